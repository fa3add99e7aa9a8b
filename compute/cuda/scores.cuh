/* Scores q.k of one group of query heads, shared by attention and retrieval: keys go from global memory straight
 * into tensor core operands (see attention.cu). A warp takes 16 keys at a time; in a warp, `row` = lane / 4 is the
 * query head (and, while loading, the key), `column` = lane % 4. Device code only. */
#ifndef COMPUTE_CUDA_SCORES_CUH
#define COMPUTE_CUDA_SCORES_CUH

#include "compute/cuda/common.cuh"

/* Operand rows 0-7: the group's queries, rounded; rows 8-15: what rounding left. Step s = 2 j + h holds dims
 * 32 j + 8 c + 4 h + 0..3 of thread column c. */
template <bool BF16, int DIM>
__device__ __forceinline__ void load_query(uint32_t (*ret_q)[4], const float *q, bool real, uint32_t column)
{
#pragma unroll
    for (int s = 0; s < DIM / 16; s++) {
        float4 v = make_float4(0, 0, 0, 0);
        if (real)
            v = *(const float4 *)(q + 32 * (s / 2) + 8 * column + 4 * (s % 2));
        split<BF16>(v.x, v.y, &ret_q[s][0], &ret_q[s][1]);
        split<BF16>(v.z, v.w, &ret_q[s][2], &ret_q[s][3]);
    }
}

/* Keys of 16 entries; a piece past the end is not read. */
template <int DIM> struct keys {
    uint4 k[2][DIM / 32];
};

template <int DIM>
__device__ __forceinline__ void load_keys(struct keys<DIM> *ret, const uint8_t *base, const uint64_t *offset,
                                          uint32_t entry, uint32_t count)
{
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        const uint8_t *p = base + offset[entry + tile * 8];
#pragma unroll
        for (int j = 0; j < DIM / 32; j++)
            ret->k[tile][j] = entry + tile * 8 < count ? load_stream(p + 64 * j) : make_uint4(0, 0, 0, 0);
    }
}

/* Scores of the row's query for entries 2c, 2c + 1, 2c + 8, 2c + 9 of 16. */
template <bool BF16, int DIM>
__device__ __forceinline__ void score_keys(float *ret_scores, const uint32_t (*q)[4], const struct keys<DIM> *keys)
{
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        float c[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < DIM / 32; j++) {
            mma_16x8x16<BF16>(c, q[2 * j], keys->k[tile][j].x, keys->k[tile][j].y);
            mma_16x8x16<BF16>(c, q[2 * j + 1], keys->k[tile][j].z, keys->k[tile][j].w);
        }
        ret_scores[2 * tile] = c[0] + c[2];
        ret_scores[2 * tile + 1] = c[1] + c[3];
    }
}

/* Maximum over the four threads of a row. */
__device__ __forceinline__ float quad_max(float v)
{
    v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 1));
    return fmaxf(v, __shfl_xor_sync(FULL_WARP, v, 2));
}

__device__ __forceinline__ float quad_sum(float v)
{
    v += __shfl_xor_sync(FULL_WARP, v, 1);
    return v + __shfl_xor_sync(FULL_WARP, v, 2);
}

#endif
