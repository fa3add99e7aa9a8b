/* See engine_gpu.h. Owner: main's thread. State: what one call's launches read, in pinned memory and on the
 * device at the same offsets, and what came back of the last call. */
#include "eval/engine_gpu.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "decoder/gpu_device.h"
#include "decoder/pass_gpu.h"
#include "decoder/weights_gpu.h"
#include "proto/limits.h"

enum { PAUSE_NS = 50000 };
#define EAGER_NS (50 * CLOCK_MS)
#define LIMIT_NS (120 * CLOCK_S) /* of one call: far above what the longest chunk takes */

/* Pinned memory and its copy on the device. */
struct twin {
    uint8_t *host, *device;
    uint64_t bytes;
};

struct engine_gpu {
    struct gpu_device *device;
    const struct gpu_api *api;
    const struct model_config *config;
    struct weights_gpu *weights;
    struct pass_gpu *pass;
    struct engine_gpu_options options;
    struct twin inputs; /* u32 [4][tokens]: ids, positions, rows, counts; then a span */
    struct twin lists;  /* u32 [regions][counts [rows][heads], items [rows][heads][list_max]] */
    uint8_t *all;       /* [rows] 1: all positions are attended */
    float *logits;      /* pinned [rows][vocab] */
    float *queries;     /* pinned [tokens][stride]: queries, keys, values of the layer in work */
    uint64_t stride;
    float *hidden; /* pinned [taps][tokens][hidden], when heads look at them */
    uint32_t hidden_taps;
    uint8_t *mirror; /* pages of the layer in work */
    uint64_t mirror_bytes;
    uint64_t *mirror_at; /* [pages] */
};

enum input { INPUT_IDS, INPUT_POSITIONS, INPUT_ROWS, INPUT_COUNTS, INPUTS };

static uint32_t *input_of(const struct engine_gpu *g, uint8_t *base, enum input input)
{
    return (uint32_t *)(void *)base + (size_t)input * g->options.tokens;
}

static struct cuda_span *span_of(const struct engine_gpu *g, uint8_t *base)
{
    return (struct cuda_span *)(void *)input_of(g, base, INPUTS);
}

/* ---- memory -------------------------------------------------------------------------------------------- */

static void twin_free(struct engine_gpu *g, struct twin *t)
{
    if (t->host)
        g->api->free_host(g->device->gpu, t->host);
    gpu_device_release(g->device, GPU_DEVICE_TABLES, t->bytes, t->device);
    *t = (struct twin){.bytes = 0};
}

static int twin_make(struct engine_gpu *g, struct twin *t, uint64_t bytes, struct err *err)
{
    void *host, *mapped, *device;
    int r = g->api->alloc_host(g->device->gpu, bytes, &host, &mapped, err);
    if (r < 0)
        return r;
    t->host = host;
    r = gpu_device_alloc(g->device, GPU_DEVICE_TABLES, bytes, &device, err);
    if (r < 0)
        return r;
    t->device = device;
    t->bytes = bytes;
    return 0;
}

static int pinned(struct engine_gpu *g, uint64_t bytes, float **ret, struct err *err)
{
    void *host, *mapped;
    int r = g->api->alloc_host(g->device->gpu, bytes, &host, &mapped, err);
    if (r == 0)
        *ret = host;
    return r;
}

static int open_memory(struct engine_gpu *g, struct err *err)
{
    const struct engine_gpu_options *o = &g->options;
    const struct model_config *c = g->config;
    pass_gpu_queries(g->pass, &g->stride);
    g->all = mem_alloc(o->tokens, sizeof *g->all);
    g->mirror_at = mem_alloc(c->context_max / BLOCK_TOKENS + 1, sizeof *g->mirror_at);
    int r = twin_make(g, &g->inputs, (uint64_t)INPUTS * o->tokens * 4 + sizeof(struct cuda_span), err);
    if (r == 0)
        r = pinned(g, (uint64_t)o->rows * c->vocab * sizeof(float), &g->logits, err);
    return r ? r : pinned(g, o->tokens * g->stride * sizeof(float), &g->queries, err);
}

int engine_gpu_open(const struct engine_gpu_options *o, struct engine_gpu **ret, struct err *err)
{
    struct engine_gpu *g = mem_alloc(1, sizeof *g);
    g->options = *o;
    g->config = model_config(o->model);
    struct pass_gpu_options limits = {.tokens_max = o->tokens,
                                      .entries_max = o->rows,
                                      .list_max = o->list_max,
                                      .context = g->config->context_max};
    int r = gpu_device_open(o->device, &g->device, err);
    if (r == 0) {
        g->api = g->device->api;
        r = weights_gpu_create(g->device, o->model, o->threads, NULL, &g->weights, err);
    }
    if (r == 0)
        r = pass_gpu_create(g->device, model_config(o->model), g->weights, &limits, &g->pass, err);
    if (r == 0)
        r = open_memory(g, err);
    if (r < 0)
        engine_gpu_close(&g);
    *ret = g;
    return r;
}

void engine_gpu_close(struct engine_gpu **gpu)
{
    struct engine_gpu *g = *gpu;
    if (!g)
        return;
    if (g->device) {
        g->api = g->device->api;
        twin_free(g, &g->inputs);
        twin_free(g, &g->lists);
        if (g->logits)
            g->api->free_host(g->device->gpu, g->logits);
        if (g->queries)
            g->api->free_host(g->device->gpu, g->queries);
        if (g->hidden)
            g->api->free_host(g->device->gpu, g->hidden);
    }
    pass_gpu_free(&g->pass);
    weights_gpu_free(&g->weights);
    gpu_device_free(&g->device);
    mem_free(&g->all);
    mem_free(&g->mirror);
    mem_free(&g->mirror_at);
    mem_free(gpu);
}

/* ---- the stream ---------------------------------------------------------------------------------------- */

static int queue_copy(struct engine_gpu *g, void *to, const void *from, uint64_t bytes)
{
    return g->api->copy(to, from, (size_t)bytes, g->device->stream);
}

/* The end of all that was queued. What does not end has the device lost to this process. */
static int wait_end(struct engine_gpu *g, int r, const char *what, struct err *err)
{
    int64_t begin = clock_now_ns(), now = begin;
    int done = 0;
    while (r == 0 && !done && now - begin < LIMIT_NS) {
        done = g->api->stream_done(g->device->stream);
        r = done < 0 ? done : 0;
        now = clock_now_ns();
        if (!done && now - begin < EAGER_NS)
            sched_yield();
        else if (!done)
            ppoll(NULL, 0, &(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
    if (r == 0 && !done)
        r = -ETIMEDOUT;
    return r < 0 ? gpu_device_error(g->device, r, what, err) : 0;
}

/* ---- pages --------------------------------------------------------------------------------------------- */

int engine_gpu_pages(struct engine_gpu *g, struct pages *p, struct err *err)
{
    uint64_t table = (uint64_t)p->sequences * g->config->layers * p->pages * sizeof *p->at;
    int r = gpu_device_alloc(g->device, GPU_DEVICE_WORKSPACE, p->total_bytes, &p->device, err);
    if (r == 0)
        r = gpu_device_alloc(g->device, GPU_DEVICE_TABLES, table, &p->device_at, err);
    return r < 0 ? r : wait_end(g, queue_copy(g, p->device_at, p->at, table), "pages", err);
}

void engine_gpu_pages_free(struct engine_gpu *g, struct pages *p)
{
    uint64_t table = (uint64_t)p->sequences * g->config->layers * p->pages * sizeof *p->at;
    gpu_device_release(g->device, GPU_DEVICE_WORKSPACE, p->total_bytes, p->device);
    gpu_device_release(g->device, GPU_DEVICE_TABLES, table, p->device_at);
    p->device = p->device_at = NULL;
}

int engine_gpu_fork(struct engine_gpu *g, const struct pages *p, struct err *err)
{
    uint8_t *base = p->device;
    int r = 0;
    for (uint32_t s = 0; s < p->sequences; s++) {
        uint32_t page = pages_split(p, s);
        for (uint32_t l = 0; l < g->config->layers && page != UINT32_MAX && r == 0; l++)
            r = queue_copy(g, base + pages_at(p, s, l)[page], base + pages_at(p, p->sequence[s].of, l)[page],
                           p->page_bytes);
    }
    return wait_end(g, r, "pages", err);
}

/* Pages of all sequences at one layer; new pieces go to the tokens' positions. */
static struct pass_gpu_kv layer_kv(const struct engine_gpu *g, const struct pages *p, uint32_t layer)
{
    const struct model_config *c = g->config;
    size_t before = (size_t)layer * p->pages, all = (size_t)p->sequences * c->layers * p->pages;
    return (struct pass_gpu_kv){.view = {.base = p->device,
                                         .device_bytes = p->total_bytes,
                                         .at = (const uint64_t *)p->device_at + before,
                                         .row_stride = (uint64_t)c->layers * p->pages,
                                         .at_count = (uint32_t)(all - before),
                                         .page_tokens = BLOCK_TOKENS,
                                         .piece_bytes = 4 * c->head_dim,
                                         .type = DTYPE_F16},
                                .write = input_of(g, g->inputs.device, INPUT_POSITIONS)};
}

static void put_token(struct engine_gpu *g, uint32_t at, uint32_t id, uint32_t position, uint32_t row)
{
    const uint32_t values[INPUTS] = {id, position, row, position + 1};
    for (int i = 0; i < INPUTS; i++)
        input_of(g, g->inputs.host, (enum input)i)[at] = values[i];
}

/* The batch of the first n tokens put; `logits` of the last ones. */
static struct pass_gpu_batch batch_of(const struct engine_gpu *g, const struct pages *p, uint32_t n,
                                      uint32_t logits)
{
    uint8_t *at = g->inputs.device;
    return (struct pass_gpu_batch){.n = n,
                                   .ids = input_of(g, at, INPUT_IDS),
                                   .positions = input_of(g, at, INPUT_POSITIONS),
                                   .rows = input_of(g, at, INPUT_ROWS),
                                   .row_count = p->sequences,
                                   .counts = input_of(g, at, INPUT_COUNTS),
                                   .logits = logits};
}

static float *hidden_of(const struct engine_gpu *g, uint32_t tap)
{
    return g->hidden + (size_t)tap * g->options.tokens * g->config->hidden;
}

static int open_hidden(struct engine_gpu *g, const struct taps *taps, struct err *err)
{
    if (g->hidden_taps >= taps->count)
        return 0;
    if (g->hidden)
        g->api->free_host(g->device->gpu, g->hidden);
    g->hidden = NULL;
    uint64_t bytes = (uint64_t)taps->count * g->options.tokens * g->config->hidden * sizeof(float);
    int r = pinned(g, bytes, &g->hidden, err);
    g->hidden_taps = r < 0 ? 0 : taps->count;
    return r;
}

/* x, n tokens that enter `layer`, on its way back where a head looks at it. */
static int queue_hidden(struct engine_gpu *g, const struct taps *taps, uint32_t layer, const float *x,
                        uint32_t n, struct err *err)
{
    int r = 0;
    for (uint32_t i = 0; i < taps->count && r == 0; i++)
        if (taps->layers[i] == layer)
            r = queue_copy(g, hidden_of(g, i), x, (uint64_t)n * g->config->hidden * sizeof *x);
    return r < 0 ? gpu_device_error(g->device, r, "hidden states", err) : 0;
}

static void take_hidden(const struct engine_gpu *g, struct taps *taps, uint32_t n)
{
    for (uint32_t i = 0; i < taps->count; i++)
        taps_put(taps, taps->layers[i], hidden_of(g, i), n);
}

/* Queues the batch, and logits back; waits. */
static int run(struct engine_gpu *g, const struct pass_gpu_batch *batch, const struct pass_gpu_source *source,
               struct err *err)
{
    int r = queue_copy(g, g->inputs.device, g->inputs.host, g->inputs.bytes);
    if (r < 0)
        return gpu_device_error(g->device, r, "inputs", err);
    r = pass_gpu_queue(g->pass, batch, source, err);
    if (r < 0) {
        wait_end(g, 0, "a pass", NULL); /* its inputs are written again */
        return r;
    }
    uint64_t bytes = (uint64_t)batch->logits * g->config->vocab * sizeof(float);
    if (bytes)
        r = queue_copy(g, g->logits, pass_gpu_logits(g->pass), bytes);
    return wait_end(g, r, "a pass", err);
}

static int interrupted(struct err *err)
{
    return engine_interrupted ? err_set(err, -ECANCELED, "interrupted") : 0;
}

/* ---- steps --------------------------------------------------------------------------------------------- */

/* Layers with the same lists make a region. */
struct steps_source {
    struct engine_gpu *gpu;
    struct taps *taps;
    const struct engine_step *steps;
    uint32_t count, rows; /* rows of the lists: sequences */
    uint32_t regions, region_of[LIMIT_LAYERS];
    bool sparse;
};

static uint64_t region_bytes(const struct steps_source *s)
{
    uint64_t heads = s->gpu->config->kv_heads;
    return s->rows * heads * (1 + (uint64_t)s->gpu->options.list_max) * sizeof(uint32_t);
}

static void find_regions(struct steps_source *s)
{
    s->regions = 1;
    for (uint32_t l = 1; l < s->gpu->config->layers; l++) {
        bool differ = false;
        for (uint32_t i = 0; i < s->count; i++) {
            const uint32_t *group_of = s->steps[i].lists ? s->steps[i].group_of : NULL;
            differ |= group_of && group_of[l] != group_of[l - 1];
        }
        s->regions += differ;
        s->region_of[l] = s->regions - 1;
    }
}

/* The lists of the region that begins at `layer`. */
static void put_region(struct steps_source *s, uint32_t layer)
{
    struct engine_gpu *g = s->gpu;
    uint32_t heads = g->config->kv_heads, most = g->options.list_max;
    uint32_t *counts = (uint32_t *)(void *)(g->lists.host + s->region_of[layer] * region_bytes(s));
    uint32_t *items = counts + (size_t)s->rows * heads;
    for (uint32_t i = 0; i < s->count; i++) {
        const struct engine_step *step = &s->steps[i];
        for (uint32_t h = 0; h < heads && step->lists; h++) {
            const struct attn_list *list = &step->lists[(size_t)step->group_of[layer] * heads + h];
            size_t at = (size_t)step->sequence * heads + h;
            CHECK(list->count <= most);
            counts[at] = list->count;
            memcpy(items + at * most, list->item, list->count * sizeof *items);
        }
    }
}

static int put_lists(struct steps_source *s, struct err *err)
{
    struct engine_gpu *g = s->gpu;
    uint64_t bytes = s->regions * region_bytes(s);
    if (g->lists.bytes < bytes) {
        twin_free(g, &g->lists);
        int r = twin_make(g, &g->lists, bytes, err);
        if (r < 0)
            return r;
    }
    for (uint32_t l = 0; l < g->config->layers; l++)
        if (l == 0 || s->region_of[l] != s->region_of[l - 1])
            put_region(s, l);
    int r = queue_copy(g, g->lists.device, g->lists.host, bytes);
    return r < 0 ? gpu_device_error(g->device, r, "lists", err) : 0;
}

static int steps_layer(void *arg, uint32_t layer, struct pass_gpu_kv *ret_kv, struct err *err)
{
    const struct steps_source *s = arg;
    struct engine_gpu *g = s->gpu;
    *ret_kv = layer_kv(g, s->steps[0].pages, layer);
    if (s->sparse) {
        uint32_t heads = g->config->kv_heads;
        ret_kv->counts =
            (const uint32_t *)(const void *)(g->lists.device + s->region_of[layer] * region_bytes(s));
        ret_kv->items = ret_kv->counts + (size_t)s->rows * heads;
        ret_kv->count_stride = heads;
        ret_kv->item_stride = (uint64_t)heads * g->options.list_max;
        ret_kv->all = g->all;
    }
    return interrupted(err);
}

static int steps_hidden(void *arg, uint32_t layer, const float *x, struct err *err)
{
    const struct steps_source *s = arg;
    return queue_hidden(s->gpu, s->taps, layer, x, s->count, err);
}

int engine_gpu_steps(struct engine_gpu *g, struct taps *taps, const struct engine_step *steps, uint32_t count,
                     struct err *err)
{
    const struct pages *pages = steps[0].pages;
    struct steps_source arg = {
        .gpu = g, .taps = taps, .steps = steps, .count = count, .rows = pages->sequences};
    struct pass_gpu_source source = {
        .layer = steps_layer, .hidden = taps->count ? steps_hidden : NULL, .arg = &arg};
    struct pass_gpu_batch batch = batch_of(g, pages, count, count);
    CHECK(count <= g->options.rows && pages->sequences <= g->options.rows);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(steps[i].pages == pages);
        put_token(g, i, steps[i].token, steps[i].position, steps[i].sequence);
        g->all[i] = steps[i].lists == NULL;
        arg.sparse |= steps[i].lists != NULL;
        batch.count_max = steps[i].position + 1 > batch.count_max ? steps[i].position + 1 : batch.count_max;
    }
    int r = open_hidden(g, taps, err);
    if (r == 0 && arg.sparse) {
        find_regions(&arg);
        r = put_lists(&arg, err);
    }
    if (r == 0)
        r = run(g, &batch, &source, err);
    if (r == 0)
        take_hidden(g, taps, count);
    return r;
}

/* ---- chunks -------------------------------------------------------------------------------------------- */

struct dense_source {
    struct engine_gpu *gpu;
    struct engine *engine;
    const struct engine_chunk *chunk;
    const struct engine_watch *watch;
};

static int dense_layer(void *arg, uint32_t layer, struct pass_gpu_kv *ret_kv, struct err *err)
{
    const struct dense_source *s = arg;
    *ret_kv = layer_kv(s->gpu, s->chunk->pages, layer);
    return interrupted(err);
}

/* The layer's queries, and its pages up to the chunk's end: those of one sequence and layer follow each other
 * on the device, unless they are shared. */
static int bring_back(const struct dense_source *s, uint32_t layer, struct err *err)
{
    struct engine_gpu *g = s->gpu;
    const struct engine_chunk *c = s->chunk;
    const struct pages *p = c->pages;
    uint32_t pages = (c->first + c->count + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    uint64_t stride;
    const float *queries = pass_gpu_queries(g->pass, &stride);
    if (g->mirror_bytes < pages * p->page_bytes) {
        mem_free(&g->mirror);
        g->mirror_bytes = p->pages * p->page_bytes;
        g->mirror = mem_alloc_aligned((size_t)g->mirror_bytes, 1);
    }
    int r = queue_copy(g, g->queries, queries, c->count * stride * sizeof *queries);
    for (uint32_t i = 0; i < pages && r == 0; i++) {
        g->mirror_at[i] = i * p->page_bytes;
        r = queue_copy(g, g->mirror + g->mirror_at[i],
                       (const uint8_t *)p->device + pages_at(p, c->sequence, layer)[i], p->page_bytes);
    }
    return wait_end(g, r, "queries and keys", err);
}

static int dense_layer_done(void *arg, uint32_t layer, struct err *err)
{
    const struct dense_source *s = arg;
    const struct engine_chunk *c = s->chunk;
    struct kv_view view = {.base = s->gpu->mirror,
                           .at = s->gpu->mirror_at,
                           .page_tokens = BLOCK_TOKENS,
                           .piece_bytes = 4 * s->gpu->config->head_dim,
                           .type = DTYPE_F16};
    int r = bring_back(s, layer, err);
    view.base = s->gpu->mirror;
    if (r == 0)
        s->watch->layer(s->watch->arg, s->engine, &view, layer, c->first, c->count);
    return r;
}

static int dense_hidden(void *arg, uint32_t layer, const float *x, struct err *err)
{
    const struct dense_source *s = arg;
    return queue_hidden(s->gpu, &s->engine->taps, layer, x, s->chunk->count, err);
}

int engine_gpu_dense(struct engine_gpu *g, struct engine *engine, const struct engine_chunk *c,
                     const struct engine_watch *watch, struct err *err)
{
    struct dense_source arg = {g, engine, c, watch};
    struct pass_gpu_source source = {.layer = dense_layer,
                                     .layer_done = watch ? dense_layer_done : NULL,
                                     .hidden = engine->taps.count ? dense_hidden : NULL,
                                     .arg = &arg};
    struct pass_gpu_batch batch = batch_of(g, c->pages, c->count, c->logits);
    uint32_t *wanted = mem_alloc(c->logits, sizeof *wanted);
    CHECK(c->count <= g->options.tokens && c->logits <= g->options.rows);
    for (uint32_t i = 0; i < c->count; i++)
        put_token(g, i, c->tokens[c->first + i], c->first + i, c->sequence);
    for (uint32_t i = 0; i < c->logits; i++)
        wanted[i] = c->count - c->logits + i;
    *span_of(g, g->inputs.host) =
        (struct cuda_span){.row = c->sequence, .first = 0, .count = c->count, .position = c->first};
    batch.spans = span_of(g, g->inputs.device);
    batch.span_count = 1;
    batch.span_max = c->count;
    batch.count_max = c->first + c->count;
    batch.wanted = wanted;
    int r = open_hidden(g, &engine->taps, err);
    if (r == 0)
        r = run(g, &batch, &source, err);
    if (r == 0)
        take_hidden(g, &engine->taps, c->count);
    mem_free(&wanted);
    return r;
}

float *engine_gpu_logits(const struct engine_gpu *g, uint32_t row)
{
    return g->logits + (size_t)row * g->config->vocab;
}

const float *engine_gpu_queries(const struct engine_gpu *g, uint32_t token)
{
    return g->queries + token * g->stride;
}
