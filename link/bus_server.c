/* The server's side of the bus: a ROUTER and its table of peers; see bus.h.
 *
 * Owner: the loop thread. A peer is in the table from an accepted HELLO until it is closed, replaced, or
 * silent; its struct does not move meanwhile. After a callback of the daemon neither the peer nor a position
 * in the table is used again, since the daemon may have closed peers in it. */
#include "link/bus.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "link/bus_internal.h"
#include "link/unix_socket.h"

struct bus_server {
    struct bus *bus;
    void *socket;
    char *path;
    struct unix_socket_file file;
    uint32_t role;
    struct bus_server_ops ops;
    void *arg;
    struct bus_peer *peers[BUS_PEERS_MAX]; /* in the order of their greeting */
    uint32_t peer_count;
    struct bus_server *next;
};

static void ready(void *arg, uint32_t events)
{
    (void)events;
    bus_server_pump(arg);
}

/* Connections of other users are refused as they come. (ZeroMQ tells nobody's credentials later on.) */
static void filter_users(void *socket)
{
    uid_t users[] = {geteuid(), 0};
    for (size_t i = 0; i < sizeof users / sizeof *users; i++)
        CHECK(zmq_setsockopt(socket, ZMQ_IPC_FILTER_UID, &users[i], sizeof users[i]) == 0);
}

int bus_serve(struct bus *bus, const char *path, uint32_t role, const struct bus_server_ops *ops, void *arg,
              struct bus_server **ret_server, struct err *err)
{
    /* We make the listening socket ourselves: ZeroMQ would unlink a path that somebody listens on, and would
     * create it with the mode of the umask. */
    int fd = -1;
    int r = unix_socket_listen(path, BUS_PEERS_MAX, &fd, err);
    if (r < 0)
        return r;
    struct bus_server *server = mem_alloc(1, sizeof *server);
    *server =
        (struct bus_server){.bus = bus, .path = mem_strdup(path), .role = role, .ops = *ops, .arg = arg};
    server->file = unix_socket_file(path);
    char endpoint[128];
    snprintf(endpoint, sizeof endpoint, "ipc://%s", path);
    server->socket = bus_socket_open(bus, ZMQ_ROUTER);
    if (!server->socket) {
        close(fd);
        r = err_set(err, -EMFILE, "%s: no more ZeroMQ sockets", path);
    } else {
        filter_users(server->socket);
        CHECK(zmq_setsockopt(server->socket, ZMQ_USE_FD, &fd, sizeof fd) == 0); /* takes fd */
        if (zmq_bind(server->socket, endpoint) < 0)
            r = err_set(err, -zmq_errno(), "%s: bind: %s", path, zmq_strerror(zmq_errno()));
        else if ((r = bus_socket_watch(bus, server->socket, ready, server)) < 0)
            err_set(err, r, "%s: %s", path, strerror(-r));
    }
    if (r < 0) {
        bus_server_close(&server);
        return r;
    }
    server->next = bus->servers;
    bus->servers = server;
    *ret_server = server;
    return 0;
}

void bus_server_close(struct bus_server **server_at)
{
    struct bus_server *server = *server_at;
    *server_at = server->next;
    /* Before the socket closes: nobody takes the path over while we listen. */
    unix_socket_unlink(server->path, server->file);
    bus_socket_close(server->bus, &server->socket);
    for (uint32_t i = 0; i < server->peer_count; i++)
        mem_free(&server->peers[i]);
    mem_free(&server->path);
    mem_free(&server);
}

struct bus_server *bus_server_next(struct bus_server *server)
{
    return server->next;
}

/* ---- peers ---- */

static struct bus_peer *find_peer(struct bus_server *server, const void *routing, size_t bytes)
{
    for (uint32_t i = 0; i < server->peer_count; i++) {
        struct bus_peer *peer = server->peers[i];
        if (peer->routing_bytes == bytes && memcmp(peer->routing, routing, bytes) == 0)
            return peer;
    }
    return NULL;
}

static void remove_peer(struct bus_server *server, struct bus_peer *peer)
{
    uint32_t i = 0;
    while (i < server->peer_count && server->peers[i] != peer)
        i++;
    CHECK(i < server->peer_count);
    server->peer_count--;
    memmove(&server->peers[i], &server->peers[i + 1], (server->peer_count - i) * sizeof *server->peers);
}

/* Out of the table first, so that the daemon finds only living ones while it is told. */
static void lose_peer(struct bus_server *server, struct bus_peer *peer)
{
    remove_peer(server, peer);
    if (server->ops.gone)
        server->ops.gone(server->arg, peer);
    mem_free(&peer);
}

void bus_lose_peer(struct bus_server *server, const struct bus_peer *who)
{
    struct bus_peer *peer = find_peer(server, who->routing, who->routing_bytes);
    if (peer && peer->epoch == who->epoch)
        lose_peer(server, peer);
}

struct bus_peer *bus_find_role(struct bus_server *server, uint32_t role)
{
    for (uint32_t i = server->peer_count; i-- > 0;)
        if (server->peers[i]->role == role)
            return server->peers[i];
    return NULL;
}

bool bus_peer_lives(const struct bus_peer *peer)
{
    return peer->pid > 0 && peer->pid <= INT32_MAX && (kill((pid_t)peer->pid, 0) == 0 || errno == EPERM);
}

/* The same client on an earlier socket, if any: it greets anew after it lost us. */
static struct bus_peer *find_earlier(struct bus_server *server, uint64_t epoch, uint32_t role)
{
    for (uint32_t i = 0; i < server->peer_count; i++)
        if (server->peers[i]->epoch == epoch && server->peers[i]->role == role)
            return server->peers[i];
    return NULL;
}

/* Makes room for one more: the peer that was silent for longest goes, if it should have pinged since. */
static int make_room(struct bus_server *server, int64_t now_ns, struct err *err)
{
    if (server->peer_count < BUS_PEERS_MAX)
        return 0;
    struct bus_peer *oldest = server->peers[0];
    for (uint32_t i = 1; i < server->peer_count; i++)
        if (server->peers[i]->heard_ns < oldest->heard_ns)
            oldest = server->peers[i];
    if (now_ns - oldest->heard_ns < 2 * BUS_PING_NS)
        return err_set(err, -EBUSY, "all %d places for peers are taken", BUS_PEERS_MAX);
    lose_peer(server, oldest);
    return 0;
}

/* ---- answers ---- */

int bus_reply(struct bus_server *server, const struct bus_peer *peer, struct msg *msg)
{
    return bus_socket_send(server->bus, server->socket, peer->routing, peer->routing_bytes, msg);
}

/* To anybody, greeted or not. What cannot be delivered is of no more interest. */
static void send_error(struct bus_server *server, struct bus_frame *frame, uint64_t id, int code,
                       const char *text)
{
    struct msg msg = {.kind = MSG_ERROR, .id = id, .error = {.code = code}};
    snprintf(msg.error.text, sizeof msg.error.text, "%s", text);
    bus_socket_send(server->bus, server->socket, zmq_msg_data(&frame->routing), zmq_msg_size(&frame->routing),
                    &msg);
}

static void send_welcome(struct bus_server *server, const struct bus_peer *peer)
{
    struct msg msg = {.kind = MSG_WELCOME, .hello = server->bus->hello};
    msg.hello.role = server->role;
    bus_reply(server, peer, &msg);
}

static void send_report(struct bus_server *server, struct bus_peer *peer, uint64_t id)
{
    char *json = server->ops.status ? server->ops.status(server->arg) : NULL;
    const char *text = json ? json : "{}";
    size_t bytes = strlen(text);
    struct msg msg = {.kind = MSG_REPORT, .id = id};
    if (bytes <= LIMIT_STATUS_BYTES)
        msg.report.json = (struct msg_bytes){.data = text, .bytes = (uint32_t)bytes};
    else
        msg = (struct msg){
            .kind = MSG_ERROR, .id = id, .error = {.code = -EMSGSIZE, .text = "status is too long"}};
    bus_reply(server, peer, &msg);
    free(json);
}

/* ---- what comes in ---- */

static void refuse(struct bus_server *server, struct bus_frame *frame, int code, const struct err *err)
{
    server->bus->counters.refused_peers++;
    send_error(server, frame, 0, code, err->text);
}

static void take_hello(struct bus_server *server, struct bus_peer *peer, struct bus_frame *frame,
                       const struct msg *msg, int64_t now_ns)
{
    struct err err = {.code = 0};
    if (peer && peer->epoch == msg->epoch && peer->role == msg->hello.role) { /* our WELCOME is on its way */
        peer->heard_ns = now_ns;
        send_welcome(server, peer);
        return;
    }
    if (peer)
        lose_peer(server, peer);
    if ((peer = find_earlier(server, msg->epoch, msg->hello.role)))
        lose_peer(server, peer);
    int r = 0;
    if (msg->hello.version_min > MSG_VERSION)
        r = err_set(&err, -EPROTONOSUPPORT, "version: found %u or newer, expected at most %u",
                    msg->hello.version_min, MSG_VERSION);
    if (r == 0)
        r = make_room(server, now_ns, &err);
    if (r < 0) {
        refuse(server, frame, r, &err);
        return;
    }
    peer = mem_alloc(1, sizeof *peer);
    peer->routing_bytes = (uint32_t)zmq_msg_size(&frame->routing);
    memcpy(peer->routing, zmq_msg_data(&frame->routing), peer->routing_bytes);
    peer->epoch = msg->epoch;
    peer->role = msg->hello.role;
    peer->pid = msg->hello.pid;
    peer->heard_ns = now_ns;
    r = server->ops.hello ? server->ops.hello(server->arg, peer, &msg->hello, &err) : 0;
    /* The daemon may have closed others in hello, but never added any: there is still room. */
    if (r < 0) {
        refuse(server, frame, r, &err);
        mem_free(&peer);
        return;
    }
    server->peers[server->peer_count++] = peer;
    send_welcome(server, peer);
}

static void close_for(struct bus_server *server, struct bus_peer *peer, struct bus_frame *frame, uint64_t id,
                      const char *text)
{
    server->bus->counters.refused_peers++;
    send_error(server, frame, id, -EPROTO, text);
    lose_peer(server, peer);
}

static void take_malformed(struct bus_server *server, struct bus_peer *peer, struct bus_frame *frame,
                           const struct msg *msg, int code, const struct err *err)
{
    server->bus->counters.malformed++;
    if (peer && msg->kind && !msg_allowed(server->role, peer->role, true, msg->kind))
        close_for(server, peer, frame, msg->id, err->text);
    else if (peer || code == -EPROTONOSUPPORT)
        send_error(server, frame, msg->id, code, err->text);
}

static void take_allowed(struct bus_server *server, struct bus_peer *peer, struct msg *msg)
{
    struct msg pong = {.kind = MSG_PONG, .id = msg->id};
    switch (msg->kind) {
    case MSG_PING:
        bus_reply(server, peer, &pong);
        break;
    case MSG_STATUS:
        send_report(server, peer, msg->id);
        break;
    default:
        if (server->ops.message)
            server->ops.message(server->arg, peer, msg);
    }
}

static void take(struct bus_server *server, struct bus_frame *frame, struct msg *msg)
{
    struct err err = {.code = 0};
    int64_t now_ns = clock_now_ns();
    struct bus_peer *peer = find_peer(server, zmq_msg_data(&frame->routing), zmq_msg_size(&frame->routing));
    int r = msg_decode(zmq_msg_data(&frame->body), zmq_msg_size(&frame->body), msg, &err);
    if (r < 0) {
        take_malformed(server, peer, frame, msg, r, &err);
        return;
    }
    server->bus->counters.received++;
    if (bus_is_late(server->bus, msg, now_ns))
        return;
    if (msg->kind == MSG_HELLO) {
        take_hello(server, peer, frame, msg, now_ns);
    } else if (!peer) {
        server->bus->counters.refused_peers++;
        send_error(server, frame, msg->id, -ENOTCONN, "HELLO has to come first");
    } else if (msg->epoch != peer->epoch) {
        server->bus->counters.dropped_epoch++;
    } else if (!msg_allowed(server->role, peer->role, true, msg->kind)) {
        snprintf(err.text, sizeof err.text, "%s is not for a %s to send to a %s", msg_kind_name(msg->kind),
                 msg_role_name(peer->role), msg_role_name(server->role));
        close_for(server, peer, frame, msg->id, err.text);
    } else {
        peer->heard_ns = now_ns;
        take_allowed(server, peer, msg);
    }
}

int bus_server_pump(struct bus_server *server)
{
    for (int i = 0; i < BUS_BATCH; i++) {
        struct bus_frame frame;
        struct msg msg;
        int r = bus_socket_receive(server->bus, server->socket, true, &frame);
        if (r == 0)
            return 0;
        if (r < 0)
            continue;
        take(server, &frame, &msg);
        msg_free(&msg);
        bus_frame_release(&frame);
    }
    return 1;
}

/* A person may stop the command line and continue it: it is not lost while its process is there. */
static bool is_lost(const struct bus_peer *peer, int64_t now_ns)
{
    int64_t silent_ns = now_ns - peer->heard_ns;
    bool patient = peer->role == ROLE_LAUNCH && silent_ns <= BUS_PATIENCE_NS && bus_peer_lives(peer);
    return silent_ns > BUS_SILENCE_NS && !patient;
}

void bus_server_tick(struct bus_server *server, int64_t now_ns, int64_t stalled_ns)
{
    for (uint32_t i = 0; i < server->peer_count; i++)
        server->peers[i]->heard_ns += stalled_ns;
    for (uint32_t i = 0; i < server->peer_count;) {
        if (is_lost(server->peers[i], now_ns)) {
            lose_peer(server, server->peers[i]);
            i = 0; /* the table may have changed under the daemon's hands */
        } else {
            i++;
        }
    }
}
