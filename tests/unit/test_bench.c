/* `specontext bench` without daemons: options, what each round asks for, and figures out of samples. */
#include <errno.h>
#include <math.h>
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

#include "base/alloc.h"
#include "launch/bench_machine.h"
#include "launch/bench_options.h"
#include "launch/bench_parts.h"
#include "launch/bench_plan.h"
#include "proto/memory.h"
#include "launch/bench_report.h"
#include "proto/limits.h"

#define PID_NEVER 4194305 /* the kernel gives numbers below 2^22 */

#define PARSE(...)                                \
    parse((const char *[]){"bench", __VA_ARGS__}, \
          sizeof(const char *[]){"bench", __VA_ARGS__} / sizeof(char *))

static struct bench_options options;
static struct err err;

static int parse(const char *const *argv, size_t argc)
{
    err = (struct err){0};
    return bench_options_parse((int)argc, (char **)(uintptr_t)argv, &options, &err);
}

static void test_options(void **state)
{
    (void)state;
    assert_int_equal(PARSE("-m", "x"), 0);
    assert_int_equal(options.prompt, 512);
    assert_int_equal(options.decode, 128);
    assert_int_equal(options.depth_count, 1);
    assert_int_equal(options.depths[0], 0);
    assert_int_equal(options.output, BENCH_MARKDOWN);
    assert_int_equal(PARSE("-m", "x", "-d", "0,512,7000", "-p", "0", "--json", "--attention", "full"), 0);
    assert_int_equal(options.depth_count, 3);
    assert_int_equal(options.depths[2], 7000);
    assert_int_equal(options.output, BENCH_JSON);
    assert_int_equal(options.run.attention, RUN_FULL);
    assert_int_equal(PARSE("-m", "x", "--requests", "7", "--generate", "9"), 0);
    assert_int_equal(options.parallel, 7);
    assert_int_equal(options.decode, 9);
    assert_int_equal(PARSE("-m", "x", "--no-offload", "--slots", "300", "--host-memory", "1M"), 0);
    assert_true(options.run.no_offload && options.run.slots == 300 && options.run.host_memory == 1 << 20);
    assert_int_equal(PARSE("--help"), 1);
}

static void test_refusals(void **state)
{
    (void)state;
    static const char *const depths[] = {"", ",", "1,", "x", "1,-2", "1 ,2", "99999999999999999999"};
    for (size_t i = 0; i < sizeof depths / sizeof *depths; i++) {
        assert_int_equal(PARSE("-m", "x", "-d", depths[i]), -EINVAL);
        assert_non_null(strstr(err.text, "--depth"));
    }
    char many[BENCH_DEPTHS_MAX * 2 + 2];
    for (size_t i = 0; i <= BENCH_DEPTHS_MAX; i++)
        memcpy(many + 2 * i, i < BENCH_DEPTHS_MAX ? "1," : "1", 2);
    assert_int_equal(PARSE("-m", "x", "-d", many), -EINVAL);
    assert_int_equal(PARSE("-d", "1"), -EINVAL);
    assert_non_null(strstr(err.text, "--model"));
    assert_int_equal(PARSE("-m", "x", "-p", "0", "-n", "0"), -EINVAL);
    assert_int_equal(PARSE("-m", "x", "--budget", "69"), -EINVAL);
    assert_int_equal(PARSE("-m", "x", "--budget", "69", "--attention", "full"), 0);
    assert_int_equal(PARSE("-m", "x", "-r", "0"), -EINVAL);
    assert_int_equal(PARSE("-m", "x", "-b", "65"), -EINVAL);
}

static void test_rows_and_requests(void **state)
{
    (void)state;
    uint32_t count;
    assert_int_equal(PARSE("-m", "x", "-p", "100", "-n", "10", "-d", "0,200", "-b", "3", "-r", "2"), 0);
    struct bench_row *rows = bench_plan_rows(&options, &count);
    assert_int_equal(count, 4);
    assert_int_equal(rows[2].kind, BENCH_PREFILL);
    assert_int_equal(rows[3].kind, BENCH_DECODE);
    assert_int_equal(rows[3].depth, 200);
    struct bench_request build = bench_plan_request(&options, &rows[3], BENCH_ROUND_BUILD, 0);
    assert_int_equal(build.prompt, 200);
    assert_int_equal(build.generate, 2); /* a step behind the last block */
    struct bench_request prefill = bench_plan_request(&options, &rows[2], 0, 0);
    assert_int_equal(prefill.prompt, 300);
    assert_int_equal(prefill.shared, 200);
    struct bench_request decode = bench_plan_request(&options, &rows[3], 1, 0);
    /* the first token that is timed has the depth in the cache */
    assert_int_equal(decode.prompt + BENCH_LEAD - 1, 200);
    assert_true(decode.generate >= BENCH_LEAD + 10);
    assert_int_equal(decode.shared, 192); /* whole blocks: the rest makes sequences differ */
    assert_int_equal(bench_plan_request(&options, &rows[1], 0, 0).prompt, 1);
    assert_int_equal(bench_plan_sequences(&options, BENCH_ROUND_BUILD), 1);
    assert_int_equal(bench_plan_sequences(&options, 0), 3);
    for (uint32_t i = 0; i < count; i++)
        bench_row_free(&rows[i]);
    mem_free(&rows);
}

static void test_sequences_that_never_begin(void **state)
{
    (void)state;
    const uint32_t enough = BENCH_LEAD + 4 * BENCH_AHEAD + 1;
    assert_int_equal(bench_plan_stuck((const uint32_t[]){enough, enough, 0, 9999}, 4, BENCH_AHEAD), 3);
    assert_int_equal(bench_plan_stuck((const uint32_t[]){enough, enough - 1, 0, 9999}, 4, BENCH_AHEAD), 0);
    assert_int_equal(bench_plan_stuck((const uint32_t[]){enough, 1, 9999}, 3, BENCH_AHEAD),
                     0); /* all have begun */
    assert_int_equal(bench_plan_stuck((const uint32_t[]){0, 0}, 2, BENCH_AHEAD), 0);
    assert_int_equal(bench_plan_stuck((const uint32_t[]){enough, 0}, 2, BENCH_AHEAD + 1), 0);
}

/* Where no prefix is used again those that have begun may be ahead by the steps of others' prompts. */
static void test_without_prefixes(void **state)
{
    (void)state;
    uint32_t context = 0;
    assert_int_equal(PARSE("-m", "x", "-p", "0", "-n", "10", "-d", "25600", "-b", "3"), 0);
    assert_true(bench_plan_builds(&options, 25600));
    assert_false(bench_plan_builds(&options, BLOCK_TOKENS - 1));
    assert_int_equal(bench_plan_ahead(&options, 25600), BENCH_AHEAD);
    options.run.write_through = WRITE_THROUGH_OFFLOADED;
    assert_false(bench_plan_builds(&options, 25600));
    assert_int_equal(bench_plan_ahead(&options, 600), BENCH_AHEAD);
    assert_int_equal(bench_plan_ahead(&options, 25600), 102);
    assert_int_equal(bench_plan_context(&options, 1 << 20, &context, &err), 0);
    assert_true(context >= 25600 + 10 + 2 * 102);
    options.run.device = "cuda:0";
    assert_int_equal(bench_plan_ahead(&options, 2048 * 50), 52);
    assert_int_equal(PARSE("-m", "x", "-d", "0,64", "--write-through", "offloaded"), -EINVAL);
    assert_non_null(strstr(err.text, "--prompt 0 or --depth 0"));
    assert_int_equal(PARSE("-m", "x", "-p", "0", "-d", "0,64", "--write-through", "offloaded"), 0);
    assert_int_equal(PARSE("-m", "x", "-d", "0", "--write-through", "offloaded"), 0);
}

static void test_context(void **state)
{
    (void)state;
    uint32_t context = 0, count;
    assert_int_equal(PARSE("-m", "x", "-p", "100", "-n", "200", "-d", "50,700", "-b", "4"), 0);
    assert_int_equal(bench_plan_context(&options, 8192, &context, &err), 0);
    assert_int_equal(context % BLOCK_TOKENS, 0);
    struct bench_row *rows = bench_plan_rows(&options, &count);
    for (uint32_t i = 0; i < count; i++) {
        struct bench_request r = bench_plan_request(&options, &rows[i], 0, 0);
        assert_true(r.prompt + r.generate <= context);
        bench_row_free(&rows[i]);
    }
    mem_free(&rows);
    assert_int_equal(bench_plan_context(&options, 800, &context, &err), -E2BIG);
    assert_non_null(strstr(err.text, "800"));
    assert_int_equal(bench_plan_context(&options, 1010, &context, &err), 0);
    assert_int_equal(context, 1010); /* rounded up, but not beyond the model */
}

static void test_tokens(void **state)
{
    (void)state;
    enum { N = 200, SHARED = 64, VOCAB = 1000 };
    struct bench_request request = {N, 1, SHARED, 0};
    uint32_t a[N], again[N], other[N], equal = 0;
    bench_plan_tokens(&request, 1, VOCAB, a);
    bench_plan_tokens(&request, 1, VOCAB, again);
    bench_plan_tokens(&request, 2, VOCAB, other);
    assert_memory_equal(a, again, sizeof a);
    assert_memory_equal(a, other, SHARED * sizeof *a);
    for (uint32_t i = 0; i < N; i++) {
        assert_true(a[i] < VOCAB);
        equal += i >= SHARED && a[i] == other[i];
    }
    assert_true(equal < 5);
}

/* Beginnings of their own: the same in each round, of no other sequence, and all are built. */
static void test_distinct(void **state)
{
    (void)state;
    uint32_t count, a[200], b[200];
    assert_int_equal(PARSE("-m", "x", "-p", "0", "-n", "10", "-d", "200", "-b", "3", "--distinct"), 0);
    struct bench_row *rows = bench_plan_rows(&options, &count);
    assert_int_equal(bench_plan_sequences(&options, BENCH_ROUND_BUILD), 3);
    for (uint32_t i = 0; i < 3; i++) {
        struct bench_request build = bench_plan_request(&options, &rows[0], BENCH_ROUND_BUILD, i),
                             warm = bench_plan_request(&options, &rows[0], BENCH_ROUND_WARM, i),
                             other = bench_plan_request(&options, &rows[0], 0, (i + 1) % 3);
        uint32_t equal = 0;
        bench_plan_tokens(&build, i + 1, 1000, a);
        bench_plan_tokens(&warm, 4 + i, 1000, b);
        assert_memory_equal(a, b, warm.shared * sizeof *a);
        bench_plan_tokens(&other, 7 + i, 1000, b);
        for (uint32_t at = 0; at < 199; at++)
            equal += a[at] == b[at];
        assert_true(equal < 5);
    }
    bench_row_free(&rows[0]);
    mem_free(&rows);
}

static void test_figures(void **state)
{
    (void)state;
    assert_int_equal(PARSE("-m", "x", "-n", "10", "-b", "2", "-r", "3", "--paced"), 0);
    struct bench_row row;
    bench_row_init(&row, BENCH_DECODE, 7, &options);
    const double rates[] = {30, 10, 20};
    memcpy(row.rates, rates, sizeof rates);
    row.repeats = 3;
    row.step_bytes = 1000;
    bench_row_close(&row);
    assert_true(bench_median(row.rates, 3) == 20);
    assert_true(bench_median(row.rates, 2) == 15);
    assert_true(isnan(bench_median(row.rates, 0)));
    struct bench_report report = {.options = &options,
                                  .model_name = "m",
                                  .head = "h",
                                  .bandwidth = 40000,
                                  .rows = &row,
                                  .row_count = 1};
    /* 20 tokens/s of two sequences are 10 steps of 1000 bytes */
    assert_true(fabs(bench_row_share(&report, &row) - 0.25) < 1e-12);
    assert_true(fabs(bench_row_step_ms(&report, &row) - 100) < 1e-9);
    assert_true(fabs(bench_row_floor_ms(&report, &row) - 25) < 1e-9);
    char *text = NULL;
    size_t bytes = 0;
    FILE *to = open_memstream(&text, &bytes);
    bench_report_json(&report, to);
    fclose(to);
    json_t *json = json_loads(text, 0, NULL);
    assert_non_null(json);
    const json_t *first = json_array_get(json_object_get(json, "rows"), 0);
    assert_true(json_real_value(json_object_get(first, "tokens_per_s")) == 20);
    assert_true(json_real_value(json_object_get(first, "min")) == 10);
    assert_true(json_is_null(json_object_get(first, "attended_mean")));
    assert_int_equal(strchr(text, '\n') - text, (long)bytes - 1); /* paced: one line */
    json_decref(json);
    free(text);
    bench_row_free(&row);
}

static void answer(struct bench_window *w, enum client_part part, const char *json)
{
    bench_window_answer(w, part, json, (uint32_t)strlen(json));
}

/* A GPU's decoder, from which a step of 100 ms wait and 3 ms attention was measured; all before must not
 * count. */
static void test_parts(void **state)
{
    (void)state;
    struct bench_parts p = {0};
    for (int repeat = 0; repeat < 2; repeat++) {
        struct bench_window w = {0};
        answer(&w, CLIENT_KVSTORE,
               "{\"totals\":{\"steps_sparse\":5,\"steps_dense\":7},\"counters_live\":{\"bytes_loaded\":900},"
               "\"counters_closed\":{\"bytes_loaded\":100}}");
        answer(&w, CLIENT_RETRIEVER, "{\"steps\":2,\"step_ms\":{\"score\":10.0}}");
        answer(&w, CLIENT_DECODER,
               "{\"gpu\":{\"steps_measured\":4,\"total_bytes\":1},\"step_ms\":{\"wait_rows\":50.0,"
               "\"wait_tables\":7.0,\"attention\":4.0},\"wait_us\":{\"tables\":{\"below\":[[5.0,9]]}},"
               "\"steps\":{\"sparse\":100,\"moves\":[[9,4]]}}");
        assert_false(bench_window_complete(&w));
        answer(&w, CLIENT_DECODER,
               "{\"gpu\":{\"steps_measured\":6,\"total_bytes\":70},\"step_ms\":{\"wait_rows\":250.0,"
               "\"wait_tables\":8.0,\"attention\":10.0},\"wait_us\":{\"tables\":{\"below\":"
               "[[2.0,3],[5.0,9],[8.0,1]]}},\"steps\":{\"sparse\":110,\"moves\":[[9,4],[100,8],[101,12],[107,"
               "8]]}}");
        answer(&w, CLIENT_RETRIEVER, "{\"steps\":4,\"step_ms\":{\"score\":7.0}}");
        answer(&w, CLIENT_KVSTORE,
               "{\"totals\":{\"steps_sparse\":15,\"steps_dense\":7,\"move_us\":1500},\"counters_live\":{"
               "\"bytes_loaded\":700},"
               "\"counters_closed\":{\"bytes_loaded\":600}}");
        assert_true(bench_window_complete(&w));
        answer(&w, CLIENT_KVSTORE, "a third one is dropped");
        assert_int_equal(bench_parts_add(&p, &w), 0);
        bench_window_clear(&w);
    }
    assert_true(p.steps == 4 && p.wait_ms == 400 && p.attention_ms == 12);
    assert_true(bench_parts_mean(p.wait_ms, p.steps) == 100 && isnan(bench_parts_mean(1, 0)));
    assert_true(p.store_steps == 20 && p.bytes_loaded == 600 && p.move_ms == 3);
    assert_true(fabs(bench_parts_mean(p.score_ms, p.retriever_steps) - 4) < 1e-9);
    assert_true(bench_waits_quantile(&p.tables, 0.5) == 2 && bench_waits_quantile(&p.tables, 0.99) == 8);
    assert_true(isnan(bench_waits_quantile(&p.rows, 0.5)));
    assert_int_equal(bench_parts_gpu_bytes(&p, CLIENT_DECODER), 70);
    assert_int_equal(bench_parts_gpu_bytes(&p, CLIENT_KVSTORE), 0);
    /* those of the steps before do not count; the window's first step is number 0 */
    static const struct bench_move moves[] = {{0, 0, 12}, {0, 6, 8}, {1, 0, 12}, {1, 6, 8}};
    assert_int_equal(p.move_count, 4);
    assert_memory_equal(p.moves, moves, sizeof moves);
    bench_parts_free(&p);
}

static void test_no_json(void **state)
{
    (void)state;
    struct bench_window w = {0};
    struct bench_parts p = {0};
    for (int i = 0; i < 2; i++)
        for (int part = 0; part < CLIENT_PARTS; part++)
            answer(&w, (enum client_part)part, i == 1 && part == CLIENT_RETRIEVER ? "{" : "{}");
    assert_int_equal(bench_parts_add(&p, &w), -EPROTO);
    bench_window_clear(&w);
    bench_parts_free(&p);
}

static void test_usage(void **state)
{
    (void)state;
    struct bench_usage usage = {0}, gone = {0};
    bench_machine_memory(getpid(), &usage);
    bench_machine_cpu(getpid(), &usage);
    assert_true(usage.rss >= usage.pss && usage.pss > 0);
    assert_true(usage.cpu_ns > 0);
    bench_machine_memory(PID_NEVER, &gone);
    bench_machine_cpu(PID_NEVER, &gone);
    assert_true(gone.rss == 0 && gone.pss == 0 && gone.cpu_ns == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_rows_and_requests),
        cmocka_unit_test(test_sequences_that_never_begin),
        cmocka_unit_test(test_context),
        cmocka_unit_test(test_without_prefixes),
        cmocka_unit_test(test_tokens),
        cmocka_unit_test(test_distinct),
        cmocka_unit_test(test_figures),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_no_json),
        cmocka_unit_test(test_usage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
