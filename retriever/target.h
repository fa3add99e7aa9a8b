/* What a head of features "target" reads beside a token's embedding: hidden states of the language model at
 * the position before, through the head's fc and norm. model/head.h says what is computed. */
#ifndef RETRIEVER_TARGET_H
#define RETRIEVER_TARGET_H

#include <stddef.h>
#include <stdint.h>

#include "compute/compute.h"
#include "model/head.h"

struct target;

/* The row of one token: [feature_layers * feature_hidden] of the position before it, f32 or bf16; NULL for a
 * sequence's first token, which gives zeros. */
struct target_row {
    const void *at;
    enum dtype type;
};

/* NULL for a head without features. At most `tokens_max` a run. All are borrowed. */
struct target *target_create(const struct head *head, uint32_t tokens_max, struct compute *compute);
void target_free(struct target **target); /* accepts NULL inside */

/* A token's are the same bits whatever else is in the call. */
void target_run(struct target *target, const struct target_row *rows, uint32_t count);

/* Of the last target_run: [count][hidden], normed: the second half of the projections' input. */
const float *target_rows(const struct target *target);

/* out [count][2 * hidden] = embedding's half, features' half, both [count][hidden]. */
void target_join(const struct target *target, float *out, const float *embedding, const float *features,
                 uint32_t count);

#endif
