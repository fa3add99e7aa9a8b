/* Daemons without a supervisor. A retriever that dies between two requests: the next one has no keys of
 * prompts, so nothing is taken from the store's cache at first, and answers stay what they were. A store that
 * is started again so soon that the retriever sends sets before it has noticed. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/loop.h"
#include "link/bus.h"
#include "link/runtime.h"
#include "proto/layout.h"
#include "tests/lib/runcase.h"
#include "tests/lib/temp.h"

#define FEATURES  "heads/alternatives/SmolLM2-135M-Instruct.features2.safetensors"
#define EMBEDDING "heads/alternatives/SmolLM2-135M-Instruct.embedding2.safetensors"
#define WAIT_S    120

enum { PROMPT = 3 * BLOCK_TOKENS + 20, TOKENS = 8, STORES = 6 };

struct stage {
    char dir[RUNTIME_PATH_MAX];
    const char *head;
    struct proc kvstore, retriever, decoder;
    struct loop *loop;
    struct bus *bus;
    struct bus_client *client;
    uint64_t request;
    uint32_t prompt;
    uint32_t tokens[TOKENS], count;
    struct msg_done done;
    bool ended, lost;
    int64_t deadline_ns;
};

static void start(struct proc *proc, const struct stage *s, const char *name, const char *const *more)
{
    const char *argv[24] = {proc_program(name), "--runtime", s->dir, "--log", "warn"};
    int n = 5;
    while (*more)
        argv[n++] = *more++;
    proc_start(proc, argv, NULL);
}
#define START(s, part, ...) \
    start(&(s)->part, s, "specontext-" #part, (const char *const[]){__VA_ARGS__, NULL})

static void start_retriever(struct stage *s)
{
    START(s, retriever, "-m", RUNCASE_MODEL, "-H", s->head, "--context", "1024", "--threads", "1");
}

static void on_message(void *arg, struct msg *msg)
{
    struct stage *s = arg;
    if (msg->id != s->request)
        return;
    for (uint32_t i = 0; msg->kind == MSG_TOKEN && i < msg->token.tokens.count && s->count < TOKENS; i++)
        s->tokens[s->count++] = msg->token.tokens.at[i];
    if (msg->kind != MSG_DONE)
        return;
    s->done = msg->done;
    s->ended = true;
}

static void on_lost(void *arg, const char *why)
{
    (void)why;
    ((struct stage *)arg)->lost = true;
}

/* Sends the request, again whenever a part is not there yet. */
static void on_tick(void *arg)
{
    struct stage *s = arg;
    uint32_t ids[PROMPT];
    for (uint32_t i = 0; i < s->prompt; i++)
        ids[i] = 1000 + i * 37 % 4001;
    struct msg msg = {.kind = MSG_GENERATE,
                      .generate = {.flags = GENERATE_REUSE | GENERATE_IGNORE_EOS,
                                   .max_tokens = TOKENS,
                                   .budget = 96,
                                   .sinks = 4,
                                   .window = 16,
                                   .sampling = {.top_p = 1, .repeat_penalty = 1},
                                   .tokens = {ids, s->prompt}}};
    bool again = s->ended && s->done.reason == FINISH_ERROR;
    if (s->lost || clock_now_ns() > s->deadline_ns || (s->ended && !again))
        loop_stop(s->loop, 0);
    if (bus_client_state(s->client) != BUS_READY || (s->request && !again))
        return;
    s->ended = false;
    s->count = 0;
    msg.id = ++s->request;
    if (bus_send(s->client, &msg) < 0) {
        s->request--;
        s->ended = again;
    }
}

/* What it has told, for a person. */
static const char *said(struct proc *proc)
{
    proc_pump(proc, clock_now_ns() + 100 * CLOCK_MS);
    return proc->err.text ? proc->err.text : "";
}

static void request(struct stage *s, uint32_t cached)
{
    s->done = (struct msg_done){.reason = FINISH_ERROR};
    s->ended = s->request > 0; /* a new one is due */
    s->deadline_ns = clock_now_ns() + WAIT_S * CLOCK_S;
    int timer = loop_add_timer(s->loop, 50 * CLOCK_MS, on_tick, s);
    loop_run(s->loop);
    loop_remove_timer(s->loop, timer);
    if (s->lost || !s->ended || s->done.reason != FINISH_LENGTH)
        fail_msg("no answer: %s\n%s%s%s", s->done.text, said(&s->kvstore), said(&s->retriever),
                 said(&s->decoder));
    assert_int_equal(s->count, TOKENS);
    assert_int_equal(s->done.cached_tokens, cached);
}

static void end(struct proc *proc)
{
    kill(proc->pid, SIGKILL);
    assert_true(proc_wait(proc, clock_now_ns() + WAIT_S * CLOCK_S));
    proc_free(proc);
}

static void start_kvstore(struct stage *s)
{
    START(s, kvstore, "--device-memory", "64M", "--host-memory", "256M", "--threads", "1");
}

static void start_decoder(struct stage *s)
{
    START(s, decoder, "-m", RUNCASE_MODEL, "--context", "1024", "--threads", "1");
}

static void connect_client(struct stage *s)
{
    static const struct bus_client_ops ops = {NULL, on_message, on_lost};
    struct msg_hello hello = {.role = ROLE_LAUNCH, .version_min = MSG_VERSION_MIN, .pid = 1};
    struct err err = {0};
    char path[RUNTIME_PATH_MAX];
    s->loop = loop_create();
    s->bus = bus_create(s->loop, &hello);
    s->request = 0;
    s->lost = false;
    assert_int_equal(runtime_path(s->dir, "decoder.sock", path, &err), 0);
    assert_int_equal(bus_connect(s->bus, path, &ops, s, &s->client, &err), 0);
}

static void disconnect_client(struct stage *s)
{
    bus_free(&s->bus);
    loop_free(&s->loop);
}

static void dies_between_requests(const char *head, uint32_t cached_behind)
{
    runcase_need_model();
    struct stage s = {.prompt = PROMPT, .head = head};
    uint32_t first[TOKENS];
    snprintf(s.dir, sizeof s.dir, "%s", runcase_path("run"));
    start_kvstore(&s);
    start_retriever(&s);
    start_decoder(&s);
    connect_client(&s);
    request(&s, 0);
    memcpy(first, s.tokens, sizeof first);
    request(&s, 3 * BLOCK_TOKENS);
    assert_memory_equal(s.tokens, first, sizeof first);
    end(&s.retriever);
    start_retriever(&s);
    request(&s, cached_behind);
    assert_memory_equal(s.tokens, first, sizeof first);
    request(&s, 3 * BLOCK_TOKENS);
    assert_memory_equal(s.tokens, first, sizeof first);
    disconnect_client(&s);
    end(&s.decoder);
    end(&s.retriever);
    end(&s.kvstore);
    temp_remove(s.dir);
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

static void on_greeted(void *arg)
{
    struct stage *s = arg;
    if (bus_client_state(s->client) == BUS_READY || clock_now_ns() > s->deadline_ns)
        loop_stop(s->loop, 0);
}

/* The decoder waits for the store, the retriever does not know yet that it is another one: the first sets
 * of a short prompt may come before its greeting, and are lost. The step that waits for them must not be. */
static void test_store_started_again(void **state)
{
    (void)state;
    runcase_need_model();
    struct stage s = {.prompt = 8, .head = FEATURES};
    snprintf(s.dir, sizeof s.dir, "%s", runcase_path("run"));
    start_retriever(&s);
    for (int i = 0; i < STORES; i++) {
        start_decoder(&s);
        connect_client(&s);
        s.deadline_ns = clock_now_ns() + WAIT_S * CLOCK_S;
        int timer = loop_add_timer(s.loop, 10 * CLOCK_MS, on_greeted, &s);
        loop_run(s.loop);
        loop_remove_timer(s.loop, timer);
        start_kvstore(&s);
        request(&s, 0);
        disconnect_client(&s);
        end(&s.kvstore);
        end(&s.decoder);
    }
    end(&s.retriever);
    temp_remove(s.dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_retriever_dies_between_requests),
                                       cmocka_unit_test(test_retriever_without_features_dies),
                                       cmocka_unit_test(test_store_started_again)};
    return cmocka_run_group_tests(tests, runcase_set_up, runcase_tear_down);
}
