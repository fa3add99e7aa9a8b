/* The thread that computes: takes tasks of the loop thread, gives answers back. */
#ifndef RETRIEVER_WORKER_H
#define RETRIEVER_WORKER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "proto/msg.h"
#include "retriever/selector.h"

struct worker;

enum worker_kind {
    WORKER_MESSAGE,     /* OPEN, CLOSE, STEP or RESELECT, in `msg` */
    WORKER_NEW_DECODER, /* the decoder that opened the sequences is gone; `decoder` has another number */
    WORKER_FORGET,      /* whoever got the sets is gone: send whole ones next */
    WORKER_FEATURES,    /* the decoder's feature segment, in `features`; is answered */
};

struct worker_task {
    enum worker_kind kind;
    uint64_t decoder; /* number of the decoder's life; sequences of an earlier one are closed */
    struct msg msg;   /* owned; its memory is released with the task */
    int features;     /* WORKER_FEATURES: a descriptor, owned */
    struct selector_peers peers;
};

struct worker_answer {
    uint64_t decoder;
    uint64_t id;   /* of the message that it answers */
    bool features; /* it answers WORKER_FEATURES */
    bool granted;  /* it answers an OPEN that asks for keys that are kept: */
    struct msg_grant grant;
    struct err err; /* code != 0: the whole message, or the segment, was refused */
    struct selector_result result;
};

/* `selector` is the worker's own from here on. */
struct worker *worker_create(struct selector *selector);
/* Waits for the task in work, drops the others; frees the selector. */
void worker_free(struct worker **worker);

/* Hands over a task made by mem_alloc. -EAGAIN when too many are waiting: the task stays the caller's. */
int worker_put(struct worker *worker, struct worker_task *task);
void worker_task_free(struct worker_task **task);

/* Readable while answers are there. */
int worker_fd(const struct worker *worker);

/* The next answer, or NULL. Give it back with worker_done when it is sent: its memory is used again. */
struct worker_answer *worker_take(struct worker *worker);
void worker_done(struct worker *worker, struct worker_answer **answer);

/* As they were after the last task. Any thread. */
void worker_stats(struct worker *worker, struct selector_stats *ret_stats);

#endif
