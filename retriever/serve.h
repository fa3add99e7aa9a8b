/* The loop thread of the retriever: its sockets and its peers. */
#ifndef RETRIEVER_SERVE_H
#define RETRIEVER_SERVE_H

#include <stdbool.h>

#include "base/err.h"
#include "base/loop.h"
#include "proto/msg.h"
#include "retriever/worker.h"

/* What the daemon is, for peers and for status. Borrowed. */
struct serve_identity {
    struct msg_hello hello;
    const char *model, *head, *pool, *backend, *rope; /* names */
    char fingerprint[33];
    uint32_t threads, sequences;
};

struct serve;

/* Binds retriever.sock in `runtime` and starts to greet kvstore.sock there (which may come later). `worker`
 * and `loop` are borrowed. The loop is stopped with 0 after DRAIN, with 1 when the store refuses this
 * retriever. */
int serve_create(struct loop *loop, struct worker *worker, const struct serve_identity *identity,
                 const char *runtime, struct serve **ret_serve, struct err *err);
void serve_free(struct serve **serve);

#endif
