/* A decoder and a retriever for tests of the planner, in the same thread. Every piece holds its
 * coordinates (sequence, position, layer, row head), so a row that went astray is seen at once.
 *
 * fake_dense and fake_sparse do one step each as the decoder would: post a record, read what the tables
 * name, check each piece, write the new ones, raise the flags. */
#ifndef TESTS_KVSTORE_FAKE_H
#define TESTS_KVSTORE_FAKE_H

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "kvstore/planner.h"
#include "kvstore/residency.h"
#include "link/flag.h"

enum { FAKE_SEQUENCES = 6, FAKE_CONTEXT = 1024, FAKE_LISTS = 16 };

struct fake_piece {
    uint32_t sequence, position, place, check;
};

struct fake_set { /* what the retriever sent last */
    uint32_t step, position, limit;
    uint32_t count[FAKE_LISTS];
    uint32_t at[FAKE_LISTS][FAKE_CONTEXT];
};

struct fake_sequence {
    uint64_t id;
    uint32_t index, next, prompt, capacity, budget, sinks, window;
    bool has; /* the retriever sent a set */
    struct fake_set set, before;
    uint32_t tokens[FAKE_CONTEXT];
};

struct fake {
    struct planner *planner;
    struct kv_layout layout;
    struct control_header *h;
    struct table_view view[2];
    uint8_t *device;
    uint64_t random;
    uint32_t step, version;
    bool deaf; /* takes no proposal of a resident set */
    struct fake_sequence sequences[FAKE_SEQUENCES];
    uint32_t reselects, closed, broken;
    uint64_t reselected;
    struct msg_closed last_closed;
    char why[256];
};

static inline uint32_t fake_random(struct fake *f, uint32_t below)
{
    f->random ^= f->random << 13;
    f->random ^= f->random >> 7;
    f->random ^= f->random << 17;
    return (uint32_t)((f->random >> 32) * below >> 32);
}

static void fake_on_reselect(void *arg, uint64_t sequence, uint32_t step)
{
    (void)step;
    struct fake *f = arg;
    f->reselects++;
    f->reselected = sequence;
}

static void fake_on_closed(void *arg, uint64_t request, const struct msg_closed *closed)
{
    (void)request;
    struct fake *f = arg;
    f->closed++;
    f->last_closed = *closed;
}

static void fake_on_broken(void *arg, const char *why)
{
    struct fake *f = arg;
    f->broken++;
    snprintf(f->why, sizeof f->why, "%s", why);
}

/* Bytes of a piece; only the first of them tell coordinates. Larger ones make pages and slots fill slabs. */
static uint32_t fake_piece_bytes = sizeof(struct fake_piece);

/* Three runs (0-3, 4-7, 8-12) and two groups (0-5, 6-12): their bounds fall on different layers. */
static inline struct kv_layout fake_layout(void)
{
    struct kv_layout layout = {.model = {1, 2},
                               .layers = 13,
                               .row_heads = 2,
                               .selection_heads = 4,
                               .piece_bytes = fake_piece_bytes,
                               .dtype = 1,
                               .context_max = FAKE_CONTEXT};
    layout_set_groups(&layout, 2);
    return layout;
}

static inline struct planner_options fake_options(void)
{
    return (struct planner_options){.device_bytes = 128u << 20,
                                    .host_bytes = 64u << 20,
                                    .sequences = FAKE_SEQUENCES,
                                    .threads = 2,
                                    .poison = true};
}

static inline struct planner_events fake_events(struct fake *f)
{
    return (struct planner_events){
        .arg = f, .reselect = fake_on_reselect, .closed = fake_on_closed, .broken = fake_on_broken};
}

/* Maps what planner_attach made, as the decoder would. */
static inline void fake_attach(struct fake *f)
{
    struct err err = {0};
    assert_int_equal(planner_attach(f->planner, 77, &err), 0);
    f->h = f->planner->control.at;
    assert_int_equal(control_header_check(f->h, &f->layout, f->planner->control.bytes, &err), 0);
    f->device = f->planner->device.base;
    for (uint32_t parity = 0; parity < 2; parity++) {
        f->view[parity].header = f->h;
        f->view[parity].base = (uint8_t *)control_table_at(f->h, parity);
        control_table_offsets(f->h, &f->view[parity].at);
    }
    f->step = f->h->first_step;
    f->version = 0;
}

static inline struct fake *fake_create(const struct planner_options *options, uint64_t seed)
{
    struct fake *f = mem_alloc(1, sizeof *f);
    struct err err = {0};
    struct planner_events events = fake_events(f);
    f->layout = fake_layout();
    f->random = seed * 0x9E3779B97F4A7C15u + 88172645463325252u;
    assert_int_equal(planner_create(&f->planner, options, &f->layout, &events, &err), 0);
    fake_attach(f);
    return f;
}

static inline void fake_free(struct fake *f)
{
    planner_free(&f->planner);
    mem_free(&f);
}

static inline struct fake_piece fake_piece(uint64_t id, uint32_t layer, uint32_t head, uint32_t position)
{
    struct fake_piece p = {(uint32_t)id, position, layer << 16 | head, 0};
    p.check = (p.sequence * 2654435761u) ^ (p.position * 40503u) ^ p.place;
    return p;
}

static inline void fake_check_piece(const void *at, uint64_t id, uint32_t layer, uint32_t head,
                                    uint32_t position)
{
    struct fake_piece want = fake_piece(id, layer, head, position);
    if (memcmp(at, &want, sizeof want)) {
        const struct fake_piece *found = at;
        fail_msg("found sequence %u position %u layer %u head %u, expected %u %u %u %u", found->sequence,
                 found->position, found->place >> 16, found->place & 0xffff, want.sequence, position, layer,
                 head);
    }
}

/* ---- the control plane ---- */

struct fake_open {
    uint32_t prompt, capacity, budget, sinks, window, flags;
    uint64_t salt;
    uint32_t token_seed; /* equal seeds: equal prompts */
};

static inline int fake_try_open(struct fake *f, struct fake_sequence *s, uint64_t id,
                                const struct fake_open *o, struct err *err)
{
    memset(s, 0, sizeof *s);
    for (uint32_t i = 0; i < FAKE_CONTEXT; i++)
        s->tokens[i] = i < o->prompt ? o->token_seed * 7919 + i : (uint32_t)id * 31 + i;
    struct msg_open open = {
        .sequence = id,
        .flags = o->flags,
        .salt = o->salt,
        .made = {.kind = o->budget ? ARENA_MADE_SPARSE : ARENA_MADE_FULL, .budget = o->budget},
        .capacity = o->capacity,
        .budget = o->budget,
        .sinks = o->sinks,
        .window = o->window,
        .tokens = {.at = s->tokens, .count = o->prompt}};
    struct msg_grant grant;
    int r = planner_open(f->planner, &open, &grant, err);
    if (r < 0)
        return r;
    s->id = id;
    s->index = grant.index;
    s->next = grant.cached;
    s->prompt = o->prompt;
    s->capacity = o->capacity;
    s->budget = o->budget;
    s->sinks = o->sinks;
    s->window = o->window;
    return 0;
}

static inline void fake_open(struct fake *f, struct fake_sequence *s, uint64_t id, const struct fake_open *o)
{
    struct err err = {0};
    int r = fake_try_open(f, s, id, o, &err);
    if (r < 0)
        fail_msg("open: %s", err.text);
}

static inline void fake_close(struct fake *f, struct fake_sequence *s)
{
    uint32_t closed = f->closed;
    assert_int_equal(planner_close(f->planner, s->id, 1), 0);
    assert_int_equal(f->closed, closed + 1);
    s->id = 0;
}

/* ---- steps ---- */

struct fake_step {
    uint32_t kind, selection, early_layers, count[FAKE_SEQUENCES];
    struct fake_sequence *sequence[FAKE_SEQUENCES];
    uint32_t entries;
    bool late_topk; /* mixed: the current sets come only after the early tables */
};

static inline bool fake_up(struct fake *f, unsigned flag)
{
    return flag_reached(control_flag_at(f->h, flag), f->step);
}

static inline void fake_raise(struct fake *f, unsigned flag)
{
    flag_raise(control_flag_at(f->h, flag), f->step);
    planner_advance(f->planner);
}

static inline void fake_post(struct fake *f, const struct fake_step *step)
{
    struct step_record *r = control_step_at(f->h, f->step);
    memset(r, 0, sizeof *r);
    r->step = f->step;
    r->kind = step->kind;
    r->selection = step->selection;
    r->early_layers = step->early_layers;
    r->entries = step->entries;
    for (uint32_t i = 0; i < step->entries; i++) {
        struct fake_sequence *s = step->sequence[i];
        r->entry[i] = (struct step_entry){.id = s->id,
                                          .sequence = s->index,
                                          .position = s->next,
                                          .count = step->count[i],
                                          .token_at = r->tokens};
        memcpy(r->token + r->tokens, s->tokens + s->next, step->count[i] * sizeof(uint32_t));
        r->tokens += step->count[i];
    }
    uint32_t proposed = atomic_load(&control_flag_at(f->h, FLAG_RESIDENT_PROPOSED)->value);
    if (proposed != f->version && !f->deaf) {
        f->version = proposed;
        flag_raise(control_flag_at(f->h, FLAG_RESIDENT_ACKED), proposed);
    }
    r->resident_version = f->version;
    fake_raise(f, FLAG_STEP_POSTED);
}

static inline struct table_header *fake_tables(struct fake *f)
{
    return control_table_at(f->h, f->step);
}

static inline uint8_t *fake_page_piece(struct fake *f, const struct fake_sequence *s, uint32_t layer,
                                       uint32_t head, uint32_t position)
{
    const struct table_view *view = &f->view[f->step & 1];
    uint64_t page = table_pages_at(view, s->index, layer)[position / BLOCK_TOKENS];
    assert_true(page + f->h->page_bytes <= f->h->device_bytes);
    return f->device + page +
           ((uint64_t)head * BLOCK_TOKENS + position % BLOCK_TOKENS) * f->layout.piece_bytes;
}

static inline uint8_t *fake_slot_piece(struct fake *f, const struct fake_sequence *s, uint32_t layer,
                                       uint32_t head, uint32_t slot)
{
    assert_true(slot < f->h->slots);
    const struct table_view *view = &f->view[f->step & 1];
    uint64_t unit = (uint64_t)head * f->h->slots + slot;
    uint64_t slab = table_slabs_at(view, s->index, layer)[unit / f->h->units_per_slab];
    assert_true(slab + f->h->slab_bytes <= f->h->device_bytes);
    return f->device + slab + unit % f->h->units_per_slab * f->layout.piece_bytes;
}

static inline int32_t fake_status(struct fake *f, const struct fake_sequence *s)
{
    const struct table_sequence *t = table_sequence_at(&f->view[f->step & 1], 1, s->index);
    assert_int_equal(t->step, f->step);
    return t->status;
}

static inline uint8_t *fake_host_piece(struct fake *f, const struct fake_sequence *s, uint32_t layer,
                                       uint32_t head, uint32_t position)
{
    const struct sequence *q = &f->planner->sequences[s->index];
    return blocks_rows(&f->planner->blocks, q->record->block[position / BLOCK_TOKENS]) +
           layout_row_at(&f->layout, head, position % BLOCK_TOKENS) + (uint64_t)layer * f->layout.piece_bytes;
}

/* Every committed row of the sequence in the arena. */
static inline void fake_check_host(struct fake *f, const struct fake_sequence *s, uint32_t from, uint32_t end)
{
    for (uint32_t p = from; p < end; p++)
        for (uint32_t h = 0; h < f->layout.row_heads; h++)
            for (uint32_t l = 0; l < f->layout.layers; l++)
                fake_check_piece(fake_host_piece(f, s, l, h, p), s->id, l, h, p);
}

static inline void fake_end_step(struct fake *f, const struct fake_step *step)
{
    fake_raise(f, FLAG_KV_WRITTEN);
    assert_true(fake_up(f, FLAG_COMMITTED));
    fake_raise(f, FLAG_STEP_CONSUMED);
    for (uint32_t i = 0; i < step->entries; i++) {
        struct fake_sequence *s = step->sequence[i];
        if (!s->id || f->planner->sequences[s->index].failed)
            continue;
        fake_check_host(f, s, s->next, s->next + step->count[i]);
        s->next += step->count[i];
    }
    f->step++;
}

/* `shared`: a sequence whose cached prefix another one made has that one's coordinates in it: not checked
 * there. */
static inline void fake_dense(struct fake *f, const struct fake_step *step)
{
    fake_post(f, step);
    assert_true(fake_up(f, FLAG_TABLES_LATE));
    const struct table_header *t = fake_tables(f);
    assert_int_equal(t->step, f->step);
    assert_int_equal(t->resident_version, f->version);
    for (uint32_t run = 0; run < f->h->runs; run++) {
        assert_true(fake_up(f, FLAG_ROWS_READY + run));
        for (uint32_t l = layout_run_first(&f->layout, run); l < layout_run_first(&f->layout, run + 1); l++)
            for (uint32_t i = 0; i < step->entries; i++) {
                const struct fake_sequence *s = step->sequence[i];
                if (fake_status(f, s) < 0)
                    continue;
                for (uint32_t h = 0; h < f->layout.row_heads; h++) {
                    for (uint32_t p = 0; p < s->next; p++)
                        fake_check_piece(fake_page_piece(f, s, l, h, p), s->id, l, h, p);
                    for (uint32_t p = s->next; p < s->next + step->count[i]; p++) {
                        struct fake_piece piece = fake_piece(s->id, l, h, p);
                        memcpy(fake_page_piece(f, s, l, h, p), &piece, sizeof piece);
                    }
                }
            }
        fake_raise(f, FLAG_RUN_CONSUMED + run);
    }
    fake_end_step(f, step);
}

/* Prefills in chunks of random length. */
static inline void fake_prefill(struct fake *f, struct fake_sequence *s)
{
    while (s->next < s->prompt) {
        uint32_t left = s->prompt - s->next, count = 1 + fake_random(f, 150);
        struct fake_step step = {.kind = STEP_DENSE, .entries = 1, .sequence = {s}};
        step.count[0] = count < left ? count : left;
        fake_dense(f, &step);
    }
}

/* A new random set made from `position`; a part of the old one stays. */
static inline void fake_choose(struct fake *f, struct fake_sequence *s, uint32_t step, uint32_t position)
{
    s->before = s->set;
    struct fake_set *set = &s->set;
    set->step = step;
    set->position = position;
    set->limit = position > s->window ? position - s->window : 0;
    if (set->limit < s->sinks)
        set->limit = s->sinks;
    uint32_t most = s->budget - s->sinks - s->window - 1, room = set->limit - s->sinks;
    uint32_t stay = 20 + fake_random(f, 80);
    for (uint32_t l = 0; l < f->layout.groups * f->layout.selection_heads; l++) {
        static uint8_t marks[FAKE_CONTEXT];
        memset(marks, 0, sizeof marks);
        uint32_t n = 0, count = fake_random(f, 8) ? most : fake_random(f, most + 1);
        count = count < room ? count : room;
        for (uint32_t i = 0; s->has && i < s->before.count[l] && n < count; i++)
            if (fake_random(f, 100) < stay)
                n += !marks[s->before.at[l][i]], marks[s->before.at[l][i]] = 1;
        while (n < count) {
            uint32_t p = s->sinks + fake_random(f, room);
            n += !marks[p];
            marks[p] = 1;
        }
        set->count[l] = 0;
        for (uint32_t p = 0; p < FAKE_CONTEXT; p++)
            if (marks[p])
                set->at[l][set->count[l]++] = p;
    }
}

struct fake_topk {
    struct msg msg;
    struct msg_topk_entry entries[FAKE_SEQUENCES];
    uint32_t counts[FAKE_SEQUENCES * FAKE_LISTS * 2];
    uint32_t positions[FAKE_SEQUENCES * FAKE_LISTS * FAKE_CONTEXT];
    uint32_t counts_used, positions_used;
};

static inline bool fake_holds(const uint32_t *at, uint32_t n, uint32_t p)
{
    for (uint32_t i = 0; i < n; i++)
        if (at[i] == p)
            return true;
    return false;
}

/* Adds the sequence's set, as a difference to the one before or whole. */
static inline void fake_topk_add(struct fake *f, struct fake_topk *t, const struct fake_sequence *s,
                                 bool whole)
{
    struct msg_topk_entry *e = &t->entries[t->msg.topk.entry_count++];
    *e = (struct msg_topk_entry){.sequence = s->id,
                                 .index = s->index,
                                 .base_step = whole ? s->set.step : s->before.step,
                                 .limit = s->set.limit,
                                 .position = s->set.position,
                                 .mass = 0.5f};
    for (uint32_t l = 0; l < f->layout.groups * f->layout.selection_heads; l++) {
        uint32_t *counts = t->counts + t->counts_used;
        t->counts_used += 2;
        counts[0] = counts[1] = 0;
        for (uint32_t i = 0; i < s->set.count[l]; i++)
            if (whole || !fake_holds(s->before.at[l], s->before.count[l], s->set.at[l][i])) {
                t->positions[t->positions_used++] = s->set.at[l][i];
                counts[0]++;
            }
        for (uint32_t i = 0; !whole && i < s->before.count[l]; i++)
            if (!fake_holds(s->set.at[l], s->set.count[l], s->before.at[l][i])) {
                t->positions[t->positions_used++] = s->before.at[l][i];
                counts[1]++;
            }
    }
}

static inline void fake_topk_send(struct fake *f, struct fake_topk *t, uint32_t step)
{
    t->msg.kind = MSG_TOPK;
    t->msg.id = step;
    t->msg.topk.entries = t->entries;
    t->msg.topk.groups = f->layout.groups;
    t->msg.topk.selection_heads = f->layout.selection_heads;
    t->msg.topk.counts = (struct msg_u32s){t->counts, t->counts_used};
    t->msg.topk.positions = (struct msg_u32s){t->positions, t->positions_used};
    planner_topk(f->planner, &t->msg);
}

/* What the retriever does when a step's tokens are known: a set from position `s->next + ahead` of each
 * sequence. */
static inline void fake_select(struct fake *f, const struct fake_step *step, uint32_t position_offset)
{
    struct fake_topk *t = mem_alloc(1, sizeof *t);
    for (uint32_t i = 0; i < step->entries; i++) {
        struct fake_sequence *s = step->sequence[i];
        bool whole = !s->has || fake_random(f, 6) == 0;
        fake_choose(f, s, f->step, s->next + position_offset);
        s->has = true;
        fake_topk_add(f, t, s, whole);
    }
    fake_topk_send(f, t, f->step);
    mem_free(&t);
}

/* One list against the set that it must hold, and every piece that it names. */
static inline void fake_check_list(struct fake *f, const struct fake_sequence *s, const struct fake_set *set,
                                   uint32_t phase, uint32_t layer, uint32_t head)
{
    const struct table_view *view = &f->view[f->step & 1];
    uint32_t group = layout_group_of(&f->layout, layer), n = 0,
             list = group * f->layout.selection_heads + head;
    uint64_t index = table_list_index(view, phase, s->index, group, head);
    const uint32_t *positions = table_positions_at(view, index), *slots = table_slots_at(view, index);
    uint32_t count = *table_count_at(view, index),
             row_head = head / (f->layout.selection_heads / f->layout.row_heads);
    assert_true(count <= f->h->list_max);
    for (uint32_t p = 0; p < s->sinks && p <= s->next; p++)
        assert_int_equal(positions[n++], p);
    for (uint32_t i = 0; i < set->count[list]; i++)
        assert_int_equal(positions[n++], set->at[list][i]);
    for (uint32_t p = set->limit; p <= s->next; p++)
        assert_int_equal(positions[n++], p);
    assert_int_equal(n, count);
    bool resident = fake_tables(f)->resident[layer];
    for (uint32_t i = 0; i < n; i++)
        fake_check_piece(resident ? fake_page_piece(f, s, layer, row_head, positions[i])
                                  : fake_slot_piece(f, s, layer, row_head, slots[i]),
                         s->id, layer, row_head, positions[i]);
}

static inline void fake_write_token(struct fake *f, const struct fake_sequence *s, uint32_t layer)
{
    uint32_t group = layout_group_of(&f->layout, layer);
    for (uint32_t h = 0; h < f->layout.row_heads; h++) {
        uint32_t slot = table_write_at(&f->view[f->step & 1], s->index, group)[h];
        struct fake_piece piece = fake_piece(s->id, layer, h, s->next);
        memcpy(fake_tables(f)->resident[layer] ? fake_page_piece(f, s, layer, h, s->next)
                                               : fake_slot_piece(f, s, layer, h, slot),
               &piece, sizeof piece);
    }
}

static inline void fake_layers(struct fake *f, const struct fake_step *step, uint32_t layer, uint32_t end)
{
    for (; layer < end; layer++) {
        assert_true(fake_up(f, FLAG_ROWS_READY + layout_run_of(&f->layout, layer)));
        bool early = step->selection == SELECTION_MIXED && layer < step->early_layers;
        for (uint32_t i = 0; i < step->entries; i++) {
            const struct fake_sequence *s = step->sequence[i];
            if (fake_status(f, s) < 0)
                continue;
            bool older = early || step->selection == SELECTION_PREVIOUS;
            const struct fake_set *set = older && s->set.position == s->next ? &s->before : &s->set;
            assert_int_equal(set->position, older ? s->next - 1 : s->next);
            fake_write_token(f, s, layer);
            for (uint32_t h = 0; h < f->layout.selection_heads; h++)
                fake_check_list(f, s, set, early ? 0 : 1, layer, h);
        }
    }
}

/* One sparse step of all sequences in `step`; their sets of the position before are there if the mode
 * needs them. */
static inline void fake_sparse(struct fake *f, struct fake_step *step)
{
    for (uint32_t i = 0; i < step->entries; i++)
        step->count[i] = 1;
    step->kind = STEP_SPARSE;
    bool before_record = !step->late_topk && fake_random(f, 2);
    if (before_record) /* TOPK may be faster than the record */
        fake_select(f, step, 0);
    fake_post(f, step);
    uint32_t first = 0;
    if (step->selection == SELECTION_MIXED) {
        assert_true(fake_up(f, FLAG_TABLES_EARLY));
        if (!before_record)
            assert_false(fake_up(f, FLAG_TABLES_LATE));
        uint32_t early_runs =
            0; /* whole runs below early_layers have their rows before the current set is known */
        while (early_runs < f->h->runs && layout_run_first(&f->layout, early_runs + 1) <= step->early_layers)
            assert_true(fake_up(f, FLAG_ROWS_READY + early_runs++));
        bool read_early = fake_random(f, 2);
        if (!before_record && read_early) {
            fake_select(f, step, 0);
            assert_true(fake_up(f, FLAG_TABLES_LATE));
        }
        if (before_record || read_early)
            fake_layers(f, step, 0, step->early_layers);
        if (!before_record && !read_early) { /* the late half is planned while the early layers are read */
            fake_select(f, step, 0);
            fake_layers(f, step, 0, step->early_layers);
        }
        first = step->early_layers;
    } else if (step->selection == SELECTION_CURRENT) {
        assert_int_equal(fake_up(f, FLAG_TABLES_LATE), before_record);
        if (!before_record)
            fake_select(f, step, 0);
    } else {
        assert_true(fake_up(f, FLAG_TABLES_LATE));
        if (!before_record) /* while the decoder computes with the older set */
            fake_select(f, step, 0);
    }
    assert_true(fake_up(f, FLAG_TABLES_LATE));
    fake_layers(f, step, first, f->layout.layers);
    fake_end_step(f, step);
    for (uint32_t i = 0; i < step->entries; i++)
        assert_true(elastic_consistent(&f->planner->sequences[step->sequence[i]->index].elastic));
}

#endif
