/* See kept.h. Owner: the worker thread.
 *
 * A block is given up only when nothing follows it and no chain holds it, so parents outlive children and a
 * pointer to a block's parent is as good as the hash of all that lies before. In the order of use a child
 * stands next to its parent, on the older side. */
#include "retriever/kept.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/hash.h"
#include "proto/memory.h"

enum { TABLE_MAX = 1 << 20, TABLE_MIN = 64 };

struct kept_block {
    struct hash128 hash;
    struct kept_block *parent; /* NULL: it begins a prompt */
    struct kept_block *next;   /* of the same place in the table */
    struct kept_block *older, *newer;
    uint64_t salt;
    uint32_t tokens[BLOCK_TOKENS];
    uint32_t children, holders;
}; /* its data follow */
_Static_assert(sizeof(struct kept_block) == MEMORY_PREFIX_BLOCK, "a plan counts it");

struct kept {
    uint64_t block_bytes;
    struct kept_block **table;
    uint32_t table_mask;
    struct kept_block order; /* the ring's head: its newer is the oldest, its older the newest */
    uint64_t salt;
    struct kept_stats stats;
};

struct kept *kept_create(uint64_t data_bytes, uint64_t bytes_max)
{
    struct kept *k = mem_alloc(1, sizeof *k);
    k->block_bytes = sizeof(struct kept_block) + data_bytes;
    uint32_t size = TABLE_MIN;
    while (size < TABLE_MAX && size < bytes_max / k->block_bytes)
        size *= 2;
    k->table = mem_alloc(size, sizeof *k->table);
    k->table_mask = size - 1;
    k->order.older = k->order.newer = &k->order;
    k->salt = hash_random_id();
    k->stats.bytes_max = bytes_max;
    return k;
}

static uint8_t *data_of(struct kept_block *b)
{
    return (uint8_t *)(b + 1);
}

static void unlink_order(struct kept_block *b)
{
    b->older->newer = b->newer;
    b->newer->older = b->older;
}

/* Between `newer` and what was older than it. */
static void link_order(struct kept_block *b, struct kept_block *newer)
{
    b->newer = newer;
    b->older = newer->older;
    b->older->newer = b;
    newer->older = b;
}

static struct kept_block **place_of(const struct kept *k, struct hash128 hash)
{
    return &k->table[(uint32_t)hash.lo & k->table_mask];
}

static void give_up(struct kept *k, struct kept_block *b)
{
    struct kept_block **at = place_of(k, b->hash);
    while (*at != b)
        at = &(*at)->next;
    *at = b->next;
    unlink_order(b);
    if (b->parent)
        b->parent->children--;
    k->stats.bytes -= k->block_bytes;
    k->stats.blocks--;
    mem_free(&b);
}

void kept_free(struct kept **kept)
{
    struct kept *k = *kept;
    if (!k)
        return;
    while (k->order.newer != &k->order) {
        CHECK(k->order.newer->holders == 0);
        give_up(k, k->order.newer);
    }
    mem_free(&k->table);
    mem_free(kept);
}

static struct hash128 hash_of(const struct kept *k, const struct kept_chain *c,
                              const struct kept_block *parent, const uint32_t *tokens)
{
    struct hash128 before = parent ? parent->hash : hash_bytes(k->salt, &c->salt, sizeof c->salt);
    return hash_chain(before, tokens, BLOCK_TOKENS * sizeof *tokens);
}

static struct kept_block *find(const struct kept *k, const struct kept_chain *c,
                               const struct kept_block *parent, const uint32_t *tokens)
{
    struct hash128 hash = hash_of(k, c, parent, tokens);
    struct kept_block *b = *place_of(k, hash);
    while (b && !(hash_equal(b->hash, hash) && b->parent == parent && b->salt == c->salt &&
                  memcmp(b->tokens, tokens, sizeof b->tokens) == 0))
        b = b->next;
    return b;
}

static void hold(struct kept_chain *c, struct kept_block *b)
{
    if (b)
        b->holders++;
    if (c->last)
        c->last->holders--;
    c->last = b;
}

void kept_open(struct kept *k, struct kept_chain *c, uint64_t salt, const uint32_t *tokens, uint32_t count)
{
    struct kept_block *b = NULL, *next;
    *c = (struct kept_chain){.salt = salt, .count = count, .ended = !k || count == 0};
    if (c->ended)
        return;
    c->tokens = mem_alloc(count, sizeof *tokens);
    memcpy(c->tokens, tokens, count * sizeof *tokens);
    while (c->blocks < (count - 1) / BLOCK_TOKENS &&
           (next = find(k, c, b, tokens + c->blocks * BLOCK_TOKENS))) {
        b = next;
        c->blocks++;
    }
    hold(c, b);
    for (; b; b = b->parent) { /* the begin comes last, and is the newest */
        unlink_order(b);
        link_order(b, &k->order);
    }
}

void kept_cut(struct kept_chain *c, uint32_t blocks)
{
    struct kept_block *b = c->last;
    CHECK(blocks <= c->blocks);
    for (; c->blocks > blocks; c->blocks--)
        b = b->parent;
    hold(c, b);
}

void kept_close(struct kept_chain *c)
{
    hold(c, NULL);
    mem_free(&c->tokens);
    memset(c, 0, sizeof *c);
}

void kept_list(const struct kept_chain *c, const uint8_t **ret_data)
{
    struct kept_block *b = c->last;
    for (uint32_t i = c->blocks; i > 0; i--, b = b->parent)
        ret_data[i - 1] = data_of(b);
}

const uint8_t *kept_last(const struct kept_chain *c)
{
    return c->last ? data_of(c->last) : NULL;
}

/* Whether one block more fits now. */
static bool make_room(struct kept *k)
{
    struct kept_block *b = k->order.newer;
    while (k->stats.bytes + k->block_bytes > k->stats.bytes_max) {
        while (b != &k->order && (b->children || b->holders))
            b = b->newer;
        if (b == &k->order)
            return false;
        struct kept_block *oldest = b;
        /* The parent of what goes may be next, and stands on the newer side. */
        b = b->newer;
        give_up(k, oldest);
        k->stats.evicted++;
    }
    return true;
}

uint8_t *kept_add(struct kept *k, struct kept_chain *c)
{
    const uint32_t *tokens = c->tokens + (size_t)c->blocks * BLOCK_TOKENS;
    CHECK(!c->ended && (c->blocks + UINT64_C(1)) * BLOCK_TOKENS <= c->count);
    struct kept_block *parent = c->last, *b = find(k, c, parent, tokens);
    if (b) {
        hold(c, b);
        c->blocks++;
        return NULL;
    }
    if (!make_room(k)) {
        c->ended = true;
        return NULL;
    }
    b = mem_alloc(1, k->block_bytes);
    b->hash = hash_of(k, c, parent, tokens);
    b->parent = parent;
    b->salt = c->salt;
    memcpy(b->tokens, tokens, sizeof b->tokens);
    struct kept_block **at = place_of(k, b->hash);
    b->next = *at;
    *at = b;
    link_order(b, parent ? parent : &k->order);
    if (parent)
        parent->children++;
    k->stats.bytes += k->block_bytes;
    k->stats.blocks++;
    hold(c, b);
    c->blocks++;
    return data_of(b);
}

void kept_stats(const struct kept *k, struct kept_stats *ret)
{
    *ret = k ? k->stats : (struct kept_stats){0};
}
