/* The decoder's GPU: the device, its one stream, and how much of its memory this process took, by purpose.
 * Device thread only; opened and closed by it. */
#ifndef DECODER_GPU_DEVICE_H
#define DECODER_GPU_DEVICE_H

#include <stdint.h>

#include "base/err.h"
#include "compute/gpu.h"

enum gpu_device_use {
    GPU_DEVICE_WEIGHTS,
    GPU_DEVICE_ACTIVATIONS, /* inputs and chosen ids too */
    GPU_DEVICE_TABLES,      /* copies of the store's tables */
    GPU_DEVICE_WORKSPACE,   /* of attention */
    GPU_DEVICE_FEATURES,    /* hidden states that the retriever reads */
    GPU_DEVICE_USES
};

struct gpu_device {
    const struct gpu_api *api;
    struct gpu *gpu;
    struct CUstream_st *stream;
    uint64_t bytes[GPU_DEVICE_USES];
};

/* For reports: a copy that outlives the device. */
struct gpu_device_figures {
    struct gpu_info info;
    uint64_t bytes[GPU_DEVICE_USES];
    uint64_t library_bytes; /* of the libraries behind the products */
    uint64_t total_bytes;   /* all that this process takes on the card, its context included */
};

/* Loads the library, opens `device` ("cuda", "cuda:N", "GPU-...") and makes the stream. */
int gpu_device_open(const char *device, struct gpu_device **ret_device, struct err *err);
void gpu_device_free(struct gpu_device **device);

/* Counted device memory, 256-byte aligned. -ENOMEM with the purpose in the text. */
int gpu_device_alloc(struct gpu_device *d, enum gpu_device_use use, uint64_t bytes, void **ret_at,
                     struct err *err);
void gpu_device_release(struct gpu_device *d, enum gpu_device_use use, uint64_t bytes, void *at);

/* What to say when a call of the table returned `r` < 0: the context's error if it has one. Returns r. */
int gpu_device_error(struct gpu_device *d, int r, const char *what, struct err *err);

void gpu_device_figures(const struct gpu_device *d, struct gpu_device_figures *ret);

#endif
