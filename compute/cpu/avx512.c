/* The kernels with AVX-512 (F, BW, VL, DQ, VNNI): products, attention, softmax. What gains nothing from wider
 * registers is AVX2's. Built with these flags whatever the rest is built for; called only where the processor
 * has them.
 *
 * Stateless; any thread. Every kernel keeps the order of kernels.h: one vector register is the 16 lanes, one
 * fused multiply-add a step, quad_sum16 the end. */
#if defined(__x86_64__)
#include <math.h>

#include "compute/cpu/q8_avx512.h"
#include "compute/cpu/simd.h"

/* As in avx2.c, at twice the width. */
enum { TILE_TOKENS = 6 };

INLINE __m256 fold(__m512 v)
{
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

/* Sums of four registers' lanes: j with j + 8, then as quad_sum. */
INLINE __m128 quad_sum16(const __m512 a[4])
{
    __m256 folded[4];
    for (int i = 0; i < 4; i++)
        folded[i] = fold(a[i]);
    return quad_sum(folded);
}

/* Lanes [0, count) on; count >= 0. */
INLINE __mmask16 mask_of(int count)
{
    return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
}

INLINE __m512 bf16_to_f32(__m256i v)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

/* 16 elements of a plain type. */
INLINE __m512 load16(enum dtype type, const uint8_t *p)
{
    if (type == DTYPE_F32)
        return _mm512_loadu_ps((const void *)p);
    __m256i v = _mm256_loadu_si256((const void *)p);
    return type == DTYPE_F16 ? _mm512_cvtph_ps(v) : bf16_to_f32(v);
}

/* The last elements of a row of a plain type, zeros after them. */
INLINE __m512 load16_tail(enum dtype type, const uint8_t *p, int count)
{
    if (type == DTYPE_F32)
        return _mm512_maskz_loadu_ps(mask_of(count), p);
    __m256i v = _mm256_maskz_loadu_epi16(mask_of(count), p);
    return type == DTYPE_F16 ? _mm512_cvtph_ps(v) : bf16_to_f32(v);
}

INLINE __m512 scalar_f16(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return _mm512_set1_ps(_cvtsh_ss(bits));
}

/* 32 elements in their order; w = d * q + m rounds once, as in the other paths. */
INLINE void load32_wide(enum dtype type, const uint8_t *p, __m512 w[2])
{
    if (type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16) {
        w[0] = load16(type, p);
        w[1] = load16(type, p + (type == DTYPE_F32 ? 64 : 32));
        return;
    }
    __m512 d = scalar_f16(p), m;
    if (type == DTYPE_Q8_0) {
        for (int i = 0; i < 2; i++)
            w[i] = _mm512_mul_ps(
                d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(p + 2 + 16 * i)))));
        return;
    }
    if (q8_has_min(type)) {
        m = scalar_f16(p + 2);
        p += 4;
    } else {
        m = _mm512_mul_ps(d, _mm512_set1_ps((float)-q8_offset(type)));
        p += 2;
    }
    int five = type == DTYPE_Q5_0 || type == DTYPE_Q5_1;
    uint32_t high = 0;
    if (five) {
        memcpy(&high, p, sizeof high);
        p += 4;
    }
    __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
    __m512i q[2] = {_mm512_and_si512(both, _mm512_set1_epi32(15)), _mm512_srli_epi32(both, 4)};
    for (int i = 0; i < 2; i++) {
        if (five)
            q[i] = _mm512_mask_or_epi32(q[i], (__mmask16)(high >> (16 * i)), q[i], _mm512_set1_epi32(16));
        w[i] = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(q[i]), m);
    }
}

/* Four rows at a time: their sums are independent chains, which hides the latency of the additions. */
INLINE __m128 dot_quad(enum dtype type, const uint8_t *const row[4], uint32_t cols, const float *x)
{
    uintptr_t ahead = (uintptr_t)row[0] + PREFETCH_BYTES; /* only prefetched, so it may pass the end */
    __m512 acc[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    uint32_t c = 0;
    size_t at = 0;
    for (; c + 32 <= cols; c += 32, at += block32_bytes(type)) {
        __m512 v[2] = {_mm512_loadu_ps(x + c), _mm512_loadu_ps(x + c + 16)};
        for (size_t i = 0; i < 4 * block32_bytes(type); i += 64)
            _mm_prefetch((const char *)(ahead + 4 * at + i), _MM_HINT_T0);
        for (int r = 0; r < 4; r++) {
            __m512 w[2];
            load32_wide(type, row[r] + at, w);
            acc[r] = _mm512_fmadd_ps(w[0], v[0], acc[r]);
            acc[r] = _mm512_fmadd_ps(w[1], v[1], acc[r]);
        }
    }
    for (; c < cols; c += 16, at += block32_bytes(type) / 2) {
        int left = cols - c < 16 ? (int)(cols - c) : 16;
        __m512 v = _mm512_maskz_loadu_ps(mask_of(left), x + c);
        for (int r = 0; r < 4; r++)
            acc[r] = _mm512_fmadd_ps(load16_tail(type, row[r] + at, left), v, acc[r]);
    }
    return quad_sum16(acc);
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
        store_some(out + r, dot_quad(type, quad, w->cols, x), left);
    }
}

static void rare_dot_rows(float *out, const struct matrix *w, uint32_t first, uint32_t rows, const float *x)
{
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    const struct dtype_info *info = dtype_info(w->type);
    for (uint32_t r = 0; r < rows; r++) {
        const uint8_t *row = (const uint8_t *)w->data + (size_t)(first + r) * row_bytes;
        __m512 acc[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (uint32_t c = 0; c < w->cols; c += info->block_len) {
            float buf[256];
            reference_expand(buf, w->type, row + (size_t)(c / info->block_len) * info->block_bytes,
                             info->block_len);
            for (uint32_t i = 0; i < info->block_len; i += 16)
                acc[0] = _mm512_fmadd_ps(_mm512_loadu_ps(buf + i), _mm512_loadu_ps(x + c + i), acc[0]);
        }
        out[r] = _mm_cvtss_f32(quad_sum16(acc));
    }
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
    if (m->bias) {
        float bias[4] = {0};
        memcpy(bias, m->bias + row, (size_t)left * sizeof *bias);
        sums = _mm_add_ps(sums, _mm_loadu_ps(bias));
    }
    store_some(m->out + (size_t)token * m->out_stride + row, sums, left);
}

/* Four rows of the panel times 1..6 tokens: at most 24 sums, 6 activations and 1 weight in registers. */
INLINE void tile_quad(const struct matmul_tile *m, int row, int token, int tokens)
{
    const float *w = m->panel + row * MATMUL_COLS;
    const float *x[TILE_TOKENS];
    float *rest = m->acc + (token * MATMUL_PANEL + row) * 16;
    __m512 acc[TILE_TOKENS][4];
    for (int t = 0; t < tokens; t++) {
        x[t] = m->x + (size_t)(token + t) * m->x_stride;
        for (int r = 0; r < 4; r++)
            acc[t][r] = m->first ? _mm512_setzero_ps() : _mm512_loadu_ps(rest + (t * MATMUL_PANEL + r) * 16);
    }
    for (uint32_t c = 0; c < m->cols; c += 16) {
        __mmask16 mask = mask_of((int)(m->cols - c));
        __m512 v[TILE_TOKENS];
        for (int t = 0; t < tokens; t++)
            v[t] = _mm512_maskz_loadu_ps(mask, x[t] + c);
        for (int r = 0; r < 4; r++) {
            __m512 weight = _mm512_loadu_ps(w + r * MATMUL_COLS + c);
            for (int t = 0; t < tokens; t++)
                acc[t][r] = _mm512_fmadd_ps(weight, v[t], acc[t][r]);
        }
    }
    if (!m->last) {
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < 4; r++)
                _mm512_storeu_ps(rest + (t * MATMUL_PANEL + r) * 16, acc[t][r]);
        return;
    }
    __m128 sums[TILE_TOKENS]; /* a loop of its own: short enough that compilers unroll it */
    for (int t = 0; t < tokens; t++)
        sums[t] = quad_sum16(acc[t]);
    for (int t = 0; t < tokens; t++)
        store_quad(m, row, token + t, sums[t]);
}

static void matmul_tile(const struct matmul_tile *m)
{
    int t = 0;
    for (; t + TILE_TOKENS <= m->tokens; t += TILE_TOKENS)
        for (int r = 0; r < m->rows; r += 4)
            tile_quad(m, r, t, TILE_TOKENS);
    for (; t + 2 <= m->tokens; t += 2)
        for (int r = 0; r < m->rows; r += 4)
            tile_quad(m, r, t, 2);
    for (int r = 0; t < m->tokens && r < m->rows; r += 4)
        tile_quad(m, r, t, 1);
}

/* As exp8 in avx2.c. */
INLINE __m512 exp16(__m512 x)
{
    __mmask16 tiny = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-86.5f), _CMP_LT_OQ);
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), _mm512_min_ps(_mm512_set1_ps(89.0f), x));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(0x1.715476p+0f)),
                                    _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.62e4p-1f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0x1.7f7d1cp-20f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_mask_blend_ps(tiny, _mm512_scalef_ps(p, n), _mm512_setzero_ps());
}

static void swiglu(float *out, const float *gate, const float *up, int dim)
{
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    for (int i = 0; i < dim; i += 16) {
        __mmask16 mask = mask_of(dim - i);
        __m512 g = _mm512_maskz_loadu_ps(mask, gate + i), u = _mm512_maskz_loadu_ps(mask, up + i);
        __m512 e = exp16(_mm512_xor_ps(g, sign));
        _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(one, e)), u));
    }
}

/* Scores of four pieces for `rows` (1..6) query rows. */
INLINE void score_quad(enum dtype type, const uint8_t *const piece[4], const float *const *q, int rows,
                       int head_dim, __m128 ret_sums[TILE_TOKENS])
{
    __m512 acc[TILE_TOKENS][4];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < 4; i++)
            acc[r][i] = _mm512_setzero_ps();
    for (int d = 0; d < head_dim; d += 16) {
        __m512 v[TILE_TOKENS];
        for (int r = 0; r < rows; r++)
            v[r] = _mm512_loadu_ps(q[r] + d);
        for (int i = 0; i < 4; i++) {
            __m512 k = load16(type, piece[i] + 2 * d);
            for (int r = 0; r < rows; r++)
                acc[r][i] = _mm512_fmadd_ps(k, v[r], acc[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        ret_sums[r] = quad_sum16(acc[r]);
}

INLINE void score_rows(enum dtype type, float *scores, const struct attn_tile *t, int row, int rows)
{
    __m128 scale = _mm_set1_ps(t->scale), sums[TILE_TOKENS];
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
        for (int r = 0; r < rows; r++)
            store_some(scores + (size_t)(row + r) * t->stride + i, _mm_mul_ps(sums[r], scale), left);
    }
}

/* Weighted sum of V for up to 6 rows and 16 * `width` dimensions; positions ascending, one chain each. */
INLINE void value_block(enum dtype type, float *acc, const float *scores, const struct attn_tile *t,
                        const struct span *s, int width)
{
    __m512 sum[TILE_TOKENS][4];
    for (int r = 0; r < s->rows; r++)
        for (int j = 0; j < width; j++)
            sum[r][j] = _mm512_setzero_ps();
    size_t at = 2 * ((size_t)t->head_dim + (size_t)s->d);
    for (int i = 0; i < t->count; i++) {
        __m512 v[4];
        for (int j = 0; j < width; j++)
            v[j] = load16(type, t->piece[i] + at + 32 * j);
        for (int r = 0; r < s->rows; r++) {
            __m512 p = _mm512_set1_ps(scores[(size_t)(s->row + r) * t->stride + (size_t)i]);
            for (int j = 0; j < width; j++)
                sum[r][j] = _mm512_fmadd_ps(p, v[j], sum[r][j]);
        }
    }
    for (int r = 0; r < s->rows; r++)
        for (int j = 0; j < width; j++)
            _mm512_storeu_ps(acc + (s->row + r) * t->head_dim + s->d + 16 * j, sum[r][j]);
}

INLINE void value_rows(enum dtype type, float *acc, const float *scores, const struct attn_tile *t, int row,
                       int rows)
{
    struct span s = {row, rows, 0};
    for (; s.d + 64 <= t->head_dim; s.d += 64)
        value_block(type, acc, scores, t, &s, 4);
    for (; s.d < t->head_dim; s.d += 16)
        value_block(type, acc, scores, t, &s, 1);
}

/* Calls with a literal number of rows: sixes, threes (a decoding group of 3), twos, one. */
#define FOR_ROWS(call, ...)                  \
    do {                                     \
        int row = 0;                         \
        for (; row + 6 <= t->rows; row += 6) \
            call(__VA_ARGS__, t, row, 6);    \
        for (; row + 3 <= t->rows; row += 3) \
            call(__VA_ARGS__, t, row, 3);    \
        if (row + 2 <= t->rows) {            \
            call(__VA_ARGS__, t, row, 2);    \
            row += 2;                        \
        }                                    \
        if (row < t->rows)                   \
            call(__VA_ARGS__, t, row, 1);    \
    } while (0)

static void attn_scores(float *scores, const struct attn_tile *t)
{
    if (t->type == DTYPE_BF16)
        FOR_ROWS(score_rows, DTYPE_BF16, scores);
    else
        FOR_ROWS(score_rows, DTYPE_F16, scores);
}

static void attn_values(float *acc, const float *scores, const struct attn_tile *t)
{
    if (t->type == DTYPE_BF16)
        FOR_ROWS(value_rows, DTYPE_BF16, acc, scores);
    else
        FOR_ROWS(value_rows, DTYPE_F16, acc, scores);
}

static float max_of(const float *x, int count)
{
    __m512 most = _mm512_set1_ps(-INFINITY);
    for (int i = 0; i < count; i += 16) /* with a NaN the second operand is taken, so NaN is passed over */
        most = _mm512_mask_max_ps(most, mask_of(count - i), _mm512_maskz_loadu_ps(mask_of(count - i), x + i),
                                  most);
    return _mm512_reduce_max_ps(most);
}

static float softmax_part(float *x, int count, float *ret_max)
{
    float max = max_of(x, count), lanes[8];
    __m512 most = _mm512_set1_ps(max), sum = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 16) {
        __mmask16 mask = mask_of(count - i);
        __m512 e = exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + i), most));
        _mm512_mask_storeu_ps(x + i, mask, e);
        sum = _mm512_mask_add_ps(sum, mask, sum, e);
    }
    _mm256_storeu_ps(lanes, fold(sum));
    *ret_max = max;
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

const struct kernels kernels_avx512 = {
    .name = "avx512",
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
    .head_dim_multiple = 16,
};
#endif
