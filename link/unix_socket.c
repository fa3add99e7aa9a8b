/* Listening Unix sockets; see unix_socket.h. No state, any thread. It must never take a path away from
 * somebody who listens on it. */
#include "link/unix_socket.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

int unix_socket_address(const char *path, struct sockaddr_un *ret, struct err *err)
{
    size_t length = strlen(path);
    if (path[0] != '/')
        return err_set(err, -EINVAL, "%s: found a relative path, expected an absolute one", path);
    if (length >= sizeof ret->sun_path)
        return err_set(err, -ENAMETOOLONG, "%s: length: found %zu, expected at most %zu", path, length,
                       sizeof ret->sun_path - 1);
    *ret = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(ret->sun_path, path, length + 1);
    return 0;
}

/* Unlinks what a dead listener left. 0 when the path is free afterwards. */
static int clear_stale(const struct sockaddr_un *address, struct err *err)
{
    struct stat st;
    if (lstat(address->sun_path, &st) < 0)
        return errno == ENOENT ? 0 : err_set(err, -errno, "%s: %s", address->sun_path, strerror(errno));
    if (!S_ISSOCK(st.st_mode))
        return err_set(err, -EEXIST, "%s: found a file, expected a socket or nothing", address->sun_path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_set(err, -errno, "%s: socket: %s", address->sun_path, strerror(errno));
    int r = connect(fd, (const struct sockaddr *)address, sizeof *address);
    int code = r < 0 ? errno : 0;
    close(fd);
    if (code == ENOENT)
        return 0;
    if (code != ECONNREFUSED)
        return err_set(err, -EADDRINUSE, "%s: another process listens there", address->sun_path);
    if (unlink(address->sun_path) < 0 && errno != ENOENT)
        return err_set(err, -errno, "%s: unlink: %s", address->sun_path, strerror(errno));
    return 0;
}

int unix_socket_listen(const char *path, int backlog, int *ret_fd, struct err *err)
{
    struct sockaddr_un address;
    int r = unix_socket_address(path, &address, err);
    if (r == 0)
        r = clear_stale(&address, err);
    if (r < 0)
        return r;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_set(err, -errno, "%s: socket: %s", path, strerror(errno));
    /* Linux gives the file the mode of the unbound socket: no moment in which it is wider than 0600. */
    if (fchmod(fd, 0600) < 0 || bind(fd, (const struct sockaddr *)&address, sizeof address) < 0 ||
        listen(fd, backlog) < 0) {
        int code = -errno;
        close(fd);
        return err_set(err, code, "%s: bind: %s", path, strerror(-code));
    }
    *ret_fd = fd;
    return 0;
}

struct unix_socket_file unix_socket_file(const char *path)
{
    struct stat st;
    return lstat(path, &st) < 0 ? (struct unix_socket_file){0}
                                : (struct unix_socket_file){.device = st.st_dev, .inode = st.st_ino};
}

void unix_socket_unlink(const char *path, struct unix_socket_file file)
{
    struct unix_socket_file now = unix_socket_file(path);
    if (file.inode && now.inode == file.inode && now.device == file.device)
        unlink(path);
}

int unix_socket_peer(int fd, pid_t *ret_pid, struct err *err)
{
    struct ucred peer;
    socklen_t length = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) < 0)
        return err_set(err, -errno, "peer credentials: %s", strerror(errno));
    if (peer.uid != geteuid() && peer.uid != 0)
        return err_set(err, -EPERM, "peer uid: found %u (pid %d), expected %u or 0", peer.uid, peer.pid,
                       geteuid());
    if (ret_pid)
        *ret_pid = peer.pid;
    return 0;
}
