/* `specontext bench` with the real model: rows in order, depths out of the prefix cache, figures that make
 * sense; and its refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "tests/lib/runcase.h"

#define WAIT_NS (RUNCASE_START_S * CLOCK_S)

/* Runs `specontext bench -m MODEL` and the arguments; its standard output as JSON, or NULL. */
static json_t *bench(int code, const char *text, const char *const *arguments)
{
    const char *argv[RUNCASE_ARGS] = {proc_program("specontext"), "bench", "-m", RUNCASE_MODEL};
    char cache[PATH_MAX + 32];
    snprintf(cache, sizeof cache, "XDG_CACHE_HOME=%s", runcase_path("cache"));
    const char *environment[] = {cache, NULL};
    for (int n = 4; *arguments; arguments++)
        argv[n++] = *arguments;
    struct proc p;
    proc_start(&p, argv, environment);
    assert_true(proc_wait(&p, clock_now_ns() + WAIT_NS));
    const char *said = p.err.text ? p.err.text : "";
    if (!proc_exited(&p, code) || !strstr(said, text))
        fail_msg("expected exit code %d and '%s', found status %x and '%s'", code, text, p.status, said);
    json_t *json = p.out.text ? json_loads(p.out.text, 0, NULL) : NULL;
    proc_free(&p);
    return json;
}
#define BENCH(code, text, ...) bench(code, text, (const char *const[]){__VA_ARGS__, NULL})

static void check_row(const json_t *row, const char *what, int depth, int tokens)
{
    assert_string_equal(json_string_value(runcase_field(row, "what")), what);
    assert_int_equal(runcase_number(row, "depth"), depth);
    assert_int_equal(runcase_number(row, "tokens"), tokens);
    assert_int_equal(runcase_number(row, "repeats"), 2);
    assert_int_equal(json_array_size(runcase_field(row, "samples")), 2);
    double rate = runcase_number(row, "tokens_per_s");
    assert_true(rate > 0 && runcase_number(row, "min") <= rate && rate <= runcase_number(row, "max"));
    assert_true(runcase_number(row, "cpu_ms_per_token") > 0);
    assert_true(runcase_number(row, "rss_bytes") >= runcase_number(row, "pss_bytes"));
    assert_true(runcase_number(row, "pss_bytes") > 0);
}

static void check_rows(const json_t *report)
{
    const json_t *rows = runcase_field(report, "rows");
    assert_int_equal(json_array_size(rows), 4);
    check_row(json_array_get(rows, 0), "prefill", 0, 70);
    check_row(json_array_get(rows, 1), "decode", 0, 8);
    check_row(json_array_get(rows, 2), "prefill", 256, 70);
    check_row(json_array_get(rows, 3), "decode", 256, 8);
    assert_int_equal(runcase_number(json_array_get(rows, 0), "cached_tokens"), 0);
    assert_int_equal(runcase_number(json_array_get(rows, 2), "cached_tokens"), 256);
    assert_int_equal(runcase_number(json_array_get(rows, 3), "cached_tokens"), 192);
    assert_true(runcase_number(report, "read_bytes_per_s") > 1e8);
    double weights = runcase_number(report, "weight_bytes");
    assert_true(runcase_number(json_array_get(rows, 3), "step_bytes") > weights);
    assert_true(json_is_null(json_object_get(json_array_get(rows, 0), "step_bytes")));
}

static void test_sparse(void **state)
{
    (void)state;
    runcase_need_model();
    json_t *report = BENCH(0, "", "--json", "-p", "70", "-n", "8", "-d", "0,256", "-r", "2", "--budget",
                           "128", "--selection", "previous", "-b", "2");
    assert_non_null(report);
    check_rows(report);
    const json_t *rows = runcase_field(report, "rows");
    double attended = runcase_number(json_array_get(rows, 3), "attended_mean");
    assert_true(attended > 100 && attended <= 129); /* a set of the step before leaves a window one longer */
    json_decref(report);
    runcase_no_remains();
}

static void test_full(void **state)
{
    (void)state;
    runcase_need_model();
    json_t *report =
        BENCH(0, "", "-o", "json", "-p", "70", "-n", "8", "-d", "0,256", "-r", "2", "--attention", "full");
    assert_non_null(report);
    check_rows(report);
    json_decref(report);
}

static void test_refusals(void **state)
{
    (void)state;
    runcase_need_model();
    assert_null(BENCH(2, "--depth", "-d", "x"));
    assert_null(BENCH(1, "--depth", "-d", "9000"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sparse), cmocka_unit_test(test_full),
                                       cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, runcase_set_up, runcase_tear_down);
}
