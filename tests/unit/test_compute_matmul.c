/* Matrix product and embedding: against products in double, and bit-equality over tokens, threads and
 * tiles. */
#include "tests/unit/compute_util.h"

struct shape {
    uint32_t rows, cols;
    int n;
};

/* What quantized activations stand for: int8 times a scale for each 32. */
static float *rounded_activations(const float *x, size_t count)
{
    float *r = mem_alloc(count, sizeof *r);
    for (size_t b = 0; b < count; b += 32) {
        float most = 0;
        for (size_t i = b; i < b + 32; i++)
            most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
        for (size_t i = b; i < b + 32; i++)
            r[i] = most > 0 ? nearbyintf(x[i] * (127 / most)) * most / 127 : 0;
    }
    return r;
}

static void naive(double *out, double *scale, const struct matrix *w, const float *x, const float *bias,
                  int n)
{
    size_t row_bytes = dtype_row_bytes(w->type, w->cols);
    double *row = mem_alloc(w->cols, sizeof *row);
    for (uint32_t r = 0; r < w->rows; r++) {
        for (uint32_t c = 0; c < w->cols; c++)
            row[c] = weight_at(w->type, (const uint8_t *)w->data + r * row_bytes, c);
        for (int t = 0; t < n; t++) {
            double sum = bias ? (double)bias[r] : 0, abs_sum = fabs(sum) + 1e-30;
            for (uint32_t c = 0; c < w->cols; c++) {
                double a = row[c], b = (double)x[(size_t)t * w->cols + c];
                sum += a * b;
                abs_sum += fabs(a * b);
            }
            out[(size_t)t * w->rows + r] = sum;
            scale[(size_t)t * w->rows + r] = abs_sum;
        }
    }
    mem_free(&row);
}

static void check_shape(struct compute *c, enum compute_activations activations, enum dtype type,
                        struct shape s, int with_bias)
{
    s.cols = whole_blocks(type, s.cols);
    struct matrix w = random_matrix(s.rows * 31 + s.cols, type, s.rows, s.cols);
    size_t count = (size_t)s.n * s.rows;
    float *x = random_floats(5, (size_t)s.n * s.cols), *bias = random_floats(6, s.rows);
    float *out = mem_alloc(count, sizeof *out);
    double *expected = mem_alloc(count, sizeof *expected), *scale = mem_alloc(count, sizeof *scale);
    int q8 = activations == COMPUTE_ACTIVATIONS_Q8 && q8_type(type);
    float *seen = q8 ? rounded_activations(x, (size_t)s.n * s.cols) : NULL;
    naive(expected, scale, &w, seen ? seen : x, with_bias ? bias : NULL, s.n);
    compute_matmul(c, out, &w, x, with_bias ? bias : NULL, s.n);
    mem_free(&seen);
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
                check_shape(c, variants[v].activations, matrix_types[t], shapes[i], i % 2 == 1);
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
                    check_shape(c, variants[v].activations, plain[t], (struct shape){19, cols[i], n}, 0);
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
    enum { ROWS = 75, COLS_MAX = 2304, TOKENS = 230 };
    float *x = random_floats(11, (size_t)TOKENS * COLS_MAX), *bias = random_floats(12, ROWS);
    float *alone = mem_alloc((size_t)TOKENS * ROWS, sizeof *alone);
    float *batch = mem_alloc((size_t)TOKENS * ROWS, sizeof *batch);
    for (size_t t = 0; t < MATRIX_TYPES; t++) {
        enum dtype type = matrix_types[t];
        uint32_t cols = type == DTYPE_Q4_1 || type == DTYPE_Q6_K ? COLS_MAX : whole_blocks(type, 544);
        struct matrix w = random_matrix(77 + t, type, ROWS, cols);
        for (size_t v = 0; v < VARIANTS; v++) {
            struct compute *c = make_compute(&variants[v]);
            if (!c)
                continue;
            int tokens = variants[v].isa == COMPUTE_ISA_REFERENCE ? 7 : TOKENS;
            if (first_of_path(v))
                for (int i = 0; i < tokens; i++)
                    compute_matmul(c, alone + (size_t)i * ROWS, &w, x + (size_t)i * cols, bias, 1);
            static const int sizes[] = {1, 2, 4, 7, 25, 97, 128, TOKENS};
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes && sizes[s] <= tokens; s++) {
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

/* Integer products take the same roundings on every path. */
static void q8_paths_agree_bit_for_bit(void **state)
{
    (void)state;
    enum { ROWS = 37, TOKENS = 19 };
    static const enum compute_isa isas[] = {COMPUTE_ISA_REFERENCE, COMPUTE_ISA_AVX2, COMPUTE_ISA_AVX512};
    for (size_t t = 0; t < MATRIX_TYPES; t++) {
        if (!q8_type(matrix_types[t]))
            continue;
        uint32_t cols = whole_blocks(matrix_types[t], 576);
        struct matrix w = random_matrix(5 + t, matrix_types[t], ROWS, cols);
        float *x = random_floats(3, (size_t)TOKENS * cols), expected[TOKENS * ROWS], out[TOKENS * ROWS];
        memset(x, 0, 32 * sizeof *x);
        for (size_t i = 0; i < 3; i++) {
            struct compute *c = make_compute(&(struct variant){isas[i], 2, COMPUTE_ACTIVATIONS_Q8});
            if (!c)
                continue;
            compute_matmul(c, i == 0 ? expected : out, &w, x, NULL, TOKENS);
            if (i > 0)
                assert_memory_equal(out, expected, sizeof out);
            compute_free(&c);
        }
        mem_free(&x);
        free_matrix(&w);
    }
}

/* A NaN or an infinity among the activations must show in the result. */
static void q8_does_not_hide_nan(void **state)
{
    (void)state;
    static const float bad[] = {NAN, INFINITY};
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        struct matrix w = random_matrix(1, DTYPE_Q4_1, 20, 96);
        for (int i = 0; i < 2; i++) {
            float *x = random_floats(4, 96), out[20];
            x[40] = bad[i];
            compute_matmul(c, out, &w, x, NULL, 1);
            for (int r = 0; r < 20; r++)
                assert_false(isfinite(out[r]));
            mem_free(&x);
        }
        free_matrix(&w);
        compute_free(&c);
    }
}

static void many_products_are_the_single_ones(void **state)
{
    (void)state;
    enum { COLS = 256, N_MAX = 40, ROWS_MAX = 300 };
    static const uint32_t rows[] = {300, 17, 0, 64};
    static const enum dtype types[] = {DTYPE_Q4_1, DTYPE_F16, DTYPE_Q8_0, DTYPE_Q6_K};
    float *x = random_floats(8, N_MAX * COLS), *bias = random_floats(9, ROWS_MAX);
    struct matrix w[4];
    float *out[4], *single = mem_alloc(N_MAX * ROWS_MAX, sizeof *single);
    for (size_t i = 0; i < 4; i++) {
        w[i] = random_matrix(20 + i, types[i], rows[i], COLS);
        out[i] = mem_alloc((size_t)N_MAX * rows[i] + 1, sizeof *out[i]);
    }
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        for (int n = 0; c && n <= N_MAX; n += n < 2 ? 1 : 19) {
            struct product p[4];
            for (size_t i = 0; i < 4; i++)
                p[i] = (struct product){out[i], &w[i], i == 1 ? bias : NULL};
            compute_matmul_many(c, p, 4, x, n);
            for (size_t i = 0; i < 4; i++) {
                compute_matmul(c, single, &w[i], x, p[i].bias, n);
                assert_memory_equal(single, out[i], (size_t)n * rows[i] * sizeof *single);
            }
        }
        compute_free(&c);
    }
    for (size_t i = 0; i < 4; i++) {
        free_matrix(&w[i]);
        mem_free(&out[i]);
    }
    mem_free(&x);
    mem_free(&bias);
    mem_free(&single);
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
            uint32_t cols = dtype_info(type)->block_len == 1 ? 67 : whole_blocks(type, 96);
            struct matrix w = random_matrix(t, type, 10, cols);
            float out[4 * 256 + 1];
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
        cmocka_unit_test(q8_paths_agree_bit_for_bit),
        cmocka_unit_test(q8_does_not_hide_nan),
        cmocka_unit_test(many_products_are_the_single_ones),
        cmocka_unit_test(embed_expands_the_named_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
