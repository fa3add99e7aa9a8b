/* Causal attention of prompts over pages.
 *
 * A block takes 128 tokens of one span and one query head: four warps of 32 tokens each. It walks the keys from
 * position 0 in tiles of 64, two tiles in flight through shared memory (cp.async), with a running maximum and sum
 * for every token; tiles past a token's own position leave its state exactly as it is, so the result does not
 * depend on how a prompt was cut. A tile lies in one page. Shared memory is swizzled by 16 bytes: a tile's row r
 * keeps unit u at u ^ (r % 8), which makes every ldmatrix free of bank conflicts. Stateless. */
#include "compute/cuda/common.cuh"

enum { WARPS = 4, THREADS = 32 * WARPS, TOKENS = 128, KEYS = 64, M_TILES = TOKENS / WARPS / 16, N_TILES = KEYS / 8 };

template <int DIM> struct tile_memory {
    uint16_t q[TOKENS * DIM];
    uint16_t k[2][KEYS * DIM], v[2][KEYS * DIM];
};

/* Address of 16 bytes (unit) of a row in shared memory. */
template <int DIM> __device__ __forceinline__ uint32_t unit_at(const uint16_t *tile, uint32_t row, uint32_t unit)
{
    return (uint32_t)__cvta_generic_to_shared(tile) + row * DIM * 2 + ((unit ^ (row & 7)) << 4);
}

__device__ __forceinline__ void copy_async(uint32_t to, const uint8_t *from, bool real)
{
    uint32_t bytes = real ? 16 : 0; /* the rest of the 16 is zeroed */
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
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

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Rounds the block's queries into shared memory; rows past the span are zero. */
template <bool BF16, int DIM>
__device__ __forceinline__ void load_queries(uint16_t *tile, const struct cuda_prefill &p, const struct cuda_span &span,
                                             uint32_t first, uint32_t q_head)
{
    for (uint32_t i = threadIdx.x; i < TOKENS * DIM / 8; i += THREADS) {
        uint32_t row = i / (DIM / 8), unit = i % (DIM / 8);
        uint4 out = make_uint4(0, 0, 0, 0);
        if (first + row < span.count) {
            const float *q = p.q + (span.first + (uint64_t)first + row) * p.q_stride + q_head * DIM + unit * 8;
            float4 a = *(const float4 *)q, b = *(const float4 *)(q + 4);
            out = make_uint4(pack<BF16>(a.x, a.y), pack<BF16>(a.z, a.w), pack<BF16>(b.x, b.y), pack<BF16>(b.z, b.w));
        }
        *(uint4 *)((uint8_t *)tile + row * DIM * 2 + ((unit ^ (row & 7)) << 4)) = out;
    }
}

/* Starts the copy of keys [KEYS * t, + KEYS) and their values; keys from `end` on are zero. */
template <int DIM>
__device__ __forceinline__ void load_keys(struct tile_memory<DIM> *m, const struct cuda_prefill &p, const uint64_t *at,
                                          uint32_t head, uint32_t t, uint32_t end)
{
    enum { UNITS = DIM / 4 }; /* of K and V */
    bool valid;
    uint64_t offset = piece_offset(p.kv, at, head, t * KEYS, &valid);
    const uint8_t *from = p.kv.base + offset;
    uint64_t rows = valid ? (p.kv.device_bytes - offset) / p.kv.piece_bytes : 0; /* that device memory has */
    const uint16_t *k = m->k[t & 1], *v = m->v[t & 1];
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < KEYS * UNITS; i += THREADS) {
        uint32_t row = i / UNITS, unit = i % UNITS;
        bool real = row < rows && t * KEYS + row < end;
        uint32_t to = unit < UNITS / 2 ? unit_at<DIM>(k, row, unit) : unit_at<DIM>(v, row, unit - UNITS / 2);
        copy_async(to, real ? from + (uint64_t)row * p.kv.piece_bytes + unit * 16 : from, real);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* s = q k^T for the warp's 32 tokens and the tile's 64 keys. */
template <bool BF16, int DIM>
__device__ __forceinline__ void score_tile(float (*s)[N_TILES][4], const uint16_t *q, const uint16_t *k)
{
    uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, r = lane % 8;
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++)
            load_matrices(a[m], unit_at<DIM>(q, warp * 16 * M_TILES + m * 16 + (matrix & 1) * 8 + r,
                                             step * 2 + (matrix >> 1)));
#pragma unroll
        for (int n = 0; n < N_TILES; n += 2) {
            uint32_t b[4];
            load_matrices(b, unit_at<DIM>(k, n * 8 + (matrix >> 1) * 8 + r, step * 2 + (matrix & 1)));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                mma_16x8x16<BF16>(s[m][n], a[m], b[0], b[1]);
                mma_16x8x16<BF16>(s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

/* acc += p v; p is made from the scores' registers. */
template <bool BF16, int DIM>
__device__ __forceinline__ void add_values(float (*acc)[DIM / 8][4], const float (*s)[N_TILES][4], const uint16_t *v)
{
    uint32_t lane = threadIdx.x % 32, matrix = lane / 8, r = lane % 8;
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
        uint32_t a[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            a[m][0] = pack<BF16>(s[m][2 * step][0], s[m][2 * step][1]);
            a[m][1] = pack<BF16>(s[m][2 * step][2], s[m][2 * step][3]);
            a[m][2] = pack<BF16>(s[m][2 * step + 1][0], s[m][2 * step + 1][1]);
            a[m][3] = pack<BF16>(s[m][2 * step + 1][2], s[m][2 * step + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < DIM / 8; n += 2) {
            uint32_t b[4];
            load_transposed(b, unit_at<DIM>(v, step * 16 + (matrix & 1) * 8 + r, n + (matrix >> 1)));
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                mma_16x8x16<BF16>(acc[m][n], a[m], b[0], b[1]);
                mma_16x8x16<BF16>(acc[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

struct token_state {
    float max, sum; /* sum: this thread's share */
};

/* Masks, moves the running maximum, and turns scores into weights; `scale` holds log2(e). */
template <int DIM>
__device__ __forceinline__ void update(float (*s)[N_TILES][4], float (*acc)[DIM / 8][4], struct token_state (*state)[2],
                                       uint32_t position, uint32_t key, float scale)
{
    uint32_t row = threadIdx.x % 32 / 4, column = threadIdx.x % 4;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t own = position + m * 16 + half * 8 + row;
            float max = state[m][half].max;
            bool masked = key + KEYS - 1 > own;
#pragma unroll
            for (int n = 0; n < N_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float *at = &s[m][n][2 * half + e];
                    if (masked && key + n * 8 + 2 * column + e > own)
                        *at = -INFINITY;
                    max = fmaxf(max, *at);
                }
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
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                acc[m][n][2 * half] *= factor;
                acc[m][n][2 * half + 1] *= factor;
            }
        }
}

template <int DIM>
__device__ __forceinline__ void write_tokens(const struct cuda_prefill &p, const struct cuda_span &span,
                                             uint32_t first, uint32_t q_head, const float (*acc)[DIM / 8][4],
                                             const struct token_state (*state)[2])
{
    uint32_t row = threadIdx.x % 32 / 4, column = threadIdx.x % 4, warp = threadIdx.x / 32;
#pragma unroll
    for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = state[m][half].sum;
            sum += __shfl_xor_sync(FULL_WARP, sum, 1);
            sum += __shfl_xor_sync(FULL_WARP, sum, 2);
            uint32_t token = first + warp * 16 * M_TILES + m * 16 + half * 8 + row;
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

template <bool BF16, int DIM> __global__ void __launch_bounds__(THREADS) prefill_kernel(struct cuda_prefill p)
{
    extern __shared__ __align__(128) uint8_t memory[];
    struct tile_memory<DIM> *m = (struct tile_memory<DIM> *)memory;
    struct cuda_span span = p.spans[blockIdx.z];
    span.count = min(span.count, p.span_max);
    /* The last tokens walk the most keys: they start first. */
    uint32_t first = (gridDim.x - 1 - blockIdx.x) * TOKENS, q_head = blockIdx.y;
    if (first >= span.count || span.row >= p.row_count)
        return;
    uint32_t head = q_head / (p.q_heads / p.kv_heads), end = span.position + min(span.count, first + TOKENS);
    const uint64_t *at = p.kv.at + span.row * p.kv.row_stride;
    load_keys<DIM>(m, p, at, head, 0, end);
    load_queries<BF16, DIM>(m->q, p, span, first, q_head);
    float acc[M_TILES][DIM / 8][4] = {};
    struct token_state state[M_TILES][2];
#pragma unroll
    for (int i = 0; i < M_TILES * 2; i++)
        state[i / 2][i % 2] = {-INFINITY, 0};
    uint32_t tiles = (end + KEYS - 1) / KEYS, own = span.position + first + threadIdx.x / 32 * 16 * M_TILES;
    for (uint32_t t = 0; t < tiles; t++) {
        if (t + 1 < tiles) {
            load_keys<DIM>(m, p, at, head, t + 1, end);
            asm volatile("cp.async.wait_group 1;" ::: "memory");
        } else {
            asm volatile("cp.async.wait_group 0;" ::: "memory");
        }
        __syncthreads();
        if (t * KEYS <= own + 16 * M_TILES - 1) {
            float s[M_TILES][N_TILES][4] = {};
            score_tile<BF16, DIM>(s, m->q, m->k[t & 1]);
            update<DIM>(s, acc, state, own, t * KEYS, p.scale * 1.44269504f);
            add_values<BF16, DIM>(acc, s, m->v[t & 1]);
        }
        __syncthreads();
    }
    write_tokens<DIM>(p, span, first, q_head, acc, state);
}

template <bool BF16, int DIM> static int launch(const struct cuda_prefill *p, cudaStream_t stream)
{
    int bytes = (int)sizeof(struct tile_memory<DIM>);
    if (cudaFuncSetAttribute(prefill_kernel<BF16, DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) !=
        cudaSuccess)
        return -EIO;
    dim3 grid(ceil_div(p->span_max, TOKENS), p->q_heads, p->span_count);
    prefill_kernel<BF16, DIM><<<grid, THREADS, bytes, stream>>>(*p);
    return launch_status();
}

int cuda_prefill(const struct cuda_prefill *p, struct CUstream_st *stream)
{
    if (!view_is_valid(&p->kv) || p->kv.slotted || p->kv.page_tokens % KEYS || p->kv_heads == 0 || p->q_heads == 0 ||
        p->q_heads % p->kv_heads || (p->head_dim != 64 && p->head_dim != 128) ||
        p->kv.piece_bytes < 4 * p->head_dim || (p->out_type != DTYPE_F32 && p->out_type != DTYPE_BF16) ||
        p->q_stride % 4 || !is_aligned(p->q, 16) || !is_aligned(p->out, 8) || p->q_heads > 65535 ||
        p->span_count > 65535)
        return -EINVAL;
    if (p->span_count == 0 || p->span_max == 0)
        return 0;
    bool bf16 = p->kv.type == DTYPE_BF16;
    if (p->head_dim == 128)
        return bf16 ? launch<true, 128>(p, stream) : launch<false, 128>(p, stream);
    return bf16 ? launch<true, 64>(p, stream) : launch<false, 64>(p, stream);
}
