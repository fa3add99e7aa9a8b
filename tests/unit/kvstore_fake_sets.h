/* The fake retriever's random sets, and sparse steps of the fake decoder over them. */
#ifndef TESTS_KVSTORE_FAKE_SETS_H
#define TESTS_KVSTORE_FAKE_SETS_H

#include "tests/unit/kvstore_fake_steps.h"

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
    uint32_t most = s->budget - s->sinks - s->window - 1, room = set->limit - s->sinks, usual = most;
    set->flags = s->base ? fake_random(f, 4) : 0;
    if (s->base && !(set->flags & TOPK_ENTRY_GROWN))
        usual = s->base - s->sinks - s->window - 1;
    s->grown += (set->flags & TOPK_ENTRY_GROWN) != 0;
    uint32_t stay = 20 + fake_random(f, 80);
    for (uint32_t l = 0; l < f->layout.groups * f->layout.selection_heads; l++) {
        static uint8_t marks[FAKE_CONTEXT];
        memset(marks, 0, sizeof marks);
        uint32_t n = 0, count = fake_random(f, 8) ? usual : fake_random(f, most + 1);
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
                                 .mass = 0.5f,
                                 .mass_base = 0.25f,
                                 .flags = s->set.flags};
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
 * sequence, in one message or several. */
static inline void fake_select(struct fake *f, const struct fake_step *step, uint32_t position_offset)
{
    struct fake_topk *t = mem_alloc(1, sizeof *t);
    for (uint32_t i = 0; i < step->entries; i++) {
        struct fake_sequence *s = step->sequence[i];
        bool whole = !s->has || fake_random(f, 6) == 0;
        fake_choose(f, s, f->step, s->next + position_offset);
        s->has = true;
        fake_topk_add(f, t, s, whole);
        if (i + 1 < step->entries && fake_random(f, 3) == 0) {
            fake_topk_send(f, t, f->step);
            memset(t, 0, sizeof *t);
        }
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

/* Layers on the device attend everything: it must be there. */
static inline void fake_check_all(struct fake *f, const struct fake_sequence *s, uint32_t layer)
{
    for (uint32_t h = 0; h < f->layout.row_heads; h++)
        for (uint32_t p = 0; p <= s->next; p++)
            fake_check_piece(fake_page_piece(f, s, layer, h, p), s->id, layer, h, p);
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
        assert_true(fake_comes(f, FLAG_ROWS_READY + layout_run_of(&f->layout, layer)));
        bool early = step->selection == SELECTION_MIXED && layer < step->early_layers;
        for (uint32_t i = 0; i < step->entries; i++) {
            struct fake_sequence *s = step->sequence[i];
            if (fake_status(f, s) < 0)
                continue;
            bool older = early || step->selection == SELECTION_PREVIOUS;
            const struct fake_set *set = older && s->set.position == s->next ? &s->before : &s->set;
            assert_int_equal(set->position, older ? s->next - 1 : s->next);
            fake_write_token(f, s, layer);
            bool all = set->flags & TOPK_ENTRY_SHORT;
            assert_int_equal(table_sequence_at(&f->view[f->step & 1], early ? 0 : 1, s->index)->flags,
                             all && fake_tables(f)->resident[0] ? TABLE_ATTEND_ALL : 0);
            bool late_all = (early ? s->set.flags : set->flags) & TOPK_ENTRY_SHORT;
            s->fallbacks += layer + 1 == f->layout.layers && late_all && fake_tables(f)->resident[0];
            if (all && fake_tables(f)->resident[layer])
                fake_check_all(f, s, layer);
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
    /* TOPK may be faster than the record. */
    bool before_record = step->early_topk || (!step->late_topk && fake_random(f, 2));
    if (before_record)
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
            assert_true(fake_comes(f, FLAG_ROWS_READY + early_runs++));
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
