/* The parts of one run as child processes: started beside our own program, watched by descriptor, ended
 * together. A part that dies, or that does not come up in time, ends the whole: the others are told to end,
 * then killed, and the runtime directory is removed.
 *
 * All calls belong to the loop's thread. supervise_start forks, so it must come before any thread or ZeroMQ
 * context exists. If this process dies without a word, the parts see the life line's end. */
#ifndef LAUNCH_SUPERVISE_H
#define LAUNCH_SUPERVISE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/loop.h"

#define SUPERVISE_PARTS_MAX    8
#define SUPERVISE_ARGS_MAX     40
#define SUPERVISE_START_NS     (60 * CLOCK_S)   /* without a READY or a new STATUS */
#define SUPERVISE_START_MAX_NS (900 * CLOCK_S)  /* in all */
#define SUPERVISE_STOP_NS      (1 * CLOCK_S)    /* from SIGTERM to SIGKILL at an ordinary end */
#define SUPERVISE_FAIL_NS      (400 * CLOCK_MS) /* ... after a failure: seen by 4.5 s, gone by 5 s */

#define SUPERVISE_ENDING_NS (1500 * CLOCK_MS) /* that a part's end may take from its death on */

struct supervise;

struct supervise_ops {
    /* What a part says while it starts; may be NULL. */
    void (*status)(void *arg, const char *part, const char *text);
    void (*ready)(void *arg);                    /* every part is ready; once */
    void (*failed)(void *arg, const char *text); /* names the part, pid and cause; once. The end has begun */
    void (*stopped)(void *arg);                  /* no part is left, the directory is gone; once */
};

struct supervise_config {
    struct loop *loop;
    const char *bin_dir; /* where the programs lie; NULL: beside our own */
    const char *dir;     /* runtime directory; NULL: a new private one */
    int64_t start_ns;    /* in place of SUPERVISE_START_NS; 0: that */
};

/* Makes the runtime directory, the notify socket in it and the life line. Strings of `config` are copied. */
int supervise_create(const struct supervise_config *config, const struct supervise_ops *ops, void *arg,
                     struct supervise **ret_supervise, struct err *err);

/* Kills what still runs, waits for it, removes the directory. */
void supervise_free(struct supervise **supervise);

const char *supervise_dir(const struct supervise *supervise);

/* A part's command line under construction; strings are borrowed until supervise_start. */
struct supervise_part {
    const char *program; /* "specontext-kvstore": file name, and the name in messages; kept by pointer */
    int die_with_parent; /* killed by the kernel with us: for parts that have nothing to tidy up */
    const char *args[SUPERVISE_ARGS_MAX];
    int arg_count;
};
void supervise_arg(struct supervise_part *part, const char *name, const char *value); /* value may be NULL */

/* Forks and executes; adds --runtime and --lifeline. Standard input is empty, output goes to our stderr. */
int supervise_start(struct supervise *supervise, const struct supervise_part *part, struct err *err);

/* Pid of a part that was started, 0 when there is none of that name. */
pid_t supervise_pid(const struct supervise *supervise, const char *program);

/* Another part of this program found that `program` does not answer any more: a failure. */
void supervise_lost(struct supervise *supervise, const char *program, const char *why);

/* Whether some part is on its way out: the kernel frees what it held before it tells its end, which takes
 * long for memory that is pinned. Its end is then better news than what others say of it. */
bool supervise_ending(const struct supervise *supervise);

/* An ordinary end: SIGTERM, SUPERVISE_STOP_NS, SIGKILL; `stopped` follows. */
void supervise_stop(struct supervise *supervise);

/* Hurries an end that has begun, or begins it: SIGKILL. */
void supervise_kill(struct supervise *supervise);

#endif
