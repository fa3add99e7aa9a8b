/* Servers and clients for tests of the bus; see node.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <zmq.h>

#include "base/clock.h"
#include "tests/lib/node.h"

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

bool node_run_until(struct loop *loop, bool (*done)(const void *arg), const void *arg)
{
    struct waiter waiter = {loop, done, arg, clock_now_ns() + 60 * CLOCK_S};
    int timer = loop_add_timer(loop, CLOCK_MS, look, &waiter);
    int r = loop_run(loop);
    loop_remove_timer(loop, timer);
    return r == 0;
}

bool node_is_at_least(const void *arg)
{
    const struct node_at_least *a = arg;
    return *a->count >= a->least;
}

bool node_is_later(const void *arg)
{
    return clock_now_ns() >= *(const int64_t *)arg;
}

static bool has_count(const void *arg)
{
    const uint64_t *const *pair = arg;
    return *pair[0] >= *pair[1];
}

/* As until, for a counter of the bus. */
void node_until_counter(struct loop *loop, const uint64_t *count, uint64_t least)
{
    const uint64_t *pair[] = {count, &least};
    assert_true(node_run_until(loop, has_count, pair));
}

/* ---- a server and clients that write down what they are told ---- */

static int on_hello(void *arg, struct bus_peer *peer, const struct msg_hello *hello, struct err *err)
{
    struct node_record *record = &((struct node *)arg)->record;
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
    struct node_record *record = &((struct node *)arg)->record;
    record->gones++;
    if (record->peer == peer)
        record->peer = NULL;
}

static void keep(struct node_record *record, const struct msg *msg)
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
    struct node_record *record = &((struct node *)arg)->record;
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
    struct node_record *record = &((struct node *)arg)->record;
    record->losses++;
    snprintf(record->text, sizeof record->text, "%s", why);
    if (record->disconnect)
        bus_disconnect(record->disconnect);
}

const struct bus_server_ops node_server_ops = {on_hello, on_server_message, on_status, on_gone};
const struct bus_client_ops node_client_ops = {on_welcome, on_client_message, on_lost};

struct msg_hello node_hello(uint32_t role)
{
    struct msg_hello hello = {.role = role, .version_min = 1, .pid = (uint32_t)getpid()};
    snprintf(hello.device, sizeof hello.device, "cpu");
    return hello;
}

int node_serve(struct node *node, struct loop *loop, const char *path, uint32_t role)
{
    struct msg_hello hello = node_hello(role);
    *node = (struct node){.loop = loop};
    node->bus = bus_create(loop, &hello);
    return bus_serve(node->bus, path, role, &node_server_ops, node, &node->server, NULL);
}

void node_join(struct node *node, struct loop *loop, const char *path, uint32_t role)
{
    struct msg_hello hello = node_hello(role);
    *node = (struct node){.loop = loop};
    node->bus = bus_create(loop, &hello);
    assert_int_equal(bus_connect(node->bus, path, &node_client_ops, node, &node->client, NULL), 0);
}

int node_setup(void **state)
{
    static struct node_fixture f;
    memset(&f, 0, sizeof f);
    assert_int_equal(runtime_make_private(f.dir, NULL), 0);
    assert_int_equal(runtime_path(f.dir, "kvstore.sock", f.path, NULL), 0);
    f.loop = loop_create();
    *state = &f;
    return 0;
}

int node_teardown(void **state)
{
    struct node_fixture *f = *state;
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

/* A server in a process of its own. The parent must not have a ZeroMQ context yet. */
pid_t node_fork_server(const char *path)
{
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    struct loop *loop = loop_create();
    static struct node node;
    if (node_serve(&node, loop, path, ROLE_KVSTORE) < 0)
        _exit(1);
    alarm(60); /* a failed test must not leave it behind */
    loop_run(loop);
    _exit(0);
}

/* A DEALER without any of our code behind it. */
void node_raw_connect(struct node_fixture *f)
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

void node_raw_send(struct node_fixture *f, const void *bytes, size_t count, int flags)
{
    assert_int_equal(zmq_send(f->raw, bytes, count, flags), (int)count);
}

void node_raw_send_msg(struct node_fixture *f, const struct msg *msg)
{
    void *buffer;
    size_t bytes;
    msg_encode(msg, &buffer, &bytes);
    node_raw_send(f, buffer, bytes, 0);
    msg_buffer_free(buffer);
}

void node_raw_greet(struct node_fixture *f, uint32_t role, uint64_t epoch)
{
    struct msg msg = {.kind = MSG_HELLO, .version = MSG_VERSION, .epoch = epoch, .hello = node_hello(role)};
    node_raw_send_msg(f, &msg);
}
