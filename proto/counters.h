/* What the store counts of a sequence, and of all of them: in CLOSED, DONE and its status. */
#ifndef PROTO_COUNTERS_H
#define PROTO_COUNTERS_H

#include <stdint.h>

/* All counts over the life of the sequence; rows and bytes over all heads and offloaded layers. "Selection"
 * means sinks and window left out. */
struct kv_counters {
    uint64_t steps;    /* sparse steps */
    uint64_t attended; /* positions attended, summed over steps and lists */
    uint64_t lists;    /* lists summed over */
    uint64_t selected; /* selected positions, summed over steps and lists that have a predecessor */
    uint64_t kept;     /* of those, how many the set before had */
    uint64_t rows_loaded, bytes_loaded;         /* gathered from the host for selections */
    uint64_t bytes_if_reloaded;                 /* what gathering every selection whole would have moved */
    uint64_t rows_filled, bytes_filled;         /* gathered for sinks, windows, pages, staging */
    uint64_t bytes_written;                     /* written through to the host */
    uint32_t layers_resident, layers_offloaded; /* at the end */
    uint32_t layers_offloaded_max;
    double mass_sum;      /* of mass_count selections, as TOPK told */
    double mass_base_sum; /* ... had each list had its base budget */
    uint64_t mass_count;
    uint64_t grown;     /* of these selections: with a list longer than its base budget */
    uint64_t fallbacks; /* steps whose set was short: the layers on the device attended everything */
};

#endif
