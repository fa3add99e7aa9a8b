/* Products in float32: part of avx2.c and of avx512.c, which include it once each after they have said how
 * wide a register is. (Not a .c file, since instruction sets are chosen by file.)
 *
 * One register is the lanes of kernels.h, one fused multiply-add a step, quad_sum the end. Shapes are
 * template-like constants: always_inline functions that take the type and the number of tokens as literals,
 * so that the arrays below become registers.
 *
 * The includer defines LANES, vi and vf (vectors of LANES uint32_t, float) and
 *   TILE_TOKENS                              tokens that keep the sums of four rows in registers: 3 or 6
 *   v_set, v_load, v_store, v_fma            as their names say; v_fma(a, b, c) = a * b + c
 *   v_load_some, v_store_some(.., count)     lanes [0, count) alone, the rest zero; count may exceed LANES
 *   v_plain(type, p), v_plain_some           LANES elements of F32, F16 or BF16
 *   v_u8(p), v_s8(p), v_u8_of(bytes, part)   LANES bytes to 32 bits; of a 16-byte register its part-th LANES
 *   v_fifth_bits(q, high, first)             q | 16 where bit first + lane of high is set
 *   lanes_float(vi)                          of int32
 *   v_fold(v)                                to 8 lanes: j with j + 8 */
#include "compute/cpu/k_quants.h"

enum { PARTS = 32 / LANES }; /* registers of 32 elements */

/* Sums of four registers' lanes. */
INLINE __m128 quad_sum_of(const vf a[4])
{
    __m256 folded[4];
    for (int i = 0; i < 4; i++)
        folded[i] = v_fold(a[i]);
    return quad_sum(folded);
}

INLINE vf scalar_f16(const uint8_t *p)
{
    return v_set(k_f16(p));
}

INLINE void numbers_to_float(__m256i numbers, const vf d[2], const vf m[2], vf w[PARTS])
{
    for (int i = 0; i < PARTS; i++) {
        int half = i * LANES / 16;
        __m128i bytes = half ? _mm256_extracti128_si256(numbers, 1) : _mm256_castsi256_si128(numbers);
        w[i] = v_fma(d[half], lanes_float(v_u8_of(bytes, i * LANES % 16 / LANES)), m[half]);
    }
}

/* Sub-block `sub` (a literal) of a superblock. */
INLINE void load32_k(enum dtype type, const uint8_t *b, int sub, const struct k_scales *s, vf w[PARTS])
{
    int first = q8_has_halves(type) ? 2 * sub : sub, second = q8_has_halves(type) ? first + 1 : first;
    vf d[2] = {v_set(s->d[first]), v_set(s->d[second])}, m[2] = {v_set(s->m[first]), v_set(s->m[second])};
    numbers_to_float(k_numbers(type, b, sub), d, m, w);
}

/* 32 elements in their order, of a plain type or a type of blocks of 32. d * (q - 8) is taken as
 * d * q + (-8 d): both are exact in float32. w = d * q + m rounds once. */
INLINE void load32(enum dtype type, const uint8_t *p, vf w[PARTS])
{
    if (type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16) {
        for (int i = 0; i < PARTS; i++)
            w[i] = v_plain(type, p + i * (type == DTYPE_F32 ? 4 : 2) * LANES);
        return;
    }
    vf d = scalar_f16(p);
    if (type == DTYPE_Q8_0) {
        for (int i = 0; i < PARTS; i++)
            w[i] = d * lanes_float(v_s8(p + 2 + LANES * i));
        return;
    }
    vf m = q8_has_min(type) ? scalar_f16(p + 2) : d * v_set((float)-q8_offset(type));
    p += q8_has_min(type) ? 4 : 2;
    if (type == DTYPE_IQ4_NL) {
        numbers_to_float(k_iq4_nl(p), (vf[]){d, d}, (vf[]){m, m}, w);
        return;
    }
    int five = type == DTYPE_Q5_0 || type == DTYPE_Q5_1;
    uint32_t high = 0;
    if (five) {
        memcpy(&high, p, sizeof high);
        p += 4;
    }
    vi q[PARTS];
    for (int i = 0; i < PARTS / 2; i++) {
        vi both = v_u8(p + LANES * i);
        q[i] = both & 15;
        q[i + PARTS / 2] = both >> 4;
    }
    for (int i = 0; i < PARTS; i++)
        w[i] = v_fma(d, lanes_float(five ? v_fifth_bits(q[i], high, LANES * i) : q[i]), m);
}

#define EACH_SUB_BLOCK(call) call(0) call(1) call(2) call(3) call(4) call(5) call(6) call(7)

INLINE void expand_k(enum dtype type, float *out, const uint8_t *row, uint32_t count)
{
    for (uint32_t i = 0; i < count; i += SUPER_BLOCK, row += dtype_info(type)->block_bytes) {
        struct k_scales s;
        vf w[PARTS];
        k_scales_of(type, row, &s);
#define EXPAND_SUB(sub)              \
    load32_k(type, row, sub, &s, w); \
    for (int j = 0; j < PARTS; j++)  \
        v_store(out + i + 32 * (sub) + LANES * j, w[j]);
        EACH_SUB_BLOCK(EXPAND_SUB)
#undef EXPAND_SUB
    }
}

INLINE void expand_as(enum dtype type, float *out, const uint8_t *row, uint32_t count)
{
    if (k_type(type)) {
        expand_k(type, out, row, count);
        return;
    }
    uint32_t i = 0;
    for (; i + 32 <= count; i += 32, row += block32_bytes(type)) {
        vf w[PARTS];
        load32(type, row, w);
        for (int j = 0; j < PARTS; j++)
            v_store(out + i + LANES * j, w[j]);
    }
    for (; i < count; i += LANES, row += block32_bytes(type) / PARTS) {
        int left = count - i < LANES ? (int)(count - i) : LANES;
        v_store_some(out + i, v_plain_some(type, row, left), left);
    }
}

/* Rows are short and read four at a time, too little at a stretch for the processor's own prefetching; only
 * prefetched, so it may pass the end. */
INLINE void prefetch_rows(const uint8_t *const row[4], size_t at, size_t bytes)
{
    uintptr_t ahead = (uintptr_t)row[0] + PREFETCH_BYTES + 4 * at;
    for (size_t i = 0; i < 4 * bytes; i += 64)
        _mm_prefetch((const char *)(ahead + i), _MM_HINT_T0);
}

INLINE void dot_sub_block(enum dtype type, const uint8_t *const row[4], size_t at, int sub,
                          const struct k_scales s[4], const float *x, vf acc[4])
{
    for (int r = 0; r < 4; r++) {
        vf w[PARTS];
        load32_k(type, row[r] + at, sub, &s[r], w);
        for (int j = 0; j < PARTS; j++)
            acc[r] = v_fma(w[j], v_load(x + LANES * j), acc[r]);
    }
}

INLINE __m128 dot_quad_k(enum dtype type, const uint8_t *const row[4], uint32_t cols, const float *x)
{
    vf acc[4] = {v_set(0), v_set(0), v_set(0), v_set(0)};
    size_t at = 0, bytes = dtype_info(type)->block_bytes;
    for (uint32_t c = 0; c < cols; c += SUPER_BLOCK, at += bytes) {
        struct k_scales s[4];
        prefetch_rows(row, at, bytes);
        for (int r = 0; r < 4; r++)
            k_scales_of(type, row[r] + at, &s[r]);
#define DOT_SUB(sub) dot_sub_block(type, row, at, sub, s, x + c + 32 * (sub), acc);
        EACH_SUB_BLOCK(DOT_SUB)
#undef DOT_SUB
    }
    return quad_sum_of(acc);
}

/* Four rows at a time: their sums are independent chains, which hides the latency of the additions. */
INLINE __m128 dot_quad(enum dtype type, const uint8_t *const row[4], uint32_t cols, const float *x)
{
    vf acc[4] = {v_set(0), v_set(0), v_set(0), v_set(0)};
    uint32_t c = 0;
    size_t at = 0;
    for (; c + 32 <= cols; c += 32, at += block32_bytes(type)) {
        vf v[PARTS];
        for (int j = 0; j < PARTS; j++)
            v[j] = v_load(x + c + LANES * j);
        prefetch_rows(row, at, block32_bytes(type));
        for (int r = 0; r < 4; r++) {
            vf w[PARTS];
            load32(type, row[r] + at, w);
            for (int j = 0; j < PARTS; j++)
                acc[r] = v_fma(w[j], v[j], acc[r]);
        }
    }
    for (; c < cols; c += LANES, at += block32_bytes(type) / PARTS) {
        int left = cols - c < LANES ? (int)(cols - c) : LANES;
        vf v = v_load_some(x + c, left);
        for (int r = 0; r < 4; r++)
            acc[r] = v_fma(v_plain_some(type, row[r] + at, left), v, acc[r]);
    }
    return quad_sum_of(acc);
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
        store_some(out + r,
                   k_type(type) ? dot_quad_k(type, quad, w->cols, x) : dot_quad(type, quad, w->cols, x),
                   left);
    }
}

#define FOR_EACH_TYPE(call)       \
    TYPE_CASE(call, DTYPE_F32)    \
    TYPE_CASE(call, DTYPE_F16)    \
    TYPE_CASE(call, DTYPE_BF16)   \
    TYPE_CASE(call, DTYPE_Q4_0)   \
    TYPE_CASE(call, DTYPE_Q4_1)   \
    TYPE_CASE(call, DTYPE_Q5_0)   \
    TYPE_CASE(call, DTYPE_Q5_1)   \
    TYPE_CASE(call, DTYPE_Q8_0)   \
    TYPE_CASE(call, DTYPE_IQ4_NL) \
    TYPE_CASE(call, DTYPE_Q2_K)   \
    TYPE_CASE(call, DTYPE_Q3_K)   \
    TYPE_CASE(call, DTYPE_Q4_K)   \
    TYPE_CASE(call, DTYPE_Q5_K)   \
    TYPE_CASE(call, DTYPE_Q6_K)   \
    default:                      \
        CHECK(!"a weight type that compute has no kernel for")

static void expand(float *out, enum dtype type, const uint8_t *row, uint32_t count)
{
#define EXPAND(t) expand_as(t, out, row, count)
    switch (type) {
        FOR_EACH_TYPE(EXPAND);
    }
#undef EXPAND
}

static void dot_rows(float *out, const struct matrix *w, uint32_t first_row, uint32_t rows, const float *x)
{
#define DOT_ROWS(t) dot_rows_as(t, out, w, first_row, rows, x)
    switch (w->type) {
        FOR_EACH_TYPE(DOT_ROWS);
    }
#undef DOT_ROWS
}
