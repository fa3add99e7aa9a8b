/* Moves rows: between the host arena and pages, staging pages and slots on the device. Pieces are bytes here.
 * One owner: the planner. No job names a layer that the arena lacks: it stays where it is.
 *
 * A batch is filled with jobs (gather_rows, gather_pages ...) and then run. Jobs of one batch never write
 * the same bytes. Where device memory is a memfd, a pool of threads copies, and a run returns when all rows
 * are in place. On a GPU (gather_gpu.c) a run only queues: rows are in place for what the stream does after
 * it. */
#ifndef KVSTORE_GATHER_H
#define KVSTORE_GATHER_H

#include <stdint.h>

#include "base/pool.h"
#include "kvstore/blocks.h"
#include "kvstore/device.h"
#include "kvstore/sequence.h"
#include "proto/control.h"

enum gather_kind {
    GATHER_ROWS,       /* host -> slots: `loads` */
    GATHER_PAGES,      /* host -> pages: positions [first, end) of one block */
    GATHER_BACK_PAGES, /* pages -> host: the same, the other way */
    GATHER_BACK_SLOTS, /* slots -> host: position `first`, from the slots that the maps name */
    GATHER_MOVE,       /* pages -> slots on the device: all occupied slots of `head` */
};

struct gather_job {
    uint8_t kind;
    uint8_t head;              /* MOVE: row head */
    uint16_t group;            /* MOVE */
    uint32_t layer, end_layer; /* layers [layer, end_layer) */
    uint32_t first, end;       /* positions, or indices of loads */
    struct sequence *sequence;
    const struct elastic_load *loads;
    const uint64_t *pages; /* places of pages: pages[(l - layer) * stride + page] */
    uint32_t stride;
    uint32_t launch, at; /* GPU: which launch it belongs to, and its first entry in that launch's list */
};

struct gather {
    struct pool *pool;
    struct blocks *blocks;
    struct device *device;
    uint32_t slots, units_per_slab; /* of the control header */
    struct gather_job *jobs;
    uint32_t count, room;
    uint32_t low, end;      /* layers that the bodies touch now */
    struct gather_gpu *gpu; /* NULL: memfd */
};

void gather_init(struct gather *gather, struct pool *pool, struct blocks *blocks, struct device *device);
void gather_free(struct gather *gather);

/* A control segment has been made, or is about to go: what depends on its counts. */
int gather_attach(struct gather *gather, const struct control_header *header, struct err *err);
void gather_detach(struct gather *gather);

/* Loads [from, count) of `loads` into the slots of layers [layer, end_layer); loads of groups outside are
 * left out. Returns the bytes that it will move. */
uint64_t gather_rows(struct gather *gather, struct sequence *sequence, const struct elastic_loads *loads,
                     const uint32_t from_layer_end[3]);

/* Positions [first, end) between the host and pages (or back). `pages` as in struct gather_job. */
void gather_pages(struct gather *gather, const struct gather_job *job);

void gather_add(struct gather *gather, const struct gather_job *job);
void gather_run(struct gather *gather); /* and empties it */

/* The same run by run of layers: `ready` is called for each of runs [run, end) when its rows are in place, or
 * queued. All jobs are GATHER_ROWS. */
struct gather_ready {
    void (*call)(void *arg, uint32_t run);
    void *arg;
};
void gather_run_each(struct gather *gather, uint32_t run, uint32_t end, struct gather_ready ready);

/* Fills the slots of loads [0, count) in layers [layer, end_layer) with 0xFF: rows that were given up. */
void gather_poison(const struct gather *gather, const struct sequence *sequence,
                   const struct elastic_loads *loads, const uint32_t from_layer_end[3]);

/* ---- places, shared with gather_gpu.c ---- */

struct gather_place { /* of a slot, the same in all layers of its group */
    uint32_t slab;
    uint64_t at; /* within the slab */
};

static inline struct gather_place gather_place(const struct gather *g, uint32_t head, uint32_t slot)
{
    uint64_t unit = (uint64_t)head * g->slots + slot;
    return (struct gather_place){(uint32_t)(unit / g->units_per_slab),
                                 unit % g->units_per_slab * g->blocks->layout.piece_bytes};
}

/* Of a piece, from the begin of device memory: in a slot, in a page of a job. */
static inline uint64_t gather_slot_at(const struct sequence *s, uint32_t layer, struct gather_place p)
{
    return s->slabs[(size_t)layer * s->slabs_max + p.slab] + p.at;
}

static inline uint64_t gather_page_at(const struct gather *g, const struct gather_job *job, uint32_t layer,
                                      uint32_t head, uint32_t position)
{
    uint64_t page = job->pages[(size_t)(layer - job->layer) * job->stride + position / BLOCK_TOKENS];
    uint64_t piece = (uint64_t)head * BLOCK_TOKENS + position % BLOCK_TOKENS;
    return page + piece * g->blocks->layout.piece_bytes;
}

/* Of a row, from the begin of the arena's rows; layout_piece_at says where a layer's piece is in it. */
static inline uint64_t gather_row_at(const struct gather *g, const struct sequence *s, uint32_t head,
                                     uint32_t position)
{
    uint64_t block = s->record->block[position / BLOCK_TOKENS];
    return block * g->blocks->block_bytes + layout_row_at(&g->blocks->layout, head, position % BLOCK_TOKENS);
}

#endif
