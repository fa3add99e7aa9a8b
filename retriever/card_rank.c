/* Selection on a GPU; see card.h. Queries of a group go in slices whose scores fit into the work's memory;
 * the positions of several slices come back by one wait.
 *
 * What is attended beside the selected positions (sinks, tail) and the weight of all are sums that Top-K
 * gives when it may take every position of a range. With pooling by mean all weights add up to 1, so that
 * pass is left out; a weight that is not finite makes all of its head so, and shows in the tail, which is
 * never empty. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/pool.h"
#include "base/trace.h"
#include "retriever/card_private.h"

enum { MASS_SELECTED, MASS_SINKS, MASS_TAIL, MASS_ALL };

static uint32_t lower(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static bool by_mass(const struct rank_item *item)
{
    return item->rule.min_mass > 0 || item->rule.top_p > 0;
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

/* Whether a slice of `queries` with so many keys fits into the memory that there is. */
static bool fits(const struct card *c, uint32_t queries, uint32_t keys_max)
{
    return c->api->retrieval_work_bytes(queries, c->config->q_heads, keys_max) <= c->sizes.scores &&
           queries * c->config->kv_heads * stride_of(keys_max) * sizeof(float) <= c->sizes.pooled;
}

/* The largest slice from `first` on. One launch has one k, which each range cuts to its own length: so an
 * item whose k is smaller must want all of its range. */
static struct card_slice next_slice(const struct card *c, const struct rank_item *items, uint32_t group,
                                    uint32_t first, uint32_t queries)
{
    struct card_slice s = {.group = group, .first = first};
    while (first + s.count < queries) {
        const struct rank_item *item = item_of(c, items, &s, s.count);
        uint32_t k = picks_of(item) > s.k ? picks_of(item) : s.k;
        uint32_t keys_max = item->keys.count > s.keys_max ? item->keys.count : s.keys_max;
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

static float *masses_at(float *masses, const struct card *c, uint32_t group, int which, uint32_t query)
{
    uint64_t lists = (uint64_t)LIMIT_SEQUENCES * c->config->kv_heads;
    return masses + (group * (uint64_t)CARD_MASSES + (uint64_t)which) * lists +
           (uint64_t)query * c->config->kv_heads;
}

static void queue_scores(struct card *c, const struct card_slice *s)
{
    const struct head_config *h = c->config;
    uint64_t q_row = (uint64_t)h->q_heads * h->head_dim;
    struct cuda_retrieval r = {.keys = card_keys(c, s->group),
                               .weights = c->weights,
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

/* The sum of the weights of [first, end), one of each query; none is longer than `most`. */
static void queue_sum(struct card *c, const struct card_slice *s, int which, const uint32_t *first,
                      const uint32_t *end, uint32_t most)
{
    struct cuda_topk t = {.index = c->ignored,
                          .index_stride = most ? most : 1,
                          .ret_count = c->counts,
                          .ret_mass = masses_at(c->masses, c, s->group, which, s->first),
                          .values = c->weights,
                          .stride = stride_of(s->keys_max),
                          .first = first ? first + s->first : NULL,
                          .end = end + s->first,
                          .rows = s->count * c->config->kv_heads,
                          .heads = c->config->kv_heads,
                          .k = most ? most : 1,
                          .end_max = s->keys_max};
    card_must(c, c->api->topk(&t, c->stream), "sums");
}

static void queue_slice(struct card *c, const struct rank_item *items, const struct card_slice *s)
{
    uint32_t sinks = 0, tail = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        const struct rank_item *item = item_of(c, items, s, i);
        sinks = item->sinks > sinks ? item->sinks : sinks;
        tail = item->keys.count - item->limit > tail ? item->keys.count - item->limit : tail;
    }
    struct cuda_topk t = {.index = c->index + s->index_at,
                          .index_stride = s->index_stride ? s->index_stride : 1,
                          .ret_count = c->counts,
                          .ret_mass = masses_at(c->masses, c, s->group, MASS_SELECTED, s->first),
                          .values = c->weights,
                          .stride = stride_of(s->keys_max),
                          .first = c->ranges->sinks + s->first,
                          .end = c->ranges->limit + s->first,
                          .rows = s->count * c->config->kv_heads,
                          .heads = c->config->kv_heads,
                          .k = s->k,
                          .end_max = s->keys_max};
    queue_scores(c, s);
    card_must(c, c->api->topk(&t, c->stream), "Top-K");
    queue_sum(c, s, MASS_SINKS, NULL, c->ranges->sinks, sinks);
    queue_sum(c, s, MASS_TAIL, c->ranges->limit, c->queries->count, tail);
    if (!c->mean)
        queue_sum(c, s, MASS_ALL, NULL, c->queries->count, s->keys_max);
}

struct collection { /* of the slices in flight, whose results lie in pinned memory */
    const struct card *card;
    const struct rank_item *items;
};

/* List and mass of one item and head. */
static void collect_list(const struct card *c, const struct rank_item *item, const struct card_slice *s,
                         uint32_t i, uint32_t h)
{
    double mass[CARD_MASSES];
    for (int m = 0; m < CARD_MASSES; m++)
        mass[m] = (double)masses_at(c->host_masses, c, s->group, m, s->first + i)[h];
    double all = c->mean ? 1 : mass[MASS_ALL];
    double kept = mass[MASS_SELECTED] + mass[MASS_SINKS] + mass[MASS_TAIL];
    double own = isfinite(kept) && isfinite(all) && all > 0 ? kept / all : (double)NAN;
    double measured = calibration_at(&c->config->calibration, own);
    item->found[h] = (struct reach_result){.mass = measured, .mass_base = measured};
    struct positions *now = &item->now[h];
    now->count = picks_of(item);
    if (now->count) /* else there may be no memory */
        memcpy(now->at,
               c->host_index + s->index_at + ((uint64_t)i * c->config->kv_heads + h) * s->index_stride,
               now->count * sizeof *now->at);
    if (item->before)
        positions_difference(&item->added[h], &item->removed[h], now, &item->before[h]);
}

/* `index` counts the items of all slices. */
static void collect_item(void *arg, int index, int thread)
{
    const struct collection *all = arg;
    const struct card_slice *s = all->card->slices;
    uint32_t i = (uint32_t)index;
    (void)thread;
    for (; i >= s->count; s++)
        i -= s->count;
    for (uint32_t h = 0; h < all->card->config->kv_heads; h++)
        collect_list(all->card, item_of(all->card, all->items, s, i), s, i, h);
}

/* Lists whose length follows from the weights: the host walks these, as it does on the CPU. */
static void pick_by_mass(struct card *c, const struct rank_item *items, const struct card_slice *s,
                         struct rank_times *times)
{
    uint64_t stride = stride_of(s->keys_max), lists = (uint64_t)s->count * c->config->kv_heads;
    int64_t begin = clock_now_ns();
    queue_scores(c, s);
    card_must(c, c->api->copy(c->host_weights, c->weights, lists * stride * sizeof *c->weights, c->stream),
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

/* Waits for the slices in flight and takes their results. */
static void flush(struct card *c, const struct rank_item *items, uint32_t *slices, uint64_t *used,
                  struct rank_times *times)
{
    uint64_t masses = (uint64_t)LIMIT_SEQUENCES * c->config->kv_heads * CARD_MASSES * c->config->groups;
    int64_t begin = clock_now_ns();
    trace(TRACE_QUEUED, trace_step);
    if (*used)
        card_must(c, c->api->copy(c->host_index, c->index, *used * sizeof *c->index, c->stream), "copy");
    card_must(c, c->api->copy(c->host_masses, c->masses, masses * sizeof *c->masses, c->stream), "copy");
    card_must(c, c->api->stream_sync(c->stream), "selection");
    int64_t done = clock_now_ns();
    trace(TRACE_RANKED, trace_step);
    struct collection all = {c, items};
    int count = 0;
    for (uint32_t i = 0; i < *slices; i++)
        count += (int)c->slices[i].count;
    pool_run(compute_pool(c->compute), count, collect_item, &all);
    times->score_ns += done - begin; /* Top-K on the card is in it */
    times->encode_ns += clock_now_ns() - done;
    *slices = 0;
    *used = 0;
}

void card_rank(struct card *c, const struct rank_item *items, uint32_t count, struct rank_times *ret_times)
{
    uint32_t groups = c->config->groups, queries = count / groups, slices = 0;
    uint64_t used = 0;
    int64_t begin = clock_now_ns();
    *ret_times = (struct rank_times){0};
    if (!queries)
        return;
    CHECK(queries == c->query_count);
    for (uint32_t i = 0; i < queries; i++) {
        c->host_ranges->sinks[i] = items[i * groups].sinks;
        c->host_ranges->limit[i] = items[i * groups].limit;
    }
    card_must(c, c->api->copy(c->ranges, c->host_ranges, sizeof *c->ranges, c->stream), "copy");
    for (uint32_t g = 0; g < groups; g++)
        for (uint32_t first = 0; first < queries;) {
            struct card_slice s = next_slice(c, items, g, first, queries);
            uint64_t positions = (uint64_t)s.count * c->config->kv_heads * s.index_stride;
            first += s.count;
            if (s.by_mass) {
                pick_by_mass(c, items, &s, ret_times);
                continue;
            }
            if ((used + positions) * sizeof *c->index > c->sizes.index)
                flush(c, items, &slices, &used, ret_times);
            s.index_at = used;
            queue_slice(c, items, &s);
            c->slices[slices++] = s;
            used += positions;
        }
    ret_times->score_ns +=
        clock_now_ns() - begin - ret_times->score_ns - ret_times->topk_ns - ret_times->encode_ns;
    flush(c, items, &slices, &used, ret_times);
}
