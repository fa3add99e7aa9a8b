/* The state machine of the step in flight: SHARED-MEMORY.md section 3. */
#ifndef KVSTORE_STEP_H
#define KVSTORE_STEP_H

#include "kvstore/planner.h"

/* Moves on as far as flags and sets allow. Whether anything moved. */
bool step_advance(struct planner *planner);

/* Queues the rows of a sparse step that were left for later, so that the next step's tables come first. Must
 * come before their pages or slots are given away and before anything reads them from the arena:
 * planner_commit with `wait` does it too. */
void step_write_owed(struct planner *planner);

/* A sequence of the step closes while its set is waited for: nothing waits for it any more. */
void step_leave(struct planner *planner, struct sequence *sequence);

/* ns until a moment that the planner's thread should meet awake, 0: it is now, INT64_MAX: none is known. On a
 * GPU the next step follows at the heels of a sparse one, and one ends when about as long has passed as the
 * last one took: to be woken then would take longer than all that is left to do for the next one's tables.
 * Steps so short that it would be most of them are slept through. */
int64_t step_until_near(const struct planner *planner, int64_t now_ns);

#endif
