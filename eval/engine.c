/* See engine.h. Owner: main's thread. It must not know how a pass computes: sources say where KV lies. */
#include "eval/engine.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "compute/gpu.h"
#include "eval/engine_gpu.h"

enum { CHUNK_CPU = 256 }; /* what stays in the caches */

volatile sig_atomic_t engine_interrupted;

static int open_pass(const struct engine_options *o, struct engine *e, struct err *err)
{
    struct pass_options options = {.threads = o->threads,
                                   .activations = (enum compute_activations)o->activations,
                                   .tokens_max = CHUNK_CPU,
                                   .entries_max = ENGINE_LANES,
                                   .logits_max = ENGINE_LANES};
    struct engine_gpu_options gpu = {.device = o->device,
                                     .model = e->model,
                                     .threads = o->threads,
                                     .tokens = ENGINE_CHUNK_MAX,
                                     .rows = ENGINE_LANES,
                                     .list_max = o->list_max};
    bool on_gpu = o->device && gpu_named(o->device);
    if (o->device && !on_gpu && strcmp(o->device, "cpu") != 0)
        return err_set(err, -EINVAL, "--device: found '%s', expected cpu, cuda, cuda:N or GPU-...",
                       o->device);
    e->chunk = on_gpu ? ENGINE_CHUNK_MAX : CHUNK_CPU;
    return on_gpu ? engine_gpu_open(&gpu, &e->gpu, err) : pass_create(e->model, &options, &e->pass, err);
}

int engine_open(const struct engine_options *o, struct engine *ret, struct err *err)
{
    memset(ret, 0, sizeof *ret);
    ret->threads = o->threads;
    int r = model_open(o->model, &ret->model, err);
    if (r < 0)
        return r;
    ret->config = model_config(ret->model);
    ret->taps = (struct taps){.hidden = ret->config->hidden, .tokens = ENGINE_CHUNK_MAX};
    if (model_vocab(ret->model))
        r = tokenizer_create(ret->model, &ret->tokenizer, err);
    if (!r)
        r = open_pass(o, ret, err);
    if (!r)
        r = compute_create("cpu", o->threads, COMPUTE_ISA_AUTO, &ret->compute, err);
    if (r)
        engine_close(ret);
    return r;
}

void engine_close(struct engine *e)
{
    compute_free(&e->compute);
    pass_free(&e->pass);
    engine_gpu_close(&e->gpu);
    taps_free(&e->taps);
    tokenizer_free(&e->tokenizer);
    model_free(&e->model);
    memset(e, 0, sizeof *e);
}

int engine_pages(struct engine *e, const struct pages_sequence *sequences, uint32_t count, struct pages *ret,
                 struct err *err)
{
    if (!e->gpu) {
        pages_init(ret, e->config, sequences, count);
        return 0;
    }
    pages_plan(ret, e->config, sequences, count);
    return engine_gpu_pages(e->gpu, ret, err);
}

void engine_pages_free(struct engine *e, struct pages *pages)
{
    if (e->gpu && pages->config)
        engine_gpu_pages_free(e->gpu, pages);
    pages_free(pages);
}

int engine_fork(struct engine *e, struct pages *pages, struct err *err)
{
    if (e->gpu)
        return engine_gpu_fork(e->gpu, pages, err);
    pages_fork(pages);
    return 0;
}

static int interrupted(struct err *err)
{
    return engine_interrupted ? err_set(err, -ECANCELED, "interrupted") : 0;
}

struct steps_source {
    struct engine *engine;
    const struct engine_step *steps;
    uint32_t count;
};

static int steps_layer(void *arg, uint32_t layer, struct pass_kv *kv, struct err *err)
{
    const struct steps_source *s = arg;
    for (uint32_t i = 0; i < s->count; i++) {
        const struct engine_step *step = &s->steps[i];
        kv[i].view = pages_view(step->pages, step->sequence, layer);
        if (step->lists)
            kv[i].lists = step->lists + (size_t)step->group_of[layer] * s->engine->config->kv_heads;
    }
    return interrupted(err);
}

static void steps_hidden(void *arg, uint32_t layer, const float *x)
{
    const struct steps_source *s = arg;
    taps_put(&s->engine->taps, layer, x, s->count);
}

int engine_steps(struct engine *e, const struct engine_step *steps, uint32_t count, struct err *err)
{
    struct pass_entry entries[ENGINE_LANES];
    struct steps_source arg = {e, steps, count};
    struct pass_source source = {
        .layer = steps_layer, .hidden = e->taps.count ? steps_hidden : NULL, .arg = &arg};
    CHECK(count > 0 && count <= ENGINE_LANES);
    if (e->gpu)
        return engine_gpu_steps(e->gpu, &e->taps, steps, count, err);
    for (uint32_t i = 0; i < count; i++)
        entries[i] = (struct pass_entry){&steps[i].token, steps[i].position, 1, 1};
    return pass_run(e->pass, entries, count, &source, err);
}

struct dense_source {
    struct engine *engine;
    const struct engine_chunk *chunk;
    const struct engine_watch *watch;
    struct kv_view view;
};

static int dense_layer(void *arg, uint32_t layer, struct pass_kv *kv, struct err *err)
{
    struct dense_source *s = arg;
    kv[0].view = s->view = pages_view(s->chunk->pages, s->chunk->sequence, layer);
    return interrupted(err);
}

static void dense_layer_done(void *arg, uint32_t layer)
{
    struct dense_source *s = arg;
    if (s->watch)
        s->watch->layer(s->watch->arg, s->engine, &s->view, layer, s->chunk->first, s->chunk->count);
}

static void dense_hidden(void *arg, uint32_t layer, const float *x)
{
    const struct dense_source *s = arg;
    taps_put(&s->engine->taps, layer, x, s->chunk->count);
}

int engine_dense(struct engine *e, const struct engine_chunk *chunk, const struct engine_watch *watch,
                 struct err *err)
{
    struct pass_entry entry = {chunk->tokens + chunk->first, chunk->first, chunk->count, chunk->logits};
    struct dense_source arg = {.engine = e, .chunk = chunk, .watch = watch};
    struct pass_source source = {.layer = dense_layer,
                                 .layer_done = dense_layer_done,
                                 .hidden = e->taps.count ? dense_hidden : NULL,
                                 .arg = &arg};
    int r =
        e->gpu ? engine_gpu_dense(e->gpu, e, chunk, watch, err) : pass_run(e->pass, &entry, 1, &source, err);
    if (!r && e->progress)
        e->progress(chunk->first + chunk->count);
    return r;
}

int engine_prefill(struct engine *e, const struct pages *pages, uint32_t sequence, const uint32_t *tokens,
                   uint32_t count, float *features, struct err *err)
{
    size_t width = taps_width(&e->taps);
    int r = 0;
    for (uint32_t at = 0; at < count && !r; at += e->chunk) {
        uint32_t n = count - at < e->chunk ? count - at : e->chunk;
        struct engine_chunk chunk = {pages, sequence, tokens, at, n, at + n == count};
        r = engine_dense(e, &chunk, NULL, err);
        if (!r && features && width)
            memcpy(features + at * width, taps_row(&e->taps, 0), n * width * sizeof *features);
    }
    return r;
}

float *engine_features_alloc(const struct engine *e, uint32_t tokens)
{
    return e->taps.count ? mem_alloc((size_t)tokens * taps_width(&e->taps), sizeof(float)) : NULL;
}

float *engine_logits(const struct engine *e, uint32_t row)
{
    return e->gpu ? engine_gpu_logits(e->gpu, row) : pass_logits(e->pass, row);
}

const float *engine_queries(const struct engine *e, uint32_t token)
{
    return e->gpu ? engine_gpu_queries(e->gpu, token)
                  : pass_queries(e->pass) + (size_t)token * e->config->q_heads * e->config->head_dim;
}
