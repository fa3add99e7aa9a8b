/* Flags between processes; see flag.h and SHARED-MEMORY.md section 3.
 *
 * A flag lies in a segment of two processes: it has one raiser and one waiter, and either side may abort it.
 * No locks: a killed process leaves a value behind, never a state that blocks. The futex is a shared one. */
#include "link/flag.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"

static bool is_aborted(uint32_t value, uint32_t step)
{
    return (int32_t)(value - step) >= (int32_t)(FLAG_ABORT_AHEAD / 2);
}

/* A waiter counts itself before it looks at the value for the last time, and the raiser looks for waiters
 * after it has stored the value; both sequentially consistent, so at least one of them sees the other. */
static void wake(struct control_flag *flag)
{
    if (atomic_load(&flag->waiters))
        syscall(SYS_futex, &flag->value, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void flag_raise(struct control_flag *flag, uint32_t step)
{
    uint32_t value = atomic_load_explicit(&flag->value, memory_order_relaxed);
    do {
        if (is_aborted(value, step))
            return;
    } while (!atomic_compare_exchange_weak(&flag->value, &value, step));
    wake(flag);
}

int flag_reached(struct control_flag *flag, uint32_t step)
{
    uint32_t value = atomic_load_explicit(&flag->value, memory_order_acquire);
    return (int32_t)(value - step) >= 0 && !is_aborted(value, step);
}

/* 0, -ECANCELED, or -EAGAIN when the flag is not there yet. */
static int look(uint32_t value, uint32_t step)
{
    if ((int32_t)(value - step) < 0)
        return -EAGAIN;
    return is_aborted(value, step) ? -ECANCELED : 0;
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int spin(struct control_flag *flag, uint32_t step, int64_t until_ns)
{
    for (;;) {
        for (int i = 0; i < 64; i++) {
            int r = look(atomic_load_explicit(&flag->value, memory_order_acquire), step);
            if (r != -EAGAIN)
                return r;
            relax();
        }
        if (clock_now_ns() >= until_ns)
            return -EAGAIN;
    }
}

int flag_wait(struct control_flag *flag, uint32_t step, int64_t deadline_ns, int64_t spin_ns)
{
    int r = look(atomic_load_explicit(&flag->value, memory_order_acquire), step);
    if (r == -EAGAIN && spin_ns > 0) {
        int64_t until_ns = clock_now_ns() + spin_ns;
        r = spin(flag, step, until_ns < deadline_ns ? until_ns : deadline_ns);
    }
    if (r != -EAGAIN)
        return r;
    struct timespec deadline = {0};
    if (deadline_ns > 0) {
        deadline.tv_sec = deadline_ns / CLOCK_S;
        deadline.tv_nsec = deadline_ns % CLOCK_S;
    }
    atomic_fetch_add(&flag->waiters, 1);
    for (;;) {
        uint32_t value = atomic_load(&flag->value);
        r = look(value, step);
        if (r != -EAGAIN)
            break;
        /* The bitset form takes an absolute time of CLOCK_MONOTONIC. */
        long slept = syscall(SYS_futex, &flag->value, FUTEX_WAIT_BITSET, value, &deadline, NULL,
                             FUTEX_BITSET_MATCH_ANY);
        if (slept < 0 && errno == ETIMEDOUT) {
            r = look(atomic_load(&flag->value), step);
            r = r == -EAGAIN ? -ETIMEDOUT : r;
            break;
        }
        CHECK(slept == 0 || errno == EAGAIN || errno == EINTR);
    }
    atomic_fetch_sub(&flag->waiters, 1);
    return r;
}

void flag_abort(struct control_flag *flag)
{
    /* Twice as far ahead would count as behind, so only the first abort of either side moves the value. */
    if (atomic_exchange(&flag->aborted, 1) == 0)
        atomic_fetch_add(&flag->value, FLAG_ABORT_AHEAD);
    wake(flag);
}

int flag_aborted(const struct control_flag *flag, uint32_t step)
{
    return is_aborted(atomic_load_explicit(&flag->value, memory_order_acquire), step);
}

void flag_abort_all(struct control_header *header)
{
    for (unsigned i = 0; i < FLAG_COUNT; i++)
        flag_abort(control_flag_at(header, i));
}

int doorbell_create(int *ret_fd)
{
    int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0)
        return -errno;
    *ret_fd = fd;
    return 0;
}

void doorbell_ring(int fd)
{
    /* -EAGAIN: rung 2^64 - 2 times already, so the reader has something to read. */
    int r = eventfd_write(fd, 1);
    CHECK(r == 0 || errno == EAGAIN);
}

void doorbell_clear(int fd)
{
    eventfd_t count;
    int r = eventfd_read(fd, &count);
    CHECK(r == 0 || errno == EAGAIN);
}
