/* KV pages of the sequences of a batch. A sequence may have its begin in common with an earlier one: whole
 * pages of that are the earlier one's own, the rest is copied when it is computed. */
#ifndef EVAL_PAGES_H
#define EVAL_PAGES_H

#include <stdint.h>

#include "compute/compute.h"
#include "model/model.h"

struct pages_sequence {
    uint32_t positions;  /* room */
    uint32_t shared, of; /* positions in common with sequence `of`, which comes before; shared 0: none */
};

struct pages {
    const struct model_config *config;
    uint8_t *base;                    /* host memory, or NULL: on a GPU (engine_gpu.h) */
    uint64_t *at;                     /* [sequence][layer][page]: offsets from base */
    struct pages_sequence *sequence;  /* [sequences] */
    uint32_t pages, sequences;        /* pages: room of one layer and sequence in `at` */
    uint64_t page_bytes, total_bytes; /* page_bytes: of one layer */
    void *device, *device_at;         /* on a GPU: the pages, and `at` */
};

/* Where all pages lie; no memory for them. */
void pages_plan(struct pages *pages, const struct model_config *config,
                const struct pages_sequence *sequences, uint32_t count);

/* pages_plan, and host memory. */
void pages_init(struct pages *pages, const struct model_config *config,
                const struct pages_sequence *sequences, uint32_t count);
void pages_free(struct pages *pages); /* accepts a zeroed object; leaves one. Nothing of a GPU is freed */

/* The page of each layer that is shared in part, in both sequences; UINT32_MAX: there is none. */
uint32_t pages_split(const struct pages *pages, uint32_t sequence);

/* When all that is shared was computed: copies split pages to those that share them. */
void pages_fork(struct pages *pages);

uint64_t *pages_at(const struct pages *pages, uint32_t sequence, uint32_t layer); /* [pages] */

/* Host memory alone. */
struct kv_view pages_view(const struct pages *pages, uint32_t sequence, uint32_t layer);

#endif
