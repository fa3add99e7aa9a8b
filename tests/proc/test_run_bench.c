/* `specontext bench` with the real model: rows in order, depths out of the prefix cache, figures that make
 * sense, also on a GPU, through the double (tests/fakegpu); and its refusals. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "tests/lib/fakegpu.h"
#include "tests/lib/runcase.h"

#define WAIT_NS (RUNCASE_START_S * CLOCK_S)

/* Runs `specontext bench -m MODEL` and the arguments; the caller frees. */
static void run_bench(struct proc *p, int code, const char *text, const char *const *arguments)
{
    const char *argv[RUNCASE_ARGS] = {proc_program("specontext"), "bench", "-m", RUNCASE_MODEL};
    char cache[PATH_MAX + 32];
    snprintf(cache, sizeof cache, "XDG_CACHE_HOME=%s", runcase_path("cache"));
    const char *environment[] = {cache, NULL};
    for (int n = 4; *arguments; arguments++)
        argv[n++] = *arguments;
    proc_start(p, argv, environment);
    assert_true(proc_wait(p, clock_now_ns() + WAIT_NS));
    const char *said = p->err.text ? p->err.text : "";
    if (!proc_exited(p, code) || !strstr(said, text))
        fail_msg("expected exit code %d and '%s', found status %x and '%s'", code, text, p->status, said);
}

/* Its standard output as JSON, or NULL. */
static json_t *bench(int code, const char *text, const char *const *arguments)
{
    struct proc p;
    run_bench(&p, code, text, arguments);
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

/* Each part of a step took time, only its waits perhaps none. */
static void check_split(const json_t *row)
{
    static const char *const parts[] = {"wait_ms", "attention_ms", "matmul_ms", "sampling_ms", "other_ms"};
    const json_t *split = runcase_field(row, "split"), *waits = runcase_field(row, "wait_us");
    double sum = 0;
    assert_true(runcase_number(split, "steps") > 0);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        double ms = runcase_number(split, parts[i]);
        assert_true(ms > 0 || (ms == 0 && i == 0));
        sum += ms;
    }
    assert_true(sum > 0);
    double p50 = runcase_number(runcase_field(waits, "tables"), "p50");
    assert_true(p50 > 0 && p50 <= runcase_number(runcase_field(waits, "tables"), "p99"));
    assert_true(runcase_number(runcase_field(waits, "rows"), "p50") > 0);
    double step = runcase_number(row, "step_ms"), floor = runcase_number(row, "floor_ms");
    assert_true(step > 0 && floor > 0);
    double ratio = runcase_number(row, "step_to_floor") * floor / step;
    assert_true(ratio > 0.999 && ratio < 1.001);
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
    assert_true(runcase_number(report, "read_bytes_per_s") > 1e6); /* also on a busy machine */
    double weights = runcase_number(report, "weight_bytes");
    assert_true(runcase_number(json_array_get(rows, 3), "step_bytes") > weights);
    assert_true(json_is_null(json_object_get(json_array_get(rows, 0), "step_bytes")));
    assert_true(json_is_null(json_object_get(report, "gpu")));
    assert_true(json_is_null(json_object_get(json_array_get(rows, 3), "gpu_memory")));
    check_split(json_array_get(rows, 3));
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

/* Host memory lacks layers: nothing is built, each sequence computes its depth in each round, those that have
 * begun decode meanwhile. On a GPU too; where all layers may leave the prefix cache works. */
static void test_write_through(void **state)
{
    (void)state;
    runcase_need_model();
    static const char *const devices[] = {"cpu", "cuda:0"}, *const offloaded[] = {"12", "30"};
    for (int i = 0; i < 4; i++) {
        json_t *report = BENCH(0, "", "--json", "-p", "0", "-n", "8", "-d", "600", "-r", "2", "--budget",
                               "128", "-b", "3", "--distinct", "--device", devices[i / 2], "--device-memory",
                               "96M", "--offload-layers", offloaded[i % 2], "--write-through", "offloaded");
        assert_non_null(report);
        const json_t *row = json_array_get(runcase_field(report, "rows"), 0);
        check_row(row, "decode", 600, 8);
        assert_int_equal(runcase_number(row, "cached_tokens"), i % 2 ? 576 : 0);
        assert_int_equal(runcase_number(row, "layers_offloaded"), i % 2 ? 30 : 14);
        assert_string_equal(json_string_value(runcase_field(report, "write_through")), "offloaded");
        json_decref(report);
    }
    runcase_no_remains();
}

/* A head that reads hidden states starts from the same depths. */
static void test_features(void **state)
{
    (void)state;
    runcase_need_model();
    json_t *report = BENCH(0, "", "--json", "-p", "70", "-n", "8", "-d", "0,256", "-r", "2", "--budget",
                           "128", "--selection", "previous", "-b", "2", "-H",
                           "heads/alternatives/SmolLM2-135M-Instruct.features2.safetensors");
    assert_non_null(report);
    check_rows(report);
    json_decref(report);
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

static void check_gpu_memory(const json_t *memory)
{
    static const char *const parts[] = {"kvstore", "retriever", "decoder"};
    double sum = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        sum += runcase_number(runcase_field(memory, parts[i]), "total_bytes");
    assert_true(sum > 0 && runcase_number(memory, "total_bytes") == sum);
}

/* 40 steps, so that events measure one. Sequences of their own select and load on their own. */
static void check_steps(const json_t *row, size_t repeats, size_t tokens)
{
    const json_t *all = runcase_field(row, "steps_ms");
    assert_int_equal(json_array_size(all), repeats);
    for (size_t i = 0; i < repeats; i++) {
        const json_t *steps = json_array_get(all, i);
        double sum = 0;
        assert_int_equal(json_array_size(steps), tokens);
        for (size_t t = 0; t < tokens; t++) {
            assert_true(json_real_value(json_array_get(steps, t)) > 0);
            sum += json_real_value(json_array_get(steps, t));
        }
        /* they make the time that the rate is of, some repeat's */
        double slowest = 1e3 * (double)tokens * runcase_number(row, "sequences") / runcase_number(row, "min");
        assert_true(sum < 1.01 * slowest);
    }
}

/* How long sequences may be with all layers on the device, and the next fewer that allow more. */
static void plan_threshold(const char *context, int *ret_most, int *ret_offloaded)
{
    const char *argv[] = {proc_program("specontext"),
                          "plan",
                          "-m",
                          RUNCASE_MODEL,
                          "-c",
                          context,
                          "--requests",
                          "2",
                          "--budget",
                          "128",
                          "--device-memory",
                          "30M",
                          "--json",
                          NULL};
    struct proc p;
    proc_start(&p, argv, NULL);
    assert_true(proc_wait(&p, clock_now_ns() + WAIT_NS));
    json_t *plan = json_loads(p.out.text, 0, NULL);
    const json_t *rows = runcase_field(plan, "thresholds");
    *ret_most = (int)runcase_number(json_array_get(rows, 0), "context");
    for (size_t i = 0; i < json_array_size(rows); i++) {
        *ret_offloaded = (int)runcase_number(json_array_get(rows, i), "layers_offloaded");
        if (runcase_number(json_array_get(rows, i), "context") > *ret_most)
            break;
    }
    json_decref(plan);
    proc_free(&p);
}

/* Each sequence with a beginning of its own, in host memory by itself; layers leave the device while they
 * grow, where the plan says that they do. */
static void test_distinct(void **state)
{
    (void)state;
    runcase_need_model();
    json_t *report = BENCH(0, "", "--json", "--distinct", "-p", "0", "-n", "70", "-d", "360", "-r", "1", "-b",
                           "2", "--budget", "128", "--device-memory", "30M");
    assert_non_null(report);
    const json_t *row = json_array_get(runcase_field(report, "rows"), 0);
    check_steps(row, 1, 70);
    const json_t *moves = runcase_field(row, "moves"), *move = json_array_get(moves, 0);
    char context[16];
    int most = 0, offloaded = 0;
    snprintf(context, sizeof context, "%d", (int)runcase_number(report, "context"));
    plan_threshold(context, &most, &offloaded);
    assert_true(most > 360 && most < 420);
    assert_int_equal(json_array_size(moves), 1);
    assert_int_equal(runcase_number(move, "repeat"), 0);
    assert_int_equal(runcase_number(move, "layers_offloaded"), offloaded);
    /* one sequence may be some steps ahead of the other, and the two reports of a step of each other */
    double at = 360 + runcase_number(move, "step");
    assert_true(at > most - 4 && at < most + 4);
    json_decref(report);
    runcase_no_remains();
}

static void test_gpu(void **state)
{
    (void)state;
    runcase_need_model();
    setenv("SPECONTEXT_FAKEGPU_BYTES", "838860800", 1);
    json_t *report = BENCH(0, "", "--json", "--device", "cuda:0", "-p", "0", "--generate", "40", "-d", "256",
                           "-r", "2", "--requests", "2", "--budget", "128", "--offload-layers", "12");
    assert_non_null(report);
    const json_t *gpu = runcase_field(report, "gpu"), *row = json_array_get(runcase_field(report, "rows"), 0);
    assert_non_null(strstr(json_string_value(runcase_field(gpu, "name")), "double"));
    assert_true(runcase_number(gpu, "copy_bytes_per_s") > 1e6 &&
                runcase_number(gpu, "link_bytes_per_s") > 1e6);
    assert_true(runcase_number(gpu, "copy_bytes_per_s") == runcase_number(report, "read_bytes_per_s"));
    check_row(row, "decode", 256, 40);
    check_split(row);
    check_steps(row, 2, 40);
    check_gpu_memory(runcase_field(row, "gpu_memory"));
    /* 30 layers, 3 heads, 64 elements of K and of V in two bytes each; two sequences */
    double kv = 2 * runcase_number(row, "attended_mean") * 30 * 3 * 256;
    double rest = runcase_number(row, "step_bytes") - runcase_number(report, "weight_bytes") - kv;
    assert_true(rest > -2 && rest < 2);
    assert_true(runcase_number(row, "loaded_bytes_per_step") > 0 && runcase_number(row, "link_share") > 0);
    json_decref(report);
    unsetenv("SPECONTEXT_FAKEGPU_BYTES");
    runcase_no_remains();
}

/* A step of a decoder on the CPU reads the retriever's keys too: of 16 bits on the CPU, of the kind that is
 * asked for on a GPU. */
static void test_key_types(void **state)
{
    (void)state;
    runcase_need_model();
    static const struct {
        const char *device, *keys, *kind;
        int bytes; /* of one key of 64 elements */
    } cases[] = {{"cpu", "auto", "f16", 128},
                 {"cpu", "int8", "int8", 128},
                 {"cuda:1", "f16", "f16", 128},
                 {"cuda:1", "auto", "int8", 66}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *report = BENCH(0, "", "--json", "-p", "0", "-n", "8", "-r", "1", "-d", "128", "--budget",
                               "128", "--retriever-device", cases[i].device, "--key-type", cases[i].keys);
        assert_non_null(report);
        assert_string_equal(json_string_value(runcase_field(report, "key_type")), cases[i].kind);
        const json_t *row = json_array_get(runcase_field(report, "rows"), 0);
        /* 8 groups of 3 heads at the middle of the row; 30 layers, 3 heads, K and V */
        double keys = (128 + 8 / 2) * 8 * 3 * cases[i].bytes;
        double kv = runcase_number(row, "attended_mean") * 30 * 3 * 256;
        double rest = runcase_number(row, "step_bytes") - runcase_number(report, "weight_bytes") - kv - keys;
        if (!(rest > -2 && rest < 2))
            fail_msg("%s on %s: found %g bytes more than expected", cases[i].keys, cases[i].device, rest);
        json_decref(report);
    }
    runcase_no_remains();
}

/* The row of `depth` in the second table has so many bars. */
static void expect_bars(const char *text, const char *row, unsigned bars)
{
    const char *line = strstr(text, row);
    unsigned found = 0;
    assert_non_null(line);
    for (line++; *line && *line != '\n'; line++)
        found += *line == '|';
    assert_int_equal(found, bars);
}

static void test_table(void **state)
{
    (void)state;
    runcase_need_model();
    struct proc p;
    setenv("SPECONTEXT_FAKEGPU_BYTES", "838860800", 1);
    run_bench(&p, 0, "",
              (const char *const[]){"--device", "cuda:0", "-p", "0", "-n", "4", "-r", "1", "-d", "128",
                                    "--attention", "full", "--retriever-device", "cpu", NULL});
    unsetenv("SPECONTEXT_FAKEGPU_BYTES");
    assert_non_null(strstr(p.out.text, "double of a GPU, attention full; copies on the device: "));
    assert_non_null(strstr(p.out.text, "\n| decode 4 | 128 | 1 | "));
    assert_non_null(
        strstr(p.out.text, "| depth | step ms | floor ms | x floor | wait | attention | matmul |"));
    assert_non_null(strstr(p.out.text, "| GPU MiB: store |"));
    expect_bars(p.out.text, "\n| 128 | ", 21);
    proc_free(&p);
    run_bench(&p, 0, "", (const char *const[]){"-p", "0", "-n", "4", "-r", "1", NULL});
    assert_null(strstr(p.out.text, "GPU"));
    expect_bars(p.out.text, "\n| depth | ", 16);
    expect_bars(p.out.text, "\n| 0 | ", 16);
    proc_free(&p);
}

static void test_refusals(void **state)
{
    (void)state;
    runcase_need_model();
    assert_null(BENCH(2, "--depth", "-d", "x"));
    assert_null(BENCH(1, "--generate: found sequences of", "-d", "16384"));
    assert_null(BENCH(2, "--offload-layers: not together", "--no-offload", "--offload-layers", "3"));
    assert_null(BENCH(1, "cuda:7: no such GPU: 2 visible", "--device", "cuda:7"));
}

static int set_up(void **state)
{
    char card[32];
    snprintf(card, sizeof card, "bench%d", (int)getpid());
    fakegpu_use(card);
    return runcase_set_up(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sparse),        cmocka_unit_test(test_features),
                                       cmocka_unit_test(test_full),          cmocka_unit_test(test_distinct),
                                       cmocka_unit_test(test_write_through), cmocka_unit_test(test_gpu),
                                       cmocka_unit_test(test_table),         cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_key_types)};
    return cmocka_run_group_tests(tests, set_up, runcase_tear_down);
}
