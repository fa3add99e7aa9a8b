/* The decoder as a process, between a retriever, a store and a client that this test plays over real sockets:
 * greeting, attachment, requests, drain, and the ends it must make when a part goes. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/loop.h"
#include "decoder/identity.h"
#include "decoder/serve.h"
#include "link/bus.h"
#include "link/fdpass.h"
#include "link/runtime.h"
#include "tests/lib/fakegpu.h"
#include "tests/unit/decoder_model.h"
#include "tests/unit/decoder_store.h"

enum { DEADLINE_S = 60, PROMPT = 20, CHUNK = 8, PROMPT_STEPS = 3, REQUESTS = 8 };

struct heard { /* of one request */
    uint32_t tokens, progress, done;
    struct msg_done last;
};

struct stage {
    struct model *model;
    struct identity identity;
    char dir[RUNTIME_PATH_MAX];
    pid_t child;
    int pidfd, listen_fd, connection, lifeline[2];
    struct loop *loop;
    struct bus *bus;
    struct bus_server *store_server, *retriever_server;
    struct bus_client *client;
    struct store store;
    bool attached, ready, reported;
    uint32_t index_used, opened, closed;
    uint64_t selections;
    struct heard heard[REQUESTS];
    struct msg_error error; /* last ERROR of the decoder */
    char status[8192];
    bool (*until)(struct stage *); /* ends stage_run */
    bool timed_out;
    int exit_status; /* of the child; -1: runs */
};

static bool decoder_on_gpu, store_on_gpu; /* of the stages that are opened next */

/* ---- the parts that are played ---- */

static void reply(struct bus_server *server, struct bus_peer *peer, struct msg *msg)
{
    assert_int_equal(bus_reply(server, peer, msg), 0);
}

static void store_message(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct stage *s = arg;
    struct msg out = {.id = msg->id};
    if (msg->kind == MSG_OPEN) {
        uint32_t i = 0;
        while (s->index_used & (1u << i))
            i++;
        assert_true(i < STORE_SEQUENCES);
        s->index_used |= 1u << i;
        s->opened++;
        out.kind = MSG_GRANT;
        out.grant = (struct msg_grant){msg->open.sequence, i, 0};
        reply(s->store_server, peer, &out);
    } else if (msg->kind == MSG_CLOSE) {
        s->closed++;
        s->index_used = 0; /* one at a time in these tests */
        out.kind = MSG_CLOSED;
        out.closed.sequence = msg->close.sequence;
        reply(s->store_server, peer, &out);
    }
}

static void retriever_message(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct stage *s = arg;
    (void)peer;
    for (uint32_t i = 0; msg->kind == MSG_STEP && i < msg->step.entry_count; i++)
        s->selections += msg->step.entries[i].flags & STEP_ENTRY_SELECT;
}

static void on_ask(void *arg, uint32_t events)
{
    (void)events;
    struct stage *s = arg;
    struct fdpass_frame frame;
    struct err err = {0};
    int fds[FDPASS_FDS_MAX], spare;
    if (s->attached) {
        loop_remove_fd(s->loop, s->connection);
        return;
    }
    assert_int_equal(fdpass_recv(s->connection, clock_now_ns() + DEADLINE_S * CLOCK_S, &frame, fds, &err), 0);
    assert_int_equal(frame.kind, FDPASS_ASK);
    assert_int_equal(frame.role, ROLE_DECODER);
    const struct gpu_api *api = NULL;
    if (store_on_gpu)
        assert_int_equal(gpu_load(&api, &err), 0);
    store_start_on(&s->store, &s->identity.layout, frame.epoch, api);
    assert_int_equal(doorbell_create(&spare), 0);
    int give[] = {s->store.device_segment.fd, s->store.control_segment.fd, s->store.bell, spare};
    struct fdpass_frame answer = {
        .magic = FDPASS_MAGIC, .kind = FDPASS_DECODER, .role = ROLE_KVSTORE, .fds = store_on_gpu ? 3 : 4};
    assert_int_equal(fdpass_send(s->connection, &answer, give + (store_on_gpu ? 1 : 0), &err), 0);
    close(spare);
    s->attached = true;
}

static void on_accept(void *arg, uint32_t events)
{
    (void)events;
    struct stage *s = arg;
    pid_t pid;
    assert_int_equal(fdpass_accept(s->listen_fd, &s->connection, &pid, NULL), 0);
    assert_int_equal(pid, s->child);
    loop_add_fd(s->loop, s->connection, EPOLLIN, on_ask, s);
}

static void client_message(void *arg, struct msg *msg)
{
    struct stage *s = arg;
    struct heard *h = &s->heard[msg->id % REQUESTS];
    switch (msg->kind) {
    case MSG_REPORT:
        snprintf(s->status, sizeof s->status, "%.*s", (int)msg->report.json.bytes,
                 (const char *)msg->report.json.data);
        s->ready = strstr(s->status, "\"state\":\"ready\"") != NULL;
        s->reported = true;
        break;
    case MSG_TOKEN:
        h->tokens += msg->token.tokens.count;
        break;
    case MSG_PROGRESS:
        h->progress = msg->progress.done;
        break;
    case MSG_DONE:
        h->done++;
        h->last = msg->done;
        break;
    case MSG_ERROR:
        s->error = msg->error;
        break;
    }
}

/* ---- running ---- */

static void check_until(void *arg)
{
    struct stage *s = arg;
    int status;
    if (s->exit_status == -1 && waitpid(s->child, &status, WNOHANG) == s->child)
        s->exit_status = WIFEXITED(status) ? WEXITSTATUS(status) : 256 + WTERMSIG(status);
    if (!s->ready && s->exit_status == -1) {
        struct msg ask = {.kind = MSG_STATUS, .id = 1};
        bus_send(s->client, &ask);
    }
    if (s->until(s))
        loop_stop(s->loop, 0);
}

static void on_child(void *arg, uint32_t events)
{
    (void)events;
    struct stage *s = arg;
    check_until(s);
    loop_remove_fd(s->loop, s->pidfd);
}

static void on_deadline(void *arg)
{
    struct stage *s = arg;
    s->timed_out = true;
    loop_stop(s->loop, 1);
}

static void run_until(struct stage *s, bool (*until)(struct stage *))
{
    s->until = until;
    int tick = loop_add_timer(s->loop, 5 * CLOCK_MS, check_until, s);
    int deadline = loop_add_timer(s->loop, DEADLINE_S * CLOCK_S, on_deadline, s);
    loop_run(s->loop);
    loop_remove_timer(s->loop, tick);
    loop_remove_timer(s->loop, deadline);
    if (s->timed_out)
        fail_msg("nothing came for %d s; status %s", DEADLINE_S, s->status);
}

static bool is_ready(struct stage *s)
{
    return s->ready || s->exit_status != -1;
}

static bool has_ended(struct stage *s)
{
    return s->exit_status != -1;
}

static bool first_token(struct stage *s)
{
    return s->heard[1].tokens > 0 || s->exit_status != -1;
}

static bool first_done(struct stage *s)
{
    return s->heard[1].done > 0;
}

static bool ended_and_done(struct stage *s)
{
    return s->exit_status != -1 && s->heard[1].done > 0;
}

static bool second_done(struct stage *s)
{
    return s->heard[2].done > 0;
}

static bool got_report(struct stage *s)
{
    return s->reported;
}

static bool got_error(struct stage *s)
{
    return s->error.code != 0;
}

static void start_child(struct stage *s, const char *path)
{
    assert_int_equal(runtime_lifeline(s->lifeline), 0);
    s->child = fork();
    assert_true(s->child >= 0);
    if (s->child == 0) {
        struct settings options = {.daemon = {s->dir, s->lifeline[0], LOG_LEVEL_ERROR},
                                   .model = path,
                                   .device = decoder_on_gpu ? "cuda:0" : "cpu",
                                   .context = STORE_CONTEXT,
                                   .threads = 1,
                                   .sequences = STORE_SEQUENCES,
                                   .chunk = CHUNK,
                                   .early_layers = -1};
        close(s->lifeline[1]);
        log_init("decoder", LOG_LEVEL_ERROR);
        _exit(serve_run(&options, s->model));
    }
    close(s->lifeline[0]);
    s->pidfd = (int)syscall(SYS_pidfd_open, s->child, 0);
    assert_true(s->pidfd >= 0);
}

/* `wrong_model`: the retriever is one for another model. */
static void stage_open(struct stage *s, bool wrong_model)
{
    memset(s, 0, sizeof *s);
    struct err err = {0};
    const char *path = decoder_on_gpu ? decoder_model_gpu() : decoder_model();
    s->exit_status = s->connection = -1;
    if (model_open(path, &s->model, &err) < 0 ||
        identity_init(&s->identity, s->model, STORE_CONTEXT, &err) < 0 ||
        runtime_make_private(s->dir, &err) < 0)
        fail_msg("%s", err.text);
    layout_set_groups(&s->identity.layout, 2);
    start_child(s, path); /* before this process has threads or sockets */
    s->loop = loop_create();
    struct msg_hello hello;
    identity_hello(&s->identity, &hello);
    hello.role = ROLE_LAUNCH;
    hello.head = 77;
    hello.layout.model.lo += wrong_model;
    s->bus = bus_create(s->loop, &hello);
    char at[RUNTIME_PATH_MAX];
    static const struct bus_server_ops store_ops = {.message = store_message};
    static const struct bus_server_ops retriever_ops = {.message = retriever_message};
    static const struct bus_client_ops client_ops = {.message = client_message};
    assert_int_equal(runtime_path(s->dir, "kvstore.sock", at, &err), 0);
    assert_int_equal(bus_serve(s->bus, at, ROLE_KVSTORE, &store_ops, s, &s->store_server, &err), 0);
    assert_int_equal(runtime_path(s->dir, "retriever.sock", at, &err), 0);
    assert_int_equal(bus_serve(s->bus, at, ROLE_RETRIEVER, &retriever_ops, s, &s->retriever_server, &err), 0);
    assert_int_equal(runtime_path(s->dir, "kvstore.fd", at, &err), 0);
    assert_int_equal(fdpass_listen(at, &s->listen_fd, &err), 0);
    assert_int_equal(runtime_path(s->dir, "decoder.sock", at, &err), 0);
    assert_int_equal(bus_connect(s->bus, at, &client_ops, s, &s->client, &err), 0);
    assert_int_equal(loop_add_fd(s->loop, s->listen_fd, EPOLLIN, on_accept, s), 0);
    assert_int_equal(loop_add_fd(s->loop, s->pidfd, EPOLLIN, on_child, s), 0);
}

static void stage_close(struct stage *s)
{
    if (s->exit_status == -1) {
        kill(s->child, SIGKILL);
        waitpid(s->child, NULL, 0);
    }
    if (s->attached)
        store_stop(&s->store);
    bus_free(&s->bus);
    loop_free(&s->loop);
    close(s->listen_fd);
    close(s->pidfd);
    if (s->connection >= 0)
        close(s->connection);
    if (s->lifeline[1] >= 0)
        close(s->lifeline[1]);
    runtime_remove(s->dir);
    assert_int_equal(access(s->dir, F_OK), -1);
    model_free(&s->model);
}

static void say(struct stage *s, uint32_t kind, uint64_t id)
{
    struct msg msg = {.kind = kind, .id = id};
    assert_int_equal(bus_send(s->client, &msg), 0);
}

/* Until the decoder's loop has handled everything that was said before. */
static void settle(struct stage *s)
{
    s->reported = false;
    say(s, MSG_STATUS, 1);
    run_until(s, got_report);
}

static void generate(struct stage *s, uint64_t id, uint32_t max_tokens, uint32_t flags)
{
    uint32_t ids[PROMPT];
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = 5 + i * 3;
    struct msg msg = {.kind = MSG_GENERATE, .id = id};
    msg.generate = (struct msg_generate){.flags = flags | GENERATE_IGNORE_EOS,
                                         .max_tokens = max_tokens,
                                         .budget = 64,
                                         .sinks = 4,
                                         .window = 16,
                                         .sampling = {.top_p = 1, .repeat_penalty = 1},
                                         .tokens = {ids, PROMPT}};
    assert_int_equal(bus_send(s->client, &msg), 0);
}

/* ---- tests ---- */

static struct stage stage;

/* A request comes to its end, a second one of its name is refused, one is cancelled; DRAIN ends with 0. */
static void test_requests(void **state)
{
    (void)state;
    struct stage *s = &stage;
    stage_open(s, false);
    run_until(s, is_ready);
    assert_true(s->ready);
    generate(s, 1, 6, 0);
    run_until(s, first_done);
    assert_int_equal(s->heard[1].last.reason, FINISH_LENGTH);
    assert_int_equal(s->heard[1].tokens, 6);
    assert_int_equal(s->heard[1].progress, PROMPT);
    assert_int_equal(s->heard[1].last.generated_tokens, 6);
    assert_int_equal(s->selections, 5);
    memset(s->heard, 0, sizeof s->heard);
    store_allow(&s->store, PROMPT_STEPS + 1);
    generate(s, 1, 150, GENERATE_FULL);
    run_until(s, first_token);
    generate(s, 1, 150, GENERATE_FULL);
    run_until(s, got_error);
    assert_int_equal(s->error.code, -EEXIST);
    say(s, MSG_CANCEL, 1);
    settle(s);
    store_allow(&s->store, INT_MAX);
    run_until(s, first_done);
    assert_int_equal(s->heard[1].last.reason, FINISH_CANCELLED);
    assert_int_equal(s->opened, 2);
    assert_int_equal(s->closed, 2);
    memset(s->heard, 0, sizeof s->heard);
    store_allow(&s->store, PROMPT_STEPS + 1);
    generate(s, 1, 30, 0);
    run_until(s, first_token);
    say(s, MSG_DRAIN, 0);
    generate(s, 2, 30, 0);
    run_until(s, second_done);
    store_allow(&s->store, INT_MAX);
    run_until(s, ended_and_done);
    assert_int_equal(s->exit_status, 0);
    assert_int_equal(s->heard[1].tokens, 30);
    assert_int_equal(s->heard[2].last.code, -ESHUTDOWN);
    stage_close(s);
}

/* The end of the descriptor socket is the store's death: the client hears it, the process ends with 1. */
static void test_store_dies(void **state)
{
    (void)state;
    struct stage *s = &stage;
    stage_open(s, false);
    run_until(s, is_ready);
    store_allow(&s->store, PROMPT_STEPS + 1);
    generate(s, 1, 200, 0);
    run_until(s, first_token);
    close(s->connection);
    s->connection = -1;
    run_until(s, ended_and_done);
    assert_int_equal(s->exit_status, 1);
    assert_int_equal(s->heard[1].last.reason, FINISH_ERROR);
    assert_non_null(strstr(s->heard[1].last.text, "kvstore is gone"));
    stage_close(s);
}

static void test_lifeline(void **state)
{
    (void)state;
    struct stage *s = &stage;
    stage_open(s, false);
    run_until(s, is_ready);
    close(s->lifeline[1]);
    s->lifeline[1] = -1;
    run_until(s, has_ended);
    assert_int_equal(s->exit_status, 0);
    stage_close(s);
}

static void test_signal(void **state)
{
    (void)state;
    struct stage *s = &stage;
    stage_open(s, false);
    run_until(s, is_ready);
    store_allow(&s->store, PROMPT_STEPS + 1);
    generate(s, 1, 200, 0);
    run_until(s, first_token);
    kill(s->child, SIGTERM);
    run_until(s, ended_and_done);
    assert_int_equal(s->exit_status, 0);
    stage_close(s);
}

static void test_wrong_retriever(void **state)
{
    (void)state;
    struct stage *s = &stage;
    stage_open(s, true);
    run_until(s, has_ended);
    assert_int_equal(s->exit_status, 1);
    assert_false(s->attached);
    stage_close(s);
}

/* All of it with the model and device memory on the double of a GPU, in two processes that share its
 * cards. */
static int on_gpu(void **state)
{
    (void)state;
    decoder_on_gpu = store_on_gpu = true;
    char card[32];
    snprintf(card, sizeof card, "serve%d",
             (int)getpid()); /* of this process: another build's test may run beside */
    fakegpu_use(card);
    return 0;
}

static int on_cpu(void **state)
{
    (void)state;
    decoder_on_gpu = store_on_gpu = false;
    return 0;
}

/* Device memory that is not where the model is computed: refused, one way and the other. */
static void test_device_elsewhere(void **state)
{
    (void)state;
    struct stage *s = &stage;
    for (int i = 0; i < 2; i++) {
        decoder_on_gpu = i;
        store_on_gpu = !i;
        stage_open(s, false);
        run_until(s, has_ended);
        assert_int_equal(s->exit_status, 1);
        assert_true(s->attached);
        stage_close(s);
    }
}

#define ON_GPU(test) cmocka_unit_test_setup_teardown(test, on_gpu, on_cpu)

int main(void)
{
    const struct CMUnitTest tests[] = {
        ON_GPU(test_requests),
        ON_GPU(test_store_dies),
        ON_GPU(test_signal),
        ON_GPU(test_device_elsewhere),
        cmocka_unit_test(test_requests),
        cmocka_unit_test(test_store_dies),
        cmocka_unit_test(test_lifeline),
        cmocka_unit_test(test_signal),
        cmocka_unit_test(test_wrong_retriever),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
