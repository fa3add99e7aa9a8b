/* See waits.h. No state. */
#include "decoder/waits.h"

/* Below 4 ns a bucket a nanosecond; from there on by the highest bit and the two behind it. */
static uint32_t bucket_of(uint64_t ns)
{
    if (ns < 4)
        return (uint32_t)ns;
    uint32_t top = 63 - (uint32_t)__builtin_clzll(ns);
    uint32_t bucket = 4 * (top - 1) + (uint32_t)(ns >> (top - 2) & 3);
    return bucket < WAITS_BUCKETS ? bucket : WAITS_BUCKETS - 1;
}

void waits_add(struct waits *w, int64_t ns)
{
    w->count[bucket_of(ns > 0 ? (uint64_t)ns : 0)]++;
    w->total++;
}

int64_t waits_bound_ns(uint32_t bucket)
{
    return bucket < 4 ? bucket + 1 : (INT64_C(5) + bucket % 4) << (bucket / 4 - 1);
}

int64_t waits_quantile_ns(const struct waits *w, double q)
{
    uint64_t seen = 0;
    for (uint32_t i = 0; i < WAITS_BUCKETS; i++) {
        seen += w->count[i];
        if (w->count[i] && (double)seen >= q * (double)w->total)
            return waits_bound_ns(i);
    }
    return 0;
}
