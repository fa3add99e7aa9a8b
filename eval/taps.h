/* Hidden states of the model that heads look at: what entered some of its layers, for the tokens of the last
 * call. */
#ifndef EVAL_TAPS_H
#define EVAL_TAPS_H

#include <stdint.h>

#include "model/head.h"

#define TAPS_MAX (4 * HEAD_FEATURE_LAYERS_MAX)

struct taps {
    uint32_t layers[TAPS_MAX], count; /* layers, each once; the number of layers: what leaves the last one */
    uint32_t hidden, tokens;          /* width; tokens of a call, at most */
    float *rows;                      /* [tokens][count][hidden] */
};

/* Adds the layers that the head looks at, none for a head without such features. -ENOTSUP for more layers in
 * all than TAPS_MAX, a layer that is not there, or another width. Rows are void. */
int taps_add(struct taps *taps, const struct head *head, uint32_t layers, struct err *err);
void taps_free(struct taps *taps); /* accepts a zeroed object; leaves one */

uint32_t taps_width(const struct taps *taps);                   /* floats of a row */
const float *taps_row(const struct taps *taps, uint32_t token); /* [count][hidden] */

/* x [n][hidden] entered `layer`. */
void taps_put(struct taps *taps, uint32_t layer, const float *x, uint32_t n);

/* out [n][feature_layers * hidden] of a head that was added, from rows [n][count][hidden]. */
void taps_gather(const struct taps *taps, const struct head *head, const float *rows, uint32_t n, float *out);

#endif
