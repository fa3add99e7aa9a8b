/* The rotation of a retrieval head at the length that it is used at; see head.h. No state; any thread. */
#include "model/head.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

int head_rope(const struct head *head, uint32_t context, struct model_rope *ret_rope, struct err *err)
{
    const struct head_config *c = head_config(head);
    *ret_rope = c->rope;
    if (context <= c->trained_context)
        return 0;
    if (c->rope.scaling == MODEL_ROPE_SCALING_LINEAR)
        return err_set(err, -ENOTSUP,
                       "%.200s: trained_context: found %" PRIu32
                       " with linear scaling, expected at least the %" PRIu32 " positions asked for",
                       head_path(head), c->trained_context, context);
    uint32_t stretch = (uint32_t)(((uint64_t)context + c->trained_context - 1) / c->trained_context);
    if (c->rope.scaling == MODEL_ROPE_SCALING_NONE)
        ret_rope->original_context = c->trained_context;
    ret_rope->scaling = MODEL_ROPE_SCALING_YARN;
    ret_rope->factor = c->rope.factor * (float)stretch;
    return 0;
}

void head_rope_text(const struct model_rope *rope, char *ret_text, size_t bytes)
{
    char scaling[120];
    if (rope->scaling == MODEL_ROPE_SCALING_YARN)
        snprintf(scaling, sizeof scaling, "yarn, factor %g over %" PRIu32 " positions, beta %g to %g",
                 (double)rope->factor, rope->original_context, (double)rope->beta_fast,
                 (double)rope->beta_slow);
    else if (rope->scaling == MODEL_ROPE_SCALING_LINEAR)
        snprintf(scaling, sizeof scaling, "linear, factor %g", (double)rope->factor);
    else
        snprintf(scaling, sizeof scaling, "none");
    snprintf(ret_text, bytes, "%s, base %g, %" PRIu32 " dimensions, %s pairs%s", scaling, (double)rope->base,
             rope->dims, rope->halves ? "halves" : "adjacent",
             rope->freq_factors ? ", frequency factors" : "");
}
