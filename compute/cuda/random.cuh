/* The sampler's random number, on host and device: the low half of the 128-bit XXH3 of {sequence, position}
 * with the seed (base/hash.h), as a number in [0, 1). XXH3 of 16 bytes, from its published description. No
 * state. */
#ifndef COMPUTE_CUDA_RANDOM_CUH
#define COMPUTE_CUDA_RANDOM_CUH

#include <stdint.h>

#define RANDOM_PRIME64_1 0x9E3779B185EBCA87ull
#define RANDOM_PRIME64_2 0xC2B2AE3D27D4EB4Full
#define RANDOM_PRIME32_2 0x85EBCA77u
/* Words 4 to 7 of the algorithm's default secret, xored in pairs. */
#define RANDOM_FLIP_LOW  (0x78E5C0CC4EE679CBull ^ 0x2172FFCC7DD05A82ull)
#define RANDOM_FLIP_HIGH (0x8E2443F7744608B8ull ^ 0x4C263A81E69035E0ull)

__host__ __device__ static inline uint64_t random_high_half(uint64_t a, uint64_t b)
{
#ifdef __CUDA_ARCH__
    return __umul64hi(a, b);
#else
    return (uint64_t)((unsigned __int128)a * b >> 64);
#endif
}

__host__ __device__ static inline uint64_t random_swap(uint64_t v)
{
    v = (v & 0x00ff00ff00ff00ffull) << 8 | (v >> 8 & 0x00ff00ff00ff00ffull);
    v = (v & 0x0000ffff0000ffffull) << 16 | (v >> 16 & 0x0000ffff0000ffffull);
    return v << 32 | v >> 32;
}

__host__ __device__ static inline double random_unit(uint64_t seed, uint64_t sequence, uint32_t position)
{
    uint64_t low_in = sequence, high_in = position;
    uint64_t mixed = low_in ^ high_in ^ (RANDOM_FLIP_LOW - seed);
    uint64_t low = mixed * RANDOM_PRIME64_1, high = random_high_half(mixed, RANDOM_PRIME64_1);
    low += 15ull << 54;
    high_in ^= RANDOM_FLIP_HIGH + seed;
    high += high_in + (uint64_t)(uint32_t)high_in * (RANDOM_PRIME32_2 - 1);
    low ^= random_swap(high);
    low *= RANDOM_PRIME64_2;
    low ^= low >> 37;
    low *= 0x165667919E3779F9ull;
    low ^= low >> 32;
    return (double)(low >> 11) * 0x1p-53;
}

#endif
