/* Which sequence goes on next: admission, prefill in chunks between decode steps, batches by kind and
 * selection, ends. Speaks to others through one function that emits messages; waits for nobody but in
 * stepper_run. Device thread only. */
#ifndef DECODER_SCHEDULER_H
#define DECODER_SCHEDULER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "decoder/stepper.h"
#include "proto/msg.h"

#define SCHEDULER_REQUESTS_MAX 1024u /* queued and running; more are refused with -EBUSY */
#define SCHEDULER_ANSWER_S     30    /* the longest wait for a GRANT or CLOSED */

enum scheduler_target { SCHEDULER_TO_CLIENT, SCHEDULER_TO_STORE, SCHEDULER_TO_RETRIEVER };

struct scheduler_options {
    uint32_t vocab, context;
    uint32_t list_max;  /* of the control segment */
    uint32_t sequences; /* live at once; <= the control segment's and the pass's */
    uint32_t chunk;     /* prefill tokens a step */
    uint64_t head;      /* fingerprint of the retrieval head: part of how sparse KV is made */
    const uint8_t *eos; /* [vocab], borrowed: 1 = ends a generation */
    bool features;      /* the head reads hidden states: scheduler_export says where they go */
    int64_t grace_ns;   /* how long a request waits for another retriever when one is gone */
    /* Sends `msg`, whose memory (mem_free) passes to the callee; msg->id is the sequence or step. To a
     * client the sequence's id names the request. */
    void (*emit)(void *arg, enum scheduler_target target, const struct msg *msg);
    /* Once in each step, behind what is emitted while it is computed; or NULL. */
    void (*meanwhile)(void *arg);
    void *arg;
};

struct scheduler_figures {
    uint32_t running, waiting;
    uint64_t prompt_tokens, cached_tokens, generated_tokens; /* computed; of them not; sampled */
    uint64_t finished[5];                                    /* by enum finish_reason */
    uint64_t non_finite;                                     /* sequences ended because of it */
    uint64_t begun_again;                                    /* because their retriever was gone */
};

struct scheduler;

struct scheduler *scheduler_create(const struct scheduler_options *options, struct stepper *stepper);
void scheduler_free(struct scheduler **scheduler);

/* Orders; handled at step boundaries. `id`: the request's number, never used before. Takes msg's memory. */
void scheduler_generate(struct scheduler *s, uint64_t id, struct msg *msg);
void scheduler_cancel(struct scheduler *s, uint64_t id); /* unknown: nothing */

/* GRANT, CLOSED and ERROR of the store, GRANT and ERROR of the retriever. The message stays the caller's. */
void scheduler_store(struct scheduler *s, const struct msg *msg);
void scheduler_retriever(struct scheduler *s, const struct msg *msg);

/* The retriever is there (again), or gone: then sparse sequences that live are closed and wait, in the order
 * in which they came and with those that come meanwhile, to be begun again with the next one: from the
 * prompt, since what the head's keys are made of is not kept. What their clients have got is computed once
 * more, not sampled. None for grace_ns: they fail. A step that waits for selections finds out by itself. */
void scheduler_retriever_ready(struct scheduler *s, int ready);

/* Where hidden states go; borrowed, of the stepper too. Before the retriever is ready for the first time, and
 * before each time it is ready again. */
void scheduler_export(struct scheduler *s, struct export *export);

/* One prefill chunk and one decode step of every sequence that is so far. 1: there is more to compute; 0:
 * nothing until an order comes. Negative: the step could not be done, the store is lost; call no more. */
int scheduler_turn(struct scheduler *s, struct err *err);

void scheduler_figures(const struct scheduler *s, struct scheduler_figures *ret);

#endif
