/* Integer products with 16 rows in a register: the primitives of q8_lanes.h in AVX-512 with VNNI. Included by
 * avx512.c alone. */
#ifndef COMPUTE_CPU_Q8_AVX512_H
#define COMPUTE_CPU_Q8_AVX512_H

#include "compute/cpu/simd.h"

#define LANES 16
enum { Q8_TILE_TOKENS = 8 };
typedef uint32_t vi __attribute__((vector_size(64)));
typedef int32_t vs __attribute__((vector_size(64)));
typedef float vf __attribute__((vector_size(64)));

INLINE vi lanes_join(__m256i a, __m256i b)
{
    return (vi)_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
}

/* Begins before the block so that the quants end the register; a masked load touches nothing else. */
INLINE __m256i lanes_small(enum dtype type, const uint8_t *p)
{
    int bytes = (int)block32_bytes(type);
    const void *from = (const void *)((uintptr_t)p - (uintptr_t)(32 - bytes));
    if (q8_has_min(type))
        return _mm256_maskz_loadu_epi32((__mmask8)(0xff << (8 - bytes / 4)), from);
    return _mm256_maskz_loadu_epi8((__mmask32)(0xffffffffu << (32 - bytes)), from);
}

INLINE void lanes_halves(vi v, vi w, vi *ret_low, vi *ret_high)
{
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
    const __m512i high = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
    *ret_low = (vi)_mm512_permutex2var_epi64((__m512i)v, low, (__m512i)w);
    *ret_high = (vi)_mm512_permutex2var_epi64((__m512i)v, high, (__m512i)w);
}

INLINE vf lanes_f16(vi v)
{
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)v));
}

INLINE vi lanes_dot(vi sum, vi u, vi x, int wide)
{
    (void)wide;
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)x);
}

INLINE vi lanes_lookup(vi codes)
{
    const __m128i values = _mm_xor_si128(_mm_setr_epi8(IQ4_NL_VALUES), _mm_set1_epi8((char)0x80));
    return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
}

INLINE vf lanes_float(vi v)
{
    return (vf)_mm512_cvtepi32_ps((__m512i)v);
}

#include "compute/cpu/q8_lanes.h"

#endif
