/* Takes sd_notify messages apart. No state besides the socket, which the caller owns; never blocks. */
#include "launch/notify.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define MESSAGE_BYTES 4096
#define RIGHTS_MAX    16

/* Unlinks the socket of a supervisor that is gone: nobody can be reached at it. */
static bool clear_stale(const struct sockaddr_un *address)
{
    struct stat st;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return false;
    bool stale = connect(fd, (const struct sockaddr *)address, sizeof *address) && errno == ECONNREFUSED;
    close(fd);
    return stale && !lstat(address->sun_path, &st) && S_ISSOCK(st.st_mode) && !unlink(address->sun_path);
}

int notify_listen(const char *path, int *ret_fd, struct err *err)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (snprintf(address.sun_path, sizeof address.sun_path, "%s", path) >= (int)sizeof address.sun_path)
        return err_set(err, -ENAMETOOLONG, "%s: too long for a socket's name", path);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return err_set(err, -errno, "socket: %s", strerror(errno));
    int on = 1, r = setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) ? -errno : 0;
    if (!r && bind(fd, (struct sockaddr *)&address, sizeof address))
        r = -errno;
    if (r == -EADDRINUSE && clear_stale(&address))
        r = bind(fd, (struct sockaddr *)&address, sizeof address) ? -errno : 0;
    if (r) {
        close(fd);
        return err_set(err, r, "%s: %s", path, r == -EADDRINUSE ? "another run is using it" : strerror(-r));
    }
    *ret_fd = fd;
    return 0;
}

static void take_ancillary(struct msghdr *header, struct notify_news *news)
{
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c)) {
        if (c->cmsg_level != SOL_SOCKET)
            continue;
        if (c->cmsg_type == SCM_CREDENTIALS && c->cmsg_len == CMSG_LEN(sizeof(struct ucred))) {
            struct ucred who;
            memcpy(&who, CMSG_DATA(c), sizeof who);
            news->pid = who.pid;
        } else if (c->cmsg_type == SCM_RIGHTS) { /* a descriptor store is not offered here */
            for (size_t at = 0; CMSG_LEN(at + sizeof(int)) <= c->cmsg_len; at += sizeof(int)) {
                int fd;
                memcpy(&fd, CMSG_DATA(c) + at, sizeof fd);
                close(fd);
            }
        }
    }
}

static void take_line(const char *line, struct notify_news *news)
{
    if (!strcmp(line, "READY=1")) {
        news->ready = true;
    } else if (!strcmp(line, "STOPPING=1")) {
        news->stopping = true;
    } else if (!strncmp(line, "STATUS=", 7)) {
        snprintf(news->status, sizeof news->status, "%s", line + 7);
        for (char *p = news->status; *p; p++) /* goes to a terminal */
            if ((unsigned char)*p < 0x20 || *p == 0x7f)
                *p = '?';
    }
}

int notify_receive(int fd, struct notify_news *ret_news)
{
    char text[MESSAGE_BYTES + 1];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(RIGHTS_MAX * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = text, .iov_len = MESSAGE_BYTES};
    struct msghdr header = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof control.bytes};
    ssize_t n;
    do {
        n = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    *ret_news = (struct notify_news){0};
    take_ancillary(&header, ret_news);
    text[n] = 0;
    for (char *save = NULL, *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save))
        take_line(line, ret_news);
    return 0;
}
