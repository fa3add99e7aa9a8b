/* What a GPU is and how much of it is free, asked by a process of its own: a context takes hundreds of
 * megabytes of the card and would stay with whoever asked. */
#ifndef LAUNCH_GPU_PROBE_H
#define LAUNCH_GPU_PROBE_H

#include <stdint.h>

#include "base/err.h"
#include "compute/gpu.h"

struct gpu_probe {
    struct gpu_info info;
    uint64_t free_bytes; /* while no context of ours is there */
};

/* Call before any other thread is started. Waits a minute at most. Errors as those of gpu_load and open; -EIO
 * or -ETIMEDOUT when the process that asked ended or hung. */
int gpu_probe(const char *device, struct gpu_probe *ret, struct err *err);

#endif
