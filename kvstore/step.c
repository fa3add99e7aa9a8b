/* One step from its record to its end; see step.h. Owner: the planner thread.
 *
 *   IDLE -> SETS (step_sparse.c) or STAGED (step_dense.c) -> WRITTEN -> CONSUMED -> IDLE
 *
 * Records are copied out of shared memory before they are checked, and everything in them is checked before
 * it is used. A part that cannot be served gets a status; a record that makes no sense breaks the
 * connection. */
#include "kvstore/step.h"

#include <errno.h>
#include <string.h>

#include "base/clock.h"
#include "base/trace.h"
#include "kvstore/residency.h"
#include "kvstore/step_private.h"
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

void step_refuse(struct planner *p, struct step_part *part, int status)
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
            step_refuse(p, part, -EINVAL);
            continue;
        }
        part->sequence->in_step = true;
        if (part->sequence->failed || status < 0) {
            step_refuse(p, part, status < 0 ? status : -ENOSPC);
            continue;
        }
        uint32_t offloaded = p->layout.layers - residency_layers(p);
        if (part->sequence->counters.layers_offloaded_max < offloaded && step->kind != STEP_RECORD)
            part->sequence->counters.layers_offloaded_max = offloaded;
        int done = sequence_record(part->sequence, &p->prefix, e->position, r->token + e->token_at, e->count);
        if (done < 0)
            step_refuse(p, part, done);
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

void step_raise_runs(struct planner *p, uint32_t end)
{
    for (; p->step.runs_raised < end; p->step.runs_raised++)
        planner_raise_rows(p, p->step.runs_raised);
}

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
        step_dense_tables(p);
        flag_raise(planner_flag(p, FLAG_TABLES_LATE), step->step);
        step->state = STEP_STAGED;
    } else {
        p->totals.steps_sparse++;
        step_sparse_tables(p);
        step->pages_settled = !p->device.gpu || device_gpu_settled(p->device.gpu);
        step->state = STEP_SETS;
    }
    return true;
}

/* The rows of positions [first, end) from where the step that is over wrote them. */
static void write_back(struct planner *p, struct sequence *s, uint32_t first, uint32_t end, bool sparse)
{
    uint32_t resident = residency_layers(p), low = p->blocks.layout.host_first_layer;
    struct gather_job job = {.kind = GATHER_BACK_PAGES,
                             .layer = low,
                             .end_layer = resident,
                             .first = first,
                             .end = end,
                             .sequence = s,
                             .pages = s->pages + (size_t)low * s->pages_max,
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
        (uint64_t)(end - first) * p->layout.row_heads * (layers - low) * p->layout.piece_bytes;
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
    step_sparse_settle(p);
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

int64_t step_until_near(const struct planner *p, int64_t now_ns)
{
    const struct step *step = &p->step;
    if (!p->device.gpu || step->kind != STEP_SPARSE)
        return INT64_MAX;
    if (step->state == STEP_IDLE)
        return now_ns - step->ended_ns < PLANNER_NEAR_NS ? 0 : INT64_MAX;
    bool computed = step->state == STEP_WRITTEN || step->state == STEP_CONSUMED;
    int64_t from_ns = step->seen_ns + step->took_ns - PLANNER_NEAR_NS;
    if (!computed || step->took_ns < 4 * PLANNER_NEAR_NS || now_ns - from_ns >= 2 * PLANNER_NEAR_NS)
        return INT64_MAX;
    return now_ns < from_ns ? from_ns - now_ns : 0;
}

bool step_advance(struct planner *p)
{
    switch (p->step.state) {
    case STEP_IDLE:
        return begin(p);
    case STEP_SETS:
        return step_sparse_advance(p);
    case STEP_STAGED:
        return step_dense_advance(p);
    case STEP_WRITTEN:
        return written(p);
    case STEP_CONSUMED:
        return consumed(p);
    }
    return false;
}
