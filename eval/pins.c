/* See pins.h. Owner: who holds the struct. */
#include "eval/pins.h"

#include <string.h>

#include "base/alloc.h"
#include "eval/look.h"

static void take(void *arg, const struct look *look)
{
    struct pins *p = arg;
    for (uint32_t i = 0; i < p->layers * p->heads; i++)
        for (uint32_t at = 0; at <= look->position; at++)
            p->weights[(size_t)i * p->count + at] += look->weights[i * look->stride + at];
}

int pins_prefill(struct engine *e, const struct pages *pages, uint32_t sequence, const uint32_t *tokens,
                 uint32_t count, float *features, struct pins *ret, struct err *err)
{
    uint32_t positions[PINS_TOKENS], n = count < PINS_TOKENS ? count : PINS_TOKENS;
    for (uint32_t i = 0; i < n; i++)
        positions[i] = count - n + i;
    struct look_text text = {.sequence = sequence,
                             .tokens = tokens,
                             .count = count,
                             .positions = positions,
                             .position_count = n,
                             .features = features,
                             .logits = 1};
    *ret = (struct pins){.layers = e->config->layers, .heads = e->config->kv_heads, .count = count};
    ret->weights = mem_alloc((size_t)ret->layers * ret->heads * count, sizeof *ret->weights);
    return look_run(e, pages, &text, take, ret, err);
}

void pins_free(struct pins *p)
{
    mem_free(&p->weights);
    memset(p, 0, sizeof *p);
}
