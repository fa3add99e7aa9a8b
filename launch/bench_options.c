/* The options of `specontext bench`: table, defaults, and what must hold between them. No state; main's
 * thread. It never prints errors: the caller does. */
#include "launch/bench_options.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/parse.h"
#include "base/options.h"
#include "base/thread.h"
#include "proto/limits.h"

#define AT(field) .at = offsetof(struct bench_options, field)

#define MODEL   "Model"
#define MEASURE "What is measured"
#define HOW     "How it runs"
#define OUTPUT  "Output"

/* A table reads best as rows. */
/* clang-format off */
static const struct option_entry table[] = {
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(run.model), .argument = "FILE", .group = MODEL,
     .text = "the model: a GGUF file or a Hugging Face folder"},
    {.name = "head", .letter = 'H', .kind = OPTION_TEXT, AT(run.head), .argument = "FILE", .group = MODEL,
     .text = "the retrieval head (default: one that comes along, else one cut from the model)"},
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
    {.name = "attention", .kind = OPTION_CHOICE, AT(run.attention), .argument = "KIND", .initial = "sparse",
     .choices = "sparse|full", .group = HOW, .text = "read what the head picked, or everything"},
    {.name = "selection", .kind = OPTION_CHOICE, AT(run.selection), .argument = "MODE", .initial = "current",
     .choices = "current|previous|mixed", .group = HOW, .text = "the token that a selection is made from"},
    {.name = "budget", .kind = OPTION_UINT, AT(run.budget), .argument = "N", .initial = "1024", .least = 2,
     .most = LIMIT_CONTEXT, .group = HOW, .text = "positions attended, sinks and window included"},
    {.name = "min-mass", .kind = OPTION_FLOAT, AT(run.min_mass), .argument = "X", .initial = "0", .least = 0,
     .most = 1, .group = HOW,
     .text = "budgets grow where the head gives their positions less than this share; 0: never"},
    {.name = "max-budget", .kind = OPTION_UINT, AT(run.max_budget), .argument = "N", .initial = "0",
     .least = 0, .most = LIMIT_CONTEXT, .group = HOW,
     .text = "with --min-mass: what they grow to, then resident layers attend all; 0: two budgets"},
    {.name = "budget-top-p", .kind = OPTION_FLOAT, AT(run.budget_top_p), .argument = "P", .initial = "0",
     .least = 0, .most = 1, .group = HOW,
     .text = "only as many positions of the budget as make this share; 0: all"},
    {.name = "sinks", .kind = OPTION_UINT, AT(run.sinks), .argument = "N", .initial = "4", .least = 0,
     .most = LIMIT_CONTEXT, .group = HOW, .text = "first positions, always attended"},
    {.name = "window", .kind = OPTION_UINT, AT(run.window), .argument = "N", .initial = "64", .least = 0,
     .most = LIMIT_CONTEXT, .group = HOW, .text = "last positions, always attended"},
    {.name = "device", .kind = OPTION_TEXT, AT(run.device), .argument = "NAME", .initial = "cpu",
     .group = HOW, .text = "where the model computes: cpu, cuda, cuda:N or the UUID of a GPU"},
    {.name = "retriever-device", .kind = OPTION_TEXT, AT(run.retriever_device), .argument = "NAME",
     .group = HOW, .text = "where the retrieval head computes (default: as --device)"},
    {.name = "gpu-memory", .kind = OPTION_SIZE, AT(run.gpu_memory), .argument = "SIZE", .initial = "0",
     .group = HOW, .text = "memory of the card for all parts together; 0: 90 % of what is free"},
    {.name = "device-memory", .kind = OPTION_SIZE, AT(run.device_memory), .argument = "SIZE", .initial = "0",
     .group = HOW, .text = "the KV cache's device memory; 0: 256M, on a GPU what --gpu-memory leaves"},
    {.name = "host-memory", .kind = OPTION_SIZE, AT(run.host_memory), .argument = "SIZE", .initial = "0",
     .group = HOW, .text = "the KV cache's host memory; 0: what the sequences and one depth need"},
    {.name = "slots", .kind = OPTION_UINT, AT(run.slots), .argument = "N", .initial = "0", .least = 0,
     .most = 65534 /* the store counts them in 16 bits */, .group = HOW,
     .text = "rows of an offloaded layer on the device, a head; 0: 1.5 of the largest budget"},
    {.name = "no-elastic", .kind = OPTION_FLAG, AT(run.no_elastic), .group = HOW,
     .text = "load every selection whole, at each step"},
    {.name = "offload-layers", .kind = OPTION_UINT, AT(run.offload_layers), .argument = "N", .initial = "0",
     .least = 0, .most = LIMIT_LAYERS, .group = HOW,
     .text = "offload at least the last N layers, whatever the device holds"},
    {.name = "no-offload", .kind = OPTION_FLAG, AT(run.no_offload), .group = HOW,
     .text = "keep every layer on the device"},
    {.name = "cores", .kind = OPTION_UINT, AT(run.cores), .argument = "N", .initial = "0", .least = 0,
     .most = 1024, .group = HOW, .text = "cores to use, divided among the parts; 0: all"},
    {.name = "activations", .kind = OPTION_CHOICE, AT(run.activations), .argument = "KIND", .initial = "f32",
     .choices = "f32|q8", .group = HOW, .text = "what products with quantized weights take"},
    {.name = "runtime", .kind = OPTION_TEXT, AT(run.runtime), .argument = "DIR", .group = HOW,
     .text = "directory of the sockets; without it a private one"},
    {.name = "log", .kind = OPTION_CHOICE, AT(run.log), .argument = "LEVEL", .initial = "error",
     .choices = "error|warn|info|debug", .group = HOW, .text = "what the parts tell on standard error"},
    {.name = "output", .letter = 'o', .kind = OPTION_CHOICE, AT(output), .argument = "FORMAT",
     .initial = "md", .choices = "md|json", .group = OUTPUT, .text = "a table or JSON, on standard output"},
    {.name = "json", .kind = OPTION_FLAG, AT(json), .group = OUTPUT, .text = "the same as --output json"},
    {.name = "paced", .kind = OPTION_FLAG, AT(paced), .group = OUTPUT,
     .text = "each repeat waits for a line on standard input and writes one"},
    {0}};
/* clang-format on */

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
    if (!o->run.model)
        return err_set(err, -EINVAL, "--model is missing");
    if (!o->prompt && !o->decode)
        return err_set(err, -EINVAL, "--prompt and --predict: found 0 in both, expected one that is not");
    uint64_t pinned = (uint64_t)o->run.sinks + o->run.window + 1;
    if (o->run.attention == RUN_SPARSE && o->run.budget <= pinned)
        return err_set(err, -EINVAL,
                       "--budget: found %u, expected more than sinks + window + the token itself (%llu)",
                       o->run.budget, (unsigned long long)pinned);
    int r = run_options_check_mass(&o->run, err);
    if (r)
        return r;
    r = run_options_check_offload(&o->run, err);
    if (r)
        return r;
    r = thread_cores_check(o->run.cores, err);
    if (r)
        return r;
    if (o->json)
        o->output = BENCH_JSON;
    return take_depths(o, err);
}

int bench_options_parse(int argc, char **argv, struct bench_options *ret_options, struct err *err)
{
    *ret_options = (struct bench_options){0};
    int r = options_parse(table, argc, argv, ret_options, err);
    if (r == 0)
        r = check(ret_options, err);
    return r ? r : run_options_check_devices(&ret_options->run, err);
}

void bench_options_help(FILE *to)
{
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
