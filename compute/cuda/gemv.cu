/* Products of a bf16 matrix with one to four tokens: bound by reading the matrix once.
 *
 * A warp takes two rows; its lanes take 16 bytes of each, several at a time, and the tokens' same columns,
 * which the L1 cache serves. A token's sum is taken in one order whatever the number of tokens. The first of
 * the matrix is asked for before the launch before has ended. Stateless. */
#include "compute/cuda/launch.cuh"

enum { THREADS = 256, ROWS = 2, UNROLL = 4 };

__device__ __forceinline__ float dot8(float sum, const uint4 &w, const uint4 &x)
{
    const uint32_t a[4] = {w.x, w.y, w.z, w.w}, b[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 p = unpack<true>(a[i]), q = unpack<true>(b[i]);
        sum = fmaf(p.x, q.x, sum);
        sum = fmaf(p.y, q.y, sum);
    }
    return sum;
}

template <int N>
__device__ __forceinline__ void finish(const struct cuda_gemv &g, float (*sum)[N], uint32_t row)
{
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
        for (int t = 0; t < N; t++) {
            float v = warp_sum(sum[r][t]);
            if (threadIdx.x % 32 != 0 || row + r >= g.rows)
                continue;
            float *out = g.out + (uint64_t)t * g.rows + row + r;
            if (g.bias)
                v += g.bias[row + r];
            *out = g.accumulate ? *out + v : v;
        }
}

/* 16 bytes of each row from unit i on, UNROLL times; nothing where less is left. */
__device__ __forceinline__ void load_batch(uint4 (*v)[ROWS], const uint4 *const *w, uint32_t i,
                                           uint32_t units)
{
    if (i + 32 * (UNROLL - 1) >= units)
        return;
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            v[u][r] = load_stream((const uint8_t *)(w[r] + i + 32 * u));
}

template <int N> __global__ void __launch_bounds__(THREADS) gemv_kernel(struct cuda_gemv g)
{
    launch_next();
    uint32_t row = (blockIdx.x * (THREADS / 32) + threadIdx.x / 32) * ROWS, lane = threadIdx.x % 32;
    if (row >= g.rows) {
        launch_wait();
        return;
    }
    uint32_t units = g.cols / 8;
    const uint4 *x = (const uint4 *)g.x, *w[ROWS];
    for (int r = 0; r < ROWS; r++)
        w[r] = (const uint4 *)g.w + (uint64_t)min(row + r, g.rows - 1) * units;
    float sum[ROWS][N] = {};
    uint4 v[UNROLL][ROWS];
    uint32_t i = lane;
    load_batch(v, w, i, units);
    launch_wait();
    for (; i + 32 * (UNROLL - 1) < units; i += 32 * UNROLL) {
        if (i != lane)
            load_batch(v, w, i, units);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int t = 0; t < N; t++) {
                uint4 xt = __ldg(x + (uint64_t)t * units + i + 32 * u);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    sum[r][t] = dot8(sum[r][t], v[u][r], xt);
            }
    }
    for (; i < units; i += 32) {
#pragma unroll
        for (int t = 0; t < N; t++) {
            uint4 xt = __ldg(x + (uint64_t)t * units + i);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                sum[r][t] = dot8(sum[r][t], load_stream((const uint8_t *)(w[r] + i)), xt);
        }
    }
    finish<N>(g, sum, row);
}

int cuda_gemv(const struct cuda_gemv *g, struct CUstream_st *stream)
{
    if (g->n > CUDA_GEMV_TOKENS || g->cols == 0 || g->cols % 8 || g->rows == 0 || !is_aligned(g->w, 16) ||
        !is_aligned(g->x, 16))
        return -EINVAL;
    unsigned blocks = ceil_div(g->rows, THREADS / 32 * ROWS);
    if (g->n == 0)
        return 0;
    if (g->n == 1)
        return launch_early(gemv_kernel<1>, dim3(blocks), THREADS, stream, *g);
    if (g->n == 2)
        return launch_early(gemv_kernel<2>, dim3(blocks), THREADS, stream, *g);
    if (g->n == 3)
        return launch_early(gemv_kernel<3>, dim3(blocks), THREADS, stream, *g);
    return launch_early(gemv_kernel<4>, dim3(blocks), THREADS, stream, *g);
}
