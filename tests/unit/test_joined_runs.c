/* When the rows of all runs are waited for at once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "decoder/joined_runs.h"

enum { LAYERS = 32, STEP_NS = 8000000 };

/* A step of 8 ms, whose rows are there after so many us; 0: nobody saw them. Returns what comes of it. */
static int step(struct joined_runs *j, uint32_t resident, int64_t rows_us)
{
    joined_runs_begin(j);
    joined_runs_launched(j, 5000);
    if (rows_us)
        joined_runs_ready(j, 5000 + rows_us * 1000);
    joined_runs_ready(j, 5000 + STEP_NS - 1); /* the first counts */
    if (!rows_us)
        j->rows_ns = 0;
    joined_runs_end(j, resident, LAYERS, 5000 + STEP_NS);
    return j->wanted;
}

static void test_late_rows_part_them_and_early_ones_join_them(void **state)
{
    (void)state;
    struct joined_runs j;
    joined_runs_init(&j);
    assert_int_equal(j.wanted, 1);
    for (int i = 0; i < 100; i++) /* of 8 layers: 2 ms, three quarters of which count */
        assert_int_equal(step(&j, 8, 1400), 1);
    for (int i = 1; i <= JOINED_RUNS_LATE; i++)
        assert_int_equal(step(&j, 8, i % 2 ? 1600 : 0), i < JOINED_RUNS_LATE);
    for (int i = 1; i <= JOINED_RUNS_SOON; i++)
        assert_int_equal(step(&j, 8, 1400), i == JOINED_RUNS_SOON);
}

static void test_single_steps_change_nothing(void **state)
{
    (void)state;
    struct joined_runs j;
    joined_runs_init(&j);
    for (int i = 0; i < 100; i++)
        assert_int_equal(step(&j, 8, i % JOINED_RUNS_LATE ? 5000 : 100), 1);
    for (int i = 0; i < JOINED_RUNS_LATE; i++)
        step(&j, 8, 5000);
    for (int i = 0; i < 100; i++)
        assert_int_equal(step(&j, 8, i % JOINED_RUNS_SOON ? 100 : 5000), 0);
}

static void test_steps_that_say_nothing(void **state)
{
    (void)state;
    struct joined_runs j;
    joined_runs_init(&j);
    for (int i = 0; i < 2 * JOINED_RUNS_LATE; i++) {
        assert_int_equal(step(&j, 0, 5000), 1);
        assert_int_equal(step(&j, LAYERS, 5000), 1);
        joined_runs_begin(&j); /* no graph */
        joined_runs_end(&j, 8, LAYERS, 1 << 30);
    }
    assert_int_equal(j.wanted, 1);
    assert_int_equal(j.against, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_late_rows_part_them_and_early_ones_join_them),
        cmocka_unit_test(test_single_steps_change_nothing),
        cmocka_unit_test(test_steps_that_say_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
