/* What `specontext bench` may be asked for. The table in bench_options.c names, explains and bounds each
 * option. */
#ifndef LAUNCH_BENCH_OPTIONS_H
#define LAUNCH_BENCH_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"
#include "launch/run_options.h"

#define BENCH_DEPTHS_MAX   32u
#define BENCH_REPEATS_MAX  1000u
#define BENCH_PARALLEL_MAX 64u

enum bench_output { BENCH_MARKDOWN, BENCH_JSON };

struct bench_options {
    struct run_options run; /* model, head, attention, budget, cores ...: as the parts are started with */
    uint32_t prompt;        /* tokens of a prefill; 0: none is measured */
    uint32_t decode;        /* tokens of a decode; 0: none is measured */
    const char *depths_text;
    uint32_t depths[BENCH_DEPTHS_MAX]; /* [depth_count] */
    uint32_t depth_count;
    uint32_t parallel, repeats;
    uint32_t output; /* enum bench_output */
    bool json, paced;
    bool distinct; /* each sequence has a beginning of its own */
};

/* 0; 1 when help was asked for; -EINVAL with one line that names the option. Strings lead into argv. */
int bench_options_parse(int argc, char **argv, struct bench_options *ret_options, struct err *err);
void bench_options_help(FILE *to);

#endif
