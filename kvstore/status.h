/* STATUS of the store as JSON. */
#ifndef KVSTORE_STATUS_H
#define KVSTORE_STATUS_H

#include "kvstore/store_worker.h"
#include "link/bus.h"

struct status_source {
    const struct store_worker_stats *stats; /* NULL: no decoder has come yet */
    const struct kv_layout *layout;         /* with stats */
    const struct planner_options *options;
    const struct bus_counters *bus;
    const char *state; /* what it waits for or does */
};

char *status_of_store(const struct status_source *source); /* malloc'ed */

#endif
