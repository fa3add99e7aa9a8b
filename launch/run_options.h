/* What `specontext run` may be asked for. The table in run_options.c is the one place that names, explains
 * and bounds each option; README.md's list is its help. */
#ifndef LAUNCH_RUN_OPTIONS_H
#define LAUNCH_RUN_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"
#include "base/log.h"
#include "base/options.h"

enum run_attention { RUN_SPARSE, RUN_FULL };

struct run_options {
    const char *model, *head; /* paths; head NULL: made from the model and kept in the cache */
    const char *prompt, *file, *prompts, *system, *chat_template; /* NULL: not given */
    const char *report, *runtime;
    bool chat;
    bool ignore_eos;
    uint32_t tokens; /* most to generate */

    uint32_t attention; /* enum run_attention */
    uint32_t selection; /* enum selection_mode */
    uint32_t budget, sinks, window;
    uint32_t max_budget;          /* 0: default, see run_options_budget_max */
    float min_mass, budget_top_p; /* 0: off */
    uint32_t pool;                /* 0: as the head recommends, 1 max, 2 mean */
    uint32_t keys;                /* enum compute_keys */

    const char *device, *retriever_device; /* "cpu" or a GPU; the retriever's: in force after parsing */
    uint64_t gpu_memory; /* bytes of the card for all parts together; 0: 90 % of what is free */
    uint32_t context;    /* 0: the model's */
    uint64_t device_memory, host_memory; /* bytes; 0: the store's default */
    uint32_t slots, sequences;           /* 0: default */
    uint32_t offload_layers;
    uint64_t prefix_memory;
    uint32_t write_through; /* enum memory_write_through */
    bool no_elastic, no_prefix, no_offload, poison;
    uint32_t activations; /* 0 f32, 1 q8 */
    uint32_t idle;        /* enum awake_idle */
    uint32_t cores;       /* 0: all that are online */
    enum log_level log;

    float temperature, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
    uint32_t top_k, repeat_last_n;
    int64_t seed; /* -1: a random one */
};

/* The entry of an option that is there, for programs that have the same one; `at` is an offset into struct
 * run_options. */
const struct option_entry *run_options_entry(const char *name);

/* Rules between these options, whoever has them; the retriever's device is in force after it. 0 or -EINVAL
 * with one line that names the option. */
int run_options_check(struct run_options *options, struct err *err);

/* 0; 1 when help was asked for; -EINVAL with one line that names the option. Strings lead into argv. */
int run_options_parse(int argc, char **argv, struct run_options *ret_options, struct err *err);
void run_options_help(FILE *to);

/* The largest budget of a list that may grow, in a context of so many positions. */
uint32_t run_options_budget_max(const struct run_options *options, uint32_t context);

/* Budget, sinks and window as they are asked for in a context of so many positions (at least 2): a budget
 * that holds the whole context is cut to it, and then sinks and window to what it has room for. */
struct run_lists {
    uint32_t budget, sinks, window;
};
struct run_lists run_options_lists(const struct run_options *options, uint32_t context);

/* "current", "sparse", "max": a choice's name as the option spells it. */
const char *run_options_selection_name(const struct run_options *options);
const char *run_options_attention_name(const struct run_options *options);
const char *run_options_pool_name(const struct run_options *options);
const char *run_options_keys_name(const struct run_options *options);

/* Whether the retriever's keys have 8 bits; after run_options_check. */
bool run_options_keys_int8(const struct run_options *options);

#endif
