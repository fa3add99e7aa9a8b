/* The reader of the store's tables; see places.h and SHARED-MEMORY.md section 3.
 *
 * Owner: the device thread. State: copies of the current step's lists (of one phase and group at a time) and
 * of one layer's page or slab offsets. It never writes shared memory, and hands out no pointer into it but
 * device memory's begin. */
#include "decoder/places.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

enum { OFFSET_ALIGN = 64, NO_LISTS = UINT32_MAX };

struct verdict {
    int status;
    const char *why;
};

struct places {
    struct kv_layout layout;
    struct control_header header; /* a copy: sizes that were checked once stay what they were */
    struct control_header *control;
    uint8_t *device;
    const struct step_record *record;
    uint8_t resident[LIMIT_LAYERS];
    uint32_t offloaded;
    struct verdict verdict[LIMIT_SEQUENCES];
    uint8_t attend_all[2][LIMIT_SEQUENCES]; /* [phase][entry] */

    uint32_t lists_of;                       /* phase * groups + group whose lists are copied, or NO_LISTS */
    uint32_t *positions, *slots;             /* [entry][head][list_max] */
    struct attn_list *by_position, *by_slot; /* [entry][head] */
    uint32_t *writes;                        /* [entry][head] */
    uint8_t *slab_used;                      /* [entry][slabs_max]: some listed slot lies in it */
    uint64_t *offsets;                       /* [entry][max(pages_max, slabs_max)] of the current layer */
    uint32_t offsets_max;
};

struct places *places_create(const struct kv_layout *layout, struct control_header *control, uint8_t *device)
{
    CHECK(layout->selection_heads == layout->row_heads);
    struct places *t = mem_alloc(1, sizeof *t);
    t->layout = *layout;
    memcpy(&t->header, control, sizeof t->header);
    t->control = control;
    t->device = device;
    size_t entries = t->header.sequences_max, lists = entries * layout->row_heads;
    t->positions = mem_alloc(lists, (size_t)t->header.list_max * sizeof *t->positions);
    t->slots = mem_alloc(lists, (size_t)t->header.list_max * sizeof *t->slots);
    t->by_position = mem_alloc(lists, sizeof *t->by_position);
    t->by_slot = mem_alloc(lists, sizeof *t->by_slot);
    t->writes = mem_alloc(lists, sizeof *t->writes);
    t->slab_used = mem_alloc(entries, t->header.slabs_max + 1);
    t->offsets_max = t->header.pages_max > t->header.slabs_max ? t->header.pages_max : t->header.slabs_max;
    t->offsets = mem_alloc(entries, t->offsets_max * sizeof *t->offsets);
    return t;
}

void places_free(struct places **places)
{
    struct places *t = *places;
    if (!t)
        return;
    mem_free(&t->positions);
    mem_free(&t->slots);
    mem_free(&t->by_position);
    mem_free(&t->by_slot);
    mem_free(&t->writes);
    mem_free(&t->slab_used);
    mem_free(&t->offsets);
    mem_free(places);
}

void places_begin(struct places *t, const struct step_record *record)
{
    CHECK(record->entries <= t->header.sequences_max);
    t->record = record;
    t->lists_of = NO_LISTS;
    memset(t->verdict, 0, sizeof t->verdict);
}

static void drop(struct places *t, uint32_t entry, int status, const char *why)
{
    if (t->verdict[entry].status == 0)
        t->verdict[entry] = (struct verdict){status, why};
}

static struct table_view view_of(const struct places *t)
{
    struct table_view view = {&t->header, NULL, {0}};
    view.base = (uint8_t *)t->control + t->header.tables_at + (t->record->step & 1) * t->header.table_bytes;
    control_table_offsets(&t->header, &view.at);
    return view;
}

int places_phase(struct places *t, enum places_phase phase, struct err *err)
{
    struct table_view view = view_of(t);
    struct table_header head;
    memcpy(&head, view.base, sizeof head);
    if (head.step != t->record->step || head.resident_version != t->record->resident_version)
        return err_set(err, -EPROTO, "tables: found step %u and resident set %u, expected step %u and set %u",
                       head.step, head.resident_version, t->record->step, t->record->resident_version);
    t->offloaded = 0;
    for (uint32_t l = 0; l < t->layout.layers; l++) {
        t->resident[l] = head.resident[l];
        t->offloaded += !head.resident[l];
    }
    for (uint32_t e = 0; e < t->record->entries; e++) {
        struct table_sequence s;
        memcpy(&s, table_sequence_at(&view, phase, t->record->entry[e].sequence), sizeof s);
        if (s.step != t->record->step)
            drop(t, e, -EPROTO, "the store's tables leave the sequence out");
        else if (s.status < 0)
            drop(t, e, s.status, "the store ended the sequence");
        else if (s.flags & ~(uint32_t)TABLE_ATTEND_ALL)
            drop(t, e, -EPROTO, "the store's tables bear a flag that does not exist");
        t->attend_all[phase][e] = s.flags & TABLE_ATTEND_ALL;
    }
    return 0;
}

/* Copies `count` items and says whether each is below `limit`. */
static int copy_items(uint32_t *to, const uint32_t *from, uint32_t count, uint32_t limit)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < count; i++) {
        to[i] = from[i];
        most = to[i] > most ? to[i] : most;
    }
    return most < limit;
}

static void mark_slabs(struct places *t, uint32_t entry, uint32_t head, const struct attn_list *list)
{
    uint8_t *used = t->slab_used + (size_t)entry * t->header.slabs_max;
    uint32_t first = head * t->header.slots; /* below LIMIT_ROW_HEADS * LIMIT_CONTEXT */
    for (uint32_t i = 0; i < list->count; i++)
        used[(first + list->item[i]) / t->header.units_per_slab] = 1;
}

/* Copies the lists of one entry and head. NULL, or what is wrong with them. */
static const char *copy_lists(struct places *t, const struct table_view *view, uint32_t entry, uint32_t group,
                              uint32_t phase, uint32_t head)
{
    const struct step_entry *e = &t->record->entry[entry];
    uint64_t list = table_list_index(view, phase, e->sequence, group, head);
    uint32_t count = *table_count_at(view, list), at = entry * t->layout.row_heads + head;
    uint32_t *positions = t->positions + (size_t)at * t->header.list_max;
    uint32_t *slots = t->slots + (size_t)at * t->header.list_max;
    if (count == 0 || count > t->header.list_max)
        return "the store's tables give a list no length that can be";
    t->by_position[at] = (struct attn_list){count, positions};
    t->by_slot[at] = (struct attn_list){count, slots};
    if (!copy_items(positions, table_positions_at(view, list), count, e->position + 1))
        return "the store's tables list a position that is not there yet";
    if (!t->offloaded)
        return NULL;
    t->writes[at] = table_write_at(view, e->sequence, group)[head];
    int layers_slotted = 0;
    for (uint32_t l = t->layout.group_first_layer[group]; l < t->layout.group_first_layer[group + 1]; l++)
        layers_slotted |= !t->resident[l];
    if (!layers_slotted)
        return NULL;
    if (t->writes[at] >= t->header.slots ||
        !copy_items(slots, table_slots_at(view, list), count, t->header.slots))
        return "the store's tables list a slot that does not exist";
    mark_slabs(t, entry, head, &t->by_slot[at]);
    mark_slabs(t, entry, head, &(struct attn_list){1, &t->writes[at]});
    return NULL;
}

static void load_lists(struct places *t, uint32_t phase, uint32_t group)
{
    uint32_t key = phase * t->layout.groups + group;
    if (t->lists_of == key)
        return;
    t->lists_of = key;
    struct table_view view = view_of(t);
    memset(t->slab_used, 0, (size_t)t->header.sequences_max * t->header.slabs_max);
    for (uint32_t e = 0; e < t->record->entries; e++) {
        for (uint32_t h = 0; t->verdict[e].status == 0 && h < t->layout.row_heads; h++) {
            const char *wrong = copy_lists(t, &view, e, group, phase, h);
            if (wrong)
                drop(t, e, -EPROTO, wrong);
        }
    }
}

/* Whether [offset, offset + bytes) lies in device memory, where a page or slab may begin. */
static int inside(const struct places *t, uint64_t offset, uint64_t bytes)
{
    return offset % OFFSET_ALIGN == 0 && bytes <= t->header.device_bytes &&
           offset <= t->header.device_bytes - bytes;
}

static void aim_pages(struct places *t, const struct table_view *view, uint32_t entry, uint32_t layer,
                      struct kv_view *kv)
{
    const struct step_entry *e = &t->record->entry[entry];
    const uint64_t *from = table_pages_at(view, e->sequence, layer);
    uint64_t *to = t->offsets + (size_t)entry * t->offsets_max;
    uint32_t pages = (e->position + e->count - 1) / BLOCK_TOKENS + 1;
    if (pages > t->header.pages_max) {
        drop(t, entry, -EPROTO, "the sequence is longer than the store's tables");
        return;
    }
    for (uint32_t i = 0; i < pages; i++) {
        to[i] = from[i];
        if (!inside(t, to[i], t->header.page_bytes))
            drop(t, entry, -EPROTO, "the store's tables name a page outside of device memory");
    }
    kv->at = to;
    kv->page_tokens = BLOCK_TOKENS;
}

static void aim_slots(struct places *t, const struct table_view *view, uint32_t entry, uint32_t layer,
                      struct kv_view *kv)
{
    const uint64_t *from = table_slabs_at(view, t->record->entry[entry].sequence, layer);
    const uint8_t *used = t->slab_used + (size_t)entry * t->header.slabs_max;
    uint64_t *to = t->offsets + (size_t)entry * t->offsets_max;
    for (uint32_t i = 0; i < t->header.slabs_max; i++) {
        to[i] = from[i];
        if (used[i] && !inside(t, to[i], t->header.slab_bytes))
            drop(t, entry, -EPROTO, "the store's tables name a slab outside of device memory");
    }
    kv->at = to;
    kv->slotted = 1;
    kv->slots = t->header.slots;
    kv->units_per_slab = t->header.units_per_slab;
}

void places_layer(struct places *t, uint32_t layer, struct pass_kv *kv)
{
    struct table_view view = view_of(t);
    int sparse = t->record->kind == STEP_SPARSE;
    int early = t->record->selection == SELECTION_MIXED && layer < t->record->early_layers;
    enum places_phase phase = early ? PLACES_EARLY : PLACES_LATE;
    if (sparse)
        load_lists(t, phase, layout_group_of(&t->layout, layer));
    for (uint32_t e = 0; e < t->record->entries; e++) {
        int slotted = sparse && !t->resident[layer];
        size_t at = (size_t)e * t->layout.row_heads;
        kv[e] = (struct pass_kv){.view = {.base = t->device,
                                          .piece_bytes = t->layout.piece_bytes,
                                          .type = (enum dtype)t->layout.dtype}};
        if (t->verdict[e].status == 0) {
            if (slotted)
                aim_slots(t, &view, e, layer, &kv[e].view);
            else
                aim_pages(t, &view, e, layer, &kv[e].view);
        }
        if (sparse && (slotted || !t->attend_all[phase][e]))
            kv[e].lists = slotted ? t->by_slot + at : t->by_position + at;
        kv[e].write = slotted ? t->writes + at : NULL;
        kv[e].dropped = t->verdict[e].status < 0;
    }
}

int places_status(const struct places *t, uint32_t entry, const char **ret_why)
{
    *ret_why = t->verdict[entry].why ? t->verdict[entry].why : "";
    return t->verdict[entry].status;
}

int places_attends_all(const struct places *t, enum places_phase phase, uint32_t entry)
{
    return t->attend_all[phase][entry];
}

uint32_t places_offloaded(const struct places *t)
{
    return t->offloaded;
}
