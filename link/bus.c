/* One ZeroMQ context of a process, the sockets' options, frames, and the clock of all its conversations; see
 * bus.h. Owner: the loop thread; ZeroMQ's I/O thread is its own and only gets whole frames, whose buffers it
 * frees. Nothing here waits: every send and receive is ZMQ_DONTWAIT. */
#include "link/bus.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/hash.h"
#include "link/bus_internal.h"

#define TICK_NS      (BUS_PING_NS / 5)
#define RECONNECT_MS 20

static void set_int(void *socket, int option, int value)
{
    CHECK(zmq_setsockopt(socket, option, &value, sizeof value) == 0);
}

void *bus_socket_open(struct bus *bus, int type)
{
    void *socket = zmq_socket(bus->context, type);
    if (!socket)
        return NULL;
    int64_t most = LIMIT_MESSAGE_BYTES;
    CHECK(zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &most, sizeof most) == 0);
    set_int(socket, ZMQ_LINGER, 0);
    set_int(socket, ZMQ_SNDHWM, BUS_HWM);
    set_int(socket, ZMQ_RCVHWM, BUS_HWM);
    set_int(socket, ZMQ_RECONNECT_IVL, RECONNECT_MS);
    if (type == ZMQ_ROUTER) {
        set_int(socket, ZMQ_ROUTER_MANDATORY, 1);
    } else {
        uint64_t routing[2] = {hash_random_id(), hash_random_id()};
        uint8_t *first = (uint8_t *)routing;
        first[0] |= 1; /* ids that begin with 0 are ZeroMQ's own */
        _Static_assert(sizeof routing == BUS_ROUTING_BYTES, "");
        CHECK(zmq_setsockopt(socket, ZMQ_ROUTING_ID, routing, sizeof routing) == 0);
        set_int(socket, ZMQ_IMMEDIATE, 1);
    }
    return socket;
}

static int socket_fd(void *socket)
{
    int fd;
    size_t bytes = sizeof fd;
    CHECK(zmq_getsockopt(socket, ZMQ_FD, &fd, &bytes) == 0);
    return fd;
}

int bus_socket_watch(struct bus *bus, void *socket, void (*fn)(void *arg, uint32_t events), void *arg)
{
    return loop_add_fd(bus->loop, socket_fd(socket), EPOLLIN, fn, arg);
}

void bus_socket_close(struct bus *bus, void **socket)
{
    if (!*socket)
        return;
    loop_remove_fd(bus->loop, socket_fd(*socket));
    zmq_close(*socket);
    *socket = NULL;
}

static void free_body(void *data, void *hint)
{
    (void)hint;
    msg_buffer_free(data);
}

static int send_failed(struct bus *bus)
{
    int code = zmq_errno();
    CHECK(code == EAGAIN || code == EHOSTUNREACH || code == EINTR);
    if (code == EHOSTUNREACH)
        return -EHOSTUNREACH;
    bus->counters.dropped_full++;
    return -EAGAIN;
}

int bus_socket_send(struct bus *bus, void *socket, const void *routing, size_t routing_bytes, struct msg *msg)
{
    if (routing_bytes && zmq_send(socket, routing, routing_bytes, ZMQ_DONTWAIT | ZMQ_SNDMORE) < 0)
        return send_failed(bus);
    msg->version = MSG_VERSION;
    msg->epoch = bus->epoch;
    void *buffer;
    size_t bytes;
    msg_encode(msg, &buffer, &bytes);
    zmq_msg_t body;
    CHECK(zmq_msg_init_data(&body, buffer, bytes, free_body, NULL) == 0);
    if (zmq_msg_send(&body, socket, ZMQ_DONTWAIT) < 0) {
        int r = send_failed(bus);
        zmq_msg_close(&body);
        return r;
    }
    bus->counters.sent++;
    return 0;
}

/* Takes the next part. False when there is none; the part is empty then. */
static bool take_part(void *socket, zmq_msg_t *part)
{
    zmq_msg_init(part);
    if (zmq_msg_recv(part, socket, ZMQ_DONTWAIT) >= 0)
        return true;
    CHECK(zmq_errno() == EAGAIN || zmq_errno() == EINTR);
    return false;
}

/* Drops the parts behind `part`. False when there were any. */
static bool is_last(void *socket, zmq_msg_t *part)
{
    if (!zmq_msg_more(part))
        return true;
    zmq_msg_t extra;
    bool more = true;
    while (more && take_part(socket, &extra)) {
        more = zmq_msg_more(&extra);
        zmq_msg_close(&extra);
    }
    return false;
}

int bus_socket_receive(struct bus *bus, void *socket, bool routed, struct bus_frame *ret)
{
    zmq_msg_init(&ret->routing);
    zmq_msg_init(&ret->body);
    bool ok = true;
    if (routed) {
        if (!take_part(socket, &ret->routing))
            return 0;
        ok = zmq_msg_more(&ret->routing) && zmq_msg_size(&ret->routing) <= BUS_ROUTING_BYTES;
        if (zmq_msg_more(&ret->routing))
            ok = take_part(socket, &ret->body) && ok;
    } else if (!take_part(socket, &ret->body)) {
        return 0;
    }
    ok = is_last(socket, &ret->body) && ok;
    if (ok)
        return 1;
    bus->counters.malformed++;
    bus_frame_release(ret);
    return -EPROTO;
}

void bus_frame_release(struct bus_frame *frame)
{
    zmq_msg_close(&frame->routing);
    zmq_msg_close(&frame->body);
}

bool bus_is_late(struct bus *bus, const struct msg *msg, int64_t now_ns)
{
    if (msg->deadline_ns == 0 || now_ns <= msg->deadline_ns)
        return false;
    bus->counters.dropped_late++;
    return true;
}

static int pump_all(void *arg)
{
    struct bus *bus = arg;
    int again = 0;
    for (struct bus_server *s = bus->servers; s; s = bus_server_next(s))
        again |= bus_server_pump(s);
    for (struct bus_client *c = bus->clients; c; c = bus_client_next(c))
        again |= bus_client_pump(c);
    bus_client_reap(&bus->clients, false);
    return again;
}

static void tick(void *arg)
{
    struct bus *bus = arg;
    int turns = 2 * BUS_HWM / BUS_BATCH;
    while (turns-- > 0 && pump_all(bus)) /* what lies in the queues was said in time */
        ;
    int64_t now_ns = clock_now_ns();
    int64_t late_ns = now_ns - bus->ticked_ns - TICK_NS;
    int64_t stalled_ns = late_ns > BUS_PING_NS ? late_ns : 0;
    bus->ticked_ns = now_ns;
    for (struct bus_server *s = bus->servers; s; s = bus_server_next(s))
        bus_server_tick(s, now_ns, stalled_ns);
    for (struct bus_client *c = bus->clients; c; c = bus_client_next(c))
        bus_client_tick(c, now_ns, stalled_ns);
    bus_client_reap(&bus->clients, false);
}

struct bus *bus_create(struct loop *loop, const struct msg_hello *hello)
{
    struct bus *bus = mem_alloc(1, sizeof *bus);
    bus->loop = loop;
    bus->hello = *hello;
    bus->epoch = hash_random_id();
    bus->context = zmq_ctx_new();
    CHECK(bus->context != NULL);
    bus->ticked_ns = clock_now_ns();
    bus->timer = loop_add_timer(loop, TICK_NS, tick, bus);
    loop_before_sleep(loop, pump_all, bus);
    return bus;
}

void bus_free(struct bus **bus_at)
{
    struct bus *bus = *bus_at;
    if (!bus)
        return;
    *bus_at = NULL;
    loop_remove_timer(bus->loop, bus->timer);
    loop_before_sleep(bus->loop, NULL, bus);
    while (bus->servers)
        bus_server_close(&bus->servers);
    bus_client_reap(&bus->clients, true);
    while (zmq_ctx_term(bus->context) < 0)
        CHECK(zmq_errno() == EINTR);
    mem_free(&bus);
}

uint64_t bus_epoch(const struct bus *bus)
{
    return bus->epoch;
}

const struct bus_counters *bus_counters(const struct bus *bus)
{
    return &bus->counters;
}

void bus_set_hello(struct bus *bus, const struct msg_hello *hello)
{
    bus->hello = *hello;
}
