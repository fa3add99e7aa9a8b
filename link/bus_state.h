/* The states of a client of the bus (PROTOCOL.md section 4), apart from sockets so that every state can meet
 * every event in a test. */
#ifndef LINK_BUS_STATE_H
#define LINK_BUS_STATE_H

#include "link/bus.h"

enum bus_event {
    BUS_EVENT_CONNECTED, /* a socket was made: HELLO may be said */
    BUS_EVENT_WELCOME,   /* WELCOME of the server whose epoch is held from now on */
    BUS_EVENT_REFUSED,   /* ERROR with id 0 instead: HELLO goes on being repeated */
    BUS_EVENT_SILENCE,   /* nothing heard for BUS_SILENCE_NS */
    BUS_EVENT_EPOCH,     /* a message of another server's life */
    BUS_EVENT_FORGOTTEN, /* the server says that we have not greeted it */
    BUS_EVENT_COUNT
};

enum { BUS_STATE_COUNT = BUS_LOST + 1 };

/* The state after the event; -1 when the event means nothing in that state. */
int bus_state_next(enum bus_state state, enum bus_event event);

const char *bus_state_name(enum bus_state state);

/* Whether a server of role `role` may send `kind` to its clients. */
bool bus_answer_allowed(uint32_t role, uint32_t kind);

#endif
