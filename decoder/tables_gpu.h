/* The store's memory as the GPU sees it: device memory opened by its handle, the control segment registered
 * for flags and copies, and a copy of the current step's tables on the device. Device thread only. */
#ifndef DECODER_TABLES_GPU_H
#define DECODER_TABLES_GPU_H

#include <stdint.h>

#include "base/err.h"
#include "decoder/gpu_device.h"
#include "decoder/pass_gpu.h"
#include "decoder/places.h"
#include "proto/control.h"

struct tables_gpu;

/* Opens and registers. -EPROTO when device memory is not a GPU's or another GPU's, with both named. `control`
 * stays mapped until tables_gpu_free. */
int tables_gpu_create(struct gpu_device *device, const struct kv_layout *layout,
                      struct control_header *control, struct tables_gpu **ret_tables, struct err *err);
void tables_gpu_free(struct tables_gpu **tables); /* nothing that uses them is on the stream */

/* Which tables, and how much of them, a step uses. */
struct tables_gpu_use {
    uint32_t step;     /* its parity counts */
    uint32_t rows;     /* table rows [0, rows) are copied */
    uint32_t resident; /* layers */
};

/* Queue copies of a sparse step's tables: where rows lie, for layers in pages or for those in slots; how many
 * a phase's lists have; the lists of one group of layers. At 32 sequences of 32K and 16 lists of 2048 they
 * are 1 MB for 8 resident layers, 4 for lists of positions and 4 for lists of slots, and the first layer
 * waits for what it needs: at 50 GB/s 20 us a MB. */
struct tables_gpu_lists {
    enum places_phase phase;
    uint32_t group;
    int slotted; /* numbers of slots; else positions */
};
int tables_gpu_copy_places(struct tables_gpu *t, const struct tables_gpu_use *use, int slotted,
                           struct CUstream_st *stream);
int tables_gpu_copy_counts(struct tables_gpu *t, const struct tables_gpu_use *use, enum places_phase phase,
                           struct CUstream_st *stream);
int tables_gpu_copy_lists(struct tables_gpu *t, const struct tables_gpu_use *use,
                          const struct tables_gpu_lists *lists, struct CUstream_st *stream);
/* The pages of one sequence of a dense step. */
int tables_gpu_copy_pages(struct tables_gpu *t, uint32_t step, uint32_t sequence);

/* Where a layer's KV lies: in slots or in pages; lists of the phase where `sparse`. `positions`: the
 * batch's. */
struct tables_gpu_layer {
    uint32_t layer;
    enum places_phase phase;
    int sparse, slotted;
    const uint32_t *positions;
};
void tables_gpu_kv(const struct tables_gpu *t, const struct tables_gpu_layer *layer, struct pass_gpu_kv *ret);

uint32_t *tables_gpu_flag(const struct tables_gpu *t, unsigned flag); /* its device address */

#endif
