/* See look.h. Owner: main's thread. Few positions are held at a time: what one weighs is layers x heads x
 * context floats. */
#include "eval/look.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"

enum { LOOKS = 8 }; /* of one chunk */

struct watcher {
    struct look looks[LOOKS];
    uint32_t count;
    float *weights; /* [q_heads][stride] of one query */
};

void look_mean(float *ret, const struct look *k, uint32_t first, uint32_t end)
{
    uint32_t n = k->position + 1;
    float *all = ret + k->heads * k->stride;
    memset(all, 0, n * sizeof *all);
    for (uint32_t h = 0; h < k->heads; h++) {
        float *mean = ret + h * k->stride;
        memset(mean, 0, n * sizeof *mean);
        for (uint32_t l = first; l < end; l++)
            for (uint32_t i = 0; i < n; i++)
                mean[i] += look_weights(k, l, h)[i];
        for (uint32_t i = 0; i < n; i++) {
            mean[i] /= (float)(end - first);
            all[i] += mean[i] / (float)k->heads;
        }
    }
}

static void watch_query(struct watcher *w, struct look *k, const struct engine *e, const struct kv_view *view,
                        uint32_t layer, const float *q)
{
    const struct model_config *c = e->config;
    uint32_t n = k->position + 1, group = c->q_heads / c->kv_heads;
    struct attn_list list = {n, NULL};
    struct attn_query query = {view, &list, 1};
    compute_attention_weights(e->compute, w->weights, k->stride, q, &query, (int)c->q_heads, (int)c->kv_heads,
                              (int)c->head_dim, 1.0f / sqrtf((float)c->head_dim));
    for (uint32_t h = 0; h < k->heads; h++) {
        float *to = k->weights + ((size_t)layer * k->heads + h) * k->stride;
        for (uint32_t i = 0; i < n; i++) {
            float sum = 0;
            for (uint32_t j = 0; j < group; j++)
                sum += w->weights[(size_t)(h * group + j) * k->stride + i];
            to[i] = sum / (float)group;
        }
    }
}

static void watch_layer(void *arg, const struct engine *e, const struct kv_view *view, uint32_t layer,
                        uint32_t first, uint32_t count)
{
    struct watcher *w = arg;
    (void)count;
    for (uint32_t i = 0; i < w->count; i++)
        watch_query(w, &w->looks[i], e, view, layer, engine_queries(e, w->looks[i].position - first));
}

/* The chunk from `first` on: as long as may be without more than LOOKS positions in it. */
static uint32_t chunk_length(const struct look_text *t, uint32_t most, uint32_t first, uint32_t next,
                             uint32_t *ret_looks)
{
    uint32_t n = t->count - first < most ? t->count - first : most, looks = 0;
    while (next + looks < t->position_count && t->positions[next + looks] < first + n) {
        if (looks == LOOKS) {
            n = t->positions[next + looks] - first;
            break;
        }
        looks++;
    }
    *ret_looks = looks;
    return n;
}

int look_run(struct engine *e, const struct pages *pages, const struct look_text *t,
             void (*take)(void *arg, const struct look *look), void *arg, struct err *err)
{
    const struct model_config *c = e->config;
    size_t stride = (t->count + 15u) & ~15u;
    struct watcher w = {0};
    struct engine_watch watch = {watch_layer, &w};
    w.weights = mem_alloc_aligned(c->q_heads * stride, sizeof *w.weights);
    for (uint32_t i = 0; i < LOOKS && i < t->position_count; i++)
        w.looks[i] = (struct look){
            .layers = c->layers,
            .heads = c->kv_heads,
            .stride = stride,
            .weights = mem_alloc_aligned((size_t)c->layers * c->kv_heads * stride, sizeof(float))};
    int r = 0;
    for (uint32_t at = t->first, next = 0; at < t->count && !r;) {
        struct engine_chunk chunk = {
            .pages = pages, .sequence = t->sequence, .tokens = t->tokens, .first = at};
        chunk.count = chunk_length(t, e->chunk, at, next, &w.count);
        chunk.logits = at + chunk.count == t->count ? t->logits : 0;
        for (uint32_t i = 0; i < w.count; i++)
            w.looks[i].position = t->positions[next + i];
        r = engine_dense(e, &chunk, w.count ? &watch : NULL, err);
        size_t width = taps_width(&e->taps);
        if (!r && t->features && width)
            memcpy(t->features + at * width, taps_row(&e->taps, 0), chunk.count * width * sizeof(float));
        for (uint32_t i = 0; i < w.count && !r; i++)
            take(arg, &w.looks[i]);
        next += w.count;
        at += chunk.count;
    }
    for (uint32_t i = 0; i < LOOKS; i++)
        mem_free(&w.looks[i].weights);
    mem_free(&w.weights);
    return r;
}
