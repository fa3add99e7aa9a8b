/* For tests of the retriever: selections by a plain double-precision reference, and the store's view of
 * sets. */
#ifndef TESTS_UNIT_RETRIEVER_REFERENCE_H
#define TESTS_UNIT_RETRIEVER_REFERENCE_H

#include "tests/unit/retriever_rig.h"

/* ---- the reference ---- */

/* Angle of pair j a position: YaRN as its paper's formulas say, when `factor` is not 1. */
static inline double ref_frequency(uint32_t j, uint32_t dims, double original, double factor)
{
    double f = pow(10000, -2.0 * j / dims);
    if (factor == 1)
        return f;
    double low = floor(dims * log(original / (32 * 2 * M_PI)) / (2 * log(10000)));
    double high = ceil(dims * log(original / (1 * 2 * M_PI)) / (2 * log(10000)));
    low = low < 0 ? 0 : low;
    high = high > dims - 1 ? dims - 1 : high;
    double ramp = (j - low) / (high - low > 1e-3 ? high - low : 1e-3);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return f / factor * ramp + f * (1 - ramp);
}

static inline void ref_norm(double *x, uint32_t count, const float *weight, double eps)
{
    double square = 0;
    for (uint32_t i = 0; i < count; i++)
        square += x[i] * x[i];
    for (uint32_t i = 0; i < count; i++)
        x[i] *= (double)weight[i] / sqrt(square / count + eps);
}

static inline void ref_embedding(const struct rig *r, uint32_t group, uint32_t token, double *x)
{
    const float *e = (const float *)model_token_embedding(r->model)->data + (size_t)token * RIG_HIDDEN;
    for (uint32_t i = 0; i < RIG_HIDDEN; i++)
        x[i] = (double)e[i];
    ref_norm(x, RIG_HIDDEN, r->norm[group], (double)head_config(r->head)->rms_eps);
}

/* Hidden states of the sequence in hand, [position][features * RIG_HIDDEN]; the test's. */
static const float *ref_hidden;

static inline void ref_features(const struct rig *r, uint32_t position, double *g)
{
    uint32_t row = r->features * RIG_HIDDEN;
    double eps = (double)head_config(r->head)->rms_eps, x[RIG_ROW_MAX] = {0};
    memset(g, 0, RIG_HIDDEN * sizeof *g);
    if (position == 0)
        return;
    for (uint32_t i = 0; i < row; i++)
        x[i] = (double)ref_hidden[(size_t)(position - 1) * row + i];
    if (head_shared(r->head)->feature_input_norm.data)
        ref_norm(x, row, r->input_norm, eps);
    for (uint32_t i = 0; i < RIG_HIDDEN; i++)
        for (uint32_t j = 0; j < row; j++)
            g[i] += (double)r->fc[i * row + j] * x[j];
    ref_norm(g, RIG_HIDDEN, r->feature_norm, eps);
}

/* What the projections read at `position`: the token's normed embedding, or the views' sums. x [views *
 * hidden]. */
static inline void ref_input(const struct rig *r, uint32_t group, const uint32_t *tokens, uint32_t position,
                             double *x)
{
    const struct head_config *c = head_config(r->head);
    bool context = c->features == HEAD_FEATURES_CONTEXT;
    if (c->features == HEAD_FEATURES_TARGET) {
        ref_embedding(r, group, tokens[position], x);
        ref_features(r, position, x + RIG_HIDDEN);
        return;
    }
    memset(x, 0, (size_t)r->views * RIG_HIDDEN * sizeof *x);
    for (uint32_t lag = 0; lag < (context ? c->taps : 1) && lag <= position; lag++) {
        const float *e = (const float *)model_token_embedding(r->model)->data +
                         (size_t)tokens[position - lag] * RIG_HIDDEN;
        double square = 0;
        for (uint32_t i = 0; i < RIG_HIDDEN; i++)
            square += (double)e[i] * (double)e[i];
        double scale = 1 / sqrt(square / RIG_HIDDEN + (double)c->rms_eps);
        for (uint32_t v = 0; v < r->views; v++)
            for (uint32_t i = 0; i < RIG_HIDDEN; i++)
                x[v * RIG_HIDDEN + i] += (double)e[i] * scale * (double)r->norm[group][i] *
                                         (context ? (double)r->taps[group][v * c->taps + lag] : 1);
    }
}

/* Projects the token at `position` with the rows of w, rotates it. */
static inline void ref_project(const struct rig *r, uint32_t group, const float *w, uint32_t rows,
                               const uint32_t *tokens, uint32_t position, double factor, double *out)
{
    const struct head_config *c = head_config(r->head);
    double x[RIG_VIEWS_MAX * RIG_HIDDEN], m = factor == 1 ? 1 : 0.1 * log(factor) + 1;
    uint32_t width = r->views * RIG_HIDDEN;
    ref_input(r, group, tokens, position, x);
    for (uint32_t row = 0; row < rows; row++) {
        out[row] = 0;
        for (uint32_t i = 0; i < width; i++)
            out[row] += (double)w[row * width + i] * x[i];
    }
    for (uint32_t h = 0; h < rows / RIG_HEAD_DIM; h++)
        for (uint32_t j = 0; j < c->rope.dims / 2; j++) {
            double angle = position * ref_frequency(j, c->rope.dims, c->trained_context, factor);
            double *head = out + h * RIG_HEAD_DIM;
            uint32_t ia = c->rope.halves ? j : 2 * j, ib = c->rope.halves ? j + c->rope.dims / 2 : 2 * j + 1;
            double a = head[ia], b = head[ib];
            head[ia] = (a * cos(angle) - b * sin(angle)) * m;
            head[ib] = (a * sin(angle) + b * cos(angle)) * m;
        }
}

/* weights [RIG_KV_HEADS][n]: pooled softmax weights of the last of n tokens. */
static inline void ref_weights(const struct rig *r, uint32_t group, enum head_pool pool, double factor,
                               const uint32_t *tokens, uint32_t n, double *weights)
{
    double *k = mem_alloc((size_t)n * RIG_KV_ROWS, sizeof *k), *w = mem_alloc(n, sizeof *w), q[RIG_Q_ROWS];
    ref_project(r, group, r->q[group], RIG_Q_ROWS, tokens, n - 1, factor, q);
    for (uint32_t p = 0; p < n; p++) {
        ref_project(r, group, r->k[group], RIG_KV_ROWS, tokens, p, factor, k + (size_t)p * RIG_KV_ROWS);
        for (uint32_t i = 0; i < RIG_KV_ROWS; i++) /* as the cache keeps it */
            k[p * RIG_KV_ROWS + i] =
                (double)dtype_f16_to_f32(dtype_f32_to_f16((float)k[p * RIG_KV_ROWS + i]));
    }
    memset(weights, 0, (size_t)n * RIG_KV_HEADS * sizeof *weights);
    for (uint32_t qh = 0; qh < RIG_Q_HEADS; qh++) {
        uint32_t h = qh / (RIG_Q_HEADS / RIG_KV_HEADS);
        double most = -INFINITY, sum = 0;
        for (uint32_t p = 0; p < n; p++) {
            w[p] = 0;
            for (uint32_t d = 0; d < RIG_HEAD_DIM; d++)
                w[p] += q[qh * RIG_HEAD_DIM + d] * k[(size_t)p * RIG_KV_ROWS + h * RIG_HEAD_DIM + d];
            w[p] /= sqrt(RIG_HEAD_DIM);
            most = fmax(most, w[p]);
        }
        for (uint32_t p = 0; p < n; p++)
            sum += w[p] = exp(w[p] - most);
        for (uint32_t p = 0; p < n; p++) {
            double *to = &weights[(size_t)h * n + p], one = w[p] / sum;
            *to = pool == HEAD_POOL_MAX ? fmax(*to, one) : *to + one / (RIG_Q_HEADS / RIG_KV_HEADS);
        }
    }
    mem_free(&k);
    mem_free(&w);
}

struct ref_order {
    double weight;
    uint32_t position;
};

static inline int ref_compare(const void *a, const void *b)
{
    const struct ref_order *x = a, *y = b;
    if (x->weight != y->weight)
        return x->weight > y->weight ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

/* in[n]: which positions a list must hold. Returns the least weight that was taken. */
static inline double ref_pick(const double *w, uint32_t sinks, uint32_t limit, uint32_t k, bool *in)
{
    uint32_t n = limit > sinks ? limit - sinks : 0;
    struct ref_order *order = mem_alloc(n, sizeof *order);
    double least = INFINITY;
    for (uint32_t i = 0; i < n; i++)
        order[i] = (struct ref_order){w[sinks + i], sinks + i};
    qsort(order, n, sizeof *order, ref_compare);
    for (uint32_t i = 0; i < n && i < k; i++) {
        in[order[i].position] = true;
        least = order[i].weight;
    }
    mem_free(&order);
    return least;
}

/* What the store knows of a sequence: its lists, made of sets and differences. */
struct store {
    uint32_t *at[RIG_GROUPS_MAX * RIG_KV_HEADS];
    uint32_t count[RIG_GROUPS_MAX * RIG_KV_HEADS];
    uint32_t step;
    bool has;
};

static inline void store_free(struct store *s)
{
    for (uint32_t l = 0; l < RIG_GROUPS_MAX * RIG_KV_HEADS; l++)
        mem_free(&s->at[l]);
}

static inline void store_list(struct store *s, uint32_t l, const uint32_t *added, uint32_t n_added,
                              const uint32_t *removed, uint32_t n_removed, bool whole)
{
    uint32_t old = whole ? 0 : s->count[l], n = 0, a = 0, d = 0;
    uint32_t *to = mem_alloc((size_t)old + n_added + 1, sizeof *to);
    for (uint32_t i = 0; i < old || a < n_added;) {
        if (a < n_added && (i == old || added[a] <= s->at[l][i])) {
            assert_true(i == old || added[a] != s->at[l][i]); /* adds what is there */
            to[n++] = added[a++];
        } else if (d < n_removed && removed[d] == s->at[l][i]) {
            d++;
            i++;
        } else {
            to[n++] = s->at[l][i++];
        }
    }
    assert_int_equal(d, n_removed); /* takes away only what is there */
    mem_free(&s->at[l]);
    s->at[l] = to;
    s->count[l] = n;
}

/* Takes entry `number` of a result. */
static inline void store_take(struct store *s, const struct selector_result *r, uint32_t number)
{
    const struct msg_topk_entry *e = &r->entries[number];
    uint32_t lists = r->groups * r->heads;
    const uint32_t *counts = r->counts + (size_t)number * lists * 2, *at = r->positions + r->first[number];
    bool whole = e->base_step == r->step;
    if (!whole) {
        assert_true(s->has);
        assert_int_equal(e->base_step, s->step);
    }
    for (uint32_t l = 0; l < lists; l++) {
        uint32_t added = counts[2 * l], removed = counts[2 * l + 1];
        if (whole)
            assert_int_equal(removed, 0);
        store_list(s, l, at, added, at + added, removed, whole);
        at += added + removed;
        for (uint32_t i = 0; i < s->count[l]; i++)
            assert_true(i == 0 || s->at[l][i] > s->at[l][i - 1]);
    }
    assert_ptr_equal(at, r->positions + r->first[number + 1]);
    s->step = r->step;
    s->has = true;
}

#endif
