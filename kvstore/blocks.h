/* The host arena of this process: the memfd of proto/arena.h with its blocks' free list and reference
 * counts.
 *
 * One owner: the planner. A block is FREE, or held by references (sequences), or SEALED without references
 * and then kept by the prefix index (prefix.h). The file grows by chunks; addresses never move. */
#ifndef KVSTORE_BLOCKS_H
#define KVSTORE_BLOCKS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "kvstore/populate.h"
#include "link/segment.h"
#include "proto/arena.h"

/* The file ends at rows_at + a multiple of this, or with the last block there may be: the unit of growth. */
#define BLOCKS_CHUNK_BYTES (UINT64_C(64) << 20)
/* The unit of first touch, and of registration with a GPU, which stops all launches for as long as it takes:
 * 0.38 ms (1.5 for 16 MiB, so that smaller ones cost no more in all). */
#define BLOCKS_STRETCH_BYTES (UINT64_C(4) << 20)

struct blocks_params {
    uint64_t host_bytes;    /* cap of the rows */
    uint32_t sequences_max; /* records */
};

struct blocks {
    struct segment segment;
    struct arena_header *header; /* == segment.at */
    struct kv_layout layout;     /* a private copy: the arena's may not be trusted after a crash */
    uint32_t blocks_max;
    uint32_t present; /* blocks that the file holds */
    uint32_t taken;   /* blocks [taken, present) never were; the lowest is taken when no other one is free */
    uint32_t *refs;   /* [blocks_max] */
    uint32_t *free;   /* stack of FREE blocks that are present */
    uint32_t free_count;
    struct populate *populate;     /* NULL: what is needed is touched by whoever needs it */
    uint64_t block_bytes, rows_at; /* private copies of header fields */
};

/* A new arena. -ENOMEM, -EINVAL (host_bytes holds no block) with one line. Blocks of an arena that lacks
 * layers serve one sequence each, so it has no more than all sequences together can fill, whatever
 * host_bytes says; where it has no layer its blocks take no bytes. */
int blocks_create(struct blocks *blocks, const struct kv_layout *layout, const struct blocks_params *params,
                  struct err *err);

/* Maps an arena that another process left; takes fd on success only. Checks header, lengths and the layout's
 * fingerprint, nothing else: reference counts are all 0 and the free list is empty until adopt.h has read the
 * records. -ENODATA: it lacks layers, and so all that its sequences need. */
int blocks_map(struct blocks *blocks, int fd, const struct kv_layout *layout, struct err *err);

void blocks_close(struct blocks *blocks); /* accepts a zeroed one */

/* A FILLING block with one reference. -ENOSPC when none is free and the file is at its cap: evict cached
 * ones. */
int blocks_take(struct blocks *blocks, uint32_t *ret_block);
void blocks_ref(struct blocks *blocks, uint32_t block);
uint32_t blocks_unref(struct blocks *blocks,
                      uint32_t block);                   /* references left; 0: caller gives or caches it */
void blocks_give(struct blocks *blocks, uint32_t block); /* becomes FREE; no references */

/* Blocks that could be taken without evicting any: free ones and those that the file may still grow by. */
uint32_t blocks_available(const struct blocks *blocks);

/* Threads that touch memory ahead of need, so that neither write-back nor registration meets page faults.
 * Once. `before`, or NULL: as in populate.h. */
void blocks_populate_start(struct blocks *blocks, int threads, void (*before)(void *arg, uint32_t stretch),
                           void *before_arg);

/* They shall touch what the first `count` blocks lie in, and no more. Returns at once. */
void blocks_populate(struct blocks *blocks, uint32_t count);

/* Whether they have: for a stretch of blocks_stretch. */
bool blocks_is_populated(const struct blocks *blocks, uint32_t stretch);

/* Stretches of the rows, and the memory of one: whole pages, the file is made long enough. */
uint32_t blocks_stretches(const struct blocks *blocks);
int blocks_stretch(struct blocks *blocks, uint32_t stretch, void **ret_at, uint64_t *ret_bytes,
                   struct err *err);

static inline uint8_t *blocks_rows(const struct blocks *b, uint32_t block)
{
    return (uint8_t *)b->segment.at + b->rows_at + (uint64_t)block * b->block_bytes;
}

#endif
