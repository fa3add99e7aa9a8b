/* Processors kept awake: threads that spin after a hint and for a while, and sleep again. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include <cmocka.h>

#include "base/awake.h"
#include "base/clock.h"
#include "base/thread.h"

#define PATIENCE_NS (10 * CLOCK_S)

static bool comes_to(const struct awake *a, bool awake)
{
    for (int64_t end = clock_now_ns() + PATIENCE_NS; (awake_count(a) > 0) != awake; sched_yield())
        if (clock_now_ns() > end)
            return false;
    return true;
}

static void test_a_hint_wakes_and_time_puts_to_sleep(void **state)
{
    (void)state;
    struct awake *a;
    awake_create(&a, thread_cores());
    for (int round = 0; round < 3; round++) {
        assert_true(comes_to(a, false));
        awake_hint(a);
        assert_true(comes_to(a, true));
        assert_in_range(awake_count(a), 1, thread_cores());
    }
    assert_true(comes_to(a, false)); /* nobody hinted again */
    awake_hint(a);
    awake_free(&a); /* in the middle of it */
    assert_null(a);
    awake_free(&a);
}

/* As many as there are to run on, no more. */
static void test_more_cores_than_there_are(void **state)
{
    (void)state;
    struct awake *a;
    awake_create(&a, 4096);
    awake_hint(a);
    assert_true(comes_to(a, true));
    assert_in_range(awake_count(a), 1, thread_cores());
    awake_free(&a);
}

/* Who is at work does not wait for them: a thread that yields in a loop, and one that only computes, get
 * nearly all of the time of a processor that one of them shares. */
static void test_they_give_way(void **state)
{
    (void)state;
    struct awake *a;
    awake_create(&a, thread_cores());
    awake_hint(a);
    assert_true(comes_to(a, true));
    for (int yields = 0; yields < 2; yields++) {
        struct timespec t;
        assert_int_equal(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t), 0);
        int64_t begin = t.tv_sec * CLOCK_S + t.tv_nsec, had = 0, end = clock_now_ns() + PATIENCE_NS;
        while (had < 200 * CLOCK_MS) { /* beside other work it takes what it takes, but comes */
            awake_hint(a);
            if (yields)
                sched_yield();
            assert_int_equal(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t), 0);
            had = t.tv_sec * CLOCK_S + t.tv_nsec - begin;
            assert_true(clock_now_ns() < end);
        }
    }
    awake_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_hint_wakes_and_time_puts_to_sleep),
        cmocka_unit_test(test_more_cores_than_there_are),
        cmocka_unit_test(test_they_give_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
