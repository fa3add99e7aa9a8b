/* See thread.h. No state. Any thread. */
#include "base/thread.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"

uint32_t thread_cores(void)
{
    cpu_set_t set;
    /* A mask longer than the set is refused: then all cores are meant. */
    long n = sched_getaffinity(0, sizeof set, &set) ? sysconf(_SC_NPROCESSORS_ONLN) : CPU_COUNT(&set);
    return n > 0 ? (uint32_t)n : 1;
}

int thread_cores_check(uint32_t wanted, struct err *err)
{
    uint32_t cores = thread_cores();
    return wanted <= cores
               ? 0
               : err_set(err, -EINVAL,
                         "--cores: found %u, expected at most %u: this process may run on no more", wanted,
                         cores);
}

void thread_start(pthread_t *ret_thread, void *(*body)(void *arg), void *arg)
{
    int error = pthread_create(ret_thread, NULL, body, arg);
    if (error)
        check_exhausted("cannot start a thread: %s; expected room for its stack and for one more task "
                        "(ulimit -v, ulimit -u, pids of the cgroup)",
                        strerror(error));
}
