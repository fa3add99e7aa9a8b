/* How much of the model's attention a retrieval head's selections really catch, by what the head itself says
 * of them: a piecewise linear map from the head's own mass to the measured one. Pure.
 *
 * As text, in a head file's metadata under "calibration": pairs own:measured with commas between, decimal
 * numbers from 0 to 1, e.g. "0:0,0.5:0.31,0.97:0.88,1:1". 2 to 32 pairs; `own` ascends and differs from pair
 * to pair, `measured` never falls; the first `own` is 0, the last pair is 1:1 (all attended is all
 * caught). */
#ifndef MODEL_CALIBRATION_H
#define MODEL_CALIBRATION_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

#define CALIBRATION_POINTS_MAX 32u
#define CALIBRATION_TEXT_BYTES 1024u /* the longest text, its NUL included */

struct calibration {
    uint32_t count; /* 0: none; the head's own mass is taken as it is */
    float own[CALIBRATION_POINTS_MAX], measured[CALIBRATION_POINTS_MAX];
};

/* 0, or -EBADMSG with "found X, expected Y"; the caller puts the name before it. */
int calibration_parse(const char *text, struct calibration *ret, struct err *err);

/* What calibration_parse demands of the pairs, for those that were not parsed; no pairs are fine too. */
int calibration_check(const struct calibration *calibration, struct err *err);

/* The text of a checked one that has pairs. */
void calibration_text(const struct calibration *calibration, char ret_text[CALIBRATION_TEXT_BYTES]);

/* The measured mass that belongs to `own`. What lies outside of [0, 1] is moved to its end; NaN stays NaN. */
double calibration_at(const struct calibration *calibration, double own);

#endif
