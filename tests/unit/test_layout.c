/* Layouts, and the headers of shared memory that follow from them: sizes, offsets, and what a header must not
 * get away with. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/arena.h"
#include "proto/control.h"

static struct kv_layout small_layout(void)
{
    struct kv_layout layout = {.model = {1, 2},
                               .layers = 30,
                               .row_heads = 3,
                               .selection_heads = 9,
                               .piece_bytes = 256,
                               .dtype = 1,
                               .context_max = 8192};
    layout_set_groups(&layout, 4);
    return layout;
}

static void a_layout_is_checked(void **state)
{
    (void)state;
    const struct kv_layout good = small_layout();
    struct err err;
    assert_int_equal(layout_check(&good, &err), 0);
    struct kv_layout l = good;
    l.layers = 0;
    assert_int_equal(layout_check(&l, &err), -EINVAL);
    assert_non_null(strstr(err.text, "layers"));
    l = good, l.layers = LIMIT_LAYERS + 1;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.row_heads = LIMIT_ROW_HEADS + 1;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.selection_heads = 10;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.selection_heads = 0;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.groups = 0;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.groups = LIMIT_GROUPS + 1;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.piece_bytes = 0;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.context_max = LIMIT_CONTEXT + 1;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.group_first_layer[0] = 1;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.group_first_layer[2] = l.group_first_layer[1];
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
    l = good, l.group_first_layer[4] = 29;
    assert_int_equal(layout_check(&l, NULL), -EINVAL);
}

static void groups_and_runs_cover_every_layer_once(void **state)
{
    (void)state;
    for (uint32_t layers = 1; layers <= LIMIT_LAYERS; layers++) {
        struct kv_layout l = small_layout();
        l.layers = layers;
        layout_set_groups(&l, layers < 4 ? layers : 4);
        assert_int_equal(layout_check(&l, NULL), 0);
        uint32_t runs = layout_runs(&l);
        assert_true(runs >= 1 && runs <= LIMIT_RUNS);
        assert_int_equal(layout_run_first(&l, 0), 0);
        assert_int_equal(layout_run_first(&l, runs), layers);
        for (uint32_t i = 0; i < layers; i++) {
            uint32_t g = layout_group_of(&l, i), r = layout_run_of(&l, i);
            assert_true(g < l.groups && i >= l.group_first_layer[g] && i < l.group_first_layer[g + 1]);
            assert_true(r < runs && i >= layout_run_first(&l, r) && i < layout_run_first(&l, r + 1));
        }
    }
}

static void every_field_moves_the_fingerprint(void **state)
{
    (void)state;
    const struct kv_layout good = small_layout();
    struct hash128 was = layout_fingerprint(&good);
    const size_t offsets[] = {
        offsetof(struct kv_layout, model.lo),
        offsetof(struct kv_layout, model.hi),
        offsetof(struct kv_layout, layers),
        offsetof(struct kv_layout, row_heads),
        offsetof(struct kv_layout, selection_heads),
        offsetof(struct kv_layout, groups),
        offsetof(struct kv_layout, piece_bytes),
        offsetof(struct kv_layout, dtype),
        offsetof(struct kv_layout, key_row_bytes),
        offsetof(struct kv_layout, context_max),
        offsetof(struct kv_layout, group_first_layer[1]),
        offsetof(struct kv_layout, host_first_layer),
    };
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++) {
        struct kv_layout l = good;
        *((uint8_t *)&l + offsets[i]) += 1;
        assert_false(hash_equal(layout_fingerprint(&l), was));
    }
    assert_true(hash_equal(layout_fingerprint(&good), was));
}

static void sizes_follow_from_the_layout(void **state)
{
    (void)state;
    struct kv_layout l = small_layout();
    l.key_row_bytes = 128;
    assert_int_equal(layout_row_bytes(&l), 30 * 256);
    assert_int_equal(layout_page_bytes(&l), 3 * 64 * 256);
    assert_int_equal(layout_block_bytes(&l), (30 * 256 * 3 + 128) * 64);
    assert_int_equal(layout_slab_bytes(&l), SLAB_BYTES_MIN);
    assert_int_equal(layout_row_at(&l, 2, 63) + layout_row_bytes(&l) + 128 * 64, layout_block_bytes(&l));
    l.row_heads = l.selection_heads = 128;
    l.piece_bytes = 65536;
    assert_int_equal(layout_slab_bytes(&l), 512u << 20);
    assert_true(layout_slab_bytes(&l) >= layout_page_bytes(&l));
}

/* An arena without the first layers: rows are shorter, pieces stand where the layers before them end. */
static void an_arena_of_some_layers(void **state)
{
    (void)state;
    struct kv_layout l = small_layout();
    struct err err;
    assert_int_equal(layout_piece_at(&l, 13), 13 * 256);
    l.host_first_layer = 12;
    assert_int_equal(layout_check(&l, &err), 0);
    assert_int_equal(layout_row_bytes(&l), 18 * 256);
    assert_int_equal(layout_block_bytes(&l), 18 * 256 * 3 * 64);
    assert_int_equal(layout_row_at(&l, 0, 1), 18 * 256);
    assert_int_equal(layout_row_at(&l, 1, 0), 64 * 18 * 256);
    assert_int_equal(layout_piece_at(&l, 12), 0);
    assert_int_equal(layout_piece_at(&l, 29) + 256, layout_row_bytes(&l));
    assert_int_equal(layout_page_bytes(&l), 3 * 64 * 256); /* of the device: as before */
    struct arena_header header;
    arena_header_init(&header, &l, 8, 100, 77);
    assert_int_equal(header.block_bytes, layout_block_bytes(&l));
    assert_int_equal(arena_header_check(&header, arena_file_bytes(&header, 0), &err), 0);
    l.host_first_layer = 30; /* none: blocks take no bytes */
    assert_int_equal(layout_check(&l, &err), 0);
    assert_int_equal(layout_block_bytes(&l), 0);
    l.host_first_layer = 31;
    assert_int_equal(layout_check(&l, &err), -EINVAL);
}

static void an_arena_header_is_checked(void **state)
{
    (void)state;
    struct kv_layout layout = small_layout();
    struct arena_header good;
    struct err err;
    arena_header_init(&good, &layout, 8, 100, 77);
    uint64_t bytes = arena_file_bytes(&good, 0);
    assert_int_equal(arena_header_check(&good, bytes, &err), 0);
    assert_int_equal(arena_header_check(&good, sizeof good - 1, NULL), -EINVAL);
    assert_int_equal(arena_header_check(&good, bytes - 1, NULL), -EINVAL);
    assert_int_equal(good.rows_at % (2u << 20), 0);
    assert_true(good.blocks_at >= good.records_at + 8ull * good.record_bytes);
    assert_true(good.rows_at >= good.blocks_at + 100 * sizeof(struct arena_block));
    for (size_t i = 0; i < offsetof(struct arena_header, blocks_present); i++) { /* every immutable byte */
        struct arena_header h = good;
        *((uint8_t *)&h + i) ^= 0x10;
        assert_true(arena_header_check(&h, bytes, NULL) < 0);
    }
    struct arena_header h = good;
    atomic_store(&h.blocks_present, 3);
    assert_int_equal(arena_header_check(&h, bytes, NULL), -EINVAL);
    assert_int_equal(arena_header_check(&h, arena_file_bytes(&h, 3), NULL), 0);
    atomic_store(&h.blocks_present, 101);
    assert_int_equal(arena_header_check(&h, UINT64_MAX, NULL), -EINVAL);
}

static struct control_header control_for(const struct kv_layout *layout)
{
    struct control_params params = {.store_epoch = 1,
                                    .decoder_epoch = 2,
                                    .device_bytes = 64 << 20,
                                    .sequences_max = 4,
                                    .list_max = 2048,
                                    .slots = 2100,
                                    .staging_tokens = 512,
                                    .first_step = 0xfffffff0};
    struct control_header header;
    control_header_init(&header, layout, &params);
    return header;
}

static void a_control_header_is_checked(void **state)
{
    (void)state;
    struct kv_layout layout = small_layout(), other = layout;
    const struct control_header good = control_for(&layout);
    assert_int_equal(control_header_check(&good, &layout, good.total_bytes, NULL), 0);
    assert_int_equal(control_header_check(&good, &layout, good.total_bytes - 1, NULL), -EINVAL);
    assert_int_equal(control_header_check(&good, &layout, 10, NULL), -EINVAL);
    other.piece_bytes = 128;
    struct err err;
    assert_int_equal(control_header_check(&good, &other, good.total_bytes, &err), -EPROTO);
    assert_non_null(strstr(err.text, "fingerprint"));
    for (size_t i = 0; i < offsetof(struct control_header, resident_layers); i++) {
        struct control_header h = good;
        *((uint8_t *)&h + i) ^= 0x10;
        assert_true(control_header_check(&h, &layout, good.total_bytes, NULL) < 0);
    }
    struct control_header moving = good; /* changes while the segment is in use */
    moving.resident_layers[3] = 7;
    assert_int_equal(control_header_check(&moving, &layout, good.total_bytes, NULL), 0);
}

/* Arrays lie in their table one behind the other: the last element of each ends before the next begins. */
static void tables_do_not_overlap(void **state)
{
    (void)state;
    struct kv_layout layout = small_layout();
    struct control_header h = control_for(&layout);
    struct table_view t = {.header = &h, .base = calloc(1, h.table_bytes)};
    assert_non_null(t.base);
    control_table_offsets(&h, &t.at);
    assert_int_equal(t.at.bytes, h.table_bytes);
    assert_int_equal(h.tables_at + 2 * h.table_bytes, h.total_bytes);
    uint32_t seq = h.sequences_max - 1;
    uint64_t list = table_list_index(&t, 1, seq, h.groups - 1, h.selection_heads - 1);
    assert_true(t.at.sequences >= sizeof(struct table_header));
    assert_true((uint8_t *)(table_sequence_at(&t, 1, seq) + 1) <= t.base + t.at.counts);
    assert_true((uint8_t *)(table_count_at(&t, list) + 1) <= t.base + t.at.writes);
    assert_true((uint8_t *)(table_write_at(&t, seq, h.groups - 1) + h.row_heads) <= t.base + t.at.pages);
    assert_true((uint8_t *)(table_pages_at(&t, seq, h.layers - 1) + h.pages_max) <= t.base + t.at.slabs);
    assert_true((uint8_t *)(table_slabs_at(&t, seq, h.layers - 1) + h.slabs_max) <= t.base + t.at.positions);
    assert_true((uint8_t *)(table_positions_at(&t, list) + h.list_max) <= t.base + t.at.slots);
    assert_true((uint8_t *)(table_slots_at(&t, list) + h.list_max) <= t.base + t.at.bytes);
    free(t.base);
    assert_int_equal(h.flags_at % 64, 0);
    assert_true(h.steps_at >= h.flags_at + FLAG_COUNT * sizeof(struct control_flag));
    assert_true(h.tables_at >= h.steps_at + STEP_RING * sizeof(struct step_record));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_layout_is_checked),
        cmocka_unit_test(groups_and_runs_cover_every_layer_once),
        cmocka_unit_test(every_field_moves_the_fingerprint),
        cmocka_unit_test(sizes_follow_from_the_layout),
        cmocka_unit_test(an_arena_of_some_layers),
        cmocka_unit_test(an_arena_header_is_checked),
        cmocka_unit_test(a_control_header_is_checked),
        cmocka_unit_test(tables_do_not_overlap),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
