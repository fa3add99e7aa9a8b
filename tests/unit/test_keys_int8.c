/* Keys of 8 bits: the grid that they are rounded to, the same on the CPU and on a GPU (the double), and the
 * scores of what they stand for. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "compute/gpu.h"
#include "tests/lib/fakegpu.h"

enum { NOT_A_NUMBER = 0x7e00, DIM_MAX = 128, KV_HEADS = 2, GROUP = 3, CHUNK = 64, KEYS_MAX = 513 };

static uint32_t random_bits(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*state >> 33);
}

static float random_float(uint64_t *state)
{
    return (float)((double)random_bits(state) / (1u << 30) - 1);
}

static float element(int8_t q, uint16_t scale)
{
    return dtype_f16_to_f32(compute_key_element(q, scale));
}

/* All of a key within half a step of what it was, and its largest number at the end of the grid. */
static void check_near(const float *k, int dim)
{
    int8_t q[DIM_MAX];
    uint16_t scale = compute_key_quantize(q, k, dim);
    float step = dtype_f16_to_f32(scale);
    int most = 0;
    for (int i = 0; i < dim; i++) {
        float found = element(q[i], scale);
        /* Half a step, and the rounding of the product to f16. */
        if (!(fabsf(found - k[i]) <= step * 0.5f + fabsf(k[i]) * 0x1p-11f + 0x1p-25f))
            fail_msg("found %g, expected %g, step %g", (double)found, (double)k[i], (double)step);
        most = abs(q[i]) > most ? abs(q[i]) : most;
    }
    assert_int_equal(most, 127);
}

static void keys_lie_on_the_grid(void **state)
{
    uint64_t random = 5;
    float k[DIM_MAX];
    (void)state;
    for (int round = 0; round < 400; round++) {
        float size = ldexpf(1, round % 22 - 6); /* normal scales */
        for (int i = 0; i < DIM_MAX; i++)
            k[i] = random_float(&random) * size;
        check_near(k, round % 2 ? 64 : 128);
    }
}

static void ties_go_to_even(void **state)
{
    float k[DIM_MAX];
    int8_t q[DIM_MAX];
    (void)state;
    for (int i = 0; i < DIM_MAX; i++)
        k[i] = (float)(2 * i - 127) / 2; /* halves, of a step of 1 */
    k[0] = 127;
    assert_int_equal(compute_key_quantize(q, k, DIM_MAX), dtype_f32_to_f16(1));
    assert_int_equal(q[0], 127);
    for (int i = 1; i < DIM_MAX; i++) {
        assert_int_equal(q[i] % 2, 0);
        assert_true(fabsf((float)q[i] - k[i]) == 0.5f);
    }
}

static void edges_of_the_scale(void **state)
{
    /* What the key's largest magnitude gives: its scale, and the number of it. */
    static const struct {
        float most;
        uint16_t scale;
        int q;
    } cases[] = {
        {0, 0, 0},
        {1e-38f, 0, 0},
        {127 * 0x1p-26f, 0, 0},          /* the scale rounds to nothing, and so does the key as f16 almost */
        {127 * 0x1p-24f, 1, 127},        /* the least scale there is */
        {127 * 1.4f * 0x1p-24f, 1, 127}, /* which is coarse: cut off at 127 */
        {127 * 0x1p-14f, 0x400, 127},
        {127, 0x3c00, 127},
        {127 * 65504.0f, 0x7bff, 127}, /* the largest scale; the element is infinite, as in f16 */
        {127 * 65536.0f, NOT_A_NUMBER, 0},
        {INFINITY, NOT_A_NUMBER, 0},
        {NAN, NOT_A_NUMBER, 0},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int sign = -1; sign <= 1; sign += 2) {
            float k[DIM_MAX] = {0};
            int8_t q[DIM_MAX];
            k[7] = (float)sign * cases[i].most;
            assert_int_equal(compute_key_quantize(q, k, DIM_MAX), cases[i].scale);
            assert_int_equal(q[7], sign * cases[i].q);
            assert_int_equal(q[0], 0);
        }
    assert_true(isinf(element(127, 0x7bff)));
    assert_true(isnan(element(0, NOT_A_NUMBER)));
    float k[DIM_MAX] = {65504.0f, 32000};
    int8_t q[DIM_MAX];
    uint16_t scale = compute_key_quantize(q, k, DIM_MAX);
    assert_true(fabsf(element(q[1], scale) - 32000) < 300);
}

/* What the CPU keeps is what a GPU scores, whatever the number of threads. */
static void rounded_keys_are_what_is_scored(void **state)
{
    enum { N = 700 };
    uint64_t random = 9;
    float *k = mem_alloc((size_t)N * 64, sizeof *k), *rounded = mem_alloc((size_t)N * 64, sizeof *rounded);
    (void)state;
    for (int i = 0; i < N * 64; i++)
        k[i] = random_float(&random) * ldexpf(1, i / 64 % 40 - 24);
    k[5 * 64 + 1] = NAN;
    k[6 * 64 + 1] = -INFINITY;
    for (int threads = 1; threads <= 3; threads++) {
        struct compute *c = NULL;
        assert_int_equal(compute_create("cpu", threads, COMPUTE_ISA_AUTO, &c, NULL), 0);
        memcpy(rounded, k, (size_t)N * 64 * sizeof *k);
        compute_keys_round(c, rounded, N, 64);
        compute_free(&c);
        for (int key = 0; key < N; key++) {
            int8_t q[64];
            uint16_t scale = compute_key_quantize(q, k + (size_t)key * 64, 64);
            for (int i = 0; i < 64; i++) {
                float found = rounded[key * 64 + i];
                if (key == 5 || key == 6)
                    assert_true(isnan(found));
                else
                    assert_int_equal(dtype_f32_to_f16(found) & 0x7fff,
                                     compute_key_element(q[i], scale) & 0x7fff);
            }
        }
    }
    mem_free(&k);
    mem_free(&rounded);
}

/* ---- on the GPU ---- */

static const struct gpu_api *api;

struct card {
    struct gpu *gpu;
    struct CUstream_st *stream;
    void *memory[16];
    int count;
};

static void *upload(struct card *c, const void *data, size_t bytes)
{
    void **at = &c->memory[c->count++];
    assert_int_equal(api->alloc(c->gpu, bytes, at, NULL), 0);
    assert_int_equal(data ? api->copy(*at, data, bytes, c->stream) : api->fill(*at, 0xff, bytes, c->stream),
                     0);
    assert_int_equal(api->stream_sync(c->stream), 0);
    return *at;
}

static void download(const struct card *c, void *to, const void *from, size_t bytes)
{
    assert_int_equal(api->copy(to, from, bytes, c->stream), 0);
    assert_int_equal(api->stream_sync(c->stream), 0);
}

static struct card card_open(void)
{
    struct card c = {0};
    assert_int_equal(api->open("cuda:0", &c.gpu, NULL), 0);
    assert_int_equal(api->stream_create(c.gpu, GPU_PRIORITY_NORMAL, &c.stream, NULL), 0);
    return c;
}

static void card_close(struct card *c)
{
    for (int i = 0; i < c->count; i++)
        api->free(c->gpu, c->memory[i]);
    api->stream_free(c->gpu, &c->stream);
    api->close(&c->gpu);
}

/* One sequence of KEYS_MAX keys in chunks, last chunk first. */
struct sequence {
    struct cuda_key_view view;
    float *k; /* [KEYS_MAX][KV_HEADS][dim] */
    int dim;
};

enum { CHUNKS = (KEYS_MAX + CHUNK - 1) / CHUNK };

static struct sequence append(struct card *c, int dim)
{
    size_t chunk = (size_t)KV_HEADS * CHUNK * (size_t)(dim + 2);
    uint64_t at[CHUNKS], random = (uint64_t)dim;
    uint32_t rows[KEYS_MAX] = {0}, positions[KEYS_MAX];
    struct sequence s = {.dim = dim, .k = mem_alloc((size_t)KEYS_MAX * KV_HEADS * DIM_MAX, sizeof *s.k)};
    for (int i = 0; i < CHUNKS; i++)
        at[i] = (uint64_t)(CHUNKS - 1 - i) * chunk;
    for (int i = 0; i < KEYS_MAX * KV_HEADS * dim; i++)
        s.k[i] = random_float(&random) * ldexpf(1, i / dim % 9 - 6);
    for (uint32_t i = 0; i < KEYS_MAX; i++)
        positions[i] = i;
    s.view = (struct cuda_key_view){.base = upload(c, NULL, CHUNKS * chunk),
                                    .device_bytes = CHUNKS * chunk,
                                    .at = upload(c, at, sizeof at),
                                    .row_stride = CHUNKS,
                                    .at_count = CHUNKS,
                                    .chunk_tokens = CHUNK,
                                    .type = DTYPE_I8};
    struct cuda_keys_append a = {.keys = s.view,
                                 .k = upload(c, s.k, (size_t)KEYS_MAX * KV_HEADS * (size_t)dim * sizeof *s.k),
                                 .stride = (uint64_t)(KV_HEADS * dim),
                                 .rows = upload(c, rows, sizeof rows),
                                 .positions = upload(c, positions, sizeof positions),
                                 .row_count = 1,
                                 .n = KEYS_MAX,
                                 .kv_heads = KV_HEADS,
                                 .head_dim = (uint32_t)dim};
    assert_int_equal(api->keys_append(&a, c->stream), 0);
    a.keys.chunk_tokens = 40;
    assert_int_equal(api->keys_append(&a, c->stream), -EINVAL);
    a.keys.chunk_tokens = CHUNK;
    a.head_dim = 32;
    assert_int_equal(api->keys_append(&a, c->stream), -EINVAL);
    return s;
}

/* Numbers, then scales, of each chunk; what no key was written to is as it was. */
static void check_bytes(const struct card *c, const struct sequence *s)
{
    size_t dim = (size_t)s->dim, chunk = KV_HEADS * CHUNK * (dim + 2);
    uint8_t *found = mem_alloc(CHUNKS * chunk, 1), *expected = mem_alloc(CHUNKS * chunk, 1);
    download(c, found, s->view.base, CHUNKS * chunk);
    memset(expected, 0xff, CHUNKS * chunk);
    for (size_t p = 0; p < KEYS_MAX; p++)
        for (size_t h = 0; h < KV_HEADS; h++) {
            uint8_t *at = expected + (CHUNKS - 1 - p / CHUNK) * chunk;
            size_t unit = h * CHUNK + p % CHUNK;
            uint16_t scale =
                compute_key_quantize((int8_t *)at + unit * dim, s->k + (p * KV_HEADS + h) * dim, s->dim);
            memcpy(at + KV_HEADS * CHUNK * dim + unit * sizeof scale, &scale, sizeof scale);
        }
    assert_memory_equal(found, expected, CHUNKS * chunk);
    mem_free(&found);
    mem_free(&expected);
}

static void check_weights(struct card *c, const struct sequence *s, uint32_t count, int mean)
{
    enum { STRIDE = 516 };
    struct compute *cpu = NULL;
    size_t dim = (size_t)s->dim;
    float q[KV_HEADS * GROUP * DIM_MAX], found[KV_HEADS * STRIDE], expected[KV_HEADS * STRIDE];
    uint64_t random = 3;
    int first = c->count;
    for (size_t i = 0; i < sizeof q / sizeof *q; i++)
        q[i] = random_float(&random) * 4;
    struct cuda_retrieval r = {.keys = s->view,
                               .weights = upload(c, NULL, sizeof found),
                               .weight_stride = STRIDE,
                               .q = upload(c, q, sizeof q),
                               .q_stride = KV_HEADS * GROUP * dim,
                               .counts = upload(c, &count, sizeof count),
                               .row_count = 1,
                               .count_max = KEYS_MAX,
                               .n = 1,
                               .q_heads = KV_HEADS * GROUP,
                               .kv_heads = KV_HEADS,
                               .head_dim = (uint32_t)dim,
                               .scale = 0.25f,
                               .mean = mean};
    r.work = upload(c, NULL, api->retrieval_work_bytes(1, KV_HEADS * GROUP, KEYS_MAX));
    assert_int_equal(api->retrieval(&r, c->stream), 0);
    download(c, found, r.weights, sizeof found);
    assert_int_equal(compute_create("cpu", 1, COMPUTE_ISA_AUTO, &cpu, NULL), 0);
    uint16_t *keys = mem_alloc(KV_HEADS * KEYS_MAX * dim, sizeof *keys);
    float *rounded = mem_alloc(KEYS_MAX * KV_HEADS * dim, sizeof *rounded);
    const uint16_t *const chunks[] = {keys};
    struct key_view view = {chunks, KEYS_MAX, 0};
    memcpy(rounded, s->k, KEYS_MAX * KV_HEADS * dim * sizeof *rounded);
    compute_keys_round(cpu, rounded, KEYS_MAX * KV_HEADS, s->dim);
    compute_keys_append(cpu, &view, rounded, KEYS_MAX, KV_HEADS, s->dim);
    view.count = count;
    compute_retrieval_weights(cpu, expected, STRIDE, q, &view, KV_HEADS * GROUP, KV_HEADS, s->dim, 0.25f,
                              mean ? POOL_MEAN : POOL_MAX);
    for (uint32_t h = 0; h < KV_HEADS; h++)
        for (uint32_t i = 0; i < count; i++) {
            float a = found[h * STRIDE + i], b = expected[h * STRIDE + i];
            if (!(fabsf(a - b) <= 1e-4f * b + 1e-7f))
                fail_msg("%u keys, weight %u: found %g, expected %g", count, i, (double)a, (double)b);
        }
    mem_free(&keys);
    mem_free(&rounded);
    compute_free(&cpu);
    while (c->count > first)
        api->free(c->gpu, c->memory[--c->count]);
}

static void the_gpu_scores_what_the_cpu_keeps(void **state)
{
    static const uint32_t counts[] = {0, 1, 15, 16, 17, 63, 64, 65, 511, 512, 513};
    (void)state;
    for (int dim = 64; dim <= DIM_MAX; dim *= 2) {
        struct card c = card_open();
        struct sequence s = append(&c, dim);
        check_bytes(&c, &s);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
            for (int mean = 0; mean < 2; mean++)
                check_weights(&c, &s, counts[i], mean);
        mem_free(&s.k);
        card_close(&c);
    }
}

static int set_up(void **state)
{
    (void)state;
    fakegpu_use(NULL);
    return gpu_load(&api, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_lie_on_the_grid),
        cmocka_unit_test(ties_go_to_even),
        cmocka_unit_test(edges_of_the_scale),
        cmocka_unit_test(rounded_keys_are_what_is_scored),
        cmocka_unit_test(the_gpu_scores_what_the_cpu_keeps),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
