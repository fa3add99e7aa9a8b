/* Frequencies of rotary embeddings. Pure, any thread. Computed in double, because an error in a frequency is
 * multiplied by the position. */
#include <errno.h>
#include <math.h>

#include "model/model_private.h"

/* The dimension whose pair turns `turns` times over the context of training. */
static double turning_dim(const struct model_rope *rope, double turns)
{
    return rope->dims * log(rope->original_context / (turns * 2 * M_PI)) / (2 * log(rope->base));
}

static int check(const struct model_rope *rope)
{
    bool plain = rope->scaling == MODEL_ROPE_SCALING_NONE;
    if (rope->dims == 0 || rope->dims % 2 || rope->dims > MODEL_HEAD_DIM_MAX)
        return -EINVAL;
    if (!isfinite(rope->base) || rope->base <= 1)
        return -EINVAL;
    if (!plain && (!isfinite(rope->factor) || rope->factor <= 0))
        return -EINVAL;
    if (rope->scaling == MODEL_ROPE_SCALING_YARN &&
        (rope->original_context == 0 || !(rope->beta_fast > 0) || !(rope->beta_slow > 0) ||
         !isfinite(rope->beta_fast) || !isfinite(rope->beta_slow) || !isfinite(rope->attn_factor)))
        return -EINVAL;
    for (uint32_t j = 0; rope->freq_factors && j < rope->dims / 2; j++)
        if (!isfinite(rope->freq_factors[j]) || rope->freq_factors[j] <= 0)
            return -EINVAL;
    return 0;
}

int model_rope_frequencies(const struct model_rope *rope, float *inv_freq, float *ret_scale)
{
    int rc = check(rope);
    if (rc < 0)
        return rc;
    bool yarn = rope->scaling == MODEL_ROPE_SCALING_YARN;
    double low = 0, width = 1, factor = rope->scaling == MODEL_ROPE_SCALING_NONE ? 1 : rope->factor;
    if (yarn) {
        low = fmax(floor(turning_dim(rope, rope->beta_fast)), 0);
        double high = fmin(ceil(turning_dim(rope, rope->beta_slow)), rope->dims - 1.0);
        width = fmax(high - low, 1e-3);
    }
    for (uint32_t j = 0; j < rope->dims / 2; j++) {
        double f = pow(rope->base, -2.0 * j / rope->dims);
        if (rope->freq_factors)
            f /= rope->freq_factors[j];
        /* YaRN leaves fast pairs as they are and interpolates slow ones; linear interpolates all. */
        double ramp = yarn ? fmin(fmax((j - low) / width, 0), 1) : 1;
        inv_freq[j] = (float)(f / factor * ramp + f * (1 - ramp));
    }
    *ret_scale = yarn ? (float)((0.1 * log(factor) + 1) * rope->attn_factor) : 1;
    return 0;
}

void model_llama3_factors(const struct model_rope *rope, const struct model_llama3 *scaling, float *ret)
{
    double original = scaling->original_context, factor = scaling->factor, low = scaling->low,
           high = scaling->high;
    for (uint32_t j = 0; j < rope->dims / 2; j++) {
        double turns = original * pow(rope->base, -2.0 * j / rope->dims) / (2 * M_PI);
        double kept =
            fmin(fmax((turns - low) / (high - low), 0), 1); /* share of the frequency not stretched */
        ret[j] = (float)(1 / ((1 - kept) / factor + kept));
    }
}
