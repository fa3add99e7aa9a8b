/* Descriptors between processes: a Unix stream socket beside each ZeroMQ endpoint that has any to give.
 * Peers are checked by SO_PEERCRED: same uid, or root. The connection stays open for the peer's life; its end
 * is the first sign of a death. */
#ifndef LINK_FDPASS_H
#define LINK_FDPASS_H

#include <stdint.h>
#include <sys/types.h>

#include "base/err.h"

#define FDPASS_FDS_MAX 8

/* The only messages of these sockets. Fixed 64 bytes, little-endian. */
struct fdpass_frame {
    uint32_t magic;    /* FDPASS_MAGIC */
    uint32_t kind;     /* enum fdpass_kind */
    uint64_t epoch;    /* of the sender */
    uint32_t role;     /* enum msg_role of the sender */
    uint32_t fds;      /* descriptors that come with it */
    uint64_t value[5]; /* by kind; zero where unused */
};
#define FDPASS_MAGIC 0x44464353u /* "SCFD" */
enum fdpass_kind {
    FDPASS_ASK = 1, /* client -> store, once: role tells what it wants */
    FDPASS_DECODER =
        2,            /* store -> decoder: device memory (a memfd; not of a GPU), control segment, doorbell of
                           the store, doorbell of the decoder; value: store epoch, device, control bytes */
    FDPASS_ARENA = 3, /* store -> supervisor: host arena; value: bytes */
    FDPASS_FEATURES = 4, /* decoder -> retriever: feature segment */
    FDPASS_TAKEN = 5,    /* retriever -> decoder: it is used */
};
_Static_assert(sizeof(struct fdpass_frame) == 64, "wire");

/* A listening socket at `path` (mode 0600), replacing a stale one that nobody listens on. */
int fdpass_listen(const char *path, int *ret_fd, struct err *err);

/* Accepts (-EAGAIN when nobody waits); refuses strangers with -EPERM. ret_pid: the peer, for pidfd and
 * messages. */
int fdpass_accept(int listen_fd, int *ret_fd, pid_t *ret_pid, struct err *err);

/* Connects until deadline_ns; retries while nobody listens. Checks the server's credentials too. */
int fdpass_connect(const char *path, int64_t deadline_ns, int *ret_fd, pid_t *ret_pid, struct err *err);

/* Sends a frame with its descriptors (they stay the caller's). Never blocks: -EAGAIN when the peer does not
 * read, -ECONNRESET when it is gone. */
int fdpass_send(int fd, const struct fdpass_frame *frame, const int *fds, struct err *err);

/* Receives one frame until deadline_ns. `fds` has room for FDPASS_FDS_MAX; unexpected ones are closed.
 * -ECONNRESET when the peer is gone, -EPROTO for anything malformed, -ETIMEDOUT when no whole frame came; a
 * deadline in the past takes what is there. After any error the connection is of no more use, except after
 * -ETIMEDOUT with nothing received. */
int fdpass_recv(int fd, int64_t deadline_ns, struct fdpass_frame *ret_frame, int *ret_fds, struct err *err);

#endif
