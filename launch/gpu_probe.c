/* See gpu_probe.h. No state. */
#include "launch/gpu_probe.h"

#include <string.h>

#include "launch/gpu_ask.h"

_Static_assert(sizeof(struct gpu_probe) <= GPU_ASK_BYTES, "an answer's size");

static int ask(const char *device, void *answer, struct err *err)
{
    struct gpu_probe *ret = answer;
    const struct gpu_api *api = NULL;
    struct gpu *gpu = NULL;
    int r = gpu_load(&api, err);
    if (r == 0)
        r = api->open(device, &gpu, err);
    if (r < 0)
        return r;
    ret->info = *api->info(gpu);
    r = api->memory_free(gpu, &ret->free_bytes);
    if (r < 0)
        err_set(err, r, "device %s: its free memory is not known", device);
    ret->free_bytes += ret->info.context_bytes; /* ours, gone when this process is */
    api->close(&gpu);
    return r;
}

int gpu_probe(const char *device, struct gpu_probe *ret, struct err *err)
{
    return gpu_ask(device, "asking for its memory", ask, ret, sizeof *ret, err);
}

int gpu_probe_same(const struct gpu_probe *card, const char *name, const char *device, int *ret,
                   struct err *err)
{
    struct gpu_probe other;
    *ret = !strcmp(device, name);
    if (*ret || !gpu_named(device))
        return 0;
    int r = gpu_probe(device, &other, err);
    *ret = r == 0 && !strcmp(other.info.uuid, card->info.uuid);
    return r;
}
