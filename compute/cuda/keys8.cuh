/* Keys of 8 bits on their way to the tensor cores: what rows.cuh does for rows of 16 bits. Device code only.
 *
 * They become f16(q * scale) there, the numbers that the CPU keeps (compute_key_element). An ldmatrix gives a
 * thread four neighbouring dims of a key where one of 16 bits gives two; since a product does not care for
 * the order of dims, the query operand is loaded in the same order. The arithmetic takes twice as long a byte
 * as with 16 bits, so the rest is kept short: 16 keys lie in one chunk, and so behind one another; rows past
 * the count are fetched with them and masked by score, as int8 is never NaN and a key's scale reaches no
 * other key's score. */
#ifndef COMPUTE_CUDA_KEYS8_CUH
#define COMPUTE_CUDA_KEYS8_CUH

#include <float.h>

#include "compute/cuda/rows.cuh"

/* Byte offsets of a key, or of the first of `rows` keys in one chunk, and of its scale. valid: nothing had to
 * be brought into range. */
struct key8_place {
    uint64_t key, scale;
    bool valid;
};

__device__ __forceinline__ struct key8_place key8_place_of(const struct cuda_key_view &keys,
                                                           const uint64_t *at, uint32_t kv_heads,
                                                           uint32_t head, uint32_t position, uint32_t dim,
                                                           uint32_t rows)
{
    uint32_t chunk = position / keys.chunk_tokens;
    bool known = chunk < keys.at_count;
    uint64_t unit = (uint64_t)head * keys.chunk_tokens + (position - chunk * keys.chunk_tokens);
    uint64_t base = at[known ? chunk : keys.at_count - 1] & ~15ull;
    uint64_t key = base + unit * dim;
    uint64_t scale = base + (uint64_t)kv_heads * keys.chunk_tokens * dim + unit * sizeof(__half);
    uint64_t last_key = (keys.device_bytes - rows * dim) & ~15ull;
    uint64_t last_scale = (keys.device_bytes - rows * sizeof(__half)) & ~1ull;
    return {key <= last_key ? key : last_key, scale <= last_scale ? scale : last_scale,
            known && key <= last_key && scale <= last_scale};
}

/* Where unit `unit` (16 bytes) of row `row` of a stage lies in it. Rows of 64 bytes have four units, and two
 * of them fill the banks. */
template <int DIM> __device__ __forceinline__ uint32_t key8_unit(uint32_t row, uint32_t unit)
{
    return unit ^ (DIM == 64 ? row / 2 % 4 : row % 8);
}

/* Starts the copy of the 16 keys from `from` on, which are those of the stage, and closes a group; without
 * `real` there is nothing in it. */
template <int DIM>
__device__ __forceinline__ void key8_fetch(struct stage<DIM> *to, const uint8_t *from, bool real)
{
    enum { UNITS = DIM / 16, ROWS = WARP_LANES / UNITS };
    uint32_t lane = threadIdx.x % 32, sub = lane / UNITS, unit = lane % UNITS;
    if (real)
#pragma unroll
        for (int r = 0; r < STAGE_ROWS; r += ROWS)
            copy_stream(shared_address(&to->row[r + sub][key8_unit<DIM>(r + sub, unit) * 16]),
                        from + lane * 16 + r * DIM, true, stream_policy());
    copy_commit();
}

/* Operand rows of the queries: step s holds dims 16 s + 4 c + {0, 1, 2, 3} of thread column c. */
template <int DIM>
__device__ __forceinline__ void key8_query(uint32_t (*ret_q)[4], const float *q, bool real, uint32_t column)
{
#pragma unroll
    for (int s = 0; s < DIM / 16; s++) {
        float4 v = make_float4(0, 0, 0, 0);
        if (real)
            v = *(const float4 *)(q + 16 * s + 4 * column);
        split<false>(v.x, v.y, &ret_q[s][0], &ret_q[s][1]);
        split<false>(v.z, v.w, &ret_q[s][2], &ret_q[s][3]);
    }
}

/* Four int8 times a scale (in both halves): f16(q * scale), two and two. 0x6400 + u is the f16 number
 * 1024 + u, and u = q + 128. */
__device__ __forceinline__ void key8_widen(uint32_t v, uint32_t scale, uint32_t *ret_low, uint32_t *ret_high)
{
    const uint32_t offset = 0x64806480; /* 1024 + 128 */
    v ^= 0x80808080;
    uint32_t low = __byte_perm(v, 0x64646464, 0x4140), high = __byte_perm(v, 0x64646464, 0x4342);
    __half2 a = __hmul2(__hsub2(*(__half2 *)&low, *(const __half2 *)&offset), *(__half2 *)&scale);
    __half2 b = __hmul2(__hsub2(*(__half2 *)&high, *(const __half2 *)&offset), *(__half2 *)&scale);
    *ret_low = *(uint32_t *)&a;
    *ret_high = *(uint32_t *)&b;
}

/* As score_rows. `scales`: of the thread's key of either half of the stage, lane / 4 and lane / 4 + 8, in
 * either half of the word. */
template <int DIM>
__device__ __forceinline__ void key8_score(float *ret_scores, const uint32_t (*q)[4], uint32_t scales,
                                           const struct stage<DIM> *stage)
{
    const uint32_t scale[2] = {__byte_perm(scales, 0, 0x1010), __byte_perm(scales, 0, 0x3232)};
    uint32_t matrix = threadIdx.x % 32 / 8, row = (matrix >> 1) * 8 + threadIdx.x % 8;
    uint32_t from = shared_address(&stage->row[row][key8_unit<DIM>(row, matrix & 1) * 16]);
    float c[2][4] = {};
#pragma unroll
    for (int s = 0; s < DIM / 32; s++) {
        uint32_t v[4], low, high;
        load_matrices(v, from ^ s * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            key8_widen(v[i], scale[i >> 1], &low, &high);
            mma_16x8x16<false>(c[i >> 1], q[2 * s + (i & 1)], low, high);
        }
    }
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        ret_scores[2 * tile] = c[tile][0] + c[tile][2];
        ret_scores[2 * tile + 1] = c[tile][1] + c[tile][3];
    }
}

/* 2^x to 2^-22; what is too small for f32 is 0. */
__device__ __forceinline__ float key8_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Takes a stage's four scores, whose first row is `row`, into a maximum and a sum of exponentials (a thread's
 * own). The exponent's base is finite, so that scores that are masked give 0; NaN and infinity make the sum
 * NaN. */
__device__ __forceinline__ void key8_take(float *max, float *sum, const float *scores, uint32_t row,
                                          uint32_t count)
{
    const float log2_e = 1.44269504f;
    const uint32_t at[4] = {0, 1, 8, 9};
    float real[4], most = *max;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        real[e] = row + at[e] < count ? scores[e] : -INFINITY;
        most = fmaxf(most, real[e]);
    }
    float base = fmaxf(most, -FLT_MAX);
    *sum *= key8_exp2((*max - base) * log2_e);
    *max = most;
#pragma unroll
    for (int e = 0; e < 4; e++)
        *sum += key8_exp2((real[e] - base) * log2_e);
}

#endif
