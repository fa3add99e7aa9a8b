/* Measures the machine and reads /proc. No state between calls; the caller's thread and a pool of its own. It
 * must never run while requests do: it would compete with them. */
#include "launch/bench_machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/pool.h"

/* A section is read by all threads in pieces. It is short, because on a machine with other work a long read
 * measures that work and gives a limit that steps exceed. Between two reads of the same section all others
 * are read, so that with weights larger than the caches it comes from memory, as it does for a step. */
enum { PIECE = 64 << 10, SECTION = 32, MATRICES = 7, ROUNDS_MAX = 200 };
#define BANDWIDTH_MAX_NS (2 * CLOCK_S)

struct piece {
    const uint8_t *data;
    size_t bytes;
};

struct sweep {
    struct pool *pool;
    struct piece pieces[SECTION];
    int count;
    size_t bytes; /* of all pieces */
    double best;
    uint64_t sums[SECTION * 8]; /* a cache line each */
};

/* Eight sums in registers, so that nothing but memory is waited for. */
static uint64_t sum_bytes(const uint8_t *data, size_t bytes)
{
    uint64_t sum[8] = {0}, words[8];
    for (size_t i = 0; i + sizeof words <= bytes; i += sizeof words) {
        __builtin_prefetch((const void *)((uintptr_t)data + i + 4096)); /* may pass the end */
        memcpy(words, data + i, sizeof words);
        for (int j = 0; j < 8; j++)
            sum[j] += words[j];
    }
    return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

static void read_piece(void *arg, int index, int thread)
{
    struct sweep *s = arg;
    (void)thread;
    s->sums[index * 8] = sum_bytes(s->pieces[index].data, s->pieces[index].bytes);
}

static void read_section(struct sweep *s)
{
    int64_t begin = clock_now_ns();
    pool_run(s->pool, s->count, read_piece, s);
    double rate = (double)s->bytes * 1e9 / (double)(clock_now_ns() - begin);
    s->best = rate > s->best ? rate : s->best;
    s->count = 0;
    s->bytes = 0;
}

static void sweep_tensor(struct sweep *s, const struct model_tensor *t)
{
    for (uint64_t at = 0; t->data && at < t->bytes; at += PIECE) {
        size_t bytes = t->bytes - at < PIECE ? (size_t)(t->bytes - at) : PIECE;
        s->pieces[s->count++] = (struct piece){(const uint8_t *)t->data + at, bytes};
        s->bytes += bytes;
        if (s->count == SECTION)
            read_section(s);
    }
}

static void matrices_of(const struct model_layer *l, const struct model_tensor *ret[MATRICES])
{
    const struct model_tensor *all[MATRICES] = {&l->wq, &l->wk, &l->wv, &l->wo, &l->gate, &l->up, &l->down};
    memcpy(ret, all, sizeof all);
}

double bench_machine_bandwidth(const struct model *model, int threads)
{
    struct sweep s = {.pool = pool_create(threads, "read")};
    int64_t end = clock_now_ns() + BANDWIDTH_MAX_NS;
    for (int round = 0; round < ROUNDS_MAX && (round == 0 || clock_now_ns() < end); round++) {
        for (uint32_t l = 0; l < model_config(model)->layers; l++) {
            const struct model_tensor *all[MATRICES];
            matrices_of(&model_layers(model)[l], all);
            for (int i = 0; i < MATRICES; i++)
                sweep_tensor(&s, all[i]);
        }
        sweep_tensor(&s, model_output(model));
    }
    pool_free(&s.pool);
    return s.best;
}

uint64_t bench_machine_weights(const struct model *model)
{
    uint64_t bytes = model_output(model)->bytes;
    for (uint32_t l = 0; l < model_config(model)->layers; l++) {
        const struct model_tensor *all[MATRICES];
        matrices_of(&model_layers(model)[l], all);
        for (int i = 0; i < MATRICES; i++)
            bytes += all[i]->bytes;
    }
    return bytes;
}

/* Bytes of a line "Name:   123 kB", 0 of any other. */
static uint64_t bytes_of(const char *line, const char *name)
{
    size_t length = strlen(name);
    if (strncmp(line, name, length) || line[length] != ':')
        return 0;
    return (uint64_t)strtoull(line + length + 1, NULL, 10) << 10;
}

void bench_machine_memory(pid_t pid, struct bench_usage *sum)
{
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/smaps_rollup", (int)pid);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        sum->rss += bytes_of(line, "Rss");
        sum->pss += bytes_of(line, "Pss");
    }
    if (file)
        fclose(file);
}

void bench_machine_cpu(pid_t pid, struct bench_usage *sum)
{
    clockid_t clock;
    struct timespec t;
    if (clock_getcpuclockid(pid, &clock) == 0 && clock_gettime(clock, &t) == 0)
        sum->cpu_ns += (int64_t)t.tv_sec * CLOCK_S + t.tv_nsec;
}
