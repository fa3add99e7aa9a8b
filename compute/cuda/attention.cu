/* Attention of decode steps: sparse lists over pages or slots, and full attention as the identity list.
 *
 * A block takes one chunk of 256 list entries of one (query, KV head): its four warps walk 64 entries each, 16
 * at a time, and write one part (maximum, sum, weighted sum of V) for all query heads of the group, so a piece is
 * read once. A second kernel merges parts in the order of chunks. The order of operations depends on the list's
 * length alone.
 *
 * A warp keeps the next 16 pieces in flight to its own part of shared memory while it works on 16 (rows.cuh); it knows
 * its pieces' addresses before it starts. Products run on tensor cores; q and the softmax weights are given as
 * two 16-bit numbers each, so the result is close to that of f32. Stateless. */
#include "compute/cuda/rows.cuh"

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    CHUNK = CUDA_ATTN_CHUNK,
    WARP_ENTRIES = CHUNK / WARPS,
    STEPS = WARP_ENTRIES / STAGE_ROWS,
    STAGES = 2,
    RESIDENT = 3, /* blocks a multiprocessor, by registers and by shared memory */
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

/* What the warps of a block leave for their merge; takes the place of the rings. */
template <int DIM> struct block_state {
    float acc[WARPS][CUDA_GROUP_MAX][DIM];
    float max[WARPS][CUDA_GROUP_MAX], sum[WARPS][CUDA_GROUP_MAX];
};

template <int DIM> union block_memory {
    struct stage<DIM * 4> ring[WARPS][STAGES];
    struct block_state<DIM> state;
};

/* State of the row's query head in one warp; acc tile t holds dims 8 t + 2 c + {0, 1}, both halves of the weights. */
template <int DIM> struct running {
    float max, sum; /* sum: this thread's share */
    float acc[DIM / 8][4];
};

/* Moves the maximum, turns the scores of 16 entries into weights and leaves them as an operand. */
template <bool BF16, int DIM>
__device__ __forceinline__ void add_weights(struct running<DIM> *state, uint32_t *ret_p, float *s, int step,
                                            uint32_t count, float scale)
{
    float max = state->max;
#pragma unroll
    for (int e = 0; e < 4; e++) {
        s[e] *= scale;
        max = row_of_score(step, e) < count ? fmaxf(max, s[e]) : max;
    }
    max = quad_max(max);
    float base = max > -INFINITY ? max : 0;
    if (__any_sync(FULL_WARP, max != state->max)) {
        float factor = expf(state->max - base);
        state->sum *= factor;
#pragma unroll
        for (int t = 0; t < DIM / 8; t++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                state->acc[t][e] *= factor;
        state->max = max;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        s[e] = row_of_score(step, e) < count ? expf(s[e] - base) : 0;
        state->sum += s[e];
    }
    split<BF16>(s[0], s[1], &ret_p[0], &ret_p[1]);
    split<BF16>(s[2], s[3], &ret_p[2], &ret_p[3]);
}

template <bool BF16, int DIM>
__device__ __forceinline__ void add_values(struct running<DIM> *state, const uint32_t *p,
                                           const struct stage<DIM * 4> *stage)
{
    uint32_t matrix = threadIdx.x % 32 / 8, r = threadIdx.x % 8;
    uint32_t from = shared_address(&stage->row[(matrix & 1) * 8 + r][DIM * 2 + (matrix >> 1) * 16]);
#pragma unroll
    for (int t = 0; t < DIM / 8; t += 2) {
        uint32_t b[4];
        load_transposed(b, from + t * 16);
        mma_16x8x16<BF16>(state->acc[t], p, b[0], b[1]);
        mma_16x8x16<BF16>(state->acc[t + 1], p, b[2], b[3]);
    }
}

/* One warp's entries: list[0 .. count). */
template <bool BF16, int DIM>
__device__ __forceinline__ void walk(struct running<DIM> *state, struct stage<DIM * 4> *ring, const uint32_t (*q)[4],
                                     const uint8_t *base, const uint64_t *offset, uint32_t count, float scale)
{
#pragma unroll
    for (int s = 0; s < STAGES; s++)
        fetch_rows<DIM * 4>(&ring[s], base, offset, s, count);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (s * STAGE_ROWS >= count)
            break;
        copy_wait<STAGES - 1>();
        __syncwarp();
        float scores[4];
        uint32_t p[4];
        score_rows<BF16, DIM, DIM * 4>(scores, q, &ring[s % STAGES]);
        add_weights<BF16, DIM>(state, p, scores, s, count, scale);
        add_values<BF16, DIM>(state, p, &ring[s % STAGES]);
        __syncwarp();
        if (s + STAGES < STEPS)
            fetch_rows<DIM * 4>(&ring[s % STAGES], base, offset, s + STAGES, count);
        else
            copy_commit();
    }
    copy_wait<0>();
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
        float base = max > -INFINITY ? max : 0;
        for (uint32_t w = 0; w < warps; w++) {
            float factor = expf(state->max[w][g] - base);
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

template <int DIM>
__device__ __forceinline__ void leave_state(struct block_state<DIM> *block, const struct running<DIM> *state)
{
    uint32_t warp = threadIdx.x / 32, row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < DIM / 8; t++)
        *(float2 *)&block->acc[warp][row][8 * t + 2 * column] =
            make_float2(state->acc[t][0] + state->acc[t][2], state->acc[t][1] + state->acc[t][3]);
    float sum = quad_sum(state->sum);
    if (column == 0) {
        block->max[warp][row] = state->max;
        block->sum[warp][row] = sum;
    }
}

template <bool BF16, int DIM>
__global__ void __launch_bounds__(THREADS, RESIDENT) attn_part_kernel(struct cuda_attn a, uint32_t chunks)
{
    extern __shared__ __align__(128) uint8_t raw_memory[];
    union block_memory<DIM> *memory = (union block_memory<DIM> *)raw_memory;
    uint32_t chunk = blockIdx.x, head = blockIdx.y, query = blockIdx.z, group = a.q_heads / a.kv_heads;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    struct list list = list_of(a, query, head);
    if (chunk * CHUNK >= list.count)
        return;
    uint32_t in_chunk = min(list.count - chunk * CHUNK, (uint32_t)CHUNK), first = warp * WARP_ENTRIES;
    uint32_t count = first < in_chunk ? min(in_chunk - first, (uint32_t)WARP_ENTRIES) : 0;
    const uint64_t *at = a.kv.at + list.row * a.kv.row_stride;
    uint64_t offset[WARP_ENTRIES / 32];
#pragma unroll
    for (int i = 0; i < WARP_ENTRIES / 32; i++) {
        uint32_t entry = chunk * CHUNK + first + min(i * 32 + lane, count - 1);
        bool valid;
        offset[i] = count ? piece_offset(a.kv, at, head, list.item ? list.item[entry] : entry, &valid) : 0;
    }
    struct running<DIM> state = {-INFINITY, 0, {}};
    if (count) {
        uint32_t q[DIM / 16][4], row = lane / 4;
        load_query<BF16, DIM>(q, a.q + query * a.q_stride + (uint64_t)(head * group + row) * DIM, row < group, lane % 4);
        walk<BF16, DIM>(&state, memory->ring[warp], q, a.kv.base, offset, count, a.scale);
    }
    __syncthreads();
    if (count)
        leave_state<DIM>(&memory->state, &state);
    __syncthreads();
    uint64_t part = ((uint64_t)query * a.kv_heads + head) * chunks + chunk;
    write_part<DIM>(a.work + part * part_floats(group, DIM), &memory->state, group, in_chunk);
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

template <bool BF16, int DIM> static int launch(const struct cuda_attn *a, cudaStream_t stream)
{
    uint32_t chunks = ceil_div(a->list_max, CHUNK);
    dim3 grid(chunks, a->kv_heads, a->n), merge(a->q_heads, a->n);
    int bytes = (int)sizeof(union block_memory<DIM>);
    if (cudaFuncSetAttribute(attn_part_kernel<BF16, DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) !=
        cudaSuccess)
        return -EIO;
    attn_part_kernel<BF16, DIM><<<grid, THREADS, bytes, stream>>>(*a, chunks);
    attn_combine_kernel<DIM><<<merge, DIM * COMBINE_GROUPS, 0, stream>>>(*a, chunks);
    return launch_status();
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
    bool bf16 = a->kv.type == DTYPE_BF16;
    if (a->head_dim == 128)
        return bf16 ? launch<true, 128>(a, stream) : launch<false, 128>(a, stream);
    return bf16 ? launch<true, 64>(a, stream) : launch<false, 64>(a, stream);
}
