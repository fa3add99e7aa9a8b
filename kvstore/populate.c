/* See populate.h. `aim` and `news` are written by the owner, `next` by the threads, each entry of `state` by
 * the one thread that took it. It must hold no lock that the owner could wait for: these threads are of low
 * priority. */
#include "kvstore/populate.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/thread.h"
#include "base/trace.h"

/* Bytes a call: the process's map of memory is held, shared, for as long as one takes (0.13 ms). */
#define PIECE_BYTES (UINT64_C(256) << 10)

enum { NICE = 10, DONE = 1, FAILED = 2 };

struct populate {
    struct populate_params params;
    uint32_t stretches;
    atomic_uint_fast8_t *state; /* [stretches] */
    _Atomic uint32_t aim, next; /* stretches [next, aim) are to be done */
    _Atomic uint32_t news;      /* a futex: raised with every change that a sleeping thread should see */
    atomic_int sleepers;
    atomic_bool stopping;
    pthread_t *threads;
};

static void touch(struct populate *p, uint32_t stretch)
{
    uint64_t from = stretch * p->params.stretch_bytes, end = from + p->params.stretch_bytes;
    end = end < p->params.bytes ? end : p->params.bytes;
    int state = DONE;
    for (; from < end && !p->stopping; from += PIECE_BYTES) {
        uint64_t bytes = end - from < PIECE_BYTES ? end - from : PIECE_BYTES;
        int r = madvise((uint8_t *)p->params.at + from, bytes, MADV_POPULATE_WRITE);
        /* A kernel without it (before 5.14, EINVAL) leaves it to whoever uses the memory. */
        if (r < 0 && errno != EINVAL)
            state = FAILED;
    }
    if (!p->stopping)
        atomic_store_explicit(&p->state[stretch], state, memory_order_release);
}

/* Takes the next stretch. False: there is none. */
static bool take(struct populate *p, uint32_t *ret_stretch)
{
    uint32_t next = atomic_load(&p->next);
    while (next < atomic_load(&p->aim))
        if (atomic_compare_exchange_weak(&p->next, &next, next + 1)) {
            *ret_stretch = next;
            return true;
        }
    return false;
}

static void *populate_main(void *arg)
{
    struct populate *p = arg;
    prctl(PR_SET_NAME, "populate");
    setpriority(PRIO_PROCESS, (id_t)gettid(), NICE); /* of this thread; as it is where that is refused */
    for (;;) {
        uint32_t stretch, news = atomic_load(&p->news);
        if (p->stopping) /* looked at behind `news`, which is raised after it: no wait misses it */
            break;
        if (take(p, &stretch)) {
            if (p->params.before)
                p->params.before(p->params.before_arg, stretch);
            int64_t begin = trace_begin();
            touch(p, stretch);
            trace_end(TRACE_POPULATE, begin);
            continue;
        }
        atomic_fetch_add(&p->sleepers,
                         1); /* before the look at `news`; the owner does it the other way round */
        if (atomic_load(&p->news) == news)
            syscall(SYS_futex, &p->news, FUTEX_WAIT_PRIVATE, news, NULL, NULL, 0);
        atomic_fetch_sub(&p->sleepers, 1);
    }
    return NULL;
}

void populate_create(struct populate **ret, const struct populate_params *params)
{
    CHECK(params->threads >= 1 && params->stretch_bytes > 0);
    struct populate *p = mem_alloc(1, sizeof *p);
    p->params = *params;
    p->stretches = (uint32_t)((params->bytes + params->stretch_bytes - 1) / params->stretch_bytes);
    p->state = mem_alloc(p->stretches, sizeof *p->state);
    p->threads = mem_alloc((size_t)params->threads, sizeof *p->threads);
    for (int i = 0; i < params->threads; i++)
        thread_start(&p->threads[i], populate_main, p);
    *ret = p;
}

static void tell(struct populate *p)
{
    atomic_fetch_add(&p->news, 1);
    if (atomic_load(&p->sleepers))
        syscall(SYS_futex, &p->news, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void populate_free(struct populate **populate)
{
    struct populate *p = *populate;
    if (!p)
        return;
    *populate = NULL;
    p->stopping = true;
    tell(p);
    for (int i = 0; i < p->params.threads; i++)
        pthread_join(p->threads[i], NULL);
    mem_free(&p->threads);
    mem_free(&p->state);
    mem_free(&p);
}

void populate_aim(struct populate *p, uint32_t stretches)
{
    stretches = stretches < p->stretches ? stretches : p->stretches;
    uint32_t before = atomic_load_explicit(&p->aim, memory_order_relaxed);
    if (stretches == before)
        return;
    atomic_store(&p->aim, stretches);
    if (stretches > before)
        tell(p);
}

bool populate_is_done(const struct populate *p, uint32_t stretch)
{
    CHECK(stretch < p->stretches);
    return atomic_load_explicit(&p->state[stretch], memory_order_acquire) == DONE;
}
