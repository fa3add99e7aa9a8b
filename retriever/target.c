/* Features of the model; see target.h. Owner: the thread that owns the compute object. Buffers are made once,
 * for a tile of tokens. */
#include "retriever/target.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

struct target {
    const struct head_config *config;
    const struct head_shared *shared;
    struct compute *compute;
    uint32_t tokens_max, inputs;
    float *x; /* [tokens_max][inputs] */
    float *g; /* [tokens_max][hidden] */
};

struct target *target_create(const struct head *head, uint32_t tokens_max, struct compute *compute)
{
    const struct head_config *c = head_config(head);
    if (c->features != HEAD_FEATURES_TARGET)
        return NULL;
    struct target *t = mem_alloc(1, sizeof *t);
    *t = (struct target){.config = c,
                         .shared = head_shared(head),
                         .compute = compute,
                         .tokens_max = tokens_max,
                         .inputs = c->feature_layer_count * c->feature_hidden};
    t->x = mem_alloc_aligned((size_t)tokens_max * t->inputs, sizeof *t->x);
    t->g = mem_alloc_aligned((size_t)tokens_max * c->hidden, sizeof *t->g);
    return t;
}

void target_free(struct target **target)
{
    struct target *t = *target;
    if (!t)
        return;
    mem_free(&t->x);
    mem_free(&t->g);
    mem_free(target);
}

static void read_row(float *to, const struct target_row *row, uint32_t count)
{
    if (!row->at) {
        memset(to, 0, count * sizeof *to);
        return;
    }
    if (row->type == DTYPE_F32) {
        memcpy(to, row->at, count * sizeof *to);
        return;
    }
    CHECK(row->type == DTYPE_BF16);
    for (uint32_t i = 0; i < count; i++)
        to[i] = dtype_bf16_to_f32(((const uint16_t *)row->at)[i]);
}

void target_run(struct target *t, const struct target_row *rows, uint32_t count)
{
    const struct model_tensor *fc = &t->shared->fc;
    const struct matrix w = {fc->type, fc->rows, fc->cols, fc->data};
    CHECK(count <= t->tokens_max);
    for (uint32_t i = 0; i < count; i++)
        read_row(t->x + (size_t)i * t->inputs, &rows[i], t->inputs);
    if (t->shared->feature_input_norm.data)
        compute_rmsnorm(t->compute, t->x, t->x, t->shared->feature_input_norm.data, (int)count,
                        (int)t->inputs, t->config->rms_eps);
    compute_matmul(t->compute, t->g, &w, t->x, NULL, (int)count);
    compute_rmsnorm(t->compute, t->g, t->g, t->shared->feature_norm.data, (int)count, (int)t->config->hidden,
                    t->config->rms_eps);
}

const float *target_rows(const struct target *t)
{
    return t->g;
}

void target_join(const struct target *t, float *out, const float *embedding, const float *features,
                 uint32_t count)
{
    size_t hidden = t->config->hidden;
    for (size_t i = 0; i < count; i++) {
        memcpy(out + 2 * i * hidden, embedding + i * hidden, hidden * sizeof *out);
        memcpy(out + (2 * i + 1) * hidden, features + i * hidden, hidden * sizeof *out);
    }
}
