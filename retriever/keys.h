/* The K cache of one sequence: rotated keys of every position so far, in 16 bit, for each layer group. It
 * grows by chunks, so that nothing is ever copied and a sequence costs what its length needs. */
#ifndef RETRIEVER_KEYS_H
#define RETRIEVER_KEYS_H

#include <stdint.h>

#include "compute/compute.h"
#include "proto/layout.h"

#define KEYS_CHUNK_TOKENS 256u
#define KEYS_TAIL         64u /* HEAD_TAPS_MAX */

struct keys {
    uint32_t groups, kv_heads, head_dim;
    uint32_t count;           /* positions that have keys */
    uint32_t chunks;          /* of each group */
    uint32_t tail[KEYS_TAIL]; /* the last tokens: position p at p % KEYS_TAIL */
    uint16_t ***chunk;        /* [groups][chunks] -> [kv_head][KEYS_CHUNK_TOKENS][head_dim] f16 */
};

void keys_init(struct keys *keys, uint32_t groups, uint32_t kv_heads, uint32_t head_dim);
void keys_free(struct keys *keys); /* accepts a zeroed object; leaves one */

/* Makes room for `tokens` positions in all. The caller bounds `tokens`. */
void keys_reserve(struct keys *keys, uint32_t tokens);

/* Counts `count` tokens whose keys are there now. */
void keys_advance(struct keys *keys, const uint32_t *tokens, uint32_t count);

/* What the operators want, of `count` keys; count <= reserved. Void after the next keys_reserve. */
struct key_view keys_view(const struct keys *keys, uint32_t group, uint32_t count);

/* Keys of BLOCK_TOKENS positions from `position` on, a multiple of it: [group][kv_head][BLOCK_TOKENS]
 * [head_dim]. To be written they must have been reserved; keys_advance counts them. */
void keys_read_block(const struct keys *keys, uint32_t position, uint8_t *to);
void keys_write_block(struct keys *keys, uint32_t position, const uint8_t *from);

uint64_t keys_bytes(const struct keys *keys);

#endif
