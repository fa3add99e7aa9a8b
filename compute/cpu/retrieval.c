/* Driver of compute_retrieval_weights: exact softmax over all keys for each query head, pooled over its
 * group.
 *
 * Three loops: scores and exponentials by chunk, each against the chunk's own maximum (every key is
 * loaded once for all query heads of its group); per query head the true maximum and sum, from the chunks
 * in order; then scaling and pooling. Scores rest in the compute object's shared buffer, so memory is
 * bounded; KV heads go through it as many at a time as fit, a single one's query heads in slices where not
 * even its scores do. Called by the owner's thread. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/pool.h"
#include "compute/cpu/address.h"
#include "compute/cpu/kernels.h"

enum { ITEM_CHUNKS = 4 };

struct job {
    const struct compute *c;
    const struct kernels *kernels;
    float *weights;
    size_t stride;
    const float *q;
    const struct key_view *view;
    int group, head_dim, chunks, items;
    float scale;
    enum pool_kind pool;
    int kv_head;      /* first KV head of this wave */
    int first, rows;  /* query heads of each group that are worked on: first .. first + rows - 1 */
    float *e;         /* [heads of the wave * rows][count]: exp(score - chunk's maximum) */
    float *max, *sum; /* [heads of the wave * rows][chunks]; sum becomes the chunk's factor */
};

static int chunk_length(const struct job *job, int chunk)
{
    uint32_t left = job->view->count - (uint32_t)chunk * ATTN_CHUNK;
    return left < ATTN_CHUNK ? (int)left : ATTN_CHUNK;
}

static int chunks_end(const struct job *job, int first)
{
    return job->chunks - first < ITEM_CHUNKS ? job->chunks : first + ITEM_CHUNKS;
}

/* Query heads [h, h + rows) of the slice of KV head `head`. */
static void score_chunk(const struct job *job, struct scratch *s, int head, int h, int rows, int chunk)
{
    int query = (job->kv_head + head) * job->group + job->first + h, row = head * job->rows + h;
    size_t count = job->view->count, first = (size_t)chunk * ATTN_CHUNK;
    const float *q[ATTN_ROWS];
    for (int r = 0; r < rows; r++)
        q[r] = job->q + (size_t)(query + r) * (size_t)job->head_dim;
    struct attn_tile tile = {
        .piece = s->piece,
        .count = chunk_length(job, chunk),
        .piece_bytes = 2 * job->head_dim,
        .type = DTYPE_F16,
        .head_dim = job->head_dim,
        .q = q,
        .rows = rows,
        .stride = count,
        .scale = job->scale,
    };
    address_keys(s->piece, job->view, (uint32_t)(job->kv_head + head), (uint32_t)first, (uint32_t)tile.count,
                 job->head_dim);
    float *e = job->e + (size_t)row * count + first;
    job->kernels->attn_scores(e, &tile);
    for (int r = 0; r < rows; r++) {
        size_t at = (size_t)(row + r) * (size_t)job->chunks + (size_t)chunk;
        job->sum[at] = job->kernels->softmax_part(e + (size_t)r * count, tile.count, &job->max[at]);
    }
}

static void score_item(void *arg, int index, int thread)
{
    const struct job *job = arg;
    int head = index / job->items, first = index % job->items * ITEM_CHUNKS;
    for (int chunk = first; chunk < chunks_end(job, first); chunk++)
        for (int h = 0; h < job->rows; h += ATTN_ROWS) {
            int rows = job->rows - h < ATTN_ROWS ? job->rows - h : ATTN_ROWS;
            score_chunk(job, &job->c->scratch[thread], head, h, rows, chunk);
        }
}

/* exp(score - max) / sum = exp(score - chunk's max) * factor of the chunk. */
static void factor_item(void *arg, int row, int thread)
{
    (void)thread;
    const struct job *job = arg;
    float *max = job->max + (size_t)row * (size_t)job->chunks,
          *sum = job->sum + (size_t)row * (size_t)job->chunks;
    float most = -INFINITY;
    for (int i = 0; i < job->chunks; i++)
        most = max[i] > most ? max[i] : most;
    double total = 0;
    for (int i = 0; i < job->chunks; i++) {
        max[i] = expf(max[i] - most);
        total += (double)max[i] * (double)sum[i];
    }
    if (job->pool == POOL_MEAN)
        total *= job->group;
    for (int i = 0; i < job->chunks; i++)
        sum[i] = (float)((double)max[i] / total);
}

static void pool_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct job *job = arg;
    int head = index / job->items, first = index % job->items * ITEM_CHUNKS;
    for (int chunk = first; chunk < chunks_end(job, first); chunk++) {
        size_t at = (size_t)chunk * ATTN_CHUNK;
        float *out = job->weights + (size_t)(job->kv_head + head) * job->stride + at;
        for (int h = 0; h < job->rows; h++) {
            size_t row = (size_t)(head * job->rows + h);
            job->kernels->pool_weights(out, job->e + row * job->view->count + at,
                                       job->sum[row * (size_t)job->chunks + (size_t)chunk],
                                       chunk_length(job, chunk), job->pool, job->first + h == 0);
        }
    }
}

void compute_retrieval_weights(struct compute *c, float *weights, size_t stride, const float *q,
                               const struct key_view *view, int q_heads, int kv_heads, int head_dim,
                               float scale, enum pool_kind pool)
{
    CHECK(kv_heads > 0 && q_heads % kv_heads == 0 && head_dim > 0 && head_dim <= HEAD_DIM_MAX);
    if (view->count == 0)
        return;
    struct job job = {.c = c,
                      .kernels = kernels_for_head(c, head_dim),
                      .weights = weights,
                      .stride = stride,
                      .q = q,
                      .view = view,
                      .group = q_heads / kv_heads,
                      .head_dim = head_dim,
                      .scale = scale,
                      .pool = pool};
    job.chunks = (int)((view->count + (uint64_t)ATTN_CHUNK - 1) / ATTN_CHUNK);
    job.items = (job.chunks + ITEM_CHUNKS - 1) / ITEM_CHUNKS;
    size_t row_floats = view->count + 2 * (size_t)job.chunks;
    CHECK(row_floats <= SHARED_FLOATS); /* 8 M keys */
    int fit = (int)(SHARED_FLOATS / row_floats), slice = fit < job.group ? fit : job.group;
    int wave = fit / slice < kv_heads ? fit / slice : kv_heads; /* 1 where a group is cut */
    job.e = c->shared;
    job.max = job.e + (size_t)(wave * slice) * view->count;
    job.sum = job.max + (size_t)(wave * slice) * (size_t)job.chunks;
    for (job.kv_head = 0; job.kv_head < kv_heads; job.kv_head += wave) {
        int heads = kv_heads - job.kv_head < wave ? kv_heads - job.kv_head : wave;
        for (job.first = 0; job.first < job.group; job.first += slice) {
            job.rows = job.group - job.first < slice ? job.group - job.first : slice;
            pool_run(c->pool, heads * job.items, score_item, &job);
            pool_run(c->pool, heads * job.rows, factor_item, &job);
            pool_run(c->pool, heads * job.items, pool_item, &job);
        }
    }
}
