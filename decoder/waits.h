/* How long steps waited, as counts by length: four buckets an octave, so that a quantile is at most a
 * quarter too large. Counts only grow: who reads them twice has those of the time between. */
#ifndef DECODER_WAITS_H
#define DECODER_WAITS_H

#include <stdint.h>

#define WAITS_BUCKETS 144u /* the last one holds all that is longer than two minutes */

struct waits {
    uint64_t count[WAITS_BUCKETS], total;
};

void waits_add(struct waits *waits, int64_t ns); /* below 0: as 0 */

/* Nanoseconds that everything in the bucket is shorter than. */
int64_t waits_bound_ns(uint32_t bucket);

/* Bound of the bucket that holds the `q` quantile, 0 < q <= 1; 0 when nothing was counted. */
int64_t waits_quantile_ns(const struct waits *waits, double q);

#endif
