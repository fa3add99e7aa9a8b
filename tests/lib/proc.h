/* Processes under test: started with both outputs captured, waited for by condition and deadline. */
#ifndef TESTS_LIB_PROC_H
#define TESTS_LIB_PROC_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/clock.h"

struct proc_text {
    char *text; /* NUL-terminated, NULL while empty */
    size_t bytes;
};

struct proc {
    pid_t pid;
    int pidfd;          /* -1: reaped */
    int out_fd, err_fd; /* -1: at end */
    struct proc_text out, err;
    int status; /* of waitpid, once reaped */
};

/* Starts argv[0] with extra environment "NAME=value" lines (NULL-terminated list; may be NULL). */
void proc_start(struct proc *proc, const char *const *argv, const char *const *environment);

/* Takes output that is there; waits at most until deadline_ns for more. Returns false at the deadline. */
bool proc_pump(struct proc *proc, int64_t deadline_ns);

/* Until standard output has at least `bytes` bytes. False: deadline, or both outputs ended before. */
bool proc_wait_output(struct proc *proc, size_t bytes, int64_t deadline_ns);

/* Until the process has ended; takes its outputs meanwhile. False at the deadline. */
bool proc_wait(struct proc *proc, int64_t deadline_ns);

bool proc_exited(const struct proc *proc, int code); /* reaped, by exit(code) */

/* Kills what is left, frees. Accepts a zeroed one. */
void proc_free(struct proc *proc);

/* Pid of a child of `parent` whose program's name begins with `name`, or 0. */
pid_t proc_child(pid_t parent, const char *name);

/* Whether the process is gone, or only a zombie. */
bool proc_gone(pid_t pid);

/* Until proc_gone of all `count` pids. False at the deadline. */
bool proc_wait_gone(const pid_t *pids, int count, int64_t deadline_ns);

/* Whether /proc/PID/maps has `text`. */
bool proc_maps_have(pid_t pid, const char *text);

/* A program of the build that the running test belongs to: "specontext". */
const char *proc_program(const char *name);

#endif
