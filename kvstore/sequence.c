/* Records, pages and slots of sequences; see sequence.h. Owner: the planner thread. It must never give a
 * page or a slab of a sequence that a step in flight names: planner.c asks only when there is none. */
#include "kvstore/sequence.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

void sequence_init(struct sequence *s, struct arena_sequence *record, uint32_t index)
{
    memset(s, 0, sizeof *s);
    s->record = record;
    s->index = index;
    s->id = record->id;
    s->salt = record->salt;
    s->made = record->made;
    s->capacity = record->capacity;
    s->prompt_tokens = record->prompt_tokens;
    s->sinks = record->sinks;
    s->window = record->window;
    s->budget = record->budget;
    s->blocks = record->blocks;
    s->committed = s->published = s->next = record->committed;
    s->first_sparse = UINT32_MAX;
}

uint32_t sequence_slot_slabs(const struct sequence_params *p, uint32_t slots)
{
    uint32_t n = 0, last = UINT32_MAX; /* heads come in ascending order, so their slabs do too */
    for (uint32_t h = 0; slots && h < p->layout->row_heads; h++) {
        uint64_t unit = (uint64_t)h * p->header_slots;
        uint32_t first = (uint32_t)(unit / p->units_per_slab);
        uint32_t end = (uint32_t)((unit + slots - 1) / p->units_per_slab);
        n += end - first + (first != last);
        last = end;
    }
    return n;
}

void sequence_attach(struct sequence *s, const struct sequence_params *p, uint32_t slots)
{
    s->attached = true;
    s->pages_max = sequence_pages(s->capacity);
    s->pages = mem_alloc((size_t)p->layout->layers * s->pages_max, sizeof *s->pages);
    s->slabs_max = p->slabs_max;
    s->slabs = mem_alloc((size_t)p->layout->layers * (p->slabs_max ? p->slabs_max : 1), sizeof *s->slabs);
    s->slots = slots;
    s->slot_slabs = s->budget ? sequence_slot_slabs(p, slots) : 0;
    memset(s->pages_written, 0, sizeof s->pages_written);
    memset(s->slabs_written, 0, sizeof s->slabs_written);
    memset(s->slabs_sent, 0, sizeof s->slabs_sent);
    memset(s->draft, 0, sizeof s->draft);
    struct elastic_params params = {.layout = p->layout,
                                    .capacity = s->capacity,
                                    .sinks = s->sinks,
                                    .window = s->window,
                                    .budget = s->budget,
                                    .slots = slots,
                                    .reload = p->reload};
    if (s->budget)
        elastic_init(&s->elastic, &params);
}

void sequence_pin(struct sequence *s, uint32_t position)
{
    struct elastic *e = &s->elastic;
    uint32_t end = position + 1;
    elastic_pin(e, e->limit < end ? e->limit : end, end, s->committed);
}

void sequence_pending_free(struct sequence_topk **pending)
{
    if (!*pending)
        return;
    mem_free(&(*pending)->counts);
    mem_free(&(*pending)->positions);
    mem_free(pending);
}

void sequence_detach(struct sequence *s, struct device *device)
{
    for (uint32_t l = 0; l < LIMIT_LAYERS; l++)
        if (s->has_slots[l])
            sequence_give_slots(s, device, l);
    for (uint32_t r = 0; r < LIMIT_RUNS && s->attached; r++)
        CHECK(s->pages_have[r] == 0); /* given run by run: only the caller knows the layout */
    elastic_free(&s->elastic);
    memset(&s->elastic, 0, sizeof s->elastic);
    mem_free(&s->pages);
    mem_free(&s->slabs);
    memset(s->pages_valid, 0, sizeof s->pages_valid);
    sequence_pending_free(&s->pending);
    s->debts = 0;
    s->attached = false;
    s->in_step = false;
}

void sequence_drop(struct sequence *s, struct prefix *prefix)
{
    atomic_store_explicit(&s->record->state, ARENA_SEQUENCE_FREE, memory_order_release);
    for (uint32_t i = s->blocks; i > 0; i--)
        prefix_unref(prefix, s->record->block[i - 1]);
    atomic_store_explicit(&s->record->blocks, 0, memory_order_relaxed);
    memset(s, 0, sizeof *s);
}

static void give_last_pages(struct sequence *s, struct device *device, const struct kv_layout *layout,
                            uint32_t run, uint32_t keep)
{
    uint32_t end = layout_run_first(layout, run + 1);
    while (s->pages_have[run] > keep) {
        s->pages_have[run]--;
        for (uint32_t l = layout_run_first(layout, run); l < end; l++)
            device_page_give(device, s->pages[(size_t)l * s->pages_max + s->pages_have[run]]);
    }
}

int sequence_grow_pages(struct sequence *s, struct device *device, const struct kv_layout *layout,
                        uint32_t run, uint32_t pages)
{
    CHECK(pages <= s->pages_max);
    uint32_t first = layout_run_first(layout, run), end = layout_run_first(layout, run + 1);
    uint32_t had = s->pages_have[run];
    for (; s->pages_have[run] < pages; s->pages_have[run]++)
        for (uint32_t l = first; l < end; l++) {
            int r = device_page_take(device, l, &s->pages[(size_t)l * s->pages_max + s->pages_have[run]]);
            if (r == 0)
                continue;
            while (l-- > first)
                device_page_give(device, s->pages[(size_t)l * s->pages_max + s->pages_have[run]]);
            give_last_pages(s, device, layout, run, had);
            return r;
        }
    return 0;
}

void sequence_give_pages(struct sequence *s, struct device *device, const struct kv_layout *layout,
                         uint32_t run)
{
    give_last_pages(s, device, layout, run, 0);
    s->pages_valid[run] = 0;
    for (uint32_t l = layout_run_first(layout, run); l < layout_run_first(layout, run + 1); l++)
        s->pages_written[0][l] = s->pages_written[1][l] = 0;
}

static bool slab_needed(const struct sequence_params *p, uint32_t slots, uint32_t slab)
{
    uint64_t begin = (uint64_t)slab * p->units_per_slab, end = begin + p->units_per_slab;
    for (uint32_t h = 0; h < p->layout->row_heads; h++) {
        uint64_t first = (uint64_t)h * p->header_slots;
        if (first < end && first + slots > begin)
            return true;
    }
    return false;
}

int sequence_take_slots(struct sequence *s, struct device *device, const struct sequence_params *p,
                        uint32_t layer)
{
    CHECK(!s->has_slots[layer]);
    if (device->free_count < s->slot_slabs)
        return -ENOSPC;
    uint64_t *slabs = s->slabs + (size_t)layer * s->slabs_max;
    for (uint32_t i = 0; i < s->slabs_max; i++) {
        slabs[i] = UINT64_MAX;
        if (slab_needed(p, s->slots, i))
            CHECK(device_slab_take(device, DEVICE_SLOTS, &slabs[i]) == 0);
    }
    s->has_slots[layer] = true;
    s->slabs_written[0][layer] = s->slabs_written[1][layer] = s->slabs_sent[layer] = false;
    return 0;
}

void sequence_give_slots(struct sequence *s, struct device *device, uint32_t layer)
{
    CHECK(s->has_slots[layer]);
    uint64_t *slabs = s->slabs + (size_t)layer * s->slabs_max;
    for (uint32_t i = 0; i < s->slabs_max; i++)
        if (slabs[i] != UINT64_MAX)
            device_slab_give(device, slabs[i]);
    s->has_slots[layer] = false;
    s->slabs_written[0][layer] = s->slabs_written[1][layer] = false;
}

int sequence_record(struct sequence *s, struct prefix *prefix, uint32_t position, const uint32_t *tokens,
                    uint32_t count)
{
    uint32_t want = sequence_pages(position + count);
    while (s->blocks < want) {
        uint32_t block;
        int r = prefix_take(prefix, &block);
        if (r < 0)
            return r;
        s->record->block[s->blocks] = block;
        atomic_store_explicit(&s->record->blocks, ++s->blocks, memory_order_release);
    }
    for (uint32_t i = 0; i < count; i++) {
        uint32_t p = position + i;
        struct arena_block *b = arena_block_at(prefix->blocks->header, s->record->block[p / BLOCK_TOKENS]);
        b->tokens[p % BLOCK_TOKENS] = tokens[i];
        if (b->ntokens < p % BLOCK_TOKENS + 1)
            b->ntokens = p % BLOCK_TOKENS + 1;
    }
    if (s->record->tokens < position + count)
        atomic_store_explicit(&s->record->tokens, position + count, memory_order_release);
    s->next = position + count;
    return 0;
}

static void seal(struct sequence *s, struct prefix *prefix)
{
    uint32_t i = s->sealed, block = s->record->block[i];
    struct arena_block *b = arena_block_at(prefix->blocks->header, block);
    struct hash128 parent = prefix_root(prefix, s->salt);
    bool sparse = s->first_sparse < (i + 1) * BLOCK_TOKENS;
    if (i > 0) {
        const struct arena_block *before = arena_block_at(prefix->blocks->header, s->record->block[i - 1]);
        parent = (struct hash128){before->hash_lo, before->hash_hi};
    }
    b->made = sparse ? s->made : (struct made){.kind = ARENA_MADE_FULL};
    struct hash128 hash = prefix_hash(parent, &b->made, b->tokens);
    b->parent_lo = parent.lo;
    b->parent_hi = parent.hi;
    b->hash_lo = hash.lo;
    b->hash_hi = hash.hi;
    atomic_store_explicit(&b->state, ARENA_BLOCK_SEALED, memory_order_release);
    prefix_insert(prefix, block);
    s->sealed++;
}

void sequence_publish(struct sequence *s, struct prefix *prefix, uint32_t end)
{
    if (end > s->published) {
        s->published = end;
        atomic_store_explicit(&s->record->committed, end, memory_order_release);
    }
    while (s->sealed < s->published / BLOCK_TOKENS)
        seal(s, prefix);
}

void sequence_tokens(const struct sequence *s, const struct blocks *blocks, uint32_t n, uint32_t *ret)
{
    for (uint32_t p = 0; p < n; p += BLOCK_TOKENS) {
        uint32_t some = n - p < BLOCK_TOKENS ? n - p : BLOCK_TOKENS;
        const struct arena_block *b = arena_block_at(blocks->header, s->record->block[p / BLOCK_TOKENS]);
        memcpy(ret + p, b->tokens, some * sizeof *ret);
    }
}
