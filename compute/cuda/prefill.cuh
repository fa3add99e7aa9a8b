/* What both forms of prefill attention share: blocks of TOKENS tokens that walk tiles of KEYS keys, the
 * running softmax, and the sources of tiles. A warp has M_TILES tiles of 16 tokens; scores and accumulators
 * lie as in mma_16x8x16's results. Device code only. */
#ifndef COMPUTE_CUDA_PREFILL_CUH
#define COMPUTE_CUDA_PREFILL_CUH

#include "compute/cuda/rows.cuh"

enum { TOKENS = 128, KEYS = 64 };

/* Eight of a token's query elements, rounded; zeros past the span. */
template <bool BF16>
__device__ __forceinline__ uint4 query_unit(const struct cuda_prefill &p, const struct cuda_span &span,
                                            uint32_t token, uint32_t q_head, uint32_t unit)
{
    if (token >= span.count)
        return make_uint4(0, 0, 0, 0);
    const float *q =
        p.q + (span.first + (uint64_t)token) * p.q_stride + (uint64_t)q_head * p.head_dim + unit * 8;
    float4 a = *(const float4 *)q, b = *(const float4 *)(q + 4);
    return make_uint4(pack<BF16>(a.x, a.y), pack<BF16>(a.z, a.w), pack<BF16>(b.x, b.y), pack<BF16>(b.z, b.w));
}

/* The pieces of a tile, which lie in one page; rows from `rows` on are to be taken as zeros. */
struct tile_source {
    const uint8_t *from;
    uint32_t rows;
};

__device__ __forceinline__ struct tile_source tile_source(const struct cuda_prefill &p, const uint64_t *at,
                                                          uint32_t head, uint32_t key, uint32_t end)
{
    bool valid;
    uint64_t offset = piece_offset(p.kv, at, head, key, &valid);
    uint64_t there = valid ? (p.kv.device_bytes - offset) / p.kv.piece_bytes : 0; /* that device memory has */
    struct tile_source source = {p.kv.base + offset, end > key ? end - key : 0};
    source.rows = there < source.rows ? (uint32_t)there : source.rows;
    return source;
}

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

struct token_state {
    float max, sum; /* sum: this thread's share */
};

/* Masks, moves the running maximum, and turns scores into weights; `scale` holds log2(e). */
template <int DIM, int M_TILES>
__device__ __forceinline__ void update(float (*s)[KEYS / 8][4], float (*acc)[DIM / 8][4],
                                       struct token_state (*state)[2], uint32_t position, uint32_t key,
                                       float scale)
{
    enum { N_TILES = KEYS / 8 };
    uint32_t row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    bool masked = key + KEYS - 1 > position; /* for some token of the warp */
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t own = position + m * 16 + half * 8 + row;
            float max = state[m][half].max;
            if (masked) {
#pragma unroll
                for (int n = 0; n < N_TILES; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++)
                        if (key + n * 8 + 2 * column + e > own)
                            s[m][n][2 * half + e] = -INFINITY;
            }
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
                max = fmaxf(max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 1));
            max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 2));
            float base = max * scale, factor = exp2_fast((state[m][half].max - max) * scale), sum = 0;
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float *at = &s[m][n][2 * half + e];
                    *at = exp2_fast(fmaf(*at, scale, -base));
                    sum += *at;
                }
            state[m][half].max = max;
            state[m][half].sum = state[m][half].sum * factor + sum;
            if (!__any_sync(FULL_WARP,
                            factor != 1)) /* a factor of 1 changes nothing, and most tiles have it */
                continue;
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                acc[m][n][2 * half] *= factor;
                acc[m][n][2 * half + 1] *= factor;
            }
        }
}

/* `first`: the warp's first token of the span. */
template <int DIM, int M_TILES>
__device__ __forceinline__ void write_tokens(const struct cuda_prefill &p, const struct cuda_span &span,
                                             uint32_t first, uint32_t q_head, const float (*acc)[DIM / 8][4],
                                             const struct token_state (*state)[2])
{
    uint32_t row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state[m][half].sum;
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            uint32_t token = first + m * 16 + half * 8 + row;
            if (token >= span.count)
                continue;
            float factor = 1.0f / sum;
            uint64_t at = ((span.first + (uint64_t)token) * p.q_heads + q_head) * DIM + 2 * column;
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                float a = acc[m][n][2 * half] * factor, b = acc[m][n][2 * half + 1] * factor;
                if (p.out_type == DTYPE_BF16)
                    *(uint32_t *)((uint16_t *)p.out + at + n * 8) = pack<true>(a, b);
                else
                    *(float2 *)((float *)p.out + at + n * 8) = make_float2(a, b);
            }
        }
}

/* prefill_hopper.cu; the arguments have been checked. */
int prefill_hopper(const struct cuda_prefill *prefill, cudaStream_t stream);

#endif
