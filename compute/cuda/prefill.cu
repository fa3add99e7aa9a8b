/* Causal attention of prompts over pages, for any GPU from sm_80 on; prefill_hopper.cu has Hopper's form.
 *
 * A block takes 128 tokens of one span and one query head: four warps of 32 tokens each. It walks the keys
 * from position 0 in tiles of 64, two tiles in flight through shared memory (cp.async), with a running
 * maximum and sum for every token; tiles past a token's own position leave its state exactly as it is, so
 * the result does not depend on how a prompt was cut. A tile lies in one page. Shared memory is swizzled by
 * 16 bytes: a tile's row r keeps unit u at u ^ (r % 8), which makes every ldmatrix free of bank conflicts.
 * Stateless. */
#include "compute/cuda/prefill.cuh"

enum { WARPS = 4, THREADS = 32 * WARPS, M_TILES = TOKENS / WARPS / 16, N_TILES = KEYS / 8 };

template <int DIM> struct tile_memory {
    uint16_t q[TOKENS * DIM];
    uint16_t k[2][KEYS * DIM], v[2][KEYS * DIM];
};

/* Address of 16 bytes (unit) of a row in shared memory. */
template <int DIM>
__device__ __forceinline__ uint32_t unit_at(const uint16_t *tile, uint32_t row, uint32_t unit)
{
    return shared_address(tile) + row * DIM * 2 + ((unit ^ (row & 7)) << 4);
}

/* Rounds the block's queries into shared memory; rows past the span are zero. */
template <bool BF16, int DIM>
__device__ __forceinline__ void load_queries(uint16_t *tile, const struct cuda_prefill &p,
                                             const struct cuda_span &span, uint32_t first, uint32_t q_head)
{
    for (uint32_t i = threadIdx.x; i < TOKENS * DIM / 8; i += THREADS) {
        uint32_t row = i / (DIM / 8), unit = i % (DIM / 8);
        *(uint4 *)((uint8_t *)tile + row * DIM * 2 + ((unit ^ (row & 7)) << 4)) =
            query_unit<BF16>(p, span, first + row, q_head, unit);
    }
}

/* Starts the copy of keys [KEYS * t, + KEYS) and their values; keys from `end` on are zero. */
template <int DIM>
__device__ __forceinline__ void load_keys(struct tile_memory<DIM> *m, const struct cuda_prefill &p,
                                          const uint64_t *at, uint32_t head, uint32_t t, uint32_t end)
{
    enum { UNITS = DIM / 4 }; /* of K and V */
    struct tile_source source = tile_source(p, at, head, t * KEYS, end);
    const uint16_t *k = m->k[t & 1], *v = m->v[t & 1];
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < KEYS * UNITS; i += THREADS) {
        uint32_t row = i / UNITS, unit = i % UNITS;
        bool real = row < source.rows;
        uint32_t to = unit < UNITS / 2 ? unit_at<DIM>(k, row, unit) : unit_at<DIM>(v, row, unit - UNITS / 2);
        copy_async(to, source.from + (real ? (uint64_t)row * p.kv.piece_bytes + unit * 16 : 0), real);
    }
    copy_commit();
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
__device__ __forceinline__ void add_values(float (*acc)[DIM / 8][4], const float (*s)[N_TILES][4],
                                           const uint16_t *v)
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
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        __syncthreads();
        if (t * KEYS <= own + 16 * M_TILES - 1) {
            float s[M_TILES][N_TILES][4] = {};
            score_tile<BF16, DIM>(s, m->q, m->k[t & 1]);
            update<DIM, M_TILES>(s, acc, state, own, t * KEYS, p.scale * 1.44269504f);
            add_values<BF16, DIM>(acc, s, m->v[t & 1]);
        }
        __syncthreads();
    }
    write_tokens<DIM, M_TILES>(p, span, first + threadIdx.x / 32 * 16 * M_TILES, q_head, acc, state);
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

int cuda_prefill_hopper(int device)
{
    int major = 0, minor = 0;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
           cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess &&
           major == 9 && minor == 0;
}

int cuda_prefill(const struct cuda_prefill *p, struct CUstream_st *stream)
{
    if (!view_is_valid(&p->kv) || p->kv.slotted || p->kv.page_tokens % KEYS || p->kv_heads == 0 ||
        p->q_heads == 0 || p->q_heads % p->kv_heads || (p->head_dim != 64 && p->head_dim != 128) ||
        p->kv.piece_bytes < 4 * p->head_dim || (p->out_type != DTYPE_F32 && p->out_type != DTYPE_BF16) ||
        p->q_stride % 4 || !is_aligned(p->q, 16) || !is_aligned(p->out, 8) || p->q_heads > 65535 ||
        p->span_count > 65535)
        return -EINVAL;
    if (p->span_count == 0 || p->span_max == 0)
        return 0;
    if (p->hopper)
        return prefill_hopper(p, stream);
    bool bf16 = p->kv.type == DTYPE_BF16;
    if (p->head_dim == 128)
        return bf16 ? launch<true, 128>(p, stream) : launch<false, 128>(p, stream);
    return bf16 ? launch<true, 64>(p, stream) : launch<false, 64>(p, stream);
}
