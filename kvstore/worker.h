/* The planner's thread and the two mailboxes between it and the loop thread.
 *
 * The thread opens the GPU, if there is one, and makes the planner, for a GPU's context belongs to the
 * thread that uses it. The loop thread puts commands and takes answers; of the planner it reads only what
 * never changes in its life, and the snapshot that worker_stats copies. */
#ifndef KVSTORE_WORKER_H
#define KVSTORE_WORKER_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/planner.h"
#include "link/bus.h"

enum worker_command_kind { WORKER_MESSAGE, WORKER_ATTACH, WORKER_DETACH, WORKER_CALL, WORKER_STOP };

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
    WORKER_FAILED,   /* the GPU is lost and the daemon has to end: error.text */
};

struct worker_answer {
    enum worker_answer_kind kind;
    struct bus_peer peer;
    uint32_t role;
    struct msg msg;
    void *owned; /* freed with the answer: what msg points to */
    uint64_t epoch;
    int fds[4]; /* device (memfd only), control, doorbell of the store, of the decoder: the loop thread's to
                   close */
    uint32_t fd_count;
    uint64_t device_bytes, control_bytes;
    struct err error;
};

struct worker_sequence {
    uint64_t id;
    uint32_t index, prompt, next, committed, capacity, budget;
    bool attached;
};

struct worker_gpu {     /* bytes by kind */
    const char *device; /* as it was asked for; NULL: none */
    char uuid[sizeof((struct gpu_info *)0)->uuid];
    int mps;
    uint64_t context_bytes, kv_bytes, tables_bytes, registered_bytes;
};

struct worker_stats { /* a snapshot for STATUS */
    struct worker_gpu gpu;
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

/* Starts the thread; with `device` naming a GPU it opens it. 0, or why it cannot. */
int worker_start(struct worker **ret, const struct planner_options *options, const char *device,
                 struct err *err);
void worker_stop(struct worker **worker);

/* "cpu", or the UUID of the GPU. */
const char *worker_device(const struct worker *worker);

/* Makes a planner, or gets rid of it, and returns when that is done. `arena_fd`: as
 * planner_create_adopting, or -1: a new arena. */
int worker_make(struct worker *worker, const struct kv_layout *layout, int arena_fd, struct err *err);
void worker_unmake(struct worker *worker);

/* NULL while there is none. Only what is fixed when it is made may be read. */
const struct planner *worker_planner(const struct worker *worker);

/* Takes `command` (made with mem_alloc). -EAGAIN: the queue is full, the command stays the caller's. */
int worker_put(struct worker *worker, struct worker_command *command);
void worker_command_free(struct worker_command *command);

struct worker_answer *worker_take(struct worker *worker); /* NULL: none */
void worker_answer_free(struct worker_answer *answer);
int worker_fd(const struct worker *worker); /* readable while answers are there */
void worker_stats(struct worker *worker, struct worker_stats *ret);

#endif
