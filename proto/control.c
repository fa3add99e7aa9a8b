/* Layout of the control segment: sizes and the check of its header. Pure, any thread. */
#include "proto/control.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static uint64_t round_up(uint64_t value, uint64_t align)
{
    return (value + align - 1) / align * align;
}

static uint64_t checksum(const struct control_header *h)
{
    return hash_bytes(0, h, offsetof(struct control_header, checksum)).lo;
}

void control_table_offsets(const struct control_header *h, struct table_offsets *ret)
{
    uint64_t lists = 2ull * h->sequences_max * h->groups * h->selection_heads;
    uint64_t seq_layers = (uint64_t)h->sequences_max * h->layers;
    ret->sequences = round_up(sizeof(struct table_header), 64);
    ret->counts = round_up(ret->sequences + 2ull * h->sequences_max * sizeof(struct table_sequence), 64);
    ret->writes = round_up(ret->counts + lists * 4, 64);
    ret->pages = round_up(ret->writes + (uint64_t)h->sequences_max * h->groups * h->row_heads * 4, 64);
    ret->slabs = round_up(ret->pages + seq_layers * h->pages_max * 8, 64);
    ret->positions = round_up(ret->slabs + seq_layers * h->slabs_max * 8, 64);
    ret->slots = round_up(ret->positions + lists * h->list_max * 4, 64);
    ret->bytes = round_up(ret->slots + lists * h->list_max * 4, 4096);
}

static void derive(struct control_header *h, const struct kv_layout *layout)
{
    struct hash128 fingerprint = layout_fingerprint(layout);
    h->magic = CONTROL_MAGIC;
    h->version = CONTROL_VERSION;
    h->header_bytes = sizeof *h;
    h->layout_lo = fingerprint.lo;
    h->layout_hi = fingerprint.hi;
    h->slab_bytes = layout_slab_bytes(layout);
    h->page_bytes = layout_page_bytes(layout);
    h->layers = layout->layers;
    h->groups = layout->groups;
    h->row_heads = layout->row_heads;
    h->selection_heads = layout->selection_heads;
    h->runs = layout_runs(layout);
    h->pages_max = (layout->context_max + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    h->units_per_slab = (uint32_t)(h->slab_bytes / layout->piece_bytes);
    h->slabs_max =
        (uint32_t)(((uint64_t)h->slots * layout->row_heads + h->units_per_slab - 1) / h->units_per_slab);
    h->flags_at = round_up(sizeof *h, 4096);
    h->steps_at = round_up(h->flags_at + FLAG_COUNT * sizeof(struct control_flag), 4096);
    h->tables_at = round_up(h->steps_at + STEP_RING * sizeof(struct step_record), 4096);
    struct table_offsets at;
    control_table_offsets(h, &at);
    h->table_bytes = at.bytes;
    h->total_bytes = h->tables_at + 2 * h->table_bytes;
    h->checksum = checksum(h);
}

uint32_t control_list_max(uint32_t budget, uint32_t context)
{
    enum { ALIGN = 16 };
    uint32_t most = budget < context ? budget + 1 : context;
    return most / ALIGN * ALIGN + ALIGN;
}

void control_header_init(struct control_header *h, const struct kv_layout *layout,
                         const struct control_params *params)
{
    memset(h, 0, sizeof *h);
    h->store_epoch = params->store_epoch;
    h->decoder_epoch = params->decoder_epoch;
    h->device_bytes = params->device_bytes;
    h->sequences_max = params->sequences_max;
    h->list_max = params->list_max;
    h->slots = params->slots;
    h->staging_tokens = params->staging_tokens;
    h->first_step = params->first_step;
    h->device_form = params->device_form;
    if (params->device_form == CONTROL_DEVICE_CUDA) {
        snprintf(h->device_uuid, sizeof h->device_uuid, "%s", params->device_uuid);
        memcpy(h->device_handle, params->device_handle, sizeof h->device_handle);
    }
    h->resident_layers[0] = layout->layers;
    derive(h, layout);
}

int control_header_check(const struct control_header *h, const struct kv_layout *layout, uint64_t file_bytes,
                         struct err *err)
{
    if (file_bytes < sizeof *h)
        return err_set(err, -EINVAL, "control segment: length: found %llu bytes, expected at least %zu",
                       (unsigned long long)file_bytes, sizeof *h);
    if (h->magic != CONTROL_MAGIC || h->version != CONTROL_VERSION || h->header_bytes != sizeof *h)
        return err_set(
            err, -EPROTO, "control segment: found magic %016llx version %u, expected %016llx version %u",
            (unsigned long long)h->magic, h->version, (unsigned long long)CONTROL_MAGIC, CONTROL_VERSION);
    if (h->sequences_max == 0 || h->sequences_max > LIMIT_SEQUENCES || h->list_max > LIMIT_CONTEXT ||
        h->slots > LIMIT_CONTEXT)
        return err_set(err, -EINVAL, "control segment: counts: found %u sequences, lists of %u, %u slots",
                       h->sequences_max, h->list_max, h->slots);
    if (h->device_form > CONTROL_DEVICE_CUDA || h->device_uuid[CONTROL_UUID_BYTES - 1])
        return err_set(err, -EPROTO, "control segment: device: found form %u, expected 0 (memfd) or 1 (CUDA)",
                       h->device_form);
    struct control_header want = *h;
    derive(&want, layout);
    if (memcmp(&want, h, sizeof want))
        return err_set(
            err, -EPROTO,
            "control segment: layout: found fingerprint %016llx and %llu bytes, expected %016llx and %llu",
            (unsigned long long)h->layout_lo, (unsigned long long)h->total_bytes,
            (unsigned long long)want.layout_lo, (unsigned long long)want.total_bytes);
    if (file_bytes < h->total_bytes)
        return err_set(err, -EINVAL, "control segment: length: found %llu bytes, expected %llu",
                       (unsigned long long)file_bytes, (unsigned long long)h->total_bytes);
    return 0;
}
