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

enum { CHUNK = 32, PROMPT = 48, LONG = 6 * CHUNK, TOKENS = 10, MODES = 3 };

static struct daemons daemons, beside, alone; /* large */

/* What it has got is what it would have got undisturbed, as far as it came. */
static void expect_start(const struct daemons_request *q, const struct daemons_request *want)
{
    assert_true(q->count <= want->count);
    assert_memory_equal(q->tokens, want->tokens, q->count * sizeof *q->tokens);
    assert_int_equal(q->done.generated_tokens, q->count);
}

static void ask_mode(struct daemons *d, uint32_t mode)
{
    daemons_ask(d, PROMPT + 16 * mode, mode, TOKENS, mode, 0);
}

/* One of each mode. */
static void ask(struct daemons *d)
{
    daemons_clear(d);
    for (uint32_t m = 0; m < MODES; m++)
        ask_mode(d, m);
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

static void hang(struct daemons *d)
{
    daemons_forget_said(d, RUNCASE_DECODER);
    kill(d->parts[RUNCASE_RETRIEVER].pid, SIGSTOP);
}

/* One that goes on greets as any other, and what it still had to say of the sequences of before is of
 * nobody. */
static void end_of_hang(struct daemons *d, bool goes_on)
{
    if (goes_on)
        kill(d->parts[RUNCASE_RETRIEVER].pid, SIGCONT);
    else
        daemons_restart(d, RUNCASE_RETRIEVER);
    daemons_run(d, NULL);
    daemons_expect_learned(d);
}

/* ---- in steps ---- */

static bool full_ended(struct daemons *d)
{
    return d->requests[MODES + 1].ended;
}

static void ask_meanwhile(struct daemons *d)
{
    daemons_ask(d, 40, 9, 4, SELECTION_CURRENT, 0);
    daemons_ask(d, 40, 10, 4, SELECTION_CURRENT, GENERATE_FULL);
}

/* The steps of all modes wait for sets of a retriever that stands still, until it is taken for dead. Requests
 * that come before there is another one wait for it, those that need none do not. */
static void hangs_in_steps(struct daemons *d, bool goes_on)
{
    ask(d);
    ask_meanwhile(d);
    daemons_learn(d);
    ask(d);
    daemons_run(d, any_has_tokens);
    hang(d);
    daemons_run(d, noticed);
    ask_meanwhile(d);
    daemons_run(d, full_ended);
    assert_false(d->requests[MODES].ended);
    end_of_hang(d, goes_on);
}

static void test_hangs(void **state)
{
    (void)state;
    runcase_need_model();
    daemons_open(&daemons, EMBEDDING, "cpu", "32");
    hangs_in_steps(&daemons, false);
    daemons_close(&daemons);
}

/* A GPU waits in another way in each mode: each alone. */
static void test_hangs_gpu(void **state)
{
    (void)state;
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, FEATURES, "cuda:0", "32");
    for (uint32_t mode = 0; mode < MODES; mode++) {
        daemons_clear(d);
        ask_mode(d, mode);
        daemons_learn(d);
        daemons_clear(d);
        ask_mode(d, mode);
        daemons_run(d, any_has_tokens);
        hang(d);
        daemons_run(d, noticed);
        end_of_hang(d, mode == SELECTION_PREVIOUS);
    }
    daemons_close(d);
}

/* ---- answers that come before a step ---- */

static bool in_prompt(struct daemons *d)
{
    return d->requests[0].progress >= CHUNK;
}

static void ask_long(struct daemons *d)
{
    daemons_clear(d);
    daemons_ask(d, LONG, 1, 4, SELECTION_CURRENT, 0);
    daemons_ask(d, PROMPT + 32, 2, 4, SELECTION_CURRENT, GENERATE_REUSE);
}

/* It hangs while its answers are waited for that come before a step: that it has read the hidden states of a
 * chunk, and keys that it kept of a prompt. */
static void hangs_before_a_step(struct daemons *d)
{
    ask_long(d);
    daemons_learn(d);
    ask_long(d);
    daemons_run(d, in_prompt);
    hang(d);
    daemons_run(d, noticed);
    end_of_hang(d, false);
    hang(d);
    ask_long(d);
    daemons_run(d, noticed);
    end_of_hang(d, true);
}

static void test_hangs_features(void **state)
{
    (void)state;
    runcase_need_model();
    daemons_open(&daemons, FEATURES, "cpu", "32");
    hangs_in_steps(&daemons, true);
    hangs_before_a_step(&daemons);
    daemons_close(&daemons);
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

static void start_without_store(struct daemons *d, const char *head, bool soon)
{
    daemons_init(d, head, "cpu", "32");
    daemons_start(d, RUNCASE_RETRIEVER);
    daemons_start(d, RUNCASE_DECODER);
    daemons_connect(d);
    daemons_run(d, waits_for_kvstore);
    daemons_kill(d, RUNCASE_RETRIEVER);
    if (soon)
        daemons_start(d, RUNCASE_RETRIEVER);
}

static void start_store(struct daemons *d, bool soon, const struct daemons_request *want)
{
    daemons_run(d, noticed);
    daemons_start(d, RUNCASE_KVSTORE);
    if (!soon) {
        daemons_run(d, loads);
        daemons_start(d, RUNCASE_RETRIEVER);
    }
    daemons_run(d, daemons_ready);
    ask_mode(d, SELECTION_CURRENT);
    daemons_run(d, NULL);
    assert_int_equal(d->requests[0].done.reason, FINISH_LENGTH);
    assert_int_equal(d->requests[0].count, TOKENS);
    expect_start(&d->requests[0], want);
    daemons_close(d);
}

/* It has told the decoder what its head is, and goes: another one comes before the store does, or behind it.
 * The decoder is ready when there is one again. Without another one it is missed by its silence: of two
 * decoders at once. */
static void test_before_the_store(void **state)
{
    (void)state;
    runcase_need_model();
    static struct daemons_request want[2];
    static const char *const heads[] = {EMBEDDING, FEATURES};
    struct daemons *const pair[] = {&daemons, &beside};
    for (int i = 0; i < 2; i++) {
        daemons_open(&daemons, heads[i], "cpu", "32");
        ask_mode(&daemons, SELECTION_CURRENT);
        daemons_learn(&daemons);
        want[i] = *daemons_learned(0);
        daemons_close(&daemons);
    }
    for (int soon = 0; soon < 2; soon++) {
        for (int i = 0; i < 2; i++)
            start_without_store(pair[i], heads[i], soon);
        for (int i = 0; i < 2; i++)
            start_store(pair[i], soon, &want[i]);
    }
}

/* ---- none comes ---- */

static struct daemons_request undisturbed[MODES];

/* Begun first and looked at last: others go on in the half minute that is waited for. */
static void test_is_left_alone(void **state)
{
    (void)state;
    runcase_need_model();
    struct daemons *d = &alone;
    daemons_open(d, FEATURES, "cpu", "32");
    ask(d);
    daemons_learn(d);
    memcpy(undisturbed, daemons_learned(0), sizeof undisturbed);
    ask(d);
    daemons_run(d, any_has_tokens);
    daemons_kill(d, RUNCASE_RETRIEVER);
    daemons_ask(d, 40, 10, 100, SELECTION_CURRENT, GENERATE_FULL);
}

static void test_none_comes(void **state)
{
    (void)state;
    runcase_need_model();
    struct daemons *d = &alone;
    daemons_run(d, NULL);
    for (uint32_t i = 0; i < MODES; i++) {
        const struct daemons_request *q = &d->requests[i];
        assert_int_equal(q->done.reason, FINISH_ERROR);
        if (!strstr(q->done.text, "retriever is gone, and no other came within "))
            fail_msg("request %u: %s", i, q->done.text);
        expect_start(q, &undisturbed[i]);
    }
    assert_int_equal(d->requests[MODES].done.reason, FINISH_LENGTH);
    daemons_start(d, RUNCASE_RETRIEVER);
    daemons_run(d, daemons_ready);
    ask(d);
    daemons_run(d, NULL);
    for (uint32_t i = 0; i < MODES; i++) {
        assert_int_equal(d->requests[i].done.reason, FINISH_LENGTH);
        assert_int_equal(d->requests[i].count, TOKENS);
        expect_start(&d->requests[i], &undisturbed[i]);
    }
    daemons_close(d);
}

/* What a test that failed left. */
static int close_daemons(void **state)
{
    (void)state;
    daemons_close(&daemons);
    daemons_close(&beside);
    return 0;
}

static int close_alone(void **state)
{
    (void)state;
    daemons_close(&alone);
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
        cmocka_unit_test(test_is_left_alone),
        cmocka_unit_test_teardown(test_hangs, close_daemons),
        cmocka_unit_test_teardown(test_hangs_features, close_daemons),
        cmocka_unit_test_teardown(test_hangs_gpu, close_daemons),
        cmocka_unit_test_teardown(test_before_the_store, close_daemons),
        cmocka_unit_test_teardown(test_none_comes, close_alone),
    };
    return cmocka_run_group_tests(tests, set_up, runcase_tear_down);
}
