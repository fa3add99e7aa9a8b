/* Superblocks of 256 and IQ4_NL for the products in float32: quants as bytes in their order, scales as
 * float32. 256-bit code, the same under every width; included by float_lanes.h. */
#ifndef COMPUTE_CPU_K_QUANTS_H
#define COMPUTE_CPU_K_QUANTS_H

#include "compute/cpu/simd.h"

enum { SUPER_BLOCK = 256 };

/* Element = d * number + m, of each 16 (of each 32: Q4_K and Q5_K, 8 entries). */
struct k_scales {
    float d[16], m[16];
};

INLINE int k_type(enum dtype type)
{
    return type == DTYPE_Q2_K || type == DTYPE_Q3_K || type == DTYPE_Q4_K || type == DTYPE_Q5_K ||
           type == DTYPE_Q6_K;
}

INLINE __m256i k_load(const uint8_t *p)
{
    return _mm256_loadu_si256((const void *)p);
}

/* (v >> shift) & mask of each byte; what crosses from the neighbour is masked off. */
INLINE __m256i k_bits(__m256i v, int shift, int mask)
{
    __m256i moved = shift >= 0 ? _mm256_srli_epi16(v, shift) : _mm256_slli_epi16(v, -shift);
    return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}

/* Numbers of sub-block `sub` (a literal) of 32, offset not taken off. */
INLINE __m256i k_numbers(enum dtype type, const uint8_t *b, int sub)
{
    int half = sub / 4, quarter = sub % 4;
    switch (type) {
    case DTYPE_Q2_K:
        return k_bits(k_load(b + 16 + 32 * half), 2 * quarter, 3);
    case DTYPE_Q3_K:
        return _mm256_or_si256(k_bits(k_load(b + 32 + 32 * half), 2 * quarter, 3),
                               k_bits(k_load(b), sub - 2, 4));
    case DTYPE_Q4_K:
        return k_bits(k_load(b + 16 + 32 * (sub / 2)), 4 * (sub % 2), 15);
    case DTYPE_Q5_K:
        return _mm256_or_si256(k_bits(k_load(b + 48 + 32 * (sub / 2)), 4 * (sub % 2), 15),
                               k_bits(k_load(b + 16), sub - 4, 16));
    default: /* Q6_K */
        return _mm256_or_si256(k_bits(k_load(b + 64 * half + 32 * (quarter % 2)), 4 * (quarter / 2), 15),
                               k_bits(k_load(b + 128 + 32 * half), 2 * quarter - 4, 48));
    }
}

INLINE void k_times(float *out, __m128i bytes, float factor, int count)
{
    for (int i = 0; i < count; i += 8, bytes = _mm_srli_si128(bytes, 8))
        _mm256_storeu_ps(
            out + i, _mm256_mul_ps(_mm256_set1_ps(factor), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))));
}

INLINE float k_f16(const uint8_t *p)
{
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return _cvtsh_ss(bits);
}

/* 12 bytes of 6-bit scales and minima, eight each: the last four of both have their upper two bits in the
 * bytes of the first four. */
INLINE void k_scales_45(const uint8_t *b, struct k_scales *s)
{
    uint32_t first[3];
    memcpy(first, b + 4, sizeof first);
    uint32_t scale = (first[2] & 0x0f0f0f0fu) | ((first[0] >> 2) & 0x30303030u);
    uint32_t min = ((first[2] >> 4) & 0x0f0f0f0fu) | ((first[1] >> 2) & 0x30303030u);
    const uint32_t six = 0x3f3f3f3fu;
    k_times(s->d, _mm_set_epi32(0, 0, (int)scale, (int)(first[0] & six)), k_f16(b), 8);
    k_times(s->m, _mm_set_epi32(0, 0, (int)min, (int)(first[1] & six)), -k_f16(b + 2), 8);
}

/* Sixteen 6-bit scales less 32: lower nibbles in 8 bytes, upper bit pairs in 4. */
INLINE __m128i k_scales_3(const uint8_t *packed)
{
    uint64_t low;
    uint32_t high;
    memcpy(&low, packed, sizeof low);
    memcpy(&high, packed + 8, sizeof high);
    __m128i nibbles = _mm_and_si128(_mm_set_epi64x((long long)(low >> 4), (long long)low), _mm_set1_epi8(15));
    __m128i pairs = _mm_set_epi32((int)(high >> 2), (int)high, (int)(high << 2), (int)(high << 4));
    pairs = _mm_and_si128(pairs, _mm_set1_epi8(48));
    return _mm_sub_epi8(_mm_or_si128(nibbles, pairs), _mm_set1_epi8(32));
}

/* Products with a scale are exact in float32. */
INLINE void k_scales_of(enum dtype type, const uint8_t *b, struct k_scales *s)
{
    if (type == DTYPE_Q4_K || type == DTYPE_Q5_K) {
        k_scales_45(b, s);
    } else if (type == DTYPE_Q2_K) {
        __m128i both = _mm_loadu_si128((const void *)b), low = _mm_set1_epi8(15);
        k_times(s->d, _mm_and_si128(both, low), k_f16(b + 80), 16);
        k_times(s->m, _mm_and_si128(_mm_srli_epi16(both, 4), low), -k_f16(b + 82), 16);
    } else {
        int three = type == DTYPE_Q3_K;
        __m128i scale = three ? k_scales_3(b + 96) : _mm_loadu_si128((const void *)(b + 192));
        float d = k_f16(b + (three ? 108 : 208));
        k_times(s->d, scale, d, 16);
        k_times(s->m, scale, d * (float)-q8_offset(type), 16);
    }
}

/* IQ4_NL's values + 128 for 16 bytes of two codes each: the lower codes first. */
INLINE __m256i k_iq4_nl(const uint8_t *p)
{
    const __m128i values = _mm_xor_si128(_mm_setr_epi8(IQ4_NL_VALUES), _mm_set1_epi8((char)0x80));
    __m128i both = _mm_loadu_si128((const void *)p);
    __m256i codes = k_bits(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), 0, 15);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), codes);
}

#endif
