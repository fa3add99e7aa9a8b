/* The command line's client against three servers in this process: greeting, requests and their answers, an
 * error in place of DONE, a refused greeting, a daemon that goes silent. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "launch/client.h"
#include "link/bus.h"
#include "link/runtime.h"
#include "tests/lib/temp.h"

#define BOUND_NS (60 * CLOCK_S)

struct world;

struct daemon {
    struct world *world;
    enum client_part part;
    struct bus *bus;
    struct bus_server *server;
};

struct world {
    char dir[PATH_MAX];
    struct loop *loop;
    struct daemon daemons[CLIENT_PARTS];
    struct client *client;
    int64_t deadline_ns;
    bool refuse; /* the decoder refuses greetings */
    /* what the client told */
    int attached, lost, dones, reports;
    enum client_part lost_part;
    char why[1024], json[64];
    uint32_t done_request, token_request, tokens[8], token_count, progress_done;
    struct msg_done done;
    /* what the decoder saw */
    int cancels;
    struct msg_sampling sampling;
};

static int on_hello(void *arg, struct bus_peer *peer, const struct msg_hello *hello, struct err *err)
{
    struct daemon *d = arg;
    (void)peer;
    assert_int_equal(hello->role, ROLE_LAUNCH);
    if (d->world->refuse && d->part == CLIENT_DECODER)
        return err_set(err, -EPERM, "not you");
    return 0;
}

static void answer_generate(struct daemon *d, struct bus_peer *peer, const struct msg *msg)
{
    struct msg reply = {.id = msg->id};
    d->world->sampling = msg->generate.sampling;
    if (msg->generate.max_tokens == 0) { /* the test's sign for "refuse it" */
        reply.kind = MSG_ERROR;
        reply.error = (struct msg_error){.code = -ENOSPC, .text = "needed 10, free 3"};
        assert_int_equal(bus_reply(d->server, peer, &reply), 0);
        return;
    }
    reply.kind = MSG_PROGRESS;
    reply.progress = (struct msg_progress){.done = 2, .total = 3, .cached = 1};
    assert_int_equal(bus_reply(d->server, peer, &reply), 0);
    reply.kind = MSG_TOKEN;
    reply.token = (struct msg_token){.tokens = msg->generate.tokens};
    assert_int_equal(bus_reply(d->server, peer, &reply), 0);
    reply.kind = MSG_DONE;
    reply.done = (struct msg_done){.reason = FINISH_LENGTH, .prompt_tokens = 3, .generated_tokens = 3};
    assert_int_equal(bus_reply(d->server, peer, &reply), 0);
}

static void on_request(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct daemon *d = arg;
    if (msg->kind == MSG_GENERATE)
        answer_generate(d, peer, msg);
    else if (msg->kind == MSG_CANCEL)
        d->world->cancels++;
}

static char *on_status(void *arg)
{
    (void)arg;
    return strdup("{\"steps\": 12}");
}

static const struct bus_server_ops server_ops = {
    .hello = on_hello, .message = on_request, .status = on_status};

static void on_attached(void *arg)
{
    struct world *w = arg;
    w->attached++;
}

static void on_lost(void *arg, enum client_part part, const char *why)
{
    struct world *w = arg;
    w->lost++;
    w->lost_part = part;
    snprintf(w->why, sizeof w->why, "%s", why);
}

static void on_progress(void *arg, uint32_t request, const struct msg_progress *progress)
{
    struct world *w = arg;
    (void)request;
    w->progress_done = progress->done;
}

static void on_tokens(void *arg, uint32_t request, const struct msg_u32s *tokens)
{
    struct world *w = arg;
    w->token_request = request;
    for (uint32_t i = 0; i < tokens->count && w->token_count < 8; i++)
        w->tokens[w->token_count++] = tokens->at[i];
}

static void on_done(void *arg, uint32_t request, const struct msg_done *done)
{
    struct world *w = arg;
    w->dones++;
    w->done_request = request;
    w->done = *done;
}

static void on_report(void *arg, enum client_part part, const char *json, uint32_t bytes)
{
    struct world *w = arg;
    (void)part;
    w->reports++;
    snprintf(w->json, sizeof w->json, "%.*s", (int)bytes, json);
}

static const struct client_ops ops = {.attached = on_attached,
                                      .lost = on_lost,
                                      .progress = on_progress,
                                      .tokens = on_tokens,
                                      .done = on_done,
                                      .report = on_report};

static void serve(struct world *w, enum client_part part)
{
    static const uint32_t roles[CLIENT_PARTS] = {ROLE_KVSTORE, ROLE_RETRIEVER, ROLE_DECODER};
    struct daemon *d = &w->daemons[part];
    struct msg_hello hello = {.role = roles[part], .version_min = MSG_VERSION_MIN, .pid = 100 + part};
    char name[32], path[RUNTIME_PATH_MAX];
    snprintf(name, sizeof name, "%s.sock", client_part_name(part));
    assert_int_equal(runtime_path(w->dir, name, path, NULL), 0);
    *d = (struct daemon){.world = w, .part = part, .bus = bus_create(w->loop, &hello)};
    assert_int_equal(bus_serve(d->bus, path, roles[part], &server_ops, d, &d->server, NULL), 0);
}

static void on_tick(void *arg)
{
    struct world *w = arg;
    loop_stop(w->loop, clock_now_ns() >= w->deadline_ns ? -1 : 0);
}

/* Runs the loop until *counter has moved off `from`. */
static void until(struct world *w, const int *counter, int from)
{
    w->deadline_ns = clock_now_ns() + BOUND_NS;
    while (*counter == from)
        assert_int_equal(loop_run(w->loop), 0);
}

static void begin(struct world *w)
{
    *w = (struct world){.loop = loop_create()};
    temp_make(w->dir);
    loop_add_timer(w->loop, 10 * CLOCK_MS, on_tick, w);
    assert_int_equal(client_create(w->loop, w->dir, &ops, w, &w->client, NULL), 0);
}

static void end(struct world *w)
{
    client_free(&w->client);
    assert_null(w->client);
    for (int i = 0; i < CLIENT_PARTS; i++)
        bus_free(&w->daemons[i].bus);
    loop_free(&w->loop);
    temp_remove(w->dir);
}

static void test_requests(void **state)
{
    (void)state;
    struct world w;
    begin(&w);
    const uint32_t ids[] = {5, 6, 7};
    struct msg_generate generate = {
        .max_tokens = 9,
        .sampling = {.temperature = 0.5f, .top_p = 0.9f, .repeat_penalty = 1, .seed = 42},
        .tokens = {.at = ids, .count = 3}};
    assert_int_equal(client_generate(w.client, 0, &generate), -ENOTCONN); /* nobody is there yet */
    for (int i = CLIENT_PARTS - 1; i >= 0; i--) /* they come later than the client */
        serve(&w, (enum client_part)i);
    until(&w, &w.attached, 0);
    assert_int_equal(client_part_pid(w.client, CLIENT_DECODER), 100 + CLIENT_DECODER);
    assert_int_equal(client_generate(w.client, 0, &generate), 0);
    until(&w, &w.dones, 0);
    assert_int_equal(w.done_request, 0);
    assert_int_equal(w.done.reason, FINISH_LENGTH);
    assert_int_equal(w.progress_done, 2);
    assert_int_equal(w.token_request, 0);
    assert_int_equal(w.token_count, 3);
    assert_memory_equal(w.tokens, ids, sizeof ids);
    assert_true(w.sampling.temperature == 0.5f && w.sampling.seed == 42);
    generate.max_tokens = 0;
    assert_int_equal(client_generate(w.client, 31, &generate), 0);
    until(&w, &w.dones, 1);
    assert_int_equal(w.done_request, 31);
    assert_int_equal(w.done.reason, FINISH_ERROR);
    assert_int_equal(w.done.code, -ENOSPC);
    assert_string_equal(w.done.text, "needed 10, free 3");
    assert_int_equal(client_cancel(w.client, 31), 0);
    until(&w, &w.cancels, 0);
    assert_int_equal(client_ask_status(w.client, CLIENT_KVSTORE), 0);
    until(&w, &w.reports, 0);
    assert_string_equal(w.json, "{\"steps\": 12}");
    assert_int_equal(w.attached, 1);
    assert_int_equal(w.lost, 0);
    end(&w);
}

static void test_refused_greeting(void **state)
{
    (void)state;
    struct world w;
    begin(&w);
    w.refuse = true;
    for (int i = 0; i < CLIENT_PARTS; i++)
        serve(&w, (enum client_part)i);
    until(&w, &w.lost, 0);
    assert_int_equal(w.lost_part, CLIENT_DECODER);
    assert_non_null(strstr(w.why, "not you"));
    assert_int_equal(w.attached, 0);
    end(&w);
}

static void test_silent_daemon(void **state)
{
    (void)state;
    struct world w;
    begin(&w);
    for (int i = 0; i < CLIENT_PARTS; i++)
        serve(&w, (enum client_part)i);
    until(&w, &w.attached, 0);
    bus_free(&w.daemons[CLIENT_RETRIEVER].bus);
    int64_t from = clock_now_ns();
    until(&w, &w.lost, 0);
    assert_int_equal(w.lost_part, CLIENT_RETRIEVER);
    assert_true(clock_now_ns() - from < 2 * BUS_SILENCE_NS);
    end(&w);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_requests),
        cmocka_unit_test(test_refused_greeting),
        cmocka_unit_test(test_silent_daemon),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
