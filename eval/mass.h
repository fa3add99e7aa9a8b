/* Attention mass: the share of the model's attention weight that falls on a set; for a chooser's sets and,
 * beside them, for sets that know the weights (oracles) and sets that look at nothing. */
#ifndef EVAL_MASS_H
#define EVAL_MASS_H

#include <stdint.h>

#include "eval/chooser.h"
#include "eval/look.h"
#include "eval/sets.h"

#define MASS_BINS 8u /* equal parts of the positions that are looked at */

/* Means, over positions, layers and KV heads; NaN when nothing was looked at. */
struct mass_figures {
    double mean, p10;               /* p10: 10th percentile over (position, layer, head) */
    double worst_layer, worst_head; /* the lowest mean of a layer, of a (layer, head) */
    uint32_t worst_layer_at, worst_head_at[2];
    double hit_rate;          /* share of the model's own Top-K, each layer's and head's, that was picked */
    double batch, batch_hits; /* the same with one set for all heads of a group */
    double best_head;         /* best set of each layer and head */
    double best_group;        /* best sets of the chooser's own shape: one a (group, head) */
    double best_shared;       /* one a head, for all layers */
    double best_batch;        /* one for all layers and heads */
    double newest, sinks_newest;
    double at[MASS_BINS]; /* mean by position */
    double best_head_at[MASS_BINS], best_group_at[MASS_BINS], sinks_newest_at[MASS_BINS];
};

struct mass;

struct mass *mass_create(uint32_t layers, uint32_t heads);
void mass_free(struct mass **mass);

/* One position. The chooser stands at it, with weights; `bin` < MASS_BINS. */
void mass_add(struct mass *mass, const struct look *look, struct chooser *chooser,
              const struct choice *choice, uint32_t bin);

/* Mean mass of each layer and head: ret [layers][heads], NaN as above. */
void mass_by_head(const struct mass *mass, double *ret);

struct mass_figures mass_figures(const struct mass *mass);

#endif
