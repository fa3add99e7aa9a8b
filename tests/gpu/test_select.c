/* Retrieval scores, Top-K and sampling against the CPU's. */
#include <cuda_runtime_api.h>
#include <errno.h>

#include "compute/cuda/sets.h"
#include "model/sampler.h"
#include "tests/gpu/gpu_test.h"

enum { KEY_CHUNK = 256 };

struct keys {
    struct cuda_key_view device;
    uint16_t **chunks;       /* f16, as the CPU has them, [rows][per row] */
    uint32_t per_row, chunk; /* chunks, and positions of one */
    uint8_t *memory;         /* what is expected on the device */
    size_t bytes;
};

static struct keys make_keys(enum dtype type, uint32_t rows, uint32_t kv_heads, uint32_t dim, uint32_t count,
                             uint32_t chunk_tokens)
{
    struct keys k = {.per_row = (count + chunk_tokens - 1) / chunk_tokens + 1, .chunk = chunk_tokens};
    size_t key = type == DTYPE_I8 ? dim + 2 : dim * 2, chunk = (size_t)kv_heads * chunk_tokens * key;
    size_t f16 = (size_t)kv_heads * chunk_tokens * dim * 2, chunks = (size_t)rows * k.per_row;
    uint64_t *at = gpu_host(chunks * 8);
    k.bytes = chunks * chunk;
    k.memory = gpu_host(k.bytes);
    k.chunks = gpu_host(chunks * sizeof *k.chunks);
    memset(k.memory, 0xff, k.bytes);
    for (size_t i = 0; i < chunks; i++) {
        at[i] = (chunks - 1 - i) * chunk;
        k.chunks[i] = type == DTYPE_I8 ? gpu_host(f16) : (void *)(k.memory + at[i]);
    }
    k.device = (struct cuda_key_view){
        gpu_alloc(k.bytes), k.bytes, gpu_upload(at, chunks * 8), k.per_row, k.per_row, chunk_tokens, type};
    return k;
}

/* Writes key `position` of a row and head to where it is expected on the device, and gives the CPU what it
 * stands for. */
static void expect_int8(const struct keys *k, const float *x, uint32_t row, uint32_t position, uint32_t head,
                        uint32_t kv_heads, uint32_t dim)
{
    size_t chunk = (size_t)row * k->per_row + position / k->chunk, chunks = k->bytes / kv_heads / k->chunk;
    size_t unit = (size_t)head * k->chunk + position % k->chunk;
    chunks /= dim + 2;
    uint8_t *at = k->memory + (chunks - 1 - chunk) * kv_heads * k->chunk * (dim + 2);
    int8_t *q = (int8_t *)at + unit * dim;
    uint16_t *scale = (uint16_t *)(at + (size_t)kv_heads * k->chunk * dim) + unit;
    *scale = compute_key_quantize(q, x, (int)dim);
    for (uint32_t d = 0; d < dim; d++)
        k->chunks[chunk][unit * dim + d] = compute_key_element(q[d], *scale);
}

static void append(const struct keys *k, const float *x, uint32_t rows, uint32_t count, uint32_t kv_heads,
                   uint32_t dim)
{
    uint32_t n = rows * count, *row_of = gpu_host(n * 4), *positions = gpu_host(n * 4);
    for (uint32_t i = 0; i < n; i++) {
        row_of[i] = i / count;
        positions[i] = i % count;
    }
    struct cuda_keys_append a = {.keys = k->device,
                                 .k = gpu_upload(x, (size_t)n * kv_heads * dim * 4),
                                 .stride = kv_heads * dim,
                                 .rows = gpu_upload(row_of, n * 4),
                                 .positions = gpu_upload(positions, n * 4),
                                 .row_count = rows,
                                 .n = n,
                                 .kv_heads = kv_heads,
                                 .head_dim = dim};
    EXPECT(cuda_keys_append(&a, NULL) == 0);
    for (uint32_t r = 0; r < rows && k->device.type == DTYPE_F16; r++) {
        struct key_view view = {(const uint16_t *const *)k->chunks + r * k->per_row, k->chunk, 0};
        compute_keys_append(gpu_compute, &view, x + (size_t)r * count * kv_heads * dim, (int)count,
                            (int)kv_heads, (int)dim);
    }
    for (size_t i = 0; k->device.type == DTYPE_I8 && i < (size_t)n * kv_heads; i++)
        expect_int8(k, x + i * dim, (uint32_t)(i / kv_heads / count), (uint32_t)(i / kv_heads % count),
                    (uint32_t)(i % kv_heads), kv_heads, dim);
    if (k->device.type != DTYPE_BF16)
        gpu_equal("keys", gpu_download(k->device.base, k->bytes), k->memory, k->bytes);
}

/* `size` of keys, 1 / size of queries. */
static void check_retrieval(enum dtype type, uint32_t dim, uint32_t group, int mean, float size,
                            uint32_t chunk)
{
    enum { ROWS = 12, KV_HEADS = 2 };
    uint32_t most = gpu_small ? 600 : 3000,
             counts[ROWS] = {0, 1, 15, 16, 17, 511, 512, 513, most, chunk - 1, chunk, chunk + 1};
    struct keys k = make_keys(type, ROWS, KV_HEADS, dim, most, chunk);
    float *x = gpu_normals((size_t)ROWS * most * KV_HEADS * dim, size);
    uint32_t q_heads = KV_HEADS * group;
    if (type == DTYPE_BF16) /* the CPU keeps f16 keys: give both what either type can hold */
        for (size_t i = 0; i < (size_t)ROWS * most * KV_HEADS * dim; i++)
            x[i] = dtype_bf16_to_f32(dtype_f32_to_bf16(dtype_f16_to_f32(dtype_f32_to_f16(x[i] * 8)) / 8));
    append(&k, x, ROWS, most, KV_HEADS, dim);
    if (type == DTYPE_BF16)
        for (uint32_t r = 0; r < ROWS; r++) {
            struct key_view view = {(const uint16_t *const *)k.chunks + r * k.per_row, chunk, 0};
            compute_keys_append(gpu_compute, &view, x + (size_t)r * most * KV_HEADS * dim, (int)most,
                                KV_HEADS, (int)dim);
        }
    size_t stride = (most + 3) / 4 * 4, count = ROWS * KV_HEADS * stride;
    float *q = gpu_normals((size_t)ROWS * q_heads * dim, size < 1 ? 0.1f / size : 3); /* f16 holds them */
    float *ref = gpu_host(count * 4);
    struct cuda_retrieval r = {.keys = k.device,
                               .weights = gpu_alloc(count * 4),
                               .weight_stride = stride,
                               .q = gpu_upload(q, (size_t)ROWS * q_heads * dim * 4),
                               .q_stride = (uint64_t)q_heads * dim,
                               .counts = gpu_upload(counts, sizeof counts),
                               .row_count = ROWS,
                               .count_max = most,
                               .n = ROWS,
                               .q_heads = q_heads,
                               .kv_heads = KV_HEADS,
                               .head_dim = dim,
                               .scale = 1 / sqrtf((float)dim),
                               .mean = mean};
    r.work = gpu_alloc(cuda_retrieval_work_bytes(ROWS, q_heads, most));
    EXPECT(cuda_retrieval(&r, NULL) == 0);
    memset(ref, 0xff, count * 4);
    for (uint32_t t = 0; t < ROWS; t++) {
        struct key_view view = {(const uint16_t *const *)k.chunks + t * k.per_row, chunk, counts[t]};
        compute_retrieval_weights(gpu_compute, ref + t * KV_HEADS * stride, stride,
                                  q + (size_t)t * q_heads * dim, &view, (int)q_heads, KV_HEADS, (int)dim,
                                  r.scale, mean ? POOL_MEAN : POOL_MAX);
    }
    gpu_compare("weights", gpu_download(r.weights, count * 4), ref, count, 5e-5);
}

static void test_retrieval(void)
{
    check_retrieval(DTYPE_F16, 128, 4, 0, 1, KEY_CHUNK);
    check_retrieval(DTYPE_F16, 64, 1, 1, 1, KEY_CHUNK);
    check_retrieval(DTYPE_BF16, 128, 8, 1, 1, KEY_CHUNK);
    check_retrieval(DTYPE_BF16, 64, 3, 0, 1, KEY_CHUNK);
    check_retrieval(DTYPE_I8, 128, 4, 1, 1, KEY_CHUNK);
    check_retrieval(DTYPE_I8, 128, 8, 0, 0x1p-12f, KEY_CHUNK); /* subnormal scales */
    check_retrieval(DTYPE_I8, 64, 1, 0, 1, KEY_CHUNK);
    check_retrieval(DTYPE_I8, 64, 3, 1, 0x1p-12f, KEY_CHUNK);
    /* A sequence's room on a card is one chunk, of as many positions as its context. */
    uint32_t grains = (gpu_small ? 13 : 63) * CUDA_KEYS_GRAIN, any = gpu_small ? 200 : 1000;
    check_retrieval(DTYPE_I8, 128, 4, 0, 1, grains);
    check_retrieval(DTYPE_I8, 64, 8, 1, 1, grains);
    check_retrieval(DTYPE_F16, 128, 3, 1, 1, any);
    check_retrieval(DTYPE_F16, 64, 4, 0, 1, any);
}

/* Numbers at the edges of the grid, bit for bit. */
static void test_keys_int8(void)
{
    static const float sizes[] = {0,       1e-30f,   0x1p-26f, 0x1p-24f, 1e-6f,       0x1p-8f,   1,
                                  1000.0f, 65504.0f, 65520.0f, 1e6f,     127 * 65504, 8.33e6f,   1e30f,
                                  3e38f,   INFINITY, NAN,      -1,       -65504.0f,   -INFINITY, 127};
    enum { KV_HEADS = 3, COUNT = 2 * COUNT_OF(sizes) };
    for (uint32_t dim = 64; dim <= 128; dim *= 2) {
        struct keys k = make_keys(DTYPE_I8, 1, KV_HEADS, dim, COUNT, KEY_CHUNK);
        float *x = gpu_normals((size_t)COUNT * KV_HEADS * dim, 1);
        for (size_t i = 0; i < COUNT * KV_HEADS; i++) {
            float size = sizes[i % COUNT_OF(sizes)], *key = x + i * dim;
            for (uint32_t d = 0; d < dim; d++) /* the second half has halves: ties */
                key[d] = i < COUNT * KV_HEADS / 2 ? key[d] * (isfinite(size) ? size / 8 : 1)
                                                  : (float)((int)(gpu_random() % 255) - 127) / 2;
            key[gpu_random() % dim] = size;
        }
        append(&k, x, 1, COUNT, KV_HEADS, dim);
    }
}

/* A key of NaN makes its list's weights NaN, and no other's. */
static void test_keys_int8_not_finite(void)
{
    enum { COUNT = 600, DIM = 128, Q_HEADS = 4 };
    struct keys k = make_keys(DTYPE_I8, 2, 1, DIM, COUNT, KEY_CHUNK);
    float *x = gpu_normals((size_t)2 * COUNT * DIM, 1), *q = gpu_normals(2 * Q_HEADS * DIM, 1);
    uint32_t counts[2] = {COUNT, COUNT - 7};
    x[70 * DIM + 9] = NAN;
    x[(COUNT + COUNT - 3) * DIM + 1] = INFINITY; /* past the count */
    append(&k, x, 2, COUNT, 1, DIM);
    struct cuda_retrieval r = {.keys = k.device,
                               .weights = gpu_alloc(2 * COUNT * 4),
                               .weight_stride = COUNT,
                               .q = gpu_upload(q, 2 * Q_HEADS * DIM * 4),
                               .q_stride = Q_HEADS * DIM,
                               .counts = gpu_upload(counts, sizeof counts),
                               .row_count = 2,
                               .count_max = COUNT,
                               .n = 2,
                               .q_heads = Q_HEADS,
                               .kv_heads = 1,
                               .head_dim = DIM,
                               .scale = 0.1f,
                               .work = gpu_alloc(cuda_retrieval_work_bytes(2, Q_HEADS, COUNT))};
    EXPECT(cuda_retrieval(&r, NULL) == 0);
    const float *w = gpu_download(r.weights, 2 * COUNT * 4);
    double sum = 0;
    for (uint32_t i = 0; i < counts[1]; i++)
        sum += (double)w[COUNT + i];
    EXPECT(isnan(w[0]) && isnan(w[70]));
    EXPECT(isfinite(sum) && sum > 0);
    r.keys.chunk_tokens = 250;
    EXPECT(cuda_retrieval(&r, NULL) == -EINVAL);
}

/* Kinds of values that a selection must get right. */
static void fill_values(float *v, uint32_t n, int kind)
{
    for (uint32_t i = 0; i < n; i++) {
        float x = gpu_normal();
        v[i] = kind == 0   ? expf(4 * x) / (float)n
               : kind == 1 ? 0.25f
               : kind == 2 ? (float)(gpu_random() % 4)
               : kind == 3 ? (gpu_random() % 3 == 0   ? NAN
                              : gpu_random() % 3 == 0 ? -INFINITY
                                                      : x)
               : kind == 4 ? (i % 2 ? -0.0f : 0.0f)
                           : nextafterf(1.0f, 2.0f) * (1 + (float)(gpu_random() % 5) * 0x1p-22f);
    }
}

static void check_topk(uint32_t n, uint32_t k, uint32_t first, int kind)
{
    enum { ROWS = 4, HEADS = 2 };
    size_t stride = (n + 3) / 4 * 4, index_stride = k < n ? k : n;
    float *values = gpu_host(ROWS * stride * 4);
    uint32_t begin[ROWS / HEADS] = {first, first / 2}, end[ROWS / HEADS] = {n, n - n / 5},
                          outer[ROWS / HEADS] = {n, n - n / 7};
    fill_values(values, ROWS * (uint32_t)stride, kind);
    struct cuda_topk t = {.index = gpu_alloc(ROWS * index_stride * 4),
                          .index_stride = index_stride,
                          .ret_count = gpu_alloc(ROWS * 4),
                          .ret_mass = gpu_alloc(ROWS * 4),
                          .values = gpu_upload(values, ROWS * stride * 4),
                          .stride = stride,
                          .first = gpu_upload(begin, sizeof begin),
                          .end = gpu_upload(end, sizeof end),
                          .outer = kind % 2 ? NULL : gpu_upload(outer, sizeof outer),
                          .rows = ROWS,
                          .heads = HEADS,
                          .k = k,
                          .end_max = n};
    EXPECT(cuda_topk(&t, NULL) == 0);
    uint32_t *index = gpu_download(t.index, ROWS * index_stride * 4),
             *counts = gpu_download(t.ret_count, ROWS * 4);
    float *masses = gpu_download(t.ret_mass, ROWS * 4);
    uint32_t *ref = gpu_host(n * 4), *scratch = gpu_host(n * 4);
    for (int r = 0; r < ROWS; r++) {
        double mass = 0;
        uint32_t from = begin[r / HEADS], m = end[r / HEADS] > from ? end[r / HEADS] - from : 0;
        uint32_t count = compute_topk(ref, &mass, values + r * stride + from, m, k, scratch);
        for (uint32_t i = 0; kind % 2 == 0 && i < outer[r / HEADS]; i++)
            mass += i < from || i >= end[r / HEADS] ? (double)values[r * stride + i] : 0;
        float cpu_mass = (float)mass;
        for (uint32_t i = 0; i < count; i++)
            ref[i] += from;
        EXPECT(counts[r] == count);
        gpu_equal("positions", index + r * index_stride, ref, (counts[r] < count ? counts[r] : count) * 4);
        gpu_compare("mass", masses + r, &cpu_mass, 1, 1e-6);
    }
}

static void test_topk(void)
{
    static const uint32_t sizes[][2] = {{1, 1},         {7, 3},          {64, 64},      {4095, 2048},
                                        {4096, 1},      {4097, 512},     {32768, 2048}, {32771, 4096},
                                        {131072, 4096}, {131072, 131071}};
    for (int i = 0; i < COUNT_OF(sizes); i++)
        for (int kind = 0; kind < 6; kind++) {
            if (gpu_small && sizes[i][0] > 5000)
                continue;
            check_topk(sizes[i][0], sizes[i][1], 0, kind);
            check_topk(sizes[i][0], sizes[i][1], sizes[i][0] / 3, kind);
        }
}

/* `count` ascending positions below `end`. */
static void fill_list(uint32_t *at, uint32_t count, uint32_t end)
{
    uint32_t left = count, p = 0;
    for (; left; p++)
        if (gpu_random() % (end - p) < left) {
            *at++ = p;
            left--;
        }
}

static bool has(const uint32_t *list, uint32_t count, uint32_t position)
{
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (list[middle] < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && list[low] == position;
}

/* Appends what `a` has and `b` has not. */
static uint32_t *append_others(uint32_t *to, const uint32_t *a, uint32_t a_count, const uint32_t *b,
                               uint32_t b_count)
{
    for (uint32_t i = 0; i < a_count; i++)
        if (!has(b, b_count, a[i]))
            *to++ = a[i];
    return to;
}

enum { SET_QUERIES = 5, SET_GROUPS = 2, SET_HEADS = 3, SET_LISTS = SET_GROUPS * SET_HEADS };

/* lists [query][list][k], counts [query][list]. */
static void mark_all(const struct cuda_sets *sets, const uint32_t *lists, const uint32_t *counts, uint32_t k)
{
    for (uint32_t g = 0; g < SET_GROUPS; g++) {
        uint32_t *index = gpu_host((size_t)SET_QUERIES * SET_HEADS * k * 4),
                 *count = gpu_host(SET_QUERIES * SET_HEADS * 4);
        for (uint32_t r = 0; r < SET_QUERIES * SET_HEADS; r++) {
            uint32_t list = r / SET_HEADS * SET_LISTS + g * SET_HEADS + r % SET_HEADS;
            memcpy(index + (size_t)r * k, lists + (size_t)list * k, k * sizeof *index);
            count[r] = counts[list];
        }
        struct cuda_sets_mark m = {.sets = *sets,
                                   .index = gpu_upload(index, (size_t)SET_QUERIES * SET_HEADS * k * 4),
                                   .row_count = gpu_upload(count, SET_QUERIES * SET_HEADS * 4),
                                   .index_stride = k,
                                   .first_list = g * SET_HEADS,
                                   .rows = SET_QUERIES * SET_HEADS,
                                   .heads = SET_HEADS};
        EXPECT(cuda_sets_mark(&m, NULL) == 0);
    }
}

static void check_sets(uint32_t end, uint32_t k, uint32_t kept)
{
    /* The last but one has a place that is none, the last is not compared. */
    static const uint32_t places[SET_QUERIES] = {3, 0, 2, 9, 1}, firsts[SET_QUERIES] = {0},
                          seconds[SET_QUERIES] = {3, 3, 3, 3, 1};
    size_t positions = (size_t)SET_QUERIES * SET_LISTS * k;
    uint32_t *before = gpu_host(positions * 4), *now = gpu_host(positions * 4);
    uint32_t counts[2][SET_QUERIES * SET_LISTS], *ref = gpu_host(2 * positions * 4), *to = ref;
    uint32_t ref_counts[SET_QUERIES * SET_LISTS * 2];
    for (uint32_t l = 0; l < SET_QUERIES * SET_LISTS; l++) {
        uint32_t *a = now + (size_t)l * k, *b = before + (size_t)l * k, place = places[l / SET_LISTS];
        counts[0][l] = l % 4 == 3 ? k / 2 : k;
        counts[1][l] = l % 5 == 4 ? 0 : k;
        fill_list(b, counts[0][l], end);
        fill_list(a, counts[1][l], end);
        if (gpu_random() % 100 < kept && counts[0][l] == counts[1][l])
            memcpy(a, b, k * sizeof *a);
        uint32_t compared = seconds[l / SET_LISTS] & CUDA_SETS_DIFFER ? counts[0][l] : 0, *begin = to;
        if (place < 4)
            to = append_others(to, a, counts[1][l], b, compared);
        ref_counts[2 * l] = (uint32_t)(to - begin);
        begin = to;
        if (place < 4)
            to = append_others(to, b, compared, a, counts[1][l]);
        ref_counts[2 * l + 1] = (uint32_t)(to - begin);
    }
    uint64_t room = (2 * positions + 3) / 4 * 4;
    struct cuda_sets sets = {.words = (end + 31) / 32,
                             .lists = SET_LISTS,
                             .place_count = 4,
                             .count = gpu_alloc(sizeof ref_counts),
                             .place = gpu_upload(places, sizeof places),
                             .how = gpu_upload(firsts, sizeof firsts)};
    void *out_device;
    sets.bits = gpu_alloc(sets.words * 4ull * 2 * SET_LISTS * 4);
    uint32_t *out = gpu_mapped(room * 4, &out_device);
    mark_all(&sets, before, counts[0], k);
    sets.how = gpu_upload(seconds, sizeof seconds);
    mark_all(&sets, now, counts[1], k);
    struct cuda_sets_changes c = {.sets = sets,
                                  .work = gpu_alloc(room * 4),
                                  .out = out_device,
                                  .total = gpu_alloc(4),
                                  .room = room,
                                  .n = SET_QUERIES};
    EXPECT(cuda_sets_changes(&c, NULL) == 0);
    gpu_equal("counts", gpu_download(sets.count, sizeof ref_counts), ref_counts, sizeof ref_counts);
    uint32_t *total = gpu_download(c.total, 4);
    EXPECT(*total == (uint32_t)(to - ref));
    gpu_equal("changes", out, ref, (size_t)(to - ref) * 4);
    c.room = 8; /* what does not fit is left out, and nothing is written past the room */
    memset(out, 0x5a, room * 4);
    EXPECT(cuda_sets_changes(&c, NULL) == 0);
    total = gpu_download(c.total, 4);
    EXPECT(*total == (to - ref < 8 ? (uint32_t)(to - ref) : 8));
    gpu_equal("changes cut", out, ref, *total * 4);
    EXPECT(room <= 8 || out[8] == 0x5a5a5a5a);
}

static void test_sets(void)
{
    check_sets(1, 1, 50);
    check_sets(33, 7, 50);
    check_sets(4096, 512, 20);
    check_sets(32768, 2048, 30);
    if (!gpu_small)
        check_sets(131072, 4096, 0);
}

struct case_of_sampling {
    float temperature, top_p, min_p;
    uint32_t top_k;
};

static void check_sampling(uint32_t vocab, const struct case_of_sampling *s, int kind)
{
    enum { N = 24 };
    float *logits = gpu_host((size_t)N * vocab * 4);
    struct cuda_sample_params params[N];
    for (size_t i = 0; i < (size_t)N * vocab; i++)
        logits[i] = kind == 0 ? gpu_normal() * 3 : kind == 1 ? 1.5f : (float)(gpu_random() % 8);
    for (uint32_t t = 0; t < N; t++)
        params[t] = (struct cuda_sample_params){
            s->temperature, s->top_p, s->min_p, s->top_k, gpu_random(), (uint64_t)gpu_random() << 20,
            t * 1000,       0};
    struct cuda_sample op = {gpu_alloc(N * 4),
                             gpu_upload(logits, (size_t)N * vocab * 4),
                             vocab,
                             gpu_upload(params, sizeof params),
                             N,
                             vocab};
    EXPECT(cuda_sample(&op, NULL) == 0);
    int32_t *ids = gpu_download(op.ids, N * 4);
    void *scratch = gpu_host(sampler_scratch_bytes(vocab));
    int wrong = 0;
    for (uint32_t t = 0; t < N; t++) {
        struct sampler_params p = sampler_params_default();
        uint32_t id = 0;
        p.temperature = s->temperature, p.top_p = s->top_p, p.min_p = s->min_p, p.top_k = s->top_k;
        p.seed = params[t].seed;
        struct sampler_input in = {.logits = logits + (size_t)t * vocab,
                                   .vocab = vocab,
                                   .scratch = scratch,
                                   .sequence = params[t].sequence,
                                   .position = params[t].position};
        EXPECT(sampler_sample(&p, &in, &id) == 0);
        wrong += (int32_t)id != ids[t];
    }
    if (wrong)
        printf("    vocab %u kind %d temperature %g top_p %g min_p %g top_k %u: %d of %d differ\n", vocab,
               kind, (double)s->temperature, (double)s->top_p, (double)s->min_p, s->top_k, wrong, N);
    EXPECT(wrong == 0);
}

static void test_sample(void)
{
    static const struct case_of_sampling cases[] = {{0, 1, 0, 0},
                                                    {1, 1, 0, 0},
                                                    {0.7f, 1, 0, 40},
                                                    {0.7f, 0.9f, 0, 0},
                                                    {1.3f, 0.95f, 0.05f, 50},
                                                    {1, 1, 0.1f, 0},
                                                    {2, 0.5f, 0, 100000},
                                                    {1, 0, 0, 0},
                                                    {0.6f, 0.95f, 0, 20},
                                                    {1, 0.999f, 0, 0},
                                                    {100, 0.9f, 0, 3},
                                                    {0.01f, 0.9f, 0, 0},
                                                    {1, 0.9f, 0.5f, 1},
                                                    {5, 1, 0, 128255}};
    static const uint32_t vocabs[] = {1, 7, 2048, 49152, 128256};
    for (int v = 0; v < (gpu_small ? 3 : COUNT_OF(vocabs)); v++)
        for (int i = 0; i < COUNT_OF(cases); i++)
            for (int kind = 0; kind < 3; kind++)
                check_sampling(vocabs[v], &cases[i], kind);
}

static void test_sample_not_finite(void)
{
    enum { N = 6, VOCAB = 3000 };
    float *logits = gpu_normals(N * VOCAB, 1);
    struct cuda_sample_params params[N];
    for (int t = 0; t < N; t++)
        params[t] = (struct cuda_sample_params){.temperature = t & 1 ? 1 : 0, .top_p = 0.9f};
    logits[0 * VOCAB + 2999] = NAN;
    logits[1 * VOCAB + 17] = INFINITY;
    for (int i = 0; i < VOCAB; i++)
        logits[2 * VOCAB + i] = -INFINITY;
    for (int i = 1; i < VOCAB; i++)
        logits[3 * VOCAB + i] = -INFINITY;
    logits[4 * VOCAB + 5] = -INFINITY;
    logits[4 * VOCAB + 2500] = logits[4 * VOCAB + 1500] = 1000;
    struct cuda_sample op = {gpu_alloc(N * 4),
                             gpu_upload(logits, N * VOCAB * 4),
                             VOCAB,
                             gpu_upload(params, sizeof params),
                             N,
                             VOCAB};
    EXPECT(cuda_sample(&op, NULL) == 0);
    int32_t *ids = gpu_download(op.ids, N * 4);
    EXPECT(ids[0] == -1 && ids[1] == -1 && ids[2] == -1);
    EXPECT(ids[3] == 0 && ids[4] == 1500 && ids[5] >= 0);
}

static void test_penalties(void)
{
    enum { N = 2, VOCAB = 500, HISTORY = 60 };
    float *logits = gpu_normals(N * VOCAB, 2), rows[N * 3] = {1.3f, 0.4f, 0.25f, 1.0f, -0.5f, 0};
    uint32_t history[N][HISTORY], begin[N + 1] = {0}, used = 0;
    struct cuda_penalty_entry entries[N * HISTORY + 1];
    for (int t = 0; t < N; t++) {
        for (int i = 0; i < HISTORY; i++) {
            history[t][i] = gpu_random() % 40;
            uint32_t e = begin[t];
            while (e < used && entries[e].id != history[t][i])
                e++;
            if (e == used)
                entries[used++] = (struct cuda_penalty_entry){history[t][i], 0};
            entries[e].count++;
        }
        begin[t + 1] = used;
    }
    struct cuda_penalties p = {gpu_upload(logits, N * VOCAB * 4),
                               VOCAB,
                               gpu_upload(entries, sizeof entries),
                               gpu_upload(begin, sizeof begin),
                               gpu_upload(rows, sizeof rows),
                               N,
                               VOCAB};
    EXPECT(cuda_penalties(&p, NULL) == 0);
    for (int t = 0; t < N; t++) {
        struct sampler_params s = sampler_params_default();
        s.repeat_penalty = rows[3 * t], s.presence_penalty = rows[3 * t + 1],
        s.frequency_penalty = rows[3 * t + 2];
        struct sampler_input in = {.logits = logits + t * VOCAB,
                                   .vocab = VOCAB,
                                   .history = history[t],
                                   .history_count = HISTORY,
                                   .scratch = gpu_host(sampler_scratch_bytes(VOCAB))};
        uint32_t id;
        EXPECT(sampler_sample(&s, &in, &id) == 0);
    }
    gpu_equal("penalties", gpu_download(p.logits, N * VOCAB * 4), logits, N * VOCAB * 4);
}

const struct gpu_test tests_select[] = {{"retrieval", test_retrieval},
                                        {"keys_int8", test_keys_int8},
                                        {"keys_int8_not_finite", test_keys_int8_not_finite},
                                        {"topk", test_topk},
                                        {"sets", test_sets},
                                        {"sample", test_sample},
                                        {"sample_not_finite", test_sample_not_finite},
                                        {"penalties", test_penalties},
                                        {NULL, NULL}};
