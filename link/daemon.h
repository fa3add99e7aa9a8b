/* What the processes of all daemons have in common: three options, and what ends them from outside. */
#ifndef LINK_DAEMON_H
#define LINK_DAEMON_H

#include <stddef.h>

#include "base/err.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/options.h"
#include "link/runtime.h"

struct daemon_options {
    const char *runtime; /* directory of the sockets */
    int lifeline;        /* descriptor whose end of file ends the daemon; -1: none */
    enum log_level log;
};

#define DAEMON_GROUP "Options"

/* clang-format off */
/* Rows of an option table whose values have a `struct daemon_options daemon`, with lifeline -1 before. */
#define DAEMON_OPTIONS(values) \
    {.name = "runtime", .kind = OPTION_TEXT, .at = offsetof(values, daemon.runtime), .argument = "DIR", \
     .initial = RUNTIME_DIR_DEFAULT, .group = DAEMON_GROUP, .text = "directory of the sockets"}, \
    {.name = "lifeline", .kind = OPTION_UINT, .at = offsetof(values, daemon.lifeline), .argument = "FD", \
     .most = 1 << 20, .group = DAEMON_GROUP, .text = "end when this descriptor reads end of file"}, \
    {.name = "log", .kind = OPTION_CHOICE, .at = offsetof(values, daemon.log), .argument = "LEVEL", \
     .initial = "info", .choices = LOG_LEVELS, .group = DAEMON_GROUP, \
     .text = "what to tell on standard error"}
/* clang-format on */

/* Processors online, at most `most`, at least 1: the default of --threads. */
int daemon_threads(int most);

/* Raises the number of files that may be open to what the system allows. -EMFILE when that is too few to run
 * at all. Every program calls it first: daemon_watch does. */
int daemon_open_files(struct err *err);

struct daemon {
    struct loop *loop;
    const struct daemon_options *options;
    /* Asked to end by "SIGTERM" or "SIGINT", or "the supervisor is gone"; may come again. */
    void (*end)(void *arg, const char *why);
    void *arg;
};

/* Watches signals and life line, and ignores SIGPIPE: a log line into a closed pipe must not end a daemon
 * that has not cleaned up. Call before any thread starts; `daemon` stays until the loop is freed. When the
 * supervisor is gone the runtime directory is removed, since nobody else will. */
int daemon_watch(struct daemon *daemon, struct err *err);

#endif
