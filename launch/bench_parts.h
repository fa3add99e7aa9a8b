/* What the daemons tell of themselves at the beginning and the end of what a benchmark times: the parts of
 * a step, how long steps waited, what was loaded, and the memory of GPUs. Sums over a row's repeats. Loop's
 * thread. */
#ifndef LAUNCH_BENCH_PARTS_H
#define LAUNCH_BENCH_PARTS_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "launch/client.h"

/* The answers of one repeat, kept as text: nothing is computed while it is timed. */
struct bench_window {
    char *text[2][CLIENT_PARTS]; /* [begin, end][part]; NULL: not yet */
};

/* The first answer of a part is of the beginning, the second of the end, later ones are dropped. */
void bench_window_answer(struct bench_window *window, enum client_part part, const char *json,
                         uint32_t bytes);
bool bench_window_complete(const struct bench_window *window);
void bench_window_clear(struct bench_window *window); /* leaves it zeroed */

struct bench_waits { /* steps by length of their wait, ascending */
    struct {
        double below_us;
        int64_t steps;
    } at[256];
    uint32_t count;
};

#define BENCH_MOVES_MAX 64

struct bench_move { /* of layers, in a step of a repeat */
    uint32_t repeat, step;
    uint32_t offloaded; /* layers, from then on */
};

struct bench_parts {
    double steps; /* that the times are of: all on the CPU, on a GPU those that events measured */
    double wait_ms, attention_ms, matmul_ms, sampling_ms, other_ms;  /* sums over them */
    double retriever_steps, append_ms, score_ms, topk_ms, encode_ms; /* sums over them */
    double store_steps, bytes_loaded, move_ms; /* move: of layers, on the store's thread */
    struct bench_waits tables, rows;
    struct bench_move moves[BENCH_MOVES_MAX]; /* the first ones */
    uint32_t move_count, repeats;
    json_t *gpu[CLIENT_PARTS]; /* as the part told at the end; NULL: none on a GPU */
};

/* Adds what happened in a complete window. 0; -EPROTO when an answer is no JSON. */
int bench_parts_add(struct bench_parts *parts, const struct bench_window *window);
void bench_parts_free(struct bench_parts *parts); /* accepts a zeroed one */

double bench_parts_mean(double sum, double steps); /* NAN of no steps */
/* Microseconds that the share `q` of the waits stayed below; NAN when none was counted. */
double bench_waits_quantile(const struct bench_waits *waits, double q);
uint64_t bench_parts_gpu_bytes(const struct bench_parts *parts, enum client_part part);

#endif
