/* Selections as they arrive: whose they are, when they may be used, and the rows that they ask for. Owner:
 * the planner thread; merges run on its pool, one sequence a body. */
#include <errno.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/trace.h"
#include "kvstore/planner.h"
#include "kvstore/residency.h"
#include "kvstore/step.h"

void planner_gather_layers(struct planner *p, struct sequence *s, uint32_t layer, uint32_t end)
{
    uint32_t range[3] = {0, layer, end};
    if (p->options.poison) {
        gather_poison(&p->gather, s, &s->elastic.loads, range);
        gather_poison(&p->gather, s, &s->elastic.fills, range);
    }
    s->counters.bytes_loaded += gather_rows(&p->gather, s, &s->elastic.loads, range);
    s->counters.bytes_filled += gather_rows(&p->gather, s, &s->elastic.fills, range);
}

void planner_gather_done(struct planner *p, struct sequence *s)
{
    (void)p;
    struct elastic *e = &s->elastic;
    s->counters.rows_loaded += e->loads.count;
    s->counters.rows_filled += e->fills.count;
    s->loaded += e->loads.count + e->fills.count;
    e->loads.count = e->fills.count = 0;
}

/* Gathers all loads and fills of the sequences in all offloaded layers and counts them. */
static void gather_all(struct planner *p, struct sequence *const *all, uint32_t count)
{
    uint64_t rows = 0;
    int64_t from = clock_now_ns();
    for (uint32_t i = 0; i < count; i++) {
        uint32_t own = all[i]->elastic.loads.count + all[i]->elastic.fills.count;
        if (own)
            planner_gather_layers(p, all[i], residency_layers(p), p->layout.layers);
        rows += own;
    }
    if (!rows)
        return;
    gather_run(&p->gather);
    for (uint32_t i = 0; i < count; i++)
        planner_gather_done(p, all[i]);
    p->totals.gather_ns += clock_now_ns() - from;
}

struct arrival { /* one entry of a TOPK */
    struct sequence *sequence;
    struct elastic_set set;
    int result;                          /* 1: not looked at yet */
    const uint32_t *group[LIMIT_GROUPS]; /* where positions of a group begin */
    atomic_bool wrong;                   /* some list is */
};

struct merge_work {
    struct planner *planner;
    struct arrival *arrivals;
};

static void refuse(struct planner *p, uint64_t sequence, uint32_t step)
{
    p->totals.sets_refused++;
    if (p->events.reselect)
        p->events.reselect(p->events.arg, sequence, step);
}

static uint32_t set_positions(const struct planner *p, const struct elastic_set *set)
{
    uint32_t n = 0, lists = p->layout.groups * p->layout.selection_heads;
    for (uint32_t i = 0; i < 2 * lists; i++)
        n += set->counts[i];
    return n;
}

/* Only the newest waits: what a difference before it would have led to is found out when its turn comes. */
static void put_aside(const struct planner *p, struct sequence *s, const struct elastic_set *set)
{
    sequence_pending_free(&s->pending);
    uint32_t lists = p->layout.groups * p->layout.selection_heads, n = set_positions(p, set);
    struct sequence_topk *pending = mem_alloc(1, sizeof *pending);
    pending->set = *set;
    pending->counts = mem_alloc(2ull * lists, sizeof *pending->counts);
    pending->positions = mem_alloc(n, sizeof *pending->positions);
    memcpy(pending->counts, set->counts, 2ull * lists * sizeof *pending->counts);
    memcpy(pending->positions, set->positions, n * sizeof *pending->positions);
    pending->set.counts = pending->counts;
    pending->set.positions = pending->positions;
    s->pending = pending;
}

/* A sparse step in flight whose tables need the set before no more: they are made, or are to be made of the
 * next one. */
static bool wants_next(const struct step *step)
{
    bool late =
        step->selection == SELECTION_CURRENT || (step->selection == SELECTION_MIXED && step->phase_out[0]);
    return step->state != STEP_IDLE && step->kind == STEP_SPARSE && (step->phase_out[1] || late);
}

/* Whether the step in flight reads the sequence's set: without slots only its tables do. */
static bool is_read(const struct planner *p, const struct sequence *s)
{
    return s->in_step && !(wants_next(&p->step) && elastic_has_no_slots(&s->elastic));
}

/* Whether the next set may replace the one in use: no step reads it, and none that is to come will ask for
 * it. */
static bool may_commit(const struct planner *p, const struct sequence *s)
{
    const struct elastic *e = &s->elastic;
    return !is_read(p, s) && e->next_position < s->next && e->next_limit <= s->committed;
}

/* Whether it may replace it while a step reads it: that step's tables name slots, which keep their rows until
 * it is consumed, and nothing in it looks at the set any more. Only where sets come a step ahead, and where
 * no slot is to be found any more: to take one might be to take what is read. */
static bool may_commit_held(const struct planner *p, const struct sequence *s)
{
    const struct elastic *e = &s->elastic;
    const struct step *step = &p->step;
    bool planned = step->kind == STEP_SPARSE && step->selection == SELECTION_PREVIOUS &&
                   (step->state == STEP_WRITTEN || step->state == STEP_CONSUMED);
    return planned && s->in_step && e->next_position < s->next && e->next_limit <= s->committed &&
           elastic_is_whole(e);
}

static void receive_pending(struct planner *p, struct sequence *s)
{
    struct sequence_topk *pending = s->pending;
    s->pending = NULL;
    if (elastic_receive(&s->elastic, &pending->set) < 0)
        refuse(p, s->id, pending->set.step);
    sequence_pending_free(&pending);
}

struct settle_work {
    struct planner *planner;
    struct sequence *ready[LIMIT_SEQUENCES];
    uint32_t count;
};

/* A set that waits and may be used, or may be given slots. (Where nothing is kept, none are.) */
static bool may_settle(const struct planner *p, const struct sequence *s)
{
    const struct elastic *e = &s->elastic;
    if (e->next == ELASTIC_NONE)
        return false;
    return may_commit(p, s) || may_commit_held(p, s) ||
           (e->next == ELASTIC_RECEIVED && !e->reload && !e->held && e->next_limit <= s->committed);
}

static void settle_one(void *arg, int index, int thread)
{
    (void)thread;
    const struct settle_work *work = arg;
    struct sequence *s = work->ready[index];
    if (may_commit(work->planner, s)) {
        elastic_commit(&s->elastic, &s->counters);
        return;
    }
    if (s->elastic.next == ELASTIC_RECEIVED)
        elastic_stage(&s->elastic);
    if (may_commit_held(work->planner, s))
        elastic_commit_held(&s->elastic, &s->counters);
}

void planner_settle(struct planner *p, struct sequence *const *all, uint32_t count)
{
    struct settle_work work = {.planner = p};
    CHECK(count <= LIMIT_SEQUENCES);
    do {
        work.count = 0;
        for (uint32_t i = 0; i < count; i++) {
            if (all[i]->elastic.next == ELASTIC_NONE && all[i]->pending)
                receive_pending(p, all[i]);
            if (may_settle(p, all[i]))
                work.ready[work.count++] = all[i];
        }
        pool_run(p->pool, (int)work.count, settle_one, &work);
        gather_all(p, work.ready, work.count);
    } while (work.count);
}

/* One list of one entry. */
static void merge_one(void *arg, int index, int thread)
{
    const struct merge_work *work = arg;
    struct planner *p = work->planner;
    uint32_t heads = p->layout.selection_heads, lists = p->layout.groups * heads;
    uint32_t list = (uint32_t)index % lists;
    struct arrival *a = &work->arrivals[(uint32_t)index / lists];
    if (a->result != 0)
        return;
    const uint32_t *positions = a->group[list / heads];
    for (uint32_t l = list / heads * heads; l < list; l++)
        positions += (uint64_t)a->set.counts[2ull * l] + a->set.counts[2ull * l + 1];
    int32_t *scratch =
        p->merge_scratch + (size_t)thread * SELECTION_SCRATCH((size_t)p->tables.header.list_max);
    if (!elastic_merge(&a->sequence->elastic, &a->set, list, positions, scratch))
        atomic_store(&a->wrong, true);
}

/* Sets of sequences that have no other one waiting are checked and merged. */
static void receive(struct planner *p, struct arrival *arrivals, uint32_t count)
{
    struct merge_work work = {p, arrivals};
    for (uint32_t i = 0; i < count; i++) {
        struct arrival *a = &arrivals[i];
        if (a->sequence && a->sequence->elastic.next == ELASTIC_NONE && !a->sequence->pending)
            a->result = elastic_check(&a->sequence->elastic, &a->set);
    }
    pool_run(p->pool, (int)(count * p->layout.groups * p->layout.selection_heads), merge_one, &work);
    for (uint32_t i = 0; i < count; i++)
        if (arrivals[i].result == 0 && arrivals[i].wrong)
            arrivals[i].result = -EINVAL;
        else if (arrivals[i].result == 0)
            elastic_received(&arrivals[i].sequence->elastic, &arrivals[i].set);
}

/* The sequence that an entry names, if its sender may speak of it. */
static struct sequence *entry_sequence(struct planner *p, const struct msg_topk_entry *e)
{
    if (!p->attached || p->broken || e->index >= p->options.sequences)
        return NULL;
    struct sequence *s = &p->sequences[e->index];
    return s->record && s->attached && s->id == e->sequence && s->budget && !s->failed ? s : NULL;
}

/* Splits the message into entries; one sequence twice would be merged by two threads at once. */
static void split(struct planner *p, const struct msg *msg, struct arrival *arrivals)
{
    const struct msg_topk *t = &msg->topk;
    uint32_t lists = p->layout.groups * p->layout.selection_heads;
    const uint32_t *counts = t->counts.at, *positions = t->positions.at;
    for (uint32_t i = 0; i < t->entry_count; i++) {
        const struct msg_topk_entry *e = &t->entries[i];
        struct arrival *a = &arrivals[i];
        *a = (struct arrival){.sequence = entry_sequence(p, e),
                              .result = 1,
                              .set = {.step = (uint32_t)msg->id,
                                      .base_step = e->base_step,
                                      .limit = e->limit,
                                      .position = e->position,
                                      .mass = e->mass,
                                      .mass_base = e->mass_base,
                                      .flags = e->flags,
                                      .counts = counts,
                                      .positions = positions}};
        for (uint32_t j = 0; j < i; j++)
            if (arrivals[j].sequence == a->sequence)
                a->sequence = NULL;
        for (uint32_t l = 0; l < lists; l++, counts += 2) {
            if (l % p->layout.selection_heads == 0)
                a->group[l / p->layout.selection_heads] = positions;
            positions += (uint64_t)counts[0] + counts[1];
        }
    }
}

/* The step whose late lists follow from the set that a sequence got last, if each step brings it one token;
 * false: none whose tables may be written yet. */
static bool step_ahead(const struct planner *p, const struct sequence *s, uint32_t *ret_step,
                       uint32_t *ret_position)
{
    const struct elastic *e = &s->elastic;
    const struct step *step = &p->step;
    uint32_t made_from = e->next != ELASTIC_NONE ? e->next_position : e->position;
    bool posted = s->next == made_from + 1; /* the record of the token that it was made from */
    if ((!e->has && e->next == ELASTIC_NONE) || step->selection != SELECTION_PREVIOUS || s->failed ||
        s->closing || made_from + 1 >= s->capacity ||
        (!posted && (s->next != made_from || step->state != STEP_IDLE)))
        return false;
    *ret_step = step->step + (!posted || step->state != STEP_IDLE);
    *ret_position = made_from + 1;
    return true;
}

/* The same for a step in flight that waits for sets made from its own tokens, and has this one's. Only
 * without slots: those move when the set is put to use. */
static bool step_waits(const struct planner *p, const struct sequence *s, uint32_t *ret_step,
                       uint32_t *ret_position)
{
    const struct step *step = &p->step;
    const struct elastic *e = &s->elastic;
    if (!s->in_step || step->state != STEP_SETS || step->phase_out[1] || !wants_next(step) ||
        !elastic_has_no_slots(e) || e->next != ELASTIC_NONE || !e->has || e->position + 1 != s->next)
        return false;
    *ret_step = step->step;
    *ret_position = e->position;
    return true;
}

/* The step after one under `mixed`, whose early layers use what the late ones use now. Only without slots. */
static bool early_ahead(const struct planner *p, const struct sequence *s, uint32_t *ret_step,
                        uint32_t *ret_position)
{
    const struct step *step = &p->step;
    const struct elastic *e = &s->elastic;
    if (step->state == STEP_IDLE || step->kind != STEP_SPARSE || step->selection != SELECTION_MIXED ||
        s->failed || s->closing || !elastic_has_no_slots(e) || e->next != ELASTIC_NONE || !e->has ||
        e->position + 1 != s->next || s->next >= s->capacity)
        return false;
    *ret_step = step->step + 1;
    *ret_position = s->next;
    return true;
}

struct draft_work {
    struct planner *planner;
    struct arrival *arrivals;
};

static void draft_one(void *arg, int index, int thread)
{
    (void)thread;
    const struct draft_work *work = arg;
    struct planner *p = work->planner;
    struct sequence *s = work->arrivals[index].sequence;
    uint32_t step, position;
    if (s && (step_ahead(p, s, &step, &position) || step_waits(p, s, &step, &position)))
        tables_draft(&p->tables, step, 1, s, position);
    if (s && early_ahead(p, s, &step, &position))
        tables_draft(&p->tables, step, 0, s, position);
}

void planner_topk(struct planner *p, const struct msg *msg)
{
    const struct msg_topk *t = &msg->topk;
    trace(TRACE_TOPK_TAKEN, (uint32_t)msg->id);
    planner_advance(
        p); /* what these sets were made from may rest on flags that are raised but not seen yet */
    if (t->groups != p->layout.groups || t->selection_heads != p->layout.selection_heads ||
        t->entry_count > LIMIT_SEQUENCES) {
        p->totals.sets_refused++;
        return;
    }
    struct arrival arrivals[LIMIT_SEQUENCES];
    split(p, msg, arrivals);
    int64_t from = clock_now_ns();
    receive(p, arrivals, t->entry_count);
    trace(TRACE_CHECKED, (uint32_t)msg->id);
    p->totals.plan_ns += clock_now_ns() - from;
    for (uint32_t i = 0; i < t->entry_count; i++) {
        struct arrival *a = &arrivals[i];
        p->totals.sets++;
        if (!a->sequence || a->result < 0)
            refuse(p, t->entries[i].sequence, (uint32_t)msg->id);
        else if (a->result > 0)
            put_aside(p, a->sequence, &a->set);
    }
    planner_advance(p); /* a step that waited for just this goes first */
    struct sequence *arrived[LIMIT_SEQUENCES];
    uint32_t count = 0;
    for (uint32_t i = 0; i < t->entry_count; i++)
        if (arrivals[i].sequence && arrivals[i].sequence->record == NULL)
            arrivals[i].sequence = NULL; /* closed by what advanced */
        else if (arrivals[i].sequence)
            arrived[count++] = arrivals[i].sequence;
    planner_settle(p, arrived, count);
    struct draft_work work = {p, arrivals};
    from = clock_now_ns();
    if (!p->broken)
        pool_run(p->pool, (int)t->entry_count, draft_one, &work);
    p->totals.plan_ns += clock_now_ns() - from;
    trace(TRACE_DRAFTED, (uint32_t)msg->id);
}

void planner_ask(struct planner *p)
{
    for (uint32_t i = 0; i < p->options.sequences && p->attached && p->events.reselect; i++) {
        const struct sequence *s = &p->sequences[i];
        const struct elastic *e = &s->elastic;
        if (!s->record || !s->attached || s->budget == 0 || s->closing || s->failed)
            continue;
        uint32_t held = e->next != ELASTIC_NONE ? e->next_step : e->step;
        bool has = e->has || e->next != ELASTIC_NONE;
        p->events.reselect(p->events.arg, s->id, has ? held + 1 : p->tables.header.first_step);
    }
}
