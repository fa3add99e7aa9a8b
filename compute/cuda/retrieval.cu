/* The retriever's scores: softmax of every query head over all keys of its sequence, pooled over the group.
 *
 * Two passes. The first reads every key once for all query heads of the group, as attention.cu does, and
 * leaves scores and, for each 512 of them, the maximum and the sum of exponentials. The second finds each
 * head's maximum and sum from these, in order, and pools. Scores take q_heads * count floats of the
 * caller's memory; keys, which are head_dim / 2 times (group 1) to head_dim / 16 times (group 8) as many
 * bytes, are never read twice. Stateless.
 *
 * Of keys of 8 bits a warp has twice as many stages in flight, which are as many bytes; keys8.cuh. */
#include "compute/cuda/keys8.cuh"

enum {
    WARPS = 4,
    THREADS = 32 * WARPS,
    CHUNK = CUDA_KEYS_CHUNK,
    WARP_KEYS = CHUNK / WARPS,
    STEPS = WARP_KEYS / STAGE_ROWS,
    STAGES = 3,
    STAGES8 = 2 * STAGES, /* of int8 keys: the same bytes */
    RESIDENT = 4,
    POOL_THREADS = 256,
    POOL_KEYS = 4 * POOL_THREADS,
    APPEND_THREADS = 256
};

static uint64_t score_stride(uint32_t count_max)
{
    return ((uint64_t)count_max + CHUNK - 1) / CHUNK * CHUNK;
}

size_t cuda_retrieval_work_bytes(uint32_t n, uint32_t q_heads, uint32_t count_max)
{
    uint64_t stride = score_stride(count_max);
    return (size_t)((uint64_t)n * q_heads * (stride + stride / CHUNK * 2) * sizeof(float));
}

/* What both passes derive from the arguments. */
struct pass {
    struct cuda_retrieval r;
    uint64_t stride; /* floats of one query head's scores */
    uint32_t chunks;
    float *stats; /* [n][q_heads][chunks][max, sum] */
};

__device__ __forceinline__ uint64_t key_offset(const struct cuda_key_view &keys, const uint64_t *at,
                                               uint32_t head, uint32_t position, uint32_t key_bytes,
                                               bool *ret_valid)
{
    uint32_t chunk = position / keys.chunk_tokens, inside = position - chunk * keys.chunk_tokens;
    *ret_valid = chunk < keys.at_count;
    chunk = *ret_valid ? chunk : keys.at_count - 1;
    uint64_t offset = (at[chunk] & ~15ull) + ((uint64_t)head * keys.chunk_tokens + inside) * key_bytes;
    uint64_t last = (keys.device_bytes - key_bytes) & ~15ull;
    *ret_valid = *ret_valid && offset <= last;
    return offset <= last ? offset : last;
}

__device__ __forceinline__ uint32_t count_of(const struct cuda_retrieval &r, uint32_t query,
                                             uint32_t *ret_row)
{
    *ret_row = r.rows ? r.rows[query] : query;
    return *ret_row < r.row_count ? min(r.counts[query], r.count_max) : 0;
}

__device__ __forceinline__ void store_scores(float *out, const float *s, uint32_t position, uint32_t count)
{
#pragma unroll
    for (int tile = 0; tile < 2; tile++) {
        uint32_t at = position + tile * 8;
        if (at + 1 < count)
            *(float2 *)(out + at) = make_float2(s[2 * tile], s[2 * tile + 1]);
        else if (at < count)
            out[at] = s[2 * tile];
    }
}

/* One warp's keys: writes scores to out [0 .. count), returns their maximum and the sum of exponentials. */
template <bool BF16, int DIM>
__device__ __forceinline__ float2 score_keys(float *out, struct stage<DIM * 2> *ring, const uint32_t (*q)[4],
                                             const struct row_source &source)
{
    const uint32_t count = source.count;
    float max = -INFINITY, sum = 0;
#pragma unroll
    for (int s = 0; s < STAGES; s++)
        fetch_rows<DIM * 2, false>(&ring[s], source, s);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (s * STAGE_ROWS >= count)
            break;
        copy_wait<STAGES - 1>();
        __syncwarp();
        float scores[4], step_max = max;
        score_rows<BF16, DIM, DIM * 2>(scores, q, &ring[s % STAGES]);
        __syncwarp();
        if (s + STAGES < STEPS)
            fetch_rows<DIM * 2, false>(&ring[s % STAGES], source, s + STAGES);
        else
            copy_commit();
#pragma unroll
        for (int e = 0; e < 4; e++) {
            scores[e] *= source.scale;
            step_max = row_of_score(s, e) < count ? fmaxf(step_max, scores[e]) : step_max;
        }
        /* A thread's own maximum will do: the four of a row are brought together at the end. */
        sum *= step_max > max ? expf(max - step_max) : 1;
        max = step_max;
#pragma unroll
        for (int e = 0; e < 4; e++)
            sum += row_of_score(s, e) < count ? expf(scores[e] - max) : 0;
        if (out)
            store_scores(out, scores, row_of_score(s, 0), count);
    }
    copy_wait<0>();
    float all = quad_max(max);
    return make_float2(all, quad_sum(max > -INFINITY ? sum * expf(max - all) : sum));
}

/* What a warp works on: `count` keys from `first` on of one KV head. */
struct warp_keys {
    const uint64_t *at;
    uint32_t head, first, count;
};

/* The same for int8 keys; q_row, out: of the thread's query head, if that is real. Lane l knows where stage
 * l % STEPS lies, and holds scales of stages 2 (l % 4) and the next, those that its quad needs. Keys are
 * under way before anything else is waited for: a block is done in half the time that one with 16 bits
 * takes. */
template <int DIM>
__device__ __forceinline__ float2 score_keys8(const struct cuda_retrieval &r, const struct warp_keys &k,
                                              const float *q_row, bool real, float *out,
                                              struct stage<DIM> *ring)
{
    const uint32_t count = k.count, lane = threadIdx.x % 32;
    uint32_t q[DIM / 16][4], scales[2];
    float max = -INFINITY, sum = 0;
    uint32_t row = min(lane % STEPS * STAGE_ROWS, (count - 1) & ~(STAGE_ROWS - 1u));
    const struct key8_place place =
        key8_place_of(r.keys, k.at, r.kv_heads, k.head, k.first + row, DIM, STAGE_ROWS);
#pragma unroll
    for (int s = 0; s < STAGES8; s++)
        key8_fetch<DIM>(&ring[s], r.keys.base + __shfl_sync(FULL_WARP, place.key, s), s * STAGE_ROWS < count);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint8_t *from = r.keys.base + __shfl_sync(FULL_WARP, place.scale, lane % 4 * 2 + i);
        const uint16_t *scale = (const uint16_t *)from + lane / 4;
        scales[i] = scale[0] | (uint32_t)scale[8] << 16;
    }
    key8_query<DIM>(q, q_row, real, lane % 4);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        if (s * STAGE_ROWS >= count)
            break;
        copy_wait<STAGES8 - 1>();
        __syncwarp();
        float scores[4];
        key8_score<DIM>(scores, q, __shfl_sync(FULL_WARP, scales[s % 2], (lane & ~3u) + s / 2),
                        &ring[s % STAGES8]);
        __syncwarp();
        if (s + STAGES8 < STEPS)
            key8_fetch<DIM>(&ring[s % STAGES8], r.keys.base + __shfl_sync(FULL_WARP, place.key, s + STAGES8),
                            (s + STAGES8) * STAGE_ROWS < count);
        else
            copy_commit();
#pragma unroll
        for (int e = 0; e < 4; e++)
            scores[e] *= r.scale;
        key8_take(&max, &sum, scores, row_of_score(s, 0), count);
        if (real)
            store_scores(out, scores, row_of_score(s, 0), count);
    }
    copy_wait<0>();
    float all = quad_max(max);
    return make_float2(all, quad_sum(max > -INFINITY ? sum * expf(max - all) : sum));
}

template <enum dtype TYPE, int DIM>
__global__ void __launch_bounds__(THREADS, RESIDENT) score_kernel(struct pass p)
{
    constexpr bool BF16 = TYPE == DTYPE_BF16;
    extern __shared__ __align__(1024) uint8_t raw_memory[];
    __shared__ float2 state_of[WARPS][8];
    struct stage<DIM * 2> *ring = (struct stage<DIM * 2> *)raw_memory + threadIdx.x / 32 * STAGES;
    const struct cuda_retrieval &r = p.r;
    uint32_t chunk = blockIdx.x, head = blockIdx.y, query = blockIdx.z, group = r.q_heads / r.kv_heads,
             table_row;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
    uint32_t all = count_of(r, query, &table_row), first = chunk * CHUNK + warp * WARP_KEYS;
    if (chunk * CHUNK >= all)
        return;
    uint32_t count = first < all ? min(all - first, (uint32_t)WARP_KEYS) : 0;
    const uint64_t *at = r.keys.at + table_row * r.keys.row_stride;
    uint64_t q_head = head * group + row;
    if (count) {
        float2 state;
        if constexpr (TYPE == DTYPE_I8) {
            const struct warp_keys keys = {at, head, first, count};
            state = score_keys8<DIM>(r, keys, r.q + query * r.q_stride + q_head * DIM, row < group,
                                     r.work + (query * (uint64_t)r.q_heads + q_head) * p.stride + first,
                                     (struct stage<DIM> *)ring);
        } else {
            bool valid;
            uint64_t offset[WARP_KEYS / 32];
#pragma unroll
            for (int i = 0; i < WARP_KEYS / 32; i++)
                offset[i] =
                    key_offset(r.keys, at, head, first + min(i * 32 + lane, count - 1), DIM * 2, &valid);
            uint32_t q[DIM / 16][4];
            load_query<BF16, DIM>(q, r.q + query * r.q_stride + q_head * DIM, row < group, lane % 4);
            float *out =
                row < group ? r.work + (query * (uint64_t)r.q_heads + q_head) * p.stride + first : NULL;
            const struct row_source source = {r.keys.base, offset, count, r.scale};
            state = score_keys<BF16, DIM>(out, ring, q, source);
        }
        if (lane % 4 == 0)
            state_of[warp][row] = state;
    }
    __syncthreads();
    if (threadIdx.x >= group)
        return;
    uint32_t warps = (min(all - chunk * CHUNK, (uint32_t)CHUNK) + WARP_KEYS - 1) / WARP_KEYS, g = threadIdx.x;
    float max = state_of[0][g].x, sum = 0;
    for (uint32_t w = 1; w < warps; w++)
        max = fmaxf(max, state_of[w][g].x);
    for (uint32_t w = 0; w < warps; w++)
        sum += state_of[w][g].y * expf(state_of[w][g].x - max);
    *(float2 *)(p.stats + ((query * (uint64_t)r.q_heads + head * group + g) * p.chunks + chunk) * 2) =
        make_float2(max, sum);
}

/* The larger; a NaN stays. */
__device__ __forceinline__ float pool_max(float a, float b)
{
    return a > b || a != a ? a : b;
}

__global__ void __launch_bounds__(POOL_THREADS) pool_kernel(struct pass p)
{
    __shared__ float max_of[8], factor_of[8];
    const struct cuda_retrieval &r = p.r;
    uint32_t head = blockIdx.y, query = blockIdx.z, group = r.q_heads / r.kv_heads, table_row;
    uint32_t count = count_of(r, query, &table_row), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (blockIdx.x * POOL_KEYS >= count)
        return;
    uint64_t first_head = query * (uint64_t)r.q_heads + head * group;
    if (warp < group) {
        const float2 *stats = (const float2 *)p.stats + (first_head + warp) * p.chunks;
        uint32_t chunks = (count + CHUNK - 1) / CHUNK;
        float max = -INFINITY;
        double total = 0;
        for (uint32_t i = lane; i < chunks; i += 32)
            max = fmaxf(max, stats[i].x);
        max = warp_max(max);
        for (uint32_t i = lane; i < chunks; i += 32)
            total += (double)expf(stats[i].x - max) * (double)stats[i].y;
        for (int step = 16; step; step >>= 1)
            total += __shfl_xor_sync(FULL_WARP, total, step);
        if (lane == 0) {
            max_of[warp] = max;
            factor_of[warp] = (float)(1.0 / (r.mean ? total * group : total));
        }
    }
    __syncthreads();
    uint32_t at = blockIdx.x * POOL_KEYS + threadIdx.x * 4;
    if (at >= count)
        return;
    float pooled[4];
    for (uint32_t g = 0; g < group; g++) {
        float4 v = *(const float4 *)(r.work + (first_head + g) * p.stride + at);
        const float s[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float w = expf(s[e] - max_of[g]) * factor_of[g];
            pooled[e] = g == 0 ? w : r.mean ? pooled[e] + w : pool_max(pooled[e], w);
        }
    }
    float *out = r.weights + (query * (uint64_t)r.kv_heads + head) * r.weight_stride + at;
    if (at + 4 <= count) {
        *(float4 *)out = make_float4(pooled[0], pooled[1], pooled[2], pooled[3]);
        return;
    }
#pragma unroll
    for (uint32_t e = 0; e < 4; e++)
        if (at + e < count)
            out[e] = pooled[e];
}

static bool keys_are_valid(const struct cuda_key_view *keys, uint32_t head_dim)
{
    if (!keys->chunk_tokens || !keys->at_count || !is_aligned(keys->base, 16))
        return false;
    if (keys->type == DTYPE_I8)
        return (head_dim == 64 || head_dim == 128) && keys->chunk_tokens % CUDA_KEYS_GRAIN == 0 &&
               keys->device_bytes >= CUDA_KEYS_GRAIN * (uint64_t)head_dim;
    return is_16bit(keys->type) && keys->device_bytes >= 2 * (uint64_t)head_dim;
}

template <enum dtype TYPE, int DIM> static int launch_scores(const struct pass *p, cudaStream_t stream)
{
    dim3 grid(p->chunks, p->r.kv_heads, p->r.n);
    int bytes = (int)sizeof(struct stage<DIM * 2>) * WARPS * STAGES;
    if (cudaFuncSetAttribute(score_kernel<TYPE, DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) !=
        cudaSuccess)
        return -EIO;
    score_kernel<TYPE, DIM><<<grid, THREADS, bytes, stream>>>(*p);
    return launch_status();
}

template <int DIM> static int launch_scores_of(const struct pass *p, cudaStream_t stream)
{
    switch (p->r.keys.type) {
    case DTYPE_I8:
        return launch_scores<DTYPE_I8, DIM>(p, stream);
    case DTYPE_BF16:
        return launch_scores<DTYPE_BF16, DIM>(p, stream);
    default:
        return launch_scores<DTYPE_F16, DIM>(p, stream);
    }
}

int cuda_retrieval(const struct cuda_retrieval *r, struct CUstream_st *stream)
{
    if (!keys_are_valid(&r->keys, r->head_dim) || r->kv_heads == 0 || r->q_heads == 0 ||
        r->q_heads % r->kv_heads || r->q_heads / r->kv_heads > CUDA_GROUP_MAX ||
        (r->head_dim != 64 && r->head_dim != 128) || r->count_max == 0 || r->weight_stride % 4 ||
        r->weight_stride < r->count_max || r->q_stride % 4 || !is_aligned(r->q, 16) ||
        !is_aligned(r->weights, 16) || !is_aligned(r->work, 16) || !r->work || r->n > 65535 ||
        r->kv_heads > 65535)
        return -EINVAL;
    if (r->n == 0)
        return 0;
    struct pass pass = {*r, score_stride(r->count_max), ceil_div(r->count_max, CHUNK), NULL};
    pass.stats = r->work + (uint64_t)r->n * r->q_heads * pass.stride;
    dim3 pool(ceil_div(r->count_max, POOL_KEYS), r->kv_heads, r->n);
    int rc = r->head_dim == 128 ? launch_scores_of<128>(&pass, stream) : launch_scores_of<64>(&pass, stream);
    if (rc < 0)
        return rc;
    pool_kernel<<<pool, POOL_THREADS, 0, stream>>>(pass);
    return launch_status();
}

/* A thread takes 8 elements of a key. */
template <bool BF16>
__global__ void __launch_bounds__(APPEND_THREADS) append_kernel(struct cuda_keys_append a)
{
    uint32_t units = a.head_dim / 8;
    uint64_t i = (uint64_t)blockIdx.x * APPEND_THREADS + threadIdx.x;
    if (i >= (uint64_t)a.n * a.kv_heads * units)
        return;
    uint32_t unit = i % units, head = i / units % a.kv_heads, t = (uint32_t)(i / units / a.kv_heads);
    uint32_t row = a.rows ? a.rows[t] : t;
    if (row >= a.row_count)
        return;
    bool valid;
    uint64_t offset =
        key_offset(a.keys, a.keys.at + row * a.keys.row_stride, head, a.positions[t], a.head_dim * 2, &valid);
    if (!valid)
        return;
    const float *from = a.k + t * a.stride + (uint64_t)head * a.head_dim + unit * 8;
    float4 x = *(const float4 *)from, y = *(const float4 *)(from + 4);
    *(uint4 *)(a.keys.base + offset + unit * 16) =
        make_uint4(pack<BF16>(x.x, x.y), pack<BF16>(x.z, x.w), pack<BF16>(y.x, y.y), pack<BF16>(y.z, y.w));
}

/* The same for int8 keys, a key's threads beside one another: compute_key_quantize, whose operations these
 * are. */
__global__ void __launch_bounds__(APPEND_THREADS) append8_kernel(struct cuda_keys_append a)
{
    const uint32_t units = a.head_dim / 8;
    uint64_t i = (uint64_t)blockIdx.x * APPEND_THREADS + threadIdx.x;
    bool real = i < (uint64_t)a.n * a.kv_heads * units;
    i = real ? i : 0; /* all take part in the shuffles */
    uint32_t unit = i % units, head = i / units % a.kv_heads, t = (uint32_t)(i / units / a.kv_heads);
    uint32_t row = a.rows ? a.rows[t] : t;
    const float *from = a.k + t * a.stride + (uint64_t)head * a.head_dim + unit * 8;
    float4 x = *(const float4 *)from, y = *(const float4 *)(from + 4);
    const float k[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    uint32_t most = 0; /* bits of magnitudes are ordered as the numbers are, NaN last */
#pragma unroll
    for (int e = 0; e < 8; e++)
        most = max(most, __float_as_uint(k[e]) & 0x7fffffff);
    for (uint32_t step = units / 2; step; step >>= 1)
        most = max(most, __shfl_xor_sync(FULL_WARP, most, step));
    uint16_t scale = __half_as_ushort(__float2half_rn(__fdiv_rn(__uint_as_float(most), 127)));
    bool finite = scale < 0x7c00;
    float size = __half2float(__ushort_as_half(scale));
    uint32_t packed[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < 8; e++) {
        float q = finite && scale ? fminf(fmaxf(rintf(__fdiv_rn(k[e], size)), -127), 127) : 0;
        packed[e / 4] |= (uint32_t)((int)q & 255) << e % 4 * 8;
    }
    if (!real || row >= a.row_count)
        return;
    const uint64_t *at = a.keys.at + row * a.keys.row_stride;
    const struct key8_place place =
        key8_place_of(a.keys, at, a.kv_heads, head, a.positions[t], a.head_dim, 1);
    if (!place.valid)
        return;
    *(uint2 *)(a.keys.base + place.key + unit * 8) = make_uint2(packed[0], packed[1]);
    if (unit == 0)
        *(uint16_t *)(a.keys.base + place.scale) = finite ? scale : 0x7e00;
}

int cuda_keys_append(const struct cuda_keys_append *a, struct CUstream_st *stream)
{
    if (!keys_are_valid(&a->keys, a->head_dim) || a->kv_heads == 0 || a->head_dim == 0 || a->head_dim % 8 ||
        a->stride % 4 || !is_aligned(a->k, 16))
        return -EINVAL;
    if (a->n == 0)
        return 0;
    unsigned blocks = ceil_div((uint64_t)a->n * a->kv_heads * (a->head_dim / 8), APPEND_THREADS);
    if (a->keys.type == DTYPE_I8)
        append8_kernel<<<blocks, APPEND_THREADS, 0, stream>>>(*a);
    else if (a->keys.type == DTYPE_BF16)
        append_kernel<true><<<blocks, APPEND_THREADS, 0, stream>>>(*a);
    else
        append_kernel<false><<<blocks, APPEND_THREADS, 0, stream>>>(*a);
    return launch_status();
}
