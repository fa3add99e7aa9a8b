/* The planner: everything the store knows and decides, behind calls that need no socket and no thread.
 *
 * One owner: the thread that calls it (worker.c in the daemon, the test itself in tests). planner_advance
 * does what can be done now and says what it waits for; nothing in here blocks except copies of rows.
 *
 *   planner.c    attach, open, close, resume, sets        step.c       the state machine of one step
 *   residency.c  which layers are on the device           adopt.c      an arena left by another process
 *   sets.c       selections as they arrive                reach.c      host memory ready ahead of need */
#ifndef KVSTORE_PLANNER_H
#define KVSTORE_PLANNER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/pool.h"
#include "kvstore/gather.h"
#include "kvstore/tables.h"
#include "proto/msg.h"

#define PLANNER_ORPHAN_NS (60 * CLOCK_S) /* a dead decoder's sequences are kept for so long */

struct planner_options {
    uint64_t device_bytes, host_bytes;
    uint32_t sequences;      /* live at a time */
    uint32_t slots;          /* of one (sequence, group, row head); 0: 1.5 x the sequence's budget */
    uint32_t budget;         /* largest that a sequence may ask for; 0: the context */
    uint32_t offload_layers; /* at least the last so many are offloaded, whatever memory allows */
    uint32_t write_through;  /* enum memory_write_through */
    int threads;
    bool no_elastic, no_prefix, no_offload, poison;
    void (*before_touch)(void *arg, uint32_t stretch); /* tests: as `before` in populate.h */
    void *before_touch_arg;
    struct device_gpu *gpu; /* that device memory lies on, borrowed; NULL: a memfd */
};

struct planner_events { /* called from inside planner calls */
    void *arg;
    void (*reselect)(void *arg, uint64_t sequence, uint32_t step);
    void (*closed)(void *arg, uint64_t request, const struct msg_closed *closed);
    void (*broken)(void *arg, const char *why); /* the decoder broke the rules; every wait was aborted */
};

enum step_state {
    STEP_IDLE,     /* waits for STEP_POSTED */
    STEP_SETS,     /* sparse: waits for TOPK */
    STEP_STAGED,   /* dense: offloaded runs go through staging; waits for RUN_CONSUMED */
    STEP_WRITTEN,  /* waits for KV_WRITTEN */
    STEP_CONSUMED, /* waits for STEP_CONSUMED */
};

struct step_part {             /* one entry of the step in flight */
    struct sequence *sequence; /* NULL: refused */
    uint32_t index, position, count, token_at;
    int32_t status;
    bool pins_owed;           /* what its tables name is pinned behind them */
    struct sequence *leaving; /* closed before its set came; its memory is kept until the step is consumed */
};

struct step {
    enum step_state state;
    uint32_t step; /* in flight, or else the next one */
    uint32_t kind, selection, early_layers;
    uint32_t parts;
    struct step_part part[LIMIT_SEQUENCES];
    uint32_t runs_raised;  /* ROWS_READY of runs [0, runs_raised) has been raised */
    uint32_t runs_written; /* dense: staged rows of runs below are back in the arena */
    bool phase_out[2];
    int64_t seen_ns, ended_ns;     /* when one began last, and ended */
    int64_t tables_ns, planned_ns; /* sparse: its late tables were out, and all that belongs to them */
    int64_t took_ns;               /* the last sparse one, begin to end */
    bool reached;                  /* reach_step registered memory in this one */
    /* sparse: nothing that was queued up to its tables of places writes pages of resident layers, or reads
     * what has become one. What the step queues then does neither: the decoder may write them at once. */
    bool pages_settled;
    uint32_t staged_at[LIMIT_SEQUENCES]; /* first staging page of each part */
    struct step_record record;           /* private copy */
};

struct residency {
    uint32_t runs, resident;                 /* of the model; resident in the version in use */
    uint32_t version, proposed;              /* in use, and proposed last */
    uint32_t runs_of[CONTROL_RESIDENT_RING]; /* resident runs of version v at v % 64 */
    uint32_t returning;                      /* runs being filled for; 0: none */
    int32_t forced;                          /* tests: that many runs, whatever memory says; -1: by memory */
    uint32_t staging_pages;                  /* of one layer and buffer */
    uint32_t staging_slabs;                  /* both buffers, all layers of a run */
    uint64_t *staging;                       /* [2][layer of a run][staging_pages] places; NULL: not taken */
    uint64_t *staging_slab;                  /* [staging_slabs] */
    uint32_t staging_layers;
};

struct commit {            /* rows that are on their way into the arena (GPU) */
    bool owed;             /* they are still to be queued: step_write_owed */
    bool waits;            /* they are */
    uint32_t ticket, step; /* there when the stream has passed the ticket */
    uint32_t parts;
    struct {
        struct sequence *sequence;
        uint32_t end;
    } part[LIMIT_SEQUENCES];
};

/* On a GPU the next step follows that close at the heels of a sparse one, mostly, and two that follow one
 * another differ by less. */
#define PLANNER_NEAR_NS (INT64_C(300) * 1000)

struct planner_totals { /* since the start */
    uint64_t steps_dense, steps_sparse, steps_record, sets, sets_refused, opened, refused, closed;
    uint64_t offloads, returns, blocks_evicted, reused_tokens, prompt_tokens, waits_broken;
    struct kv_counters counters;         /* of closed sequences */
    int64_t plan_ns, gather_ns, move_ns; /* move: of layers out of the device's memory, or back */
};

struct planner {
    struct planner_options options;
    struct planner_events events;
    uint64_t epoch;          /* of this store */
    struct kv_layout layout; /* the decoder's; blocks.layout says which layers the arena has */
    uint32_t kept_runs;      /* runs [0, kept_runs) never leave the device: the arena does not have them */
    struct blocks blocks;
    struct prefix prefix;
    struct device device;
    struct pool *pool;
    struct gather gather;
    bool attached; /* a decoder is there: the fields down to `step` are valid */
    bool broken;   /* it broke the rules: nothing is done for it until it is gone */
    uint64_t decoder_epoch;
    struct segment control;
    struct control_header *flags; /* of the control segment: for its flags alone */
    struct tables tables;
    int32_t *merge_scratch; /* [thread][SELECTION_SCRATCH(list_max)] */
    struct sequence_params params;
    struct residency residency;
    struct step step;
    struct commit commit;
    struct sequence sequences[LIMIT_SEQUENCES];
    struct planner_totals totals;
};

/* `arena_fd`: an inherited arena (taken when it can be used, else left to the caller), or -1.
 * `ret_adopted` tells which; when it could not be used *ret_why says why and a fresh arena was made. */
int planner_create(struct planner **ret, const struct planner_options *options,
                   const struct kv_layout *layout, const struct planner_events *events, struct err *err);
int planner_create_adopting(struct planner **ret, const struct planner_options *options,
                            const struct kv_layout *layout, const struct planner_events *events, int arena_fd,
                            struct err *why);
void planner_free(struct planner **planner);

/* Makes a control segment for a decoder. -EBUSY while another is attached; -ENOMEM. */
int planner_attach(struct planner *planner, uint64_t decoder_epoch, struct err *err);

/* The decoder is gone: waits are broken, the step in flight is void, its sequences wait for a RESUME. */
void planner_detach(struct planner *planner, int64_t now_ns);

/* 0 and *ret_grant; -EEXIST, -EINVAL; -E2BIG: can never fit; -ENOSPC: does not fit now. One line with
 * numbers. */
int planner_open(struct planner *planner, const struct msg_open *open, struct msg_grant *ret_grant,
                 struct err *err);

/* `events.closed` follows, at once or when the step that names the sequence is consumed. -ENOENT. */
int planner_close(struct planner *planner, uint64_t id, uint64_t request);

/* Ids in ret_resumed->tokens are the caller's to free with mem_free. -ENOENT. */
int planner_resume(struct planner *planner, uint64_t id, struct msg_resumed *ret_resumed, struct err *err);

uint32_t planner_prefix(const struct planner *planner, const struct msg_prefix *query);
void planner_topk(struct planner *planner, const struct msg *msg);

/* Asks, by events.reselect, for sets newer than those at hand: of a retriever that came, or came back, which
 * may have sent some to a store that did not know it. */
void planner_ask(struct planner *planner);

/* Does all that can be done now. Returns whether work that needs no event is left (filling pages,
 * registering memory): call planner_idle then, between events. While a step is computed: reach_step
 * (reach.h). */
void planner_advance(struct planner *planner);
bool planner_idle(struct planner *planner, int64_t now_ns);

/* The flag that the step in flight waits for and that rings no doorbell; NULL when it waits for none. */
struct control_flag *planner_waits_for(struct planner *planner, uint32_t *ret_step);

/* GPU: queued work is not done yet, so planner_advance should be called again within a millisecond; and the
 * error that ends the daemon, NULL while there is none. */
bool planner_busy(struct planner *planner);
const struct err *planner_error(const struct planner *planner);

/* Tests: propose that exactly `runs` runs are resident, or those that are kept; -1: by memory again. */
void planner_force(struct planner *planner, int32_t runs);

/* ---- shared by the planner's files ---- */

static inline struct control_flag *planner_flag(struct planner *p, unsigned flag)
{
    return (struct control_flag *)((uint8_t *)p->flags + p->tables.header.flags_at) + flag;
}

/* What the step in flight wrote back is published; with `wait` it is waited for, so nothing is left after. */
void planner_commit(struct planner *planner, bool wait);

/* ROWS_READY of a run, once all rows that were queued are in place. */
void planner_raise_rows(struct planner *planner, uint32_t run);

void planner_break(struct planner *planner, const char *why);
void planner_finish_close(struct planner *planner, struct sequence *sequence);

/* Makes the waiting next sets of sequences known to the tables' side: stages or commits them as far as the
 * step in flight allows. */
void planner_settle(struct planner *planner, struct sequence *const *sequences, uint32_t count);

/* Adds jobs for loads and fills in layers [layer, end), counting their bytes. */
void planner_gather_layers(struct planner *planner, struct sequence *sequence, uint32_t layer, uint32_t end);
/* Counts rows of loads and fills and forgets them. */
void planner_gather_done(struct planner *planner, struct sequence *sequence);

#endif
