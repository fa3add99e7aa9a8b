/* Radix selection by one block of SELECT_THREADS threads: keys whose unsigned order is the order of the
 * values, and the search for the bin in which a descending running total reaches a goal. Device code only. */
#ifndef COMPUTE_CUDA_SELECT_CUH
#define COMPUTE_CUDA_SELECT_CUH

#include "compute/cuda/common.cuh"

enum { SELECT_THREADS = 1024, SELECT_WARPS = 32, SELECT_BINS = 2048, SELECT_PASSES = 3 };

/* -0 equals +0, NaN equals -infinity. */
__device__ __forceinline__ uint32_t key_of(float value)
{
    float v = value == value ? value + 0.0f : -INFINITY;
    uint32_t bits = __float_as_uint(v);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

__device__ __forceinline__ float value_of(uint32_t key)
{
    return __uint_as_float(key ^ (key & 0x80000000u ? 0x80000000u : 0xffffffffu));
}

/* Pass p looks at bits [shift, shift + bits) of the key: 11, 11, 10. */
__device__ __forceinline__ uint32_t select_shift(int pass)
{
    return pass == 0 ? 21 : pass == 1 ? 10 : 0;
}

__device__ __forceinline__ uint32_t select_mask(int pass)
{
    return pass == 2 ? 0x3ffu : 0x7ffu;
}

/* Whether the bits above the pass's own are those found by the passes before. */
__device__ __forceinline__ bool select_matches(uint32_t key, uint32_t prefix, int pass)
{
    return pass == 0 || ((key ^ prefix) >> (pass == 1 ? 21 : 10)) == 0;
}

struct select_found {
    uint32_t bin;
    uint64_t above; /* total of the bins above it */
};

/* Sum of v over the threads before this one; *ret_all of all. `shared`: SELECT_WARPS entries; ends with all
 * threads past a barrier after its first use, so a second call needs other memory or a barrier. */
__device__ __forceinline__ uint64_t block_scan(uint64_t v, uint64_t *shared, uint64_t *ret_all)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint64_t sum = v;
    for (int step = 1; step < 32; step <<= 1) {
        uint64_t other = __shfl_up_sync(FULL_WARP, sum, step);
        sum += lane >= step ? other : 0;
    }
    if (lane == 31)
        shared[warp] = sum;
    __syncthreads();
    uint64_t warps = shared[lane];
    for (int step = 1; step < 32; step <<= 1) {
        uint64_t other = __shfl_up_sync(FULL_WARP, warps, step);
        warps += lane >= step ? other : 0;
    }
    *ret_all = __shfl_sync(FULL_WARP, warps, 31);
    uint64_t before = __shfl_sync(FULL_WARP, warps, warp ? warp - 1 : 0);
    return (warp ? before : 0) + sum - v;
}

#endif
