/* Hidden states on their way out to a retriever whose head reads them: the decoder's end of the feature
 * segment (proto/features.h). Gives each token of a step a row, keeps rows that the retriever may still read
 * from being written again, and writes them.
 *
 * A row is named to the retriever by a STEP message that is sent after the step that wrote it has ended.
 * Device thread only; any thread may abort the flag in the segment's header, which ends a wait. */
#ifndef DECODER_EXPORT_H
#define DECODER_EXPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "decoder/gpu_device.h"
#include "model/model.h"
#include "proto/features.h"

#define EXPORT_NONE   UINT32_MAX /* in place of a row: nothing is exported of this token */
#define EXPORT_WAIT_S 30         /* the longest wait for the retriever to have read */

struct export;

struct export_options {
    struct layout_features wanted; /* of a retriever: identity_features has checked it */
    uint64_t decoder_epoch, retriever_epoch;
    uint32_t chunk;            /* tokens of the longest chunk of a prompt */
    const char *reader;        /* the retriever's device: "cpu", or a GPU's UUID */
    struct gpu_device *device; /* NULL: on the CPU */
};

/* Makes the segment; rows lie on the GPU where the retriever is on the same one. */
int export_create(const struct export_options *options, struct export **ret_export, struct err *err);
void export_free(struct export **export); /* nothing may write any more; accepts NULL inside */

int export_fd(const struct export *export); /* of the segment; stays the export's */

/* Rows of the next chunk of a prompt, the first of them; of a sequence's token at `position`, in a step. */
uint32_t export_chunk(struct export *export, uint32_t count);
uint32_t export_step(const struct export *export, uint32_t index, uint32_t position);

/* The number of the next message to the retriever; it names rows [row, row + count). */
uint32_t export_message(struct export *export);
void export_named(struct export *export, uint32_t row, uint32_t count);

/* Waits until rows [row, row + count) are read no more. 0, -ECANCELED (it was aborted), -ETIMEDOUT. */
int export_claim(struct export *export, uint32_t row, uint32_t count, struct err *err);

/* Takes the hidden states `from` [n] that enter `layer`, if they are wanted: token t into row rows[t], unless
 * that is EXPORT_NONE. On a GPU queues it; `from` and `rows` are addresses of the device. */
void export_write(const struct export *x, uint32_t layer, const float *from, const uint32_t *rows,
                  uint32_t n);
int export_queue(const struct export *x, uint32_t layer, const float *from, const uint32_t *rows, uint32_t n);

struct export_figures {
    uint32_t rows;
    uint64_t bytes;  /* of all rows */
    bool on_gpu;     /* they lie there */
    int64_t wait_ns; /* for the retriever, summed */
    uint64_t waits;
};
void export_figures(const struct export *export, struct export_figures *ret); /* zeros for NULL */

#endif
