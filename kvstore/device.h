/* Device memory, a memfd or memory of a GPU, cut into slabs: pages of a layer, slots of a (sequence, layer),
 * staging. SHARED-MEMORY.md section 2. One owner: the planner.
 *
 * Places are byte offsets from the begin of device memory, as the tables carry them. With `poison`,
 * whatever is given is filled with 0xFF (a NaN in every float format), so that nobody reads what nobody
 * wrote. On a GPU `base` is an address there: the host only computes with it. */
#ifndef KVSTORE_DEVICE_H
#define KVSTORE_DEVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "kvstore/device_gpu.h"
#include "link/segment.h"
#include "proto/layout.h"

enum device_use { DEVICE_FREE, DEVICE_PAGES, DEVICE_SLOTS, DEVICE_STAGING };

struct device_slab {
    uint32_t older, newer; /* list of the layer's slabs that have free pages; DEVICE_NONE at its ends */
    uint16_t used;         /* pages taken */
    uint16_t free;         /* first free page, or DEVICE_NO_PAGE */
    uint8_t use;           /* enum device_use */
    uint8_t layer;         /* of pages */
};

#define DEVICE_NONE    UINT32_MAX
#define DEVICE_NO_PAGE UINT16_MAX

struct device {
    struct device_gpu *gpu;        /* borrowed; NULL: a memfd */
    struct segment segment;        /* memfd only */
    uint8_t handle[GPU_IPC_BYTES]; /* GPU only */
    uint8_t *base;
    uint64_t bytes, slab_bytes, page_bytes;
    uint32_t slabs, pages_per_slab;
    bool poison;
    struct device_slab *slab; /* [slabs] */
    uint16_t *next_page;      /* [slabs][pages_per_slab]: chains of free pages */
    uint32_t *free;           /* stack of free slabs */
    uint32_t free_count;
    uint32_t taken;                 /* slabs [0, taken) were taken at least once */
    uint32_t partial[LIMIT_LAYERS]; /* slabs of the layer with free pages, the fullest is not sought */
    uint32_t layer_slabs[LIMIT_LAYERS], layer_pages[LIMIT_LAYERS]; /* held now */
    uint32_t slot_slabs, staging_slabs;
};

struct device_params {
    uint64_t bytes;
    bool poison;
    struct device_gpu *gpu;
};

/* -EINVAL: holds no slab; -ENOMEM and what the GPU says, with one line. */
int device_create(struct device *device, const struct kv_layout *layout, const struct device_params *params,
                  struct err *err);
void device_close(struct device *device);

/* Fills with 0xFF, on a GPU behind all that is queued. */
void device_poison(struct device *device, uint64_t at, uint64_t bytes);

int device_page_take(struct device *device, uint32_t layer, uint64_t *ret_at); /* 0 or -ENOSPC */
void device_page_give(struct device *device, uint64_t at);
int device_slab_take(struct device *device, enum device_use use, uint64_t *ret_at);
void device_slab_give(struct device *device, uint64_t at);

/* Slabs that the layer would hold if it had `pages` more pages than now. */
uint64_t device_layer_slabs(const struct device *device, uint32_t layer, uint64_t pages);

#endif
