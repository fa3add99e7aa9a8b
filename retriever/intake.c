/* Segments on their way in; see intake.h. Owner: the loop thread. Whoever may connect is one user (fdpass.h);
 * what a segment holds is checked by who maps it. */
#include "retriever/intake.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/log.h"
#include "link/fdpass.h"
#include "link/runtime.h"
#include "link/unix_socket.h"
#include "proto/msg.h"

struct intake {
    struct loop *loop;
    bool (*take)(void *arg, int fd, uint64_t decoder_epoch);
    void *arg;
    int listen_fd, connection; /* -1: none */
    char path[RUNTIME_PATH_MAX];
    struct unix_socket_file file;
};

static void drop(struct intake *s)
{
    if (s->connection < 0)
        return;
    loop_remove_fd(s->loop, s->connection);
    close(s->connection);
    s->connection = -1;
}

static void on_connection(void *arg, uint32_t events)
{
    struct intake *s = arg;
    struct fdpass_frame frame;
    int fds[FDPASS_FDS_MAX];
    struct err err = {0};
    (void)events;
    int r = fdpass_recv(s->connection, 0, &frame, fds, &err);
    if (r == -ETIMEDOUT)
        return;
    bool sound = r == 0 && frame.kind == FDPASS_FEATURES && frame.role == ROLE_DECODER && frame.fds == 1;
    if (sound) {
        if (!s->take(s->arg, fds[0], frame.epoch))
            drop(s);
        return;
    }
    for (uint32_t i = 0; r == 0 && i < frame.fds && i < FDPASS_FDS_MAX; i++)
        close(fds[i]);
    if (r == 0)
        log_warn("features: found frame kind %u of role %u with %u descriptors, expected kind %d of role %d "
                 "with 1",
                 frame.kind, frame.role, frame.fds, FDPASS_FEATURES, ROLE_DECODER);
    else if (r != -ECONNRESET)
        log_warn("features: %s", err.text);
    drop(s);
}

static void on_listen(void *arg, uint32_t events)
{
    struct intake *s = arg;
    struct err err = {0};
    pid_t pid;
    int fd;
    (void)events;
    int r = fdpass_accept(s->listen_fd, &fd, &pid, &err);
    if (r < 0) {
        if (r != -EAGAIN)
            log_warn("features: %s", err.text);
        return;
    }
    drop(s);
    s->connection = fd;
    r = loop_add_fd(s->loop, fd, EPOLLIN | EPOLLRDHUP, on_connection, s);
    if (r < 0) { /* nobody would ever hear it */
        log_warn("features: epoll: %s", strerror(-r));
        drop(s);
    }
}

int intake_create(struct loop *loop, const char *runtime,
                  bool (*take)(void *arg, int fd, uint64_t decoder_epoch), void *arg,
                  struct intake **ret_intake, struct err *err)
{
    struct intake *s = mem_alloc(1, sizeof *s);
    *s = (struct intake){.loop = loop, .take = take, .arg = arg, .listen_fd = -1, .connection = -1};
    int r = runtime_path(runtime, "retriever.fd", s->path, err);
    if (r == 0)
        r = fdpass_listen(s->path, &s->listen_fd, err);
    if (r == 0) {
        s->file = unix_socket_file(s->path);
        r = loop_add_fd(loop, s->listen_fd, EPOLLIN, on_listen, s);
        if (r < 0)
            err_set(err, r, "%s: epoll: %s", s->path, strerror(-r));
    }
    if (r < 0)
        intake_free(&s);
    else
        *ret_intake = s;
    return r;
}

void intake_free(struct intake **intake)
{
    struct intake *s = *intake;
    if (!s)
        return;
    drop(s);
    if (s->listen_fd >= 0) {
        unix_socket_unlink(s->path, s->file); /* before it closes, when others may take the path */
        loop_remove_fd(s->loop, s->listen_fd);
        close(s->listen_fd);
    }
    mem_free(intake);
}

void intake_answer(struct intake *s, uint64_t epoch)
{
    struct fdpass_frame frame = {.kind = FDPASS_TAKEN, .epoch = epoch, .role = ROLE_RETRIEVER};
    struct err err = {0};
    if (s->connection >= 0 && fdpass_send(s->connection, &frame, NULL, &err) < 0) {
        log_warn("features: %s", err.text);
        drop(s);
    }
}
