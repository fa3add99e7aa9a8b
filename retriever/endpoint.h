/* The loop thread of the retriever: its sockets and its peers. */
#ifndef RETRIEVER_ENDPOINT_H
#define RETRIEVER_ENDPOINT_H

#include <stdbool.h>

#include "base/err.h"
#include "base/loop.h"
#include "compute/gpu.h"
#include "proto/msg.h"
#include "retriever/worker.h"

/* What the daemon is, for peers and for status. Borrowed. */
struct endpoint_identity {
    struct msg_hello hello;
    const char *model, *head, *pool, *backend, *rope, *key_type; /* names */
    char fingerprint[33];
    uint32_t threads, sequences;
    struct gpu_info gpu; /* uuid "": on the CPU */
};

struct endpoint;

/* Binds retriever.sock in `runtime` and starts to greet kvstore.sock there (which may come later). `worker`
 * and `loop` are borrowed. The loop is stopped with 0 after DRAIN, with 1 when the store refuses this
 * retriever. */
int endpoint_create(struct loop *loop, struct worker *worker, const struct endpoint_identity *identity,
                    const char *runtime, struct endpoint **ret_endpoint, struct err *err);
void endpoint_free(struct endpoint **endpoint);

#endif
