/* See taps.h. Owner: who holds the struct. */
#include "eval/taps.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

static uint32_t find(const struct taps *t, uint32_t layer)
{
    uint32_t i = 0;
    while (i < t->count && t->layers[i] != layer)
        i++;
    return i;
}

int taps_add(struct taps *t, const struct head *head, uint32_t layers, struct err *err)
{
    const struct head_config *c = head_config(head);
    for (uint32_t i = 0; i < c->feature_layer_count; i++) {
        uint32_t layer = c->feature_layers[i], at = find(t, layer);
        if (layer > layers || c->feature_hidden != t->hidden)
            return err_set(err, -ENOTSUP,
                           "%s: features: found layer %u, %u wide, expected at most layer %u, %u wide",
                           head_path(head), layer, c->feature_hidden, layers, t->hidden);
        if (at == TAPS_MAX)
            return err_set(err, -ENOTSUP, "%s: features: found more than %u layers of all heads",
                           head_path(head), TAPS_MAX);
        t->layers[at] = layer;
        t->count += at == t->count;
    }
    mem_free(&t->rows);
    if (t->count)
        t->rows = mem_alloc((size_t)t->tokens * taps_width(t), sizeof *t->rows);
    return 0;
}

void taps_free(struct taps *t)
{
    mem_free(&t->rows);
    memset(t, 0, sizeof *t);
}

uint32_t taps_width(const struct taps *t)
{
    return t->count * t->hidden;
}

const float *taps_row(const struct taps *t, uint32_t token)
{
    return t->count ? t->rows + (size_t)token * taps_width(t) : NULL;
}

void taps_put(struct taps *t, uint32_t layer, const float *x, uint32_t n)
{
    uint32_t at = find(t, layer);
    CHECK(n <= t->tokens);
    for (uint32_t i = 0; i < n && at < t->count; i++)
        memcpy(t->rows + (size_t)i * taps_width(t) + (size_t)at * t->hidden, x + (size_t)i * t->hidden,
               t->hidden * sizeof *x);
}

void taps_gather(const struct taps *t, const struct head *head, const float *rows, uint32_t n, float *out)
{
    const struct head_config *c = head_config(head);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < c->feature_layer_count; j++) {
            uint32_t at = find(t, c->feature_layers[j]);
            CHECK(at < t->count);
            memcpy(out, rows + (size_t)i * taps_width(t) + (size_t)at * t->hidden, t->hidden * sizeof *out);
            out += t->hidden;
        }
}
