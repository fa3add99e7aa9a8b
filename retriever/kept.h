/* Keys of prompts that were, kept for prompts to come: a head that reads hidden states of the model cannot
 * make those of a cached prefix again. Blocks of 64 positions, found by their tokens and all before them, as
 * the store finds its own (kvstore/prefix.h); the one used least lately goes first, ends of chains before
 * their begins. Host memory, on a GPU too. One thread.
 *
 * What is kept was made of hidden states under full attention: of whole blocks inside a prompt. */
#ifndef RETRIEVER_KEPT_H
#define RETRIEVER_KEPT_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/layout.h"

struct kept;
struct kept_block;

/* The blocks of one open sequence's prompt. They stay as long as it holds them. Zeroed: none. */
struct kept_chain {
    uint64_t salt;
    uint32_t *tokens, count; /* the prompt */
    struct kept_block *last; /* of the chain's; held */
    uint32_t blocks;         /* [0, blocks) of the prompt are kept */
    bool ended;              /* no further one will be */
};

/* `data_bytes` of each block; at most `bytes_max` in all, what keeps them included. */
struct kept *kept_create(uint64_t data_bytes, uint64_t bytes_max);
void kept_free(struct kept **kept); /* accepts NULL inside; every chain must be closed */

/* Takes the longest beginning of the prompt that is kept, at least one token less than all; copies the
 * tokens. Without `kept` the chain has none and keeps none. */
void kept_open(struct kept *kept, struct kept_chain *chain, uint64_t salt, const uint32_t *tokens,
               uint32_t count);

/* Lets blocks from `blocks` on go, of those that the chain has. */
void kept_cut(struct kept_chain *chain, uint32_t blocks);
void kept_close(struct kept_chain *chain); /* leaves a zeroed one */

/* Data of the chain's blocks, first to last, into ret_data [chain->blocks]. */
void kept_list(const struct kept_chain *chain, const uint8_t **ret_data);
const uint8_t *kept_last(const struct kept_chain *chain); /* of the last one; NULL: there is none */

/* Makes block `chain->blocks` of the prompt the chain's last. Returns its data, to be filled now; NULL: it
 * was there, or there is no room and the chain has ended. */
uint8_t *kept_add(struct kept *kept, struct kept_chain *chain);

struct kept_stats {
    uint64_t bytes, bytes_max, blocks, evicted; /* evicted: so far */
};
void kept_stats(const struct kept *kept, struct kept_stats *ret); /* zeros for NULL */

#endif
