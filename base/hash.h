/* Hashes: keys of the prefix cache and fingerprints. XXH3 of libxxhash, 128 bit, salted. Not a MAC: ids are
 * always compared as well where a collision would mix two users' text. */
#ifndef BASE_HASH_H
#define BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

struct hash128 {
    uint64_t lo, hi;
};

struct hash128 hash_bytes(uint64_t salt, const void *data, size_t bytes);

/* The hash of (parent, data): what a chain of blocks is keyed by. */
struct hash128 hash_chain(struct hash128 parent, const void *data, size_t bytes);

int hash_equal(struct hash128 a, struct hash128 b);

/* A random 64-bit id (getrandom), never 0: epochs, salts. */
uint64_t hash_random_id(void);

#endif
