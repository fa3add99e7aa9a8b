/* What the decoder tells of its model, and what a retriever must have in common with it. */
#ifndef DECODER_IDENTITY_H
#define DECODER_IDENTITY_H

#include <stdint.h>

#include "base/err.h"
#include "model/model.h"
#include "proto/msg.h"

struct identity {
    struct kv_layout layout; /* groups: 0 until a retriever has told them */
    struct hash128 tokenizer;
    uint64_t head;                   /* fingerprint of the retriever's head */
    uint32_t hidden;                 /* width of the model's hidden states */
    struct layout_features features; /* hidden states that the head reads; layers 0: none */
    char device[48];                 /* "cpu", or the GPU's UUID */
};

/* `context` 0: the model's. -EINVAL when the model or the context exceeds what the formats hold. */
int identity_init(struct identity *id, const struct model *model, uint32_t context, struct err *err);

/* What HELLO says now; the layout is in it once the groups are known. */
void identity_hello(const struct identity *id, struct msg_hello *ret);

/* Compares a retriever's WELCOME and takes the layer groups and the head from it. -EPROTO with the field,
 * what was found and what was expected. */
int identity_join(struct identity *id, const struct msg_hello *retriever, struct err *err);

/* Whether another life of the retriever is the same as the one that was joined. */
int identity_compare(const struct identity *id, const struct msg_hello *retriever, struct err *err);

#endif
