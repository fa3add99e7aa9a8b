/* The GPU that device memory lies on, as the store uses it: memory, one stream, how far that stream is,
 * pinned memory for lists, and host memory that kernels may reach.
 *
 * One owner: the thread that opened it, the planner's. All work of the store goes through the one stream, in
 * order; nobody else waits in it, so all of it ends by itself. Only device_gpu_wait and device_gpu_take wait,
 * with a deadline. A GPU's error is final: it is kept in `error`, everything after it does nothing, and the
 * daemon ends. */
#ifndef KVSTORE_DEVICE_GPU_H
#define KVSTORE_DEVICE_GPU_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "compute/gpu.h"
#include "proto/control.h"

enum { DEVICE_GPU_BUFFERS = 8 };

struct device_gpu_buffer { /* pinned */
    uint8_t *host, *device;
    uint32_t ticket; /* it may be filled again once the stream has passed this */
};

struct device_gpu {
    const struct gpu_api *api;
    struct gpu *gpu;
    struct CUstream_st *stream; /* of high priority: a gather must not queue behind a whole chip of work */
    struct gpu_info info;
    struct err error;          /* code 0 while the GPU is sound */
    _Atomic uint32_t *reached; /* pinned, written by the stream: the last ticket it has passed */
    uint32_t *reached_at;      /* the same for the stream */
    uint32_t ticket;           /* the last one that was queued */
    bool ahead;                /* work was queued behind it */
    uint32_t written;          /* the one behind the last work that writes what the decoder reads */
    struct device_gpu_buffer buffers[DEVICE_GPU_BUFFERS];
    uint32_t buffer;                 /* that is filled now, `used` bytes of it */
    uint64_t used, buffer_bytes;     /* of each */
    uint64_t kv_bytes, tables_bytes; /* device memory that is held now, for status */
    uint64_t registered_bytes;
    int64_t look_ns; /* when to ask again */
};

/* `name`: as gpu_api.open takes it. -ENODEV, -ENOENT ... with the reason. */
int device_gpu_open(struct device_gpu **ret, const char *name, struct err *err);
void device_gpu_close(struct device_gpu **gpu); /* waits for the stream; memory must have been freed */

/* Device memory; `count` is the sum, kv_bytes or tables_bytes, that it belongs to. */
int device_gpu_alloc(struct device_gpu *gpu, uint64_t bytes, uint64_t *count, void **ret_at, struct err *err);
void device_gpu_free(struct device_gpu *gpu, uint64_t bytes, uint64_t *count, void *at);

/* Host memory that is mapped here, whole pages of it, for kernels: at the same address, or -ENOTSUP. Pages
 * are populated and pinned. */
int device_gpu_register(struct device_gpu *gpu, void *at, uint64_t bytes, struct err *err);
void device_gpu_unregister(struct device_gpu *gpu, void *at, uint64_t bytes);

/* ---- the stream ---- */

/* Result of something that was just queued by way of `api`; _writes: that writes what the decoder reads. */
void device_gpu_queued(struct device_gpu *gpu, int r);
void device_gpu_writes(struct device_gpu *gpu, int r);

void device_gpu_fill(struct device_gpu *gpu, void *at, uint8_t byte, uint64_t bytes);

/* A ticket behind all that is queued; whether the stream has passed one; whether it has passed everything. */
uint32_t device_gpu_ticket(struct device_gpu *gpu);
bool device_gpu_passed(const struct device_gpu *gpu, uint32_t ticket);
bool device_gpu_idle(const struct device_gpu *gpu);
/* Whether it has passed all that writes what the decoder reads, and all that was ahead of device_gpu_given:
 * what is left goes to the host. */
bool device_gpu_settled(const struct device_gpu *gpu);
/* Memory was given back: its next owner must not write there while what is queued now still reads it. */
void device_gpu_given(struct device_gpu *gpu);

/* Asks, now and then, whether the GPU is sound: for who has work queued and waits for other things. */
void device_gpu_look(struct device_gpu *gpu);

/* 0 once the stream has passed it; else the error, which is final. */
int device_gpu_wait(struct device_gpu *gpu, uint32_t ticket);
int device_gpu_wait_all(struct device_gpu *gpu);

/* Raises a flag of a registered segment once all that is queued is done. It does not look whether the flag
 * was aborted: whoever aborts flags waits for the stream first. */
void device_gpu_raise(struct device_gpu *gpu, struct control_flag *flag, uint32_t step);

/* Pinned memory, 256-byte aligned, for what is queued before the next take. Waits while all of it is in use.
 * NULL: failed. ret_device: the same for kernels. */
void *device_gpu_take(struct device_gpu *gpu, uint64_t bytes, void **ret_device);

/* Makes each piece of pinned memory so long at least, which waits for the stream and takes as long as some
 * steps do: for lists that are sure to come. Else the first such list does. 0, or the error, which is
 * final. */
int device_gpu_widen(struct device_gpu *gpu, uint64_t bytes);

static inline bool device_gpu_failed(const struct device_gpu *gpu)
{
    return gpu->error.code != 0;
}

#endif
