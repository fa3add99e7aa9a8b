/* What a head of features "context" reads in place of a token's normed embedding: for each of its views the
 * sum of the normed embeddings of the token and of those before it, weighted by the view's taps. */
#ifndef RETRIEVER_MIX_H
#define RETRIEVER_MIX_H

#include "compute/compute.h"
#include "model/head.h"
#include "retriever/keys.h"

struct mix;

/* A token and where the ones before it are found. */
struct mix_token {
    const uint32_t *at; /* in a list of which `before` tokens stand before it */
    uint32_t before;
    const struct keys *keys; /* ... and before the list those that keys->tail knows */
};

/* The token `lag` before; there are as many before it as its position says. Reaches over less than
 * KEYS_TAIL. */
uint32_t mix_earlier(const struct mix_token *token, uint32_t lag);

/* NULL for a head without context. At most `tokens_max` a run. All are borrowed. */
struct mix *mix_create(const struct head *head, const struct matrix *table, uint32_t tokens_max,
                       struct compute *compute);
void mix_free(struct mix **mix); /* accepts NULL inside */

/* The sums of `count` tokens; a token's are the same bits whatever else is in the call. */
void mix_run(struct mix *mix, const struct mix_token *tokens, uint32_t count);

/* Of the last mix_run: [count][views * hidden], times the group's norm weights. */
const float *mix_rows(const struct mix *mix, uint32_t group);

#endif
