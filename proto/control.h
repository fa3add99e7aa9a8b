/* The control segment: flags, step records and tables between one store and one decoder.
 * Byte-level description, edges and death rules: SHARED-MEMORY.md section 3.
 *
 * One memfd, made anew by the store for each (store epoch, decoder epoch) pair and never re-used, so a late
 * writer of a dead pair can harm nobody. Every field has one writer, named here. Offsets into device memory
 * are in bytes from its begin.
 *
 *   0          struct control_header              written once by the store before the fd is sent
 *   flags_at   struct control_flag [FLAG_COUNT]   one cache line each
 *   steps_at   struct step_record [STEP_RING]     decoder; record of step t at t % STEP_RING
 *   tables_at  two struct-of-arrays tables, step t uses parity t & 1; store
 */
#ifndef PROTO_CONTROL_H
#define PROTO_CONTROL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/layout.h"

#define CONTROL_MAGIC   UINT64_C(0x313043544E4F4353) /* "SCONTC01" */
#define CONTROL_VERSION 3u

/* Steps are 32-bit and compared cyclically. A flag of step t is raised by storing t, and satisfies a waiter
 * for step s when (int32_t)(t - s) >= 0. To break every wait for ever, a flag is set FLAG_ABORT_AHEAD past
 * the step: the same comparison (and a GPU's stream wait for >=) lets the waiter go, and it sees that the
 * value is at least FLAG_ABORT_AHEAD / 2 ahead of what it asked for. */
#define FLAG_ABORT_AHEAD 0x40000000u

enum control_flag_index {
    FLAG_STEP_POSTED,       /* decoder: record of step t is complete */
    FLAG_KV_WRITTEN,        /* decoder: KV of every entry of step t lies in device memory */
    FLAG_STEP_CONSUMED,     /* decoder: tables and slots of step t are read no more */
    FLAG_RESIDENT_ACKED,    /* decoder: version of the resident set that it uses from its next record on */
    FLAG_TABLES_EARLY,      /* store: tables of step t, phase 0 (mixed selection only) */
    FLAG_TABLES_LATE,       /* store: tables of step t, phase 1 and everything phases share */
    FLAG_COMMITTED,         /* store: rows of step t are in the arena */
    FLAG_RESIDENT_PROPOSED, /* store: version of the resident set that it wants */
    FLAG_ROWS_READY,        /* store: + run: rows that run needs for step t are in place */
    FLAG_RUN_CONSUMED =
        FLAG_ROWS_READY + LIMIT_RUNS, /* decoder: + run: dense step t: run's KV written, read no more */
    FLAG_COUNT = FLAG_RUN_CONSUMED + LIMIT_RUNS
};

struct control_flag {
    _Atomic uint32_t value;   /* writer: as listed */
    _Atomic uint32_t waiters; /* writer: the one reader; nonzero while it sleeps (futex form only) */
    _Atomic uint32_t aborted; /* either side, 0 -> 1 once, before it moves value by FLAG_ABORT_AHEAD */
    uint32_t pad[13];
};

/* Device memory: a memfd whose descriptor is sent, or memory of a GPU, opened by its handle. */
enum control_device { CONTROL_DEVICE_MEMFD = 0, CONTROL_DEVICE_CUDA = 1 };
enum { CONTROL_UUID_BYTES = 48, CONTROL_HANDLE_BYTES = 64, CONTROL_RESIDENT_RING = 64 };

struct control_header {
    uint64_t magic;
    uint32_t version;
    uint32_t header_bytes;
    uint64_t store_epoch, decoder_epoch;
    uint64_t layout_lo, layout_hi; /* layout_fingerprint */
    uint64_t total_bytes;          /* of this segment */
    uint64_t device_bytes;         /* of device memory */
    uint64_t slab_bytes, page_bytes;
    uint64_t flags_at, steps_at, tables_at, table_bytes; /* table_bytes: of one parity */
    uint32_t layers, groups, row_heads, selection_heads, runs;
    uint32_t sequences_max;
    uint32_t list_max;       /* room of one list, for the largest budget and one position more */
    uint32_t pages_max;      /* pages of one (sequence, layer) */
    uint32_t slabs_max;      /* slabs of one (sequence, layer) that hold slots */
    uint32_t slots;          /* slots of one (sequence, group, row head) */
    uint32_t units_per_slab; /* pieces that one slab holds */
    uint32_t
        staging_tokens;   /* positions that one dense step may touch while layers are offloaded, all entries
                                together; 0: no limit (nothing can be offloaded) */
    uint32_t first_step;  /* the first record's step */
    uint32_t device_form; /* enum control_device */
    char device_uuid[CONTROL_UUID_BYTES];        /* CUDA: the GPU that device memory lies on; else zeros */
    uint8_t device_handle[CONTROL_HANDLE_BYTES]; /* CUDA: IPC handle of device memory; else zeros */
    uint64_t checksum;                           /* low half of hash_bytes(0, all fields above) */
    /* Resident layers of version v of the resident set, at v % CONTROL_RESIDENT_RING: written by the store
     * before it raises RESIDENT_PROPOSED to v. Version 0 is all layers. */
    uint32_t resident_layers[CONTROL_RESIDENT_RING];
};

enum step_kind {
    STEP_DENSE = 1,  /* full attention over pages (prefill, --attention full) */
    STEP_SPARSE = 2, /* one token an entry, attention over the tables' lists */
    STEP_RECORD = 3, /* token ids only: nothing is computed, no table is made; COMMITTED is raised */
};

enum selection_mode { SELECTION_CURRENT = 0, SELECTION_PREVIOUS = 1, SELECTION_MIXED = 2 };

struct step_entry {
    uint64_t id;       /* sequence */
    uint32_t sequence; /* its index in the tables */
    uint32_t position; /* of the first token */
    uint32_t count;    /* tokens */
    uint32_t token_at; /* index of the first in token[] */
};

struct step_record { /* writer: decoder; complete when FLAG_STEP_POSTED reaches `step` */
    uint32_t step;
    uint32_t kind;             /* enum step_kind */
    uint32_t selection;        /* enum selection_mode */
    uint32_t early_layers;     /* mixed: layers [0, early_layers) use phase 0, the others phase 1 */
    uint32_t resident_version; /* version acked before this record */
    uint32_t entries, tokens;
    uint32_t pad0;
    struct step_entry entry[LIMIT_SEQUENCES];
    uint32_t token[LIMIT_STEP_TOKENS];
};

/* One per parity, at table_at + parity * table_bytes; arrays follow at the offsets of struct
 * table_offsets. */
struct table_header { /* writer: store; complete when FLAG_TABLES_LATE reaches `step` */
    uint32_t step;
    uint32_t resident_version;
    uint8_t
        resident[LIMIT_LAYERS]; /* 1: all KV of the layer is in pages; 0: slots (sparse) or staging (dense) */
};

/* All positions, up to the token's own, are attended in layers whose KV is in pages; lists are for the
 * others. */
enum table_sequence_flags { TABLE_ATTEND_ALL = 1 };

/* Per (phase, sequence). */
struct table_sequence {
    uint32_t step;   /* equals the step when the sequence has an entry in it */
    int32_t status;  /* 0, or a negative errno: the entry must be dropped and its sequence ended */
    uint32_t loaded; /* rows gathered for it in this step, all groups and heads */
    uint32_t flags;  /* enum table_sequence_flags */
};

/* Offsets in bytes from the begin of a parity's table. All are multiples of 64. */
struct table_offsets {
    uint64_t sequences; /* struct table_sequence [2 phases][sequences_max] */
    uint64_t counts;    /* u32 [2][sequences_max][groups][selection_heads]: attended positions */
    uint64_t writes;    /* u32 [sequences_max][groups][row_heads]: slot for the KV of the entry's token */
    uint64_t pages; /* u64 [sequences_max][layers][pages_max]: own pages if resident, else staging pages */
    uint64_t slabs; /* u64 [sequences_max][layers][slabs_max] */
    uint64_t positions; /* u32 [2][sequences_max][groups][selection_heads][list_max], ascending */
    uint64_t slots;     /* u32, same shape: the slot of each position, in the row head that serves the head */
    uint64_t bytes;     /* of the whole table, a multiple of 4096 */
};

_Static_assert(sizeof(struct control_flag) == 64, "layout");
_Static_assert(sizeof(struct control_header) == 544, "layout");
_Static_assert(offsetof(struct control_header, layers) == 112, "layout");
_Static_assert(offsetof(struct control_header, checksum) == 280, "layout");
_Static_assert(sizeof(struct step_entry) == 24, "layout");
_Static_assert(offsetof(struct step_record, entry) == 32, "layout");
_Static_assert(sizeof(struct step_record) == 32 + LIMIT_SEQUENCES * 24 + LIMIT_STEP_TOKENS * 4, "layout");
_Static_assert(sizeof(struct table_header) == 8 + LIMIT_LAYERS, "layout");
_Static_assert(sizeof(struct table_sequence) == 16, "layout");

/* What the store chooses; everything else of a control_header follows from it and the layout. */
struct control_params {
    uint64_t store_epoch, decoder_epoch;
    uint64_t device_bytes;
    uint32_t sequences_max, list_max, slots, staging_tokens, first_step;
    uint32_t device_form;
    const char *device_uuid;      /* CUDA only */
    const uint8_t *device_handle; /* CUDA only */
};

/* Places of one list: the budget, one more for `previous`, rounded up to cache lines. */
uint32_t control_list_max(uint32_t budget, uint32_t context);
/* Fills a header, offsets and checksum included. */
void control_header_init(struct control_header *header, const struct kv_layout *layout,
                         const struct control_params *params);

/* What the decoder does before it touches anything else: recomputes all of it and compares. `file_bytes` from
 * fstat. 0, -EINVAL or -EPROTO with one line: field, found, expected. */
int control_header_check(const struct control_header *header, const struct kv_layout *layout,
                         uint64_t file_bytes, struct err *err);

void control_table_offsets(const struct control_header *header, struct table_offsets *ret_offsets);

static inline struct control_flag *control_flag_at(struct control_header *h, unsigned flag)
{
    return (struct control_flag *)((uint8_t *)h + h->flags_at) + flag;
}

static inline struct step_record *control_step_at(struct control_header *h, uint32_t step)
{
    return (struct step_record *)((uint8_t *)h + h->steps_at) + (step & (STEP_RING - 1));
}

static inline struct table_header *control_table_at(struct control_header *h, uint32_t step)
{
    return (struct table_header *)((uint8_t *)h + h->tables_at + (step & 1) * h->table_bytes);
}

/* Element addresses inside one parity's table; indices must be below the header's counts. */
struct table_view {
    const struct control_header *header;
    uint8_t *base; /* control_table_at() */
    struct table_offsets at;
};

static inline struct table_sequence *table_sequence_at(const struct table_view *t, uint32_t phase,
                                                       uint32_t seq)
{
    return (struct table_sequence *)(t->base + t->at.sequences) + (uint64_t)phase * t->header->sequences_max +
           seq;
}

static inline uint64_t table_list_index(const struct table_view *t, uint32_t phase, uint32_t seq,
                                        uint32_t group, uint32_t head)
{
    const struct control_header *h = t->header;
    return (((uint64_t)phase * h->sequences_max + seq) * h->groups + group) * h->selection_heads + head;
}

static inline uint32_t *table_count_at(const struct table_view *t, uint64_t list)
{
    return (uint32_t *)(t->base + t->at.counts) + list;
}

static inline uint32_t *table_positions_at(const struct table_view *t, uint64_t list)
{
    return (uint32_t *)(t->base + t->at.positions) + list * t->header->list_max;
}

static inline uint32_t *table_slots_at(const struct table_view *t, uint64_t list)
{
    return (uint32_t *)(t->base + t->at.slots) + list * t->header->list_max;
}

static inline uint32_t *table_write_at(const struct table_view *t, uint32_t seq, uint32_t group)
{
    const struct control_header *h = t->header;
    return (uint32_t *)(t->base + t->at.writes) + ((uint64_t)seq * h->groups + group) * h->row_heads;
}

static inline uint64_t *table_pages_at(const struct table_view *t, uint32_t seq, uint32_t layer)
{
    const struct control_header *h = t->header;
    return (uint64_t *)(t->base + t->at.pages) + ((uint64_t)seq * h->layers + layer) * h->pages_max;
}

static inline uint64_t *table_slabs_at(const struct table_view *t, uint32_t seq, uint32_t layer)
{
    const struct control_header *h = t->header;
    return (uint64_t *)(t->base + t->at.slabs) + ((uint64_t)seq * h->layers + layer) * h->slabs_max;
}

#endif
