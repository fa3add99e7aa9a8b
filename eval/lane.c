/* See lane.h. What is loaded is found out by the store's own elastic loading (kvstore/elastic.h), which works
 * on positions alone. Owner: who created it. */
#include "eval/lane.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "kvstore/elastic.h"
#include "proto/layout.h"

enum { LOADERS = 2 };

struct loader {
    struct elastic elastic;
    uint64_t loaded, whole; /* rows of one layer */
};

struct lane {
    struct chooser *chooser;
    struct choice choice;
    uint32_t capacity, heads, lists;  /* lists = groups * heads */
    struct positions *picks, *before; /* [lists] */
    bool has;                         /* `before` holds the set of the position before */
    uint32_t *items;                  /* [lists][budget] */
    struct attn_list *attended;       /* [lists] */
    uint64_t common, selected;        /* over adjacent selections */
    struct kv_layout layout;
    struct loader loaders[LOADERS]; /* slots: 2 budgets, 1.5 budgets */
    uint32_t *counts, *sent;        /* [2 * lists], [lists * budget]: one set as the store takes it */
    uint32_t step;
};

static void loaders_init(struct lane *n)
{
    for (int i = 0; i < LOADERS; i++) {
        uint64_t slots = (uint64_t)n->choice.budget * (i ? 3 : 4) / 2;
        struct elastic_params p = {.layout = &n->layout,
                                   .capacity = n->capacity,
                                   .sinks = n->choice.sinks,
                                   .window = n->choice.window,
                                   .budget = n->choice.budget};
        uint32_t needed = elastic_slots_needed(&p);
        slots = slots < needed ? needed : slots;
        slots = slots < n->capacity ? slots : n->capacity;
        p.slots = slots < ELASTIC_SLOTS_MAX ? (uint32_t)slots : ELASTIC_SLOTS_MAX;
        elastic_init(&n->loaders[i].elastic, &p);
        for (uint32_t g = 0; g < n->layout.groups; g++)
            elastic_attach(&n->loaders[i].elastic, g, 0);
    }
}

struct lane *lane_create(const struct model_config *model, struct chooser *chooser,
                         const struct choice *choice, uint32_t capacity)
{
    struct lane *n = mem_alloc(1, sizeof *n);
    uint32_t groups = chooser_groups(chooser);
    n->chooser = chooser;
    n->choice = *choice;
    n->capacity = capacity;
    n->heads = model->kv_heads;
    n->lists = groups * n->heads;
    n->picks = mem_alloc(n->lists, sizeof *n->picks);
    n->before = mem_alloc(n->lists, sizeof *n->before);
    n->items = mem_alloc((size_t)n->lists * choice->budget, sizeof *n->items);
    n->attended = mem_alloc(n->lists, sizeof *n->attended);
    n->counts = mem_alloc(2ull * n->lists, sizeof *n->counts);
    n->sent = mem_alloc((size_t)n->lists * choice->budget, sizeof *n->sent);
    n->layout = (struct kv_layout){.layers = model->layers,
                                   .row_heads = n->heads,
                                   .selection_heads = n->heads,
                                   .groups = groups,
                                   .piece_bytes = 4 * model->head_dim,
                                   .context_max = capacity};
    for (uint32_t l = 0, g = 1; l < model->layers; l++)
        if (l && chooser_group_of(chooser)[l] != chooser_group_of(chooser)[l - 1])
            n->layout.group_first_layer[g++] = l;
    n->layout.group_first_layer[groups] = model->layers;
    loaders_init(n);
    return n;
}

void lane_free(struct lane **lane)
{
    struct lane *n = *lane;
    if (!n)
        return;
    for (int i = 0; i < LOADERS; i++)
        elastic_free(&n->loaders[i].elastic);
    for (uint32_t i = 0; i < n->lists; i++) {
        positions_free(&n->picks[i]);
        positions_free(&n->before[i]);
    }
    mem_free(&n->picks);
    mem_free(&n->before);
    mem_free(&n->items);
    mem_free(&n->attended);
    mem_free(&n->counts);
    mem_free(&n->sent);
    mem_free(lane);
}

void lane_restart(struct lane *n)
{
    for (int i = 0; i < LOADERS; i++)
        elastic_free(&n->loaders[i].elastic);
    loaders_init(n);
    n->has = false;
}

/* Rows of all layers that the set in use names, and those of them that had to be loaded. */
static void load(struct lane *n, struct loader *r, const struct elastic_set *set, const struct span *span)
{
    struct elastic *e = &r->elastic;
    struct kv_counters counters = {0};
    CHECK(elastic_receive(e, set) == 0);
    bool first = !e->has;
    elastic_commit(e, &counters);
    for (uint32_t g = 0; g < n->layout.groups && !first; g++) {
        uint32_t layers = n->layout.group_first_layer[g + 1] - n->layout.group_first_layer[g];
        r->whole += elastic_selected_rows(e, g) * layers;
        for (uint32_t i = 0; i < e->loads.count; i++)
            r->loaded += e->loads.at[i].group == g ? layers : 0;
    }
    elastic_pin(e, span->limit, span->position + 1, span->position);
    e->loads.count = e->fills.count = 0;
}

static void load_all(struct lane *n, const struct span *span)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < n->lists; i++) {
        n->counts[2 * i] = n->picks[i].count;
        n->counts[2 * i + 1] = 0;
        if (n->picks[i].count)
            memcpy(n->sent + at, n->picks[i].at, n->picks[i].count * sizeof *n->sent);
        at += n->picks[i].count;
    }
    n->step++;
    struct elastic_set set = {.step = n->step,
                              .base_step = n->step,
                              .limit = span->limit,
                              .position = span->position,
                              .counts = n->counts,
                              .positions = n->sent};
    for (int i = 0; i < LOADERS; i++)
        load(n, &n->loaders[i], &set, span);
}

const struct attn_list *lane_choose(struct lane *n, uint32_t position)
{
    struct span span = sets_span(&n->choice, position);
    struct positions *swap = n->before;
    n->before = n->picks;
    n->picks = swap;
    for (uint32_t i = 0; i < n->lists; i++) {
        uint32_t *items = n->items + (size_t)i * n->choice.budget;
        chooser_pick(n->chooser, i / n->heads, i % n->heads, &span, &n->picks[i]);
        n->attended[i] = (struct attn_list){sets_attended(items, &span, &n->picks[i]), items};
        if (n->has) {
            n->common += sets_common(&n->picks[i], &n->before[i]);
            n->selected += n->picks[i].count;
        }
    }
    n->has = true;
    load_all(n, &span);
    return n->attended;
}

const uint32_t *lane_group_of(const struct lane *n)
{
    return chooser_group_of(n->chooser);
}

struct chooser *lane_chooser(const struct lane *n)
{
    return n->chooser;
}

static double saved(const struct loader *r)
{
    return r->whole ? 1 - (double)r->loaded / (double)r->whole : (double)NAN;
}

struct lane_figures lane_figures(const struct lane *n)
{
    return (struct lane_figures){.overlap =
                                     n->selected ? (double)n->common / (double)n->selected : (double)NAN,
                                 .saved = saved(&n->loaders[0]),
                                 .saved_default = saved(&n->loaders[1])};
}
