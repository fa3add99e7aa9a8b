/* Sets, lists and loads of a sparse step, phase by phase; see step_private.h. Owner: the planner thread. */
#include <errno.h>

#include "base/clock.h"
#include "base/trace.h"
#include "kvstore/residency.h"
#include "kvstore/step_private.h"
#include "link/flag.h"

static bool set_is(const struct elastic *e, uint32_t position)
{
    return e->has && e->position == position;
}

/* Whether the set made from `position` is the one in use, or the next one is and may become so. */
static bool set_at_hand(const struct sequence *s, uint32_t position)
{
    const struct elastic *e = &s->elastic;
    return set_is(e, position) || (e->next != ELASTIC_NONE && e->next_position == position);
}

/* Position that the set of a phase is made from. */
static uint32_t set_position(const struct step *step, uint32_t phase, uint32_t position)
{
    bool previous =
        step->selection == SELECTION_PREVIOUS || (step->selection == SELECTION_MIXED && phase == 0);
    return previous ? position - 1 : position;
}

struct phase_work {
    struct planner *planner;
    uint32_t phase;
};

/* What prepare_part left behind the tables: they name the slot that is given here, and no row is missing. */
static void pin_part(void *arg, int index, int thread)
{
    (void)thread;
    const struct step_part *part = &((struct planner *)arg)->step.part[index];
    if (part->pins_owed)
        sequence_pin(part->sequence, part->position);
}

static bool pins_are_owed(const struct step *step)
{
    bool owed = false;
    for (uint32_t i = 0; i < step->parts; i++)
        owed |= step->part[i].pins_owed;
    return owed;
}

/* Sets, pins and lists of one part for one phase. */
static void prepare_part(void *arg, int index, int thread)
{
    (void)thread;
    const struct phase_work *work = arg;
    struct planner *p = work->planner;
    struct step_part *part = &p->step.part[index];
    struct sequence *s = part->sequence;
    if (!s)
        return;
    struct elastic *e = &s->elastic;
    bool late_mixed = p->step.selection == SELECTION_MIXED && work->phase == 1;
    if (!set_is(e, set_position(&p->step, work->phase, part->position))) {
        /* Under `mixed` the early layers still read the slots of the set before: what takes their place is
         * gathered into the late layers now, and into the early ones when the step is consumed. */
        if (late_mixed && e->next == ELASTIC_RECEIVED)
            elastic_stage(e);
        s->debts = late_mixed ? e->loads.count : 0;
        elastic_commit(e, &s->counters);
    } else {
        s->debts = e->loads.count;
    }
    part->pins_owed = p->step.selection == SELECTION_PREVIOUS && !elastic_has_no_slots(e) &&
                      tables_are_drafted(s, p->step.step, 1, part->position);
    if (!late_mixed && !part->pins_owed)
        sequence_pin(s, part->position);
    tables_lists(&p->tables, p->step.step, work->phase, s, part->position);
    tables_entry(&p->tables, p->step.step, work->phase, part->index, 0,
                 s->loaded + e->loads.count + e->fills.count);
    if (e->is_short && residency_layers(p) > 0) {
        tables_attend_all(&p->tables, p->step.step, work->phase, part->index);
        s->counters.fallbacks += work->phase;
    }
}

static void rows_ready(void *arg, uint32_t run)
{
    step_raise_runs(arg, run + 1);
}

/* Gathers what the parts lack, run by run, and raises ROWS_READY of each run in [.., end). */
static void gather_runs(struct planner *p, uint32_t end)
{
    struct step *step = &p->step;
    int64_t from = clock_now_ns();
    uint32_t low = layout_run_first(&p->layout, step->runs_raised), last = layout_run_first(&p->layout, end);
    low = low > residency_layers(p) ? low : residency_layers(p);
    if (step->phase_out[1] && step->selection == SELECTION_MIXED && low < step->early_layers)
        low = step->early_layers;
    for (uint32_t i = 0; i < step->parts && low < last; i++)
        if (step->part[i].sequence)
            planner_gather_layers(p, step->part[i].sequence, low, last);
    gather_run_each(&p->gather, step->runs_raised, end, (struct gather_ready){rows_ready, p});
    p->totals.gather_ns += clock_now_ns() - from;
}

/* After the runs of the early phase: the same rows for the layers above. */
static void gather_early_rest(struct planner *p)
{
    struct step *step = &p->step;
    uint32_t low = layout_run_first(&p->layout, step->runs_raised), resident = residency_layers(p);
    for (uint32_t i = 0; i < step->parts; i++)
        if (step->part[i].sequence)
            planner_gather_layers(p, step->part[i].sequence, low > resident ? low : resident,
                                  p->layout.layers);
    gather_run(&p->gather);
    for (uint32_t i = 0; i < step->parts; i++)
        if (step->part[i].sequence)
            planner_gather_done(p, step->part[i].sequence);
}

/* After the late runs under `mixed`: rows whose slots no early layer reads go into the early layers now. */
static void gather_late_rest(struct planner *p)
{
    struct step *step = &p->step;
    uint32_t resident = residency_layers(p);
    bool mixed = step->selection == SELECTION_MIXED && resident < step->early_layers;
    for (uint32_t i = 0; i < step->parts; i++) {
        struct sequence *s = step->part[i].sequence;
        if (!s)
            continue;
        uint32_t all = s->elastic.loads.count;
        s->debt_layers = mixed && s->debts < all ? step->early_layers : 0;
        if (s->debt_layers)
            s->elastic.loads.count = s->debts;
        if (mixed)
            planner_gather_layers(p, s, resident, step->early_layers);
        s->elastic.loads.count = all;
    }
    gather_run(&p->gather);
    for (uint32_t i = 0; i < step->parts; i++)
        if (step->part[i].sequence && step->part[i].sequence->debt_layers == 0)
            planner_gather_done(p, step->part[i].sequence);
}

static void count_sparse(struct planner *p)
{
    uint32_t resident = residency_layers(p);
    for (uint32_t i = 0; i < p->step.parts; i++) {
        struct sequence *s = p->step.part[i].sequence;
        if (!s)
            continue;
        s->counters.steps++;
        s->loaded = 0;
        for (uint32_t g = 0; g < p->layout.groups; g++) {
            uint32_t first = p->layout.group_first_layer[g], end = p->layout.group_first_layer[g + 1];
            first = first > resident ? first : resident;
            if (s->elastic.attached[g] && first < end)
                s->counters.bytes_if_reloaded +=
                    elastic_selected_rows(&s->elastic, g) * (end - first) * p->layout.piece_bytes;
        }
    }
}

static bool all_drafted(const struct step *step, uint32_t phase)
{
    for (uint32_t i = 0; i < step->parts; i++) {
        const struct step_part *part = &step->part[i];
        if (part->sequence && !tables_are_drafted(part->sequence, step->step, phase, part->position))
            return false;
    }
    return true;
}

/* Runs all of whose layers use the early phase. */
static uint32_t early_runs(const struct planner *p)
{
    uint32_t early = 0;
    while (early < p->residency.runs && layout_run_first(&p->layout, early + 1) <= p->step.early_layers)
        early++;
    return early;
}

static void phase_publish(struct planner *p, uint32_t phase)
{
    struct step *step = &p->step;
    struct phase_work work = {p, phase};
    int64_t from = clock_now_ns();
    if (all_drafted(step, phase)) /* then each takes less time than a thread to wake up */
        for (uint32_t i = 0; i < step->parts; i++)
            prepare_part(&work, (int)i, 0);
    else
        pool_run(p->pool, (int)step->parts, prepare_part, &work);
    step->phase_out[phase] = true;
    flag_raise(planner_flag(p, phase ? FLAG_TABLES_LATE : FLAG_TABLES_EARLY), step->step);
    step->tables_ns = clock_now_ns();
    trace(phase ? TRACE_TABLES_LATE : TRACE_TABLES_EARLY, step->step);
    uint32_t end = phase ? p->residency.runs : early_runs(p);
    if (step->pages_settled) /* what is queued next is none of theirs */
        step_raise_runs(p, end < p->residency.resident ? end : p->residency.resident);
    step_write_owed(p);
    p->totals.plan_ns += clock_now_ns() - from;
    if (phase == 0) {
        gather_runs(p, end);
        gather_early_rest(p);
        return;
    }
    gather_runs(p, end);
    gather_late_rest(p);
    if (pins_are_owed(step))
        pool_run(p->pool, (int)step->parts, pin_part, p);
    count_sparse(p);
    step->planned_ns = clock_now_ns();
    step->state = STEP_WRITTEN;
}

static bool sets_at_hand(const struct step *step, uint32_t phase)
{
    for (uint32_t i = 0; i < step->parts; i++) {
        const struct step_part *part = &step->part[i];
        if (part->sequence && !set_at_hand(part->sequence, set_position(step, phase, part->position)))
            return false;
    }
    return true;
}

void step_sparse_settle(struct planner *p)
{
    struct sequence *all[LIMIT_SEQUENCES];
    uint32_t count = 0;
    for (uint32_t i = 0; i < p->step.parts; i++) {
        struct sequence *s = p->step.part[i].sequence;
        if (s && s->record && s->budget && !s->closing)
            all[count++] = s;
    }
    planner_settle(p, all, count);
}

bool step_sparse_advance(struct planner *p)
{
    struct step *step = &p->step;
    bool moved = false;
    for (uint32_t phase = step->selection == SELECTION_MIXED ? 0 : 1; phase < 2; phase++) {
        if (step->phase_out[phase])
            continue;
        if (!sets_at_hand(step, phase))
            return moved;
        phase_publish(p, phase);
        if (phase == 0 || step->selection == SELECTION_PREVIOUS)
            step_sparse_settle(
                p); /* the late set, or that of the step to come, may have waited for this one */
        moved = true;
    }
    return moved;
}

void step_sparse_tables(struct planner *p)
{
    struct step *step = &p->step;
    uint32_t resident[2] = {0, residency_layers(p)};
    for (uint32_t i = 0; i < step->parts; i++) {
        struct step_part *part = &step->part[i];
        struct sequence *s = part->sequence;
        if (!s)
            continue;
        int r = part->position == 0 && step->selection != SELECTION_CURRENT ? -EINVAL : 0;
        if (r == 0)
            r = residency_ensure_pages(p, s, part->position + 1, part->position);
        if (r == 0)
            r = residency_ensure_slots(p, s);
        if (r < 0) {
            step_refuse(p, part, r);
            continue;
        }
        if (s->first_sparse > part->position)
            s->first_sparse = part->position;
        tables_pages(&p->tables, step->step, s, sequence_pages(part->position + 1), resident);
        for (uint32_t l = resident[1]; l < p->layout.layers; l++)
            tables_slabs(&p->tables, step->step, s, l);
    }
    gather_run(&p->gather);
}
