/* From queries and keys to selected positions: weights, Top-K, and the difference to the set before. */
#ifndef RETRIEVER_RANK_H
#define RETRIEVER_RANK_H

#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "model/head.h"
#include "retriever/positions.h"
#include "retriever/reach.h"

struct rank;

/* For up to `context` keys. `compute` is borrowed; further ones are made so that each of its threads can
 * work on an item of its own. Memory: one [kv_heads][context] of weights and one [context] of scratch a
 * thread. */
int rank_create(const struct head_config *head, enum head_pool pool, uint32_t context, int threads,
                enum compute_isa isa, struct compute *compute, struct rank **ret_rank, struct err *err);
void rank_free(struct rank **rank);

/* One (sequence, layer group). Pointers lead to [kv_heads] of what they name. The lists' room is the
 * caller's: min(k_max, limit - sinks) for now and added, before[h].count for removed. */
struct rank_item {
    struct key_view keys;   /* of positions 0 .. t, where t is the token that q was made from */
    const float *q;         /* [q_heads][head_dim]; NULL on a GPU (card.h), where keys give a count only */
    uint32_t sinks;         /* Top-K picks among [sinks, limit); what lies outside, up to t, is attended */
    uint32_t limit;         /* sinks <= limit */
    struct reach_rule rule; /* how many it picks */
    struct positions *now;
    const struct positions *before; /* NULL: no difference is wanted */
    struct positions *added, *removed;
    struct reach_result *found; /* masses of all that is attended */
};

struct rank_times {
    int64_t score_ns, topk_ns, encode_ns; /* add up to the time of the call */
};

/* Fills the list of head `h` of an item, and what was found of it, from the weights of all its keys. */
void rank_pick(const struct rank_item *item, uint32_t h, const float *weights,
               const struct calibration *calibration, const struct reach_scratch *scratch);

/* Fills the lists and masses of all items. Results depend on nothing but the item. */
void rank_run(struct rank *rank, const struct rank_item *items, uint32_t count, struct rank_times *ret_times);

#endif
