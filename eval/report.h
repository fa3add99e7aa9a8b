/* What was measured: as tables for people, as JSON for programs. */
#ifndef EVAL_REPORT_H
#define EVAL_REPORT_H

#include <stdbool.h>
#include <stdio.h>

#include "base/err.h"
#include "eval/forced.h"
#include "eval/lane.h"
#include "eval/mass.h"
#include "eval/options.h"
#include "eval/tasks.h"

/* One way to choose at one context, over all texts. `head`: a head's name, or a variant's text. */
struct report_row {
    const char *head;
    uint32_t budget, context, from;
    uint32_t texts;
    struct mass_figures mass;
    double *by_head; /* [layers][heads], owned: mass */
    uint32_t layers, heads;
    struct lane_counts counts;
    struct lane_figures lane; /* of counts */
    struct forced_sums forced;
};

/* One (head, budget, length, task); paired: both attentions answer the same items. */
struct report_task {
    const char *head;
    uint32_t budget, context;
    enum task_kind task;
    uint32_t items;
    double full, sparse;    /* mean scores */
    uint32_t better, worse; /* items where sparse scored higher, lower */
    double squares;         /* sum of the squares of sparse - full */
};

/* One (head, budget) of a long generation, over texts and samples; head NULL: full attention. */
struct report_generation {
    const char *head;
    uint32_t budget;
    uint32_t texts, prompt, tokens; /* tokens: generated in all */
    bool sampled;
    uint32_t streams;
    double loss;                 /* sum over streams of each one's mean -log p under full attention */
    double worse, worse_squares; /* the same less that of full attention's stream beside it, and squared */
    double distinct[4];          /* share of distinct n-grams among all, n = 1 .. 4 */
};

struct report {
    const struct eval_options *options;
    const char *model_name;
    const struct report_row *rows;
    uint32_t row_count;
    const struct report_task *tasks;
    uint32_t task_count;
    const struct report_generation *generations;
    uint32_t generation_count;
    bool incomplete; /* interrupted or failed: figures are of a part of what was asked for */
};

void report_tables(const struct report *report, FILE *to);
void report_json(const struct report *report, FILE *to);

/* The same JSON as a file, whole or not at all. Errno of the system. */
int report_json_file(const struct report *report, const char *path, struct err *err);

/* Mass over budget and over position, as SVG; whole or not at all. Errno of the system. */
int report_plot(const struct report *report, const char *path, struct err *err);

#endif
