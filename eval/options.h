/* What `specontext eval` may be asked for. The table in options.c is the one place that names, explains and
 * bounds each option. */
#ifndef EVAL_OPTIONS_H
#define EVAL_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"
#include "base/options.h"
#include "eval/tasks.h"
#include "eval/variant.h"

#define EVAL_LIST_MAX 16u

struct eval_list {
    uint32_t at[EVAL_LIST_MAX];
    uint32_t count;
};

struct eval_options {
    const char *model, *device;
    struct option_texts heads, files, variant_texts;
    struct variant variants[OPTION_TEXTS_MAX];                               /* of variant_texts */
    const char *budget_text, *context_text, *tasks_text, *task_context_text; /* as given */
    struct eval_list budgets, contexts, task_contexts;
    enum task_kind tasks[TASK_COUNT];
    uint32_t task_count;

    uint32_t from, positions, steps;
    uint32_t sinks, window, pool; /* pool: 0 as the head recommends, 1 max, 2 mean */
    uint32_t keys;                /* enum compute_keys */
    bool no_texts, no_mass, no_forced;

    uint32_t items;
    uint32_t seed;
    float task_floor;
    const char *chat_template;

    uint32_t long_generation, long_prompt, long_prompts, long_seeds;
    float temperature;

    bool json;
    const char *json_file, *plot;
    uint32_t cores, activations, batch;
};

/* 0; 1 when help was asked for; -EINVAL with one line that names the option. Strings lead into argv. */
int eval_options_parse(int argc, char **argv, struct eval_options *ret_options, struct err *err);
void eval_options_help(FILE *to);

#endif
