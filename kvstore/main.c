/* specontext-kvstore: owns all KV memory. This file: start and end of the process.
 *
 * Threads: the loop thread (serve.c: sockets), the planner (worker.c: all KV state), its pool (gather.c:
 * rows). */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "base/log.h"
#include "base/loop.h"
#include "kvstore/options.h"
#include "kvstore/serve.h"
#include "link/runtime.h"

struct life {
    struct loop *loop;
    const struct options *options;
};

static void on_signal(void *arg, int signal)
{
    struct life *life = arg;
    log_info("ends: %s", signal == SIGTERM ? "SIGTERM" : "SIGINT");
    loop_stop(life->loop, 0);
}

static void on_lifeline(void *arg, uint32_t events)
{
    (void)events;
    struct life *life = arg;
    char byte;
    ssize_t n = read(life->options->lifeline, &byte, 1);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR)))
        return;
    log_info("ends: the supervisor is gone");
    runtime_remove(life->options->runtime);
    loop_stop(life->loop, 0);
}

/* An arena that the service manager kept for us; others are closed. */
static int inherited_arena(void)
{
    char **names = NULL;
    int arena = -1, n = sd_listen_fds_with_names(1, &names);
    for (int i = 0; i < n; i++) {
        int fd = SD_LISTEN_FDS_START + i;
        if (arena < 0 && names && names[i] && strcmp(names[i], "arena") == 0)
            arena = fd;
        else
            close(fd);
        if (names)
            free(names[i]);
    }
    free(names);
    return arena;
}

static int run(const struct options *options)
{
    struct err err = {0};
    struct life life = {.options = options};
    struct serve *serve = NULL;
    int arena_fd = inherited_arena();
    static const int SIGNALS[] = {SIGTERM, SIGINT, 0};
    signal(SIGPIPE, SIG_IGN);
    life.loop = loop_create();
    int r =
        loop_add_signals(life.loop, SIGNALS, on_signal, &life); /* before any thread: they inherit the mask */
    if (r == 0 && options->lifeline >= 0)
        r = loop_add_fd(life.loop, options->lifeline, EPOLLIN | EPOLLHUP, on_lifeline, &life);
    if (r < 0)
        err_set(&err, r, "loop: %s", strerror(-r));
    if (r == 0)
        r = runtime_prepare(options->runtime, &err);
    if (r == 0)
        r = serve_create(&serve, life.loop, options, arena_fd, &err);
    if (r == 0) {
        log_info("started version=%s runtime=%s device=%llu host=%llu sequences=%u threads=%d",
                 SPECONTEXT_VERSION, options->runtime, (unsigned long long)options->planner.device_bytes,
                 (unsigned long long)options->planner.host_bytes, options->planner.sequences,
                 options->planner.threads);
        sd_notify(0, "READY=1");
        r = loop_run(life.loop);
        sd_notify(0, "STOPPING=1");
    } else {
        log_error("%s", err.text);
    }
    serve_free(&serve);
    loop_free(&life.loop);
    log_info("stopped");
    return r == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct options options;
    struct err err = {0};
    int r = options_parse(argc, argv, &options, &err);
    if (r < 0) {
        fprintf(stderr, "specontext-kvstore: %s\n", err.text);
        return 2;
    }
    if (r > 0)
        return 0;
    log_init("kvstore", options.level);
    return run(&options);
}
