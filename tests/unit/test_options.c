/* Option tables: defaults, forms, ranges, refusals that name the option, and rules between options of
 * `run`. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "launch/run_options.h"

#define PARSE(...) \
    parse((const char *[]){"run", __VA_ARGS__}, sizeof(const char *[]){"run", __VA_ARGS__} / sizeof(char *))

static struct run_options options;
static struct err err;

static int parse(const char *const *argv, size_t argc)
{
    err = (struct err){0};
    return run_options_parse((int)argc, (char **)(uintptr_t)argv, &options, &err);
}

static void test_defaults(void **state)
{
    (void)state;
    assert_int_equal(PARSE("-m", "x.gguf", "-p", "hello"), 0);
    assert_string_equal(options.model, "x.gguf");
    assert_string_equal(options.prompt, "hello");
    assert_null(options.head);
    assert_int_equal(options.tokens, 256);
    assert_int_equal(options.budget, 1024);
    assert_int_equal(options.sinks, 4);
    assert_int_equal(options.window, 64);
    assert_int_equal(options.attention, RUN_SPARSE);
    assert_true(options.temperature == 0);
    assert_int_equal(options.top_k, 40);
    assert_int_equal(options.seed, -1);
    assert_string_equal(run_options_selection_name(&options), "current");
    assert_string_equal(run_options_attention_name(&options), "sparse");
    assert_int_equal(options.log, LOG_LEVEL_WARN);
    assert_string_equal(run_options_pool_name(&options), "head");
    assert_string_equal(run_options_keys_name(&options), "auto");
    assert_false(run_options_keys_int8(&options));
}

/* Of 8 bits where the retriever is on a GPU, unless the option says otherwise. */
static void test_key_type(void **state)
{
    (void)state;
    assert_int_equal(PARSE("-m", "x", "-p", "y", "--key-type", "int8"), 0);
    assert_true(run_options_keys_int8(&options));
    assert_string_equal(run_options_keys_name(&options), "int8");
    assert_int_equal(PARSE("-m", "x", "-p", "y", "--device", "cuda:0"), 0);
    assert_true(run_options_keys_int8(&options));
    assert_int_equal(PARSE("-m", "x", "-p", "y", "--device", "cuda:0", "--retriever-device", "cpu"), 0);
    assert_false(run_options_keys_int8(&options));
    assert_int_equal(PARSE("-m", "x", "-p", "y", "--retriever-device", "cuda:1", "--key-type", "f16"), 0);
    assert_false(run_options_keys_int8(&options));
}

static void test_forms(void **state)
{
    (void)state;
    assert_int_equal(PARSE("--model=a=b", "-p", "", "-n", "0", "--device-memory", "1.5G", "--selection",
                           "mixed", "--no-elastic", "--temp", "0.8", "-n", "7", "--pool", "mean", "--seed",
                           "12"),
                     0);
    assert_string_equal(options.model, "a=b");
    assert_string_equal(options.prompt, "");
    assert_int_equal(options.tokens, 7); /* the last one counts */
    assert_true(options.device_memory == 3 * (UINT64_C(1) << 29));
    assert_string_equal(run_options_selection_name(&options), "mixed");
    assert_string_equal(run_options_pool_name(&options), "mean");
    assert_true(options.no_elastic);
    assert_false(options.no_prefix);
    assert_true(options.temperature > 0.79f && options.temperature < 0.81f);
    assert_int_equal(options.seed, 12);
}

static void test_prompt_that_looks_like_an_option(void **state)
{
    (void)state;
    assert_int_equal(PARSE("-m", "x", "-p", "--help"), 0);
    assert_string_equal(options.prompt, "--help");
}

static void test_help(void **state)
{
    (void)state;
    assert_int_equal(PARSE("-h"), 1);
    assert_int_equal(PARSE("-m", "x", "--help"), 1);
}

/* Each command line with the option that the message must name. */
static void test_refusals(void **state)
{
    (void)state;
    static const char *const cases[][3] = {
        {"--bogus", NULL, "--bogus"},
        {"word", NULL, "word"},
        {"-n", NULL, "--predict"},
        {"-n", "x", "--predict"},
        {"-n", "-1", "--predict"},
        {"-n", "4294967296", "--predict"},
        {"--budget", "1e3", "--budget"},
        {"--budget", "69", "--budget"},
        {"--temp", "nan", "--temp"},
        {"--temp", "inf", "--temp"},
        {"--temp", "-1", "--temp"},
        {"--repeat-penalty", "0", "--repeat-penalty"},
        {"--presence-penalty", "-3", "--presence-penalty"},
        {"--top-p", "1.5", "--top-p"},
        {"--top-p", "", "--top-p"},
        {"--min-p", "x", "--min-p"},
        {"--selection", "next", "--selection"},
        {"--attention", "", "--attention"},
        {"--device-memory", "64Q", "--device-memory"},
        {"--seed", "-2", "--seed"},
        {"--no-elastic=1", NULL, "--no-elastic"},
        {"--prompts", "x", "--prompts"},
        {"--system", "x", "--system"},
        {"-c", "1", "--ctx-size"},
        {"--sequences", "65", "--sequences"},
        {"--max-budget", "1048577", "--max-budget: found '1048577', expected a number from 0 to 1048576"},
        {"--device", "cuda:", "--device: found cuda:, "},
        {"--device", "cuda:x", "--device: found cuda:x, "},
        {"--device", "cuda:-1", "--device: found cuda:-1, "},
        {"--device", "cuda:99999", "--device: found cuda:99999, "},
        {"--device", "cuda0", "--device: found cuda0, "},
        {"--device", "GPU-", "--device: found GPU-, "},
        {"--retriever-device", "cuda: 1", "--retriever-device: found cuda: 1, "},
        {"--key-type", "int4", "--key-type: found 'int4', expected one of auto|f16|int8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *argv[] = {"run", "-m", "x", "-p", "y", cases[i][0], cases[i][1]};
        int r = parse(argv, cases[i][1] ? 7 : 6);
        if (r != -EINVAL || !strstr(err.text, cases[i][2]))
            fail_msg("%s %s: found %d '%s'", cases[i][0], cases[i][1] ? cases[i][1] : "", r, err.text);
    }
}

/* Words that are no options, wherever they stand, are told apart from arguments; a table without a place for
 * them refuses them. */
static void test_words(void **state)
{
    (void)state;
    struct values {
        struct option_words words;
        const char *text;
        bool flag;
    } values = {0};
    const struct option_entry table[] = {
        {.name = "", .kind = OPTION_WORDS, .at = offsetof(struct values, words)},
        {.name = "text", .letter = 't', .kind = OPTION_TEXT, .at = offsetof(struct values, text)},
        {.name = "flag", .kind = OPTION_FLAG, .at = offsetof(struct values, flag)},
        {0}};
    char *argv[] = {(char[]){"x"}, (char[]){"a"},      (char[]){"-t"}, (char[]){"b"},
                    (char[]){""},  (char[]){"--flag"}, (char[]){"c"},  NULL};
    assert_int_equal(options_parse(table, 7, argv, &values, &err), 0);
    assert_int_equal(values.words.count, 3);
    assert_string_equal(values.words.at[0], "a");
    assert_string_equal(values.words.at[1], "");
    assert_string_equal(values.words.at[2], "c");
    assert_string_equal(values.text, "b");
    assert_true(values.flag);
    char *none[] = {argv[0], (char[]){"--"}, NULL};
    assert_int_equal(options_parse(table, 2, none, &values, &err), -EINVAL);
    assert_int_equal(values.words.count, 0);
    char *word[] = {argv[0], (char[]){"a"}, NULL};
    assert_int_equal(options_parse(table + 1, 2, word, &values, &err), -EINVAL);
    assert_string_equal(err.text, "unknown argument 'a'");
}

/* In a context that the budget holds whole, sinks, window and the token itself fit into the budget. */
static void test_lists_of_a_short_context(void **state)
{
    (void)state;
    static const uint32_t contexts[] = {2, 3, 5, 6, 64, 68, 69, 70, 1023, 1024, 1025, 8192};
    assert_int_equal(PARSE("-m", "x", "-p", "y"), 0);
    for (size_t i = 0; i < sizeof contexts / sizeof *contexts; i++) {
        struct run_lists l = run_options_lists(&options, contexts[i]);
        assert_int_equal(l.budget, contexts[i] < 1024 ? contexts[i] : 1024);
        assert_true(l.sinks + l.window + 1 <= l.budget);
        assert_true(contexts[i] < 69 || (l.sinks == 4 && l.window == 64));
    }
}

static void test_what_must_be_there(void **state)
{
    (void)state;
    assert_int_equal(PARSE("-p", "x"), -EINVAL);
    assert_non_null(strstr(err.text, "--model"));
    assert_int_equal(PARSE("-m", "x"), -EINVAL);
    assert_non_null(strstr(err.text, "--prompt"));
    assert_int_equal(PARSE("-m", "x", "--prompts", "y"), 0);
    assert_int_equal(PARSE("-m", "x", "-p", "y", "--budget", "10", "--attention", "full"), 0);
}

/* The help is made from the table: each shown option with its default, hidden ones not. */
static void test_help_text(void **state)
{
    (void)state;
    char *text = NULL;
    size_t bytes;
    FILE *to = open_memstream(&text, &bytes);
    run_options_help(to);
    fclose(to);
    static const char *const wanted[] = {"-m, --model FILE",     "--budget N",   "[1024]",
                                         "sparse|full [sparse]", "\nSampling\n", "--min-p P",
                                         "--report FILE"};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (!strstr(text, wanted[i]))
            fail_msg("the help lacks '%s'", wanted[i]);
    assert_null(strstr(text, "poison"));
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n"))
        if (strlen(line) > 120)
            fail_msg("a line of the help is too long: %s", line);
    free(text);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_key_type),
        cmocka_unit_test(test_forms),
        cmocka_unit_test(test_prompt_that_looks_like_an_option),
        cmocka_unit_test(test_help),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_lists_of_a_short_context),
        cmocka_unit_test(test_what_must_be_there),
        cmocka_unit_test(test_help_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
