/* The host arena: one memfd that holds every KV row and everything needed to make sense of it again.
 * Byte-level description and death rules: SHARED-MEMORY.md section 1. Only the store maps it; the supervisor
 * (or systemd's descriptor store) merely holds the descriptor, so that it outlives the store.
 *
 *   0            struct arena_header
 *   records_at   struct arena_sequence [sequences_max], each record_bytes long
 *   blocks_at    struct arena_block [blocks_max]
 *   rows_at      block b: kv rows [row head][token][layer][piece], then key rows [token][key_row_bytes];
 *                layers from layout.host_first_layer on
 *
 * The file grows at its end, by chunks (blocks_present tells whole blocks). One writer of every field: the
 * store's planner thread. Counts are published by release stores, after what they count. */
#ifndef PROTO_ARENA_H
#define PROTO_ARENA_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/layout.h"

#define ARENA_MAGIC    UINT64_C(0x3130415845504353) /* "SCPEXA01" */
#define ARENA_VERSION  2u
#define ARENA_NO_BLOCK UINT32_MAX

struct arena_header {
    uint64_t magic;
    uint32_t version;
    uint32_t header_bytes;         /* sizeof(struct arena_header) */
    uint64_t layout_lo, layout_hi; /* layout_fingerprint */
    struct kv_layout layout;
    uint32_t sequences_max;
    uint32_t record_bytes; /* stride of sequence records */
    uint32_t blocks_max;
    uint32_t pad0; /* zero */
    uint64_t records_at, blocks_at, rows_at;
    uint64_t block_bytes;
    uint64_t salt;            /* of the prefix hashes */
    uint64_t header_checksum; /* low half of hash_bytes(0, all fields above) */
    /* Fields below change while the store runs. */
    _Atomic uint32_t blocks_present; /* blocks that the file is long enough for */
    uint32_t pad1;
    _Atomic uint64_t store_epoch; /* of the store that last wrote */
};

/* How the KV of a block was made: blocks are re-used only by requests that ask for the same. */
enum arena_made { ARENA_MADE_FULL = 1, ARENA_MADE_SPARSE = 2 };

struct made {
    uint32_t kind;   /* enum arena_made */
    uint32_t budget; /* sparse: positions attended, else 0 */
    uint64_t head;   /* sparse: fingerprint of the retrieval head (low half), else 0 */
};

enum arena_block_state {
    ARENA_BLOCK_FREE = 0,
    ARENA_BLOCK_FILLING = 1, /* owned by one sequence, fewer than 64 rows committed, or not hashed yet */
    ARENA_BLOCK_SEALED = 2,  /* 64 rows committed, hash valid, never written again */
};

struct arena_block {
    uint64_t hash_lo, hash_hi;     /* chain hash over salt, made and all tokens up to the end of this block */
    uint64_t parent_lo, parent_hi; /* chain hash of the block before, 0 for the first */
    struct made made;
    uint32_t ntokens;  /* ids below that are valid, <= 64 */
    uint32_t pad0[19]; /* zero */
    uint32_t tokens[BLOCK_TOKENS];
    _Atomic uint32_t state; /* publish word */
    uint32_t pad1[15];
};

enum arena_sequence_state {
    ARENA_SEQUENCE_FREE = 0,
    ARENA_SEQUENCE_LIVE = 1,
    ARENA_SEQUENCE_LIMBO = 2, /* closed, still named by an unfinished step */
};

struct arena_sequence {
    uint64_t id;      /* decoder's id of the sequence */
    uint64_t salt;    /* of its prefix hashes */
    struct made made; /* how rows past the prompt are made */
    uint32_t prompt_tokens;
    uint32_t capacity; /* positions it may grow to: blocks are reserved for them */
    uint32_t sinks, window, budget;
    uint32_t cached_tokens; /* reused from other sequences at the start */
    uint32_t pad0[2];
    _Atomic uint32_t blocks;    /* entries of block[] that are valid */
    _Atomic uint32_t tokens;    /* ids recorded: token p is blocks[p / 64].tokens[p % 64] */
    _Atomic uint32_t committed; /* positions whose rows are in the arena */
    _Atomic uint32_t state;     /* publish word */
    uint32_t block[];           /* [context_max / 64, rounded up] */
};

_Static_assert(sizeof(struct made) == 16, "layout");
_Static_assert(sizeof(struct arena_block) == 448, "layout");
_Static_assert(offsetof(struct arena_block, tokens) == 128, "layout");
_Static_assert(offsetof(struct arena_block, state) == 384, "layout");
_Static_assert(offsetof(struct arena_sequence, blocks) == 64, "layout");
_Static_assert(offsetof(struct arena_sequence, block) == 80, "layout");
_Static_assert(offsetof(struct arena_header, layout) == 32, "layout");
_Static_assert(sizeof(struct kv_layout) == 120, "layout");
_Static_assert(offsetof(struct arena_header, blocks_present) == 216, "layout");
_Static_assert(sizeof(struct arena_header) == 232, "layout");

/* Fills every immutable field of `header` (sizes, offsets, checksum) for a layout. blocks_max and
 * sequences_max are the caller's; both > 0. */
void arena_header_init(struct arena_header *header, const struct kv_layout *layout, uint32_t sequences_max,
                       uint32_t blocks_max, uint64_t salt);

/* Checks a header that is `file_bytes` long in all: magic, version, checksum, offsets, lengths. 0 or -EINVAL
 * / -EPROTO with one line. Nothing else of the arena may be touched before this returned 0. */
int arena_header_check(const struct arena_header *header, uint64_t file_bytes, struct err *err);

uint64_t arena_file_bytes(const struct arena_header *header, uint32_t blocks); /* with that many blocks */

static inline struct arena_sequence *arena_sequence_at(struct arena_header *h, uint32_t index)
{
    return (struct arena_sequence *)((uint8_t *)h + h->records_at + (uint64_t)index * h->record_bytes);
}

static inline struct arena_block *arena_block_at(struct arena_header *h, uint32_t block)
{
    return (struct arena_block *)((uint8_t *)h + h->blocks_at) + block;
}

#endif
