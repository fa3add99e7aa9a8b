/* Every architecture and variant, as Hugging Face folder and as GGUF: a plain float64 pass over what
 * model_open hands out gives the logits of tests/vectors/arch. So names, shapes, order of rows, biases, norms
 * and rotations are right, whatever computes with them later. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/model.h"
#include "tests/lib/ggufgen_arch.h"

#define WIDTH_MAX     256 /* of any vector of these models */
#define POSITIONS_MAX 80
#define TOLERANCE     5e-5

struct pass {
    const struct model *m;
    const struct model_config *c;
    float inv_freq[WIDTH_MAX], scale;
    double (*keys)[WIDTH_MAX], (*values)[WIDTH_MAX]; /* [layer * POSITIONS_MAX + position] */
};

static double element(const struct model_tensor *t, uint32_t row, uint32_t col)
{
    size_t i = (size_t)row * t->cols + col;
    if (t->type == DTYPE_F32)
        return (double)((const float *)t->data)[i];
    uint16_t half = ((const uint16_t *)t->data)[i];
    return (double)(t->type == DTYPE_F16 ? dtype_f16_to_f32(half) : dtype_bf16_to_f32(half));
}

static void multiply(const struct model_tensor *w, const struct model_tensor *bias, const double *x,
                     double *y)
{
    for (uint32_t r = 0; r < w->rows; r++) {
        y[r] = bias && bias->data ? element(bias, 0, r) : 0;
        for (uint32_t c = 0; c < w->cols; c++)
            y[r] += element(w, r, c) * x[c];
    }
}

static void normalise(const struct pass *p, const struct model_tensor *w, const double *x, double *y)
{
    double sum = 0;
    assert_int_equal(w->type, DTYPE_F32);
    for (uint32_t i = 0; i < w->cols; i++)
        sum += x[i] * x[i];
    double factor = 1 / sqrt(sum / w->cols + (double)p->c->rms_eps);
    for (uint32_t i = 0; i < w->cols; i++)
        y[i] = x[i] * factor * element(w, 0, i);
}

static void rotate(const struct pass *p, double *x, uint32_t position)
{
    const struct model_rope *r = &p->c->rope;
    for (uint32_t j = 0; j < r->dims / 2; j++) {
        double *a = &x[r->halves ? j : 2 * j], *b = &x[r->halves ? j + r->dims / 2 : 2 * j + 1];
        double angle = position * (double)p->inv_freq[j], old = *a, scale = (double)p->scale;
        *a = (old * cos(angle) - *b * sin(angle)) * scale;
        *b = (*b * cos(angle) + old * sin(angle)) * scale;
    }
}

/* Norms (where there are) and rotations of all heads of a query or key. */
static void shape_heads(const struct pass *p, const struct model_tensor *norm, double *x, uint32_t heads,
                        uint32_t position)
{
    for (uint32_t h = 0; h < heads; h++) {
        double *head = x + (size_t)h * p->c->head_dim;
        if (norm->data)
            normalise(p, norm, head, head);
        rotate(p, head, position);
    }
}

static void attend(const struct pass *p, uint32_t layer, const double *q, uint32_t position, double *out)
{
    uint32_t d = p->c->head_dim, group = p->c->q_heads / p->c->kv_heads;
    for (uint32_t h = 0; h < p->c->q_heads; h++) {
        double scores[POSITIONS_MAX], most = -INFINITY, sum = 0;
        for (uint32_t s = 0; s <= position; s++) {
            const double *k = p->keys[layer * POSITIONS_MAX + s] + (size_t)h / group * d;
            scores[s] = 0;
            for (uint32_t i = 0; i < d; i++)
                scores[s] += q[h * d + i] * k[i] / sqrt(d);
            most = fmax(most, scores[s]);
        }
        memset(out + (size_t)h * d, 0, d * sizeof *out);
        for (uint32_t s = 0; s <= position; s++)
            sum += scores[s] = exp(scores[s] - most);
        for (uint32_t s = 0; s <= position; s++)
            for (uint32_t i = 0; i < d; i++)
                out[h * d + i] += scores[s] / sum * p->values[layer * POSITIONS_MAX + s][h / group * d + i];
    }
}

static void run_layer(const struct pass *p, uint32_t layer, uint32_t position, double *x)
{
    const struct model_layer *l = &model_layers(p->m)[layer];
    double n[WIDTH_MAX], q[WIDTH_MAX], mixed[WIDTH_MAX], y[WIDTH_MAX], gate[WIDTH_MAX];
    double *k = p->keys[layer * POSITIONS_MAX + position], *v = p->values[layer * POSITIONS_MAX + position];
    normalise(p, &l->attn_norm, x, n);
    multiply(&l->wq, &l->q_bias, n, q);
    multiply(&l->wk, &l->k_bias, n, k);
    multiply(&l->wv, &l->v_bias, n, v);
    shape_heads(p, &l->q_norm, q, p->c->q_heads, position);
    shape_heads(p, &l->k_norm, k, p->c->kv_heads, position);
    attend(p, layer, q, position, mixed);
    multiply(&l->wo, NULL, mixed, y);
    for (uint32_t i = 0; i < p->c->hidden; i++)
        x[i] += y[i];
    normalise(p, &l->ffn_norm, x, n);
    multiply(&l->gate, NULL, n, gate);
    multiply(&l->up, NULL, n, mixed);
    for (uint32_t i = 0; i < p->c->ffn; i++)
        mixed[i] *= gate[i] / (1 + exp(-gate[i]));
    multiply(&l->down, NULL, mixed, y);
    for (uint32_t i = 0; i < p->c->hidden; i++)
        x[i] += y[i];
}

/* The largest difference from the golden logits. Tokens that the golden ones lack must never be the
 * likeliest. */
static double check_logits(const struct pass *p, const struct ggufgen_arch_golden *golden)
{
    double worst = 0;
    for (uint32_t position = 0; position < golden->tokens; position++) {
        double x[WIDTH_MAX], n[WIDTH_MAX], logits[WIDTH_MAX];
        for (uint32_t i = 0; i < p->c->hidden; i++)
            x[i] = element(model_token_embedding(p->m), golden->ids[position], i);
        for (uint32_t layer = 0; layer < p->c->layers; layer++)
            run_layer(p, layer, position, x);
        normalise(p, model_output_norm(p->m), x, n);
        multiply(model_output(p->m), NULL, n, logits);
        double most = -INFINITY;
        for (uint32_t i = 0; i < golden->vocab; i++) {
            worst = fmax(worst, fabs(logits[i] - (double)golden->logits[position * golden->vocab + i]));
            most = fmax(most, logits[i]);
        }
        for (uint32_t i = golden->vocab; i < p->c->vocab; i++)
            assert_true(logits[i] < most);
    }
    return worst;
}

/* `vocab`: of the golden logits, when the model has more; or 0. */
static void check_model(const char *name, const char *path, uint32_t vocab, double tolerance)
{
    struct pass p = {0};
    struct model *m = NULL;
    struct err err = {0};
    struct ggufgen_arch_golden golden;
    if (model_open(path, &m, &err) < 0)
        fail_msg("%s", err.text);
    p.m = m;
    p.c = model_config(m);
    ggufgen_arch_golden(name, vocab ? vocab : p.c->vocab, &golden);
    assert_int_equal(golden.tokens, 72);
    assert_int_equal(model_rope_frequencies(&p.c->rope, p.inv_freq, &p.scale), 0);
    p.keys = mem_alloc((size_t)p.c->layers * POSITIONS_MAX, sizeof *p.keys);
    p.values = mem_alloc((size_t)p.c->layers * POSITIONS_MAX, sizeof *p.values);
    double worst = check_logits(&p, &golden);
    if (!(worst < tolerance))
        fail_msg("%s: %s: found a difference of %g, expected less than %g", name, path, worst, tolerance);
    mem_free(&p.keys);
    mem_free(&p.values);
    mem_free(&golden.ids);
    mem_free(&golden.logits);
    model_free(&m);
}

static void test_folders(void **state)
{
    (void)state;
    for (unsigned i = 0; ggufgen_arch_names[i]; i++) {
        char *path;
        ggufgen_arch_folder(ggufgen_arch_names[i], 1 + i % 3, NULL, &path);
        check_model(ggufgen_arch_names[i], path, 0, TOLERANCE);
        ggufgen_arch_remove(&path);
    }
}

static void test_gguf(void **state)
{
    (void)state;
    static const enum dtype types[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    for (unsigned i = 0; ggufgen_arch_names[i]; i++) {
        char *path;
        ggufgen_arch_file(ggufgen_arch_names[i], types[i % 3], 1 + i % 2 * 2, &path);
        check_model(ggufgen_arch_names[i], path, 0, TOLERANCE);
        ggufgen_arch_remove(&path);
    }
}

/* The case llama-gqa as tools/inflate made it larger in every direction: more layers, wider, more heads of
 * twice the dimensions, bfloat16: the same logits but for its rounding (they go up to 4.6); the added
 * tokens never win. */
static void test_inflated(void **state)
{
    (void)state;
    check_model("llama-gqa", "tests/vectors/inflated", 128, 5e-2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_folders),
        cmocka_unit_test(test_gguf),
        cmocka_unit_test(test_inflated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
