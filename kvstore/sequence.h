/* One sequence: its record in the arena, the pages and slots that it holds on the device, its sets and
 * counters.
 *
 * One owner: the planner. The arena record is the lasting part; everything else can be rebuilt from it. */
#ifndef KVSTORE_SEQUENCE_H
#define KVSTORE_SEQUENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/device.h"
#include "kvstore/elastic.h"
#include "kvstore/prefix.h"
#include "proto/control.h"
#include "proto/msg.h"

struct sequence_topk { /* a set that came before the one ahead of it was in use */
    struct elastic_set set;
    uint32_t *counts, *positions; /* owned */
};

struct sequence_draft { /* lists of a step that is to come, written before its record */
    bool ready;
    uint32_t step, position; /* of that step and of its token */
    uint32_t set_step;       /* of the set */
    uint32_t changes;        /* elastic.changes by then: with another one the slots are others */
    bool whole;              /* lists of groups with slots too: nothing is left, while there is no more of */
    uint32_t moves;          /* elastic.moves than by then */
    uint32_t window_end;     /* else: of the window, positions below are in the lists of groups with slots */
    uint64_t listed;         /* entries of all lists of groups without, which are whole */
    uint64_t listed_slots;   /* and of those with, if they are */
};

struct sequence {
    struct arena_sequence *record; /* NULL: the place is free */
    uint64_t id;
    uint32_t index;                                          /* of the record, and in the tables */
    uint32_t capacity, prompt_tokens, sinks, window, budget; /* as in the record, which is never read back */
    uint64_t salt;
    struct made made;
    bool attached;           /* belongs to the decoder that is there now */
    int64_t orphan_until_ns; /* not attached: when it is dropped */
    bool closing;            /* CLOSE has come; waits for the step that names it */
    uint64_t close_request;
    bool failed;             /* a step of it could not be served: every later one is refused */
    bool in_step;            /* named by the step in flight */
    uint32_t next;           /* position of the next token */
    uint32_t committed;      /* positions whose rows are in the arena, for all that is gathered from now on */
    uint32_t published;      /* and for whoever reads the arena: as far as record->committed says */
    uint32_t blocks;         /* entries of record->block */
    uint32_t blocks_reached; /* blocks [0, blocks_reached) are registered with the GPU */
    uint32_t sealed;         /* blocks [0, sealed) are SEALED */
    uint32_t first_sparse;   /* lowest position made by a sparse step, or UINT32_MAX */

    uint32_t pages_max;
    uint64_t *pages;                  /* [layer][pages_max] places of own pages */
    uint32_t pages_have[LIMIT_RUNS];  /* pages of each layer of the run */
    uint32_t pages_valid[LIMIT_RUNS]; /* positions whose rows are in them */
    uint64_t *slabs; /* [layer][slabs_max] places of slabs with slots; UINT64_MAX: none needed */
    bool has_slots[LIMIT_LAYERS];
    uint32_t slabs_max, slots, slot_slabs;   /* slot_slabs: of one layer */
    uint32_t pages_written[2][LIMIT_LAYERS]; /* valid entries of the tables, per parity */
    bool slabs_written[2][LIMIT_LAYERS];
    struct sequence_draft draft[2][2]; /* [parity][phase] */
    uint32_t drafts_used;              /* steps whose lists were there before their record */
    uint32_t drafts_whole;             /* of those, all of them and with slots */
    bool slabs_sent[LIMIT_LAYERS];     /* to the GPU */

    struct elastic elastic; /* with budget 0: never used */
    struct sequence_topk *pending;
    uint32_t debts;       /* loads [0, debts) of elastic.loads lack layers below debt_layers */
    uint32_t debt_layers; /* 0: none */
    uint32_t loaded;      /* rows gathered since the last step's tables */
    struct kv_counters counters;
};

struct sequence_params { /* what of the store's options and segments a sequence needs */
    const struct kv_layout *layout;
    uint32_t header_slots, slabs_max, units_per_slab; /* as in the control header */
    bool reload;
};

/* Sets everything up for a record that is filled in. */
void sequence_init(struct sequence *sequence, struct arena_sequence *record, uint32_t index);

/* Makes the device side: nothing is allocated on the device yet. `slots`: of one (group, row head). */
void sequence_attach(struct sequence *sequence, const struct sequence_params *params, uint32_t slots);

/* Gives back pages and slots, forgets sets; the record stays. */
void sequence_detach(struct sequence *sequence, struct device *device);

/* Gives the blocks back - sealed ones stay cached - and frees the record. */
void sequence_drop(struct sequence *sequence, struct prefix *prefix);

/* Slabs of slots that one layer of a sequence with so many slots occupies. */
uint32_t sequence_slot_slabs(const struct sequence_params *params, uint32_t slots);

/* Pages of a run's layers up to `pages`. 0 or -ENOSPC (what was had before stays). */
int sequence_grow_pages(struct sequence *sequence, struct device *device, const struct kv_layout *layout,
                        uint32_t run, uint32_t pages);
void sequence_give_pages(struct sequence *sequence, struct device *device, const struct kv_layout *layout,
                         uint32_t run);
int sequence_take_slots(struct sequence *sequence, struct device *device,
                        const struct sequence_params *params, uint32_t layer);
void sequence_give_slots(struct sequence *sequence, struct device *device, uint32_t layer);

/* Records token ids at [position, position + count), taking blocks as needed. 0 or -ENOSPC. */
int sequence_record(struct sequence *sequence, struct prefix *prefix, uint32_t position,
                    const uint32_t *tokens, uint32_t count);

/* Rows of [0, end) are in the arena: publishes that and seals whole blocks. */
void sequence_publish(struct sequence *sequence, struct prefix *prefix, uint32_t end);

/* Copies ids [0, n) out of the blocks. */
void sequence_tokens(const struct sequence *sequence, const struct blocks *blocks, uint32_t n, uint32_t *ret);

/* Pins what a sparse step at `position` reads with the set in use: elastic_pin. */
void sequence_pin(struct sequence *sequence, uint32_t position);

void sequence_pending_free(struct sequence_topk **pending);

static inline uint32_t sequence_pages(uint32_t positions)
{
    return positions / BLOCK_TOKENS + (positions % BLOCK_TOKENS != 0);
}

#endif
