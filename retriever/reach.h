/* How many of the best positions a list gets: a fixed number, or as many as hold a given share of the head's
 * weight. PROTOCOL.md section 5, "Length of a list". Pure but for the scratch; results depend on the input
 * alone. */
#ifndef RETRIEVER_REACH_H
#define RETRIEVER_REACH_H

#include <stdbool.h>
#include <stdint.h>

#include "model/calibration.h"

#define REACH_LEAST 64u /* picked positions that a list keeps where it could do with fewer */

struct reach_rule {
    uint32_t k;            /* picked positions of the base budget */
    uint32_t k_max;        /* of the largest one; k <= k_max */
    float min_mass, top_p; /* 0 to 1; 0: off */
};

struct reach_input {      /* of one list */
    const float *weights; /* [count]: of the positions that may be picked */
    uint32_t count;
    double outside, all; /* weight that is attended anyhow; of all positions */
    const struct calibration *calibration;
};

/* Each [count]. */
struct reach_scratch {
    uint32_t *topk, *index;
    float *weights;
};

struct reach_result {
    double mass, mass_base; /* calibrated; NaN when the weights are not finite */
    bool grown;             /* longer than k */
    bool is_short;          /* min_mass is not reached by k_max either */
};

/* Indices of the positions picked, ascending, into ret_index [min(k_max, count)]; returns their number. Of
 * equal weights the lower index wins. */
uint32_t reach_pick(uint32_t *ret_index, const struct reach_input *input, const struct reach_rule *rule,
                    const struct reach_scratch *scratch, struct reach_result *ret);

#endif
