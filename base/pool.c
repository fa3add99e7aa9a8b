/* Parallel loops over a fixed set of threads; see pool.h.
 *
 * Owner: the thread that calls pool_run. Workers spin for a short while for the next loop before they sleep,
 * since a decode step runs hundreds of loops of tens of microseconds each and a futex wake costs as much. */
#include "base/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/thread.h"

enum { POOL_SPIN = 2000 };

typedef void (*pool_body)(void *arg, int index, int thread);

struct pool_worker {
    struct pool *pool;
    pthread_t thread;
    int index;
};

/* `claim` is the round in the upper half and the next index in the lower. The owner closes it (index at its
 * highest) before it changes body, arg and count and opens it after, so a thread whose compare-and-swap
 * succeeds has read those three (with acquire) for the round that it claims. The owner waits for items,
 * never for threads: a worker that the system has not let run yet finds the round over and costs nothing. */
struct pool {
    int threads;
    const char *name;
    struct pool_worker *workers;
    _Atomic(pool_body) body;
    _Atomic(void *) arg;
    atomic_int count;
    _Alignas(64) atomic_uint_fast64_t claim;
    _Alignas(64) atomic_int done;     /* items of this round that are finished */
    _Alignas(64) atomic_int sleepers; /* workers that wait for `open`, or are about to */
    atomic_uint open;                 /* the round, again: a futex is a word */
    atomic_int owner_sleeps;
    atomic_int stopping;
    pthread_mutex_t mutex;
    pthread_cond_t finished;
};

static uint32_t round_of(uint64_t claim)
{
    return (uint32_t)(claim >> 32);
}

static void finish_item(struct pool *pool, int count)
{
    if (atomic_fetch_add(&pool->done, 1) + 1 < count || !atomic_load(&pool->owner_sleeps))
        return;
    pthread_mutex_lock(&pool->mutex);
    pthread_cond_signal(&pool->finished);
    pthread_mutex_unlock(&pool->mutex);
}

static void take_indices(struct pool *pool, int thread)
{
    uint64_t claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    for (;;) {
        int count = atomic_load_explicit(&pool->count, memory_order_acquire);
        pool_body body = atomic_load_explicit(&pool->body, memory_order_acquire);
        void *arg = atomic_load_explicit(&pool->arg, memory_order_acquire);
        uint32_t index = (uint32_t)claim;
        if (index >= (uint32_t)count)
            return;
        if (!atomic_compare_exchange_weak_explicit(&pool->claim, &claim, claim + 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        body(arg, (int)index, thread);
        finish_item(pool, count);
        claim = atomic_load_explicit(&pool->claim, memory_order_acquire);
    }
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Returns when a round other than `seen` is open. */
static void wait_round(struct pool *pool, uint32_t seen)
{
    for (int i = 0; i < POOL_SPIN; i++) {
        if (round_of(atomic_load_explicit(&pool->claim, memory_order_acquire)) != seen)
            return;
        relax();
    }
    atomic_fetch_add(&pool->sleepers,
                     1); /* before the look at `open`; the owner does it the other way round */
    while (atomic_load(&pool->open) == seen)
        syscall(SYS_futex, &pool->open, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&pool->sleepers, 1);
}

static void *worker_main(void *arg)
{
    struct pool_worker *worker = arg;
    struct pool *pool = worker->pool;
    char name[16];
    snprintf(name, sizeof name, "%.10s/%d", pool->name, worker->index);
    prctl(PR_SET_NAME, name);
    uint32_t seen = 0;
    for (;;) {
        wait_round(pool, seen);
        seen = round_of(atomic_load(&pool->claim));
        if (atomic_load(&pool->stopping))
            return NULL;
        take_indices(pool, worker->index);
    }
}

struct pool *pool_create(int threads, const char *name)
{
    CHECK(threads >= 1);
    struct pool *pool = mem_alloc_aligned(1, sizeof *pool);
    pool->threads = threads;
    pool->name = name;
    pool->workers = mem_alloc((size_t)threads, sizeof *pool->workers);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->finished, NULL);
    for (int i = 1; i < threads; i++) {
        pool->workers[i].pool = pool;
        pool->workers[i].index = i;
        thread_start(&pool->workers[i].thread, worker_main, &pool->workers[i]);
    }
    return pool;
}

static void start_round(struct pool *pool, pool_body body, void *arg, int count)
{
    uint64_t next = (uint64_t)(round_of(atomic_load(&pool->claim)) + 1) << 32;
    atomic_store(&pool->claim, (next - (UINT64_C(1) << 32)) | UINT32_MAX);
    atomic_store(&pool->body, body);
    atomic_store(&pool->arg, arg);
    atomic_store(&pool->count, count);
    atomic_store(&pool->done, 0);
    atomic_store(&pool->claim, next);
    atomic_store(&pool->open, round_of(next));
    /* No condition variable: woken by one, threads would wait for its mutex one after another. */
    if (atomic_load(&pool->sleepers))
        syscall(SYS_futex, &pool->open, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void pool_free(struct pool **pool_at)
{
    struct pool *pool = *pool_at;
    if (!pool)
        return;
    *pool_at = NULL;
    atomic_store(&pool->stopping, 1);
    start_round(pool, NULL, NULL, 0);
    for (int i = 1; i < pool->threads; i++)
        pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->finished);
    pthread_mutex_destroy(&pool->mutex);
    mem_free(&pool->workers);
    mem_free(&pool);
}

int pool_threads(const struct pool *pool)
{
    return pool->threads;
}

static void wait_items(struct pool *pool, int count)
{
    for (int i = 0; i < POOL_SPIN; i++) {
        if (atomic_load_explicit(&pool->done, memory_order_acquire) == count)
            return;
        relax();
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->owner_sleeps, 1); /* before the look at `done`; workers do it the other way round */
    while (atomic_load(&pool->done) != count)
        pthread_cond_wait(&pool->finished, &pool->mutex);
    atomic_store(&pool->owner_sleeps, 0);
    pthread_mutex_unlock(&pool->mutex);
}

void pool_run(struct pool *pool, int count, void (*body)(void *arg, int index, int thread), void *arg)
{
    if (pool->threads == 1 || count <= 1) {
        for (int i = 0; i < count; i++)
            body(arg, i, 0);
        return;
    }
    start_round(pool, body, arg, count);
    take_indices(pool, 0);
    wait_items(pool, count);
}
