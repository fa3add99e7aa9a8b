/* See awake.h. `until_ns` and `news` are written by whoever hints. It must hold no lock. */
#include "base/awake.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/thread.h"

#define AWAKE_NS (20 * CLOCK_MS) /* a step of any size, and what lies between two */

enum { PAUSES = 20 }; /* about a microsecond */

struct keeper {
    struct awake *awake;
    pthread_t thread;
    int processor;
};

struct awake {
    uint32_t count;
    struct keeper *keepers;
    _Atomic int64_t until_ns;
    _Atomic uint32_t news;     /* a futex: grows with a hint while threads sleep, and at the end */
    atomic_uint asleep, spins; /* threads */
    atomic_bool stopping;
};

static void pause_a_little(void)
{
#if defined(__x86_64__)
    for (int i = 0; i < PAUSES; i++)
        __builtin_ia32_pause();
#endif
}

static bool goes_on(struct awake *a)
{
    return !a->stopping && clock_now_ns() < atomic_load(&a->until_ns);
}

static void keep(struct awake *a)
{
    atomic_fetch_add(&a->spins, 1);
    while (goes_on(a)) {
        pause_a_little();
        sched_yield();
    }
    atomic_fetch_sub(&a->spins, 1);
}

static void *keeper_main(void *arg)
{
    struct keeper *k = arg;
    struct awake *a = k->awake;
    prctl(PR_SET_NAME, "awake");
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(k->processor, &set);
    struct sched_param param = {0};
    if (sched_setaffinity(0, sizeof set, &set) < 0 || sched_setscheduler(0, SCHED_IDLE, &param) < 0)
        return NULL; /* with another policy it would take time from those who work */
    while (!a->stopping) {
        uint32_t news = atomic_load(&a->news);
        keep(a);
        /* Before the last look at `until_ns`; awake_hint does it the other way round: one sees the other. */
        atomic_fetch_add(&a->asleep, 1);
        if (!a->stopping && !goes_on(a))
            syscall(SYS_futex, &a->news, FUTEX_WAIT_PRIVATE, news, NULL, NULL, 0);
        atomic_fetch_sub(&a->asleep, 1);
    }
    return NULL;
}

void awake_create(struct awake **ret, uint32_t cores)
{
    CHECK(cores >= 1);
    struct awake *a = mem_alloc(1, sizeof *a);
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) < 0)
        CPU_ZERO(&set); /* more processors than the set has room for: none is kept awake */
    a->keepers = mem_alloc(cores, sizeof *a->keepers);
    for (int p = 0; p < CPU_SETSIZE && a->count < cores; p++)
        if (CPU_ISSET(p, &set))
            a->keepers[a->count++] = (struct keeper){.awake = a, .processor = p};
    for (uint32_t i = 0; i < a->count; i++)
        thread_start(&a->keepers[i].thread, keeper_main, &a->keepers[i]);
    *ret = a;
}

static void tell(struct awake *a)
{
    atomic_fetch_add(&a->news, 1);
    if (atomic_load(&a->asleep))
        syscall(SYS_futex, &a->news, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void awake_free(struct awake **awake)
{
    struct awake *a = *awake;
    if (!a)
        return;
    *awake = NULL;
    a->stopping = true;
    tell(a);
    for (uint32_t i = 0; i < a->count; i++)
        pthread_join(a->keepers[i].thread, NULL);
    mem_free(&a->keepers);
    mem_free(&a);
}

void awake_hint(struct awake *a)
{
    atomic_store(&a->until_ns, clock_now_ns() + AWAKE_NS);
    if (atomic_load(&a->asleep))
        tell(a);
}

uint32_t awake_count(const struct awake *a)
{
    return atomic_load(&a->spins);
}
