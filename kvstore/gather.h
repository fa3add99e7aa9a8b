/* Moves rows: between the host arena and pages, staging pages and slots on the device, over a pool of
 * threads. Pieces are bytes here. One owner: the planner; every call returns when all rows are in place.
 *
 * A batch is filled with jobs (gather_rows, gather_pages ...) and then run. Jobs of one batch never write
 * the same bytes. */
#ifndef KVSTORE_GATHER_H
#define KVSTORE_GATHER_H

#include <stdint.h>

#include "base/pool.h"
#include "kvstore/blocks.h"
#include "kvstore/device.h"
#include "kvstore/sequence.h"

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
    const struct sequence *sequence;
    const struct elastic_load *loads;
    const uint64_t *pages; /* places of pages: pages[(l - layer) * stride + page] */
    uint32_t stride;
};

struct gather {
    struct pool *pool;
    const struct blocks *blocks;
    const struct device *device;
    uint32_t slots, units_per_slab; /* of the control header */
    struct gather_job *jobs;
    uint32_t count, room;
};

void gather_init(struct gather *gather, struct pool *pool, const struct blocks *blocks,
                 const struct device *device);
void gather_free(struct gather *gather);

/* Loads [from, count) of `loads` into the slots of layers [layer, end_layer); loads of groups outside are
 * left out. Returns the bytes that it will move. */
uint64_t gather_rows(struct gather *gather, const struct sequence *sequence,
                     const struct elastic_loads *loads, const uint32_t from_layer_end[3]);

/* Positions [first, end) between the host and pages (or back). `pages` as in struct gather_job. */
void gather_pages(struct gather *gather, const struct gather_job *job);

void gather_add(struct gather *gather, const struct gather_job *job);
void gather_run(struct gather *gather); /* and empties it */

/* Fills the slots of loads [0, count) in layers [layer, end_layer) with 0xFF: rows that were given up. */
void gather_poison(const struct gather *gather, const struct sequence *sequence,
                   const struct elastic_loads *loads, const uint32_t from_layer_end[3]);

#endif
