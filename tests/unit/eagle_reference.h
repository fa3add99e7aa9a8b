/* For the test of imported draft models: what a head of one group that reads hidden states of the model
 * gives, in double precision from its tensors. Header only. */
#ifndef TESTS_UNIT_EAGLE_REFERENCE_H
#define TESTS_UNIT_EAGLE_REFERENCE_H

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "model/head.h"

enum { FEATURE_TOKENS = 60 };

static inline double element(const struct model_tensor *t, uint64_t i)
{
    const uint16_t *narrow = t->data;
    return t->type == DTYPE_F32   ? (double)((const float *)t->data)[i]
           : t->type == DTYPE_F16 ? (double)dtype_f16_to_f32(narrow[i])
                                  : (double)dtype_bf16_to_f32(narrow[i]);
}

static inline void norm_by(double *x, uint32_t n, const struct model_tensor *weight, double eps)
{
    double square = 0;
    for (uint32_t i = 0; i < n; i++)
        square += x[i] * x[i];
    for (uint32_t i = 0; i < n && weight->data; i++)
        x[i] *= element(weight, i) / sqrt(square / n + eps);
}

/* What the projections read: the token's embedding, and hidden states of the position before. */
static inline void reference_input(const struct head *head, const struct model *model, uint32_t token,
                                   const float *before, double *x)
{
    const struct head_config *h = head_config(head);
    const struct head_shared *s = head_shared(head);
    const struct model_tensor *table =
        h->embedding == HEAD_EMBEDDING_OWN ? &s->embedding : model_token_embedding(model);
    uint32_t inputs = h->feature_layer_count * h->feature_hidden;
    double *row = mem_alloc(inputs, sizeof *row), eps = (double)h->rms_eps;
    for (uint32_t i = 0; i < h->hidden; i++)
        x[i] = element(table, (uint64_t)token * h->hidden + i);
    norm_by(x, h->hidden, &head_groups(head)[0].norm, eps);
    for (uint32_t i = 0; i < inputs && before; i++)
        row[i] = (double)before[i];
    norm_by(row, inputs, &s->feature_input_norm, eps);
    for (uint32_t i = 0; i < h->hidden; i++) {
        x[h->hidden + i] = 0;
        for (uint32_t j = 0; j < inputs; j++)
            x[h->hidden + i] += element(&s->fc, (uint64_t)i * inputs + j) * row[j];
    }
    norm_by(x + h->hidden, h->hidden, &s->feature_norm, eps);
    mem_free(&row);
}

static inline void reference_project(const struct head *head, const struct model_tensor *w,
                                     const struct model_tensor *norm, const double *x, uint32_t position,
                                     double *out)
{
    const struct head_config *h = head_config(head);
    float inv_freq[MODEL_HEAD_DIM_MAX / 2], scale;
    assert_int_equal(model_rope_frequencies(&h->rope, inv_freq, &scale), 0);
    for (uint32_t i = 0; i < w->rows; i++) {
        out[i] = 0;
        for (uint32_t j = 0; j < w->cols; j++)
            out[i] += element(w, (uint64_t)i * w->cols + j) * x[j];
    }
    for (double *v = out; v < out + w->rows; v += h->head_dim) {
        if (norm->data)
            norm_by(v, h->head_dim, norm, (double)h->rms_eps);
        for (uint32_t j = 0; j < h->rope.dims / 2; j++) {
            uint32_t a = h->rope.halves ? j : 2 * j, b = h->rope.halves ? j + h->rope.dims / 2 : 2 * j + 1;
            double angle = position * (double)inv_freq[j], va = v[a], vb = v[b];
            v[a] = (va * cos(angle) - vb * sin(angle)) * (double)scale;
            v[b] = (va * sin(angle) + vb * cos(angle)) * (double)scale;
        }
    }
}

/* weights [kv_heads][FEATURE_TOKENS]: of the last token, the largest of a group's query heads. */
static inline void reference_weights(const struct head *head, const struct model *model,
                                     const uint32_t *tokens, const float *hidden, double *weights)
{
    const struct head_config *h = head_config(head);
    const struct head_group *g = &head_groups(head)[0];
    uint32_t row = h->feature_layer_count * h->feature_hidden, n = FEATURE_TOKENS;
    double *x = mem_alloc(2 * h->hidden, sizeof *x), *q = mem_alloc(g->q.rows, sizeof *q),
           *k = mem_alloc((size_t)n * g->k.rows, sizeof *k), w[FEATURE_TOKENS];
    for (uint32_t p = 0; p < n; p++) {
        reference_input(head, model, tokens[p], p ? hidden + (size_t)(p - 1) * row : NULL, x);
        reference_project(head, &g->k, &g->k_norm, x, p, k + (size_t)p * g->k.rows);
    }
    reference_project(head, &g->q, &g->q_norm, x, n - 1, q);
    memset(weights, 0, (size_t)h->kv_heads * n * sizeof *weights);
    for (uint32_t i = 0; i < h->q_heads; i++) {
        uint32_t kv = i / (h->q_heads / h->kv_heads);
        double sum = 0;
        for (uint32_t p = 0; p < n; p++) {
            w[p] = 0;
            for (uint32_t d = 0; d < h->head_dim; d++)
                w[p] += q[i * h->head_dim + d] * k[(size_t)p * g->k.rows + kv * h->head_dim + d];
            sum += w[p] = exp(w[p] / sqrt(h->head_dim));
        }
        for (uint32_t p = 0; p < n; p++)
            weights[kv * n + p] = fmax(weights[kv * n + p], w[p] / sum);
    }
    mem_free(&x);
    mem_free(&q);
    mem_free(&k);
}

#endif
