/* The double's row-wise operators and products: the CPU's, with outputs rounded as the kernels round. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "tests/fakegpu/fakegpu.h"

void fakegpu_store(void *out, enum dtype type, uint64_t at, const float *x, uint64_t count)
{
    uint16_t *narrow = (uint16_t *)out + at;
    if (type == DTYPE_F32)
        memcpy((float *)out + at, x, count * sizeof *x);
    else if (type == DTYPE_BF16)
        for (uint64_t i = 0; i < count; i++)
            narrow[i] = dtype_f32_to_bf16(x[i]);
    else
        for (uint64_t i = 0; i < count; i++)
            narrow[i] = dtype_f32_to_f16(x[i]);
}

void fakegpu_load(float *out, const void *from, enum dtype type, uint64_t at, uint64_t count)
{
    const uint16_t *narrow = (const uint16_t *)from + at;
    if (type == DTYPE_F32)
        memcpy(out, (const float *)from + at, count * sizeof *out);
    else if (type == DTYPE_BF16)
        for (uint64_t i = 0; i < count; i++)
            out[i] = dtype_bf16_to_f32(narrow[i]);
    else
        for (uint64_t i = 0; i < count; i++)
            out[i] = dtype_f16_to_f32(narrow[i]);
}

static void run_embed(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_embed *e = argument;
    struct matrix table = {DTYPE_BF16, e->rows, e->cols, e->table};
    float *row = fakegpu_scratch(worker, 0, e->cols * sizeof *row);
    for (uint32_t t = 0; t < e->n; t++) {
        uint32_t id = e->ids[t] < e->rows ? e->ids[t] : e->rows - 1;
        compute_embed(worker->compute, row, &table, &id, 1);
        fakegpu_store(e->out, e->out_type, (uint64_t)t * e->cols, row, e->cols);
    }
}

int fakegpu_embed(const struct cuda_embed *e, struct CUstream_st *stream)
{
    if (!fakegpu_is_output(e->out_type) || e->cols == 0 || e->cols % 8 || e->rows == 0 ||
        !fakegpu_aligned(e->out, 16) || !fakegpu_aligned(e->table, 16))
        return -EINVAL;
    return e->n ? FAKEGPU_LAUNCH(stream, run_embed, e, e->out, e->table, e->ids) : 0;
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static void run_mix(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_mix *m = argument;
    float *row = fakegpu_scratch(worker, 0, m->dim * sizeof *row);
    float *sums = fakegpu_scratch(worker, 1, (size_t)m->views * m->dim * sizeof *sums);
    for (uint32_t t = 0; t < m->n; t++) {
        uint32_t at = smaller(m->at[t], m->id_count - 1), reach = smaller(m->positions[t], at);
        memset(sums, 0, (size_t)m->views * m->dim * sizeof *sums);
        for (uint32_t lag = 0; lag < m->tap_count && lag <= reach; lag++) {
            uint32_t id = smaller(m->ids[at - lag], m->rows - 1);
            fakegpu_load(row, m->table, DTYPE_BF16, (uint64_t)id * m->dim, m->dim);
            for (uint32_t v = 0; v < m->views; v++)
                for (uint32_t i = 0; i < m->dim; i++)
                    sums[(size_t)v * m->dim + i] +=
                        m->taps[v * m->tap_count + lag] * m->row_scale[id] * row[i];
        }
        for (uint32_t v = 0; v < m->views; v++)
            for (uint32_t i = 0; i < m->dim; i++)
                sums[(size_t)v * m->dim + i] *= m->weight[i];
        fakegpu_store(m->out, DTYPE_BF16, (uint64_t)t * m->views * m->dim, sums, (uint64_t)m->views * m->dim);
    }
}

int fakegpu_mix(const struct cuda_mix *m, struct CUstream_st *stream)
{
    if (m->views == 0 || m->views > CUDA_MIX_VIEWS_MAX || m->tap_count == 0 ||
        m->tap_count > CUDA_MIX_TAPS_MAX || m->dim == 0 || m->dim % 4 || m->rows == 0 || m->id_count == 0 ||
        !fakegpu_aligned(m->out, 16) || !fakegpu_aligned(m->table, 16) || !fakegpu_aligned(m->weight, 16))
        return -EINVAL;
    return m->n ? FAKEGPU_LAUNCH(stream, run_mix, m, m->out, m->table, m->row_scale, m->taps, m->weight,
                                 m->ids, m->at, m->positions)
                : 0;
}

static void run_rmsnorm(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_rmsnorm *r = argument;
    float *weight = fakegpu_scratch(worker, 0, r->dim * sizeof *weight);
    float *row = fakegpu_scratch(worker, 1, r->dim * sizeof *row);
    fakegpu_load(weight, r->weight, r->weight_type, 0, r->dim);
    for (uint32_t t = 0; t < r->n; t++) {
        float *x = r->x + (uint64_t)t * r->dim;
        if (r->add)
            compute_add(worker->compute, x, r->add + (uint64_t)t * r->dim, r->dim);
        compute_rmsnorm(worker->compute, row, x, weight, 1, (int)r->dim, r->eps);
        fakegpu_store(r->out, r->out_type, (uint64_t)t * r->dim, row, r->dim);
    }
}

int fakegpu_rmsnorm(const struct cuda_rmsnorm *r, struct CUstream_st *stream)
{
    if (!fakegpu_is_output(r->out_type) || !fakegpu_is_output(r->weight_type) || r->dim == 0 || r->dim % 4 ||
        !fakegpu_aligned(r->x, 16) || !fakegpu_aligned(r->add, 16) || !fakegpu_aligned(r->out, 16) ||
        !fakegpu_aligned(r->weight, 16))
        return -EINVAL;
    return r->n ? FAKEGPU_LAUNCH(stream, run_rmsnorm, r, r->out, r->x, r->add, r->weight) : 0;
}

static void run_headnorm(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_headnorm *h = argument;
    float *weight = fakegpu_scratch(worker, 0, h->dim * sizeof *weight);
    fakegpu_load(weight, h->weight, h->weight_type, 0, h->dim);
    for (uint32_t t = 0; t < h->n; t++) {
        float *x = h->x + t * h->stride;
        compute_rmsnorm(worker->compute, x, x, weight, (int)h->heads, (int)h->dim, h->eps);
    }
}

int fakegpu_headnorm(const struct cuda_headnorm *h, struct CUstream_st *stream)
{
    if (!fakegpu_is_output(h->weight_type) || h->dim == 0 || h->dim % 4 || h->stride % 4 ||
        h->stride < (uint64_t)h->heads * h->dim || !fakegpu_aligned(h->x, 16) ||
        !fakegpu_aligned(h->weight, 16))
        return -EINVAL;
    return h->n && h->heads ? FAKEGPU_LAUNCH(stream, run_headnorm, h, h->x, h->weight) : 0;
}

static void run_swiglu(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_swiglu *s = argument;
    float *row = fakegpu_scratch(worker, 0, s->dim * sizeof *row);
    for (uint32_t t = 0; t < s->n; t++) {
        compute_swiglu(worker->compute, row, s->gate + t * s->stride, s->up + t * s->stride, 1, (int)s->dim);
        fakegpu_store(s->out, s->out_type, (uint64_t)t * s->dim, row, s->dim);
    }
}

int fakegpu_swiglu(const struct cuda_swiglu *s, struct CUstream_st *stream)
{
    if (!fakegpu_is_output(s->out_type) || s->dim == 0 || s->dim % 4 || s->stride % 4 || s->stride < s->dim ||
        s->n > 65535 || !fakegpu_aligned(s->out, 16) || !fakegpu_aligned(s->gate, 16) ||
        !fakegpu_aligned(s->up, 16))
        return -EINVAL;
    return s->n ? FAKEGPU_LAUNCH(stream, run_swiglu, s, s->out, s->gate, s->up) : 0;
}

static void run_put_rows(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_put_rows *p = argument;
    (void)worker;
    for (uint32_t t = 0; t < p->n; t++)
        if (p->rows[t] < p->row_count)
            fakegpu_store(p->out, DTYPE_BF16, p->rows[t] * p->stride, p->x + (uint64_t)t * p->dim, p->dim);
}

int fakegpu_put_rows(const struct cuda_put_rows *p, struct CUstream_st *stream)
{
    if (p->dim == 0 || p->dim % 4 || p->stride % 4 || p->stride < p->dim || !fakegpu_aligned(p->out, 8) ||
        !fakegpu_aligned(p->x, 16))
        return -EINVAL;
    return p->n ? FAKEGPU_LAUNCH(stream, run_put_rows, p, p->out, p->x, p->rows) : 0;
}

struct narrowing {
    void *out;
    const float *x;
    uint64_t count;
    enum dtype type;
};

static void run_narrow(struct fakegpu_worker *worker, void *argument)
{
    const struct narrowing *n = argument;
    (void)worker;
    fakegpu_store(n->out, n->type, 0, n->x, n->count);
}

int fakegpu_narrow(void *out, enum dtype out_type, const float *x, uint64_t count, struct CUstream_st *stream)
{
    struct narrowing n = {out, x, count, out_type};
    if (!fakegpu_is_16bit(out_type))
        return -EINVAL;
    return count ? FAKEGPU_LAUNCH(stream, run_narrow, &n, out, x) : 0;
}

static void run_rope_angles(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_rope_angles *a = argument;
    uint32_t half = a->dims / 2;
    (void)worker;
    for (uint64_t i = 0; i < (uint64_t)a->n * half; i++) {
        double angle = (double)a->positions[i / half] * (double)a->inv_freq[i % half];
        a->table[2 * i] = (float)(cos(angle) * (double)a->scale);
        a->table[2 * i + 1] = (float)(sin(angle) * (double)a->scale);
    }
}

int fakegpu_rope_angles(const struct cuda_rope_angles *a, struct CUstream_st *stream)
{
    if (a->dims == 0 || a->dims % 2)
        return -EINVAL;
    return a->n ? FAKEGPU_LAUNCH(stream, run_rope_angles, a, a->table, a->positions, a->inv_freq) : 0;
}

static void rotate(const struct cuda_rope *r, uint64_t first, uint64_t second, const float *angle)
{
    float a, b;
    fakegpu_load(&a, r->x, r->type, first, 1);
    fakegpu_load(&b, r->x, r->type, second, 1);
    float x = a * angle[0] - b * angle[1], y = a * angle[1] + b * angle[0];
    fakegpu_store(r->x, r->type, first, &x, 1);
    fakegpu_store(r->x, r->type, second, &y, 1);
}

static void run_rope(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_rope *r = argument;
    uint32_t half = r->dims / 2;
    (void)worker;
    for (uint64_t t = 0; t < r->n; t++)
        for (uint32_t h = 0; h < r->heads; h++)
            for (uint32_t j = 0; j < half; j++) {
                uint64_t first = t * r->stride + (uint64_t)h * r->head_dim + (r->adjacent ? 2 * j : j);
                rotate(r, first, r->adjacent ? first + 1 : first + half, r->table + (t * half + j) * 2);
            }
}

int fakegpu_rope(const struct cuda_rope *r, struct CUstream_st *stream)
{
    if (!fakegpu_is_output(r->type) || r->dims == 0 || r->dims % 2 || r->dims > r->head_dim ||
        r->stride < (uint64_t)r->heads * r->head_dim || !fakegpu_aligned(r->table, 8))
        return -EINVAL;
    return r->n && r->heads ? FAKEGPU_LAUNCH(stream, run_rope, r, r->x, r->table) : 0;
}

/* ---- products ------------------------------------------------------------------------------------------ */

struct product_argument {
    struct cuda_matmul_shape shape;
    struct cuda_matmul matmul;
};

static bool same_plan(const struct cuda_matmul_shape *a, const struct cuda_matmul_shape *b)
{
    return a->rows == b->rows && a->cols == b->cols && a->n == b->n && a->out_type == b->out_type &&
           a->has_bias == b->has_bias && a->accumulate == b->accumulate;
}

static bool is_prepared(struct gpu *gpu, const struct cuda_matmul_shape *shape)
{
    bool found = false;
    pthread_mutex_lock(&gpu->mutex);
    for (size_t i = 0; i < gpu->shape_count && !found; i++)
        found = same_plan(&gpu->shapes[i], shape);
    pthread_mutex_unlock(&gpu->mutex);
    return found;
}

int fakegpu_matmul_prepare(struct gpu *gpu, const struct cuda_matmul_shape *shape, struct err *err)
{
    if (shape->rows == 0 || shape->cols == 0 || shape->cols % 8 || shape->n == 0 ||
        !fakegpu_is_output(shape->out_type))
        return err_set(err, -EINVAL, "product of %u x %u with %u tokens: not served", shape->rows,
                       shape->cols, shape->n);
    if (is_prepared(gpu, shape))
        return 0;
    pthread_mutex_lock(&gpu->mutex);
    gpu->shapes = mem_resize(gpu->shapes, gpu->shape_count + 1, sizeof *gpu->shapes);
    gpu->shapes[gpu->shape_count++] = *shape;
    pthread_mutex_unlock(&gpu->mutex);
    return 0;
}

static void run_matmul(struct fakegpu_worker *worker, void *argument)
{
    const struct product_argument *a = argument;
    const struct cuda_matmul_shape *s = &a->shape;
    struct matrix w = {DTYPE_BF16, s->rows, s->cols, a->matmul.w};
    size_t count = (size_t)s->n * s->rows;
    float *x = fakegpu_scratch(worker, 0, (size_t)s->n * s->cols * sizeof *x);
    float *out = fakegpu_scratch(worker, 1, count * sizeof *out);
    float *bias = fakegpu_scratch(worker, 2, s->rows * sizeof *bias);
    fakegpu_load(x, a->matmul.x, DTYPE_BF16, 0, (uint64_t)s->n * s->cols);
    if (s->has_bias)
        fakegpu_load(bias, a->matmul.bias, s->out_type, 0, s->rows);
    compute_matmul(worker->compute, out, &w, x, s->has_bias ? bias : NULL, (int)s->n);
    if (s->accumulate) {
        float *before = fakegpu_scratch(worker, 3, count * sizeof *before);
        fakegpu_load(before, a->matmul.out, s->out_type, 0, count);
        compute_add(worker->compute, out, before, count);
    }
    fakegpu_store(a->matmul.out, s->out_type, 0, out, count);
}

/* A plan that nobody prepared is made here, but not inside a capture: there it would fail on a GPU. */
int fakegpu_matmul(struct gpu *gpu, const struct cuda_matmul_shape *shape, const struct cuda_matmul *matmul,
                   struct CUstream_st *stream)
{
    struct product_argument a = {*shape, *matmul};
    if (shape->n == 0)
        return 0;
    if (!!shape->has_bias != (matmul->bias != NULL) || !fakegpu_aligned(matmul->w, 16) ||
        !fakegpu_aligned(matmul->x, 16) || !fakegpu_aligned(matmul->out, 16))
        return -EINVAL;
    if (shape->n > 2 && fakegpu_capturing(stream) && !is_prepared(gpu, shape))
        return -EINVAL;
    int r = fakegpu_matmul_prepare(gpu, shape, NULL);
    return r < 0 ? r
                 : FAKEGPU_LAUNCH(stream, run_matmul, &a, matmul->out, matmul->w, matmul->x, matmul->bias);
}

/* ---- products of few tokens ---- */

enum { PRODUCT_BLOCKS = 3 }; /* of which one has sums of squares, the others zeros */

uint32_t fakegpu_product_blocks(uint32_t rows)
{
    return rows ? PRODUCT_BLOCKS : 0;
}

/* The factors of a norm that the product was to wait for. */
static void scale_tokens(const struct cuda_product *p, float *out)
{
    for (uint32_t t = 0; p->squares && t < p->n; t++) {
        float sum = 0;
        for (uint32_t b = 0; b < p->square_blocks; b++)
            sum += p->squares[b * CUDA_PRODUCT_TOKENS + t];
        for (uint32_t r = 0; r < p->rows; r++)
            out[(size_t)t * p->rows + r] /= sqrtf(sum / (float)p->cols + p->eps);
    }
}

/* What the next product takes. */
static void put_next(const struct cuda_product *p, const float *out, float *row)
{
    memset(p->next_squares, 0, PRODUCT_BLOCKS * CUDA_PRODUCT_TOKENS * sizeof *p->next_squares);
    for (uint32_t t = 0; t < p->n; t++) {
        for (uint32_t r = 0; r < p->rows; r++) {
            float v = out[(size_t)t * p->rows + r];
            p->next_squares[t] += v * v;
            row[r] = v * p->next_weight[r];
        }
        fakegpu_store(p->next, DTYPE_BF16, (uint64_t)t * p->rows, row, p->rows);
    }
}

static void put_gated(struct fakegpu_worker *worker, const struct cuda_product *p, const float *out,
                      float *row)
{
    uint32_t half = p->rows / 2;
    for (uint32_t t = 0; t < p->n; t++) {
        const float *gate = out + (size_t)t * p->rows;
        compute_swiglu(worker->compute, row, gate, gate + half, 1, (int)half);
        fakegpu_store(p->gated, DTYPE_BF16, (uint64_t)t * half, row, half);
    }
}

static void run_product(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_product *p = argument;
    struct matrix w = {DTYPE_BF16, p->rows, p->cols, p->w};
    size_t count = (size_t)p->n * p->rows;
    float *x = fakegpu_scratch(worker, 0, (size_t)p->n * p->cols * sizeof *x);
    float *out = fakegpu_scratch(worker, 1, count * sizeof *out);
    float *row = fakegpu_scratch(worker, 2, p->rows * sizeof *row);
    fakegpu_load(x, p->x, DTYPE_BF16, 0, (uint64_t)p->n * p->cols);
    compute_matmul(worker->compute, out, &w, x, NULL, (int)p->n);
    scale_tokens(p, out);
    if (p->gated) {
        put_gated(worker, p, out, row);
        return;
    }
    for (size_t i = 0; i < count; i++)
        out[i] += (p->bias ? p->bias[i % p->rows] : 0) + (p->accumulate ? p->out[i] : 0);
    memcpy(p->out, out, count * sizeof *out);
    if (p->next)
        put_next(p, out, row);
}

int fakegpu_product(const struct cuda_product *p, struct CUstream_st *stream)
{
    if (p->n > CUDA_PRODUCT_TOKENS || p->rows == 0 || p->cols == 0 || p->cols % CUDA_PRODUCT_COLUMNS ||
        !fakegpu_aligned(p->w, 16) || !fakegpu_aligned(p->x, 16) ||
        (p->gated && (p->rows % 16 || p->accumulate || p->bias || p->next)) ||
        (p->next && (!p->next_weight || !p->next_squares)))
        return -EINVAL;
    return p->n ? FAKEGPU_LAUNCH(stream, run_product, p, p->out, p->w, p->x, p->bias, p->squares, p->gated,
                                 p->next, p->next_weight, p->next_squares)
                : 0;
}
