/* Causal attention of prompts over pages, for Hopper (sm_90a).
 *
 * A block takes 128 tokens of one span and one query head, 64 for each of its two warpgroups, and walks the
 * keys as prefill.cu does, with the same guarantees: two tiles of 64 keys in flight through shared memory,
 * a running softmax in registers, products by wgmma. Two blocks share a multiprocessor, so that one's
 * softmax runs beside the other's products. Stateless. */
#include "compute/cuda/hopper.cuh"
#include "compute/cuda/prefill.cuh"

enum { GROUPS = TOKENS / 64, THREADS = 128 * GROUPS, STAGES = 2 };

/* Panels of 64 columns, see hopper.cuh. */
template <int DIM> struct tile_memory {
    uint8_t q[GROUPS][DIM / 64][64 * 128];
    uint8_t k[STAGES][DIM / 64][KEYS * 128];
    uint8_t v[STAGES][DIM / 64][KEYS * 128];
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ uint32_t unit_offset(uint32_t row, uint32_t unit)
{
    return row * 128 + ((unit ^ (row & 7)) << 4);
}

template <bool BF16, int DIM>
__device__ __forceinline__ void load_queries(struct tile_memory<DIM> *m, const struct cuda_prefill &p,
                                             const struct cuda_span &span, uint32_t first, uint32_t q_head)
{
    for (uint32_t i = threadIdx.x; i < TOKENS * DIM / 8; i += THREADS) {
        uint32_t row = i / (DIM / 8), unit = i % (DIM / 8);
        *(uint4 *)(m->q[row / 64][unit / 8] + unit_offset(row % 64, unit % 8)) =
            query_unit<BF16>(p, span, first + row, q_head, unit);
    }
}

template <int DIM>
__device__ __forceinline__ void load_keys(struct tile_memory<DIM> *m, const struct cuda_prefill &p,
                                          const uint64_t *at, uint32_t head, uint32_t t, uint32_t end)
{
    enum { UNITS = DIM / 8 };
    struct tile_source source = tile_source(p, at, head, t * KEYS, end);
    uint32_t k = shared_address(m->k[t % STAGES]), v = shared_address(m->v[t % STAGES]);
#pragma unroll
    for (uint32_t i = threadIdx.x; i < KEYS * UNITS; i += THREADS) {
        uint32_t row = i / UNITS, unit = i % UNITS;
        bool real = row < source.rows;
        const uint8_t *from = source.from + (real ? (uint64_t)row * p.kv.piece_bytes + unit * 16 : 0);
        uint32_t to = unit / 8 * (KEYS * 128) + unit_offset(row, unit % 8);
        copy_async(k + to, from, real);
        copy_async(v + to, from + (real ? DIM * 2 : 0), real);
    }
    copy_commit();
}

/* One warpgroup and one tile. */
template <bool BF16, int DIM>
__device__ __forceinline__ void take_tile(struct tile_memory<DIM> *m, uint32_t t, float (*acc)[DIM / 8][4],
                                          struct token_state (*state)[2], uint32_t own, float scale)
{
    uint32_t q = shared_address(m->q[threadIdx.x / 128]), k = shared_address(m->k[t % STAGES]);
    uint32_t v = shared_address(m->v[t % STAGES]);
    float s[1][KEYS / 8][4];
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < DIM / 16; step++) {
        uint32_t to = step % 4 * 32;
        wgmma_scores<BF16>(&s[0][0][0], panel_by_row(q + step / 4 * (64 * 128) + to),
                           panel_by_row(k + step / 4 * (KEYS * 128) + to), step > 0);
    }
    wgmma_end();
    update<DIM, 1>(s, acc, state, own, t * KEYS, scale);
    uint32_t weights[KEYS / 16][4];
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            weights[step][e] =
                pack<BF16>(s[0][2 * step + e / 2][2 * (e % 2)], s[0][2 * step + e / 2][2 * (e % 2) + 1]);
    wgmma_begin();
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++)
        wgmma_values<BF16, DIM>(&acc[0][0][0], weights[step],
                                panel_by_column(v + step * 16 * 128, KEYS * 128));
    wgmma_end();
}

template <bool BF16, int DIM>
__device__ __forceinline__ void run(const struct cuda_prefill &p, struct tile_memory<DIM> *m)
{
    struct cuda_span span = p.spans[blockIdx.z];
    span.count = min(span.count, p.span_max);
    uint32_t first = (gridDim.x - 1 - blockIdx.x) * TOKENS, q_head = blockIdx.y;
    if (first >= span.count || span.row >= p.row_count)
        return;
    uint32_t head = q_head / (p.q_heads / p.kv_heads), end = span.position + min(span.count, first + TOKENS);
    const uint64_t *at = p.kv.at + span.row * p.kv.row_stride;
    load_keys<DIM>(m, p, at, head, 0, end);
    load_queries<BF16, DIM>(m, p, span, first, q_head);
    float acc[1][DIM / 8][4] = {};
    struct token_state state[1][2] = {{{-INFINITY, 0}, {-INFINITY, 0}}};
    uint32_t token = first + threadIdx.x / 32 * 16,
             last = span.position + first + threadIdx.x / 128 * 64 + 63;
    for (uint32_t t = 0; t * KEYS < end; t++) {
        if ((t + 1) * KEYS < end) {
            load_keys<DIM>(m, p, at, head, t + 1, end);
            copy_wait<1>();
        } else {
            copy_wait<0>();
        }
        wgmma_publish();
        __syncthreads();
        if (t * KEYS <= last)
            take_tile<BF16, DIM>(m, t, acc, state, span.position + token, p.scale * 1.44269504f);
        __syncthreads();
    }
    write_tokens<DIM, 1>(p, span, token, q_head, acc, state);
}

#else

/* Other architectures never launch it. */
template <bool BF16, int DIM>
__device__ __forceinline__ void run(const struct cuda_prefill &, struct tile_memory<DIM> *)
{
}

#endif

template <bool BF16, int DIM>
__global__ void __launch_bounds__(THREADS, 2) hopper_kernel(struct cuda_prefill p)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    run<BF16, DIM>(p, (struct tile_memory<DIM> *)memory);
}

template <bool BF16, int DIM> static int launch(const struct cuda_prefill *p, cudaStream_t stream)
{
    int bytes = (int)sizeof(struct tile_memory<DIM>);
    if (cudaFuncSetAttribute(hopper_kernel<BF16, DIM>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) !=
        cudaSuccess)
        return -EIO;
    dim3 grid(ceil_div(p->span_max, TOKENS), p->q_heads, p->span_count);
    hopper_kernel<BF16, DIM><<<grid, THREADS, bytes, stream>>>(*p);
    return launch_status();
}

int prefill_hopper(const struct cuda_prefill *p, cudaStream_t stream)
{
    bool bf16 = p->kv.type == DTYPE_BF16;
    if (p->head_dim == 128)
        return bf16 ? launch<true, 128>(p, stream) : launch<false, 128>(p, stream);
    return bf16 ? launch<true, 64>(p, stream) : launch<false, 64>(p, stream);
}
