/* From token ids to keys and queries: embedding, norm, projections, rotation of the retrieval head. */
#ifndef RETRIEVER_FORWARD_H
#define RETRIEVER_FORWARD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "model/head.h"
#include "model/model.h"
#include "retriever/keys.h"

#define FORWARD_TILE_TOKENS 256u /* tokens that go through the projections together */

struct forward;

/* For sequences of up to `context` positions; at most `queries_max` queries a call of forward_run. `compute`,
 * `model` and `head` are borrowed. Errors as head_rope, and -EINVAL for a rotation that makes no sense. */
int forward_create(const struct model *model, const struct head *head, uint32_t context, uint32_t queries_max,
                   struct compute *compute, struct forward **ret_forward, struct err *err);
void forward_free(struct forward **forward);

const struct model_rope *forward_rope(const struct forward *forward); /* the one in force */

/* Tokens of one sequence; they follow the keys that it has. Checked by the caller: ids below the vocabulary,
 * keys->count + count within the context. */
struct forward_part {
    struct keys *keys;
    const uint32_t *tokens;
    uint32_t count;
    bool query; /* a query of the last token is wanted */
};

/* Appends the keys of all parts; computes the queries that they want, numbered in their order. A token's key
 * and query are the same bits whatever else is in the call. */
void forward_run(struct forward *forward, const struct forward_part *parts, uint32_t part_count);

/* Query `number` of the last forward_run: [q_heads][head_dim]. */
const float *forward_query(const struct forward *forward, uint32_t group, uint32_t number);

#endif
