/* Row-wise operators and products. */
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <errno.h>

#include "tests/gpu/gpu_test.h"

static void test_embed(void)
{
    enum { ROWS = 1000, COLS = 520, N = 9 };
    uint16_t *table = gpu_bf16(gpu_normals(ROWS * COLS, 1), ROWS * COLS);
    uint32_t ids[N] = {0,   1, ROWS - 1, 77,        77,
                       500, 3, ROWS,     UINT32_MAX}; /* the last two: brought into range */
    float ref[N * COLS], *out = gpu_alloc(sizeof ref);
    struct matrix matrix = {DTYPE_BF16, ROWS, COLS, table};
    struct cuda_embed embed = {
        out, DTYPE_F32, gpu_upload(table, ROWS * COLS * 2), ROWS, COLS, gpu_upload(ids, sizeof ids), N};
    EXPECT(cuda_embed(&embed, NULL) == 0);
    ids[N - 2] = ids[N - 1] = ROWS - 1;
    compute_embed(gpu_compute, ref, &matrix, ids, N);
    gpu_compare("embed", gpu_download(out, sizeof ref), ref, N * COLS, 0);
    embed.out_type = DTYPE_BF16;
    EXPECT(cuda_embed(&embed, NULL) == 0);
    gpu_compare("embed bf16", gpu_from_bf16(gpu_download(out, sizeof ref / 2), N * COLS), ref, N * COLS, 0);
    embed.out_type = DTYPE_Q4_1;
    EXPECT(cuda_embed(&embed, NULL) == -EINVAL);
}

/* m with addresses of host memory, but table in f32; float64 sums. */
static void mix_reference(float *out, const struct cuda_mix *m, const float *table)
{
    for (uint32_t t = 0; t < m->n; t++) {
        uint32_t at = m->at[t] < m->id_count ? m->at[t] : m->id_count - 1;
        for (uint32_t i = 0; i < m->views * m->dim; i++) {
            double sum = 0;
            for (uint32_t lag = 0; lag < m->tap_count && lag <= m->positions[t] && lag <= at; lag++) {
                uint32_t id = m->ids[at - lag] < m->rows ? m->ids[at - lag] : m->rows - 1;
                sum += (double)m->taps[i / m->dim * m->tap_count + lag] * (double)m->row_scale[id] *
                       (double)table[(size_t)id * m->dim + i % m->dim];
            }
            out[(size_t)t * m->views * m->dim + i] = (float)(sum * (double)m->weight[i % m->dim]);
        }
    }
}

/* Two sequences in one list of ids, and numbers past every end. */
static void test_mix(void)
{
    enum { TABLE = 200, IDS = 150, TOKENS = 9 };
    static const uint32_t at[TOKENS] = {0, 1, 70, 71, 72, 140, 149, 149, UINT32_MAX};
    static const uint32_t positions[TOKENS] = {0, 1, 5000, 0, 1, 69, 4, UINT32_MAX, UINT32_MAX};
    static const uint32_t shapes[][3] = {{4, 1, 1},     {576, 1, 64}, {520, 2, 1},   {512, 3, 5},
                                         {4096, 4, 32}, {64, 7, 64},  {8192, 16, 64}}; /* dim, views, taps */
    uint32_t ids[IDS];
    for (uint32_t i = 0; i < IDS; i++)
        ids[i] = i % 40 == 39 ? TABLE + i : gpu_random() % TABLE;
    ids[149] = UINT32_MAX;
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        uint32_t dim = shapes[i][0], views = shapes[i][1], taps = shapes[i][2];
        size_t inputs = (size_t)TABLE * dim, count = (size_t)TOKENS * views * dim;
        uint16_t *table = gpu_bf16(gpu_normals(inputs, 1), inputs), *out = gpu_alloc(count * 2);
        float *ref = gpu_host(count * 4);
        struct cuda_mix m = {.row_scale = gpu_normals(TABLE, 1),
                             .taps = gpu_normals((size_t)views * taps, 1),
                             .weight = gpu_normals(dim, 1),
                             .ids = ids,
                             .at = at,
                             .positions = positions,
                             .id_count = IDS,
                             .rows = TABLE,
                             .dim = dim,
                             .views = views,
                             .tap_count = taps,
                             .n = TOKENS};
        mix_reference(ref, &m, gpu_from_bf16(table, inputs));
        m.out = out;
        m.table = gpu_upload(table, inputs * 2);
        m.row_scale = gpu_upload(m.row_scale, TABLE * 4);
        m.taps = gpu_upload(m.taps, (size_t)views * taps * 4);
        m.weight = gpu_upload(m.weight, (size_t)dim * 4);
        m.ids = gpu_upload(ids, sizeof ids);
        m.at = gpu_upload(at, sizeof at);
        m.positions = gpu_upload(positions, sizeof positions);
        EXPECT(cuda_mix(&m, NULL) == 0);
        uint16_t *all = gpu_download(out, count * 2);
        for (int t = 0; t < TOKENS; t++)
            gpu_compare("mix", gpu_from_bf16(all + t * (count / TOKENS), count / TOKENS),
                        ref + t * (count / TOKENS), count / TOKENS, 4e-3);
        /* The last token alone: the same bits. */
        m.at += TOKENS - 1;
        m.positions += TOKENS - 1;
        m.n = 1;
        EXPECT(cuda_mix(&m, NULL) == 0);
        gpu_equal("mix alone", gpu_download(out, count * 2 / TOKENS), all + count - count / TOKENS,
                  count * 2 / TOKENS);
        m.views = CUDA_MIX_VIEWS_MAX + 1;
        EXPECT(cuda_mix(&m, NULL) == -EINVAL);
    }
}

/* Rows in any order, one of them past the end; what lies between is left as it was. */
static void test_put_rows(void)
{
    enum { TABLE = 9, TOKENS = 5 };
    static const uint32_t rows[TOKENS] = {7, 0, UINT32_MAX, TABLE, 3};
    static const uint32_t shapes[][2] = {
        {4, 4}, {576, 3 * 576}, {4096, 8192}, {4100, 4104}}; /* dim, stride */
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        uint32_t dim = shapes[i][0], stride = shapes[i][1];
        size_t bytes = (size_t)TABLE * stride * 2;
        float *x = gpu_normals((size_t)TOKENS * dim, 2);
        uint16_t *ref = gpu_host(bytes), *narrow = gpu_bf16(x, (size_t)TOKENS * dim);
        void *out = gpu_alloc(bytes), *mapped, *host = gpu_mapped(bytes, &mapped);
        memset(ref, 0xff, bytes);
        memset(host, 0xff, bytes);
        for (uint32_t t = 0; t < TOKENS; t++)
            if (rows[t] < TABLE)
                memcpy(ref + (size_t)rows[t] * stride, narrow + (size_t)t * dim, dim * 2);
        struct cuda_put_rows put = {.out = out,
                                    .stride = stride,
                                    .x = gpu_upload(x, (size_t)TOKENS * dim * 4),
                                    .rows = gpu_upload(rows, sizeof rows),
                                    .row_count = TABLE,
                                    .n = TOKENS,
                                    .dim = dim};
        EXPECT(cuda_put_rows(&put, NULL) == 0);
        gpu_equal("put rows", gpu_download(out, bytes), ref, bytes);
        put.out = mapped;
        EXPECT(cuda_put_rows(&put, NULL) == 0);
        gpu_download(out, 4); /* waits */
        gpu_equal("put rows on the host", host, ref, bytes);
        put.stride = dim - 4;
        EXPECT(cuda_put_rows(&put, NULL) == -EINVAL);
    }
}

static void test_rmsnorm(void)
{
    static const uint32_t dims[] = {4, 64, 576, 4096, 8192, 12288};
    for (int i = 0; i < COUNT_OF(dims); i++) {
        enum { N = 5 };
        uint32_t dim = dims[i];
        size_t count = (size_t)N * dim;
        float *x = gpu_normals(count, 3), *add = gpu_normals(count, 1), *weight = gpu_normals(dim, 1);
        float *ref = gpu_host(count * 4), *out = gpu_alloc(count * 4), *device_x = gpu_upload(x, count * 4);
        struct cuda_rmsnorm norm = {.out = out,
                                    .out_type = DTYPE_F32,
                                    .x = device_x,
                                    .n = N,
                                    .dim = dim,
                                    .eps = 1e-5f,
                                    .weight = gpu_upload(weight, dim * 4),
                                    .weight_type = DTYPE_F32};
        EXPECT(cuda_rmsnorm(&norm, NULL) == 0);
        compute_rmsnorm(gpu_compute, ref, x, weight, N, (int)dim, 1e-5f);
        gpu_compare("rmsnorm", gpu_download(out, count * 4), ref, count, 1e-6);
        norm.add = gpu_upload(add, count * 4);
        norm.out_type = DTYPE_BF16;
        EXPECT(cuda_rmsnorm(&norm, NULL) == 0);
        compute_add(gpu_compute, x, add, count);
        compute_rmsnorm(gpu_compute, ref, x, weight, N, (int)dim, 1e-5f);
        gpu_compare("rmsnorm add", gpu_download(device_x, count * 4), x, count, 0);
        gpu_compare("rmsnorm bf16", gpu_from_bf16(gpu_download(out, count * 2), count), ref, count, 4e-3);
    }
}

static void test_headnorm(void)
{
    enum { N = 3, HEADS = 5, DIM = 128, STRIDE = 7 * DIM };
    float *x = gpu_normals(N * STRIDE, 2), *weight = gpu_normals(DIM, 1),
          *device = gpu_upload(x, N * STRIDE * 4);
    uint16_t *bf16 = gpu_bf16(weight, DIM);
    weight = gpu_from_bf16(bf16, DIM);
    struct cuda_headnorm norm = {device, STRIDE, gpu_upload(bf16, DIM * 2), DTYPE_BF16, N, HEADS, DIM, 1e-6f};
    EXPECT(cuda_headnorm(&norm, NULL) == 0);
    for (int t = 0; t < N; t++)
        compute_rmsnorm(gpu_compute, x + t * STRIDE, x + t * STRIDE, weight, HEADS, DIM, 1e-6f);
    gpu_compare("headnorm", gpu_download(device, N * STRIDE * 4), x, N * STRIDE, 1e-6);
}

static void test_swiglu_narrow(void)
{
    enum { N = 3, DIM = 1028, STRIDE = 2 * DIM };
    float *x = gpu_normals(N * STRIDE, 3), *both = gpu_upload(x, N * STRIDE * 4),
          *out = gpu_alloc(N * DIM * 4);
    float *ref = gpu_host(N * DIM * 4);
    struct cuda_swiglu op = {out, DTYPE_F32, both, both + DIM, STRIDE, N, DIM};
    EXPECT(cuda_swiglu(&op, NULL) == 0);
    for (int t = 0; t < N; t++)
        compute_swiglu(gpu_compute, ref + t * DIM, x + t * STRIDE, x + t * STRIDE + DIM, 1, DIM);
    gpu_compare("swiglu", gpu_download(out, N * DIM * 4), ref, N * DIM, 1e-6);
    uint16_t *narrow = gpu_alloc(N * STRIDE * 2), *expected = gpu_bf16(x, N * STRIDE);
    EXPECT(cuda_narrow(narrow, DTYPE_BF16, both, N * STRIDE, NULL) == 0);
    gpu_equal("narrow bf16", gpu_download(narrow, N * STRIDE * 2), expected, N * STRIDE * 2);
    EXPECT(cuda_narrow(narrow, DTYPE_F16, both, N * STRIDE, NULL) == 0);
    for (int i = 0; i < N * STRIDE; i++)
        expected[i] = dtype_f32_to_f16(x[i]);
    gpu_equal("narrow f16", gpu_download(narrow, N * STRIDE * 2), expected, N * STRIDE * 2);
}

static void test_rope(void)
{
    enum { N = 6, HEADS = 3, DIM = 128, STRIDE = 4 * DIM };
    static const uint32_t positions[N] = {0, 1, 63, 4095, 131071, 1048575};
    for (int variant = 0; variant < 4; variant++) {
        uint32_t dims = variant & 1 ? 96 : DIM;
        float *x = gpu_normals(N * STRIDE, 1), inv_freq[DIM / 2], *device = gpu_upload(x, N * STRIDE * 4);
        for (uint32_t j = 0; j < dims / 2; j++)
            inv_freq[j] = powf(500000, -2.0f * (float)j / (float)dims);
        struct cuda_rope_angles angles = {gpu_alloc(N * dims * 4),
                                          gpu_upload(positions, sizeof positions),
                                          gpu_upload(inv_freq, sizeof inv_freq),
                                          N,
                                          dims,
                                          1.25f};
        struct cuda_rope rope = {device, DTYPE_F32, STRIDE, angles.table, N, HEADS, DIM, dims, variant >> 1};
        EXPECT(cuda_rope_angles(&angles, NULL) == 0);
        EXPECT(cuda_rope(&rope, NULL) == 0);
        struct rope cpu = {variant >> 1 ? ROPE_PAIRS_ADJACENT : ROPE_PAIRS_HALVES, (int)dims, inv_freq,
                           1.25f};
        for (int t = 0; t < N; t++)
            compute_rope(gpu_compute, x + t * STRIDE, &cpu, positions + t, 1, HEADS, DIM);
        gpu_compare("rope", gpu_download(device, N * STRIDE * 4), x, N * STRIDE, 1e-7);
    }
}

/* float64 sums over the same bf16 numbers. */
static void product_of(float *out, const float *w, const float *x, const float *bias, const uint32_t *shape)
{
    for (uint32_t t = 0; t < shape[2]; t++)
        for (uint32_t r = 0; r < shape[0]; r++) {
            double sum = bias ? (double)bias[r] : 0;
            for (uint32_t i = 0; i < shape[1]; i++)
                sum += (double)w[(size_t)r * shape[1] + i] * (double)x[(size_t)t * shape[1] + i];
            out[(size_t)t * shape[0] + r] = (float)sum;
        }
}

struct product_inputs {
    uint16_t *w16, *x16;
    float *w, *x, *bias, *ref;
    void *device_w, *device_x, *device_bias, *out;
};

static struct product_inputs product_inputs(const uint32_t *shape)
{
    size_t weights = (size_t)shape[0] * shape[1], inputs = (size_t)shape[2] * shape[1];
    struct product_inputs p;
    p.w16 = gpu_bf16(gpu_normals(weights, 0.1f), weights);
    p.x16 = gpu_bf16(gpu_normals(inputs, 1), inputs);
    p.w = gpu_from_bf16(p.w16, weights);
    p.x = gpu_from_bf16(p.x16, inputs);
    p.bias = gpu_normals(shape[0], 1);
    p.ref = gpu_host((size_t)shape[0] * shape[2] * 4);
    p.device_w = gpu_upload(p.w16, weights * 2);
    p.device_x = gpu_upload(p.x16, inputs * 2);
    p.device_bias = gpu_upload(p.bias, shape[0] * 4);
    p.out = gpu_alloc((size_t)shape[0] * shape[2] * 4);
    return p;
}

static void test_gemv(void)
{
    static const uint32_t shapes[][3] = {
        {1, 8, 1}, {17, 576, 2}, {1001, 4096, 3}, {576, 1544, 4}, {130, 14336, 1}};
    for (int i = 0; i < COUNT_OF(shapes); i++) {
        const uint32_t *shape = shapes[i];
        size_t count = (size_t)shape[0] * shape[2];
        struct product_inputs p = product_inputs(shape);
        struct cuda_gemv gemv = {p.out,    p.device_w, p.device_x, p.device_bias,
                                 shape[0], shape[1],   shape[2],   0};
        EXPECT(cuda_gemv(&gemv, NULL) == 0);
        product_of(p.ref, p.w, p.x, p.bias, shape);
        float *out = gpu_download(p.out, count * 4);
        gpu_compare("gemv", out, p.ref, count, 1e-5);
        /* The last token alone: the same bits. */
        gemv.x = (uint16_t *)p.device_x + (size_t)(shape[2] - 1) * shape[1];
        gemv.n = 1;
        EXPECT(cuda_gemv(&gemv, NULL) == 0);
        gpu_equal("gemv alone", gpu_download(p.out, shape[0] * 4), out + count - shape[0], shape[0] * 4);
        gemv.accumulate = 1;
        gemv.bias = NULL;
        EXPECT(cuda_gemv(&gemv, NULL) == 0);
    }
}

/* What a layer of a pass does around its products, in float64 but for the roundings that kernels.h names. */
struct joined {
    uint32_t shape[3];
    int squares, gated, next, bias, accumulate;
};

enum { SQUARE_BLOCKS = 5 };

static void joined_reference(const struct joined *j, float *ref, const float *squares, const float *bias,
                             const float *before)
{
    for (uint32_t t = 0; t < j->shape[2]; t++) {
        double sum = 0;
        for (uint32_t b = 0; b < SQUARE_BLOCKS; b++)
            sum += (double)squares[b * CUDA_PRODUCT_TOKENS + t];
        for (uint32_t r = 0; r < j->shape[0]; r++) {
            size_t at = (size_t)t * j->shape[0] + r;
            double v = (double)ref[at];
            if (j->squares)
                v /= sqrt(sum / j->shape[1] + 1e-5);
            ref[at] = (float)(v + (j->bias ? (double)bias[r] : 0) + (j->accumulate ? (double)before[at] : 0));
        }
    }
}

static void check_gated(const struct joined *j, const float *ref, const void *device)
{
    uint32_t half = j->shape[0] / 2, n = j->shape[2];
    float *want = gpu_host((size_t)half * n * 4);
    for (uint32_t t = 0; t < n; t++)
        compute_swiglu(gpu_compute, want + (size_t)t * half, ref + (size_t)t * 2 * half,
                       ref + (size_t)t * 2 * half + half, 1, (int)half);
    float *out = gpu_from_bf16(gpu_download(device, (size_t)half * n * 2), (size_t)half * n);
    gpu_compare("product gated", out, want, (size_t)half * n, 4e-3);
}

static void check_next(const struct joined *j, const float *out, const float *weight, const void *next,
                       const float *next_squares)
{
    uint32_t rows = j->shape[0], n = j->shape[2], blocks = cuda_product_blocks(rows);
    size_t count = (size_t)rows * n;
    float *want = gpu_host(count * 4), sums[2][CUDA_PRODUCT_TOKENS] = {{0}};
    const float *got = gpu_download(next_squares, blocks * CUDA_PRODUCT_TOKENS * 4ull);
    for (uint32_t t = 0; t < n; t++) {
        for (uint32_t r = 0; r < rows; r++) {
            want[(size_t)t * rows + r] = out[(size_t)t * rows + r] * weight[r];
            sums[0][t] += out[(size_t)t * rows + r] * out[(size_t)t * rows + r];
        }
        for (uint32_t b = 0; b < blocks; b++)
            sums[1][t] += got[b * CUDA_PRODUCT_TOKENS + t];
    }
    gpu_compare("product next", gpu_from_bf16(gpu_download(next, count * 2), count), want, count, 4e-3);
    gpu_compare("product squares", sums[1], sums[0], n, 1e-5);
}

static void run_joined(const struct joined *j)
{
    const uint32_t *shape = j->shape;
    size_t count = (size_t)shape[0] * shape[2];
    struct product_inputs p = product_inputs(shape);
    float *squares = gpu_normals(SQUARE_BLOCKS * CUDA_PRODUCT_TOKENS, 100), *before = gpu_normals(count, 1);
    float *weight = gpu_normals(shape[0], 1);
    for (int i = 0; i < SQUARE_BLOCKS * CUDA_PRODUCT_TOKENS; i++)
        squares[i] = fabsf(squares[i]);
    struct cuda_product product = {.out = p.out,
                                   .w = p.device_w,
                                   .x = p.device_x,
                                   .bias = j->bias ? p.device_bias : NULL,
                                   .rows = shape[0],
                                   .cols = shape[1],
                                   .n = shape[2],
                                   .accumulate = j->accumulate,
                                   .squares = j->squares ? gpu_upload(squares, SQUARE_BLOCKS * 128) : NULL,
                                   .square_blocks = j->squares ? SQUARE_BLOCKS : 0,
                                   .eps = 1e-5f,
                                   .gated = j->gated ? gpu_alloc(count) : NULL,
                                   .next = j->next ? gpu_alloc(count * 2) : NULL,
                                   .next_weight = j->next ? gpu_upload(weight, shape[0] * 4) : NULL,
                                   .next_squares =
                                       j->next ? gpu_alloc(cuda_product_blocks(shape[0]) * 128ull) : NULL};
    cudaMemcpy(p.out, before, count * 4, cudaMemcpyHostToDevice);
    EXPECT(cuda_product(&product, NULL) == 0);
    product_of(p.ref, p.w, p.x, NULL, shape);
    joined_reference(j, p.ref, squares, p.bias, before);
    if (j->gated) {
        check_gated(j, p.ref, product.gated);
        return;
    }
    float *out = gpu_download(p.out, count * 4);
    gpu_compare("product", out, p.ref, count,
                shape[1] > 4096 ? 3e-5 : 1e-5); /* tensor cores cut what they add */
    if (j->next)
        check_next(j, out, weight, product.next, product.next_squares);
    /* The last token alone: the same bits. */
    uint32_t last = shape[2] - 1;
    product.x = (uint16_t *)p.device_x + (size_t)last * shape[1];
    product.n = 1;
    product.squares = NULL, product.square_blocks = 0, product.next = NULL;
    if (j->squares)
        return;
    cudaMemcpy(p.out, before + count - shape[0], shape[0] * 4, cudaMemcpyHostToDevice);
    EXPECT(cuda_product(&product, NULL) == 0);
    gpu_equal("product alone", gpu_download(p.out, shape[0] * 4), out + count - shape[0], shape[0] * 4);
}

static void test_product(void)
{
    if (!cuda_prefill_hopper(0))
        return;
    EXPECT(cuda_product_load() == 0);
    static const struct joined cases[] = {
        {{64, 64, 1}, 0, 0, 0, 0, 0},      {{1001, 128, 3}, 0, 0, 0, 1, 1},
        {{960, 576, 8}, 1, 0, 0, 1, 0},    {{576, 1536, 9}, 0, 0, 1, 0, 1},
        {{3072, 576, 17}, 1, 1, 0, 0, 0},  {{1168, 1600, 32}, 1, 1, 0, 0, 0},
        {{48, 64, 5}, 0, 1, 0, 0, 0},      {{6144, 4096, 32}, 1, 0, 0, 0, 0},
        {{4096, 4096, 32}, 0, 0, 1, 0, 1}, {{28672, 4096, 31}, 1, 1, 0, 0, 0},
        {{4096, 14336, 32}, 0, 0, 1, 0, 1}};
    for (int i = 0; i < COUNT_OF(cases); i++)
        if (!gpu_small || cases[i].shape[0] < 4096)
            run_joined(&cases[i]);
}

static void test_matmul(void)
{
    static const uint32_t shapes[][3] = {{64, 64, 1}, {1024, 576, 5}, {1536, 2048, 33}, {256, 4096, 200}};
    cublasLtHandle_t handle = NULL;
    size_t workspace_bytes = 32 << 20;
    void *workspace = gpu_alloc(workspace_bytes);
    EXPECT(cublasLtCreate(&handle) == CUBLAS_STATUS_SUCCESS);
    for (int i = 0; i < COUNT_OF(shapes) * 3 && handle; i++) {
        const uint32_t *shape = shapes[i / 3];
        size_t count = (size_t)shape[0] * shape[2];
        int bf16 = i % 3 == 1, accumulate = i % 3 == 2;
        struct product_inputs p = product_inputs(shape);
        struct cuda_matmul_shape s = {shape[0],   shape[1],   shape[2],       bf16 ? DTYPE_BF16 : DTYPE_F32,
                                      i % 3 == 0, accumulate, workspace_bytes};
        struct cuda_matmul_plan *plan = NULL;
        struct cuda_matmul m = {p.out, p.device_w, p.device_x, s.has_bias ? p.device_bias : NULL, workspace};
        product_of(p.ref, p.w, p.x, s.has_bias ? p.bias : NULL, shape);
        if (accumulate) {
            float *before = gpu_normals(count, 1);
            cudaMemcpy(p.out, before, count * 4, cudaMemcpyHostToDevice);
            for (size_t j = 0; j < count; j++)
                p.ref[j] += before[j];
        }
        EXPECT(cuda_matmul_plan(handle, &s, &plan) == 0);
        EXPECT(plan && cuda_matmul(handle, plan, &m, NULL) == 0);
        cuda_matmul_plan_free(&plan);
        float *out =
            bf16 ? gpu_from_bf16(gpu_download(p.out, count * 2), count) : gpu_download(p.out, count * 4);
        gpu_compare(bf16 ? "matmul bf16" : "matmul", out, p.ref, count, bf16 ? 4e-3 : 1e-5);
    }
    if (handle)
        cublasLtDestroy(handle);
}

const struct gpu_test tests_rows[] = {{"embed", test_embed},
                                      {"mix", test_mix},
                                      {"put_rows", test_put_rows},
                                      {"rmsnorm", test_rmsnorm},
                                      {"headnorm", test_headnorm},
                                      {"swiglu_add_narrow", test_swiglu_narrow},
                                      {"rope", test_rope},
                                      {"gemv", test_gemv},
                                      {"matmul", test_matmul},
                                      {"product", test_product},
                                      {NULL, NULL}};
