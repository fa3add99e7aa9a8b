/* See daemon.h. Loop thread. Says nothing itself: the daemon logs why it ends. */
#include "link/daemon.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

int daemon_threads(int most)
{
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (online < 1)
        return 1;
    return online < most ? (int)online : most;
}

static void on_signal(void *arg, int signal)
{
    struct daemon *d = arg;
    d->end(d->arg, signal == SIGTERM ? "SIGTERM" : "SIGINT");
}

static void on_lifeline(void *arg, uint32_t events)
{
    (void)events;
    struct daemon *d = arg;
    char byte;
    ssize_t n = read(d->options->lifeline, &byte, 1);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    loop_remove_fd(d->loop, d->options->lifeline);
    runtime_remove(d->options->runtime);
    d->end(d->arg, "the supervisor is gone");
}

int daemon_watch(struct daemon *d, struct err *err)
{
    static const int signals[] = {SIGTERM, SIGINT, 0};
    signal(SIGPIPE, SIG_IGN);
    int r = loop_add_signals(d->loop, signals, on_signal, d);
    if (r < 0)
        return err_set(err, r, "signals: %s", strerror(-r));
    r = d->options->lifeline < 0
            ? 0
            : loop_add_fd(d->loop, d->options->lifeline, EPOLLIN | EPOLLHUP, on_lifeline, d);
    return r < 0 ? err_set(err, r, "lifeline: descriptor %d: %s", d->options->lifeline, strerror(-r)) : 0;
}
