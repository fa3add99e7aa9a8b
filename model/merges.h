/* Ranked merges of neighbouring tokens: the heart of byte-pair encoding. Read only once filled: any
 * thread. */
#ifndef MODEL_MERGES_H
#define MODEL_MERGES_H

#include <stdbool.h>
#include <stdint.h>

struct merge {
    uint32_t left, right, rank, into; /* rank UINT32_MAX: empty slot */
};

struct merges {
    struct merge *slots; /* hash table */
    uint32_t mask, count;
};

/* An empty table; it grows as it is filled. Release with merges_free, which accepts a zeroed object. */
void merges_init(struct merges *merges);
void merges_free(struct merges *merges);

/* left, right -> into, the lower rank first; rank < UINT32_MAX. A pair that is there already keeps what it
 * has: enter the better rank first. False in that case. */
bool merges_add(struct merges *merges, struct merge merge);

/* Merges ids [count] in place as long as a pair of the table stands in it: always the pair of lowest rank, of
 * equal ranks the leftmost. Returns the new count. Long inputs take O(n log n) time and 24 bytes an id. */
uint32_t merges_apply(const struct merges *merges, uint32_t *ids, uint32_t count);

#endif
