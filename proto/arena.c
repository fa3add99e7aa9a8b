/* Layout of the host arena: sizes and the checks of its header. Pure, any thread. */
#include "proto/arena.h"

#include <errno.h>
#include <string.h>

enum { ARENA_ALIGN = 4096 };
#define ROWS_ALIGN (UINT64_C(2) << 20) /* rows start on a huge page */

static uint64_t round_up(uint64_t value, uint64_t align)
{
    return (value + align - 1) / align * align;
}

static uint64_t header_checksum(const struct arena_header *h)
{
    return hash_bytes(0, h, offsetof(struct arena_header, header_checksum)).lo;
}

static void set_offsets(struct arena_header *h)
{
    uint64_t pages = (h->layout.context_max + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    h->record_bytes = (uint32_t)round_up(sizeof(struct arena_sequence) + pages * sizeof(uint32_t), 64);
    h->records_at = round_up(sizeof *h, ARENA_ALIGN);
    h->blocks_at = round_up(h->records_at + (uint64_t)h->record_bytes * h->sequences_max, ARENA_ALIGN);
    h->rows_at = round_up(h->blocks_at + (uint64_t)h->blocks_max * sizeof(struct arena_block), ROWS_ALIGN);
    h->block_bytes = layout_block_bytes(&h->layout);
}

void arena_header_init(struct arena_header *h, const struct kv_layout *layout, uint32_t sequences_max,
                       uint32_t blocks_max, uint64_t salt)
{
    memset(h, 0, sizeof *h);
    struct hash128 fingerprint = layout_fingerprint(layout);
    h->magic = ARENA_MAGIC;
    h->version = ARENA_VERSION;
    h->header_bytes = sizeof *h;
    h->layout_lo = fingerprint.lo;
    h->layout_hi = fingerprint.hi;
    h->layout = *layout;
    h->sequences_max = sequences_max;
    h->blocks_max = blocks_max;
    h->salt = salt;
    set_offsets(h);
    h->header_checksum = header_checksum(h);
}

int arena_header_check(const struct arena_header *h, uint64_t file_bytes, struct err *err)
{
    if (file_bytes < sizeof *h)
        return err_set(err, -EINVAL, "arena: length: found %llu bytes, expected at least %zu",
                       (unsigned long long)file_bytes, sizeof *h);
    if (h->magic != ARENA_MAGIC)
        return err_set(err, -EINVAL, "arena: magic: found %016llx, expected %016llx",
                       (unsigned long long)h->magic, (unsigned long long)ARENA_MAGIC);
    if (h->version != ARENA_VERSION || h->header_bytes != sizeof *h)
        return err_set(err, -EPROTO, "arena: version: found %u (header %u bytes), expected %u (%zu)",
                       h->version, h->header_bytes, ARENA_VERSION, sizeof *h);
    if (h->header_checksum != header_checksum(h))
        return err_set(err, -EINVAL, "arena: header checksum: found %016llx, expected %016llx",
                       (unsigned long long)h->header_checksum, (unsigned long long)header_checksum(h));
    int r = layout_check(&h->layout, err);
    if (r < 0)
        return r;
    if (h->sequences_max == 0 || h->sequences_max > LIMIT_SEQUENCES || h->blocks_max == 0)
        return err_set(err, -EINVAL, "arena: counts: found %u sequences and %u blocks", h->sequences_max,
                       h->blocks_max);
    struct arena_header want = *h;
    set_offsets(&want);
    if (want.record_bytes != h->record_bytes || want.records_at != h->records_at ||
        want.blocks_at != h->blocks_at || want.rows_at != h->rows_at || want.block_bytes != h->block_bytes)
        return err_set(err, -EINVAL, "arena: offsets: found rows at %llu, expected %llu",
                       (unsigned long long)h->rows_at, (unsigned long long)want.rows_at);
    uint32_t present = atomic_load_explicit(&h->blocks_present, memory_order_acquire);
    if (present > h->blocks_max || arena_file_bytes(h, present) > file_bytes)
        return err_set(err, -EINVAL, "arena: blocks: found %u of %u in %llu bytes", present, h->blocks_max,
                       (unsigned long long)file_bytes);
    return 0;
}

uint64_t arena_file_bytes(const struct arena_header *h, uint32_t blocks)
{
    return h->rows_at + (uint64_t)blocks * h->block_bytes;
}
