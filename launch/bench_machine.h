/* What a benchmark compares its figures with: the bandwidth of reading the model's weights, and what
 * processes take of memory and processor. */
#ifndef LAUNCH_BENCH_MACHINE_H
#define LAUNCH_BENCH_MACHINE_H

#include <stdint.h>
#include <sys/types.h>

#include "model/model.h"

/* Bytes a second of the fastest short read of the model's own weights by `threads` threads. The threads are
 * started for it and gone afterwards. */
double bench_machine_bandwidth(const struct model *model, int threads);

/* Bytes that a decode step reads of the weights: the matrices of all layers and the output's; norms and
 * biases are too small to count. */
uint64_t bench_machine_weights(const struct model *model);

struct bench_usage {
    uint64_t rss, pss; /* bytes; 0 where /proc does not tell */
    int64_t cpu_ns;    /* of all its threads since it began */
};

/* Adds one process to *sum; a process that is gone adds nothing. */
void bench_machine_memory(pid_t pid, struct bench_usage *sum);
void bench_machine_cpu(pid_t pid, struct bench_usage *sum);

#endif
