/* The part of a card that a head with features of the model has; retriever only. */
#ifndef RETRIEVER_CARD_FEATURES_H
#define RETRIEVER_CARD_FEATURES_H

#include "retriever/card_private.h"

/* Elements of a row; 0: the head has no such features. */
uint64_t card_features_inputs(const struct head_config *head);

/* Memory and weights, of a head that has features; the first failure stays in *rc. */
void card_features_take(struct card *card, const struct head_shared *shared, int *rc, struct err *err);
int card_features_upload(struct card *card, struct compute *compute, const struct head_shared *from);

/* Plans of products for n tokens, before a capture. */
void card_features_prepare(struct card *card, uint32_t n);

void card_drop_graphs(struct card *card);

struct card_features_tokens {
    const uint32_t *rows;                         /* device, [n]: of the position before each token */
    const uint32_t *host_positions, *host_places; /* [n] */
    uint32_t n;                                   /* at most CARD_TILE */
};

/* Notes which token of the sequence has its row elsewhere, before its part is put into a call. */
void card_features_begin(struct card *card, const struct projection_part *part);

/* Queues features.normed [n][hidden] of the tokens; nothing for a head without features. */
void card_features_run(struct card *card, const struct card_features_tokens *tokens);

#endif
