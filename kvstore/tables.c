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

static uint32_t write_positions(const struct selection_list *list, uint32_t sinks, const uint32_t window[2],
                                uint32_t *restrict out)
{
    uint32_t n = 0;
    for (uint32_t p = 0; p < sinks; p++)
        out[n++] = p;
    memcpy(out + n, list->position, list->count * sizeof *out);
    n += list->count;
    for (uint32_t p = window[0]; p < window[1]; p++)
        out[n++] = p;
    return n;
}

static void write_slots(const struct selection_list *list, const struct elastic_head *head, uint32_t sinks,
                        const uint32_t window[2], uint32_t *restrict out)
{
    const uint16_t *restrict map = head->slot_of, *restrict slot = list->slot;
    for (uint32_t p = 0; p < sinks; p++)
        *out++ = map[p];
    for (uint32_t i = 0; i < list->count; i++)
        out[i] = slot[i];
    out += list->count;
    for (uint32_t p = window[0]; p < window[1]; p++)
        *out++ = map[p];
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
    uint32_t window[2] = {e->limit < position + 1 ? e->limit : position + 1, position + 1};
    for (uint32_t g = 0; g < t->header.groups; g++) {
        for (uint32_t h = 0; h < t->header.selection_heads; h++) {
            const struct selection_list *list = &elastic_list(e, g, h)->now;
            uint64_t index = table_list_index(view, phase, s->index, g, h);
            CHECK((uint64_t)sinks + list->count + (window[1] - window[0]) <= t->header.list_max);
            uint32_t n = write_positions(list, sinks, window, table_positions_at(view, index));
            *table_count_at(view, index) = n;
            if (e->attached[g])
                write_slots(list, elastic_head(e, g, h / e->ratio), sinks, window,
                            table_slots_at(view, index));
            s->counters.attended += phase ? attended(t, step, e, g, n, position) : 0;
        }
        uint32_t *writes = table_write_at(view, s->index, g);
        for (uint32_t h = 0; h < t->header.row_heads && e->attached[g]; h++) {
            uint32_t slot = elastic_head(e, g, h)->slot_of[position];
            if (writes[h] !=
                slot) /* the late phase finds what the early one wrote, which is being read by then */
                writes[h] = slot;
        }
    }
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
