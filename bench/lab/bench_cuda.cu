/* Times every CUDA operator at the shapes of an 8B model (32 query heads, 8 KV heads, head_dim 128, batch
 * 32) and gives each time's share of its floor: bytes over the copy bandwidth, or over the link rate, both
 * measured in the same run. `bench_cuda [NAME ...]`, names as in `parts`; none: all.
 *
 * An operator is captured into a graph of several launches, over rotating inputs where one set would stay
 * in the cache; the figure is the median of the graph's runs over its launches. Inputs are random, never
 * zero. */
#include "bench/lab/bench_cuda.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute/cuda/kernels.h"

double copy_rate, link_rate, link_back_rate;

struct copy {
    void *to, *from;
    uint64_t bytes;
    cudaMemcpyKind kind;
};

static int launch_copy(void *arg, int index)
{
    (void)index;
    struct copy *c = (struct copy *)arg;
    return cudaMemcpyAsync(c->to, c->from, c->bytes, c->kind, lab_stream);
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
    copy_words<<<(unsigned)(c->bytes / 16 / 1024), 256, 0, lab_stream>>>((uint4 *)c->to, (uint4 *)c->from,
                                                                         c->bytes / 16);
    return (int)cudaGetLastError();
}

static int launch_read(void *arg, int index)
{
    (void)index;
    struct copy *c = (struct copy *)arg;
    read_words<<<(unsigned)(c->bytes / 16 / 2048), 256, 0, lab_stream>>>((uint4 *)c->to, (uint4 *)c->from,
                                                                         c->bytes / 16);
    return (int)cudaGetLastError();
}

/* The copy rate is the better of the library's and a kernel's: inside a graph the library may use a copy
 * engine. */
static void measure_ceilings(void)
{
    uint64_t bytes = 4ull << 30;
    struct copy c = {lab_bf16(bytes / 2), lab_bf16(bytes / 2), bytes, cudaMemcpyDeviceToDevice};
    double library = 2.0 * (double)bytes / lab_seconds(launch_copy, &c, 2);
    double kernel = 2.0 * (double)bytes / lab_seconds(launch_kernel_copy, &c, 2);
    double read = (double)bytes / lab_seconds(launch_read, &c, 2);
    copy_rate = library > kernel ? library : kernel;
    OK(cudaHostAlloc(&host_memory, host_bytes, cudaHostAllocMapped));
    OK(cudaHostGetDevicePointer(&host_device, host_memory, 0));
    struct copy in = {c.to, host_memory, 1ull << 30, cudaMemcpyHostToDevice};
    link_rate = (double)in.bytes / lab_seconds(launch_copy, &in, 1);
    struct copy back = {host_memory, c.to, 1ull << 30, cudaMemcpyDeviceToHost};
    link_back_rate = (double)back.bytes / lab_seconds(launch_copy, &back, 1);
    cudaFree(c.to);
    cudaFree(c.from);
    printf("copy (read and written): library %.2f, kernel %.2f TB/s; read only %.2f TB/s; link %.1f GB/s in, "
           "%.1f out\n",
           library / 1e12, kernel / 1e12, read / 1e12, link_rate / 1e9, link_back_rate / 1e9);
}

struct moves {
    struct cuda_moves m;
    bool scatter;
};

static int launch_moves(void *arg, int index)
{
    (void)index;
    struct moves *b = (struct moves *)arg;
    return b->scatter ? cuda_scatter(&b->m, lab_stream) : cuda_gather(&b->m, lab_stream);
}

/* Random rows of host memory, `layers` pieces each, to slots of 32 sequences. */
static void moves_of(uint32_t layers, uint32_t blocks, bool scatter)
{
    enum { SEQUENCES = 32, SLOTS = 3072, UNITS = 512 };
    uint32_t count = (512u << 20) / (layers * PIECE), slabs = KV_HEADS * SLOTS / UNITS, x = 2463534242u;
    uint64_t slab_bytes = (uint64_t)UNITS * PIECE, tables = (uint64_t)SEQUENCES * layers * slabs;
    uint64_t *at = lab_permuted(tables, slab_bytes), rows = host_bytes / (layers * PIECE);
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
    b.m.kv.base = (uint8_t *)lab_bf16(tables * slab_bytes / 2);
    b.m.kv.device_bytes = tables * slab_bytes;
    b.m.kv.at = (uint64_t *)lab_upload(at, tables * 8);
    b.m.kv.row_stride = (uint64_t)layers * slabs, b.m.kv.layer_stride = b.m.kv.at_count = slabs;
    b.m.kv.slotted = 1, b.m.kv.slots = SLOTS, b.m.kv.units_per_slab = UNITS, b.m.kv.piece_bytes = PIECE;
    b.m.kv.type = DTYPE_BF16;
    b.m.host_base = (uint8_t *)host_device, b.m.host_bytes = host_bytes;
    b.m.moves = (struct cuda_move *)lab_upload(moves, count * sizeof *moves);
    b.m.count = count, b.m.layers = layers, b.m.row_count = SEQUENCES, b.m.heads = KV_HEADS,
    b.m.blocks = blocks;
    double bytes = (double)count * layers * PIECE;
    snprintf(shape, sizeof shape, "runs of %u layers (%u B), %u blocks", layers, layers * PIECE, blocks);
    double seconds = lab_seconds(launch_moves, &b, 1);
    lab_report(scatter ? "scatter" : "gather", shape, seconds,
               bytes / (scatter ? link_back_rate : link_rate));
    cudaFree(b.m.kv.base), cudaFree((void *)b.m.kv.at), cudaFree((void *)b.m.moves);
    free(at), free(moves);
}

void bench_moves(void)
{
    for (int scatter = 0; scatter < 2; scatter++) {
        moves_of(1, 16, scatter);
        moves_of(4, 8, scatter);
        moves_of(4, 16, scatter);
        moves_of(8, 16, scatter);
        moves_of(32, 16, scatter);
    }
}

static const struct {
    const char *name;
    void (*run)(void);
} parts[] = {
    {"attn", bench_attn},         {"prefill", bench_prefill}, {"retrieval", bench_retrieval},
    {"sample", bench_sample},     {"moves", bench_moves},     {"rows", bench_rows},
    {"products", bench_products},
};

enum { PARTS = sizeof parts / sizeof *parts };

static bool known(const char *name)
{
    for (int i = 0; i < PARTS; i++)
        if (strcmp(parts[i].name, name) == 0)
            return true;
    return false;
}

int main(int argc, char **argv)
{
    for (int a = 1; a < argc; a++)
        if (!known(argv[a])) {
            fprintf(stderr, "bench_cuda: no part '%s'\n", argv[a]);
            return 2;
        }
    lab_begin();
    measure_ceilings();
    for (int i = 0; i < PARTS; i++) {
        bool wanted = argc == 1;
        for (int a = 1; a < argc; a++)
            wanted |= strcmp(argv[a], parts[i].name) == 0;
        if (wanted)
            parts[i].run();
    }
    return 0;
}
