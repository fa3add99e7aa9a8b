/* Elastic loading against a slow model of it: which rows are held, who is given up, what is counted; and
 * the pieces below it: merges of lists, prefix index under collisions of table places, pages and slabs. */
#include "tests/unit/kvstore_fake_sets.h"

#include "kvstore/selection.h"

enum {
    CAPACITY = 600,
    SINKS = 3,
    WINDOW = 10,
    BUDGET = 60,
    SLOTS = 120,
    STEPS = 400,
    MOST = BUDGET - SINKS - WINDOW - 1
};

/* What a head with one list must do: rows by time of deselection, the oldest goes first. */
struct model {
    int64_t held[CAPACITY]; /* 0: no; 1: named or pinned; t > 1: unselected since t */
    bool selected[CAPACITY];
    int64_t clock;
    uint32_t loads;
};

struct rig {
    struct fake f; /* for its random numbers alone */
    struct kv_layout layout;
    struct elastic elastic;
    struct kv_counters counters;
    struct model model;
    uint32_t set[MOST], count, position, step;
};

static struct rig *rig_create(uint64_t seed, uint32_t slots)
{
    struct rig *r = mem_alloc(1, sizeof *r);
    r->f.random = seed * 7919 + 12345;
    r->layout = (struct kv_layout){
        .layers = 4, .row_heads = 1, .selection_heads = 1, .piece_bytes = 8, .context_max = CAPACITY};
    layout_set_groups(&r->layout, 1);
    struct elastic_params p = {.layout = &r->layout,
                               .capacity = CAPACITY,
                               .sinks = SINKS,
                               .window = WINDOW,
                               .budget = BUDGET,
                               .slots = slots};
    assert_true(elastic_slots_needed(&p) <= slots);
    elastic_init(&r->elastic, &p);
    elastic_attach(&r->elastic, 0, 0);
    r->model.clock = 2;
    r->position = 200;
    return r;
}

static void rig_free(struct rig **r)
{
    elastic_free(&(*r)->elastic);
    mem_free(r);
}

static uint32_t held_count(const struct model *m)
{
    uint32_t n = 0;
    for (uint32_t p = 0; p < CAPACITY; p++)
        n += m->held[p] != 0;
    return n;
}

static void model_hold(struct model *m, uint32_t p, uint32_t slots, bool load)
{
    if (m->held[p] == 0) {
        m->loads += load;
        if (held_count(m) == slots) {
            uint32_t oldest = CAPACITY;
            for (uint32_t q = 0; q < CAPACITY; q++)
                if (m->held[q] > 1 && (oldest == CAPACITY || m->held[q] < m->held[oldest]))
                    oldest = q;
            assert_true(oldest < CAPACITY);
            m->held[oldest] = 0;
        }
    }
    m->held[p] = 1;
}

static bool pinned(uint32_t p, uint32_t limit, uint32_t position)
{
    return p < SINKS || (p >= limit && p <= position);
}

/* Random next set: mostly the old one. */
static void next_set(struct rig *r, uint32_t limit, uint32_t *ret, uint32_t *ret_count)
{
    static uint8_t marks[CAPACITY];
    memset(marks, 0, sizeof marks);
    uint32_t count = fake_random(&r->f, 5) ? MOST : fake_random(&r->f, MOST), n = 0;
    for (uint32_t i = 0; i < r->count && n < count; i++)
        if (fake_random(&r->f, 100) < 75)
            n += !marks[r->set[i]], marks[r->set[i]] = 1;
    while (n < count) {
        uint32_t p = SINKS + fake_random(&r->f, limit - SINKS);
        n += !marks[p];
        marks[p] = 1;
    }
    *ret_count = 0;
    for (uint32_t p = 0; p < CAPACITY; p++)
        if (marks[p])
            ret[(*ret_count)++] = p;
}

static void rig_send(struct rig *r, const uint32_t *set, uint32_t count, uint32_t limit, bool whole)
{
    uint32_t counts[2] = {0, 0}, positions[2 * MOST], n = 0;
    for (uint32_t i = 0; i < count; i++)
        if (whole || !fake_holds(r->set, r->count, set[i]))
            positions[n++] = set[i], counts[0]++;
    for (uint32_t i = 0; !whole && i < r->count; i++)
        if (!fake_holds(set, count, r->set[i]))
            positions[n++] = r->set[i], counts[1]++;
    struct elastic_set s = {.step = r->step + 1,
                            .base_step = whole ? r->step + 1 : r->step,
                            .limit = limit,
                            .position = r->position,
                            .counts = counts,
                            .positions = positions};
    assert_int_equal(elastic_receive(&r->elastic, &s), 0);
    r->step++;
}

/* Same rows held, same victims, same loads as the model, step by step; the set in use is never given up. */
static void test_least_recently_selected_goes_first(void **state)
{
    (void)state;
    struct rig *r = rig_create(1, SLOTS);
    struct model *m = &r->model;
    struct elastic *e = &r->elastic;
    for (uint32_t i = 0; i < STEPS && r->position + 1 < CAPACITY; i++, r->position++) {
        uint32_t limit = r->position - WINDOW, set[MOST], count;
        next_set(r, limit, set, &count);
        rig_send(r, set, count, limit, r->count == 0 || fake_random(&r->f, 9) == 0);
        elastic_commit(e, &r->counters);
        elastic_pin(e, limit, r->position + 1, r->position);
        m->loads = 0;
        for (uint32_t k = 0; k < r->count; k++) { /* gone ones, in ascending order */
            uint32_t p = r->set[k];
            m->selected[p] = fake_holds(set, count, p);
            if (!m->selected[p] && !(m->held[p] == 1 && p >= limit - 1 && p + 1 >= limit))
                m->held[p] = m->clock++;
        }
        for (uint32_t k = 0; k < count; k++) /* those that are held come first: they are no victims */
            if (m->held[set[k]])
                m->held[set[k]] = 1;
        for (uint32_t k = 0; k < count; k++)
            model_hold(m, set[k], SLOTS, true), m->selected[set[k]] = true;
        for (uint32_t p = SINKS; p < limit; p++)
            if (m->held[p] == 1 && !m->selected[p])
                m->held[p] = m->clock++;
        for (uint32_t p = 0; p <= r->position; p++)
            if (pinned(p, limit, r->position))
                model_hold(m, p, SLOTS, false);
        memcpy(r->set, set, sizeof set);
        r->count = count;
        assert_true(elastic_consistent(e));
        assert_int_equal(e->loads.count + (i == 0 ? e->fills.count - SINKS - WINDOW : 0), m->loads);
        const struct elastic_head *h = elastic_head(e, 0, 0);
        for (uint32_t p = 0; p < CAPACITY; p++)
            if ((h->slot_of[p] != SELECTION_NO_SLOT) != (m->held[p] != 0))
                fail_msg("step %u: position %u: held %d, expected %d", i, p,
                         h->slot_of[p] != SELECTION_NO_SLOT, m->held[p] != 0);
        e->loads.count = e->fills.count = 0;
    }
    assert_true(r->counters.kept > r->counters.selected / 2);
    rig_free(&r);
}

/* A staged set takes nothing that the set in use, the window or the sinks hold, however few slots there
 * are. */
static void test_staging_spares_the_set_in_use(void **state)
{
    (void)state;
    for (uint32_t slots = MOST + SINKS + WINDOW + 2; slots < SLOTS; slots += 9) {
        struct rig *r = rig_create(slots, slots);
        struct elastic *e = &r->elastic;
        const struct elastic_head *h = elastic_head(e, 0, 0);
        for (uint32_t i = 0; i < 200; i++, r->position++) {
            uint32_t limit = r->position - WINDOW, set[MOST], count;
            if (i > 0)
                elastic_pin(e, limit - 1, r->position + 1, r->position);
            uint16_t before[MOST];
            for (uint32_t k = 0; k < r->count; k++)
                before[k] = h->slot_of[r->set[k]];
            next_set(r, limit, set, &count);
            rig_send(r, set, count, limit, r->count == 0);
            elastic_stage(e);
            for (uint32_t k = 0; k < r->count; k++)
                assert_int_equal(h->slot_of[r->set[k]], before[k]);
            for (uint32_t p = 0; p <= r->position && i > 0; p++)
                if (pinned(p, limit - 1, r->position))
                    assert_true(h->slot_of[p] != SELECTION_NO_SLOT);
            for (uint32_t k = 0; k < e->loads.count; k++) {
                uint32_t p = e->loads.at[k].position;
                assert_false(fake_holds(r->set, r->count, p) || pinned(p, limit - 1, r->position));
                assert_true(fake_holds(set, count, p));
            }
            elastic_commit(e, &r->counters);
            memcpy(r->set, set, sizeof set);
            r->count = count;
            assert_true(elastic_consistent(e));
            for (uint32_t k = 0; k < count; k++)
                assert_int_equal(elastic_list(e, 0, 0)->now.slot[k], h->slot_of[set[k]]);
            e->loads.count = e->fills.count = 0;
        }
        rig_free(&r);
    }
}

/* A whole set put to use while the one before it is read: each slot that its lists or pins named keeps its
 * row up to the release. Afterwards everything is as if it had been committed then; and the slot of the
 * step's own row is the one that was foretold. */
static void test_a_held_commit_gives_nothing_away(void **state)
{
    (void)state;
    uint32_t held = 0, ahead = 0;
    struct rig *r = rig_create(3, SLOTS), *later = rig_create(3, SLOTS);
    for (uint32_t i = 0; i < 200; i++, r->position++, later->position++) {
        struct elastic *e = &r->elastic, *o = &later->elastic;
        const struct elastic_head *h = elastic_head(e, 0, 0);
        uint32_t limit = r->position - WINDOW, set[MOST], count;
        next_set(r, limit, set, &count);
        bool whole = r->count == 0 || fake_random(&r->f, 4) == 0;
        uint32_t set_before[MOST], pins = e->pin_end, low = e->pin_low;
        uint16_t slot_before[MOST];
        memcpy(set_before, r->set, sizeof set_before);
        for (uint32_t k = 0; k < r->count; k++)
            slot_before[k] = h->slot_of[r->set[k]];
        rig_send(r, set, count, limit, whole);
        rig_send(later, set, count, limit, whole);
        elastic_stage(e);
        elastic_stage(o);
        uint32_t before = r->count;
        memcpy(r->set, set, sizeof set);
        memcpy(later->set, set, sizeof set);
        r->count = later->count = count;
        if (elastic_is_whole(e)) {
            elastic_commit_held(e, &r->counters);
            held++;
            for (uint32_t k = 0; k < before; k++)
                assert_int_equal(h->position_of[slot_before[k]], set_before[k]);
            for (uint32_t p = low; p < pins; p++)
                assert_int_equal(h->position_of[h->slot_of[p]], p);
            assert_true(elastic_consistent(e));
            elastic_release(e);
        } else {
            elastic_commit(e, &r->counters);
        }
        elastic_commit(o, &later->counters);
        bool one = elastic_pins_one(e, r->position);
        uint32_t slot = elastic_slot_ahead(e, h), fills = e->fills.count;
        elastic_pin(e, limit, r->position + 1, r->position);
        assert_true(!one || (h->slot_of[r->position] == slot && e->fills.count == fills));
        ahead += one;
        elastic_pin(o, limit, r->position + 1, r->position);
        assert_memory_equal(h->slot_of, elastic_head(o, 0, 0)->slot_of, CAPACITY * sizeof *h->slot_of);
        assert_int_equal(e->loads.count, o->loads.count);
        assert_memory_equal(e->loads.at, o->loads.at, e->loads.count * sizeof *e->loads.at);
    }
    assert_true(held > 100 && ahead > 190);
    assert_memory_equal(&r->counters, &later->counters, sizeof r->counters);
    rig_free(&r);
    rig_free(&later);
}

static void test_attach_and_detach(void **state)
{
    (void)state;
    struct rig *r = rig_create(5, SLOTS);
    struct elastic *e = &r->elastic;
    for (uint32_t i = 0; i < 200; i++, r->position++) {
        uint32_t limit = r->position - WINDOW, set[MOST], count;
        next_set(r, limit, set, &count);
        rig_send(r, set, count, limit, r->count == 0);
        if (fake_random(&r->f, 2))
            elastic_stage(e);
        if (e->attached[0] && fake_random(&r->f, 3) == 0)
            elastic_detach(e, 0);
        else if (!e->attached[0])
            elastic_attach(e, 0, r->position);
        elastic_commit(e, &r->counters);
        elastic_pin(e, limit, r->position + 1, r->position);
        const struct selection_list *now = &elastic_list(e, 0, 0)->now;
        assert_int_equal(now->count, count);
        for (uint32_t k = 0; k < count; k++) {
            assert_int_equal(now->position[k], set[k]);
            if (e->attached[0])
                assert_int_equal(now->slot[k], elastic_head(e, 0, 0)->slot_of[set[k]]);
        }
        assert_true(elastic_consistent(e));
        memcpy(r->set, set, sizeof set);
        r->count = count;
    }
    rig_free(&r);
}

static void test_merge_edges(void **state)
{
    (void)state;
    struct selection s;
    int32_t scratch[SELECTION_SCRATCH(40)];
    selection_init(&s, 40);
    uint32_t many[41];
    for (uint32_t i = 0; i < 41; i++)
        many[i] = 2 * i;
    struct selection_change c = {.high = 1000, .scratch = scratch};
    c.added = many;
    c.added_count = 41;
    assert_false(selection_full(&s, &c)); /* one too many */
    c.added_count = 40;
    assert_true(selection_full(&s, &c));
    assert_int_equal(s.added, 40);
    selection_swap(&s);
    c.added_count = 0;
    c.removed = many;
    c.removed_count = 40;
    assert_true(selection_diff(&s, &c)); /* everything goes */
    assert_int_equal(s.next.count, 0);
    c.removed_count = 20;
    uint32_t odd[20];
    for (uint32_t i = 0; i < 20; i++)
        odd[i] = 2 * i + 1;
    c.added = odd;
    c.added_count = 20;
    assert_true(selection_diff(&s, &c)); /* half goes, as much comes */
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(s.next.position[i], odd[i]);
        assert_int_equal(s.next.position[20 + i], 40 + 2 * i);
        assert_int_equal(s.added_at[i], i);
    }
    c.added_count = 21;
    assert_false(selection_diff(&s, &c)); /* 41 in the end */
    c.added_count = 20;
    odd[19] = 38; /* removed and added at once */
    assert_false(selection_diff(&s, &c));
    odd[19] = 44; /* there already */
    assert_false(selection_diff(&s, &c));
    odd[19] = 1000;
    assert_false(selection_diff(&s, &c));
    odd[19] = 999;
    assert_true(selection_diff(&s, &c));
    c.removed = odd; /* not there */
    c.added_count = 0;
    assert_false(selection_diff(&s, &c));
    selection_free(&s);
}

static void test_device_pages_and_slabs(void **state)
{
    (void)state;
    struct kv_layout layout = fake_layout();
    layout.piece_bytes = 512; /* 4 pages in a slab */
    struct device d;
    struct err err = {0};
    assert_int_equal(device_create(&d, &layout, &(struct device_params){10 << 18, true, NULL}, &err), 0);
    assert_int_equal(d.pages_per_slab, 4);
    struct fake f = {.random = 99};
    uint64_t at[40];
    uint32_t layer[40], n = 0;
    for (uint32_t i = 0; i < 3000; i++) {
        if (fake_random(&f, 2) && n < 40) {
            layer[n] = fake_random(&f, 3);
            if (device_page_take(&d, layer[n], &at[n]) < 0) {
                assert_int_equal(d.free_count, 0);
                continue;
            }
            for (uint32_t k = 0; k < n; k++) {
                assert_true(at[k] != at[n]);
                if (at[k] / d.slab_bytes == at[n] / d.slab_bytes) /* a slab's pages are of one layer */
                    assert_int_equal(layer[k], layer[n]);
            }
            assert_int_equal(d.base[at[n]], 0xff);
            memset(d.base + at[n], 1, d.page_bytes);
            n++;
        } else if (n) {
            uint32_t k = fake_random(&f, n);
            device_page_give(&d, at[k]);
            n--;
            at[k] = at[n];
            layer[k] = layer[n];
        }
    }
    while (n)
        device_page_give(&d, at[--n]);
    assert_int_equal(d.free_count, 10);
    for (uint64_t i = 0; i < d.bytes; i += 4096)
        assert_int_equal(d.base[i], 0xff);
    device_close(&d);
}

static void test_prefix_index_against_a_list(void **state)
{
    (void)state;
    struct kv_layout layout = fake_layout();
    struct blocks blocks;
    struct prefix prefix;
    struct err err = {0};
    struct blocks_params params = {.host_bytes = 50 * 26624, .sequences_max = 2};
    assert_int_equal(blocks_create(&blocks, &layout, &params, &err), 0);
    prefix_init(&prefix, &blocks, true);
    prefix.table_mask = 127; /* crowded */
    struct fake f = {.random = 4242};
    uint32_t chain[64];
    for (uint32_t i = 0; i < 3000; i++) {
        uint32_t tokens[8 * BLOCK_TOKENS], text = fake_random(&f, 12), length = 1 + fake_random(&f, 8);
        for (uint32_t k = 0; k < 8 * BLOCK_TOKENS; k++)
            tokens[k] = text * 1000 + k;
        struct prefix_query q = {.tokens = tokens, .blocks = length};
        uint32_t found = prefix_find(&prefix, &q, chain);
        for (uint32_t k = 0; k < found; k++)
            prefix_ref(&prefix, chain[k]);
        struct hash128 parent = prefix_root(&prefix, 0);
        for (uint32_t k = 0; k < length; k++) {
            if (k >= found) {
                assert_int_equal(prefix_take(&prefix, &chain[k]), 0);
                struct arena_block *b = arena_block_at(blocks.header, chain[k]);
                memcpy(b->tokens, tokens + k * BLOCK_TOKENS, sizeof b->tokens);
                b->made.kind = ARENA_MADE_FULL;
                b->parent_lo = parent.lo;
                b->parent_hi = parent.hi;
                struct hash128 hash = prefix_hash(parent, &b->made, b->tokens);
                b->hash_lo = hash.lo;
                b->hash_hi = hash.hi;
                b->state = ARENA_BLOCK_SEALED;
                prefix_insert(&prefix, chain[k]);
            }
            const struct arena_block *b = arena_block_at(blocks.header, chain[k]);
            assert_int_equal(b->tokens[0], text * 1000 + k * BLOCK_TOKENS);
            parent = (struct hash128){b->hash_lo, b->hash_hi};
        }
        assert_int_equal(prefix_find(&prefix, &q, chain + 32), length);
        assert_memory_equal(chain, chain + 32, length * sizeof *chain);
        for (uint32_t k = length; k > 0; k--)
            prefix_unref(&prefix, chain[k - 1]);
        assert_int_equal(prefix.cached, prefix.indexed);
        assert_int_equal(blocks.present - blocks.free_count, prefix.cached);
    }
    assert_true(prefix.evicted > 100);
    prefix_close(&prefix);
    blocks_close(&blocks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_least_recently_selected_goes_first),
        cmocka_unit_test(test_staging_spares_the_set_in_use),
        cmocka_unit_test(test_a_held_commit_gives_nothing_away),
        cmocka_unit_test(test_attach_and_detach),
        cmocka_unit_test(test_merge_edges),
        cmocka_unit_test(test_device_pages_and_slabs),
        cmocka_unit_test(test_prefix_index_against_a_list),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
