/* The step of a threshold: a run's layers leave the device sequence by sequence, with one list for all of
 * them, and their pages are given behind its tables; with less and less room for slots beside pages. */
#include "tests/unit/kvstore_fake_sets.h"

enum { OPEN = 4, LAYERS = 5 }; /* of the last run, which lie in one group */

static const struct fake_open SPARSE = {
    .prompt = 300, .capacity = 700, .budget = 96, .sinks = 4, .window = 16};

static const struct gpu_api *real_api;
static struct gpu_api counting;
static uint32_t launches;

static int count_copies(const struct cuda_copies *copies, struct CUstream_st *stream)
{
    launches++;
    return real_api->copy_pieces(copies, stream);
}

static void count_launches(bool on)
{
    if (!fake_gpu)
        return;
    if (on) {
        real_api = fake_gpu->api;
        counting = *real_api;
        counting.copy_pieces = count_copies;
        launches = 0;
    }
    fake_gpu->api = on ? &counting : real_api;
}

/* Slabs that nobody else can have, so that `left` are free. */
static void take_slabs(struct planner *p, uint64_t left, uint64_t *ret_slabs, uint32_t *ret_count)
{
    *ret_count = 0;
    while (p->device.free_count > left)
        assert_int_equal(device_slab_take(&p->device, DEVICE_SLOTS, &ret_slabs[(*ret_count)++]), 0);
}

static uint32_t pages_of_run(const struct fake *f, uint32_t run)
{
    uint32_t pages = 0;
    for (uint32_t n = 0; n < OPEN; n++)
        pages += f->planner->sequences[f->sequences[n].index].pages_have[run];
    return pages;
}

static struct fake_step step_of_all(struct fake *f)
{
    struct fake_step step = {.kind = STEP_SPARSE, .selection = SELECTION_CURRENT, .entries = OPEN};
    for (uint32_t n = 0; n < OPEN; n++) {
        step.sequence[n] = &f->sequences[n];
        step.count[n] = 1;
    }
    return step;
}

static struct fake *leave_create(uint64_t seed)
{
    fake_piece_bytes = 2048; /* a page is a slab */
    struct planner_options options = fake_options();
    options.host_bytes = 256u << 20;
    options.device_bytes = 160u << 20;
    struct fake *f = fake_create(&options, seed);
    assert_int_equal(f->planner->device.pages_per_slab, 1);
    planner_force(f->planner, 3);
    for (uint32_t n = 0; n < OPEN; n++) {
        struct fake_open open = SPARSE;
        open.token_seed = n;
        fake_open(f, &f->sequences[n], 1 + n, &open);
        fake_prefill(f, &f->sequences[n]);
    }
    for (uint32_t i = 0; i < 3; i++) {
        struct fake_step step = step_of_all(f);
        fake_sparse(f, &step);
    }
    return f;
}

static void leave_free(struct fake *f)
{
    fake_free(f);
    fake_piece_bytes = sizeof(struct fake_piece);
}

static void check_all(struct fake *f)
{
    for (uint32_t i = 0; i < 3; i++) {
        struct fake_step step = step_of_all(f);
        fake_sparse(f, &step);
    }
    for (uint32_t n = 0; n < OPEN; n++) {
        assert_false(f->planner->sequences[f->sequences[n].index].failed);
        fake_check_host(f, &f->sequences[n], 0, f->sequences[n].next);
    }
}

/* With room: as far as the tables nothing is given, afterwards a piece at a time, before the step is over. */
static void test_pages_are_given_behind_the_tables(void **state)
{
    (void)state;
    struct fake *f = leave_create(51);
    struct planner *p = f->planner;
    uint32_t pages = pages_of_run(f, 2);
    assert_true(pages >= OPEN * 5);
    planner_force(p, 2);
    struct fake_step step = step_of_all(f);
    fake_select(f, &step, 0);
    count_launches(true);
    fake_post(f, &step);
    assert_true(fake_up(f, FLAG_TABLES_LATE));
    count_launches(false);
    assert_int_equal(p->residency.resident, 2);
    if (fake_gpu)
        assert_int_equal(launches, OPEN);
    assert_int_equal(pages_of_run(f, 2), pages);
    for (uint32_t n = OPEN; n > 0; n--) {
        assert_true(residency_leaving(p));
        uint32_t free = p->device.free_count, left = pages_of_run(f, 2);
        assert_true(planner_idle(p, clock_now_ns()));
        assert_true(pages_of_run(f, 2) < left); /* of one sequence */
        assert_int_equal(p->device.free_count, free + (left - pages_of_run(f, 2)) * LAYERS);
    }
    assert_false(residency_leaving(p));
    assert_int_equal(pages_of_run(f, 2), 0);
    assert_false(planner_idle(p, clock_now_ns()));
    fake_layers(f, &step, 0, f->layout.layers);
    fake_end_step(f, &step);
    check_all(f);
    planner_force(p, 3); /* and back */
    while (planner_idle(p, clock_now_ns()))
        continue;
    check_all(f);
    assert_int_equal(p->residency.resident, 3);
    leave_free(f);
}

/* A step of the threshold that leaves no slab free. What was not given in time goes when it is over; where
 * its own tables need pages, as soon as they do. */
static void test_pages_go_where_room_is_needed(void **state)
{
    (void)state;
    for (uint32_t more = 0; more < 2; more++) {
        struct fake *f = leave_create(52);
        struct planner *p = f->planner;
        uint64_t slabs[1024];
        uint32_t count;
        while (more && f->sequences[0].next % BLOCK_TOKENS) {
            struct fake_step step = step_of_all(f);
            fake_sparse(f, &step);
        }
        planner_force(p, 2);
        struct fake_step step = step_of_all(f);
        fake_select(f, &step, 0);
        take_slabs(p, p->sequences[0].slot_slabs * LAYERS * OPEN + p->residency.staging_slabs, slabs, &count);
        fake_post(f, &step);
        assert_true(fake_up(f, FLAG_TABLES_LATE));
        assert_true(more ? pages_of_run(f, 2) == 0 : p->device.free_count == 0 && pages_of_run(f, 2) > 0);
        fake_layers(f, &step, 0, f->layout.layers);
        fake_end_step(f, &step);
        assert_int_equal(pages_of_run(f, 2), 0);
        while (count)
            device_slab_give(&p->device, slabs[--count]);
        check_all(f);
        leave_free(f);
    }
}

/* From room for the slots of all sequences to room for none. */
static void test_with_less_and_less_room(void **state)
{
    (void)state;
    uint64_t slabs[1024];
    for (uint32_t way = 0; way < 6; way++) {
        struct fake *f = leave_create(60 + way);
        struct planner *p = f->planner;
        uint32_t one = p->sequences[0].slot_slabs, count;
        /* All; of one sequence and a little more; of one sequence; of one layer and all sequences, which is
         * less; a little less still; nothing. */
        const uint32_t left[] = {one * LAYERS * OPEN, one * LAYERS + 3, one * LAYERS,
                                 one * OPEN,          one * OPEN - 1,   0};
        assert_true(one * OPEN < one * LAYERS);
        planner_force(p, 2);
        struct fake_step step = step_of_all(f);
        fake_select(f, &step, 0);
        take_slabs(p, left[way] + p->residency.staging_slabs, slabs, &count);
        count_launches(true);
        fake_post(f, &step);
        assert_true(fake_up(f, FLAG_TABLES_LATE));
        count_launches(false);
        if (fake_gpu)
            assert_int_equal(launches, way < 3 ? OPEN : way == 3 ? OPEN * LAYERS : 0);
        assert_int_equal(p->residency.resident, 2);
        assert_true(way < 3 ? pages_of_run(f, 2) > 0 : pages_of_run(f, 2) == 0);
        fake_layers(f, &step, 0, f->layout.layers);
        fake_end_step(f, &step);
        while (count)
            device_slab_give(&p->device, slabs[--count]);
        check_all(f);
        leave_free(f);
    }
}

/* Several runs at once, over the bound of two groups: the higher one's pages make room for the lower one's
 * slots. */
static void test_several_runs_at_once(void **state)
{
    (void)state;
    struct fake *f = leave_create(53);
    planner_force(f->planner, 0);
    check_all(f);
    assert_int_equal(f->planner->residency.resident, 0);
    planner_force(f->planner, 3);
    while (planner_idle(f->planner, clock_now_ns()))
        continue;
    check_all(f);
    assert_int_equal(f->planner->residency.resident, 3);
    leave_free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages_are_given_behind_the_tables),
        cmocka_unit_test(test_pages_go_where_room_is_needed),
        cmocka_unit_test(test_with_less_and_less_room),
        cmocka_unit_test(test_several_runs_at_once),
    };
    return fake_run_both(tests);
}
