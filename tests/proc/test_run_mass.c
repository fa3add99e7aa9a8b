/* Whole runs whose budgets follow the head's confidence: equal to full attention where nothing less may do,
 * equal whatever is on the device, and the figures that say what happened. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/lib/runcase.h"

#define COMMON                                                                                           \
    "-f", runcase_document(2400), "-n", "24", "--ignore-eos", "-c", "1024", "--poison", "--host-memory", \
        "256M"

static double number(const struct runcase *c, const char *name)
{
    return runcase_number(c->report, name);
}

/* A mass of one is reached by all positions only: budgets grow to the context. */
static void test_growth_to_everything(void **state)
{
    (void)state;
    runcase_need_model();
    static const char *const modes[] = {"current", "previous", "mixed"}, *const offloaded[] = {"0", "11",
                                                                                               "30"};
    struct runcase full, small, c;
    RUNCASE_RUN(&full, COMMON, "--attention", "full");
    RUNCASE_RUN(&small, COMMON, "--budget", "96");
    assert_false(json_equal(runcase_field(full.report, "tokens"), runcase_field(small.report, "tokens")));
    for (int i = 0; i < 3; i++) {
        RUNCASE_RUN(&c, COMMON, "--budget", "96", "--min-mass", "1", "--max-budget", "1024", "--selection",
                    modes[i], "--offload-layers", offloaded[i]);
        runcase_expect_equal(full.report, c.report, "tokens");
        assert_true(number(&c, "layers_offloaded_max") >= 11 * i);
        assert_true(number(&c, "budget_grown") >= number(&c, "sparse_steps"));
        assert_true(number(&c, "fallbacks") == 0);
        assert_true(number(&c, "attended_mean") > number(&c, "prompt_tokens"));
        assert_true(number(&c, "mass_mean") > 0.9999 && number(&c, "mass_base_mean") < 0.9999);
        runcase_free(&c);
    }
    runcase_free(&full);
    runcase_free(&small);
}

/* Budgets that may not grow: layers on the device attend everything, others what was picked. */
static void test_fallback(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase full, small, all, none, some;
    RUNCASE_RUN(&full, COMMON, "--attention", "full");
    RUNCASE_RUN(&small, COMMON, "--budget", "96");
    RUNCASE_RUN(&all, COMMON, "--budget", "96", "--min-mass", "1", "--max-budget", "96");
    RUNCASE_RUN(&none, COMMON, "--budget", "96", "--min-mass", "1", "--max-budget", "96", "--offload-layers",
                "30");
    RUNCASE_RUN(&some, COMMON, "--budget", "96", "--min-mass", "1", "--max-budget", "96", "--offload-layers",
                "15");
    runcase_expect_equal(full.report, all.report, "tokens");
    runcase_expect_equal(small.report, none.report, "tokens");
    assert_true(number(&all, "fallbacks") == number(&all, "sparse_steps"));
    assert_true(number(&none, "fallbacks") == 0); /* nothing is there to fall back to */
    assert_true(number(&some, "fallbacks") == number(&some, "sparse_steps"));
    assert_true(number(&all, "budget_grown") == 0);
    assert_true(number(&all, "attended_mean") > number(&all, "prompt_tokens"));
    assert_true(number(&none, "attended_mean") == number(&small, "attended_mean"));
    assert_true(number(&some, "attended_mean") > number(&none, "attended_mean"));
    assert_true(number(&some, "attended_mean") < number(&all, "attended_mean"));
    assert_non_null(strstr(all.proc.err.text, "steps fell back to all positions"));
    assert_null(strstr(small.proc.err.text, "fell back"));
    runcase_free(&full);
    runcase_free(&small);
    runcase_free(&all);
    runcase_free(&none);
    runcase_free(&some);
}

/* Budgets that grow as far as a share takes: the same tokens with all layers on the device and with none. */
static void test_growth_to_a_share(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase small, all, none;
    RUNCASE_RUN(&small, COMMON, "--budget", "96");
    double mass = number(&small, "mass_mean");
    char wanted[32];
    snprintf(wanted, sizeof wanted, "%.3f", (1 + mass) / 2);
    RUNCASE_RUN(&all, COMMON, "--budget", "96", "--min-mass", wanted, "--max-budget", "1024");
    RUNCASE_RUN(&none, COMMON, "--budget", "96", "--min-mass", wanted, "--max-budget", "1024",
                "--offload-layers", "30");
    runcase_expect_equal(all.report, none.report, "tokens");
    assert_true(number(&all, "budget_grown") > 0 && number(&all, "fallbacks") == 0);
    assert_true(number(&all, "mass_mean") >= (1 + mass) / 2 - 0.001);
    assert_true(number(&all, "mass_mean") > number(&all, "mass_base_mean"));
    assert_true(number(&all, "attended_mean") > number(&small, "attended_mean"));
    assert_true(number(&all, "attended_mean") < number(&all, "prompt_tokens"));
    assert_true(number(&none, "rows_loaded") > 0);
    assert_int_equal((int)number(&all, "max_budget"), 1024);
    assert_true(number(&small, "budget_grown") == 0 && number(&small, "fallbacks") == 0);
    assert_true(number(&small, "mass_mean") == number(&small, "mass_base_mean"));
    assert_int_equal((int)number(&small, "max_budget"), 96);
    runcase_free(&small);
    runcase_free(&all);
    runcase_free(&none);
}

/* Lists that end where their share is reached. */
static void test_top_p(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase whole, all, none;
    RUNCASE_RUN(&whole, COMMON, "--budget", "400", "--budget-top-p", "1");
    RUNCASE_RUN(&all, COMMON, "--budget", "400", "--budget-top-p", "0.7");
    RUNCASE_RUN(&none, COMMON, "--budget", "400", "--budget-top-p", "0.7", "--offload-layers", "30");
    runcase_expect_equal(all.report, none.report, "tokens");
    assert_true(number(&whole, "attended_mean") == 400);
    assert_true(number(&all, "attended_mean") < 400 && number(&all, "attended_mean") >= 4 + 64 + 1 + 64);
    assert_true(number(&all, "mass_mean") < number(&all, "mass_base_mean"));
    assert_true(number(&all, "mass_mean") >= 0.7);
    assert_true(number(&all, "budget_grown") == 0);
    runcase_free(&whole);
    runcase_free(&all);
    runcase_free(&none);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_growth_to_everything),
        cmocka_unit_test(test_fallback),
        cmocka_unit_test(test_growth_to_a_share),
        cmocka_unit_test(test_top_p),
    };
    return cmocka_run_group_tests(tests, runcase_set_up, runcase_tear_down);
}
