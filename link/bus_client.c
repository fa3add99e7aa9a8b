/* The client's side of the bus: one DEALER a life, its greeting and its heartbeat; see bus.h and
 * bus_state.h.
 *
 * Owner: the loop thread. `change` is the only place that sets the state. A client that is disconnected
 * within a callback stays allocated until bus.c reaps it. */
#include "link/bus.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "link/bus_internal.h"
#include "link/unix_socket.h"

struct bus_client {
    struct bus *bus;
    void *socket;
    char *path;
    struct bus_client_ops ops;
    void *arg;
    enum bus_state state;
    bool closed;           /* disconnected: waits to be freed */
    uint64_t server_epoch; /* READY: of the server that welcomed us */
    uint32_t server_role;
    int64_t heard_ns, sent_ns;
    int64_t asked_ns; /* last HELLO or PING; 0: none on this socket */
    struct bus_client *next;
};

static void change(struct bus_client *client, enum bus_event event)
{
    int next = bus_state_next(client->state, event);
    CHECK(next >= 0);
    client->state = (enum bus_state)next;
}

static void ready(void *arg, uint32_t events)
{
    (void)events;
    bus_client_pump(arg);
}

/* -EAGAIN and others: the tick tries again. */
static int open_socket(struct bus_client *client)
{
    char endpoint[128];
    snprintf(endpoint, sizeof endpoint, "ipc://%s", client->path);
    client->socket = bus_socket_open(client->bus, ZMQ_DEALER);
    if (!client->socket)
        return -EMFILE;
    int r = zmq_connect(client->socket, endpoint) < 0 ? -zmq_errno() : 0;
    if (r == 0)
        r = bus_socket_watch(client->bus, client->socket, ready, client);
    if (r < 0) {
        bus_socket_close(client->bus, &client->socket);
        return r;
    }
    client->asked_ns = 0;
    change(client, BUS_EVENT_CONNECTED);
    return 0;
}

int bus_connect(struct bus *bus, const char *path, const struct bus_client_ops *ops, void *arg,
                struct bus_client **ret_client, struct err *err)
{
    struct sockaddr_un address;
    int r = unix_socket_address(path, &address, err);
    if (r < 0)
        return r;
    struct bus_client *client = mem_alloc(1, sizeof *client);
    *client =
        (struct bus_client){.bus = bus, .path = mem_strdup(path), .ops = *ops, .arg = arg, .state = BUS_NEW};
    r = open_socket(client);
    client->next = bus->clients;
    bus->clients = client;
    if (r < 0) {
        bus_disconnect(&client);
        return err_set(err, r, "%s: connect: %s", path, zmq_strerror(-r));
    }
    *ret_client = client;
    return 0;
}

void bus_disconnect(struct bus_client **client)
{
    if (!*client)
        return;
    bus_socket_close((*client)->bus, &(*client)->socket);
    (*client)->closed = true;
    *client = NULL;
}

struct bus_client *bus_client_next(struct bus_client *client)
{
    return client->next;
}

void bus_client_reap(struct bus_client **list, bool all)
{
    while (*list) {
        struct bus_client *client = *list;
        if (!client->closed && !all) {
            list = &client->next;
            continue;
        }
        *list = client->next;
        bus_socket_close(client->bus, &client->socket);
        mem_free(&client->path);
        mem_free(&client);
    }
}

enum bus_state bus_client_state(const struct bus_client *client)
{
    return client->state;
}

static int send_now(struct bus_client *client, struct msg *msg)
{
    int r = bus_socket_send(client->bus, client->socket, NULL, 0, msg);
    if (r == 0)
        client->sent_ns = clock_now_ns();
    return r;
}

int bus_send(struct bus_client *client, struct msg *msg)
{
    return client->state == BUS_READY ? send_now(client, msg) : -ENOTCONN;
}

/* Whether a connection is there and has room; saves the work for a HELLO that nobody would get. */
static bool is_writable(const struct bus_client *client)
{
    int events = 0;
    size_t bytes = sizeof events;
    return zmq_getsockopt(client->socket, ZMQ_EVENTS, &events, &bytes) == 0 && (events & ZMQ_POLLOUT);
}

static void greet(struct bus_client *client, int64_t now_ns)
{
    struct msg msg = {.kind = MSG_HELLO, .hello = client->bus->hello};
    if (is_writable(client) && send_now(client, &msg) == 0)
        client->asked_ns = now_ns;
}

static void lose(struct bus_client *client, enum bus_event event, const char *why)
{
    change(client, event);
    bus_socket_close(client->bus, &client->socket);
    if (client->ops.lost)
        client->ops.lost(client->arg, why);
    if (!client->closed)
        open_socket(client); /* on failure the client stays LOST and the tick tries again */
}

void bus_client_reset(struct bus_client *client, const char *why)
{
    if (client->state == BUS_READY)
        lose(client, BUS_EVENT_SILENCE, why);
}

static void pass(struct bus_client *client, struct msg *msg)
{
    if (client->ops.message)
        client->ops.message(client->arg, msg);
}

static void take_greeting(struct bus_client *client, struct msg *msg, int64_t now_ns)
{
    if (msg->kind == MSG_WELCOME) {
        client->server_epoch = msg->epoch;
        client->server_role = msg->hello.role;
        client->heard_ns = now_ns;
        change(client, BUS_EVENT_WELCOME);
        if (client->ops.welcome)
            client->ops.welcome(client->arg, &msg->hello, msg->epoch);
    } else if (msg->kind == MSG_ERROR && msg->id == 0) {
        change(client, BUS_EVENT_REFUSED);
        pass(client, msg);
    } else { /* meant for an earlier greeting */
        client->bus->counters.dropped_epoch++;
    }
}

static void take_ready(struct bus_client *client, struct msg *msg, int64_t now_ns)
{
    if (msg->epoch != client->server_epoch) {
        client->bus->counters.dropped_epoch++;
        lose(client, BUS_EVENT_EPOCH, "the server was started anew");
        return;
    }
    client->heard_ns = now_ns;
    if (msg->kind == MSG_PONG || msg->kind == MSG_WELCOME) /* WELCOME: we had said HELLO twice */
        return;
    if (msg->kind == MSG_ERROR && msg->error.code == -ENOTCONN)
        lose(client, BUS_EVENT_FORGOTTEN, "the server does not know us any more");
    else if (!bus_answer_allowed(client->server_role, msg->kind))
        client->bus->counters.malformed++;
    else
        pass(client, msg);
}

static void take(struct bus_client *client, struct bus_frame *frame, struct msg *msg)
{
    struct bus *bus = client->bus;
    int64_t now_ns = clock_now_ns();
    if (msg_decode(zmq_msg_data(&frame->body), zmq_msg_size(&frame->body), msg, NULL) < 0) {
        bus->counters.malformed++;
        return;
    }
    bus->counters.received++;
    if (bus_is_late(bus, msg, now_ns))
        return;
    if (client->state == BUS_READY)
        take_ready(client, msg, now_ns);
    else
        take_greeting(client, msg, now_ns);
}

int bus_client_pump(struct bus_client *client)
{
    for (int i = 0; i < BUS_BATCH; i++) {
        struct bus_frame frame;
        struct msg msg;
        if (!client->socket)
            return 0;
        int r = bus_socket_receive(client->bus, client->socket, false, &frame);
        if (r == 0) {
            if (client->state == BUS_GREETING && client->asked_ns == 0)
                greet(client, clock_now_ns());
            return 0;
        }
        if (r < 0)
            continue;
        take(client, &frame, &msg);
        msg_free(&msg);
        bus_frame_release(&frame);
    }
    return 1;
}

/* A client that only sends (TOPK has no answer) must ask too, else it would hear nothing and take the server
 * for dead. */
static void ping(struct bus_client *client, int64_t now_ns)
{
    bool quiet = now_ns - client->sent_ns >= BUS_PING_NS;
    bool deaf = now_ns - client->heard_ns >= BUS_PING_NS && now_ns - client->asked_ns >= BUS_PING_NS;
    struct msg msg = {.kind = MSG_PING};
    if ((quiet || deaf) && is_writable(client) && send_now(client, &msg) == 0)
        client->asked_ns = now_ns;
}

void bus_client_tick(struct bus_client *client, int64_t now_ns, int64_t stalled_ns)
{
    if (client->closed)
        return;
    client->heard_ns += stalled_ns;
    if (!client->socket)
        open_socket(client);
    else if (client->state == BUS_GREETING && now_ns - client->asked_ns >= BUS_PING_NS)
        greet(client, now_ns);
    else if (client->state == BUS_READY && now_ns - client->heard_ns > BUS_SILENCE_NS)
        lose(client, BUS_EVENT_SILENCE, "the server said nothing for 4 s");
    else if (client->state == BUS_READY)
        ping(client, now_ns);
}
