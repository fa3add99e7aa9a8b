/* Takes over the records of an arena that another process left: SHARED-MEMORY.md, "When the store dies". */
#ifndef KVSTORE_ADOPT_H
#define KVSTORE_ADOPT_H

#include <stdint.h>

#include "kvstore/planner.h"

struct adopt_report {
    uint32_t sequences, dropped; /* LIVE records taken over; those that did not hold what they must */
    uint32_t sealed, broken;     /* blocks whose hash fits their ids; SEALED ones whose hash does not */
};

/* Checks every record against the limits before it uses any, and rebuilds reference counts, free list,
 * index and order. Live sequences wait for a RESUME. */
struct adopt_report adopt_records(struct planner *planner, int64_t now_ns);

#endif
