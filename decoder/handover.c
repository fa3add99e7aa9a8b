/* Handing over the feature segment; see handover.h. Owner: the loop thread. The connection stays open for the
 * retriever's life; who has answered may close it. */
#include "decoder/handover.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/clock.h"
#include "link/fdpass.h"
#include "link/flag.h"
#include "proto/features.h"

void handover_init(struct handover *h, struct loop *loop, void (*done)(void *arg, const char *why), void *arg)
{
    *h = (struct handover){
        .loop = loop, .done = done, .arg = arg, .segment.fd = -1, .connection = -1, .timer = -1};
}

static void stop_timer(struct handover *h)
{
    if (h->timer >= 0)
        loop_remove_timer(h->loop, h->timer);
    h->timer = -1;
}

static void drop_connection(struct handover *h)
{
    if (h->connection < 0)
        return;
    loop_remove_fd(h->loop, h->connection);
    close(h->connection);
    h->connection = -1;
}

static void on_late(void *arg)
{
    struct handover *h = arg;
    handover_drop(h);
    h->done(h->arg, "it did not answer");
}

static void on_answer(void *arg, uint32_t events)
{
    struct handover *h = arg;
    struct fdpass_frame frame;
    int fds[FDPASS_FDS_MAX];
    struct err err = {0};
    (void)events;
    int r = fdpass_recv(h->connection, 0, &frame, fds, &err);
    if (r == -ETIMEDOUT)
        return;
    for (uint32_t i = 0; r == 0 && i < FDPASS_FDS_MAX; i++)
        if (fds[i] >= 0)
            close(fds[i]); /* an answer brings none */
    int waiting = h->timer >= 0, taken = r == 0 && frame.kind == FDPASS_TAKEN;
    if (!taken)
        drop_connection(h);
    if (r == -ECONNRESET)
        return; /* its death: who hears of it drops this, or the timer ends */
    stop_timer(h);
    if (waiting)
        h->done(h->arg, taken ? NULL : r == 0 ? "it answered with another kind of frame" : err.text);
}

int handover_send(struct handover *h, const char *path, int fd, uint64_t epoch, struct err *err)
{
    struct fdpass_frame frame = {.kind = FDPASS_FEATURES, .epoch = epoch, .role = ROLE_DECODER, .fds = 1};
    pid_t pid;
    handover_close(h);
    int own = dup(fd);
    if (own < 0)
        return err_set(err, -errno, "feature segment: %s", strerror(errno));
    int r = segment_map(own, 0, &h->segment, err);
    if (r < 0) {
        close(own);
        return r;
    }
    r = fdpass_connect(path, clock_now_ns() + CLOCK_S, &h->connection, &pid, err);
    if (r == 0)
        r = fdpass_send(h->connection, &frame, &fd, err);
    if (r == 0 && (r = loop_add_fd(h->loop, h->connection, EPOLLIN | EPOLLRDHUP, on_answer, h)) < 0)
        err_set(err, r, "%s: epoll: %s", path, strerror(-r));
    if (r < 0 && h->connection >= 0) {
        close(h->connection);
        h->connection = -1;
    }
    if (r < 0 && r != -ETIMEDOUT && r != -ECONNRESET)
        return r;
    /* Who does not listen, or hung up, is about to be lost, which drops this; or the timer ends. */
    h->timer = loop_add_timer(h->loop, HANDOVER_ANSWER_S * CLOCK_S, on_late, h);
    return 0;
}

void handover_abort(struct handover *h)
{
    if (h->segment.at)
        flag_abort(&((struct features_header *)h->segment.at)->read);
}

void handover_drop(struct handover *h)
{
    stop_timer(h);
    drop_connection(h);
}

void handover_close(struct handover *h)
{
    if (h->loop)
        handover_drop(h);
    segment_close(&h->segment);
}
