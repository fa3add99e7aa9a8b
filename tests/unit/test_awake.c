/* Processors kept awake: threads that spin after a hint and for a while, and sleep again. */
#include <dirent.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "base/awake.h"
#include "base/clock.h"
#include "base/thread.h"

/* Threads of SCHED_IDLE run seldom beside others that have work. */
#define PATIENCE_NS (60 * CLOCK_S)

/* Hints go on as long as they are to be awake: one may have passed before any of them ran. */
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

/* Threads of this process with the name and policy of those that keep a processor awake, each tied to one. */
static uint32_t idle_threads(void)
{
    uint32_t count = 0;
    DIR *all = opendir("/proc/self/task");
    assert_non_null(all);
    for (struct dirent *d; (d = readdir(all));) {
        char path[64], name[16] = "";
        cpu_set_t set;
        pid_t id = (pid_t)strtol(d->d_name, NULL, 10);
        snprintf(path, sizeof path, "/proc/self/task/%d/comm", id);
        FILE *from = fopen(path, "re");
        if (!from)
            continue; /* not a thread */
        if (fgets(name, sizeof name, from) && !strcmp(name, "awake\n") &&
            sched_getscheduler(id) == SCHED_IDLE && sched_getaffinity(id, sizeof set, &set) == 0)
            count += CPU_COUNT(&set) == 1;
        fclose(from);
    }
    closedir(all);
    return count;
}

/* Who is at work does not wait for them: neither one that only computes nor one that yields in a loop, to
 * which a thread of theirs that did not yield would be a millisecond each time. */
static void test_they_give_way(void **state)
{
    (void)state;
    struct awake *a;
    awake_create(&a, thread_cores());
    for (int64_t end = clock_now_ns() + PATIENCE_NS; idle_threads() < thread_cores(); sched_yield())
        assert_true(clock_now_ns() < end);
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
