/* The engine's half on a GPU: the decoder's own pass there (decoder/pass_gpu.h) over pages on the device,
 * with logits, and queries and KV where they are looked at, brought back. One thread; every call waits for
 * its own end. */
#ifndef EVAL_ENGINE_GPU_H
#define EVAL_ENGINE_GPU_H

#include <stdint.h>

#include "eval/engine.h"

struct engine_gpu;

struct engine_gpu_options {
    const char *device; /* "cuda", "cuda:N", "GPU-..." */
    const struct model *model;
    int threads;           /* of the CPU, for loading */
    uint32_t tokens, rows; /* of one call: tokens; sequences and logits */
    uint32_t list_max;     /* of sparse lists */
};

int engine_gpu_open(const struct engine_gpu_options *options, struct engine_gpu **ret, struct err *err);
void engine_gpu_close(struct engine_gpu **gpu);

/* Device memory for what pages_plan planned; copies of split pages. */
int engine_gpu_pages(struct engine_gpu *gpu, struct pages *pages, struct err *err);
void engine_gpu_pages_free(struct engine_gpu *gpu, struct pages *pages);
int engine_gpu_fork(struct engine_gpu *gpu, const struct pages *pages, struct err *err);

/* As engine_steps and engine_dense. All steps of a call are of the same pages. */
int engine_gpu_steps(struct engine_gpu *gpu, struct taps *taps, const struct engine_step *steps,
                     uint32_t count, struct err *err);
int engine_gpu_dense(struct engine_gpu *gpu, struct engine *engine, const struct engine_chunk *chunk,
                     const struct engine_watch *watch, struct err *err);

float *engine_gpu_logits(const struct engine_gpu *gpu, uint32_t row);
const float *engine_gpu_queries(const struct engine_gpu *gpu, uint32_t token);

#endif
