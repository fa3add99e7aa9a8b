/* Processors kept awake: processes that spin after a hint and for a while, and sleep again. */
#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/awake.h"
#include "base/clock.h"
#include "base/thread.h"
#include "tests/lib/temp.h"

#define PATIENCE_NS (120 * CLOCK_S) /* on a busy machine: keepers have to run to be seen */

/* Hints again and again when they are to be awake: on a busy machine one hint is over before they run. */
static bool comes_to(struct awake *a, bool awake)
{
    for (int64_t end = clock_now_ns() + PATIENCE_NS; (awake_count(a) > 0) != awake; sched_yield()) {
        if (clock_now_ns() > end)
            return false;
        if (awake)
            awake_hint(a);
    }
    return true;
}

static void test_a_hint_wakes_and_time_puts_to_sleep(void **state)
{
    (void)state;
    struct awake *a;
    awake_create(&a, thread_cores());
    for (int round = 0; round < 3; round++) {
        assert_true(comes_to(a, false));
        assert_true(comes_to(a, true));
        assert_true(awake_count(a) <= thread_cores());
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
    assert_true(comes_to(a, true));
    assert_true(awake_count(a) <= thread_cores());
    awake_free(&a);
}

/* Time that a thread takes for some work, beside keepers that are awake or asleep. */
static int64_t takes(struct awake *a, bool awake, bool yields)
{
    assert_true(comes_to(a, awake));
    struct timespec t;
    assert_int_equal(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t), 0);
    int64_t begin = t.tv_sec * CLOCK_S + t.tv_nsec, had = 0, from = clock_now_ns();
    while (had < (yields ? 2 : 200) * CLOCK_MS) {
        if (awake)
            awake_hint(a);
        if (yields)
            sched_yield();
        assert_int_equal(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t), 0);
        had = t.tv_sec * CLOCK_S + t.tv_nsec - begin;
    }
    return clock_now_ns() - from;
}

/* Who is at work does not wait for them: a thread that yields in a loop, and one that only computes. Beside
 * other work each takes what it takes, yields most. */
static void test_they_give_way(void **state)
{
    (void)state;
    struct awake *a;
    awake_create(&a, thread_cores());
    for (int yields = 0; yields < 2; yields++) {
        int64_t before = takes(a, false, yields), beside = takes(a, true, yields);
        if (beside > CLOCK_S + 10 * (before + takes(a, false, yields)))
            fail_msg("%d yields: found %g s, before %g", yields, (double)beside / 1e9, (double)before / 1e9);
    }
    awake_free(&a);
}

/* Waits for as many children as there are. */
static void expect_gone(uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        assert_true(waitpid(-1, NULL, 0) > 0);
    assert_int_equal(waitpid(-1, NULL, 0), -1);
    assert_int_equal(errno, ECHILD);
}

/* A process that is killed is gone when its threads have run once more, and its peers see it when all that
 * have its files are gone: keepers are neither. They end with it. */
static void test_nobody_waits_for_them(void **state)
{
    (void)state;
    struct awake *a;
    char threads[256];
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    snprintf(threads, sizeof threads, "%s", temp_list("/proc/self/task"));
    awake_create(&a, thread_cores());
    assert_true(comes_to(a, true));
    assert_string_equal(temp_list("/proc/self/task"), threads);
    close(ends[1]);
    struct pollfd end = {.fd = ends[0], .events = POLLIN};
    assert_int_equal(poll(&end, 1, (int)(PATIENCE_NS / CLOCK_MS)), 1);
    assert_true(end.revents & POLLHUP);
    close(ends[0]);
    awake_free(&a);
    expect_gone(thread_cores());

    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    pid_t parent = fork();
    if (parent == 0) {
        awake_create(&a, thread_cores());
        _exit(comes_to(a, true) ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(parent, &status, 0), parent);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    expect_gone(thread_cores());
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nobody_waits_for_them), /* first: it counts its children */
        cmocka_unit_test(test_a_hint_wakes_and_time_puts_to_sleep),
        cmocka_unit_test(test_more_cores_than_there_are),
        cmocka_unit_test(test_they_give_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
