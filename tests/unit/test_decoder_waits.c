/* Counts of waits by length: every length falls below its bucket's bound and not below a quarter less. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "decoder/waits.h"

static void test_bounds(void **state)
{
    (void)state;
    for (int64_t ns = 0; ns < INT64_C(60000000000); ns += ns / 7 + 1) {
        struct waits w = {0};
        waits_add(&w, ns);
        int64_t bound = waits_quantile_ns(&w, 1);
        assert_true(ns < bound && bound <= ns + ns / 4 + 1);
        assert_int_equal(w.total, 1);
    }
    for (uint32_t i = 1; i < WAITS_BUCKETS; i++)
        assert_true(waits_bound_ns(i) > waits_bound_ns(i - 1));
}

static void test_ends(void **state)
{
    (void)state;
    struct waits w = {0};
    assert_int_equal(waits_quantile_ns(&w, 0.5), 0);
    waits_add(&w, -1);
    assert_int_equal(waits_quantile_ns(&w, 0.5), 1);
    waits_add(&w, INT64_MAX);
    assert_int_equal(waits_quantile_ns(&w, 1), waits_bound_ns(WAITS_BUCKETS - 1));
}

static void test_quantiles(void **state)
{
    (void)state;
    struct waits w = {0};
    for (int i = 0; i < 98; i++)
        waits_add(&w, 1000);
    waits_add(&w, 1000000);
    waits_add(&w, 1000000);
    assert_true(waits_quantile_ns(&w, 0.5) <= 1250);
    assert_true(waits_quantile_ns(&w, 0.98) <= 1250);
    assert_true(waits_quantile_ns(&w, 0.99) > 1000000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bounds), cmocka_unit_test(test_ends),
                                       cmocka_unit_test(test_quantiles)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
