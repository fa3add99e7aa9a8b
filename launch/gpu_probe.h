/* What a GPU is and how much of it is free, asked by a process of its own (gpu_ask.h). */
#ifndef LAUNCH_GPU_PROBE_H
#define LAUNCH_GPU_PROBE_H

#include <stdint.h>

#include "base/err.h"
#include "compute/gpu.h"

struct gpu_probe {
    struct gpu_info info;
    uint64_t free_bytes; /* while no context of ours is there */
};

/* As gpu_ask; errors as those of gpu_load and open too. */
int gpu_probe(const char *device, struct gpu_probe *ret, struct err *err);

/* Whether `device` is the card that was probed as `name`; not so where it is the CPU. Errors as gpu_probe. */
int gpu_probe_same(const struct gpu_probe *card, const char *name, const char *device, int *ret,
                   struct err *err);

#endif
