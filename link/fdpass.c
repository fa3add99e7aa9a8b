/* Descriptors between processes; see fdpass.h. No state, any thread. Everything that a peer sends is counted
 * before it is kept: a descriptor is either handed to the caller or closed. Nothing here blocks but
 * fdpass_connect and fdpass_recv, and those until their deadline. */
#include "link/fdpass.h"

#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "link/unix_socket.h"

enum { FDPASS_BACKLOG = 16, FDPASS_RETRY_MS = 10, FDPASS_POLL_MAX_MS = 60000 };

/* Room for one more than is ever allowed, so that too many are seen, not truncated away. */
enum { FDPASS_ROOM = FDPASS_FDS_MAX + 1 };

struct fdpass_control {
    _Alignas(struct cmsghdr) char bytes[CMSG_SPACE(sizeof(int) * FDPASS_ROOM)];
};

struct fdpass_received {
    uint32_t bytes; /* of the frame, so far */
    int fds[FDPASS_ROOM];
    uint32_t count;
    bool too_many;
};

int fdpass_listen(const char *path, int *ret_fd, struct err *err)
{
    return unix_socket_listen(path, FDPASS_BACKLOG, ret_fd, err);
}

int fdpass_accept(int listen_fd, int *ret_fd, pid_t *ret_pid, struct err *err)
{
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0)
        return err_set(err, -errno, "descriptor socket: accept: %s", strerror(errno));
    int r = unix_socket_peer(fd, ret_pid, err);
    if (r < 0) {
        close(fd);
        return err_prefix(err, r, "descriptor socket");
    }
    *ret_fd = fd;
    return 0;
}

int fdpass_connect(const char *path, int64_t deadline_ns, int *ret_fd, pid_t *ret_pid, struct err *err)
{
    struct sockaddr_un address;
    int r = unix_socket_address(path, &address, err);
    if (r < 0)
        return r;
    for (;;) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            return err_set(err, -errno, "%s: socket: %s", path, strerror(errno));
        if (connect(fd, (const struct sockaddr *)&address, sizeof address) == 0) {
            r = unix_socket_peer(fd, ret_pid, err);
            if (r == 0)
                *ret_fd = fd;
            else
                close(fd);
            return r == 0 ? 0 : err_prefix(err, r, "%s", path);
        }
        int code = errno;
        close(fd);
        if (code != ENOENT && code != ECONNREFUSED && code != EAGAIN)
            return err_set(err, -code, "%s: connect: %s", path, strerror(code));
        int left = clock_left_ms(deadline_ns, FDPASS_RETRY_MS);
        if (left == 0)
            return err_set(err, -ETIMEDOUT, "%s: nobody listens there: %s", path, strerror(code));
        poll(NULL, 0, left);
    }
}

int fdpass_send(int fd, const struct fdpass_frame *frame, const int *fds, struct err *err)
{
    CHECK(frame->fds <= FDPASS_FDS_MAX);
    struct fdpass_frame out = *frame;
    out.magic = FDPASS_MAGIC;
    struct iovec part = {.iov_base = &out, .iov_len = sizeof out};
    struct fdpass_control control;
    memset(&control, 0, sizeof control);
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (frame->fds) {
        size_t bytes = sizeof(int) * frame->fds;
        header.msg_control = control.bytes;
        header.msg_controllen = CMSG_SPACE(bytes);
        struct cmsghdr *item = CMSG_FIRSTHDR(&header);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(bytes);
        memcpy(CMSG_DATA(item), fds, bytes);
    }
    ssize_t sent = sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == (ssize_t)sizeof out)
        return 0;
    int code = sent >= 0 ? EPROTO : errno == EPIPE ? ECONNRESET : errno;
    return err_set(err, -code, "descriptor socket: send: %s", strerror(code));
}

static void close_all(struct fdpass_received *got)
{
    for (uint32_t i = 0; i < got->count; i++)
        close(got->fds[i]);
    got->count = 0;
}

static void take_fds(struct fdpass_received *got, struct msghdr *header)
{
    for (struct cmsghdr *item = CMSG_FIRSTHDR(header); item; item = CMSG_NXTHDR(header, item)) {
        if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(item) + i * sizeof fd, sizeof fd);
            if (got->count < FDPASS_ROOM)
                got->fds[got->count++] = fd;
            else
                close(fd);
        }
    }
    got->too_many |= (header->msg_flags & MSG_CTRUNC) || got->count > FDPASS_FDS_MAX;
}

/* One recvmsg. 1 when the frame is whole, 0 when more must come, -EAGAIN, or an error. */
static int receive_part(int fd, struct fdpass_frame *frame, struct fdpass_received *got, struct err *err)
{
    struct iovec part = {.iov_base = (uint8_t *)frame + got->bytes, .iov_len = sizeof *frame - got->bytes};
    struct fdpass_control control;
    struct msghdr header = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    ssize_t n = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return -EAGAIN;
    if (n == 0 || (n < 0 && errno == ECONNRESET))
        return err_set(err, -ECONNRESET, "descriptor socket: the peer is gone");
    if (n < 0)
        return err_set(err, -errno, "descriptor socket: receive: %s", strerror(errno));
    take_fds(got, &header);
    if (got->too_many)
        return err_set(err, -EPROTO, "descriptor socket: found more descriptors than %d", FDPASS_FDS_MAX);
    got->bytes += (uint32_t)n;
    return got->bytes == sizeof *frame;
}

static int check_frame(const struct fdpass_frame *frame, uint32_t count, struct err *err)
{
    if (frame->magic != FDPASS_MAGIC)
        return err_set(err, -EPROTO, "descriptor socket: magic: found %08x, expected %08x", frame->magic,
                       FDPASS_MAGIC);
    if (frame->kind < FDPASS_ASK || frame->kind > FDPASS_TAKEN)
        return err_set(err, -EPROTO, "descriptor socket: kind: found %u, expected %u to %u", frame->kind,
                       FDPASS_ASK, FDPASS_TAKEN);
    if (frame->fds != count)
        return err_set(err, -EPROTO, "descriptor socket: descriptors: found %u, expected %u", count,
                       frame->fds);
    return 0;
}

int fdpass_recv(int fd, int64_t deadline_ns, struct fdpass_frame *ret_frame, int *ret_fds, struct err *err)
{
    struct fdpass_received got = {.bytes = 0};
    struct fdpass_frame frame;
    memset(&frame, 0, sizeof frame);
    for (int i = 0; i < FDPASS_FDS_MAX; i++)
        ret_fds[i] = -1;
    int r;
    while ((r = receive_part(fd, &frame, &got, err)) == 0 || r == -EAGAIN) {
        int left = clock_left_ms(deadline_ns, FDPASS_POLL_MAX_MS);
        if (left == 0 && r == -EAGAIN) {
            r = err_set(err, -ETIMEDOUT, "descriptor socket: found %u bytes until the deadline, expected %zu",
                        got.bytes, sizeof frame);
            break;
        }
        struct pollfd wait = {.fd = fd, .events = POLLIN};
        if (left > 0)
            poll(&wait, 1, left);
    }
    if (r == 1)
        r = check_frame(&frame, got.count, err);
    if (r < 0) {
        close_all(&got);
        return r;
    }
    memcpy(ret_fds, got.fds, sizeof(int) * got.count);
    *ret_frame = frame;
    return 0;
}
