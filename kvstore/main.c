/* specontext-kvstore: owns all KV memory. This file: start and end of the process.
 *
 * Threads: the loop thread (serve.c: sockets), the planner (worker.c: all KV state), its pool (gather.c:
 * rows). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "base/log.h"
#include "base/loop.h"
#include "base/trace.h"
#include "kvstore/serve.h"
#include "kvstore/store_options.h"
#include "link/daemon.h"

static void on_end(void *arg, const char *why)
{
    struct loop *loop = arg;
    log_info("ends: %s", why);
    loop_stop(loop, 0);
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

static int run(const struct store_options *options)
{
    struct err err = {0};
    struct serve *serve = NULL;
    int arena_fd = inherited_arena();
    struct loop *loop = loop_create();
    struct daemon daemon = {.loop = loop, .options = &options->daemon, .end = on_end, .arg = loop};
    int r = daemon_watch(&daemon, &err); /* before any thread: they inherit the mask */
    if (r == 0)
        r = runtime_prepare(options->daemon.runtime, &err);
    if (r == 0)
        r = serve_create(&serve, loop, options, arena_fd, &err);
    if (r == 0) {
        log_info("started version=%s runtime=%s on=%s device=%llu host=%llu sequences=%u threads=%d",
                 SPECONTEXT_VERSION, options->daemon.runtime, options->device,
                 (unsigned long long)options->planner.device_bytes,
                 (unsigned long long)options->planner.host_bytes, options->planner.sequences,
                 options->planner.threads);
        sd_notify(0, "READY=1");
        r = loop_run(loop);
        sd_notify(0, "STOPPING=1");
    } else {
        log_error("%s", err.text);
        sd_notifyf(0, "STOPPING=1\nSTATUS=%s", err.text);
    }
    serve_free(&serve);
    loop_free(&loop);
    log_info("stopped");
    return r == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct store_options options;
    struct err err = {0};
    int r = store_options_parse(argc, argv, &options, &err);
    if (r < 0) {
        fprintf(stderr, "specontext-kvstore: %s\n", err.text);
        return 2;
    }
    if (r > 0)
        return 0;
    log_init("kvstore", options.daemon.log);
    trace_open("kvstore");
    return run(&options);
}
