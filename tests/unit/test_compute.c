/* Creation and the operators that work row by row: rmsnorm, swiglu, add, rope. */
#include <errno.h>

#include "tests/unit/compute_util.h"

static void create_says_what_is_wrong(void **state)
{
    (void)state;
    struct compute *c = NULL;
    struct err err;
    assert_int_equal(compute_create("npu", 1, COMPUTE_ISA_AUTO, &c, &err), -ENODEV);
    assert_non_null(strstr(err.text, "npu"));
    assert_int_equal(compute_create("cpu", 0, COMPUTE_ISA_AUTO, &c, &err), -EINVAL);
    assert_null(c);
    assert_int_equal(compute_create("cpu", 2, COMPUTE_ISA_REFERENCE, &c, &err), 0);
    assert_string_equal(compute_name(c), "cpu reference");
    assert_non_null(compute_pool(c));
    compute_free(&c);
    assert_null(c);
    compute_free(&c);
}

static void name_says_what_it_is_made_of(void **state)
{
    (void)state;
    struct compute *c = make_compute(&(struct variant){COMPUTE_ISA_REFERENCE, 1, COMPUTE_ACTIVATIONS_Q8});
    assert_string_equal(compute_name(c), "cpu reference q8");
    compute_free(&c);
}

/* Runs a test of one compute object on every path and number of threads. */
static void on_all(void (*test)(struct compute *c))
{
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        test(c);
        compute_free(&c);
    }
}

static const int dims[] = {1, 7, 8, 100, 576, 1536};
enum { DIMS = sizeof dims / sizeof *dims };

static void check_rmsnorm(struct compute *c)
{
    enum { N = 40 };
    for (int i = 0; i < DIMS; i++) {
        int dim = dims[i];
        size_t count = (size_t)(N * dim);
        float *x = random_floats(1, count), *weight = random_floats(2, (size_t)dim),
              *out = mem_alloc(count, sizeof *out);
        compute_rmsnorm(c, out, x, weight, N, dim, 1e-5f);
        for (int t = 0; t < N; t++) {
            double sum = 0;
            for (int d = 0; d < dim; d++)
                sum += pow((double)x[t * dim + d], 2);
            double factor = 1 / sqrt(sum / dim + (double)1e-5f);
            for (int d = 0; d < dim; d++) {
                double expected = (double)x[t * dim + d] * factor * (double)weight[d];
                check_near(out[t * dim + d], expected, fabs(expected), 1e-6, "rmsnorm",
                           (size_t)(t * dim + d));
            }
        }
        float *one = mem_alloc((size_t)dim, sizeof *one);
        compute_rmsnorm(c, one, x + 17 * dim, weight, 1, dim, 1e-5f);
        assert_memory_equal(one, out + 17 * dim, (size_t)dim * sizeof *one);
        compute_rmsnorm(c, x, x, weight, N, dim, 1e-5f);
        assert_memory_equal(x, out, count * sizeof *x);
        mem_free(&x);
        mem_free(&weight);
        mem_free(&out);
        mem_free(&one);
    }
}

static void rmsnorm_is_near_double(void **state)
{
    (void)state;
    on_all(check_rmsnorm);
}

static void check_swiglu(struct compute *c)
{
    enum { N = 30 };
    for (int i = 0; i < DIMS; i++) {
        int dim = dims[i];
        size_t count = (size_t)(N * dim);
        float *gate = random_floats(3, count), *up = random_floats(4, count),
              *out = mem_alloc(count, sizeof *out);
        static const float edges[] = {0, 88, -88, 200, -200, -87.2f, 89.5f, 1e-20f};
        for (size_t e = 0; e < count && e < sizeof edges / sizeof *edges; e++)
            gate[e * 13 % count] = edges[e];
        compute_swiglu(c, out, gate, up, N, dim);
        for (size_t j = 0; j < count; j++) {
            double g = (double)gate[j], expected = g / (1 + exp(-g)) * (double)up[j];
            check_near(out[j], expected, fabs(expected) + 1e-34, 1e-6, "swiglu", j);
        }
        compute_swiglu(c, gate, gate, up, N, dim);
        assert_memory_equal(gate, out, count * sizeof *gate);
        mem_free(&gate);
        mem_free(&up);
        mem_free(&out);
    }
    float gate = NAN, up = 1, out;
    compute_swiglu(c, &out, &gate, &up, 1, 1);
    assert_true(isnan(out));
}

static void swiglu_is_near_double(void **state)
{
    (void)state;
    on_all(check_swiglu);
}

static void check_add(struct compute *c)
{
    enum { COUNT = 50001 };
    float *x = random_floats(5, COUNT), *y = random_floats(6, COUNT), *sum = mem_alloc(COUNT, sizeof *sum);
    for (int i = 0; i < COUNT; i++)
        sum[i] = x[i] + y[i];
    compute_add(c, x, y, 0);
    compute_add(c, x, y, COUNT);
    assert_memory_equal(x, sum, COUNT * sizeof *x);
    mem_free(&x);
    mem_free(&y);
    mem_free(&sum);
}

static void add_is_exact(void **state)
{
    (void)state;
    on_all(check_add);
}

static void rotate_naive(double *out, const float *x, const struct rope *rope, uint32_t position,
                         int head_dim)
{
    for (int d = 0; d < head_dim; d++)
        out[d] = (double)x[d];
    int half = rope->dims / 2, adjacent = rope->pairs == ROPE_PAIRS_ADJACENT;
    for (int j = 0; j < half; j++) {
        int a = adjacent ? 2 * j : j, b = adjacent ? 2 * j + 1 : j + half;
        double angle = (double)position * (double)rope->inv_freq[j];
        double cosine = cos(angle) * (double)rope->scale, sine = sin(angle) * (double)rope->scale;
        out[a] = (double)x[a] * cosine - (double)x[b] * sine;
        out[b] = (double)x[a] * sine + (double)x[b] * cosine;
    }
}

static void check_rope_case(struct compute *c, const struct rope *rope, int heads, int head_dim)
{
    /* Neighbours, far ones, the same again, and some that share a slot of a cache of any power of two. */
    static const uint32_t positions[] = {0,    1, 2,           131071,      131072, 5,     1029,
                                         2053, 5, 4294967295u, 4294967294u, 1,      777777};
    enum { N = sizeof positions / sizeof *positions };
    int row = heads * head_dim;
    float *x = random_floats(7, (size_t)(N * row)), *out = mem_alloc((size_t)(N * row), sizeof *out);
    double *expected = mem_alloc((size_t)head_dim, sizeof *expected);
    memcpy(out, x, (size_t)(N * row) * sizeof *out);
    compute_rope(c, out, rope, positions, N, heads, head_dim);
    for (int t = 0; t < N; t++)
        for (int h = 0; h < heads; h++) {
            int at = t * row + h * head_dim;
            rotate_naive(expected, x + at, rope, positions[t], head_dim);
            for (int d = 0; d < head_dim; d++)
                check_near(out[at + d], expected[d], 10, 3e-7, "rope", (size_t)(at + d));
            for (int d = rope->dims; d < head_dim; d++)
                assert_true(out[at + d] == x[at + d]);
        }
    for (int t = 0; t < N; t++) {
        compute_rope(c, x + t * row, rope, &positions[t], 1, heads, head_dim);
        assert_memory_equal(x + t * row, out + t * row, (size_t)row * sizeof *x);
    }
    mem_free(&x);
    mem_free(&out);
    mem_free(&expected);
}

static void check_rope(struct compute *c)
{
    float inv_freq[128];
    for (int j = 0; j < 128; j++)
        inv_freq[j] = (float)pow(1e5, -j / 32.0);
    check_rope_case(c, &(struct rope){ROPE_PAIRS_ADJACENT, 64, inv_freq, 1}, 9, 64);
    check_rope_case(c, &(struct rope){ROPE_PAIRS_HALVES, 64, inv_freq, 1}, 3, 64);
    check_rope_case(c, &(struct rope){ROPE_PAIRS_HALVES, 40, inv_freq, 1.277f}, 2, 64);
    check_rope_case(c, &(struct rope){ROPE_PAIRS_ADJACENT, 256, inv_freq, 1}, 1, 256);
    check_rope_case(c, &(struct rope){ROPE_PAIRS_ADJACENT, 64, inv_freq + 1, 1}, 9, 64);
}

static void rope_is_near_double(void **state)
{
    (void)state;
    on_all(check_rope);
}

/* 1500 tokens of a prompt from 131000 on, at once and one by one: the pool's items and the cache's slots. */
static void check_rope_prompt(struct compute *c)
{
    enum { N = 1500, ROW = 2 * 64 };
    float inv_freq[32], *x = random_floats(8, (size_t)N * ROW), *one = random_floats(8, (size_t)N * ROW);
    uint32_t *positions = mem_alloc(N, sizeof *positions);
    for (int j = 0; j < 32; j++)
        inv_freq[j] = (float)pow(1e4, -j / 32.0);
    struct rope rope = {ROPE_PAIRS_HALVES, 64, inv_freq, 1};
    for (uint32_t t = 0; t < N; t++)
        positions[t] = 131000 + t;
    compute_rope(c, x, &rope, positions, N, 2, 64);
    for (int t = N - 1; t >= 0; t--)
        compute_rope(c, one + (size_t)t * ROW, &rope, &positions[t], 1, 2, 64);
    assert_memory_equal(x, one, (size_t)N * ROW * sizeof *x);
    mem_free(&x);
    mem_free(&one);
    mem_free(&positions);
}

static void rope_ignores_company(void **state)
{
    (void)state;
    on_all(check_rope_prompt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(create_says_what_is_wrong),
        cmocka_unit_test(name_says_what_it_is_made_of),
        cmocka_unit_test(rmsnorm_is_near_double),
        cmocka_unit_test(swiglu_is_near_double),
        cmocka_unit_test(add_is_exact),
        cmocka_unit_test(rope_is_near_double),
        cmocka_unit_test(rope_ignores_company),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
