/* Threads that the process cannot do without. */
#ifndef BASE_THREAD_H
#define BASE_THREAD_H

#include <pthread.h>

/* As pthread_create; where the system refuses one, the process ends with a line that says so. */
void thread_start(pthread_t *ret_thread, void *(*body)(void *arg), void *arg);

#endif
