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

#include "base/clock.h"

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

/* What a thread did for a while: the store's planner, the last one apart. Such a stamp's time is that of its
 * begin, and in the place of a step stand the ns that it took (UINT32_MAX: at least so many). They lie within
 * one another; bench/timeline.py has the same names and counts a moment for the shortest around it. */
enum trace_span {
    TRACE_AWAKE = 64,     /* from one sleep to the next */
    TRACE_ADVANCE,        /* what steps ask for: tables, gathers, write-back, their end */
    TRACE_SETS,           /* a TOPK */
    TRACE_OPEN,           /* an OPEN */
    TRACE_CLOSE,          /* a CLOSE */
    TRACE_COMMAND,        /* any other: attach, detach, resume, prefix, a planner made or dropped */
    TRACE_LEAVE,          /* a sequence's pages, slots and blocks are given back; or its pages of a run */
    TRACE_MOVE,           /* layers leave the device or have come back: a new resident set */
    TRACE_RETURN,         /* some rows of layers that come back */
    TRACE_GATHER,         /* lists made and queued, or rows copied */
    TRACE_BACK,           /* rows of the step before queued for the arena */
    TRACE_REGISTER_LATE,  /* a step needed host memory that was not registered */
    TRACE_REGISTER_AHEAD, /* the same in time */
    TRACE_TOUCH,          /* first touch of memory that is registered late */
    TRACE_GROW,           /* the arena's file lengthened */
    TRACE_STREAM_WAIT,    /* for the GPU: rows to publish, a list's memory, the end of it all */
    TRACE_WIDEN,          /* larger buffers for lists */
    TRACE_POPULATE,       /* threads of kvstore/populate.c: first touch of a stretch */
    TRACE_NEAR,           /* outside `awake`: looking for a step that is near */
};

extern bool trace_is_on;
extern _Thread_local uint32_t trace_step; /* for code that is not told the step: whoever knows it sets it */
void trace_stamp(enum trace_event event, uint32_t step);

static inline void trace(enum trace_event event, uint32_t step)
{
    if (trace_is_on)
        trace_stamp(event, step);
}

/* Around what a span is of: begin = trace_begin(); ...; trace_end(TRACE_..., begin). Spans of less than 10 us
 * are left out. */
void trace_stamp_span(enum trace_span span, int64_t begin_ns);

static inline int64_t trace_begin(void)
{
    return trace_is_on ? clock_now_ns() : 0;
}

static inline void trace_end(enum trace_span span, int64_t begin_ns)
{
    if (trace_is_on)
        trace_stamp_span(span, begin_ns);
}

#endif
