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

static void expand_iq4_nl(float *out, const uint8_t *b)
{
    static const int8_t values[16] = {IQ4_NL_VALUES};
    float d = load_f16(b);
    for (int i = 0; i < 16; i++) {
        out[i] = d * (float)values[b[2 + i] & 15];
        out[i + 16] = d * (float)values[b[2 + i] >> 4];
    }
}

/* 6-bit scale and minimum of sub-block i of Q4_K and Q5_K. */
static void scale_min_of(const uint8_t *packed, int i, int *ret_scale, int *ret_min)
{
    if (i < 4) {
        *ret_scale = packed[i] & 63;
        *ret_min = packed[i + 4] & 63;
    } else {
        *ret_scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6) << 4;
        *ret_min = packed[i + 4] >> 4 | (packed[i] >> 6) << 4;
    }
}

/* Q4_K: d, dmin, scales, quants; Q5_K has 32 bytes of fifth bits before the quants. Sub-block i of 32. */
static void expand_q45_k(float *out, const uint8_t *b, int five)
{
    const uint8_t *high = b + 16, *quants = b + (five ? 48 : 16);
    for (int i = 0; i < 8; i++) {
        int scale, min;
        scale_min_of(b + 4, i, &scale, &min);
        float d = load_f16(b) * (float)scale, m = load_f16(b + 2) * (float)min;
        for (int j = 0; j < 32; j++) {
            int q = quants[32 * (i / 2) + j] >> (4 * (i % 2)) & 15;
            if (five)
                q |= (high[j] >> i & 1) << 4;
            out[32 * i + j] = d * (float)q - m;
        }
    }
}

/* Element i's bit pair of Q2_K (16 bytes of scale and minimum, a nibble each, 64 of bit pairs, d, dmin) or of
 * Q3_K (see q3_k_scale). */
static int pair_at(const uint8_t *pairs, int i)
{
    return pairs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

static void expand_q2_k(float *out, const uint8_t *b)
{
    for (int i = 0; i < 256; i++) {
        uint8_t scale = b[i / 16];
        out[i] = load_f16(b + 80) * (float)(scale & 15) * (float)pair_at(b + 16, i) -
                 load_f16(b + 82) * (float)(scale >> 4);
    }
}

/* 32 bytes of third bits (clear: minus 4), 64 of bit pairs, 12 of 6-bit scales less 32, d. */
static int q3_k_scale(const uint8_t *b, int s)
{
    const uint8_t *packed = b + 96;
    int low = s < 8 ? packed[s] & 15 : packed[s - 8] >> 4;
    return (low | (packed[8 + s % 4] >> (s / 4 * 2) & 3) << 4) - 32;
}

/* 0..7 */
static int q3_k_at(const uint8_t *b, int i)
{
    return pair_at(b + 32, i) | (b[i % 32] >> (i / 32) & 1) << 2;
}

static void expand_q3_k(float *out, const uint8_t *b)
{
    for (int i = 0; i < 256; i++)
        out[i] = load_f16(b + 108) * (float)q3_k_scale(b, i / 16) * (float)(q3_k_at(b, i) - 4);
}

/* Element i of a Q6_K block, 0..63: 128 bytes of nibbles, 64 of bit pairs, 16 int8 scales, d. */
static int q6_k_at(const uint8_t *b, int i)
{
    int half = i / 128, quarter = i % 128 / 32, j = i % 32;
    int low = b[64 * half + 32 * (quarter % 2) + j] >> (4 * (quarter / 2)) & 15;
    return low | (b[128 + 32 * half + j] >> (2 * quarter) & 3) << 4;
}

static void expand_q6_k(float *out, const uint8_t *b)
{
    for (int i = 0; i < 256; i++)
        out[i] = load_f16(b + 208) * (float)(int8_t)b[192 + i / 16] * (float)(q6_k_at(b, i) - 32);
}

static void expand_block(float *out, enum dtype type, const uint8_t *b)
{
    switch (type) {
    case DTYPE_IQ4_NL:
        expand_iq4_nl(out, b);
        break;
    case DTYPE_Q2_K:
        expand_q2_k(out, b);
        break;
    case DTYPE_Q3_K:
        expand_q3_k(out, b);
        break;
    case DTYPE_Q4_K:
        expand_q45_k(out, b, 0);
        break;
    case DTYPE_Q5_K:
        expand_q45_k(out, b, 1);
        break;
    case DTYPE_Q6_K:
        expand_q6_k(out, b);
        break;
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

void reference_expand(float *out, enum dtype type, const uint8_t *row, uint32_t count)
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
        const struct dtype_info *info = dtype_info(type);
        for (uint32_t i = 0; i < count; i += info->block_len)
            expand_block(out + i, type, row + (size_t)(i / info->block_len) * info->block_bytes);
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
            reference_expand(buf, w->type, row + (size_t)(c / info->block_len) * info->block_bytes, count);
            lanes_add(acc, buf, x + c, count);
        }
        out[r] = lanes_sum(acc);
    }
}

static void matmul_tile(const struct matmul_tile *m)
{
    for (int t = 0; t < m->tokens; t++)
        for (int r = 0; r < m->rows; r++) {
            float *acc = m->acc + (t * MATMUL_PANEL + r) * 16;
            if (m->first)
                memset(acc, 0, 8 * sizeof *acc);
            lanes_add(acc, m->panel + r * MATMUL_COLS, m->x + (size_t)t * m->x_stride, m->cols);
            if (!m->last)
                continue;
            float sum = lanes_sum(acc);
            m->out[(size_t)t * m->out_stride + (size_t)r] = m->bias ? sum + m->bias[r] : sum;
        }
}

/* ---- products in integers ---- */

static void quantize(struct act_block *out, const float *x, uint32_t cols)
{
    for (; cols; cols -= Q8_BLOCK, x += Q8_BLOCK, out++) {
        float most = 0, poison = 0;
        for (int i = 0; i < Q8_BLOCK; i++) {
            float a = fabsf(x[i]);
            most = a > most ? a : most;
            poison = a != a ? a : poison;
        }
        float factor = most > 0 ? 127.0f / most : 0;
        out->total[0] = out->total[1] = 0;
        for (int i = 0; i < Q8_BLOCK; i++) {
            float v = x[i] * factor; /* a subnormal `most` makes the factor infinite */
            out->q[i] = v >= 127 ? 127 : v <= -127 ? -127 : v == v ? (int8_t)lrintf(v) : 0;
            out->total[i / 16] += out->q[i];
        }
        out->scale = most * (1.0f / 127) + poison;
        out->sum = out->scale * (float)(out->total[0] + out->total[1]);
    }
}

/* The numbers of block `block` of a row without their offset taken off, and their d and m (or second d,
 * and what either half adds). */
struct numbers {
    int u[Q8_BLOCK];
    float d, m, min[2];
};

static void numbers_of_halves(struct numbers *n, enum dtype type, const uint8_t *b, int sub)
{
    float scale[2];
    for (int i = 0; i < Q8_BLOCK; i++)
        n->u[i] = type == DTYPE_Q6_K   ? q6_k_at(b, 32 * sub + i)
                  : type == DTYPE_Q3_K ? q3_k_at(b, 32 * sub + i)
                                       : pair_at(b + 16, 32 * sub + i);
    for (int h = 0; h < 2; h++) {
        int s = 2 * sub + h;
        scale[h] = type == DTYPE_Q6_K   ? load_f16(b + 208) * (float)(int8_t)b[192 + s]
                   : type == DTYPE_Q3_K ? load_f16(b + 108) * (float)q3_k_scale(b, s)
                                        : load_f16(b + 80) * (float)(b[s] & 15);
        n->min[h] = type == DTYPE_Q2_K ? -(load_f16(b + 82) * (float)(b[s] >> 4)) : 0;
    }
    n->d = scale[0];
    n->m = scale[1];
}

static void numbers_of_super(struct numbers *n, enum dtype type, const uint8_t *b, int sub)
{
    if (q8_has_halves(type)) {
        numbers_of_halves(n, type, b, sub);
        return;
    }
    int scale, min, five = type == DTYPE_Q5_K;
    scale_min_of(b + 4, sub, &scale, &min);
    n->d = load_f16(b) * (float)scale;
    n->m = -(load_f16(b + 2) * (float)min);
    for (int i = 0; i < Q8_BLOCK; i++) {
        n->u[i] = b[(five ? 48 : 16) + 32 * (sub / 2) + i] >> (4 * (sub % 2)) & 15;
        if (five)
            n->u[i] |= (b[16 + i] >> sub & 1) << 4;
    }
}

static void numbers_of(struct numbers *n, enum dtype type, const uint8_t *row, uint32_t block)
{
    static const int8_t values[16] = {IQ4_NL_VALUES};
    const struct dtype_info *info = dtype_info(type);
    if (info->block_len != Q8_BLOCK) {
        numbers_of_super(n, type, row + (size_t)(block / 8) * info->block_bytes, (int)(block % 8));
        return;
    }
    const uint8_t *b = row + (size_t)block * info->block_bytes;
    n->d = load_f16(b);
    n->m = q8_has_min(type) ? load_f16(b + 2) : 0;
    const uint8_t *quants = b + (q8_has_min(type) ? 4 : 2);
    int five = type == DTYPE_Q5_0 || type == DTYPE_Q5_1;
    uint32_t high = five ? load_u32(quants) : 0;
    quants += five ? 4 : 0;
    for (int i = 0; i < Q8_BLOCK; i++) {
        int q = type == DTYPE_Q8_0 ? (int8_t)quants[i] + 128 : quants[i % 16] >> (i / 16 * 4) & 15;
        q |= (int)(high >> i & 1) << 4;
        n->u[i] = type == DTYPE_IQ4_NL ? values[q] + 128 : q;
    }
}

static float q8_step(enum dtype type, float acc, const struct numbers *n, const struct act_block *x)
{
    int32_t sum[2] = {0, 0};
    for (int i = 0; i < Q8_BLOCK; i++)
        sum[i / 16] += (n->u[i] - q8_offset(type)) * x->q[i];
    if (q8_has_halves(type)) {
        float part = (n->d * x->scale) * (float)sum[0] + (n->m * x->scale) * (float)sum[1];
        if (q8_has_half_mins(type))
            part += (n->min[0] * x->scale) * (float)x->total[0] + (n->min[1] * x->scale) * (float)x->total[1];
        return acc + part;
    }
    float part = (n->d * x->scale) * (float)(sum[0] + sum[1]);
    return acc + (q8_has_min(type) ? part + n->m * x->sum : part);
}

static void q8_dot_rows(float *out, const struct matrix *w, uint32_t first_row, uint32_t rows,
                        const struct act_block *x)
{
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    for (uint32_t r = 0; r < rows; r++) {
        out[r] = 0;
        for (uint32_t i = 0; i < w->cols / Q8_BLOCK; i++) {
            struct numbers n;
            numbers_of(&n, w->type, (const uint8_t *)w->data + (first_row + r) * row_bytes, i);
            out[r] = q8_step(w->type, out[r], &n, x + i);
        }
    }
}

/* The reference's panels have a row. */
static void q8_panel(void *panel, const struct matrix *w, uint32_t row, int rows, uint32_t block, int blocks)
{
    (void)rows;
    struct numbers *n = panel;
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    for (int i = 0; i < blocks; i++)
        numbers_of(n + i, w->type, (const uint8_t *)w->data + row * row_bytes, block + (uint32_t)i);
}

static void q8_tile(const struct q8_tile *t)
{
    const struct numbers *n = t->panel;
    for (int i = 0; i < t->tokens; i++) {
        float acc = t->first ? 0 : t->acc[i * Q8_ROWS];
        for (int k = 0; k < t->blocks; k++)
            acc = q8_step(t->type, acc, n + k, t->x + (size_t)i * t->x_stride + k);
        t->acc[i * Q8_ROWS] = acc;
        if (t->last)
            t->out[(size_t)i * t->out_stride] = t->bias ? acc + *t->bias : acc;
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
        reference_expand(k, t->type, t->piece[i], (uint32_t)t->head_dim);
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
        reference_expand(v, t->type, t->piece[i] + 2 * t->head_dim, (uint32_t)t->head_dim);
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
    .expand = reference_expand,
    .dot_rows = dot_rows,
    .matmul_tile = matmul_tile,
    .quantize = quantize,
    .q8_dot_rows = q8_dot_rows,
    .q8_panel = q8_panel,
    .q8_tile = q8_tile,
    .q8_rows = 1,
    .rmsnorm = rmsnorm,
    .swiglu = swiglu,
    .narrow = narrow,
    .attn_scores = attn_scores,
    .attn_values = attn_values,
    .softmax_part = softmax_part,
    .pool_weights = pool_weights,
    .head_dim_multiple = 1,
};
