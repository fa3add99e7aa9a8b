/* Free generation of several streams at once: prompts are computed once with full attention; behind them each
 * stream goes on by itself, with full attention or with sets of its own (its KV feeds its KV). */
#ifndef EVAL_DECODE_H
#define EVAL_DECODE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "eval/engine.h"
#include "eval/lane.h"
#include "model/sampler.h"

struct decode_stream {
    const uint32_t *prompt; /* streams with the same pointer share what is computed of it */
    uint32_t prompt_count;
    uint32_t tokens;   /* most to generate */
    bool stop;         /* at a token that ends a generation; it is not part of `out` */
    struct lane *lane; /* NULL: full attention. Lane and chooser are the stream's own. */
    struct sampler_params sampling;
    struct token_buf out; /* what it generated; released by the caller */
    bool ended;           /* the model ended it */
};

/* Lanes and choosers are reset first; `out` of each stream is emptied. 1 <= count <= ENGINE_LANES. */
int decode_run(struct engine *engine, struct decode_stream *streams, uint32_t count, struct err *err);

#endif
