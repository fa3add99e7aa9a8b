/* Attention and the writes of KV pieces: against a softmax in double over the same rounded values, and
 * bit-equality between identity, paged and slotted lists, batches, threads. Unused memory holds NaN. */
#include "tests/unit/compute_util.h"

enum { PAGE = 64, Q_HEADS_MAX = 16 };

/* The KV of one sequence, once in pages that lie in a random order, once in slots of a random order. */
struct world {
    int kv_heads, head_dim;
    uint32_t positions, pages, slots, units_per_slab, slabs;
    enum dtype type;
    uint64_t *page_at, *slab_at;
    uint8_t *page_memory, *slab_memory;
    struct kv_view paged, slotted;
    float *k, *v;       /* [positions][kv_heads][head_dim], before rounding */
    uint32_t *slot;     /* [kv_heads][positions] */
    uint32_t *position; /* [positions]: 0, 1, 2, ... */
};

static void shuffle(uint64_t seed, uint32_t *x, uint32_t n)
{
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = rng_next(&seed) % i, swap = x[i - 1];
        x[i - 1] = x[j];
        x[j] = swap;
    }
}

static uint64_t *shuffled_offsets(uint64_t seed, uint32_t n, uint64_t bytes)
{
    uint32_t *order = mem_alloc(n, sizeof *order);
    uint64_t *at = mem_alloc(n, sizeof *at);
    for (uint32_t i = 0; i < n; i++)
        order[i] = i;
    shuffle(seed, order, n);
    for (uint32_t i = 0; i < n; i++)
        at[i] = order[i] * bytes;
    mem_free(&order);
    return at;
}

static void make_views(struct world *w, uint32_t page_tokens, uint32_t units_per_slab)
{
    uint32_t piece = 4 * (uint32_t)w->head_dim;
    w->pages = w->positions / page_tokens + 1;
    w->slots = w->positions + 13;
    w->units_per_slab = units_per_slab;
    w->slabs = (uint32_t)w->kv_heads * w->slots / units_per_slab + 1;
    uint64_t page_bytes = (uint64_t)page_tokens * piece * (uint64_t)w->kv_heads;
    uint64_t slab_bytes = (uint64_t)units_per_slab * piece;
    w->page_at = shuffled_offsets(3, w->pages, page_bytes);
    w->slab_at = shuffled_offsets(4, w->slabs, slab_bytes);
    w->page_memory = mem_alloc(w->pages, page_bytes);
    w->slab_memory = mem_alloc(w->slabs, slab_bytes);
    memset(w->page_memory, 0xff, w->pages * page_bytes);
    memset(w->slab_memory, 0xff, w->slabs * slab_bytes);
    w->paged = (struct kv_view){.base = w->page_memory,
                                .at = w->page_at,
                                .page_tokens = page_tokens,
                                .piece_bytes = piece,
                                .type = w->type};
    w->slotted = (struct kv_view){.base = w->slab_memory,
                                  .at = w->slab_at,
                                  .slotted = 1,
                                  .slots = w->slots,
                                  .units_per_slab = units_per_slab,
                                  .piece_bytes = piece,
                                  .type = w->type};
}

static void fill_world(struct world *w, struct compute *c)
{
    for (uint32_t p = 0; p < w->positions; p++) {
        uint32_t slots[Q_HEADS_MAX];
        for (int h = 0; h < w->kv_heads; h++)
            slots[h] = w->slot[(uint32_t)h * w->positions + p];
        size_t at = (size_t)p * (size_t)(w->kv_heads * w->head_dim);
        struct kv_place paged = {&w->paged, &w->position[p], 1}, slotted = {&w->slotted, slots, 0};
        compute_kv_write(c, &paged, w->k + at, w->v + at, 1, w->kv_heads, w->head_dim);
        compute_kv_write(c, &slotted, w->k + at, w->v + at, 1, w->kv_heads, w->head_dim);
    }
}

static struct world make_world(struct compute *c, uint32_t positions, int kv_heads, int head_dim,
                               enum dtype type)
{
    struct world w = {.kv_heads = kv_heads, .head_dim = head_dim, .positions = positions, .type = type};
    make_views(&w, type == DTYPE_BF16 ? 48 : PAGE, type == DTYPE_BF16 ? 100 : 128);
    size_t count = (size_t)positions * (size_t)(kv_heads * head_dim);
    w.k = random_floats(21, count);
    w.v = random_floats(22, count);
    w.position = mem_alloc(positions, sizeof *w.position);
    w.slot = mem_alloc((size_t)kv_heads * positions, sizeof *w.slot);
    for (uint32_t p = 0; p < positions; p++)
        w.position[p] = p;
    for (int h = 0; h < kv_heads; h++) {
        uint32_t *order = mem_alloc(w.slots, sizeof *order);
        for (uint32_t i = 0; i < w.slots; i++)
            order[i] = i;
        shuffle((uint64_t)h + 50, order, w.slots);
        memcpy(w.slot + (uint32_t)h * positions, order, positions * sizeof *order);
        mem_free(&order);
    }
    fill_world(&w, c);
    return w;
}

static void free_world(struct world *w)
{
    mem_free(&w->page_at);
    mem_free(&w->slab_at);
    mem_free(&w->page_memory);
    mem_free(&w->slab_memory);
    mem_free(&w->k);
    mem_free(&w->v);
    mem_free(&w->slot);
    mem_free(&w->position);
}

static double rounded(enum dtype type, float x)
{
    return type == DTYPE_BF16 ? (double)dtype_bf16_to_f32(dtype_f32_to_bf16(x))
                              : (double)dtype_f16_to_f32(dtype_f32_to_f16(x));
}

/* One query head over the positions of `list`. */
static void naive_head(double *out, const struct world *w, int kv_head, const float *q,
                       const struct attn_list *list, float scale)
{
    uint32_t count = list->count;
    double *score = mem_alloc(count, sizeof *score), max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        size_t at = ((size_t)(list->item ? list->item[i] : i) * (size_t)w->kv_heads + (size_t)kv_head) *
                    (size_t)w->head_dim;
        for (int d = 0; d < w->head_dim; d++)
            score[i] += (double)q[d] * rounded(w->type, w->k[at + (size_t)d]);
        score[i] *= (double)scale;
        max = score[i] > max ? score[i] : max;
    }
    memset(out, 0, (size_t)w->head_dim * sizeof *out);
    for (uint32_t i = 0; i < count; i++) {
        size_t at = ((size_t)(list->item ? list->item[i] : i) * (size_t)w->kv_heads + (size_t)kv_head) *
                    (size_t)w->head_dim;
        double e = exp(score[i] - max);
        sum += e;
        for (int d = 0; d < w->head_dim; d++)
            out[d] += e * rounded(w->type, w->v[at + (size_t)d]);
    }
    for (int d = 0; d < w->head_dim; d++)
        out[d] /= sum;
    mem_free(&score);
}

struct heads {
    int q, kv, dim;
    enum dtype type;
};

static void check_counts(struct compute *c, struct heads heads, const uint32_t *counts, int n)
{
    uint32_t most = 0;
    for (int i = 0; i < n; i++)
        most = counts[i] > most ? counts[i] : most;
    struct world w = make_world(c, most + 1, heads.kv, heads.dim, heads.type);
    size_t row = (size_t)(heads.q * heads.dim);
    float *q = random_floats(31, (size_t)n * row), *out = mem_alloc((size_t)n * row, sizeof *out);
    struct attn_list *lists = mem_alloc((size_t)n, sizeof *lists);
    struct attn_query *queries = mem_alloc((size_t)n, sizeof *queries);
    double *expected = mem_alloc((size_t)heads.dim, sizeof *expected);
    float scale = 1.0f / sqrtf((float)heads.dim);
    for (int i = 0; i < n; i++) {
        lists[i] = (struct attn_list){counts[i], NULL};
        queries[i] = (struct attn_query){&w.paged, &lists[i], 1};
    }
    memset(out, 0xff, (size_t)n * row * sizeof *out);
    compute_attention(c, out, q, queries, n, heads.q, heads.kv, heads.dim, scale);
    for (int i = 0; i < n; i++)
        for (int h = 0; h < heads.q; h++) {
            size_t at = (size_t)i * row + (size_t)(h * heads.dim);
            if (counts[i])
                naive_head(expected, &w, h / (heads.q / heads.kv), q + at, &lists[i], scale);
            else
                memset(expected, 0, (size_t)heads.dim * sizeof *expected);
            for (int d = 0; d < heads.dim; d++)
                check_near(out[at + (size_t)d], expected[d], 1 + fabs(expected[d]), 3e-6, "attention",
                           at + (size_t)d);
        }
    mem_free(&q);
    mem_free(&out);
    mem_free(&lists);
    mem_free(&queries);
    mem_free(&expected);
    free_world(&w);
}

/* The weights themselves, of lists of positions and of slots: each against a softmax in double. */
static void check_weights(struct compute *c, struct heads heads, uint32_t count)
{
    struct world w = make_world(c, count + 40, heads.kv, heads.dim, heads.type);
    size_t stride = count + 3;
    float *q = random_floats(41, (size_t)(heads.q * heads.dim)),
          *out = mem_alloc((size_t)heads.q * stride, sizeof *out), scale = 1.0f / sqrtf((float)heads.dim);
    uint32_t *position = mem_alloc(count, sizeof *position);
    uint32_t *slot = mem_alloc((size_t)heads.kv * count, sizeof *slot);
    struct attn_list paged = {count, position}, *slotted = mem_alloc((size_t)heads.kv, sizeof *slotted);
    for (uint32_t i = 0; i < count; i++)
        position[i] = i + i * 40 / count;
    for (int h = 0; h < heads.kv; h++) {
        slotted[h] = (struct attn_list){count, slot + (uint32_t)h * count};
        for (uint32_t i = 0; i < count; i++)
            slot[(uint32_t)h * count + i] = w.slot[(uint32_t)h * w.positions + position[i]];
    }
    const struct attn_query queries[] = {{&w.paged, &paged, 1}, {&w.slotted, slotted, 0}};
    double *expected = mem_alloc(count, sizeof *expected);
    for (int form = 0; form < 2; form++) {
        memset(out, 0xff, (size_t)heads.q * stride * sizeof *out);
        compute_attention_weights(c, out, stride, q, &queries[form], heads.q, heads.kv, heads.dim, scale);
        for (int h = 0; h < heads.q; h++) {
            double sum = 0;
            for (uint32_t i = 0; i < count; i++) {
                size_t at = ((size_t)position[i] * (size_t)heads.kv + (size_t)(h / (heads.q / heads.kv))) *
                            (size_t)heads.dim;
                double score = 0;
                for (int d = 0; d < heads.dim; d++)
                    score += (double)q[h * heads.dim + d] * rounded(w.type, w.k[at + (size_t)d]);
                sum += expected[i] = exp(score * (double)scale);
            }
            for (uint32_t i = 0; i < count; i++)
                check_near(out[(size_t)h * stride + i], expected[i] / sum, expected[i] / sum, 2e-5, "weights",
                           (size_t)h * stride + i);
        }
    }
    mem_free(&q);
    mem_free(&out);
    mem_free(&position);
    mem_free(&slot);
    mem_free(&slotted);
    mem_free(&expected);
    free_world(&w);
}

static void attention_weights_are_near_double(void **state)
{
    (void)state;
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        check_weights(c, (struct heads){9, 3, 64, DTYPE_F16}, 700);
        check_weights(c, (struct heads){4, 4, 16, DTYPE_BF16}, 256);
        check_weights(c, (struct heads){4, 2, 20, DTYPE_F16}, 1);
        compute_free(&c);
    }
}

static void attention_is_near_double(void **state)
{
    (void)state;
    static const uint32_t counts[] = {0, 1, PAGE - 1, PAGE, PAGE + 1, 255, 256, 257, 3, 700, 1030};
    static const struct heads shapes[] = {{9, 3, 64, DTYPE_F16},   {8, 4, 8, DTYPE_F16},
                                          {4, 1, 128, DTYPE_BF16}, {2, 2, 72, DTYPE_F16},
                                          {5, 1, 12, DTYPE_BF16},  {16, 2, 96, DTYPE_F16}};
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
            check_counts(c, shapes[s], counts, sizeof counts / sizeof *counts);
            for (size_t i = 0; i < 7; i++)
                check_counts(c, shapes[s], counts + i, 1);
        }
        compute_free(&c);
    }
}

/* More query heads on one KV head than a tile of rows holds. */
static void attention_of_a_large_group(void **state)
{
    (void)state;
    static const uint32_t counts[] = {300, 1, 299};
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        check_counts(c, (struct heads){71, 1, 16, DTYPE_F16}, counts, 3);
        compute_free(&c);
    }
}

/* A sparse list as positions of pages, as slots, and (when it names everything) as the identity. */
static void check_same_bits(struct compute *c, struct world *w, uint32_t every, int q_heads)
{
    uint32_t count = 0;
    uint32_t *positions = mem_alloc(w->positions, sizeof *positions);
    uint32_t *slots = mem_alloc((size_t)w->kv_heads * w->positions, sizeof *slots);
    for (uint32_t p = 0; p < w->positions; p += every)
        positions[count++] = p;
    struct attn_list lists[Q_HEADS_MAX], shared = {count, positions}, identity = {count, NULL};
    for (int h = 0; h < w->kv_heads; h++) {
        for (uint32_t i = 0; i < count; i++)
            slots[(uint32_t)h * count + i] = w->slot[(uint32_t)h * w->positions + positions[i]];
        lists[h] = (struct attn_list){count, slots + (uint32_t)h * count};
    }
    size_t row = (size_t)(q_heads * w->head_dim);
    float *q = random_floats(41, row), *a = mem_alloc(row, sizeof *a), *b = mem_alloc(row, sizeof *b);
    struct attn_query paged = {&w->paged, &shared, 1}, slotted = {&w->slotted, lists, 0};
    struct attn_query full = {&w->paged, &identity, 1};
    compute_attention(c, a, q, &paged, 1, q_heads, w->kv_heads, w->head_dim, 0.1f);
    assert_true(isfinite(a[0]));
    compute_attention(c, b, q, &slotted, 1, q_heads, w->kv_heads, w->head_dim, 0.1f);
    assert_memory_equal(a, b, row * sizeof *a);
    if (every == 1) {
        compute_attention(c, b, q, &full, 1, q_heads, w->kv_heads, w->head_dim, 0.1f);
        assert_memory_equal(a, b, row * sizeof *a);
    }
    mem_free(&positions);
    mem_free(&slots);
    mem_free(&q);
    mem_free(&a);
    mem_free(&b);
}

static void attention_ignores_where_pieces_lie(void **state)
{
    (void)state;
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        for (int bf16 = 0; bf16 < 2; bf16++) {
            struct world w = make_world(c, 1111, 3, 64, bf16 ? DTYPE_BF16 : DTYPE_F16);
            for (uint32_t every = 1; every <= 3; every++)
                check_same_bits(c, &w, every, 9);
            free_world(&w);
        }
        compute_free(&c);
    }
}

/* A causal chunk of queries at once, each alone, on every number of threads: one result per path. */
static void check_company(int q_heads, int kv_heads, int head_dim)
{
    enum { N = 70, BEFORE = 235 };
    size_t row = (size_t)(q_heads * head_dim);
    float *q = random_floats(51, N * row), *out = mem_alloc(N * row, sizeof *out);
    float *alone = mem_alloc(N * row, sizeof *alone);
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        struct world w = make_world(c, BEFORE + N, kv_heads, head_dim, DTYPE_F16), other = w;
        struct attn_list lists[N];
        struct attn_query queries[N];
        for (int i = 0; i < N; i++) {
            lists[i] = (struct attn_list){(uint32_t)(BEFORE + 1 + i), i == 33 ? w.position : NULL};
            queries[i] = (struct attn_query){i == 40 ? &other.paged : &w.paged, &lists[i], 1};
        }
        if (first_of_path(v))
            for (int i = 0; i < N; i++)
                compute_attention(c, alone + (size_t)i * row, q + (size_t)i * row, &queries[i], 1, q_heads,
                                  kv_heads, head_dim, 0.125f);
        static const int sizes[] = {1, 2, 3, 5, 8, 9, N};
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
            memset(out, 0xff, N * row * sizeof *out);
            compute_attention(c, out, q, queries, sizes[s], q_heads, kv_heads, head_dim, 0.125f);
            assert_memory_equal(out, alone, (size_t)sizes[s] * row * sizeof *out);
        }
        free_world(&w);
        compute_free(&c);
    }
    mem_free(&q);
    mem_free(&out);
    mem_free(&alone);
}

static void attention_ignores_company_and_threads(void **state)
{
    (void)state;
    check_company(9, 3, 64);
    check_company(4, 4, 40);
    check_company(8, 1, 128);
}

/* A row that was never loaded must end the sequence, and only queries that list it. */
static void attention_shows_nan_to_those_who_listed_it(void **state)
{
    (void)state;
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        struct world w = make_world(c, 300, 1, 64, DTYPE_F16);
        enum { N = 4, BAD = 298 };
        uint8_t *piece = w.page_memory + w.page_at[BAD / PAGE] + (uint64_t)(BAD % PAGE) * w.paged.piece_bytes;
        for (int half = 0; half < 2; half++) {
            memset(piece + half * 128, 0xff, 128);
            float *q = random_floats(61, N * 192), out[N * 192];
            struct attn_list lists[N];
            struct attn_query queries[N];
            for (int i = 0; i < N; i++) {
                lists[i] = (struct attn_list){(uint32_t)(297 + i), NULL};
                queries[i] = (struct attn_query){&w.paged, &lists[i], 1};
            }
            compute_attention(c, out, q, queries, N, 3, 1, 64, 0.125f);
            for (int i = 0; i < N * 192; i++)
                assert_int_equal(isnan(out[i]) != 0, i / 192 >= 2);
            mem_free(&q);
            fill_world(&w, c);
        }
        free_world(&w);
        compute_free(&c);
    }
}

static void kv_write_rounds_to_nearest_even(void **state)
{
    (void)state;
    static const float values[] = {1.0f,        1.00048828125f, 1.00146484375f, -65504,
                                   65520,       1e-8f,          5.9604645e-8f,  -1e-24f,
                                   3.14159265f, 1.00390625f,    1.01171875f};
    enum { DIM = sizeof values / sizeof *values };
    for (size_t v = 0; v < VARIANTS; v++) {
        struct compute *c = make_compute(&variants[v]);
        if (!c)
            continue;
        for (int bf16 = 0; bf16 < 2; bf16++) {
            uint8_t memory[2][4 * DIM + 1];
            memset(memory, 0x55, sizeof memory);
            uint64_t at = 1; /* an odd address */
            struct kv_view kv = {.base = memory[0],
                                 .at = &at,
                                 .page_tokens = 1,
                                 .piece_bytes = 4 * DIM,
                                 .type = bf16 ? DTYPE_BF16 : DTYPE_F16};
            uint32_t item = 0;
            struct kv_place place = {&kv, &item, 1};
            compute_kv_write(c, &place, values, values, 1, 1, DIM);
            for (size_t i = 0; i < 2 * DIM; i++) {
                uint16_t got;
                memcpy(&got, memory[0] + 1 + 2 * i, sizeof got);
                float x = values[i % DIM];
                assert_int_equal(got, bf16 ? dtype_f32_to_bf16(x) : dtype_f32_to_f16(x));
            }
            assert_int_equal(memory[0][0], 0x55);
            assert_int_equal(memory[1][0], 0x55);
        }
        compute_free(&c);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_is_near_double),
        cmocka_unit_test(attention_weights_are_near_double),
        cmocka_unit_test(attention_of_a_large_group),
        cmocka_unit_test(attention_ignores_where_pieces_lie),
        cmocka_unit_test(attention_ignores_company_and_threads),
        cmocka_unit_test(attention_shows_nan_to_those_who_listed_it),
        cmocka_unit_test(kv_write_rounds_to_nearest_even),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
