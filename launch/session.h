/* How every command that needs the three daemons finds a head and brings them up. */
#ifndef LAUNCH_SESSION_H
#define LAUNCH_SESSION_H

#include <limits.h>

#include "base/err.h"
#include "base/loop.h"
#include "launch/client.h"
#include "launch/parts.h"
#include "launch/supervise.h"
#include "model/model.h"

struct session_config {
    struct loop *loop;
    const char *dir;                          /* runtime directory; NULL: a private one */
    void (*on_signal)(void *arg, int number); /* SIGINT, SIGTERM, SIGHUP */
    const struct supervise_ops *supervise_ops;
    const struct client_ops *client_ops;
    void *arg; /* of all three */
};

/* The head's path: `given`, or where that is NULL one from the cache, made if there is none. */
int session_head(const char *given, const struct model *model, char ret_path[PATH_MAX], struct err *err);

/* Starts the parts and connects to them. On failure too, what was made stands in the two results and is the
 * caller's to free. */
int session_start(const struct session_config *config, const struct parts_plan *plan,
                  struct supervise **ret_supervise, struct client **ret_client, struct err *err);

#endif
