/* What the parts of step.c share: a step's record and end (step.c), what lies between for each kind. */
#ifndef KVSTORE_STEP_PRIVATE_H
#define KVSTORE_STEP_PRIVATE_H

#include "kvstore/step.h"

/* The part gets no tables but a status, a negative errno; its sequence has failed. */
void step_refuse(struct planner *planner, struct step_part *part, int status);

/* Raises ROWS_READY of runs up to `end` that were not raised. */
void step_raise_runs(struct planner *planner, uint32_t end);

/* Tables of all parts; then, run by run, rows into the staging pages and back. Whether anything moved. */
void step_dense_tables(struct planner *planner);
bool step_dense_advance(struct planner *planner);

/* Pages and slots of all parts; then lists, pins and loads of each phase whose sets are there. Whether
 * anything moved. */
void step_sparse_tables(struct planner *planner);
bool step_sparse_advance(struct planner *planner);

/* Next sets of the step's sequences that may be settled now. */
void step_sparse_settle(struct planner *planner);

#endif
