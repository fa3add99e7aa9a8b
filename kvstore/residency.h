/* Which layers are on the device: accounting, versions, and the transitions between them.
 *
 * Layers of runs [0, resident) are; those of the first kept_runs, which the arena lacks, always. Offloading
 * goes run by run from the last; it is proposed as soon as what all sequences will need next no longer fits.
 * Coming back needs room for all that they may ever grow to, so that a load near the threshold stays put.
 * The step of the threshold moves sequence by sequence what slots will hold of a whole run; pages are given
 * behind it, but where the next sequence's slots need their room. Where that is not enough slots are taken
 * layer by layer before that layer's pages are given, and where there is still less the pages go first. */
#ifndef KVSTORE_RESIDENCY_H
#define KVSTORE_RESIDENCY_H

#include <stdint.h>

#include "kvstore/planner.h"

/* Staging and versions for a new decoder. `params` gets staging_tokens. */
void residency_init(struct planner *planner, struct control_params *params);
void residency_close(struct planner *planner);

struct residency_need { /* of a sequence that is not there yet */
    uint32_t pages, slot_slabs;
};

/* Slabs for all sequences and `more`, with that many runs resident: what they need soon, or at most ever. */
uint64_t residency_slabs(const struct planner *planner, uint32_t runs, const struct residency_need *more,
                         bool ever);

/* Proposes what memory asks for; called when the load has changed. */
void residency_review(struct planner *planner);

/* The version that a step's record names comes into use. -EPROTO: it was never proposed, or is older. */
int residency_apply(struct planner *planner, uint32_t version);

/* Pages of all resident runs for a sequence: room for `positions`, rows of [0, valid). 0 or -ENOSPC. The
 * fills are added to the gather batch. */
int residency_ensure_pages(struct planner *planner, struct sequence *sequence, uint32_t positions,
                           uint32_t valid);

/* Slots in all offloaded layers, for a sparse step. 0 or -ENOSPC. */
int residency_ensure_slots(struct planner *planner, struct sequence *sequence);

/* One piece of what no step waits for: pages of runs that have left are given, those of runs that come back
 * filled. Whether there may be more. */
bool residency_idle(struct planner *planner);
/* Whether pages of runs that have left are still to be given, which takes no time of the GPU's. */
bool residency_leaving(const struct planner *planner);

void residency_give_all(struct planner *planner, struct sequence *sequence); /* pages of every run */

static inline uint32_t residency_layers(const struct planner *p)
{
    return layout_run_first(&p->layout, p->residency.resident);
}

/* Places of the staging pages of a layer of `run`, from page `first`. */
const uint64_t *residency_staging(const struct planner *planner, uint32_t run, uint32_t layer,
                                  uint32_t first);

#endif
