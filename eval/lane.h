/* One way to choose at one budget, followed through consecutive positions of a sequence: its sets as lists
 * for attention, how much neighbours share, and what elastic loading would load. */
#ifndef EVAL_LANE_H
#define EVAL_LANE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "eval/chooser.h"
#include "eval/look.h"
#include "eval/pins.h"
#include "eval/sets.h"
#include "proto/control.h"

struct lane;

/* Who picks. Oracles go by the weights that full attention gives to the token in work, as look.h has them: KV
 * and queries are those of full attention, not of the lane. Both sets of a step are made before any layer of
 * the lane is computed, out of the same look. What they attain no head of that shape is likely to beat; mass
 * does not tell all, so it is no proof. */
enum oracle {
    ORACLE_NONE,   /* the chooser */
    ORACLE_HEADS,  /* for each layer and head the best set there */
    ORACLE_GROUPS, /* for each of the chooser's groups and each head one set: the best by the mean over the
                    * group's layers */
};

struct lane_options {
    const struct model_config *model;
    struct chooser *chooser; /* borrowed */
    struct choice choice;
    const uint32_t *group_budgets; /* [chooser_groups] in place of the choice's, each above sinks and window;
                                    * NULL: one budget. Not with pins, lists by mass and ORACLE_HEADS */
    enum selection_mode selection; /* mixed: the first third of the layers takes the previous set */
    float pins;                    /* share of the picked positions; see pins.h */
    uint32_t pin_layers;           /* 0: those of each group */
    enum oracle oracle;            /* with SELECTION_CURRENT, without pins */
    uint32_t capacity;             /* positions */
    bool loads;                    /* count what elastic loading loads; not with ORACLE_HEADS */
};

enum { LANE_LOADERS = 2 }; /* slots = 2 budgets; the store's default, 1.5 budgets */

/* Sums, over positions. */
struct lane_counts {
    uint64_t common, selected;                          /* picked positions of adjacent sets */
    uint64_t attended, lists;                           /* length of each layer's lists, and their number */
    uint64_t loaded[LANE_LOADERS], whole[LANE_LOADERS]; /* rows of one layer */
};

struct lane_figures {
    double overlap;       /* of adjacent selections, sinks and window left out; NaN when there were no two */
    double saved;         /* share of row bytes that were not loaded again, slots = 2 budgets */
    double saved_default; /* the same with the store's default, 1.5 budgets */
    double attended;      /* mean length of a list, over layers and heads */
};

struct lane *lane_create(const struct lane_options *options);
void lane_free(struct lane **lane);

/* A new sequence: the next set has no predecessor. What was counted stays. */
void lane_restart(struct lane *lane);

/* Whether the last token of a prompt must be weighed, and lane_prime called, before the first lane_choose:
 * the set it makes is the first that is used. */
bool lane_needs_prime(const struct lane *lane);
void lane_prime(struct lane *lane, uint32_t position);

/* Whether it keeps what a prompt's end looked at: then lane_pin comes behind lane_restart. */
bool lane_wants_pins(const struct lane *lane);
void lane_pin(struct lane *lane, const struct pins *pins);

/* The sets that the newest token, at `position`, attends; [lists of the group][kv_heads], valid until the
 * next call. The chooser holds that token's weights. */
const struct attn_list *lane_choose(struct lane *lane, uint32_t position);

/* Whether an oracle picks: then lane_choose_by takes lane_choose's place, and the chooser is not asked for
 * weights: it need not be fed. */
bool lane_knows(const struct lane *lane);
const struct attn_list *lane_choose_by(struct lane *lane, const struct look *look);

const uint32_t *lane_group_of(const struct lane *lane); /* [layers], for those lists */
struct chooser *lane_chooser(const struct lane *lane);

const struct lane_counts *lane_counts(const struct lane *lane);
void lane_counts_add(struct lane_counts *to, const struct lane_counts *from);
struct lane_figures lane_figures(const struct lane_counts *counts);

#endif
