/* What a GPU can move, measured in the run whose figures are set against it. */
#ifndef LAUNCH_BENCH_GPU_H
#define LAUNCH_BENCH_GPU_H

#include <stdint.h>

#include "base/err.h"
#include "model/model.h"

struct bench_gpu {
    char name[96];
    int mps;
    double copy_rate; /* bytes read and written in a second by a copy on the device */
    double link_rate; /* bytes in a second from pinned host memory */
};

/* Opens the device, copies, closes it, in a process of its own (gpu_ask.h): call while no request runs.
 * Needs 1 GiB of device memory and 256 MiB of pinned memory for a moment; takes less where that is not
 * free. Errors as those of gpu_load and open too. */
int bench_gpu_measure(const char *device, struct bench_gpu *ret, struct err *err);

/* Bytes of weights that a decode step reads on a GPU: all matrices and the output as bf16, of the embedding
 * table rows alone. */
uint64_t bench_gpu_weights(const struct model *model);

#endif
