/* Tables of a step; see tables.h. Owner: the planner thread, lists also by its pool. It must never write a
 * table of the parity that a step in flight reads. */
#include "kvstore/tables.h"

#include <string.h>

#include "base/check.h"

void tables_init(struct tables *t, struct control_header *control)
{
    memset(t, 0, sizeof *t);
    memcpy(&t->header, control, sizeof t->header);
    for (uint32_t parity = 0; parity < 2; parity++) {
        t->view[parity].header = &t->header;
        t->view[parity].base = (uint8_t *)control + t->header.tables_at + parity * t->header.table_bytes;
        control_table_offsets(&t->header, &t->view[parity].at);
    }
}

static struct table_view *view_of(struct tables *t, uint32_t step)
{
    return &t->view[step & 1];
}

void tables_begin(struct tables *t, uint32_t step, uint32_t version, uint32_t resident)
{
    struct table_header *header = (struct table_header *)view_of(t, step)->base;
    header->step = step;
    header->resident_version = version;
    t->resident[step & 1] = resident;
    for (uint32_t l = 0; l < t->header.layers; l++)
        header->resident[l] = l < resident;
}

void tables_pages(struct tables *t, uint32_t step, struct sequence *s, uint32_t pages,
                  const uint32_t range[2])
{
    CHECK(pages <= t->header.pages_max && pages <= s->pages_max);
    for (uint32_t l = range[0]; l < range[1]; l++) {
        uint32_t *written = &s->pages_written[step & 1][l];
        uint64_t *out = table_pages_at(view_of(t, step), s->index, l);
        for (; *written < pages; ++*written)
            out[*written] = s->pages[(size_t)l * s->pages_max + *written];
    }
}

void tables_staging(struct tables *t, uint32_t step, struct sequence *s, uint32_t layer,
                    const uint64_t *pages, uint32_t count)
{
    CHECK(count <= t->header.pages_max);
    memcpy(table_pages_at(view_of(t, step), s->index, layer), pages, count * sizeof *pages);
    s->pages_written[step & 1][layer] = 0;
}

void tables_slabs(struct tables *t, uint32_t step, struct sequence *s, uint32_t layer)
{
    bool *written = &s->slabs_written[step & 1][layer];
    if (*written)
        return;
    uint64_t *out = table_slabs_at(view_of(t, step), s->index, layer);
    const uint64_t *slabs = s->slabs + (size_t)layer * s->slabs_max;
    for (uint32_t i = 0; i < t->header.slabs_max; i++)
        out[i] = slabs[i] == UINT64_MAX ? 0 : slabs[i]; /* units there are never named */
    *written = true;
}

/* One list while it is written: `at` entries are there. */
struct list_out {
    uint32_t *restrict positions, *restrict slots; /* slots NULL: the group has none */
    const uint16_t *slot_of;
    uint32_t at;
};

static struct list_out list_out(const struct table_view *view, uint32_t phase, const struct sequence *s,
                                uint32_t group, uint32_t head)
{
    const struct elastic *e = &s->elastic;
    uint64_t index = table_list_index(view, phase, s->index, group, head);
    return (struct list_out){.positions = table_positions_at(view, index),
                             .slots = e->attached[group] ? table_slots_at(view, index) : NULL,
                             .slot_of = elastic_head(e, group, head / e->ratio)->slot_of};
}

static void write_range(struct list_out *out, uint32_t from, uint32_t end)
{
    for (uint32_t p = from; p < end; p++, out->at++) {
        out->positions[out->at] = p;
        if (out->slots)
            out->slots[out->at] = out->slot_of[p];
    }
}

static void write_one(struct list_out *out, uint32_t position, uint32_t slot)
{
    out->positions[out->at] = position;
    out->slots[out->at++] = slot;
}

static void write_selection(struct list_out *out, const struct selection_list *list)
{
    memcpy(out->positions + out->at, list->position, list->count * sizeof *list->position);
    if (out->slots) {
        uint32_t *restrict to = out->slots + out->at;
        const uint16_t *restrict slot = list->slot;
        for (uint32_t i = 0; i < list->count; i++)
            to[i] = slot[i];
    }
    out->at += list->count;
}

void tables_draft(struct tables *t, uint32_t step, uint32_t phase, struct sequence *s, uint32_t position)
{
    const struct table_view *view = view_of(t, step);
    const struct elastic *e = &s->elastic;
    bool next = e->next != ELASTIC_NONE;
    uint32_t limit = next ? e->next_limit : e->limit;
    struct sequence_draft *draft = &s->draft[step & 1][phase];
    draft->ready = false;
    if (limit > position || (!elastic_has_no_slots(e) && e->pin_end < e->sinks) ||
        (next && !elastic_is_whole(e)))
        return;
    /* What is pinned stays in its slot until the step unpins it; a named row stays in its own too. */
    uint32_t pinned = e->pin_end < position ? e->pin_end : position;
    if (e->pin_low > limit || pinned < limit)
        pinned = limit;
    /* The slot that the step writes its own row to will be the next that is given. Nothing writes it before:
     * that it is read until then, by the step in flight, does not matter. */
    bool whole = !next && !elastic_has_no_slots(e) && elastic_pins_one(e, position);
    uint64_t listed[2] = {0, 0};
    for (uint32_t g = 0; g < t->header.groups; g++) {
        for (uint32_t h = 0; h < t->header.selection_heads; h++) {
            const struct selection *list = elastic_list(e, g, h);
            struct list_out out = list_out(view, phase, s, g, h);
            const struct selection_list *from = next ? &list->next : &list->now;
            uint32_t end = e->attached[g] ? pinned : position + 1;
            CHECK((uint64_t)e->sinks + from->count + (end - limit) <= t->header.list_max);
            write_range(&out, 0, e->sinks);
            write_selection(&out, from);
            write_range(&out, limit, end);
            if (e->attached[g] && !whole)
                continue;
            if (e->attached[g])
                write_one(&out, position, elastic_slot_ahead(e, elastic_head(e, g, h / e->ratio)));
            *table_count_at(view, table_list_index(view, phase, s->index, g, h)) = out.at;
            listed[e->attached[g]] += out.at;
        }
        for (uint32_t h = 0; h < t->header.row_heads && whole && e->attached[g]; h++)
            table_write_at(view, s->index, g)[h] = elastic_slot_ahead(e, elastic_head(e, g, h));
    }
    *draft = (struct sequence_draft){.ready = true,
                                     .step = step,
                                     .position = position,
                                     .set_step = next ? e->next_step : e->step,
                                     .changes = e->changes,
                                     .whole = whole,
                                     .moves = e->moves,
                                     .window_end = pinned,
                                     .listed = listed[0],
                                     .listed_slots = listed[1]};
}

static bool is_drafted(const struct sequence *s, uint32_t step, uint32_t phase, uint32_t position)
{
    const struct sequence_draft *d = &s->draft[step & 1][phase];
    return d->ready && d->step == step && d->position == position && d->set_step == s->elastic.step &&
           d->changes == s->elastic.changes;
}

static bool is_whole(const struct sequence *s, uint32_t step, uint32_t phase)
{
    const struct sequence_draft *d = &s->draft[step & 1][phase];
    return d->whole && d->moves == s->elastic.moves;
}

bool tables_are_drafted(const struct sequence *s, uint32_t step, uint32_t phase, uint32_t position)
{
    return is_drafted(s, step, phase, position) &&
           (is_whole(s, step, phase) || elastic_has_no_slots(&s->elastic));
}

/* Positions that a layer of the group attends on average. */
static uint64_t attended(const struct tables *t, uint32_t step, const struct elastic *e, uint32_t group,
                         uint32_t listed, uint32_t position)
{
    uint32_t first = e->layout.group_first_layer[group], end = e->layout.group_first_layer[group + 1];
    uint32_t resident = t->resident[step & 1];
    uint64_t all = e->is_short && resident > first ? (resident < end ? resident : end) - first : 0;
    return (all * (position + 1) + (end - first - all) * listed) / (end - first);
}

void tables_lists(struct tables *t, uint32_t step, uint32_t phase, struct sequence *s, uint32_t position)
{
    const struct table_view *view = view_of(t, step);
    const struct elastic *e = &s->elastic;
    uint32_t sinks = e->sinks < position + 1 ? e->sinks : position + 1;
    uint32_t window = e->limit < position + 1 ? e->limit : position + 1;
    struct sequence_draft *draft = &s->draft[step & 1][phase];
    bool drafted = is_drafted(s, step, phase, position), slots = drafted && is_whole(s, step, phase);
    /* Groups whose lists are whole attend what is listed, unless the set is short. */
    s->counters.attended +=
        phase && drafted && !e->is_short ? draft->listed + (slots ? draft->listed_slots : 0) : 0;
    for (uint32_t g = 0; g < t->header.groups; g++) {
        bool whole = drafted && (slots || !e->attached[g]);
        for (uint32_t h = 0; h < t->header.selection_heads && !(whole && !e->is_short); h++) {
            const struct selection_list *list = &elastic_list(e, g, h)->now;
            struct list_out out = list_out(view, phase, s, g, h);
            CHECK((uint64_t)sinks + list->count + (position + 1 - window) <= t->header.list_max);
            if (whole) {
                out.at = sinks + list->count + (position + 1 - window);
            } else if (drafted) {
                out.at = sinks + list->count + (draft->window_end - window);
                write_range(&out, draft->window_end, position + 1);
            } else {
                write_range(&out, 0, sinks);
                write_selection(&out, list);
                write_range(&out, window, position + 1);
            }
            *table_count_at(view, table_list_index(view, phase, s->index, g, h)) = out.at;
            s->counters.attended += phase ? attended(t, step, e, g, out.at, position) : 0;
        }
        uint32_t *writes = table_write_at(view, s->index, g);
        for (uint32_t h = 0; h < t->header.row_heads && e->attached[g] && !slots; h++) {
            uint32_t slot = elastic_head(e, g, h)->slot_of[position];
            if (writes[h] !=
                slot) /* the late phase finds what the early one wrote, which is being read by then */
                writes[h] = slot;
        }
    }
    s->drafts_used += drafted;
    s->drafts_whole += slots;
    draft->ready = false;
    s->counters.lists += phase ? (uint64_t)t->header.groups * t->header.selection_heads : 0;
}

void tables_entry(struct tables *t, uint32_t step, uint32_t phase, uint32_t index, int32_t status,
                  uint32_t loaded)
{
    CHECK(index < t->header.sequences_max);
    struct table_sequence *entry = table_sequence_at(view_of(t, step), phase, index);
    *entry = (struct table_sequence){.step = step, .status = status, .loaded = loaded};
}

void tables_attend_all(struct tables *t, uint32_t step, uint32_t phase, uint32_t index)
{
    CHECK(index < t->header.sequences_max);
    table_sequence_at(view_of(t, step), phase, index)->flags = TABLE_ATTEND_ALL;
}
