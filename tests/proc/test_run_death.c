/* A retriever that is killed while requests run, and started again: in a step that waits for its sets, while
 * messages are on their way to it, in a prompt, unheard of by a decoder that stands still. Every answer is
 * what it would have been; where no other one comes, the requests that need one end alone. */
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

struct answers {
    struct daemons_request of[DAEMONS_REQUESTS];
    uint32_t count;
};

static struct daemons daemons; /* large */
static struct answers wanted;

/* One request, or one of each mode. */
static void ask(struct daemons *d, int mode, uint32_t tokens)
{
    daemons_clear(d);
    for (int m = 0; m < MODES; m++)
        if (mode < 0 || m == mode)
            daemons_ask(d, PROMPT + 30 * (uint32_t)m, (uint32_t)m, tokens, (uint32_t)m, 0);
}

/* What the requests that were asked get when nobody dies. */
static void learn(struct daemons *d)
{
    daemons_run(d, NULL);
    memcpy(wanted.of, d->requests, sizeof wanted.of);
    wanted.count = d->count;
    for (uint32_t i = 0; i < d->count; i++)
        if (d->requests[i].done.reason != FINISH_LENGTH)
            fail_msg("request %u: %s", i, d->requests[i].done.text);
}

static void expect_wanted(const struct daemons *d, uint32_t i)
{
    const struct daemons_request *q = &d->requests[i], *want = &wanted.of[i];
    if (q->done.reason != FINISH_LENGTH)
        fail_msg("request %u, selection %u: %s", i, q->ask.selection, q->done.text);
    assert_int_equal(q->count, want->count);
    for (uint32_t t = 0; t < q->count; t++)
        if (q->tokens[t] != want->tokens[t])
            fail_msg("request %u, selection %u: token %u: found %u, expected %u", i, q->ask.selection, t,
                     q->tokens[t], want->tokens[t]);
    assert_int_equal(q->done.generated_tokens, want->count);
    assert_int_equal(q->progress, q->prompt);
}

static void expect_all_wanted(const struct daemons *d)
{
    for (uint32_t i = 0; i < d->count; i++)
        expect_wanted(d, i);
}

static void again(struct daemons *d)
{
    daemons_kill(d, RUNCASE_RETRIEVER);
    daemons_start(d, RUNCASE_RETRIEVER);
}

/* ---- at once ---- */

static void kill_at_token(struct daemons *d, uint32_t request)
{
    if (d->step || d->requests[request].count < 5)
        return;
    d->step = 1;
    again(d);
}

static void modes_each(const char *head, const char *device)
{
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, head, device, "64");
    for (int mode = 0; mode < MODES; mode++) {
        ask(d, mode, TOKENS);
        learn(d);
        ask(d, mode, TOKENS);
        d->heard = kill_at_token;
        daemons_run(d, NULL);
        expect_all_wanted(d);
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

/* So that the next loss is noticed. */
static void forget_said(struct daemons *d)
{
    d->parts[RUNCASE_DECODER].err.text[0] = 0;
    d->parts[RUNCASE_DECODER].err.bytes = 0;
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
    learn(d);
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
    again(d);
    daemons_run(d, NULL);
    if (strcmp(device, "cpu") == 0) /* there a batch gives what each would get alone */
        expect_all_wanted(d);
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
        learn(d);
        ask(d, -1, TOKENS);
        daemons_run(d, any_has_tokens);
        kill(d->parts[RUNCASE_RETRIEVER].pid, SIGSTOP);
        daemons_run(d, noticed);
        kill(d->parts[RUNCASE_RETRIEVER].pid, SIGCONT);
        daemons_run(d, NULL);
        expect_all_wanted(d);
        daemons_close(d);
    }
}

/* It dies while the decoder stands still, so that the decoder's next message to it goes nowhere. */
static void dies_unheard(const char *head)
{
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, head, "cpu", "64");
    for (int mode = 0; mode < MODES; mode++) {
        ask(d, mode, TOKENS);
        learn(d);
        ask(d, mode, TOKENS);
        daemons_run(d, any_has_tokens);
        kill(d->parts[RUNCASE_DECODER].pid, SIGSTOP);
        daemons_kill(d, RUNCASE_RETRIEVER);
        kill(d->parts[RUNCASE_DECODER].pid, SIGCONT);
        daemons_run(d, noticed);
        forget_said(d);
        daemons_start(d, RUNCASE_RETRIEVER);
        daemons_run(d, NULL);
        expect_all_wanted(d);
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
        learn(d);
        daemons_close(d);
        daemons_init(d, i % 2 ? FEATURES : EMBEDDING, "cpu", "64");
        daemons_start(d, RUNCASE_RETRIEVER);
        daemons_start(d, RUNCASE_DECODER);
        daemons_connect(d);
        daemons_run(d, waits_for_kvstore);
        if (i / 2)
            again(d);
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
        expect_all_wanted(d);
        daemons_close(d);
    }
}

/* ---- prompts ---- */

static void kill_in_prompt(struct daemons *d, uint32_t request)
{
    if (d->step || d->requests[request].progress < 64 || d->requests[request].count)
        return;
    d->step = 1;
    again(d);
}

static bool in_prompt(struct daemons *d)
{
    return d->requests[0].progress >= 64;
}

static void dies_in_prompt(const char *head, const char *device)
{
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_open(d, head, device, "32");
    daemons_ask(d, 600, 1, 4, SELECTION_CURRENT, 0);
    learn(d);
    daemons_clear(d);
    daemons_ask(d, 600, 1, 4, SELECTION_CURRENT, 0);
    d->heard = kill_in_prompt;
    daemons_run(d, NULL);
    assert_int_equal(d->step, 1);
    expect_all_wanted(d);
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
    learn(d);
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
        forget_said(d);
        again(d);
        daemons_run(d, NULL);
        expect_all_wanted(d);
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
    learn(d);
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
        assert_memory_equal(q->tokens, wanted.of[i].tokens, q->count * sizeof *q->tokens);
        assert_int_equal(q->done.generated_tokens, q->count);
    }
    assert_int_equal(d->requests[MODES].done.reason, FINISH_LENGTH);
    daemons_start(d, RUNCASE_RETRIEVER);
    daemons_run(d, daemons_ready);
    ask(d, -1, TOKENS);
    daemons_run(d, NULL);
    expect_all_wanted(d);
    daemons_close(d);
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
    learn(d);
    int64_t round_ns = clock_now_ns() - begin_ns;
    for (uint32_t r = 0; r < rounds; r++) {
        ask_round(d);
        bool soon = rand_r(&seed) % 2; /* before the one before is greeted, or has the feature segment */
        for (uint32_t kills = 1 + (uint32_t)rand_r(&seed) % 3; kills; kills--) {
            kill_at_ns = clock_now_ns() + round_ns / 1000 * (rand_r(&seed) % (soon ? 100 : 800));
            daemons_run(d, round_goes_on);
            again(d);
            killed++;
        }
        daemons_run(d, NULL);
        for (uint32_t i = 0; i < d->count; i++) {
            if (d->requests[i].done.reason == FINISH_LENGTH) {
                assert_int_equal(d->requests[i].count, wanted.of[i].count);
                if (strcmp(device, "cpu") == 0) /* there a batch gives what each would get alone */
                    expect_wanted(d, i);
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
        cmocka_unit_test_teardown(test_hangs, close_daemons),
        cmocka_unit_test_teardown(test_hangs_features, close_daemons),
        cmocka_unit_test_teardown(test_hangs_gpu, close_daemons),
        cmocka_unit_test_teardown(test_hangs_and_goes_on, close_daemons),
        cmocka_unit_test_teardown(test_message_on_its_way, close_daemons),
        cmocka_unit_test_teardown(test_message_on_its_way_features, close_daemons),
        cmocka_unit_test_teardown(test_before_the_store, close_daemons),
        cmocka_unit_test_teardown(test_in_prompt, close_daemons),
        cmocka_unit_test_teardown(test_in_prompt_gpu, close_daemons),
        cmocka_unit_test_teardown(test_hangs_before_a_step, close_daemons),
        cmocka_unit_test_teardown(test_none_comes, close_daemons),
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
