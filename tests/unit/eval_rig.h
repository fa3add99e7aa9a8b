/* For tests of eval/: a small model with a head, its engine on the CPU or on the double of a GPU, and a
 * text. */
#ifndef TESTS_UNIT_EVAL_RIG_H
#define TESTS_UNIT_EVAL_RIG_H

#include "tests/unit/retriever_rig.h"

#include "eval/engine.h"
#include "eval/lane.h"
#include "tests/lib/fakegpu.h"

enum { CONTEXT = 400 };

struct world {
    struct rig *rig;
    struct engine engine;
    struct chooser *chooser; /* of the rig's head */
    uint32_t tokens[CONTEXT];
};

static inline struct chooser *make_chooser(struct world *w, bool newest)
{
    struct chooser_options options = {.model = w->rig->model,
                                      .head = newest ? NULL : w->rig->head,
                                      .pool = HEAD_POOL_MEAN,
                                      .context = CONTEXT,
                                      .taps = &w->engine.taps};
    struct chooser *c = NULL;
    struct err err = {0};
    if (chooser_create(&options, &c, &err) < 0)
        fail_msg("%s", err.text);
    return c;
}

/* `features`: layers of the model that the head looks at. */
static inline struct world *world_make_looking(uint32_t groups, uint32_t features, const char *device)
{
    struct world *w = mem_alloc(1, sizeof *w);
    struct err err = {0};
    w->rig = rig_make(&(struct rig_options){.groups = groups,
                                            .features = features,
                                            .trained_context = 1 << 20,
                                            .rope_dims = RIG_HEAD_DIM,
                                            .rms_eps = 1e-5f});
    if (device)
        fakegpu_use(NULL);
    struct engine_options options = {
        .model = w->rig->model_path, .device = device, .threads = 2, .list_max = CONTEXT + 1};
    if (engine_open(&options, &w->engine, &err) < 0)
        fail_msg("%s", err.text);
    if (taps_add(&w->engine.taps, w->rig->head, RIG_LAYERS, &err) < 0)
        fail_msg("%s", err.text);
    w->chooser = make_chooser(w, false);
    rig_tokens(w->tokens, CONTEXT, RIG_VOCAB, 77);
    return w;
}

static inline struct world *world_make(uint32_t groups, const char *device)
{
    return world_make_looking(groups, 0, device);
}

static inline void world_free(struct world **world)
{
    struct world *w = *world;
    chooser_free(&w->chooser);
    engine_close(&w->engine);
    rig_free(&w->rig);
    mem_free(world);
}

static inline void pick(const struct world *w, uint32_t group, uint32_t head, const struct choice *choice,
                        const struct span *span, struct positions *ret)
{
    uint32_t topk[CONTEXT], index[CONTEXT];
    float weights[CONTEXT];
    chooser_pick(w->chooser, group, head, choice, span, &(struct reach_scratch){topk, index, weights}, ret);
}

static inline struct lane *make_lane(const struct world *w, struct chooser *chooser,
                                     const struct choice *choice, enum selection_mode selection)
{
    return lane_create(&(struct lane_options){.model = w->engine.config,
                                              .chooser = chooser,
                                              .choice = *choice,
                                              .selection = selection,
                                              .capacity = CONTEXT,
                                              .loads = true});
}

#endif
