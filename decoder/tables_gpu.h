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

/* Copies of a sparse step's tables: where rows lie in layers [layer, end), all in pages or all in slots, and
 * for those in slots where new rows are written; how many a phase's lists have; the lists of one group of
 * layers. At 32 sequences of 32K and lists of 2048 for 8 heads they are 0.1 MB a layer in pages, 2 MB for
 * lists of positions and 2 MB for lists of slots. Either by tables_gpu_copy, or with others by copy_mapped
 * (compute/gpu.h). */
struct tables_gpu_lists {
    enum places_phase phase;
    uint32_t group;
    int slotted; /* numbers of slots; else positions */
};
struct cuda_mapped_copy tables_gpu_places(const struct tables_gpu *t, const struct tables_gpu_use *use,
                                          int slotted, uint32_t layer, uint32_t end);
struct cuda_mapped_copy tables_gpu_writes(const struct tables_gpu *t, const struct tables_gpu_use *use);
struct cuda_mapped_copy tables_gpu_counts(const struct tables_gpu *t, const struct tables_gpu_use *use,
                                          enum places_phase phase);
struct cuda_mapped_copy tables_gpu_lists(const struct tables_gpu *t, const struct tables_gpu_use *use,
                                         const struct tables_gpu_lists *lists);
/* Queues one of them on a copy engine, beside what the card computes. */
int tables_gpu_copy(struct tables_gpu *t, const struct cuda_mapped_copy *part, struct CUstream_st *stream);
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
