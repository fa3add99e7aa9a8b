/* What the processes must agree on about a model's KV cache, and the fingerprint that says that they do.
 *
 * Nothing here knows what a piece holds: it is `piece_bytes` bytes of one token, one row head, one layer.
 * Row heads (what moves) and selection heads (what Top-K picks for) are two counts; selection head s reads
 * row head s * row_heads / selection_heads. */
#ifndef PROTO_LAYOUT_H
#define PROTO_LAYOUT_H

#include <stdint.h>

#include "base/err.h"
#include "base/hash.h"
#include "proto/limits.h"

struct kv_layout {
    struct hash128 model; /* model fingerprint */
    uint32_t layers;
    uint32_t row_heads;
    uint32_t selection_heads; /* a multiple of row_heads */
    uint32_t groups;          /* layer groups; group g serves layers [first_layer[g], first_layer[g+1]) */
    uint32_t piece_bytes;
    uint32_t dtype;         /* enum dtype of the pieces' elements: compared, never interpreted */
    uint32_t key_row_bytes; /* second row kind: the retriever's K of one token; 0 = not kept */
    uint32_t context_max;   /* positions a sequence may have */
    uint32_t group_first_layer[LIMIT_GROUPS + 1]; /* [0] = 0, [groups] = layers, ascending */
    /* Of the arena's layout alone, 0 in all that processes tell each other: layers below, whole runs of them,
     * are not in the arena (write-through `offloaded`, memory.h). */
    uint32_t host_first_layer;
};

/* Every count within proto/limits.h, products within 64 bits. 0 or -EINVAL with field, found, expected. */
int layout_check(const struct kv_layout *layout, struct err *err);

/* Equal fingerprints <=> same layout (all fields above, block size, format versions). */
struct hash128 layout_fingerprint(const struct kv_layout *layout);

/* Splits layers evenly into `groups` runs of layers; fills groups and group_first_layer. */
void layout_set_groups(struct kv_layout *layout, uint32_t groups);

uint32_t layout_group_of(const struct kv_layout *layout, uint32_t layer);

/* Runs: RUN_LAYERS consecutive layers each, the last run takes the remainder as well (a model with fewer
 * than RUN_LAYERS layers is one run). Offloading goes by whole runs, last run first. */
uint32_t layout_runs(const struct kv_layout *layout);
uint32_t layout_run_first(const struct kv_layout *layout, uint32_t run); /* run = layout_runs(): layers */
uint32_t layout_run_of(const struct kv_layout *layout, uint32_t layer);

/* Sizes in bytes. A row: the pieces of one (token, row head) in the arena's layers; none: 0. */
uint64_t layout_row_bytes(const struct kv_layout *layout);
uint64_t
layout_block_bytes(const struct kv_layout *layout);         /* rows of 64 tokens, all row heads, + key rows */
uint64_t layout_page_bytes(const struct kv_layout *layout); /* one layer, 64 tokens, all row heads */
uint64_t
layout_slab_bytes(const struct kv_layout *layout); /* SLAB_BYTES_MIN, or the next power of two >= a page */

/* Offset of a row within its block: [row head][token in block][layer of the arena][piece]. */
static inline uint64_t layout_row_at(const struct kv_layout *layout, uint32_t row_head, uint32_t token)
{
    return ((uint64_t)row_head * BLOCK_TOKENS + token) * (layout->layers - layout->host_first_layer) *
           layout->piece_bytes;
}

/* Offset of a layer's piece within its row; layer >= host_first_layer. */
static inline uint64_t layout_piece_at(const struct kv_layout *layout, uint32_t layer)
{
    return (uint64_t)(layer - layout->host_first_layer) * layout->piece_bytes;
}

/* Hidden states of the model that a retrieval head reads; proto/features.h. */
struct layout_features {
    uint32_t layers;                      /* 1 .. LIMIT_FEATURE_LAYERS */
    uint32_t hidden;                      /* width of each */
    uint32_t layer[LIMIT_FEATURE_LAYERS]; /* those that enter this layer, ascending; zero past `layers` */
};

#endif
