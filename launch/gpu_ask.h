/* Questions to a GPU that a process of its own puts: a context takes hundreds of megabytes of the card and
 * would stay with whoever asked. */
#ifndef LAUNCH_GPU_ASK_H
#define LAUNCH_GPU_ASK_H

#include <stddef.h>

#include "base/err.h"

/* In the child: fills `ret`, which holds no pointers. 0 or a negative errno with its line. */
typedef int gpu_question(const char *device, void *ret, struct err *err);

/* Forks, asks, and takes over the answer of `bytes` (at most GPU_ASK_BYTES). Call before any other thread is
 * started. Waits a minute at most. Errors of the question; -EIO or -ETIMEDOUT when the process that asked
 * ended or hung, with `what` in the line. */
#define GPU_ASK_BYTES 1024u
int gpu_ask(const char *device, const char *what, gpu_question *ask, void *ret, size_t bytes,
            struct err *err);

#endif
