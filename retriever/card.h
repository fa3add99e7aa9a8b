/* The retriever's projection and ranking on a GPU: what projection.h and rank.h do on the CPU, behind
 * compute/gpu.h. Keys, queries, weights and Top-K stay on the card; lists and masses come back.
 *
 * Activations and weights are bf16 where products take them, keys f16 as on the CPU or of 8 bits
 * (compute_key_quantize), as the CPU rounds them when it is told to. Memory is taken at
 * start, once: keys of `sequences` times `context` positions, and slices of work of a bounded size.
 *
 * One thread at a time uses a card. An error of the GPU ends the process (exit status 1, one line), since a
 * context that failed cannot be used again. */
#ifndef RETRIEVER_CARD_H
#define RETRIEVER_CARD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "compute/gpu.h"
#include "model/head.h"
#include "model/model.h"
#include "retriever/projection.h"
#include "retriever/rank.h"

struct card;

struct card_options {
    const char *device; /* as struct gpu_api says */
    const struct model *model;
    const struct head *head;
    enum head_pool pool;
    uint32_t context, sequences;
    bool keys_int8;
    uint64_t work_bytes;     /* bound of one slice of work, where one query fits; 0: MEMORY_GPU_WORK */
    struct compute *compute; /* borrowed: widens the model's tensors at load; its pool collects lists */
};

/* -ENOTSUP: a head, or a context, that the kernels do not serve; -ENOMEM with what was wanted for what and
 * what the card has; errors as gpu_load, gpu_api.open and projection_rotation. */
int card_create(const struct card_options *options, struct card **ret_card, struct err *err);
void card_free(struct card **card);

const struct model_rope *card_rope(const struct card *card);
const struct gpu_info *card_info(const struct card *card);

const struct gpu_api *card_api(const struct card *card);
struct gpu *card_gpu(const struct card *card);

/* For a head with features of the model: their rows, at an address of the card, until other ones are set. */
void card_set_features(struct card *card, const void *rows, uint32_t count);

/* Keys of BLOCK_TOKENS positions of the sequence at `place`, as keys_read_block and keys_write_block have
 * them (of 8 bits with the list's scales behind each list), and a row of the features, to host memory or from
 * it. BLOCK_TOKENS * card_key_bytes; queued: card_sync waits for them. */
void card_read_block(struct card *card, uint32_t place, uint32_t position, uint8_t *to);
void card_write_block(struct card *card, uint32_t place, uint32_t position, const uint8_t *from);
void card_read_row(struct card *card, uint32_t row, uint8_t *to);
void card_sync(struct card *card);

/* Bytes on the card, by kind. */
struct card_bytes {
    uint64_t context, weights, keys, workspace, libraries;
};
struct card_bytes card_bytes(const struct card *card);

/* Steps that were launched as a graph. */
uint64_t card_graph_steps(const struct card *card);

/* Bytes of keys that one position takes, all groups. */
uint64_t card_key_bytes(const struct card *card);

/* As projection_run: keys of all parts, queries of those that want one. keys->count counts, nothing else of
 * `keys` is used; `place` < sequences names the sequence's keys on the card. */
void card_project(struct card *card, const struct projection_part *parts, uint32_t part_count);

/* What a query's set changed by. The positions of all lists - list by list (group * kv_heads + kv_head) those
 * added, then those removed, ascending - without a gap. Valid until card_set's `flushed` returns. */
struct card_changes {
    const uint32_t *counts; /* [lists][added, removed] */
    const uint32_t *positions;
    uint64_t total; /* positions */
};

/* What becomes of results. The last two sets of a sequence stay on the card (lists by mass apart: their items
 * have lists on the host, as rank_run's). */
struct card_sink {
    const uint32_t *how; /* [queries] enum cuda_sets_how: which of the two is made, whether it is compared */
    /* In the order of queries, after the item's `found` is there; NULL: its lists went by mass. */
    void (*take)(void *arg, uint32_t query, const struct card_changes *changes);
    void (*flushed)(void *arg); /* after some queries: their changes are about to be overwritten */
    void *arg;
};

/* Bytes of a decode step. Over the link: up 18 KB of ids, places and ranges; down 4 for each position added
 * or removed, and for each half 1 KB for each list of one sequence. On the card: keys once (2 * head_dim for
 * each position and list, of 8 bits head_dim + 2), scores 8 for each position and query head, weights twice,
 * sets 8 times.
 *
 * As rank_run, for items in the order of card_project's queries: item n * groups + g is query n, group g.
 * now, before, added and removed are used for lists by mass only. */
void card_rank(struct card *card, const struct rank_item *items, uint32_t count, const struct card_sink *sink,
               struct rank_times *ret_times);

/* One of the two sets of the sequence at `place` (second: as enum cuda_sets_how says): positions into
 * ret_positions, list after list, with their numbers in ret_counts [lists]. Returns how many. Room: what the
 * sets can have. */
uint64_t card_read_set(struct card *card, uint32_t place, bool second, uint32_t *ret_counts,
                       uint32_t *ret_positions);

/* Whether the host picks, and keeps the lists. */
static inline bool card_picks_by_mass(const struct reach_rule *rule)
{
    return rule->min_mass > 0 || rule->top_p > 0;
}

#endif
