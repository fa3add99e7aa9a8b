/* Tables of a dense step, and offloaded runs through the staging pages; see step_private.h. Owner: the
 * planner thread. */
#include <errno.h>

#include "base/clock.h"
#include "kvstore/residency.h"
#include "kvstore/step_private.h"
#include "link/flag.h"

void step_dense_tables(struct planner *p)
{
    struct step *step = &p->step;
    uint32_t resident[2] = {0, residency_layers(p)}, staged = 0;
    for (uint32_t i = 0; i < step->parts; i++) {
        struct step_part *part = &step->part[i];
        struct sequence *s = part->sequence;
        if (!s)
            continue;
        uint32_t positions = part->position + part->count, pages = sequence_pages(positions);
        int r = residency_ensure_pages(p, s, positions, part->position);
        if (resident[1] < p->layout.layers && pages > p->residency.staging_pages - staged)
            r = -ENOSPC;
        if (r < 0) {
            step_refuse(p, part, r);
            continue;
        }
        step->staged_at[i] = staged;
        tables_pages(&p->tables, step->step, s, pages, resident);
        for (uint32_t l = resident[1]; l < p->layout.layers; l++)
            tables_staging(&p->tables, step->step, s, l,
                           residency_staging(p, layout_run_of(&p->layout, l), l, staged), pages);
        staged += resident[1] < p->layout.layers ? pages : 0;
        for (uint32_t phase = 0; phase < 2; phase++)
            tables_entry(&p->tables, step->step, phase, part->index, 0, 0);
    }
    gather_run(&p->gather);
}

/* Rows of one part between the arena and the staging pages of an offloaded run. */
static uint64_t staged_rows(struct planner *p, uint32_t i, uint32_t run, bool back)
{
    struct step_part *part = &p->step.part[i];
    uint32_t layer = layout_run_first(&p->layout, run), end = layout_run_first(&p->layout, run + 1);
    struct gather_job job = {.kind = back ? GATHER_BACK_PAGES : GATHER_PAGES,
                             .layer = layer,
                             .end_layer = end,
                             .first = back ? part->position : 0,
                             .end = back ? part->position + part->count : part->position,
                             .sequence = part->sequence,
                             .pages = residency_staging(p, run, layer, p->step.staged_at[i]),
                             .stride = p->residency.staging_pages};
    gather_pages(&p->gather, &job);
    return (uint64_t)(job.end - job.first) * p->layout.row_heads * (end - layer) * p->layout.piece_bytes;
}

static void stage_run(struct planner *p, uint32_t run, bool back)
{
    for (uint32_t i = 0; i < p->step.parts; i++) {
        struct sequence *s = p->step.part[i].sequence;
        if (!s)
            continue;
        uint64_t bytes = staged_rows(p, i, run, back);
        uint64_t rows = run == p->residency.resident && !back ? p->step.part[i].position : 0;
        s->counters.rows_filled += rows * p->layout.row_heads;
        *(back ? &s->counters.bytes_written : &s->counters.bytes_filled) += bytes;
    }
    int64_t from = clock_now_ns();
    gather_run(&p->gather);
    p->totals.gather_ns += clock_now_ns() - from;
}

static bool run_consumed(struct planner *p, uint32_t run)
{
    return flag_reached(planner_flag(p, FLAG_RUN_CONSUMED + run), p->step.step);
}

/* Two buffers take turns: that of a run is filled again, for the run after next, once its rows are read
 * and its new ones are back in the arena. */
bool step_dense_advance(struct planner *p)
{
    struct step *step = &p->step;
    bool moved = false;
    for (;;) {
        uint32_t next = step->runs_raised;
        if (next < p->residency.runs && (next < step->runs_written + 2 || next < p->residency.resident)) {
            if (next >= p->residency.resident)
                stage_run(p, next, false);
            step_raise_runs(p, next + 1);
        } else if (step->runs_written < p->residency.runs && run_consumed(p, step->runs_written)) {
            stage_run(p, step->runs_written++, true);
        } else {
            break;
        }
        moved = true;
    }
    if (step->runs_written < p->residency.runs)
        return moved;
    step->state = STEP_WRITTEN;
    return true;
}
