/* See memory.h. No state, any thread. */
#include "proto/memory.h"

#include <math.h>

static uint64_t divide_up(uint64_t a, uint64_t b)
{
    return (a + b - 1) / b;
}

uint64_t memory_paper_threshold(const struct memory_paper *p, uint32_t offloaded)
{
    double piece =
        4.0 * p->requests * p->kv_heads * p->head_dim; /* K and V, 2 bytes each, of every request */
    double left = p->memory_bytes - 1.3 * (p->model_bytes + p->head_bytes) - piece * offloaded * p->budget;
    double s = floor(left / (piece * (p->layers + 1.0 + p->query_groups - offloaded)));
    return s > 0 ? (uint64_t)s : 0;
}

/* Of one layer. */
static uint64_t page_slabs(const struct kv_layout *layout, uint64_t pages)
{
    return divide_up(pages, layout_slab_bytes(layout) / layout_page_bytes(layout));
}

/* Of one sequence and layer. */
static uint64_t slot_slabs(const struct kv_layout *layout, uint32_t slots)
{
    return divide_up((uint64_t)slots * layout->row_heads, layout_slab_bytes(layout) / layout->piece_bytes);
}

static uint32_t run_layers_max(const struct kv_layout *layout)
{
    uint32_t runs = layout_runs(layout); /* the last run is the longest */
    return layout->layers - layout_run_first(layout, runs - 1);
}

uint64_t memory_staging_slabs(const struct kv_layout *layout, uint32_t tokens)
{
    uint64_t pages = divide_up(tokens, BLOCK_TOKENS);
    return 2 * run_layers_max(layout) * page_slabs(layout, pages);
}

uint32_t memory_staging_tokens(const struct kv_layout *layout, uint64_t device_bytes, uint32_t slots)
{
    uint64_t slab_bytes = layout_slab_bytes(layout), all = device_bytes / slab_bytes;
    uint64_t one = layout->layers * slot_slabs(layout, memory_slots(slots, layout->context_max));
    uint64_t most = all > one && all - one > all / 2 ? all - one : all / 2;
    uint64_t slabs = most / (2 * run_layers_max(layout)); /* of one layer and buffer */
    uint64_t pages = (slabs ? slabs : 1) * (slab_bytes / layout_page_bytes(layout));
    uint64_t wanted = divide_up(layout->context_max, BLOCK_TOKENS);
    return (uint32_t)((pages < wanted ? pages : wanted) * BLOCK_TOKENS);
}

uint64_t memory_device_slabs(const struct kv_layout *layout, const struct memory_load *load, uint32_t context,
                             uint32_t resident)
{
    uint64_t pages = (uint64_t)load->requests * divide_up(context, BLOCK_TOKENS);
    uint64_t slabs = resident * page_slabs(layout, pages);
    if (resident < layout->layers) {
        slabs += (uint64_t)load->requests * (layout->layers - resident) *
                 slot_slabs(layout, memory_slots(load->slots, context));
        slabs += memory_staging_slabs(layout, load->staging_tokens);
    }
    return slabs;
}

uint64_t memory_kept_slabs(const struct kv_layout *layout, const struct memory_load *load, uint32_t context,
                           uint32_t resident)
{
    uint64_t ahead = context + (uint64_t)BLOCK_TOKENS;
    uint32_t positions = ahead < layout->context_max ? (uint32_t)ahead : layout->context_max;
    uint64_t pages = (uint64_t)load->requests * divide_up(positions, BLOCK_TOKENS),
             slots = load->requests * slot_slabs(layout, memory_slots(load->slots, positions)),
             layers = layout->layers - resident + (resident > 0 ? 1u : 0u);
    return resident * page_slabs(layout, pages) + layers * slots +
           memory_staging_slabs(layout, load->staging_tokens);
}

uint32_t memory_exact_threshold(const struct kv_layout *layout, const struct memory_load *load,
                                uint64_t device_bytes, uint32_t resident)
{
    uint64_t slabs = device_bytes / layout_slab_bytes(layout);
    uint32_t low = 0,
             high =
                 layout->context_max; /* low fits (or is 0), above high does not: slabs grow with context */
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (memory_kept_slabs(layout, load, middle, resident) <= slabs)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

const char *memory_through_name(uint32_t write_through)
{
    return write_through == WRITE_THROUGH_ALL ? "all" : "offloaded";
}

uint32_t memory_runs_allowed(const struct kv_layout *layout, uint32_t offload_layers)
{
    uint32_t runs = layout_runs(layout);
    uint32_t most = layout->layers - (offload_layers < layout->layers ? offload_layers : layout->layers);
    while (layout_run_first(layout, runs) > most)
        runs--;
    return runs;
}

uint32_t memory_runs_kept(const struct kv_layout *layout, uint32_t requests, uint32_t slots,
                          uint64_t device_bytes, const struct memory_through *through)
{
    if (through->write_through == WRITE_THROUGH_ALL)
        return 0;
    if (through->no_offload)
        return layout_runs(layout);
    uint64_t slabs = device_bytes / layout_slab_bytes(layout);
    slots = memory_slots(slots, layout->context_max);
    struct memory_load load = {.requests = requests,
                               .slots = slots,
                               .staging_tokens =
                                   memory_staging_tokens(layout, slabs * layout_slab_bytes(layout), slots)};
    uint32_t runs = memory_runs_allowed(layout, through->offload_layers);
    while (runs > 0 &&
           memory_kept_slabs(layout, &load, layout->context_max, layout_run_first(layout, runs)) > slabs)
        runs--;
    return runs;
}

uint64_t memory_host_bytes(const struct kv_layout *layout, uint32_t requests, uint32_t context)
{
    return (uint64_t)requests * divide_up(context, BLOCK_TOKENS) * layout_block_bytes(layout);
}

uint64_t memory_prefix_bytes(const struct memory_gpu_head *h, uint64_t row_bytes)
{
    uint64_t keys = (uint64_t)h->groups * h->kv_heads * memory_gpu_key_bytes(h);
    return MEMORY_PREFIX_BLOCK + BLOCK_TOKENS * keys + row_bytes;
}
