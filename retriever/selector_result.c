/* See selector_result.h. Its memory grows and is used again. */
#include "retriever/selector_result.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"

static size_t lists_of(const struct selector_result *r)
{
    return (size_t)r->groups * r->heads;
}

void selector_result_begin(struct selector_result *r, uint32_t step, const struct head_config *head)
{
    r->step = step;
    r->groups = head->groups;
    r->heads = head->kv_heads;
    r->entry_count = r->refusal_count = 0;
}

void selector_result_refuse(struct selector_result *r, uint64_t sequence, const struct err *err)
{
    if (r->refusal_count == r->refusal_room) {
        r->refusal_room = LIMIT_SEQUENCES;
        r->refusals = mem_resize(r->refusals, r->refusal_room, sizeof *r->refusals);
    }
    struct selector_refusal *to = &r->refusals[r->refusal_count++];
    to->sequence = sequence;
    to->code = err->code;
    snprintf(to->text, sizeof to->text, "%s", err->text);
}

void selector_result_reserve(struct selector_result *r, uint32_t entries, size_t counts, size_t positions)
{
    if (entries > r->entry_room) {
        r->entry_room = LIMIT_SEQUENCES;
        r->entries = mem_resize(r->entries, r->entry_room, sizeof *r->entries);
        r->first = mem_resize(r->first, r->entry_room + 1, sizeof *r->first);
    }
    if (counts > r->count_room) {
        r->count_room = counts;
        r->counts = mem_resize(r->counts, counts, sizeof *r->counts);
    }
    if (positions > r->position_room) {
        r->position_room = positions + positions / 4;
        r->positions = mem_resize(r->positions, r->position_room, sizeof *r->positions);
    }
}

size_t selector_result_begin_entry(struct selector_result *r, const struct msg_topk_entry *entry,
                                   const uint32_t *counts, size_t positions)
{
    size_t at = r->entry_count ? r->first[r->entry_count] : 0, lists = lists_of(r);
    selector_result_reserve(r, r->entry_count + 1, (r->entry_count + 1) * lists * 2, at + positions);
    r->first[r->entry_count] = at;
    memcpy(r->counts + r->entry_count * lists * 2, counts, lists * 2 * sizeof *counts);
    r->entries[r->entry_count++] = *entry;
    r->first[r->entry_count] = at + positions;
    return at;
}

void selector_result_put(struct selector_result *r, const struct msg_topk_entry *entry,
                         const struct positions *added, const struct positions *removed)
{
    size_t at = r->entry_count ? r->first[r->entry_count] : 0, count = 0, lists = lists_of(r);
    for (size_t l = 0; l < lists; l++)
        count += (size_t)added[l].count + (removed ? removed[l].count : 0);
    selector_result_reserve(r, r->entry_count + 1, (r->entry_count + 1) * lists * 2, at + count);
    uint32_t *counts = r->counts + r->entry_count * lists * 2;
    r->first[r->entry_count] = at;
    for (size_t l = 0; l < lists; l++) {
        const struct positions *parts[] = {&added[l], removed ? &removed[l] : NULL};
        for (int i = 0; i < 2; i++) {
            uint32_t n = parts[i] ? parts[i]->count : 0;
            if (n)
                memcpy(r->positions + at, parts[i]->at, n * sizeof *r->positions);
            *counts++ = n;
            at += n;
        }
    }
    r->entries[r->entry_count++] = *entry;
    r->first[r->entry_count] = at;
}

uint32_t selector_result_part(const struct selector_result *r, uint32_t first, size_t bytes,
                              struct msg_topk *topk)
{
    size_t lists = (size_t)r->groups * r->heads;
    uint32_t end = first + 1;
    while (end < r->entry_count &&
           (r->first[end + 1] - r->first[first] + lists * 2 * (end + 1 - first)) * sizeof(uint32_t) <= bytes)
        end++;
    *topk = (struct msg_topk){
        .entries = r->entries + first,
        .entry_count = end - first,
        .groups = r->groups,
        .selection_heads = r->heads,
        .counts = {r->counts + first * lists * 2, (uint32_t)((end - first) * lists * 2)},
        .positions = {r->positions + r->first[first], (uint32_t)(r->first[end] - r->first[first])}};
    return end;
}

void selector_result_free(struct selector_result *result)
{
    mem_free(&result->entries);
    mem_free(&result->counts);
    mem_free(&result->positions);
    mem_free(&result->first);
    mem_free(&result->refusals);
    memset(result, 0, sizeof *result);
}
