/* What the command line refuses and how: exit codes, one line that says what is wrong, nothing left
 * behind. And `specontext status` on a run that is busy. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/features.h"
#include "tests/lib/runcase.h"
#include "tests/lib/temp.h"

#define SHORT_NS (RUNCASE_START_S * CLOCK_S)

/* Runs `specontext` with the arguments; the exit code and a part of standard error must be as told, and a
 * refusal of options must begin with our name: one line a fault, none of the C library's. */
static void expect(int code, const char *text, const char *const *arguments)
{
    const char *argv[24] = {proc_program("specontext")};
    for (int i = 0; arguments[i]; i++)
        argv[i + 1] = arguments[i];
    struct proc p;
    proc_start(&p, argv, NULL);
    assert_true(proc_wait(&p, clock_now_ns() + SHORT_NS));
    const char *err = p.err.text ? p.err.text : "";
    bool ours = code != 2 || !strncmp(err, "specontext", 10) || !strncmp(err, "Usage", 5);
    if (!proc_exited(&p, code) || !strstr(err, text) || !ours)
        fail_msg("expected exit code %d and '%s', found status %x and '%s'", code, text, p.status, err);
    proc_free(&p);
}
#define EXPECT(code, text, ...) expect(code, text, (const char *const[]){__VA_ARGS__, NULL})

static void test_usage(void **state)
{
    (void)state;
    EXPECT(2, "Usage", NULL);
    EXPECT(2, "'bogus'", "bogus");
    EXPECT(2, "--model", "run");
    EXPECT(2, "--bogus", "run", "--bogus");
    EXPECT(2, "--predict", "run", "-m", "x", "-p", "y", "-n", "many");
    EXPECT(2, "--min-mass", "run", "-m", "x", "-p", "y", "--min-mass", "1.5");
    EXPECT(2, "--min-mass", "run", "-m", "x", "-p", "y", "--min-mass", "nan");
    EXPECT(2, "--budget-top-p", "run", "-m", "x", "-p", "y", "--budget-top-p", "-0.1");
    EXPECT(2, "--max-budget: only with --min-mass", "run", "-m", "x", "-p", "y", "--max-budget", "2048");
    EXPECT(2, "--max-budget: found 1023, expected 0 or at least --budget (1024)", "run", "-m", "x", "-p", "y",
           "--min-mass", "0.5", "--max-budget", "1023");
    EXPECT(2, "--min-mass: not together with --attention full", "run", "-m", "x", "-p", "y", "--min-mass",
           "0.5", "--attention", "full");
    EXPECT(2, "--max-budget: only with --min-mass", "bench", "-m", "x", "--max-budget", "2048");
    EXPECT(2, "--cores: found 1024, expected at most ", "run", "-m", "x", "-p", "y", "--cores", "1024");
    EXPECT(2, "--cores: found 1024, expected at most ", "bench", "-m", "x", "--cores", "1024");
    EXPECT(2, "--cores: found 1024, expected at most ", "eval", "-m", "x", "-f", "y", "--cores", "1024");
    EXPECT(2, "--write-through: found 'some', expected one of all|offloaded", "run", "-m", "x", "-p", "y",
           "--write-through", "some");
    EXPECT(2, "--write-through: found 'some', expected one of all|offloaded", "bench", "-m", "x",
           "--write-through", "some");
    EXPECT(2, "--write-through: found 'some', expected one of all|offloaded", "plan", "--write-through",
           "some");
    EXPECT(2, "--write-through offloaded: a prefill at a depth", "bench", "-m", "x", "-d", "0,64",
           "--write-through", "offloaded");
    EXPECT(2, "--bogus", "status", "--bogus");
    EXPECT(2, "specontext inspect: unknown option '--bogus'\n", "inspect", "--bogus");
    EXPECT(2, "specontext tokenize: --model: its argument MODEL is missing\n", "tokenize", "-m");
    EXPECT(2, "specontext detokenize: unknown option '-1'\n", "detokenize", "-m", "x", "-1");
    EXPECT(2, "specontext head: unknown option '-Xo'\n", "head", "inspect", "-Xo");
    EXPECT(2, "specontext plan: unknown option '--bogus';", "plan", "--bogus");
    EXPECT(2, "specontext plan: --context: found '0', expected a number from 1 to 1048576;", "plan",
           "--context", "0");
    EXPECT(2, "specontext plan: --ctx-size: found 'x', expected a number from 1 to 1048576;", "plan", "-c",
           "x");
    EXPECT(2, "specontext plan: --gpu-memory: found '2Z', expected a size such as 64M or 2G;", "plan",
           "--gpu-memory", "2Z");
    EXPECT(1, "specontext status: /nowhere: No such file or directory\n", "status", "--runtime", "/nowhere");
    EXPECT(1, "specontext status: /dev/null: Not a directory\n", "status", "--runtime", "/dev/null",
           "--json");
    EXPECT(0, "", "--help");
    EXPECT(0, "", "run", "--help");
    EXPECT(0, "", "help", "status");
    EXPECT(0, "", "version");
}

/* What tells something and cannot has failed. */
static void test_full_output(void **state)
{
    (void)state;
    char command[PATH_MAX + 64];
    snprintf(command, sizeof command, "exec '%s' help >/dev/full", proc_program("specontext"));
    const char *argv[] = {"/bin/sh", "-c", command, NULL};
    struct proc p;
    proc_start(&p, argv, NULL);
    assert_true(proc_wait(&p, clock_now_ns() + SHORT_NS));
    if (!proc_exited(&p, 1) || !p.err.text || !strstr(p.err.text, "standard output: No space left"))
        fail_msg("found status %x and '%s'", p.status, p.err.text ? p.err.text : "");
    proc_free(&p);
}

static void expect_few_files(const char *program, const char *arguments)
{
    char command[PATH_MAX + 128];
    snprintf(command, sizeof command, "ulimit -n 20; exec '%s' %s", proc_program(program), arguments);
    const char *argv[] = {"/bin/sh", "-c", command, NULL};
    struct proc p;
    proc_start(&p, argv, NULL);
    assert_true(proc_wait(&p, clock_now_ns() + SHORT_NS));
    if (!proc_exited(&p, 1) || !p.err.text ||
        !strstr(p.err.text, "open files (ulimit -n): found a limit of 20"))
        fail_msg("%s: found status %x and '%s'", program, p.status, p.err.text ? p.err.text : "");
    proc_free(&p);
}

static void test_few_open_files(void **state)
{
    (void)state;
    runcase_need_model();
    char arguments[2 * PATH_MAX];
    snprintf(arguments, sizeof arguments, "run -m '%s' -p hi -n 2", RUNCASE_MODEL);
    expect_few_files("specontext", arguments);
    snprintf(arguments, sizeof arguments, "--runtime '%s'", runcase_path("few"));
    expect_few_files("specontext-kvstore", arguments);
}

static void test_bad_input(void **state)
{
    (void)state;
    runcase_need_model();
    char bad[PATH_MAX], list[PATH_MAX], longer[PATH_MAX];
    snprintf(bad, sizeof bad, "%s", runcase_path("bad.txt"));
    snprintf(list, sizeof list, "%s", runcase_path("bad.jsonl"));
    snprintf(longer, sizeof longer, "%s", runcase_document(20000));
    temp_write(bad, "abc\xff");
    temp_write(list, "\"good\"\n{}\n");
    EXPECT(1, "no-such-model", "run", "-m", "no-such-model", "-p", "x");
    EXPECT(1, "no-such-file", "run", "-m", RUNCASE_MODEL, "-f", "no-such-file");
    EXPECT(1, "byte 3 of 4 is no valid UTF-8", "run", "-m", RUNCASE_MODEL, "-f", bad);
    EXPECT(1, "bad.jsonl:2: not a JSON string", "run", "-m", RUNCASE_MODEL, "--prompts", list);
    EXPECT(1, "the context of 512 positions", "run", "-m", RUNCASE_MODEL, "-f", longer, "-c", "512");
    EXPECT(1, "the prompt: it is empty", "run", "-m", RUNCASE_MODEL, "-p", "");
    EXPECT(1, "--ctx-size", "run", "-m", RUNCASE_MODEL, "-p", "x", "-c", "9000");
    EXPECT(1, "README.md", "run", "-m", "README.md", "-p", "x");
}

/* What a command that succeeds prints. */
static json_t *json_of(const char *const *argv)
{
    struct proc p;
    proc_start(&p, argv, NULL);
    assert_true(proc_wait(&p, clock_now_ns() + SHORT_NS));
    assert_true(proc_exited(&p, 0));
    json_t *all = json_loads(p.out.text, 0, NULL);
    assert_non_null(all);
    proc_free(&p);
    return all;
}

/* What a model is, with the head that `run` would take: the one that comes along, or none. */
static void test_inspect(void **state)
{
    (void)state;
    runcase_need_model();
    json_t *all =
        json_of((const char *[]){proc_program("specontext"), "inspect", RUNCASE_MODEL, "--json", NULL});
    json_t *head = json_object_get(all, "head");
    assert_string_equal(json_string_value(json_object_get(all, "attention")), "GQA");
    assert_int_equal(json_integer_value(json_object_get(all, "kv_bytes_per_token")), 30 * 3 * 64 * 2 * 2);
    assert_int_equal(json_integer_value(json_object_get(head, "groups")), 8);
    assert_string_equal(json_string_value(json_object_get(head, "features")), "target");
    const char *path = json_string_value(json_object_get(head, "path"));
    char real[PATH_MAX];
    assert_non_null(realpath("heads/SmolLM2-135M-Instruct.safetensors", real));
    assert_string_equal(path, real);
    json_decref(all);
    EXPECT(0, "", "inspect", RUNCASE_MODEL, "--memory", "1G");
    EXPECT(1, "", "inspect", RUNCASE_MODEL, "--memory", "100M");
}

static uint64_t term(const json_t *gpu, const char *name)
{
    const json_t *value = json_object_get(gpu, name);
    assert_true(json_is_integer(value));
    return (uint64_t)json_integer_value(value);
}

/* Every byte of a card is somebody's, the rows of hidden states that a head reads among them. */
static void test_plan_of_a_card(void **state)
{
    (void)state;
    runcase_need_model();
    const char *const heads[] = {"heads/alternatives/SmolLM2-135M-Instruct.embedding2.safetensors",
                                 "heads/SmolLM2-135M-Instruct.safetensors"};
    for (int i = 0; i < 2; i++) {
        json_t *all = json_of((const char *[]){proc_program("specontext"), "plan", "-m", RUNCASE_MODEL,
                                               "--head", heads[i], "--gpu-memory", "8G", "-c", "1000",
                                               "--context", "1000", "--requests", "2", "--json", NULL});
        const json_t *gpu = json_object_get(all, "gpu");
        /* 1008 positions for 1000, a scale for each key of 64 numbers; 8 bytes a sequence more. */
        assert_int_equal((term(gpu, "retriever_keys_bytes") - 16) % (UINT64_C(2) * 3 * 1008 * 66), 0);
        assert_int_equal(term(gpu, "features_bytes"), i ? features_bytes(1000, 3, 576, DTYPE_BF16) : 0);
        assert_int_equal(term(gpu, "kvstore_process_bytes") + term(gpu, "retriever_process_bytes") +
                             term(gpu, "decoder_process_bytes") + term(gpu, "mapping_bytes"),
                         UINT64_C(8) << 30);
        json_decref(all);
    }
}

/* README.md names every field of a report. */
static void test_report_is_documented(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    RUNCASE_START(&c, "-p", "x", "-n", "1");
    runcase_end(&c, 0, clock_now_ns() + SHORT_NS);
    FILE *from = fopen("README.md", "re");
    assert_non_null(from);
    static char text[1 << 16];
    size_t bytes = fread(text, 1, sizeof text - 1, from);
    fclose(from);
    text[bytes] = 0;
    char *begin = strstr(text, "### The report"), *end = begin ? strstr(begin, "### Exit codes") : NULL;
    assert_non_null(end);
    *end = 0;
    const char *name;
    json_t *value;
    json_object_foreach(c.report, name, value)
    {
        char quoted[64];
        snprintf(quoted, sizeof quoted, "`%s`", name);
        if (!strstr(begin, quoted))
            fail_msg("README.md: the report: %s is not there", quoted);
    }
    runcase_free(&c);
}

/* A head that is none: the retriever says so, and the part is named. */
static void test_bad_head(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    RUNCASE_START(&c, "-p", "x", "-H", "README.md");
    runcase_end(&c, 1, clock_now_ns() + SHORT_NS);
    assert_non_null(strstr(c.proc.err.text, "specontext: specontext-retriever (pid"));
    const char *last = strstr(c.proc.err.text, "while starting: "); /* the last line has the cause, too */
    assert_non_null(last);
    assert_non_null(strstr(last, "README.md"));
    assert_null(c.report);
    runcase_free(&c);
}

/* Where no report can be written nothing is started; what is no file is not replaced by one. */
static void test_report_places(void **state)
{
    (void)state;
    runcase_need_model();
    char fifo[PATH_MAX];
    struct stat st;
    snprintf(fifo, sizeof fifo, "%s", runcase_path("report.fifo"));
    assert_int_equal(mkfifo(fifo, 0600), 0);
    EXPECT(1, "--report: /no-such/x: No such file", "run", "-m", RUNCASE_MODEL, "-p", "x", "--report",
           "/no-such/x");
    EXPECT(1, "--report: /: Is a directory", "run", "-m", RUNCASE_MODEL, "-p", "x", "--report", "/");
    EXPECT(1, "report.fifo: No such device", "run", "-m", RUNCASE_MODEL, "-p", "x", "-n", "1", "--report",
           fifo);
    EXPECT(0, "", "run", "-m", RUNCASE_MODEL, "-p", "x", "-n", "1", "--report", "/dev/stderr");
    assert_int_equal(stat(fifo, &st), 0);
    assert_true(S_ISFIFO(st.st_mode));
}

/* Memory that cannot hold the prompt: refused with numbers, not a hang. */
static void test_too_little_memory(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    RUNCASE_START(&c, "-f", runcase_document(3000), "-n", "8", "--host-memory", "1M");
    runcase_end(&c, 1, clock_now_ns() + SHORT_NS);
    assert_non_null(c.proc.err.text);
    if (!strpbrk(c.proc.err.text, "0123456789") || !strstr(c.proc.err.text, "specontext: "))
        fail_msg("no numbers in: %s", c.proc.err.text);
    runcase_free(&c);
}

/* Contexts shorter than sinks and window. */
static void test_short_context(void **state)
{
    (void)state;
    runcase_need_model();
    EXPECT(0, "", "run", "-m", RUNCASE_MODEL, "-p", "Once upon", "-n", "8", "-c", "8");
    EXPECT(0, "", "run", "-m", RUNCASE_MODEL, "-p", "Once upon", "-n", "40", "-c", "32", "--ignore-eos",
           "--min-mass", "0.9");
    EXPECT(0, "", "bench", "-m", RUNCASE_MODEL, "-p", "16", "-n", "2", "--repeats", "1");
}

/* An answer that ends after the token that the prompt gave: it has no rate, and none is shown. */
static void test_one_token(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    char prompts[PATH_MAX];
    snprintf(prompts, sizeof prompts, "%s", runcase_path("one.jsonl"));
    temp_write(prompts, "\"a\\u0000b\"\n"); /* the model says nothing more */
    RUNCASE_RUN(&c, "--prompts", prompts, "-n", "2");
    const json_t *only = json_array_get(runcase_field(c.report, "sequences"), 0);
    assert_int_equal((int)runcase_number(only, "generated_tokens"), 1);
    assert_non_null(strstr(c.proc.err.text, "decode: "));
    assert_null(strstr(c.proc.err.text, "nan"));
    runcase_free(&c);
}

/* The reader of standard output goes away. */
static void test_closed_output(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    RUNCASE_START(&c, "-p", "Once upon a time", "-n", "6000", "--ignore-eos", "--budget", "128");
    runcase_wait_text(&c);
    close(c.proc.out_fd);
    c.proc.out_fd = -1;
    runcase_end(&c, 1, clock_now_ns() + SHORT_NS);
    assert_non_null(strstr(c.proc.err.text, "standard output: Broken pipe"));
    runcase_free(&c);
}

/* Descriptors that are not there at all: their numbers must not be taken for other things. */
static void test_absent_streams(void **state)
{
    (void)state;
    runcase_need_model();
    static const struct {
        const char *closed;
        int code;
        const char *text;
    } cases[] = {{">&-", 1, "standard output: Bad file descriptor"},
                 {"2>&-", 0, ""},
                 {"<&-", 0, ""},
                 {">/dev/full", 1, "standard output: No space left"},
                 {"<&- >&- 2>&-", 1, ""}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        char line[64];
        snprintf(line, sizeof line, "exec \"$@\" %s", cases[i].closed);
        const char *argv[] = {"/bin/sh", "-c", line,          "sh", proc_program("specontext"),
                              "run",     "-m", RUNCASE_MODEL, "-p", "One",
                              "-n",      "4",  NULL};
        struct proc p;
        proc_start(&p, argv, NULL);
        assert_true(proc_wait(&p, clock_now_ns() + SHORT_NS));
        const char *err = p.err.text ? p.err.text : "";
        if (!proc_exited(&p, cases[i].code) || !strstr(err, cases[i].text))
            fail_msg("%s: found status %x and '%s'", cases[i].closed, p.status, err);
        proc_free(&p);
        runcase_no_remains();
    }
}

static void test_status(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    char dir[PATH_MAX];
    snprintf(dir, sizeof dir, "%s", runcase_path("run/here"));
    RUNCASE_START(&c, "-p", "Once upon a time", "-n", "6000", "--ignore-eos", "--budget", "128", "--runtime",
                  dir);
    runcase_wait_text(&c);
    runcase_find_parts(&c);
    const char *argv[] = {proc_program("specontext"), "status", "--runtime", dir, "--json", NULL};
    struct proc status = {0};
    int64_t deadline_ns = clock_now_ns() + SHORT_NS;
    do { /* on a busy machine a part may not answer within the two seconds that it waits */
        proc_free(&status);
        proc_start(&status, argv, NULL);
        assert_true(proc_wait(&status, deadline_ns));
    } while (!proc_exited(&status, 0) && clock_now_ns() < deadline_ns);
    assert_true(proc_exited(&status, 0));
    json_t *all = json_loads(status.out.text, 0, NULL);
    assert_non_null(all);
    assert_int_equal(json_array_size(runcase_field(all, "missing")), 0);
    assert_true(json_is_object(runcase_field(all, "kvstore")));
    assert_true(json_is_object(runcase_field(all, "retriever")));
    assert_true(json_is_object(runcase_field(all, "decoder")));
    json_decref(all);
    proc_free(&status);
    kill(c.proc.pid, SIGINT);
    runcase_end(&c, 130, clock_now_ns() + SHORT_NS);
    /* Nobody is left: it says so, and ends. */
    proc_start(&status, argv, NULL);
    assert_true(proc_wait(&status, clock_now_ns() + SHORT_NS));
    assert_true(proc_exited(&status, 1));
    all = json_loads(status.out.text, 0, NULL);
    assert_int_equal(json_array_size(runcase_field(all, "missing")), 3);
    json_decref(all);
    proc_free(&status);
    runcase_free(&c);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_usage),
        cmocka_unit_test(test_bad_input),
        cmocka_unit_test(test_few_open_files),
        cmocka_unit_test(test_inspect),
        cmocka_unit_test(test_plan_of_a_card),
        cmocka_unit_test(test_bad_head),
        cmocka_unit_test(test_too_little_memory),
        cmocka_unit_test(test_report_places),
        cmocka_unit_test(test_report_is_documented),
        cmocka_unit_test(test_short_context),
        cmocka_unit_test(test_full_output),
        cmocka_unit_test(test_one_token),
        cmocka_unit_test(test_closed_output),
        cmocka_unit_test(test_absent_streams),
        cmocka_unit_test(test_status),
    };
    return cmocka_run_group_tests(tests, runcase_set_up, runcase_tear_down);
}
