/* A fixed set of threads that run one parallel loop at a time.
 *
 * The owner's thread takes part, so a pool of 1 has no thread of its own. Which thread runs which index is
 * not fixed: bodies must write to places that depend on the index alone, so results never depend on it. */
#ifndef BASE_POOL_H
#define BASE_POOL_H

struct pool;

/* `threads` >= 1 counts the caller. Names the threads "name/i". */
struct pool *pool_create(int threads, const char *name);

/* Joins the threads. Accepts NULL, sets *pool to NULL. */
void pool_free(struct pool **pool);

int pool_threads(const struct pool *pool);

/* Runs body(arg, index, thread) for every index in [0, count), returns when all are done. `thread` is in
 * [0, threads) and picks scratch memory. One caller at a time; a body must not call pool_run on the same
 * pool. */
void pool_run(struct pool *pool, int count, void (*body)(void *arg, int index, int thread), void *arg);

#endif
