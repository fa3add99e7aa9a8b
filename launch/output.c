/* A queue in front of a descriptor. Owned by the loop's thread. It writes only when poll says that a small
 * write will not block; the descriptor itself is not made non-blocking, because the terminal behind it is
 * shared with the shell. */
#include "launch/output.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/alloc.h"

#define WRITE_BYTES 512 /* POSIX's least PIPE_BUF: a ready pipe takes so much at once */

struct output {
    struct loop *loop;
    int fd;
    bool waiting; /* registered with the loop */
    bool broken;
    void (*moved)(void *arg, int error);
    void *arg;
    char *text;
    size_t begin, end, capacity;
};

struct output *output_create(struct loop *loop, int fd, void (*moved)(void *arg, int error), void *arg)
{
    struct output *o = mem_alloc(1, sizeof *o);
    *o = (struct output){.loop = loop, .fd = fd, .moved = moved, .arg = arg};
    return o;
}

static void wait_for(struct output *o, bool wanted);

void output_free(struct output **output)
{
    if (!*output)
        return;
    wait_for(*output, false);
    mem_free(&(*output)->text);
    mem_free(output);
}

bool output_empty(const struct output *o)
{
    return o->begin == o->end;
}

/* Writes while the descriptor takes it. Regular files always do, and cannot be watched by epoll. */
static void drain(struct output *o)
{
    while (o->begin < o->end) {
        struct pollfd p = {.fd = o->fd, .events = POLLOUT};
        int ready = poll(&p, 1, 0);
        if (ready <= 0)
            break;
        size_t left = o->end - o->begin;
        ssize_t n = write(o->fd, o->text + o->begin, left < WRITE_BYTES ? left : WRITE_BYTES);
        if (n < 0 && (errno == EINTR || errno == EAGAIN))
            break;
        if (n < 0) {
            int r = -errno;
            o->broken = true;
            o->begin = o->end = 0;
            wait_for(o, false);
            o->moved(o->arg, r);
            return;
        }
        o->begin += (size_t)n;
    }
    bool empty = o->begin == o->end;
    if (empty)
        o->begin = o->end = 0;
    wait_for(o, !empty);
    if (empty)
        o->moved(o->arg, 0);
}

static void on_ready(void *arg, uint32_t events)
{
    (void)events;
    drain(arg);
}

static void wait_for(struct output *o, bool wanted)
{
    if (wanted == o->waiting)
        return;
    if (!wanted)
        loop_remove_fd(o->loop, o->fd);
    else if (loop_add_fd(o->loop, o->fd, EPOLLOUT, on_ready, o))
        return; /* cannot be watched: the next write tries again */
    o->waiting = wanted;
}

void output_write(struct output *o, const void *text, size_t bytes)
{
    if (o->broken || !bytes)
        return;
    if (o->end + bytes > o->capacity) {
        o->capacity = (o->end + bytes) * 2;
        o->text = mem_resize(o->text, o->capacity, 1);
    }
    memcpy(o->text + o->end, text, bytes);
    o->end += bytes;
    if (!o->waiting)
        drain(o);
}
