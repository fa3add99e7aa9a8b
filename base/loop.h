/* The event loop of a daemon's loop thread: file descriptors, timers, signals, and a hook before each sleep.
 * One thread owns it; loop_stop may be called from callbacks only. Other threads talk to it by mailboxes. */
#ifndef BASE_LOOP_H
#define BASE_LOOP_H

#include <stdint.h>

struct loop;

struct loop *loop_create(void);
void loop_free(struct loop **loop);

/* Calls fn(arg, events) when `fd` has any of the epoll `events` (level-triggered). 0 or -errno. */
int loop_add_fd(struct loop *loop, int fd, uint32_t events, void (*fn)(void *arg, uint32_t events),
                void *arg);
void loop_remove_fd(struct loop *loop, int fd); /* also from inside a callback, for any fd */

/* Calls fn every `period_ns` (first after one period). Returns a timer id >= 0. */
int loop_add_timer(struct loop *loop, int64_t period_ns, void (*fn)(void *arg), void *arg);
void loop_remove_timer(struct loop *loop, int timer);

/* Blocks `signals` (0-terminated list) for the whole process - call before threads start - and calls fn with
 * the number when one arrives. */
int loop_add_signals(struct loop *loop, const int *signals, void (*fn)(void *arg, int signal), void *arg);

/* Called before each sleep: drains queues whose readiness no descriptor tells (ZeroMQ's edge-triggered one).
 * Returns 1 when it did some work and wants to run again before sleeping. Several may be set; all are called.
 * fn NULL takes away those of `arg`. */
void loop_before_sleep(struct loop *loop, int (*fn)(void *arg), void *arg);

/* Runs until loop_stop; returns its code. */
int loop_run(struct loop *loop);
void loop_stop(struct loop *loop, int code);

#endif
