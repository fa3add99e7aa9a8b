/* The planner's thread and the two mailboxes between it and the loop thread.
 *
 * The thread opens the GPU, if there is one, and makes the planner, for a GPU's context belongs to the
 * thread that uses it. The loop thread puts commands and takes answers; of the planner it reads only what
 * never changes in its life, and the snapshot that store_worker_stats copies. */
#ifndef KVSTORE_STORE_WORKER_H
#define KVSTORE_STORE_WORKER_H

#include <stdbool.h>
#include <stdint.h>

#include "kvstore/planner.h"
#include "link/bus.h"

enum store_worker_command_kind {
    STORE_WORKER_MESSAGE,
    STORE_WORKER_ASK, /* a retriever came: planner_ask */
    STORE_WORKER_ATTACH,
    STORE_WORKER_DETACH,
    STORE_WORKER_CALL,
    STORE_WORKER_STOP
};

struct store_worker_command {
    enum store_worker_command_kind kind;
    struct bus_peer peer; /* MESSAGE: who asked */
    struct msg msg;       /* MESSAGE: owned */
    uint64_t epoch;       /* ATTACH: of the decoder */
};

enum store_worker_answer_kind {
    STORE_WORKER_REPLY,    /* msg to peer */
    STORE_WORKER_TO_ROLE,  /* msg to whoever has `role` now */
    STORE_WORKER_ATTACHED, /* fds for the decoder of `epoch`; error.code < 0: none, and why */
    STORE_WORKER_BROKEN,   /* the decoder of `epoch` broke the rules: error.text */
    STORE_WORKER_FAILED,   /* the GPU is lost and the daemon has to end: error.text */
};

struct store_worker_answer {
    enum store_worker_answer_kind kind;
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

struct store_worker_sequence {
    uint64_t id;
    uint32_t index, prompt, next, committed, capacity, budget;
    bool attached;
};

struct store_worker_gpu { /* bytes by kind */
    const char *device;   /* as it was asked for; NULL: none */
    char uuid[sizeof((struct gpu_info *)0)->uuid];
    int mps;
    uint64_t context_bytes, kv_bytes, tables_bytes, registered_bytes;
    uint64_t reached_ahead, reached_late, reached_touched; /* stretches of the arena: gather_gpu.h */
};

struct store_worker_stats { /* a snapshot for STATUS */
    struct store_worker_gpu gpu;
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
    uint32_t host_layers; /* whose rows the arena has */
    uint32_t slots, staging_tokens, list_max;
    uint32_t live_count;
    struct store_worker_sequence sequences[LIMIT_SEQUENCES];
};

struct store_worker;

/* Starts the thread; with `device` naming a GPU it opens it. 0, or why it cannot. */
int store_worker_start(struct store_worker **ret, const struct planner_options *options, const char *device,
                       struct err *err);
void store_worker_stop(struct store_worker **worker);

/* "cpu", or the UUID of the GPU. */
const char *store_worker_device(const struct store_worker *worker);

/* Makes a planner, or gets rid of it, and returns when that is done. `arena_fd`: as
 * planner_create_adopting, or -1: a new arena. */
int store_worker_make(struct store_worker *worker, const struct kv_layout *layout, int arena_fd,
                      struct err *err);
void store_worker_unmake(struct store_worker *worker);

/* NULL while there is none. Only what is fixed when it is made may be read. */
const struct planner *store_worker_planner(const struct store_worker *worker);

/* Takes `command` (made with mem_alloc). -EAGAIN: the queue is full, the command stays the caller's. */
int store_worker_put(struct store_worker *worker, struct store_worker_command *command);
void store_worker_command_free(struct store_worker_command *command);

struct store_worker_answer *store_worker_take(struct store_worker *worker); /* NULL: none */
void store_worker_answer_free(struct store_worker_answer *answer);
int store_worker_fd(const struct store_worker *worker); /* readable while answers are there */
void store_worker_stats(struct store_worker *worker, struct store_worker_stats *ret);

#endif
