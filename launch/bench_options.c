/* The options of `specontext bench`: table, defaults, and what must hold between them. No state; main's
 * thread. It never prints errors: the caller does. */
#include "launch/bench_options.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/parse.h"
#include "base/options.h"
#include "proto/limits.h"
#include "proto/memory.h"

#define AT(field) .at = offsetof(struct bench_options, field)

#define MODEL   "Model"
#define MEASURE "What is measured"
#define HOW     "How it runs"
#define OUTPUT  "Output"

/* An option that `run` has, too, and all about it that is not said here. */
#define OF_RUN(option, in) .name = option, .group = in

/* A table reads best as rows. */
/* clang-format off */
static const struct option_entry rows[] = {
    {OF_RUN("model", MODEL)},
    {OF_RUN("head", MODEL)},
    {.name = "prompt", .letter = 'p', .kind = OPTION_UINT, AT(prompt), .argument = "N", .initial = "512",
     .least = 0, .most = LIMIT_CONTEXT, .group = MEASURE, .text = "tokens of a prefill; 0: none"},
    {.name = "predict", .letter = 'n', .kind = OPTION_UINT, AT(decode), .argument = "N", .initial = "128",
     .least = 0, .most = LIMIT_CONTEXT, .group = MEASURE, .text = "tokens of a decode; 0: none"},
    {.name = "generate", .kind = OPTION_UINT, AT(decode), .argument = "N", .least = 0, .most = LIMIT_CONTEXT,
     .group = MEASURE, .text = "the same as --predict"},
    {.name = "depth", .letter = 'd', .kind = OPTION_TEXT, AT(depths_text), .argument = "N[,N...]",
     .initial = "0", .group = MEASURE, .text = "tokens that stand in the KV cache before"},
    {.name = "parallel", .letter = 'b', .kind = OPTION_UINT, AT(parallel), .argument = "N", .initial = "1",
     .least = 1, .most = BENCH_PARALLEL_MAX, .group = MEASURE, .text = "sequences at the same time"},
    {.name = "requests", .kind = OPTION_UINT, AT(parallel), .argument = "R", .least = 1,
     .most = BENCH_PARALLEL_MAX, .group = MEASURE, .text = "the same as --parallel"},
    {.name = "repeats", .letter = 'r', .kind = OPTION_UINT, AT(repeats), .argument = "N", .initial = "5",
     .least = 1, .most = BENCH_REPEATS_MAX, .group = MEASURE, .text = "repeats after one that warms up"},
    {.name = "distinct", .kind = OPTION_FLAG, AT(distinct), .group = MEASURE,
     .text = "prefill the depth of each sequence by itself; without it all share one that is prefilled once"},
    {OF_RUN("attention", HOW)},
    {OF_RUN("selection", HOW)},
    {OF_RUN("budget", HOW)},
    {OF_RUN("min-mass", HOW)},
    {OF_RUN("max-budget", HOW)},
    {OF_RUN("budget-top-p", HOW)},
    {OF_RUN("sinks", HOW)},
    {OF_RUN("window", HOW)},
    {OF_RUN("device", HOW)},
    {OF_RUN("retriever-device", HOW)},
    {OF_RUN("key-type", HOW)},
    {OF_RUN("gpu-memory", HOW)},
    {OF_RUN("device-memory", HOW)},
    {OF_RUN("host-memory", HOW),
     .text = "the KV cache's host memory; 0: what the sequences and one depth need"},
    {OF_RUN("prefix-memory", HOW)},
    {OF_RUN("slots", HOW)},
    {OF_RUN("no-elastic", HOW)},
    {OF_RUN("offload-layers", HOW)},
    {OF_RUN("no-offload", HOW)},
    {OF_RUN("write-through", HOW)},
    {OF_RUN("cores", HOW)},
    {OF_RUN("idle", HOW)},
    {OF_RUN("activations", HOW)},
    {OF_RUN("runtime", HOW)},
    {OF_RUN("log", HOW), .initial = "error"},
    {.name = "output", .letter = 'o', .kind = OPTION_CHOICE, AT(output), .argument = "FORMAT",
     .initial = "md", .choices = "md|json", .group = OUTPUT, .text = "a table or JSON, on standard output"},
    {.name = "json", .kind = OPTION_FLAG, AT(json), .group = OUTPUT, .text = "the same as --output json"},
    {.name = "paced", .kind = OPTION_FLAG, AT(paced), .group = OUTPUT,
     .text = "each repeat waits for a line on standard input and writes one"},
};
/* clang-format on */

enum { ROWS = sizeof rows / sizeof *rows };

static void make_table(struct option_entry ret[ROWS + 1])
{
    for (int i = 0; i < ROWS; i++) {
        ret[i] = rows[i];
        if (rows[i].argument || rows[i].kind == OPTION_FLAG) /* its own */
            continue;
        ret[i] = *run_options_entry(rows[i].name);
        ret[i].at += offsetof(struct bench_options, run);
        ret[i].group = rows[i].group;
        ret[i].initial = rows[i].initial ? rows[i].initial : ret[i].initial;
        ret[i].text = rows[i].text ? rows[i].text : ret[i].text;
    }
    ret[ROWS] = (struct option_entry){0};
}

static int take_depths(struct bench_options *o, struct err *err)
{
    const char *at = o->depths_text;
    for (;;) {
        char number[16];
        size_t length = strcspn(at, ",");
        if (o->depth_count == BENCH_DEPTHS_MAX)
            return err_set(err, -EINVAL, "--depth: found more than %u numbers", BENCH_DEPTHS_MAX);
        if (length >= sizeof number)
            return err_set(err, -EINVAL, "--depth: found '%s', expected numbers and commas", o->depths_text);
        memcpy(number, at, length);
        number[length] = 0;
        if (parse_u32(number, 0, LIMIT_CONTEXT, &o->depths[o->depth_count++]))
            return err_set(err, -EINVAL, "--depth: found '%s', expected 0 to %u", number, LIMIT_CONTEXT);
        if (!at[length])
            return 0;
        at += length + 1;
    }
}

static int check(struct bench_options *o, struct err *err)
{
    int r = run_options_check(&o->run, err);
    if (r)
        return r;
    if (!o->prompt && !o->decode)
        return err_set(err, -EINVAL, "--prompt and --predict: found 0 in both, expected one that is not");
    if (o->json)
        o->output = BENCH_JSON;
    r = take_depths(o, err);
    for (uint32_t i = 0; i < o->depth_count && !r; i++)
        if (o->prompt && o->depths[i] && o->run.write_through == WRITE_THROUGH_OFFLOADED)
            r = err_set(
                err, -EINVAL,
                "--write-through offloaded: a prefill at a depth begins with cached blocks, which then "
                "there are none of; expected --prompt 0 or --depth 0");
    return r;
}

int bench_options_parse(int argc, char **argv, struct bench_options *ret_options, struct err *err)
{
    struct option_entry table[ROWS + 1];
    make_table(table);
    *ret_options = (struct bench_options){0};
    int r = options_parse(table, argc, argv, ret_options, err);
    return r ? r : check(ret_options, err);
}

void bench_options_help(FILE *to)
{
    struct option_entry table[ROWS + 1];
    make_table(table);
    fputs(
        "Usage: specontext bench -m MODEL [options]\n"
        "\n"
        "Measures prefill and decode, tokens a second, through the three daemons that `run` starts: random\n"
        "tokens of a fixed seed, no tokenizer, greedy sampling. Medians, with the slowest and the fastest; "
        "then\n"
        "where the time of decode steps went, against the time that reading weights and KV alone would take\n"
        "(on a GPU: at the rate of a copy, measured in the same run).\n"
        "Exit code: 0 done, 1 failed, 2 wrong options, 130 interrupted.\n",
        to);
    options_help(table, to);
}
