/* See awake.h. What keepers share lies in shared memory: `until_ns` and `news` are written by whoever
 * hints, the rest by the keepers. It must hold no lock. */
#include "base/awake.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"

#define AWAKE_NS (20 * CLOCK_MS) /* a step of any size, and what lies between two */

enum { PAUSES = 20 }; /* about a microsecond */

struct shared {
    _Atomic int64_t until_ns;
    _Atomic uint32_t news;     /* a futex: grows with a hint while keepers sleep */
    atomic_uint asleep, spins; /* keepers */
};

struct awake {
    uint32_t count;
    pid_t *keepers;
    struct shared *shared;
};

static void pause_a_little(void)
{
#if defined(__x86_64__)
    for (int i = 0; i < PAUSES; i++)
        __builtin_ia32_pause();
#endif
}

static bool goes_on(struct shared *s)
{
    return clock_now_ns() < atomic_load(&s->until_ns);
}

static void keep(struct shared *s)
{
    atomic_fetch_add(&s->spins, 1);
    while (goes_on(s)) {
        pause_a_little();
        sched_yield();
    }
    atomic_fetch_sub(&s->spins, 1);
}

/* Runs behind fork in a process that may have had threads: system calls alone. */
static void keeper_main(struct shared *s, int processor, pid_t parent)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(processor, &set);
    struct sched_param param = {0};
    prctl(PR_SET_NAME, "awake");
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent || close_range(0, UINT_MAX, 0) < 0) /* peers see the end of the parent's */
        return;
    if (sched_setaffinity(0, sizeof set, &set) < 0 || sched_setscheduler(0, SCHED_IDLE, &param) < 0)
        return; /* with another policy it would take time from those who work */
    for (;;) {
        uint32_t news = atomic_load(&s->news);
        keep(s);
        /* Before the last look at `until_ns`; awake_hint does it the other way round: one sees the other. */
        atomic_fetch_add(&s->asleep, 1);
        if (!goes_on(s))
            syscall(SYS_futex, &s->news, FUTEX_WAIT, news, NULL, NULL, 0);
        atomic_fetch_sub(&s->asleep, 1);
    }
}

void awake_create(struct awake **ret, uint32_t cores)
{
    CHECK(cores >= 1);
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) < 0)
        CPU_ZERO(&set); /* more processors than the set has room for: none is kept awake */
    void *shared =
        mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        check_exhausted("no memory for the keepers of processors; expected a page (ulimit -v)");
    struct awake *a = mem_alloc(1, sizeof *a);
    a->shared = shared;
    a->keepers = mem_alloc(cores, sizeof *a->keepers);
    pid_t parent = getpid(), keeper = 0;
    for (int p = 0; p < CPU_SETSIZE && a->count < cores && keeper >= 0; p++) {
        if (!CPU_ISSET(p, &set))
            continue;
        keeper = fork();
        if (keeper == 0) {
            keeper_main(a->shared, p, parent);
            _exit(0);
        }
        if (keeper > 0)
            a->keepers[a->count++] = keeper;
    }
    *ret = a;
}

/* Nobody waits for their end: it may take seconds, and what is left of them goes with this process. */
void awake_free(struct awake **awake)
{
    struct awake *a = *awake;
    if (!a)
        return;
    *awake = NULL;
    for (uint32_t i = 0; i < a->count; i++)
        kill(a->keepers[i], SIGKILL);
    munmap(a->shared, sizeof *a->shared);
    mem_free(&a->keepers);
    mem_free(&a);
}

void awake_hint(struct awake *a)
{
    struct shared *s = a->shared;
    atomic_store(&s->until_ns, clock_now_ns() + AWAKE_NS);
    if (atomic_load(&s->asleep)) {
        atomic_fetch_add(&s->news, 1);
        syscall(SYS_futex, &s->news, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

uint32_t awake_count(const struct awake *a)
{
    return atomic_load(&a->shared->spins);
}
