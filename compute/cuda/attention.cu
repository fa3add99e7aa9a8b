/* Attention of decode steps: sparse lists over pages or slots, and full attention as the identity list.
 *
 * A block takes one chunk of 256 list entries of one (query, KV head): its four warps walk 64 entries each, 16
 * at a time, and write one part (maximum, sum, weighted sum of V) for all query heads of the group, so a piece is
 * read once. A second kernel merges parts in the order of chunks. The order of operations depends on the list's
 * length alone.
 *
 * What makes it run at memory speed: pieces go from global memory straight into the registers of tensor core
 * operands, 16 bytes a thread. That needs no shared memory and no shuffle, since the sum over head_dim may take
 * dims in any order: q is loaded in the same order. A 16 x 16 operand has room for 8 query heads twice, so q and
 * the softmax weights are given as two 16-bit numbers each (rows 0-7 and 8-15) at no cost, and the result is close
 * to that of f32. Stateless. */
#include "compute/cuda/scores.cuh"

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    CHUNK = CUDA_ATTN_CHUNK,
    WARP_ENTRIES = CHUNK / WARPS,
    STEPS = WARP_ENTRIES / 16,
    RESIDENT = 4, /* blocks a multiprocessor: 128 registers a thread */
    COMBINE_GROUPS = 4 /* the merge of long lists is cut into this many ranges of chunks */
};

/* A part: acc [group][dim], then max [group], sum [group]. */
__host__ __device__ static inline uint64_t part_floats(uint32_t group, uint32_t dim)
{
    return (uint64_t)group * (dim + 2);
}

size_t cuda_attn_work_bytes(uint32_t n, uint32_t q_heads, uint32_t head_dim, uint32_t list_max)
{
    uint64_t chunks = ((uint64_t)list_max + CHUNK - 1) / CHUNK;
    return (size_t)(n * chunks * part_floats(q_heads, head_dim) * sizeof(float));
}

struct list {
    uint32_t row, count;
    const uint32_t *item;
};

/* A query of a row that no table has walks nothing. */
__device__ __forceinline__ struct list list_of(const struct cuda_attn &a, uint32_t query, uint32_t head)
{
    struct list list;
    list.row = a.rows ? a.rows[query] : query;
    list.item = NULL;
    list.count = 0;
    if (list.row >= a.row_count)
        return list;
    uint32_t h = a.shared_list ? 0 : head;
    if (a.items) {
        list.item = a.items + list.row * a.item_stride + (uint64_t)h * a.list_max;
        list.count = a.counts[list.row * a.count_stride + h];
    } else {
        list.count = a.counts[query];
    }
    list.count = list.count < a.list_max ? list.count : a.list_max;
    return list;
}

/* The four entries of 16 that a thread's column covers in the value product: 2c, 2c + 1, 2c + 8, 2c + 9. */
template <int DIM> struct values {
    uint4 v[4][DIM / 64];
};

template <int DIM>
__device__ __forceinline__ void load_values(struct values<DIM> *ret, const uint8_t *base, const uint64_t *offset,
                                            uint32_t entry, uint32_t count)
{
#pragma unroll
    for (int e = 0; e < 4; e++) {
        uint32_t i = entry + (e & 1) + 8 * (e >> 1);
        const uint8_t *p = base + offset[i];
#pragma unroll
        for (int half = 0; half < DIM / 64; half++)
            ret->v[e][half] = i < count ? load_stream(p + 128 * half) : make_uint4(0, 0, 0, 0);
    }
}

__device__ __forceinline__ uint32_t word_of(const uint4 &v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

template <bool BF16, int DIM>
__device__ __forceinline__ void add_values(float (*acc)[4], const uint32_t *p, const struct values<DIM> *v)
{
#pragma unroll
    for (int half = 0; half < DIM / 64; half++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            uint32_t select = i % 2 ? 0x7632 : 0x5410;
            uint32_t b0 = __byte_perm(word_of(v->v[0][half], i / 2), word_of(v->v[1][half], i / 2), select);
            uint32_t b1 = __byte_perm(word_of(v->v[2][half], i / 2), word_of(v->v[3][half], i / 2), select);
            mma_16x8x16<BF16>(acc[half * 8 + i], p, b0, b1);
        }
}

/* What the warps of a block leave for their merge. */
template <int DIM> struct block_state {
    uint64_t offset[CHUNK];
    float acc[WARPS][CUDA_GROUP_MAX][DIM];
    float max[WARPS][CUDA_GROUP_MAX], sum[WARPS][CUDA_GROUP_MAX];
};

/* Scores become exp(score - max); entries past the end become 0. */
__device__ __forceinline__ void softmax_warp(float (*s)[4], uint32_t first, uint32_t count, float scale,
                                             float *ret_max, float *ret_sum)
{
    uint32_t column = threadIdx.x % 4;
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[i][e] *= scale;
            if (first + i * 16 + (e >> 1) * 8 + 2 * column + (e & 1) < count)
                max = fmaxf(max, s[i][e]);
        }
    max = quad_max(max);
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            bool real = first + i * 16 + (e >> 1) * 8 + 2 * column + (e & 1) < count;
            s[i][e] = real ? expf(s[i][e] - max) : 0;
            sum += s[i][e];
        }
    *ret_max = max;
    *ret_sum = quad_sum(sum);
}

/* Merges the parts of the warps that had entries, in their order. */
template <int DIM>
__device__ __forceinline__ void write_part(float *part, const struct block_state<DIM> *state, uint32_t group,
                                           uint32_t count)
{
    uint32_t warps = (count + WARP_ENTRIES - 1) / WARP_ENTRIES;
    for (uint32_t i = threadIdx.x; i < group * DIM; i += THREADS) {
        uint32_t g = i / DIM, d = i % DIM;
        float max = state->max[0][g], acc = 0, sum = 0;
        for (uint32_t w = 1; w < warps; w++)
            max = fmaxf(max, state->max[w][g]);
        for (uint32_t w = 0; w < warps; w++) {
            float factor = expf(state->max[w][g] - max);
            acc += factor * state->acc[w][g][d];
            sum += factor * state->sum[w][g];
        }
        part[i] = acc;
        if (d == 0) {
            part[group * DIM + g] = max;
            part[group * DIM + group + g] = sum;
        }
    }
}

template <bool BF16, int DIM>
__global__ void __launch_bounds__(THREADS, RESIDENT) attn_part_kernel(struct cuda_attn a, uint32_t chunks)
{
    __shared__ struct block_state<DIM> state;
    uint32_t chunk = blockIdx.x, head = blockIdx.y, query = blockIdx.z, group = a.q_heads / a.kv_heads;
    uint32_t warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
    struct list list = list_of(a, query, head);
    if (chunk * CHUNK >= list.count)
        return;
    uint32_t count = min(list.count - chunk * CHUNK, (uint32_t)CHUNK), first = warp * WARP_ENTRIES;
    const uint64_t *at = a.kv.at + list.row * a.kv.row_stride;
    for (uint32_t i = threadIdx.x; i < CHUNK; i += THREADS) {
        uint32_t entry = chunk * CHUNK + (i < count ? i : count - 1);
        bool valid;
        state.offset[i] = piece_offset(a.kv, at, head, list.item ? list.item[entry] : entry, &valid);
    }
    uint32_t q[DIM / 16][4];
    load_query<BF16, DIM>(q, a.q + query * a.q_stride + (uint64_t)(head * group + row) * DIM, row < group, column);
    __syncthreads();
    if (first < count) {
        float s[STEPS][4];
        const uint8_t *key = a.kv.base + 16 * column;
        struct keys<DIM> keys, next_keys;
        load_keys<DIM>(&keys, key, state.offset, first + row, count);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (i + 1 < STEPS)
                load_keys<DIM>(&next_keys, key, state.offset, first + (i + 1) * 16 + row, count);
            score_keys<BF16, DIM>(s[i], q, &keys);
            keys = next_keys;
        }
        const uint8_t *value = a.kv.base + DIM * 2 + 16 * row;
        struct values<DIM> now, next;
        load_values<DIM>(&now, value, state.offset, first + 2 * column, count);
        float max, sum, acc[DIM / 8][4] = {};
        softmax_warp(s, first, count, a.scale, &max, &sum);
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
            if (i + 1 < STEPS)
                load_values<DIM>(&next, value, state.offset, first + (i + 1) * 16 + 2 * column, count);
            uint32_t p[4];
            split<BF16>(s[i][0], s[i][1], &p[0], &p[1]);
            split<BF16>(s[i][2], s[i][3], &p[2], &p[3]);
            add_values<BF16, DIM>(acc, p, &now);
            now = next;
        }
#pragma unroll
        for (int t = 0; t < DIM / 8; t++) {
            uint32_t dim = 64 * (t / 8) + 16 * column + t % 8;
            state.acc[warp][row][dim] = acc[t][0] + acc[t][2];
            state.acc[warp][row][dim + 8] = acc[t][1] + acc[t][3];
        }
        if (column == 0) {
            state.max[warp][row] = max;
            state.sum[warp][row] = sum;
        }
    }
    __syncthreads();
    uint64_t part = ((uint64_t)query * a.kv_heads + head) * chunks + chunk;
    write_part<DIM>(a.work + part * part_floats(group, DIM), &state, group, count);
}

/* One block a (query, KV head, query head of the group): COMBINE_GROUPS ranges of chunks, then the ranges. */
template <int DIM>
__global__ void __launch_bounds__(DIM *COMBINE_GROUPS) attn_combine_kernel(struct cuda_attn a, uint32_t chunks)
{
    __shared__ float acc_of[COMBINE_GROUPS][DIM], sum_of[COMBINE_GROUPS], max_of[COMBINE_GROUPS * DIM / 32];
    uint32_t group = a.q_heads / a.kv_heads, head = blockIdx.x / group, g = blockIdx.x % group, query = blockIdx.y;
    uint32_t range = threadIdx.x / DIM, dim = threadIdx.x % DIM;
    struct list list = list_of(a, query, head);
    uint32_t count = (list.count + CHUNK - 1) / CHUNK, step = (count + COMBINE_GROUPS - 1) / COMBINE_GROUPS;
    uint32_t begin = min(range * step, count), end = min(begin + step, count);
    uint64_t floats = part_floats(group, DIM);
    const float *part = a.work + ((uint64_t)query * a.kv_heads + head) * chunks * floats;
    const float *max_at = part + group * DIM + g;
    float max = -INFINITY;
    for (uint32_t i = threadIdx.x; i < count; i += DIM * COMBINE_GROUPS)
        max = fmaxf(max, max_at[i * floats]);
    max = warp_max(max);
    if (threadIdx.x % 32 == 0)
        max_of[threadIdx.x / 32] = max;
    __syncthreads();
    for (uint32_t w = 0; w < COMBINE_GROUPS * DIM / 32; w++)
        max = fmaxf(max, max_of[w]);
    float acc = 0, sum = 0;
#pragma unroll 4
    for (uint32_t i = begin; i < end; i++) {
        float factor = expf(max_at[i * floats] - max);
        acc += factor * part[i * floats + g * DIM + dim];
        sum += factor * max_at[i * floats + group];
    }
    acc_of[range][dim] = acc;
    if (dim == 0)
        sum_of[range] = sum;
    __syncthreads();
    if (range != 0)
        return;
    for (uint32_t r = 1; r < COMBINE_GROUPS; r++) {
        acc += acc_of[r][dim];
        sum += sum_of[r];
    }
    float out = count ? acc / sum : 0;
    uint64_t at = ((uint64_t)query * a.q_heads + head * group + g) * DIM + dim;
    if (a.out_type == DTYPE_BF16)
        ((uint16_t *)a.out)[at] = (uint16_t)pack<true>(out, 0);
    else
        ((float *)a.out)[at] = out;
}

template <int DIM> static void launch(const struct cuda_attn *a, uint32_t chunks, cudaStream_t stream)
{
    dim3 grid(chunks, a->kv_heads, a->n), merge(a->q_heads, a->n);
    if (a->kv.type == DTYPE_BF16)
        attn_part_kernel<true, DIM><<<grid, THREADS, 0, stream>>>(*a, chunks);
    else
        attn_part_kernel<false, DIM><<<grid, THREADS, 0, stream>>>(*a, chunks);
    attn_combine_kernel<DIM><<<merge, DIM * COMBINE_GROUPS, 0, stream>>>(*a, chunks);
}

int cuda_attn(const struct cuda_attn *a, struct CUstream_st *stream)
{
    if (!view_is_valid(&a->kv) || (a->out_type != DTYPE_F32 && a->out_type != DTYPE_BF16) || a->kv_heads == 0 ||
        a->q_heads % a->kv_heads || a->q_heads / a->kv_heads > CUDA_GROUP_MAX || a->q_heads == 0 ||
        (a->head_dim != 64 && a->head_dim != 128) || a->kv.piece_bytes < 4 * a->head_dim || a->list_max == 0 ||
        (!a->items && a->kv.slotted) || a->q_stride % 4 || !is_aligned(a->q, 16) || !a->work || a->n > 65535 ||
        a->kv_heads > 65535)
        return -EINVAL;
    if (a->n == 0)
        return 0;
    uint32_t chunks = ceil_div(a->list_max, CHUNK);
    if (a->head_dim == 64)
        launch<64>(a, chunks, stream);
    else
        launch<128>(a, chunks, stream);
    return launch_status();
}
