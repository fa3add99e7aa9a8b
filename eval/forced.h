/* Sparse against full attention on a given text: the prompt is computed in full, after it each lane goes on
 * token by token with its own sets and its own KV, while the text says what comes next. */
#ifndef EVAL_FORCED_H
#define EVAL_FORCED_H

#include <stdint.h>

#include "base/err.h"
#include "eval/engine.h"
#include "eval/lane.h"

/* Sums over scored positions; each predicts the token behind it. */
struct forced_sums {
    uint64_t positions, agreed;    /* agreed: both think the same token likeliest */
    double loss_full, loss_sparse; /* -log p of the text's token, natural */
    double kl;                     /* of the sparse distribution from the full one */
};

struct forced_text {
    const uint32_t *tokens;
    uint32_t count;     /* of the text that is used */
    uint32_t from, end; /* positions that are scored; 1 <= from, end < count */
};

/* Adds the distance of two rows of logits to `sums`; `next` is the token that came. */
void forced_compare(struct forced_sums *sums, const float *full, const float *sparse, uint32_t vocab,
                    uint32_t next);

/* Restarts and resets lanes and their choosers (lanes that share one stand next to each other), then follows
 * them all. `sums` [lanes] are added to. lanes <= ENGINE_LANES. */
int forced_run(struct engine *engine, const struct forced_text *text, struct lane *const *lanes,
               uint32_t count, struct forced_sums *sums, struct err *err);

/* The same for sets alone, without the model: what lanes count about overlap and loading. */
void forced_choose_only(const struct forced_text *text, struct lane *const *lanes, uint32_t count);

#endif
