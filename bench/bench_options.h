/* Options of the benchmarks of operators: what compute is made from, and whether to be quick. */
#ifndef BENCH_BENCH_OPTIONS_H
#define BENCH_BENCH_OPTIONS_H

#include <stdio.h>
#include <unistd.h>

#include "base/options.h"
#include "compute/compute.h"

struct bench_options {
    struct compute_options compute; /* defaults stand in it before */
    bool quick;
};

/* False, with a line on stderr or the help on stdout, when there is nothing to run; *ret_code to end with. */
static inline bool bench_options_parse(int argc, char **argv, struct bench_options *o, int *ret_code)
{
#define AT(field) .at = offsetof(struct bench_options, field), .group = "Options"
    static const struct option_entry table[] = {
        {.name = "quick", .kind = OPTION_FLAG, AT(quick), .text = "fewer repetitions"},
        {.name = "threads",
         .kind = OPTION_UINT,
         AT(compute.threads),
         .argument = "N",
         .least = 1,
         .most = 1024,
         .text = "threads that compute (default: all processors)"},
        {.name = "isa",
         .kind = OPTION_CHOICE,
         AT(compute.isa),
         .argument = "NAME",
         .choices = COMPUTE_ISA_CHOICES,
         .text = "instruction set of the operators"},
        {.name = "activations",
         .kind = OPTION_CHOICE,
         AT(compute.activations),
         .argument = "KIND",
         .choices = COMPUTE_ACTIVATIONS_CHOICES,
         .text = "what products with quantized weights take"},
        {0}};
#undef AT
    struct err err = {0};
    o->compute.device = "cpu";
    o->compute.threads = (int)sysconf(_SC_NPROCESSORS_ONLN);
    int r = options_parse(table, argc, argv, o, &err);
    if (r < 0)
        fprintf(stderr, "%s: %s\n", argv[0], err.text);
    else if (r > 0)
        options_help(table, stdout);
    *ret_code = r < 0 ? 2 : 0;
    return r == 0;
}

#endif
