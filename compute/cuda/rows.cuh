/* Rows that a list names, on their way to the tensor cores: shared by attention and retrieval. Device code
 * only.
 *
 * A warp has its own ring of stages in shared memory, 16 rows each, filled by cp.async, so loads stay in
 * flight while it computes, hold no registers, and need no barrier with other warps. Unit u (16 bytes) of
 * row r lies at u ^ (r % 8): ldmatrix is free of bank conflicts, and a row's 128 bytes stay together. With
 * padded rows instead, cp.async asked for half of the sectors twice: the L2 cache hit 37 % instead of 7 %,
 * and 32 x 8 x 2048 pieces took 92.5 us instead of 87.1.
 *
 * The query operand has 16 rows for up to 8 query heads: rows 0-7 hold q rounded to 16 bits, rows 8-15 what
 * rounding left, so adding both halves of a result gives it at nearly f32's precision for the same number
 * of instructions. In operands and results, `row` = lane / 4 is the query head and `column` = lane % 4. */
#ifndef COMPUTE_CUDA_ROWS_CUH
#define COMPUTE_CUDA_ROWS_CUH

#include "compute/cuda/common.cuh"

enum { STAGE_ROWS = 16, WARP_LANES = 32 };

template <int ROW_BYTES> struct stage {
    __align__(1024) uint8_t row[STAGE_ROWS][ROW_BYTES];
};

__device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* 16 bytes, or 16 zeros where `real` is false. */
__device__ __forceinline__ void copy_async(uint32_t to, const uint8_t *from, bool real)
{
    uint32_t bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

/* The same of what is read once: it leaves the L2 cache first, so that what others will read again stays. */
__device__ __forceinline__ uint64_t stream_policy(void)
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void copy_stream(uint32_t to, const uint8_t *from, bool real, uint64_t policy)
{
    uint32_t bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(bytes), "l"(policy)
                 : "memory");
}

__device__ __forceinline__ void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until at most `LEFT` of the thread's groups are in flight. */
template <int LEFT> __device__ __forceinline__ void copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void load_matrices(uint32_t *r, uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

__device__ __forceinline__ void load_transposed(uint32_t *r, uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
}

/* The rows of one warp, and what scores are multiplied by. Lane l holds the offsets of rows l, l + 32, ... */
struct row_source {
    const uint8_t *base;
    const uint64_t *offset;
    uint32_t count;
    float scale;
};

/* Starts the copy of rows [16 s, 16 s + 16) of the warp's `count`, as a stream or not, and closes a group;
 * s is a constant of an unrolled loop. Rows past the count become zeros: whatever lies there must not reach a
 * sum, not even times 0. */
template <int ROW_BYTES, bool STREAM>
__device__ __forceinline__ void fetch_rows(struct stage<ROW_BYTES> *to, const struct row_source &source,
                                           int s)
{
    enum { LANES = ROW_BYTES / 16, ROWS = WARP_LANES / LANES };
    uint32_t lane = threadIdx.x % 32, sub = lane / LANES, unit = lane % LANES;
    uint64_t policy = STREAM ? stream_policy() : 0;
#pragma unroll
    for (int r = 0; r < STAGE_ROWS; r += ROWS) {
        int first = s * STAGE_ROWS + r;
        const uint8_t *from =
            source.base + __shfl_sync(FULL_WARP, source.offset[first / 32], first % 32 + sub);
        uint32_t at = shared_address(&to->row[r + sub][(unit ^ ((r + sub) & 7)) * 16]);
        if (STREAM)
            copy_stream(at, from + unit * 16, first + sub < source.count, policy);
        else
            copy_async(at, from + unit * 16, first + sub < source.count);
    }
    copy_commit();
}

/* Operand rows of the group's queries: step s holds dims 16 s + 2 c + {0, 1, 8, 9} of thread column c. */
template <bool BF16, int DIM>
__device__ __forceinline__ void load_query(uint32_t (*ret_q)[4], const float *q, bool real, uint32_t column)
{
#pragma unroll
    for (int s = 0; s < DIM / 16; s++) {
        float2 low = make_float2(0, 0), high = low;
        if (real) {
            low = *(const float2 *)(q + 16 * s + 2 * column);
            high = *(const float2 *)(q + 16 * s + 2 * column + 8);
        }
        split<BF16>(low.x, low.y, &ret_q[s][0], &ret_q[s][1]);
        split<BF16>(high.x, high.y, &ret_q[s][2], &ret_q[s][3]);
    }
}

/* Scores of the row's query head for rows 2c, 2c + 1, 2c + 8, 2c + 9 of the stage, whose rows begin with K.
 */
template <bool BF16, int DIM, int ROW_BYTES>
__device__ __forceinline__ void score_rows(float *ret_scores, const uint32_t (*q)[4],
                                           const struct stage<ROW_BYTES> *stage)
{
    uint32_t matrix = threadIdx.x % 32 / 8, r = threadIdx.x % 8;
    uint32_t from = shared_address(&stage->row[(matrix >> 1) * 8 + r][((matrix & 1) ^ r) * 16]);
    float c[2][2][4] = {}; /* two sums of every other step: half as long a chain */
#pragma unroll
    for (int s = 0; s < DIM / 16; s++) {
        uint32_t b[4];
        load_matrices(b, from ^ s * 32);
        mma_16x8x16<BF16>(c[s & 1][0], q[s], b[0], b[1]);
        mma_16x8x16<BF16>(c[s & 1][1], q[s], b[2], b[3]);
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        ret_scores[2 * tile] = (c[0][tile][0] + c[1][tile][0]) + (c[0][tile][2] + c[1][tile][2]);
        ret_scores[2 * tile + 1] = (c[0][tile][1] + c[1][tile][1]) + (c[0][tile][3] + c[1][tile][3]);
    }
}

/* Which row of the warp's a thread's score e (0 .. 3) of step s belongs to. */
__device__ __forceinline__ uint32_t row_of_score(int s, int e)
{
    return s * STAGE_ROWS + (e >> 1) * 8 + 2 * (threadIdx.x % 4) + (e & 1);
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
