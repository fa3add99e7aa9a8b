/* What picks: scores of keys, Top-K, sets and their changes, sampling. */
#include "bench/lab/bench_cuda.cuh"

#include <stdio.h>
#include <stdlib.h>

#include "compute/cuda/kernels.h"
#include "compute/cuda/sets.h"

static int launch_retrieval(void *arg, int index)
{
    (void)index;
    return cuda_retrieval((struct cuda_retrieval *)arg, lab_stream);
}

static int launch_topk(void *arg, int index)
{
    (void)index;
    return cuda_topk((struct cuda_topk *)arg, lab_stream);
}

struct sets_bench {
    struct cuda_sets_mark mark;
    struct cuda_sets_changes changes;
};

static int launch_sets(void *arg, int index)
{
    (void)index;
    struct sets_bench *b = (struct sets_bench *)arg;
    int rc = cuda_sets_mark(&b->mark, lab_stream);
    return rc ? rc : cuda_sets_changes(&b->changes, lab_stream);
}

/* The lists that Top-K left, against sets of k other positions at random: nearly all changes. */
static void sets_of(const struct cuda_topk *t, uint32_t n)
{
    struct sets_bench b = {};
    uint32_t words = t->end_max / 32, most = 2 * t->k * t->rows, *numbers = (uint32_t *)calloc(2 * n, 4);
    void *out = NULL, *mapped = NULL;
    char shape[64];
    for (uint32_t i = 0; i < n; i++)
        numbers[i] = i, numbers[n + i] = CUDA_SETS_DIFFER;
    struct cuda_sets sets = {};
    sets.bits = (uint32_t *)lab_device(8ull * t->rows * words);
    sets.count = (uint32_t *)lab_device(8ull * t->rows);
    sets.place = (uint32_t *)lab_upload(numbers, 8 * n);
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
    b.changes.work = (uint32_t *)lab_device(4ull * most);
    b.changes.out = (uint32_t *)mapped, b.changes.total = (uint32_t *)lab_device(4);
    b.changes.room = most, b.changes.n = n;
    snprintf(shape, sizeof shape, "%u lists of %u, all changed, to host", t->rows, t->k);
    lab_report("sets", shape, lab_seconds(launch_sets, &b, LAUNCHES), 4.0 * most / link_back_rate);
    cudaFree(sets.bits), cudaFree(sets.count), cudaFree(b.changes.work), cudaFree(b.changes.total);
    cudaFreeHost(out), free(bits), free(numbers);
}

/* Top-K of what was scored. */
static void pick_from(const struct cuda_retrieval *r, uint32_t k)
{
    uint32_t n = r->n, count = r->count_max;
    char shape[64];
    struct cuda_topk t = {};
    t.index = (uint32_t *)lab_device((uint64_t)n * KV_HEADS * k * 4);
    t.index_stride = k;
    t.ret_count = (uint32_t *)lab_device(n * KV_HEADS * 4);
    t.ret_mass = (float *)lab_device(n * KV_HEADS * 4);
    t.values = r->weights;
    t.stride = count;
    t.end = r->counts;
    t.rows = n * KV_HEADS, t.heads = KV_HEADS, t.k = k, t.end_max = count;
    snprintf(shape, sizeof shape, "%u of %u, %u rows", k, count, t.rows);
    lab_report("topk", shape, lab_seconds(launch_topk, &t, LAUNCHES), 4.0 * t.rows * count / copy_rate);
    sets_of(&t, n);
    cudaFree(t.index), cudaFree(t.ret_count), cudaFree(t.ret_mass);
}

static void retrieval_of(enum dtype type, uint32_t n, uint32_t count, uint32_t k)
{
    enum { CHUNK = 1024 };
    uint32_t chunks = count / CHUNK, *counts = (uint32_t *)malloc(n * 4);
    uint64_t chunk_bytes = (uint64_t)KV_HEADS * CHUNK * (type == DTYPE_I8 ? DIM + 2 : DIM * 2),
             *at = lab_permuted((uint64_t)n * chunks, chunk_bytes);
    char shape[64];
    for (uint32_t i = 0; i < n; i++)
        counts[i] = count;
    struct cuda_retrieval r = {};
    r.keys.base = (uint8_t *)lab_bf16(n * chunks * chunk_bytes / 2);
    r.keys.device_bytes = n * chunks * chunk_bytes;
    r.keys.at = (uint64_t *)lab_upload(at, (uint64_t)n * chunks * 8);
    r.keys.row_stride = r.keys.at_count = chunks;
    r.keys.chunk_tokens = CHUNK;
    r.keys.type = type;
    r.weights = (float *)lab_device((uint64_t)n * KV_HEADS * count * 4);
    r.weight_stride = count;
    r.q = lab_floats(n * Q_HEADS * DIM, 2);
    r.q_stride = Q_HEADS * DIM;
    r.counts = (uint32_t *)lab_upload(counts, n * 4);
    r.row_count = n, r.count_max = count, r.n = n, r.q_heads = Q_HEADS, r.kv_heads = KV_HEADS,
    r.head_dim = DIM;
    r.scale = 0.0884f;
    r.work = (float *)lab_device(cuda_retrieval_work_bytes(n, Q_HEADS, count));
    snprintf(shape, sizeof shape, "%u seq x %u heads x %u keys of %u bits", n, KV_HEADS, count,
             type == DTYPE_I8 ? 8 : 16);
    lab_report("retrieval", shape, lab_seconds(launch_retrieval, &r, 2),
               (double)(n * chunks * chunk_bytes) / copy_rate);
    if (type != DTYPE_I8) /* the rest is the same */
        pick_from(&r, k);
    cudaFree(r.keys.base), cudaFree(r.weights), cudaFree(r.work);
    free(counts), free(at);
}

void bench_retrieval(void)
{
    retrieval_of(DTYPE_BF16, 32, 32768, 2048);
    retrieval_of(DTYPE_I8, 32, 32768, 2048);
    retrieval_of(DTYPE_BF16, 1, 131072, 4096);
    retrieval_of(DTYPE_I8, 1, 131072, 4096);
}

static int launch_sample(void *arg, int index)
{
    (void)index;
    return cuda_sample((struct cuda_sample *)arg, lab_stream);
}

void bench_sample(void)
{
    enum { VOCAB = 128256, N = 32 };
    static const struct cuda_sample_params kinds[] = {{0, 1, 0, 0, 1, 2, 3, 0},
                                                      {0.7f, 0.95f, 0, 0, 1, 2, 3, 0},
                                                      {0.7f, 0.95f, 0, 40, 1, 2, 3, 0},
                                                      {1, 1, 0, 0, 1, 2, 3, 0}};
    static const char *const names[] = {"greedy", "top_p 0.95", "top_k 40, top_p 0.95", "whole vocabulary"};
    float *logits = lab_floats((uint64_t)N * VOCAB, 3);
    char shape[64];
    for (int i = 0; i < 9; i++) {
        uint32_t n = i < 4 || i == 8 ? (uint32_t)N : 1;
        /* The last: 1000 likely tokens above the rest, as a model that knows what it says. */
        for (int t = 0; t < N && i == 8; t++)
            lab_fill_floats(logits + (uint64_t)t * VOCAB + 5000, 1000, 9u + (uint32_t)t, 12);
        struct cuda_sample_params params[N];
        for (int t = 0; t < N; t++)
            params[t] = kinds[i == 8 ? 1 : i % 4];
        struct cuda_sample s = {(int32_t *)lab_device(N * 4),
                                logits,
                                VOCAB,
                                (struct cuda_sample_params *)lab_upload(params, sizeof params),
                                n,
                                VOCAB};
        snprintf(shape, sizeof shape, "%s%s, %u x %u", names[i == 8 ? 1 : i % 4], i == 8 ? " of few" : "", n,
                 VOCAB);
        lab_report("sample", shape, lab_seconds(launch_sample, &s, LAUNCHES), 4.0 * n * VOCAB / copy_rate);
    }
    cudaFree(logits);
}
