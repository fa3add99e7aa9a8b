/* Integer products with 8 rows in a register: the primitives of q8_lanes.h in AVX2. Included by avx2.c
 * alone. */
#ifndef COMPUTE_CPU_Q8_AVX2_H
#define COMPUTE_CPU_Q8_AVX2_H

#include "compute/cpu/simd.h"

#define LANES 8
enum { Q8_TILE_TOKENS = 2 };
typedef uint32_t vi __attribute__((vector_size(32)));
typedef int32_t vs __attribute__((vector_size(32)));
typedef float vf __attribute__((vector_size(32)));

INLINE vi lanes_join(__m256i a, __m256i b)
{
    (void)b;
    return (vi)a;
}

INLINE __m256i lanes_small(enum dtype type, const uint8_t *p)
{
    uint16_t d;
    uint32_t head, high = 0;
    memcpy(&d, p, sizeof d);
    if (q8_has_min(type)) {
        memcpy(&head, p, sizeof head);
        p += 4;
    } else {
        head = (uint32_t)d << 16;
        p += 2;
    }
    if (type == DTYPE_Q5_0 || type == DTYPE_Q5_1) {
        memcpy(&high, p, sizeof high);
        p += 4;
        return _mm256_set_m128i(_mm_loadu_si128((const void *)p), _mm_set_epi32((int)high, (int)head, 0, 0));
    }
    return _mm256_set_m128i(_mm_loadu_si128((const void *)p), _mm_set_epi32((int)head, 0, 0, 0));
}

INLINE void lanes_halves(vi v, vi w, vi *ret_low, vi *ret_high)
{
    *ret_low = (vi)_mm256_permute2x128_si256((__m256i)v, (__m256i)w, 0x20);
    *ret_high = (vi)_mm256_permute2x128_si256((__m256i)v, (__m256i)w, 0x31);
}

INLINE vf lanes_f16(vi v)
{
    __m256i low = (__m256i)(v & 0xffff);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}

/* Pairs of products of numbers up to 127 fit in 16 bits; wider ones are taken in 16 bits from the start. */
INLINE vi lanes_dot(vi sum, vi u, vi x, int wide)
{
    if (!wide) {
        __m256i pairs = _mm256_maddubs_epi16((__m256i)u, (__m256i)x);
        return sum + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    __m256i even = _mm256_and_si256((__m256i)u, _mm256_set1_epi16(255));
    __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)x, 8), 8);
    sum = sum + (vi)_mm256_madd_epi16(even, x_even);
    return sum + (vi)_mm256_madd_epi16(_mm256_srli_epi16((__m256i)u, 8), _mm256_srai_epi16((__m256i)x, 8));
}

INLINE vi lanes_lookup(vi codes)
{
    const __m128i values = _mm_xor_si128(_mm_setr_epi8(IQ4_NL_VALUES), _mm_set1_epi8((char)0x80));
    return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
}

INLINE vf lanes_float(vi v)
{
    return (vf)_mm256_cvtepi32_ps((__m256i)v);
}

#include "compute/cpu/q8_lanes.h"

#endif
