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

enum { PROMPT = 150, TOKENS = 16, MODES = 3, ROUND_REQUESTS = 4 };

static uint32_t rounds = 3; /* of random kills; more by the first argument */

static struct daemons daemons; /* large */

/* One request, or one of each mode. */
static void ask(struct daemons *d, int mode, uint32_t tokens)
{
    daemons_clear(d);
    for (int m = 0; m < MODES; m++)
        if (mode < 0 || m == mode)
            daemons_ask(d, PROMPT + 30 * (uint32_t)m, (uint32_t)m, tokens, (uint32_t)m, 0);
}

/* ---- at once ---- */

static void kill_at_token(struct daemons *d, uint32_t request)
{
    if (d->step || d->requests[request].count < 5)
        return;
    d->step = 1;
    daemons_restart(d, RUNCASE_RETRIEVER);
}

static void modes_each(const char *head, const char *device)
{
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, head, device, "64");
    for (int mode = 0; mode < MODES; mode++) {
        ask(d, mode, TOKENS);
        daemons_learn(d);
        ask(d, mode, TOKENS);
        d->heard = kill_at_token;
        daemons_run(d, NULL);
        daemons_expect_learned(d);
    }
    daemons_close(d);
}

static void test_at_once(void **state)
{
    (void)state;
    modes_each(EMBEDDING, "cpu");
}

static void test_at_once_features(void **state)
{
    (void)state;
    modes_each(FEATURES, "cpu");
}

static void test_at_once_gpu(void **state)
{
    (void)state;
    modes_each(EMBEDDING, "cuda:0");
}

static void test_at_once_gpu_features(void **state)
{
    (void)state;
    modes_each(FEATURES, "cuda:0");
}

/* ---- what is not heard of at once ---- */

static bool noticed(struct daemons *d)
{
    return daemons_said(d, RUNCASE_DECODER, "retriever is gone");
}

static bool any_has_tokens(struct daemons *d)
{
    for (uint32_t i = 0; i < d->count; i++)
        if (d->requests[i].count >= 3)
            return true;
    return false;
}

/* It dies while the decoder stands still, so that the decoder's next message to it goes nowhere. */
static void dies_unheard(const char *head)
{
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, head, "cpu", "64");
    for (int mode = 0; mode < MODES; mode++) {
        ask(d, mode, TOKENS);
        daemons_learn(d);
        ask(d, mode, TOKENS);
        daemons_run(d, any_has_tokens);
        kill(d->parts[RUNCASE_DECODER].pid, SIGSTOP);
        daemons_kill(d, RUNCASE_RETRIEVER);
        kill(d->parts[RUNCASE_DECODER].pid, SIGCONT);
        daemons_run(d, noticed);
        daemons_forget_said(d, RUNCASE_DECODER);
        daemons_start(d, RUNCASE_RETRIEVER);
        daemons_run(d, NULL);
        daemons_expect_learned(d);
    }
    daemons_close(d);
}

static void test_message_on_its_way(void **state)
{
    (void)state;
    dies_unheard(EMBEDDING);
}

static void test_message_on_its_way_features(void **state)
{
    (void)state;
    dies_unheard(FEATURES);
}

/* ---- prompts ---- */

static void kill_in_prompt(struct daemons *d, uint32_t request)
{
    if (d->step || d->requests[request].progress < 64 || d->requests[request].count)
        return;
    d->step = 1;
    daemons_restart(d, RUNCASE_RETRIEVER);
}

static void dies_in_prompt(const char *head, const char *device)
{
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, head, device, "32");
    daemons_ask(d, 600, 1, 4, SELECTION_CURRENT, 0);
    daemons_learn(d);
    daemons_clear(d);
    daemons_ask(d, 600, 1, 4, SELECTION_CURRENT, 0);
    d->heard = kill_in_prompt;
    daemons_run(d, NULL);
    assert_int_equal(d->step, 1);
    daemons_expect_learned(d);
    daemons_close(d);
}

static void test_in_prompt(void **state)
{
    (void)state;
    dies_in_prompt(EMBEDDING, "cpu");
    dies_in_prompt(FEATURES, "cpu");
}

static void test_in_prompt_gpu(void **state)
{
    (void)state;
    dies_in_prompt(FEATURES, "cuda:0");
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

static void ask_round(struct daemons *d)
{
    daemons_clear(d);
    for (uint32_t i = 0; i < ROUND_REQUESTS; i++)
        daemons_ask(d, 60 + 70 * i, i, 12 + 6 * i, i % MODES, i == 3 ? GENERATE_REUSE : 0);
}

static void random_kills(const char *head, const char *device, unsigned seed)
{
    runcase_need_model();
    struct daemons *d = &daemons;
    uint32_t failed = 0, killed = 0;
    print_message("# seed %u\n", seed);
    daemons_open(d, head, device, "64");
    int64_t begin_ns = clock_now_ns();
    ask_round(d);
    daemons_learn(d);
    int64_t round_ns = clock_now_ns() - begin_ns;
    for (uint32_t r = 0; r < rounds; r++) {
        ask_round(d);
        bool soon = rand_r(&seed) % 2; /* before the one before is greeted, or has the feature segment */
        for (uint32_t kills = 1 + (uint32_t)rand_r(&seed) % 3; kills; kills--) {
            kill_at_ns = clock_now_ns() + round_ns / 1000 * (rand_r(&seed) % (soon ? 100 : 800));
            daemons_run(d, round_goes_on);
            daemons_restart(d, RUNCASE_RETRIEVER);
            killed++;
        }
        daemons_run(d, NULL);
        for (uint32_t i = 0; i < d->count; i++) {
            if (d->requests[i].done.reason == FINISH_LENGTH) {
                if (strcmp(device, "cpu") == 0) /* there a batch gives what each would get alone */
                    daemons_expect(d, i);
                continue;
            }
            print_message("# round %u request %u: %s\n", r, i, d->requests[i].done.text);
            assert_non_null(strstr(d->requests[i].done.text, "retriever"));
            failed++;
        }
    }
    print_message("# %u kills, %u requests failed\n", killed, failed);
    assert_int_equal(failed, 0);
    daemons_close(d);
}

static void test_at_random(void **state)
{
    (void)state;
    random_kills(EMBEDDING, "cpu", (unsigned)time(NULL));
}

static void test_at_random_features(void **state)
{
    (void)state;
    random_kills(FEATURES, "cpu", (unsigned)time(NULL) + 1);
}

static void test_at_random_gpu(void **state)
{
    (void)state;
    random_kills(EMBEDDING, "cuda:0", (unsigned)time(NULL) + 2);
    random_kills(FEATURES, "cuda:0", (unsigned)time(NULL) + 3);
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
        cmocka_unit_test_teardown(test_at_once, close_daemons),
        cmocka_unit_test_teardown(test_at_once_features, close_daemons),
        cmocka_unit_test_teardown(test_at_once_gpu, close_daemons),
        cmocka_unit_test_teardown(test_at_once_gpu_features, close_daemons),
        cmocka_unit_test_teardown(test_message_on_its_way, close_daemons),
        cmocka_unit_test_teardown(test_message_on_its_way_features, close_daemons),
        cmocka_unit_test_teardown(test_in_prompt, close_daemons),
        cmocka_unit_test_teardown(test_in_prompt_gpu, close_daemons),
        cmocka_unit_test_teardown(test_at_random, close_daemons),
        cmocka_unit_test_teardown(test_at_random_features, close_daemons),
        cmocka_unit_test_teardown(test_at_random_gpu, close_daemons),
    };
    if (argc > 1)
        rounds = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        cmocka_set_test_filter(argv[2]);
    return cmocka_run_group_tests(tests, set_up, runcase_tear_down);
}
