/* The model that is measured: forward passes over pages, in this process, with full attention or with sets.
 * One thread (and the pools behind the operators). */
#ifndef EVAL_ENGINE_H
#define EVAL_ENGINE_H

#include <signal.h>
#include <stdint.h>

#include "base/err.h"
#include "decoder/pass.h"
#include "eval/pages.h"
#include "model/model.h"
#include "model/tokenizer.h"

#define ENGINE_CHUNK 256u /* tokens of one dense call */
#define ENGINE_LANES 64u  /* sequences of one call */

struct engine {
    struct model *model;
    const struct model_config *config;
    struct tokenizer *tokenizer; /* NULL: the model has none */
    struct pass *pass;
    struct compute *compute; /* for all but the pass */
    int threads;
    void (*progress)(uint32_t position); /* after each dense call: the position behind it; may be NULL */
};

struct engine_options {
    const char *model;
    int threads;
    uint32_t activations; /* enum compute_activations */
};

int engine_open(const struct engine_options *options, struct engine *ret, struct err *err);
void engine_close(struct engine *engine); /* accepts a zeroed object; leaves one */

/* Set by a signal: every call below ends with -ECANCELED at its next layer. */
extern volatile sig_atomic_t engine_interrupted;

/* One token of one sequence. */
struct engine_step {
    const struct pages *pages;
    uint32_t sequence, position, token;
    const struct attn_list *lists; /* [groups][kv_heads]; NULL: all positions */
    const uint32_t *group_of;      /* [layers], with lists */
};

/* Computes the tokens of all steps (at most ENGINE_LANES); row i of pass_logits is that of step i. */
int engine_steps(struct engine *engine, const struct engine_step *steps, uint32_t count, struct err *err);

/* Called after each layer of engine_dense; tokens first .. first + count - 1 were computed. */
struct engine_watch {
    void (*layer)(void *arg, const struct engine *engine, const struct kv_view *view, uint32_t layer,
                  uint32_t first, uint32_t count);
    void *arg;
};

/* Tokens first .. first + count - 1 (at most ENGINE_CHUNK) of a sequence, with full attention; logits of the
 * last `logits` of them. `watch` may be NULL. */
struct engine_chunk {
    const struct pages *pages;
    uint32_t sequence;
    const uint32_t *tokens; /* of the sequence, from position 0 */
    uint32_t first, count, logits;
};
int engine_dense(struct engine *engine, const struct engine_chunk *chunk, const struct engine_watch *watch,
                 struct err *err);

/* engine_dense over tokens [0, count) of sequence 0, logits of the last one. */
int engine_prefill(struct engine *engine, const struct pages *pages, const uint32_t *tokens, uint32_t count,
                   struct err *err);

#endif
