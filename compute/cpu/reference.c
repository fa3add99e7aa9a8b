/* The kernels in plain C: what every other path is checked against, and the fallback of old processors.
 *
 * Stateless; any thread. Must keep the order of summation that kernels.h states, in each kernel. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "compute/cpu/kernels.h"

enum { EXPAND_COLS = 256 };

static inline uint16_t load_u16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline float load_f16(const uint8_t *p)
{
    return dtype_f16_to_f32(load_u16(p));
}

static inline uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* w = d * q + m. The product is exact in float32 (11 bits of d, at most 8 of q), so it rounds once, as a
 * fused multiply-add does. */
static void expand_q4(float *out, const uint8_t *nibbles, float d, float m, int offset)
{
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)((nibbles[i] & 15) - offset) + m;
        out[i + 16] = d * (float)((nibbles[i] >> 4) - offset) + m;
    }
}

static void expand_q5(float *out, const uint8_t *nibbles, uint32_t high, float d, float m, int offset)
{
    for (int i = 0; i < 16; i++) {
        int low = (nibbles[i] & 15) | (int)(high >> i & 1) << 4;
        int up = (nibbles[i] >> 4) | (int)(high >> (i + 16) & 1) << 4;
        out[i] = d * (float)(low - offset) + m;
        out[i + 16] = d * (float)(up - offset) + m;
    }
}

static void expand_q8(float *out, const uint8_t *block)
{
    float d = load_f16(block);
    for (int i = 0; i < 32; i++)
        out[i] = d * (float)(int8_t)block[2 + i];
}

static void expand_block(float *out, enum dtype type, const uint8_t *b)
{
    switch (type) {
    case DTYPE_Q4_0:
        expand_q4(out, b + 2, load_f16(b), 0, 8);
        break;
    case DTYPE_Q4_1:
        expand_q4(out, b + 4, load_f16(b), load_f16(b + 2), 0);
        break;
    case DTYPE_Q5_0:
        expand_q5(out, b + 6, load_u32(b + 2), load_f16(b), 0, 16);
        break;
    case DTYPE_Q5_1:
        expand_q5(out, b + 8, load_u32(b + 4), load_f16(b), load_f16(b + 2), 0);
        break;
    case DTYPE_Q8_0:
        expand_q8(out, b);
        break;
    default:
        CHECK(!"a weight type that compute has no kernel for");
    }
}

static void expand(float *out, enum dtype type, const uint8_t *row, uint32_t count)
{
    if (type == DTYPE_F32) {
        memcpy(out, row, count * sizeof *out);
    } else if (type == DTYPE_F16) {
        for (uint32_t i = 0; i < count; i++)
            out[i] = load_f16(row + 2 * (size_t)i);
    } else if (type == DTYPE_BF16) {
        for (uint32_t i = 0; i < count; i++)
            out[i] = dtype_bf16_to_f32(load_u16(row + 2 * (size_t)i));
    } else {
        size_t block_bytes = dtype_info(type)->block_bytes;
        for (uint32_t i = 0; i < count; i += 32)
            expand_block(out + i, type, row + i / 32 * block_bytes);
    }
}

static void lanes_add(float acc[8], const float *a, const float *b, uint32_t count)
{
    uint32_t i = 0;
    for (; i + 8 <= count; i += 8)
        for (int j = 0; j < 8; j++)
            acc[j] += a[i + (uint32_t)j] * b[i + (uint32_t)j];
    for (int j = 0; i < count; i++, j++)
        acc[j] += a[i] * b[i];
}

static float lanes_sum(const float a[8])
{
    return ((a[0] + a[1]) + (a[2] + a[3])) + ((a[4] + a[5]) + (a[6] + a[7]));
}

static void dot_rows(float *out, const struct matrix *w, uint32_t first_row, uint32_t rows, const float *x)
{
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    const struct dtype_info *info = dtype_info(w->type);
    const uint8_t *row = (const uint8_t *)w->data + first_row * row_bytes;
    for (uint32_t r = 0; r < rows; r++, row += row_bytes) {
        float acc[8] = {0}, buf[EXPAND_COLS];
        for (uint32_t c = 0; c < w->cols; c += EXPAND_COLS) {
            uint32_t count = w->cols - c < EXPAND_COLS ? w->cols - c : EXPAND_COLS;
            expand(buf, w->type, row + (size_t)(c / info->block_len) * info->block_bytes, count);
            lanes_add(acc, buf, x + c, count);
        }
        out[r] = lanes_sum(acc);
    }
}

static void matmul_tile(const struct matmul_tile *m)
{
    for (int t = 0; t < m->tokens; t++)
        for (int r = 0; r < m->rows; r++) {
            float *acc = m->acc + (t * MATMUL_PANEL + r) * 8;
            if (m->first)
                memset(acc, 0, 8 * sizeof *acc);
            lanes_add(acc, m->panel + r * MATMUL_COLS, m->x + (size_t)t * m->x_stride, m->cols);
            if (!m->last)
                continue;
            float sum = lanes_sum(acc);
            m->out[(size_t)t * m->out_stride + (size_t)r] = m->bias ? sum + m->bias[r] : sum;
        }
}

static void rmsnorm(float *out, const float *x, const float *weight, int dim, float eps)
{
    double sum = 0;
    for (int i = 0; i < dim; i++)
        sum += (double)x[i] * x[i];
    float factor = (float)(1.0 / sqrt(sum / dim + (double)eps));
    for (int i = 0; i < dim; i++)
        out[i] = x[i] * factor * weight[i];
}

static void swiglu(float *out, const float *gate, const float *up, int dim)
{
    for (int i = 0; i < dim; i++)
        out[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
}

static void narrow(uint8_t *out, enum dtype type, const float *x, int count)
{
    for (int i = 0; i < count; i++) {
        uint16_t v = type == DTYPE_BF16 ? dtype_f32_to_bf16(x[i]) : dtype_f32_to_f16(x[i]);
        memcpy(out + 2 * i, &v, sizeof v);
    }
}

static void attn_scores(float *scores, const struct attn_tile *t)
{
    float k[HEAD_DIM_MAX];
    for (int i = 0; i < t->count; i++) {
        expand(k, t->type, t->piece[i], (uint32_t)t->head_dim);
        for (int r = 0; r < t->rows; r++) {
            float acc[8] = {0};
            lanes_add(acc, k, t->q[r], (uint32_t)t->head_dim);
            scores[(size_t)r * t->stride + (size_t)i] = lanes_sum(acc) * t->scale;
        }
    }
}

static void attn_values(float *acc, const float *scores, const struct attn_tile *t)
{
    float v[HEAD_DIM_MAX];
    memset(acc, 0, (size_t)t->rows * (size_t)t->head_dim * sizeof *acc);
    for (int i = 0; i < t->count; i++) {
        expand(v, t->type, t->piece[i] + 2 * t->head_dim, (uint32_t)t->head_dim);
        for (int r = 0; r < t->rows; r++) {
            float p = scores[(size_t)r * t->stride + (size_t)i], *a = acc + r * t->head_dim;
            for (int d = 0; d < t->head_dim; d++)
                a[d] += p * v[d];
        }
    }
}

static float softmax_part(float *x, int count, float *ret_max)
{
    float max = -INFINITY, sum = 0;
    for (int i = 0; i < count; i++)
        max = x[i] > max ? x[i] : max;
    for (int i = 0; i < count; i++) {
        x[i] = expf(x[i] - max);
        sum += x[i];
    }
    *ret_max = max;
    return sum;
}

static void pool_weights(float *out, const float *e, float factor, int count, enum pool_kind pool, int first)
{
    for (int i = 0; i < count; i++) {
        float v = e[i] * factor;
        if (first)
            out[i] = v;
        else if (pool == POOL_MEAN)
            out[i] += v;
        else if (v > out[i] || v != v)
            out[i] = v;
    }
}

const struct kernels kernels_reference = {
    .name = "reference",
    .expand = expand,
    .dot_rows = dot_rows,
    .matmul_tile = matmul_tile,
    .rmsnorm = rmsnorm,
    .swiglu = swiglu,
    .narrow = narrow,
    .attn_scores = attn_scores,
    .attn_values = attn_values,
    .softmax_part = softmax_part,
    .pool_weights = pool_weights,
    .head_dim_multiple = 1,
};
