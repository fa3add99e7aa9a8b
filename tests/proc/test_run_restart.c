/* Daemons without a supervisor. A retriever that dies between two requests: the next one has no keys of
 * prompts, so nothing is taken from the store's cache at first, and answers stay what they were. A store that
 * is started again so soon that the retriever sends sets before it has noticed. A decoder, or the store, that
 * dies with a request in work while host memory lacks layers: the next one begins anew. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "proto/control.h"
#include "proto/layout.h"
#include "tests/lib/daemons.h"

#define FEATURES  "heads/alternatives/SmolLM2-135M-Instruct.features2.safetensors"
#define EMBEDDING "heads/alternatives/SmolLM2-135M-Instruct.embedding2.safetensors"

enum { PROMPT = 3 * BLOCK_TOKENS + 20, SHORT = 8, TOKENS = 8, STORES = 6 };

static struct daemons daemons; /* large */

/* One request, whose tokens are left in requests[0]. */
static void request(struct daemons *d, uint32_t prompt, uint32_t cached)
{
    const struct daemons_request *q = &d->requests[0];
    daemons_clear(d);
    daemons_ask(d, prompt, 0, TOKENS, SELECTION_CURRENT, GENERATE_REUSE);
    daemons_run(d, NULL);
    if (q->done.reason != FINISH_LENGTH)
        fail_msg("no answer: %s", q->done.text);
    assert_int_equal(q->count, TOKENS);
    assert_int_equal(q->done.cached_tokens, cached);
}

static void dies_between_requests(const char *head, uint32_t cached_behind)
{
    runcase_need_model();
    struct daemons *d = &daemons;
    const uint32_t *tokens = d->requests[0].tokens;
    uint32_t first[TOKENS];
    daemons_open(d, head, "cpu", "512");
    request(d, PROMPT, 0);
    memcpy(first, tokens, sizeof first);
    request(d, PROMPT, 3 * BLOCK_TOKENS);
    assert_memory_equal(tokens, first, sizeof first);
    daemons_kill(d, RUNCASE_RETRIEVER);
    daemons_start(d, RUNCASE_RETRIEVER);
    request(d, PROMPT, cached_behind);
    assert_memory_equal(tokens, first, sizeof first);
    request(d, PROMPT, 3 * BLOCK_TOKENS);
    assert_memory_equal(tokens, first, sizeof first);
    daemons_close(d);
}

static void test_retriever_dies_between_requests(void **state)
{
    (void)state;
    dies_between_requests(FEATURES, 0);
}

/* Which is asked to open a sequence when the store is. */
static void test_retriever_without_features_dies(void **state)
{
    (void)state;
    dies_between_requests(EMBEDDING, 3 * BLOCK_TOKENS);
}

static bool has_greeted(struct daemons *d)
{
    return bus_client_state(d->client) == BUS_READY;
}

static bool has_token(struct daemons *d)
{
    return d->requests[0].count > 0;
}

/* Rows that only the device had are not there any more, and nothing is made of those that are. */
static void test_dies_while_host_memory_lacks_layers(void **state)
{
    (void)state;
    runcase_need_model();
    struct daemons *d = &daemons;
    const uint32_t *tokens = d->requests[0].tokens;
    struct proc *decoder = &d->parts[RUNCASE_DECODER];
    uint32_t first[TOKENS];
    daemons_open(d, EMBEDDING, "cpu", "512");
    request(d, PROMPT, 0);
    memcpy(first, tokens, sizeof first);
    daemons_disconnect(d);
    daemons_kill(d, RUNCASE_DECODER);
    d->lacks_layers = true;
    daemons_restart(d, RUNCASE_KVSTORE);
    for (int i = 0; i < 3; i++) {
        daemons_start(d, RUNCASE_DECODER);
        daemons_connect(d);
        daemons_run(d, daemons_ready);
        request(d, PROMPT, 0);
        assert_memory_equal(tokens, first, sizeof first);
        daemons_clear(d);
        daemons_ask(d, PROMPT, 0, TOKENS, SELECTION_CURRENT, GENERATE_REUSE);
        daemons_run(d, has_token);
        daemons_disconnect(d);
        if (i == 1) { /* the store first: the decoder ends by itself */
            daemons_kill(d, RUNCASE_KVSTORE);
            assert_true(proc_wait(decoder, clock_now_ns() + DAEMONS_WAIT_S * CLOCK_S));
            assert_true(proc_exited(decoder, 1));
            assert_true(daemons_said(d, RUNCASE_DECODER, "kvstore is gone"));
            proc_free(decoder);
            daemons_start(d, RUNCASE_KVSTORE);
        } else {
            daemons_kill(d, RUNCASE_DECODER);
        }
    }
    daemons_close(d);
}

/* The decoder waits for the store, the retriever does not know yet that it is another one: the first sets
 * of a short prompt may come before its greeting, and are lost. The step that waits for them must not be. */
static void test_store_started_again(void **state)
{
    (void)state;
    runcase_need_model();
    struct daemons *d = &daemons;
    daemons_init(d, FEATURES, "cpu", "512");
    daemons_start(d, RUNCASE_RETRIEVER);
    for (int i = 0; i < STORES; i++) {
        daemons_start(d, RUNCASE_DECODER);
        daemons_connect(d);
        daemons_run(d, has_greeted);
        daemons_start(d, RUNCASE_KVSTORE);
        daemons_run(d, daemons_ready);
        request(d, SHORT, 0);
        daemons_disconnect(d);
        daemons_kill(d, RUNCASE_KVSTORE);
        daemons_kill(d, RUNCASE_DECODER);
    }
    daemons_close(d);
}

/* What a test that failed left. */
static int close_daemons(void **state)
{
    (void)state;
    daemons_close(&daemons);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_retriever_dies_between_requests, close_daemons),
        cmocka_unit_test_teardown(test_retriever_without_features_dies, close_daemons),
        cmocka_unit_test_teardown(test_store_started_again, close_daemons),
        cmocka_unit_test_teardown(test_dies_while_host_memory_lacks_layers, close_daemons),
    };
    return cmocka_run_group_tests(tests, runcase_set_up, runcase_tear_down);
}
