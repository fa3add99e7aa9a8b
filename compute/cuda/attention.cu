/* Attention of decode steps: sparse lists over pages or slots, and full attention as the identity list.
 *
 * A block takes one chunk of 256 list entries of one (query, KV head): its four warps walk 64 entries each,
 * 16 at a time, and write one part (maximum, sum, weighted sum of V) for all query heads of the group, so a
 * piece is read once. A second kernel merges parts in the order of chunks. The order of operations depends
 * on the list's length alone.
 *
 * A warp keeps the next 16 pieces in flight to its own part of shared memory while it works on 16
 * (rows.cuh). Products run on tensor cores; q and the softmax weights are given as two 16-bit numbers each,
 * so the result is close to that of f32. Stateless. */
#include "compute/cuda/launch.cuh"
#include "compute/cuda/rows.cuh"

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    CHUNK = CUDA_ATTN_CHUNK,
    WARP_ENTRIES = CHUNK / WARPS,
    STEPS = WARP_ENTRIES / STAGE_ROWS,
    STAGES = 2,
    RESIDENT = 3, /* blocks a multiprocessor, by registers and by shared memory */
    RANGES = 4,   /* a list's chunks are merged in this many ranges, */
    BATCH = 8,    /* so many of a range at once; */
    HEADS = 2     /* a block merges for so many query heads */
};

/* A part: acc [group][dim], then max [group], sum [group]; acc of every head on 16 bytes. */
__host__ __device__ static inline uint64_t part_floats(uint32_t group, uint32_t dim)
{
    return (uint64_t)group * (dim + 4);
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
    float acc[WARPS][CUDA_GROUP_MAX][DIM + 8]; /* padded: a warp writes eight rows at once */
    float max[WARPS][CUDA_GROUP_MAX], sum[WARPS][CUDA_GROUP_MAX];
};

template <int DIM> union block_memory {
    struct stage<DIM * 4> ring[WARPS][STAGES];
    struct block_state<DIM> state;
};

/* State of the row's query head in one warp; acc tile t holds dims 8 t + 2 c + {0, 1}, both halves of the
 * weights. */
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
    uint32_t from = shared_address(&stage->row[(matrix & 1) * 8 + r][((matrix >> 1) ^ r) * 16]);
#pragma unroll
    for (int t = 0; t < DIM / 8; t += 2) {
        uint32_t b[4];
        load_transposed(b, from ^ (DIM * 2 + t * 16));
        mma_16x8x16<BF16>(state->acc[t], p, b[0], b[1]);
        mma_16x8x16<BF16>(state->acc[t + 1], p, b[2], b[3]);
    }
}

/* One block's work: a chunk of the list of one (query, KV head). Every warp finds it by itself. */
struct item {
    uint64_t index; /* of all; past the end: no item */
    uint32_t chunk, head, query;
    uint32_t count;  /* entries of the chunk that the warp takes */
    uint32_t filled; /* entries of the chunk */
    bool last;       /* of its list's chunks */
};

/* The grid's size and shape: items in the order chunk, head, query. */
struct work {
    uint32_t chunks;
    uint64_t items;
};

/* The first item with entries from `index` on, in steps of the grid: 32 candidates at a time, one a lane,
 * since a launch is sized for the longest list that may come. */
__device__ __forceinline__ struct item find_item(const struct cuda_attn &a, const struct work &work,
                                                 uint64_t index)
{
    uint32_t lane = threadIdx.x % 32;
    struct item item = {work.items, 0, 0, 0, 0, 0, true};
    for (; index < work.items; index += 32ull * gridDim.x) {
        uint64_t mine = index + (uint64_t)lane * gridDim.x;
        uint32_t list = (uint32_t)(mine / work.chunks), begin = (uint32_t)(mine % work.chunks) * CHUNK,
                 count = 0;
        if (mine < work.items)
            count = list_of(a, list / a.kv_heads, list % a.kv_heads).count;
        uint32_t real = __ballot_sync(FULL_WARP, begin < count);
        if (!real)
            continue;
        uint32_t from = __ffs(real) - 1, first = threadIdx.x / 32 * WARP_ENTRIES;
        item.index = index + (uint64_t)from * gridDim.x;
        list = __shfl_sync(FULL_WARP, list, from);
        item.query = list / a.kv_heads;
        item.head = list % a.kv_heads;
        item.chunk = __shfl_sync(FULL_WARP, begin, from) / CHUNK;
        uint32_t left = __shfl_sync(FULL_WARP, count, from) - item.chunk * CHUNK;
        item.filled = min(left, (uint32_t)CHUNK);
        item.last = left <= CHUNK;
        item.count = first < item.filled ? min(item.filled - first, (uint32_t)WARP_ENTRIES) : 0;
        break;
    }
    return item;
}

/* List entries of the warp: lane l those of rows l and l + 32. */
__device__ __forceinline__ void load_entries(uint32_t *ret_entry, const struct cuda_attn &a,
                                             const struct item &item, bool real)
{
    uint32_t lane = threadIdx.x % 32, first = item.chunk * CHUNK + threadIdx.x / 32 * WARP_ENTRIES;
    struct list list = list_of(a, item.query, item.head);
#pragma unroll
    for (int i = 0; i < WARP_ENTRIES / 32; i++) {
        uint32_t at = first + min(i * 32 + lane, item.count - 1);
        ret_entry[i] = real && item.count && list.item ? list.item[at] : at;
    }
}

__device__ __forceinline__ void load_offsets(uint64_t *ret_offset, const struct cuda_attn &a,
                                             const struct item &item, const uint32_t *entry, bool real)
{
    uint32_t row = real && a.rows ? a.rows[item.query] : item.query;
    bool valid;
#pragma unroll
    for (int i = 0; i < WARP_ENTRIES / 32; i++)
        ret_offset[i] = real && item.count
                            ? piece_offset(a.kv, a.kv.at + row * a.kv.row_stride, item.head, entry[i], &valid)
                            : 0;
}

/* One step of 16 entries; then starts the copy that takes its stage next. */
template <bool BF16, int DIM>
__device__ __forceinline__ void take_step(struct running<DIM> *state, struct stage<DIM * 4> *ring,
                                          const uint32_t (*q)[4], const struct row_source &source, int s)
{
    copy_wait<STAGES - 1>();
    __syncwarp();
    float scores[4];
    uint32_t p[4];
    score_rows<BF16, DIM, DIM * 4>(scores, q, &ring[s % STAGES]);
    add_weights<BF16, DIM>(state, p, scores, s, source.count, source.scale);
    add_values<BF16, DIM>(state, p, &ring[s % STAGES]);
    __syncwarp();
    if (s + STAGES < STEPS)
        fetch_rows<DIM * 4, true>(&ring[s % STAGES], source, s + STAGES);
    else
        copy_commit();
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

/* From item to item in steps of the grid, usually just one. The next item's addresses are looked up while
 * this one's pieces are on their way. The first item's, and where they are settled its first pieces too,
 * before the launch before has ended. */
template <bool BF16, int DIM>
__global__ void __launch_bounds__(THREADS, RESIDENT) attn_part_kernel(struct cuda_attn a, struct work work)
{
    extern __shared__ __align__(1024) uint8_t raw_memory[];
    union block_memory<DIM> *memory = (union block_memory<DIM> *)raw_memory;
    uint32_t group = a.q_heads / a.kv_heads, row = threadIdx.x % 32 / 4;
    struct stage<DIM * 4> *ring = memory->ring[threadIdx.x / 32];
    struct item item = find_item(a, work, blockIdx.x);
    uint32_t entry[WARP_ENTRIES / 32];
    uint64_t offset[WARP_ENTRIES / 32];
    bool real = item.index < work.items;
    launch_next();
    load_entries(entry, a, item, real);
    load_offsets(offset, a, item, entry, real);
    while (real) {
        const struct row_source source = {a.kv.base, offset, item.count, a.scale};
        if (!a.settled || item.last)
            launch_wait();
#pragma unroll
        for (int s = 0; s < STAGES; s++)
            fetch_rows<DIM * 4, true>(&ring[s], source, s);
        launch_wait();
        uint32_t q[DIM / 16][4];
        load_query<BF16, DIM>(q, a.q + item.query * a.q_stride + (uint64_t)(item.head * group + row) * DIM,
                              row < group, threadIdx.x % 4);
        struct item next = find_item(a, work, item.index + gridDim.x);
        bool next_real = next.index < work.items;
        load_entries(entry, a, next, next_real);
        struct running<DIM> state = {
            - INFINITY, 0,
            {
            }
        };
#pragma unroll
        for (int s = 0; s < STEPS && s * STAGE_ROWS < item.count; s++)
            take_step<BF16, DIM>(&state, ring, q, source, s);
        copy_wait<0>();
        load_offsets(offset, a, next, entry, next_real);
        __syncthreads();
        if (item.count)
            leave_state<DIM>(&memory->state, &state);
        __syncthreads();
        uint64_t part = ((uint64_t)item.query * a.kv_heads + item.head) * work.chunks + item.chunk;
        write_part<DIM>(a.work + part * part_floats(group, DIM), &memory->state, group, item.filled);
        __syncthreads();
        item = next;
        real = next_real;
    }
    launch_wait();
}

/* What of a query head has been merged: acc of the lane's PER dims. */
template <int PER> struct merged {
    float max, sum, acc[PER];
};

/* Adds up to BATCH parts that follow each other: all are on their way before the first is used. */
template <int PER>
__device__ __forceinline__ void merge_parts(struct merged<PER> *m, const float *acc_at, const float *max_at,
                                            uint32_t group, uint64_t floats, uint32_t count)
{
    uint32_t lane = threadIdx.x % 32;
    float max = lane < count ? max_at[lane * floats] : -INFINITY;
    float sum = lane < count ? max_at[lane * floats + group] : 0;
    float acc[BATCH][PER];
#pragma unroll
    for (int c = 0; c < BATCH; c++) {
        const float *from = acc_at + c * floats + lane * PER;
        if (c < count && PER == 4)
            *(float4 *)acc[c] = *(const float4 *)from;
        else if (c < count)
            *(float2 *)acc[c] = *(const float2 *)from;
    }
    float most = fmaxf(m->max, warp_max(max)), base = most > -INFINITY ? most : 0;
    float before = expf(m->max - base), factor = expf(max - base);
    m->max = most;
    m->sum = m->sum * before + warp_sum(sum * factor);
#pragma unroll
    for (int i = 0; i < PER; i++)
        m->acc[i] *= before;
#pragma unroll
    for (int c = 0; c < BATCH; c++) {
        float f = __shfl_sync(FULL_WARP, factor, c);
#pragma unroll
        for (int i = 0; i < PER; i++)
            m->acc[i] += c < count ? f * acc[c][i] : 0;
    }
}

/* A warp merges one range of a (query, query head)'s chunks; then the ranges are. */
template <int DIM>
__global__ void __launch_bounds__(HEADS *RANGES * 32) attn_combine_kernel(struct cuda_attn a, uint32_t chunks)
{
    enum { PER = DIM / 32 };
    __shared__ __align__(16) float acc_of[HEADS][RANGES][DIM];
    __shared__ float max_of[HEADS][RANGES], sum_of[HEADS][RANGES];
    uint32_t group = a.q_heads / a.kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t which = warp / RANGES, range = warp % RANGES;
    uint32_t index = blockIdx.x * HEADS + which, query = index / a.q_heads, q_head = index % a.q_heads;
    launch_next();
    uint32_t count = query < a.n ? (list_of(a, query, q_head / group).count + CHUNK - 1) / CHUNK : 0;
    uint32_t step = (count + RANGES - 1) / RANGES, begin = min(range * step, count),
             end = min(begin + step, count);
    uint64_t floats = part_floats(group, DIM);
    const float *part = a.work + ((uint64_t)query * a.kv_heads + q_head / group) * chunks * floats;
    struct merged<PER> m = {-INFINITY, 0, {}};
    launch_wait();
    for (uint32_t first = begin; first < end; first += BATCH) {
        const float *from = part + first * floats;
        merge_parts<PER>(&m, from + q_head % group * DIM, from + group * DIM + q_head % group, group, floats,
                         min(end - first, (uint32_t)BATCH));
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        acc_of[which][range][lane * PER + i] = m.acc[i];
    if (lane == 0) {
        max_of[which][range] = m.max;
        sum_of[which][range] = m.sum;
    }
    __syncthreads();
    uint32_t h = threadIdx.x / DIM, dim = threadIdx.x % DIM;
    uint64_t at = ((uint64_t)blockIdx.x * HEADS + h) * DIM + dim;
    if (h >= HEADS || at >= (uint64_t)a.n * a.q_heads * DIM)
        return;
    float max = max_of[h][0], acc = 0, sum = 0;
    for (int r = 1; r < RANGES; r++)
        max = fmaxf(max, max_of[h][r]);
    float base = max > -INFINITY ? max : 0;
    for (int r = 0; r < RANGES; r++) {
        float factor = expf(max_of[h][r] - base);
        acc += factor * acc_of[h][r][dim];
        sum += factor * sum_of[h][r];
    }
    uint32_t of = (blockIdx.x * HEADS + h) / a.q_heads, head = (blockIdx.x * HEADS + h) % a.q_heads / group;
    float out = list_of(a, of, head).count ? acc / sum : 0;
    if (a.out_type == DTYPE_BF16)
        ((uint16_t *)a.out)[at] = (uint16_t)pack<true>(out, 0);
    else
        ((float *)a.out)[at] = out;
}

template <bool BF16, int DIM> static int launch(const struct cuda_attn *a, cudaStream_t stream)
{
    struct work work = {ceil_div(a->list_max, CHUNK), 0};
    work.items = (uint64_t)work.chunks * a->kv_heads * a->n;
    int bytes = (int)sizeof(union block_memory<DIM>), device = 0, processors = 0;
    if (cudaFuncSetAttribute(attn_part_kernel<BF16, DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             bytes) != cudaSuccess ||
        cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
        return -EIO;
    /* A block an item spreads best; but a launch that is sized for far longer lists than it finds would spend
     * its time on empty blocks, so a large one fills the chip once and its blocks look for items. */
    uint64_t fill = (uint64_t)processors * RESIDENT;
    dim3 grid((unsigned)(work.items <= 16 * fill ? work.items : fill)),
        merge(ceil_div((uint64_t)a->n * a->q_heads, HEADS));
    struct launch_form part, combine;
    launch_form(&part, grid, THREADS, (size_t)bytes, stream);
    launch_form(&combine, merge, HEADS * RANGES * 32, 0, stream);
    cudaLaunchKernelEx(&part.config, attn_part_kernel<BF16, DIM>, *a, work);
    cudaLaunchKernelEx(&combine.config, attn_combine_kernel<DIM>, *a, work.chunks);
    return launch_status();
}

int cuda_attn(const struct cuda_attn *a, struct CUstream_st *stream)
{
    if (!view_is_valid(&a->kv) || (a->out_type != DTYPE_F32 && a->out_type != DTYPE_BF16) ||
        a->kv_heads == 0 || a->q_heads % a->kv_heads || a->q_heads / a->kv_heads > CUDA_GROUP_MAX ||
        a->q_heads == 0 || (a->head_dim != 64 && a->head_dim != 128) || a->kv.piece_bytes < 4 * a->head_dim ||
        a->list_max == 0 || (!a->items && a->kv.slotted) || a->q_stride % 4 || !is_aligned(a->q, 16) ||
        !a->work || !is_aligned(a->work, 16) || a->n > 65535 || a->kv_heads > 65535)
        return -EINVAL;
    if (a->n == 0)
        return 0;
    bool bf16 = a->kv.type == DTYPE_BF16;
    if (a->head_dim == 128)
        return bf16 ? launch<true, 128>(a, stream) : launch<false, 128>(a, stream);
    return bf16 ? launch<true, 64>(a, stream) : launch<false, 64>(a, stream);
}
