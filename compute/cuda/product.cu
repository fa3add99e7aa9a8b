/* Products of a bf16 matrix with up to 32 tokens and what comes before and after them, for Hopper (sm_90a):
 * bound by reading the matrix once.
 *
 * A block takes 64 rows and walks the columns, or, where a cluster of PARTS blocks shares the rows, its part
 * of them. One thread keeps some 200 KB of the matrix and of the tokens on their way into shared memory (the
 * tensor memory accelerator, one mbarrier a stage); a warpgroup multiplies them by wgmma, matrix rows times
 * tokens. The first stages of the matrix, which no launch writes, are asked for before the launch before has
 * ended. Parts are added in their order through distributed shared memory. The order of a token's sums
 * depends on the matrix' shape alone, not on the number of tokens.
 *
 * Measured on an H200 (bench/results/2026-12-01-products-h200.md): what the producer takes between two stages
 * shows (18.5 us for 16.0, 6144 x 4096), so its loop is short; boxes of one panel are no better than of two;
 * tiles of 128 or 256 rows, and tiles that blocks take as a counter says, are slower.
 *
 * Stateless, but for the address of the driver's function that describes a matrix. */
#include <cuda.h>

#include "compute/cuda/hopper.cuh"
#include "compute/cuda/launch.cuh"
#include "compute/cuda/rows.cuh"
#include "compute/cuda/tma.cuh"

enum {
    COLUMNS = CUDA_PRODUCT_COLUMNS, /* of a panel: hopper.cuh */
    PANELS = 2,                     /* of a stage: 256 bytes of a row */
    TILE = 64,                      /* rows of a block */
    PAIRED = 8,                     /* neighbouring rows of each half, where gate and up are paired */
    CONSUMERS = 128,
    PRODUCER = CONSUMERS,     /* this thread */
    NORMERS = CONSUMERS + 32, /* from this thread on */
    THREADS = NORMERS + 128,
};

struct product {
    CUtensorMap w, x;
    struct cuda_product p;
    uint32_t steps; /* of PANELS panels */
};

/* What shared memory holds, as offsets: PANELS panels of the matrix and as many of the tokens, STAGES times.
 * Some 36 KiB of a multiprocessor's are left to the launches before and after. */
template <int TOKENS> struct form {
    enum {
        STAGES = TOKENS == 32 ? 8 : TOKENS == 16 ? 9 : 10,
        W_PANEL = TILE * 2 * COLUMNS,
        X_PANEL = TOKENS * 2 * COLUMNS,
        X = PANELS * W_PANEL, /* in a stage */
        STAGE_BYTES = X + PANELS * X_PANEL,
        FULL = STAGES * STAGE_BYTES, /* barriers */
        EMPTY = FULL + 8 * STAGES,
        FACTORS = EMPTY + 8 * STAGES, /* f32 [32], of each token's sums */
        SQUARES = FACTORS + 4 * 32,   /* f32 [warps][32] */
        BYTES = SQUARES + 4 * 4 * 32,
    };
};

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <class F>
__device__ __forceinline__ void load_w(const struct product &p, uint32_t memory, uint32_t s, uint32_t step,
                                       uint64_t policy)
{
    uint32_t to = memory + s * F::STAGE_BYTES, barrier = memory + F::FULL + 8 * s;
    barrier_expect(barrier, F::STAGE_BYTES);
    if (p.p.gated)
        load_box_paired(to, &p.w, blockIdx.y * (TILE / 2 / PAIRED), step * PANELS, barrier, policy);
    else
        load_box(to, &p.w, blockIdx.y * TILE, step * PANELS, barrier, policy);
}

template <class F>
__device__ __forceinline__ void load_x(const struct product &p, uint32_t memory, uint32_t s, uint32_t step,
                                       uint64_t policy)
{
    load_box(memory + s * F::STAGE_BYTES + F::X, &p.x, 0, step * PANELS, memory + F::FULL + 8 * s, policy);
}

/* One thread. Steps [first, last). */
template <class F>
__device__ __forceinline__ void produce(const struct product &p, uint32_t memory, uint32_t first,
                                        uint32_t last)
{
    uint64_t once = stream_policy(), often = keep_policy();
    uint32_t ahead = min(last - first, (uint32_t)F::STAGES);
    for (uint32_t s = 0; s < ahead; s++)
        load_w<F>(p, memory, s, first + s, once);
    launch_wait();
    for (uint32_t s = 0; s < ahead; s++)
        load_x<F>(p, memory, s, first + s, often);
    uint32_t s = 0, round = 0;
    for (uint32_t step = first + F::STAGES; step < last; step++) {
        barrier_wait(memory + F::EMPTY + 8 * s, round & 1);
        load_w<F>(p, memory, s, step, once);
        load_x<F>(p, memory, s, step, often);
        if (++s == F::STAGES)
            s = 0, round++;
    }
}

/* One warpgroup: sums over the block's part of the columns. */
template <int TOKENS>
__device__ __forceinline__ void consume(float *sum, uint32_t memory, uint32_t steps)
{
    using F = struct form<TOKENS>;
    for (uint32_t i = 0, s = 0, before = 0, round = 0; i < steps; i++) {
        uint32_t stage = memory + s * F::STAGE_BYTES;
        uint64_t w = panel_by_row(stage), x = panel_by_row(stage + F::X); /* addresses in units of 16 bytes */
        barrier_wait(memory + F::FULL + 8 * s, round & 1);
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < PANELS * 4; k++)
            wgmma_tokens<TOKENS>(sum, w + (k / 4 * F::W_PANEL + k % 4 * 32) / 16,
                                 x + (k / 4 * F::X_PANEL + k % 4 * 32) / 16, i > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > 0 && threadIdx.x == 0)
            barrier_arrive(memory + F::EMPTY + 8 * before);
        before = s;
        if (++s == F::STAGES)
            s = 0, round++;
    }
    wgmma_wait<0>();
}

/* Four warps, a lane a token: what the norm multiplies the sums by. Loads are in flight together. */
__device__ __forceinline__ void norm(const struct product &p, float *factors, float *sums)
{
    enum { FLIGHT = 32 };
    uint32_t lane = threadIdx.x % 32, warp = (threadIdx.x - NORMERS) / 32;
    float sum = 0, v[FLIGHT];
    for (uint32_t first = warp; first < p.p.square_blocks; first += 4 * FLIGHT) {
#pragma unroll
        for (int i = 0; i < FLIGHT; i++)
            v[i] = first + 4 * i < p.p.square_blocks ? __ldcg(p.p.squares + (first + 4 * i) * 32 + lane) : 0;
#pragma unroll
        for (int i = 0; i < FLIGHT; i++)
            sum += v[i];
    }
    sums[warp * 32 + lane] = sum;
    asm volatile("bar.sync 2, 128;" ::: "memory");
    if (warp > 0)
        return;
    sum = sums[lane] + sums[32 + lane] + sums[64 + lane] + sums[96 + lane];
    factors[lane] = p.p.squares ? 1.0f / sqrtf(sum / (float)p.p.cols + p.p.eps) : 1;
}

/* Where a thread's sum j belongs: see hopper.cuh. */
__device__ __forceinline__ uint32_t row_of(int j)
{
    return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * (j / 2 % 2);
}

__device__ __forceinline__ uint32_t token_of(int j)
{
    return 8 * (j / 4) + threadIdx.x % 4 * 2 + j % 2;
}

/* Adds the parts of sums j = part, part + PARTS, ... */
template <int TOKENS, int PARTS>
__device__ __forceinline__ void add_parts(float *sum, float *mine, uint32_t part)
{
    if (threadIdx.x < CONSUMERS)
#pragma unroll
        for (int j = 0; j < TOKENS / 2; j++)
            mine[j * CONSUMERS + threadIdx.x] = sum[j];
    cluster_wait();
    if (threadIdx.x < CONSUMERS)
#pragma unroll
        for (int j = 0; j < TOKENS / 2; j++) {
            if (j % PARTS != part)
                continue;
            sum[j] = 0;
#pragma unroll
            for (int from = 0; from < PARTS; from++)
                sum[j] += cluster_load(shared_address(mine + j * CONSUMERS + threadIdx.x), from);
        }
    cluster_wait(); /* nobody leaves while others read */
}

/* Gate and up of one token, which one thread has. */
__device__ __forceinline__ void put_gated(const struct cuda_product &p, uint32_t token, float gate, float up)
{
    uint32_t half = p.rows / 2, row = blockIdx.y * (TILE / 2) + threadIdx.x / 32 * 8 + threadIdx.x % 32 / 4;
    if (row < half && token < p.n)
        ((uint16_t *)p.gated)[(uint64_t)token * half + row] = (uint16_t)pack<true>(silu_times(gate, up), 0);
}

/* Sums of squares of the block's rows, from each thread's own: token_of(i / 2 * 4 + i % 2) for squares[i]. */
template <int TOKENS>
__device__ __forceinline__ void put_squares(float *to, float *squares, float *of_warps)
{
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++) {
        for (int step = 4; step < 32; step <<= 1)
            squares[i] += __shfl_xor_sync(FULL_WARP, squares[i], step);
        if (threadIdx.x % 32 < 4)
            of_warps[threadIdx.x / 32 * 32 + token_of(i / 2 * 4 + i % 2)] = squares[i];
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (threadIdx.x < 32)
        to[threadIdx.x] = threadIdx.x < TOKENS ? of_warps[threadIdx.x] + of_warps[32 + threadIdx.x] +
                                                     of_warps[64 + threadIdx.x] + of_warps[96 + threadIdx.x]
                                               : 0;
}

/* Sums j = part, part + PARTS, ... go where they belong. `before`: what they are added to. */
template <int TOKENS, int PARTS>
__device__ __forceinline__ void finish(const struct cuda_product &p, uint32_t part, const float *sum,
                                       const float *before, const float *factors, float *of_warps)
{
    float squares[TOKENS / 4] = {};
#pragma unroll
    for (int j = 0; j < TOKENS / 2; j++) {
        uint32_t row = blockIdx.y * TILE + row_of(j), token = token_of(j);
        if (j % PARTS != part)
            continue;
        float v = sum[j] * factors[token];
        if (p.gated) {
            if (j % 4 < 2)
                put_gated(p, token, v, sum[j + 2] * factors[token]);
            continue;
        }
        if (row >= p.rows || token >= p.n)
            continue;
        v += before[j];
        uint64_t at = (uint64_t)token * p.rows + row;
        p.out[at] = v;
        if (p.next)
            ((uint16_t *)p.next)[at] = (uint16_t)pack<true>(v * p.next_weight[row], 0);
        squares[j / 4 * 2 + j % 2] += v * v;
    }
    if (p.next)
        put_squares<TOKENS>(p.next_squares + (blockIdx.y * PARTS + part) * 32, squares, of_warps);
}

template <int TOKENS, int PARTS> __device__ __forceinline__ void run(const struct product &p)
{
    using F = struct form<TOKENS>;
    extern __shared__ __align__(1024) uint8_t shared[];
    float *factors = (float *)(shared + F::FACTORS), *of_warps = (float *)(shared + F::SQUARES);
    uint32_t memory = shared_address(shared), part = blockIdx.x;
    uint32_t first = part * p.steps / PARTS, last = (part + 1) * p.steps / PARTS;
    bool consumer = threadIdx.x < CONSUMERS;
    if (threadIdx.x == PRODUCER) {
        prefetch_map(&p.w);
        prefetch_map(&p.x);
    }
    launch_next();
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2 * F::STAGES; s++)
            barrier_init(memory + F::FULL + 8 * s, 1);
        barrier_publish();
    }
    __syncthreads();
    if (threadIdx.x == PRODUCER)
        produce<F>(p, memory, first, last);
    launch_wait();
    float sum[TOKENS / 2] = {}, before[TOKENS / 2] = {};
    if (threadIdx.x >= NORMERS)
        norm(p, factors, of_warps);
    if (consumer) {
#pragma unroll
        for (int j = 0; j < TOKENS / 2; j++) {
            uint32_t row = blockIdx.y * TILE + row_of(j), token = token_of(j);
            if (j % PARTS != part || row >= p.p.rows || token >= p.p.n)
                continue;
            if (p.p.bias)
                before[j] = p.p.bias[row];
            if (p.p.accumulate)
                before[j] += p.p.out[(uint64_t)token * p.p.rows + row];
        }
        consume<TOKENS>(sum, memory, last - first);
    }
    __syncthreads();
    if (PARTS > 1)
        add_parts<TOKENS, PARTS>(sum, (float *)shared, part);
    if (consumer)
        finish<TOKENS, PARTS>(p.p, part, sum, before, factors, of_warps);
}

#else

/* Other architectures never launch it. */
template <int TOKENS, int PARTS> __device__ __forceinline__ void run(const struct product &)
{
}

#endif

template <int TOKENS, int PARTS>
__global__ void __launch_bounds__(THREADS, 2) product_kernel(const __grid_constant__ struct product p)
{
    run<TOKENS, PARTS>(p);
}

/* ---- launches ---- */

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static encode_function encoder(void)
{
    static encode_function known;
    encode_function found = __atomic_load_n(&known, __ATOMIC_ACQUIRE);
    if (found)
        return found;
    void *function = NULL;
    cudaDriverEntryPointQueryResult status;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                         &status) != cudaSuccess ||
        status != cudaDriverEntryPointSuccess)
        return NULL;
    __atomic_store_n(&known, (encode_function)function, __ATOMIC_RELEASE);
    return (encode_function)function;
}

/* A bf16 matrix as boxes of PANELS panels; what lies outside reads as zeros. strides[i]: bytes from one of
 * dimension i + 1 to the next. */
static int encode(CUtensorMap *map, const void *at, cuuint32_t rank, const cuuint64_t *sizes,
                  const cuuint64_t *strides, const cuuint32_t *box)
{
    static const cuuint32_t each[5] = {1, 1, 1, 1, 1};
    encode_function function = encoder();
    if (!function)
        return -ENOTSUP;
    CUresult result = function(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, (void *)at, sizes, strides, box,
                               each, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? 0 : -EINVAL;
}

static int encode_rows(CUtensorMap *map, const void *at, uint32_t rows, uint32_t cols, uint32_t box_rows)
{
    cuuint64_t sizes[3] = {COLUMNS, rows, cols / COLUMNS}, strides[2] = {2ull * cols, 2 * COLUMNS};
    cuuint32_t box[3] = {COLUMNS, box_rows, PANELS};
    return encode(map, at, 3, sizes, strides, box);
}

/* Rows of w by gate and up: PAIRED of one, PAIRED of the other, so that a thread has both (hopper.cuh). */
static int encode_paired(CUtensorMap *map, const void *at, uint32_t rows, uint32_t cols)
{
    cuuint64_t row = 2ull * cols, sizes[5] = {COLUMNS, PAIRED, 2, rows / 2 / PAIRED, cols / COLUMNS};
    cuuint64_t strides[4] = {row, row * (rows / 2), row * PAIRED, 2 * COLUMNS};
    cuuint32_t box[5] = {COLUMNS, PAIRED, 2, TILE / 2 / PAIRED, PANELS};
    return encode(map, at, 5, sizes, strides, box);
}

template <int TOKENS, int PARTS> static int launch(const struct cuda_product *p, cudaStream_t stream)
{
    auto kernel = product_kernel<TOKENS, PARTS>;
    struct product product = {};
    product.p = *p;
    product.steps = ceil_div(p->cols, COLUMNS * PANELS);
    int r = p->gated ? encode_paired(&product.w, p->w, p->rows, p->cols)
                     : encode_rows(&product.w, p->w, p->rows, p->cols, TILE);
    if (r == 0)
        r = encode_rows(&product.x, p->x, p->n, p->cols, TOKENS);
    if (r < 0)
        return r;
    struct launch_form how;
    launch_form(&how, dim3(PARTS, ceil_div(p->rows, TILE)), THREADS, form<TOKENS>::BYTES, stream);
    launch_form_cluster(&how, PARTS);
    cudaLaunchKernelEx(&how.config, kernel, product);
    return launch_status();
}

template <int TOKENS, int PARTS> static int load(void)
{
    auto kernel = product_kernel<TOKENS, PARTS>;
    struct cudaFuncAttributes attributes; /* asking for them loads the code */
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, form<TOKENS>::BYTES) !=
            cudaSuccess ||
        cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess)
        return -EIO;
    return 0;
}

int cuda_product_load(void)
{
    int (*const all[])(void) = {load<8, 1>, load<16, 1>, load<32, 1>, load<8, 2>, load<16, 2>, load<32, 2>};
    int r = encoder() ? 0 : -ENOTSUP;
    for (unsigned i = 0; r == 0 && i < sizeof all / sizeof *all; i++)
        r = all[i]();
    return r;
}

/* Two blocks share rows where one for each 64 would leave half of the multiprocessors without. */
enum { TILES_SHARED = 66 };

static unsigned parts_of(uint32_t rows)
{
    return ceil_div(rows, TILE) <= TILES_SHARED ? 2 : 1;
}

uint32_t cuda_product_blocks(uint32_t rows)
{
    return ceil_div(rows, TILE) * parts_of(rows);
}

template <int TOKENS> static int launch_parts(const struct cuda_product *p, cudaStream_t stream)
{
    return parts_of(p->rows) == 2 ? launch<TOKENS, 2>(p, stream) : launch<TOKENS, 1>(p, stream);
}

int cuda_product(const struct cuda_product *p, struct CUstream_st *stream)
{
    if (p->n > CUDA_PRODUCT_TOKENS || p->rows == 0 || p->cols == 0 || p->cols % COLUMNS ||
        !is_aligned(p->w, 16) || !is_aligned(p->x, 16) ||
        (p->gated && (p->rows % (2 * PAIRED) || p->accumulate || p->bias || p->next)) ||
        (p->next && (!p->next_weight || !p->next_squares)) || ceil_div(p->rows, TILE) > 65535)
        return -EINVAL;
    if (p->n == 0)
        return 0;
    if (p->n <= 8)
        return launch_parts<8>(p, stream);
    return p->n <= 16 ? launch_parts<16>(p, stream) : launch_parts<32>(p, stream);
}
