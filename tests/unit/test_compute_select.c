/* Retrieval weights and top-k: against softmax in double and a sorted list; edges, NaN, ties, threads. */
#include "tests/unit/compute_util.h"

enum { CHUNK_TOKENS = 96 };

struct keys {
    struct key_view view;
    uint16_t **chunks;
    uint32_t chunk_count;
    float *k; /* [count][kv_heads][head_dim], before rounding */
};

static struct keys make_keys(struct compute *c, uint32_t count, int kv_heads, int head_dim)
{
    struct keys keys = {.chunk_count = count / CHUNK_TOKENS + 1};
    size_t row = (size_t)(kv_heads * head_dim);
    keys.chunks = mem_alloc(keys.chunk_count, sizeof *keys.chunks);
    for (uint32_t i = 0; i < keys.chunk_count; i++) {
        keys.chunks[i] = mem_alloc(CHUNK_TOKENS * row, sizeof **keys.chunks);
        memset(keys.chunks[i], 0xff, CHUNK_TOKENS * row * sizeof **keys.chunks);
    }
    keys.k = random_floats(71, count * row + 1);
    keys.view = (struct key_view){(const uint16_t *const *)keys.chunks, CHUNK_TOKENS, 0};
    for (uint32_t at = 0, step = 1; at < count; at += step, step = step * 3 + 1) {
        uint32_t n = count - at < step ? count - at : step;
        keys.view.count = at;
        compute_keys_append(c, &keys.view, keys.k + at * row, (int)n, kv_heads, head_dim);
        assert_int_equal(keys.view.count, at);
    }
    keys.view.count = count;
    return keys;
}

static void free_keys(struct keys *keys)
{
    for (uint32_t i = 0; i < keys->chunk_count; i++)
        mem_free(&keys->chunks[i]);
    mem_free(&keys->chunks);
    mem_free(&keys->k);
}

struct heads {
    int q, kv, dim;
};

static void naive_softmax(double *out, const struct keys *keys, struct heads heads, int kv_head,
                          const float *q, float scale)
{
    double max = -INFINITY, sum = 0;
    for (uint32_t p = 0; p < keys->view.count; p++) {
        out[p] = 0;
        for (int d = 0; d < heads.dim; d++) {
            float k =
                keys->k[((size_t)p * (size_t)heads.kv + (size_t)kv_head) * (size_t)heads.dim + (size_t)d];
            out[p] += (double)q[d] * (double)dtype_f16_to_f32(dtype_f32_to_f16(k));
        }
        out[p] *= (double)scale;
        max = out[p] > max ? out[p] : max;
    }
    for (uint32_t p = 0; p < keys->view.count; p++)
        sum += out[p] = exp(out[p] - max);
    for (uint32_t p = 0; p < keys->view.count; p++)
        out[p] /= sum;
}

static void check_weights(struct compute *c, struct heads heads, uint32_t count, enum pool_kind pool)
{
    struct keys keys = make_keys(c, count, heads.kv, heads.dim);
    size_t stride = count + 5, total = stride * (size_t)heads.kv;
    float *q = random_floats(81, (size_t)(heads.q * heads.dim)), *weights = mem_alloc(total, sizeof *weights);
    double *one = mem_alloc(count, sizeof *one), *pooled = mem_alloc(count, sizeof *pooled);
    int group = heads.q / heads.kv;
    float scale = 1.0f / sqrtf((float)heads.dim);
    for (size_t i = 0; i < total; i++)
        weights[i] = 42;
    compute_retrieval_weights(c, weights, stride, q, &keys.view, heads.q, heads.kv, heads.dim, scale, pool);
    for (int h = 0; h < heads.kv; h++) {
        memset(pooled, 0, count * sizeof *pooled);
        for (int g = 0; g < group; g++) {
            naive_softmax(one, &keys, heads, h, q + (size_t)((h * group + g) * heads.dim), scale);
            for (uint32_t p = 0; p < count; p++)
                pooled[p] = pool == POOL_MEAN ? pooled[p] + one[p] / group : fmax(pooled[p], one[p]);
        }
        for (uint32_t p = 0; p < count; p++)
            check_near(weights[(size_t)h * stride + p], pooled[p], pooled[p] + 1e-30, 2e-5, "weights", p);
        for (size_t p = count; p < stride; p++)
            assert_true(weights[(size_t)h * stride + p] == 42);
    }
    mem_free(&q);
    mem_free(&weights);
    mem_free(&one);
    mem_free(&pooled);
    free_keys(&keys);
}

/* A group whose scores do not fit in the shared buffer at once: the same bits as its halves, pooled. */
static void weights_of_more_scores_than_memory(void **state)
{
    (void)state;
    enum { COUNT = 140000, GROUP = 70, DIM = 16 };
    struct compute *c = make_compute(&variants[0]);
    struct keys keys = make_keys(c, COUNT, 2, DIM);
    float *q = random_floats(5, 2 * GROUP * DIM), *whole = mem_alloc(2 * COUNT, sizeof *whole);
    float *half[2] = {mem_alloc(2 * COUNT, sizeof *whole), mem_alloc(2 * COUNT, sizeof *whole)};
    compute_retrieval_weights(c, whole, COUNT, q, &keys.view, 2 * GROUP, 2, DIM, 0.25f, POOL_MAX);
    for (int h = 0; h < 2; h++) {
        float part[GROUP * DIM];
        for (int kv = 0; kv < 2; kv++)
            memcpy(part + kv * GROUP / 2 * DIM, q + (kv * GROUP + h * GROUP / 2) * DIM, sizeof part / 2);
        compute_retrieval_weights(c, half[h], COUNT, part, &keys.view, GROUP, 2, DIM, 0.25f, POOL_MAX);
    }
    for (size_t i = 0; i < 2 * COUNT; i++)
        assert_true(whole[i] > 0 && whole[i] == fmaxf(half[0][i], half[1][i]));
    mem_free(&q);
    mem_free(&whole);
    mem_free(&half[0]);
    mem_free(&half[1]);
    free_keys(&keys);
    compute_free(&c);
}

static void weights_are_near_double(void **state)
{
    (void)state;
    static const uint32_t counts[] = {0, 1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 256, 257, 2050};
    static const struct heads shapes[] = {{9, 3, 64}, {4, 4, 8}, {64, 1, 24}, {8, 2, 20}};
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++)
            for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
                check_weights(c, shapes[s], counts[i], i % 2 ? POOL_MEAN : POOL_MAX);
        compute_free(&c);
    }
}

static void weights_ignore_threads(void **state)
{
    (void)state;
    enum { COUNT = 3001, Q = 9, KV = 3, DIM = 64 };
    float *q = random_floats(91, Q * DIM), *first = mem_alloc(KV * COUNT, sizeof *first);
    float *weights = mem_alloc(KV * COUNT, sizeof *weights);
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        struct keys keys = make_keys(c, COUNT, KV, DIM);
        compute_retrieval_weights(c, weights, COUNT, q, &keys.view, Q, KV, DIM, 0.125f, POOL_MAX);
        if (first_of_path(v))
            memcpy(first, weights, KV * COUNT * sizeof *first);
        assert_memory_equal(first, weights, KV * COUNT * sizeof *first);
        free_keys(&keys);
        compute_free(&c);
    }
    mem_free(&q);
    mem_free(&first);
    mem_free(&weights);
}

/* A key of NaN makes its own KV head's weights NaN, so that the mass shows it; other heads do not notice. */
static void weights_of_nan_keys(void **state)
{
    (void)state;
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        struct keys keys = make_keys(c, 500, 2, 16);
        memset(keys.chunks[3] + 5 * 16, 0xff, 32);
        float *q = random_floats(92, 4 * 16), weights[1000];
        uint32_t index[10], scratch[500];
        double mass;
        for (int pool = POOL_MAX; pool <= POOL_MEAN; pool++) {
            compute_retrieval_weights(c, weights, 500, q, &keys.view, 4, 2, 16, 0.25f, (enum pool_kind)pool);
            for (int p = 0; p < 1000; p++)
                assert_int_equal(isnan(weights[p]) != 0, p < 500);
            assert_int_equal(compute_topk(index, &mass, weights, 500, 10, scratch), 10);
            assert_true(isnan(mass));
            assert_int_equal(index[9], 9);
        }
        mem_free(&q);
        free_keys(&keys);
        compute_free(&c);
    }
}

struct ranked {
    float value;
    uint32_t position;
};

static int by_rank(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    if (x->value != y->value)
        return x->value > y->value ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

static int by_number(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static void check_topk(const float *values, uint32_t n, uint32_t k)
{
    uint32_t expected_count = k < n ? k : n;
    struct ranked *ranked = mem_alloc(n, sizeof *ranked);
    uint32_t *expected = mem_alloc(expected_count, sizeof *expected),
             *scratch = mem_alloc(n, sizeof *scratch);
    uint32_t *index = mem_alloc((size_t)expected_count + 1, sizeof *index);
    double mass = -1, expected_mass = 0;
    for (uint32_t i = 0; i < n; i++)
        ranked[i] = (struct ranked){isnan(values[i]) ? -INFINITY : values[i], i};
    qsort(ranked, n, sizeof *ranked, by_rank);
    for (uint32_t i = 0; i < expected_count; i++)
        expected[i] = ranked[i].position;
    qsort(expected, expected_count, sizeof *expected, by_number);
    for (uint32_t i = 0; i < expected_count; i++)
        expected_mass += (double)values[expected[i]];
    index[expected_count] = 77777;
    assert_int_equal(compute_topk(index, &mass, values, n, k, scratch), expected_count);
    assert_memory_equal(index, expected, expected_count * sizeof *index);
    assert_int_equal(index[expected_count], 77777);
    assert_true(mass == expected_mass || (isnan(mass) && isnan(expected_mass)));
    assert_int_equal(compute_topk(index, NULL, values, n, k, scratch), expected_count);
    mem_free(&ranked);
    mem_free(&expected);
    mem_free(&scratch);
    mem_free(&index);
}

static void fill(float *values, uint32_t n, int kind)
{
    uint64_t seed = (uint64_t)kind * 7 + n;
    for (uint32_t i = 0; i < n; i++) {
        float x = rng_float(&seed);
        uint32_t u = rng_next(&seed);
        switch (kind) {
        case 0:
            values[i] = x;
            break;
        case 1:
            values[i] = 0.25f; /* all equal */
            break;
        case 2:
            values[i] = (float)(u % 3) - 1; /* many ties */
            break;
        case 3:
            values[i] = expf(12 * x - 20); /* like attention weights */
            break;
        case 4: /* NaN, infinities, both zeros */
            values[i] = u % 5 == 0   ? NAN
                        : u % 5 == 1 ? -INFINITY
                        : u % 5 == 2 ? -0.0f
                        : u % 5 == 3 ? 0.0f
                                     : x;
            break;
        case 5:
            values[i] = NAN;
            break;
        case 6: /* every sampled value is small, the large ones lie between */
            values[i] = i % 4 == 0 ? 1e-9f : 1.0f + 1e-6f * (float)(u % 64);
            break;
        default:
            values[i] = -1.0f - 1e-7f * (float)(n - i); /* near ties, ascending */
        }
    }
}

static void topk_equals_sorting(void **state)
{
    (void)state;
    static const uint32_t sizes[] = {0, 1, 2, 100, 2048, 4096, 5000, 9973};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        uint32_t n = sizes[s], ks[] = {0, 1, 2, n / 3, n / 2 + 1, n - (n > 0), n, n + 7, 2048};
        float *values = mem_alloc(n, sizeof *values);
        for (int kind = 0; kind < 8; kind++) {
            fill(values, n, kind);
            for (size_t i = 0; i < sizeof ks / sizeof *ks; i++)
                check_topk(values, n, ks[i]);
        }
        mem_free(&values);
    }
}

static void topk_of_the_longest_context(void **state)
{
    (void)state;
    enum { N = 131072 };
    float *values = mem_alloc(N, sizeof *values);
    for (int kind = 0; kind < 8; kind++) {
        fill(values, N, kind);
        check_topk(values, N, 4096);
    }
    mem_free(&values);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(weights_are_near_double), cmocka_unit_test(weights_of_more_scores_than_memory),
        cmocka_unit_test(weights_ignore_threads),  cmocka_unit_test(weights_of_nan_keys),
        cmocka_unit_test(topk_equals_sorting),     cmocka_unit_test(topk_of_the_longest_context),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
