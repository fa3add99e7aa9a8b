/* What a layer does beside attention: products with weights, and the operators that go row by row. */
#include "bench/lab/bench_cuda.cuh"

#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>

#include "compute/cuda/kernels.h"

struct products {
    struct cuda_gemv g[SETS_MAX];
    struct cuda_matmul m[SETS_MAX];
    struct cuda_product p[SETS_MAX];
    struct cuda_matmul_plan *plan;
    cublasLtHandle_t handle;
    int sets;
};

static int launch_gemv(void *arg, int index)
{
    struct products *b = (struct products *)arg;
    return cuda_gemv(&b->g[index % b->sets], lab_stream);
}

static int launch_matmul(void *arg, int index)
{
    struct products *b = (struct products *)arg;
    return cuda_matmul(b->handle, b->plan, &b->m[index % b->sets], lab_stream);
}

static int launch_product(void *arg, int index)
{
    struct products *b = (struct products *)arg;
    return cuda_product(&b->p[index % b->sets], lab_stream);
}

void bench_products(void)
{
    static const uint32_t shapes[][2] = {
        {6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}, {128256, 4096}};
    static const uint32_t tokens[] = {1, 2, 4, 8, 16, 32, 512};
    static struct products b;
    size_t workspace_bytes = 32 << 20;
    void *workspace = lab_device(workspace_bytes), *x = lab_bf16(512 * 14336);
    float *out = (float *)lab_device(512ull * 128256 * 4);
    char shape[64];
    OK(cublasLtCreate(&b.handle));
    OK(cuda_product_load());
    for (int i = 0; i < 5; i++) {
        uint32_t rows = shapes[i][0], cols = shapes[i][1];
        uint64_t weights = (uint64_t)rows * cols;
        b.sets = weights * 2 > (400u << 20) ? 2 : 8;
        uint16_t *w = (uint16_t *)lab_bf16(weights * b.sets);
        for (int t = 0; t < 7; t++) {
            uint32_t n = tokens[t];
            struct cuda_matmul_shape s = {rows, cols, n, DTYPE_F32, 0, 0, workspace_bytes};
            OK(cuda_matmul_plan(b.handle, &s, &b.plan));
            for (int j = 0; j < b.sets; j++) {
                b.g[j] = {out, w + j * weights, x, NULL, rows, cols, n, 0};
                b.m[j] = {out, w + j * weights, x, NULL, workspace};
                b.p[j] = {};
                b.p[j].out = out, b.p[j].w = w + j * weights, b.p[j].x = x;
                b.p[j].rows = rows, b.p[j].cols = cols, b.p[j].n = n;
            }
            double bytes = 2.0 * (double)weights + 2.0 * n * cols + 4.0 * n * rows;
            double floor = bytes / copy_rate, compute = 2.0 * (double)weights * n / 790e12;
            floor = compute > floor ? compute : floor;
            snprintf(shape, sizeof shape, "%u x %u, %u tokens", rows, cols, n);
            lab_report("matmul", shape, lab_seconds(launch_matmul, &b, LAUNCHES), floor);
            if (n <= CUDA_PRODUCT_TOKENS)
                lab_report("product", shape, lab_seconds(launch_product, &b, LAUNCHES), floor);
            if (n <= CUDA_GEMV_TOKENS)
                lab_report("gemv", shape, lab_seconds(launch_gemv, &b, LAUNCHES), floor);
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
    return cuda_rmsnorm(&((struct rows *)arg)->norm, lab_stream);
}

static int launch_swiglu(void *arg, int index)
{
    (void)index;
    return cuda_swiglu(&((struct rows *)arg)->swiglu, lab_stream);
}

static int launch_rope(void *arg, int index)
{
    (void)index;
    return cuda_rope(&((struct rows *)arg)->rope, lab_stream);
}

static int launch_angles(void *arg, int index)
{
    (void)index;
    return cuda_rope_angles(&((struct rows *)arg)->angles, lab_stream);
}

static int launch_embed(void *arg, int index)
{
    (void)index;
    return cuda_embed(&((struct rows *)arg)->embed, lab_stream);
}

static int launch_write(void *arg, int index)
{
    (void)index;
    return cuda_kv_write(&((struct rows *)arg)->write, lab_stream);
}

static void rows_of(uint32_t n)
{
    enum { HIDDEN = 4096, INNER = 14336, QKV = (Q_HEADS + 2 * KV_HEADS) * DIM };
    struct rows b = {};
    char shape[64];
    uint32_t *ids = (uint32_t *)malloc(n * 4);
    uint64_t pages = (uint64_t)n / PAGE + 1, page_bytes = (uint64_t)KV_HEADS * PAGE * PIECE;
    uint64_t *at = lab_permuted(pages, page_bytes);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = i;
    float *x = lab_floats((uint64_t)n * HIDDEN, 1), *add = lab_floats((uint64_t)n * HIDDEN, 1);
    float *both = lab_floats(2ull * n * INNER, 1), *qkv = lab_floats((uint64_t)n * QKV, 1);
    float *weight = lab_floats(HIDDEN, 1);
    void *out = lab_device((uint64_t)n * INNER * 2), *device_ids = lab_upload(ids, n * 4);
    b.norm = {out, DTYPE_BF16, x, add, weight, DTYPE_F32, n, HIDDEN, 1e-5f};
    b.swiglu = {out, DTYPE_BF16, both, both + INNER, 2 * INNER, n, INNER};
    b.angles = {
        (float *)lab_device(n * DIM * 4ull), (uint32_t *)device_ids, lab_floats(DIM / 2, 0.1f), n, DIM, 1};
    b.rope = {qkv, DTYPE_F32, QKV, b.angles.table, n, Q_HEADS + KV_HEADS, DIM, DIM, 0};
    b.embed = {out, DTYPE_BF16, lab_bf16(16384ull * HIDDEN), 16384, HIDDEN, (uint32_t *)device_ids, n};
    b.write.kv.base = (uint8_t *)lab_device(pages * page_bytes);
    b.write.kv.device_bytes = pages * page_bytes;
    b.write.kv.at = (uint64_t *)lab_upload(at, pages * 8);
    b.write.kv.at_count = (uint32_t)pages;
    b.write.kv.page_tokens = PAGE, b.write.kv.piece_bytes = PIECE, b.write.kv.type = DTYPE_BF16;
    b.write.k = qkv + Q_HEADS * DIM, b.write.v = qkv + (Q_HEADS + KV_HEADS) * DIM, b.write.stride = QKV;
    b.write.rows = (uint32_t *)lab_device(n * 4);
    OK(cudaMemset((void *)b.write.rows, 0, n * 4));
    b.write.items = (uint32_t *)device_ids, b.write.row_count = 1;
    b.write.n = n, b.write.kv_heads = KV_HEADS, b.write.head_dim = DIM;
    double floats = (double)n * 4 / copy_rate;
    snprintf(shape, sizeof shape, "%u tokens", n);
    lab_report("rmsnorm", shape, lab_seconds(launch_norm, &b, LAUNCHES), floats * HIDDEN * 3.5);
    lab_report("swiglu", shape, lab_seconds(launch_swiglu, &b, LAUNCHES), floats * INNER * 2.5);
    lab_report("angles", shape, lab_seconds(launch_angles, &b, LAUNCHES), floats * DIM);
    lab_report("rope", shape, lab_seconds(launch_rope, &b, LAUNCHES),
               floats * (Q_HEADS + KV_HEADS) * DIM * 2);
    lab_report("embed", shape, lab_seconds(launch_embed, &b, LAUNCHES), floats * HIDDEN);
    lab_report("kv_write", shape, lab_seconds(launch_write, &b, LAUNCHES), floats * KV_HEADS * DIM * 3);
    cudaFree(x), cudaFree(add), cudaFree(both), cudaFree(qkv), cudaFree(weight), cudaFree(out);
    cudaFree(device_ids), cudaFree(b.angles.table), cudaFree((void *)b.embed.table),
        cudaFree(b.write.kv.base);
    free(ids), free(at);
}

void bench_rows(void)
{
    rows_of(32);
    rows_of(8192);
}
