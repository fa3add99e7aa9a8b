/* A model's weights on a GPU: matrices expanded to bf16, those that share their input stacked into one;
 * vectors in f32. One allocation, written once, read by every pass. Device thread only. */
#ifndef DECODER_WEIGHTS_GPU_H
#define DECODER_WEIGHTS_GPU_H

#include <stdatomic.h>
#include <stdint.h>

#include "base/err.h"
#include "decoder/gpu_device.h"
#include "model/model.h"

struct weights_gpu_layer {        /* device addresses; NULL where the model has none */
    const float *attn_norm;       /* [hidden] */
    const void *qkv;              /* bf16 [q_heads * head_dim + 2 * kv_heads * head_dim][hidden] */
    const float *qkv_bias;        /* as many */
    const float *q_norm, *k_norm; /* [head_dim] */
    const void *wo;               /* bf16 [hidden][q_heads * head_dim] */
    const float *ffn_norm;        /* [hidden] */
    const void *gate_up;          /* bf16 [2 * ffn][hidden]: gate, then up */
    const void *down;             /* bf16 [hidden][ffn] */
};

struct weights_gpu {
    struct gpu_device *device;
    struct weights_gpu_layer *layers; /* [config.layers] */
    const void *embedding, *output;   /* bf16 [vocab][hidden]; the same if tied */
    const float *output_norm;         /* [hidden] */
    const float *inv_freq;            /* [rope.dims / 2] */
    float rope_scale;
    void *memory;
    uint64_t bytes;
};

/* Reads, expands and uploads everything; `threads` of the CPU help. Seconds for a model of some GB: ends with
 * -ECANCELED soon after *stop (may be NULL) is set. `device` is borrowed, for the object's life. */
int weights_gpu_create(struct gpu_device *device, const struct model *model, int threads,
                       const atomic_int *stop, struct weights_gpu **ret_weights, struct err *err);
void weights_gpu_free(struct weights_gpu **weights);

#endif
