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

#endif
