/* Sparse against full attention on given texts: each prompt is computed in full, after it each lane goes on
 * token by token with its own sets and its own KV, while the text says what comes next. Where a lane is an
 * oracle's, the token passes through full attention first, to be looked at. */
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
    double worse, worse_squares;   /* loss_sparse - loss_full of each position, and its square */
    double kl, kl_squares;         /* of the sparse distribution from the full one */
};

struct forced_text {
    const uint32_t *tokens;
    uint32_t count;     /* of the text that is used */
    uint32_t from, end; /* positions that are scored; 1 <= from, end < count */
};

/* Adds the distance of two rows of logits to `sums`; `next` is the token that came. */
void forced_compare(struct forced_sums *sums, const float *full, const float *sparse, uint32_t vocab,
                    uint32_t next);
void forced_sums_add(struct forced_sums *to, const struct forced_sums *from);

/* -log p of a token. */
double forced_loss(const float *logits, uint32_t vocab, uint32_t token);

/* Mean, and its standard error, of n values of which sum and sum of squares are known. */
struct forced_mean {
    double mean, error;
};
struct forced_mean forced_mean(double sum, double squares, uint64_t n);

/* Restarts and resets lanes and their choosers, then follows all texts at once. lanes [texts][lanes] (lanes
 * of one text may share choosers); `sums` [lanes] are added to. texts * (1 + lanes) <= ENGINE_LANES. */
int forced_run(struct engine *engine, const struct forced_text *texts, uint32_t text_count,
               struct lane *const *lanes, uint32_t lanes_each, struct forced_sums *sums, struct err *err);

/* The same for sets alone, without the model: what lanes count about overlap and loading. No chooser looks
 * at the model's hidden states, no lane is an oracle's. */
void forced_choose_only(struct engine *engine, const struct forced_text *texts, uint32_t text_count,
                        struct lane *const *lanes, uint32_t lanes_each);

#endif
