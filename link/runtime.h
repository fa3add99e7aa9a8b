/* The runtime directory: where the sockets of one instance lie, and the life line to its supervisor. */
#ifndef LINK_RUNTIME_H
#define LINK_RUNTIME_H

#include <limits.h>

#include "base/err.h"

#define RUNTIME_DIR_DEFAULT "/run/specontext"
#define RUNTIME_PATH_MAX    100 /* sun_path has 108 bytes */

/* Names below the directory: "kvstore.sock" (bus), "kvstore.fd" (descriptors), "retriever.sock",
 * "decoder.sock". -ENAMETOOLONG when the result would not fit a socket address. */
int runtime_path(const char *dir, const char *name, char ret_path[RUNTIME_PATH_MAX], struct err *err);

/* Makes the directory (0700) if it is missing; refuses one that belongs to another user or is writable by
 * others. */
int runtime_prepare(const char *dir, struct err *err);

/* A private directory "specontext-XXXXXX" below $XDG_RUNTIME_DIR, $TMPDIR or /tmp. */
int runtime_make_private(char ret_dir[RUNTIME_PATH_MAX], struct err *err);

/* Removes the sockets in the directory and the directory itself. Only names that this project makes. */
void runtime_remove(const char *dir);

/* The life line: a pipe whose write end only the supervisor holds. A daemon that was given its read end
 * (--lifeline FD) ends when it reads end-of-file, whatever became of the supervisor. */
int runtime_lifeline(int ret_fds[2]);

#endif
