/* What scheduler.c (requests: admitted, opened, closed, begun again) and scheduler_steps.c (steps: who is in
 * one, what the retriever and the clients are told of it) share. */
#ifndef DECODER_SCHEDULER_PRIVATE_H
#define DECODER_SCHEDULER_PRIVATE_H

#include "decoder/generation.h"
#include "decoder/scheduler.h"

struct scheduler {
    struct scheduler_options options;
    struct stepper *stepper;
    struct export *export;                          /* NULL: the head reads no hidden states */
    struct generation *all[SCHEDULER_REQUESTS_MAX]; /* in order of arrival */
    uint32_t count;
    bool retriever_ready, served; /* served: a turn has found it ready */
    int64_t lost_at_ns;           /* when one that had served was lost */
    bool full;                    /* the store had no room: nobody is admitted until a sequence is closed */
    struct scheduler_figures figures;

    struct generation *members[LIMIT_SEQUENCES]; /* of the step being made */
    struct stepper_part parts[LIMIT_SEQUENCES];
    struct stepper_verdict verdicts[LIMIT_SEQUENCES];
    struct msg told; /* a STEP that waits until the step is computed; kind 0: none */
    uint32_t posted; /* members of the step that runs */
};

void scheduler_emit(struct scheduler *s, enum scheduler_target target, const struct msg *msg);

/* Whether steps may name it: granted, and not closed. */
bool scheduler_computes(const struct generation *q);

/* Whether the retriever needs the sequence's hidden states. */
bool scheduler_reads_features(const struct scheduler *s, const struct generation *q);

/* One prefill chunk of the first that has a prompt to compute; one decode step of every sequence that is so
 * far. Errors as scheduler_turn's. */
int scheduler_prefill(struct scheduler *s, struct err *err);
int scheduler_decode(struct scheduler *s, struct err *err);

/* A RECORD step of the last tokens of those that ended, which go to their clients then. */
void scheduler_record(struct scheduler *s);

/* What is done while a step is computed: for stepper_on_meanwhile, `arg` is the scheduler. */
void scheduler_send_recorded(void *arg);

#endif
