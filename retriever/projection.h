/* From token ids to keys and queries: embedding, norm, projections, rotation of the retrieval head. */
#ifndef RETRIEVER_PROJECTION_H
#define RETRIEVER_PROJECTION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "model/head.h"
#include "model/model.h"
#include "retriever/keys.h"

#define PROJECTION_TILE_TOKENS 256u /* tokens that go through the projections together */

struct projection;

/* What turns keys and queries: the rotation in force for a context, its frequencies and scale. */
struct projection_rotation {
    struct model_rope rope;
    float inv_freq[MODEL_HEAD_DIM_MAX / 2]; /* [rope.dims / 2] */
    float scale;
};

/* Errors as head_rope, and -EINVAL for a rotation that makes no sense. */
int projection_rotation(const struct head *head, uint32_t context, struct projection_rotation *ret,
                        struct err *err);

/* For sequences of up to `context` positions; at most `queries_max` queries a call of projection_run.
 * `compute`, `model` and `head` are borrowed. Errors as projection_rotation. */
int projection_create(const struct model *model, const struct head *head, uint32_t context,
                      uint32_t queries_max, struct compute *compute, struct projection **ret_projection,
                      struct err *err);
void projection_free(struct projection **projection);

/* From now on keys are appended as those of 8 bits are scored (compute_keys_round). */
void projection_round_keys(struct projection *projection);

const struct model_rope *projection_rope(const struct projection *projection); /* the one in force */

/* Tokens of one sequence; they follow the keys that it has. Checked by the caller: ids below the vocabulary,
 * keys->count + count within the context. */
struct projection_part {
    struct keys *keys;
    const uint32_t *tokens;
    uint32_t count;
    uint32_t place; /* of the sequence, on a GPU: card.h */
    bool query;     /* a query of the last token is wanted */
    /* For a head with features of the model (target.h), rows that follow one another, of the position before
     * each token: `features` is the first of them, F32 or BF16. On a GPU `feature_row` is its number instead
     * (card.h). A part that begins a sequence, or goes on behind keys that were kept, has none of them for
     * its first token: that one's is `before`, in host memory; none at position 0. */
    const void *features, *before;
    enum dtype features_type;
    uint32_t feature_row;
};

/* Before the keys of the part are counted. */
static inline bool projection_begins(const struct projection_part *part)
{
    return part->keys->count == 0 || part->before;
}

/* Which of the part's rows is of the position before token i; of a first token without one, any. */
static inline uint32_t projection_feature(const struct projection_part *part, uint32_t i)
{
    return i && projection_begins(part) ? i - 1 : i;
}

/* Appends the keys of all parts; computes the queries that they want, numbered in their order. A token's key
 * and query are the same bits whatever else is in the call. */
void projection_run(struct projection *projection, const struct projection_part *parts, uint32_t part_count);

/* Query `number` of the last projection_run: [q_heads][head_dim]. */
const float *projection_query(const struct projection *projection, uint32_t group, uint32_t number);

#endif
