/* The receiving side of sd_notify: a datagram socket on which the parts tell READY=1 and STATUS=text. */
#ifndef LAUNCH_NOTIFY_H
#define LAUNCH_NOTIFY_H

#include <stdbool.h>
#include <sys/types.h>

#include "base/err.h"

struct notify_news {
    pid_t pid; /* of the sender, as the kernel tells */
    bool ready;
    bool stopping;
    char status[256]; /* "" when the message has none; control characters replaced */
};

/* Binds a non-blocking, close-on-exec socket at `path`. A socket that nobody listens on any more is replaced;
 * -EADDRINUSE when somebody does. */
int notify_listen(const char *path, int *ret_fd, struct err *err);

/* Takes one message. 0, -EAGAIN when there is none, another negative errno when the socket is broken.
 * Messages without credentials come as pid 0. Descriptors that came along are closed. */
int notify_receive(int fd, struct notify_news *ret_news);

#endif
