/* Who chooses: a retrieval head (its keys of one sequence, and its weights for the newest token), or the rule
 * "the newest positions". One thread at a time; several choosers may work at once. */
#ifndef EVAL_CHOOSER_H
#define EVAL_CHOOSER_H

#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "eval/sets.h"
#include "eval/taps.h"
#include "model/head.h"
#include "model/model.h"
#include "retriever/reach.h"

struct chooser;

struct chooser_options {
    const struct model *model; /* borrowed, as all others */
    const struct head *head;   /* NULL: newest positions */
    enum head_pool pool;
    enum compute_keys keys; /* auto: f16, as on a CPU */
    uint32_t context;
    const struct taps *taps; /* that rows of features are made of; for heads that look at them */
};

/* -ENOTSUP for a head whose key heads are not as many as the model's. */
int chooser_create(const struct chooser_options *options, struct chooser **ret_chooser, struct err *err);
void chooser_free(struct chooser **chooser);

uint32_t chooser_groups(const struct chooser *chooser);
const uint32_t *chooser_group_of(const struct chooser *chooser); /* [layers of the model] */

void chooser_reset(struct chooser *chooser); /* forgets the sequence */

/* Whether the head looks at hidden states of the model. */
bool chooser_looks(const struct chooser *chooser);

/* Appends tokens (count > 0); with `weigh` the weights of the last one are computed. `features`: rows of taps
 * of the position before each token, for a head that looks at them; a sequence's first token has none. */
void chooser_feed(struct chooser *chooser, const uint32_t *tokens, uint32_t count, const float *features,
                  bool weigh);

/* [positions so far], of the last token; valid until the next chooser_feed. `head` == number of KV heads: the
 * sum over all heads, for one set that all share. */
const float *chooser_weights(const struct chooser *chooser, uint32_t group, uint32_t head);

/* The positions of [span->sinks, span->limit) that the weights choose; span is the choice's at the newest
 * token. Scratch: [positions so far] each, the caller's own: reads of one chooser may run side by side. */
void chooser_pick(const struct chooser *chooser, uint32_t group, uint32_t head, const struct choice *choice,
                  const struct span *span, const struct reach_scratch *scratch, struct positions *ret);

#endif
