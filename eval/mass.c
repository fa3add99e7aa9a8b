/* See mass.h. Owner: who created it. */
#include "eval/mass.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

struct sum {
    double total;
    uint64_t count;
};

struct mass {
    uint32_t layers, heads;
    struct sum *by_head; /* [layers][heads] */
    float *samples;      /* each (position, layer, head) */
    uint32_t count, room;
    struct sum hits, batch, batch_hits, best_head, best_group, best_shared, best_batch, newest, sinks_newest;
    struct sum at[MASS_BINS], best_head_at[MASS_BINS], best_group_at[MASS_BINS], sinks_newest_at[MASS_BINS];
};

static void add(struct sum *s, double value)
{
    s->total += value;
    s->count++;
}

static double mean(const struct sum *s)
{
    return s->count ? s->total / (double)s->count : (double)NAN;
}

struct mass *mass_create(uint32_t layers, uint32_t heads)
{
    struct mass *m = mem_alloc(1, sizeof *m);
    m->layers = layers;
    m->heads = heads;
    m->by_head = mem_alloc((size_t)layers * heads, sizeof *m->by_head);
    return m;
}

void mass_free(struct mass **mass)
{
    if (!*mass)
        return;
    mem_free(&(*mass)->by_head);
    mem_free(&(*mass)->samples);
    mem_free(mass);
}

/* What one position needs while it is added. */
struct work {
    struct mass *mass;
    const struct look *look;
    struct span span;
    uint32_t bin;
    const struct choice *choice;
    struct reach_scratch scratch;
    struct positions own, best;
};

static void add_sample(struct mass *m, double value)
{
    if (m->count == m->room) {
        m->room = m->room ? 2 * m->room : 4096;
        m->samples = mem_resize(m->samples, m->room, sizeof *m->samples);
    }
    m->samples[m->count++] = (float)value;
}

/* The chooser's set at one layer and head, and the best one there. */
static void add_layer(struct work *w, uint32_t layer, uint32_t head)
{
    struct mass *m = w->mass;
    const float *weights = look_weights(w->look, layer, head);
    double mass = sets_mass(weights, &w->span, &w->own);
    add(&m->by_head[(size_t)layer * m->heads + head], mass);
    add(&m->at[w->bin], mass);
    add_sample(m, mass);
    sets_pick(&w->best, weights, &w->span, w->scratch.topk);
    double best = sets_mass(weights, &w->span, &w->best);
    add(&m->best_head, best);
    add(&m->best_head_at[w->bin], best);
    if (w->best.count)
        add(&m->hits, (double)sets_common(&w->own, &w->best) / w->best.count);
}

/* One set for layers [first, end) of one head, chosen by `by`. */
static void add_shared(struct work *w, const float *by, uint32_t head, const uint32_t layers[2],
                       struct sum *to, struct sum *to_bin)
{
    sets_pick(&w->best, by, &w->span, w->scratch.topk);
    for (uint32_t l = layers[0]; l < layers[1]; l++) {
        double mass = sets_mass(look_weights(w->look, l, head), &w->span, &w->best);
        add(to, mass);
        if (to_bin)
            add(to_bin, mass);
    }
}

static void add_batch(struct work *w, uint32_t layer, uint32_t head)
{
    const float *weights = look_weights(w->look, layer, head);
    add(&w->mass->batch, sets_mass(weights, &w->span, &w->own));
    sets_pick(&w->best, weights, &w->span, w->scratch.topk);
    if (w->best.count)
        add(&w->mass->batch_hits, (double)sets_common(&w->own, &w->best) / w->best.count);
}

/* Sets of one group: layers[0] .. layers[1] - 1. */
static void add_group(struct work *w, struct chooser *chooser, uint32_t group, const uint32_t layers[2])
{
    struct mass *m = w->mass;
    size_t stride = w->look->stride;
    float *by = mem_alloc_aligned((m->heads + 1) * stride, sizeof *by);
    look_mean(by, w->look, layers[0], layers[1]);
    for (uint32_t h = 0; h < m->heads; h++) {
        chooser_pick(chooser, group, h, w->choice, &w->span, &w->scratch, &w->own);
        for (uint32_t l = layers[0]; l < layers[1]; l++)
            add_layer(w, l, h);
        add_shared(w, by + h * stride, h, layers, &m->best_group, &m->best_group_at[w->bin]);
    }
    chooser_pick(chooser, group, m->heads, w->choice, &w->span, &w->scratch, &w->own);
    for (uint32_t h = 0; h < m->heads; h++)
        for (uint32_t l = layers[0]; l < layers[1]; l++)
            add_batch(w, l, h);
    mem_free(&by);
}

static void add_all_layers(struct work *w, const struct choice *choice)
{
    struct mass *m = w->mass;
    size_t stride = w->look->stride;
    const uint32_t layers[2] = {0, m->layers};
    float *by = mem_alloc_aligned((m->heads + 1) * stride, sizeof *by);
    look_mean(by, w->look, 0, m->layers);
    for (uint32_t h = 0; h < m->heads; h++) {
        add_shared(w, by + h * stride, h, layers, &m->best_shared, NULL);
        add_shared(w, by + m->heads * stride, h, layers, &m->best_batch, NULL);
        for (uint32_t l = 0; l < m->layers; l++) {
            const float *weights = look_weights(w->look, l, h);
            add(&m->newest, sets_mass_newest(weights, choice, w->span.position));
            double both = sets_mass_sinks_newest(weights, choice, w->span.position);
            add(&m->sinks_newest, both);
            add(&m->sinks_newest_at[w->bin], both);
        }
    }
    mem_free(&by);
}

void mass_add(struct mass *m, const struct look *look, struct chooser *chooser, const struct choice *choice,
              uint32_t bin)
{
    struct work w = {
        .mass = m, .look = look, .span = sets_span(choice, look->position), .bin = bin, .choice = choice};
    const uint32_t *group_of = chooser_group_of(chooser);
    uint32_t positions = look->position + 1;
    w.scratch = (struct reach_scratch){.topk = mem_alloc(positions, sizeof *w.scratch.topk),
                                       .index = mem_alloc(positions, sizeof *w.scratch.index),
                                       .weights = mem_alloc(positions, sizeof *w.scratch.weights)};
    for (uint32_t first = 0, end; first < m->layers; first = end) {
        for (end = first + 1; end < m->layers && group_of[end] == group_of[first]; end++)
            ;
        add_group(&w, chooser, group_of[first], (const uint32_t[]){first, end});
    }
    add_all_layers(&w, choice);
    positions_free(&w.own);
    positions_free(&w.best);
    mem_free(&w.scratch.topk);
    mem_free(&w.scratch.index);
    mem_free(&w.scratch.weights);
}

static int compare(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double percentile_10(const struct mass *m)
{
    if (!m->count)
        return (double)NAN;
    float *sorted = mem_alloc(m->count, sizeof *sorted);
    memcpy(sorted, m->samples, m->count * sizeof *sorted);
    qsort(sorted, m->count, sizeof *sorted, compare);
    double value = (double)sorted[m->count / 10];
    mem_free(&sorted);
    return value;
}

static void find_worst(const struct mass *m, struct mass_figures *f)
{
    f->worst_layer = f->worst_head = (double)NAN;
    struct sum all = {0};
    for (uint32_t l = 0; l < m->layers; l++) {
        struct sum layer = {0};
        for (uint32_t h = 0; h < m->heads; h++) {
            const struct sum *s = &m->by_head[(size_t)l * m->heads + h];
            layer.total += s->total;
            layer.count += s->count;
            if (!(mean(s) >= f->worst_head)) {
                f->worst_head = mean(s);
                f->worst_head_at[0] = l;
                f->worst_head_at[1] = h;
            }
        }
        if (!(mean(&layer) >= f->worst_layer)) {
            f->worst_layer = mean(&layer);
            f->worst_layer_at = l;
        }
        all.total += layer.total;
        all.count += layer.count;
    }
    f->mean = mean(&all);
}

void mass_by_head(const struct mass *m, double *ret)
{
    for (uint32_t i = 0; i < m->layers * m->heads; i++)
        ret[i] = mean(&m->by_head[i]);
}

struct mass_figures mass_figures(const struct mass *m)
{
    struct mass_figures f = {.p10 = percentile_10(m),
                             .hit_rate = mean(&m->hits),
                             .batch = mean(&m->batch),
                             .batch_hits = mean(&m->batch_hits),
                             .best_head = mean(&m->best_head),
                             .best_group = mean(&m->best_group),
                             .best_shared = mean(&m->best_shared),
                             .best_batch = mean(&m->best_batch),
                             .newest = mean(&m->newest),
                             .sinks_newest = mean(&m->sinks_newest)};
    find_worst(m, &f);
    for (uint32_t b = 0; b < MASS_BINS; b++) {
        f.at[b] = mean(&m->at[b]);
        f.best_head_at[b] = mean(&m->best_head_at[b]);
        f.best_group_at[b] = mean(&m->best_group_at[b]);
        f.sinks_newest_at[b] = mean(&m->sinks_newest_at[b]);
    }
    return f;
}
