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

static int take_fds(struct attach *a, int *fds, const struct kv_layout *layout, uint64_t epoch, int on_gpu,
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
    if (h->device_form != (on_gpu ? CONTROL_DEVICE_CUDA : CONTROL_DEVICE_MEMFD))
        return err_set(err, -EPROTO, "kvstore: control segment: found device memory of form %u",
                       h->device_form);
    r = on_gpu ? 0 : segment_map(fds[FD_DEVICE], h->device_bytes, &a->device, err);
    if (r < 0)
        return err_prefix(err, r, "kvstore: device memory");
    if (!on_gpu)
        fds[FD_DEVICE] = -1;
    a->store_epoch = h->store_epoch;
    a->store_bell = fds[FD_STORE_BELL];
    a->decoder_bell = fds[FD_DECODER_BELL];
    fds[FD_STORE_BELL] = fds[FD_DECODER_BELL] = -1;
    return 0;
}

/* Descriptors that came, by name; without device memory's they begin with the control segment's. */
static int sort_fds(const struct fdpass_frame *frame, int on_gpu, int *fds, struct err *err)
{
    uint32_t expected = on_gpu ? FD_COUNT - 1 : FD_COUNT;
    if (frame->kind == FDPASS_DECODER && frame->fds == (uint32_t)(on_gpu ? FD_COUNT : FD_COUNT - 1))
        return err_set(err, -EPROTO, "kvstore: found its device memory on %s, expected it on %s",
                       on_gpu ? "the CPU" : "a GPU", on_gpu ? "our GPU" : "the CPU");
    if (frame->kind != FDPASS_DECODER || frame->fds != expected)
        return err_set(err, -EPROTO,
                       "kvstore: found frame kind %u with %u descriptors, expected kind %d with %u",
                       frame->kind, frame->fds, FDPASS_DECODER, expected);
    if (on_gpu) {
        memmove(fds + FD_CONTROL, fds, expected * sizeof *fds);
        fds[FD_DEVICE] = -1;
    }
    return 0;
}

int attach_take(struct attach *a, const struct kv_layout *layout, uint64_t epoch, int on_gpu, struct err *err)
{
    struct fdpass_frame frame;
    int fds[FDPASS_FDS_MAX];
    _Static_assert(FDPASS_FDS_MAX >= FD_COUNT, "room for all");
    memset(fds, 0xff, sizeof fds);
    int r = fdpass_recv(a->connection, clock_now_ns() + CLOCK_S, &frame, fds, err);
    if (r < 0)
        return err_prefix(err, r, "kvstore");
    r = sort_fds(&frame, on_gpu, fds, err);
    if (r == 0)
        r = take_fds(a, fds, layout, epoch, on_gpu, err);
    for (uint32_t i = 0; i < FDPASS_FDS_MAX; i++)
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
