/* The store's tables on a GPU; see tables_gpu.h. Owner: the device thread.
 *
 * The copy has the layout of one parity's table. Rows are copied up to the last that a batch has: one copy an
 * array costs less than one a sequence. Kernels clamp what they find there. */
#include "decoder/tables_gpu.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

struct tables_gpu {
    struct gpu_device *device;
    const struct gpu_api *api;
    struct kv_layout layout;
    struct control_header header; /* a copy: sizes that were checked once stay what they were */
    struct control_header *control;
    uint8_t *control_device; /* the same for the device */
    struct table_offsets at;
    void *memory; /* the store's device memory */
    void *copy;   /* [table_bytes] */
};

static int check_device(const struct tables_gpu *t, struct err *err)
{
    const char *own = t->api->info(t->device->gpu)->uuid;
    char theirs[CONTROL_UUID_BYTES];
    memcpy(theirs, t->header.device_uuid, sizeof theirs);
    theirs[sizeof theirs - 1] = 0;
    if (t->header.device_form != CONTROL_DEVICE_CUDA)
        return err_set(err, -EPROTO, "kvstore: found its device memory on the CPU, expected it on GPU %s",
                       own);
    if (strcmp(theirs, own) != 0)
        return err_set(err, -EPROTO, "kvstore: found its device memory on GPU %s, expected the decoder's, %s",
                       theirs, own);
    return 0;
}

int tables_gpu_create(struct gpu_device *device, const struct kv_layout *layout,
                      struct control_header *control, struct tables_gpu **ret_tables, struct err *err)
{
    CHECK(layout->selection_heads == layout->row_heads);
    struct tables_gpu *t = mem_alloc(1, sizeof *t);
    void *registered = NULL;
    t->device = device;
    t->api = device->api;
    t->layout = *layout;
    memcpy(&t->header, control, sizeof t->header);
    control_table_offsets(&t->header, &t->at);
    int r = check_device(t, err);
    if (r == 0)
        r = t->api->ipc_open(device->gpu, t->header.device_handle, &t->memory, err);
    if (r == 0)
        r = t->api->host_register(device->gpu, control, t->header.total_bytes, &registered, err);
    if (r == 0) {
        t->control = control;
        t->control_device = registered;
        r = gpu_device_alloc(device, GPU_DEVICE_TABLES, t->header.table_bytes, &t->copy, err);
    }
    if (r < 0) {
        tables_gpu_free(&t);
        return r;
    }
    *ret_tables = t;
    return 0;
}

void tables_gpu_free(struct tables_gpu **tables)
{
    struct tables_gpu *t = *tables;
    if (!t)
        return;
    gpu_device_release(t->device, GPU_DEVICE_TABLES, t->header.table_bytes, t->copy);
    if (t->control)
        t->api->host_unregister(t->device->gpu, t->control);
    if (t->memory)
        t->api->ipc_close(t->device->gpu, t->memory);
    mem_free(tables);
}

/* Of each of the table's `rows` rows, `stride` bytes apart from `offset` on, the first `bytes`. */
static struct cuda_mapped_copy part_of(const struct tables_gpu *t, const struct tables_gpu_use *use,
                                       uint64_t offset, uint64_t bytes, uint64_t stride)
{
    uint64_t table = t->header.tables_at + (use->step & 1) * t->header.table_bytes;
    CHECK(bytes <= stride &&
          offset + (use->rows ? (use->rows - 1) * stride + bytes : 0) <= t->header.table_bytes);
    return (struct cuda_mapped_copy){.to = (uint8_t *)t->copy + offset,
                                     .from = t->control_device + table + offset,
                                     .bytes = bytes,
                                     .stride = stride,
                                     .rows = use->rows};
}

int tables_gpu_copy(struct tables_gpu *t, const struct cuda_mapped_copy *part, struct CUstream_st *stream)
{
    const uint8_t *host = (const uint8_t *)t->control + ((const uint8_t *)part->from - t->control_device);
    return t->api->copy_rows(part->to, host, part->bytes, part->stride, part->rows, stream);
}

/* Bytes of one table row of each array. */
static uint64_t counts_row(const struct tables_gpu *t)
{
    return (uint64_t)t->header.groups * t->header.selection_heads * sizeof(uint32_t);
}

static uint64_t writes_row(const struct tables_gpu *t)
{
    return (uint64_t)t->header.groups * t->header.row_heads * sizeof(uint32_t);
}

static uint64_t lists_row(const struct tables_gpu *t)
{
    return counts_row(t) * t->header.list_max;
}

static uint64_t pages_row(const struct tables_gpu *t)
{
    return (uint64_t)t->header.layers * t->header.pages_max * sizeof(uint64_t);
}

static uint64_t slabs_row(const struct tables_gpu *t)
{
    return (uint64_t)t->header.layers * t->header.slabs_max * sizeof(uint64_t);
}

struct cuda_mapped_copy tables_gpu_places(const struct tables_gpu *t, const struct tables_gpu_use *use,
                                          int slotted, uint32_t layer, uint32_t end)
{
    uint64_t of_layer = (slotted ? t->header.slabs_max : t->header.pages_max) * sizeof(uint64_t);
    CHECK(layer <= end && end <= t->header.layers);
    return part_of(t, use, (slotted ? t->at.slabs : t->at.pages) + layer * of_layer, (end - layer) * of_layer,
                   slotted ? slabs_row(t) : pages_row(t));
}

struct cuda_mapped_copy tables_gpu_writes(const struct tables_gpu *t, const struct tables_gpu_use *use)
{
    return part_of(t, use, t->at.writes, writes_row(t), writes_row(t));
}

struct cuda_mapped_copy tables_gpu_counts(const struct tables_gpu *t, const struct tables_gpu_use *use,
                                          enum places_phase phase)
{
    uint64_t before = (uint64_t)phase * t->header.sequences_max * counts_row(t);
    return part_of(t, use, t->at.counts + before, counts_row(t), counts_row(t));
}

struct cuda_mapped_copy tables_gpu_lists(const struct tables_gpu *t, const struct tables_gpu_use *use,
                                         const struct tables_gpu_lists *lists)
{
    uint64_t group = lists_row(t) / t->header.groups,
             before = (uint64_t)lists->phase * t->header.sequences_max * lists_row(t) + lists->group * group;
    CHECK(lists->group < t->header.groups);
    return part_of(t, use, (lists->slotted ? t->at.slots : t->at.positions) + before, group, lists_row(t));
}

int tables_gpu_copy_pages(struct tables_gpu *t, uint32_t step, uint32_t sequence)
{
    const struct tables_gpu_use one = {.step = step, .rows = 1};
    CHECK(sequence < t->header.sequences_max);
    const struct cuda_mapped_copy pages =
        part_of(t, &one, t->at.pages + sequence * pages_row(t), pages_row(t), pages_row(t));
    return tables_gpu_copy(t, &pages, t->device->stream);
}

static void aim_view(const struct tables_gpu *t, const struct tables_gpu_layer *l, struct cuda_kv_view *ret)
{
    const struct control_header *h = &t->header;
    const uint8_t *copy = t->copy;
    *ret = (struct cuda_kv_view){.base = t->memory,
                                 .device_bytes = h->device_bytes,
                                 .slotted = l->slotted,
                                 .page_tokens = BLOCK_TOKENS,
                                 .slots = h->slots,
                                 .units_per_slab = h->units_per_slab,
                                 .piece_bytes = t->layout.piece_bytes,
                                 .type = (enum dtype)t->layout.dtype};
    uint64_t most = l->slotted ? h->slabs_max : h->pages_max;
    ret->at = (const uint64_t *)(copy + (l->slotted ? t->at.slabs : t->at.pages)) + l->layer * most;
    ret->at_count = (uint32_t)most;
    ret->layer_stride = most;
    ret->row_stride = h->layers * most;
}

void tables_gpu_kv(const struct tables_gpu *t, const struct tables_gpu_layer *l, struct pass_gpu_kv *ret)
{
    const struct control_header *h = &t->header;
    const uint8_t *copy = t->copy;
    uint32_t group = layout_group_of(&t->layout, l->layer);
    uint64_t before = (uint64_t)l->phase * h->sequences_max, head = (uint64_t)group * h->selection_heads;
    memset(ret, 0, sizeof *ret);
    aim_view(t, l, &ret->view);
    ret->write = l->positions;
    if (l->slotted) {
        ret->write = (const uint32_t *)(copy + t->at.writes) + (uint64_t)group * h->row_heads;
        ret->write_stride = (uint64_t)h->groups * h->row_heads;
        ret->write_heads = 1;
    }
    if (!l->sparse)
        return;
    ret->counts = (const uint32_t *)(copy + t->at.counts + before * counts_row(t)) + head;
    ret->count_stride = (uint64_t)h->groups * h->selection_heads;
    ret->items =
        (const uint32_t *)(copy + (l->slotted ? t->at.slots : t->at.positions) + before * lists_row(t)) +
        head * h->list_max;
    ret->item_stride = ret->count_stride * h->list_max;
}

uint32_t *tables_gpu_flag(const struct tables_gpu *t, unsigned flag)
{
    return (uint32_t *)(t->control_device + t->header.flags_at + flag * sizeof(struct control_flag));
}
