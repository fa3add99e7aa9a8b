/* The state machine of the step in flight: SHARED-MEMORY.md section 3. */
#ifndef KVSTORE_STEP_H
#define KVSTORE_STEP_H

#include "kvstore/planner.h"

/* Moves on as far as flags and sets allow. Whether anything moved. */
bool step_advance(struct planner *planner);

/* A sequence of the step closes while its set is waited for: nothing waits for it any more. */
void step_leave(struct planner *planner, struct sequence *sequence);

#endif
