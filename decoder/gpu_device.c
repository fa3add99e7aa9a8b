/* The decoder's GPU; see gpu_device.h. Owner: the device thread. */
#include "decoder/gpu_device.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

static const char *const use_names[GPU_DEVICE_USES] = {"weights", "activations", "tables", "workspace",
                                                       "features"};

int gpu_device_open(const char *device, struct gpu_device **ret_device, struct err *err)
{
    struct gpu_device *d = mem_alloc(1, sizeof *d);
    int r = gpu_load(&d->api, err);
    if (r == 0)
        r = d->api->open(device, &d->gpu, err);
    if (r == 0)
        r = d->api->stream_create(d->gpu, GPU_PRIORITY_NORMAL, &d->stream, err);
    if (r < 0) {
        gpu_device_free(&d);
        return r;
    }
    *ret_device = d;
    return 0;
}

void gpu_device_free(struct gpu_device **device)
{
    struct gpu_device *d = *device;
    if (!d)
        return;
    if (d->stream)
        d->api->stream_free(d->gpu, &d->stream);
    if (d->gpu)
        d->api->close(&d->gpu);
    mem_free(device);
}

int gpu_device_alloc(struct gpu_device *d, enum gpu_device_use use, uint64_t bytes, void **ret_at,
                     struct err *err)
{
    int r = d->api->alloc(d->gpu, bytes, ret_at, err);
    if (r < 0)
        return err_prefix(err, r, "%s", use_names[use]);
    d->bytes[use] += bytes;
    return 0;
}

void gpu_device_release(struct gpu_device *d, enum gpu_device_use use, uint64_t bytes, void *at)
{
    if (!at)
        return;
    CHECK(d->bytes[use] >= bytes);
    d->bytes[use] -= bytes;
    d->api->free(d->gpu, at);
}

int gpu_device_error(struct gpu_device *d, int r, const char *what, struct err *err)
{
    if (d->api->check(d->gpu, err) < 0)
        return -EIO;
    return err_set(err, r, "GPU: %s: %s", what, strerror(-r));
}

void gpu_device_figures(const struct gpu_device *d, struct gpu_device_figures *ret)
{
    *ret = (struct gpu_device_figures){.info = *d->api->info(d->gpu),
                                       .library_bytes = d->api->library_bytes(d->gpu)};
    memcpy(ret->bytes, d->bytes, sizeof ret->bytes);
    ret->total_bytes = ret->info.context_bytes + ret->library_bytes;
    for (unsigned i = 0; i < GPU_DEVICE_USES; i++)
        ret->total_bytes += ret->bytes[i];
}
