/* compute_attention_weights: the weights themselves, which attention never writes down. Scores by chunk with
 * the kernels that attention uses, then one softmax over all of them. Called by the owner's thread. */
#include <math.h>

#include "base/pool.h"
#include "compute/cpu/address.h"
#include "compute/cpu/kernels.h"

struct job {
    struct compute *c;
    const struct kernels *kernels;
    float *weights;
    size_t stride;
    const float *q;
    const struct attn_query *query;
    int q_heads, kv_heads, head_dim;
    float scale;
};

static void softmax(float *x, uint32_t count)
{
    float max = -INFINITY;
    double sum = 0;
    for (uint32_t i = 0; i < count; i++)
        max = x[i] > max ? x[i] : max;
    for (uint32_t i = 0; i < count; i++) {
        x[i] = expf(x[i] - max);
        sum += (double)x[i];
    }
    for (uint32_t i = 0; i < count; i++)
        x[i] = (float)((double)x[i] / sum);
}

static void run_head(void *arg, int index, int thread)
{
    const struct job *job = arg;
    struct scratch *s = &job->c->scratch[thread];
    uint32_t kv_head = (uint32_t)(index / (job->q_heads / job->kv_heads));
    const struct attn_list *list = &job->query->lists[job->query->shared_list ? 0 : kv_head];
    const float *q = job->q + (size_t)index * (size_t)job->head_dim;
    float *out = job->weights + (size_t)index * job->stride;
    for (uint32_t first = 0; first < list->count; first += ATTN_CHUNK) {
        uint32_t left = list->count - first, length = left < ATTN_CHUNK ? left : ATTN_CHUNK;
        address_pieces(s->piece, job->query->kv, kv_head, list->item, first, length);
        struct attn_tile tile = {.piece = s->piece,
                                 .count = (int)length,
                                 .piece_bytes = 2 * job->head_dim, /* K alone */
                                 .type = job->query->kv->type,
                                 .head_dim = job->head_dim,
                                 .q = &q,
                                 .rows = 1,
                                 .stride = ATTN_CHUNK,
                                 .scale = job->scale};
        job->kernels->attn_scores(s->scores, &tile);
        for (uint32_t i = 0; i < length; i++)
            out[first + i] = s->scores[i];
    }
    softmax(out, list->count);
}

void compute_attention_weights(struct compute *c, float *weights, size_t stride, const float *q,
                               const struct attn_query *query, int q_heads, int kv_heads, int head_dim,
                               float scale)
{
    struct job job = {
        c, kernels_for_head(c, head_dim), weights, stride, q, query, q_heads, kv_heads, head_dim, scale};
    pool_run(c->pool, q_heads, run_head, &job);
}
