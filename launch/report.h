/* The figures of a run: as JSON for programs, as lines for people. */
#ifndef LAUNCH_REPORT_H
#define LAUNCH_REPORT_H

#include <stdint.h>
#include <stdio.h>

#include "base/err.h"
#include "launch/run_options.h"
#include "launch/sequence.h"

#define REPORT_PROCESSES_MAX 8

struct report {
    const struct run_options *options;
    const char *model_name;
    const char *head;                     /* path */
    uint32_t context, budget, budget_max; /* in force */
    uint64_t seed;                        /* the one that was used */
    const struct sequence *sequences;     /* [count] */
    uint32_t count;
    int64_t load_ns, run_ns; /* until all parts were ready; from then to the end */
    const char *error;       /* NULL: none */
    struct report_process {
        const char *name;
        uint32_t pid;
    } processes[REPORT_PROCESSES_MAX];
    uint32_t process_count;
};

/* Before the run: whether report_write can be expected to succeed. The error names --report. */
int report_check(const char *path, struct err *err);

/* Writes `path` whole or not at all; a device or a pipe is written to, not replaced, and -ENXIO or -EAGAIN
 * when nobody reads it. One prompt: its figures stand at the top level; a list of prompts: in "sequences".
 * Numbers that were never measured are null. */
int report_write(const struct report *report, const char *path, struct err *err);

/* Load, prefill, decode, attention and traffic, a line each. */
void report_print(const struct report *report, FILE *to);

#endif
