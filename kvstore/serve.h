/* The store's loop thread: its server on the bus, the socket that hands out descriptors, and who is
 * attached. */
#ifndef KVSTORE_SERVE_H
#define KVSTORE_SERVE_H

#include "base/err.h"
#include "base/loop.h"
#include "kvstore/store_options.h"

struct serve;

/* Binds both sockets. `arena_fd`: an inherited arena, or -1; taken. */
int serve_create(struct serve **ret, struct loop *loop, const struct store_options *options, int arena_fd,
                 struct err *err);
void serve_free(struct serve **serve);

#endif
