/* Deterministic Top-K: the k largest of each row, ties to the lower position, ascending.
 *
 * One block a row. Three passes count the digits of the keys (11, 11 and 10 bits) and narrow down to the
 * exact k-th key; a last pass walks the row in order and writes the positions that it takes. Rows of 32K
 * values stay in the L2 cache, so only the first pass touches memory. Integer counts alone decide, so the
 * result is the same on every run. Stateless. */
#include "compute/cuda/select.cuh"

enum { TILE = 4 * SELECT_THREADS };

struct row {
    const float *values;
    uint32_t first, end; /* positions */
    uint32_t aligned;    /* first position of the first tile: a multiple of 4 */
};

/* Four neighbours; what lies outside [first, end) gets key 0, below every value's key. */
__device__ __forceinline__ void load_tile(const struct row &row, uint32_t at, float *ret_value,
                                          uint32_t *ret_key)
{
    float4 v = make_float4(0, 0, 0, 0);
    if (at < row.end)
        v = *(const float4 *)(row.values + at);
    ret_value[0] = v.x, ret_value[1] = v.y, ret_value[2] = v.z, ret_value[3] = v.w;
#pragma unroll
    for (uint32_t e = 0; e < 4; e++)
        ret_key[e] = at + e >= row.first && at + e < row.end ? key_of(ret_value[e]) : 0;
}

/* The bin, from the highest down, in which the running count reaches `want`. */
__device__ __forceinline__ struct select_found find_bin(const uint32_t *bins, uint64_t want, uint64_t *scan,
                                                        struct select_found *shared)
{
    uint32_t high = SELECT_BINS - 1 - 2 * threadIdx.x;
    uint64_t a = bins[high], b = bins[high - 1], all, before = block_scan(a + b, scan, &all);
    if (before < want && want <= before + a)
        *shared = {high, before};
    else if (before + a < want && want <= before + a + b)
        *shared = {high - 1, before + a};
    __syncthreads();
    return *shared;
}

/* Key of the k-th largest; *ret_ties of exactly this key are among the k. 1 <= k < number of values. */
__device__ __forceinline__ uint32_t kth_key(const struct row &row, uint32_t k, uint32_t *ret_ties)
{
    __shared__ uint32_t bins[SELECT_BINS];
    __shared__ uint64_t scan[SELECT_WARPS];
    __shared__ struct select_found found;
    uint32_t prefix = 0;
    for (int pass = 0; pass < SELECT_PASSES; pass++) {
        for (uint32_t i = threadIdx.x; i < SELECT_BINS; i += SELECT_THREADS)
            bins[i] = 0;
        __syncthreads();
#pragma unroll 4
        for (uint32_t at = row.aligned + threadIdx.x * 4; at < row.end; at += TILE) {
            float value[4];
            uint32_t key[4];
            load_tile(row, at, value, key);
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (key[e] && select_matches(key[e], prefix, pass))
                    atomicAdd(&bins[key[e] >> select_shift(pass) & select_mask(pass)], 1u);
        }
        __syncthreads();
        struct select_found f = find_bin(bins, k, scan, &found);
        prefix |= f.bin << select_shift(pass);
        k -= (uint32_t)f.above;
        __syncthreads();
    }
    *ret_ties = k;
    return prefix;
}

/* Writes the taken positions of [aligned, end) in order; returns this thread's share of the mass. */
__device__ __forceinline__ double write_taken(const struct row &row, uint32_t least, uint32_t ties,
                                              uint32_t want, uint32_t *index)
{
    __shared__ uint64_t scan[2][SELECT_WARPS];
    uint64_t above = 0, equal = 0;
    double mass = 0;
    int parity = 0;
    for (uint32_t base = row.aligned; base < row.end && above + min(equal, (uint64_t)ties) < want;
         base += TILE, parity ^= 1) {
        float value[4];
        uint32_t key[4], at = base + threadIdx.x * 4;
        load_tile(row, at, value, key);
        uint64_t mine = 0, all;
#pragma unroll
        for (int e = 0; e < 4; e++)
            mine += key[e] > least ? 1 : key[e] == least && key[e] ? 1ull << 32 : 0;
        uint64_t before = block_scan(mine, scan[parity], &all);
        uint64_t a = above + (uint32_t)before, q = equal + (before >> 32);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            bool over = key[e] > least, tie = key[e] == least && key[e] != 0;
            if (over || (tie && q < ties)) {
                index[a + min(q, (uint64_t)ties)] = at + e;
                mass += (double)value[e];
            }
            a += over;
            q += tie;
        }
        above += (uint32_t)all;
        equal += all >> 32;
    }
    return mass;
}

/* This thread's share of the values in [from, end). */
__device__ __forceinline__ double sum_of(const float *values, uint32_t from, uint32_t end)
{
    double sum = 0;
    for (uint32_t i = from + threadIdx.x; i < end; i += SELECT_THREADS)
        sum += (double)values[i];
    return sum;
}

__device__ __forceinline__ void write_mass(double mass, float *ret_mass)
{
    __shared__ double mass_of[SELECT_WARPS];
    for (int step = 16; step; step >>= 1)
        mass += __shfl_xor_sync(FULL_WARP, mass, step);
    if (threadIdx.x % 32 == 0)
        mass_of[threadIdx.x / 32] = mass;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    mass = 0;
    for (int w = 0; w < SELECT_WARPS; w++)
        mass += mass_of[w];
    *ret_mass = (float)mass;
}

__global__ void __launch_bounds__(SELECT_THREADS) topk_kernel(struct cuda_topk t)
{
    uint32_t r = blockIdx.x, least = 0, ties = 0;
    struct row row;
    row.values = t.values + r * t.stride;
    row.end = min(t.end[r / t.heads], t.end_max);
    row.first = t.first ? min(t.first[r / t.heads], row.end) : 0;
    row.aligned = row.first & ~3u;
    uint32_t count = row.end - row.first, want = min(t.k, count);
    if (want && want < count)
        least = kth_key(row, want, &ties);
    double mass = want ? write_taken(row, least, ties, want, t.index + r * t.index_stride) : 0;
    if (threadIdx.x == 0)
        t.ret_count[r] = want;
    if (t.outer)
        mass += sum_of(row.values, 0, row.first) +
                sum_of(row.values, row.end, min(t.outer[r / t.heads], t.end_max));
    if (t.ret_mass)
        write_mass(mass, t.ret_mass + r);
}

int cuda_topk(const struct cuda_topk *t, struct CUstream_st *stream)
{
    if (t->heads == 0 || t->end_max == 0 || t->end_max > CUDA_TOPK_MAX || t->stride % 4 ||
        t->stride < t->end_max || t->index_stride < (t->k < t->end_max ? t->k : t->end_max) ||
        !is_aligned(t->values, 16) || !t->end)
        return -EINVAL;
    if (t->rows == 0)
        return 0;
    topk_kernel<<<t->rows, SELECT_THREADS, 0, stream>>>(*t);
    return launch_status();
}
