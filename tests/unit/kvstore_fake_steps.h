/* Dense steps of the fake decoder: it posts a record, reads and checks every piece that the tables name,
 * writes the new ones and raises its flags; and what sparse steps share with them. */
#ifndef TESTS_KVSTORE_FAKE_STEPS_H
#define TESTS_KVSTORE_FAKE_STEPS_H

#include "tests/unit/kvstore_fake.h"

struct fake_step {
    uint32_t kind, selection, early_layers, count[FAKE_SEQUENCES];
    struct fake_sequence *sequence[FAKE_SEQUENCES];
    uint32_t entries;
    bool late_topk;  /* mixed: the current sets come only after the early tables */
    bool early_topk; /* they come before the record */
};

static inline bool fake_up(struct fake *f, unsigned flag)
{
    return flag_reached(control_flag_at(f->h, flag), f->step);
}

/* A flag that the stream raises, or that is raised when the stream has come to an end. */
static inline bool fake_comes(struct fake *f, unsigned flag)
{
    int64_t deadline = clock_now_ns() + FAKE_PATIENCE;
    while (fake_gpu && !fake_up(f, flag) && !planner_error(f->planner) && clock_now_ns() < deadline) {
        planner_advance(f->planner);
        sched_yield(); /* the stream is a thread */
    }
    const struct err *err = planner_error(f->planner);
    if (err)
        fail_msg("%s", err->text);
    return fake_up(f, flag);
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
    const struct blocks *b = &f->planner->blocks;
    return blocks_rows(b, q->record->block[position / BLOCK_TOKENS]) +
           layout_row_at(&b->layout, head, position % BLOCK_TOKENS) + layout_piece_at(&b->layout, layer);
}

/* Every committed row of the sequence in the arena, layers that it lacks apart. */
static inline void fake_check_host(struct fake *f, const struct fake_sequence *s, uint32_t from, uint32_t end)
{
    for (uint32_t p = from; p < end; p++)
        for (uint32_t h = 0; h < f->layout.row_heads; h++)
            for (uint32_t l = f->planner->blocks.layout.host_first_layer; l < f->layout.layers; l++)
                fake_check_piece(fake_host_piece(f, s, l, h, p), s->id, l, h, p);
}

static inline void fake_end_step(struct fake *f, const struct fake_step *step)
{
    if (f->hasty) {
        flag_raise(control_flag_at(f->h, FLAG_KV_WRITTEN), f->step);
    } else {
        fake_raise(f, FLAG_KV_WRITTEN);
        assert_true(fake_comes(f, FLAG_COMMITTED));
    }
    fake_raise(f, FLAG_STEP_CONSUMED);
    if (f->hasty)
        f->planner->step.ended_ns = INT64_MAX; /* however slow this machine is */
    for (uint32_t i = 0; i < step->entries; i++) {
        struct fake_sequence *s = step->sequence[i];
        if (!s->id || f->planner->sequences[s->index].failed)
            continue;
        if (!f->hasty)
            fake_check_host(f, s, s->next, s->next + step->count[i]);
        s->next += step->count[i];
    }
    f->step++;
}

/* Of all sequences in `step`, `count` tokens each. */
static inline void fake_dense(struct fake *f, const struct fake_step *step)
{
    fake_post(f, step);
    assert_true(fake_up(f, FLAG_TABLES_LATE));
    const struct table_header *t = fake_tables(f);
    assert_int_equal(t->step, f->step);
    assert_int_equal(t->resident_version, f->version);
    for (uint32_t run = 0; run < f->h->runs; run++) {
        assert_true(fake_comes(f, FLAG_ROWS_READY + run));
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

#endif
