/* Choosing the next token. Pure functions: the same parameters, logits, history, sequence and position
 * give the same token in every process and on every retry, so a session that is rebuilt goes on as it
 * would have. */
#ifndef MODEL_SAMPLER_H
#define MODEL_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct sampler_params {
    float temperature;       /* 0: greedy; 0 .. 100 */
    float top_p;             /* 0 .. 1; 1: off. The likeliest token always stays. */
    float min_p;             /* 0 .. 1; 0: off */
    uint32_t top_k;          /* 0, or the vocabulary and more: off */
    float repeat_penalty;    /* 0.01 .. 100; 1: off. Divides positive logits, multiplies negative ones. */
    float presence_penalty;  /* -2 .. 2; 0: off. Taken from the logit of a token that occurred. */
    float frequency_penalty; /* -2 .. 2; 0: off. Taken once for each occurrence. */
    uint32_t repeat_last_n;  /* tokens at the end of the history that penalties look at; 0: none */
    uint64_t seed;
};

/* Greedy, nothing else: temperature 0, penalties off, repeat_last_n 64. */
struct sampler_params sampler_params_default(void);

/* 0, or -EINVAL with the name of the first parameter that is NaN, infinite or out of its range. */
int sampler_params_check(const struct sampler_params *params, struct err *err);

/* Bytes of scratch that sampler_sample needs for this vocabulary; align it for uint64_t. */
size_t sampler_scratch_bytes(uint32_t vocab);

struct sampler_input {
    float *logits; /* [vocab], changed */
    uint32_t vocab;
    const uint32_t *history; /* [history_count], oldest first */
    uint32_t history_count;
    uint64_t sequence; /* with `position` and the seed: the random number */
    uint32_t position;
    void *scratch; /* sampler_scratch_bytes(vocab); contents do not matter */
};

/* Order: penalties, top_k, top_p, min_p, temperature. Equal logits: the lower id first. 0; -EDOM when a
 * logit is NaN or +infinity, or all are -infinity; -EINVAL when the history holds an id out of range.
 * Allocates nothing. `params` must have passed sampler_params_check. */
int sampler_sample(const struct sampler_params *params, const struct sampler_input *input, uint32_t *ret_id);

#endif
