/* Slots and sets of one sequence; see elastic.h. Owner: the planner thread, or one thread of its pool.
 *
 * Work per step is in proportion to what changed: new positions look into slot_of, victims come off the
 * ring, gone ones go onto it. Lists are merged as streams (selection.c). */
#include "kvstore/elastic.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

#define ELASTIC_NOWHERE UINT32_MAX /* position of a slot that was never used */

static uint32_t list_max(const struct elastic_params *p)
{
    uint32_t always = p->sinks + p->window + 1;
    uint32_t max = p->budget > always ? p->budget - always : 0;
    return max < p->capacity ? max : p->capacity;
}

uint32_t elastic_slots_needed(const struct elastic_params *p)
{
    /* Sinks, the window of a set that is one step old, and the union of the lists that share a row head. */
    uint64_t ratio = p->layout->selection_heads / p->layout->row_heads;
    uint64_t need = ratio * list_max(p) + p->sinks + p->window + 2u;
    return need < p->capacity ? (uint32_t)need : p->capacity;
}

void elastic_init(struct elastic *e, const struct elastic_params *p)
{
    CHECK(p->slots <= LIMIT_SLOTS);
    memset(e, 0, sizeof *e);
    e->layout = *p->layout;
    e->capacity = p->capacity;
    e->sinks = p->sinks;
    e->window = p->window;
    e->slots = p->slots;
    e->reload = p->reload;
    e->list_max = list_max(p);
    e->ratio = e->layout.selection_heads / e->layout.row_heads;
    e->lists = mem_alloc((size_t)e->layout.groups * e->layout.selection_heads, sizeof *e->lists);
    e->heads = mem_alloc((size_t)e->layout.groups * e->layout.row_heads, sizeof *e->heads);
    e->scratch = mem_alloc(SELECTION_SCRATCH(e->list_max), sizeof *e->scratch);
    for (uint32_t i = 0; i < e->layout.groups * e->layout.selection_heads; i++)
        selection_init(&e->lists[i], e->list_max);
}

static void head_free(struct elastic_head *h)
{
    mem_free(&h->slot_of);
    mem_free(&h->position_of); /* the other arrays stand behind it */
    memset(h, 0, sizeof *h);
}

void elastic_free(struct elastic *e)
{
    for (uint32_t i = 0; e->lists && i < e->layout.groups * e->layout.selection_heads; i++)
        selection_free(&e->lists[i]);
    for (uint32_t i = 0; e->heads && i < e->layout.groups * e->layout.row_heads; i++)
        head_free(&e->heads[i]);
    mem_free(&e->lists);
    mem_free(&e->heads);
    mem_free(&e->scratch);
    mem_free(&e->loads.at);
    mem_free(&e->fills.at);
}

/* One block of memory for what a head needs in each step, so that a prefetch can take it in one sweep. */
static void head_init(struct elastic_head *h, uint32_t capacity, uint32_t slots)
{
    h->slot_of = mem_alloc(capacity, sizeof *h->slot_of);
    memset(h->slot_of, 0xff, capacity * sizeof *h->slot_of);
    h->position_of = mem_alloc_aligned(1, slots * sizeof(uint32_t) + (3ull * slots + 2) * sizeof(uint16_t));
    h->refs = (uint16_t *)(h->position_of + slots);
    h->older = h->refs + slots;
    h->newer = h->older + slots + 1;
    h->older[slots] = h->newer[slots] = (uint16_t)slots;
}

static struct elastic_load *loads_room(struct elastic_loads *loads, uint32_t more)
{
    if (loads->room - loads->count < more) {
        uint32_t want = loads->count + more;
        loads->room = want > 2 * loads->room ? want : 2 * loads->room;
        loads->at = mem_resize(loads->at, loads->room, sizeof *loads->at);
    }
    return loads->at + loads->count;
}

static inline void ring_remove(struct elastic_head *h, uint32_t s)
{
    uint16_t older = h->older[s], newer = h->newer[s];
    h->newer[older] = newer;
    h->older[newer] = older;
    h->unselected--;
}

static inline void ring_append(struct elastic_head *h, uint32_t s, uint32_t slots)
{
    uint16_t newest = h->older[slots];
    h->newer[newest] = (uint16_t)s;
    h->older[s] = newest;
    h->newer[s] = (uint16_t)slots;
    h->older[slots] = (uint16_t)s;
    h->unselected++;
}

static inline uint32_t obtainable(const struct elastic_head *h, uint32_t slots)
{
    return slots - h->used + h->unselected;
}

/* A slot for `position`, which has none: a fresh one, or that of the row deselected longest ago. */
static inline uint32_t slot_obtain(struct elastic_head *h, uint32_t slots, uint32_t position)
{
    uint32_t s;
    if (h->used < slots) {
        s = h->used++;
    } else {
        CHECK(h->unselected > 0);
        s = h->newer[slots];
        ring_remove(h, s);
        h->slot_of[h->position_of[s]] = SELECTION_NO_SLOT;
    }
    h->position_of[s] = position;
    h->slot_of[position] = (uint16_t)s;
    h->refs[s] = 0;
    return s;
}

/* One more list names slot s. */
static inline void slot_name(struct elastic_head *h, uint32_t s, bool in_ring)
{
    if (in_ring)
        ring_remove(h, s);
    h->selected += (h->refs[s] & ~ELASTIC_PIN) == 0;
    h->refs[s]++;
}

static inline void slot_unname(struct elastic_head *h, uint32_t s, uint32_t slots)
{
    uint32_t refs = --h->refs[s];
    h->selected -= (refs & ~ELASTIC_PIN) == 0;
    if (refs == 0)
        ring_append(h, s, slots);
}

bool elastic_merge(struct elastic *e, const struct elastic_set *set, uint32_t list, const uint32_t *positions,
                   int32_t *scratch)
{
    const uint32_t *counts = set->counts + 2ull * list;
    struct selection_change change = {.added = positions,
                                      .added_count = counts[0],
                                      .removed = positions + counts[0],
                                      .removed_count = counts[1],
                                      .low = e->sinks,
                                      .high = set->limit,
                                      .scratch = scratch};
    return set->base_step == set->step ? selection_full(&e->lists[list], &change)
                                       : selection_diff(&e->lists[list], &change);
}

int elastic_check(const struct elastic *e, const struct elastic_set *set)
{
    CHECK(e->next == ELASTIC_NONE);
    if (set->base_step != set->step && (!e->has || set->base_step != e->step))
        return -ENOENT;
    uint32_t limit = set->position > e->window ? set->position - e->window : 0;
    limit = limit > e->sinks ? limit : e->sinks;
    if (set->limit != limit || set->position >= e->capacity || (e->has && set->position < e->position))
        return -EINVAL;
    return 0;
}

void elastic_received(struct elastic *e, const struct elastic_set *set)
{
    e->next = ELASTIC_RECEIVED;
    e->next_step = set->step;
    e->next_position = set->position;
    e->next_limit = set->limit;
    e->next_mass = set->mass;
    e->next_mass_base = set->mass_base;
    e->next_flags = set->flags;
    e->next_whole = !e->has;
}

int elastic_receive(struct elastic *e, const struct elastic_set *set)
{
    int r = elastic_check(e, set);
    const uint32_t *positions = set->positions;
    for (uint32_t l = 0; r == 0 && l < e->layout.groups * e->layout.selection_heads; l++) {
        if (!elastic_merge(e, set, l, positions, e->scratch))
            r = -EINVAL;
        positions += (uint64_t)set->counts[2ull * l] + set->counts[2ull * l + 1];
    }
    if (r == 0)
        elastic_received(e, set);
    return r;
}

/* Asks for the map entries that the following list will look up. */
static void prefetch_next(const struct elastic *e, uint32_t group, uint32_t selection_head)
{
    if (selection_head >= e->layout.selection_heads)
        return;
    const struct selection *list = elastic_list(e, group, selection_head);
    const uint16_t *slot_of = elastic_head(e, group, selection_head / e->ratio)->slot_of;
    for (uint32_t k = 0; k < list->added; k++)
        __builtin_prefetch(&slot_of[list->next.position[list->added_at[k]]], 1);
}

/* Slots of the rows deselected longest ago, and fresh ones first, into loads[0, n).slot. */
static void victims_take(struct elastic_head *h, uint32_t slots, struct elastic_load *restrict loads,
                         uint32_t n)
{
    uint16_t *restrict newer = h->newer;
    uint32_t k = 0;
    for (; k < n && h->used < slots; k++) {
        loads[k].slot = (uint16_t)h->used;
        h->position_of[h->used++] = ELASTIC_NOWHERE;
    }
    uint32_t s = newer[slots], from_ring = n - k;
    CHECK(from_ring <= h->unselected);
    for (; k < n; k++) {
        loads[k].slot = (uint16_t)s;
        s = newer[s];
    }
    newer[slots] = (uint16_t)s;
    h->older[s] = (uint16_t)slots;
    h->unselected -= from_ring;
}

/* Gives the slots in loads[0, n) to positions [at[0, n)] of `list`. The map is far larger than the caches,
 * and what the victims' entries cost is their misses: all are asked for before the first is written. */
static void victims_replace(struct elastic_head *h, struct selection_list *list, const uint32_t *restrict at,
                            struct elastic_load *restrict loads, uint32_t n)
{
    uint16_t *restrict slot_of = h->slot_of, *restrict refs = h->refs, *restrict slot = list->slot;
    uint32_t *restrict position_of = h->position_of;
    const int32_t *restrict position = list->position;
    for (uint32_t k = 0; k < n; k++)
        __builtin_prefetch(&slot_of[position_of[loads[k].slot]], 1);
    for (uint32_t k = 0; k < n; k++) {
        uint32_t s = loads[k].slot, before = position_of[s], p = (uint32_t)position[at[k]];
        if (before != ELASTIC_NOWHERE)
            slot_of[before] = SELECTION_NO_SLOT;
        position_of[s] = p;
        slot_of[p] = (uint16_t)s;
        refs[s] = 1;
        slot[at[k]] = (uint16_t)s;
        loads[k].position = p;
    }
    h->selected += n;
}

/* Slots for the new positions of one list: those that are there already, then others as long as `keep` stay
 * obtainable. The positions that are left stay in added_at. Returns how many slots were obtained. */
static uint32_t stage_list(struct elastic *e, struct elastic_head *h, struct selection *list,
                           struct elastic_load *loads, uint32_t keep)
{
    const int32_t *restrict position = list->next.position;
    const uint16_t *restrict slot_of = h->slot_of;
    uint16_t *restrict slot = list->next.slot;
    uint32_t *restrict at = list->added_at;
    const uint32_t slots = e->slots;
    uint32_t n = list->added, missing = 0;
    for (uint32_t k = 0; k < n; k++) /* independent loads: the processor overlaps their misses */
        slot[at[k]] = slot_of[position[at[k]]];
    for (uint32_t k = 0; k < n; k++) {
        uint32_t i = at[k], s = slot[i];
        at[missing] = i;
        /* A name more on an unselected row, or on a pinned one, is a slot less to obtain, now or when it is
         * unpinned. What is left out here finds its row again later, if it is still there. */
        if (keep && s != SELECTION_NO_SLOT && obtainable(h, slots) <= keep &&
            (h->refs[s] & ~ELASTIC_PIN) == 0)
            slot[i] = (uint16_t)(s = SELECTION_NO_SLOT);
        missing += s == SELECTION_NO_SLOT;
        if (s != SELECTION_NO_SLOT)
            slot_name(h, s, h->refs[s] == 0);
    }
    uint32_t can = obtainable(h, slots), most = can > keep ? can - keep : 0;
    uint32_t n_now = missing < most ? missing : most;
    victims_take(h, slots, loads, n_now);
    victims_replace(h, &list->next, at, loads, n_now);
    for (uint32_t k = n_now; k < missing; k++)
        at[k - n_now] = at[k];
    list->added = missing - n_now;
    return n_now;
}

/* `keep`: slots that must stay obtainable for what will be pinned next. */
static void stage_head(struct elastic *e, uint32_t group, uint32_t head, uint32_t keep)
{
    struct elastic_head *h = elastic_head(e, group, head);
    struct elastic_loads *loads = e->next_whole ? &e->fills : &e->loads;
    for (uint32_t r = 0; r < e->ratio; r++) {
        struct selection *list = elastic_list(e, group, head * e->ratio + r);
        struct elastic_load *out = loads_room(loads, list->added);
        prefetch_next(e, group, head * e->ratio + r + 1);
        uint32_t n = stage_list(e, h, list, out, keep);
        for (uint32_t i = 0; i < n; i++) {
            out[i].group = (uint8_t)group;
            out[i].head = (uint8_t)head;
        }
        loads->count += n;
    }
}

static void head_prefetch(const struct elastic *e, const struct elastic_head *h)
{
    const char *at = (const char *)h->position_of;
    size_t bytes = h->slot_of ? e->slots * (sizeof(uint32_t) + 3 * sizeof(uint16_t)) : 0;
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(at + i, 1);
}

void elastic_stage(struct elastic *e)
{
    CHECK(e->next == ELASTIC_RECEIVED && !e->held);
    if (e->reload)
        return;
    e->moves++;
    uint32_t wanted = e->sinks + e->window + 2;
    for (uint32_t g = 0; g < e->layout.groups; g++)
        for (uint32_t head = 0; e->attached[g] && head < e->layout.row_heads; head++) {
            struct elastic_head *h = elastic_head(e, g, head);
            if (head + 1 < e->layout.row_heads)
                head_prefetch(e, h + 1);
            stage_head(e, g, head, h->pinned < wanted ? wanted - h->pinned : 1);
        }
    e->next = ELASTIC_STAGED;
}

/* Every selected row again, as if nothing had been kept. */
static void reload_head(struct elastic *e, uint32_t group, uint32_t head)
{
    struct elastic_head *h = elastic_head(e, group, head);
    struct elastic_load *out = loads_room(&e->loads, h->selected);
    uint32_t n = 0;
    for (uint32_t s = 0; s < h->used; s++)
        if (h->refs[s] & ~ELASTIC_PIN)
            out[n++] = (struct elastic_load){h->position_of[s], (uint16_t)s, (uint8_t)group, (uint8_t)head};
    CHECK(n == h->selected);
    e->loads.count += n;
}

static void commit_head(struct elastic *e, uint32_t group, uint32_t head)
{
    struct elastic_head *h = elastic_head(e, group, head);
    uint32_t loads = e->loads.count;
    for (uint32_t r = 0; r < e->ratio; r++) {
        const struct selection *list = elastic_list(e, group, head * e->ratio + r);
        for (uint32_t j = 0; j < list->removed; j++)
            slot_unname(h, list->removed_slot[j], e->slots);
    }
    stage_head(e, group, head, 0);
    for (uint32_t r = 0; r < e->ratio; r++)
        CHECK(elastic_list(e, group, head * e->ratio + r)->added == 0);
    if (e->reload && !e->next_whole) {
        e->loads.count = loads;
        reload_head(e, group, head);
    }
}

void elastic_commit(struct elastic *e, struct kv_counters *counters)
{
    CHECK(e->next != ELASTIC_NONE && !e->held);
    for (uint32_t i = 0; i < e->layout.groups * e->layout.selection_heads; i++)
        if (e->has) {
            const struct selection *list = &e->lists[i];
            counters->selected += list->next.count;
            counters->kept += list->now.count - list->removed;
        }
    for (uint32_t g = 0; g < e->layout.groups; g++) {
        for (uint32_t head = 0; e->attached[g] && head < e->layout.row_heads; head++)
            commit_head(e, g, head);
        for (uint32_t s = 0; s < e->layout.selection_heads; s++)
            selection_swap(elastic_list(e, g, s));
    }
    counters->mass_sum += (double)e->next_mass;
    counters->mass_base_sum += (double)e->next_mass_base;
    counters->mass_count++;
    counters->grown += (e->next_flags & TOPK_ENTRY_GROWN) != 0;
    e->is_short = e->next_flags & TOPK_ENTRY_SHORT;
    e->has = true;
    e->step = e->next_step;
    e->position = e->next_position;
    e->limit = e->next_limit;
    e->next = ELASTIC_NONE;
    e->moves++;
}

bool elastic_is_whole(const struct elastic *e)
{
    if (e->next != ELASTIC_STAGED)
        return false;
    for (uint32_t g = 0; g < e->layout.groups; g++)
        for (uint32_t h = 0; h < e->layout.selection_heads && e->attached[g]; h++)
            if (elastic_list(e, g, h)->added)
                return false;
    return true;
}

void elastic_commit_held(struct elastic *e, struct kv_counters *counters)
{
    CHECK(elastic_is_whole(e));
    elastic_commit(e, counters);
    e->held = true;
}

void elastic_release(struct elastic *e)
{
    e->held = false;
}

static void pin_one(struct elastic *e, uint32_t position, uint32_t committed)
{
    for (uint32_t g = 0; g < e->layout.groups; g++)
        for (uint32_t head = 0; e->attached[g] && head < e->layout.row_heads; head++) {
            struct elastic_head *h = elastic_head(e, g, head);
            uint32_t s = h->slot_of[position];
            if (s == SELECTION_NO_SLOT) {
                s = slot_obtain(h, e->slots, position);
                if (position < committed) {
                    *loads_room(&e->fills, 1) =
                        (struct elastic_load){position, (uint16_t)s, (uint8_t)g, (uint8_t)head};
                    e->fills.count++;
                }
            } else if (h->refs[s] == 0) {
                ring_remove(h, s);
            }
            h->pinned += !(h->refs[s] & ELASTIC_PIN);
            h->refs[s] |= ELASTIC_PIN;
        }
}

static void unpin_one(struct elastic *e, uint32_t position)
{
    for (uint32_t g = 0; g < e->layout.groups; g++)
        for (uint32_t head = 0; e->attached[g] && head < e->layout.row_heads; head++) {
            struct elastic_head *h = elastic_head(e, g, head);
            uint32_t s = h->slot_of[position];
            CHECK(s != SELECTION_NO_SLOT && (h->refs[s] & ELASTIC_PIN));
            h->refs[s] &= (uint16_t)~ELASTIC_PIN;
            h->pinned--;
            if (h->refs[s] == 0)
                ring_append(h, s, e->slots);
        }
}

static uint32_t sinks_below(const struct elastic *e, uint32_t end)
{
    return e->sinks < end ? e->sinks : end;
}

void elastic_pin(struct elastic *e, uint32_t low, uint32_t end, uint32_t committed)
{
    CHECK(end <= e->capacity && !e->held);
    if (low > end)
        low = end;
    for (uint32_t p = e->pin_low; p < e->pin_end; p++)
        if (p >= e->sinks && (p < low || p >= end))
            unpin_one(e, p);
    for (uint32_t p = sinks_below(e, e->pin_end); p < sinks_below(e, end); p++)
        pin_one(e, p, committed);
    for (uint32_t p = low; p < end; p++)
        if (p >= e->sinks && (p < e->pin_low || p >= e->pin_end))
            pin_one(e, p, committed);
    e->pin_low = low;
    e->pin_end = end;
    e->moves++;
}

bool elastic_pins_one(const struct elastic *e, uint32_t position)
{
    if (e->pin_end != position || e->pin_low > e->limit || e->limit > position || e->sinks > position ||
        position >= e->capacity)
        return false;
    for (uint32_t g = 0; g < e->layout.groups; g++)
        for (uint32_t head = 0; e->attached[g] && head < e->layout.row_heads; head++) {
            const struct elastic_head *h = elastic_head(e, g, head);
            if (h->slot_of[position] != SELECTION_NO_SLOT || elastic_slot_ahead(e, h) == SELECTION_NO_SLOT)
                return false;
        }
    return true;
}

/* Names the slots of a list anew; positions without one get one. */
static void attach_list(struct elastic *e, struct elastic_head *h, struct selection_list *list,
                        const struct elastic_load *where)
{
    struct elastic_load *out = loads_room(&e->fills, list->count);
    uint32_t n = 0;
    for (uint32_t i = 0; i < list->count; i++) {
        uint32_t p = (uint32_t)list->position[i], s = h->slot_of[p];
        if (s == SELECTION_NO_SLOT) {
            s = slot_obtain(h, e->slots, p);
            out[n] = *where;
            out[n].position = p;
            out[n++].slot = (uint16_t)s;
        }
        h->selected += (h->refs[s] & ~ELASTIC_PIN) == 0;
        h->refs[s]++;
        list->slot[i] = (uint16_t)s;
    }
    e->fills.count += n;
}

void elastic_attach(struct elastic *e, uint32_t group, uint32_t committed)
{
    CHECK(!e->attached[group] && !e->held);
    for (uint32_t head = 0; head < e->layout.row_heads; head++) {
        struct elastic_head *h = elastic_head(e, group, head);
        struct elastic_load where = {.group = (uint8_t)group, .head = (uint8_t)head};
        head_init(h, e->capacity, e->slots);
        for (uint32_t r = 0; r < e->ratio; r++) {
            struct selection *list = elastic_list(e, group, head * e->ratio + r);
            attach_list(e, h, &list->now, &where);
            if (e->next != ELASTIC_NONE)
                selection_relate(list);
        }
    }
    bool others[LIMIT_GROUPS];
    memcpy(others, e->attached, sizeof others);
    memset(e->attached, 0, sizeof e->attached);
    e->attached[group] = true; /* pin_one goes over attached groups: this one alone */
    for (uint32_t p = 0; p < sinks_below(e, e->pin_end); p++)
        pin_one(e, p, committed);
    for (uint32_t p = e->pin_low > e->sinks ? e->pin_low : e->sinks; p < e->pin_end; p++)
        pin_one(e, p, committed);
    memcpy(e->attached, others, sizeof others);
    e->attached[group] = true;
    e->changes++;
    e->moves++;
    if (e->next == ELASTIC_STAGED) /* commit takes care of what is new in this group */
        for (uint32_t head = 0; head < e->layout.row_heads; head++)
            stage_head(e, group, head, e->sinks + e->window + 2);
}

void elastic_detach(struct elastic *e, uint32_t group)
{
    CHECK(e->attached[group]);
    e->attached[group] = false;
    e->changes++;
    e->moves++;
    for (uint32_t head = 0; head < e->layout.row_heads; head++)
        head_free(elastic_head(e, group, head));
    /* A staged set forgot which positions were new once they had slots. */
    for (uint32_t s = 0; s < e->layout.selection_heads && e->next != ELASTIC_NONE; s++)
        selection_relate(elastic_list(e, group, s));
}

void elastic_occupied(const struct elastic *e, uint32_t group, struct elastic_loads *loads)
{
    for (uint32_t head = 0; head < e->layout.row_heads; head++) {
        const struct elastic_head *h = elastic_head(e, group, head);
        struct elastic_load *out = loads_room(loads, h->used);
        for (uint32_t s = 0; s < h->used; s++)
            out[s] = (struct elastic_load){h->position_of[s], (uint16_t)s, (uint8_t)group, (uint8_t)head};
        loads->count += h->used;
    }
}

bool elastic_has_no_slots(const struct elastic *e)
{
    for (uint32_t g = 0; g < e->layout.groups; g++)
        if (e->attached[g])
            return false;
    return true;
}

uint64_t elastic_selected_rows(const struct elastic *e, uint32_t group)
{
    uint64_t rows = 0;
    for (uint32_t head = 0; head < e->layout.row_heads; head++)
        rows += elastic_head(e, group, head)->selected;
    return rows;
}

static bool head_consistent(const struct elastic *e, const struct elastic_head *h)
{
    uint32_t ring = 0, selected = 0, pinned = 0, unnamed = 0, mapped = 0;
    for (uint32_t s = h->newer[e->slots]; s != e->slots; s = h->newer[s]) {
        if (s >= h->used || h->refs[s] != 0 || h->older[h->newer[s]] != s || ring++ > e->slots)
            return false;
    }
    for (uint32_t s = 0; s < h->used; s++) {
        selected += (h->refs[s] & ~ELASTIC_PIN) != 0;
        pinned += (h->refs[s] & ELASTIC_PIN) != 0;
        unnamed += h->refs[s] == 0;
        if (h->position_of[s] >= e->capacity || h->slot_of[h->position_of[s]] != s)
            return false;
    }
    for (uint32_t p = 0; p < e->capacity; p++)
        mapped += h->slot_of[p] != SELECTION_NO_SLOT;
    return ring == h->unselected && unnamed == ring && selected == h->selected && pinned == h->pinned &&
           mapped == h->used;
}

bool elastic_consistent(const struct elastic *e)
{
    for (uint32_t g = 0; g < e->layout.groups; g++)
        for (uint32_t head = 0; e->attached[g] && head < e->layout.row_heads; head++)
            if (!head_consistent(e, elastic_head(e, g, head)))
                return false;
    return true;
}
