/* Registers of 8 lanes: the primitives of float_lanes.h, attention_lanes.h and q8_lanes.h in AVX2. Included
 * by avx2.c alone. */
#ifndef COMPUTE_CPU_LANES_AVX2_H
#define COMPUTE_CPU_LANES_AVX2_H

#include "compute/cpu/simd.h"

#define LANES 8
enum { TILE_TOKENS = 3, Q8_TILE_TOKENS = 2 };
typedef uint32_t vi __attribute__((vector_size(32)));
typedef int32_t vs __attribute__((vector_size(32)));
typedef float vf __attribute__((vector_size(32)));

INLINE vf v_set(float x)
{
    return (vf)_mm256_set1_ps(x);
}

INLINE vf v_load(const float *p)
{
    return (vf)_mm256_loadu_ps(p);
}

INLINE vf v_load_some(const float *p, int count)
{
    return (vf)_mm256_maskload_ps(p, lane_mask(count));
}

INLINE void v_store(float *p, vf v)
{
    _mm256_storeu_ps(p, (__m256)v);
}

INLINE void v_store_some(float *p, vf v, int count)
{
    _mm256_maskstore_ps(p, lane_mask(count), (__m256)v);
}

INLINE vf v_keep(vf v, int count)
{
    return (vf)_mm256_and_ps((__m256)v, _mm256_castsi256_ps(lane_mask(count)));
}

INLINE vf v_fma(vf a, vf b, vf c)
{
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

INLINE vf v_min(vf a, vf b)
{
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
}

INLINE vf v_max(vf a, vf b)
{
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
}

INLINE vf v_round(vf v)
{
    return (vf)_mm256_round_ps((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* 2^n in two factors, since n reaches 128. */
INLINE vf v_scale2(vf v, vf n)
{
    __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32((__m256)n), _mm256_set1_epi32(126));
    return v * (vf)_mm256_castsi256_ps(_mm256_slli_epi32(power, 23)) * v_set(2.0f);
}

INLINE vf v_zero_where_less(vf v, vf x, float limit)
{
    return (vf)_mm256_andnot_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(limit), _CMP_LT_OQ), (__m256)v);
}

INLINE __m256 v_fold(vf v)
{
    return (__m256)v;
}

INLINE vi v_u8(const uint8_t *p)
{
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p));
}

INLINE vi v_s8(const uint8_t *p)
{
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p));
}

INLINE vi v_u8_of(__m128i bytes, int part)
{
    return (vi)_mm256_cvtepu8_epi32(part ? _mm_srli_si128(bytes, 8) : bytes);
}

/* The bit alone, whatever it is worth, cut down to 16. The lowest four are worth less, so they are moved up
 * first. */
INLINE vi v_fifth_bits(vi q, uint32_t high, int first)
{
    const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i bits = _mm256_set1_epi32((int)(first == 0 ? high << 4 : high));
    __m256i bit = _mm256_and_si256(bits, _mm256_slli_epi32(lane_bit, first == 0 ? 4 : first));
    return q | (vi)_mm256_min_epu32(bit, _mm256_set1_epi32(16));
}

INLINE vf v_plain(enum dtype type, const uint8_t *p)
{
    return (vf)load8(type, p);
}

INLINE vf v_plain_some(enum dtype type, const uint8_t *p, int count)
{
    uint8_t buf[32] = {0};
    memcpy(buf, p, (size_t)count * (type == DTYPE_F32 ? 4 : 2));
    return (vf)load8(type, buf);
}

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

#endif
