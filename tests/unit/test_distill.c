/* Heads with features target as tools/distill exports them: the file opens, and scores computed from it as
 * model/head.h says, in double precision, are those that training saw (tools/distill/vectors.py). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/dtype.h"
#include "model/head.h"
#include "model/model.h"

#define VECTORS "tests/vectors/distill"

struct vectors {
    uint32_t sizes[5]; /* tokens, width of the states, queries, groups, key heads */
    uint32_t *tokens, *queries;
    float *states, *weights;
};

static const uint32_t layers[] = {2, 5, 8}, first_layers[] = {0, 3, 8};

static void read_vectors(struct vectors *v)
{
    char magic[4];
    FILE *f = fopen(VECTORS "/expected.bin", "rbe");
    assert_non_null(f);
    assert_int_equal(fread(magic, 1, 4, f), 4);
    assert_memory_equal(magic, "DVEC", 4);
    assert_int_equal(fread(v->sizes, 4, 5, f), 5);
    size_t n = v->sizes[0], states = n * v->sizes[1], m = v->sizes[2],
           weights = v->sizes[3] * v->sizes[4] * m * n;
    assert_true(n <= 4096 && v->sizes[1] <= 4096 && m <= n && weights <= 1 << 20);
    uint16_t *half = mem_alloc(states, sizeof *half);
    v->tokens = mem_alloc(n, sizeof *v->tokens);
    v->queries = mem_alloc(m, sizeof *v->queries);
    v->states = mem_alloc(states, sizeof *v->states);
    v->weights = mem_alloc(weights, sizeof *v->weights);
    assert_int_equal(fread(v->tokens, 4, n, f), n);
    assert_int_equal(fread(half, 2, states, f), states);
    assert_int_equal(fread(v->queries, 4, m, f), m);
    assert_int_equal(fread(v->weights, 4, weights, f), weights);
    assert_int_equal(fgetc(f), EOF);
    for (size_t i = 0; i < states; i++)
        v->states[i] = dtype_f16_to_f32(half[i]);
    mem_free(&half);
    fclose(f);
}

static double weight(const struct model_tensor *t, uint32_t row, uint32_t col)
{
    size_t at = (size_t)row * t->cols + col;
    if (t->type == DTYPE_F32)
        return (double)((const float *)t->data)[at];
    assert_int_equal(t->type, DTYPE_F16);
    return (double)dtype_f16_to_f32(((const uint16_t *)t->data)[at]);
}

static void norm(double *x, const struct model_tensor *weights, uint32_t n, double eps)
{
    double square = 0;
    for (uint32_t i = 0; i < n; i++)
        square += x[i] * x[i];
    for (uint32_t i = 0; i < n; i++)
        x[i] *= weight(weights, 0, i) / sqrt(square / n + eps);
}

/* What the projections of a group read at a position: [2 * hidden]. */
static void input(const struct head *head, const struct model *model, uint32_t group, const struct vectors *v,
                  uint32_t position, double *x)
{
    const struct head_config *c = head_config(head);
    const struct head_shared *shared = head_shared(head);
    double *g = x + c->hidden;
    uint32_t width = v->sizes[1];
    const struct model_tensor *table = model_token_embedding(model);
    assert_int_equal(table->type, DTYPE_BF16);
    const uint16_t *row = (const uint16_t *)table->data + (size_t)v->tokens[position] * c->hidden;
    for (uint32_t i = 0; i < c->hidden; i++) {
        x[i] = (double)dtype_bf16_to_f32(row[i]);
        g[i] = 0;
        for (uint32_t j = 0; j < width && position > 0; j++)
            g[i] += weight(&shared->fc, i, j) * (double)v->states[(size_t)(position - 1) * width + j];
    }
    norm(x, &head_groups(head)[group].norm, c->hidden, (double)c->rms_eps);
    norm(g, &shared->feature_norm, c->hidden, (double)c->rms_eps);
}

/* Projects an input with the rows of w and rotates it. */
static void project(const struct head_config *c, const struct model_tensor *w, const double *x,
                    uint32_t position, double *out)
{
    for (uint32_t row = 0; row < w->rows; row++) {
        out[row] = 0;
        for (uint32_t i = 0; i < w->cols; i++)
            out[row] += weight(w, row, i) * x[i];
    }
    for (uint32_t at = 0; at < w->rows; at += c->head_dim)
        for (uint32_t j = 0; j < c->rope.dims; j += 2) {
            double angle = position * pow((double)c->rope.base, -(double)j / c->rope.dims);
            double a = out[at + j], b = out[at + j + 1];
            out[at + j] = a * cos(angle) - b * sin(angle);
            out[at + j + 1] = a * sin(angle) + b * cos(angle);
        }
}

/* Adds a query head's softmax weights to the mean over `each` heads. */
static void pool(const double *q, const double *keys, uint32_t stride, uint32_t dim, uint32_t count,
                 uint32_t each, double *weights)
{
    double *s = mem_alloc(count, sizeof *s), most = -INFINITY, sum = 0;
    for (uint32_t p = 0; p < count; p++) {
        s[p] = 0;
        for (uint32_t d = 0; d < dim; d++)
            s[p] += q[d] * keys[(size_t)p * stride + d] / sqrt(dim);
        most = fmax(most, s[p]);
    }
    for (uint32_t p = 0; p < count; p++)
        sum += s[p] = exp(s[p] - most);
    for (uint32_t p = 0; p < count; p++)
        weights[p] += s[p] / sum / each;
    mem_free(&s);
}

static void check_query(const struct head *head, const struct vectors *v, uint32_t group, uint32_t number,
                        const double *inputs, const double *keys)
{
    const struct head_config *c = head_config(head);
    uint32_t n = v->sizes[0], heads = v->sizes[4], at = v->queries[number], each = c->q_heads / heads;
    double *q = mem_alloc((size_t)c->q_heads * c->head_dim, sizeof *q),
           *weights = mem_alloc(n, sizeof *weights);
    project(c, &head_groups(head)[group].q, inputs + (size_t)at * 2 * c->hidden, at, q);
    for (uint32_t h = 0; h < heads; h++) {
        const float *expected = v->weights + (((size_t)group * heads + h) * v->sizes[2] + number) * n;
        memset(weights, 0, n * sizeof *weights);
        for (uint32_t i = 0; i < each; i++)
            pool(q + (size_t)(h * each + i) * c->head_dim, keys + (size_t)h * c->head_dim,
                 heads * c->head_dim, c->head_dim, at + 1, each, weights);
        for (uint32_t p = 0; p < n; p++)
            if (!(fabs(weights[p] - (double)expected[p]) < 1e-4))
                fail_msg("group %u, head %u, query %u, position %u: computed %g, expected %g", group, h, at,
                         p, weights[p], (double)expected[p]);
    }
    mem_free(&q);
    mem_free(&weights);
}

static void an_exported_head_scores_as_in_training(void **state)
{
    (void)state;
    struct err err = {0};
    struct model *model = NULL;
    struct head *head = NULL;
    struct vectors v;
    read_vectors(&v);
    if (model_open("tests/vectors/eagle/model", &model, &err) < 0 ||
        head_open(VECTORS "/head.safetensors", model, &head, &err) < 0)
        fail_msg("%s", err.text);
    const struct head_config *c = head_config(head);
    assert_int_equal(c->features, HEAD_FEATURES_TARGET);
    assert_int_equal(c->pool, HEAD_POOL_MEAN);
    assert_int_equal(c->feature_layer_count, 3);
    assert_memory_equal(c->feature_layers, layers, sizeof layers);
    assert_int_equal(c->feature_layer_count * c->feature_hidden, v.sizes[1]);
    assert_int_equal(c->groups, v.sizes[3]);
    assert_memory_equal(c->group_first_layer, first_layers, sizeof first_layers);
    assert_int_equal(c->kv_heads, v.sizes[4]);
    uint32_t n = v.sizes[0], rows = c->kv_heads * c->head_dim;
    double *inputs = mem_alloc((size_t)n * 2 * c->hidden, sizeof *inputs),
           *keys = mem_alloc((size_t)n * rows, sizeof *keys);
    for (uint32_t g = 0; g < c->groups; g++) {
        for (uint32_t p = 0; p < n; p++) {
            double *x = inputs + (size_t)p * 2 * c->hidden;
            input(head, model, g, &v, p, x);
            project(c, &head_groups(head)[g].k, x, p, keys + (size_t)p * rows);
        }
        for (uint32_t i = 0; i < v.sizes[2]; i++)
            check_query(head, &v, g, i, inputs, keys);
    }
    mem_free(&inputs);
    mem_free(&keys);
    mem_free(&v.tokens);
    mem_free(&v.queries);
    mem_free(&v.states);
    mem_free(&v.weights);
    head_free(&head);
    model_free(&model);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {cmocka_unit_test(an_exported_head_scores_as_in_training)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
