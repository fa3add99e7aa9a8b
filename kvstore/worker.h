/* The planner's thread and the two mailboxes between it and the loop thread.
 *
 * The loop thread puts commands and takes answers; it never touches the planner while the thread runs,
 * except to read the snapshot that worker_stats copies. */
#ifndef KVSTORE_WORKER_H
#define KVSTORE_WORKER_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/planner.h"
#include "link/bus.h"

enum worker_command_kind { WORKER_MESSAGE, WORKER_ATTACH, WORKER_DETACH, WORKER_STOP };

struct worker_command {
    enum worker_command_kind kind;
    struct bus_peer peer; /* MESSAGE: who asked */
    struct msg msg;       /* MESSAGE: owned */
    uint64_t epoch;       /* ATTACH: of the decoder */
};

enum worker_answer_kind {
    WORKER_REPLY,    /* msg to peer */
    WORKER_TO_ROLE,  /* msg to whoever has `role` now */
    WORKER_ATTACHED, /* fds for the decoder of `epoch`; error.code < 0: none, and why */
    WORKER_BROKEN,   /* the decoder of `epoch` broke the rules: error.text */
};

struct worker_answer {
    enum worker_answer_kind kind;
    struct bus_peer peer;
    uint32_t role;
    struct msg msg;
    void *owned; /* freed with the answer: what msg points to */
    uint64_t epoch;
    int fds[4]; /* device, control, doorbell of the store, of the decoder: the loop thread's to close */
    uint64_t device_bytes, control_bytes;
    struct err error;
};

struct worker_sequence {
    uint64_t id;
    uint32_t index, prompt, next, committed, capacity, budget;
    bool attached;
};

struct worker_stats { /* a snapshot for STATUS */
    struct planner_totals totals;
    struct kv_counters live; /* of open sequences, summed */
    uint64_t store_epoch, decoder_epoch;
    bool attached;
    enum step_state state;
    uint32_t step, layers, layers_resident, version, proposed;
    uint32_t slabs, slabs_free, slabs_slots, slabs_staging, pages;
    uint64_t slab_bytes, page_bytes, device_bytes;
    uint32_t blocks, blocks_present, blocks_free, blocks_cached;
    uint64_t answers_lost; /* the loop was too far behind */
    uint64_t block_bytes, arena_bytes, control_bytes;
    uint32_t slots, staging_tokens, list_max;
    uint32_t live_count;
    struct worker_sequence sequences[LIMIT_SEQUENCES];
};

struct worker;

/* Starts the thread over `planner`, which stays the caller's and must not be touched until worker_stop.
 * The planner's events must be worker_events(): set them before it is created. */
struct worker *worker_start(struct planner *planner);
void worker_stop(struct worker **worker);
struct planner_events worker_events(void);

/* Takes `command` (made with mem_alloc). -EAGAIN: the queue is full, the command stays the caller's. */
int worker_put(struct worker *worker, struct worker_command *command);
void worker_command_free(struct worker_command *command);

struct worker_answer *worker_take(struct worker *worker); /* NULL: none */
void worker_answer_free(struct worker_answer *answer);
int worker_fd(const struct worker *worker); /* readable while answers are there */
void worker_stats(struct worker *worker, struct worker_stats *ret);

#endif
