/* Listening Unix sockets, for descriptors and for the bus alike. */
#ifndef LINK_UNIX_SOCKET_H
#define LINK_UNIX_SOCKET_H

#include <sys/types.h>
#include <sys/un.h>

#include "base/err.h"

/* -ENAMETOOLONG when path does not fit; -EINVAL when it is not absolute. */
int unix_socket_address(const char *path, struct sockaddr_un *ret_address, struct err *err);

/* A stream socket that listens at `path`: mode 0600 from its first moment, close-on-exec, non-blocking. The
 * file of a dead listener is replaced; -EADDRINUSE when somebody listens there, -EEXIST when the file is no
 * socket. The caller takes the path away with unix_socket_unlink when it stops, before it closes. */
int unix_socket_listen(const char *path, int backlog, int *ret_fd, struct err *err);

/* Which file a path names, to know later whether it is still that one; zeros when there is none. */
struct unix_socket_file {
    dev_t device;
    ino_t inode;
};
struct unix_socket_file unix_socket_file(const char *path);

/* Unlinks the path if it names that file still: another process may have taken the path over. */
void unix_socket_unlink(const char *path, struct unix_socket_file file);

/* Who is at the other end. 0; -EPERM unless its uid is ours or root's. ret_pid may be NULL. */
int unix_socket_peer(int fd, pid_t *ret_pid, struct err *err);

#endif
