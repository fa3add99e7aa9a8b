/* Threads that the process cannot do without, and the cores that there are for them. */
#ifndef BASE_THREAD_H
#define BASE_THREAD_H

#include <pthread.h>
#include <stdint.h>

#include "base/err.h"

/* Cores that this process may run on, at least 1. */
uint32_t thread_cores(void);

/* Of an option --cores: 0 stands for all. -EINVAL with a line when there are not so many. */
int thread_cores_check(uint32_t wanted, struct err *err);

/* As pthread_create; where the system refuses one, the process ends with a line that says so. */
void thread_start(pthread_t *ret_thread, void *(*body)(void *arg), void *arg);

#endif
