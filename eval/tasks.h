/* Long-range tasks, made by a generator: a text with something in it that an answer needs, and the answer.
 * The same (task, seed, item, units) give the same text everywhere. No state. */
#ifndef EVAL_TASKS_H
#define EVAL_TASKS_H

#include <stdint.h>

#include "model/detok.h"

/* key-value: pairs, one is asked for. needle: a number in a long report. variables: a chain of assignments.
 * passages: how many different numbered passages there are. copy: a list from the begin of the text. */
enum task_kind { TASK_KEY_VALUE, TASK_NEEDLE, TASK_VARIABLES, TASK_PASSAGES, TASK_COPY, TASK_COUNT };

#define TASK_ANSWERS_MAX 16u
#define TASK_WORD_BYTES  32u

struct task {
    struct text_buf text;                            /* what the user says; released by task_free */
    char lead[96];                                   /* what the answer begins with, given; may be "" */
    char answers[TASK_ANSWERS_MAX][TASK_WORD_BYTES]; /* words or numbers that the answer must have */
    uint32_t answer_count;
    uint32_t answer_tokens; /* enough to say them */
};

const char *task_name(enum task_kind kind);
int task_by_name(const char *name, uint64_t bytes, enum task_kind *ret); /* -ENOENT */

/* `units`: sentences, pairs or lines of the text, at least 1; more units never make a shorter text. */
void task_make(enum task_kind kind, uint64_t seed, uint32_t item, uint32_t units, struct task *ret);
void task_free(struct task *task); /* accepts a zeroed object; leaves one */

/* Share of the answers that stand in the text, each as a word of its own (0 .. 1); of a list, in its order;
 * of a number, the first one in the text must be it. */
double task_score(const struct task *task, const char *text, uint64_t bytes);

#endif
