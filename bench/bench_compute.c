/* Times of the operators at the shapes of SmolLM2-135M (hidden 576, FFN 1536, 9/3 heads x 64, vocabulary
 * 49152), beside what the machine gives in the same run: copy and read bandwidth, and the FMA peak.
 *
 *   bench_compute [--quick] [--threads N] [--isa auto|reference|avx2|avx512] [--activations f32|q8]
 *
 * Products of every type of weights, with both kinds of activations, have a table of their own.
 * Every figure is the best of several repeats, since other work on the machine only ever adds time. */
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/pool.h"
#include "bench/bench_options.h"

enum { HIDDEN = 576, FFN = 1536, Q_HEADS = 9, KV_HEADS = 3, HEAD_DIM = 64, VOCAB = 49152, PAGE = 64 };

struct bench {
    struct compute *c;
    int repeats;
    bool quick;
    double read_gbs, fma_gflops;
};

static uint64_t rng_state = 1;

static float random_float(void)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(rng_state >> 40) / (float)(1 << 24) - 0.5f;
}

static float *random_floats(size_t count)
{
    float *x = mem_alloc(count, sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = random_float();
    return x;
}

/* Seconds of the fastest of the repeats, each of `times` calls. */
static double best_of_repeats(int repeats, int times, void (*call)(void *arg), void *arg)
{
    double best = INFINITY;
    call(arg);
    for (int r = 0; r < repeats; r++) {
        int64_t start = clock_now_ns();
        for (int i = 0; i < times; i++)
            call(arg);
        double seconds = (double)(clock_now_ns() - start) * 1e-9 / times;
        best = seconds < best ? seconds : best;
    }
    return best;
}

static double best_of(const struct bench *b, int times, void (*call)(void *arg), void *arg)
{
    return best_of_repeats(b->repeats, times, call, arg);
}

enum { STREAM_BYTES = 256 << 20, SLICES = 256, SECTION = 8 }; /* slices of one timed read or copy */

struct stream {
    struct pool *pool;
    uint8_t *from, *to;
    uint64_t sums[SLICES];
    int first; /* slice of the section */
};

static void copy_slice(void *arg, int index, int thread)
{
    (void)thread;
    struct stream *s = arg;
    size_t bytes = STREAM_BYTES / SLICES;
    index += s->first;
    memcpy(s->to + (size_t)index * bytes, s->from + (size_t)index * bytes, bytes);
}

static void read_slice(void *arg, int index, int thread)
{
    (void)thread;
    struct stream *s = arg;
    index += s->first;
    const uint64_t *p = (const uint64_t *)(s->from + (size_t)index * (STREAM_BYTES / SLICES));
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < STREAM_BYTES / SLICES / 8; i += 8) {
        __builtin_prefetch((const void *)((uintptr_t)(p + i) + 4096)); /* may pass the end */
        for (int j = 0; j < 8; j++)
            sum[j] += p[i + (size_t)j];
    }
    for (int j = 1; j < 8; j++)
        sum[0] += sum[j];
    s->sums[index] = sum[0];
}

/* Bytes per second of the best section. Sections are short: on a machine with other work a long one measures
 * that work, and gives a limit that operators exceed. */
static double best_section(struct stream *s, void (*slice)(void *arg, int index, int thread))
{
    double best = INFINITY;
    for (int round = 0; round < 10; round++)
        for (s->first = 0; s->first < SLICES; s->first += SECTION) {
            int64_t start = clock_now_ns();
            pool_run(s->pool, SECTION, slice, s);
            double seconds = (double)(clock_now_ns() - start) * 1e-9;
            best = seconds < best ? seconds : best;
        }
    return (double)SECTION * (STREAM_BYTES / SLICES) / best;
}

enum { FMA_CHAINS = 12, FMA_STEPS = 1 << 16 };

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void fma_chains(float *out)
{
    __m256 acc[FMA_CHAINS], a = _mm256_loadu_ps(out), m = _mm256_set1_ps(0.5f);
    for (int i = 0; i < FMA_CHAINS; i++)
        acc[i] = _mm256_add_ps(a, _mm256_set1_ps((float)i));
    for (int n = 0; n < FMA_STEPS; n++)
        for (int i = 0; i < FMA_CHAINS; i++)
            acc[i] = _mm256_fmadd_ps(acc[i], m, a);
    for (int i = 1; i < FMA_CHAINS; i++)
        acc[0] = _mm256_add_ps(acc[0], acc[i]);
    _mm256_storeu_ps(out, acc[0]);
}

__attribute__((target("avx512f"))) static void wide_fma_chains(float *out)
{
    __m512 acc[FMA_CHAINS], a = _mm512_loadu_ps(out), m = _mm512_set1_ps(0.5f);
    for (int i = 0; i < FMA_CHAINS; i++)
        acc[i] = _mm512_add_ps(a, _mm512_set1_ps((float)i));
    for (int n = 0; n < FMA_STEPS; n++)
        for (int i = 0; i < FMA_CHAINS; i++)
            acc[i] = _mm512_fmadd_ps(acc[i], m, a);
    for (int i = 1; i < FMA_CHAINS; i++)
        acc[0] = _mm512_add_ps(acc[0], acc[i]);
    _mm512_storeu_ps(out, acc[0]);
}
#else
static void wide_fma_chains(float *out)
{
    for (int n = 0; n < FMA_STEPS * FMA_CHAINS; n++)
        for (int i = 0; i < 16; i++)
            out[i] = out[i] * 0.5f + 1.0f;
}

static void fma_chains(float *out)
{
    for (int n = 0; n < FMA_STEPS * FMA_CHAINS; n++)
        for (int i = 0; i < 8; i++)
            out[i] = out[i] * 0.5f + 1.0f;
}
#endif

struct fma {
    struct pool *pool;
    float *out;
    int lanes;
};

static void fma_item(void *arg, int index, int thread)
{
    (void)thread;
    const struct fma *f = arg;
    if (f->lanes == 16)
        wide_fma_chains(f->out + index * 16);
    else
        fma_chains(f->out + index * 16);
}

static void fma_all(void *arg)
{
    struct fma *f = arg;
    pool_run(f->pool, pool_threads(f->pool), fma_item, f);
}

static void measure_machine(struct bench *b)
{
    struct stream s = {.pool = compute_pool(b->c)};
    s.from = mem_alloc_aligned(STREAM_BYTES, 1);
    s.to = mem_alloc_aligned(STREAM_BYTES, 1);
    memset(s.from, 1, STREAM_BYTES);
    double copy = 2.0 * best_section(&s, copy_slice) * 1e-9;
    b->read_gbs = best_section(&s, read_slice) * 1e-9;
    mem_free(&s.from);
    mem_free(&s.to);
    int threads = pool_threads(s.pool);
    struct fma f = {s.pool, random_floats((size_t)threads * 16), strstr(compute_name(b->c), "512") ? 16 : 8};
    b->fma_gflops = 2.0 * f.lanes * FMA_CHAINS * FMA_STEPS * threads / best_of(b, 4, fma_all, &f) * 1e-9;
    mem_free(&f.out);
    printf("%s, %d threads: copy %.1f GB/s (read + written), read %.1f GB/s, FMA peak %.0f GFLOP/s (%d "
           "lanes)\n\n",
           compute_name(b->c), threads, copy, b->read_gbs, b->fma_gflops, f.lanes);
}

struct weights {
    struct compute *c;
    struct matrix *w; /* `matrices` copies, so that decoding finds none of them in a cache */
    int matrices, next, n;
    float *x, *out;
};

static void multiply(void *arg)
{
    struct weights *p = arg;
    compute_matmul(p->c, p->out, &p->w[p->next], p->x, NULL, p->n);
    p->next = (p->next + 1) % p->matrices;
}

static struct matrix make_matrix(enum dtype type, uint32_t rows, uint32_t cols)
{
    size_t bytes = dtype_row_bytes(type, cols) * rows, block = dtype_info(type)->block_bytes;
    uint8_t *data = mem_alloc_aligned(bytes, 1);
    uint16_t half = dtype_f32_to_f16(0.01f);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
        uint64_t bits = rng_state & 0x3f3f3f3f3f3f3f3fu; /* no NaN and nothing huge in any type, */
        bits |= dtype_info(type)->block_len == 1 ? 0x2020202020202020u : 0; /* and nothing subnormal */
        memcpy(data + i, &bits, sizeof bits);
    }
    size_t at = type == DTYPE_Q2_K ? 80 : type == DTYPE_Q3_K ? 108 : type == DTYPE_Q6_K ? 208 : 0;
    for (size_t i = 0; dtype_info(type)->block_len > 1 && i < bytes; i += block)
        memcpy(data + i + at, &half, sizeof half);
    return (struct matrix){type, rows, cols, data};
}

static double time_product(const struct bench *b, enum dtype type, uint32_t rows, uint32_t cols, int n)
{
    size_t bytes = dtype_row_bytes(type, cols) * rows;
    struct weights p = {.c = b->c, .n = n, .x = random_floats((size_t)n * cols)};
    p.out = mem_alloc((size_t)n * rows, sizeof *p.out);
    p.matrices = n == 1 ? (int)((size_t)(b->quick ? 24 << 20 : 96 << 20) / bytes) + 1 : 1;
    p.w = mem_alloc((size_t)p.matrices, sizeof *p.w);
    for (int i = 0; i < p.matrices; i++)
        p.w[i] = make_matrix(type, rows, cols);
    /* Call by call: a long stretch measures what else the machine does. */
    double seconds = best_of_repeats(b->repeats * (n == 1 ? p.matrices : n < 32 ? 8 : 4), 1, multiply, &p);
    for (int i = 0; i < p.matrices; i++) {
        void *data = (void *)(uintptr_t)p.w[i].data;
        mem_free(&data);
    }
    mem_free(&p.w);
    mem_free(&p.x);
    mem_free(&p.out);
    return seconds;
}

/* Every type at a shape that superblocks divide. What the file's bytes pass at, as a share of what a read
 * alone reaches; GFLOP/s for 8 tokens and for many. */
static void bench_types(const struct bench *b, struct compute *const by_activations[2])
{
    static const enum dtype types[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q8_0,  DTYPE_Q4_0,
                                       DTYPE_Q4_1, DTYPE_Q5_0, DTYPE_Q5_1, DTYPE_Q2_K,  DTYPE_Q3_K,
                                       DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K, DTYPE_IQ4_NL};
    enum { ROWS = 768, COLS = 1536, FEW = 8, MANY = 96 };
    printf("\nproducts, %d x %d: decode, GB/s of weights (%% of a read); n=%d and n=%d, GFLOP/s\n", ROWS,
           COLS, FEW, MANY);
    printf("type    float32 activations              int8 activations\n");
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        double bytes = (double)dtype_row_bytes(types[t], COLS) * ROWS, flops = 2.0 * ROWS * COLS;
        printf("%-7s", dtype_info(types[t])->name);
        for (int i = 0; i < 2; i++) {
            struct bench mine = *b;
            mine.c = by_activations[i];
            double gbs = bytes / time_product(&mine, types[t], ROWS, COLS, 1) * 1e-9;
            printf(" %5.1f (%3.0f%%) %5.0f %5.0f       ", gbs, 100 * gbs / b->read_gbs,
                   flops * FEW / time_product(&mine, types[t], ROWS, COLS, FEW) * 1e-9,
                   flops * MANY / time_product(&mine, types[t], ROWS, COLS, MANY) * 1e-9);
        }
        printf("\n");
    }
}

/* The model's own shapes. */
static void bench_matmul(const struct bench *b)
{
    static const enum dtype types[] = {DTYPE_F32, DTYPE_F16, DTYPE_Q8_0, DTYPE_Q4_0, DTYPE_Q4_1};
    printf("product         decode, GB/s of weights (us)       n=8, GFLOP/s   prefill n=%d, GFLOP/s (%% of "
           "peak)\n",
           b->quick ? 64 : 256);
    printf("type     %dx%d     %dx%d      %dx%d     %dx%d       %dx%d  %dx%d\n", HIDDEN, HIDDEN, FFN, HIDDEN,
           VOCAB, HIDDEN, FFN, HIDDEN, FFN, HIDDEN, HIDDEN, FFN);
    for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
        static const uint32_t rows[] = {HIDDEN, FFN, VOCAB};
        printf("%-5s", dtype_info(types[t])->name);
        for (int i = 0; i < 3; i++) {
            double s = time_product(b, types[t], rows[i], HIDDEN, 1);
            double bytes = (double)(dtype_row_bytes(types[t], HIDDEN) * rows[i]);
            printf("  %5.1f (%6.1f)", bytes / s * 1e-9, s * 1e6);
        }
        printf("  %6.0f      ", 2.0 * FFN * HIDDEN * 8 / time_product(b, types[t], FFN, HIDDEN, 8) * 1e-9);
        int n = b->quick ? 64 : 256;
        double up = 2.0 * FFN * HIDDEN * n / time_product(b, types[t], FFN, HIDDEN, n) * 1e-9;
        double down = 2.0 * FFN * HIDDEN * n / time_product(b, types[t], HIDDEN, FFN, n) * 1e-9;
        printf("  %4.0f (%2.0f%%)  %4.0f (%2.0f%%)\n", up, 100 * up / b->fma_gflops, down,
               100 * down / b->fma_gflops);
    }
}

enum { LAYERS = 30 };

/* Pages of all layers, so that a step's pieces come from memory as in decoding. */
struct attend {
    struct compute *c;
    struct kv_view views[LAYERS];
    struct attn_list *lists;
    struct attn_query *queries;
    uint64_t *at;
    float *q, *out;
    int n, layer;
};

static void attend(void *arg)
{
    struct attend *a = arg;
    for (int i = 0; i < a->n; i++)
        a->queries[i].kv = &a->views[a->layer];
    compute_attention(a->c, a->out, a->q, a->queries, a->n, Q_HEADS, KV_HEADS, HEAD_DIM, 0.125f);
    a->layer = (a->layer + 1) % LAYERS;
}

/* `every` > 1: a sparse list of every so-manieth position. */
static double time_attention(const struct bench *b, uint32_t context, uint32_t every, int n)
{
    uint32_t pages = (context + PAGE - 1) / PAGE, piece = 4 * HEAD_DIM, count = context / every;
    size_t page_bytes = (size_t)PAGE * piece * KV_HEADS, layer_bytes = pages * page_bytes;
    struct attend a = {.c = b->c, .n = n};
    uint8_t *memory = mem_alloc_aligned(LAYERS * layer_bytes, 1);
    for (size_t i = 0; i < LAYERS * layer_bytes; i += 2) {
        uint16_t half = (uint16_t)(0x2c00 + i % 509);
        memcpy(memory + i, &half, sizeof half);
    }
    uint32_t *positions = mem_alloc(count, sizeof *positions);
    for (uint32_t i = 0; i < count; i++)
        positions[i] = i * every;
    a.at = mem_alloc(pages, sizeof *a.at);
    for (uint32_t i = 0; i < pages; i++)
        a.at[i] = (uint64_t)i * page_bytes;
    for (int l = 0; l < LAYERS; l++)
        a.views[l] = (struct kv_view){.base = memory + (size_t)l * layer_bytes,
                                      .at = a.at,
                                      .page_tokens = PAGE,
                                      .piece_bytes = piece,
                                      .type = DTYPE_F16};
    a.lists = mem_alloc((size_t)n, sizeof *a.lists);
    a.queries = mem_alloc((size_t)n, sizeof *a.queries);
    for (int i = 0; i < n; i++) {
        a.lists[i] = (struct attn_list){count - (uint32_t)(n - 1 - i), every > 1 ? positions : NULL};
        a.queries[i] = (struct attn_query){NULL, &a.lists[i], 1};
    }
    a.q = random_floats((size_t)n * Q_HEADS * HEAD_DIM);
    a.out = mem_alloc((size_t)n * Q_HEADS * HEAD_DIM, sizeof *a.out);
    double seconds = best_of_repeats(b->repeats * (n == 1 ? LAYERS : 1), 1, attend, &a);
    mem_free(&memory);
    mem_free(&positions);
    mem_free(&a.at);
    mem_free(&a.lists);
    mem_free(&a.queries);
    mem_free(&a.q);
    mem_free(&a.out);
    return seconds;
}

static void bench_attention(const struct bench *b)
{
    printf("\nattention, %d/%d heads x %d, one query, one layer of %d\n", Q_HEADS, KV_HEADS, HEAD_DIM,
           LAYERS);
    static const uint32_t contexts[] = {4096, 8192, 32768};
    for (int i = 0; i < (b->quick ? 2 : 3); i++) {
        double s = time_attention(b, contexts[i], 1, 1),
               bytes = (double)contexts[i] * KV_HEADS * 4 * HEAD_DIM;
        printf("  full   %6u positions  %8.1f us  %5.1f GB/s (read limit %.1f)\n", contexts[i], s * 1e6,
               bytes / s * 1e-9, b->read_gbs);
    }
    double s = time_attention(b, 8192, 4, 1);
    printf("  sparse %6u of %u        %8.1f us  %5.1f GB/s\n", 2048u, 8192u, s * 1e6,
           2048.0 * KV_HEADS * 256 / s * 1e-9);
    int n = b->quick ? 64 : 256;
    s = time_attention(b, 4096, 1, n);
    double flops = 4.0 * Q_HEADS * HEAD_DIM * n * (4096 - n / 2.0);
    printf("  prefill %d tokens before 4096  %6.2f ms  %.0f GFLOP/s (%.0f%% of peak)\n", n, s * 1e3,
           flops / s * 1e-9, 100 * flops / s * 1e-9 / b->fma_gflops);
}

struct retrieve {
    struct compute *c;
    struct key_view view;
    float *weights, *q;
    uint32_t *index, *scratch;
};

static void retrieve(void *arg)
{
    struct retrieve *r = arg;
    compute_retrieval_weights(r->c, r->weights, r->view.count, r->q, &r->view, Q_HEADS, KV_HEADS, HEAD_DIM,
                              0.125f, POOL_MAX);
}

static void pick(void *arg)
{
    struct retrieve *r = arg;
    double mass;
    compute_topk(r->index, &mass, r->weights, r->view.count, 2048, r->scratch);
}

static void bench_retrieval(const struct bench *b)
{
    static const uint32_t counts[] = {4096, 8192, 32768, 131072};
    printf("\nretrieval, %d/%d heads x %d, and top-2048 of one KV head\n", Q_HEADS, KV_HEADS, HEAD_DIM);
    for (int i = 0; i < (b->quick ? 3 : 4); i++) {
        size_t halves = (size_t)counts[i] * KV_HEADS * HEAD_DIM;
        uint16_t *chunk = mem_alloc(halves, sizeof *chunk);
        const uint16_t *const chunks[] = {chunk};
        struct retrieve r = {
            .c = b->c, .view = {chunks, counts[i], 0}, .q = random_floats(Q_HEADS * HEAD_DIM)};
        float *keys = random_floats(halves);
        compute_keys_append(b->c, &r.view, keys, (int)counts[i], KV_HEADS, HEAD_DIM);
        r.view.count = counts[i];
        r.weights = mem_alloc((size_t)counts[i] * KV_HEADS, sizeof *r.weights);
        r.index = mem_alloc(2048, sizeof *r.index);
        r.scratch = mem_alloc(counts[i], sizeof *r.scratch);
        double s = best_of_repeats(4 * b->repeats, 1, retrieve, &r);
        printf("  %6u keys: weights %8.1f us (%5.1f GB/s of keys)", counts[i], s * 1e6,
               (double)halves * 2 / s * 1e-9);
        double flat = best_of(b, 8, pick, &r);
        for (uint32_t p = 0; p < counts[i]; p++)
            r.weights[p] = expf(20 * random_float() - 20);
        double peaked = best_of(b, 8, pick, &r);
        for (uint32_t p = 0; p < counts[i]; p++)
            r.weights[p] = 1.0f / (float)counts[i];
        double equal = best_of(b, 8, pick, &r);
        printf("  top-k %6.1f us, wide range %6.1f us, all equal %6.1f us\n", flat * 1e6, peaked * 1e6,
               equal * 1e6);
        mem_free(&chunk);
        mem_free(&keys);
        mem_free(&r.q);
        mem_free(&r.weights);
        mem_free(&r.index);
        mem_free(&r.scratch);
    }
}

int main(int argc, char **argv)
{
    struct bench_options options = {.quick = false};
    int code;
    if (!bench_options_parse(argc, argv, &options, &code))
        return code;
    struct bench b = {.quick = options.quick, .repeats = options.quick ? 3 : 7};
    struct compute *by_activations[2];
    struct err err;
    for (int i = 0; i < 2; i++) {
        struct compute_options chosen = options.compute;
        chosen.activations = i ? COMPUTE_ACTIVATIONS_Q8 : COMPUTE_ACTIVATIONS_F32;
        if (compute_create_with(&chosen, &by_activations[i], &err) < 0) {
            fprintf(stderr, "%s\n", err.text);
            return 1;
        }
    }
    b.c = by_activations[options.compute.activations == COMPUTE_ACTIVATIONS_Q8];
    measure_machine(&b);
    bench_matmul(&b);
    bench_types(&b, by_activations);
    bench_attention(&b);
    bench_retrieval(&b);
    for (int i = 0; i < 2; i++)
        compute_free(&by_activations[i]);
    return 0;
}
