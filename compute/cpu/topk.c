/* compute_topk: the k largest of n values in time proportional to n, ties to the lower position.
 *
 * A sample guesses a bound that a few more than k values pass; one sweep collects their positions; a radix
 * select among these finds the exact k-th value. A wrong guess only costs another sweep. Stateless. */
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#include <math.h>
#include <string.h>

#include "compute/cpu/kernels.h"

enum { BINS = 1 << 11, SAMPLE = 1024 };

/* Unsigned order of the key is the order of the values; -0 equals +0, NaN equals -infinity. */
static inline uint32_t key_of(float value)
{
    float v = value == value ? value + 0.0f : -INFINITY;
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

static inline float value_of(uint32_t key)
{
    uint32_t bits = key ^ (key & 0x80000000u ? 0x80000000u : 0xffffffffu);
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* The highest bin from which on at least `want` counts lie; *ret_above: counts in the bins above it. */
static uint32_t bin_of_rank(const uint32_t *bins, uint32_t want, uint32_t *ret_above)
{
    uint32_t above = 0, bin = BINS;
    while (bin-- > 1 && above + bins[bin] < want)
        above += bins[bin];
    *ret_above = above;
    return bin;
}

/* Bits in which the candidates' keys differ: where all are equal there is nothing to sort. */
static uint32_t differing_bits(const float *values, const uint32_t *candidate, uint32_t count)
{
    uint32_t first = key_of(values[candidate[0]]), bits = 0;
    for (uint32_t i = 1; i < count; i++)
        bits |= key_of(values[candidate[i]]) ^ first;
    return bits;
}

/* Key of the k-th largest of the candidates, 1 <= k <= count, and how many candidates of exactly this key are
 * among the k. */
static uint32_t select_key(const float *values, const uint32_t *candidate, uint32_t count, uint32_t k,
                           uint32_t *ret_equal)
{
    static const int shifts[] = {21, 10, 0};
    uint32_t differ = differing_bits(values, candidate, count), prefix = key_of(values[candidate[0]]),
             mask = 0;
    for (int pass = 0; pass < 3; pass++) {
        uint32_t digits = ((pass == 2 ? 1u << 10 : 1u << 11) - 1) << shifts[pass];
        if (differ & digits) {
            uint32_t bins[BINS] = {0}, above;
            for (uint32_t i = 0; i < count; i++) {
                uint32_t key = key_of(values[candidate[i]]);
                bins[(key & digits) >> shifts[pass]] += ((key ^ prefix) & mask) == 0;
            }
            prefix = (prefix & ~digits) | bin_of_rank(bins, k, &above) << shifts[pass];
            k -= above;
        }
        mask |= digits;
    }
    *ret_equal = k;
    return prefix;
}

/* A value that the k largest are probably not below, from every (n / SAMPLE)-th value. */
static float guess_bound(const float *values, uint32_t n, uint32_t k, uint32_t *scratch)
{
    if (n < 4 * SAMPLE)
        return -INFINITY;
    uint32_t step = n / SAMPLE, equal;
    double share = (double)k / (double)step;
    uint32_t rank = (uint32_t)(share + 3 * sqrt(share)) + 2;
    if (rank >= SAMPLE)
        return -INFINITY;
    for (uint32_t i = 0; i < SAMPLE; i++)
        scratch[i] = i * step;
    return value_of(select_key(values, scratch, SAMPLE, rank, &equal));
}

/* Bit i set where values[i] >= bound, for 16 values. */
static inline uint32_t at_least(const float *values, float bound)
{
#if defined(__SSE2__)
    __m128 least = _mm_set1_ps(bound);
    __m128i m[4];
    for (int i = 0; i < 4; i++)
        m[i] = _mm_castps_si128(_mm_cmpge_ps(_mm_loadu_ps(values + 4 * i), least));
    return (uint32_t)_mm_movemask_epi8(
        _mm_packs_epi16(_mm_packs_epi32(m[0], m[1]), _mm_packs_epi32(m[2], m[3])));
#else
    uint32_t bits = 0;
    for (int i = 0; i < 16; i++)
        bits |= (uint32_t)(values[i] >= bound) << i;
    return bits;
#endif
}

/* Positions of the values that are not below the bound, ascending; returns their number. */
static uint32_t collect(uint32_t *ret_index, const float *values, uint32_t n, float bound)
{
    uint32_t count = 0, i = 0;
    if (!(bound > -INFINITY)) { /* NaN ranks as -infinity, so everything passes */
        for (; i < n; i++)
            ret_index[i] = i;
        return n;
    }
    for (; i + 16 <= n; i += 16)
        for (uint32_t bits = at_least(values + i, bound); bits; bits &= bits - 1)
            ret_index[count++] = i + (uint32_t)__builtin_ctz(bits);
    for (; i < n; i++)
        if (values[i] >= bound)
            ret_index[count++] = i;
    return count;
}

static uint32_t take_all(uint32_t *ret_index, double *ret_mass, const float *values, uint32_t n)
{
    double mass = 0;
    for (uint32_t i = 0; i < n; i++) {
        ret_index[i] = i;
        mass += (double)values[i];
    }
    if (ret_mass)
        *ret_mass = mass;
    return n;
}

uint32_t compute_topk(uint32_t *ret_index, double *ret_mass, const float *values, uint32_t n, uint32_t k,
                      uint32_t *scratch)
{
    if (k >= n)
        return take_all(ret_index, ret_mass, values, n);
    if (k == 0)
        return take_all(ret_index, ret_mass, values, 0);
    uint32_t count = collect(scratch, values, n, guess_bound(values, n, k, scratch)), equal, taken = 0;
    if (count < k)
        count = collect(scratch, values, n, -INFINITY);
    uint32_t least = select_key(values, scratch, count, k, &equal);
    double mass = 0;
    for (uint32_t i = 0; taken < k; i++) {
        uint32_t key = key_of(values[scratch[i]]);
        if (key < least || (key == least && equal == 0))
            continue;
        equal -= key == least;
        ret_index[taken++] = scratch[i];
        mass += (double)values[scratch[i]];
    }
    if (ret_mass)
        *ret_mass = mass;
    return k;
}
