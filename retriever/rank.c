/* Scores and selects; see rank.h. Owner: the thread that owns the compute object.
 *
 * Many items are spread over the threads, one item a thread, each with a single-threaded compute object of
 * its own; few items are done one after another, with all threads inside each. Operators give the same bits
 * either way, and everything after them is done head by head in a fixed order. */
#include "retriever/rank.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/pool.h"

enum { SUM_LANES = 16, SUM_BLOCK = 256 };

/* What one thread of the pool works with. */
struct lane {
    struct compute *compute; /* of one thread; NULL when there is only one thread: the borrowed one serves */
    float *weights;          /* [kv_heads][stride] */
    struct reach_scratch scratch;
    struct rank_times times;
};

struct rank {
    struct compute *compute;
    int threads;
    uint32_t q_heads, kv_heads, head_dim;
    enum pool_kind pool;
    float scale;
    struct calibration calibration;
    struct lane *lanes; /* [threads] */
};

/* One pool_run. */
struct job {
    struct rank *rank;
    const struct rank_item *items;
    const struct rank_item *item; /* heads of this one, whose weights are in lane 0 */
};

static uint32_t stride_of(uint32_t count)
{
    return (count + 15) & ~15u;
}

int rank_create(const struct head_config *head, enum head_pool pool, uint32_t context, int threads,
                enum compute_isa isa, struct compute *compute, struct rank **ret_rank, struct err *err)
{
    struct rank *r = mem_alloc(1, sizeof *r);
    r->compute = compute;
    r->threads = threads;
    r->q_heads = head->q_heads;
    r->kv_heads = head->kv_heads;
    r->head_dim = head->head_dim;
    r->pool = pool == HEAD_POOL_MEAN ? POOL_MEAN : POOL_MAX;
    r->calibration = head->calibration;
    r->scale = (float)(1 / sqrt((double)head->head_dim));
    r->lanes = mem_alloc_aligned((size_t)threads, sizeof *r->lanes);
    int rc = 0;
    for (int i = 0; i < threads && rc == 0; i++) {
        struct lane *lane = &r->lanes[i];
        /* Not touched before it is used: only the part that the longest sequence needs becomes memory. */
        lane->weights = mem_alloc((size_t)head->kv_heads * stride_of(context), sizeof *lane->weights);
        lane->scratch.topk = mem_alloc(context, sizeof *lane->scratch.topk);
        lane->scratch.index = mem_alloc(context, sizeof *lane->scratch.index);
        lane->scratch.weights = mem_alloc(context, sizeof *lane->scratch.weights);
        if (threads > 1)
            rc = compute_create("cpu", 1, isa, &lane->compute, err);
    }
    if (rc < 0)
        rank_free(&r);
    else
        *ret_rank = r;
    return rc;
}

void rank_free(struct rank **rank)
{
    struct rank *r = *rank;
    if (!r)
        return;
    for (int i = 0; i < r->threads; i++) {
        compute_free(&r->lanes[i].compute);
        mem_free(&r->lanes[i].weights);
        mem_free(&r->lanes[i].scratch.topk);
        mem_free(&r->lanes[i].scratch.index);
        mem_free(&r->lanes[i].scratch.weights);
    }
    mem_free(&r->lanes);
    mem_free(rank);
}

/* In a fixed order: 16 lanes a block, blocks in double. */
static double sum_of(const float *x, uint32_t count)
{
    double sum = 0;
    for (uint32_t first = 0; first < count; first += SUM_BLOCK) {
        uint32_t n = count - first < SUM_BLOCK ? count - first : SUM_BLOCK, i = 0;
        float lane[SUM_LANES] = {0};
        for (; i + SUM_LANES <= n; i += SUM_LANES)
            for (uint32_t j = 0; j < SUM_LANES; j++)
                lane[j] += x[first + i + j];
        for (; i < n; i++)
            lane[i % SUM_LANES] += x[first + i];
        for (uint32_t j = 0; j < SUM_LANES; j++)
            sum += (double)lane[j];
    }
    return sum;
}

static void score(struct rank *r, struct compute *c, float *weights, const struct rank_item *item)
{
    compute_retrieval_weights(c, weights, stride_of(item->keys.count), item->q, &item->keys, (int)r->q_heads,
                              (int)r->kv_heads, (int)r->head_dim, r->scale, r->pool);
}

void rank_pick(const struct rank_item *item, uint32_t h, const float *weights,
               const struct calibration *calibration, const struct reach_scratch *scratch)
{
    struct positions *now = &item->now[h];
    uint32_t end = item->keys.count;
    struct reach_input input = {.weights = weights + item->sinks,
                                .count = item->limit - item->sinks,
                                .outside = sum_of(weights, item->sinks) +
                                           sum_of(weights + item->limit, end - item->limit),
                                .all = sum_of(weights, end),
                                .calibration = calibration};
    now->count = reach_pick(now->at, &input, &item->rule, scratch, &item->found[h]);
    for (uint32_t i = 0; i < now->count; i++)
        now->at[i] += item->sinks;
}

static void pick(const struct rank *r, const struct rank_item *item, uint32_t h, const float *w,
                 struct lane *lane)
{
    int64_t begin = clock_now_ns();
    rank_pick(item, h, w, &r->calibration, &lane->scratch);
    int64_t picked = clock_now_ns();
    lane->times.topk_ns += picked - begin;
    if (item->before)
        positions_difference(&item->added[h], &item->removed[h], &item->now[h], &item->before[h]);
    lane->times.encode_ns += clock_now_ns() - picked;
}

static void run_item(void *arg, int index, int thread)
{
    struct job *job = arg;
    struct rank *r = job->rank;
    struct lane *lane = &r->lanes[thread];
    const struct rank_item *item = &job->items[index];
    int64_t begin = clock_now_ns();
    score(r, lane->compute ? lane->compute : r->compute, lane->weights, item);
    lane->times.score_ns += clock_now_ns() - begin;
    for (uint32_t h = 0; h < r->kv_heads; h++)
        pick(r, item, h, lane->weights + (size_t)h * stride_of(item->keys.count), lane);
}

static void run_head(void *arg, int index, int thread)
{
    struct job *job = arg;
    const float *weights = job->rank->lanes[0].weights;
    pick(job->rank, job->item, (uint32_t)index, weights + (size_t)index * stride_of(job->item->keys.count),
         &job->rank->lanes[thread]);
}

/* All threads inside one item. */
static void run_alone(struct job *job)
{
    struct rank *r = job->rank;
    int64_t begin = clock_now_ns();
    score(r, r->compute, r->lanes[0].weights, job->item);
    r->lanes[0].times.score_ns += clock_now_ns() - begin;
    pool_run(compute_pool(r->compute), (int)r->kv_heads, run_head, job);
}

/* The threads' times, scaled to the time that passed. */
static void share_time(const struct rank *r, int64_t passed, struct rank_times *ret)
{
    struct rank_times sum = {0};
    for (int i = 0; i < r->threads; i++) {
        sum.score_ns += r->lanes[i].times.score_ns;
        sum.topk_ns += r->lanes[i].times.topk_ns;
        sum.encode_ns += r->lanes[i].times.encode_ns;
    }
    double all = (double)(sum.score_ns + sum.topk_ns + sum.encode_ns);
    double share = all > 0 ? (double)passed / all : 0;
    ret->topk_ns = (int64_t)((double)sum.topk_ns * share);
    ret->encode_ns = (int64_t)((double)sum.encode_ns * share);
    ret->score_ns = passed - ret->topk_ns - ret->encode_ns;
}

void rank_run(struct rank *r, const struct rank_item *items, uint32_t count, struct rank_times *ret_times)
{
    struct job job = {.rank = r, .items = items};
    int64_t begin = clock_now_ns();
    for (int i = 0; i < r->threads; i++)
        memset(&r->lanes[i].times, 0, sizeof r->lanes[i].times);
    if (r->threads == 1)
        for (uint32_t i = 0; i < count; i++)
            run_item(&job, (int)i, 0);
    else if (count >= (uint32_t)r->threads)
        pool_run(compute_pool(r->compute), (int)count, run_item, &job);
    else
        for (uint32_t i = 0; i < count; i++) {
            job.item = &items[i];
            run_alone(&job);
        }
    share_time(r, clock_now_ns() - begin, ret_times);
}
