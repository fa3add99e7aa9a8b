/* How long lists get: against a plain rule over sorted weights, and through the selector: sets that grow,
 * that end early, that are short, and what their messages say. */
#include "tests/unit/retriever_reference.h"

#include <errno.h>

#include "retriever/reach.h"

enum { MOST = 700 };

static const struct rig_options plain = {
    .groups = 2, .trained_context = 1 << 20, .rope_dims = 16, .rms_eps = 1e-5f};
static const struct calibration none;

/* ---- one list ---- */

struct naive {
    uint32_t count;
    double mass, mass_base;
    bool grown, is_short, in[MOST];
};

/* What PROTOCOL.md says, step by step: the best `count` of all, and how heavy they are. */
static double naive_mass(const struct reach_input *in, const struct ref_order *order, uint32_t count)
{
    double chosen = 0;
    for (uint32_t i = 0; i < count; i++)
        chosen += order[i].weight;
    return calibration_at(in->calibration, (in->outside + chosen) / in->all);
}

static bool naive_reaches(const struct reach_input *in, const struct ref_order *order, uint32_t count,
                          float x)
{
    return x >= 1 ? count == in->count : count == in->count || naive_mass(in, order, count) >= (double)x;
}

static uint32_t at_most(uint32_t k, uint32_t n)
{
    return k < n ? k : n;
}

static void naive_pick(const struct reach_input *in, const struct reach_rule *rule, struct naive *ret)
{
    struct ref_order order[MOST];
    uint32_t n = in->count, base = at_most(rule->k, n), most = at_most(rule->k_max, n), count = base;
    for (uint32_t i = 0; i < n; i++)
        order[i] = (struct ref_order){(double)in->weights[i], i};
    qsort(order, n, sizeof *order, ref_compare);
    *ret = (struct naive){.mass_base = naive_mass(in, order, base)};
    float share = rule->top_p > rule->min_mass ? rule->top_p : rule->min_mass;
    if (rule->min_mass > 0 && !naive_reaches(in, order, base, rule->min_mass)) {
        while (count < most && !naive_reaches(in, order, count, rule->min_mass))
            count++;
        ret->is_short = !naive_reaches(in, order, count, rule->min_mass);
    } else if (rule->top_p > 0 && naive_reaches(in, order, base, share)) {
        count = at_most(REACH_LEAST, base);
        while (!naive_reaches(in, order, count, share))
            count++;
    }
    ret->count = count;
    ret->grown = count > base;
    ret->mass = naive_mass(in, order, count);
    for (uint32_t i = 0; i < count; i++)
        ret->in[order[i].position] = true;
}

/* Weights in steps of 1/64, so that many are equal and every sum is exact. */
static void fill(float *weights, uint32_t n, uint32_t seed, bool steep)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t x = tiny_random(&seed) >> 8 & 63;
        weights[i] = (float)(steep ? x * x * x / 4096 : x) / 64;
    }
}

struct seen { /* that each way was gone */
    uint32_t grown, is_short, cut, plain;
};

static void check_list(const struct reach_input *in, const struct reach_rule *rule, struct seen *seen)
{
    static uint32_t topk[MOST], index[MOST], out[MOST];
    static float weights[MOST];
    static struct naive want;
    const struct reach_scratch scratch = {topk, index, weights};
    struct reach_result found;
    naive_pick(in, rule, &want);
    uint32_t count = reach_pick(out, in, rule, &scratch, &found);
    if (count != want.count || found.grown != want.grown || found.is_short != want.is_short ||
        fabs(found.mass - want.mass) > 1e-12 || fabs(found.mass_base - want.mass_base) > 1e-12)
        fail_msg("n %u k %u to %u, min_mass %g, top_p %g: found %u (%d %d %.9g), expected %u (%d %d %.9g)",
                 in->count, rule->k, rule->k_max, (double)rule->min_mass, (double)rule->top_p, count,
                 found.grown, found.is_short, found.mass, want.count, want.grown, want.is_short, want.mass);
    for (uint32_t i = 0; i < count; i++) {
        assert_true(want.in[out[i]]);
        assert_true(i == 0 || out[i] > out[i - 1]);
    }
    seen->grown += found.grown && !found.is_short;
    seen->is_short += found.is_short;
    seen->cut += count < at_most(rule->k, in->count);
    seen->plain += count == at_most(rule->k, in->count) && !found.is_short;
}

static void lists_are_as_long_as_the_rule_says(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {0, 1, 63, 64, 65, 300, MOST},
                          budgets[] = {0, 1, 20, 64, 100, 299, 1000};
    static const float shares[] = {0, 0.25f, 0.5f, 0.8f, 0.95f, 1};
    struct calibration low;
    struct err err;
    struct seen seen = {0};
    float weights[MOST];
    assert_int_equal(calibration_parse("0:0,0.5:0.25,0.9:0.7,1:1", &low, &err), 0);
    for (uint32_t i = 0; i < 7 * 7 * 7 * 6 * 6 * 4; i++) {
        uint32_t n = lengths[i % 7], k = budgets[i / 7 % 7], more = budgets[i / 49 % 7], form = i / 343 / 36;
        struct reach_rule rule = {k, k + more, shares[i / 343 % 6], shares[i / 343 / 6 % 6]};
        fill(weights, n, i + 1, form & 1);
        struct reach_input in = {
            .weights = weights, .count = n, .outside = 3, .all = 3, .calibration = form & 2 ? &low : &none};
        for (uint32_t j = 0; j < n; j++)
            in.all += (double)weights[j];
        check_list(&in, &rule, &seen);
    }
    assert_true(seen.grown > 1000 && seen.is_short > 1000 && seen.cut > 500 && seen.plain > 1000);
}

static void weights_that_are_no_numbers_make_no_list_longer(void **state)
{
    (void)state;
    float weights[4] = {1, NAN, 2, 3};
    uint32_t topk[4], index[4], out[4];
    float scratch_weights[4];
    const struct reach_scratch scratch = {topk, index, scratch_weights};
    struct reach_input in = {.weights = weights, .count = 4, .all = (double)NAN, .calibration = &none};
    struct reach_result found;
    assert_int_equal(reach_pick(out, &in, &(struct reach_rule){2, 4, 1, 1}, &scratch, &found), 2);
    assert_true(isnan(found.mass) && isnan(found.mass_base));
    assert_false(found.grown || found.is_short);
}

/* ---- through the selector ---- */

static void open_with(struct selector *s, const struct msg_open *open)
{
    struct err err = {0};
    if (selector_open(s, open, &err) < 0)
        fail_msg("%s", err.text);
}

/* Each list holds the best of the reference, as many as the mass that the rule asks for takes. */
static void check_set(const struct rig *r, const struct msg_open *o, const uint32_t *tokens, uint32_t n,
                      const struct store *store, const struct msg_topk_entry *entry)
{
    double w[RIG_KV_HEADS * 512], sum = 0;
    bool grown = false, even = true;
    uint32_t limit = n - 1 - o->window, base = o->budget_base - o->sinks - o->window - 1;
    for (uint32_t l = 0; l < 2 * RIG_KV_HEADS; l++) {
        if (l % RIG_KV_HEADS == 0)
            ref_weights(r, l / RIG_KV_HEADS, HEAD_POOL_MAX, 1, tokens, n, w);
        const double *mine = w + (size_t)l % RIG_KV_HEADS * n;
        double all = 0, kept = 0, least = INFINITY;
        for (uint32_t p = 0; p < n; p++) {
            all += mine[p];
            kept += p < o->sinks || p >= limit ? mine[p] : 0;
        }
        for (uint32_t i = 0; i < store->count[l]; i++) {
            kept += mine[store->at[l][i]];
            least = fmin(least, mine[store->at[l][i]]);
        }
        /* Float32 may take one position more or less than the reference would. */
        grown |= store->count[l] > base;
        even &= store->count[l] == base;
        if (store->count[l] != base && store->count[l] != REACH_LEAST) {
            assert_true(kept / all >= (double)o->min_mass - 1e-4);
            assert_true((kept - least) / all <= (double)o->min_mass + 1e-4);
        }
        sum += kept / all;
    }
    assert_int_equal(entry->flags & TOPK_ENTRY_GROWN, grown ? TOPK_ENTRY_GROWN : 0);
    assert_true(fabs(sum / (2 * RIG_KV_HEADS) - (double)entry->mass) < 1e-3);
    assert_true(!even || entry->mass == entry->mass_base);
}

static void sets_grow_and_shrink_by_their_mass(void **state)
{
    (void)state;
    enum { PROMPT = 400, STEPS = 60 };
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = 512, .threads = 2});
    struct selector_result result = {0};
    struct store store = {0};
    struct msg_open open = {.sequence = 1,
                            .capacity = 512,
                            .budget = 300,
                            .budget_base = 120,
                            .sinks = 4,
                            .window = 16,
                            .min_mass = 0.98f,
                            .top_p = 0.98f};
    uint32_t tokens[PROMPT + STEPS], grown = 0, uneven = 0, cut = 0;
    rig_tokens(tokens, PROMPT + STEPS, RIG_VOCAB, 21);
    open_with(s, &open);
    for (uint32_t n = PROMPT; n < PROMPT + STEPS; n++) {
        rig_step(s, 1, n, tokens, n == PROMPT ? 0 : n - 1, n, true, &result);
        store_take(&store, &result, 0); /* differences between lists of any lengths */
        check_set(r, &open, tokens, n, &store, &result.entries[0]);
        grown += result.entries[0].flags & TOPK_ENTRY_GROWN;
        for (uint32_t l = 0; l < 2 * RIG_KV_HEADS; l++) {
            uneven += store.count[l] != store.count[0];
            cut += store.count[l] < 120 - 4 - 16 - 1;
        }
        assert_int_equal(result.entries[0].flags & TOPK_ENTRY_SHORT, 0);
    }
    struct selector_stats stats;
    selector_stats(s, &stats);
    assert_int_equal(stats.grown, grown);
    assert_int_equal(stats.fallbacks, 0);
    assert_true(grown > 10 && grown < STEPS && uneven > 20 && cut > 10);
    store_free(&store);
    selector_result_free(&result);
    selector_free(&s);
    rig_free(&r);
}

/* All that may be attended, whatever its weight; and what is short says so. */
static void a_mass_of_one_takes_everything(void **state)
{
    (void)state;
    struct rig *r = rig_make(&plain);
    uint32_t tokens[300];
    rig_tokens(tokens, 300, RIG_VOCAB, 5);
    for (uint32_t budget = 100; budget <= 500; budget += 200) {
        struct selector *s = rig_selector(r, (struct rig_selector){.context = 512});
        struct selector_result result = {0};
        struct msg_open open = {.sequence = 1,
                                .capacity = 512,
                                .budget = budget,
                                .budget_base = 60,
                                .sinks = 4,
                                .window = 16,
                                .min_mass = 1};
        open_with(s, &open);
        rig_step(s, 1, 1, tokens, 0, 300, true, &result);
        uint32_t most = budget - 21 < 299 - 16 - 4 ? budget - 21 : 299 - 16 - 4;
        for (uint32_t l = 0; l < 2 * RIG_KV_HEADS; l++)
            assert_int_equal(result.counts[2 * l], most);
        bool all = budget >= 300;
        assert_int_equal(result.entries[0].flags, TOPK_ENTRY_GROWN | (all ? 0 : TOPK_ENTRY_SHORT));
        selector_result_free(&result);
        selector_free(&s);
    }
    rig_free(&r);
}

/* What is reported, and what lists are held against, is the calibrated mass. */
static void masses_are_calibrated(void **state)
{
    (void)state;
    struct rig_options o = plain;
    struct selector_result own = {0}, half = {0};
    struct msg_open open = {.sequence = 1,
                            .capacity = 512,
                            .budget = 512,
                            .budget_base = 60,
                            .sinks = 4,
                            .window = 16,
                            .min_mass = 0.49f};
    uint32_t tokens[300], sum[2] = {0};
    rig_tokens(tokens, 300, RIG_VOCAB, 5);
    for (int i = 0; i < 2; i++) {
        o.calibration = i ? "0:0,0.9999:0.49995,1:1" : NULL;
        struct rig *r = rig_make(&o);
        struct selector *s = rig_selector(r, (struct rig_selector){.context = 512});
        struct selector_result *result = i ? &half : &own;
        open_with(s, &open);
        rig_step(s, 1, 1, tokens, 0, 300, true, result);
        for (uint32_t l = 0; l < 2 * RIG_KV_HEADS; l++)
            sum[i] += result->counts[2 * l];
        selector_free(&s);
        rig_free(&r);
    }
    assert_true(fabsf(half.entries[0].mass_base - own.entries[0].mass_base / 2) < 1e-6f);
    assert_int_equal(own.entries[0].flags, 0);
    assert_int_equal(half.entries[0].flags, TOPK_ENTRY_GROWN);
    assert_int_equal(sum[0], 2 * RIG_KV_HEADS * (60 - 21));
    assert_true(sum[1] > sum[0]);
    assert_true(half.entries[0].mass >= 0.49f - 1e-6f && half.entries[0].mass < 0.5f);
    selector_result_free(&own);
    selector_result_free(&half);
}

static void contradictions_are_refused(void **state)
{
    (void)state;
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = 512});
    struct msg_open open = {.sequence = 1, .capacity = 512, .budget = 100, .sinks = 4, .window = 64};
    struct err err = {0};
    open.budget_base = 101;
    assert_int_equal(selector_open(s, &open, &err), -EINVAL);
    assert_non_null(strstr(err.text, "found 101, expected at most the budget of 100"));
    open.budget_base = 68;
    assert_int_equal(selector_open(s, &open, &err), -EINVAL);
    assert_non_null(strstr(err.text, "budget: found 68, expected at least sinks 4"));
    open.budget_base = 69;
    assert_int_equal(selector_open(s, &open, &err), 0);
    selector_free(&s);
    rig_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_are_as_long_as_the_rule_says),
        cmocka_unit_test(weights_that_are_no_numbers_make_no_list_longer),
        cmocka_unit_test(sets_grow_and_shrink_by_their_mass),
        cmocka_unit_test(a_mass_of_one_takes_everything),
        cmocka_unit_test(masses_are_calibrated),
        cmocka_unit_test(contradictions_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
