/* Addresses of a run of list entries at once, so that kernels see plain pointers and one code path serves
 * identity, paged and slotted lists. Any thread; no state. */
#include "compute/cpu/address.h"

/* Page and slab sizes are powers of two in practice; a division per piece would cost as much as its load. */
static int shift_of(uint32_t size)
{
    return size && !(size & (size - 1)) ? __builtin_ctz(size) : -1;
}

static void paged_list(const uint8_t **ret_piece, const struct kv_view *kv, uint32_t head,
                       const uint32_t *item, uint32_t count)
{
    int shift = shift_of(kv->page_tokens);
    if (shift < 0) {
        for (uint32_t i = 0; i < count; i++)
            ret_piece[i] = address_piece(kv, head, item[i]);
        return;
    }
    const uint8_t *base = kv->base + (uint64_t)head * kv->page_tokens * kv->piece_bytes;
    for (uint32_t i = 0; i < count; i++)
        ret_piece[i] =
            base + kv->at[item[i] >> shift] + (uint64_t)(item[i] & (kv->page_tokens - 1)) * kv->piece_bytes;
}

static void slotted_list(const uint8_t **ret_piece, const struct kv_view *kv, uint32_t head,
                         const uint32_t *item, uint32_t count)
{
    int shift = shift_of(kv->units_per_slab);
    if (shift < 0) {
        for (uint32_t i = 0; i < count; i++)
            ret_piece[i] = address_piece(kv, head, item[i]);
        return;
    }
    uint64_t first = (uint64_t)head * kv->slots;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t unit = first + item[i];
        ret_piece[i] = kv->base + kv->at[unit >> shift] + (unit & (kv->units_per_slab - 1)) * kv->piece_bytes;
    }
}

static void identity(const uint8_t **ret_piece, const struct kv_view *kv, uint32_t head, uint32_t first,
                     uint32_t count)
{
    uint32_t i = 0;
    while (i < count) {
        uint32_t inside = (first + i) % kv->page_tokens, end = kv->page_tokens - inside;
        const uint8_t *piece = address_piece(kv, head, first + i);
        for (uint32_t j = 0; j < end && i < count; j++, i++, piece += kv->piece_bytes)
            ret_piece[i] = piece;
    }
}

void address_pieces(const uint8_t **ret_piece, const struct kv_view *kv, uint32_t head, const uint32_t *item,
                    uint32_t first, uint32_t count)
{
    if (!item)
        identity(ret_piece, kv, head, first, count);
    else if (kv->slotted)
        slotted_list(ret_piece, kv, head, item + first, count);
    else
        paged_list(ret_piece, kv, head, item + first, count);
}

void address_keys(const uint8_t **ret_key, const struct key_view *view, uint32_t head, uint32_t first,
                  uint32_t count, int head_dim)
{
    uint32_t i = 0;
    while (i < count) {
        uint32_t end = view->chunk_tokens - (first + i) % view->chunk_tokens;
        const uint8_t *key = address_key(view, head, first + i, head_dim);
        for (uint32_t j = 0; j < end && i < count; j++, i++, key += 2 * (size_t)head_dim)
            ret_key[i] = key;
    }
}
