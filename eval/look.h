/* What the model looks at: the attention weights of some queries of a text, computed while the text passes
 * through the model with full attention. */
#ifndef EVAL_LOOK_H
#define EVAL_LOOK_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "eval/engine.h"

/* One query position. */
struct look {
    uint32_t position, layers, heads; /* heads: KV heads */
    size_t stride;                    /* >= position + 1 */
    float *weights; /* [layers][heads][stride]: mean of the softmax weights of a KV head's query heads */
};

static inline const float *look_weights(const struct look *look, uint32_t layer, uint32_t head)
{
    return look->weights + ((size_t)layer * look->heads + head) * look->stride;
}

/* ret [heads + 1][stride]: mean over the layers [first, end) of each head, and behind them the mean over the
 * heads too. */
void look_mean(float *ret, const struct look *look, uint32_t first, uint32_t end);

struct look_text {
    uint32_t sequence; /* of the pages */
    const uint32_t *tokens;
    uint32_t first, count;     /* tokens before `first` are in the pages already */
    const uint32_t *positions; /* ascending, in [first, count) */
    uint32_t position_count;
    float *features; /* rows of taps of all tokens, filled up to the chunk in work; may be NULL */
    uint32_t logits; /* of the last so many tokens of the last chunk */
};

/* Calls `take` for each position, ascending; the look is valid during the call. `pages` has room for the text
 * in its sequence, which is filled. 0 or what the engine returned. */
int look_run(struct engine *engine, const struct pages *pages, const struct look_text *text,
             void (*take)(void *arg, const struct look *look), void *arg, struct err *err);

#endif
