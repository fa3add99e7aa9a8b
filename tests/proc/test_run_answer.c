/* Whole runs: processes and what they map, and outputs that must be equal token for token: full attention
 * and a budget as large as the context, layers on the device or not, elastic loading or not, batch or
 * alone, cached prefix or not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "tests/lib/runcase.h"
#include "tests/lib/temp.h"

#define ARENA "memfd:specontext-arena"

static void test_processes(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    RUNCASE_START(&c, "-f", runcase_document(3000), "-p", "The end of it was that", "-n", "48",
                  "--ignore-eos", "--budget", "256");
    runcase_wait_text(&c);
    runcase_find_parts(&c);
    assert_int_not_equal(c.parts[0], c.parts[1]);
    assert_int_not_equal(c.parts[1], c.parts[2]);
    assert_int_not_equal(c.parts[0], c.parts[2]);
    assert_true(proc_maps_have(c.parts[RUNCASE_KVSTORE], ARENA));
    assert_false(proc_maps_have(c.parts[RUNCASE_RETRIEVER], ARENA));
    assert_false(proc_maps_have(c.parts[RUNCASE_DECODER], ARENA));
    assert_false(proc_maps_have(c.proc.pid, ARENA));
    runcase_end(&c, 0, clock_now_ns() + RUNCASE_START_S * CLOCK_S);
    assert_non_null(c.report);

    const json_t *pids = runcase_field(c.report, "processes");
    assert_int_equal((pid_t)runcase_number(pids, "kvstore"), c.parts[RUNCASE_KVSTORE]);
    assert_int_equal((pid_t)runcase_number(pids, "retriever"), c.parts[RUNCASE_RETRIEVER]);
    assert_int_equal((pid_t)runcase_number(pids, "decoder"), c.parts[RUNCASE_DECODER]);
    assert_int_equal((pid_t)runcase_number(pids, "specontext"), c.proc.pid);
    for (int i = 0; i < RUNCASE_PARTS; i++)
        assert_true(proc_gone(c.parts[i]));

    assert_int_equal((int)runcase_number(c.report, "generated_tokens"), 48);
    assert_int_equal(json_array_size(runcase_field(c.report, "tokens")), 48);
    assert_string_equal(json_string_value(runcase_field(c.report, "finish_reason")), "length");
    const json_t *text = runcase_field(c.report, "text");
    assert_memory_equal(c.proc.out.text, json_string_value(text), json_string_length(text));
    double attended = runcase_number(c.report, "attended_mean"),
           overlap = runcase_number(c.report, "overlap_mean");
    assert_true(attended > 128 && attended <= 256);
    assert_true(runcase_number(c.report, "prompt_tokens") > 512);
    assert_true(overlap > 0 && overlap <= 1);
    double mass = runcase_number(c.report, "mass_mean");
    assert_true(mass > 0 && mass <= 1.0001);
    assert_true(runcase_number(c.report, "ttft_ms") > 0);
    assert_true(runcase_number(c.report, "decode_tokens_per_s") > 0);
    assert_true(runcase_number(c.report, "prefill_tokens_per_s") > 0);
    runcase_free(&c);
}

static void test_full_equals_a_budget_of_the_context(void **state)
{
    (void)state;
    runcase_need_model();
    const char *document = runcase_document(2400);
    struct runcase full, sparse, small;
    RUNCASE_RUN(&full, "-f", document, "-n", "32", "--ignore-eos", "-c", "1024", "--attention", "full");
    RUNCASE_RUN(&sparse, "-f", document, "-n", "32", "--ignore-eos", "-c", "1024", "--budget", "1024");
    RUNCASE_RUN(&small, "-f", document, "-n", "32", "--ignore-eos", "-c", "1024", "--budget", "80",
                "--window", "8");
    runcase_expect_equal(full.report, sparse.report, "tokens");
    /* The test could not see a difference if a small budget changed nothing. */
    assert_false(json_equal(runcase_field(full.report, "tokens"), runcase_field(small.report, "tokens")));
    assert_true(runcase_number(sparse.report, "attended_mean") >
                runcase_number(small.report, "attended_mean"));
    runcase_free(&full);
    runcase_free(&sparse);
    runcase_free(&small);
}

/* In each mode of selection. */
static void residency(const char *mode)
{
    runcase_need_model();
    RUNCASE_RESIDENCIES((&(struct runcase_residency){"--device-memory", "28M", "18M", 1}), "-f",
                        runcase_document(3000), "-n", "32", "--ignore-eos", "-c", "1024", "--budget", "128",
                        "--poison", "--selection", mode);
}

static void test_residency_current(void **state)
{
    (void)state;
    residency("current");
}

static void test_residency_previous(void **state)
{
    (void)state;
    residency("previous");
}

static void test_residency_mixed(void **state)
{
    (void)state;
    residency("mixed");
}

/* 18 MB hold all layers of 320 positions. The prompt of 254 fits, and so does a short answer; a long one
 * crosses. */
static void test_threshold_in_mid_generation(void **state)
{
    (void)state;
    runcase_need_model();
    const char *document = runcase_document(1100);
    struct runcase roomy, tight, before;
#define COMMON "-f", document, "--ignore-eos", "-c", "1024", "--budget", "128", "--poison"
    RUNCASE_RUN(&roomy, COMMON, "-n", "160");
    RUNCASE_RUN(&tight, COMMON, "-n", "160", "--device-memory", "18M");
    RUNCASE_RUN(&before, COMMON, "-n", "40", "--device-memory", "18M");
#undef COMMON
    runcase_expect_equal(roomy.report, tight.report, "tokens");
    assert_int_equal((int)runcase_number(roomy.report, "layers_offloaded_max"), 0);
    assert_int_equal((int)runcase_number(before.report, "layers_offloaded_max"), 0);
    assert_true(runcase_number(tight.report, "layers_offloaded_max") > 0);
    assert_true(runcase_number(tight.report, "rows_loaded") > 0);
    runcase_free(&roomy);
    runcase_free(&tight);
    runcase_free(&before);
}

static void test_elastic_loading(void **state)
{
    (void)state;
    runcase_need_model();
    const char *document = runcase_document(3000);
    struct runcase elastic, whole;
#define COMMON                                                                                             \
    "-f", document, "-n", "48", "--ignore-eos", "-c", "1024", "--budget", "256", "--device-memory", "28M", \
        "--poison"
    RUNCASE_RUN(&elastic, COMMON);
    RUNCASE_RUN(&whole, COMMON, "--no-elastic");
#undef COMMON
    runcase_expect_equal(elastic.report, whole.report, "tokens");
    double loaded = runcase_number(elastic.report, "bytes_loaded");
    double reloaded = runcase_number(elastic.report, "bytes_if_reloaded");
    print_message("# elastic loading: %.0f of %.0f bytes, %.1f %% saved\n", loaded, reloaded,
                  100 - 100 * loaded / reloaded);
    assert_true(loaded > 0 && loaded < reloaded);
    /* Without it each selection is loaded whole, but for the first, which fills the slots either way. */
    double steps = runcase_number(whole.report, "sparse_steps");
    double loaded_whole = runcase_number(whole.report, "bytes_loaded");
    assert_true(loaded_whole * steps == reloaded * (steps - 1));
    assert_true(runcase_number(whole.report, "bytes_if_reloaded") == reloaded);
    runcase_free(&elastic);
    runcase_free(&whole);
}

static void expect_equal_lists(const json_t *a, const json_t *b, size_t count)
{
    const json_t *x = runcase_field(a, "sequences"), *y = runcase_field(b, "sequences");
    assert_int_equal(json_array_size(x), count);
    assert_int_equal(json_array_size(y), count);
    for (size_t i = 0; i < count; i++)
        runcase_expect_equal(json_array_get(x, i), json_array_get(y, i), "tokens");
}

static void test_batch_equals_alone(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase batch, alone;
#define COMMON \
    "--prompts", "tests/vectors/prompts32.jsonl", "-n", "12", "--ignore-eos", "-c", "512", "--budget", "96"
    RUNCASE_RUN(&batch, COMMON);
    RUNCASE_RUN(&alone, COMMON, "--sequences", "1", "--no-prefix");
#undef COMMON
    expect_equal_lists(batch.report, alone.report, 32);
    /* One JSON string a line, in order. */
    size_t lines = 0, at = 0;
    for (char *line = strtok(batch.proc.out.text, "\n"); line; line = strtok(NULL, "\n"), lines++) {
        json_t *text = json_loads(line, JSON_DECODE_ANY, NULL);
        const json_t *one = json_array_get(runcase_field(batch.report, "sequences"), at++);
        assert_true(json_equal(text, runcase_field(one, "text")));
        json_decref(text);
    }
    assert_int_equal(lines, 32);
    runcase_free(&batch);
    runcase_free(&alone);
}

static void test_prefix_is_used_again(void **state)
{
    (void)state;
    runcase_need_model();
    char path[PATH_MAX];
    json_t *text =
        json_string("The sea was calm and the wind was light, and nobody on the ship thought of what was "
                    "to come. The captain stood at the rail and looked to the west, where the sky was "
                    "red, and he said to the mate that they would be home before the week was out. The "
                    "mate said nothing. He had sailed these waters for thirty years, and he knew that "
                    "a red sky in the west may mean one thing to a farmer and another to a sailor.");
    char *line = json_dumps(text, JSON_ENCODE_ANY), both[4096];
    snprintf(both, sizeof both, "%s\n%s\n", line, line);
    snprintf(path, sizeof path, "%s", runcase_path("twice.jsonl"));
    temp_write(path, both);
    struct runcase used, unused;
    RUNCASE_RUN(&used, "--prompts", path, "-n", "16", "--ignore-eos", "--sequences", "1");
    RUNCASE_RUN(&unused, "--prompts", path, "-n", "16", "--ignore-eos", "--sequences", "1", "--no-prefix");
    expect_equal_lists(used.report, unused.report, 2);
    const json_t *first = json_array_get(runcase_field(used.report, "sequences"), 0);
    const json_t *second = json_array_get(runcase_field(used.report, "sequences"), 1);
    runcase_expect_equal(first, second, "tokens");
    assert_int_equal((int)runcase_number(first, "cached_tokens"), 0);
    assert_int_equal((int)runcase_number(second, "cached_tokens"), 64);
    const json_t *never = json_array_get(runcase_field(unused.report, "sequences"), 1);
    assert_int_equal((int)runcase_number(never, "cached_tokens"), 0);
    json_decref(text);
    runcase_free(&used);
    runcase_free(&unused);
}

static void test_seed(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase a, b, other;
    RUNCASE_RUN(&a, "-p", "My favourite", "-n", "24", "--ignore-eos", "--temp", "1", "--seed", "7");
    RUNCASE_RUN(&b, "-p", "My favourite", "-n", "24", "--ignore-eos", "--temp", "1", "--seed", "7", "--cores",
                "1");
    RUNCASE_RUN(&other, "-p", "My favourite", "-n", "24", "--ignore-eos", "--temp", "1", "--seed", "8");
    runcase_expect_equal(a.report, b.report, "tokens");
    assert_false(json_equal(runcase_field(a.report, "tokens"), runcase_field(other.report, "tokens")));
    runcase_free(&a);
    runcase_free(&b);
    runcase_free(&other);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_processes),
        cmocka_unit_test(test_full_equals_a_budget_of_the_context),
        cmocka_unit_test(test_residency_current),
        cmocka_unit_test(test_residency_previous),
        cmocka_unit_test(test_residency_mixed),
        cmocka_unit_test(test_threshold_in_mid_generation),
        cmocka_unit_test(test_elastic_loading),
        cmocka_unit_test(test_batch_equals_alone),
        cmocka_unit_test(test_prefix_is_used_again),
        cmocka_unit_test(test_seed),
    };
    return cmocka_run_group_tests(tests, runcase_set_up, runcase_tear_down);
}
