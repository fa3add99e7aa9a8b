/* The forward pass of a model (model/model.h: llama, qwen2, qwen3, mistral) over tokens of one or several
 * sequences: weights and activations, no KV.
 *
 * Where KV pieces lie and which positions a token attends is told by a source, layer by layer: the daemon's
 * source reads the store's tables, a test's hands out pages of its own. Nothing here knows of sockets,
 * segments or steps. Results of a token depend on its ids, its positions and its lists alone, never on what
 * else is computed with it, on chunking, or on where the pieces lie (compute/compute.h). One thread. */
#ifndef DECODER_PASS_H
#define DECODER_PASS_H

#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "model/model.h"

struct pass;

struct pass_options {
    int threads; /* >= 1 */
    enum compute_isa isa;
    enum compute_activations activations;
    uint32_t tokens_max; /* of one call, all entries together */
    uint32_t entries_max;
    uint32_t logits_max; /* rows of logits of one call */
};

/* Consecutive tokens of one sequence. */
struct pass_entry {
    const uint32_t *tokens; /* [count], each < vocab */
    uint32_t position;      /* of the first */
    uint32_t count;
    uint32_t logits; /* logits are wanted of the last so many tokens, 0 .. count */
};

/* What one layer reads and writes for one entry. */
struct pass_kv {
    struct kv_view view;
    /* [kv_heads] for the entry's one token; NULL: all positions up to each token's own (paged views only) */
    const struct attn_list *lists;
    /* [kv_heads] slots of the entry's one token (slotted views); NULL: its position */
    const uint32_t *write;
    int dropped; /* nothing is written or attended; the entry's results mean nothing */
};

struct pass_source {
    /* Called in each layer, in order, when its queries, keys and values are computed and before anything of
     * the cache is read or written, so that waiting meets less; with kv[entries] (of the layer before, at
     * first zero): fills it and may wait. Every offset and item that it hands out must lie inside the memory
     * at view.base. A negative errno ends the pass. */
    int (*layer)(void *arg, uint32_t layer, struct pass_kv *kv, struct err *err);
    /* Called after a layer was computed: its pieces are written and it reads no more. May be NULL. */
    void (*layer_done)(void *arg, uint32_t layer);
    /* Called with the hidden states that enter a layer, x [token][hidden], tokens in the order of the
     * entries, and with `layer` == the number of layers for those that leave the last one. May be NULL. */
    void (*hidden)(void *arg, uint32_t layer, const float *x);
    void *arg;
};

struct pass_times {                   /* nanoseconds, summed over all calls */
    int64_t matmul, attention, other; /* other: norms, rope, activation, embedding, KV writes */
};

/* 0, or -ENODEV of compute_create, or -EINVAL for frequencies that make no sense. `model` is borrowed. All
 * memory of later calls is allocated here. */
int pass_create(const struct model *model, const struct pass_options *options, struct pass **ret_pass,
                struct err *err);
void pass_free(struct pass **pass);

/* Computes all tokens. Counts must be within the options, each entry has a token: CHECKed. 0, or what the
 * source returned. */
int pass_run(struct pass *f, const struct pass_entry *entries, uint32_t count,
             const struct pass_source *source, struct err *err);

/* [vocab], rows in the order of the entries of the last call; may be overwritten by the caller. */
float *pass_logits(struct pass *f, uint32_t row);

/* [token][q_heads][head_dim], normed and rotated, of the layer in work: as attention takes them. For a
 * source, within its calls; tokens in the order of the entries. */
const float *pass_queries(const struct pass *f);

uint32_t pass_vocab(const struct pass *f);
const struct pass_times *pass_times(const struct pass *f);
const char *pass_backend(const struct pass *f); /* compute_name */
uint64_t pass_bytes(const struct pass *f);      /* of activations */

#endif
