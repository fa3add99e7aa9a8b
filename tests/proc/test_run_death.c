/* A retriever that is killed while requests run, and started again: in a step that waits for its sets, while
 * messages are on their way to it, in a prompt, at random. Every answer is what it would have been. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/control.h"
#include "tests/lib/daemons.h"
#include "tests/lib/fakegpu.h"

#define FEATURES  "heads/alternatives/SmolLM2-135M-Instruct.features2.safetensors"
#define EMBEDDING "heads/alternatives/SmolLM2-135M-Instruct.embedding2.safetensors"

enum { CHUNK = 32, PROMPT = 48, TOKENS = 10, MODES = 3 };

static uint32_t rounds = 1; /* of random kills; more by the first argument */

static struct daemons daemons; /* large */
static int64_t round_ns;       /* of all requests, undisturbed */

/* One of each mode, the last with a prefix that is kept. */
static void ask(struct daemons *d)
{
    daemons_clear(d);
    for (uint32_t m = 0; m < MODES; m++)
        daemons_ask(d, PROMPT + 16 * m, m, TOKENS + 3 * m, m, m == SELECTION_MIXED ? GENERATE_REUSE : 0);
}

static void begin(struct daemons *d, const char *head, const char *device)
{
    runcase_need_model();
    daemons_open(d, head, device, "32");
    int64_t begin_ns = clock_now_ns();
    ask(d);
    daemons_learn(d);
    round_ns = clock_now_ns() - begin_ns;
}

/* ---- heard of at once ---- */

/* One kill for each request, when it has a few tokens more than the one before had. */
static void kill_at_tokens(struct daemons *d, uint32_t request)
{
    if (request != d->step || d->requests[request].count < 3 + 3 * request)
        return;
    d->step++;
    daemons_restart(d, RUNCASE_RETRIEVER);
}

static void dies_in_steps(struct daemons *d)
{
    ask(d);
    d->heard = kill_at_tokens;
    daemons_run(d, NULL);
    assert_int_equal(d->step, MODES);
    daemons_expect_learned(d);
}

static void kill_in_prompt(struct daemons *d, uint32_t request)
{
    if (d->step || d->requests[request].progress < CHUNK || d->requests[request].count)
        return;
    d->step = 1;
    daemons_restart(d, RUNCASE_RETRIEVER);
}

static void dies_in_prompt(struct daemons *d)
{
    ask(d);
    d->heard = kill_in_prompt;
    daemons_run(d, NULL);
    assert_int_equal(d->step, 1);
    daemons_expect_learned(d);
}

/* ---- what is not heard of at once ---- */

static bool noticed(struct daemons *d)
{
    return daemons_said(d, RUNCASE_DECODER, "retriever is gone");
}

static bool all_have_tokens(struct daemons *d)
{
    for (uint32_t i = 0; i < d->count; i++)
        if (d->requests[i].count < 2)
            return false;
    return true;
}

/* It dies while the decoder stands still, so that the decoder's next message to it goes nowhere. */
static void dies_unheard(struct daemons *d)
{
    ask(d);
    daemons_run(d, all_have_tokens);
    kill(d->parts[RUNCASE_DECODER].pid, SIGSTOP);
    daemons_forget_said(d, RUNCASE_DECODER);
    daemons_kill(d, RUNCASE_RETRIEVER);
    kill(d->parts[RUNCASE_DECODER].pid, SIGCONT);
    daemons_run(d, noticed);
    daemons_start(d, RUNCASE_RETRIEVER);
    daemons_run(d, NULL);
    daemons_expect_learned(d);
}

/* ---- at random ---- */

static int64_t kill_at_ns;

static bool round_goes_on(struct daemons *d)
{
    bool ended = true;
    for (uint32_t i = 0; i < d->count; i++)
        ended &= d->requests[i].ended;
    return ended || clock_now_ns() > kill_at_ns;
}

static void dies_at_random(struct daemons *d, unsigned seed)
{
    print_message("# seed %u\n", seed);
    for (uint32_t r = 0; r < rounds; r++) {
        ask(d);
        bool soon = rand_r(&seed) % 2; /* before the one before is greeted, or has the feature segment */
        for (uint32_t kills = 1 + (uint32_t)rand_r(&seed) % 3; kills; kills--) {
            kill_at_ns = clock_now_ns() + round_ns / 1000 * (rand_r(&seed) % (soon ? 100 : 800));
            daemons_run(d, round_goes_on);
            daemons_restart(d, RUNCASE_RETRIEVER);
        }
        daemons_run(d, NULL);
        daemons_expect_learned(d);
    }
}

/* ---- heads and devices ---- */

/* The next one is not where the one before was, and takes hidden states in another form: its scores are
 * rounded otherwise. */
static void comes_elsewhere(struct daemons *d)
{
    ask(d);
    daemons_run(d, all_have_tokens);
    daemons_kill(d, RUNCASE_RETRIEVER);
    bool moves_to_gpu = strcmp(d->device, "cpu") == 0;
    d->key_type = moves_to_gpu ? "f16" : "int8"; /* as it was */
    d->device = moves_to_gpu ? "cuda:0" : "cpu";
    daemons_start(d, RUNCASE_RETRIEVER);
    daemons_run(d, NULL);
    for (uint32_t i = 0; i < d->count; i++) {
        if (d->requests[i].done.reason != FINISH_LENGTH)
            fail_msg("request %u: %s", i, d->requests[i].done.text);
        assert_memory_equal(d->requests[i].tokens, daemons_learned(i)->tokens, 2 * sizeof(uint32_t));
    }
}

static void each_way(const char *head, const char *device)
{
    struct daemons *d = &daemons;
    bool features = strcmp(head, FEATURES) == 0, on_cpu = strcmp(device, "cpu") == 0;
    begin(d, head, device);
    dies_in_steps(d);
    if (features || on_cpu)
        dies_in_prompt(d);
    if (on_cpu) /* what is done then is the loop's */
        dies_unheard(d);
    dies_at_random(d, (unsigned)time(NULL));
    if (features)
        comes_elsewhere(d);
    daemons_close(d);
}

static void test_embedding(void **state)
{
    (void)state;
    each_way(EMBEDDING, "cpu");
}

static void test_features(void **state)
{
    (void)state;
    each_way(FEATURES, "cpu");
}

static void test_embedding_gpu(void **state)
{
    (void)state;
    each_way(EMBEDDING, "cuda:0");
}

static void test_features_gpu(void **state)
{
    (void)state;
    each_way(FEATURES, "cuda:0");
}

/* What a test that failed left. */
static int close_daemons(void **state)
{
    (void)state;
    daemons_close(&daemons);
    return 0;
}

static int set_up(void **state)
{
    char card[32];
    snprintf(card, sizeof card, "death%d", (int)getpid());
    fakegpu_use(card);
    return runcase_set_up(state);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_embedding, close_daemons),
        cmocka_unit_test_teardown(test_features, close_daemons),
        cmocka_unit_test_teardown(test_embedding_gpu, close_daemons),
        cmocka_unit_test_teardown(test_features_gpu, close_daemons),
    };
    if (argc > 1)
        rounds = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        cmocka_set_test_filter(argv[2]);
    return cmocka_run_group_tests(tests, set_up, runcase_tear_down);
}
