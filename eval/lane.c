/* See lane.h. What is loaded is found out by the store's own elastic loading (kvstore/elastic.h), which works
 * on positions alone. Owner: who created it. */
#include "eval/lane.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "kvstore/elastic.h"
#include "proto/layout.h"

struct lane {
    struct lane_options options;
    uint32_t longest, heads, groups, lists; /* lists = groups * heads; longest: of a list */
    struct choice *choices;                 /* [groups] */
    struct positions *picks, *before;       /* [lists] */
    struct span span, span_before;          /* that they were picked in */
    bool has;                               /* `picks` holds a set of this sequence */
    uint32_t *group_of;                     /* [layers]; of early layers in mixed mode: groups + group */
    uint32_t *first_layer;                  /* [groups + 1] */
    const struct look *look;                /* of an oracle, while it picks */
    uint32_t *items;                        /* [2 * lists][longest + 1] */
    struct attn_list *attended;             /* [2 * lists]: the late ones, then the early ones */
    struct reach_scratch scratch;
    struct positions *pins; /* [lists] attended in all sets of this sequence */
    float *weights;         /* with pins [capacity]; of an oracle [heads + 1][capacity rounded up] */
    struct lane_counts counts;
    struct kv_layout layout;
    struct elastic loaders[LANE_LOADERS];
    uint32_t *sent_counts, *sent; /* [2 * lists], [lists * longest]: one set as the store takes it */
    uint32_t step;
};

static void loaders_init(struct lane *n)
{
    const struct lane_options *o = &n->options;
    for (int i = 0; i < LANE_LOADERS && o->loads; i++) {
        uint64_t slots = (uint64_t)n->longest * (i ? 3 : 4) / 2;
        struct elastic_params p = {.layout = &n->layout,
                                   .capacity = o->capacity,
                                   .sinks = o->choice.sinks,
                                   .window = o->choice.window,
                                   .budget = n->longest};
        uint32_t needed = elastic_slots_needed(&p);
        slots = slots < needed ? needed : slots;
        slots = slots < o->capacity ? slots : o->capacity;
        p.slots = slots < LIMIT_SLOTS ? (uint32_t)slots : LIMIT_SLOTS;
        elastic_init(&n->loaders[i], &p);
        for (uint32_t g = 0; g < n->layout.groups; g++)
            elastic_attach(&n->loaders[i], g, 0);
    }
}

static void loaders_free(struct lane *n)
{
    for (int i = 0; i < LANE_LOADERS && n->options.loads; i++)
        elastic_free(&n->loaders[i]);
}

static void place_groups(struct lane *n)
{
    const struct model_config *model = n->options.model;
    const uint32_t *of = chooser_group_of(n->options.chooser);
    bool each = n->options.oracle == ORACLE_HEADS;
    uint32_t early = n->options.selection == SELECTION_MIXED ? model->layers / 3 : 0;
    n->layout = (struct kv_layout){.layers = model->layers,
                                   .row_heads = n->heads,
                                   .selection_heads = n->heads,
                                   .groups = n->groups,
                                   .piece_bytes = 4 * model->head_dim,
                                   .context_max = n->options.capacity};
    n->group_of = mem_alloc(model->layers, sizeof *n->group_of);
    n->first_layer = mem_alloc(n->groups + 1, sizeof *n->first_layer);
    for (uint32_t l = 0, g = 1; l < model->layers; l++) {
        n->group_of[l] = each ? l : of[l] + (l < early ? n->groups : 0);
        if (l && (each || of[l] != of[l - 1]))
            n->first_layer[g++] = l;
    }
    n->first_layer[n->groups] = model->layers;
    for (uint32_t g = 0; g <= n->groups && n->options.loads; g++)
        n->layout.group_first_layer[g] = n->first_layer[g];
}

struct lane *lane_create(const struct lane_options *o)
{
    struct lane *n = mem_alloc(1, sizeof *n);
    size_t heads = o->model->kv_heads, averages = (heads + 1) * ((o->capacity + 15ull) & ~15ull);
    size_t room = o->oracle == ORACLE_GROUPS ? averages : o->pins > 0 ? o->capacity : 0;
    CHECK(!o->oracle || (o->selection == SELECTION_CURRENT && o->pins <= 0));
    CHECK(o->oracle != ORACLE_HEADS || (!o->loads && !o->group_budgets));
    CHECK(!o->group_budgets || (o->pins <= 0 && o->choice.min_mass <= 0 && o->choice.top_p <= 0));
    n->options = *o;
    n->heads = o->model->kv_heads;
    n->groups = o->oracle == ORACLE_HEADS ? o->model->layers : chooser_groups(o->chooser);
    n->lists = n->groups * n->heads;
    n->choices = mem_alloc(n->groups, sizeof *n->choices);
    for (uint32_t g = 0; g < n->groups; g++) {
        n->choices[g] = o->choice;
        if (o->group_budgets)
            n->choices[g].budget = o->group_budgets[g];
        uint32_t longest = sets_longest(&n->choices[g]);
        n->longest = longest > n->longest ? longest : n->longest;
    }
    n->picks = mem_alloc(n->lists, sizeof *n->picks);
    n->before = mem_alloc(n->lists, sizeof *n->before);
    n->pins = mem_alloc(n->lists, sizeof *n->pins);
    n->weights = mem_alloc(room, sizeof *n->weights);
    n->items = mem_alloc(2ull * n->lists * (n->longest + 1), sizeof *n->items);
    n->attended = mem_alloc(2ull * n->lists, sizeof *n->attended);
    n->scratch.topk = mem_alloc(o->capacity, sizeof *n->scratch.topk);
    n->scratch.index = mem_alloc(o->capacity, sizeof *n->scratch.index);
    n->scratch.weights = mem_alloc(o->capacity, sizeof *n->scratch.weights);
    n->sent_counts = mem_alloc(2ull * n->lists, sizeof *n->sent_counts);
    n->sent = mem_alloc((size_t)n->lists * n->longest, sizeof *n->sent);
    place_groups(n);
    loaders_init(n);
    return n;
}

void lane_free(struct lane **lane)
{
    struct lane *n = *lane;
    if (!n)
        return;
    loaders_free(n);
    for (uint32_t i = 0; i < n->lists; i++) {
        positions_free(&n->picks[i]);
        positions_free(&n->before[i]);
        positions_free(&n->pins[i]);
    }
    mem_free(&n->choices);
    mem_free(&n->picks);
    mem_free(&n->before);
    mem_free(&n->pins);
    mem_free(&n->weights);
    mem_free(&n->group_of);
    mem_free(&n->first_layer);
    mem_free(&n->items);
    mem_free(&n->attended);
    mem_free(&n->scratch.topk);
    mem_free(&n->scratch.index);
    mem_free(&n->scratch.weights);
    mem_free(&n->sent_counts);
    mem_free(&n->sent);
    mem_free(lane);
}

void lane_restart(struct lane *n)
{
    loaders_free(n);
    loaders_init(n);
    n->has = false;
    for (uint32_t i = 0; i < n->lists; i++)
        n->pins[i].count = 0;
}

bool lane_wants_pins(const struct lane *n)
{
    return n->options.pins > 0;
}

/* The best positions of the prompt for list i, as many as the share of the picked ones says. */
static void pin(struct lane *n, uint32_t i, const struct pins *p)
{
    const struct choice *c = &n->options.choice;
    uint32_t early = n->options.pin_layers, k = c->budget - c->sinks - c->window - 1;
    memset(n->weights, 0, p->count * sizeof *n->weights);
    for (uint32_t l = 0; l < p->layers; l++) {
        const float *from = p->weights + ((size_t)l * p->heads + i % n->heads) * p->count;
        if (early ? l < early : chooser_group_of(n->options.chooser)[l] == i / n->heads)
            for (uint32_t at = 0; at < p->count; at++)
                n->weights[at] += from[at];
    }
    struct span span = sets_span(c, p->count - 1);
    uint32_t most = (uint32_t)((float)k * n->options.pins);
    span.most = most < span.most ? most : span.most;
    sets_pick(&n->pins[i], n->weights, &span, n->scratch.topk);
}

void lane_pin(struct lane *n, const struct pins *p)
{
    CHECK(lane_wants_pins(n) && p->count <= n->options.capacity);
    for (uint32_t i = 0; i < n->lists; i++)
        pin(n, i, p);
}

/* What is pinned, and the head's best of the others. */
static void pick_beside_pins(struct lane *n, uint32_t i)
{
    uint32_t count = n->span.position + 1;
    const float *weights = chooser_weights(n->options.chooser, i / n->heads, i % n->heads);
    memcpy(n->weights, weights, count * sizeof *weights);
    for (uint32_t j = 0; j < n->pins[i].count; j++)
        n->weights[n->pins[i].at[j]] = INFINITY;
    sets_pick(&n->picks[i], n->weights, &n->span, n->scratch.topk);
}

/* Rows of all layers that the set in use names, and those of them that had to be loaded. */
static void load(struct lane *n, int loader, const struct elastic_set *set)
{
    struct elastic *e = &n->loaders[loader];
    struct kv_counters counters = {0};
    CHECK(elastic_receive(e, set) == 0);
    bool first = !e->has;
    elastic_commit(e, &counters);
    for (uint32_t g = 0; g < n->layout.groups && !first; g++) {
        uint32_t layers = n->layout.group_first_layer[g + 1] - n->layout.group_first_layer[g];
        n->counts.whole[loader] += elastic_selected_rows(e, g) * layers;
        for (uint32_t i = 0; i < e->loads.count; i++)
            n->counts.loaded[loader] += e->loads.at[i].group == g ? layers : 0;
    }
    elastic_pin(e, n->span.limit, n->span.position + 1, n->span.position);
    e->loads.count = e->fills.count = 0;
}

static void load_all(struct lane *n)
{
    uint32_t at = 0;
    for (uint32_t i = 0; i < n->lists; i++) {
        n->sent_counts[2 * i] = n->picks[i].count;
        n->sent_counts[2 * i + 1] = 0;
        if (n->picks[i].count)
            memcpy(n->sent + at, n->picks[i].at, n->picks[i].count * sizeof *n->sent);
        at += n->picks[i].count;
    }
    n->step++;
    struct elastic_set set = {.step = n->step,
                              .base_step = n->step,
                              .limit = n->span.limit,
                              .position = n->span.position,
                              .counts = n->sent_counts,
                              .positions = n->sent};
    for (int i = 0; i < LANE_LOADERS; i++)
        load(n, i, &set);
}

/* One oracle's list; the lists of a group's heads follow one another. */
static void pick_by_look(struct lane *n, uint32_t i, const struct span *span)
{
    const struct look *k = n->look;
    uint32_t group = i / n->heads, head = i % n->heads;
    const float *weights = NULL;
    if (n->options.oracle == ORACLE_HEADS)
        weights = look_weights(k, group, head);
    else {
        if (head == 0)
            look_mean(n->weights, k, n->first_layer[group], n->first_layer[group + 1]);
        weights = n->weights + head * k->stride;
    }
    sets_choose(&n->picks[i], weights, &n->choices[group], span, NULL, &n->scratch);
}

static void pick(struct lane *n, uint32_t position)
{
    struct positions *swap = n->before;
    n->before = n->picks;
    n->picks = swap;
    n->span_before = n->span;
    n->span = sets_span(&n->options.choice, position);
    for (uint32_t i = 0; i < n->lists; i++) {
        const struct choice *choice = &n->choices[i / n->heads];
        struct span span = sets_span(choice, position);
        if (n->look)
            pick_by_look(n, i, &span);
        else if (lane_wants_pins(n))
            pick_beside_pins(n, i);
        else
            chooser_pick(n->options.chooser, i / n->heads, i % n->heads, choice, &span, &n->scratch,
                         &n->picks[i]);
        if (n->has) {
            n->counts.common += sets_common(&n->picks[i], &n->before[i]);
            n->counts.selected += n->picks[i].count;
        }
    }
    n->has = true;
    if (n->options.loads)
        load_all(n);
}

bool lane_needs_prime(const struct lane *n)
{
    return n->options.selection != SELECTION_CURRENT;
}

void lane_prime(struct lane *n, uint32_t position)
{
    pick(n, position);
}

/* One set of lists, `part` 0 late or 1 early; a set of the token before lacks the newest position. */
static void attend(struct lane *n, uint32_t part, const struct positions *picks, struct span span,
                   uint32_t position)
{
    span.position = position;
    for (uint32_t i = 0; i < n->lists; i++) {
        uint32_t at = part * n->lists + i, *items = n->items + (size_t)at * (n->longest + 1);
        n->attended[at] = (struct attn_list){sets_attended(items, &span, &picks[i]), items};
        uint32_t layers = n->first_layer[i / n->heads + 1] - n->first_layer[i / n->heads];
        n->counts.attended += part ? 0 : (uint64_t)n->attended[at].count * layers;
        n->counts.lists += part ? 0 : layers;
    }
}

const struct attn_list *lane_choose(struct lane *n, uint32_t position)
{
    enum selection_mode mode = n->options.selection;
    CHECK((mode == SELECTION_CURRENT || n->has) && lane_knows(n) == (n->look != NULL));
    pick(n, position);
    if (mode == SELECTION_PREVIOUS)
        attend(n, 0, n->before, n->span_before, position);
    else
        attend(n, 0, n->picks, n->span, position);
    if (mode == SELECTION_MIXED)
        attend(n, 1, n->before, n->span_before, position);
    return n->attended;
}

bool lane_knows(const struct lane *n)
{
    return n->options.oracle != ORACLE_NONE;
}

const struct attn_list *lane_choose_by(struct lane *n, const struct look *look)
{
    n->look = look;
    const struct attn_list *lists = lane_choose(n, look->position);
    n->look = NULL;
    return lists;
}

const uint32_t *lane_group_of(const struct lane *n)
{
    return n->group_of;
}

struct chooser *lane_chooser(const struct lane *n)
{
    return n->options.chooser;
}

const struct lane_counts *lane_counts(const struct lane *n)
{
    return &n->counts;
}

void lane_counts_add(struct lane_counts *to, const struct lane_counts *from)
{
    to->common += from->common;
    to->selected += from->selected;
    to->attended += from->attended;
    to->lists += from->lists;
    for (int i = 0; i < LANE_LOADERS; i++) {
        to->loaded[i] += from->loaded[i];
        to->whole[i] += from->whole[i];
    }
}

static double share(uint64_t part, uint64_t whole)
{
    return whole ? (double)part / (double)whole : (double)NAN;
}

struct lane_figures lane_figures(const struct lane_counts *c)
{
    return (struct lane_figures){.overlap = share(c->common, c->selected),
                                 .saved = 1 - share(c->loaded[0], c->whole[0]),
                                 .saved_default = 1 - share(c->loaded[1], c->whole[1]),
                                 .attended = share(c->attended, c->lists)};
}
