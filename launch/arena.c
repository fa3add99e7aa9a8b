/* Asks the store for the arena's descriptor and keeps it. State in struct arena_hold, owned by the loop's
 * thread; the two waits are bounded by WAIT_NS and begin only when the other side is ready. */
#include "launch/arena.h"

#include <stdbool.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "link/fdpass.h"
#include "link/runtime.h"
#include "proto/msg.h"

#define WAIT_NS (200 * CLOCK_MS)

void arena_hold_init(struct arena_hold *hold, struct loop *loop)
{
    *hold = (struct arena_hold){.loop = loop, .socket = -1, .fd = -1};
}

static void on_answer(void *arg, uint32_t events)
{
    struct arena_hold *hold = arg;
    struct fdpass_frame frame;
    int fds[FDPASS_FDS_MAX];
    struct err err = {0};
    (void)events;
    int r = fdpass_recv(hold->socket, clock_now_ns() + WAIT_NS, &frame, fds, &err);
    bool good = !r && frame.kind == FDPASS_ARENA && frame.fds == 1 && hold->fd < 0;
    if (good)
        hold->fd = fds[0];
    for (uint32_t i = 0; !r && !good && i < frame.fds; i++)
        close(fds[i]);
    if (!good && hold->fd < 0)
        log_warn("the arena's descriptor is not held: %s", r ? err.text : "unexpected answer");
    loop_remove_fd(hold->loop, hold->socket); /* it either came or will not come on this connection */
    if (good)
        return; /* the connection stays open, so that the store sees who holds it */
    close(hold->socket);
    hold->socket = -1;
}

int arena_hold_ask(struct arena_hold *hold, const char *dir, uint64_t epoch, struct err *err)
{
    char path[RUNTIME_PATH_MAX];
    pid_t pid;
    int r = runtime_path(dir, "kvstore.fd", path, err);
    if (r)
        return r;
    r = fdpass_connect(path, clock_now_ns() + WAIT_NS, &hold->socket, &pid, err);
    if (r) {
        hold->socket = -1;
        return r;
    }
    struct fdpass_frame ask = {.kind = FDPASS_ASK, .epoch = epoch, .role = ROLE_LAUNCH};
    r = fdpass_send(hold->socket, &ask, NULL, err);
    if (!r)
        r = loop_add_fd(hold->loop, hold->socket, EPOLLIN, on_answer, hold);
    if (r) {
        close(hold->socket);
        hold->socket = -1;
    }
    return r;
}

void arena_hold_free(struct arena_hold *hold)
{
    if (hold->socket >= 0) {
        loop_remove_fd(hold->loop, hold->socket);
        close(hold->socket);
    }
    if (hold->fd >= 0)
        close(hold->fd);
    hold->socket = hold->fd = -1;
}
