/* Blocks of the host arena; see blocks.h. Owner: the planner thread. It must never use a number out of an
 * adopted arena that adopt.c has not checked. */
#include "kvstore/blocks.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/trace.h"

#define BLOCKS_MOST (1u << 22) /* records of blocks are kept for all of them */

static void set_private(struct blocks *b, const struct kv_layout *layout)
{
    b->header = b->segment.at;
    b->layout = *layout;
    b->blocks_max = b->header->blocks_max;
    b->block_bytes = b->header->block_bytes;
    b->rows_at = b->header->rows_at;
    b->refs = mem_alloc(b->blocks_max, sizeof *b->refs);
    b->free = mem_alloc(b->blocks_max, sizeof *b->free);
}

int blocks_create(struct blocks *b, const struct kv_layout *layout, const struct blocks_params *params,
                  struct err *err)
{
    memset(b, 0, sizeof *b);
    b->segment.fd = -1;
    uint64_t block_bytes = layout_block_bytes(layout);
    uint64_t blocks_max = block_bytes ? params->host_bytes / block_bytes : BLOCKS_MOST;
    uint64_t pages = (layout->context_max + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    if (layout->host_first_layer > 0 && blocks_max > pages * params->sequences_max)
        blocks_max = pages * params->sequences_max;
    if (blocks_max == 0)
        return err_set(err, -EINVAL, "host memory: found %llu bytes, expected at least one block of %llu",
                       (unsigned long long)params->host_bytes, (unsigned long long)block_bytes);
    if (blocks_max > BLOCKS_MOST)
        blocks_max = BLOCKS_MOST;
    struct arena_header header;
    arena_header_init(&header, layout, params->sequences_max, (uint32_t)blocks_max, hash_random_id());
    int r = segment_create_reserved("specontext-arena", arena_file_bytes(&header, 0),
                                    arena_file_bytes(&header, header.blocks_max), &b->segment, err);
    if (r < 0)
        return r;
    memcpy(b->segment.at, &header, sizeof header);
    set_private(b, layout);
    return 0;
}

int blocks_map(struct blocks *b, int fd, const struct kv_layout *layout, struct err *err)
{
    memset(b, 0, sizeof *b);
    struct segment probe = {.fd = -1};
    int copy = dup(fd);
    if (copy < 0)
        return err_set(err, -errno, "arena: dup: %s", strerror(errno));
    int r = segment_map(copy, 0, &probe, err);
    if (r < 0) {
        close(copy);
        b->segment.fd = -1;
        return r;
    }
    struct arena_header header;
    r = probe.bytes < sizeof header ? err_set(err, -EINVAL, "arena: found %llu bytes, expected a header",
                                              (unsigned long long)probe.bytes)
                                    : arena_header_check(probe.at, probe.bytes, err);
    if (r == 0)
        memcpy(&header, probe.at, sizeof header);
    segment_close(&probe);
    if (r == 0 && header.layout.host_first_layer > 0)
        r = err_set(err, -ENODATA,
                    "arena: layers: found those from %u on (write-through offloaded), expected all %u: the "
                    "others were on the device of the store that is gone, and no sequence is whole",
                    header.layout.host_first_layer, header.layout.layers);
    struct hash128 want = layout_fingerprint(layout);
    if (r == 0 &&
        (header.layout_lo != want.lo || header.layout_hi != want.hi || header.blocks_max > BLOCKS_MOST))
        r = err_set(err, -EINVAL, "arena: layout: found fingerprint %016llx, expected %016llx",
                    (unsigned long long)header.layout_lo, (unsigned long long)want.lo);
    b->segment.fd = -1;
    if (r < 0)
        return r;
    r = segment_map_reserved(fd, arena_file_bytes(&header, header.blocks_max), &b->segment, err);
    if (r < 0)
        return r;
    set_private(b, layout);
    b->present = header.blocks_present;
    b->taken = b->present;
    return 0;
}

void blocks_close(struct blocks *b)
{
    populate_free(&b->populate);
    mem_free(&b->refs);
    mem_free(&b->free);
    if (b->segment.at)
        segment_close(&b->segment);
    memset(b, 0, sizeof *b);
    b->segment.fd = -1;
}

static uint64_t rows_bytes(const struct blocks *b)
{
    return (uint64_t)b->blocks_max * b->block_bytes;
}

/* Lengthens the file to so many bytes of rows, and on to the end of the chunk. */
static int grow_to(struct blocks *b, uint64_t rows, struct err *err)
{
    uint64_t chunks = (rows + BLOCKS_CHUNK_BYTES - 1) / BLOCKS_CHUNK_BYTES;
    uint64_t bytes = b->rows_at + chunks * BLOCKS_CHUNK_BYTES;
    uint64_t most = b->rows_at + rows_bytes(b);
    bytes = bytes < most ? bytes : most;
    if (bytes <= b->segment.bytes)
        return 0;
    int64_t begin = trace_begin();
    int r = segment_grow(&b->segment, bytes, err);
    trace_end(TRACE_GROW, begin);
    return r;
}

static int grow(struct blocks *b)
{
    if (b->present == b->blocks_max || grow_to(b, (b->present + 1) * b->block_bytes, NULL) < 0)
        return -ENOSPC;
    uint64_t hold = b->block_bytes ? (b->segment.bytes - b->rows_at) / b->block_bytes : b->blocks_max;
    uint32_t end = hold < b->blocks_max ? (uint32_t)hold : b->blocks_max;
    for (uint32_t i = end; i > b->present; i--) /* so that the lowest is taken first */
        b->free[b->free_count++] = i - 1;
    b->present = end;
    atomic_store_explicit(&b->header->blocks_present, b->present, memory_order_release);
    return 0;
}

int blocks_take(struct blocks *b, uint32_t *ret_block)
{
    if (b->free_count == 0) {
        int r = grow(b);
        if (r < 0)
            return r;
    }
    uint32_t block = b->free[--b->free_count];
    CHECK(b->refs[block] == 0);
    b->refs[block] = 1;
    b->taken = b->taken > block ? b->taken : block + 1;
    struct arena_block *record = arena_block_at(b->header, block);
    memset(record, 0, offsetof(struct arena_block, state));
    atomic_store_explicit(&record->state, ARENA_BLOCK_FILLING, memory_order_release);
    *ret_block = block;
    return 0;
}

void blocks_ref(struct blocks *b, uint32_t block)
{
    CHECK(block < b->present);
    b->refs[block]++;
}

uint32_t blocks_unref(struct blocks *b, uint32_t block)
{
    CHECK(block < b->present && b->refs[block] > 0);
    return --b->refs[block];
}

void blocks_give(struct blocks *b, uint32_t block)
{
    CHECK(block < b->present && b->refs[block] == 0 && b->free_count < b->blocks_max);
    atomic_store_explicit(&arena_block_at(b->header, block)->state, ARENA_BLOCK_FREE, memory_order_release);
    b->free[b->free_count++] = block;
}

uint32_t blocks_available(const struct blocks *b)
{
    return b->free_count + (b->blocks_max - b->present);
}

void blocks_populate_start(struct blocks *b, int threads, void (*before)(void *arg, uint32_t stretch),
                           void *before_arg)
{
    uint64_t page = 4096;
    CHECK(!b->populate);
    struct populate_params params = {.at = (uint8_t *)b->segment.at + b->rows_at,
                                     .bytes = (rows_bytes(b) + page - 1) / page * page,
                                     .stretch_bytes = BLOCKS_STRETCH_BYTES,
                                     .threads = threads,
                                     .before = before,
                                     .before_arg = before_arg};
    populate_create(&b->populate, &params);
}

void blocks_populate(struct blocks *b, uint32_t count)
{
    CHECK(count <= b->blocks_max);
    uint64_t bytes = count * b->block_bytes;
    uint64_t stretches = (bytes + BLOCKS_STRETCH_BYTES - 1) / BLOCKS_STRETCH_BYTES;
    /* Where the file cannot be lengthened a step that needs it will say so. */
    if (b->populate && grow_to(b, stretches * BLOCKS_STRETCH_BYTES, NULL) == 0)
        populate_aim(b->populate, (uint32_t)stretches);
}

bool blocks_is_populated(const struct blocks *b, uint32_t stretch)
{
    return b->populate && populate_is_done(b->populate, stretch);
}

uint32_t blocks_stretches(const struct blocks *b)
{
    return (uint32_t)((rows_bytes(b) + BLOCKS_STRETCH_BYTES - 1) / BLOCKS_STRETCH_BYTES);
}

int blocks_stretch(struct blocks *b, uint32_t stretch, void **ret_at, uint64_t *ret_bytes, struct err *err)
{
    CHECK(stretch < blocks_stretches(b));
    uint64_t page = 4096, from = stretch * BLOCKS_STRETCH_BYTES, end = from + BLOCKS_STRETCH_BYTES;
    int r = grow_to(b, end, err); /* an adopted file may end anywhere */
    if (r < 0)
        return r;
    end = end < rows_bytes(b) ? end : rows_bytes(b);
    *ret_at = (uint8_t *)b->segment.at + b->rows_at + from;
    *ret_bytes = (end - from + page - 1) / page * page;
    return 0;
}
