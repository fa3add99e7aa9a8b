/* One step from its record to its end; see step.h. Owner: the planner thread.
 *
 *   IDLE -> SETS (sparse) or STAGED (dense) -> WRITTEN -> CONSUMED -> IDLE
 *
 * Records are copied out of shared memory before they are checked, and everything in them is checked
 * before it is used. A part that cannot be served gets a status; a record that makes no sense breaks the
 * connection. */
#include "kvstore/step.h"

#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "base/trace.h"
#include "kvstore/residency.h"
#include "link/flag.h"

static bool record_sane(const struct planner *p, const struct step_record *r)
{
    return r->step == p->step.step && r->kind >= STEP_DENSE && r->kind <= STEP_RECORD &&
           r->selection <= SELECTION_MIXED && r->entries <= LIMIT_SEQUENCES &&
           r->tokens <= LIMIT_STEP_TOKENS &&
           (r->selection != SELECTION_MIXED || r->early_layers <= p->layout.layers);
}

/* The sequence of an entry, or NULL when the entry contradicts what the store knows. */
static struct sequence *entry_sequence(struct planner *p, const struct step_record *r, uint32_t i)
{
    const struct step_entry *e = &r->entry[i];
    if (e->sequence >= p->options.sequences)
        return NULL;
    struct sequence *s = &p->sequences[e->sequence];
    if (!s->record || !s->attached || s->closing || s->id != e->id || s->in_step)
        return NULL;
    if (e->count == 0 || e->token_at > r->tokens || e->count > r->tokens - e->token_at)
        return NULL;
    if (e->position != s->next || e->position >= s->capacity || e->count > s->capacity - e->position)
        return NULL;
    if (r->kind == STEP_SPARSE && (e->count != 1 || s->budget == 0))
        return NULL;
    return s;
}

static void part_refuse(struct planner *p, struct step_part *part, int status)
{
    if (part->sequence) {
        part->sequence->failed = true;
        part->sequence->in_step = false;
    }
    part->sequence = NULL;
    part->status = status;
    if (p->step.kind == STEP_RECORD || part->index >= p->options.sequences)
        return;
    for (uint32_t phase = 0; phase < 2; phase++)
        tables_entry(&p->tables, p->step.step, phase, part->index, status, 0);
}

/* Records ids; leaves out what cannot be. */
static void parts_begin(struct planner *p, int status)
{
    struct step *step = &p->step;
    const struct step_record *r = &step->record;
    step->parts = r->entries;
    for (uint32_t i = 0; i < r->entries; i++) {
        const struct step_entry *e = &r->entry[i];
        struct step_part *part = &step->part[i];
        *part = (struct step_part){.index = e->sequence,
                                   .position = e->position,
                                   .count = e->count,
                                   .token_at = e->token_at,
                                   .sequence = entry_sequence(p, r, i)};
        if (!part->sequence) {
            part_refuse(p, part, -EINVAL);
            continue;
        }
        part->sequence->in_step = true;
        if (part->sequence->failed || status < 0) {
            part_refuse(p, part, status < 0 ? status : -ENOSPC);
            continue;
        }
        uint32_t offloaded = p->layout.layers - residency_layers(p);
        if (part->sequence->counters.layers_offloaded_max < offloaded && step->kind != STEP_RECORD)
            part->sequence->counters.layers_offloaded_max = offloaded;
        int done = sequence_record(part->sequence, &p->prefix, e->position, r->token + e->token_at, e->count);
        if (done < 0)
            part_refuse(p, part, done);
    }
}

static void step_end(struct planner *p)
{
    struct step *step = &p->step;
    for (uint32_t i = 0; i < step->parts; i++) {
        struct sequence *s = step->part[i].sequence;
        if (!s)
            continue;
        s->in_step = false;
        elastic_release(&s->elastic);
    }
    step->state = STEP_IDLE;
    step->ended_ns = clock_now_ns();
    if (step->kind == STEP_SPARSE)
        step->took_ns = step->ended_ns - step->seen_ns;
    step->step++;
}

static void raise_runs(struct planner *p, uint32_t end)
{
    for (; p->step.runs_raised < end; p->step.runs_raised++)
        planner_raise_rows(p, p->step.runs_raised);
}

/* ---- dense ---- */

static void dense_tables(struct planner *p)
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
            part_refuse(p, part, r);
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
static bool staged_advance(struct planner *p)
{
    struct step *step = &p->step;
    bool moved = false;
    for (;;) {
        uint32_t next = step->runs_raised;
        if (next < p->residency.runs && (next < step->runs_written + 2 || next < p->residency.resident)) {
            if (next >= p->residency.resident)
                stage_run(p, next, false);
            raise_runs(p, next + 1);
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

/* ---- sparse ---- */

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
    raise_runs(arg, run + 1);
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
        raise_runs(p, end < p->residency.resident ? end : p->residency.resident);
    step_write_owed(p);
    p->totals.plan_ns += clock_now_ns() - from;
    if (phase == 0) {
        gather_runs(p, end);
        gather_early_rest(p);
        return;
    }
    gather_runs(p, end);
    gather_late_rest(p);
    if (step->selection == SELECTION_PREVIOUS && residency_layers(p) < p->layout.layers)
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

/* Next sets of the step's sequences that may be settled now. */
static void settle_parts(struct planner *p)
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

static bool sets_advance(struct planner *p)
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
            settle_parts(p); /* the late set, or that of the step to come, may have waited for this one */
        moved = true;
    }
    return moved;
}

static void sparse_tables(struct planner *p)
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
            part_refuse(p, part, r);
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

/* ---- begin and end ---- */

static bool begin(struct planner *p)
{
    struct step *step = &p->step;
    if (!flag_reached(planner_flag(p, FLAG_STEP_POSTED), step->step))
        return false;
    trace(TRACE_SEEN, step->step);
    step->seen_ns = clock_now_ns();
    step->reached = false;
    struct step_record *r = &step->record;
    const struct step_record *shared =
        (const struct step_record *)((const uint8_t *)p->flags + p->tables.header.steps_at) +
        (step->step & (STEP_RING - 1));
    memcpy(r, shared, sizeof *r);
    if (!record_sane(p, r)) {
        planner_break(p, "a step record contradicts the protocol");
        return false;
    }
    step->kind = r->kind;
    step->selection = r->selection;
    step->early_layers = r->early_layers;
    step->runs_raised = 0;
    step->phase_out[0] = step->phase_out[1] = false;
    if (r->kind != STEP_SPARSE || r->resident_version != p->residency.version)
        step_write_owed(p);
    int status = r->kind == STEP_RECORD ? 0 : residency_apply(p, r->resident_version);
    if (status == -EPROTO) {
        planner_break(p, "a step record names a resident set that was not proposed");
        return false;
    }
    parts_begin(p, status);
    if (r->kind == STEP_RECORD) {
        p->totals.steps_record++;
        planner_commit(p, true); /* the flag speaks of all steps up to it */
        flag_raise(planner_flag(p, FLAG_COMMITTED), step->step);
        step_end(p);
        return true;
    }
    tables_begin(&p->tables, step->step, r->resident_version, residency_layers(p));
    if (r->kind == STEP_DENSE) {
        p->totals.steps_dense++;
        step->runs_written = p->residency.resident;
        dense_tables(p);
        flag_raise(planner_flag(p, FLAG_TABLES_LATE), step->step);
        step->state = STEP_STAGED;
    } else {
        p->totals.steps_sparse++;
        sparse_tables(p);
        step->pages_settled = !p->device.gpu || device_gpu_settled(p->device.gpu);
        step->state = STEP_SETS;
    }
    return true;
}

/* The rows of positions [first, end) from where the step that is over wrote them. */
static void write_back(struct planner *p, struct sequence *s, uint32_t first, uint32_t end, bool sparse)
{
    uint32_t resident = residency_layers(p);
    struct gather_job job = {.kind = GATHER_BACK_PAGES,
                             .layer = 0,
                             .end_layer = resident,
                             .first = first,
                             .end = end,
                             .sequence = s,
                             .pages = s->pages,
                             .stride = s->pages_max};
    gather_pages(&p->gather, &job);
    uint32_t layers = resident;
    if (sparse && resident < p->layout.layers) {
        job.kind = GATHER_BACK_SLOTS;
        job.layer = resident;
        job.end_layer = layers = p->layout.layers;
        gather_add(&p->gather, &job);
    }
    s->counters.bytes_written +=
        (uint64_t)(end - first) * p->layout.row_heads * layers * p->layout.piece_bytes;
}

/* What was queued is on its way. */
static void commit_waits(struct planner *p)
{
    struct commit *commit = &p->commit;
    commit->ticket = p->device.gpu ? device_gpu_ticket(p->device.gpu) : 0;
    commit->waits = true;
    planner_commit(p, false);
    trace(TRACE_WRITE_BACK, commit->step);
}

void step_write_owed(struct planner *p)
{
    struct commit *commit = &p->commit;
    if (!commit->owed)
        return;
    int64_t begin = trace_begin();
    commit->owed = false;
    for (uint32_t i = 0; i < commit->parts; i++) /* sparse: a token each */
        write_back(p, commit->part[i].sequence, commit->part[i].end - 1, commit->part[i].end, true);
    gather_run(&p->gather);
    if (!planner_error(p))
        commit_waits(p);
    trace_end(TRACE_BACK, begin);
}

/* Whether the step's new rows stay where they are until the next one's tables are out, so that they may be
 * written back behind those: in pages they do, in slots while they are pinned, as a window keeps them. */
static bool rows_stay(const struct planner *p)
{
    const struct step *step = &p->step;
    bool slots = residency_layers(p) < p->layout.layers;
    for (uint32_t i = 0; i < step->parts && slots; i++)
        if (step->part[i].sequence && step->part[i].sequence->window == 0)
            return false;
    return p->device.gpu && step->kind == STEP_SPARSE;
}

static bool written(struct planner *p)
{
    struct step *step = &p->step;
    if (!flag_reached(planner_flag(p, FLAG_KV_WRITTEN), step->step))
        return false;
    trace(TRACE_WRITTEN, step->step);
    planner_commit(p, true); /* of the step before: long there, mostly */
    bool sparse = step->kind == STEP_SPARSE;
    bool later = rows_stay(p);
    for (uint32_t i = 0; i < step->parts && !later; i++) {
        const struct step_part *part = &step->part[i];
        if (part->sequence)
            write_back(p, part->sequence, part->position, part->position + part->count, sparse);
    }
    gather_run(&p->gather);
    struct commit *commit = &p->commit;
    *commit = (struct commit){.step = step->step, .owed = later};
    for (uint32_t i = 0; i < step->parts; i++) {
        struct sequence *s = step->part[i].sequence;
        if (!s)
            continue;
        s->committed = step->part[i].position + step->part[i].count;
        commit->part[commit->parts].sequence = s;
        commit->part[commit->parts++].end = s->committed;
        for (uint32_t run = 0; run < p->residency.resident; run++)
            s->pages_valid[run] = s->committed;
    }
    if (planner_error(p))
        return false;
    if (!later)
        commit_waits(p);
    step->state = STEP_CONSUMED;
    return true;
}

static void pay_debts(struct planner *p)
{
    struct step *step = &p->step;
    for (uint32_t i = 0; i < step->parts; i++) {
        struct sequence *s = step->part[i].sequence;
        if (!s || s->debt_layers == 0)
            continue;
        uint32_t range[3] = {s->debts, residency_layers(p), s->debt_layers};
        s->counters.bytes_loaded += gather_rows(&p->gather, s, &s->elastic.loads, range);
    }
    gather_run(&p->gather);
    for (uint32_t i = 0; i < step->parts; i++) {
        struct sequence *s = step->part[i].sequence;
        if (!s || s->debt_layers == 0)
            continue;
        s->debt_layers = 0;
        planner_gather_done(p, s);
        s->loaded = 0; /* they are in the count of the step that is over */
    }
}

static bool consumed(struct planner *p)
{
    struct step *step = &p->step;
    if (!flag_reached(planner_flag(p, FLAG_STEP_CONSUMED), step->step))
        return false;
    step_end(p);
    pay_debts(p);
    for (uint32_t i = 0; i < step->parts; i++) {
        struct step_part *part = &step->part[i];
        if (part->leaving)
            planner_finish_close(p, part->leaving);
        if (!part->sequence || !part->sequence->closing)
            continue;
        planner_finish_close(p, part->sequence);
        part->sequence = NULL;
    }
    settle_parts(p);
    residency_review(p);
    trace(TRACE_CONSUMED, step->step - 1);
    return true;
}

void step_leave(struct planner *p, struct sequence *s)
{
    struct step *step = &p->step;
    for (uint32_t i = 0; i < step->parts && step->state == STEP_SETS && !step->phase_out[1]; i++) {
        struct step_part *part = &step->part[i];
        if (part->sequence != s)
            continue;
        part->sequence = NULL;
        part->leaving = s;
        for (uint32_t phase = step->phase_out[0] ? 1 : 0; phase < 2; phase++)
            tables_entry(&p->tables, step->step, phase, part->index, -ECANCELED, 0);
    }
}

bool step_advance(struct planner *p)
{
    switch (p->step.state) {
    case STEP_IDLE:
        return begin(p);
    case STEP_SETS:
        return sets_advance(p);
    case STEP_STAGED:
        return staged_advance(p);
    case STEP_WRITTEN:
        return written(p);
    case STEP_CONSUMED:
        return consumed(p);
    }
    return false;
}
