/* compute_topk: the k largest of n values in time proportional to n, ties to the lower position.
 *
 * A sample guesses a bound that a few more than k values pass; one sweep collects their positions; a radix
 * select among these finds the exact k-th value. A wrong guess only costs another sweep. Stateless. */
#include <math.h>
#include <string.h>

#include "compute/cpu/kernels.h"

enum { BIN_BITS = 11, BINS = 1 << BIN_BITS, SAMPLE = 1024 };

/* Unsigned order of the key is the order of the values; -0 equals +0, NaN equals -infinity. */
static inline uint32_t key_of(float value)
{
    float v = value == value ? value + 0.0f : -INFINITY;
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
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

/* The lowest top bin that the k largest probably lie in, from every (n / SAMPLE)-th value. */
static uint32_t guess_bin(const float *values, uint32_t n, uint32_t k)
{
    if (n < 4 * SAMPLE)
        return 0;
    uint32_t bins[BINS] = {0}, above, step = n / SAMPLE;
    for (uint32_t i = 0; i < SAMPLE; i++)
        bins[key_of(values[i * step]) >> (32 - BIN_BITS)]++;
    double share = (double)k / (double)step;
    uint32_t rank = (uint32_t)(share + 3 * sqrt(share)) + 2;
    return rank >= SAMPLE ? 0 : bin_of_rank(bins, rank, &above);
}

static uint32_t collect(uint32_t *ret_index, const float *values, uint32_t n, uint32_t bin)
{
    uint32_t count = 0, least = bin << (32 - BIN_BITS);
    for (uint32_t i = 0; i < n; i++) {
        ret_index[count] = i;
        count += key_of(values[i]) >= least;
    }
    return count;
}

/* Key of the k-th largest candidate, and how many candidates of exactly this key are among the k. */
static uint32_t select_key(const float *values, const uint32_t *candidate, uint32_t count, uint32_t k,
                           uint32_t *ret_equal)
{
    static const int shifts[] = {21, 10, 0};
    uint32_t prefix = 0, mask = 0;
    for (int pass = 0; pass < 3; pass++) {
        uint32_t bins[BINS] = {0}, above, digits = (pass == 2 ? 1u << 10 : 1u << 11) - 1;
        for (uint32_t i = 0; i < count; i++) {
            uint32_t key = key_of(values[candidate[i]]);
            bins[key >> shifts[pass] & digits] += (key & mask) == prefix;
        }
        prefix |= bin_of_rank(bins, k, &above) << shifts[pass];
        mask |= digits << shifts[pass];
        k -= above;
    }
    *ret_equal = k;
    return prefix;
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
    uint32_t count = collect(scratch, values, n, guess_bin(values, n, k)), equal, taken = 0;
    if (count < k)
        count = collect(scratch, values, n, 0);
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
