/* The bodies of gather.h on a GPU: jobs become lists that its kernels walk, one launch for all jobs of a
 * kind and range of layers. Nothing waits, but for room in the pinned buffers. One owner: the planner. */
#ifndef KVSTORE_GATHER_GPU_H
#define KVSTORE_GATHER_GPU_H

#include "kvstore/gather.h"

/* For a gather whose other fields are set. */
struct gather_gpu *gather_gpu_create(struct gather *gather);
void gather_gpu_free(struct gather_gpu **gpu); /* waits for the stream; lets go of the arena */

/* Slab tables on the device, with the counts of a control header. */
int gather_gpu_attach(struct gather_gpu *gpu, const struct control_header *header, struct err *err);
void gather_gpu_detach(struct gather_gpu *gpu);

/* Queues the batch. */
void gather_gpu_run(struct gather_gpu *gpu);

/* Queues a batch of GATHER_ROWS piece by piece: its lists are made once, then layers [gather->low,
 * gather->end) of them go out with each call. Nothing else may be queued that takes pinned memory in
 * between. */
void gather_gpu_begin(struct gather_gpu *gpu);
void gather_gpu_layers(struct gather_gpu *gpu);

/* Registers one more stretch of those that hold the first `blocks`, if it has been populated. 1: it did; 0:
 * all of them are; -EAGAIN: the next one is not populated yet, or the GPU has failed. */
int gather_gpu_reach(struct gather_gpu *gpu, uint32_t blocks);

/* Stretches registered so far, and ns that one takes: the longest of the last ones that were registered ahead
 * of need. */
struct gather_gpu_reached {
    uint64_t ahead;   /* in time */
    uint64_t late;    /* when a step needed them, */
    uint64_t touched; /* of those: had to be populated first */
    int64_t longest_ns;
};
struct gather_gpu_reached gather_gpu_reached(const struct gather_gpu *gpu);

#endif
