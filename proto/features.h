/* The feature segment: hidden states of the language model on their way from one decoder to one retriever
 * whose head reads them. Byte-level description and death rules: SHARED-MEMORY.md section 4.
 *
 * One memfd, made anew by the decoder for each (decoder epoch, retriever epoch) pair and never re-used. A row
 * holds what enters the head's feature layers at one position of one sequence, layer behind layer. Rows lie
 * in the segment itself, or, where both processes use the same GPU, in memory of the GPU that the header
 * names. Where a row is read and written is told by messages: STEP names rows when they are complete, and
 * `read` tells the decoder which messages' rows it may write again.
 *
 *   0          struct features_header   written once by the decoder before the descriptor is sent
 *   rows_at    rows                     decoder; absent where they are a GPU's */
#ifndef PROTO_FEATURES_H
#define PROTO_FEATURES_H

#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "proto/control.h"
#include "proto/msg.h"

#define FEATURES_MAGIC   UINT64_C(0x3130544145464353) /* "SCFEAT01" */
#define FEATURES_VERSION 1u

enum features_form { FEATURES_HOST = 0, FEATURES_CUDA = 1 };

/* Rows: `FEATURES_STEPS` of every sequence, for its newest tokens in turn, then `FEATURES_CHUNKS` times as
 * many as a chunk of a prompt has tokens. So a row is read at leisure while the next steps are computed. */
enum { FEATURES_STEPS = 4, FEATURES_CHUNKS = 2, FEATURES_ROWS_AT = 4096 };

struct features_header {
    uint64_t magic;
    uint32_t version, header_bytes;
    uint64_t decoder_epoch, retriever_epoch;
    uint64_t total_bytes; /* of this segment */
    uint64_t rows_at;     /* HOST: in this segment; CUDA: 0 */
    uint64_t row_bytes;
    uint32_t rows;
    uint32_t type; /* enum dtype: DTYPE_F32, or DTYPE_BF16 where either process uses a GPU */
    uint32_t form; /* enum features_form */
    uint32_t layers, hidden;
    uint32_t layer[LIMIT_FEATURE_LAYERS];
    uint32_t pad0;
    char uuid[CONTROL_UUID_BYTES];        /* CUDA: the GPU that the rows lie on; else zeros */
    uint8_t handle[CONTROL_HANDLE_BYTES]; /* CUDA: IPC handle of the rows; else zeros */
    uint64_t checksum;                    /* low half of hash_bytes(0, all fields above) */
    uint64_t pad1[3];
    /* Retriever: `reading` of the last STEP message whose rows it reads no more. */
    struct control_flag read;
};

_Static_assert(offsetof(struct features_header, rows) == 56, "layout");
_Static_assert(offsetof(struct features_header, layer) == 76, "layout");
_Static_assert(offsetof(struct features_header, uuid) == 112, "layout");
_Static_assert(offsetof(struct features_header, checksum) == 224, "layout");
_Static_assert(offsetof(struct features_header, read) == 256, "layout");
_Static_assert(sizeof(struct features_header) == 320, "layout");

struct features_params {
    uint64_t decoder_epoch, retriever_epoch;
    const struct layout_features *wanted;
    uint32_t chunk; /* tokens of the longest chunk */
    enum dtype type;
    enum features_form form;
    const char *uuid;      /* CUDA */
    const uint8_t *handle; /* [CONTROL_HANDLE_BYTES] CUDA */
};

void features_header_init(struct features_header *header, const struct features_params *params);

/* What a retriever checks before it uses anything, on a private copy: `file_bytes` of the segment, the
 * epochs, what its head reads. -EPROTO or -EINVAL with the field, what was found, what was expected. */
int features_header_check(const struct features_header *header, const struct features_params *expected,
                          uint64_t file_bytes, struct err *err);

/* Rows for chunks of so many tokens, and their bytes. */
uint32_t features_rows(uint32_t chunk);
uint64_t features_bytes(uint32_t chunk, uint32_t layers, uint32_t hidden, enum dtype type);

#endif
