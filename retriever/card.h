/* The retriever's projection and ranking on a GPU: what projection.h and rank.h do on the CPU, behind
 * compute/gpu.h. Keys, queries, weights and Top-K stay on the card; lists and masses come back.
 *
 * Activations and weights are bf16 where products take them, keys f16 as on the CPU. Memory is taken at
 * start, once: keys of `sequences` times `context` positions, and slices of work of a bounded size.
 *
 * One thread at a time uses a card. An error of the GPU ends the process (exit status 1, one line), since a
 * context that failed cannot be used again. */
#ifndef RETRIEVER_CARD_H
#define RETRIEVER_CARD_H

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

/* Bytes on the card, by kind. */
struct card_bytes {
    uint64_t context, weights, keys, workspace, libraries;
};
struct card_bytes card_bytes(const struct card *card);

/* Bytes of keys that one position takes, all groups. */
uint64_t card_key_bytes(const struct card *card);

/* As projection_run: keys of all parts, queries of those that want one. keys->count counts, nothing else of
 * `keys` is used; `place` < sequences names the sequence's keys on the card. */
void card_project(struct card *card, const struct projection_part *parts, uint32_t part_count);

/* As rank_run, for items in the order of card_project's queries: item n * groups + g is query n, group g. */
void card_rank(struct card *card, const struct rank_item *items, uint32_t count,
               struct rank_times *ret_times);

#endif
