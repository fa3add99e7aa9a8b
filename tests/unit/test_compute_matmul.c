/* Matrix product and embedding: against products in double, and bit-equality over tokens, threads and
 * tiles. */
#include "tests/unit/compute_util.h"

struct shape {
    uint32_t rows, cols;
    int n;
};

static void naive(double *out, double *scale, const struct matrix *w, const float *x, const float *bias,
                  int n)
{
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    for (int t = 0; t < n; t++)
        for (uint32_t r = 0; r < w->rows; r++) {
            double sum = bias ? (double)bias[r] : 0, abs_sum = fabs(sum) + 1e-30;
            for (uint32_t c = 0; c < w->cols; c++) {
                double a = weight_at(w->type, (const uint8_t *)w->data + r * row_bytes, c);
                double b = (double)x[(size_t)t * w->cols + c];
                sum += a * b;
                abs_sum += fabs(a * b);
            }
            out[(size_t)t * w->rows + r] = sum;
            scale[(size_t)t * w->rows + r] = abs_sum;
        }
}

static void check_shape(struct compute *c, enum dtype type, struct shape s, int with_bias)
{
    struct matrix w = random_matrix(s.rows * 31 + s.cols, type, s.rows, s.cols);
    size_t count = (size_t)s.n * s.rows;
    float *x = random_floats(5, (size_t)s.n * s.cols), *bias = random_floats(6, s.rows);
    float *out = mem_alloc(count, sizeof *out);
    double *expected = mem_alloc(count, sizeof *expected), *scale = mem_alloc(count, sizeof *scale);
    naive(expected, scale, &w, x, with_bias ? bias : NULL, s.n);
    compute_matmul(c, out, &w, x, with_bias ? bias : NULL, s.n);
    for (size_t i = 0; i < count; i++)
        check_near(out[i], expected[i], scale[i], 1e-6, dtype_info(type)->name, i);
    mem_free(&x);
    mem_free(&bias);
    mem_free(&out);
    mem_free(&expected);
    mem_free(&scale);
    free_matrix(&w);
}

static void matmul_is_near_double(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{1, 32, 1},   {16, 576, 1},   {37, 576, 5},  {5, 1056, 2},
                                          {9, 2080, 4}, {130, 96, 101}, {64, 1024, 3}, {0, 32, 2}};
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        for (size_t t = 0; t < MATRIX_TYPES; t++)
            for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
                check_shape(c, matrix_types[t], shapes[i], i % 2 == 1);
        compute_free(&c);
    }
}

static void matmul_takes_any_number_of_columns(void **state)
{
    (void)state;
    static const uint32_t cols[] = {1, 7, 8, 9, 31, 33, 100, 1025, 1031};
    static const enum dtype plain[] = {DTYPE_F32, DTYPE_F16, DTYPE_BF16};
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        for (size_t t = 0; t < 3; t++)
            for (size_t i = 0; i < sizeof cols / sizeof *cols; i++)
                for (int n = 1; n <= 5; n += 2)
                    check_shape(c, plain[t], (struct shape){19, cols[i], n}, 0);
        compute_free(&c);
    }
}

static void matmul_of_no_tokens_writes_nothing(void **state)
{
    (void)state;
    struct compute *c = make_compute(&variants[0]);
    struct matrix w = random_matrix(1, DTYPE_F32, 4, 8);
    float out[4] = {7, 7, 7, 7}, x[8] = {0};
    compute_matmul(c, out, &w, x, NULL, 0);
    for (int i = 0; i < 4; i++)
        assert_true(out[i] == 7);
    free_matrix(&w);
    compute_free(&c);
}

/* A token alone, in batches of every small size and in one that crosses the tiles; each number of threads. */
static void matmul_ignores_company_and_threads(void **state)
{
    (void)state;
    enum { ROWS = 75, COLS = 1120, TOKENS = 230 };
    float *x = random_floats(11, (size_t)TOKENS * COLS), *bias = random_floats(12, ROWS);
    float *alone = mem_alloc((size_t)TOKENS * ROWS, sizeof *alone);
    float *batch = mem_alloc((size_t)TOKENS * ROWS, sizeof *batch);
    for (size_t t = 0; t < MATRIX_TYPES; t++) {
        struct matrix w = random_matrix(77 + t, matrix_types[t], ROWS, COLS);
        for (size_t v = 0; v < VARIANTS; v++) {
            struct compute *c = make_compute(&variants[v]);
            if (!c)
                continue;
            if (v == 0 || v == 2)
                for (int i = 0; i < TOKENS; i++)
                    compute_matmul(c, alone + (size_t)i * ROWS, &w, x + (size_t)i * COLS, bias, 1);
            static const int sizes[] = {1, 2, 3, 4, 5, 7, 25, 96, 97, TOKENS};
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
                memset(batch, 0xff, (size_t)TOKENS * ROWS * sizeof *batch);
                compute_matmul(c, batch, &w, x, bias, sizes[s]);
                assert_memory_equal(batch, alone, (size_t)sizes[s] * ROWS * sizeof *batch);
            }
            compute_free(&c);
        }
        free_matrix(&w);
    }
    mem_free(&x);
    mem_free(&bias);
    mem_free(&alone);
    mem_free(&batch);
}

static void embed_expands_the_named_rows(void **state)
{
    (void)state;
    static const uint32_t ids[] = {3, 0, 9, 9};
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        for (size_t t = 0; t < MATRIX_TYPES; t++) {
            enum dtype type = matrix_types[t];
            uint32_t cols = dtype_info(type)->block_len == 1 ? 67 : 96;
            struct matrix w = random_matrix(t, type, 10, cols);
            float out[4 * 96 + 1];
            out[4 * cols] = 42;
            compute_embed(c, out, &w, ids, 4);
            for (uint32_t i = 0; i < 4 * cols; i++) {
                const uint8_t *row = (const uint8_t *)w.data + ids[i / cols] * dtype_row_bytes(type, cols);
                assert_true(out[i] == (float)weight_at(type, row, i % cols));
            }
            assert_true(out[4 * cols] == 42);
            free_matrix(&w);
        }
        compute_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(matmul_is_near_double),
        cmocka_unit_test(matmul_takes_any_number_of_columns),
        cmocka_unit_test(matmul_of_no_tokens_writes_nothing),
        cmocka_unit_test(matmul_ignores_company_and_threads),
        cmocka_unit_test(embed_expands_the_named_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
