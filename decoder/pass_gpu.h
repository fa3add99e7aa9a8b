/* The forward pass on a GPU: decoder/pass.h's computation, queued on the device's stream. Everything here
 * queues and returns; results are there when the stream has come to its end. Nothing waits, allocates or
 * reads a table on the host after creation, so what a batch queues can be captured into a graph, provided
 * that pass_gpu_prepare saw its shape before.
 *
 * Activations: the residual stream, queries, keys, values and gates are f32; what goes into a product is
 * rounded to bf16, as the weights are. Where KV lies and what is attended is told by a source, layer by
 * layer, as in pass.h. Device thread only. */
#ifndef DECODER_PASS_GPU_H
#define DECODER_PASS_GPU_H

#include <stdint.h>

#include "base/err.h"
#include "decoder/gpu_device.h"
#include "decoder/pass.h"
#include "decoder/weights_gpu.h"
#include "model/model.h"

struct pass_gpu;

struct pass_gpu_options {
    uint32_t tokens_max;  /* of one batch */
    uint32_t entries_max; /* sequences of one batch, and rows of logits */
    uint32_t list_max;    /* of sparse lists */
    uint32_t context;     /* the longest identity list */
};

/* What one layer reads and writes; see cuda_kv_write and cuda_attn. */
struct pass_gpu_kv {
    struct cuda_kv_view view;
    const uint32_t *write; /* items of the new pieces */
    uint64_t write_stride;
    int write_heads;       /* an item for each head (slots); else one a token (positions) */
    const uint32_t *items; /* lists; NULL: all positions up to each token's own */
    const uint32_t *counts;
    uint64_t item_stride, count_stride;
    const uint8_t *all; /* host memory, [n] 1: no list for this token, but all positions; NULL: for none */
};

struct pass_gpu_source {
    /* Called when the layer's queries, keys and values are queued and before anything of the cache is read
     * or written; may queue waits and copies, fills *ret_kv. `layer_done` (may be NULL): the layer is
     * queued. */
    int (*layer)(void *arg, uint32_t layer, struct pass_gpu_kv *ret_kv, struct err *err);
    int (*layer_done)(void *arg, uint32_t layer, struct err *err);
    /* As pass.h's; x is the device's. Queues what reads it. May be NULL. */
    int (*hidden)(void *arg, uint32_t layer, const float *x, struct err *err);
    void *arg;
};

/* Tokens; all pointers but `wanted` are the device's. */
struct pass_gpu_batch {
    uint32_t n;                /* tokens */
    const uint32_t *ids;       /* [n] */
    const uint32_t *positions; /* [n] */
    const uint32_t *rows;      /* [n] table rows; row_count and more: nothing is written or attended. Read
                                   from the first layer's source on */
    uint32_t row_count;
    const uint32_t *counts; /* [n] position + 1; needed where lists are identities */
    uint32_t count_max;     /* the largest of them */
    /* Prompts: attention by spans. NULL: by lists, one token a sequence, which stands last in its list. */
    const struct cuda_span *spans;
    uint32_t span_count, span_max;
    uint32_t logits;        /* rows that are wanted, in the order of `wanted` */
    const uint32_t *wanted; /* [logits] tokens; NULL: all */
};

struct pass_gpu_sampling {                      /* the device's addresses, or mapped host memory */
    const struct cuda_sample_params *params;    /* [logits] */
    const struct cuda_penalty_entry *penalties; /* NULL: none in this batch */
    const uint32_t *penalty_begin;              /* [logits + 1] */
    const float *penalty_params;                /* [logits][3] */
    int32_t *ret_ids;                           /* [logits] -1: not finite */
};

/* Allocates all activations. -ENOTSUP for models whose heads the kernels do not serve. `config`, `weights`
 * (of that model) and `device` are borrowed. */
int pass_gpu_create(struct gpu_device *device, const struct model_config *config,
                    const struct weights_gpu *weights, const struct pass_gpu_options *options,
                    struct pass_gpu **ret_pass, struct err *err);
void pass_gpu_free(struct pass_gpu **pass);

/* Plans the products of a batch of n tokens and `logits` rows. */
int pass_gpu_prepare(struct pass_gpu *f, uint32_t n, uint32_t logits, struct err *err);

/* Queues the pass up to the logits, then the choice of tokens. */
int pass_gpu_queue(struct pass_gpu *f, const struct pass_gpu_batch *batch,
                   const struct pass_gpu_source *source, struct err *err);
int pass_gpu_sample(struct pass_gpu *f, uint32_t rows, const struct pass_gpu_sampling *sampling,
                    struct err *err);

const float *pass_gpu_logits(const struct pass_gpu *f); /* device, [logits][vocab] of the last batch */
/* Device, [tokens][stride], the first [q_heads][head_dim] of each: normed and rotated queries of the layer in
 * work. For a source's layer_done, whose copies are queued before the next layer overwrites them. */
const float *pass_gpu_queries(const struct pass_gpu *f, uint64_t *ret_stride);
const struct model_config *pass_gpu_config(const struct pass_gpu *f);
struct gpu_device *pass_gpu_device(const struct pass_gpu *f);
const struct pass_gpu_options *pass_gpu_options(const struct pass_gpu *f);

/* Times. Between pass_gpu_profile(f, 1) and (f, 0) what is queued is surrounded by events; not inside a
 * capture. pass_gpu_collect, when the stream is done, adds what they measured: 1, or 0 if nothing was. */
struct pass_gpu_times { /* nanoseconds */
    struct pass_times compute;
    int64_t wait, sampling; /* wait: for the store's flags, copies of tables included */
};
void pass_gpu_profile(struct pass_gpu *f, int on);
int pass_gpu_collect(struct pass_gpu *f, struct pass_gpu_times *to);

#endif
