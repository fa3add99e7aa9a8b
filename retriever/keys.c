/* Chunks of keys; see keys.h. Owner: whoever holds the struct, which is the worker thread. Bounds are the
 * caller's: nothing here may be sized by a message that was not checked. */
#include "retriever/keys.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

static size_t chunk_elements(const struct keys *keys)
{
    return (size_t)keys->kv_heads * KEYS_CHUNK_TOKENS * keys->head_dim;
}

void keys_init(struct keys *keys, uint32_t groups, uint32_t kv_heads, uint32_t head_dim)
{
    *keys = (struct keys){.groups = groups, .kv_heads = kv_heads, .head_dim = head_dim};
    keys->chunk = mem_alloc(groups, sizeof *keys->chunk);
}

void keys_free(struct keys *keys)
{
    for (uint32_t g = 0; keys->chunk && g < keys->groups; g++) {
        for (uint32_t i = 0; i < keys->chunks; i++)
            mem_free(&keys->chunk[g][i]);
        mem_free(&keys->chunk[g]);
    }
    mem_free(&keys->chunk);
    memset(keys, 0, sizeof *keys);
}

void keys_reserve(struct keys *keys, uint32_t tokens)
{
    uint32_t chunks = tokens / KEYS_CHUNK_TOKENS + (tokens % KEYS_CHUNK_TOKENS != 0);
    if (chunks <= keys->chunks)
        return;
    for (uint32_t g = 0; g < keys->groups; g++) {
        keys->chunk[g] = mem_resize(keys->chunk[g], chunks, sizeof **keys->chunk);
        for (uint32_t i = keys->chunks; i < chunks; i++)
            keys->chunk[g][i] = mem_alloc_aligned(chunk_elements(keys), sizeof(uint16_t));
    }
    keys->chunks = chunks;
}

void keys_advance(struct keys *keys, const uint32_t *tokens, uint32_t count)
{
    for (uint32_t i = count > KEYS_TAIL ? count - KEYS_TAIL : 0; i < count; i++)
        keys->tail[(keys->count + i) % KEYS_TAIL] = tokens[i];
    keys->count += count;
}

struct key_view keys_view(const struct keys *keys, uint32_t group, uint32_t count)
{
    CHECK(group < keys->groups && count <= (uint64_t)keys->chunks * KEYS_CHUNK_TOKENS);
    return (struct key_view){.chunks = (const uint16_t *const *)keys->chunk[group],
                             .chunk_tokens = KEYS_CHUNK_TOKENS,
                             .count = count};
}

_Static_assert(KEYS_CHUNK_TOKENS % BLOCK_TOKENS == 0, "a block lies in one chunk");

/* Of one group and head. */
static size_t part_bytes(const struct keys *keys)
{
    return (size_t)BLOCK_TOKENS * keys->head_dim * sizeof(uint16_t);
}

static uint8_t *part_at(const struct keys *keys, uint32_t position, uint32_t group, uint32_t head)
{
    uint32_t chunk = position / KEYS_CHUNK_TOKENS, at = position % KEYS_CHUNK_TOKENS;
    CHECK(chunk < keys->chunks && at % BLOCK_TOKENS == 0);
    return (uint8_t *)(keys->chunk[group][chunk] + ((size_t)head * KEYS_CHUNK_TOKENS + at) * keys->head_dim);
}

void keys_read_block(const struct keys *keys, uint32_t position, uint8_t *to)
{
    for (uint32_t g = 0; g < keys->groups; g++)
        for (uint32_t h = 0; h < keys->kv_heads; h++, to += part_bytes(keys))
            memcpy(to, part_at(keys, position, g, h), part_bytes(keys));
}

void keys_write_block(struct keys *keys, uint32_t position, const uint8_t *from)
{
    for (uint32_t g = 0; g < keys->groups; g++)
        for (uint32_t h = 0; h < keys->kv_heads; h++, from += part_bytes(keys))
            memcpy(part_at(keys, position, g, h), from, part_bytes(keys));
}

uint64_t keys_bytes(const struct keys *keys)
{
    return (uint64_t)keys->groups * keys->chunks * chunk_elements(keys) * sizeof(uint16_t);
}
