/* Flags: waiting and raising across processes, aborts that stay, and cyclic steps. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "link/flag.h"
#include "link/segment.h"

enum { ROUNDS = 2000 };

struct shared {
    struct control_flag there, back;
};

static int64_t soon(void)
{
    return clock_now_ns() + 60 * CLOCK_S;
}

static struct shared *shared_memory(struct segment *segment)
{
    assert_int_equal(segment_create("flags", sizeof(struct shared), segment, NULL), 0);
    return segment->at;
}

static void steps_are_compared_cyclically(void **state)
{
    (void)state;
    struct control_flag flag = {.value = 0xfffffffe};
    assert_true(flag_reached(&flag, 0xfffffffe));
    assert_true(flag_reached(&flag, 0xfffffff0));
    assert_false(flag_reached(&flag, 0xffffffff));
    assert_false(flag_reached(&flag, 0));
    flag_raise(&flag, 1);
    assert_true(flag_reached(&flag, 0xffffffff));
    assert_true(flag_reached(&flag, 1));
    assert_false(flag_reached(&flag, 2));
    assert_int_equal(flag_wait(&flag, 1, 0, 0), 0); /* there already: no deadline matters */
    assert_int_equal(atomic_load(&flag.waiters), 0);
}

static void waiting_ends_at_the_deadline(void **state)
{
    (void)state;
    struct control_flag flag = {.value = 4};
    const int64_t spins[] = {0, CLOCK_MS, 100 * CLOCK_S};
    for (size_t i = 0; i < sizeof spins / sizeof *spins; i++) {
        int64_t deadline_ns = clock_now_ns() + 5 * CLOCK_MS;
        assert_int_equal(flag_wait(&flag, 5, deadline_ns, spins[i]), -ETIMEDOUT);
        int64_t over_ns = clock_now_ns() - deadline_ns;
        assert_true(over_ns >= 0 && over_ns < 5 * CLOCK_S);
    }
    assert_int_equal(flag_wait(&flag, 5, -1, 0), -ETIMEDOUT);
    assert_int_equal(atomic_load(&flag.waiters), 0);
}

/* Answers every step of `there` by the same step of `back`. */
static void echo(struct shared *shared, int64_t spin_ns)
{
    for (uint32_t step = 1; step <= ROUNDS; step++) {
        if (flag_wait(&shared->there, step, soon(), spin_ns) != 0)
            _exit(1);
        flag_raise(&shared->back, step);
    }
    _exit(0);
}

static void two_processes_play_ping_pong(void **state)
{
    (void)state;
    const int64_t spins[] = {0, 20000};
    for (size_t i = 0; i < 2; i++) {
        struct segment segment;
        struct shared *shared = shared_memory(&segment);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0)
            echo(shared, spins[i]);
        for (uint32_t step = 1; step <= ROUNDS; step++) {
            flag_raise(&shared->there, step);
            assert_int_equal(flag_wait(&shared->back, step, soon(), spins[i]), 0);
        }
        int status;
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
        assert_int_equal(atomic_load(&shared->there.waiters), 0);
        segment_close(&segment);
    }
}

/* Returns once the other process sleeps in flag_wait. */
static void until_waiting(struct control_flag *flag)
{
    int64_t deadline_ns = soon();
    while (atomic_load(&flag->waiters) == 0) {
        assert_true(clock_now_ns() < deadline_ns);
        sched_yield();
    }
}

static void an_abort_wakes_the_sleeper(void **state)
{
    (void)state;
    struct segment segment;
    struct shared *shared = shared_memory(&segment);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(flag_wait(&shared->there, 1, soon(), 0) == -ECANCELED ? 0 : 1);
    until_waiting(&shared->there);
    flag_abort(&shared->there);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    segment_close(&segment);
}

static void a_killed_waiter_harms_nobody(void **state)
{
    (void)state;
    struct segment segment;
    struct shared *shared = shared_memory(&segment);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(flag_wait(&shared->there, 1, soon(), 0));
    until_waiting(&shared->there);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    flag_raise(&shared->there, 1);
    assert_int_equal(flag_wait(&shared->there, 1, soon(), 0), 0);
    segment_close(&segment);
}

static void an_abort_stays(void **state)
{
    (void)state;
    struct control_flag flag = {.value = 7};
    assert_false(flag_aborted(&flag, 8));
    flag_abort(&flag);
    for (int again = 0; again < 3; again++) { /* the other side as well, and both once more */
        assert_int_equal(flag_wait(&flag, 5, soon(), 0), -ECANCELED); /* a reader that lags behind */
        flag_abort(&flag);
    }
    assert_true(flag_aborted(&flag, 8));
    assert_false(flag_reached(&flag, 7));
    assert_false(flag_reached(&flag, 8));
    assert_int_equal(flag_wait(&flag, 8, soon(), 0), -ECANCELED);
    for (uint32_t step = 8; step < 1000; step++) {
        flag_raise(&flag, step);
        assert_int_equal(flag_wait(&flag, step + 1, soon(), 0), -ECANCELED);
    }
    assert_true(flag_aborted(&flag, 1000));
}

struct racer {
    struct control_flag *flag;
    pthread_barrier_t *barrier;
    uint32_t from;
};

static void *raise_many(void *arg)
{
    struct racer *racer = arg;
    pthread_barrier_wait(racer->barrier);
    for (uint32_t i = 0; i < 200; i++)
        flag_raise(racer->flag, racer->from + i);
    return NULL;
}

/* A raise that runs at the same time never overwrites the abort, whichever comes first. */
static void raises_do_not_undo_an_abort(void **state)
{
    (void)state;
    for (uint32_t round = 0; round < 300; round++) {
        struct control_flag flag = {.value = round * 1000};
        pthread_barrier_t barrier;
        pthread_barrier_init(&barrier, NULL, 2);
        struct racer racer = {.flag = &flag, .barrier = &barrier, .from = round * 1000 + 1};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, raise_many, &racer), 0);
        pthread_barrier_wait(&barrier);
        flag_abort(&flag);
        pthread_join(thread, NULL);
        pthread_barrier_destroy(&barrier);
        assert_true(flag_aborted(&flag, round * 1000 + 201));
        assert_int_equal(flag_wait(&flag, round * 1000 + 1, soon(), 0), -ECANCELED);
    }
}

static void all_flags_of_a_segment_are_aborted(void **state)
{
    (void)state;
    struct kv_layout layout = {
        .layers = 8, .row_heads = 1, .selection_heads = 1, .piece_bytes = 64, .context_max = 128};
    layout_set_groups(&layout, 1);
    struct control_params params = {
        .device_bytes = 1 << 20, .sequences_max = 1, .list_max = 16, .slots = 16, .first_step = 100};
    struct control_header header;
    control_header_init(&header, &layout, &params);
    struct segment segment;
    assert_int_equal(segment_create("control", header.total_bytes, &segment, NULL), 0);
    struct control_header *mapped = segment.at;
    *mapped = header;
    for (unsigned i = 0; i < FLAG_COUNT; i++)
        atomic_store(&control_flag_at(mapped, i)->value, 99 + i);
    flag_abort_all(mapped);
    flag_abort_all(mapped);
    for (unsigned i = 0; i < FLAG_COUNT; i++)
        assert_int_equal(flag_wait(control_flag_at(mapped, i), 100 + i, soon(), 0), -ECANCELED);
    assert_int_equal(mapped->checksum, header.checksum);
    assert_int_equal(control_step_at(mapped, 0)->step, 0); /* nothing behind the flags was touched */
    segment_close(&segment);
}

static void doorbells_are_readable_until_cleared(void **state)
{
    (void)state;
    int fd;
    assert_int_equal(doorbell_create(&fd), 0);
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    assert_int_equal(poll(&wait, 1, 0), 0);
    doorbell_ring(fd);
    doorbell_ring(fd);
    assert_int_equal(poll(&wait, 1, 0), 1);
    doorbell_clear(fd);
    assert_int_equal(poll(&wait, 1, 0), 0);
    doorbell_clear(fd);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_compared_cyclically),
        cmocka_unit_test(waiting_ends_at_the_deadline),
        cmocka_unit_test(two_processes_play_ping_pong),
        cmocka_unit_test(an_abort_wakes_the_sleeper),
        cmocka_unit_test(a_killed_waiter_harms_nobody),
        cmocka_unit_test(an_abort_stays),
        cmocka_unit_test(raises_do_not_undo_an_abort),
        cmocka_unit_test(all_flags_of_a_segment_are_aborted),
        cmocka_unit_test(doorbells_are_readable_until_cleared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
