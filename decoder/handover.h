/* The feature segment on its way to the retriever, and the loop's hold on it: the loop thread maps it to let
 * go of waits in it. Loop thread only. */
#ifndef DECODER_HANDOVER_H
#define DECODER_HANDOVER_H

#include <stdint.h>

#include "base/err.h"
#include "base/loop.h"
#include "link/segment.h"

#define HANDOVER_ANSWER_S 30 /* the longest wait for the retriever's answer */

struct handover {
    struct loop *loop;
    /* `why` NULL: the retriever uses the segment; else that it does not. At most one call for each send. */
    void (*done)(void *arg, const char *why);
    void *arg;
    struct segment segment;
    int connection; /* to retriever.fd; -1: none */
    int timer;      /* while the answer is waited for; -1: it is not */
};

void handover_init(struct handover *h, struct loop *loop, void (*done)(void *arg, const char *why),
                   void *arg);

/* Sends the segment `fd`, which stays the caller's, to who listens at `path`; what was sent before is let go.
 * Blocks up to 1 s while nobody listens; a retriever that is not there is one that does not answer. */
int handover_send(struct handover *h, const char *path, int fd, uint64_t epoch, struct err *err);

/* Ends present and future waits for the retriever in the segment sent last. */
void handover_abort(struct handover *h);

/* The retriever is gone: no answer is waited for, and `done` is not called. */
void handover_drop(struct handover *h);

void handover_close(struct handover *h);

#endif
