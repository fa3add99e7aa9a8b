/* Attention over lists and prompts against the CPU's, bit-equality across layouts and company, bad indices.
 */
#include <cuda_runtime_api.h>
#include <errno.h>

#include "tests/gpu/gpu_test.h"

enum { PAGE = 64, ROWS_MAX = 16 };

/* Some sequences with `capacity` positions each, in pages and in slots, on both sides. */
struct cache {
    enum dtype type;
    uint32_t rows, kv_heads, dim, capacity, piece, pages, slabs, units;
    uint8_t *paged, *slotted; /* host */
    uint64_t *page_at, *slab_at;
    struct cuda_kv_view device_paged, device_slotted;
    struct kv_view view[ROWS_MAX];
};

static void put(const struct cache *c, uint8_t *at)
{
    for (uint32_t d = 0; d < 2 * c->dim; d++) {
        float x = gpu_normal();
        uint16_t v = c->type == DTYPE_BF16 ? dtype_f32_to_bf16(x) : dtype_f32_to_f16(x);
        memcpy(at + 2 * d, &v, 2);
    }
}

static uint8_t *piece_at(const struct cache *c, bool slotted, uint32_t row, uint32_t head, uint32_t item)
{
    if (!slotted)
        return c->paged + c->page_at[row * c->pages + item / PAGE] + (head * PAGE + item % PAGE) * c->piece;
    uint64_t unit = (uint64_t)head * c->capacity + item;
    return c->slotted + c->slab_at[row * c->slabs + unit / c->units] + unit % c->units * c->piece;
}

/* Slot of a position: an odd multiple spreads them. */
static uint32_t slot_of(const struct cache *c, uint32_t position)
{
    uint32_t step = 7;
    while (c->capacity % step == 0)
        step += 2;
    return (uint32_t)((uint64_t)position * step % c->capacity);
}

static uint64_t *shuffled(uint32_t entries, uint64_t bytes)
{
    uint64_t *at = gpu_host(entries * 8);
    for (uint32_t i = 0; i < entries; i++)
        at[i] = i * bytes;
    for (uint32_t i = entries; i-- > 1;) {
        uint32_t j = gpu_random() % (i + 1);
        uint64_t swap = at[i];
        at[i] = at[j], at[j] = swap;
    }
    return at;
}

/* Every piece is filled; what lies past `used` positions is NaN. */
static struct cache make_cache(enum dtype type, uint32_t rows, uint32_t kv_heads, uint32_t dim,
                               uint32_t capacity)
{
    struct cache c = {
        .type = type, .rows = rows, .kv_heads = kv_heads, .dim = dim, .piece = 4 * dim, .units = 96};
    c.pages = (capacity + PAGE - 1) / PAGE + 1;
    c.capacity = capacity;
    c.slabs = (kv_heads * capacity + c.units - 1) / c.units;
    uint64_t page_bytes = (uint64_t)kv_heads * PAGE * c.piece, slab_bytes = (uint64_t)c.units * c.piece;
    uint64_t paged_bytes = rows * c.pages * page_bytes, slotted_bytes = rows * c.slabs * slab_bytes;
    c.page_at = shuffled(rows * c.pages, page_bytes);
    c.slab_at = shuffled(rows * c.slabs, slab_bytes);
    c.paged = gpu_host(paged_bytes);
    c.slotted = gpu_host(slotted_bytes);
    memset(c.paged, 0xff, paged_bytes);
    memset(c.slotted, 0xff, slotted_bytes);
    for (uint32_t r = 0; r < rows; r++)
        for (uint32_t h = 0; h < kv_heads; h++)
            for (uint32_t p = 0; p < capacity; p++) {
                put(&c, piece_at(&c, false, r, h, p));
                memcpy(piece_at(&c, true, r, h, slot_of(&c, p)), piece_at(&c, false, r, h, p), c.piece);
            }
    struct cuda_kv_view kv = {.base = gpu_upload(c.paged, paged_bytes),
                              .device_bytes = paged_bytes,
                              .at = gpu_upload(c.page_at, rows * c.pages * 8),
                              .row_stride = c.pages,
                              .at_count = c.pages,
                              .page_tokens = PAGE,
                              .piece_bytes = c.piece,
                              .type = type};
    c.device_paged = kv;
    kv.base = gpu_upload(c.slotted, slotted_bytes);
    kv.device_bytes = slotted_bytes;
    kv.at = gpu_upload(c.slab_at, rows * c.slabs * 8);
    kv.row_stride = kv.at_count = c.slabs;
    kv.slotted = 1;
    kv.slots = capacity;
    kv.units_per_slab = c.units;
    c.device_slotted = kv;
    for (uint32_t r = 0; r < rows; r++)
        c.view[r] = (struct kv_view){c.paged, c.page_at + r * c.pages, 0, PAGE, 0, 0, c.piece, type};
    return c;
}

/* Ascending random subset of [0, capacity) with `count` members. */
static void subset(uint32_t *list, uint32_t count, uint32_t capacity)
{
    uint32_t taken = 0;
    for (uint32_t p = 0; p < capacity && taken < count; p++)
        if (gpu_random() % (capacity - p) < count - taken)
            list[taken++] = p;
}

struct lists {
    uint32_t *counts, *positions, *slots; /* [rows][heads], [rows][heads][list_max] */
    void *device_counts, *device_positions, *device_slots;
    uint32_t list_max;
};

static struct lists make_lists(const struct cache *c, const uint32_t *counts, uint32_t list_max)
{
    uint32_t lists = c->rows * c->kv_heads;
    struct lists l = {.counts = gpu_host(lists * 4), .list_max = list_max};
    l.positions = gpu_host((size_t)lists * list_max * 4);
    l.slots = gpu_host((size_t)lists * list_max * 4);
    for (uint32_t i = 0; i < lists; i++) {
        l.counts[i] = counts[i % c->rows + (i / c->rows) % 2];
        subset(l.positions + (size_t)i * list_max, l.counts[i], c->capacity);
        for (uint32_t j = 0; j < l.counts[i]; j++)
            l.slots[(size_t)i * list_max + j] = slot_of(c, l.positions[(size_t)i * list_max + j]);
    }
    l.device_counts = gpu_upload(l.counts, lists * 4);
    l.device_positions = gpu_upload(l.positions, (size_t)lists * list_max * 4);
    l.device_slots = gpu_upload(l.slots, (size_t)lists * list_max * 4);
    return l;
}

static struct cuda_attn make_attn(const struct cache *c, const struct lists *l, bool slotted, uint32_t group,
                                  const float *q)
{
    uint32_t q_heads = c->kv_heads * group;
    struct cuda_attn a = {.kv = slotted ? c->device_slotted : c->device_paged,
                          .out_type = DTYPE_F32,
                          .q = q,
                          .q_stride = (uint64_t)q_heads * c->dim,
                          .counts = l->device_counts,
                          .count_stride = c->kv_heads,
                          .items = slotted ? l->device_slots : l->device_positions,
                          .item_stride = (uint64_t)c->kv_heads * l->list_max,
                          .row_count = c->rows,
                          .list_max = l->list_max,
                          .n = c->rows,
                          .q_heads = q_heads,
                          .kv_heads = c->kv_heads,
                          .head_dim = c->dim,
                          .scale = 1 / sqrtf((float)c->dim)};
    a.out = gpu_alloc((size_t)c->rows * q_heads * c->dim * 4);
    a.work = gpu_alloc(cuda_attn_work_bytes(a.n, q_heads, c->dim, l->list_max));
    return a;
}

static void reference(float *out, const struct cache *c, const struct lists *l, uint32_t group,
                      const float *q)
{
    struct attn_query queries[ROWS_MAX];
    struct attn_list lists[ROWS_MAX * 8];
    for (uint32_t i = 0; i < c->rows * c->kv_heads; i++)
        lists[i] = (struct attn_list){l->counts[i], l->positions + (size_t)i * l->list_max};
    for (uint32_t r = 0; r < c->rows; r++)
        queries[r] = (struct attn_query){&c->view[r], lists + r * c->kv_heads, 0};
    compute_attention(gpu_compute, out, q, queries, (int)c->rows, (int)(c->kv_heads * group),
                      (int)c->kv_heads, (int)c->dim, 1 / sqrtf((float)c->dim));
}

static void check_lists(enum dtype type, uint32_t dim, uint32_t group)
{
    static const uint32_t counts[] = {0, 1, 15, 63, 64, 65, 255, 256, 257, 600, 512, 17};
    struct cache c = make_cache(type, COUNT_OF(counts) - 1, 2, dim, 640);
    struct lists l = make_lists(&c, counts, 620);
    size_t row = (size_t)c.kv_heads * group * dim, count = c.rows * row;
    float *q = gpu_normals(count, 2), *device_q = gpu_upload(q, count * 4), *ref = gpu_host(count * 4);
    reference(ref, &c, &l, group, q);
    struct cuda_attn a = make_attn(&c, &l, false, group, device_q);
    EXPECT(cuda_attn(&a, NULL) == 0);
    float *out = gpu_download(a.out, count * 4);
    gpu_compare("paged", out, ref, count, type == DTYPE_F16 ? 3e-6 : 3e-5);
    struct cuda_attn slotted = make_attn(&c, &l, true, group, device_q);
    EXPECT(cuda_attn(&slotted, NULL) == 0);
    gpu_equal("slotted", gpu_download(slotted.out, count * 4), out, count * 4);
    /* The last row alone, with a longer grid: the same bits. */
    uint32_t last = c.rows - 1;
    a.rows = gpu_upload(&last, 4);
    a.q = device_q + last * row;
    a.n = 1;
    EXPECT(cuda_attn(&a, NULL) == 0);
    gpu_equal("alone", gpu_download(a.out, row * 4), out + last * row, row * 4);
    a.out_type = DTYPE_BF16;
    EXPECT(cuda_attn(&a, NULL) == 0);
    gpu_compare("bf16", gpu_from_bf16(gpu_download(a.out, row * 2), row), ref + last * row, row, 4e-3);
}

static void test_attn_lists(void)
{
    static const uint32_t groups[] = {1, 2, 3, 4, 5, 7, 8};
    for (int i = 0; i < (gpu_small ? 2 : COUNT_OF(groups)); i++)
        for (int v = 0; v < 4; v++)
            check_lists(v & 1 ? DTYPE_F16 : DTYPE_BF16, v & 2 ? 128 : 64, groups[i]);
}

static void test_attn_identity(void)
{
    enum { ROWS = 5, GROUP = 4, DIM = 128 };
    uint32_t capacity = gpu_small ? 700 : 5000, counts[ROWS + 1] = {1, 64, 300, capacity, 0, 0};
    struct cache c = make_cache(DTYPE_BF16, ROWS, 1, DIM, capacity);
    uint32_t *all = gpu_host(capacity * 4), list_max = capacity;
    for (uint32_t i = 0; i < capacity; i++)
        all[i] = i;
    struct lists l = make_lists(&c, counts, list_max);
    size_t count = (size_t)ROWS * GROUP * DIM;
    float *q = gpu_normals(count, 2), *device_q = gpu_upload(q, count * 4), *ref = gpu_host(count * 4);
    for (uint32_t r = 0; r < ROWS; r++) {
        l.counts[r] = counts[r];
        memcpy(l.positions + (size_t)r * list_max, all, counts[r] * 4);
    }
    l.device_counts = gpu_upload(l.counts, ROWS * 4);
    l.device_positions = gpu_upload(l.positions, (size_t)ROWS * list_max * 4);
    reference(ref, &c, &l, GROUP, q);
    struct cuda_attn a = make_attn(&c, &l, false, GROUP, device_q);
    EXPECT(cuda_attn(&a, NULL) == 0);
    float *out = gpu_download(a.out, count * 4);
    gpu_compare("lists", out, ref, count, 3e-5);
    a.settled = 1;
    a.out = gpu_alloc(count * 4);
    EXPECT(cuda_attn(&a, NULL) == 0 && cuda_attn(&a, NULL) == 0);
    gpu_equal("settled", gpu_download(a.out, count * 4), out, count * 4);
    a.items = NULL;
    EXPECT(cuda_attn(&a, NULL) == 0);
    gpu_equal("identity", gpu_download(a.out, count * 4), out, count * 4);
}

/* More items than one wave of blocks, most of them empty: blocks go from item to item. The same lists in a
 * launch of their own size: the same bits. */
static void test_attn_many_items(void)
{
    static const uint32_t counts[ROWS_MAX + 2] = {300, 0,   1, 256, 257, 64,  0, 299, 12,
                                                  300, 128, 0, 5,   77,  255, 3, 9,   0};
    uint32_t kv_heads = gpu_small ? 2 : 8, list_max = gpu_small ? 300 : 65536;
    struct cache c = make_cache(DTYPE_BF16, ROWS_MAX, kv_heads, 64, 310);
    struct lists l = make_lists(&c, counts, 300);
    size_t count = (size_t)ROWS_MAX * kv_heads * 4 * 64;
    float *q = gpu_normals(count, 2), *device_q = gpu_upload(q, count * 4), *ref = gpu_host(count * 4);
    reference(ref, &c, &l, 4, q);
    struct cuda_attn a = make_attn(&c, &l, false, 4, device_q);
    EXPECT(cuda_attn(&a, NULL) == 0);
    float *out = gpu_download(a.out, count * 4);
    gpu_compare("own size", out, ref, count, 3e-5);
    uint32_t *wide = gpu_host((size_t)ROWS_MAX * kv_heads * list_max * 4);
    for (uint32_t i = 0; i < ROWS_MAX * kv_heads; i++)
        memcpy(wide + (size_t)i * list_max, l.positions + (size_t)i * l.list_max, l.counts[i] * 4);
    a.items = gpu_upload(wide, (size_t)ROWS_MAX * kv_heads * list_max * 4);
    a.item_stride = (uint64_t)kv_heads * list_max;
    a.list_max = list_max;
    a.out = gpu_alloc(count * 4);
    a.work = gpu_alloc(cuda_attn_work_bytes(ROWS_MAX, kv_heads * 4, 64, list_max));
    EXPECT(cuda_attn(&a, NULL) == 0);
    gpu_equal("sized for more", gpu_download(a.out, count * 4), out, count * 4);
}

/* Lists of so many chunks that a merge takes several rounds: ranges longer than one batch of parts, one more
 * than that, and ranges with nothing in them. */
static void check_merge(enum dtype type, uint32_t dim, const uint32_t *groups, int group_count)
{
    enum { ROWS = 3, LONGEST = 1 };
    uint32_t longest = gpu_small ? 8193 : 20000, counts[ROWS + 1] = {2300, longest, 8193, 0};
    struct cache c = make_cache(type, ROWS, 1, dim, longest + 100);
    struct lists l = make_lists(&c, counts, longest);
    for (int i = 0; i < group_count; i++) {
        size_t row = (size_t)groups[i] * dim, count = ROWS * row;
        float *q = gpu_normals(count, 2), *device_q = gpu_upload(q, count * 4), *ref = gpu_host(count * 4);
        reference(ref, &c, &l, groups[i], q);
        struct cuda_attn a = make_attn(&c, &l, false, groups[i], device_q);
        EXPECT(cuda_attn(&a, NULL) == 0);
        float *out = gpu_download(a.out, count * 4);
        for (int r = 0; r < ROWS; r++)
            gpu_compare("merged", out + r * row, ref + r * row, row, 3e-5);
        struct cuda_attn slotted = make_attn(&c, &l, true, groups[i], device_q);
        EXPECT(cuda_attn(&slotted, NULL) == 0);
        gpu_equal("merged of slots", gpu_download(slotted.out, count * 4), out, count * 4);
        /* One query: with an odd number of heads the last block has half its work. */
        uint32_t alone = LONGEST;
        a.rows = gpu_upload(&alone, 4);
        a.q = device_q + LONGEST * row;
        a.n = 1;
        a.out = gpu_alloc(count * 4);
        EXPECT(cuda_attn(&a, NULL) == 0);
        memset(ref, 0xff, count * 4); /* as gpu_alloc left what nobody may write */
        memcpy(ref, out + LONGEST * row, row * 4);
        gpu_equal("merged alone", gpu_download(a.out, count * 4), ref, count * 4);
    }
}

static void test_attn_merge(void)
{
    static const uint32_t groups[] = {3, 1, 8};
    check_merge(DTYPE_BF16, 64, groups, gpu_small ? 1 : COUNT_OF(groups));
    if (!gpu_small)
        check_merge(DTYPE_F16, 128, groups, COUNT_OF(groups));
}

/* A row that nobody loaded must show; tables full of nonsense must do no harm. */
static void test_attn_bad_input(void)
{
    uint32_t counts[] = {40, 40, 40};
    struct cache c = make_cache(DTYPE_F16, 2, 2, 64, 128);
    struct lists l = make_lists(&c, counts, 64);
    size_t count = 2 * 2 * 4 * 64;
    float *device_q = gpu_upload(gpu_normals(count, 1), count * 4);
    struct cuda_attn a = make_attn(&c, &l, false, 4, device_q);
    l.positions[3] = 130; /* past the last position: a NaN row */
    a.items = gpu_upload(l.positions, 2 * 2 * 64 * 4);
    EXPECT(cuda_attn(&a, NULL) == 0);
    float *out = gpu_download(a.out, count * 4);
    EXPECT(isnan(out[0]) && !isnan(out[count - 1]));
    uint64_t *junk = gpu_host(4096);
    for (int i = 0; i < 512; i++)
        junk[i] = (uint64_t)gpu_random() << 32 | gpu_random();
    a.items = gpu_upload(junk, 4096);
    a.counts = gpu_upload(junk, 4096);
    EXPECT(cuda_attn(&a, NULL) == 0);
    a.kv.at = gpu_upload(junk, 4096);
    EXPECT(cuda_attn(&a, NULL) == 0);
    a.kv = c.device_slotted;
    a.kv.at = gpu_upload(junk, 4096);
    a.rows = gpu_upload(junk, 4096);
    EXPECT(cuda_attn(&a, NULL) == 0);
    EXPECT(cudaDeviceSynchronize() == cudaSuccess);
    a.head_dim = 96;
    EXPECT(cuda_attn(&a, NULL) == -EINVAL);
}

/* Pieces past 2^31 elements and 2^33 bytes from the base. */
static void test_attn_far(void)
{
    enum { COUNT = 300, GROUP = 4, DIM = 128 };
    uint32_t counts[] = {COUNT, COUNT};
    struct cache c = make_cache(DTYPE_BF16, 1, 1, DIM, COUNT + 20);
    struct lists l = make_lists(&c, counts, COUNT);
    size_t count = GROUP * DIM;
    float *q = gpu_normals(count, 2), *ref = gpu_host(count * 4);
    uint64_t far = 9000000000ull / 16 * 16, bytes = c.device_paged.device_bytes;
    uint8_t *memory = NULL;
    if (gpu_small || cudaMalloc((void **)&memory, far + bytes) != cudaSuccess)
        return;
    EXPECT(cudaMemcpy(memory + far, c.paged, bytes, cudaMemcpyHostToDevice) == cudaSuccess);
    for (uint32_t i = 0; i < c.pages; i++)
        c.page_at[i] += far;
    struct cuda_attn a = make_attn(&c, &l, false, GROUP, gpu_upload(q, count * 4));
    a.kv.base = memory;
    a.kv.device_bytes = far + bytes;
    a.kv.at = gpu_upload(c.page_at, c.pages * 8);
    for (uint32_t i = 0; i < c.pages; i++)
        c.page_at[i] -= far;
    reference(ref, &c, &l, GROUP, q);
    EXPECT(cuda_attn(&a, NULL) == 0);
    gpu_compare("far", gpu_download(a.out, count * 4), ref, count, 3e-5);
    cudaFree(memory);
}

struct prompt {
    struct cache c;
    uint32_t group, tokens;
    int hopper;
    float *q, *device_q;
};

static float *run_prefill(const struct prompt *p, const struct cuda_span *spans, uint32_t count,
                          uint32_t span_max)
{
    size_t floats = (size_t)p->tokens * p->c.kv_heads * p->group * p->c.dim;
    struct cuda_prefill f = {.kv = p->c.device_paged,
                             .out = gpu_alloc(floats * 4),
                             .out_type = DTYPE_F32,
                             .q = p->device_q,
                             .q_stride = (uint64_t)p->c.kv_heads * p->group * p->c.dim,
                             .spans = gpu_upload(spans, count * sizeof *spans),
                             .span_count = count,
                             .span_max = span_max,
                             .row_count = p->c.rows,
                             .q_heads = p->c.kv_heads * p->group,
                             .kv_heads = p->c.kv_heads,
                             .head_dim = p->c.dim,
                             .scale = 1 / sqrtf((float)p->c.dim),
                             .hopper = p->hopper};
    EXPECT(cuda_prefill(&f, NULL) == 0);
    return gpu_download(f.out, floats * 4);
}

/* Row 0: a prompt of 300 after 100 positions; row 1: one of 129 from the start; row 2: a single token. */
static void check_prefill(enum dtype type, uint32_t dim, uint32_t group)
{
    struct prompt p = {.c = make_cache(type, 3, 2, dim, 400), .group = group, .tokens = 430};
    size_t row = (size_t)p.c.kv_heads * group * dim, count = p.tokens * row;
    p.q = gpu_normals(count, 2);
    p.device_q = gpu_upload(p.q, count * 4);
    struct cuda_span whole[] = {{0, 0, 300, 100}, {1, 300, 129, 0}, {2, 429, 1, 65}};
    struct cuda_span cut[] = {{0, 0, 77, 100}, {0, 77, 128, 177}, {0, 205, 95, 305}, {1, 300, 1, 0},
                              {1, 301, 63, 1}, {1, 364, 65, 64},  {2, 429, 1, 65},   {9, 0, 64, 0}};
    struct attn_query *queries = gpu_host(p.tokens * sizeof *queries);
    struct attn_list *lists = gpu_host(p.tokens * sizeof *lists);
    for (int s = 0; s < 3; s++)
        for (uint32_t i = 0; i < whole[s].count; i++) {
            uint32_t t = whole[s].first + i;
            lists[t] = (struct attn_list){whole[s].position + i + 1, NULL};
            queries[t] = (struct attn_query){&p.c.view[whole[s].row], &lists[t], 1};
        }
    float *ref = gpu_host(count * 4);
    compute_attention(gpu_compute, ref, p.q, queries, (int)p.tokens, (int)(p.c.kv_heads * group),
                      (int)p.c.kv_heads, (int)dim, 1 / sqrtf((float)dim));
    for (p.hopper = 0; p.hopper <= cuda_prefill_hopper(0); p.hopper++) {
        float *out = run_prefill(&p, whole, 3, 300);
        gpu_compare(p.hopper ? "prefill hopper" : "prefill", out, ref, count,
                    type == DTYPE_F16 ? 2e-3 : 1e-2);
        gpu_equal("prefill cut", run_prefill(&p, cut, 8, 128), out, count * 4);
    }
}

static void test_prefill(void)
{
    check_prefill(DTYPE_BF16, 128, 4);
    if (gpu_small)
        return;
    check_prefill(DTYPE_F16, 128, 1);
    check_prefill(DTYPE_BF16, 64, 3);
    check_prefill(DTYPE_F16, 64, 8);
}

const struct gpu_test tests_attention[] = {{"attn_lists", test_attn_lists},
                                           {"attn_identity", test_attn_identity},
                                           {"attn_many_items", test_attn_many_items},
                                           {"attn_merge", test_attn_merge},
                                           {"attn_bad_input", test_attn_bad_input},
                                           {"attn_far", test_attn_far},
                                           {"prefill", test_prefill},
                                           {NULL, NULL}};
