/* What the vector paths share: small helpers of 256 bits, and AVX2 kernels that a wider path takes over as
 * they are. For files built with AVX2, FMA and F16C only. */
#ifndef COMPUTE_CPU_SIMD_H
#define COMPUTE_CPU_SIMD_H

#include <immintrin.h>
#include <string.h>

#include "base/check.h"
#include "compute/cpu/kernels.h"

#define INLINE static inline __attribute__((always_inline))

enum { PREFETCH_PIECES = 16, PREFETCH_BYTES = 8192 };

void avx2_quantize(struct act_block *out, const float *x, uint32_t cols);
void avx2_rmsnorm(float *out, const float *x, const float *weight, int dim, float eps);
void avx2_narrow(uint8_t *out, enum dtype type, const float *x, int count);
void avx2_pool_weights(float *out, const float *e, float factor, int count, enum pool_kind pool, int first);

/* Sums of four registers' lanes, each ((0+1)+(2+3)) + ((4+5)+(6+7)). */
INLINE __m128 quad_sum(const __m256 a[4])
{
    __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* Lanes [0, count) on. */
INLINE __m256i lane_mask(int count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE __m256 load8_f16(const uint8_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
}

INLINE __m256 load8_bf16(const uint8_t *p)
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)), 16));
}

/* 8 elements of a plain type. */
INLINE __m256 load8(enum dtype type, const uint8_t *p)
{
    if (type == DTYPE_F32)
        return _mm256_loadu_ps((const void *)p);
    return type == DTYPE_F16 ? load8_f16(p) : load8_bf16(p);
}

INLINE size_t block32_bytes(enum dtype type)
{
    return type == DTYPE_F32                            ? 128
           : type == DTYPE_Q8_0                         ? 34
           : type == DTYPE_Q4_0 || type == DTYPE_IQ4_NL ? 18
           : type == DTYPE_Q4_1                         ? 20
           : type == DTYPE_Q5_0                         ? 22
           : type == DTYPE_Q5_1                         ? 24
                                                        : 64;
}

INLINE void store_some(float *out, __m128 v, int count)
{
    if (count == 4) {
        _mm_storeu_ps(out, v);
        return;
    }
    float buf[4];
    _mm_storeu_ps(buf, v);
    memcpy(out, buf, (size_t)count * sizeof *out);
}

/* K and V lie together: fetched at once they cost half of what they cost apart. */
INLINE void prefetch_pieces(const struct attn_tile *t, int first, int end)
{
    for (int i = first; i < end && i < t->count; i++)
        for (int at = 0; at < t->piece_bytes; at += 64)
            _mm_prefetch((const char *)t->piece[i] + at, _MM_HINT_T0);
}

/* Some query rows of a tile and where in the head's dimensions to begin. */
struct span {
    int row, rows, d;
};

#define TYPE_CASE(call, type) \
    case type:                \
        call(type);           \
        break;

#endif
