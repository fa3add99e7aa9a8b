/* Holds the descriptor of the store's host arena, so that the KV in it outlives the store. The memory is
 * never mapped here. Loop's thread. */
#ifndef LAUNCH_ARENA_H
#define LAUNCH_ARENA_H

#include <stdint.h>

#include "base/err.h"
#include "base/loop.h"

struct arena_hold {
    struct loop *loop;
    int socket; /* -1: not asked, or answered */
    int fd;     /* the arena; -1: not received */
};

void arena_hold_init(struct arena_hold *hold, struct loop *loop);

/* Asks the store of runtime directory `dir`; the answer is taken when it comes. The store must listen
 * already. */
int arena_hold_ask(struct arena_hold *hold, const char *dir, uint64_t epoch, struct err *err);

void arena_hold_free(struct arena_hold *hold); /* closes; accepts one that never asked */

#endif
