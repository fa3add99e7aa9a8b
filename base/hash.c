/* See hash.h. Stateless, any thread. */
#include "base/hash.h"

#include <sys/random.h>
#include <xxhash.h>

#include "base/check.h"

struct hash128 hash_bytes(uint64_t salt, const void *data, size_t bytes)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(data, bytes, salt);
    return (struct hash128){h.low64, h.high64};
}

struct hash128 hash_chain(struct hash128 parent, const void *data, size_t bytes)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(data, bytes, parent.lo);
    struct hash128 mixed[2] = {{h.low64, h.high64}, parent};
    return hash_bytes(parent.hi, mixed, sizeof mixed);
}

int hash_equal(struct hash128 a, struct hash128 b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

uint64_t hash_random_id(void)
{
    uint64_t id = 0;
    while (id == 0)
        CHECK(getrandom(&id, sizeof id, 0) == (ssize_t)sizeof id);
    return id;
}
