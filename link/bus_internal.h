/* What the parts of the bus share: bus.c (context, frames, time), bus_server.c, bus_client.c. */
#ifndef LINK_BUS_INTERNAL_H
#define LINK_BUS_INTERNAL_H

#include <zmq.h>

#include "link/bus.h"
#include "link/bus_state.h"

enum {
    BUS_PEERS_MAX = 64,
    BUS_HWM = 1000,
    BUS_BATCH = 64, /* messages of one socket before others get their turn */
    BUS_ROUTING_BYTES = 16,
};

struct bus {
    struct loop *loop;
    void *context;
    uint64_t epoch;
    struct msg_hello hello;
    struct bus_counters counters;
    struct bus_server *servers;
    struct bus_client *clients; /* disconnected ones stay until no callback runs */
    int timer;
    int64_t ticked_ns; /* last tick */
};

/* A routing id and a frame; the id is empty on a client. */
struct bus_frame {
    zmq_msg_t routing, body;
};

/* A socket with the options that all have. NULL: out of descriptors. */
void *bus_socket_open(struct bus *bus, int type);
void bus_socket_close(struct bus *bus, void **socket);

/* Calls fn(arg) for readiness of the socket. Never relied upon alone: ZeroMQ's descriptor is edge-triggered,
 * so bus.c pumps every socket before each sleep too. */
int bus_socket_watch(struct bus *bus, void *socket, void (*fn)(void *arg, uint32_t events), void *arg);

/* Sends one message, behind `routing_bytes` of `routing` if there are any. Fills in version and epoch. 0,
 * -EAGAIN (counted), -EHOSTUNREACH. */
int bus_socket_send(struct bus *bus, void *socket, const void *routing, size_t routing_bytes,
                    struct msg *msg);

/* The next frame. 1: *ret_frame must be released; 0: none; -EPROTO: one of another shape was dropped and
 * counted. `routed`: a routing id stands before it. */
int bus_socket_receive(struct bus *bus, void *socket, bool routed, struct bus_frame *ret_frame);
void bus_frame_release(struct bus_frame *frame);

/* Whether the message's time is over (counted). */
bool bus_is_late(struct bus *bus, const struct msg *msg, int64_t now_ns);

/* One turn: 1 when more may be waiting. */
int bus_server_pump(struct bus_server *server);
int bus_client_pump(struct bus_client *client);

/* Time: `stalled_ns` is how long this process itself did not run, which is not the peers' silence. */
void bus_server_tick(struct bus_server *server, int64_t now_ns, int64_t stalled_ns);
void bus_client_tick(struct bus_client *client, int64_t now_ns, int64_t stalled_ns);

struct bus_server *bus_server_next(struct bus_server *server);
void bus_server_close(struct bus_server **server); /* sets it to the next one */
struct bus_client *bus_client_next(struct bus_client *client);
/* Frees those that were disconnected, or all. */
void bus_client_reap(struct bus_client **list, bool all);

#endif
