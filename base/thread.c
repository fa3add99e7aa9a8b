/* See thread.h. No state. Any thread. */
#include "base/thread.h"

#include <string.h>

#include "base/check.h"

void thread_start(pthread_t *ret_thread, void *(*body)(void *arg), void *arg)
{
    int error = pthread_create(ret_thread, NULL, body, arg);
    if (error)
        check_exhausted("cannot start a thread: %s; expected room for its stack and for one more task "
                        "(ulimit -v, ulimit -u, pids of the cgroup)",
                        strerror(error));
}
