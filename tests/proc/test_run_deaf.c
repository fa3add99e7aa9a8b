/* A retriever that hangs, or is not there, until it is taken for dead: steps wait for its sets, other answers
 * of its are waited for, the store comes later, no other one comes. Answers are what they would have been;
 * where no other one comes, the requests that need one end alone. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/control.h"
#include "tests/lib/daemons.h"
#include "tests/lib/fakegpu.h"

#define FEATURES  "heads/alternatives/SmolLM2-135M-Instruct.features2.safetensors"
#define EMBEDDING "heads/alternatives/SmolLM2-135M-Instruct.embedding2.safetensors"

enum { PROMPT = 150, TOKENS = 16, MODES = 3 };

static struct daemons daemons; /* large */

/* One request, or one of each mode. */
static void ask(struct daemons *d, int mode, uint32_t tokens)
{
    daemons_clear(d);
    for (int m = 0; m < MODES; m++)
        if (mode < 0 || m == mode)
            daemons_ask(d, PROMPT + 30 * (uint32_t)m, (uint32_t)m, tokens, (uint32_t)m, 0);
}

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

/* The steps of all modes wait for sets of a retriever that stands still, until it is taken for dead. Requests
 * that come before there is another one wait for it, those that need none do not. */
static void waits_for_one_that_hangs(const char *head, const char *device, int mode)
{
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, head, device, "64");
    ask(d, mode, TOKENS);
    daemons_ask(d, 40, 9, 4, SELECTION_CURRENT, 0);
    daemons_ask(d, 40, 10, 4, SELECTION_CURRENT, GENERATE_FULL);
    daemons_learn(d);
    ask(d, mode, TOKENS);
    daemons_run(d, any_has_tokens);
    kill(d->parts[RUNCASE_RETRIEVER].pid, SIGSTOP);
    daemons_run(d, noticed);
    daemons_ask(d, 40, 9, 4, SELECTION_CURRENT, 0);
    daemons_ask(d, 40, 10, 4, SELECTION_CURRENT, GENERATE_FULL);
    uint32_t full = d->count - 1;
    while (!d->requests[full].ended)
        daemons_run(d, any_has_tokens);
    assert_false(d->requests[full - 1].ended);
    daemons_restart(d, RUNCASE_RETRIEVER);
    daemons_run(d, NULL);
    if (strcmp(device, "cpu") == 0) /* there a batch gives what each would get alone */
        daemons_expect_learned(d);
    for (uint32_t i = 0; i < d->count; i++)
        assert_int_equal(d->requests[i].done.reason, FINISH_LENGTH);
    daemons_close(d);
}

static void test_hangs(void **state)
{
    (void)state;
    waits_for_one_that_hangs(EMBEDDING, "cpu", -1);
}

static void test_hangs_features(void **state)
{
    (void)state;
    waits_for_one_that_hangs(FEATURES, "cpu", -1);
}

static void test_hangs_gpu(void **state)
{
    (void)state;
    waits_for_one_that_hangs(FEATURES, "cuda:0", SELECTION_CURRENT);
    waits_for_one_that_hangs(EMBEDDING, "cuda:0", SELECTION_PREVIOUS);
    waits_for_one_that_hangs(EMBEDDING, "cuda:0", SELECTION_MIXED);
}

/* One that hangs and goes on, after it was taken for dead: it greets as any other, and what it still had to
 * say of the sequences of before is of nobody. */
static void test_hangs_and_goes_on(void **state)
{
    (void)state;
    runcase_need_model();
    struct daemons *d = &daemons;
    for (int features = 0; features < 2; features++) {
        daemons_open(d, features ? FEATURES : EMBEDDING, "cpu", "64");
        ask(d, -1, TOKENS);
        daemons_learn(d);
        ask(d, -1, TOKENS);
        daemons_run(d, any_has_tokens);
        kill(d->parts[RUNCASE_RETRIEVER].pid, SIGSTOP);
        daemons_run(d, noticed);
        kill(d->parts[RUNCASE_RETRIEVER].pid, SIGCONT);
        daemons_run(d, NULL);
        daemons_expect_learned(d);
        daemons_close(d);
    }
}

/* ---- before there is a store ---- */

static bool waits_for_kvstore(struct daemons *d)
{
    return daemons_state_begins(d, "waiting for kvstore");
}

/* The store is there, and weights and activations may be. */
static bool loads(struct daemons *d)
{
    return daemons_state_begins(d, "loading") || daemons_state_begins(d, "waiting for another retriever");
}

/* It has told the decoder what its head is, and goes: another one comes before the store does, or behind it.
 * The decoder is ready when there is one again. */
static void test_before_the_store(void **state)
{
    (void)state;
    runcase_need_model();
    struct daemons *d = &daemons;
    for (int i = 0; i < 4; i++) {
        daemons_open(d, i % 2 ? FEATURES : EMBEDDING, "cpu", "64");
        ask(d, SELECTION_CURRENT, TOKENS);
        daemons_learn(d);
        daemons_close(d);
        daemons_init(d, i % 2 ? FEATURES : EMBEDDING, "cpu", "64");
        daemons_start(d, RUNCASE_RETRIEVER);
        daemons_start(d, RUNCASE_DECODER);
        daemons_connect(d);
        daemons_run(d, waits_for_kvstore);
        if (i / 2)
            daemons_restart(d, RUNCASE_RETRIEVER);
        else
            daemons_kill(d, RUNCASE_RETRIEVER);
        daemons_run(d, noticed);
        daemons_start(d, RUNCASE_KVSTORE);
        if (!(i / 2)) {
            daemons_run(d, loads);
            daemons_start(d, RUNCASE_RETRIEVER);
        }
        daemons_run(d, daemons_ready);
        ask(d, SELECTION_CURRENT, TOKENS);
        daemons_run(d, NULL);
        daemons_expect_learned(d);
        daemons_close(d);
    }
}

/* ---- answers that come before a step ---- */

static bool in_prompt(struct daemons *d)
{
    return d->requests[0].progress >= 64;
}

/* It hangs while its answers are waited for that come before a step: keys that it kept of a prompt, and that
 * it has read the hidden states of a chunk. */
static void test_hangs_before_a_step(void **state)
{
    (void)state;
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, FEATURES, "cpu", "32");
    daemons_ask(d, 600, 1, 4, SELECTION_CURRENT, 0);
    daemons_ask(d, PROMPT, 2, 4, SELECTION_CURRENT, GENERATE_REUSE);
    daemons_learn(d);
    for (int i = 0; i < 2; i++) {
        daemons_clear(d);
        if (i == 0) {
            daemons_ask(d, 600, 1, 4, SELECTION_CURRENT, 0);
            daemons_run(d, in_prompt);
            kill(d->parts[RUNCASE_RETRIEVER].pid, SIGSTOP);
        } else {
            kill(d->parts[RUNCASE_RETRIEVER].pid, SIGSTOP);
            daemons_ask(d, 600, 1, 4, SELECTION_CURRENT, 0);
        }
        daemons_ask(d, PROMPT, 2, 4, SELECTION_CURRENT, GENERATE_REUSE);
        daemons_run(d, noticed);
        daemons_forget_said(d, RUNCASE_DECODER);
        daemons_restart(d, RUNCASE_RETRIEVER);
        daemons_run(d, NULL);
        daemons_expect_learned(d);
    }
    daemons_close(d);
}

/* ---- none comes ---- */

static void test_none_comes(void **state)
{
    (void)state;
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, FEATURES, "cpu", "64");
    ask(d, -1, TOKENS);
    daemons_learn(d);
    ask(d, -1, TOKENS);
    daemons_run(d, any_has_tokens);
    daemons_kill(d, RUNCASE_RETRIEVER);
    daemons_ask(d, 40, 10, 100, SELECTION_CURRENT, GENERATE_FULL);
    daemons_run(d, NULL);
    for (uint32_t i = 0; i < MODES; i++) {
        const struct daemons_request *q = &d->requests[i];
        assert_int_equal(q->done.reason, FINISH_ERROR);
        if (!strstr(q->done.text, "retriever is gone, and no other came within "))
            fail_msg("request %u: %s", i, q->done.text);
        assert_memory_equal(q->tokens, daemons_learned(i)->tokens, q->count * sizeof *q->tokens);
        assert_int_equal(q->done.generated_tokens, q->count);
    }
    assert_int_equal(d->requests[MODES].done.reason, FINISH_LENGTH);
    daemons_start(d, RUNCASE_RETRIEVER);
    daemons_run(d, daemons_ready);
    ask(d, -1, TOKENS);
    daemons_run(d, NULL);
    daemons_expect_learned(d);
    daemons_close(d);
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
    snprintf(card, sizeof card, "deaf%d", (int)getpid());
    fakegpu_use(card);
    return runcase_set_up(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_hangs, close_daemons),
        cmocka_unit_test_teardown(test_hangs_features, close_daemons),
        cmocka_unit_test_teardown(test_hangs_gpu, close_daemons),
        cmocka_unit_test_teardown(test_hangs_and_goes_on, close_daemons),
        cmocka_unit_test_teardown(test_before_the_store, close_daemons),
        cmocka_unit_test_teardown(test_hangs_before_a_step, close_daemons),
        cmocka_unit_test_teardown(test_none_comes, close_daemons),
    };
    return cmocka_run_group_tests(tests, set_up, runcase_tear_down);
}
