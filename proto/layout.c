/* Arithmetic over struct kv_layout. Pure, any thread. */
#include "proto/layout.h"

#include <errno.h>
#include <string.h>

static int check_range(const char *field, uint64_t found, uint64_t low, uint64_t high, struct err *err)
{
    if (found >= low && found <= high)
        return 0;
    return err_set(err, -EINVAL, "layout: %s: found %llu, expected %llu to %llu", field,
                   (unsigned long long)found, (unsigned long long)low, (unsigned long long)high);
}

int layout_check(const struct kv_layout *l, struct err *err)
{
    int r = check_range("layers", l->layers, 1, LIMIT_LAYERS, err);
    if (r == 0)
        r = check_range("row_heads", l->row_heads, 1, LIMIT_ROW_HEADS, err);
    if (r == 0)
        r = check_range("selection_heads", l->selection_heads, l->row_heads, LIMIT_SELECTION_HEADS, err);
    if (r == 0 && l->selection_heads % l->row_heads)
        r = err_set(err, -EINVAL, "layout: selection_heads: found %u, expected a multiple of row_heads %u",
                    l->selection_heads, l->row_heads);
    if (r == 0)
        r = check_range("groups", l->groups, 1, l->layers < LIMIT_GROUPS ? l->layers : LIMIT_GROUPS, err);
    if (r == 0)
        r = check_range("piece_bytes", l->piece_bytes, 1, 65536, err);
    if (r == 0)
        r = check_range("key_row_bytes", l->key_row_bytes, 0, 1 << 20, err);
    if (r == 0)
        r = check_range("context_max", l->context_max, 1, LIMIT_CONTEXT, err);
    if (r == 0)
        r = check_range("host_first_layer", l->host_first_layer, 0, l->layers, err);
    if (r == 0)
        r = check_range("group_first_layer[0]", l->group_first_layer[0], 0, 0, err);
    for (uint32_t g = 0; r == 0 && g < l->groups; g++)
        r = check_range("group_first_layer", l->group_first_layer[g + 1], l->group_first_layer[g] + 1,
                        l->layers, err);
    if (r == 0)
        r = check_range("group_first_layer[groups]", l->group_first_layer[l->groups], l->layers, l->layers,
                        err);
    return r;
}

struct hash128 layout_fingerprint(const struct kv_layout *l)
{
    uint64_t words[16 + LIMIT_GROUPS + 1];
    memset(words, 0, sizeof words);
    uint64_t head[] = {l->model.lo,        l->model.hi,  l->layers,      l->row_heads,
                       l->selection_heads, l->groups,    l->piece_bytes, l->dtype,
                       l->key_row_bytes,   BLOCK_TOKENS, l->context_max, l->host_first_layer};
    memcpy(words, head, sizeof head);
    for (uint32_t g = 0; g <= l->groups && g <= LIMIT_GROUPS; g++)
        words[16 + g] = l->group_first_layer[g];
    return hash_bytes(1, words, sizeof words);
}

void layout_set_groups(struct kv_layout *l, uint32_t groups)
{
    memset(l->group_first_layer, 0, sizeof l->group_first_layer);
    l->groups = groups;
    for (uint32_t g = 0; g <= groups && g <= LIMIT_GROUPS; g++)
        l->group_first_layer[g] = l->layers * g / groups;
}

uint32_t layout_group_of(const struct kv_layout *l, uint32_t layer)
{
    uint32_t g = 0;
    while (g + 1 < l->groups && layer >= l->group_first_layer[g + 1])
        g++;
    return g;
}

uint32_t layout_runs(const struct kv_layout *l)
{
    uint32_t runs = l->layers / RUN_LAYERS;
    return runs ? runs : 1;
}

uint32_t layout_run_first(const struct kv_layout *l, uint32_t run)
{
    return run >= layout_runs(l) ? l->layers : run * RUN_LAYERS;
}

uint32_t layout_run_of(const struct kv_layout *l, uint32_t layer)
{
    uint32_t run = layer / RUN_LAYERS, runs = layout_runs(l);
    return run < runs ? run : runs - 1;
}

uint64_t layout_row_bytes(const struct kv_layout *l)
{
    return layout_piece_at(l, l->layers);
}

uint64_t layout_block_bytes(const struct kv_layout *l)
{
    return (layout_row_bytes(l) * l->row_heads + l->key_row_bytes) * BLOCK_TOKENS;
}

uint64_t layout_page_bytes(const struct kv_layout *l)
{
    return (uint64_t)l->row_heads * BLOCK_TOKENS * l->piece_bytes;
}

uint64_t layout_slab_bytes(const struct kv_layout *l)
{
    uint64_t bytes = SLAB_BYTES_MIN;
    while (bytes < layout_page_bytes(l))
        bytes *= 2;
    return bytes;
}
