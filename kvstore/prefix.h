/* Prefix reuse: an index of SEALED blocks by their chain hash, and the order in which unreferenced ones
 * are given up. One owner: the planner.
 *
 * hash(block) = hash_chain(hash(block before), made, 64 ids); before the first block stands a hash of the
 * arena's salt and the sequence's. Ids are compared as well, block by block from the first, so a collision
 * can never mix two texts. A FULL block serves everyone; what follows a SPARSE block is reached only
 * through it. */
#ifndef KVSTORE_PREFIX_H
#define KVSTORE_PREFIX_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/blocks.h"

struct prefix {
    struct blocks *blocks;
    uint32_t *table; /* open addressing, block + 1; 0 = empty */
    uint32_t table_mask;
    uint32_t *older, *newer; /* order of unreferenced blocks; index blocks_max is the ring's head */
    uint8_t *flags;          /* per block: indexed, cached */
    uint32_t indexed, cached;
    uint64_t evicted; /* so far */
    bool enabled;
};

void prefix_init(struct prefix *prefix, struct blocks *blocks, bool enabled);
void prefix_close(struct prefix *prefix);

struct hash128 prefix_root(const struct prefix *prefix, uint64_t salt);
struct hash128 prefix_hash(struct hash128 parent, const struct made *made,
                           const uint32_t tokens[BLOCK_TOKENS]);

struct prefix_query {
    uint64_t salt;
    struct made made; /* that sparse blocks must have */
    bool sparse;      /* may use sparse-made blocks at all */
    const uint32_t *tokens;
    uint32_t blocks; /* whole blocks that `tokens` hold and that may be used */
};

/* Writes the blocks that cover the longest cached prefix; returns how many. Takes no references. */
uint32_t prefix_find(const struct prefix *prefix, const struct prefix_query *query, uint32_t *ret_blocks);

/* Enters a SEALED block, unless one of equal content is there already. */
void prefix_insert(struct prefix *prefix, uint32_t block);

/* Takes a reference to a block that prefix_find named. */
void prefix_ref(struct prefix *prefix, uint32_t block);

/* Gives a reference back. The last one of an indexed block leaves it cached; any other block becomes FREE.
 * Blocks of one sequence must come last block first, so that the ends of chains are given up before their
 * begins. */
void prefix_unref(struct prefix *prefix, uint32_t block);

/* Enters a block that nobody references (adoption of an arena). */
void prefix_cache(struct prefix *prefix, uint32_t block);

/* A block for a sequence: free, or else the cached one that was let go first. -ENOSPC. */
int prefix_take(struct prefix *prefix, uint32_t *ret_block);

#endif
