/* Ends of every kind while a run is busy: each part killed, each part stopped, the command line itself
 * killed, Ctrl-C once and twice. All must be over within 5 seconds (on a machine that is not busy otherwise),
 * name the part, and leave nothing behind. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "link/bus.h"
#include "tests/lib/runcase.h"

#define BOUND_NS      runcase_bound_ns(5 * CLOCK_S)
#define STOP_BOUND_NS runcase_bound_ns(6 * CLOCK_S) /* noticed within 5 seconds, and the end of the others */

static const char *const names[RUNCASE_PARTS] = {"specontext-kvstore", "specontext-retriever",
                                                 "specontext-decoder"};

/* A run that would go on for minutes, at its first byte of text. */
static void begin_busy(struct runcase *c)
{
    RUNCASE_START(c, "-p", "Once upon a time", "-n", "6000", "--ignore-eos", "--budget", "128");
    runcase_wait_text(c);
    runcase_find_parts(c);
}

static void expect_named(const struct runcase *c, const char *part, const char *cause)
{
    const char *text = c->proc.err.text ? c->proc.err.text : "";
    if (!strstr(text, part) || !strstr(text, cause))
        fail_msg("expected '%s' and '%s' in: %s", part, cause, text);
}

static void kill_part(enum runcase_part part)
{
    runcase_need_model();
    struct runcase c;
    begin_busy(&c);
    kill(c.parts[part], SIGKILL);
    runcase_end(&c, 1, clock_now_ns() + BOUND_NS);
    char pid[32], line[128];
    snprintf(pid, sizeof pid, "(pid %d)", (int)c.parts[part]);
    snprintf(line, sizeof line, "specontext: %s %s was ended by signal 9", names[part], pid);
    expect_named(&c, line, "signal 9");
    for (int i = 0; i < RUNCASE_PARTS; i++)
        assert_true(proc_gone(c.parts[i]));
    /* What was generated before is not lost. */
    assert_non_null(c.report);
    assert_true(json_array_size(runcase_field(c.report, "tokens")) > 0);
    assert_non_null(strstr(json_string_value(runcase_field(c.report, "error")), names[part]));
    runcase_free(&c);
}

static void test_kill_kvstore(void **state)
{
    (void)state;
    kill_part(RUNCASE_KVSTORE);
}

static void test_kill_retriever(void **state)
{
    (void)state;
    kill_part(RUNCASE_RETRIEVER);
}

static void test_kill_decoder(void **state)
{
    (void)state;
    kill_part(RUNCASE_DECODER);
}

static void test_kill_command_line(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    begin_busy(&c);
    int64_t deadline_ns = clock_now_ns() + BOUND_NS;
    kill(c.proc.pid, SIGKILL);
    assert_true(proc_wait(&c.proc, deadline_ns));
    assert_true(proc_wait_gone(c.parts, RUNCASE_PARTS, deadline_ns));
    runcase_no_remains();
    runcase_free(&c);
}

static void stop_part(enum runcase_part part)
{
    runcase_need_model();
    struct runcase c;
    begin_busy(&c);
    kill(c.parts[part], SIGSTOP);
    runcase_end(&c, 1, clock_now_ns() + STOP_BOUND_NS);
    expect_named(&c, names[part], "stopped by signal 19");
    for (int i = 0; i < RUNCASE_PARTS; i++)
        assert_true(proc_gone(c.parts[i]));
    runcase_free(&c);
}

static void test_stop_kvstore(void **state)
{
    (void)state;
    stop_part(RUNCASE_KVSTORE);
}

static void test_stop_retriever(void **state)
{
    (void)state;
    stop_part(RUNCASE_RETRIEVER);
}

static void test_stop_decoder(void **state)
{
    (void)state;
    stop_part(RUNCASE_DECODER);
}

/* Decoding goes on for as long as the stop; under sanitizers a few tokens a second are all there are. */
#ifdef __SANITIZE_ADDRESS__
#define STOP_TOKENS "80"
#else
#define STOP_TOKENS "400"
#endif

/* The command line stopped for longer than a peer may be silent: nobody is lost, and the answer is whole. */
static void test_stop_command_line(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    RUNCASE_START(&c, "-p", "Count to a thousand.", "-n", STOP_TOKENS, "--ignore-eos");
    int64_t start_ns = clock_now_ns(), deadline_ns = start_ns + RUNCASE_START_S * CLOCK_S;
    while (!c.proc.out.bytes)
        assert_true(proc_pump(&c.proc, deadline_ns));
    kill(c.proc.pid, SIGSTOP);
    assert_false(proc_wait(&c.proc, clock_now_ns() + BUS_SILENCE_NS + CLOCK_S));
    kill(c.proc.pid, SIGCONT);
    runcase_end(&c, 0, clock_now_ns() + RUNCASE_START_S * CLOCK_S);
    char tokens[24];
    snprintf(tokens, sizeof tokens, "%.0f", runcase_number(c.report, "generated_tokens"));
    assert_string_equal(tokens, STOP_TOKENS);
    runcase_free(&c);
}

static void interrupt(int number)
{
    runcase_need_model();
    struct runcase c;
    begin_busy(&c);
    kill(c.proc.pid, number);
    runcase_end(&c, 130, clock_now_ns() + BOUND_NS);
    expect_named(&c, "decode:", "tokens/s");
    assert_non_null(c.report);
    assert_string_equal(json_string_value(runcase_field(c.report, "finish_reason")), "cancelled");
    assert_int_equal(json_array_size(runcase_field(c.report, "tokens")),
                     (size_t)runcase_number(c.report, "generated_tokens"));
    assert_true(runcase_number(c.report, "generated_tokens") > 0);
    assert_memory_equal(c.proc.out.text, json_string_value(runcase_field(c.report, "text")),
                        json_string_length(runcase_field(c.report, "text")));
    runcase_free(&c);
}

static void test_interrupt(void **state)
{
    (void)state;
    interrupt(SIGINT);
}

static void test_terminate(void **state)
{
    (void)state;
    interrupt(SIGTERM);
}

/* The second signal does not wait for last words, even from a decoder that cannot give any. */
static void test_interrupt_twice(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    begin_busy(&c);
    kill(c.parts[RUNCASE_DECODER], SIGSTOP);
    kill(c.proc.pid, SIGINT);
    kill(c.proc.pid, SIGTERM);
    runcase_end(&c, 130, clock_now_ns() + runcase_bound_ns(1500 * CLOCK_MS));
    runcase_free(&c);
}

static void test_interrupt_while_loading(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    RUNCASE_START(&c, "-p", "x", "--log", "debug");
    int64_t deadline_ns = clock_now_ns() + RUNCASE_START_S * CLOCK_S;
    while (!c.proc.err.text || !strstr(c.proc.err.text, "runtime directory"))
        assert_true(proc_pump(&c.proc, deadline_ns));
    kill(c.proc.pid, SIGINT);
    runcase_end(&c, 130, clock_now_ns() + BOUND_NS);
    runcase_free(&c);
}

/* A run in the midst of a long prompt: no text yet. */
static void begin_prefill(struct runcase *c)
{
    RUNCASE_START(c, "-f", "tests/vectors/demo/document.txt", "-n", "8", "--log", "debug");
    int64_t deadline_ns = clock_now_ns() + RUNCASE_START_S * CLOCK_S;
    while (!c->proc.err.text || !strstr(c->proc.err.text, "specontext: ready after"))
        assert_true(proc_pump(&c->proc, deadline_ns));
    runcase_find_parts(c);
    assert_int_equal(c->proc.out.bytes, 0);
}

static void test_interrupt_in_prefill(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    begin_prefill(&c);
    kill(c.proc.pid, SIGINT);
    runcase_end(&c, 130, clock_now_ns() + BOUND_NS);
    assert_int_equal(c.proc.out.bytes, 0);
    assert_true(json_is_null(json_object_get(c.report, "prefill_tokens_per_s")));
    assert_null(strstr(c.proc.err.text, " cached), ")); /* nor does a rate stand on the terminal */
    runcase_free(&c);
}

static void test_kill_in_prefill(void **state)
{
    (void)state;
    runcase_need_model();
    for (int part = 0; part < RUNCASE_PARTS; part++) {
        struct runcase c;
        begin_prefill(&c);
        kill(c.parts[part], SIGKILL);
        runcase_end(&c, 1, clock_now_ns() + BOUND_NS);
        expect_named(&c, names[part], "was ended by signal 9");
        runcase_free(&c);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kill_kvstore),
        cmocka_unit_test(test_kill_retriever),
        cmocka_unit_test(test_kill_decoder),
        cmocka_unit_test(test_kill_command_line),
        cmocka_unit_test(test_stop_kvstore),
        cmocka_unit_test(test_stop_retriever),
        cmocka_unit_test(test_stop_decoder),
        cmocka_unit_test(test_stop_command_line),
        cmocka_unit_test(test_interrupt),
        cmocka_unit_test(test_terminate),
        cmocka_unit_test(test_interrupt_twice),
        cmocka_unit_test(test_interrupt_while_loading),
        cmocka_unit_test(test_interrupt_in_prefill),
        cmocka_unit_test(test_kill_in_prefill),
    };
    return cmocka_run_group_tests(tests, runcase_set_up, runcase_tear_down);
}
