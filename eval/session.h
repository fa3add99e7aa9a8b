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

/* One way to choose: a row of every table. Heads (outer) and budgets (inner), then the variants. */
struct session_way {
    uint32_t head; /* index into heads */
    const struct variant *variant;
    const char *name; /* the head's, or the variant's text */
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
    struct variant *plain; /* [heads * budgets] */
    struct session_way ways[ENGINE_LANES];
    uint32_t way_count;
    uint32_t families; /* of 1 + way_count sequences, that are computed together */
    struct session_text texts[OPTION_TEXTS_MAX];
    uint32_t text_count;
    struct eval_list contexts, task_contexts; /* with defaults, none above the model's */
};

/* 0 or negative with one line. */
int session_open(const struct eval_options *options, struct session *ret, struct err *err);
void session_close(struct session *session); /* accepts a zeroed object */

/* A chooser for a way, for the session's context. */
int session_chooser(struct session *session, uint32_t way, struct chooser **ret, struct err *err);

/* Whether two ways can share a chooser: not when what it looks at follows from the sets. */
bool session_alike(const struct session *session, uint32_t way, uint32_t other);

/* `families` times a lane for each way, `capacity` positions each. With `apart` each lane has a chooser of
 * its own, else those of a family that are alike share one. `loads` as in lane.h. */
struct session_lanes {
    struct lane **at; /* [families][ways] */
    uint32_t count;
    struct chooser **choosers;
    uint32_t chooser_count;
};
struct session_lanes_options {
    uint32_t families, capacity;
    bool apart, loads;
};
int session_lanes(struct session *session, const struct session_lanes_options *options,
                  struct session_lanes *ret, struct err *err);
void session_lanes_free(struct session_lanes *lanes); /* accepts a zeroed object; leaves one */

/* One line to standard error, where a terminal also shows how far the model has come. */
void session_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Takes that line away. */
void session_clear(void);

/* The three below allocate what they return, also when they fail; with -ECANCELED (engine_interrupted) it is
 * what was measured by then, and a count is 0 when that is nothing. */

/* Figures of all texts: rows [context][way]. */
int measure_texts(struct session *session, struct report_row **ret_rows, uint32_t *ret_count,
                  struct err *err);

/* All tasks: [length][task][way]. */
int answer_tasks(struct session *session, struct report_task **ret_tasks, uint32_t *ret_count,
                 struct err *err);

/* Long generations: greedy, then sampled; in each full attention, then [way]. */
int generate_long(struct session *session, struct report_generation **ret, uint32_t *ret_count,
                  struct err *err);

/* Share of the n-grams of ids that are distinct; NaN for fewer than n ids. */
double generate_distinct(const uint32_t *ids, uint32_t count, uint32_t n);

#endif
