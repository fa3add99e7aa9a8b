/* States of a client of the bus; see bus_state.h. Constant data, any thread.
 *
 *   NEW -connected-> GREETING -welcome-> READY -silence, epoch, forgotten-> LOST -connected-> GREETING
 *
 * A client that nobody welcomed has nothing to lose, so silence means nothing to it. */
#include "link/bus_state.h"

#include <stddef.h>

/* State + 1, so that 0 is "nothing". */
#define TO(state) ((state) + 1)

static const signed char next_state[BUS_STATE_COUNT][BUS_EVENT_COUNT] = {
    [BUS_NEW] = {[BUS_EVENT_CONNECTED] = TO(BUS_GREETING)},
    [BUS_GREETING] = {[BUS_EVENT_WELCOME] = TO(BUS_READY), [BUS_EVENT_REFUSED] = TO(BUS_GREETING)},
    [BUS_READY] = {[BUS_EVENT_SILENCE] = TO(BUS_LOST),
                   [BUS_EVENT_EPOCH] = TO(BUS_LOST),
                   [BUS_EVENT_FORGOTTEN] = TO(BUS_LOST)},
    [BUS_LOST] = {[BUS_EVENT_CONNECTED] = TO(BUS_GREETING)},
};

int bus_state_next(enum bus_state state, enum bus_event event)
{
    return next_state[state][event] - 1;
}

const char *bus_state_name(enum bus_state state)
{
    static const char *const names[] = {"new", "greeting", "ready", "lost"};
    return names[state];
}

struct answer {
    uint32_t role, kind;
};

static const struct answer answers[] = {
    {ROLE_KVSTORE, MSG_GRANT},    {ROLE_KVSTORE, MSG_CLOSED},   {ROLE_KVSTORE, MSG_RESUMED},
    {ROLE_KVSTORE, MSG_PREFIXED}, {ROLE_KVSTORE, MSG_RESELECT}, {ROLE_DECODER, MSG_PROGRESS},
    {ROLE_DECODER, MSG_TOKEN},    {ROLE_DECODER, MSG_DONE},     {ROLE_RETRIEVER, MSG_GRANT},
};

bool bus_answer_allowed(uint32_t role, uint32_t kind)
{
    if (kind == MSG_WELCOME || kind == MSG_ERROR || kind == MSG_PONG || kind == MSG_REPORT)
        return true;
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
        if (answers[i].role == role && answers[i].kind == kind)
            return true;
    return false;
}
