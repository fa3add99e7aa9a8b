/* Memory touched for the first time on threads of its own, ahead of need: the kernel zeroes each page then,
 * which takes 0.5 ms a MiB.
 *
 * One owner, who says how far (populate_aim) and asks what is done; the threads, of low priority, go through
 * stretches in ascending order, in small pieces, and never write to the memory's bytes. Each stretch is done
 * by one of them, which alone says so. The owner may touch and use any of the memory meanwhile. */
#ifndef KVSTORE_POPULATE_H
#define KVSTORE_POPULATE_H

#include <stdbool.h>
#include <stdint.h>

struct populate;

struct populate_params {
    void *at;               /* page aligned; mapped for as long as the threads are there */
    uint64_t bytes;         /* all that there can be of it: the last stretch may be shorter */
    uint64_t stretch_bytes; /* a multiple of the page */
    int threads;            /* >= 1 */
    void (*before)(void *arg, uint32_t stretch); /* tests: a thread is about to begin with one; or NULL */
    void *before_arg;
};

/* The threads wait until there is something to do. */
void populate_create(struct populate **ret, const struct populate_params *params);

/* Joins the threads: within one small piece. Accepts NULL. */
void populate_free(struct populate **populate);

/* Stretches [0, stretches) shall be populated; what the memory is mapped from is that long. Fewer than
 * before: those that nobody has begun with are left. Wakes threads only when there is more to do. */
void populate_aim(struct populate *populate, uint32_t stretches);

/* Whether a stretch has been. Never, when there was no memory for it. Any thread. */
bool populate_is_done(const struct populate *populate, uint32_t stretch);

#endif
