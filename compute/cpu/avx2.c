/* The kernels with AVX2, FMA and F16C: products, attention, softmax. Built with these flags whatever the rest
 * is built for; called only where the processor has them.
 *
 * Stateless; any thread. Every kernel keeps the order of kernels.h: one vector register is the 8 lanes, one
 * fused multiply-add a step, quad_sum the end. Shapes are template-like constants: always_inline functions
 * that take the type and the number of rows as literals, so that the arrays below become registers. */
#if defined(__x86_64__)
#include <math.h>

#include "compute/cpu/q8_avx2.h"
#include "compute/cpu/simd.h"

/* Rows are short and read four at a time, too little at a stretch for the processor's own prefetching. */

/* d and m of a block, which lie side by side. */
INLINE void broadcast_f16_pair(const uint8_t *p, __m256 *ret_d, __m256 *ret_m)
{
    int bits;
    memcpy(&bits, p, sizeof bits);
    __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(bits));
    *ret_d = _mm256_broadcastss_ps(pair);
    *ret_m = _mm256_broadcastss_ps(_mm_movehdup_ps(pair));
}

INLINE __m256 scale8(__m256i q, __m256 d, __m256 m)
{
    return _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(q), m);
}

INLINE void nibbles(const uint8_t *p, __m256i q[4])
{
    const __m256i low = _mm256_set1_epi32(15);
    __m256i a = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
    __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)(p + 8)));
    q[0] = _mm256_and_si256(a, low);
    q[1] = _mm256_and_si256(b, low);
    q[2] = _mm256_srli_epi32(a, 4);
    q[3] = _mm256_srli_epi32(b, 4);
}

/* Adds 16 where the element's bit of `high` is set: the bit alone, whatever it is worth, cut down to 16. The
 * lowest four are worth less, so they are moved up first. */
INLINE void fifth_bits(const uint8_t *p, __m256i q[4])
{
    uint32_t high;
    memcpy(&high, p, sizeof high);
    const __m256i sixteen = _mm256_set1_epi32(16), lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (int i = 0; i < 4; i++) {
        __m256i bits = _mm256_set1_epi32((int)(i == 0 ? high << 4 : high));
        __m256i bit = _mm256_and_si256(bits, _mm256_slli_epi32(lane_bit, i == 0 ? 4 : 8 * i));
        q[i] = _mm256_or_si256(q[i], _mm256_min_epu32(bit, sixteen));
    }
}

/* 32 elements in their order. d * (q - 8) is taken as d * q + (-8 d): both are exact in float32. */
INLINE void load32(enum dtype type, const uint8_t *p, __m256 w[4])
{
    __m256 d, m;
    __m256i q[4];
    if (type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16) {
        for (int i = 0; i < 4; i++)
            w[i] = load8(type, p + i * (type == DTYPE_F32 ? 32 : 16));
        return;
    }
    if (type == DTYPE_Q8_0) {
        d = broadcast_f16(p);
        for (int i = 0; i < 4; i++)
            w[i] = _mm256_mul_ps(
                d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(p + 2 + 8 * i)))));
        return;
    }
    if (type == DTYPE_Q4_1 || type == DTYPE_Q5_1) {
        broadcast_f16_pair(p, &d, &m);
        p += 4;
    } else {
        d = broadcast_f16(p);
        m = _mm256_mul_ps(d, _mm256_set1_ps(type == DTYPE_Q4_0 ? -8.0f : -16.0f));
        p += 2;
    }
    if (type == DTYPE_Q5_0 || type == DTYPE_Q5_1) {
        nibbles(p + 4, q);
        fifth_bits(p, q);
    } else {
        nibbles(p, q);
    }
    for (int i = 0; i < 4; i++)
        w[i] = scale8(q[i], d, m);
}

/* The last elements of a row of a plain type, zeros after them. */
INLINE __m256 load_tail(enum dtype type, const uint8_t *p, int count)
{
    uint8_t buf[32] = {0};
    memcpy(buf, p, (size_t)count * (type == DTYPE_F32 ? 4 : 2));
    return load8(type, buf);
}

INLINE void expand_as(enum dtype type, float *out, const uint8_t *row, uint32_t count)
{
    uint32_t i = 0;
    for (; i + 32 <= count; i += 32, row += block32_bytes(type)) {
        __m256 w[4];
        load32(type, row, w);
        for (int j = 0; j < 4; j++)
            _mm256_storeu_ps(out + i + 8 * j, w[j]);
    }
    for (; i < count; i += 8, row += block32_bytes(type) / 4) {
        int left = count - i < 8 ? (int)(count - i) : 8;
        _mm256_maskstore_ps(out + i, lane_mask(left), load_tail(type, row, left));
    }
}

/* Four rows at a time: their sums are independent chains, which hides the latency of the additions. */
INLINE __m128 dot_quad(enum dtype type, const uint8_t *const row[4], uint32_t cols, const float *x)
{
    const char *ahead = (const char *)row[0] + PREFETCH_BYTES; /* only prefetched, so it may pass the end */
    __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    uint32_t c = 0;
    size_t at = 0;
    for (; c + 32 <= cols; c += 32, at += block32_bytes(type)) {
        __m256 v[4];
        for (int j = 0; j < 4; j++)
            v[j] = _mm256_loadu_ps(x + c + 8 * j);
        for (size_t i = 0; i < 4 * block32_bytes(type); i += 64)
            _mm_prefetch(ahead + 4 * at + i, _MM_HINT_T0);
        for (int r = 0; r < 4; r++) {
            __m256 w[4];
            load32(type, row[r] + at, w);
            for (int j = 0; j < 4; j++)
                acc[r] = _mm256_fmadd_ps(w[j], v[j], acc[r]);
        }
    }
    for (; c < cols; c += 8, at += block32_bytes(type) / 4) {
        int left = cols - c < 8 ? (int)(cols - c) : 8;
        __m256 v = _mm256_maskload_ps(x + c, lane_mask(left));
        for (int r = 0; r < 4; r++)
            acc[r] = _mm256_fmadd_ps(load_tail(type, row[r] + at, left), v, acc[r]);
    }
    return quad_sum(acc);
}

INLINE void dot_rows_as(enum dtype type, float *out, const struct matrix *w, uint32_t first, uint32_t rows,
                        const float *x)
{
    size_t row_bytes = dtype_row_bytes(type, w->cols);
    const uint8_t *row = (const uint8_t *)w->data + first * row_bytes;
    for (uint32_t r = 0; r < rows; r += 4, row += 4 * row_bytes) {
        int left = rows - r < 4 ? (int)(rows - r) : 4;
        const uint8_t *quad[4];
        for (int i = 0; i < 4; i++) /* past the end the last row stands in; its sum is not stored */
            quad[i] = row + (size_t)(i < left ? i : left - 1) * row_bytes;
        __m128 sums = dot_quad(type, quad, w->cols, x);
        store_some(out + r, sums, left);
    }
}

static void rare_dot_rows(float *out, const struct matrix *w, uint32_t first, uint32_t rows, const float *x)
{
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    const struct dtype_info *info = dtype_info(w->type);
    for (uint32_t r = 0; r < rows; r++) {
        const uint8_t *row = (const uint8_t *)w->data + (size_t)(first + r) * row_bytes;
        __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
        for (uint32_t c = 0; c < w->cols; c += info->block_len) {
            float buf[256];
            reference_expand(buf, w->type, row + (size_t)(c / info->block_len) * info->block_bytes,
                             info->block_len);
            for (uint32_t i = 0; i < info->block_len; i += 8)
                acc[0] = _mm256_fmadd_ps(_mm256_loadu_ps(buf + i), _mm256_loadu_ps(x + c + i), acc[0]);
        }
        out[r] = _mm_cvtss_f32(quad_sum(acc));
    }
}

void avx2_expand(float *out, enum dtype type, const uint8_t *row, uint32_t count)
{
    if (is_rare(type)) {
        reference_expand(out, type, row, count);
        return;
    }
#define EXPAND(t) expand_as(t, out, row, count)
    switch (type) {
        FOR_EACH_TYPE(EXPAND);
    }
#undef EXPAND
}

static void dot_rows(float *out, const struct matrix *w, uint32_t first_row, uint32_t rows, const float *x)
{
    if (is_rare(w->type)) {
        rare_dot_rows(out, w, first_row, rows, x);
        return;
    }
#define DOT_ROWS(t) dot_rows_as(t, out, w, first_row, rows, x)
    switch (w->type) {
        FOR_EACH_TYPE(DOT_ROWS);
    }
#undef DOT_ROWS
}

INLINE void store_quad(const struct matmul_tile *m, int row, int token, __m128 sums)
{
    int left = m->rows - row < 4 ? m->rows - row : 4;
    float *out = m->out + (size_t)token * m->out_stride + row;
    float bias[4] = {0};
    if (m->bias) {
        memcpy(bias, m->bias + row, (size_t)left * sizeof *bias);
        sums = _mm_add_ps(sums, _mm_loadu_ps(bias));
    }
    store_some(out, sums, left);
}

/* Four rows of the panel times 1..3 tokens: at most 12 sums, 3 activations and 1 weight in registers. */
INLINE void tile_quad(const struct matmul_tile *m, int row, int token, int tokens)
{
    const float *w = m->panel + row * MATMUL_COLS;
    const float *x[3];
    float *rest = m->acc + (token * MATMUL_PANEL + row) * 16;
    __m256 acc[3][4];
    for (int t = 0; t < tokens; t++) {
        x[t] = m->x + (size_t)(token + t) * m->x_stride;
        for (int r = 0; r < 4; r++)
            acc[t][r] = m->first ? _mm256_setzero_ps() : _mm256_loadu_ps(rest + (t * MATMUL_PANEL + r) * 16);
    }
    uint32_t c = 0;
    for (; c + 8 <= m->cols; c += 8) {
        __m256 v[3];
        for (int t = 0; t < tokens; t++)
            v[t] = _mm256_loadu_ps(x[t] + c);
        for (int r = 0; r < 4; r++) {
            __m256 weight = _mm256_loadu_ps(w + r * MATMUL_COLS + c);
            for (int t = 0; t < tokens; t++)
                acc[t][r] = _mm256_fmadd_ps(weight, v[t], acc[t][r]);
        }
    }
    if (c < m->cols) {
        __m256i mask = lane_mask((int)(m->cols - c));
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < 4; r++)
                acc[t][r] = _mm256_fmadd_ps(_mm256_loadu_ps(w + r * MATMUL_COLS + c),
                                            _mm256_maskload_ps(x[t] + c, mask), acc[t][r]);
    }
    for (int t = 0; t < tokens; t++) {
        if (m->last)
            store_quad(m, row, token + t, quad_sum(acc[t]));
        else
            for (int r = 0; r < 4; r++)
                _mm256_storeu_ps(rest + (t * MATMUL_PANEL + r) * 16, acc[t][r]);
    }
}

/* Rows or tokens to take at once when `left` are left: threes, and no single one at the end of four. */
INLINE int take_of(int left)
{
    return left == 4 ? 2 : left < 3 ? left : 3;
}

static void matmul_tile(const struct matmul_tile *m)
{
    for (int t = 0, take; t < m->tokens; t += take) {
        take = take_of(m->tokens - t);
        for (int r = 0; r < m->rows; r += 4) {
            if (take == 3)
                tile_quad(m, r, t, 3);
            else if (take == 2)
                tile_quad(m, r, t, 2);
            else
                tile_quad(m, r, t, 1);
        }
    }
}

/* 8 numbers of x * factor, in [-127, 127], 0 for NaN. */
INLINE __m256i quantize8(const float *x, __m256 factor)
{
    __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x), factor);
    v = _mm256_and_ps(v, _mm256_cmp_ps(v, v, _CMP_ORD_Q));
    v = _mm256_max_ps(_mm256_set1_ps(-127.0f), _mm256_min_ps(_mm256_set1_ps(127.0f), v));
    return _mm256_cvtps_epi32(v);
}

static int32_t sum_of(__m128i v)
{
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}

/* As the reference: the largest magnitude passes over NaN, which then spoils the scale. */
INLINE void quantize_block(struct act_block *out, const float *x)
{
    __m256 most = _mm256_setzero_ps(), nan = _mm256_setzero_ps();
    for (int i = 0; i < Q8_BLOCK; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i);
        most = _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), most);
        nan = _mm256_or_ps(nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    float largest = _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
    __m256 factor = _mm256_set1_ps(largest > 0 ? 127.0f / largest : 0);
    __m256i a = _mm256_packs_epi32(quantize8(x, factor), quantize8(x + 8, factor));
    __m256i b = _mm256_packs_epi32(quantize8(x + 16, factor), quantize8(x + 24, factor));
    __m256i q =
        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((void *)out->q, q);
    __m256i sums = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q), _mm256_set1_epi16(1));
    out->total[0] = sum_of(_mm256_castsi256_si128(sums));
    out->total[1] = sum_of(_mm256_extracti128_si256(sums, 1));
    out->scale = largest * (1.0f / 127) + (_mm256_movemask_ps(nan) ? NAN : 0.0f);
    out->sum = out->scale * (float)(out->total[0] + out->total[1]);
}

void avx2_quantize(struct act_block *out, const float *x, uint32_t cols)
{
    for (uint32_t i = 0; i < cols; i += Q8_BLOCK)
        quantize_block(out++, x + i);
}

void avx2_rmsnorm(float *out, const float *x, const float *weight, int dim, float eps)
{
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    int i = 0;
    for (; i + 8 <= dim; i += 8) {
        __m256d a = _mm256_cvtps_pd(_mm_loadu_ps(x + i)), b = _mm256_cvtps_pd(_mm_loadu_ps(x + i + 4));
        low = _mm256_fmadd_pd(a, a, low);
        high = _mm256_fmadd_pd(b, b, high);
    }
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(low, high));
    double sum = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
    for (; i < dim; i++)
        sum += (double)x[i] * (double)x[i];
    float factor = (float)(1.0 / sqrt(sum / dim + (double)eps));
    for (i = 0; i < dim; i++)
        out[i] = x[i] * factor * weight[i];
}

/* exp: 2^n times a Taylor polynomial of degree 7 on [-ln2/2, ln2/2], where its error is below 6e-9. Below
 * -86.5 the result is 0, above 88.7 infinity, of NaN it is NaN (operand order of min and max matters). */
INLINE __m256 exp8(__m256 x)
{
    __m256 tiny = _mm256_cmp_ps(x, _mm256_set1_ps(-86.5f), _CMP_LT_OQ);
    x = _mm256_max_ps(_mm256_set1_ps(-87.0f), _mm256_min_ps(_mm256_set1_ps(89.0f), x));
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(0x1.715476p+0f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.62e4p-1f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.7f7d1cp-20f), r);
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
    /* 2^n in two factors, since n reaches 128 */
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(126)), 23);
    p = _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(power)), _mm256_set1_ps(2.0f));
    return _mm256_andnot_ps(tiny, p);
}

INLINE __m256 swiglu8(__m256 gate, __m256 up)
{
    __m256 one = _mm256_set1_ps(1.0f), minus = _mm256_xor_ps(gate, _mm256_set1_ps(-0.0f));
    return _mm256_mul_ps(_mm256_div_ps(gate, _mm256_add_ps(one, exp8(minus))), up);
}

static void swiglu(float *out, const float *gate, const float *up, int dim)
{
    int i = 0;
    for (; i + 8 <= dim; i += 8)
        _mm256_storeu_ps(out + i, swiglu8(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i)));
    if (i < dim) {
        __m256i mask = lane_mask(dim - i);
        _mm256_maskstore_ps(out + i, mask,
                            swiglu8(_mm256_maskload_ps(gate + i, mask), _mm256_maskload_ps(up + i, mask)));
    }
}

void avx2_narrow(uint8_t *out, enum dtype type, const float *x, int count)
{
    int i = 0;
    for (; type == DTYPE_F16 && i + 8 <= count; i += 8)
        _mm_storeu_si128((void *)(out + 2 * i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < count; i++) {
        uint16_t v = type == DTYPE_BF16 ? dtype_f32_to_bf16(x[i]) : dtype_f32_to_f16(x[i]);
        memcpy(out + 2 * i, &v, sizeof v);
    }
}

/* Scores of four pieces for `rows` (1..3) query rows. */
INLINE void score_quad(enum dtype type, const uint8_t *const piece[4], const float *const *q, int rows,
                       int head_dim, __m128 ret_sums[3])
{
    __m256 acc[3][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++)
            acc[r][i] = _mm256_setzero_ps();
    for (int d = 0; d < head_dim; d += 8) {
        __m256 v[3];
        for (int r = 0; r < rows; r++)
            v[r] = _mm256_loadu_ps(q[r] + d);
        for (int i = 0; i < 4; i++) {
            __m256 k = load8(type, piece[i] + 2 * d);
            for (int r = 0; r < rows; r++)
                acc[r][i] = _mm256_fmadd_ps(k, v[r], acc[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        ret_sums[r] = quad_sum(acc[r]);
}

INLINE void score_rows(enum dtype type, float *scores, const struct attn_tile *t, int row, int rows)
{
    __m128 scale = _mm_set1_ps(t->scale), sums[3];
    if (row == 0)
        prefetch_pieces(t, 0, PREFETCH_PIECES);
    for (int i = 0; i < t->count; i += 4) {
        int left = t->count - i < 4 ? t->count - i : 4;
        const uint8_t *piece[4];
        for (int j = 0; j < 4; j++) /* past the end the last piece stands in; its score is not stored */
            piece[j] = t->piece[i + (j < left ? j : left - 1)];
        if (row == 0)
            prefetch_pieces(t, i + PREFETCH_PIECES, i + PREFETCH_PIECES + 4);
        score_quad(type, piece, t->q + row, rows, t->head_dim, sums);
        for (int r = 0; r < rows; r++) {
            float *out = scores + (size_t)(row + r) * t->stride + i;
            store_some(out, _mm_mul_ps(sums[r], scale), left);
        }
    }
}

/* Weighted sum of V for up to 3 rows and 8 * `width` dimensions; positions ascending, one chain each. */
INLINE void value_block(enum dtype type, float *acc, const float *scores, const struct attn_tile *t,
                        const struct span *s, int width)
{
    __m256 sum[3][8];
    for (int r = 0; r < s->rows; r++)
        for (int j = 0; j < width; j++)
            sum[r][j] = _mm256_setzero_ps();
    size_t at = 2 * ((size_t)t->head_dim + (size_t)s->d);
    for (int i = 0; i < t->count; i++) {
        __m256 p[3];
        for (int r = 0; r < s->rows; r++)
            p[r] = _mm256_broadcast_ss(scores + (size_t)(s->row + r) * t->stride + i);
        for (int j = 0; j < width; j++) {
            __m256 v = load8(type, t->piece[i] + at + 16 * j);
            for (int r = 0; r < s->rows; r++)
                sum[r][j] = _mm256_fmadd_ps(p[r], v, sum[r][j]);
        }
    }
    for (int r = 0; r < s->rows; r++)
        for (int j = 0; j < width; j++)
            _mm256_storeu_ps(acc + (s->row + r) * t->head_dim + s->d + 8 * j, sum[r][j]);
}

INLINE void value_rows(enum dtype type, float *acc, const float *scores, const struct attn_tile *t, int row,
                       int rows)
{
    struct span s = {row, rows, 0};
    if (rows == 1)
        for (; s.d + 64 <= t->head_dim; s.d += 64)
            value_block(type, acc, scores, t, &s, 8);
    for (; s.d + 32 <= t->head_dim; s.d += 32)
        value_block(type, acc, scores, t, &s, 4);
    for (; s.d < t->head_dim; s.d += 8)
        value_block(type, acc, scores, t, &s, 1);
}

/* From a number of rows to a literal one. */
INLINE void score_rows_by(enum dtype type, float *scores, const struct attn_tile *t, int row, int rows)
{
    if (rows == 3)
        score_rows(type, scores, t, row, 3);
    else if (rows == 2)
        score_rows(type, scores, t, row, 2);
    else
        score_rows(type, scores, t, row, 1);
}

INLINE void value_rows_by(enum dtype type, float *acc, const float *scores, const struct attn_tile *t,
                          int row, int rows)
{
    if (rows == 3)
        value_rows(type, acc, scores, t, row, 3);
    else if (rows == 2)
        value_rows(type, acc, scores, t, row, 2);
    else
        value_rows(type, acc, scores, t, row, 1);
}

static void attn_scores(float *scores, const struct attn_tile *t)
{
    for (int row = 0, take; row < t->rows; row += take) {
        take = take_of(t->rows - row);
        if (t->type == DTYPE_BF16)
            score_rows_by(DTYPE_BF16, scores, t, row, take);
        else
            score_rows_by(DTYPE_F16, scores, t, row, take);
    }
}

static void attn_values(float *acc, const float *scores, const struct attn_tile *t)
{
    for (int row = 0, take; row < t->rows; row += take) {
        take = take_of(t->rows - row);
        if (t->type == DTYPE_BF16)
            value_rows_by(DTYPE_BF16, acc, scores, t, row, take);
        else
            value_rows_by(DTYPE_F16, acc, scores, t, row, take);
    }
}

static float max_of(const float *x, int count)
{
    __m256 most = _mm256_set1_ps(-INFINITY);
    int i = 0;
    for (; i + 8 <= count; i += 8) /* with a NaN the second operand is taken, so NaN is passed over */
        most = _mm256_max_ps(_mm256_loadu_ps(x + i), most);
    float lanes[8], max = -INFINITY;
    _mm256_storeu_ps(lanes, most);
    for (int j = 0; j < 8; j++)
        max = lanes[j] > max ? lanes[j] : max;
    for (; i < count; i++)
        max = x[i] > max ? x[i] : max;
    return max;
}

static float softmax_part(float *x, int count, float *ret_max)
{
    float max = max_of(x, count), lanes[8];
    __m256 most = _mm256_set1_ps(max), sum = _mm256_setzero_ps();
    int i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(x + i), most));
        _mm256_storeu_ps(x + i, e);
        sum = _mm256_add_ps(sum, e);
    }
    if (i < count) {
        __m256i mask = lane_mask(count - i);
        __m256 e = exp8(_mm256_sub_ps(_mm256_maskload_ps(x + i, mask), most));
        _mm256_maskstore_ps(x + i, mask, e);
        sum = _mm256_add_ps(sum, _mm256_and_ps(e, _mm256_castsi256_ps(mask)));
    }
    _mm256_storeu_ps(lanes, sum);
    *ret_max = max;
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/* max with NaN of either side kept. */
INLINE __m256 sticky_max(__m256 fresh, __m256 old)
{
    return _mm256_or_ps(_mm256_max_ps(fresh, old), _mm256_cmp_ps(fresh, fresh, _CMP_UNORD_Q));
}

void avx2_pool_weights(float *out, const float *e, float factor, int count, enum pool_kind pool, int first)
{
    __m256 scale = _mm256_set1_ps(factor);
    for (int i = 0; i < count; i += 8) {
        __m256i mask = lane_mask(count - i);
        __m256 v = _mm256_mul_ps(_mm256_maskload_ps(e + i, mask), scale);
        if (!first) {
            __m256 old = _mm256_maskload_ps(out + i, mask);
            v = pool == POOL_MEAN ? _mm256_add_ps(old, v) : sticky_max(v, old);
        }
        _mm256_maskstore_ps(out + i, mask, v);
    }
}

const struct kernels kernels_avx2 = {
    .name = "avx2",
    .expand = avx2_expand,
    .dot_rows = dot_rows,
    .matmul_tile = matmul_tile,
    .quantize = avx2_quantize,
    .q8_dot_rows = q8_dot_rows,
    .q8_panel = q8_panel,
    .q8_tile = q8_tile,
    .q8_rows = LANES,
    .rmsnorm = avx2_rmsnorm,
    .swiglu = swiglu,
    .narrow = avx2_narrow,
    .attn_scores = attn_scores,
    .attn_values = attn_values,
    .softmax_part = softmax_part,
    .pool_weights = avx2_pool_weights,
    .head_dim_multiple = 8,
};
#endif
