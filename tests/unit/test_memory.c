/* The memory model: the paper's thresholds with its erratum mended, and properties of the exact one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "proto/memory.h"

static const struct memory_paper paper_8b = {
    .memory_bytes = 80.0 * (1 << 30),
    .model_bytes = 16.06e9,
    .head_bytes = 60e6,
    .layers = 32,
    .kv_heads = 8,
    .head_dim = 128,
    .query_groups = 4,
    .requests = 32,
    .budget = 2048,
};

static void paper_thresholds(void **state)
{
    (void)state;
    static const uint64_t want[][2] = {{0, 13391}, {8, 16520}, {16, 22033}, {24, 34332}, {32, 85988}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        assert_int_equal(memory_paper_threshold(&paper_8b, (uint32_t)want[i][0]), want[i][1]);
    struct memory_paper small = paper_8b;
    small.memory_bytes = 4.0 * (1 << 30);
    assert_int_equal(memory_paper_threshold(&small, 0), 0);
}

static struct kv_layout layout_8b(void)
{
    struct kv_layout l;
    memset(&l, 0, sizeof l);
    l.layers = 32;
    l.row_heads = l.selection_heads = 8;
    l.piece_bytes = 512;
    l.context_max = 131072;
    layout_set_groups(&l, 1);
    return l;
}

/* As the store: no more than positions, nor than numbers of 16 bits. */
static void slots_are_capped(void **state)
{
    (void)state;
    assert_int_equal(memory_slots(3072, 131072), 3072);
    assert_int_equal(memory_slots(3072, 2048), 2048);
    assert_int_equal(memory_slots(150000, 131072), LIMIT_SLOTS);
}

static void exact_is_monotonic_and_tight(void **state)
{
    (void)state;
    struct kv_layout l = layout_8b();
    struct memory_load load = {.requests = 32, .slots = 3072, .staging_tokens = 16384};
    uint64_t bytes = 40ull << 30;
    uint32_t before = 0;
    for (uint32_t resident = 32;; resident -= RUN_LAYERS) {
        uint32_t s = memory_exact_threshold(&l, &load, bytes, resident);
        uint64_t slab = layout_slab_bytes(&l);
        assert_true(memory_kept_slabs(&l, &load, s, resident) * slab <= bytes);
        assert_true(memory_device_slabs(&l, &load, s, resident) * slab <= bytes);
        if (s < l.context_max)
            assert_true(memory_kept_slabs(&l, &load, s + 1, resident) * slab > bytes);
        if (resident < 32 && resident > 0)
            assert_true(s > before);
        before = s;
        if (resident == 0)
            break;
    }
    assert_int_equal(before, l.context_max); /* all offloaded: the device no longer limits the length */
}

static void exact_counts_by_hand(void **state)
{
    (void)state;
    struct kv_layout l = layout_8b(); /* a page is 8 * 64 * 512 = 256 KiB: one slab */
    assert_int_equal(layout_slab_bytes(&l), 256 << 10);
    struct memory_load load = {.requests = 2, .slots = 1000, .staging_tokens = 640};
    assert_int_equal(memory_device_slabs(&l, &load, 640, 32), 32 * 2 * 10);
    /* 8 heads x 640 slots of 512 B = 5120 units = 10 slabs of 512; staging 2 x 4 layers x 10 pages */
    assert_int_equal(memory_device_slabs(&l, &load, 640, 28), 28 * 2 * 10 + 2 * 4 * 10 + 80);
    /* a page more a sequence, slots of a fifth layer (704 a head: 11 slabs a sequence) */
    assert_int_equal(memory_kept_slabs(&l, &load, 640, 28), 28 * 2 * 11 + 2 * 5 * 11 + 80);
    assert_int_equal(memory_kept_slabs(&l, &load, 640, 32), 32 * 2 * 11 + 2 * 11 + 80);
    assert_int_equal(memory_kept_slabs(&l, &load, 640, 0), 2 * 32 * 11 + 80);
    assert_int_equal(memory_host_bytes(&l, 2, 65), 2ull * 2 * 64 * 8 * 32 * 512);
}

/* The context, or what half of the device takes, or all but one sequence's slots. */
static void staging_by_hand(void **state)
{
    (void)state;
    struct kv_layout l = layout_8b(); /* 8 slabs for 64 positions; 32 layers of 1 slab a 64 slots */
    assert_int_equal(memory_staging_tokens(&l, UINT64_C(64) << 30, 640), l.context_max);
    uint64_t slab = layout_slab_bytes(&l);
    assert_int_equal(memory_staging_tokens(&l, 1000 * slab, 640), (1000 - 320) / 8 * 64);
    assert_int_equal(memory_staging_tokens(&l, 400 * slab, 640), 200 / 8 * 64);
    assert_int_equal(memory_staging_tokens(&l, slab, 640), 64);
}

static void runs_cover_all_layers(void **state)
{
    (void)state;
    struct kv_layout l = layout_8b();
    for (l.layers = 1; l.layers <= LIMIT_LAYERS; l.layers++) {
        uint32_t runs = layout_runs(&l);
        assert_int_equal(layout_run_first(&l, 0), 0);
        assert_int_equal(layout_run_first(&l, runs), l.layers);
        for (uint32_t layer = 0; layer < l.layers; layer++) {
            uint32_t run = layout_run_of(&l, layer);
            assert_true(layer >= layout_run_first(&l, run) && layer < layout_run_first(&l, run + 1));
        }
    }
}

/* What is kept fits when all requests are as long as they may be, and one run more does not. */
static void layers_that_never_leave(void **state)
{
    (void)state;
    struct kv_layout l = layout_8b();
    l.context_max = 34816;
    struct memory_through through = {.write_through = WRITE_THROUGH_OFFLOADED};
    uint64_t slab = layout_slab_bytes(&l);
    assert_int_equal(memory_host_bytes(&l, 32, l.context_max), UINT64_C(136) << 30);
    for (uint64_t bytes = slab; bytes < UINT64_C(160) << 30; bytes += bytes / 2) {
        struct memory_load load = {.requests = 32,
                                   .slots = 3072,
                                   .staging_tokens = memory_staging_tokens(&l, bytes / slab * slab, 3072)};
        uint32_t kept = memory_runs_kept(&l, 32, 3072, bytes, &through);
        uint64_t longest = memory_exact_threshold(&l, &load, bytes, layout_run_first(&l, kept));
        assert_true(kept == 0 || longest == l.context_max);
        if (kept < 8)
            assert_true(memory_exact_threshold(&l, &load, bytes, layout_run_first(&l, kept + 1)) <
                        l.context_max);
    }
    assert_int_equal(memory_runs_kept(&l, 32, 3072, slab, &through), 0);
    assert_int_equal(memory_runs_kept(&l, 32, 3072, UINT64_C(160) << 30, &through), 8);
    /* 24 of 32 layers are ever offloaded: three quarters of the bytes */
    l.host_first_layer = layout_run_first(&l, memory_runs_kept(&l, 32, 3072, UINT64_C(50) << 30, &through));
    assert_int_equal(l.host_first_layer, 8);
    assert_int_equal(memory_host_bytes(&l, 32, l.context_max), UINT64_C(102) << 30);
    through.offload_layers = 27;
    assert_int_equal(memory_runs_kept(&l, 32, 3072, UINT64_C(160) << 30, &through), 1);
    through.no_offload = true;
    assert_int_equal(memory_runs_kept(&l, 32, 3072, slab, &through), 8);
    through.write_through = WRITE_THROUGH_ALL;
    assert_int_equal(memory_runs_kept(&l, 32, 3072, slab, &through), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(paper_thresholds),
        cmocka_unit_test(slots_are_capped),
        cmocka_unit_test(exact_is_monotonic_and_tight),
        cmocka_unit_test(exact_counts_by_hand),
        cmocka_unit_test(staging_by_hand),
        cmocka_unit_test(runs_cover_all_layers),
        cmocka_unit_test(layers_that_never_leave),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
