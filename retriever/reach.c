/* Lists by mass; see reach.h. No state.
 *
 * A list that is too light doubles until it is heavy enough; the shortest heavy one is then found by halving,
 * by Top-K among those that were picked already, so that nothing is ever sorted. */
#include "retriever/reach.h"

#include <math.h>
#include <stddef.h>

#include "compute/compute.h"

struct pick { /* a list in the making */
    const struct reach_input *input;
    const struct reach_scratch *scratch;
    uint32_t *index;
    uint32_t count;
    double chosen; /* weight of what is picked */
};

static double mass_of(const struct reach_input *in, double chosen)
{
    if (!isfinite(in->all) || !(in->all > 0))
        return (double)NAN;
    return calibration_at(in->calibration, (in->outside + chosen) / in->all);
}

/* A share of 1 is reached by everything only: what the head gives no weight the model may still attend to. */
static bool reaches(const struct reach_input *in, uint32_t count, double chosen, float share)
{
    return count == in->count || (share < 1 && mass_of(in, chosen) >= (double)share);
}

static void take(struct pick *p, uint32_t k)
{
    const struct reach_input *in = p->input;
    p->count = compute_topk(p->index, &p->chosen, in->weights, in->count, k, p->scratch->topk);
}

/* Cuts the list to the shortest that reaches `share`; fewer than `least` are known not to, or not wanted. The
 * list as it is reaches it. */
static void cut(struct pick *p, uint32_t least, float share)
{
    const struct reach_scratch *s = p->scratch;
    uint32_t low = least < p->count ? least : p->count, high = p->count;
    double chosen = p->chosen;
    if (share >= 1)
        return; /* there is no shorter one */
    for (uint32_t i = 0; i < p->count; i++)
        s->weights[i] = p->input->weights[p->index[i]];
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        compute_topk(s->index, &chosen, s->weights, p->count, mid, s->topk);
        if (reaches(p->input, mid, chosen, share))
            high = mid;
        else
            low = mid + 1;
    }
    compute_topk(s->index, &p->chosen, s->weights, p->count, high, s->topk);
    for (uint32_t i = 0; i < high; i++)
        p->index[i] = p->index[s->index[i]]; /* indices ascend: none is read after it was overwritten */
    p->count = high;
}

/* Longer, until min_mass is reached. */
static void grow(struct pick *p, const struct reach_rule *rule, struct reach_result *ret)
{
    const struct reach_input *in = p->input;
    uint32_t most = rule->k_max < in->count ? rule->k_max : in->count, below = p->count;
    while (p->count < most && !reaches(in, p->count, p->chosen, rule->min_mass)) {
        below = p->count;
        uint64_t more = 2 * (uint64_t)below > REACH_LEAST ? 2 * (uint64_t)below : REACH_LEAST;
        take(p, more < most && rule->min_mass < 1 ? (uint32_t)more : most);
    }
    ret->grown = p->count > rule->k;
    ret->is_short = !reaches(in, p->count, p->chosen, rule->min_mass);
    if (ret->grown && !ret->is_short)
        cut(p, below + 1, rule->min_mass);
}

uint32_t reach_pick(uint32_t *ret_index, const struct reach_input *in, const struct reach_rule *rule,
                    const struct reach_scratch *scratch, struct reach_result *ret)
{
    struct pick p = {.input = in, .scratch = scratch, .index = ret_index};
    take(&p, rule->k);
    *ret = (struct reach_result){.mass_base = mass_of(in, p.chosen)};
    float share = rule->top_p > rule->min_mass ? rule->top_p : rule->min_mass;
    if (isfinite(ret->mass_base)) {
        if (rule->min_mass > 0)
            grow(&p, rule, ret);
        if (rule->top_p > 0 && !ret->grown && reaches(in, p.count, p.chosen, share))
            cut(&p, REACH_LEAST, share);
    }
    ret->mass = mass_of(in, p.chosen);
    return p.count;
}
