/* Registers of 16 lanes: the primitives of float_lanes.h, attention_lanes.h and q8_lanes.h in AVX-512 with
 * VNNI. Included by avx512.c alone. */
#ifndef COMPUTE_CPU_LANES_AVX512_H
#define COMPUTE_CPU_LANES_AVX512_H

#include "compute/cpu/simd.h"

#define LANES 16
enum { TILE_TOKENS = 6, Q8_TILE_TOKENS = 8 };
typedef uint32_t vi __attribute__((vector_size(64)));
typedef int32_t vs __attribute__((vector_size(64)));
typedef float vf __attribute__((vector_size(64)));

/* Lanes [0, count) on; count >= 0. */
INLINE __mmask16 mask_of(int count)
{
    return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
}

INLINE vf v_set(float x)
{
    return (vf)_mm512_set1_ps(x);
}

INLINE vf v_load(const float *p)
{
    return (vf)_mm512_loadu_ps(p);
}

INLINE vf v_load_some(const float *p, int count)
{
    return (vf)_mm512_maskz_loadu_ps(mask_of(count), p);
}

INLINE void v_store(float *p, vf v)
{
    _mm512_storeu_ps(p, (__m512)v);
}

INLINE void v_store_some(float *p, vf v, int count)
{
    _mm512_mask_storeu_ps(p, mask_of(count), (__m512)v);
}

INLINE vf v_keep(vf v, int count)
{
    return (vf)_mm512_maskz_mov_ps(mask_of(count), (__m512)v);
}

INLINE vf v_fma(vf a, vf b, vf c)
{
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

INLINE vf v_min(vf a, vf b)
{
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
}

INLINE vf v_max(vf a, vf b)
{
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
}

INLINE vf v_round(vf v)
{
    return (vf)_mm512_roundscale_ps((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vf v_scale2(vf v, vf n)
{
    return (vf)_mm512_scalef_ps((__m512)v, (__m512)n);
}

INLINE vf v_zero_where_less(vf v, vf x, float limit)
{
    __mmask16 less = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_LT_OQ);
    return (vf)_mm512_mask_blend_ps(less, (__m512)v, _mm512_setzero_ps());
}

INLINE __m256 v_fold(vf v)
{
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
}

INLINE vi v_u8(const uint8_t *p)
{
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p));
}

INLINE vi v_s8(const uint8_t *p)
{
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p));
}

INLINE vi v_u8_of(__m128i bytes, int part)
{
    (void)part;
    return (vi)_mm512_cvtepu8_epi32(bytes);
}

INLINE vi v_fifth_bits(vi q, uint32_t high, int first)
{
    return (vi)_mm512_mask_or_epi32((__m512i)q, (__mmask16)(high >> first), (__m512i)q,
                                    _mm512_set1_epi32(16));
}

INLINE vf bf16_to_f32(__m256i v)
{
    return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

INLINE vf v_plain(enum dtype type, const uint8_t *p)
{
    if (type == DTYPE_F32)
        return (vf)_mm512_loadu_ps((const void *)p);
    __m256i v = _mm256_loadu_si256((const void *)p);
    return type == DTYPE_F16 ? (vf)_mm512_cvtph_ps(v) : bf16_to_f32(v);
}

INLINE vf v_plain_some(enum dtype type, const uint8_t *p, int count)
{
    if (type == DTYPE_F32)
        return (vf)_mm512_maskz_loadu_ps(mask_of(count), p);
    __m256i v = _mm256_maskz_loadu_epi16(mask_of(count), p);
    return type == DTYPE_F16 ? (vf)_mm512_cvtph_ps(v) : bf16_to_f32(v);
}

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

#endif
