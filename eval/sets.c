/* See sets.h. No state. */
#include "eval/sets.h"

#include "compute/compute.h"
#include "retriever/rank.h"

uint32_t sets_longest(const struct choice *c)
{
    return c->max_budget > c->budget ? c->max_budget : c->budget;
}

struct span sets_span(const struct choice *c, uint32_t position)
{
    uint32_t end = position + 1, sinks = c->sinks < end ? c->sinks : end;
    uint32_t limit = position > c->window ? position - c->window : 0;
    limit = limit < sinks ? sinks : limit;
    uint32_t k = c->budget - c->sinks - c->window - 1;
    return (struct span){position, sinks, limit, k < limit - sinks ? k : limit - sinks};
}

void sets_pick(struct positions *ret, const float *weights, const struct span *s, uint32_t *scratch)
{
    positions_reserve(ret, s->most);
    ret->count = compute_topk(ret->at, NULL, weights + s->sinks, s->limit - s->sinks, s->most, scratch);
    for (uint32_t i = 0; i < ret->count; i++)
        ret->at[i] += s->sinks;
}

void sets_choose(struct positions *ret, const float *weights, const struct choice *c, const struct span *span,
                 const struct calibration *calibration, const struct reach_scratch *scratch)
{
    static const struct calibration as_it_is;
    if (c->min_mass <= 0 && c->top_p <= 0) {
        sets_pick(ret, weights, span, scratch->topk);
        return;
    }
    uint32_t always = c->sinks + c->window + 1;
    struct reach_result found;
    struct rank_item item = {.keys = {.count = span->position + 1},
                             .sinks = span->sinks,
                             .limit = span->limit,
                             .rule = {.k = c->budget - always,
                                      .k_max = sets_longest(c) - always,
                                      .min_mass = c->min_mass,
                                      .top_p = c->top_p},
                             .now = ret,
                             .found = &found};
    positions_reserve(ret, item.rule.k_max);
    rank_pick(&item, 0, weights, calibration ? calibration : &as_it_is, scratch);
}

uint32_t sets_attended(uint32_t *ret, const struct span *s, const struct positions *picks)
{
    uint32_t n = 0;
    for (uint32_t p = 0; p < s->sinks; p++)
        ret[n++] = p;
    for (uint32_t i = 0; i < picks->count; i++)
        ret[n++] = picks->at[i];
    for (uint32_t p = s->limit; p <= s->position; p++)
        ret[n++] = p;
    return n;
}

static double sum(const float *x, uint32_t first, uint32_t end)
{
    double total = 0;
    for (uint32_t i = first; i < end; i++)
        total += (double)x[i];
    return total;
}

double sets_mass(const float *w, const struct span *s, const struct positions *picks)
{
    double mass = sum(w, 0, s->sinks) + sum(w, s->limit, s->position + 1);
    for (uint32_t i = 0; i < picks->count; i++)
        mass += (double)w[picks->at[i]];
    return mass;
}

uint32_t sets_common(const struct positions *a, const struct positions *b)
{
    uint32_t common = 0;
    for (uint32_t i = 0, j = 0; i < a->count && j < b->count;) {
        common += a->at[i] == b->at[j];
        uint32_t x = a->at[i], y = b->at[j];
        i += x <= y;
        j += y <= x;
    }
    return common;
}

double sets_mass_newest(const float *w, const struct choice *c, uint32_t position)
{
    uint32_t end = position + 1;
    return sum(w, end > c->budget ? end - c->budget : 0, end);
}

double sets_mass_sinks_newest(const float *w, const struct choice *c, uint32_t position)
{
    uint32_t end = position + 1, newest = c->budget - c->sinks;
    uint32_t first = end > newest ? end - newest : 0, sinks = c->sinks < first ? c->sinks : first;
    return sum(w, 0, sinks) + sum(w, first, end);
}
