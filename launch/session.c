/* See session.h. No state. */
#include "launch/session.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "launch/head_cache.h"

int session_head(const char *given, const struct model *model, char ret_path[PATH_MAX], struct err *err)
{
    if (!given)
        return head_cache_get(model, ret_path, err);
    if (snprintf(ret_path, PATH_MAX, "%s", given) >= PATH_MAX)
        return err_set(err, -ENAMETOOLONG, "--head: name too long");
    return 0;
}

int session_start(const struct session_config *c, const struct parts_plan *plan,
                  struct supervise **ret_supervise, struct client **ret_client, struct err *err)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP, 0};
    uint64_t device_memory = 0;
    signal(SIGPIPE, SIG_IGN); /* a closed pipe is an error of write */
    /* Before there is a directory, which nobody would remove if we were killed meanwhile, and before signals
     * wait for the loop. */
    int r = parts_device_memory(plan, &device_memory, err);
    if (r)
        return r;
    r = loop_add_signals(c->loop, signals, c->on_signal, c->arg);
    if (r)
        return err_set(err, r, "signals: %s", strerror(-r));
    struct supervise_config config = {.loop = c->loop, .dir = c->dir};
    r = supervise_create(&config, c->supervise_ops, c->arg, ret_supervise, err);
    if (r)
        return r;
    log_debug("runtime directory %s", supervise_dir(*ret_supervise));
    r = parts_start(*ret_supervise, plan, device_memory, err);
    if (r)
        return r;
    return client_create(c->loop, supervise_dir(*ret_supervise), c->client_ops, c->arg, ret_client, err);
}
