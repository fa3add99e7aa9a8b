/* Keeps processors from being halted while steps follow one another. A halted one takes 20 to 50 us to
 * come back in a virtual machine, and a sleeping thread that is woken finds one: a decode step wakes some
 * ten, one after the other.
 *
 * One keeper for each processor, tied to it, of the policy SCHED_IDLE: it runs where nobody else wants to,
 * and yields the processor once a microsecond, so that nobody waits for it, not even a thread that yields
 * in a loop. It is a process of its own, with nothing of this one's but a page: a thread must run once more
 * to die, and such a one waits for that as long as others want its processor. With four busy programs on two
 * cores a process with such threads went 9 to 13 s after it was killed. */
#ifndef BASE_AWAKE_H
#define BASE_AWAKE_H

#include <stdint.h>

/* What cores without work do from step to step, as --idle says it: the parts' common words, in this order. */
#define AWAKE_IDLE_CHOICES "auto|halt|poll"
enum awake_idle { AWAKE_IDLE_AUTO, AWAKE_IDLE_HALT, AWAKE_IDLE_POLL };

struct awake;

/* For the first `cores` processors that this process may run on (>= 1); the keepers sleep. Where the
 * system refuses the policy, or further processes, nothing is kept awake. They end with the thread that
 * calls. */
void awake_create(struct awake **ret, uint32_t cores);

/* Ends the keepers and does not wait for it. Accepts NULL. */
void awake_free(struct awake **awake);

/* Work goes on: for 20 ms from now processors are kept awake. One thread at a time. Costs a few ns unless
 * the keepers were asleep. */
void awake_hint(struct awake *awake);

/* Keepers that keep a processor awake at this moment. Any thread. */
uint32_t awake_count(const struct awake *awake);

#endif
