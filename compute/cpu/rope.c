/* compute_rope: rotates query and key heads, with a cache of cos and sin by position.
 *
 * The angle position * inv_freq is taken in double: at position 131072 a float32 angle is off by up to 0.004.
 * Owner: the compute object's thread fills the cache; items of the pool only read it. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/pool.h"
#include "compute/cpu/kernels.h"

enum { ITEM_FLOATS = 1 << 14 };

struct job {
    struct compute *c;
    float *x;
    const struct rope *rope;
    const uint32_t *positions;
    int n, heads, head_dim, tokens_per_item;
};

/* A cache made for other frequencies is of no use; one process has one set, so this happens once. */
static void match_cache(struct rope_cache *cache, const struct rope *rope)
{
    size_t bytes = (size_t)rope->dims / 2 * sizeof *rope->inv_freq;
    if (cache->dims == rope->dims && cache->scale == rope->scale &&
        memcmp(cache->inv_freq, rope->inv_freq, bytes) == 0)
        return;
    cache->dims = rope->dims;
    cache->scale = rope->scale;
    memcpy(cache->inv_freq, rope->inv_freq, bytes);
    uint32_t slots = ROPE_TABLE / (uint32_t)rope->dims;
    cache->slots = slots < 1024 ? slots : 1024;
    memset(cache->tag, 0, cache->slots * sizeof *cache->tag);
}

static float *slot_of(struct rope_cache *cache, uint32_t position)
{
    return cache->table + (size_t)(position % cache->slots) * (size_t)cache->dims;
}

static void fill_slot(struct rope_cache *cache, uint32_t position)
{
    float *table = slot_of(cache, position);
    for (int j = 0; j < cache->dims / 2; j++) {
        double sin_angle, cos_angle;
        sincos((double)position * (double)cache->inv_freq[j], &sin_angle, &cos_angle);
        table[2 * j] = (float)(cos_angle * (double)cache->scale);
        table[2 * j + 1] = (float)(sin_angle * (double)cache->scale);
    }
}

/* Length of the longest run of tokens whose positions do not need one slot for two of them. */
static int fill_run(struct rope_cache *cache, const uint32_t *positions, int n)
{
    cache->run++;
    int t = 0;
    for (; t < n; t++) {
        uint32_t slot = positions[t] % cache->slots;
        uint64_t tag = (uint64_t)positions[t] + 1;
        if (cache->tag[slot] != tag) {
            if (cache->stamp[slot] == cache->run)
                break;
            fill_slot(cache, positions[t]);
            cache->tag[slot] = tag;
        }
        cache->stamp[slot] = cache->run;
    }
    return t;
}

static void rotate(float *x, const float *table, const struct rope *rope)
{
    int half = rope->dims / 2;
    int step = rope->pairs == ROPE_PAIRS_ADJACENT ? 2 : 1,
        other = rope->pairs == ROPE_PAIRS_ADJACENT ? 1 : half;
    for (int j = 0; j < half; j++) {
        float a = x[j * step], b = x[j * step + other], cosine = table[2 * j], sine = table[2 * j + 1];
        x[j * step] = a * cosine - b * sine;
        x[j * step + other] = a * sine + b * cosine;
    }
}

static void rope_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct job *job = arg;
    int first = index * job->tokens_per_item;
    int end = job->n - first < job->tokens_per_item ? job->n : first + job->tokens_per_item;
    for (int t = first; t < end; t++) {
        const float *table = slot_of(job->c->rope, job->positions[t]);
        for (int h = 0; h < job->heads; h++)
            rotate(job->x + ((size_t)t * (size_t)job->heads + (size_t)h) * (size_t)job->head_dim, table,
                   job->rope);
    }
}

void compute_rope(struct compute *c, float *x, const struct rope *rope, const uint32_t *positions, int n,
                  int heads, int head_dim)
{
    CHECK(rope->dims > 0 && rope->dims % 2 == 0 && rope->dims <= head_dim && head_dim <= HEAD_DIM_MAX);
    match_cache(c->rope, rope);
    struct job job = {.c = c, .rope = rope, .heads = heads, .head_dim = head_dim};
    job.tokens_per_item = ITEM_FLOATS / (heads * head_dim) + 1;
    for (int t = 0; t < n; t += job.n) {
        job.x = x + (size_t)t * (size_t)heads * (size_t)head_dim;
        job.positions = positions + t;
        job.n = fill_run(c->rope, positions + t, n - t);
        pool_run(c->pool, (job.n + job.tokens_per_item - 1) / job.tokens_per_item, rope_item, &job);
    }
}
