/* Times every CUDA operator at the shapes of an 8B model (32 query heads, 8 KV heads, head_dim 128, batch
 * 32) and gives each time's share of its floor: bytes over the copy bandwidth, or over the link rate, both
 * measured in the same run. `bench_cuda [--quick] [name ...]`.
 *
 * An operator is captured into a graph of several launches, over rotating inputs where one set would stay
 * in the cache; the figure is the median of the graph's runs over its launches. Inputs are random, never
 * zero. */
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute/cuda/kernels.h"
#include "compute/cuda/sets.h"

enum { RUNS = 9, LAUNCHES = 8, SETS_MAX = 16 };

#define OK(call) check((int)(call), __LINE__)

static void check(int status, int line)
{
    if (status == 0)
        return;
    printf("line %d: status %d (%s)\n", line, status, cudaGetErrorString(cudaGetLastError()));
    exit(1);
}

static cudaStream_t stream;
static double copy_rate, link_rate, link_back_rate; /* bytes a second */
static char **wanted;
static int wanted_count;

static bool is_wanted(const char *name)
{
    for (int i = 0; i < wanted_count; i++)
        if (strcmp(wanted[i], name) == 0)
            return true;
    return wanted_count == 0;
}

__global__ void fill_bits(uint32_t *out, uint64_t words, uint32_t seed, uint32_t mask, uint32_t set)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < words;
         i += (uint64_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)(i >> 32) * 0x9E3779B9u ^ (uint32_t)i * 0x85EBCA6Bu ^ seed;
        x ^= x >> 15, x *= 0x2C1B3C6Du, x ^= x >> 12, x *= 0x297A2D39u, x ^= x >> 15;
        out[i] = (x & mask) | set;
    }
}

/* Random 16-bit floats of magnitude 2^-3 .. 2^0 (bf16), both signs. */
static void *random_bf16(uint64_t count)
{
    void *memory;
    OK(cudaMalloc(&memory, count * 2 + 16));
    fill_bits<<<1024, 256, 0, stream>>>((uint32_t *)memory, count / 2, 12345u + (uint32_t)count, 0x80ff80ffu,
                                        0x3f003f00u & 0x3e003e00u);
    OK(cudaStreamSynchronize(stream));
    return memory;
}

__global__ void fill_normal(float *out, uint64_t count, uint32_t seed, float scale)
{
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count;
         i += (uint64_t)gridDim.x * blockDim.x) {
        uint32_t x = (uint32_t)i * 0x85EBCA6Bu ^ seed;
        float sum = 0;
        for (int k = 0; k < 4; k++) {
            x ^= x >> 15, x *= 0x2C1B3C6Du, x ^= x >> 12, x *= 0x297A2D39u, x ^= x >> 15, x += 0x9E3779B9u;
            sum += (float)x * 0x1p-32f - 0.5f;
        }
        out[i] = sum * 1.73f * scale;
    }
}

static float *random_floats(uint64_t count, float scale)
{
    float *memory;
    OK(cudaMalloc((void **)&memory, count * 4 + 16));
    fill_normal<<<1024, 256, 0, stream>>>(memory, count, 777u + (uint32_t)count, scale);
    OK(cudaStreamSynchronize(stream));
    return memory;
}

static void *device(uint64_t bytes)
{
    void *memory;
    OK(cudaMalloc(&memory, bytes));
    return memory;
}

static void *upload(const void *data, uint64_t bytes)
{
    void *memory = device(bytes);
    OK(cudaMemcpy(memory, data, bytes, cudaMemcpyHostToDevice));
    return memory;
}

static int by_value(const void *a, const void *b)
{
    return (*(const float *)a > *(const float *)b) - (*(const float *)a < *(const float *)b);
}

typedef int (*launch_fn)(void *arg, int index);

/* Median seconds of one launch. */
static double median_seconds(launch_fn launch, void *arg, int launches)
{
    cudaGraph_t graph;
    cudaGraphExec_t run;
    cudaEvent_t begin, end;
    float ms[RUNS];
    OK(launch(arg, 0));
    OK(cudaStreamSynchronize(stream));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < launches; i++)
        OK(launch(arg, i));
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&run, graph, 0));
    OK(cudaEventCreate(&begin));
    OK(cudaEventCreate(&end));
    OK(cudaGraphLaunch(run, stream));
    for (int i = 0; i < RUNS; i++) {
        OK(cudaEventRecord(begin, stream));
        OK(cudaGraphLaunch(run, stream));
        OK(cudaEventRecord(end, stream));
        OK(cudaEventSynchronize(end));
        OK(cudaEventElapsedTime(&ms[i], begin, end));
    }
    OK(cudaGraphExecDestroy(run));
    OK(cudaGraphDestroy(graph));
    OK(cudaEventDestroy(begin));
    OK(cudaEventDestroy(end));
    qsort(ms, RUNS, sizeof *ms, by_value);
    return (double)ms[RUNS / 2] / 1000 / launches;
}

static void report(const char *name, const char *shape, double seconds, double floor)
{
    printf("%-16s %-44s %9.1f us  floor %9.1f us  %5.1f %%\n", name, shape, seconds * 1e6, floor * 1e6,
           100 * floor / seconds);
    fflush(stdout);
}

struct copy {
    void *to, *from;
    uint64_t bytes;
    cudaMemcpyKind kind;
};

static int launch_copy(void *arg, int index)
{
    (void)index;
    struct copy *c = (struct copy *)arg;
    return cudaMemcpyAsync(c->to, c->from, c->bytes, c->kind, stream);
}

static void *host_memory, *host_device;
static uint64_t host_bytes = 3ull << 30;

__global__ void copy_words(uint4 *to, const uint4 *from, uint64_t count)
{
    uint64_t i = blockIdx.x * (uint64_t)blockDim.x * 4 + threadIdx.x;
    for (int u = 0; u < 4; u++, i += blockDim.x)
        if (i < count)
            to[i] = from[i];
}

__global__ void read_words(uint4 *to, const uint4 *from, uint64_t count)
{
    uint64_t i = blockIdx.x * (uint64_t)blockDim.x * 8 + threadIdx.x;
    uint4 v = make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < 8; u++, i += blockDim.x)
        if (i < count)
            v.x ^= from[i].x, v.y ^= from[i].y, v.z ^= from[i].z, v.w ^= from[i].w;
    if ((v.x ^ v.y ^ v.z ^ v.w) == 0x12345678)
        *to = v;
}

static int launch_kernel_copy(void *arg, int index)
{
    (void)index;
    struct copy *c = (struct copy *)arg;
    copy_words<<<(unsigned)(c->bytes / 16 / 1024), 256, 0, stream>>>((uint4 *)c->to, (uint4 *)c->from,
                                                                     c->bytes / 16);
    return (int)cudaGetLastError();
}

static int launch_read(void *arg, int index)
{
    (void)index;
    struct copy *c = (struct copy *)arg;
    read_words<<<(unsigned)(c->bytes / 16 / 2048), 256, 0, stream>>>((uint4 *)c->to, (uint4 *)c->from,
                                                                     c->bytes / 16);
    return (int)cudaGetLastError();
}

/* The copy rate is the better of the library's and a kernel's: inside a graph the library may use a copy
 * engine. */
static void measure_ceilings(void)
{
    uint64_t bytes = 4ull << 30;
    struct copy c = {random_bf16(bytes / 2), random_bf16(bytes / 2), bytes, cudaMemcpyDeviceToDevice};
    double library = 2.0 * (double)bytes / median_seconds(launch_copy, &c, 2);
    double kernel = 2.0 * (double)bytes / median_seconds(launch_kernel_copy, &c, 2);
    double read = (double)bytes / median_seconds(launch_read, &c, 2);
    copy_rate = library > kernel ? library : kernel;
    OK(cudaHostAlloc(&host_memory, host_bytes, cudaHostAllocMapped));
    OK(cudaHostGetDevicePointer(&host_device, host_memory, 0));
    struct copy in = {c.to, host_memory, 1ull << 30, cudaMemcpyHostToDevice};
    link_rate = (double)in.bytes / median_seconds(launch_copy, &in, 1);
    struct copy back = {host_memory, c.to, 1ull << 30, cudaMemcpyDeviceToHost};
    link_back_rate = (double)back.bytes / median_seconds(launch_copy, &back, 1);
    cudaFree(c.to);
    cudaFree(c.from);
    printf("copy (read and written): library %.2f, kernel %.2f TB/s; read only %.2f TB/s; link %.1f GB/s in, "
           "%.1f out\n",
           library / 1e12, kernel / 1e12, read / 1e12, link_rate / 1e9, link_back_rate / 1e9);
}

/* ---- attention ---- */

enum { KV_HEADS = 8, Q_HEADS = 32, DIM = 128, PIECE = 512, PAGE = 64 };

struct attn {
    struct cuda_attn a[SETS_MAX];
    int sets;
};

static int launch_attn(void *arg, int index)
{
    struct attn *b = (struct attn *)arg;
    return cuda_attn(&b->a[index % b->sets], stream);
}

static uint64_t *permuted(uint64_t entries, uint64_t bytes)
{
    uint64_t *at = (uint64_t *)malloc(entries * 8), x = 88172645463325252u;
    for (uint64_t i = 0; i < entries; i++)
        at[i] = i * bytes;
    for (uint64_t i = entries; i-- > 1;) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        uint64_t j = x % (i + 1), swap = at[i];
        at[i] = at[j], at[j] = swap;
    }
    return at;
}

/* Lists of `budget` ascending entries out of `capacity`, evenly jittered. */
static uint32_t *spread_lists(uint64_t lists, uint32_t budget, uint32_t capacity)
{
    uint32_t *items = (uint32_t *)malloc(lists * budget * 4), x = 2463534242u;
    for (uint64_t l = 0; l < lists; l++)
        for (uint32_t i = 0; i < budget; i++) {
            x ^= x << 13, x ^= x >> 17, x ^= x << 5;
            uint64_t low = (uint64_t)i * capacity / budget, high = (uint64_t)(i + 1) * capacity / budget;
            items[l * budget + i] = (uint32_t)(low + x % (high - low));
        }
    return items;
}

/* Sequences of `capacity` positions; lists of `budget` (0: identity over the first `used`). Layers rotate. */
static void bench_attn(const char *shape, uint32_t n, uint32_t capacity, uint32_t budget, bool slotted,
                       uint32_t used)
{
    static struct attn b;
    uint32_t pages = capacity / PAGE, list = budget ? budget : capacity;
    uint64_t page_bytes = (uint64_t)KV_HEADS * PAGE * PIECE, moved = (uint64_t)n * KV_HEADS * used * PIECE;
    uint64_t one = n * (uint64_t)pages * page_bytes, sets = (1ull << 30) / moved + 1;
    b.sets = (int)(sets < SETS_MAX && sets * one < (40ull << 30) ? sets : (40ull << 30) / one + 1);
    b.sets = b.sets < SETS_MAX ? b.sets : SETS_MAX;
    uint8_t *pool = (uint8_t *)random_bf16(one * b.sets / 2);
    uint64_t *at = permuted(n * (uint64_t)pages * b.sets, page_bytes);
    uint64_t *device_at = (uint64_t *)upload(at, n * (uint64_t)pages * b.sets * 8);
    uint32_t *items = budget ? spread_lists((uint64_t)n * KV_HEADS, budget, capacity) : NULL;
    uint32_t *counts = (uint32_t *)malloc(n * KV_HEADS * 4);
    for (uint32_t i = 0; i < n * KV_HEADS; i++)
        counts[i] = used;
    struct cuda_attn a = {};
    a.kv.base = pool;
    a.kv.device_bytes = one * b.sets;
    a.kv.row_stride = a.kv.at_count = pages;
    a.kv.page_tokens = PAGE;
    a.kv.slotted = slotted;
    a.kv.slots = capacity;
    a.kv.units_per_slab = KV_HEADS * PAGE;
    a.kv.piece_bytes = PIECE;
    a.kv.type = DTYPE_BF16;
    a.out = device(n * Q_HEADS * DIM * 2);
    a.out_type = DTYPE_BF16;
    a.q = random_floats(n * Q_HEADS * DIM, 1);
    a.q_stride = Q_HEADS * DIM;
    a.counts = (uint32_t *)upload(counts, n * KV_HEADS * 4);
    a.count_stride = KV_HEADS;
    a.items = items ? (uint32_t *)upload(items, (uint64_t)n * KV_HEADS * list * 4) : NULL;
    a.item_stride = (uint64_t)KV_HEADS * list;
    a.row_count = n;
    a.settled = 1;
    a.list_max = list;
    a.n = n, a.q_heads = Q_HEADS, a.kv_heads = KV_HEADS, a.head_dim = DIM;
    a.scale = 0.0884f;
    a.work = (float *)device(cuda_attn_work_bytes(n, Q_HEADS, DIM, list));
    for (int s = 0; s < b.sets; s++) {
        b.a[s] = a;
        b.a[s].kv.at = device_at + (uint64_t)s * n * pages;
    }
    report("attn", shape, median_seconds(launch_attn, &b, LAUNCHES), (double)moved / copy_rate);
    cudaFree(pool), cudaFree(device_at), cudaFree(a.out), cudaFree((void *)a.q), cudaFree((void *)a.counts);
    cudaFree((void *)a.items), cudaFree(a.work);
    free(at), free(items), free(counts);
}

static void bench_attention(void)
{
    bench_attn("32 seq, 2048 of 32K, paged", 32, 32768, 2048, false, 2048);
    bench_attn("32 seq, 2048 of 3072 slots", 32, 3072, 2048, true, 2048);
    bench_attn("8 seq, 2048 of 16K, paged", 8, 16384, 2048, false, 2048);
    bench_attn("1 seq, 2048 of 32K, paged", 1, 32768, 2048, false, 2048);
    bench_attn("32 seq, full 8K", 32, 8192, 0, false, 8192);
    bench_attn("1 seq, full 128K", 1, 131072, 0, false, 131072);
    bench_attn("32 seq, full 2K, sized for 32K", 32, 32768, 0, false, 2048);
}

static int launch_prefill(void *arg, int index)
{
    (void)index;
    return cuda_prefill((struct cuda_prefill *)arg, stream);
}

static void bench_prefill(void)
{
    static const uint32_t shapes[][3] = {{8192, 0, 1}, {2048, 30720, 1}, {2048, 0, 4}, {32768, 0, 1}};
    for (int i = 0; i < 4; i++) {
        uint32_t tokens = shapes[i][0], before = shapes[i][1], spans = shapes[i][2];
        uint32_t pages = (tokens + before) / PAGE;
        uint64_t page_bytes = (uint64_t)KV_HEADS * PAGE * PIECE;
        struct cuda_span span[4];
        for (uint32_t s = 0; s < spans; s++)
            span[s] = {s, s * tokens, tokens, before};
        struct cuda_prefill p = {};
        uint64_t *at = permuted((uint64_t)spans * pages, page_bytes);
        p.kv.base = (uint8_t *)random_bf16(spans * pages * page_bytes / 2);
        p.kv.device_bytes = spans * pages * page_bytes;
        p.kv.at = (uint64_t *)upload(at, (uint64_t)spans * pages * 8);
        p.kv.row_stride = p.kv.at_count = pages;
        p.kv.page_tokens = PAGE;
        p.kv.piece_bytes = PIECE;
        p.kv.type = DTYPE_BF16;
        p.out = device((uint64_t)spans * tokens * Q_HEADS * DIM * 2);
        p.out_type = DTYPE_BF16;
        p.q = random_floats((uint64_t)spans * tokens * Q_HEADS * DIM, 1);
        p.q_stride = Q_HEADS * DIM;
        p.spans = (struct cuda_span *)upload(span, sizeof span);
        p.span_count = spans, p.span_max = tokens, p.row_count = spans;
        p.q_heads = Q_HEADS, p.kv_heads = KV_HEADS, p.head_dim = DIM;
        p.scale = 0.0884f;
        double pairs = (double)tokens * before + 0.5 * (double)tokens * (tokens + 1.0);
        double flop = 4.0 * DIM * Q_HEADS * pairs * spans;
        for (p.hopper = 0; p.hopper <= cuda_prefill_hopper(0); p.hopper++) {
            double seconds = median_seconds(launch_prefill, &p, 1);
            printf("prefill%s  %u x %u tokens after %u: %.3f ms, %.0f TFLOP/s\n",
                   p.hopper ? " hopper" : "       ", spans, tokens, before, seconds * 1e3,
                   flop / seconds / 1e12);
        }
        cudaFree(p.kv.base), cudaFree((void *)p.kv.at), cudaFree(p.out), cudaFree((void *)p.q);
        cudaFree((void *)p.spans);
        free(at);
    }
}

/* ---- products ---- */

struct products {
    struct cuda_gemv g[SETS_MAX];
    struct cuda_matmul m[SETS_MAX];
    struct cuda_matmul_plan *plan;
    cublasLtHandle_t handle;
    int sets;
};

static int launch_gemv(void *arg, int index)
{
    struct products *b = (struct products *)arg;
    return cuda_gemv(&b->g[index % b->sets], stream);
}

static int launch_matmul(void *arg, int index)
{
    struct products *b = (struct products *)arg;
    return cuda_matmul(b->handle, b->plan, &b->m[index % b->sets], stream);
}

static void bench_products(void)
{
    static const uint32_t shapes[][2] = {
        {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}};
    static const uint32_t tokens[] = {1, 2, 4, 8, 32, 512};
    static struct products b;
    size_t workspace_bytes = 32 << 20;
    void *workspace = device(workspace_bytes), *x = random_bf16(512 * 14336);
    float *out = (float *)device(512ull * 128256 * 4);
    char shape[64];
    OK(cublasLtCreate(&b.handle));
    for (int i = 0; i < 5; i++) {
        uint32_t rows = shapes[i][0], cols = shapes[i][1];
        uint64_t weights = (uint64_t)rows * cols;
        b.sets = weights * 2 > (400u << 20) ? 2 : 8;
        uint16_t *w = (uint16_t *)random_bf16(weights * b.sets);
        for (int t = 0; t < 6; t++) {
            uint32_t n = tokens[t];
            struct cuda_matmul_shape s = {rows, cols, n, DTYPE_F32, 0, 0, workspace_bytes};
            OK(cuda_matmul_plan(b.handle, &s, &b.plan));
            for (int j = 0; j < b.sets; j++) {
                b.g[j] = {out, w + j * weights, x, NULL, rows, cols, n, 0};
                b.m[j] = {out, w + j * weights, x, NULL, workspace};
            }
            double bytes = 2.0 * (double)weights + 2.0 * n * cols + 4.0 * n * rows;
            double floor = bytes / copy_rate, compute = 2.0 * (double)weights * n / 790e12;
            floor = compute > floor ? compute : floor;
            snprintf(shape, sizeof shape, "%u x %u, %u tokens", rows, cols, n);
            report("matmul", shape, median_seconds(launch_matmul, &b, LAUNCHES), floor);
            if (n <= CUDA_GEMV_TOKENS)
                report("gemv", shape, median_seconds(launch_gemv, &b, LAUNCHES), floor);
            cuda_matmul_plan_free(&b.plan);
        }
        cudaFree(w);
    }
    cublasLtDestroy(b.handle);
    cudaFree(workspace), cudaFree(x), cudaFree(out);
}

struct rows {
    struct cuda_rmsnorm norm;
    struct cuda_swiglu swiglu;
    struct cuda_rope rope;
    struct cuda_rope_angles angles;
    struct cuda_embed embed;
    struct cuda_kv_write write;
};

static int launch_norm(void *arg, int index)
{
    (void)index;
    return cuda_rmsnorm(&((struct rows *)arg)->norm, stream);
}

static int launch_swiglu(void *arg, int index)
{
    (void)index;
    return cuda_swiglu(&((struct rows *)arg)->swiglu, stream);
}

static int launch_rope(void *arg, int index)
{
    (void)index;
    return cuda_rope(&((struct rows *)arg)->rope, stream);
}

static int launch_angles(void *arg, int index)
{
    (void)index;
    return cuda_rope_angles(&((struct rows *)arg)->angles, stream);
}

static int launch_embed(void *arg, int index)
{
    (void)index;
    return cuda_embed(&((struct rows *)arg)->embed, stream);
}

static int launch_write(void *arg, int index)
{
    (void)index;
    return cuda_kv_write(&((struct rows *)arg)->write, stream);
}

static void bench_rows_of(uint32_t n)
{
    enum { HIDDEN = 4096, INNER = 14336, QKV = (Q_HEADS + 2 * KV_HEADS) * DIM };
    struct rows b = {};
    char shape[64];
    uint32_t *ids = (uint32_t *)malloc(n * 4);
    uint64_t pages = (uint64_t)n / PAGE + 1, page_bytes = (uint64_t)KV_HEADS * PAGE * PIECE;
    uint64_t *at = permuted(pages, page_bytes);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = i;
    float *x = random_floats((uint64_t)n * HIDDEN, 1), *add = random_floats((uint64_t)n * HIDDEN, 1);
    float *both = random_floats(2ull * n * INNER, 1), *qkv = random_floats((uint64_t)n * QKV, 1);
    float *weight = random_floats(HIDDEN, 1);
    void *out = device((uint64_t)n * INNER * 2), *device_ids = upload(ids, n * 4);
    b.norm = {out, DTYPE_BF16, x, add, weight, DTYPE_F32, n, HIDDEN, 1e-5f};
    b.swiglu = {out, DTYPE_BF16, both, both + INNER, 2 * INNER, n, INNER};
    b.angles = {
        (float *)device(n * DIM * 4ull), (uint32_t *)device_ids, random_floats(DIM / 2, 0.1f), n, DIM, 1};
    b.rope = {qkv, DTYPE_F32, QKV, b.angles.table, n, Q_HEADS + KV_HEADS, DIM, DIM, 0};
    b.embed = {out, DTYPE_BF16, random_bf16(16384ull * HIDDEN), 16384, HIDDEN, (uint32_t *)device_ids, n};
    b.write.kv.base = (uint8_t *)device(pages * page_bytes);
    b.write.kv.device_bytes = pages * page_bytes;
    b.write.kv.at = (uint64_t *)upload(at, pages * 8);
    b.write.kv.at_count = (uint32_t)pages;
    b.write.kv.page_tokens = PAGE, b.write.kv.piece_bytes = PIECE, b.write.kv.type = DTYPE_BF16;
    b.write.k = qkv + Q_HEADS * DIM, b.write.v = qkv + (Q_HEADS + KV_HEADS) * DIM, b.write.stride = QKV;
    b.write.rows = (uint32_t *)device(n * 4);
    OK(cudaMemset((void *)b.write.rows, 0, n * 4));
    b.write.items = (uint32_t *)device_ids, b.write.row_count = 1;
    b.write.n = n, b.write.kv_heads = KV_HEADS, b.write.head_dim = DIM;
    double floats = (double)n * 4 / copy_rate;
    snprintf(shape, sizeof shape, "%u tokens", n);
    report("rmsnorm", shape, median_seconds(launch_norm, &b, LAUNCHES), floats * HIDDEN * 3.5);
    report("swiglu", shape, median_seconds(launch_swiglu, &b, LAUNCHES), floats * INNER * 2.5);
    report("angles", shape, median_seconds(launch_angles, &b, LAUNCHES), floats * DIM);
    report("rope", shape, median_seconds(launch_rope, &b, LAUNCHES), floats * (Q_HEADS + KV_HEADS) * DIM * 2);
    report("embed", shape, median_seconds(launch_embed, &b, LAUNCHES), floats * HIDDEN);
    report("kv_write", shape, median_seconds(launch_write, &b, LAUNCHES), floats * KV_HEADS * DIM * 3);
    cudaFree(x), cudaFree(add), cudaFree(both), cudaFree(qkv), cudaFree(weight), cudaFree(out);
    cudaFree(device_ids), cudaFree(b.angles.table), cudaFree((void *)b.embed.table),
        cudaFree(b.write.kv.base);
    free(ids), free(at);
}

/* ---- retrieval, selection, sampling ---- */

static int launch_retrieval(void *arg, int index)
{
    (void)index;
    return cuda_retrieval((struct cuda_retrieval *)arg, stream);
}

static int launch_topk(void *arg, int index)
{
    (void)index;
    return cuda_topk((struct cuda_topk *)arg, stream);
}

struct sets_bench {
    struct cuda_sets_mark mark;
    struct cuda_sets_changes changes;
};

static int launch_sets(void *arg, int index)
{
    (void)index;
    struct sets_bench *b = (struct sets_bench *)arg;
    int rc = cuda_sets_mark(&b->mark, stream);
    return rc ? rc : cuda_sets_changes(&b->changes, stream);
}

/* The lists that Top-K left, against sets of k other positions at random: nearly all changes. */
static void bench_sets(const struct cuda_topk *t, uint32_t n)
{
    struct sets_bench b = {};
    uint32_t words = t->end_max / 32, most = 2 * t->k * t->rows, *numbers = (uint32_t *)calloc(2 * n, 4);
    void *out = NULL, *mapped = NULL;
    char shape[64];
    for (uint32_t i = 0; i < n; i++)
        numbers[i] = i, numbers[n + i] = CUDA_SETS_DIFFER;
    struct cuda_sets sets = {};
    sets.bits = (uint32_t *)device(8ull * t->rows * words);
    sets.count = (uint32_t *)device(8ull * t->rows);
    sets.place = (uint32_t *)upload(numbers, 8 * n);
    sets.how = sets.place + n;
    sets.words = words, sets.lists = t->heads, sets.place_count = n;
    if (cudaHostAlloc(&out, 4ull * most, cudaHostAllocMapped) || cudaHostGetDevicePointer(&mapped, out, 0))
        exit(1);
    uint32_t *bits = (uint32_t *)calloc((size_t)2 * t->rows * words, 4);
    for (uint32_t r = 0; r < t->rows; r++)
        for (uint32_t i = 0; i < t->k; i++) {
            uint32_t p = (uint32_t)rand() % t->end_max;
            bits[(2ull * r + 1) * words + p / 32] |= 1u << p % 32;
        }
    cudaMemcpy(sets.bits, bits, 8ull * t->rows * words, cudaMemcpyHostToDevice);
    b.mark.sets = b.changes.sets = sets;
    b.mark.index = t->index, b.mark.index_stride = t->index_stride, b.mark.row_count = t->ret_count;
    b.mark.rows = t->rows, b.mark.heads = t->heads;
    b.changes.work = (uint32_t *)device(4ull * most);
    b.changes.out = (uint32_t *)mapped, b.changes.total = (uint32_t *)device(4);
    b.changes.room = most, b.changes.n = n;
    snprintf(shape, sizeof shape, "%u lists of %u, all changed, to host", t->rows, t->k);
    report("sets", shape, median_seconds(launch_sets, &b, LAUNCHES), 4.0 * most / link_back_rate);
    cudaFree(sets.bits), cudaFree(sets.count), cudaFree(b.changes.work), cudaFree(b.changes.total);
    cudaFreeHost(out), free(bits), free(numbers);
}

static void bench_retrieval(uint32_t n, uint32_t count, uint32_t k)
{
    enum { CHUNK = 1024 };
    uint32_t chunks = count / CHUNK, *counts = (uint32_t *)malloc(n * 4);
    uint64_t chunk_bytes = (uint64_t)KV_HEADS * CHUNK * DIM * 2,
             *at = permuted((uint64_t)n * chunks, chunk_bytes);
    char shape[64];
    for (uint32_t i = 0; i < n; i++)
        counts[i] = count;
    struct cuda_retrieval r = {};
    r.keys.base = (uint8_t *)random_bf16(n * chunks * chunk_bytes / 2);
    r.keys.device_bytes = n * chunks * chunk_bytes;
    r.keys.at = (uint64_t *)upload(at, (uint64_t)n * chunks * 8);
    r.keys.row_stride = r.keys.at_count = chunks;
    r.keys.chunk_tokens = CHUNK;
    r.keys.type = DTYPE_BF16;
    r.weights = (float *)device((uint64_t)n * KV_HEADS * count * 4);
    r.weight_stride = count;
    r.q = random_floats(n * Q_HEADS * DIM, 2);
    r.q_stride = Q_HEADS * DIM;
    r.counts = (uint32_t *)upload(counts, n * 4);
    r.row_count = n, r.count_max = count, r.n = n, r.q_heads = Q_HEADS, r.kv_heads = KV_HEADS,
    r.head_dim = DIM;
    r.scale = 0.0884f;
    r.work = (float *)device(cuda_retrieval_work_bytes(n, Q_HEADS, count));
    snprintf(shape, sizeof shape, "%u seq x %u heads x %u keys", n, KV_HEADS, count);
    report("retrieval", shape, median_seconds(launch_retrieval, &r, 2),
           (double)(n * chunks * chunk_bytes) / copy_rate);
    struct cuda_topk t = {};
    t.index = (uint32_t *)device((uint64_t)n * KV_HEADS * k * 4);
    t.index_stride = k;
    t.ret_count = (uint32_t *)device(n * KV_HEADS * 4);
    t.ret_mass = (float *)device(n * KV_HEADS * 4);
    t.values = r.weights;
    t.stride = count;
    t.end = r.counts;
    t.rows = n * KV_HEADS, t.heads = KV_HEADS, t.k = k, t.end_max = count;
    snprintf(shape, sizeof shape, "%u of %u, %u rows", k, count, t.rows);
    report("topk", shape, median_seconds(launch_topk, &t, LAUNCHES), 4.0 * t.rows * count / copy_rate);
    bench_sets(&t, n);
    cudaFree(r.keys.base), cudaFree(r.weights), cudaFree(r.work), cudaFree(t.index);
    free(counts), free(at);
}

static int launch_sample(void *arg, int index)
{
    (void)index;
    return cuda_sample((struct cuda_sample *)arg, stream);
}

static void bench_sample(void)
{
    enum { VOCAB = 128256, N = 32 };
    static const struct cuda_sample_params kinds[] = {{0, 1, 0, 0, 1, 2, 3, 0},
                                                      {0.7f, 0.95f, 0, 0, 1, 2, 3, 0},
                                                      {0.7f, 0.95f, 0, 40, 1, 2, 3, 0},
                                                      {1, 1, 0, 0, 1, 2, 3, 0}};
    static const char *const names[] = {"greedy", "top_p 0.95", "top_k 40, top_p 0.95", "whole vocabulary"};
    float *logits = random_floats((uint64_t)N * VOCAB, 3);
    char shape[64];
    for (int i = 0; i < 9; i++) {
        uint32_t n = i < 4 || i == 8 ? (uint32_t)N : 1;
        /* The last: 1000 likely tokens above the rest, as a model that knows what it says. */
        for (int t = 0; t < N && i == 8; t++)
            fill_normal<<<1, 256, 0, stream>>>(logits + (uint64_t)t * VOCAB + 5000, 1000, 9u + t, 12);
        struct cuda_sample_params params[N];
        for (int t = 0; t < N; t++)
            params[t] = kinds[i == 8 ? 1 : i % 4];
        struct cuda_sample s = {(int32_t *)device(N * 4),
                                logits,
                                VOCAB,
                                (struct cuda_sample_params *)upload(params, sizeof params),
                                n,
                                VOCAB};
        snprintf(shape, sizeof shape, "%s%s, %u x %u", names[i == 8 ? 1 : i % 4], i == 8 ? " of few" : "", n,
                 VOCAB);
        report("sample", shape, median_seconds(launch_sample, &s, LAUNCHES), 4.0 * n * VOCAB / copy_rate);
    }
    cudaFree(logits);
}

struct moves {
    struct cuda_moves m;
    bool scatter;
};

static int launch_moves(void *arg, int index)
{
    (void)index;
    struct moves *b = (struct moves *)arg;
    return b->scatter ? cuda_scatter(&b->m, stream) : cuda_gather(&b->m, stream);
}

/* Random rows of host memory, `layers` pieces each, to slots of 32 sequences. */
static void bench_moves(uint32_t layers, uint32_t blocks, bool scatter)
{
    enum { SEQUENCES = 32, SLOTS = 3072, UNITS = 512 };
    uint32_t count = (512u << 20) / (layers * PIECE), slabs = KV_HEADS * SLOTS / UNITS, x = 2463534242u;
    uint64_t slab_bytes = (uint64_t)UNITS * PIECE, tables = (uint64_t)SEQUENCES * layers * slabs;
    uint64_t *at = permuted(tables, slab_bytes), rows = host_bytes / (layers * PIECE);
    struct cuda_move *moves = (struct cuda_move *)malloc(count * sizeof *moves);
    char shape[64];
    for (uint32_t i = 0; i < count; i++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        moves[i].host = (uint64_t)(x % rows) * layers * PIECE;
        moves[i].item = i / (SEQUENCES * KV_HEADS) * 5 % SLOTS;
        moves[i].head = (uint16_t)(i % KV_HEADS);
        moves[i].row = (uint16_t)(i / KV_HEADS % SEQUENCES);
    }
    struct moves b = {};
    b.scatter = scatter;
    b.m.kv.base = (uint8_t *)random_bf16(tables * slab_bytes / 2);
    b.m.kv.device_bytes = tables * slab_bytes;
    b.m.kv.at = (uint64_t *)upload(at, tables * 8);
    b.m.kv.row_stride = (uint64_t)layers * slabs, b.m.kv.layer_stride = b.m.kv.at_count = slabs;
    b.m.kv.slotted = 1, b.m.kv.slots = SLOTS, b.m.kv.units_per_slab = UNITS, b.m.kv.piece_bytes = PIECE;
    b.m.kv.type = DTYPE_BF16;
    b.m.host_base = (uint8_t *)host_device, b.m.host_bytes = host_bytes;
    b.m.moves = (struct cuda_move *)upload(moves, count * sizeof *moves);
    b.m.count = count, b.m.layers = layers, b.m.row_count = SEQUENCES, b.m.heads = KV_HEADS,
    b.m.blocks = blocks;
    double bytes = (double)count * layers * PIECE;
    snprintf(shape, sizeof shape, "runs of %u layers (%u B), %u blocks", layers, layers * PIECE, blocks);
    double seconds = median_seconds(launch_moves, &b, 1);
    report(scatter ? "scatter" : "gather", shape, seconds, bytes / (scatter ? link_back_rate : link_rate));
    cudaFree(b.m.kv.base), cudaFree((void *)b.m.kv.at), cudaFree((void *)b.m.moves);
    free(at), free(moves);
}

int main(int argc, char **argv)
{
    wanted = argv + 1;
    wanted_count = argc - 1;
    OK(cudaStreamCreate(&stream));
    measure_ceilings();
    if (is_wanted("attn"))
        bench_attention();
    if (is_wanted("prefill"))
        bench_prefill();
    if (is_wanted("retrieval")) {
        bench_retrieval(32, 32768, 2048);
        bench_retrieval(1, 131072, 4096);
    }
    if (is_wanted("sample"))
        bench_sample();
    if (is_wanted("moves"))
        for (int scatter = 0; scatter < 2; scatter++) {
            bench_moves(1, 16, scatter);
            bench_moves(4, 8, scatter);
            bench_moves(4, 16, scatter);
            bench_moves(8, 16, scatter);
            bench_moves(32, 16, scatter);
        }
    if (is_wanted("rows")) {
        bench_rows_of(32);
        bench_rows_of(8192);
    }
    if (is_wanted("products"))
        bench_products();
    return 0;
}
