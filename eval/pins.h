/* What a prompt's end looked at: attention weights of its last tokens, of all layers, as they come out of
 * prefill. A lane may keep the best of these positions in all of its sets. */
#ifndef EVAL_PINS_H
#define EVAL_PINS_H

#include <stdint.h>

#include "base/err.h"
#include "eval/engine.h"

#define PINS_TOKENS 8u /* last tokens of the prompt */

struct pins {
    uint32_t layers, heads, count; /* count: tokens of the prompt */
    float *weights;                /* [layers][heads][count]: sums over those tokens */
};

/* engine_prefill, and the weights. */
int pins_prefill(struct engine *engine, const struct pages *pages, uint32_t sequence, const uint32_t *tokens,
                 uint32_t count, float *features, struct pins *ret, struct err *err);
void pins_free(struct pins *pins); /* accepts a zeroed object; leaves one */

#endif
