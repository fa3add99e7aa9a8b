/* For tests of the retriever: a small model with a head, and steps through it. */
#ifndef TESTS_UNIT_RETRIEVER_RIG_H
#define TESTS_UNIT_RETRIEVER_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "model/head.h"
#include "retriever/selector.h"
#include "tests/unit/tiny_model.h"

#ifndef RIG_DIM
#define RIG_DIM 16 /* another one: before this header */
#endif

enum {
    RIG_HIDDEN = 32,
    RIG_Q_HEADS = 4,
    RIG_KV_HEADS = 2,
    RIG_HEAD_DIM = RIG_DIM,
    RIG_VOCAB = 64,
    RIG_LAYERS = 4
};
enum {
    RIG_Q_ROWS = RIG_Q_HEADS * RIG_HEAD_DIM,
    RIG_KV_ROWS = RIG_KV_HEADS * RIG_HEAD_DIM,
    RIG_GROUPS_MAX = 2,
    RIG_VIEWS_MAX = 3,
    RIG_TAPS_MAX = 64,
    RIG_FEATURES_MAX = 3,
    RIG_ROW_MAX = RIG_FEATURES_MAX * RIG_HIDDEN
};

struct rig {
    char dir[40], model_path[64], head_path[64];
    struct model *model;
    struct head *head;
    float norm[RIG_GROUPS_MAX][RIG_HIDDEN], head_norm[RIG_HEAD_DIM];
    uint32_t views;
    float q[RIG_GROUPS_MAX][RIG_Q_ROWS * RIG_VIEWS_MAX * RIG_HIDDEN]; /* rows of views * RIG_HIDDEN */
    float k[RIG_GROUPS_MAX][RIG_KV_ROWS * RIG_VIEWS_MAX * RIG_HIDDEN];
    float taps[RIG_GROUPS_MAX][RIG_VIEWS_MAX * RIG_TAPS_MAX]; /* [views][taps] */
    uint32_t features;                                        /* layers of the model; 0: none */
    float fc[RIG_HIDDEN * RIG_ROW_MAX], feature_norm[RIG_HIDDEN], input_norm[RIG_ROW_MAX];
};

struct rig_options {
    uint32_t groups, trained_context, rope_dims;
    uint32_t views, taps; /* 0: no context */
    uint32_t features;    /* layers of the model whose inputs the head reads; 0: none; not with views */
    bool input_norm;      /* of what it reads */
    float rms_eps;
    bool halves;
    bool head_norms;         /* of queries and keys */
    const char *calibration; /* of the head; NULL: none */
    float (*weight)(const struct tiny_model *m, const char *name, uint32_t row, uint32_t col);
    float (*projection)(uint32_t group, char which, uint32_t row, uint32_t col); /* NULL: random */
};

static inline void rig_fill(struct rig *r, const struct rig_options *o)
{
    uint32_t seed = 11, taps_seed = 12, width = r->views * RIG_HIDDEN;
    for (uint32_t i = 0; i < RIG_HEAD_DIM; i++)
        r->head_norm[i] = 1 + (float)(i % 5) / 8;
    for (uint32_t g = 0; g < RIG_GROUPS_MAX; g++) {
        for (uint32_t i = 0; i < RIG_HIDDEN; i++)
            r->norm[g][i] = o->projection ? 1 : 1 + 0.3f * tiny_uniform(&seed);
        for (uint32_t i = 0; i < RIG_Q_ROWS * width; i++)
            r->q[g][i] =
                o->projection ? o->projection(g, 'q', i / width, i % width) : 0.6f * tiny_uniform(&seed);
        for (uint32_t i = 0; i < RIG_KV_ROWS * width; i++)
            r->k[g][i] =
                o->projection ? o->projection(g, 'k', i / width, i % width) : 0.6f * tiny_uniform(&seed);
        for (uint32_t i = 0; i < RIG_VIEWS_MAX * RIG_TAPS_MAX; i++)
            r->taps[g][i] = o->projection ? (float)((int)(tiny_random(&taps_seed) >> 8 & 7) - 3) / 8
                                          : tiny_uniform(&taps_seed);
    }
}

static inline void rig_fill_features(struct rig *r, const struct rig_options *o)
{
    uint32_t seed = 13;
    for (uint32_t i = 0; i < RIG_HIDDEN * RIG_ROW_MAX; i++)
        r->fc[i] = o->projection ? o->projection(0, 'f', i / RIG_ROW_MAX, i % RIG_ROW_MAX)
                                 : 0.3f * tiny_uniform(&seed);
    for (uint32_t i = 0; i < RIG_HIDDEN; i++)
        r->feature_norm[i] = o->projection ? 1 : 1 + 0.3f * tiny_uniform(&seed);
    for (uint32_t i = 0; i < RIG_ROW_MAX; i++)
        r->input_norm[i] = 1 + 0.3f * tiny_uniform(&seed);
}

/* Ascending layers, the last of them behind the model's last. */
static inline uint32_t rig_feature_layer(const struct rig_options *o, uint32_t i)
{
    return i + 1 == o->features ? RIG_LAYERS : i;
}

static inline struct rig *rig_make(const struct rig_options *o)
{
    const struct tiny_model tiny = {.vocab = RIG_VOCAB,
                                    .hidden = RIG_HIDDEN,
                                    .q_heads = RIG_Q_HEADS,
                                    .kv_heads = RIG_KV_HEADS,
                                    .head_dim = RIG_HEAD_DIM,
                                    .layers = RIG_LAYERS,
                                    .context = 1 << 20,
                                    .seed = 5,
                                    .rope_base = 10000,
                                    .weight = o->weight};
    struct rig *r = mem_alloc(1, sizeof *r);
    struct err err = {0};
    struct head_group groups[RIG_GROUPS_MAX];
    snprintf(r->dir, sizeof r->dir, "/tmp/test_retriever.XXXXXX");
    assert_non_null(mkdtemp(r->dir));
    snprintf(r->model_path, sizeof r->model_path, "%s/model.gguf", r->dir);
    snprintf(r->head_path, sizeof r->head_path, "%s/head.safetensors", r->dir);
    tiny_model_write(&tiny, r->model_path);
    if (model_open(r->model_path, &r->model, &err) < 0)
        fail_msg("%s", err.text);
    r->features = o->features;
    r->views = o->views ? o->views : o->features ? 2 : 1; /* halves of what projections read */
    rig_fill(r, o);
    rig_fill_features(r, o);
    struct head_config c = {.model = model_fingerprint(r->model),
                            .tokenizer = model_tokenizer_fingerprint(r->model),
                            .vocab = RIG_VOCAB,
                            .hidden = RIG_HIDDEN,
                            .q_heads = RIG_Q_HEADS,
                            .kv_heads = RIG_KV_HEADS,
                            .head_dim = RIG_HEAD_DIM,
                            .layers = RIG_LAYERS,
                            .features = o->views      ? HEAD_FEATURES_CONTEXT
                                        : o->features ? HEAD_FEATURES_TARGET
                                                      : HEAD_FEATURES_NONE,
                            .feature_layer_count = o->features,
                            .feature_hidden = o->features ? RIG_HIDDEN : 0,
                            .views = o->views,
                            .taps = o->taps,
                            .groups = o->groups,
                            .rms_eps = o->rms_eps,
                            .rope = {.base = 10000,
                                     .dims = o->rope_dims,
                                     .halves = o->halves,
                                     .factor = 1,
                                     .original_context = o->trained_context,
                                     .beta_fast = 32,
                                     .beta_slow = 1,
                                     .attn_factor = 1},
                            .trained_context = o->trained_context};
    struct head_shared shared = {0};
    uint32_t row = o->features * RIG_HIDDEN;
    for (uint32_t i = 0; i < o->features; i++)
        c.feature_layers[i] = rig_feature_layer(o, i);
    if (o->features) {
        shared.fc = (struct model_tensor){DTYPE_F32, RIG_HIDDEN, row, r->fc, 0};
        shared.feature_norm = (struct model_tensor){DTYPE_F32, 1, RIG_HIDDEN, r->feature_norm, 0};
    }
    if (o->input_norm)
        shared.feature_input_norm = (struct model_tensor){DTYPE_F32, 1, row, r->input_norm, 0};
    if (o->calibration && calibration_parse(o->calibration, &c.calibration, &err) < 0)
        fail_msg("%s", err.text);
    for (uint32_t g = 0; g < o->groups; g++) {
        c.group_first_layer[g + 1] = g + 1 == o->groups ? RIG_LAYERS : g + 1;
        groups[g] = (struct head_group){{DTYPE_F32, 1, RIG_HIDDEN, r->norm[g], 0},
                                        {DTYPE_F32, RIG_Q_ROWS, r->views * RIG_HIDDEN, r->q[g], 0},
                                        {DTYPE_F32, RIG_KV_ROWS, r->views * RIG_HIDDEN, r->k[g], 0},
                                        {0},
                                        {0},
                                        {0}};
        if (o->views)
            groups[g].taps = (struct model_tensor){DTYPE_F32, o->views, o->taps, r->taps[g], 0};
        if (o->head_norms)
            groups[g].q_norm = groups[g].k_norm =
                (struct model_tensor){DTYPE_F32, 1, RIG_HEAD_DIM, r->head_norm, 0};
    }
    if (head_write(r->head_path, &c, o->features ? &shared : NULL, groups, &err) < 0 ||
        head_open(r->head_path, r->model, &r->head, &err) < 0)
        fail_msg("%s", err.text);
    return r;
}

static inline void rig_free(struct rig **rig)
{
    struct rig *r = *rig;
    head_free(&r->head);
    model_free(&r->model);
    unlink(r->model_path);
    unlink(r->head_path);
    rmdir(r->dir);
    mem_free(rig);
}

struct rig_selector {
    enum head_pool pool;
    uint32_t context;
    int threads;
    enum compute_isa isa;
    const char *device;
    uint64_t work_bytes;
    uint32_t sequences; /* 0: 8 */
    uint64_t kept_bytes;
    enum compute_keys keys;
};

static inline struct selector *rig_selector(const struct rig *r, struct rig_selector o)
{
    struct selector_options options = {.device = o.device,
                                       .work_bytes = o.work_bytes,
                                       .model = r->model,
                                       .head = r->head,
                                       .pool = o.pool,
                                       .context = o.context,
                                       .sequences = o.sequences ? o.sequences : 8,
                                       .threads = o.threads ? o.threads : 1,
                                       .isa = o.isa,
                                       .kept_bytes = o.kept_bytes,
                                       .keys = o.keys};
    struct selector *s = NULL;
    struct err err = {0};
    if (selector_create(&options, &s, &err) < 0)
        fail_msg("%s", err.text);
    return s;
}

static inline void rig_open(struct selector *s, uint64_t id, uint32_t capacity, uint32_t budget,
                            uint32_t sinks, uint32_t window)
{
    struct msg_open open = {
        .sequence = id, .capacity = capacity, .budget = budget, .sinks = sinks, .window = window};
    struct err err = {0};
    if (selector_open(s, &open, &err) < 0)
        fail_msg("%s", err.text);
}

/* One sequence's tokens [from, to), a selection of the last one. */
static inline void rig_step(struct selector *s, uint64_t id, uint32_t step, const uint32_t *tokens,
                            uint32_t from, uint32_t to, bool select, struct selector_result *result)
{
    struct msg_step_entry entry = {id, 9, from, to - from, select ? STEP_ENTRY_SELECT : 0};
    struct msg_step msg = {&entry, 1, {tokens + from, to - from}, {0}, 0};
    selector_step(s, step, &msg, result);
    if (result->refusal_count)
        fail_msg("%s", result->refusals[0].text);
}

static inline void rig_tokens(uint32_t *tokens, uint32_t count, uint32_t below, uint32_t seed)
{
    for (uint32_t i = 0; i < count; i++)
        tokens[i] = tiny_random(&seed) % below;
}

#endif
