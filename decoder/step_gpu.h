/* Steps on a GPU: the decoder's end of the control segment where device memory is a GPU's.
 *
 * Sparse steps are captured graphs, kept for the last batches' shapes: a graph copies its inputs from pinned
 * memory, waits for the tables, copies them to the device, waits for rows, run by run or for all at once
 * (joined_runs.h), and leaves the chosen ids in pinned memory. It is launched before the tables are there,
 * so that everything that needs none is done by then. For the tables it waits on a flag of ours: this thread
 * waits for the store's flag, checks what the store says of each entry, voids the table rows of those that
 * were dropped, and only then lets the stream go on. So a dropped entry, or a step that is broken off at its
 * tables, writes nothing into anybody's KV. For rows the stream waits on the store's own flags; broken off
 * there, a step writes its own new places, which are not committed. Dense steps (and every PROFILE_EVERY-th
 * sparse one) are queued launch by launch; this thread waits for their tables within layer 0.
 *
 * An entry whose set is short attends everything in resident layers (TABLE_ATTEND_ALL), which no graph can
 * foresee: the graph that was launched runs out without rows, the step is queued again launch by launch,
 * and so are the next STEP_GPU_DIRECT steps.
 *
 * Times: decode steps are measured with events once in STEP_GPU_PROFILE_EVERY, first the
 * STEP_GPU_PROFILE_AT-th after a prompt, prompts always; `times` sums over the steps that were measured.
 * Device thread only. */
#ifndef DECODER_STEP_GPU_H
#define DECODER_STEP_GPU_H

#include <stdint.h>

#include "base/err.h"
#include "decoder/pass_gpu.h"
#include "decoder/places.h"
#include "decoder/stepper.h"
#include "proto/control.h"

enum { STEP_GPU_PROFILE_EVERY = 512, STEP_GPU_PROFILE_AT = 16, STEP_GPU_DIRECT = 16 };

struct step_gpu;

struct step_gpu_figures {
    uint64_t captured, launched; /* graphs made; launches of graphs */
    uint64_t rejoined; /* changes between one wait for all rows and one a run: up to two graphs each */
    uint64_t repeated; /* steps that a graph began and launches made good */
    uint64_t profiled; /* steps in `times` */
    struct pass_gpu_times times;
    struct waits waits; /* `times.wait` of each that is no prompt's */
};

/* Waits for the tables of a phase and reads them into `places`; the stepper's. `arrived`: reaches the step
 * when the stream stands and waits for them too: till then nobody loses time. NULL: it does. */
struct step_gpu_tables {
    int (*wait)(void *arg, enum places_phase phase, const _Atomic uint32_t *arrived, struct err *err);
    void (*meanwhile)(void *arg); /* nothing but the step's end is to be waited for */
    void *arg;
    struct places *places;
};

/* Opens the store's device memory and registers the control segment (`bytes` mapped at `control`, which stays
 * mapped until step_gpu_free). `pass` is borrowed. */
int step_gpu_create(const struct kv_layout *layout, struct control_header *control, struct pass_gpu *pass,
                    struct step_gpu **ret_step, struct err *err);
void step_gpu_free(struct step_gpu **step);

/* From now on hidden states go there; NULL: nowhere. Borrowed. Graphs made before are void. */
void step_gpu_export(struct step_gpu *step, const struct export *export);

/* Computes the posted step of `record`. On success ret_tokens [spec->count] holds the chosen ids, -1 where
 * the logits are not finite; of dropped parts anything. Errors as stepper_run, and -EIO: the GPU is lost.
 * After an error nothing of the step is left on the stream, and no further step can be run; where the stream
 * does not end, the process does: one line, exit code 1. */
int step_gpu_run(struct step_gpu *g, const struct step_record *record, const struct stepper_spec *spec,
                 const struct step_gpu_tables *tables, int32_t *ret_tokens, struct err *err);

/* Of the steps that have ended; reads what events measured since it was called last. */
void step_gpu_figures(struct step_gpu *g, struct step_gpu_figures *ret);

#endif
