/* The bus: greeting in either order, restarts and deaths, silence, floods, hostile frames, and permissions. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <zmq.h>

#include "base/clock.h"
#include "link/bus.h"
#include "link/bus_state.h"
#include "link/runtime.h"

enum { PEERS_MAX = 64 };

/* What a server or a client was told. */
struct record {
    int hellos, welcomes, messages, losses, gones;
    struct msg last; /* without memory */
    char text[LIMIT_TEXT_BYTES];
    uint64_t epoch, sum;
    struct bus_peer *peer;
    int refuse;                     /* HELLOs to refuse */
    struct bus_client **disconnect; /* client to disconnect within the next callback */
};

struct node {
    struct loop *loop;
    struct bus *bus;
    struct bus_server *server;
    struct bus_client *client;
    struct record record;
};

struct fixture {
    char dir[RUNTIME_PATH_MAX], path[RUNTIME_PATH_MAX];
    struct loop *loop;
    struct node store, one, two;
    void *raw_context, *raw;
};

/* ---- running a loop until something is so ---- */

struct waiter {
    struct loop *loop;
    bool (*done)(const void *arg);
    const void *arg;
    int64_t deadline_ns;
};

static void look(void *arg)
{
    struct waiter *waiter = arg;
    if (waiter->done(waiter->arg))
        loop_stop(waiter->loop, 0);
    else if (clock_now_ns() > waiter->deadline_ns)
        loop_stop(waiter->loop, 1);
}

static bool run_until(struct loop *loop, bool (*done)(const void *arg), const void *arg)
{
    struct waiter waiter = {loop, done, arg, clock_now_ns() + 20 * CLOCK_S};
    int timer = loop_add_timer(loop, CLOCK_MS, look, &waiter);
    int r = loop_run(loop);
    loop_remove_timer(loop, timer);
    return r == 0;
}

struct at_least {
    const int *count;
    int least;
};

static bool is_at_least(const void *arg)
{
    const struct at_least *a = arg;
    return *a->count >= a->least;
}

/* Runs until *count >= least. */
#define until(loop, count, least) \
    assert_true(run_until(loop, is_at_least, &(struct at_least){&(count), least}))

static bool is_later(const void *arg)
{
    return clock_now_ns() >= *(const int64_t *)arg;
}

static bool has_count(const void *arg)
{
    const uint64_t *const *pair = arg;
    return *pair[0] >= *pair[1];
}

/* As until, for a counter of the bus. */
static void until_counter(struct loop *loop, const uint64_t *count, uint64_t least)
{
    const uint64_t *pair[] = {count, &least};
    assert_true(run_until(loop, has_count, pair));
}

/* ---- a server and clients that write down what they are told ---- */

static int on_hello(void *arg, struct bus_peer *peer, const struct msg_hello *hello, struct err *err)
{
    struct record *record = &((struct node *)arg)->record;
    record->hellos++;
    if (record->refuse > 0) {
        record->refuse--;
        return err_set(err, -EINVAL, "no room for a %s today", msg_role_name(hello->role));
    }
    record->peer = peer;
    return 0;
}

static void on_gone(void *arg, struct bus_peer *peer)
{
    struct record *record = &((struct node *)arg)->record;
    record->gones++;
    if (record->peer == peer)
        record->peer = NULL;
}

static void keep(struct record *record, const struct msg *msg)
{
    record->messages++;
    record->last = *msg;
    record->last.memory = NULL;
    if (msg->kind == MSG_ERROR)
        snprintf(record->text, sizeof record->text, "%s", msg->error.text);
    if (msg->kind == MSG_REPORT)
        snprintf(record->text, sizeof record->text, "%s", (const char *)msg->report.json.data);
    if (msg->kind == MSG_TOKEN)
        for (uint32_t i = 0; i < msg->token.tokens.count; i++)
            record->sum += msg->token.tokens.at[i];
    if (record->disconnect)
        bus_disconnect(record->disconnect);
}

static void on_server_message(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct node *node = arg;
    node->record.peer = peer;
    keep(&node->record, msg);
}

static char *on_status(void *arg)
{
    const struct bus_counters *c = bus_counters(((struct node *)arg)->bus);
    char text[200];
    snprintf(text, sizeof text, "{\"late\":%llu,\"messages\":%d}", (unsigned long long)c->dropped_late,
             ((struct node *)arg)->record.messages);
    return strdup(text);
}

static void on_welcome(void *arg, const struct msg_hello *hello, uint64_t epoch)
{
    struct record *record = &((struct node *)arg)->record;
    (void)hello;
    record->welcomes++;
    record->epoch = epoch;
    if (record->disconnect)
        bus_disconnect(record->disconnect);
}

static void on_client_message(void *arg, struct msg *msg)
{
    keep(&((struct node *)arg)->record, msg);
}

static void on_lost(void *arg, const char *why)
{
    struct record *record = &((struct node *)arg)->record;
    record->losses++;
    snprintf(record->text, sizeof record->text, "%s", why);
    if (record->disconnect)
        bus_disconnect(record->disconnect);
}

static const struct bus_server_ops server_ops = {on_hello, on_server_message, on_status, on_gone};
static const struct bus_client_ops client_ops = {on_welcome, on_client_message, on_lost};

static struct msg_hello hello_of(uint32_t role)
{
    struct msg_hello hello = {.role = role, .version_min = 1, .pid = (uint32_t)getpid()};
    strcpy(hello.device, "cpu");
    return hello;
}

static int serve(struct node *node, struct loop *loop, const char *path, uint32_t role)
{
    struct msg_hello hello = hello_of(role);
    *node = (struct node){.loop = loop};
    node->bus = bus_create(loop, &hello);
    return bus_serve(node->bus, path, role, &server_ops, node, &node->server, NULL);
}

static void join(struct node *node, struct loop *loop, const char *path, uint32_t role)
{
    struct msg_hello hello = hello_of(role);
    *node = (struct node){.loop = loop};
    node->bus = bus_create(loop, &hello);
    assert_int_equal(bus_connect(node->bus, path, &client_ops, node, &node->client, NULL), 0);
}

static int setup(void **state)
{
    static struct fixture f;
    memset(&f, 0, sizeof f);
    assert_int_equal(runtime_make_private(f.dir, NULL), 0);
    assert_int_equal(runtime_path(f.dir, "kvstore.sock", f.path, NULL), 0);
    f.loop = loop_create();
    *state = &f;
    return 0;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    if (f->raw)
        zmq_close(f->raw);
    if (f->raw_context)
        zmq_ctx_term(f->raw_context);
    bus_free(&f->one.bus);
    bus_free(&f->two.bus);
    bus_free(&f->store.bus);
    loop_free(&f->loop);
    runtime_remove(f->dir);
    assert_int_equal(access(f->dir, F_OK), -1); /* a server takes its socket away */
    return 0;
}

/* ---- the states ---- */

static void every_state_meets_every_event(void **state)
{
    (void)state;
    static const int expected[BUS_STATE_COUNT][BUS_EVENT_COUNT] = {
        /*               CONNECTED     WELCOME    REFUSED       SILENCE   EPOCH     FORGOTTEN */
        [BUS_NEW] = {BUS_GREETING, -1, -1, -1, -1, -1},
        [BUS_GREETING] = {-1, BUS_READY, BUS_GREETING, -1, -1, -1},
        [BUS_READY] = {-1, -1, -1, BUS_LOST, BUS_LOST, BUS_LOST},
        [BUS_LOST] = {BUS_GREETING, -1, -1, -1, -1, -1},
    };
    for (int s = 0; s < BUS_STATE_COUNT; s++)
        for (int e = 0; e < BUS_EVENT_COUNT; e++)
            assert_int_equal(bus_state_next((enum bus_state)s, (enum bus_event)e), expected[s][e]);
    assert_string_equal(bus_state_name(BUS_READY), "ready");
}

static void servers_may_only_send_answers(void **state)
{
    (void)state;
    int allowed = 0;
    for (uint32_t role = ROLE_DECODER; role <= ROLE_KVSTORE; role++)
        for (uint32_t kind = 0; kind < 64; kind++)
            allowed += bus_answer_allowed(role, kind);
    assert_int_equal(allowed, 3 * 4 + 5 + 3);
    assert_false(bus_answer_allowed(ROLE_KVSTORE, MSG_GENERATE));
    assert_true(bus_answer_allowed(ROLE_DECODER, MSG_DONE));
}

/* ---- greeting ---- */

static void the_client_may_come_first(void **state)
{
    struct fixture *f = *state;
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    assert_int_equal(bus_client_state(f->one.client), BUS_GREETING);
    int64_t later_ns = clock_now_ns() + 30 * CLOCK_MS;
    assert_true(run_until(f->loop, is_later, &later_ns));
    struct msg msg = {.kind = MSG_PREFIX, .prefix.made.kind = ARENA_MADE_FULL};
    assert_int_equal(bus_send(f->one.client, &msg), -ENOTCONN);
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    until(f->loop, f->one.record.welcomes, 1);
    assert_int_equal(bus_client_state(f->one.client), BUS_READY);
    assert_int_equal(f->one.record.epoch, bus_epoch(f->store.bus));
    assert_int_equal(f->store.record.peer->epoch, bus_epoch(f->one.bus));
    assert_int_equal(f->store.record.peer->pid, getpid());
}

static void the_server_may_come_first(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    struct stat st;
    assert_int_equal(stat(f->path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    int64_t begun_ns = clock_now_ns();
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
    assert_true(clock_now_ns() - begun_ns < BUS_PING_NS); /* at once, not with the first repetition */
    assert_ptr_equal(bus_find_role(f->store.server, ROLE_DECODER), f->store.record.peer);
    assert_null(bus_find_role(f->store.server, ROLE_RETRIEVER));
    struct msg status = {.kind = MSG_STATUS, .id = 77};
    assert_int_equal(bus_send(f->one.client, &status), 0);
    until(f->loop, f->one.record.messages, 1);
    assert_int_equal(f->one.record.last.kind, MSG_REPORT);
    assert_int_equal(f->one.record.last.id, 77);
    assert_string_equal(f->one.record.text, "{\"late\":0,\"messages\":0}");
}

static void a_path_has_one_server(void **state)
{
    struct fixture *f = *state;
    struct err err;
    struct node other = {0};
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    assert_int_equal(serve(&other, f->loop, f->path, ROLE_KVSTORE), -EADDRINUSE);
    assert_int_equal(
        bus_serve(other.bus, "kvstore.sock", ROLE_KVSTORE, &server_ops, &other, &other.server, &err),
        -EINVAL);
    assert_int_equal(bus_connect(other.bus, "kvstore.sock", &client_ops, &other, &other.client, &err),
                     -EINVAL);
    bus_free(&other.bus);
    join(&f->one, f->loop, f->path, ROLE_DECODER); /* the first one is as before */
    until(f->loop, f->one.record.welcomes, 1);
}

static void a_refused_greeting_is_told_and_repeated(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    f->store.record.refuse = 1;
    join(&f->one, f->loop, f->path, ROLE_GATEWAY);
    until(f->loop, f->one.record.messages, 1);
    assert_int_equal(f->one.record.last.kind, MSG_ERROR);
    assert_int_equal(f->one.record.last.error.code, -EINVAL);
    assert_string_equal(f->one.record.text, "no room for a gateway today");
    assert_int_equal(bus_client_state(f->one.client), BUS_GREETING);
    assert_null(bus_find_role(f->store.server, ROLE_GATEWAY));
    until(f->loop, f->one.record.welcomes, 1);
    assert_int_equal(bus_counters(f->store.bus)->refused_peers, 1);
    assert_int_equal(f->store.record.gones, 0);
}

/* ---- restarts ---- */

static void a_new_server_is_noticed(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
    for (int life = 2; life <= 4; life++) {
        bus_free(&f->store.bus);
        assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
        int64_t begun_ns = clock_now_ns();
        until(f->loop, f->one.record.welcomes, life);
        assert_true(clock_now_ns() - begun_ns < BUS_SILENCE_NS); /* by its answer, not by silence */
        assert_int_equal(f->one.record.losses, life - 1);
        assert_int_equal(f->one.record.epoch, bus_epoch(f->store.bus));
        struct msg msg = {.kind = MSG_RESUME, .id = 5, .resume.sequence = 1};
        assert_int_equal(bus_send(f->one.client, &msg), 0);
        until(f->loop, f->store.record.messages, 1);
    }
}

/* A server in a process of its own. The parent must not have a ZeroMQ context yet. */
static pid_t fork_server(const char *path)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    struct loop *loop = loop_create();
    static struct node node;
    if (serve(&node, loop, path, ROLE_KVSTORE) < 0)
        _exit(1);
    alarm(60); /* a failed test must not leave it behind */
    loop_run(loop);
    _exit(0);
}

static void a_killed_server_is_replaced(void **state)
{
    struct fixture *f = *state;
    pid_t pid = fork_server(f->path);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(access(f->path, F_OK), 0); /* its socket is left, and is taken over */
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    until(f->loop, f->one.record.welcomes, 2);
    assert_int_equal(f->one.record.losses, 1);
}

static void a_client_that_greets_anew_replaces_itself(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
    bus_disconnect(&f->one.client);
    assert_null(f->one.client);
    bus_disconnect(&f->one.client);
    assert_int_equal(bus_connect(f->one.bus, f->path, &client_ops, &f->one, &f->one.client, NULL), 0);
    until(f->loop, f->one.record.welcomes, 2);
    assert_int_equal(f->store.record.gones, 1);
    struct bus_peer *peer = bus_find_role(f->store.server, ROLE_DECODER);
    assert_non_null(peer);
    bus_close_peer(f->store.server, peer);
    assert_null(bus_find_role(f->store.server, ROLE_DECODER)); /* there was one only */
    until(f->loop, f->one.record.welcomes, 3);                 /* forgotten: it notices and greets anew */
    assert_int_equal(f->one.record.losses, 1);
    assert_int_equal(f->store.record.gones, 1);
}

/* ---- what may not come in ---- */

static void forbidden_kinds_close_the_peer(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    join(&f->one, f->loop, f->path, ROLE_RETRIEVER);
    until(f->loop, f->one.record.welcomes, 1);
    struct msg msg = {.kind = MSG_CLOSE, .id = 4, .close.sequence = 1};
    assert_int_equal(bus_send(f->one.client, &msg), 0);
    until(f->loop, f->store.record.gones, 1);
    assert_int_equal(f->store.record.messages, 0);
    until(f->loop, f->one.record.messages, 1);
    assert_int_equal(f->one.record.last.error.code, -EPROTO);
    assert_int_equal(f->one.record.last.id, 4);
    assert_string_equal(f->one.record.text, "CLOSE is not for a retriever to send to a kvstore");
    until(f->loop, f->one.record.welcomes, 2); /* it may begin anew */
}

static void late_messages_are_dropped(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
    struct msg msg = {.kind = MSG_RESUME, .id = 1, .deadline_ns = clock_now_ns(), .resume.sequence = 1};
    assert_int_equal(bus_send(f->one.client, &msg), 0);
    msg.id = 2;
    msg.deadline_ns = clock_now_ns() + 30 * CLOCK_S;
    assert_int_equal(bus_send(f->one.client, &msg), 0);
    until(f->loop, f->store.record.messages, 1);
    assert_int_equal(f->store.record.last.id, 2);
    assert_int_equal(bus_counters(f->store.bus)->dropped_late, 1);
    msg =
        (struct msg){.kind = MSG_GRANT, .deadline_ns = 1, .grant.sequence = 1}; /* on the way back as well */
    assert_int_equal(bus_reply(f->store.server, f->store.record.peer, &msg), 0);
    until_counter(f->loop, &bus_counters(f->one.bus)->dropped_late, 1);
    assert_int_equal(f->one.record.messages, 0);
}

/* A DEALER without any of our code behind it. */
static void raw_connect(struct fixture *f)
{
    char endpoint[128];
    int linger = 0, timeout = 10000, hwm = 0;
    snprintf(endpoint, sizeof endpoint, "ipc://%s", f->path);
    if (!f->raw_context)
        f->raw_context = zmq_ctx_new();
    f->raw = zmq_socket(f->raw_context, ZMQ_DEALER);
    assert_non_null(f->raw);
    zmq_setsockopt(f->raw, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(f->raw, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
    zmq_setsockopt(f->raw, ZMQ_SNDHWM, &hwm, sizeof hwm);
    assert_int_equal(zmq_connect(f->raw, endpoint), 0);
}

static void raw_send(struct fixture *f, const void *bytes, size_t count, int flags)
{
    assert_int_equal(zmq_send(f->raw, bytes, count, flags), (int)count);
}

static void raw_send_msg(struct fixture *f, const struct msg *msg)
{
    void *buffer;
    size_t bytes;
    msg_encode(msg, &buffer, &bytes);
    raw_send(f, buffer, bytes, 0);
    msg_buffer_free(buffer);
}

static void raw_greet(struct fixture *f, uint32_t role, uint64_t epoch)
{
    struct msg msg = {.kind = MSG_HELLO, .version = 1, .epoch = epoch, .hello = hello_of(role)};
    raw_send_msg(f, &msg);
}

static void malformed_frames_leave_the_server_alive(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    raw_connect(f);
    const struct bus_counters *counters = bus_counters(f->store.bus);
    raw_send(f, "", 0, 0);
    raw_send(f, "\x96", 1, 0);
    raw_send(f, "\xdd\xff\xff\xff\xff\x01\x01\x01\x01", 9, 0);
    raw_send(f, "", 0, ZMQ_SNDMORE); /* as a REQ would: three frames */
    raw_send(f, "\x96\x04\x01\x05\x06\x00\x80", 7, 0);
    for (int i = 0; i < 5; i++)
        raw_send(f, "x", 1, i < 4 ? ZMQ_SNDMORE : 0);
    until_counter(f->loop, &counters->malformed, 5);
    raw_greet(f, ROLE_DECODER, 5); /* still the same connection, and welcome */
    until(f->loop, f->store.record.hellos, 1);
    int64_t begun_ns = clock_now_ns();
    raw_send(f, "\x96\x63\x01\x05\x06\x00\x80", 7, 0); /* an unknown kind closes a peer */
    until(f->loop, f->store.record.gones, 1);
    assert_true(clock_now_ns() - begun_ns < BUS_SILENCE_NS - CLOCK_S); /* for that, not for silence */
    assert_int_equal(counters->malformed, 6);
    raw_send(f, "\x96\x04\x09\x05\x06\x00\x80", 7, 0); /* a version of the future gets an answer */
    until_counter(f->loop, &counters->malformed, 7);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
    struct msg msg;
    uint8_t answer[4096];
    const int codes[] = {0, -EPROTO, -EPROTONOSUPPORT}; /* WELCOME, then two errors */
    for (int i = 0; i < 3; i++) {
        int bytes = zmq_recv(f->raw, answer, sizeof answer, 0);
        assert_true(bytes > 0 && bytes <= (int)sizeof answer);
        assert_int_equal(msg_decode(answer, (size_t)bytes, &msg, NULL), 0);
        assert_int_equal(msg.kind, i == 0 ? MSG_WELCOME : MSG_ERROR);
        if (i)
            assert_int_equal(msg.error.code, codes[i]);
        msg_free(&msg);
    }
}

static void a_message_beyond_the_limit_never_arrives(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    raw_connect(f);
    size_t bytes = (size_t)LIMIT_MESSAGE_BYTES + 1;
    zmq_msg_t huge;
    assert_int_equal(zmq_msg_init_size(&huge, bytes), 0); /* never touched: the header's length is enough */
    assert_int_equal(zmq_msg_send(&huge, f->raw, 0), (int)bytes);
    raw_greet(f, ROLE_LAUNCH, 5); /* behind it, on a new connection */
    until(f->loop, f->store.record.hellos, 1);
    assert_int_equal(bus_counters(f->store.bus)->malformed, 0);
    assert_int_equal(bus_counters(f->store.bus)->received, 1);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
}

static void messages_of_another_epoch_are_dropped(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    raw_connect(f);
    struct msg msg = {.kind = MSG_RESUME, .version = 1, .epoch = 5, .id = 1, .resume.sequence = 9};
    raw_send_msg(f, &msg); /* before HELLO: refused */
    until_counter(f->loop, &bus_counters(f->store.bus)->refused_peers, 1);
    raw_greet(f, ROLE_DECODER, 5);
    raw_send_msg(f, &msg);
    msg.epoch = 4;
    msg.id = 2;
    raw_send_msg(f, &msg);
    msg.epoch = 5;
    msg.id = 3;
    raw_send_msg(f, &msg);
    until(f->loop, f->store.record.messages, 2);
    assert_int_equal(f->store.record.last.id, 3);
    assert_int_equal(bus_counters(f->store.bus)->dropped_epoch, 1);
    raw_greet(f, ROLE_DECODER, 5); /* repeated: welcomed, not told again */
    msg.id = 4;
    raw_send_msg(f, &msg);
    until(f->loop, f->store.record.messages, 3);
    assert_int_equal(f->store.record.hellos, 1);
    raw_greet(f, ROLE_DECODER, 6); /* a new life on the same connection */
    until(f->loop, f->store.record.hellos, 2);
    assert_int_equal(f->store.record.gones, 1);
}

static void strangers_are_cut_off(void **state)
{
    struct fixture *f = *state;
    if (geteuid() != 0)
        skip();
    const uid_t users[] = {0, 12345};
    pid_t pids[2];
    int go[2];
    assert_int_equal(pipe(go), 0);
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] > 0)
            continue;
        char byte;
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        strcpy(address.sun_path, f->path);
        alarm(20);
        if (read(go[0], &byte, 1) != 1 || setresuid(users[i], users[i], users[i]) < 0)
            _exit(1);
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
            _exit(2);
        ssize_t n = recv(fd, &byte, 1, 0); /* ZeroMQ speaks first, unless it hangs up */
        _exit(n == (users[i] == 0 ? 1 : 0) ? 0 : 3);
    }
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    assert_int_equal(chmod(f->dir, 0777), 0); /* the first two locks are open: the third is under test */
    assert_int_equal(chmod(f->path, 0777), 0);
    assert_int_equal(write(go[1], "go", 2), 2);
    for (int i = 0; i < 2; i++) {
        int status;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
    close(go[0]);
    close(go[1]);
}

/* ---- the table of peers ---- */

static void the_table_of_peers_is_bounded(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    void *raws[PEERS_MAX];
    for (int i = 0; i < PEERS_MAX; i++) {
        raw_connect(f);
        raw_greet(f, ROLE_LAUNCH, (uint64_t)i + 1);
        raws[i] = f->raw;
    }
    f->raw = NULL;
    until(f->loop, f->store.record.hellos, PEERS_MAX);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.messages, 1);
    assert_int_equal(f->one.record.last.error.code, -EBUSY);
    assert_int_equal(f->store.record.gones, 0);
    until(f->loop, f->one.record.welcomes, 1); /* once somebody should have pinged and has not */
    assert_int_equal(f->store.record.gones, 1);
    for (int i = 0; i < PEERS_MAX; i++)
        zmq_close(raws[i]);
}

static void a_peer_that_left_is_unreachable(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
    bus_free(&f->one.bus);
    int64_t deadline_ns = clock_now_ns() + 10 * CLOCK_S;
    int r = 0;
    while (r != -EHOSTUNREACH && clock_now_ns() < deadline_ns) {
        struct msg msg = {.kind = MSG_GRANT, .grant.sequence = 1};
        r = bus_reply(f->store.server, f->store.record.peer, &msg);
        assert_true(r == 0 || r == -EAGAIN || r == -EHOSTUNREACH);
    }
    assert_int_equal(r, -EHOSTUNREACH);
}

/* ---- load ---- */

/* The buffer of the ids is overwritten as soon as the send returns. */
static void big_messages_arrive_unharmed(void **state)
{
    struct fixture *f = *state;
    enum { MESSAGES = 100, IDS = 1 << 18 };
    static uint32_t ids[IDS];
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_DECODER), 0);
    join(&f->one, f->loop, f->path, ROLE_GATEWAY);
    until(f->loop, f->one.record.welcomes, 1);
    uint64_t sum = 0;
    for (uint32_t i = 1; i <= MESSAGES; i++) {
        for (uint32_t k = 0; k < IDS; k++)
            sum += ids[k] = i * 7 + k;
        struct msg msg = {.kind = MSG_TOKEN, .id = i, .token.tokens = {ids, IDS}};
        assert_int_equal(bus_reply(f->store.server, f->store.record.peer, &msg), 0);
        memset(ids, 0xff, sizeof ids);
        if (i % 10 == 0)
            until(f->loop, f->one.record.messages, (int)i);
    }
    assert_int_equal(f->one.record.sum, sum);
    assert_int_equal(f->one.record.last.id, MESSAGES);
    /* An answer of a kind that only stores give is not handed on. */
    struct msg msg = {.kind = MSG_GRANT, .grant.sequence = 1};
    assert_int_equal(bus_reply(f->store.server, f->store.record.peer, &msg), 0);
    until_counter(f->loop, &bus_counters(f->one.bus)->malformed, 1);
    assert_int_equal(f->one.record.messages, MESSAGES);
}

static bool is_report(const void *arg)
{
    return ((const struct record *)arg)->last.kind == MSG_REPORT;
}

/* The server is stopped: the queue fills, then each send is refused at once; what waited is dropped as late. */
static void a_flood_is_refused_not_queued_for_ever(void **state)
{
    struct fixture *f = *state;
    pid_t pid = fork_server(f->path);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
    kill(pid, SIGSTOP);
    static uint32_t ids[2000];
    struct msg msg = {.kind = MSG_PREFIX, .deadline_ns = clock_now_ns() + 1};
    msg.prefix = (struct msg_prefix){.made.kind = ARENA_MADE_FULL, .tokens = {ids, 2000}};
    int sent = 0, refused = 0;
    for (int64_t until_ns = clock_now_ns() + 10 * CLOCK_S; refused < 100 && clock_now_ns() < until_ns;) {
        int64_t begun_ns = clock_now_ns();
        int r = bus_send(f->one.client, &msg);
        assert_true(clock_now_ns() - begun_ns < CLOCK_S);
        assert_true(r == 0 || r == -EAGAIN);
        sent += r == 0;
        refused += r == -EAGAIN;
    }
    assert_int_equal(refused, 100);
    assert_true(sent >= 100 && sent < 5000);
    assert_true(bus_counters(f->one.bus)->dropped_full >= 100);
    kill(pid, SIGCONT);
    struct msg status = {.kind = MSG_STATUS, .id = 1};
    int64_t deadline_ns = clock_now_ns() + 10 * CLOCK_S;
    while (bus_send(f->one.client, &status) == -EAGAIN && clock_now_ns() < deadline_ns)
        ;
    assert_true(run_until(f->loop, is_report, &f->one.record));
    char expected[100];
    snprintf(expected, sizeof expected, "{\"late\":%d,\"messages\":0}", sent); /* none was taken for new */
    assert_string_equal(f->one.record.text, expected);
    assert_int_equal(f->one.record.losses, 0);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

/* ---- callbacks ---- */

static void clients_may_disconnect_within_any_callback(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    join(&f->one, f->loop, f->path, ROLE_DECODER);
    f->one.record.disconnect = &f->one.client;
    until(f->loop, f->one.record.welcomes, 1);
    assert_null(f->one.client);

    join(&f->two, f->loop, f->path, ROLE_DECODER);
    until(f->loop, f->two.record.welcomes, 1);
    f->two.record.disconnect = &f->two.client;
    struct msg status = {.kind = MSG_STATUS};
    for (int i = 0; i < 3; i++)
        assert_int_equal(bus_send(f->two.client, &status), 0);
    until(f->loop, f->two.record.messages, 1);
    assert_null(f->two.client);

    f->two.record = (struct record){0};
    assert_int_equal(bus_connect(f->two.bus, f->path, &client_ops, &f->two, &f->two.client, NULL), 0);
    until(f->loop, f->two.record.welcomes, 1);
    f->two.record.disconnect = &f->two.client;
    bus_close_peer(f->store.server, f->store.record.peer);
    until(f->loop, f->two.record.losses, 1);
    assert_null(f->two.client);
    assert_int_equal(f->two.record.messages, 0);
}

/* ---- silence: one wait of a little more than BUS_SILENCE_NS for all of it ---- */

struct sender {
    struct node *node;
    int sent;
};

/* Only ever sends, as a retriever does: no answer comes but to the bus's own pings. */
static void send_topk(void *arg)
{
    struct sender *sender = arg;
    const struct msg_topk_entry entry = {.sequence = 1, .position = 1};
    const uint32_t counts[2] = {0};
    struct msg msg = {.kind = MSG_TOPK, .id = 1};
    msg.topk = (struct msg_topk){
        .entries = &entry, .entry_count = 1, .groups = 1, .selection_heads = 1, .counts = {counts, 2}};
    if (bus_send(sender->node->client, &msg) == 0)
        sender->sent++;
}

static void silence_is_death_but_only_of_the_silent(void **state)
{
    struct fixture *f = *state;
    char other[RUNTIME_PATH_MAX], third[RUNTIME_PATH_MAX];
    assert_int_equal(runtime_path(f->dir, "retriever.sock", other, NULL), 0);
    assert_int_equal(runtime_path(f->dir, "decoder.sock", third, NULL), 0);
    pid_t pid = fork_server(other);
    struct loop *stalled = loop_create(); /* a process that is stopped itself: its loop does not run */
    static struct node stalled_store, stalled_client;
    assert_int_equal(serve(&stalled_store, stalled, third, ROLE_KVSTORE), 0);
    join(&stalled_client, stalled, third, ROLE_DECODER);
    until(stalled, stalled_client.record.welcomes, 1);

    assert_int_equal(serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    raw_connect(f);
    raw_greet(f, ROLE_DECODER, 5); /* and not a word more */
    join(&f->one, f->loop, f->path, ROLE_RETRIEVER);
    join(&f->two, f->loop, other, ROLE_DECODER);
    until(f->loop, f->one.record.welcomes, 1);
    until(f->loop, f->two.record.welcomes, 1);
    until(f->loop, f->store.record.hellos, 2);
    kill(pid, SIGSTOP);
    struct sender sender = {.node = &f->one};
    int timer = loop_add_timer(f->loop, 100 * CLOCK_MS, send_topk, &sender);
    int64_t begun_ns = clock_now_ns(), end_ns = begun_ns + BUS_SILENCE_NS + 700 * CLOCK_MS;
    until(f->loop, f->two.record.losses, 1);
    assert_true(clock_now_ns() - begun_ns > BUS_SILENCE_NS - BUS_PING_NS);
    assert_true(clock_now_ns() - begun_ns < BUS_SILENCE_NS + CLOCK_S);
    assert_true(run_until(f->loop, is_later, &end_ns));

    assert_int_equal(f->store.record.gones, 1); /* the raw one */
    assert_null(bus_find_role(f->store.server, ROLE_DECODER));
    assert_non_null(bus_find_role(f->store.server, ROLE_RETRIEVER));
    assert_int_equal(f->one.record.losses, 0);
    assert_true(sender.sent > 20);
    loop_remove_timer(f->loop, timer);
    kill(pid, SIGCONT);
    until(f->loop, f->two.record.welcomes, 2); /* hung, not dead: greeted anew */

    int64_t later_ns = clock_now_ns() + BUS_PING_NS;
    assert_true(run_until(stalled, is_later, &later_ns));
    assert_int_equal(stalled_client.record.losses, 0); /* that we did not run is not the others' silence */
    assert_int_equal(stalled_store.record.gones, 0);
    bus_free(&stalled_client.bus);
    bus_free(&stalled_store.bus);
    loop_free(&stalled);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_state_meets_every_event),
        cmocka_unit_test(servers_may_only_send_answers),
        cmocka_unit_test_setup_teardown(the_client_may_come_first, setup, teardown),
        cmocka_unit_test_setup_teardown(the_server_may_come_first, setup, teardown),
        cmocka_unit_test_setup_teardown(a_path_has_one_server, setup, teardown),
        cmocka_unit_test_setup_teardown(a_refused_greeting_is_told_and_repeated, setup, teardown),
        cmocka_unit_test_setup_teardown(a_new_server_is_noticed, setup, teardown),
        cmocka_unit_test_setup_teardown(a_killed_server_is_replaced, setup, teardown),
        cmocka_unit_test_setup_teardown(a_client_that_greets_anew_replaces_itself, setup, teardown),
        cmocka_unit_test_setup_teardown(forbidden_kinds_close_the_peer, setup, teardown),
        cmocka_unit_test_setup_teardown(late_messages_are_dropped, setup, teardown),
        cmocka_unit_test_setup_teardown(malformed_frames_leave_the_server_alive, setup, teardown),
        cmocka_unit_test_setup_teardown(a_message_beyond_the_limit_never_arrives, setup, teardown),
        cmocka_unit_test_setup_teardown(messages_of_another_epoch_are_dropped, setup, teardown),
        cmocka_unit_test_setup_teardown(strangers_are_cut_off, setup, teardown),
        cmocka_unit_test_setup_teardown(the_table_of_peers_is_bounded, setup, teardown),
        cmocka_unit_test_setup_teardown(a_peer_that_left_is_unreachable, setup, teardown),
        cmocka_unit_test_setup_teardown(big_messages_arrive_unharmed, setup, teardown),
        cmocka_unit_test_setup_teardown(a_flood_is_refused_not_queued_for_ever, setup, teardown),
        cmocka_unit_test_setup_teardown(clients_may_disconnect_within_any_callback, setup, teardown),
        cmocka_unit_test_setup_teardown(silence_is_death_but_only_of_the_silent, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
