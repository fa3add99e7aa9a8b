/* The decoder's feature segment as the retriever has it: checked, mapped, its rows where they can be read
 * (SHARED-MEMORY.md section 4). One thread. */
#ifndef RETRIEVER_ROWS_H
#define RETRIEVER_ROWS_H

#include <stdint.h>

#include "base/err.h"
#include "compute/gpu.h"
#include "model/head.h"
#include "proto/features.h"

struct rows;

struct rows_wanted {
    uint64_t decoder_epoch, retriever_epoch;
    const struct head_config *head;
    const struct gpu_api *api; /* NULL: rows are read by the CPU */
    struct gpu *gpu;
};

/* What the head asks of the decoder. */
struct layout_features rows_features(const struct head_config *head);

/* Closes `fd`, a segment's descriptor, whatever it returns. -EPROTO or -EINVAL for what is not the segment
 * wanted, -EXDEV for rows on a GPU that is not ours, and errors of the mapping, each with one line. */
int rows_open(int fd, const struct rows_wanted *wanted, struct rows **ret_rows, struct err *err);
void rows_close(struct rows **rows); /* nothing may read them any more; accepts NULL inside */

const uint8_t *rows_at(const struct rows *rows); /* the first; on a GPU its address there */
uint32_t rows_count(const struct rows *rows);
enum dtype rows_type(const struct rows *rows);
uint64_t rows_row_bytes(const struct rows *rows);

/* Tells the decoder that message `reading`, and those before it, are done with. */
void rows_read(struct rows *rows, uint32_t reading);

#endif
