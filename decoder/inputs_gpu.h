/* What a step's launches read: tokens, positions, table rows, sampling, in pinned memory and on the device.
 *
 * Three blocks. `early` is known when the step is posted. `rows`, one for each phase of the tables, name the
 * table row of each token and are written when the tables were read: entries that were dropped get
 * ROW_VOID, for which kernels write and attend nothing. Offsets within a block depend on the batch's counts
 * alone, so that a captured copy serves every step of the same counts. Device thread only. */
#ifndef DECODER_INPUTS_GPU_H
#define DECODER_INPUTS_GPU_H

#include <stdint.h>

#include "base/err.h"
#include "decoder/gpu_device.h"
#include "decoder/pass_gpu.h"
#include "decoder/places.h"
#include "decoder/stepper.h"
#include "proto/control.h"

#define INPUTS_GPU_ROW_VOID UINT32_MAX
enum { INPUTS_GPU_PHASES = 2 };

struct inputs_gpu;

/* Pinned memory and device memory for batches of so many tokens and entries. */
int inputs_gpu_create(struct gpu_device *device, const struct pass_gpu_options *limits, uint32_t vocab,
                      struct inputs_gpu **ret_inputs, struct err *err);
void inputs_gpu_free(struct inputs_gpu **inputs);

/* Begins a step; nothing of the one before may be on the stream. Sampling rows are the parts in order: all
 * of a SPARSE step, else those that sample. */
int inputs_gpu_begin(struct inputs_gpu *in, const struct step_record *record, const struct stepper_spec *spec,
                     struct err *err);
int inputs_gpu_penalizes(const struct inputs_gpu *in);       /* whether some row of this step has penalties */
uint64_t inputs_gpu_generation(const struct inputs_gpu *in); /* changes when addresses do: graphs are void */

/* Host: rows of the phase, from what was read of the tables; or no rows at all. */
void inputs_gpu_rows(struct inputs_gpu *in, enum places_phase phase, const struct places *places);
void inputs_gpu_void(struct inputs_gpu *in);

/* Queues the copies; that of rows is given, for the stream that waits for the tables. */
int inputs_gpu_queue(struct inputs_gpu *in);
struct cuda_mapped_copy inputs_gpu_rows_copy(const struct inputs_gpu *in, enum places_phase phase);

/* Device address of each token's row in the feature segment, EXPORT_NONE for tokens without; NULL: no token
 * of this step has one. */
const uint32_t *inputs_gpu_features(const struct inputs_gpu *in);

/* The batch of this step, but for row_count; and its sampling. */
void inputs_gpu_batch(const struct inputs_gpu *in, struct pass_gpu_batch *ret);
void inputs_gpu_sampling(const struct inputs_gpu *in, struct pass_gpu_sampling *ret);

/* The id chosen for a part; the stream is done. -1: none, or not finite. */
int32_t inputs_gpu_chosen(const struct inputs_gpu *in, uint32_t part);

/* Flags of ours for the stream, one a phase. */
uint32_t *inputs_gpu_go(const struct inputs_gpu *in, enum places_phase phase); /* device address */
void inputs_gpu_let_go(struct inputs_gpu *in, enum places_phase phase, uint32_t step);

/* And one that the stream raises where it begins to wait for the late phase. */
uint32_t *inputs_gpu_arrival(const struct inputs_gpu *in); /* device address */
_Atomic uint32_t *inputs_gpu_arrived(const struct inputs_gpu *in);

#endif
