/* Where a KV piece or a retrieval key lies. Pure arithmetic on offsets that the caller checked. */
#ifndef COMPUTE_CPU_ADDRESS_H
#define COMPUTE_CPU_ADDRESS_H

#include <stdint.h>

#include "compute/compute.h"

/* item: a position in a paged view, a slot in a slotted one. */
static inline uint8_t *address_piece(const struct kv_view *kv, uint32_t head, uint32_t item)
{
    if (kv->slotted) {
        uint64_t unit = (uint64_t)head * kv->slots + item;
        return kv->base + kv->at[unit / kv->units_per_slab] + unit % kv->units_per_slab * kv->piece_bytes;
    }
    uint64_t row = (uint64_t)head * kv->page_tokens + item % kv->page_tokens;
    return kv->base + kv->at[item / kv->page_tokens] + row * kv->piece_bytes;
}

static inline const uint8_t *address_key(const struct key_view *view, uint32_t head, uint32_t position,
                                         int head_dim)
{
    const uint16_t *chunk = view->chunks[position / view->chunk_tokens];
    size_t row = (size_t)head * view->chunk_tokens + position % view->chunk_tokens;
    return (const uint8_t *)(chunk + row * (size_t)head_dim);
}

/* Pieces of list entries first .. first + count - 1; item NULL is the identity. */
void address_pieces(const uint8_t **ret_piece, const struct kv_view *kv, uint32_t head, const uint32_t *item,
                    uint32_t first, uint32_t count);

/* Keys first .. first + count - 1 of one head. */
void address_keys(const uint8_t **ret_key, const struct key_view *view, uint32_t head, uint32_t first,
                  uint32_t count, int head_dim);

#endif
