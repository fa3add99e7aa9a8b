/* Host memory made ready ahead of need: which blocks open sequences will soon take, told to the threads that
 * touch memory (populate.h), and registered with the GPU once those have. Registering stops all launches of
 * the process, so it is done a piece at a time and only where no step waits for the planner. */
#ifndef KVSTORE_REACH_H
#define KVSTORE_REACH_H

#include "kvstore/planner.h"

/* Starts the threads. Once, when the planner's other parts are there. */
void reach_start(struct planner *planner);

/* While a step is computed: registers one more stretch. Returns when to call it again: 0 at once, else a
 * time; INT64_MAX: not in this step. In a sparse step it does so for a while some time after the record,
 * since the next one may come soon; in a dense one at any time. */
int64_t reach_step(struct planner *planner, int64_t now_ns);

/* Between steps: tells the threads how far; after a while without a step also registers one more stretch of
 * what has been populated. Whether it did. */
bool reach_quiet(struct planner *planner, int64_t now_ns);

#endif
