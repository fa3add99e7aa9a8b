/* The sampler: parameter checks, each cut, penalties, distribution, repeatability, damaged logits. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "model/sampler.h"

#define VOCAB 8

/* Samples from logits by the parameters; position varies the draw. Returns the id or a negative errno. */
static int sample(const struct sampler_params *p, const float *logits, uint32_t position)
{
    float copy[VOCAB];
    uint64_t scratch[VOCAB];
    uint32_t id = UINT32_MAX;
    assert_true(sampler_scratch_bytes(VOCAB) <= sizeof scratch);
    memset(scratch, 0xff, sizeof scratch);
    memcpy(copy, logits, sizeof copy);
    struct sampler_input in = {
        .logits = copy, .vocab = VOCAB, .sequence = 3, .position = position, .scratch = scratch};
    int rc = sampler_sample(p, &in, &id);
    return rc < 0 ? rc : (int)id;
}

static void count(const struct sampler_params *p, const float *logits, uint32_t draws, uint32_t counts[VOCAB])
{
    memset(counts, 0, VOCAB * sizeof *counts);
    for (uint32_t i = 0; i < draws; i++) {
        int id = sample(p, logits, i);
        assert_true(id >= 0 && id < VOCAB);
        counts[id]++;
    }
}

static const float slope[VOCAB] = {0, 1, 2, 3, 3, 2, 1, 0}; /* ids 3 and 4 tie at the top */

/* Field fault: each parameter x {NaN, +-Inf, -1, out of range}. */
static void test_params(void **state)
{
    (void)state;
    struct sampler_params good = sampler_params_default();
    struct err err;
    assert_int_equal(sampler_params_check(&good, &err), 0);
    const struct {
        const char *name;
        size_t offset;
        float low, high; /* just outside */
    } fields[] = {
        {"temperature", offsetof(struct sampler_params, temperature), -1, 101},
        {"top_p", offsetof(struct sampler_params, top_p), -1, 1.5f},
        {"min_p", offsetof(struct sampler_params, min_p), -1, 1.5f},
        {"repeat_penalty", offsetof(struct sampler_params, repeat_penalty), 0, 1e30f},
        {"presence_penalty", offsetof(struct sampler_params, presence_penalty), -3, 3},
        {"frequency_penalty", offsetof(struct sampler_params, frequency_penalty), -3, 3},
    };
    for (unsigned i = 0; i < sizeof fields / sizeof *fields; i++) {
        const float bad[] = {NAN,           -NAN,           INFINITY, -INFINITY,
                             fields[i].low, fields[i].high, 3e38f,    -1e-3f - 2};
        for (unsigned j = 0; j < sizeof bad / sizeof *bad; j++) {
            struct sampler_params p = good;
            memcpy((char *)&p + fields[i].offset, &bad[j], sizeof bad[j]);
            assert_int_equal(sampler_params_check(&p, &err), -EINVAL);
            assert_non_null(strstr(err.text, fields[i].name));
        }
    }
    struct sampler_params p = good;
    p.repeat_last_n = UINT32_MAX;
    assert_int_equal(sampler_params_check(&p, &err), -EINVAL);
    assert_non_null(strstr(err.text, "repeat_last_n"));
    p = good;
    p.top_k = UINT32_MAX; /* more than any vocabulary: off */
    p.temperature = 1;
    assert_int_equal(sampler_params_check(&p, &err), 0);
    assert_true(sample(&p, slope, 0) >= 0);
}

/* Field fault: a NaN must never become a token. */
static void test_damaged(void **state)
{
    (void)state;
    struct sampler_params p = sampler_params_default();
    const float bad[] = {NAN, -NAN, INFINITY};
    for (int greedy = 0; greedy < 2; greedy++) {
        p.temperature = greedy ? 0 : 1;
        for (unsigned i = 0; i < 3; i++) {
            for (unsigned at = 0; at < VOCAB; at++) {
                float logits[VOCAB];
                memcpy(logits, slope, sizeof logits);
                logits[at] = bad[i];
                assert_int_equal(sample(&p, logits, 0), -EDOM);
            }
        }
        float none[VOCAB], one[VOCAB];
        for (unsigned i = 0; i < VOCAB; i++)
            none[i] = one[i] = -INFINITY;
        assert_int_equal(sample(&p, none, 0), -EDOM);
        one[5] = -1e30f;
        assert_int_equal(sample(&p, one, 0), 5);
    }
}

static void test_greedy(void **state)
{
    (void)state;
    struct sampler_params p = sampler_params_default();
    assert_int_equal(sample(&p, slope, 0), 3); /* ties go to the lower id */
    const float equal[VOCAB] = {0};
    assert_int_equal(sample(&p, equal, 0), 0);
    p.temperature = 1;
    p.top_k = 1;
    for (uint32_t i = 0; i < 50; i++)
        assert_int_equal(sample(&p, slope, i), 3);
    p.top_k = 0;
    p.top_p = 0;
    for (uint32_t i = 0; i < 50; i++)
        assert_int_equal(sample(&p, slope, i), 3);
    p.top_p = 1;
    p.temperature = 1e-45f; /* the smallest float there is: as good as greedy, one of the tied */
    for (uint32_t i = 0; i < 50; i++) {
        int id = sample(&p, slope, i);
        assert_true(id == 3 || id == 4);
    }
}

static void test_cuts(void **state)
{
    (void)state;
    struct sampler_params p = sampler_params_default();
    uint32_t counts[VOCAB];
    p.temperature = 1;
    p.top_k = 3; /* 3, 4, and of the tied 2 and 5 the lower id */
    count(&p, slope, 2000, counts);
    assert_true(counts[3] && counts[4] && counts[2]);
    assert_int_equal(counts[2] + counts[3] + counts[4], 2000);
    p.top_k = 0;
    p.top_p = 0.6f; /* 3 and 4 hold 0.655 of the mass */
    count(&p, slope, 2000, counts);
    assert_true(counts[3] && counts[4]);
    assert_int_equal(counts[3] + counts[4], 2000);
    p.top_p = 0.7f;
    count(&p, slope, 2000, counts);
    assert_true(counts[2]);
    assert_int_equal(counts[2] + counts[3] + counts[4], 2000);
    p.top_k = 4; /* of four, 3 and 4 hold 0.731: top_p counts what top_k left */
    p.top_p = 0.72f;
    count(&p, slope, 2000, counts);
    assert_int_equal(counts[3] + counts[4], 2000);
    p.top_k = 0;
    p.top_p = 1;
    p.min_p = 0.3f; /* exp(-1) = 0.37 stays, exp(-2) goes, at any temperature */
    p.temperature = 50;
    count(&p, slope, 2000, counts);
    assert_true(counts[2] && counts[3] && counts[4] && counts[5]);
    assert_int_equal(counts[2] + counts[3] + counts[4] + counts[5], 2000);
    p.min_p = 1;
    count(&p, slope, 2000, counts);
    assert_int_equal(counts[3] + counts[4], 2000);
}

/* Chi-square of 20000 draws against softmax(logits / T); 7 degrees of freedom, 40 is far beyond 1e-5. */
static void check_distribution(const struct sampler_params *p, const float *logits)
{
    uint32_t counts[VOCAB];
    double total = 0, chi = 0;
    for (int i = 0; i < VOCAB; i++)
        total += exp(logits[i] / p->temperature);
    count(p, logits, 20000, counts);
    for (int i = 0; i < VOCAB; i++) {
        double expected = 20000 * exp(logits[i] / p->temperature) / total;
        chi += (counts[i] - expected) * (counts[i] - expected) / expected;
    }
    assert_true(chi < 40);
}

static void test_distribution(void **state)
{
    (void)state;
    struct sampler_params p = sampler_params_default();
    p.seed = 99;
    p.temperature = 1;
    check_distribution(&p, slope);
    p.temperature = 0.5f;
    check_distribution(&p, slope);
    p.temperature = 2;
    p.top_k = VOCAB; /* off */
    check_distribution(&p, slope);
    p.top_p = 0.9999999f; /* on, but cuts nothing: through the ordered path */
    p.top_k = 0;
    check_distribution(&p, slope);
}

static void test_repeatable(void **state)
{
    (void)state;
    struct sampler_params p = sampler_params_default();
    p.temperature = 1.5f;
    p.seed = 5;
    int differ_seed = 0, differ_position = 0;
    for (uint32_t i = 0; i < 200; i++) {
        int id = sample(&p, slope, i);
        assert_int_equal(sample(&p, slope, i), id);
        struct sampler_params other = p;
        other.seed = 6;
        differ_seed += sample(&other, slope, i) != id;
        differ_position += sample(&p, slope, i + 1) != id;
    }
    assert_true(differ_seed > 50 && differ_position > 50);
}

static int penalised(const struct sampler_params *p, const uint32_t *history, uint32_t n, float logits[VOCAB])
{
    uint64_t scratch[VOCAB];
    uint32_t id = UINT32_MAX;
    memset(scratch, 0xff, sizeof scratch);
    struct sampler_input in = {
        .logits = logits, .vocab = VOCAB, .history = history, .history_count = n, .scratch = scratch};
    int rc = sampler_sample(p, &in, &id);
    return rc < 0 ? rc : (int)id;
}

static void test_penalties(void **state)
{
    (void)state;
    const uint32_t history[] = {6, 1, 1, 2, 1};
    float logits[VOCAB] = {4, 4, -4, 0, 0, 0, 9, 0};
    struct sampler_params p = sampler_params_default();
    p.repeat_last_n = 4; /* 6 is out of the window */
    p.repeat_penalty = 2;
    p.presence_penalty = 0.5f;
    p.frequency_penalty = 0.25f;
    assert_int_equal(penalised(&p, history, 5, logits), 6);
    assert_true(logits[0] == 4 && logits[6] == 9 && logits[3] == 0);
    assert_true(logits[1] == 4 / 2.f - 0.5f - 3 * 0.25f);
    assert_true(logits[2] == -4 * 2.f - 0.5f - 0.25f);
    float again[VOCAB] = {1, 2, 0};
    p = sampler_params_default();
    p.presence_penalty = 2;
    assert_int_equal(penalised(&p, history, 5, again), 0);
    p.repeat_last_n = 0;
    float third[VOCAB] = {1, 2, 0};
    assert_int_equal(penalised(&p, history, 5, third), 1);
    p.repeat_last_n = 64;
    const uint32_t out_of_range[] = {VOCAB};
    assert_int_equal(penalised(&p, out_of_range, 1, third), -EINVAL);
}

/* The heap against a plain sort, on a vocabulary that is not small. */
static void test_large(void **state)
{
    (void)state;
    const uint32_t vocab = 5000;
    float *logits = mem_alloc(vocab, sizeof *logits), *copy = mem_alloc(vocab, sizeof *copy);
    void *scratch = mem_alloc(sampler_scratch_bytes(vocab), 1);
    struct sampler_params p = sampler_params_default();
    p.temperature = 1;
    p.top_k = 40;
    for (uint32_t i = 0; i < vocab; i++)
        logits[i] = (float)((i * 7919u) % 4999) / 500; /* some ties */
    for (uint32_t position = 0; position < 500; position++) {
        uint32_t id, better = 0;
        memcpy(copy, logits, vocab * sizeof *copy);
        struct sampler_input in = {.logits = copy, .vocab = vocab, .position = position, .scratch = scratch};
        assert_int_equal(sampler_sample(&p, &in, &id), 0);
        for (uint32_t i = 0; i < vocab; i++)
            better += logits[i] > logits[id] || (i < id && logits[i] == logits[id]);
        assert_true(better < 40);
    }
    mem_free(&scratch);
    mem_free(&copy);
    mem_free(&logits);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_params),       cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_greedy),       cmocka_unit_test(test_cuts),
        cmocka_unit_test(test_distribution), cmocka_unit_test(test_repeatable),
        cmocka_unit_test(test_penalties),    cmocka_unit_test(test_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
