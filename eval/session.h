/* What all measurements share: the model, the choosers' heads, the texts. One thread. */
#ifndef EVAL_SESSION_H
#define EVAL_SESSION_H

#include <stdint.h>

#include "base/err.h"
#include "eval/chooser.h"
#include "eval/engine.h"
#include "eval/options.h"
#include "eval/report.h"

struct session_head {
    const char *name;  /* as it was asked for, or the path that stood for the default */
    struct head *head; /* NULL: newest positions */
    char *path;        /* owned; NULL: `name` is the caller's */
};

struct session_text {
    const char *name;
    struct token_buf tokens;
};

struct session {
    const struct eval_options *options;
    struct engine engine;
    uint32_t context; /* the longest that anything asks for */
    struct session_head heads[OPTION_TEXTS_MAX];
    uint32_t head_count;
    struct session_text texts[OPTION_TEXTS_MAX];
    uint32_t text_count;
    struct eval_list contexts, task_contexts; /* with defaults, none above the model's */
};

/* 0 or negative with one line. */
int session_open(const struct eval_options *options, struct session *ret, struct err *err);
void session_close(struct session *session); /* accepts a zeroed object */

/* A chooser of head `index`, for the session's context. */
int session_chooser(struct session *session, uint32_t index, struct chooser **ret, struct err *err);

/* Lanes for every head (outer) and budget (inner), `capacity` positions each. With `apart` each lane has a
 * chooser of its own, else those of a head share one. */
struct session_lanes {
    struct lane **at;
    uint32_t count;
    struct chooser **choosers;
    uint32_t chooser_count;
};
int session_lanes(struct session *session, uint32_t capacity, bool apart, struct session_lanes *ret,
                  struct err *err);
void session_lanes_free(struct session_lanes *lanes); /* accepts a zeroed object; leaves one */

uint32_t session_head_of(const struct session *session, uint32_t lane);   /* index into heads */
uint32_t session_budget_of(const struct session *session, uint32_t lane); /* positions */

/* One line to standard error, where a terminal also shows how far the model has come. */
void session_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Takes that line away. */
void session_clear(void);

/* Figures of all texts: rows [context][head][budget], allocated here. */
int measure_texts(struct session *session, struct report_row **ret_rows, uint32_t *ret_count,
                  struct err *err);

/* All tasks: [length][task][head][budget]. */
int answer_tasks(struct session *session, struct report_task **ret_tasks, uint32_t *ret_count,
                 struct err *err);

/* Long generations: greedy, then sampled; in each full attention, then [head][budget]. */
int generate_long(struct session *session, struct report_generation **ret, uint32_t *ret_count,
                  struct err *err);

/* Share of the n-grams of ids that are distinct; NaN for fewer than n ids. */
double generate_distinct(const uint32_t *ids, uint32_t count, uint32_t n);

#endif
