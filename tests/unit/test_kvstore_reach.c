/* Host memory ahead of need: threads that touch it, and stretches registered with a GPU while steps are
 * computed. The threads can be held up before each stretch, registering can be made slow. */
#include "tests/unit/kvstore_fake_sets.h"

#include <stdatomic.h>
#include <sys/mman.h>

#include "kvstore/gather_gpu.h"
#include "kvstore/populate.h"
#include "kvstore/reach.h"
#include "link/segment.h"

enum { PAGE = 4096, STRETCH = 2 << 20 }; /* a huge page: no stretch makes another's pages */

#define FROM_NS (2 * CLOCK_MS) /* kvstore/reach.c: after a step of 8 ms, or more */
#define TO_NS   (4 * CLOCK_MS)

static atomic_bool gate_open;
static atomic_uint begun; /* stretches */

static void before_touch(void *arg, uint32_t stretch)
{
    (void)arg;
    (void)stretch;
    atomic_fetch_add(&begun, 1);
    for (int64_t deadline = clock_now_ns() + FAKE_PATIENCE; !gate_open && clock_now_ns() < deadline;)
        sched_yield();
}

static bool until(int64_t deadline)
{
    sched_yield();
    return clock_now_ns() < deadline;
}

/* ---- threads alone ---- */

static bool is_there(const uint8_t *at, uint64_t bytes)
{
    uint64_t there = 0;
    for (uint64_t page = 0; page < bytes; page += PAGE) {
        uint8_t found = 0;
        assert_int_equal(mincore((uint8_t *)(uintptr_t)at + page, PAGE, &found), 0);
        there += found & 1;
    }
    assert_true(there == 0 || there * PAGE == bytes);
    return there > 0;
}

static void wait_done(const struct populate *p, uint32_t stretch)
{
    for (int64_t deadline = clock_now_ns() + FAKE_PATIENCE; !populate_is_done(p, stretch);)
        assert_true(until(deadline));
}

static void test_threads_touch_as_far_as_told(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 3; threads++) {
        struct segment s;
        struct err err = {0};
        struct populate *p;
        uint64_t bytes = 9 * STRETCH + 3 * PAGE;
        assert_int_equal(segment_create_reserved("populated", 6 * STRETCH, bytes, &s, &err), 0);
        memset((uint8_t *)s.at + PAGE, 7, PAGE);
        struct populate_params params = {
            .at = s.at, .bytes = bytes, .stretch_bytes = STRETCH, .threads = threads};
        populate_create(&p, &params);
        populate_aim(p, 4);
        for (uint32_t i = 0; i < 4; i++)
            wait_done(p, i);
        assert_true(is_there(s.at, 4 * STRETCH));
        assert_false(is_there((uint8_t *)s.at + 4 * STRETCH, 2 * STRETCH));
        assert_int_equal(((uint8_t *)s.at)[PAGE], 7); /* nothing is written */
        assert_int_equal(((uint8_t *)s.at)[2 * PAGE], 0);
        populate_aim(p, 2); /* takes nothing back */
        populate_aim(p, 5);
        wait_done(p, 4);
        assert_false(is_there((uint8_t *)s.at + 5 * STRETCH, STRETCH));
        assert_int_equal(segment_grow(&s, bytes, &err), 0);
        populate_aim(p, UINT32_MAX); /* no further than there is */
        wait_done(p, 9);
        for (uint32_t i = 0; i < 10; i++)
            wait_done(p, i);
        populate_free(&p);
        segment_close(&s);
    }
}

/* A stretch that there is no memory for is never done; those behind it are. */
static void test_what_cannot_be_touched_is_not_done(void **state)
{
    (void)state;
    struct segment s;
    struct err err = {0};
    struct populate *p;
    assert_int_equal(segment_create_reserved("short", STRETCH / 2, 2 * STRETCH, &s, &err), 0);
    gate_open = true;
    begun = 0;
    struct populate_params params = {
        .at = s.at, .bytes = 2 * STRETCH, .stretch_bytes = STRETCH, .threads = 1, .before = before_touch};
    populate_create(&p, &params);
    populate_aim(p, 1);
    for (int64_t deadline = clock_now_ns() + FAKE_PATIENCE; begun < 1;)
        assert_true(until(deadline));
    populate_aim(p, 2);
    for (int64_t deadline = clock_now_ns() + FAKE_PATIENCE; begun < 2;) /* done with the first, then */
        assert_true(until(deadline));
    assert_false(populate_is_done(p, 0));
    populate_free(&p); /* in the middle of the second one, or behind it */
    segment_close(&s);
}

/* ---- in the planner ---- */

static const struct fake_open SPARSE = {
    .prompt = 250, .capacity = 700, .budget = 96, .sinks = 4, .window = 16};

static struct fake *reach_create(uint64_t seed, bool open_gate)
{
    gate_open = open_gate;
    begun = 0;
    fake_piece_bytes = 1024; /* 1.7 MB a block: stretches end within blocks */
    struct planner_options options = fake_options();
    options.host_bytes = 256u << 20;
    options.device_bytes = 400u << 20;
    options.before_touch = before_touch;
    return fake_create(&options, seed);
}

static void reach_free(struct fake *f)
{
    gate_open = true;
    fake_free(f);
    fake_piece_bytes = sizeof(struct fake_piece);
}

static struct gather_gpu_reached reached(const struct fake *f)
{
    return gather_gpu_reached(f->planner->gather.gpu);
}

static void open_all(struct fake *f, const struct fake_open *open)
{
    for (uint32_t n = 0; n < FAKE_SEQUENCES; n++) {
        struct fake_open own = *open;
        own.token_seed = n;
        fake_open(f, &f->sequences[n], 1 + n, &own);
        fake_prefill(f, &f->sequences[n]);
    }
}

static struct fake_step step_of_all(struct fake *f)
{
    struct fake_step step = {.kind = STEP_SPARSE, .selection = SELECTION_CURRENT, .entries = FAKE_SEQUENCES};
    for (uint32_t n = 0; n < FAKE_SEQUENCES; n++) {
        step.sequence[n] = &f->sequences[n];
        step.count[n] = 1;
    }
    return step;
}

/* As far as its tables; the planner is done with it until KV_WRITTEN. */
static struct fake_step begin_step(struct fake *f)
{
    struct fake_step step = step_of_all(f);
    fake_select(f, &step, 0);
    fake_post(f, &step);
    assert_true(fake_up(f, FLAG_TABLES_LATE));
    f->planner->step.took_ns = 10 * CLOCK_MS; /* the one before */
    f->planner->step.planned_ns = f->planner->step.seen_ns;
    return step;
}

static void end_step(struct fake *f, const struct fake_step *step)
{
    fake_layers(f, step, 0, f->layout.layers);
    fake_end_step(f, step);
}

/* All that is wanted, as if the window of the step in flight had no end. */
static void reach_all(struct fake *f)
{
    int64_t again = 0, deadline = clock_now_ns() + FAKE_PATIENCE, now = f->planner->step.seen_ns + FROM_NS;
    while (again != INT64_MAX) {
        f->planner->step.reached = false;
        again = reach_step(f->planner, now);
        assert_true(until(deadline));
    }
}

static uint32_t blocks_of(const struct fake *f, uint64_t bytes)
{
    return (uint32_t)(bytes / f->planner->blocks.block_bytes);
}

/* While the threads stand still before the first stretch steps are planned, and all is right; whatever a step
 * needs is touched in it then, and nothing is registered ahead. */
static void test_steps_go_on_while_memory_is_touched(void **state)
{
    (void)state;
    struct fake *f = reach_create(41, false);
    open_all(f, &SPARSE);
    while (planner_idle(f->planner, clock_now_ns())) /* asks them, and waits for nothing */
        continue;
    for (int64_t deadline = clock_now_ns() + FAKE_PATIENCE; begun == 0;)
        assert_true(until(deadline));
    for (uint32_t i = 0; i < 75; i++) {
        struct fake_step step = begin_step(f);
        int64_t from = f->planner->step.seen_ns + FROM_NS;
        assert_true(reach_step(f->planner, from) == from + CLOCK_MS); /* perhaps it is there then */
        end_step(f, &step);
        assert_false(planner_idle(f->planner, f->planner->step.seen_ns + CLOCK_S));
    }
    assert_true(begun >= 1 && begun <= 2); /* threads */
    assert_int_equal(reached(f).ahead, 0);
    assert_true(reached(f).touched > 0);
    assert_int_equal(reached(f).late, reached(f).touched);
    for (uint32_t n = 0; n < FAKE_SEQUENCES; n++)
        fake_check_host(f, &f->sequences[n], 0, f->sequences[n].next);
    gate_open = true; /* what they had not begun with follows */
    struct fake_step step = begin_step(f);
    reach_all(f);
    assert_true(reached(f).ahead > 0);
    end_step(f, &step);
    reach_free(f);
}

/* All sequences need a block in the same step, twice: nothing is registered in a step, nor touched. */
static void test_steps_find_all_in_place(void **state)
{
    (void)state;
    struct fake *f = reach_create(42, true);
    open_all(f, &SPARSE);
    struct fake_step step = begin_step(f);
    reach_all(f);
    end_step(f, &step);
    struct gather_gpu_reached before = reached(f);
    uint32_t blocks = f->planner->blocks.taken;
    for (uint32_t i = 0; i < 75; i++) {
        step = begin_step(f);
        reach_all(f);
        end_step(f, &step);
    }
    assert_int_equal(f->planner->blocks.taken, blocks + 2 * FAKE_SEQUENCES);
    assert_true(reached(f).ahead > before.ahead);
    assert_int_equal(reached(f).late, before.late);
    assert_int_equal(reached(f).touched, before.touched);
    for (uint32_t n = 0; n < FAKE_SEQUENCES; n++)
        fake_check_host(f, &f->sequences[n], 0, f->sequences[n].next);
    reach_free(f);
}

/* What has been touched and was not registered, since there was no time for it, is not touched again. */
static void test_steps_register_what_has_been_touched(void **state)
{
    (void)state;
    struct fake *f = reach_create(46, true);
    open_all(f, &SPARSE);
    struct fake_step step = begin_step(f);
    reach_all(f);
    end_step(f, &step);
    struct gather_gpu_reached before = reached(f);
    struct blocks *b = &f->planner->blocks;
    for (uint32_t i = 0; i < FAKE_SEQUENCES * 5 / 2; i++) { /* more blocks than were reached */
        uint32_t block = UINT32_MAX;
        assert_int_equal(blocks_take(b, &block), 0);
        blocks_unref(b, block);
    }
    uint32_t behind = b->taken + 2 * FAKE_SEQUENCES;
    assert_true(behind <= b->blocks_max);
    blocks_populate(b, behind);
    uint32_t last = (uint32_t)((behind * b->block_bytes - 1) / BLOCKS_STRETCH_BYTES);
    for (int64_t deadline = clock_now_ns() + FAKE_PATIENCE; !blocks_is_populated(b, last);)
        assert_true(until(deadline));
    for (uint32_t i = 0; i < 75; i++) {
        step = begin_step(f);
        end_step(f, &step);
    }
    assert_true(reached(f).late > before.late);
    assert_int_equal(reached(f).touched, before.touched);
    assert_int_equal(reached(f).ahead, before.ahead);
    reach_free(f);
}

/* Registering that takes a while. */
static struct gpu_api slow_api;
static const struct gpu_api *real_api;
static int64_t register_ns;
static uint32_t registrations;

static int slow_register(struct gpu *gpu, void *at, uint64_t bytes, void **ret_device, struct err *err)
{
    for (int64_t end = clock_now_ns() + register_ns; clock_now_ns() < end;)
        sched_yield();
    registrations++;
    return real_api->host_register(gpu, at, bytes, ret_device, err);
}

static void test_the_window_is_kept(void **state)
{
    (void)state;
    real_api = fake_gpu->api;
    slow_api = *real_api;
    slow_api.host_register = slow_register;
    fake_gpu->api = &slow_api;
    struct fake *f = reach_create(43, true);
    struct fake_open open = SPARSE;
    open.capacity = 1000;
    open_all(f, &open);
    struct planner *p = f->planner;
    /* As fast as it is: several a step, as long as the measured time leaves room for. */
    uint32_t most = 0;
    register_ns = 0;
    while (most < 2) {
        struct fake_step step = begin_step(f);
        int64_t seen = p->step.seen_ns, deadline = clock_now_ns() + FAKE_PATIENCE, again;
        assert_true(reach_step(p, seen) == seen + FROM_NS);
        assert_true(reach_step(p, seen + TO_NS + 1) == INT64_MAX);
        registrations = 0;
        while ((again = reach_step(p, seen + FROM_NS)) != INT64_MAX && registrations < 2)
            assert_true(until(deadline)); /* it is being touched */
        most = registrations > most ? registrations : most;
        end_step(f, &step);
    }
    /* Slow ones: one a step, since another would not fit. */
    register_ns = 3 * CLOCK_MS / 2;
    for (uint32_t i = 0; i < 3; i++) {
        for (uint32_t n = 0; i == 1 && n < 3; n++) { /* other sequences, so that more is wanted */
            fake_close(f, &f->sequences[n]);
            open.prompt = 600, open.token_seed = 20 + n;
            fake_open(f, &f->sequences[n], 20 + n, &open);
            fake_prefill(f, &f->sequences[n]);
        }
        struct fake_step step = begin_step(f);
        int64_t seen = p->step.seen_ns, deadline = clock_now_ns() + FAKE_PATIENCE, again;
        registrations = 0;
        while ((again = reach_step(p, seen + FROM_NS)) != 0 && again != INT64_MAX)
            assert_true(until(deadline));
        assert_int_equal(again, 0);
        assert_int_equal(registrations, 1);
        assert_true(reached(f).longest_ns >= register_ns);
        assert_true(reach_step(p, seen + FROM_NS + register_ns) == INT64_MAX);
        end_step(f, &step);
    }
    /* A sparse step registers for what comes next; a dense one has no window, and does for whole answers. */
    register_ns = 0;
    uint64_t near = 0, wanted = 0;
    for (uint32_t n = 0; n < FAKE_SEQUENCES; n++) {
        near += (f->sequences[n].next + 1 + 256 + 63) / 64;
        wanted += (open.capacity + 63) / 64;
    }
    assert_true(near + 16 < wanted);
    assert_true(blocks_of(f, fake_gpu->registered_bytes) < near + 16);
    struct fake_step dense = {.kind = STEP_DENSE, .entries = 1, .sequence = {&f->sequences[0]}, .count = {1}};
    fake_post(f, &dense);
    reach_all(f);
    assert_true(fake_gpu->registered_bytes >= wanted * p->blocks.block_bytes);
    assert_true(blocks_of(f, fake_gpu->registered_bytes) < wanted + 16);
    reach_free(f);
    fake_gpu->api = real_api;
}

/* Steps that are shorter, and tables that waited for sets. */
static void test_the_window_follows_the_steps(void **state)
{
    (void)state;
    struct fake *f = reach_create(47, false);
    open_all(f, &SPARSE);
    struct fake_step step = begin_step(f);
    struct step *s = &f->planner->step;
    int64_t seen = s->seen_ns, us = CLOCK_MS / 1000;
    s->took_ns = 2 * CLOCK_MS;
    assert_true(reach_step(f->planner, seen) == seen + 500 * us);
    assert_true(reach_step(f->planner, seen + CLOCK_MS + 1) == INT64_MAX);
    s->took_ns = 0; /* none yet */
    assert_true(reach_step(f->planner, seen) == seen + FROM_NS);
    s->planned_ns = seen + 9 * CLOCK_MS;
    assert_true(reach_step(f->planner, seen + 10 * CLOCK_MS) == seen + 11 * CLOCK_MS);
    assert_true(reach_step(f->planner, seen + 11 * CLOCK_MS + 1) == INT64_MAX);
    end_step(f, &step);
    assert_true(s->took_ns == s->ended_ns - seen);
    step = step_of_all(f); /* a step's own times */
    fake_post(f, &step);
    assert_true(reach_step(f->planner, s->seen_ns + FROM_NS) == INT64_MAX);
    fake_select(f, &step, 0);
    assert_true(s->planned_ns > s->seen_ns && s->planned_ns <= clock_now_ns());
    end_step(f, &step);
    reach_free(f);
}

/* Between steps nothing is registered while the next one may be near, all that has been touched later. */
static void test_quiet_time(void **state)
{
    (void)state;
    struct fake *f = reach_create(44, true);
    open_all(f, &SPARSE);
    struct fake_step step = begin_step(f);
    end_step(f, &step);
    uint64_t registered = fake_gpu->registered_bytes;
    int64_t seen = f->planner->step.seen_ns;
    uint64_t wanted = FAKE_SEQUENCES * ((f->sequences[0].next + 256 + 63) / 64ull);
    struct blocks *b = &f->planner->blocks;
    uint32_t last = (uint32_t)((wanted * b->block_bytes - 1) / BLOCKS_STRETCH_BYTES);
    for (int64_t deadline = clock_now_ns() + FAKE_PATIENCE; !blocks_is_populated(b, last);) {
        assert_false(planner_idle(f->planner, seen + CLOCK_MS));
        assert_true(until(deadline));
    }
    assert_false(planner_idle(f->planner, seen + CLOCK_MS));
    assert_true(reach_step(f->planner, seen + FROM_NS) == INT64_MAX);
    assert_int_equal(fake_gpu->registered_bytes, registered);
    for (int64_t deadline = clock_now_ns() + FAKE_PATIENCE;
         fake_gpu->registered_bytes < wanted * b->block_bytes;) {
        planner_idle(f->planner, seen + CLOCK_S);
        assert_true(until(deadline));
    }
    reach_free(f);
}

/* Without a GPU: some blocks more than are in use, of those that the file holds, and no others. */
static void test_memory_is_left_alone(void **state)
{
    (void)state;
    struct device_gpu *gpu = fake_gpu;
    fake_gpu = NULL;
    struct fake *f = reach_create(45, true);
    fake_open(f, &f->sequences[0], 1, &SPARSE);
    fake_prefill(f, &f->sequences[0]);
    struct blocks *b = &f->planner->blocks;
    assert_false(planner_idle(f->planner, clock_now_ns()));
    assert_int_equal(b->segment.bytes, b->rows_at + BLOCKS_CHUNK_BYTES);
    uint64_t bytes = (4 + 8) * b->block_bytes;
    uint32_t end = (uint32_t)((bytes + BLOCKS_STRETCH_BYTES - 1) / BLOCKS_STRETCH_BYTES);
    for (int64_t deadline = clock_now_ns() + FAKE_PATIENCE; !blocks_is_populated(b, end - 1);)
        assert_true(until(deadline));
    assert_int_equal(begun, end);
    assert_false(is_there((uint8_t *)b->segment.at + b->rows_at + end * BLOCKS_STRETCH_BYTES,
                          BLOCKS_CHUNK_BYTES - end * BLOCKS_STRETCH_BYTES));
    reach_free(f);
    fake_gpu = gpu;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads_touch_as_far_as_told),
        cmocka_unit_test(test_what_cannot_be_touched_is_not_done),
        cmocka_unit_test(test_steps_go_on_while_memory_is_touched),
        cmocka_unit_test(test_steps_find_all_in_place),
        cmocka_unit_test(test_steps_register_what_has_been_touched),
        cmocka_unit_test(test_the_window_is_kept),
        cmocka_unit_test(test_the_window_follows_the_steps),
        cmocka_unit_test(test_quiet_time),
        cmocka_unit_test(test_memory_is_left_alone),
    };
    return cmocka_run_group_tests(tests, fake_gpu_setup, fake_gpu_teardown);
}
