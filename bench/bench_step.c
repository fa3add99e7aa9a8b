/* A whole forward pass of SmolLM2-135M (Q4_1, head Q8_0) made of the operators, with random weights: what the
 * decoder can reach, without sockets, scheduling and sampling. Beside it the floor: the bytes that a step
 * must read, at the best bandwidth of short reads of the same bytes by the same threads. Short, because on a
 * machine with other work a long read measures that work, and gives a floor that steps fall below.
 *
 *   bench_step [--threads N] [--isa NAME] [--activations f32|q8] [--quick]
 *
 * Decoding: the median and the fastest step, and the median of the processor time of a step (of all threads,
 * with their waiting for each other), which other work disturbs least. Products of the same activations are
 * also timed one by one, in turn with those in one loop. Prefill: 2,000 tokens in chunks of 512. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/pool.h"
#include "bench/bench_options.h"

enum { LAYERS = 30, HIDDEN = 576, FFN = 1536, Q_HEADS = 9, KV_HEADS = 3, DIM = 64, VOCAB = 49152 };
enum { KV = KV_HEADS * DIM, PAGE = 64, CONTEXT = 8192, CHUNK = 512, PIECE = 4 * DIM, STEPS_MAX = 200 };
enum { PAGES = CONTEXT / PAGE, PAGE_BYTES = PAGE * KV_HEADS * PIECE };
enum { PARTS = 8, SECTION = 3 }; /* layers of one timed read */

struct layer {
    struct matrix q, k, v, o, gate, up, down;
    struct kv_view view;
};

struct step {
    struct compute *c;
    struct layer layers[LAYERS];
    struct matrix head;
    size_t weight_bytes;
    uint64_t at[PAGES];
    struct rope rope;
    float inv_freq[DIM / 2], norm[HIDDEN];
    float *x, *y, *q, *k, *v, *a, *gate, *up, *logits;
    uint32_t sparse[CONTEXT], positions[CHUNK];
    struct attn_list lists[CHUNK];
    struct attn_query queries[CHUNK];
    struct kv_place places[CHUNK];
    int separate; /* each product in a loop of its own */
    double attention_s;
};

static uint64_t rng_state = 1;

static uint64_t rng_next(void)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return rng_state;
}

static struct matrix make_matrix(struct step *s, enum dtype type, uint32_t rows, uint32_t cols)
{
    size_t bytes = dtype_row_bytes(type, cols) * rows, block = dtype_info(type)->block_bytes;
    uint8_t *data = mem_alloc_aligned(bytes, 1);
    uint16_t d = dtype_f32_to_f16(0.004f), m = dtype_f32_to_f16(-0.03f);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t bits = rng_next();
        memcpy(data + i, &bits, sizeof bits);
    }
    for (size_t i = 0; i < bytes; i += block) {
        memcpy(data + i, &d, sizeof d);
        if (type == DTYPE_Q4_1)
            memcpy(data + i + 2, &m, sizeof m);
    }
    s->weight_bytes += bytes;
    return (struct matrix){type, rows, cols, data};
}

static void make_layer(struct step *s, struct layer *l)
{
    l->q = make_matrix(s, DTYPE_Q4_1, HIDDEN, HIDDEN);
    l->k = make_matrix(s, DTYPE_Q4_1, KV, HIDDEN);
    l->v = make_matrix(s, DTYPE_Q4_1, KV, HIDDEN);
    l->o = make_matrix(s, DTYPE_Q4_1, HIDDEN, HIDDEN);
    l->gate = make_matrix(s, DTYPE_Q4_1, FFN, HIDDEN);
    l->up = make_matrix(s, DTYPE_Q4_1, FFN, HIDDEN);
    l->down = make_matrix(s, DTYPE_Q4_1, HIDDEN, FFN);
    l->view = (struct kv_view){.base = mem_alloc((size_t)PAGES * PAGE_BYTES, 1),
                               .at = s->at,
                               .page_tokens = PAGE,
                               .piece_bytes = PIECE,
                               .type = DTYPE_F16};
    for (size_t i = 0; i < (size_t)PAGES * PAGE_BYTES; i += 2) {
        uint16_t half = (uint16_t)(0x2c00 + rng_next() % 509);
        memcpy(l->view.base + i, &half, sizeof half);
    }
}

static float *floats(size_t count)
{
    return mem_alloc(count, sizeof(float));
}

static void make_step(struct step *s)
{
    for (int i = 0; i < PAGES; i++)
        s->at[i] = (uint64_t)i * PAGE_BYTES;
    for (int i = 0; i < LAYERS; i++)
        make_layer(s, &s->layers[i]);
    s->head = make_matrix(s, DTYPE_Q8_0, VOCAB, HIDDEN);
    for (int i = 0; i < DIM / 2; i++)
        s->inv_freq[i] = powf(100000, -2.0f * (float)i / DIM);
    s->rope = (struct rope){ROPE_PAIRS_ADJACENT, DIM, s->inv_freq, 1};
    for (int i = 0; i < HIDDEN; i++)
        s->norm[i] = 1;
    s->x = floats(CHUNK * HIDDEN);
    s->y = floats(CHUNK * HIDDEN);
    s->q = floats(CHUNK * HIDDEN);
    s->a = floats(CHUNK * HIDDEN);
    s->k = floats(CHUNK * KV);
    s->v = floats(CHUNK * KV);
    s->gate = floats(CHUNK * FFN);
    s->up = floats(CHUNK * FFN);
    s->logits = floats(VOCAB);
}

static void multiply(struct step *s, const struct product *p, int count, const float *x, int n)
{
    for (int i = 0; s->separate && i < count; i++)
        compute_matmul(s->c, p[i].out, p[i].w, x, NULL, n);
    if (!s->separate)
        compute_matmul_many(s->c, p, count, x, n);
}

static void run_layer(struct step *s, const struct layer *l, int n)
{
    struct compute *c = s->c;
    compute_rmsnorm(c, s->y, s->x, s->norm, n, HIDDEN, 1e-5f);
    struct product qkv[] = {{s->q, &l->q, NULL}, {s->k, &l->k, NULL}, {s->v, &l->v, NULL}};
    multiply(s, qkv, 3, s->y, n);
    compute_rope(c, s->q, &s->rope, s->positions, n, Q_HEADS, DIM);
    compute_rope(c, s->k, &s->rope, s->positions, n, KV_HEADS, DIM);
    for (int i = 0; i < n; i++) {
        s->places[i] = (struct kv_place){&l->view, &s->positions[i], 1};
        s->queries[i] = (struct attn_query){&l->view, &s->lists[i], 1};
    }
    compute_kv_write(c, s->places, s->k, s->v, n, KV_HEADS, DIM);
    int64_t start = clock_now_ns();
    compute_attention(c, s->a, s->q, s->queries, n, Q_HEADS, KV_HEADS, DIM, 0.125f);
    s->attention_s += (double)(clock_now_ns() - start) * 1e-9;
    compute_matmul(c, s->y, &l->o, s->a, NULL, n);
    compute_add(c, s->x, s->y, (size_t)n * HIDDEN);
    compute_rmsnorm(c, s->y, s->x, s->norm, n, HIDDEN, 1e-5f);
    struct product ffn[] = {{s->gate, &l->gate, NULL}, {s->up, &l->up, NULL}};
    multiply(s, ffn, 2, s->y, n);
    compute_swiglu(c, s->gate, s->gate, s->up, n, FFN);
    compute_matmul(c, s->y, &l->down, s->gate, NULL, n);
    compute_add(c, s->x, s->y, (size_t)n * HIDDEN);
}

/* n tokens at `first`; `budget` > 0: every token attends that many positions, spread evenly. */
static double forward(struct step *s, uint32_t first, int n, uint32_t budget, int with_head)
{
    int64_t start = clock_now_ns();
    for (size_t i = 0; i < (size_t)n * HIDDEN; i++)
        s->x[i] = (float)(rng_next() >> 40) / (float)(1 << 24) - 0.5f;
    for (int i = 0; i < n; i++) {
        s->positions[i] = first + (uint32_t)i;
        s->lists[i] = (struct attn_list){first + (uint32_t)i + 1, NULL};
        if (budget && budget < s->lists[i].count)
            s->lists[i] = (struct attn_list){budget, s->sparse};
    }
    for (uint32_t i = 0; i < budget; i++)
        s->sparse[i] = (uint32_t)((uint64_t)i * first / budget);
    for (int i = 0; i < LAYERS; i++)
        run_layer(s, &s->layers[i], n);
    compute_rmsnorm(s->c, s->y, s->x + (size_t)(n - 1) * HIDDEN, s->norm, 1, HIDDEN, 1e-5f);
    if (with_head)
        compute_matmul(s->c, s->logits, &s->head, s->y, NULL, 1);
    return (double)(clock_now_ns() - start) * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Processor time of all threads, seconds. */
static double cpu_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void decode(struct step *s, const char *name, uint32_t depth, uint32_t budget, int steps)
{
    double seconds[STEPS_MAX], cpu[STEPS_MAX];
    forward(s, depth, 1, budget, 1);
    for (int i = 0; i < steps; i++) {
        double start = cpu_now();
        seconds[i] = forward(s, depth + (uint32_t)i, 1, budget, 1);
        cpu[i] = cpu_now() - start;
    }
    qsort(seconds, (size_t)steps, sizeof *seconds, by_value);
    qsort(cpu, (size_t)steps, sizeof *cpu, by_value);
    double median = seconds[steps / 2], best = seconds[0];
    printf("%-34s median %6.2f ms %5.0f tokens/s   best %6.2f ms %5.0f tokens/s   cpu %6.2f ms\n", name,
           median * 1e3, 1 / median, best * 1e3, 1 / best, cpu[steps / 2] * 1e3);
}

/* Steps with products in one loop and one by one, in turn, so that both meet the same other work. */
static void compare_loops(struct step *s, int steps)
{
    double seconds[2][STEPS_MAX], cpu[2][STEPS_MAX];
    for (int i = 0; i < 2 * steps; i++) {
        s->separate = i % 2;
        double start = cpu_now();
        seconds[i % 2][i / 2] = forward(s, (uint32_t)i, 1, 0, 1);
        cpu[i % 2][i / 2] = cpu_now() - start;
    }
    s->separate = 0;
    for (int k = 0; k < 2; k++) {
        qsort(seconds[k], (size_t)steps, sizeof *seconds[k], by_value);
        qsort(cpu[k], (size_t)steps, sizeof *cpu[k], by_value);
        printf("  %-32s median %6.2f ms   best quarter below %6.2f ms   best %6.2f ms   cpu %6.2f ms\n",
               k ? "products one by one" : "q,k,v and gate,up in one loop", seconds[k][steps / 2] * 1e3,
               seconds[k][steps / 4] * 1e3, seconds[k][0] * 1e3, cpu[k][steps / 2] * 1e3);
    }
}

static void prefill(struct step *s, int tokens, int repeats)
{
    double best = INFINITY, attention = 0;
    for (int r = 0; r < repeats; r++) {
        double sum = 0;
        s->attention_s = 0;
        for (int t = 0; t < tokens; t += CHUNK) {
            int n = tokens - t < CHUNK ? tokens - t : CHUNK;
            sum += forward(s, (uint32_t)t, n, 0, t + n == tokens);
        }
        if (sum < best) {
            best = sum;
            attention = s->attention_s;
        }
    }
    printf("%-34s best %6.0f ms %5.0f tokens/s, attention %.0f ms\n", "prefill 2000 tokens", best * 1e3,
           tokens / best, attention * 1e3);
}

struct sweep {
    const struct layer *layers; /* [SECTION] */
    uint64_t sums[PARTS * 8];
};

static uint64_t sum_bytes(const uint8_t *data, size_t bytes)
{
    uint64_t sum[8] = {0}, words[8];
    for (size_t i = 0; i + 64 <= bytes; i += 64) {
        __builtin_prefetch((const void *)((uintptr_t)data + i + 4096)); /* may pass the end */
        memcpy(words, data + i, sizeof words);
        for (int j = 0; j < 8; j++)
            sum[j] += words[j];
    }
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

static size_t matrix_bytes(const struct matrix *m)
{
    return dtype_row_bytes(m->type, m->cols) * m->rows;
}

static void sweep_part(void *arg, int index, int thread)
{
    (void)thread;
    struct sweep *w = arg;
    uint64_t sum = 0;
    for (int i = 0; i < SECTION; i++) {
        const struct layer *l = &w->layers[i];
        const struct matrix *m[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (int j = 0; j < 7; j++) {
            size_t bytes = matrix_bytes(m[j]) / PARTS;
            sum += sum_bytes((const uint8_t *)m[j]->data + (size_t)index * bytes, bytes);
        }
    }
    w->sums[index * 8] = sum;
}

/* The time that only reading the weights takes. The layers are twice a cache of 32 MB, so each is cold. */
static void floor_of_reading(const struct step *s)
{
    size_t bytes = 0;
    for (int i = 0; i < SECTION; i++) {
        const struct layer *l = &s->layers[i];
        bytes += matrix_bytes(&l->q) + matrix_bytes(&l->k) + matrix_bytes(&l->v) + matrix_bytes(&l->o) +
                 matrix_bytes(&l->gate) + matrix_bytes(&l->up) + matrix_bytes(&l->down);
    }
    double best = INFINITY;
    for (int r = 0; r < 40; r++)
        for (int i = 0; i + SECTION <= LAYERS; i += SECTION) {
            struct sweep w = {.layers = &s->layers[i]};
            int64_t start = clock_now_ns();
            pool_run(compute_pool(s->c), PARTS, sweep_part, &w);
            double seconds = (double)(clock_now_ns() - start) * 1e-9;
            best = seconds < best ? seconds : best;
        }
    double rate = (double)bytes / best, floor = (double)s->weight_bytes / rate;
    printf("%-34s        %6.2f ms %5.0f tokens/s   (%.1f MB at %.1f GB/s)\n", "floor: reading the weights",
           floor * 1e3, 1 / floor, (double)s->weight_bytes * 1e-6, rate * 1e-9);
}

int main(int argc, char **argv)
{
    struct bench_options options = {.compute = {.activations = COMPUTE_ACTIVATIONS_Q8}};
    int code;
    if (!bench_options_parse(argc, argv, &options, &code))
        return code;
    bool quick = options.quick;
    struct err err;
    struct step *s = mem_alloc(1, sizeof *s); /* lives as long as the process */
    if (compute_create_with(&options.compute, &s->c, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    make_step(s);
    printf("%s, %d threads\n", compute_name(s->c), options.compute.threads);
    int steps = quick ? 30 : STEPS_MAX;
    floor_of_reading(s);
    decode(s, "decode, depth 0", 0, 0, steps);
    compare_loops(s, steps);
    decode(s, "decode, depth 7000", 7000, 0, steps);
    decode(s, "decode, depth 7000, 512 positions", 7000, 512, steps);
    prefill(s, 2000, quick ? 1 : 3);
    compute_free(&s->c);
    return 0;
}
