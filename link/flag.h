/* Flags between processes, in the futex form: proto/control.h says what each means and who writes it.
 * The same calls become stream memory operations where the waiter is a GPU stream. */
#ifndef LINK_FLAG_H
#define LINK_FLAG_H

#include <stdint.h>

#include "proto/control.h"

/* Stores `step` with release order and wakes the reader. Never moves an aborted flag back. */
void flag_raise(struct control_flag *flag, uint32_t step);

/* Whether the flag has reached `step` (acquire). An aborted flag has not. */
int flag_reached(struct control_flag *flag, uint32_t step);

/* Waits until the flag reaches `step`. 0, -ECANCELED when it was aborted, -ETIMEDOUT at deadline_ns. Spins
 * for `spin_ns` before it sleeps. */
int flag_wait(struct control_flag *flag, uint32_t step, int64_t deadline_ns, int64_t spin_ns);

/* Breaks present and future waits. Either side may call it, again as well. */
void flag_abort(struct control_flag *flag);

/* `step`: what the caller waited for last. */
int flag_aborted(const struct control_flag *flag, uint32_t step);

/* Aborts all flags of a control segment: what a survivor does first when its peer has died. */
void flag_abort_all(struct control_header *header);

/* Doorbells: eventfds that tell a loop or a planner that some flag moved. */
int doorbell_create(int *ret_fd);
void doorbell_ring(int fd);
void doorbell_clear(int fd);

#endif
