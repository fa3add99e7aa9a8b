/* Parallel loops over a fixed set of threads; see pool.h.
 *
 * Owner: the thread that calls pool_run. Workers spin for a short while for the next loop before they sleep,
 * since a decode step runs hundreds of loops of tens of microseconds each and a futex wake costs as much. */
#include "base/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/prctl.h>

#include "base/alloc.h"
#include "base/check.h"

enum { POOL_SPIN = 2000 };

struct pool_worker {
    struct pool *pool;
    pthread_t thread;
    int index;
};

struct pool {
    int threads;
    const char *name;
    struct pool_worker *workers;
    void (*body)(void *arg, int index, int thread);
    void *arg;
    int count;
    _Alignas(64) atomic_int next;      /* next index to take */
    _Alignas(64) atomic_uint round;    /* raised by the owner to start a loop */
    _Alignas(64) atomic_int running;   /* workers that have not finished this round */
    pthread_mutex_t mutex;
    pthread_cond_t start;
    pthread_cond_t done;
    int stopping;
};

static void take_indices(struct pool *pool, int thread)
{
    for (;;) {
        int i = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (i >= pool->count)
            return;
        pool->body(pool->arg, i, thread);
    }
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void wait_round(struct pool *pool, unsigned seen)
{
    for (int i = 0; i < POOL_SPIN; i++) {
        if (atomic_load_explicit(&pool->round, memory_order_acquire) != seen)
            return;
        relax();
    }
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load_explicit(&pool->round, memory_order_acquire) == seen)
        pthread_cond_wait(&pool->start, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *arg)
{
    struct pool_worker *worker = arg;
    struct pool *pool = worker->pool;
    char name[16];
    snprintf(name, sizeof name, "%.10s/%d", pool->name, worker->index);
    prctl(PR_SET_NAME, name);
    unsigned seen = 0;
    for (;;) {
        wait_round(pool, seen);
        seen++;
        if (pool->stopping)
            return NULL;
        take_indices(pool, worker->index);
        if (atomic_fetch_sub_explicit(&pool->running, 1, memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->mutex);
        }
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
    pthread_cond_init(&pool->start, NULL);
    pthread_cond_init(&pool->done, NULL);
    for (int i = 1; i < threads; i++) {
        pool->workers[i].pool = pool;
        pool->workers[i].index = i;
        CHECK(pthread_create(&pool->workers[i].thread, NULL, worker_main, &pool->workers[i]) == 0);
    }
    return pool;
}

static void start_round(struct pool *pool)
{
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add_explicit(&pool->round, 1, memory_order_release);
    pthread_cond_broadcast(&pool->start);
    pthread_mutex_unlock(&pool->mutex);
}

void pool_free(struct pool **pool_at)
{
    struct pool *pool = *pool_at;
    if (!pool)
        return;
    *pool_at = NULL;
    pool->stopping = 1;
    start_round(pool);
    for (int i = 1; i < pool->threads; i++)
        pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->done);
    pthread_cond_destroy(&pool->start);
    pthread_mutex_destroy(&pool->mutex);
    mem_free(&pool->workers);
    mem_free(&pool);
}

int pool_threads(const struct pool *pool)
{
    return pool->threads;
}

static void wait_workers(struct pool *pool)
{
    for (int i = 0; i < POOL_SPIN; i++) {
        if (atomic_load_explicit(&pool->running, memory_order_acquire) == 0)
            return;
        relax();
    }
    pthread_mutex_lock(&pool->mutex);
    while (atomic_load_explicit(&pool->running, memory_order_acquire) != 0)
        pthread_cond_wait(&pool->done, &pool->mutex);
    pthread_mutex_unlock(&pool->mutex);
}

void pool_run(struct pool *pool, int count, void (*body)(void *arg, int index, int thread), void *arg)
{
    if (pool->threads == 1 || count <= 1) {
        for (int i = 0; i < count; i++)
            body(arg, i, 0);
        return;
    }
    pool->body = body;
    pool->arg = arg;
    pool->count = count;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->running, pool->threads - 1, memory_order_relaxed);
    start_round(pool);
    take_indices(pool, 0);
    wait_workers(pool);
}
