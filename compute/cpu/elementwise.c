/* Drivers of operators that work row by row: rmsnorm, swiglu, add, and the writes of KV pieces and keys.
 *
 * Called by the owner's thread. Small inputs run on it alone, since waking the pool costs more than they
 * do. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/check.h"
#include "base/pool.h"
#include "compute/cpu/address.h"
#include "compute/cpu/kernels.h"

enum { ITEM_FLOATS = 1 << 14 };

struct job {
    const struct compute *c;
    float *out;
    const float *a, *b;
    int n, dim, rows_per_item;
    float eps;
    size_t count;
};

static void run_rows(struct job *job, void (*body)(void *, int, int))
{
    job->rows_per_item = ITEM_FLOATS / (job->dim > 0 ? job->dim : 1) + 1;
    pool_run(job->c->pool, (job->n + job->rows_per_item - 1) / job->rows_per_item, body, job);
}

static int rows_end(const struct job *job, int first)
{
    return job->n - first < job->rows_per_item ? job->n : first + job->rows_per_item;
}

static void rmsnorm_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct job *job = arg;
    int first = index * job->rows_per_item, end = rows_end(job, first);
    for (int t = first; t < end; t++) {
        size_t at = (size_t)t * (size_t)job->dim;
        job->c->kernels->rmsnorm(job->out + at, job->a + at, job->b, job->dim, job->eps);
    }
}

void compute_rmsnorm(struct compute *c, float *out, const float *x, const float *weight, int n, int dim,
                     float eps)
{
    struct job job = {.c = c, .out = out, .a = x, .b = weight, .n = n, .dim = dim, .eps = eps};
    run_rows(&job, rmsnorm_item);
}

static void swiglu_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct job *job = arg;
    int first = index * job->rows_per_item, end = rows_end(job, first);
    for (int t = first; t < end; t++) {
        size_t at = (size_t)t * (size_t)job->dim;
        job->c->kernels->swiglu(job->out + at, job->a + at, job->b + at, job->dim);
    }
}

void compute_swiglu(struct compute *c, float *out, const float *gate, const float *up, int n, int dim)
{
    struct job job = {.c = c, .out = out, .a = gate, .b = up, .n = n, .dim = dim};
    run_rows(&job, swiglu_item);
}

static void add_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct job *job = arg;
    size_t first = (size_t)index * ITEM_FLOATS;
    size_t end = job->count - first < ITEM_FLOATS ? job->count : first + ITEM_FLOATS;
    for (size_t i = first; i < end; i++)
        job->out[i] += job->b[i];
}

void compute_add(struct compute *c, float *x, const float *y, size_t count)
{
    struct job job = {.c = c, .out = x, .b = y, .count = count};
    pool_run(c->pool, (int)((count + ITEM_FLOATS - 1) / ITEM_FLOATS), add_item, &job);
}

void compute_kv_write(struct compute *c, const struct kv_place *places, const float *k, const float *v, int n,
                      int kv_heads, int head_dim)
{
    for (int t = 0; t < n; t++)
        for (int h = 0; h < kv_heads; h++) {
            const struct kv_place *place = &places[t];
            uint32_t item = place->item[place->shared_item ? 0 : h];
            uint8_t *piece = address_piece(place->kv, (uint32_t)h, item);
            size_t at = ((size_t)t * (size_t)kv_heads + (size_t)h) * (size_t)head_dim;
            c->kernels->narrow(piece, place->kv->type, k + at, head_dim);
            c->kernels->narrow(piece + 2 * (size_t)head_dim, place->kv->type, v + at, head_dim);
        }
}

void compute_keys_append(struct compute *c, const struct key_view *view, const float *k, int n, int kv_heads,
                         int head_dim)
{
    for (int t = 0; t < n; t++)
        for (int h = 0; h < kv_heads; h++) {
            uint32_t position = view->count + (uint32_t)t;
            const uint8_t *key = address_key(view, (uint32_t)h, position, head_dim);
            size_t at = ((size_t)t * (size_t)kv_heads + (size_t)h) * (size_t)head_dim;
            c->kernels->narrow((uint8_t *)(uintptr_t)key, DTYPE_F16, k + at, head_dim);
        }
}

/* Bits of magnitudes are ordered as the numbers are, NaN behind all others: none is lost. */
static float largest(const float *k, int dim)
{
    uint32_t most = 0;
    for (int i = 0; i < dim; i++) {
        uint32_t bits;
        memcpy(&bits, &k[i], sizeof bits);
        bits &= 0x7fffffff;
        most = bits > most ? bits : most;
    }
    float ret;
    memcpy(&ret, &most, sizeof ret);
    return ret;
}

uint16_t compute_key_quantize(int8_t *q, const float *k, int dim)
{
    enum { MOST = 127, F16_INFINITY = 0x7c00, F16_NAN = 0x7e00 };
    uint16_t scale = dtype_f32_to_f16(largest(k, dim) / MOST);
    bool finite = scale < F16_INFINITY;
    float unit = dtype_f16_to_f32(scale);
    for (int i = 0; i < dim; i++) {
        float x = finite && scale ? rintf(k[i] / unit) : 0;
        q[i] = (int8_t)(x < -MOST ? -MOST : x > MOST ? MOST : x);
    }
    return finite ? scale : F16_NAN;
}

static void round_rows(void *arg, int index, int thread)
{
    const struct job *job = arg;
    int first = index * job->rows_per_item;
    int8_t q[HEAD_DIM_MAX];
    (void)thread;
    for (int row = first; row < rows_end(job, first); row++) {
        float *k = job->out + (size_t)row * (size_t)job->dim;
        float unit = dtype_f16_to_f32(compute_key_quantize(q, k, job->dim));
        for (int i = 0; i < job->dim; i++)
            k[i] = (float)q[i] * unit; /* exact: f16 rounds it once */
    }
}

void compute_keys_round(struct compute *c, float *k, int n, int dim)
{
    struct job job = {.c = c, .out = k, .n = n, .dim = dim};
    CHECK(dim > 0 && dim <= HEAD_DIM_MAX);
    run_rows(&job, round_rows);
}
