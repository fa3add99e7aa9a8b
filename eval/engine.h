/* The model that is measured: forward passes over pages, in this process, with full attention or with sets.
 * One thread (and the pools behind the operators). */
#ifndef EVAL_ENGINE_H
#define EVAL_ENGINE_H

#include <signal.h>
#include <stdint.h>

#include "base/err.h"
#include "decoder/pass.h"
#include "eval/pages.h"
#include "eval/taps.h"
#include "model/model.h"
#include "model/tokenizer.h"

#define ENGINE_CHUNK_MAX 2048u /* tokens of one dense call; an engine's own limit is in `chunk` */
#define ENGINE_LANES     128u  /* sequences, and rows of logits, of one call */

struct engine_gpu;

struct engine {
    struct model *model;
    const struct model_config *config;
    struct tokenizer *tokenizer; /* NULL: the model has none */
    struct pass *pass;           /* on the CPU, */
    struct engine_gpu *gpu;      /* or on a GPU */
    struct compute *compute;     /* for all but the pass */
    int threads;
    uint32_t chunk;                      /* tokens of one dense call, at most */
    struct taps taps;                    /* of the last call; taps_add before one */
    void (*progress)(uint32_t position); /* after each dense call: the position behind it; may be NULL */
};

struct engine_options {
    const char *model;
    const char *device; /* NULL: "cpu" */
    int threads;
    uint32_t activations; /* enum compute_activations */
    uint32_t list_max;    /* of sparse lists; for a GPU */
};

int engine_open(const struct engine_options *options, struct engine *ret, struct err *err);
void engine_close(struct engine *engine); /* accepts a zeroed object; leaves one */

/* Set by a signal: every call below ends with -ECANCELED at its next layer. */
extern volatile sig_atomic_t engine_interrupted;

/* Pages for a batch; what sequences share, after it was computed, gets to all of them. */
int engine_pages(struct engine *engine, const struct pages_sequence *sequences, uint32_t count,
                 struct pages *ret, struct err *err);
void engine_pages_free(struct engine *engine, struct pages *pages); /* accepts a zeroed object; leaves one */
int engine_fork(struct engine *engine, struct pages *pages, struct err *err);

/* One token of one sequence. */
struct engine_step {
    const struct pages *pages;
    uint32_t sequence, position, token;
    const struct attn_list *lists; /* [groups][kv_heads]; NULL: all positions */
    const uint32_t *group_of;      /* [layers], with lists */
};

/* Computes the tokens of all steps (at most ENGINE_LANES, of the same pages); row i of engine_logits is that
 * of step i. */
int engine_steps(struct engine *engine, const struct engine_step *steps, uint32_t count, struct err *err);

/* Called after each layer of engine_dense; tokens first .. first + count - 1 were computed. */
struct engine_watch {
    void (*layer)(void *arg, const struct engine *engine, const struct kv_view *view, uint32_t layer,
                  uint32_t first, uint32_t count);
    void *arg;
};

/* Tokens first .. first + count - 1 (at most engine.chunk) of a sequence, with full attention; logits of the
 * last `logits` (at most ENGINE_LANES) of them. `watch` may be NULL. */
struct engine_chunk {
    const struct pages *pages;
    uint32_t sequence;
    const uint32_t *tokens; /* of the sequence, from position 0 */
    uint32_t first, count, logits;
};
int engine_dense(struct engine *engine, const struct engine_chunk *chunk, const struct engine_watch *watch,
                 struct err *err);

/* engine_dense over tokens [0, count) of a sequence, logits of the last one. `features` (may be NULL): rows
 * of taps of all tokens. */
int engine_prefill(struct engine *engine, const struct pages *pages, uint32_t sequence,
                   const uint32_t *tokens, uint32_t count, float *features, struct err *err);

/* Room for rows of taps of so many tokens; NULL when no head looks at them. */
float *engine_features_alloc(const struct engine *engine, uint32_t tokens);

/* [vocab], rows of the last call; may be overwritten by the caller. */
float *engine_logits(const struct engine *engine, uint32_t row);

/* [q_heads][head_dim] of a token of the chunk in the layer in work, for a watch. */
const float *engine_queries(const struct engine *engine, uint32_t token);

#endif
