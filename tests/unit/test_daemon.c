/* Command lines of the three daemons, and what ends a daemon from outside. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "decoder/settings.h"
#include "kvstore/store_options.h"
#include "model/head.h"
#include "retriever/arguments.h"

enum { WORDS_MAX = 8 };

static union {
    struct store_options store;
    struct arguments retriever;
    struct settings decoder;
} values;
static struct err err;

enum daemon_name { STORE, RETRIEVER, DECODER };

/* `line`: words with single blanks between them. */
static int parse(enum daemon_name daemon, const char *line)
{
    static char text[256];
    char *argv[WORDS_MAX + 2] = {(char[]){"program"}};
    int argc = 1;
    snprintf(text, sizeof text, "%s", line);
    for (char *word = strtok(text, " "); word && argc <= WORDS_MAX; word = strtok(NULL, " "))
        argv[argc++] = word;
    memset(&err, 0, sizeof err);
    if (daemon == STORE)
        return store_options_parse(argc, argv, &values.store, &err);
    if (daemon == RETRIEVER)
        return arguments_parse(argc, argv, &values.retriever, &err);
    return settings_parse(argc, argv, &values.decoder, &err);
}

static void defaults(void **state)
{
    (void)state;
    assert_int_equal(parse(STORE, ""), 0);
    const struct planner_options *p = &values.store.planner;
    assert_string_equal(values.store.daemon.runtime, RUNTIME_DIR_DEFAULT);
    assert_int_equal(values.store.daemon.lifeline, -1);
    assert_int_equal(values.store.daemon.log, LOG_LEVEL_INFO);
    assert_int_equal(p->device_bytes, UINT64_C(256) << 20);
    assert_true(p->host_bytes > 0 && p->threads >= 1 && p->threads <= 16);
    assert_int_equal(p->sequences, 32);
    assert_false(p->no_elastic || p->no_prefix || p->no_offload || p->poison);

    assert_int_equal(parse(RETRIEVER, "-m a -H b"), 0);
    assert_string_equal(values.retriever.head, "b");
    assert_int_equal(values.retriever.pool, 0);
    assert_int_equal(values.retriever.sequences, 32);
    assert_true(values.retriever.threads >= 1);

    assert_int_equal(parse(DECODER, "-m a"), 0);
    assert_string_equal(values.decoder.model, "a");
    assert_int_equal(values.decoder.chunk, 256);
    assert_int_equal(values.decoder.early_layers, -1);
    assert_int_equal(values.decoder.isa, COMPUTE_ISA_AUTO);
    assert_int_equal(values.decoder.activations, COMPUTE_ACTIVATIONS_F32);
}

static void what_is_said_is_taken(void **state)
{
    (void)state;
    assert_int_equal(parse(STORE, "--lifeline 7 --log debug --host-memory=2G --slots 9 --no-offload"), 0);
    assert_int_equal(values.store.daemon.lifeline, 7);
    assert_int_equal(values.store.daemon.log, LOG_LEVEL_DEBUG);
    assert_int_equal(values.store.planner.host_bytes, UINT64_C(2) << 30);
    assert_int_equal(values.store.planner.slots, 9);
    assert_true(values.store.planner.no_offload);
    assert_int_equal(parse(RETRIEVER, "-m a -H b --pool mean --threads 3"), 0);
    assert_int_equal(values.retriever.pool, 1 + HEAD_POOL_MEAN);
    assert_int_equal(values.retriever.threads, 3);
    assert_int_equal(parse(DECODER, "-m a --isa avx2 --activations q8 --early-layers 0"), 0);
    assert_int_equal(values.decoder.isa, COMPUTE_ISA_AVX2);
    assert_int_equal(values.decoder.activations, COMPUTE_ACTIVATIONS_Q8);
    assert_int_equal(values.decoder.early_layers, 0);
}

static void mistakes(void **state)
{
    (void)state;
    static const struct {
        enum daemon_name daemon;
        const char *line, *text;
    } cases[] = {
        {STORE, "--sequences 0", "--sequences: found '0', expected a number from 1 to "},
        {STORE, "--threads 257", "--threads: found '257', expected a number from 1 to 256"},
        {STORE, "--lifeline -1", "--lifeline: found '-1'"},
        {STORE, "--device-memory lots", "--device-memory: found 'lots', expected a size"},
        {STORE, "--log loud", "--log: found 'loud', expected one of error|warn|info|debug"},
        {STORE, "--what", "unknown option '--what'"},
        {STORE, "word", "unknown argument 'word'"},
        {RETRIEVER, "-H b", "--model is missing"},
        {RETRIEVER, "-m a", "--head is missing"},
        {RETRIEVER, "-m a -H b --pool both", "--pool: found 'both', expected one of head|max|mean"},
        {DECODER, "", "--model is missing"},
        {DECODER, "-m", "--model: its argument FILE is missing"},
        {DECODER, "-m a --chunk 0", "--chunk: found '0', expected a number from 1 to "},
        {DECODER, "-m a --isa sse", "--isa: found 'sse', expected one of auto|reference|avx2|avx512"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(parse(cases[i].daemon, cases[i].line), -EINVAL);
        if (strncmp(err.text, cases[i].text, strlen(cases[i].text)) != 0)
            fail_msg("%s: found '%s', expected '%s'", cases[i].line, err.text, cases[i].text);
    }
}

struct ended {
    struct loop *loop;
    const char *why;
};

static void on_end(void *arg, const char *why)
{
    struct ended *ended = arg;
    ended->why = why;
    loop_stop(ended->loop, 0);
}

static void on_timer(void *arg)
{
    loop_stop(arg, 1);
}

/* Runs a watched loop to its end and expects the reason. */
static void run(const struct daemon_options *options, const char *why)
{
    struct ended ended = {.loop = loop_create()};
    struct daemon daemon = {.loop = ended.loop, .options = options, .end = on_end, .arg = &ended};
    assert_int_equal(daemon_watch(&daemon, &err), 0);
    loop_add_timer(ended.loop, 60 * CLOCK_S, on_timer, ended.loop);
    if (options->lifeline < 0)
        assert_int_equal(kill(getpid(), SIGTERM), 0); /* blocked by now: the loop takes it */
    assert_int_equal(loop_run(ended.loop), 0);
    assert_string_equal(ended.why, why);
    loop_free(&ended.loop);
}

static void a_signal_ends_it(void **state)
{
    (void)state;
    run(&(struct daemon_options){.runtime = "/nonexistent", .lifeline = -1}, "SIGTERM");
}

static void the_end_of_the_lifeline_ends_it(void **state)
{
    (void)state;
    char dir[RUNTIME_PATH_MAX];
    int lifeline[2];
    struct stat st;
    assert_int_equal(runtime_make_private(dir, &err), 0);
    assert_int_equal(runtime_lifeline(lifeline), 0);
    close(lifeline[1]);
    run(&(struct daemon_options){.runtime = dir, .lifeline = lifeline[0]}, "the supervisor is gone");
    close(lifeline[0]);
    assert_int_equal(stat(dir, &st), -1);
}

static void a_lifeline_that_is_none_is_refused(void **state)
{
    (void)state;
    struct loop *loop = loop_create();
    struct daemon_options options = {.runtime = "/nonexistent", .lifeline = 1 << 20};
    struct daemon daemon = {.loop = loop, .options = &options, .end = on_end};
    assert_int_equal(daemon_watch(&daemon, &err), -EBADF);
    assert_non_null(strstr(err.text, "lifeline: descriptor 1048576"));
    loop_free(&loop);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),
        cmocka_unit_test(what_is_said_is_taken),
        cmocka_unit_test(mistakes),
        cmocka_unit_test(a_signal_ends_it),
        cmocka_unit_test(the_end_of_the_lifeline_ends_it),
        cmocka_unit_test(a_lifeline_that_is_none_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
