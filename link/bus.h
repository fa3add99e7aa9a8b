/* Messages between processes over ZeroMQ: a ROUTER a server, a DEALER a client, ipc:// only.
 *
 * Explicit high-water marks, no lingering, a fresh identity each life, ROUTER_MANDATORY. A server keeps a
 * peer table keyed by routing id; a peer must say HELLO first, and whatever msg_allowed forbids closes it.
 * All calls belong to the loop thread; the bus sets its own before-sleep hook and timer there.
 *
 * Who may connect: the socket has mode 0600 from its first moment and lies in a directory of mode 0700
 * (link/runtime.h), and connections of other users but root are closed as they are accepted. Messages
 * themselves carry no credentials: ZeroMQ tells none for ipc. */
#ifndef LINK_BUS_H
#define LINK_BUS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/err.h"
#include "base/loop.h"
#include "proto/msg.h"

struct bus; /* one ZeroMQ context of a process, its epoch and its HELLO */
struct bus_server;
struct bus_client;

struct bus_peer { /* what a server knows of one peer */
    uint8_t routing[16];
    uint32_t routing_bytes;
    uint64_t epoch;
    uint32_t role; /* enum msg_role; 0 before HELLO */
    uint32_t pid;
    int64_t heard_ns; /* last message */
    void *user;       /* the daemon's own */
};

struct bus_counters { /* for status and metrics */
    uint64_t sent, received, dropped_full, dropped_late, dropped_epoch, refused_peers, malformed;
};

struct bus *bus_create(struct loop *loop, const struct msg_hello *hello);
void bus_free(struct bus **bus); /* closes its servers and clients; not from a callback of theirs */
uint64_t bus_epoch(const struct bus *bus);
const struct bus_counters *bus_counters(const struct bus *bus);

/* Replaces the identity told in later HELLO / WELCOME (a store learns its layout late). */
void bus_set_hello(struct bus *bus, const struct msg_hello *hello);

struct bus_server_ops {
    /* A peer said HELLO. 0 accepts (WELCOME is sent); negative refuses: err's text goes back as ERROR.
     * Nothing may be sent to the peer before the call returns, nor is it found by bus_find_role. NULL
     * accepts all. A peer that repeats itself is welcomed again without a call. */
    int (*hello)(void *arg, struct bus_peer *peer, const struct msg_hello *hello, struct err *err);
    /* Any other allowed message. PING, STATUS are answered by the bus (STATUS through `status`). The message
     * is released after the call unless the callee took msg->memory (sets it to NULL). */
    void (*message)(void *arg, struct bus_peer *peer, struct msg *msg);
    /* JSON text for STATUS, NUL-terminated, malloc'ed; may be NULL. */
    char *(*status)(void *arg);
    /* A peer that was accepted is no more (may be NULL): a protocol error, silence past BUS_SILENCE_NS,
     * another HELLO of the same process, its place was needed, or bus_lose_peer. It is freed after the call.
     * Not called for bus_free. */
    void (*gone)(void *arg, struct bus_peer *peer);
};

/* Binds ipc://path (absolute); the socket of a dead server is replaced, -EADDRINUSE when one lives. */
int bus_serve(struct bus *bus, const char *path, uint32_t role, const struct bus_server_ops *ops, void *arg,
              struct bus_server **ret_server, struct err *err);

/* Sends to a peer; epoch and version are filled in. -EAGAIN: its queue is full (counted), -EHOSTUNREACH. */
int bus_reply(struct bus_server *server, const struct bus_peer *peer, struct msg *msg);

/* The peer of a role that greeted last, or NULL. */
struct bus_peer *bus_find_role(struct bus_server *server, uint32_t role);

/* Whether the process that a peer named in its HELLO exists, as far as can be seen from here: a place that
 * only one may hold is refused to a second one while it does. */
bool bus_peer_lives(const struct bus_peer *peer);

/* Loses the peer that `who` is, or is a copy of, and says so by `gone`: for one whose queue is full. It hears
 * ERROR -ENOTCONN at its next message, in place of what it missed, and greets anew. Also from a callback of
 * that peer, except `hello` and `gone`. */
void bus_lose_peer(struct bus_server *server, const struct bus_peer *who);

#define BUS_PING_NS    (500 * CLOCK_MS) /* clients ping when they have sent, or heard, nothing for so long */
#define BUS_SILENCE_NS (4 * CLOCK_S)    /* a peer that says nothing for so long is LOST */
#define BUS_PATIENCE_NS \
    (3600 * CLOCK_S) /* ... of ROLE_LAUNCH and its process lives: a person may stop it for a while */

enum bus_state { BUS_NEW, BUS_GREETING, BUS_READY, BUS_LOST };

struct bus_client_ops {
    /* READY; again after each loss. */
    void (*welcome)(void *arg, const struct msg_hello *hello, uint64_t epoch);
    /* Anything but WELCOME and PONG. ERROR with id 0 while GREETING: HELLO was refused; it goes on being
     * repeated until bus_disconnect. The message's memory as in bus_server_ops. */
    void (*message)(void *arg, struct msg *msg);
    void (*lost)(void *arg, const char *why); /* silence, or another epoch: everything asked for is void */
};

/* Connects (the server may come later), says HELLO and repeats it each BUS_PING_NS until welcomed. One
 * client a server and bus. All callbacks may be NULL; each may call bus_send, bus_disconnect and
 * bus_connect. */
int bus_connect(struct bus *bus, const char *path, const struct bus_client_ops *ops, void *arg,
                struct bus_client **ret_client, struct err *err);
/* 0, -EAGAIN (full or unconnected for now, counted), -ENOTCONN (not READY). */
int bus_send(struct bus_client *client, struct msg *msg);
enum bus_state bus_client_state(const struct bus_client *client);
/* READY: takes the server for lost, as after silence, and greets it anew. Not from within its callbacks. */
void bus_client_reset(struct bus_client *client, const char *why);
void bus_disconnect(struct bus_client **client);

#endif
