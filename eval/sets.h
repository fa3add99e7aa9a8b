/* Sets of positions that one query attends, and what they are worth. Pure functions.
 *
 * A set is sinks, picks and the newest positions: [0, sinks), k of [sinks, limit), [limit, position]; the
 * budget counts all of it. The rule is the retriever's (PROTOCOL.md, section on selections). */
#ifndef EVAL_SETS_H
#define EVAL_SETS_H

#include <stdint.h>

#include "retriever/positions.h"
#include "retriever/reach.h"

struct choice {
    uint32_t budget, sinks, window; /* budget > sinks + window */
    uint32_t max_budget;            /* 0: budget */
    float min_mass, top_p;          /* 0: off; PROTOCOL.md section 5, "Length of a list" */
};

uint32_t sets_longest(const struct choice *choice); /* positions of the longest set */

struct span {
    uint32_t position;           /* of the query */
    uint32_t sinks, limit, most; /* `most` = min(k, limit - sinks) positions of [sinks, limit) are picked */
};

struct span sets_span(const struct choice *choice, uint32_t position);

/* The `most` positions of the largest weights, ascending, ties to the lower one. weights [position + 1];
 * scratch [position + 1]. */
void sets_pick(struct positions *ret, const float *weights, const struct span *span, uint32_t *scratch);

/* The same, or as many as hold the mass that the choice asks for; `calibration` may be NULL: the weights are
 * the mass itself. Scratch [position + 1] each. */
void sets_choose(struct positions *ret, const float *weights, const struct choice *choice,
                 const struct span *span, const struct calibration *calibration,
                 const struct reach_scratch *scratch);

/* The whole set, ascending, into ret [budget]; returns its length. */
uint32_t sets_attended(uint32_t *ret, const struct span *span, const struct positions *picks);

/* Sum of the weights on the set. */
double sets_mass(const float *weights, const struct span *span, const struct positions *picks);

/* Positions that both lists have. */
uint32_t sets_common(const struct positions *a, const struct positions *b);

/* Sum of the weights on the newest `budget` positions, and on `sinks` and the newest budget - sinks. */
double sets_mass_newest(const float *weights, const struct choice *choice, uint32_t position);
double sets_mass_sinks_newest(const float *weights, const struct choice *choice, uint32_t position);

#endif
