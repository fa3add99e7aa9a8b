/* See daemon.h. Loop thread. Says nothing itself: the daemon logs why it ends. */
#include "link/daemon.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

int daemon_threads(int most)
{
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (online < 1)
        return 1;
    return online < most ? (int)online : most;
}

/* A daemon has up to 40 of its own, sockets of ZeroMQ included, and some for each that connects. */
enum { OPEN_FILES_MIN = 128 };

int daemon_open_files(struct err *err)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return err_set(err, -errno, "open files: %s", strerror(errno));
    if (limit.rlim_max < OPEN_FILES_MIN)
        return err_set(err, -EMFILE, "open files (ulimit -n): found a limit of %llu, expected at least %d",
                       (unsigned long long)limit.rlim_max, OPEN_FILES_MIN);
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
        return err_set(err, -errno, "open files: %s", strerror(errno));
    return 0;
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
    int r = daemon_open_files(err);
    if (r < 0)
        return r;
    r = loop_add_signals(d->loop, signals, on_signal, d);
    if (r < 0)
        return err_set(err, r, "signals: %s", strerror(-r));
    r = d->options->lifeline < 0
            ? 0
            : loop_add_fd(d->loop, d->options->lifeline, EPOLLIN | EPOLLHUP, on_lifeline, d);
    return r < 0 ? err_set(err, r, "lifeline: descriptor %d: %s", d->options->lifeline, strerror(-r)) : 0;
}
