/* Selection on a GPU; see card.h. Queries go in flights whose changes fit into the memory that brings them
 * to the host, and within these, group by group, in slices whose scores fit into the work's. A slice's lists
 * become sets of bits; what a flight's sets changed by comes back by one wait.
 *
 * Top-K sums up what is attended: selected positions, sinks, tail. The weight of all is what it gives when it
 * may take every position. With pooling by mean all weights add up to 1, so that pass is left out; a weight
 * that is not finite makes all of its head so, and shows in the tail, which is never empty. */
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/trace.h"
#include "retriever/card_private.h"

enum { MASS_KEPT, MASS_ALL };
enum { YIELD_TURNS = 64, LOOK_TURNS = 4096 };
#define PATIENCE_NS (30 * CLOCK_S)

struct flight {
    uint32_t first, end; /* queries */
    uint64_t positions;  /* that may come back */
    bool by_mass;        /* some of the queries' lists go by mass */
    uint32_t ticket;     /* of its results, once they are queued */
};

static uint32_t set_words(const struct card *c)
{
    return (uint32_t)(c->sizes.sets / c->sequences / card_lists(c) / 2 / sizeof *c->sets);
}

static uint32_t lower(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static bool by_mass(const struct rank_item *item)
{
    return card_picks_by_mass(&item->rule);
}

static uint32_t picks_of(const struct rank_item *item)
{
    return lower(item->rule.k, item->limit - item->sinks);
}

static const struct rank_item *item_of(const struct card *c, const struct rank_item *items,
                                       const struct card_slice *s, uint32_t i)
{
    return &items[(s->first + i) * c->config->groups + s->group];
}

static uint64_t stride_of(uint32_t count)
{
    return ((uint64_t)count + 3) & ~UINT64_C(3);
}

static uint32_t rounded(const struct card *c, uint32_t keys)
{
    return lower((keys + CARD_KEYS_STEP - 1) / CARD_KEYS_STEP * CARD_KEYS_STEP, c->context);
}

/* Whether a slice of `queries` with so many keys fits into the memory that there is. */
static bool fits(const struct card *c, uint32_t queries, uint32_t keys_max)
{
    return c->api->retrieval_work_bytes(queries, c->config->q_heads, keys_max) <= c->sizes.scores &&
           queries * c->config->kv_heads * stride_of(keys_max) * sizeof(float) <= c->sizes.pooled;
}

/* The largest slice from `first` on. One launch has one k, which each range cuts to its own length: so an
 * item whose k is smaller must want all of its range. */
static struct card_slice next_slice(const struct card *c, const struct rank_item *items, uint32_t group,
                                    uint32_t first, uint32_t end)
{
    struct card_slice s = {.group = group, .first = first};
    while (first + s.count < end) {
        const struct rank_item *item = item_of(c, items, &s, s.count);
        uint32_t k = picks_of(item) > s.k ? picks_of(item) : s.k;
        uint32_t keys_max = rounded(c, item->keys.count);
        keys_max = keys_max > s.keys_max ? keys_max : s.keys_max;
        s.by_mass = s.count ? s.by_mass : by_mass(item);
        bool same = s.by_mass || lower(k, item->limit - item->sinks) == picks_of(item);
        for (uint32_t i = 0; i < s.count && same && !s.by_mass; i++) {
            const struct rank_item *other = item_of(c, items, &s, i);
            same = lower(k, other->limit - other->sinks) == picks_of(other);
        }
        uint64_t positions =
            s.by_mass ? 0 : (uint64_t)(s.count + 1) * c->config->kv_heads * lower(k, keys_max);
        if (s.count && (by_mass(item) != s.by_mass || !same || !fits(c, s.count + 1, keys_max) ||
                        positions * 4 > c->sizes.index))
            break;
        s.k = k;
        s.keys_max = keys_max;
        s.count++;
    }
    s.index_stride = lower(s.k, s.keys_max);
    return s;
}

/* The queries from `first` on whose changes fit, one at least. */
static struct flight next_flight(const struct card *c, const struct rank_item *items, uint32_t first,
                                 uint32_t queries, const uint32_t *how)
{
    struct flight f = {.first = first, .end = first};
    uint64_t room = c->sizes.changes / sizeof *c->changes;
    for (; f.end < queries; f.end++) {
        const struct rank_item *item = &items[(uint64_t)f.end * c->config->groups];
        /* The set before had no more positions than this one. */
        uint64_t most = by_mass(item) ? 0 : (uint64_t)card_lists(c) * picks_of(item);
        most *= how[f.end] & CUDA_SETS_DIFFER ? 2 : 1;
        if (f.end > first && f.positions + most > room)
            break;
        f.positions += most;
        f.by_mass |= by_mass(item);
    }
    return f;
}

static float *masses_at(float *masses, const struct card *c, uint32_t group, int which, uint32_t query)
{
    uint64_t lists = (uint64_t)LIMIT_SEQUENCES * c->config->kv_heads;
    return masses + (group * (uint64_t)CARD_MASSES + (uint64_t)which) * lists +
           (uint64_t)query * c->config->kv_heads;
}

static void follow(struct card *c, struct CUstream_st *stream, struct CUstream_st *after)
{
    card_must(c, c->api->stream_follow(c->gpu, stream, after), "order");
}

/* The lanes' work comes before what is queued on the stream from here on. */
static void join_lanes(struct card *c, struct CUstream_st *stream)
{
    for (int lane = 0; lane < 2; lane++)
        if (c->lane_used[lane])
            follow(c, stream, c->lane[lane]);
}

/* All streams' work comes before what is queued on the first from here on. */
static void join_all(struct card *c)
{
    join_lanes(c, c->stream);
    c->lane_used[0] = c->lane_used[1] = false;
    c->next_lane = 0;
}

static void queue_scores(struct card *c, const struct card_slice *s, uint32_t lane)
{
    const struct head_config *h = c->config;
    uint64_t q_row = (uint64_t)h->q_heads * h->head_dim;
    struct cuda_retrieval r = {.keys = card_keys(c, s->group),
                               .weights = c->weights[lane],
                               .weight_stride = stride_of(s->keys_max),
                               .q = c->q + ((uint64_t)s->group * LIMIT_SEQUENCES + s->first) * q_row,
                               .q_stride = q_row,
                               .rows = c->queries->place + s->first,
                               .counts = c->queries->count + s->first,
                               .row_count = c->sequences,
                               .count_max = s->keys_max,
                               .n = s->count,
                               .q_heads = h->q_heads,
                               .kv_heads = h->kv_heads,
                               .head_dim = h->head_dim,
                               .scale = (float)(1 / sqrt((double)h->head_dim)),
                               .mean = c->mean,
                               .work = c->work};
    card_must(c, c->api->retrieval(&r, c->stream), "scores");
}

/* The sum of all weights of each list. */
static void queue_sum(struct card *c, const struct card_slice *s, uint32_t lane)
{
    struct cuda_topk t = {.index = c->ignored,
                          .index_stride = s->keys_max,
                          .ret_count = c->counts[lane],
                          .ret_mass = masses_at(c->masses[c->second], c, s->group, MASS_ALL, s->first),
                          .values = c->weights[lane],
                          .stride = stride_of(s->keys_max),
                          .end = c->queries->count + s->first,
                          .rows = s->count * c->config->kv_heads,
                          .heads = c->config->kv_heads,
                          .k = s->keys_max,
                          .end_max = s->keys_max};
    card_must(c, c->api->topk(&t, c->lane[lane]), "sums");
}

static uint32_t *counts_in(float *results, const struct card *c)
{
    return (uint32_t *)masses_at(results, c, c->config->groups, 0, 0);
}

static struct cuda_sets sets_of(const struct card *c)
{
    return (struct cuda_sets){.bits = c->sets,
                              .count = counts_in(c->masses[c->second], c),
                              .place = c->queries->place,
                              .how = c->ranges->how,
                              .words = set_words(c),
                              .lists = card_lists(c),
                              .place_count = c->sequences};
}

/* Scores in the first stream, what is made of them in a lane's: it takes few of the card's units, and the
 * next slice's scores are made meanwhile. With pooling by max there is memory for one lane. */
static void queue_slice(struct card *c, const struct card_slice *s)
{
    uint32_t lane = c->next_lane;
    struct cuda_topk t = {.index = c->index[lane],
                          .index_stride = s->index_stride ? s->index_stride : 1,
                          .ret_count = c->counts[lane],
                          .ret_mass = masses_at(c->masses[c->second], c, s->group, MASS_KEPT, s->first),
                          .values = c->weights[lane],
                          .stride = stride_of(s->keys_max),
                          .first = c->ranges->sinks + s->first,
                          .end = c->ranges->limit + s->first,
                          .outer = c->queries->count + s->first,
                          .rows = s->count * c->config->kv_heads,
                          .heads = c->config->kv_heads,
                          .k = s->k,
                          .end_max = s->keys_max};
    struct cuda_sets_mark m = {.sets = sets_of(c),
                               .index = c->index[lane],
                               .row_count = c->counts[lane],
                               .index_stride = t.index_stride,
                               .first_query = s->first,
                               .first_list = s->group * c->config->kv_heads,
                               .rows = t.rows,
                               .heads = t.heads};
    if (c->lane_used[lane]) /* its weights are read till then */
        follow(c, c->stream, c->lane[lane]);
    queue_scores(c, s, lane);
    follow(c, c->lane[lane], c->stream);
    c->lane_used[lane] = true;
    c->next_lane = c->mean ? 1 - lane : 0;
    card_must(c, c->api->topk(&t, c->lane[lane]), "Top-K");
    card_must(c, c->api->sets_mark(&m, c->lane[lane]), "sets");
    if (!c->mean)
        queue_sum(c, s, lane);
}

/* Mass of one item and head. */
static void collect_mass(const struct card *c, const struct rank_item *item, uint32_t group, uint32_t query,
                         uint32_t h)
{
    double mass[CARD_MASSES];
    for (int m = 0; m < CARD_MASSES; m++)
        mass[m] = (double)masses_at(c->results, c, group, m, query)[h];
    double all = c->mean ? 1 : mass[MASS_ALL];
    double own = isfinite(mass[MASS_KEPT]) && isfinite(all) && all > 0 ? mass[MASS_KEPT] / all : (double)NAN;
    double measured = calibration_at(&c->config->calibration, own);
    item->found[h] = (struct reach_result){.mass = measured, .mass_base = measured};
}

/* Lists whose length follows from the weights: the host walks these, as it does on the CPU. */
static void pick_by_mass(struct card *c, const struct rank_item *items, const struct card_slice *s,
                         struct rank_times *times)
{
    uint64_t stride = stride_of(s->keys_max), lists = (uint64_t)s->count * c->config->kv_heads;
    int64_t begin = clock_now_ns();
    join_all(c);
    queue_scores(c, s, 0);
    card_must(
        c, c->api->copy(c->host_weights, c->weights[0], lists * stride * sizeof *c->host_weights, c->stream),
        "copy");
    card_must(c, c->api->stream_sync(c->stream), "scores");
    int64_t scored = clock_now_ns();
    times->score_ns += scored - begin;
    for (uint64_t l = 0; l < lists; l++) {
        uint32_t h = (uint32_t)(l % c->config->kv_heads);
        const struct rank_item *item = item_of(c, items, s, (uint32_t)(l / c->config->kv_heads));
        rank_pick(item, h, c->host_weights + l * stride, &c->config->calibration, &c->scratch);
        int64_t picked = clock_now_ns();
        times->topk_ns += picked - scored;
        if (item->before)
            positions_difference(&item->added[h], &item->removed[h], &item->now[h], &item->before[h]);
        scored = clock_now_ns();
        times->encode_ns += scored - picked;
    }
}

/* Changes that there is room for in one of the two places where results land, or in both together. */
static uint64_t room_of(const struct card *c, bool whole)
{
    uint64_t room = c->sizes.changes / sizeof *c->changes;
    return whole ? room : room / 2 / 4 * 4;
}

/* Hands on what one query's set changed by; returns the place of the next one's. */
static const uint32_t *hand_on(const struct card *c, const struct rank_item *items, uint32_t query,
                               const uint32_t *positions, const struct card_sink *sink)
{
    uint32_t lists = card_lists(c), groups = c->config->groups;
    struct card_changes changes = {.counts = counts_in(c->results, c) + (uint64_t)query * lists * 2,
                                   .positions = positions};
    for (uint32_t i = 0; i < 2 * lists; i++)
        changes.total += changes.counts[i];
    CHECK(changes.total <= (uint64_t)(c->host_changes + room_of(c, true) - positions));
    for (uint32_t g = 0; g < groups; g++)
        for (uint32_t h = 0; h < c->config->kv_heads; h++)
            collect_mass(c, &items[(uint64_t)query * groups + g], g, query, h);
    sink->take(sink->arg, query, &changes);
    return positions + changes.total;
}

static void queue_flight(struct card *c, const struct rank_item *items, const struct flight *f,
                         struct rank_times *times)
{
    uint64_t counts = 2 * sizeof(uint32_t) * card_lists(c);
    if (f->by_mass) /* lists by mass have no set on the card: nothing changes there */
        card_must(c,
                  c->api->fill(counts_in(c->masses[c->second], c) + f->first * counts / sizeof(uint32_t), 0,
                               (f->end - f->first) * counts, c->stream),
                  "fill");
    for (uint32_t g = 0; g < c->config->groups; g++)
        for (uint32_t first = f->first; first < f->end;) {
            struct card_slice s = next_slice(c, items, g, first, f->end);
            first += s.count;
            if (s.by_mass)
                pick_by_mass(c, items, &s, times);
            else
                queue_slice(c, &s);
        }
}

/* ---- what comes back ---- */

/* What the sets of a flight changed by, and all counts and masses, to the host; `second`: the place where
 * they land. Then the ticket. */
static void queue_results(struct card *c, const struct flight *f, bool second, bool whole)
{
    uint64_t at = second ? room_of(c, false) : 0;
    struct cuda_sets_changes changes = {.sets = sets_of(c),
                                        .work = c->changes,
                                        .out = (uint32_t *)c->host_changes_device + at,
                                        .total = c->total,
                                        .room = room_of(c, whole),
                                        .first = f->first,
                                        .n = f->end - f->first};
    follow(c, c->out, c->stream);
    join_lanes(c, c->out);
    if (f->positions)
        card_must(c, c->api->sets_changes(&changes, c->out), "changes");
    card_copy(c, c->host_masses_device[second], c->masses[second], card_results_bytes(c), c->out);
    card_must(c, c->api->flag_write(c->landed_device, ++c->ticket, c->out), "flag");
}

/* A stream that stands still has an error, mostly, which ends the process. */
static void wait_landed(struct card *c, uint32_t ticket)
{
    int64_t begin = clock_now_ns();
    for (uint32_t turn = 1; (int32_t)(atomic_load_explicit(c->landed, memory_order_acquire) - ticket) < 0;
         turn++) {
        if (turn % YIELD_TURNS == 0)
            sched_yield();
        if (turn % LOOK_TURNS)
            continue;
        int done = c->api->stream_done(c->stream);
        card_must(c, done < 0 ? done : 0, "selection");
        card_must(c, clock_now_ns() - begin > PATIENCE_NS ? -ETIMEDOUT : 0, "selection");
    }
    card_must(c, c->api->check(c->gpu, NULL), "selection");
}

/* Waits for a flight and hands its results on. */
static void land(struct card *c, const struct rank_item *items, const struct flight *f, bool second,
                 const struct card_sink *sink, struct rank_times *times)
{
    int64_t begin = clock_now_ns();
    wait_landed(c, f->ticket);
    trace(TRACE_RANKED, trace_step);
    int64_t done = clock_now_ns();
    const uint32_t *positions = c->host_changes + (second ? room_of(c, false) : 0);
    c->results = c->host_masses[second];
    for (uint32_t query = f->first; query < f->end; query++)
        if (by_mass(&items[(uint64_t)query * c->config->groups]))
            sink->take(sink->arg, query, NULL);
        else
            positions = hand_on(c, items, query, positions, sink);
    sink->flushed(sink->arg);
    times->score_ns += done - begin; /* Top-K on the card is in it */
    times->encode_ns += clock_now_ns() - done;
}

static void queue_ranges(struct card *c)
{
    card_copy(c, c->ranges, c->host_ranges_device, sizeof *c->ranges, c->stream);
}

/* ---- steps of one or two flights: the card goes on while the host hands on ---- */

struct course {
    struct flight flight[2];
    uint32_t count; /* 0: it takes more, or lists by mass, which the host waits for in between */
};

static struct course plan_course(const struct card *c, const struct rank_item *items, uint32_t queries,
                                 const uint32_t *how)
{
    struct course plan = {.count = queries < CARD_HALVED ? 1 : 2};
    for (uint32_t i = 0, first = 0; i < plan.count; i++) {
        uint32_t end = i + 1 < plan.count ? (queries + 1) / 2 : queries;
        plan.flight[i] = next_flight(c, items, first, end, how);
        first = plan.flight[i].end;
        if (first != end || plan.flight[i].by_mass || plan.flight[i].positions > room_of(c, plan.count == 1))
            return (struct course){.count = 0};
    }
    return plan;
}

/* Queues all of a step. In a capture the tickets are given at each launch. */
static void queue_course(struct card *c, const struct rank_item *items, struct course *plan)
{
    struct rank_times none = {0};
    card_queue_waiting(c);
    queue_ranges(c);
    for (uint32_t i = 0; i < plan->count; i++) {
        c->second = i > 0;
        queue_flight(c, items, &plan->flight[i], &none);
        queue_results(c, &plan->flight[i], i > 0, plan->count == 1);
        plan->flight[i].ticket = c->ticket;
    }
    c->second = false;
    join_all(c);
    follow(c, c->stream, c->out);
}

/* ---- decode steps as graphs ---- */

/* Whether the step is one whose launches depend on nothing but its shape. */
static bool has_shape(const struct card *c, const struct rank_item *items, const struct course *plan,
                      struct card_shape *ret)
{
    *ret = (struct card_shape){.n = c->query_count, .flights = plan->count};
    if (!c->waiting || plan->count == 0)
        return false;
    for (uint32_t i = 0; i < plan->count; i++)
        for (uint32_t g = 0; g < c->config->groups; g++) {
            const struct flight *f = &plan->flight[i];
            struct card_slice s = next_slice(c, items, g, f->first, f->end);
            bool first = i == 0 && g == 0, same = first || s.k == ret->k;
            if (!f->positions || s.count != f->end - f->first || !same)
                return false;
            ret->k = s.k;
            ret->keys_max[i] = s.keys_max;
        }
    return true;
}

/* NULL where it cannot be: steps are queued launch by launch then. */
static struct gpu_graph *capture(struct card *c, const struct rank_item *items, const struct course *plan)
{
    struct gpu_graph *graph = NULL;
    struct course copy = *plan;
    struct err err = {0};
    uint32_t ticket = c->ticket;
    card_prepare_products(c, c->query_count);
    c->capture_rc = c->api->capture_begin(c->stream, &err);
    if (c->capture_rc == 0) {
        c->capturing = true;
        queue_course(c, items, &copy);
        c->capturing = false;
        int end = c->api->capture_end(c->gpu, c->stream, &graph, &err);
        c->capture_rc = c->capture_rc < 0 ? c->capture_rc : end;
        c->lane_used[0] = c->lane_used[1] = false;
        c->next_lane = 0;
    }
    c->ticket = ticket; /* none of them was queued */
    if (c->capture_rc == 0 && c->api->graph_flags(graph) == plan->count)
        return graph;
    log_warn("GPU %s: steps are queued launch by launch: %s", c->api->info(c->gpu)->uuid,
             err.code ? err.text : strerror(-c->capture_rc));
    c->api->check(c->gpu, NULL); /* what is told here is over */
    if (graph)
        c->api->graph_free(&graph);
    c->no_graphs = true;
    return NULL;
}

/* The graph of a step's shape: kept, or made in place of the one used longest ago when the shape comes for
 * the second time - the first loads the kernels' code. NULL: none. */
static struct gpu_graph *find_graph(struct card *c, const struct rank_item *items, const struct course *plan)
{
    struct card_shape shape, before = c->seen;
    struct card_graph *oldest = &c->graphs[0];
    c->seen = (struct card_shape){0};
    if (c->no_graphs || !has_shape(c, items, plan, &shape))
        return NULL;
    c->seen = shape;
    for (int i = 0; i < CARD_GRAPHS; i++) {
        struct card_graph *g = &c->graphs[i];
        if (g->graph && !memcmp(&g->shape, &shape, sizeof shape)) {
            g->used = ++c->graph_clock;
            return g->graph;
        }
        if (!g->graph || (oldest->graph && g->used < oldest->used))
            oldest = g;
    }
    if (memcmp(&before, &shape, sizeof shape) != 0)
        return NULL;
    if (oldest->graph)
        c->api->graph_free(&oldest->graph);
    *oldest = (struct card_graph){.graph = capture(c, items, plan), .shape = shape, .used = ++c->graph_clock};
    return oldest->graph;
}

static void launch(struct card *c, struct gpu_graph *graph, struct course *plan)
{
    uint32_t values[2];
    for (uint32_t i = 0; i < plan->count; i++)
        values[i] = plan->flight[i].ticket = ++c->ticket;
    card_must(c, c->api->graph_launch(graph, values, c->stream), "step");
    c->graph_steps++;
}

/* ---- any step ---- */

/* One flight after the other. */
static void rank_all(struct card *c, const struct rank_item *items, uint32_t queries,
                     const struct card_sink *sink, struct rank_times *times)
{
    card_queue_waiting(c);
    queue_ranges(c);
    for (struct flight f = {0}; f.end < queries;) {
        struct rank_times picks = {0};
        int64_t begin = clock_now_ns();
        f = next_flight(c, items, f.end, queries, sink->how);
        queue_flight(c, items, &f, &picks);
        queue_results(c, &f, false, true);
        f.ticket = c->ticket;
        join_all(c);
        follow(c, c->stream, c->out);
        times->score_ns += clock_now_ns() - begin - picks.topk_ns - picks.encode_ns;
        times->topk_ns += picks.topk_ns;
        times->encode_ns += picks.encode_ns;
        land(c, items, &f, false, sink, times);
    }
}

void card_rank(struct card *c, const struct rank_item *items, uint32_t count, const struct card_sink *sink,
               struct rank_times *ret_times)
{
    uint32_t groups = c->config->groups, queries = count / groups;
    *ret_times = (struct rank_times){0};
    if (!queries)
        return;
    CHECK(queries == c->query_count);
    for (uint32_t i = 0; i < queries; i++) {
        c->host_ranges->sinks[i] = items[i * groups].sinks;
        c->host_ranges->limit[i] = items[i * groups].limit;
        c->host_ranges->how[i] = sink->how[i];
    }
    int64_t begin = clock_now_ns();
    struct course plan = plan_course(c, items, queries, sink->how);
    struct gpu_graph *graph = find_graph(c, items, &plan);
    if (plan.count == 0) {
        rank_all(c, items, queries, sink, ret_times);
        return;
    }
    if (graph)
        launch(c, graph, &plan);
    else
        queue_course(c, items, &plan);
    trace(TRACE_QUEUED, trace_step);
    ret_times->score_ns += clock_now_ns() - begin;
    for (uint32_t i = 0; i < plan.count; i++)
        land(c, items, &plan.flight[i], i > 0, sink, ret_times);
}

uint64_t card_read_set(struct card *c, uint32_t place, bool second, uint32_t *ret_counts,
                       uint32_t *ret_positions)
{
    uint32_t words = set_words(c), lists = card_lists(c);
    uint64_t bytes = c->sizes.sets / c->sequences, at = 0;
    CHECK(place < c->sequences);
    card_must(c, c->api->copy(c->host_sets, c->sets + place * (bytes / sizeof *c->sets), bytes, c->stream),
              "copy");
    card_must(c, c->api->stream_sync(c->stream), "set");
    for (uint32_t l = 0; l < lists; l++) {
        const uint32_t *set = c->host_sets + ((uint64_t)l * 2 + second) * words;
        uint64_t begin = at;
        for (uint32_t w = 0; w < words; w++)
            for (uint32_t bits = set[w]; bits; bits &= bits - 1)
                ret_positions[at++] = w * 32 + (uint32_t)__builtin_ctz(bits);
        ret_counts[l] = (uint32_t)(at - begin);
    }
    return at;
}
