/* One way to choose at one budget, followed through consecutive positions of a sequence: its sets as lists
 * for attention, how much neighbours share, and what elastic loading would load. */
#ifndef EVAL_LANE_H
#define EVAL_LANE_H

#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "eval/chooser.h"
#include "eval/sets.h"

struct lane;

struct lane_figures {
    double overlap;       /* of adjacent selections, sinks and window left out; NaN when there were no two */
    double saved;         /* share of row bytes that were not loaded again, slots = 2 budgets */
    double saved_default; /* the same with the store's default, 1.5 budgets */
};

/* `chooser` is borrowed; `capacity` positions. */
struct lane *lane_create(const struct model_config *model, struct chooser *chooser,
                         const struct choice *choice, uint32_t capacity);
void lane_free(struct lane **lane);

/* A new sequence: the next set has no predecessor. What was counted stays. */
void lane_restart(struct lane *lane);

/* The sets for the chooser's newest token at `position`; [groups][kv_heads], valid until the next call. */
const struct attn_list *lane_choose(struct lane *lane, uint32_t position);

const uint32_t *lane_group_of(const struct lane *lane); /* [layers] */
struct chooser *lane_chooser(const struct lane *lane);

struct lane_figures lane_figures(const struct lane *lane);

#endif
