/* KV pages of sequences that have a prompt in common: the first one has all pages, the others share those of
 * the prompt with it and own the rest. */
#ifndef EVAL_PAGES_H
#define EVAL_PAGES_H

#include <stdint.h>

#include "compute/compute.h"
#include "model/model.h"

struct pages {
    const struct model_config *config;
    uint8_t *base;
    uint64_t *at;              /* [sequence][layer][page]: offsets from base */
    uint32_t pages, sequences; /* pages of one layer and sequence */
    uint32_t shared;           /* positions of the prompt */
    uint64_t page_bytes;       /* of one layer */
};

/* `positions` of each sequence, `shared` <= positions of them in common. */
void pages_init(struct pages *pages, const struct model_config *config, uint32_t positions, uint32_t shared,
                uint32_t sequences);
void pages_free(struct pages *pages); /* accepts a zeroed object; leaves one */

/* When the prompt is computed in sequence 0: what lies of it in a page that is not shared gets to all. */
void pages_fork(struct pages *pages);

struct kv_view pages_view(const struct pages *pages, uint32_t sequence, uint32_t layer);

#endif
