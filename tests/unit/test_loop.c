/* The event loop: descriptors, timers, signals, hooks, and removal of anything from within callbacks. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/loop.h"

enum { TOO_LATE = 99 };

struct fixture {
    struct loop *loop;
    int fds[3];
    int calls[3];
    int hook_calls, timer_calls;
    int timer, signal;
    int64_t begun_ns;
};

static void too_late(void *arg)
{
    struct fixture *f = arg;
    loop_stop(f->loop, TOO_LATE);
}

static int setup(void **state)
{
    static struct fixture f;
    f = (struct fixture){.loop = loop_create(), .begun_ns = clock_now_ns()};
    for (int i = 0; i < 3; i++)
        f.fds[i] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    loop_add_timer(f.loop, 10 * CLOCK_S, too_late, &f);
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    loop_free(&f->loop);
    assert_null(f->loop);
    loop_free(&f->loop);
    for (int i = 0; i < 3; i++)
        close(f->fds[i]);
    return 0;
}

static void count_and_stop(void *arg, uint32_t events)
{
    struct fixture *f = arg;
    assert_true(events & EPOLLIN);
    eventfd_t value;
    eventfd_read(f->fds[0], &value);
    f->calls[0]++;
    loop_stop(f->loop, 7);
}

static void a_ready_descriptor_is_called(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(loop_add_fd(f->loop, f->fds[0], EPOLLIN, count_and_stop, f), 0);
    assert_int_equal(loop_add_fd(f->loop, f->fds[0], EPOLLIN, count_and_stop, f), -EEXIST);
    assert_int_equal(loop_add_fd(f->loop, -1, EPOLLIN, count_and_stop, f), -EBADF);
    eventfd_write(f->fds[0], 1);
    assert_int_equal(loop_run(f->loop), 7);
    eventfd_write(f->fds[0], 1);
    assert_int_equal(loop_run(f->loop), 7);
    assert_int_equal(f->calls[0], 2);
}

/* Whichever of the three is called first takes the other two and itself away. */
static void remove_all(void *arg, uint32_t events)
{
    (void)events;
    struct fixture *f = arg;
    f->calls[0]++;
    for (int i = 0; i < 3; i++)
        loop_remove_fd(f->loop, f->fds[i]);
    loop_stop(f->loop, 1);
}

static void callbacks_may_remove_others_and_themselves(void **state)
{
    struct fixture *f = *state;
    for (int i = 0; i < 3; i++) {
        loop_add_fd(f->loop, f->fds[i], EPOLLIN, remove_all, f);
        eventfd_write(f->fds[i], 1);
    }
    assert_int_equal(loop_run(f->loop), 1);
    assert_int_equal(f->calls[0], 1);
    loop_remove_fd(f->loop, f->fds[0]); /* no longer there */
}

static void unexpected(void *arg, uint32_t events)
{
    (void)events;
    struct fixture *f = arg;
    f->calls[1]++;
}

/* Closes the other descriptor and opens a new one, which the system gives the same number. */
static void replace(void *arg, uint32_t events)
{
    (void)events;
    struct fixture *f = arg;
    f->calls[0]++;
    for (int i = 0; i < 2; i++)
        loop_remove_fd(f->loop, f->fds[i]);
    int was = f->fds[1];
    close(f->fds[1]);
    f->fds[1] = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    assert_int_equal(f->fds[1], was);
    loop_add_fd(f->loop, f->fds[1], EPOLLIN, unexpected, f);
    loop_stop(f->loop, 1);
}

static void an_old_event_is_not_for_a_new_descriptor(void **state)
{
    struct fixture *f = *state;
    for (int i = 0; i < 2; i++) {
        loop_add_fd(f->loop, f->fds[i], EPOLLIN, replace, f);
        eventfd_write(f->fds[i], 1);
    }
    assert_int_equal(loop_run(f->loop), 1);
    assert_int_equal(f->calls[0], 1);
    assert_int_equal(f->calls[1], 0);
}

static void count_timer(void *arg)
{
    struct fixture *f = arg;
    if (++f->timer_calls == 3)
        loop_stop(f->loop, 3);
}

static void timers_repeat(void **state)
{
    struct fixture *f = *state;
    loop_add_timer(f->loop, 2 * CLOCK_MS, count_timer, f);
    assert_int_equal(loop_run(f->loop), 3);
    assert_true(clock_now_ns() - f->begun_ns >= 6 * CLOCK_MS);
}

static void add_timers(void *arg)
{
    struct fixture *f = arg;
    loop_remove_timer(f->loop, f->timer);
    for (int i = 0; i < 20; i++) /* the array of timers grows while it is walked */
        loop_add_timer(f->loop, CLOCK_S * (5 + i), too_late, f);
    loop_add_timer(f->loop, CLOCK_MS, count_timer, f);
    f->hook_calls++;
}

static void timers_may_be_added_and_removed_by_timers(void **state)
{
    struct fixture *f = *state;
    f->timer = loop_add_timer(f->loop, CLOCK_MS, add_timers, f);
    assert_true(f->timer >= 0);
    assert_int_equal(loop_run(f->loop), 3);
    assert_int_equal(f->hook_calls, 1);
    loop_remove_timer(f->loop, -1);
    loop_remove_timer(f->loop, 1000);
}

static void keep_signal(void *arg, int signal)
{
    struct fixture *f = arg;
    f->signal = signal;
    loop_stop(f->loop, 5);
}

static void signals_arrive_as_events(void **state)
{
    struct fixture *f = *state;
    const int list[] = {SIGUSR1, SIGUSR2, 0};
    assert_int_equal(loop_add_signals(f->loop, list, keep_signal, f), 0);
    kill(getpid(), SIGUSR2);
    assert_int_equal(loop_run(f->loop), 5);
    assert_int_equal(f->signal, SIGUSR2);
    kill(getpid(), SIGUSR1);
    assert_int_equal(loop_run(f->loop), 5);
    assert_int_equal(f->signal, SIGUSR1);
}

static int busy_hook(void *arg)
{
    struct fixture *f = arg;
    return ++f->hook_calls < 4;
}

static int other_hook(void *arg)
{
    struct fixture *f = ((struct fixture **)arg)[0];
    if (f->hook_calls == 4)
        loop_stop(f->loop, f->calls[2] ? 4 : 8);
    return 0;
}

static void note(void *arg, uint32_t events)
{
    (void)events;
    struct fixture *f = arg;
    f->calls[2]++;
}

/* A hook that has work keeps the loop from sleeping, but not from serving descriptors. */
static void hooks_run_before_each_sleep(void **state)
{
    struct fixture *f = *state;
    struct fixture *box[] = {f};
    loop_add_fd(f->loop, f->fds[0], EPOLLIN, note, f);
    eventfd_write(f->fds[0], 1);
    loop_before_sleep(f->loop, busy_hook, f);
    loop_before_sleep(f->loop, other_hook, box);
    assert_int_equal(loop_run(f->loop), 4);
    assert_int_equal(f->calls[2], 3);
    loop_before_sleep(f->loop, NULL, f);
    assert_int_equal(loop_run(f->loop), 4); /* only the other one is left, and stops */
    assert_int_equal(f->hook_calls, 4);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(a_ready_descriptor_is_called, setup, teardown),
        cmocka_unit_test_setup_teardown(callbacks_may_remove_others_and_themselves, setup, teardown),
        cmocka_unit_test_setup_teardown(an_old_event_is_not_for_a_new_descriptor, setup, teardown),
        cmocka_unit_test_setup_teardown(timers_repeat, setup, teardown),
        cmocka_unit_test_setup_teardown(timers_may_be_added_and_removed_by_timers, setup, teardown),
        cmocka_unit_test_setup_teardown(signals_arrive_as_events, setup, teardown),
        cmocka_unit_test_setup_teardown(hooks_run_before_each_sleep, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
