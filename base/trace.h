/* Stamps of a step on its way through the processes, for measurements of where its time goes.
 *
 * Off unless the environment's SPECONTEXT_TRACE names a folder when a program starts; then each process
 * keeps its stamps in a file of its own there (PART-PID.trace), mapped, so that however the process ends they
 * are there. bench/timeline.py reads them. A stamp costs a reading of the clock and 16 bytes of a file of
 * 16 MiB, whose room on the disk is taken when it is made; a full file takes no more of them. Any thread. */
#ifndef BASE_TRACE_H
#define BASE_TRACE_H

#include <stdbool.h>
#include <stdint.h>

/* In the order of the way; bench/timeline.py has the same names. */
enum trace_event {
    TRACE_POSTED = 1,     /* decoder: STEP_POSTED raised */
    TRACE_TOLD,           /* decoder: STEP handed to the socket */
    TRACE_HEARD,          /* retriever: STEP came out of the socket */
    TRACE_BEGUN,          /* retriever: its thread took it */
    TRACE_QUEUED,         /* retriever: all work is queued on the GPU */
    TRACE_RANKED,         /* retriever: lists are on the host */
    TRACE_COMPARED,       /* retriever: differences are made */
    TRACE_ANSWERED,       /* retriever: handed to the loop thread */
    TRACE_SENT,           /* retriever: last TOPK handed to the socket */
    TRACE_TOPK,           /* store: TOPK came out of the socket */
    TRACE_TOPK_TAKEN,     /* store: the planner took it */
    TRACE_CHECKED,        /* store: its sets are merged and checked */
    TRACE_DRAFTED,        /* store: done with it, the lists of the step ahead written */
    TRACE_SEEN,           /* store: the step's record was found */
    TRACE_TABLES_EARLY,   /* store: flag raised */
    TRACE_TABLES_LATE,    /* store: flag raised */
    TRACE_WRITTEN,        /* store: KV_WRITTEN was found */
    TRACE_WRITE_BACK,     /* store: new rows queued for the arena */
    TRACE_CONSUMED,       /* store: done with the step */
    TRACE_LAUNCHED,       /* decoder: the step is queued on the GPU */
    TRACE_RELEASED_EARLY, /* decoder: tables read */
    TRACE_RELEASED_LATE,  /* decoder: tables read */
    TRACE_ENDED,          /* decoder: the stream came to the step's end */
};

/* Takes the file of this process, named for its part. Without the environment's word it does nothing; a file
 * that cannot be made is logged and means no stamps. Once, before threads. */
void trace_open(const char *part);

extern bool trace_is_on;
extern _Thread_local uint32_t trace_step; /* for code that is not told the step: whoever knows it sets it */
void trace_stamp(enum trace_event event, uint32_t step);

static inline void trace(enum trace_event event, uint32_t step)
{
    if (trace_is_on)
        trace_stamp(event, step);
}

#endif
