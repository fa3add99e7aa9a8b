/* Index of sealed blocks and the order of eviction; see prefix.h. Owner: the planner thread. */
#include "kvstore/prefix.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

enum { INDEXED = 1, CACHED = 2 };

static uint32_t ring(const struct prefix *p)
{
    return p->blocks->blocks_max;
}

void prefix_init(struct prefix *p, struct blocks *blocks, bool enabled)
{
    memset(p, 0, sizeof *p);
    p->blocks = blocks;
    p->enabled = enabled;
    uint32_t size = 64;
    while (size < 2 * blocks->blocks_max)
        size *= 2;
    p->table = mem_alloc(size, sizeof *p->table);
    p->table_mask = size - 1;
    p->older = mem_alloc(blocks->blocks_max + 1u, sizeof *p->older);
    p->newer = mem_alloc(blocks->blocks_max + 1u, sizeof *p->newer);
    p->flags = mem_alloc(blocks->blocks_max, sizeof *p->flags);
    p->older[ring(p)] = p->newer[ring(p)] = ring(p);
}

void prefix_close(struct prefix *p)
{
    mem_free(&p->table);
    mem_free(&p->older);
    mem_free(&p->newer);
    mem_free(&p->flags);
    memset(p, 0, sizeof *p);
}

struct hash128 prefix_root(const struct prefix *p, uint64_t salt)
{
    return hash_bytes(p->blocks->header->salt, &salt, sizeof salt);
}

struct hash128 prefix_hash(struct hash128 parent, const struct made *made,
                           const uint32_t tokens[BLOCK_TOKENS])
{
    struct {
        struct made made;
        uint32_t tokens[BLOCK_TOKENS];
    } data;
    data.made = *made;
    memcpy(data.tokens, tokens, sizeof data.tokens);
    return hash_chain(parent, &data, sizeof data);
}

static bool made_equal(const struct made *a, const struct made *b)
{
    return a->kind == b->kind && a->budget == b->budget && a->head == b->head;
}

/* A block that follows `parent`, with the same ids, made the same way; ARENA_NO_BLOCK if there is none. */
static uint32_t lookup(const struct prefix *p, struct hash128 parent, const struct made *made,
                       const uint32_t *tokens)
{
    struct hash128 hash = prefix_hash(parent, made, tokens);
    for (uint32_t at = (uint32_t)hash.lo & p->table_mask; p->table[at]; at = (at + 1) & p->table_mask) {
        uint32_t block = p->table[at] - 1;
        const struct arena_block *b = arena_block_at(p->blocks->header, block);
        if (b->hash_lo == hash.lo && b->hash_hi == hash.hi && b->parent_lo == parent.lo &&
            b->parent_hi == parent.hi && made_equal(&b->made, made) &&
            memcmp(b->tokens, tokens, sizeof b->tokens) == 0)
            return block;
    }
    return ARENA_NO_BLOCK;
}

uint32_t prefix_find(const struct prefix *p, const struct prefix_query *query, uint32_t *ret_blocks)
{
    struct hash128 parent = prefix_root(p, query->salt);
    const struct made full = {.kind = ARENA_MADE_FULL};
    bool through_sparse = false;
    uint32_t n = 0;
    for (; p->enabled && n < query->blocks; n++) {
        const uint32_t *tokens = query->tokens + (uint64_t)n * BLOCK_TOKENS;
        uint32_t block = through_sparse ? ARENA_NO_BLOCK : lookup(p, parent, &full, tokens);
        if (block == ARENA_NO_BLOCK && query->sparse && query->made.kind == ARENA_MADE_SPARSE) {
            block = lookup(p, parent, &query->made, tokens);
            through_sparse = block != ARENA_NO_BLOCK;
        }
        if (block == ARENA_NO_BLOCK)
            break;
        const struct arena_block *b = arena_block_at(p->blocks->header, block);
        parent = (struct hash128){b->hash_lo, b->hash_hi};
        ret_blocks[n] = block;
    }
    return n;
}

void prefix_insert(struct prefix *p, uint32_t block)
{
    if (!p->enabled)
        return;
    const struct arena_block *b = arena_block_at(p->blocks->header, block);
    struct hash128 parent = {b->parent_lo, b->parent_hi};
    if (lookup(p, parent, &b->made, b->tokens) != ARENA_NO_BLOCK)
        return;
    uint32_t at = (uint32_t)b->hash_lo & p->table_mask;
    while (p->table[at])
        at = (at + 1) & p->table_mask;
    p->table[at] = block + 1;
    p->flags[block] |= INDEXED;
    p->indexed++;
}

/* Open addressing without tombstones: entries behind the hole move up if their home allows it. */
static void table_remove(struct prefix *p, uint32_t block)
{
    uint32_t mask = p->table_mask;
    uint32_t hole = (uint32_t)arena_block_at(p->blocks->header, block)->hash_lo & mask;
    while (p->table[hole] != block + 1) {
        CHECK(p->table[hole]);
        hole = (hole + 1) & mask;
    }
    for (uint32_t at = (hole + 1) & mask; p->table[at]; at = (at + 1) & mask) {
        uint32_t home = (uint32_t)arena_block_at(p->blocks->header, p->table[at] - 1)->hash_lo & mask;
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            p->table[hole] = p->table[at];
            hole = at;
        }
    }
    p->table[hole] = 0;
    p->flags[block] &= (uint8_t)~INDEXED;
    p->indexed--;
}

static void cached_remove(struct prefix *p, uint32_t block)
{
    p->newer[p->older[block]] = p->newer[block];
    p->older[p->newer[block]] = p->older[block];
    p->flags[block] &= (uint8_t)~CACHED;
    p->cached--;
}

static void cached_append(struct prefix *p, uint32_t block)
{
    uint32_t head = ring(p), newest = p->older[head];
    p->newer[newest] = block;
    p->older[block] = newest;
    p->newer[block] = head;
    p->older[head] = block;
    p->flags[block] |= CACHED;
    p->cached++;
}

void prefix_ref(struct prefix *p, uint32_t block)
{
    if (p->flags[block] & CACHED)
        cached_remove(p, block);
    blocks_ref(p->blocks, block);
}

void prefix_unref(struct prefix *p, uint32_t block)
{
    if (blocks_unref(p->blocks, block) == 0)
        prefix_cache(p, block);
}

void prefix_cache(struct prefix *p, uint32_t block)
{
    if (p->flags[block] & INDEXED)
        cached_append(p, block);
    else
        blocks_give(p->blocks, block);
}

int prefix_take(struct prefix *p, uint32_t *ret_block)
{
    int r = blocks_take(p->blocks, ret_block);
    if (r == 0 || p->cached == 0)
        return r;
    uint32_t oldest = p->newer[ring(p)];
    cached_remove(p, oldest);
    table_remove(p, oldest);
    p->evicted++;
    blocks_give(p->blocks, oldest);
    return blocks_take(p->blocks, ret_block);
}
