/* Slabs and pages of device memory; see device.h. Owner: the planner thread. It must never give a place
 * that a posted and not consumed step may read: planner.c gives only between steps. */
#include "kvstore/device.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

/* One allocation, exported once: every decoder of this store's life opens the same handle. */
static int memory_take(struct device *d, struct err *err)
{
    int r;
    if (!d->gpu) {
        r = segment_create("specontext-device", d->bytes, &d->segment, err);
        d->base = d->segment.at;
        return r;
    }
    void *at = NULL;
    r = device_gpu_alloc(d->gpu, gpu_export_bytes(d->bytes), &d->gpu->kv_bytes, &at, err);
    if (r < 0)
        return r;
    d->base = at;
    return d->gpu->api->ipc_export(d->gpu->gpu, at, d->handle, err);
}

void device_poison(struct device *d, uint64_t at, uint64_t bytes)
{
    if (d->gpu)
        device_gpu_fill(d->gpu, d->base + at, 0xff, bytes);
    else
        memset(d->base + at, 0xff, bytes);
}

static void poison(struct device *d, uint64_t at, uint64_t bytes)
{
    if (d->poison)
        device_poison(d, at, bytes);
}

static void give(struct device *d, uint64_t at, uint64_t bytes)
{
    if (d->gpu)
        device_gpu_given(d->gpu);
    poison(d, at, bytes);
}

int device_create(struct device *d, const struct kv_layout *layout, const struct device_params *params,
                  struct err *err)
{
    memset(d, 0, sizeof *d);
    d->segment.fd = -1;
    d->gpu = params->gpu;
    d->slab_bytes = layout_slab_bytes(layout);
    d->page_bytes = layout_page_bytes(layout);
    uint64_t pages_per_slab = d->slab_bytes / d->page_bytes;
    d->pages_per_slab = pages_per_slab < DEVICE_NO_PAGE ? (uint32_t)pages_per_slab : DEVICE_NO_PAGE - 1u;
    uint64_t slabs = params->bytes / d->slab_bytes;
    if (slabs == 0 || slabs >= DEVICE_NONE)
        return err_set(err, -EINVAL, "device memory: found %llu bytes, expected 1 to 2^32 - 2 slabs of %llu",
                       (unsigned long long)params->bytes, (unsigned long long)d->slab_bytes);
    d->slabs = (uint32_t)slabs;
    d->bytes = slabs * d->slab_bytes;
    d->poison = params->poison;
    int r = memory_take(d, err);
    if (r < 0)
        return r;
    d->slab = mem_alloc(d->slabs, sizeof *d->slab);
    d->next_page = mem_alloc((size_t)d->slabs * d->pages_per_slab, sizeof *d->next_page);
    d->free = mem_alloc(d->slabs, sizeof *d->free);
    for (uint32_t i = d->slabs; i > 0; i--)
        d->free[d->free_count++] = i - 1;
    for (uint32_t l = 0; l < LIMIT_LAYERS; l++)
        d->partial[l] = DEVICE_NONE;
    if (d->gpu) /* all at once: a decoder that has a slab's place need not wait for the store's stream */
        poison(d, 0, d->bytes);
    return 0;
}

void device_close(struct device *d)
{
    mem_free(&d->slab);
    mem_free(&d->next_page);
    mem_free(&d->free);
    if (d->segment.at)
        segment_close(&d->segment);
    if (d->gpu && d->base) {
        device_gpu_wait_all(d->gpu);
        device_gpu_free(d->gpu, gpu_export_bytes(d->bytes), &d->gpu->kv_bytes, d->base);
    }
    memset(d, 0, sizeof *d);
    d->segment.fd = -1;
}

int device_slab_take(struct device *d, enum device_use use, uint64_t *ret_at)
{
    if (d->free_count == 0)
        return -ENOSPC;
    uint32_t s = d->free[--d->free_count];
    if (s >= d->taken) { /* slabs that nobody had yet come lowest first */
        CHECK(s == d->taken);
        d->taken++;
        if (!d->gpu) /* one by one: pages of all of it, touched before anybody asks, take seconds */
            poison(d, s * d->slab_bytes, d->slab_bytes);
    }
    d->slab[s].use = (uint8_t)use;
    d->slot_slabs += use == DEVICE_SLOTS;
    d->staging_slabs += use == DEVICE_STAGING;
    *ret_at = s * d->slab_bytes;
    return 0;
}

void device_slab_give(struct device *d, uint64_t at)
{
    uint32_t s = (uint32_t)(at / d->slab_bytes);
    CHECK(s < d->slabs && d->slab[s].use != DEVICE_FREE);
    d->slot_slabs -= d->slab[s].use == DEVICE_SLOTS;
    d->staging_slabs -= d->slab[s].use == DEVICE_STAGING;
    d->slab[s].use = DEVICE_FREE;
    d->free[d->free_count++] = s;
    give(d, at, d->slab_bytes);
}

static void partial_insert(struct device *d, uint32_t s)
{
    uint32_t layer = d->slab[s].layer, first = d->partial[layer];
    d->slab[s].older = DEVICE_NONE;
    d->slab[s].newer = first;
    if (first != DEVICE_NONE)
        d->slab[first].older = s;
    d->partial[layer] = s;
}

static void partial_remove(struct device *d, uint32_t s)
{
    struct device_slab *slab = &d->slab[s];
    if (slab->older != DEVICE_NONE)
        d->slab[slab->older].newer = slab->newer;
    else
        d->partial[slab->layer] = slab->newer;
    if (slab->newer != DEVICE_NONE)
        d->slab[slab->newer].older = slab->older;
}

static int open_page_slab(struct device *d, uint32_t layer)
{
    uint64_t at;
    int r = device_slab_take(d, DEVICE_PAGES, &at);
    if (r < 0)
        return r;
    uint32_t s = (uint32_t)(at / d->slab_bytes);
    uint16_t *next = d->next_page + (size_t)s * d->pages_per_slab;
    for (uint32_t i = 0; i < d->pages_per_slab; i++)
        next[i] = i + 1 < d->pages_per_slab ? (uint16_t)(i + 1) : DEVICE_NO_PAGE;
    d->slab[s].free = 0;
    d->slab[s].used = 0;
    d->slab[s].layer = (uint8_t)layer;
    partial_insert(d, s);
    d->layer_slabs[layer]++;
    return 0;
}

int device_page_take(struct device *d, uint32_t layer, uint64_t *ret_at)
{
    CHECK(layer < LIMIT_LAYERS);
    if (d->partial[layer] == DEVICE_NONE) {
        int r = open_page_slab(d, layer);
        if (r < 0)
            return r;
    }
    uint32_t s = d->partial[layer];
    struct device_slab *slab = &d->slab[s];
    uint32_t page = slab->free;
    slab->free = d->next_page[(size_t)s * d->pages_per_slab + page];
    slab->used++;
    if (slab->free == DEVICE_NO_PAGE)
        partial_remove(d, s);
    d->layer_pages[layer]++;
    *ret_at = s * d->slab_bytes + page * d->page_bytes;
    return 0;
}

void device_page_give(struct device *d, uint64_t at)
{
    uint32_t s = (uint32_t)(at / d->slab_bytes);
    CHECK(s < d->slabs && d->slab[s].use == DEVICE_PAGES && d->slab[s].used > 0);
    struct device_slab *slab = &d->slab[s];
    uint32_t page = (uint32_t)(at % d->slab_bytes / d->page_bytes);
    give(d, at, d->page_bytes);
    if (slab->free == DEVICE_NO_PAGE)
        partial_insert(d, s);
    d->next_page[(size_t)s * d->pages_per_slab + page] = slab->free;
    slab->free = (uint16_t)page;
    slab->used--;
    d->layer_pages[slab->layer]--;
    if (slab->used == 0) {
        partial_remove(d, s);
        d->layer_slabs[slab->layer]--;
        device_slab_give(d, s * d->slab_bytes);
    }
}

uint64_t device_layer_slabs(const struct device *d, uint32_t layer, uint64_t pages)
{
    uint64_t room = (uint64_t)d->layer_slabs[layer] * d->pages_per_slab - d->layer_pages[layer];
    uint64_t more = pages > room ? pages - room : 0;
    return d->layer_slabs[layer] + (more + d->pages_per_slab - 1) / d->pages_per_slab;
}
