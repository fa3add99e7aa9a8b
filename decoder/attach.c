/* Attaching to the store; see attach.h. Owner: the loop thread. Maps exactly two segments of the store,
 * never its host arena. Nothing of the control segment is used before its header was checked. */
#include "decoder/attach.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "link/fdpass.h"
#include "proto/msg.h"

enum { FD_DEVICE, FD_CONTROL, FD_STORE_BELL, FD_DECODER_BELL, FD_COUNT };

void attach_init(struct attach *a)
{
    memset(a, 0, sizeof *a);
    a->connection = a->store_bell = a->decoder_bell = a->device.fd = a->control.fd = -1;
}

int attach_ask(struct attach *a, const char *path, uint64_t epoch, struct err *err)
{
    pid_t pid;
    int r = fdpass_connect(path, clock_now_ns() + CLOCK_S, &a->connection, &pid, err);
    if (r < 0)
        return r;
    struct fdpass_frame ask = {.kind = FDPASS_ASK, .epoch = epoch, .role = ROLE_DECODER};
    return fdpass_send(a->connection, &ask, NULL, err);
}

/* Maps the control segment far enough to read its header, then whole. */
static int map_control(struct attach *a, int *fd, const struct kv_layout *layout, struct err *err)
{
    struct stat st;
    if (fstat(*fd, &st) < 0)
        return err_set(err, -errno, "control segment: %s", strerror(errno));
    int r = segment_map(*fd, 0, &a->control, err);
    if (r < 0)
        return r;
    *fd = -1;
    r = control_header_check(attach_control(a), layout, (uint64_t)st.st_size, err);
    if (r == 0 && a->control.bytes < attach_control(a)->total_bytes)
        r = err_set(err, -EINVAL, "control segment: mapped %llu bytes, expected %llu",
                    (unsigned long long)a->control.bytes, (unsigned long long)attach_control(a)->total_bytes);
    return r;
}

static int take_fds(struct attach *a, int *fds, const struct kv_layout *layout, uint64_t epoch,
                    struct err *err)
{
    int r = map_control(a, &fds[FD_CONTROL], layout, err);
    if (r < 0)
        return err_prefix(err, r, "kvstore");
    const struct control_header *h = attach_control(a);
    if (h->decoder_epoch != epoch)
        return err_set(err, -EPROTO,
                       "kvstore: control segment: found decoder epoch %016llx, expected %016llx",
                       (unsigned long long)h->decoder_epoch, (unsigned long long)epoch);
    r = segment_map(fds[FD_DEVICE], h->device_bytes, &a->device, err);
    if (r < 0)
        return err_prefix(err, r, "kvstore: device memory");
    fds[FD_DEVICE] = -1;
    a->store_epoch = h->store_epoch;
    a->store_bell = fds[FD_STORE_BELL];
    a->decoder_bell = fds[FD_DECODER_BELL];
    fds[FD_STORE_BELL] = fds[FD_DECODER_BELL] = -1;
    return 0;
}

int attach_take(struct attach *a, const struct kv_layout *layout, uint64_t epoch, struct err *err)
{
    struct fdpass_frame frame;
    int fds[FDPASS_FDS_MAX];
    int r = fdpass_recv(a->connection, clock_now_ns() + CLOCK_S, &frame, fds, err);
    if (r < 0)
        return err_prefix(err, r, "kvstore");
    if (frame.kind != FDPASS_DECODER || frame.fds != FD_COUNT)
        r = err_set(err, -EPROTO,
                    "kvstore: found frame kind %u with %u descriptors, expected kind %d with %d", frame.kind,
                    frame.fds, FDPASS_DECODER, FD_COUNT);
    else
        r = take_fds(a, fds, layout, epoch, err);
    for (uint32_t i = 0; i < frame.fds && i < FDPASS_FDS_MAX; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return r;
}

static void close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void attach_close(struct attach *a)
{
    segment_close(&a->control);
    segment_close(&a->device);
    close_fd(&a->store_bell);
    close_fd(&a->decoder_bell);
    close_fd(&a->connection);
}
