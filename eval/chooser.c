/* See chooser.h. The arithmetic is the retriever's own: retriever/projection.h for keys and queries,
 * compute/ for weights; sets.h has what is picked. Owner: who created it. */
#include "eval/chooser.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>

#include "base/alloc.h"
#include "base/check.h"
#include "retriever/keys.h"
#include "retriever/projection.h"

struct chooser {
    struct chooser_options options;
    struct compute *compute;       /* of one thread */
    struct projection *projection; /* NULL: newest positions */
    struct keys keys;
    uint32_t count; /* positions so far */
    uint32_t groups, heads;
    uint32_t *group_of; /* [layers] */
    size_t stride;
    float *weights; /* [groups][heads + 1][stride]; newest: [stride] */
};

static void open_groups(struct chooser *c)
{
    const struct head_config *h = c->options.head ? head_config(c->options.head) : NULL;
    uint32_t layers = model_config(c->options.model)->layers;
    c->group_of = mem_alloc(layers, sizeof *c->group_of);
    for (uint32_t g = 0; h && g < h->groups; g++)
        for (uint32_t l = h->group_first_layer[g]; l < h->group_first_layer[g + 1]; l++)
            c->group_of[l] = g;
}

int chooser_create(const struct chooser_options *o, struct chooser **ret_chooser, struct err *err)
{
    const struct head_config *h = o->head ? head_config(o->head) : NULL;
    uint32_t kv_heads = model_config(o->model)->kv_heads;
    if (h && h->kv_heads != kv_heads)
        return err_set(err, -ENOTSUP, "%s: kv_heads: found %" PRIu32 ", expected the model's %" PRIu32,
                       head_path(o->head), h->kv_heads, kv_heads);
    struct chooser *c = mem_alloc(1, sizeof *c);
    c->options = *o;
    c->heads = kv_heads;
    c->groups = h ? h->groups : 1;
    c->stride = (o->context + 15u) & ~15u;
    c->weights =
        mem_alloc(h ? (size_t)c->groups * (kv_heads + 1) * c->stride : c->stride, sizeof *c->weights);
    open_groups(c);
    int r = compute_create("cpu", 1, COMPUTE_ISA_AUTO, &c->compute, err);
    if (r == 0 && h)
        r = projection_create(o->model, o->head, o->context, 1, c->compute, &c->projection, err);
    if (r < 0) {
        chooser_free(&c);
        return r;
    }
    if (h && o->keys == COMPUTE_KEYS_INT8)
        projection_round_keys(c->projection);
    chooser_reset(c);
    for (uint32_t i = 0; !h && i < o->context; i++)
        c->weights[i] = (float)i; /* exact below 2^24 positions; newer ones rank higher */
    *ret_chooser = c;
    return 0;
}

void chooser_free(struct chooser **chooser)
{
    struct chooser *c = *chooser;
    if (!c)
        return;
    keys_free(&c->keys);
    projection_free(&c->projection);
    mem_free(&c->group_of);
    mem_free(&c->weights);
    compute_free(&c->compute);
    mem_free(chooser);
}

uint32_t chooser_groups(const struct chooser *c)
{
    return c->groups;
}

const uint32_t *chooser_group_of(const struct chooser *c)
{
    return c->group_of;
}

void chooser_reset(struct chooser *c)
{
    c->count = 0;
    if (!c->projection)
        return;
    const struct head_config *h = head_config(c->options.head);
    keys_free(&c->keys);
    keys_init(&c->keys, h->groups, h->kv_heads, h->head_dim);
}

static void weigh_group(struct chooser *c, uint32_t g)
{
    const struct head_config *h = head_config(c->options.head);
    float *w = c->weights + (size_t)g * (c->heads + 1) * c->stride, *all = w + c->heads * c->stride;
    struct key_view view = keys_view(&c->keys, g, c->count);
    compute_retrieval_weights(c->compute, w, c->stride, projection_query(c->projection, g, 0), &view,
                              (int)h->q_heads, (int)h->kv_heads, (int)h->head_dim,
                              (float)(1 / sqrt((double)h->head_dim)),
                              c->options.pool == HEAD_POOL_MEAN ? POOL_MEAN : POOL_MAX);
    for (uint32_t i = 0; i < c->count; i++) {
        all[i] = 0;
        for (uint32_t head = 0; head < c->heads; head++)
            all[i] += w[head * c->stride + i];
    }
}

bool chooser_looks(const struct chooser *c)
{
    return c->options.head && head_config(c->options.head)->features == HEAD_FEATURES_TARGET;
}

void chooser_feed(struct chooser *c, const uint32_t *tokens, uint32_t count, const float *features,
                  bool weigh)
{
    CHECK(count > 0 && count <= c->options.context - c->count);
    uint32_t rows = chooser_looks(c) ? count - (c->count == 0) : 0;
    float *own = NULL;
    c->count += count;
    if (!c->projection)
        return;
    struct projection_part part = {.keys = &c->keys, .tokens = tokens, .count = count, .query = weigh};
    if (rows) {
        const struct head_config *h = head_config(c->options.head);
        own = mem_alloc((size_t)rows * h->feature_layer_count * h->feature_hidden, sizeof *own);
        taps_gather(c->options.taps, c->options.head, features, rows, own);
        part.features = own;
        part.features_type = DTYPE_F32;
    }
    projection_run(c->projection, &part, 1);
    mem_free(&own);
    for (uint32_t g = 0; weigh && g < c->groups; g++)
        weigh_group(c, g);
}

const float *chooser_weights(const struct chooser *c, uint32_t group, uint32_t head)
{
    CHECK(group < c->groups && head <= c->heads);
    return c->projection ? c->weights + ((size_t)group * (c->heads + 1) + head) * c->stride : c->weights;
}

void chooser_pick(const struct chooser *c, uint32_t group, uint32_t head, const struct choice *choice,
                  const struct span *span, const struct reach_scratch *scratch, struct positions *ret)
{
    const float *weights = chooser_weights(c, group, head);
    CHECK(span->position + 1 == c->count);
    if (c->projection)
        sets_choose(ret, weights, choice, span, &head_config(c->options.head)->calibration, scratch);
    else
        sets_pick(ret, weights, span, scratch->topk);
}
