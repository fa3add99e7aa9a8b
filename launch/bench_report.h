/* The figures of a benchmark: as a table for people, as JSON for programs. */
#ifndef LAUNCH_BENCH_REPORT_H
#define LAUNCH_BENCH_REPORT_H

#include <stdint.h>
#include <stdio.h>

#include "launch/bench_gpu.h"
#include "launch/bench_machine.h"
#include "launch/bench_options.h"
#include "launch/bench_parts.h"

enum bench_kind { BENCH_PREFILL, BENCH_DECODE };

/* One line of the table: what was measured at one depth. */
struct bench_row {
    enum bench_kind kind;
    uint32_t depth;   /* tokens in the cache before, of each sequence */
    uint32_t tokens;  /* of each sequence, a repeat */
    uint32_t repeats; /* done */
    double *rates;    /* [repeats] tokens a second of all sequences together; sorted by bench_row_close */
    double *cpu;      /* [repeats] seconds of processor time a token, all processes; sorted as well */
    double *step_ms;  /* [repeats][tokens] of each step of a decode; NULL for a prefill */
    uint32_t cached;  /* tokens that prefix reuse spared one sequence, last repeat */
    uint32_t layers_offloaded;
    double attended;     /* positions that a list of a sparse step had in the mean; NAN: none was sparse */
    uint64_t step_bytes; /* that a decode step must read; 0 for a prefill */
    struct bench_usage memory; /* of all processes, after the last repeat */
    struct bench_parts parts;
};

struct bench_report {
    const struct bench_options *options;
    const char *model_name, *head; /* head: path */
    uint32_t context, cores;
    uint64_t weight_bytes;
    const struct bench_gpu *gpu; /* NULL: on the CPU */
    double bandwidth;            /* bytes a second: fastest read of weights, on a GPU its copies */
    const struct bench_row *rows;
    uint32_t row_count;
};

void bench_row_init(struct bench_row *row, enum bench_kind kind, uint32_t depth,
                    const struct bench_options *options);
void bench_row_close(struct bench_row *row);
void bench_row_free(struct bench_row *row); /* accepts a zeroed one */

/* Middle one of `count` sorted values, or the mean of the two in the middle; NAN when there are none. */
double bench_median(const double *sorted, uint32_t count);

/* Milliseconds of a step, and what they would be if it only read what it must at `bandwidth`; NAN for a
 * prefill. */
double bench_row_step_ms(const struct bench_report *report, const struct bench_row *row);
double bench_row_floor_ms(const struct bench_report *report, const struct bench_row *row);
/* Their ratio, at most about 1; NAN for a prefill. */
double bench_row_share(const struct bench_report *report, const struct bench_row *row);

void bench_report_table(const struct bench_report *report, FILE *to);
void bench_report_json(const struct bench_report *report, FILE *to); /* paced: in one line */

#endif
