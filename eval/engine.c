/* See engine.h. Owner: main's thread. It must not know how a pass computes: sources say where KV lies. */
#include "eval/engine.h"

#include <errno.h>
#include <string.h>

#include "base/check.h"

volatile sig_atomic_t engine_interrupted;

int engine_open(const struct engine_options *o, struct engine *ret, struct err *err)
{
    memset(ret, 0, sizeof *ret);
    ret->threads = o->threads;
    int r = model_open(o->model, &ret->model, err);
    if (r < 0)
        return r;
    ret->config = model_config(ret->model);
    if (model_vocab(ret->model))
        r = tokenizer_create(ret->model, &ret->tokenizer, err);
    struct pass_options options = {.threads = o->threads,
                                   .activations = (enum compute_activations)o->activations,
                                   .tokens_max = ENGINE_CHUNK,
                                   .entries_max = ENGINE_LANES,
                                   .logits_max = ENGINE_LANES};
    if (!r)
        r = pass_create(ret->model, &options, &ret->pass, err);
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
    tokenizer_free(&e->tokenizer);
    model_free(&e->model);
    memset(e, 0, sizeof *e);
}

static int interrupted(struct err *err)
{
    return engine_interrupted ? err_set(err, -ECANCELED, "interrupted") : 0;
}

struct steps_source {
    const struct engine *engine;
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

int engine_steps(struct engine *e, const struct engine_step *steps, uint32_t count, struct err *err)
{
    struct pass_entry entries[ENGINE_LANES];
    struct steps_source arg = {e, steps, count};
    struct pass_source source = {.layer = steps_layer, .arg = &arg};
    CHECK(count > 0 && count <= ENGINE_LANES);
    for (uint32_t i = 0; i < count; i++)
        entries[i] = (struct pass_entry){&steps[i].token, steps[i].position, 1, 1};
    return pass_run(e->pass, entries, count, &source, err);
}

struct dense_source {
    const struct engine *engine;
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

int engine_dense(struct engine *e, const struct engine_chunk *chunk, const struct engine_watch *watch,
                 struct err *err)
{
    struct pass_entry entry = {chunk->tokens + chunk->first, chunk->first, chunk->count, chunk->logits};
    struct dense_source arg = {.engine = e, .chunk = chunk, .watch = watch};
    struct pass_source source = {.layer = dense_layer, .layer_done = dense_layer_done, .arg = &arg};
    int r = pass_run(e->pass, &entry, 1, &source, err);
    if (!r && e->progress)
        e->progress(chunk->first + chunk->count);
    return r;
}

int engine_prefill(struct engine *e, const struct pages *pages, const uint32_t *tokens, uint32_t count,
                   struct err *err)
{
    int r = 0;
    for (uint32_t at = 0; at < count && !r; at += ENGINE_CHUNK) {
        uint32_t n = count - at < ENGINE_CHUNK ? count - at : ENGINE_CHUNK;
        struct engine_chunk chunk = {pages, 0, tokens, at, n, at + n == count};
        r = engine_dense(e, &chunk, NULL, err);
    }
    return r;
}
