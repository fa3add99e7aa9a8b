/* The options of `specontext run`: table, defaults, and what must hold between them. No state. */
#include "launch/run_options.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "base/awake.h"
#include "base/check.h"
#include "base/thread.h"
#include "compute/gpu.h"
#include "proto/control.h"
#include "proto/limits.h"
#include "proto/memory.h"

#define AT(field) .at = offsetof(struct run_options, field)

#define PROMPT    "Model and prompt"
#define ATTENTION "Attention"
#define MEMORY    "Memory"
#define SAMPLING  "Sampling"
#define PROGRAM   "Program"

/* A table reads best as rows. */
/* clang-format off */
static const struct option_entry table[] = {
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(model), .argument = "FILE", .group = PROMPT,
     .text = "the model: a GGUF file or a Hugging Face folder"},
    {.name = "head", .letter = 'H', .kind = OPTION_TEXT, AT(head), .argument = "FILE", .group = PROMPT,
     .text = "the retrieval head (default: one that comes along, else one cut from the model)"},
    {.name = "prompt", .letter = 'p', .kind = OPTION_TEXT, AT(prompt), .argument = "TEXT", .group = PROMPT,
     .text = "the prompt; follows the text of --file"},
    {.name = "file", .letter = 'f', .kind = OPTION_TEXT, AT(file), .argument = "FILE", .group = PROMPT,
     .text = "a file with the prompt, or its first part; -: standard input"},
    {.name = "prompts", .kind = OPTION_TEXT, AT(prompts), .argument = "FILE", .group = PROMPT,
     .text = "many prompts, one JSON string a line, run as one batch"},
    {.name = "predict", .letter = 'n', .kind = OPTION_UINT, AT(tokens), .argument = "N", .initial = "256",
     .least = 0, .most = LIMIT_CONTEXT, .group = PROMPT, .text = "most tokens to generate"},
    {.name = "ctx-size", .letter = 'c', .kind = OPTION_UINT, AT(context), .argument = "N", .initial = "0",
     .least = 0, .most = LIMIT_CONTEXT, .group = PROMPT,
     .text = "positions of a sequence; 0: as the model was made"},
    {.name = "chat", .kind = OPTION_FLAG, AT(chat), .group = PROMPT,
     .text = "put the prompt into the model's chat template"},
    {.name = "chat-template", .kind = OPTION_TEXT, AT(chat_template), .argument = "NAME|FILE",
     .group = PROMPT,
     .text = "another template than the model's, with --chat: a name (see README.md) or a file"},
    {.name = "system", .kind = OPTION_TEXT, AT(system), .argument = "TEXT", .group = PROMPT,
     .text = "the system message, with --chat"},
    {.name = "ignore-eos", .kind = OPTION_FLAG, AT(ignore_eos), .group = PROMPT,
     .text = "go on after the model's end of text"},
    {.name = "attention", .kind = OPTION_CHOICE, AT(attention), .argument = "KIND", .initial = "sparse",
     .choices = "sparse|full", .group = ATTENTION, .text = "read what the head picked, or everything"},
    {.name = "budget", .kind = OPTION_UINT, AT(budget), .argument = "N", .initial = "1024", .least = 2,
     .most = LIMIT_CONTEXT, .group = ATTENTION, .text = "positions attended, sinks and window included"},
    {.name = "min-mass", .kind = OPTION_FLOAT, AT(min_mass), .argument = "X", .initial = "0", .least = 0,
     .most = 1, .group = ATTENTION,
     .text = "budgets grow where the head gives their positions less than this share; 0: never"},
    {.name = "max-budget", .kind = OPTION_UINT, AT(max_budget), .argument = "N", .initial = "0", .least = 0,
     .most = LIMIT_CONTEXT, .group = ATTENTION,
     .text = "with --min-mass: the most they grow to; 0: two budgets"},
    {.name = "budget-top-p", .kind = OPTION_FLOAT, AT(budget_top_p), .argument = "P", .initial = "0",
     .least = 0, .most = 1, .group = ATTENTION,
     .text = "only as many positions of the budget as make this share; 0: all"},
    {.name = "sinks", .kind = OPTION_UINT, AT(sinks), .argument = "N", .initial = "4", .least = 0,
     .most = LIMIT_CONTEXT, .group = ATTENTION, .text = "first positions, always attended"},
    {.name = "window", .kind = OPTION_UINT, AT(window), .argument = "N", .initial = "64", .least = 0,
     .most = LIMIT_CONTEXT, .group = ATTENTION, .text = "last positions, always attended"},
    {.name = "selection", .kind = OPTION_CHOICE, AT(selection), .argument = "MODE", .initial = "current",
     .choices = "current|previous|mixed", .group = ATTENTION,
     .text = "the token that a selection is made from"},
    {.name = "pool", .kind = OPTION_CHOICE, AT(pool), .argument = "KIND", .initial = "head",
     .choices = "head|max|mean", .group = ATTENTION, .text = "how query heads share a selection"},
    {.name = "device", .kind = OPTION_TEXT, AT(device), .argument = "NAME", .initial = "cpu", .group = MEMORY,
     .text = "where the model computes: cpu, cuda, cuda:N or the UUID of a GPU"},
    {.name = "retriever-device", .kind = OPTION_TEXT, AT(retriever_device), .argument = "NAME",
     .group = MEMORY, .text = "where the retrieval head computes (default: as --device)"},
    {.name = "key-type", .kind = OPTION_CHOICE, AT(keys), .argument = "KIND", .initial = "auto",
     .choices = COMPUTE_KEYS_CHOICES, .group = MEMORY,
     .text = "the retriever's keys; auto: int8 on a GPU, else f16"},
    {.name = "gpu-memory", .kind = OPTION_SIZE, AT(gpu_memory), .argument = "SIZE", .initial = "0",
     .group = MEMORY, .text = "memory of the card for all parts together; 0: 90 % of what is free"},
    {.name = "device-memory", .kind = OPTION_SIZE, AT(device_memory), .argument = "SIZE", .initial = "0",
     .group = MEMORY, .text = "the KV cache's device memory; 0: 256M, on a GPU what --gpu-memory leaves"},
    {.name = "host-memory", .kind = OPTION_SIZE, AT(host_memory), .argument = "SIZE", .initial = "0",
     .group = MEMORY, .text = "the KV cache's host memory; 0: half of the machine's"},
    {.name = "slots", .kind = OPTION_UINT, AT(slots), .argument = "N", .initial = "0", .least = 0,
     .most = LIMIT_SLOTS, .group = MEMORY,
     .text = "rows of an offloaded layer on the device, a head; 0: 1.5 of the largest budget"},
    {.name = "sequences", .kind = OPTION_UINT, AT(sequences), .argument = "N", .initial = "0", .least = 0,
     .most = LIMIT_SEQUENCES, .group = MEMORY, .text = "prompts that run at the same time; 0: up to 32"},
    {.name = "no-elastic", .kind = OPTION_FLAG, AT(no_elastic), .group = MEMORY,
     .text = "load every selection whole, at each step"},
    {.name = "no-prefix", .kind = OPTION_FLAG, AT(no_prefix), .group = MEMORY,
     .text = "do not start from KV of an equal beginning"},
    {.name = "prefix-memory", .kind = OPTION_SIZE, AT(prefix_memory), .argument = "SIZE", .initial = "256M",
     .group = MEMORY, .text = "with a head that reads hidden states: host memory for its keys of beginnings"},
    {.name = "offload-layers", .kind = OPTION_UINT, AT(offload_layers), .argument = "N", .initial = "0",
     .least = 0, .most = LIMIT_LAYERS, .group = MEMORY,
     .text = "offload at least the last N layers, whatever the device holds"},
    {.name = "no-offload", .kind = OPTION_FLAG, AT(no_offload), .group = MEMORY,
     .text = "keep every layer on the device"},
    {.name = "write-through", .kind = OPTION_CHOICE, AT(write_through), .argument = "LAYERS",
     .initial = "all", .choices = WRITE_THROUGH_CHOICES, .group = MEMORY,
     .text = "host memory has all layers, or only those that are ever offloaded"},
    {.name = "temp", .kind = OPTION_FLOAT, AT(temperature), .argument = "T", .initial = "0", .least = 0,
     .most = 100, .group = SAMPLING, .text = "temperature; 0: always the likeliest token"},
    {.name = "top-k", .kind = OPTION_UINT, AT(top_k), .argument = "N", .initial = "40", .least = 0,
     .group = SAMPLING, .text = "only the N likeliest; 0: all"},
    {.name = "top-p", .kind = OPTION_FLOAT, AT(top_p), .argument = "P", .initial = "0.95", .least = 0,
     .most = 1, .group = SAMPLING, .text = "only the likeliest of this joint probability"},
    {.name = "min-p", .kind = OPTION_FLOAT, AT(min_p), .argument = "P", .initial = "0.05", .least = 0,
     .most = 1, .group = SAMPLING, .text = "only those of this share of the likeliest's probability"},
    {.name = "repeat-penalty", .kind = OPTION_FLOAT, AT(repeat_penalty), .argument = "X", .initial = "1",
     .least = 0.01, .most = 100, .group = SAMPLING,
     .text = "divides the logits of what came before; 1: off"},
    {.name = "presence-penalty", .kind = OPTION_FLOAT, AT(presence_penalty), .argument = "X",
     .initial = "0", .least = -2, .most = 2, .group = SAMPLING,
     .text = "subtracted once from what came before"},
    {.name = "frequency-penalty", .kind = OPTION_FLOAT, AT(frequency_penalty), .argument = "X",
     .initial = "0", .least = -2, .most = 2, .group = SAMPLING,
     .text = "subtracted for each time it came before"},
    {.name = "repeat-last-n", .kind = OPTION_UINT, AT(repeat_last_n), .argument = "N", .initial = "64",
     .least = 0, .most = LIMIT_CONTEXT, .group = SAMPLING, .text = "tokens that penalties look back over"},
    {.name = "seed", .letter = 's', .kind = OPTION_INT64, AT(seed), .argument = "N", .initial = "-1",
     .least = -1, .group = SAMPLING, .text = "seed of the random choices; -1: a new one"},
    {.name = "report", .kind = OPTION_TEXT, AT(report), .argument = "FILE", .group = PROGRAM,
     .text = "write figures and text as JSON"},
    {.name = "cores", .kind = OPTION_UINT, AT(cores), .argument = "N", .initial = "0", .least = 0,
     .most = 1024, .group = PROGRAM, .text = "cores to use, divided among the parts; 0: all"},
    {.name = "idle", .kind = OPTION_CHOICE, AT(idle), .argument = "KIND", .initial = "auto",
     .choices = AWAKE_IDLE_CHOICES, .group = PROGRAM,
     .text = "idle cores while tokens are made; auto: poll on a GPU"},
    {.name = "activations", .kind = OPTION_CHOICE, AT(activations), .argument = "KIND", .initial = "f32",
     .choices = "f32|q8", .group = PROGRAM,
     .text = "what quantized weights are multiplied by; q8: rounded to 8 bits"},
    {.name = "runtime", .kind = OPTION_TEXT, AT(runtime), .argument = "DIR", .group = PROGRAM,
     .text = "directory of the sockets; without it a private one"},
    {.name = "log", .kind = OPTION_CHOICE, AT(log), .argument = "LEVEL", .initial = "warn",
     .choices = LOG_LEVELS, .group = PROGRAM, .text = "what the parts tell on standard error"},
    {.name = "poison", .kind = OPTION_FLAG, AT(poison), .text = "fill free places with NaN"},
    {0}};
/* clang-format on */

_Static_assert(SELECTION_CURRENT == 0 && SELECTION_PREVIOUS == 1 && SELECTION_MIXED == 2,
               "order of --selection");

static int check_mass(const struct run_options *o, struct err *err)
{
    const char *rule = o->min_mass > 0       ? "--min-mass"
                       : o->budget_top_p > 0 ? "--budget-top-p"
                       : o->max_budget       ? "--max-budget"
                                             : NULL;
    if (rule && o->attention == RUN_FULL)
        return err_set(err, -EINVAL, "%s: not together with --attention full", rule);
    if (o->max_budget && !(o->min_mass > 0))
        return err_set(err, -EINVAL, "--max-budget: only with --min-mass");
    if (o->max_budget && o->max_budget < o->budget)
        return err_set(err, -EINVAL, "--max-budget: found %u, expected 0 or at least --budget (%u)",
                       o->max_budget, o->budget);
    return 0;
}

uint32_t run_options_budget_max(const struct run_options *o, uint32_t context)
{
    uint64_t most = o->max_budget ? o->max_budget : o->min_mass > 0 ? 2 * (uint64_t)o->budget : o->budget;
    return most < context ? (uint32_t)most : context;
}

struct run_lists run_options_lists(const struct run_options *o, uint32_t context)
{
    struct run_lists ret = {o->budget, o->sinks, o->window};
    if (ret.budget < context)
        return ret;
    ret.budget = context;
    if (ret.sinks > context - 1)
        ret.sinks = context - 1;
    if (ret.window > context - 1 - ret.sinks)
        ret.window = context - 1 - ret.sinks;
    return ret;
}

static int check_devices(struct run_options *o, struct err *err)
{
    if (!o->retriever_device)
        o->retriever_device = o->device;
    const struct {
        const char *option, *value;
    } devices[] = {{"--device", o->device}, {"--retriever-device", o->retriever_device}};
    for (int i = 0; i < 2; i++)
        if (strcmp(devices[i].value, "cpu") != 0 && !gpu_named(devices[i].value))
            return err_set(err, -EINVAL, "%s: found %s, expected cpu, cuda, cuda:N or GPU-UUID",
                           devices[i].option, devices[i].value);
    if (o->gpu_memory && !gpu_named(o->device))
        return err_set(err, -EINVAL, "--gpu-memory: only with --device cuda");
    if (gpu_named(o->device) && o->activations)
        return err_set(err, -EINVAL, "--activations: only on the CPU; a GPU computes with bf16");
    return 0;
}

int run_options_check(struct run_options *o, struct err *err)
{
    if (!o->model)
        return err_set(err, -EINVAL, "--model is missing");
    uint64_t pinned = (uint64_t)o->sinks + o->window + 1;
    if (o->attention == RUN_SPARSE && o->budget <= pinned)
        return err_set(err, -EINVAL,
                       "--budget: found %u, expected more than sinks + window + the token itself (%llu)",
                       o->budget, (unsigned long long)pinned);
    if (o->no_offload && o->offload_layers)
        return err_set(err, -EINVAL, "--offload-layers: not together with --no-offload");
    int r = check_mass(o, err);
    if (!r)
        r = check_devices(o, err);
    return r ? r : thread_cores_check(o->cores, err);
}

/* Rules of prompts. */
static int check_prompt(const struct run_options *o, struct err *err)
{
    if (!o->prompt && !o->file && !o->prompts)
        return err_set(err, -EINVAL, "--prompt, --file or --prompts is missing");
    if (o->prompts && (o->prompt || o->file))
        return err_set(err, -EINVAL, "--prompts: not together with --prompt or --file");
    if (o->system && !o->chat)
        return err_set(err, -EINVAL, "--system: only with --chat");
    if (o->chat_template && !o->chat)
        return err_set(err, -EINVAL, "--chat-template: only with --chat");
    if (o->context == 1)
        return err_set(err, -EINVAL, "--ctx-size: found 1, expected 0 or at least 2");
    return 0;
}

const struct option_entry *run_options_entry(const char *name)
{
    const struct option_entry *e = table;
    while (e->name && strcmp(e->name, name) != 0)
        e++;
    CHECK(e->name);
    return e;
}

int run_options_parse(int argc, char **argv, struct run_options *ret_options, struct err *err)
{
    *ret_options = (struct run_options){0};
    int r = options_parse(table, argc, argv, ret_options, err);
    if (r == 0)
        r = run_options_check(ret_options, err);
    return r ? r : check_prompt(ret_options, err);
}

void run_options_help(FILE *to)
{
    fputs("Usage: specontext run -m MODEL (-p TEXT | -f FILE | --prompts FILE) [options]\n"
          "\n"
          "Answers a prompt: text goes to standard output, progress and timings to standard error.\n"
          "Exit code: 0 done, 1 failed, 2 wrong options, 130 interrupted.\n",
          to);
    options_help(table, to);
}

const char *run_options_selection_name(const struct run_options *options)
{
    static const char *const names[] = {"current", "previous", "mixed"};
    return names[options->selection];
}

const char *run_options_attention_name(const struct run_options *options)
{
    return options->attention == RUN_FULL ? "full" : "sparse";
}

const char *run_options_pool_name(const struct run_options *options)
{
    static const char *const names[] = {"head", "max", "mean"};
    return names[options->pool];
}

const char *run_options_keys_name(const struct run_options *options)
{
    static const char *const names[] = {"auto", "f16", "int8"};
    return names[options->keys];
}

bool run_options_keys_int8(const struct run_options *options)
{
    return gpu_keys_int8((enum compute_keys)options->keys, options->retriever_device);
}
