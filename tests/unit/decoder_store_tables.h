/* What the tests' store says of a step: where its pages and slots lie, and its tables, sound or faulty.
 * Included by decoder_store.h, after the struct. */
#ifndef TESTS_UNIT_DECODER_STORE_TABLES_H
#define TESTS_UNIT_DECODER_STORE_TABLES_H

static inline uint64_t store_page(const struct store *s, uint32_t sequence, uint32_t layer, uint32_t page)
{
    uint32_t pages = STORE_CONTEXT / BLOCK_TOKENS;
    uint64_t number = ((uint64_t)sequence * s->layout.layers + layer) * pages + (page * 3 + 1) % pages;
    return number * s->control->page_bytes;
}

static inline uint64_t store_slab(const struct store *s, uint32_t sequence, uint32_t layer, uint32_t slab)
{
    uint64_t number = ((uint64_t)sequence * s->layout.layers + layer) * s->control->slabs_max + slab;
    return s->slots_at + number * s->control->slab_bytes;
}

static inline uint8_t *store_in_page(const struct store *s, uint32_t sequence, uint32_t layer, uint32_t head,
                                     uint32_t position)
{
    return s->device + store_page(s, sequence, layer, position / BLOCK_TOKENS) +
           ((uint64_t)head * BLOCK_TOKENS + position % BLOCK_TOKENS) * s->layout.piece_bytes;
}

static inline uint8_t *store_in_slot(const struct store *s, uint32_t sequence, uint32_t layer, uint32_t head,
                                     uint32_t slot)
{
    uint32_t unit = head * s->control->slots + slot, slab = unit / s->control->units_per_slab;
    return s->device + store_slab(s, sequence, layer, slab) +
           (uint64_t)(unit % s->control->units_per_slab) * s->layout.piece_bytes;
}

/* Slots are given out backwards, so that no slot equals its position. */
static inline uint32_t store_slot(const struct store *s, uint32_t position)
{
    return s->control->slots - 1 - position;
}

/* Layers with pages in sparse steps. */
static inline uint32_t store_resident(const struct store *s, const struct step_record *r)
{
    return s->control->resident_layers[r->resident_version % CONTROL_RESIDENT_RING];
}

static inline struct table_view store_view(struct store *s, uint32_t step)
{
    struct table_view v = {s->control, (uint8_t *)control_table_at(s->control, step), {0}};
    control_table_offsets(s->control, &v.at);
    return v;
}

static inline void store_lists(struct store *s, struct table_view *v, const struct step_entry *e, int fault)
{
    for (uint32_t phase = 0; phase < 2; phase++)
        for (uint32_t g = 0; g < s->layout.groups; g++)
            for (uint32_t h = 0; h < s->layout.row_heads; h++) {
                uint64_t list = table_list_index(v, phase, e->sequence, g, h);
                *table_count_at(v, list) =
                    fault == STORE_LONG_LIST ? s->control->list_max + 1 : e->position + 1;
                for (uint32_t p = 0; p <= e->position; p++) {
                    table_positions_at(v, list)[p] = p;
                    table_slots_at(v, list)[p] = store_slot(s, p);
                }
                if (fault == STORE_SHORT) {
                    *table_count_at(v, list) = 1;
                    table_positions_at(v, list)[0] = e->position;
                    table_slots_at(v, list)[0] = store_slot(s, e->position);
                }
                if (fault == STORE_BAD_LIST)
                    table_positions_at(v, list)[e->position] = e->position + 1;
                if (fault == STORE_BAD_SLOT)
                    table_slots_at(v, list)[0] = s->control->slots;
                table_write_at(v, e->sequence, g)[h] = store_slot(s, e->position);
            }
}

static inline void store_places(struct store *s, struct table_view *v, const struct step_entry *e, int fault)
{
    uint32_t last = (e->position + e->count - 1) / BLOCK_TOKENS; /* no page before its time */
    for (uint32_t l = 0; l < s->layout.layers; l++) {
        for (uint32_t p = 0; p < STORE_CONTEXT / BLOCK_TOKENS; p++)
            table_pages_at(v, e->sequence, l)[p] = p <= last ? store_page(s, e->sequence, l, p) : UINT64_MAX;
        for (uint32_t b = 0; b < s->control->slabs_max; b++)
            table_slabs_at(v, e->sequence, l)[b] = store_slab(s, e->sequence, l, b);
        if (fault == STORE_BAD_PAGE)
            table_pages_at(v, e->sequence, l)[0] = s->control->device_bytes - s->control->page_bytes + 64;
        if (fault == STORE_BAD_SLAB)
            table_slabs_at(v, e->sequence, l)[0] = UINT64_MAX - 63;
    }
}

/* Between pages, which stand for the host here, and slots. */
static inline void store_move(struct store *s, const struct step_record *r, const struct step_entry *e,
                              uint32_t first, int to_slots)
{
    for (uint32_t l = store_resident(s, r); l < s->layout.layers; l++)
        for (uint32_t h = 0; h < s->layout.row_heads; h++)
            for (uint32_t p = first; p < e->position + !to_slots; p++) {
                uint8_t *page = store_in_page(s, e->sequence, l, h, p);
                uint8_t *slot = store_in_slot(s, e->sequence, l, h, store_slot(s, p));
                memcpy(to_slots ? slot : page, to_slots ? page : slot, s->layout.piece_bytes);
            }
}

static inline void store_fill(struct store *s, struct step_record *r)
{
    struct table_view v = store_view(s, r->step);
    struct table_header *head = (struct table_header *)v.base;
    uint32_t resident = store_resident(s, r), staged = 0;
    memset(head, 0, sizeof *head);
    head->step = r->step;
    head->resident_version = r->resident_version;
    memset(head->resident, 1, resident);
    for (uint32_t i = 0; i < r->entries; i++) {
        const struct step_entry *e = &r->entry[i];
        int fault = e->sequence == atomic_load(&s->fault_sequence) ? atomic_load(&s->fault) : STORE_SOUND;
        int status = fault == STORE_DROPS ? -ENOSPC : 0;
        staged += (e->position + e->count + BLOCK_TOKENS - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
        if (r->kind == STEP_DENSE && resident < s->layout.layers && staged > STORE_STAGING)
            status = -ENOSPC;
        for (uint32_t phase = 0; phase < 2; phase++)
            *table_sequence_at(&v, phase, e->sequence) =
                (struct table_sequence){r->step, status, 0, fault == STORE_SHORT ? TABLE_ATTEND_ALL : 0};
        store_places(s, &v, e, fault);
        if (r->kind != STEP_SPARSE)
            continue;
        if (fault == STORE_POISONS_ROW)
            memset(store_in_page(s, e->sequence, 1, 0, 0), 0xff, s->layout.piece_bytes);
        store_lists(s, &v, e, fault);
        store_move(s, r, e, 0, 1);
    }
}

#endif
