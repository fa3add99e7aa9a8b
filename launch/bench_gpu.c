/* Copy rates of a GPU. No state between calls. */
#include "launch/bench_gpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compute/gpu.h"
#include "launch/gpu_ask.h"

_Static_assert(sizeof(struct bench_gpu) <= GPU_ASK_BYTES, "an answer's size");

enum { ROUNDS = 9, COPIES = 4 };
#define DEVICE_BYTES (UINT64_C(512) << 20)
#define HOST_BYTES   (UINT64_C(256) << 20)
#define LEAST_BYTES  (UINT64_C(1) << 20)

struct rig {
    const struct gpu_api *api;
    struct gpu *gpu;
    struct CUstream_st *stream;
    struct gpu_event *begin, *end;
    void *to, *from, *host;
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median over the rounds of the bytes copied in a second. */
static int rate_of(struct rig *rig, const void *from, uint64_t bytes, double *ret)
{
    double rates[ROUNDS];
    for (int round = -1; round < ROUNDS; round++) { /* the first warms up */
        float ms = 0;
        int r = rig->api->event_record(rig->begin, rig->stream);
        for (int i = 0; i < COPIES && r == 0; i++)
            r = rig->api->copy(rig->to, from, bytes, rig->stream);
        if (r == 0)
            r = rig->api->event_record(rig->end, rig->stream);
        if (r == 0)
            r = rig->api->stream_sync(rig->stream);
        if (r == 0)
            r = rig->api->event_elapsed(rig->begin, rig->end, &ms);
        if (r < 0)
            return r;
        if (round >= 0)
            rates[round] = ms > 0 ? COPIES * (double)bytes / ((double)ms * 1e-3) : 0;
    }
    qsort(rates, ROUNDS, sizeof *rates, by_value);
    *ret = rates[ROUNDS / 2];
    return 0;
}

static int prepare(struct rig *rig, uint64_t *device_bytes, uint64_t *host_bytes, struct err *err)
{
    const struct gpu_api *api = rig->api;
    uint64_t available = 0;
    void *mapped;
    int r = api->stream_create(rig->gpu, GPU_PRIORITY_NORMAL, &rig->stream, err);
    if (r == 0)
        r = api->memory_free(rig->gpu, &available);
    while (*device_bytes > available / 4 && *device_bytes > LEAST_BYTES)
        *device_bytes /= 2;
    while (*host_bytes > *device_bytes)
        *host_bytes /= 2;
    if (r == 0)
        r = api->alloc(rig->gpu, *device_bytes, &rig->to, err);
    if (r == 0)
        r = api->alloc(rig->gpu, *device_bytes, &rig->from, err);
    if (r == 0)
        r = api->alloc_host(rig->gpu, *host_bytes, &rig->host, &mapped, err);
    if (r == 0)
        r = api->event_create(rig->gpu, &rig->begin, err);
    if (r == 0)
        r = api->event_create(rig->gpu, &rig->end, err);
    if (r == 0)
        memset(rig->host, 1, *host_bytes);
    return r;
}

static void release(struct rig *rig)
{
    const struct gpu_api *api = rig->api;
    api->event_free(&rig->begin);
    api->event_free(&rig->end);
    api->stream_free(rig->gpu, &rig->stream);
    if (rig->to)
        api->free(rig->gpu, rig->to);
    if (rig->from)
        api->free(rig->gpu, rig->from);
    if (rig->host)
        api->free_host(rig->gpu, rig->host);
    api->close(&rig->gpu);
}

static int measure(const char *device, void *answer, struct err *err)
{
    struct bench_gpu *ret = answer;
    struct rig rig = {0};
    uint64_t device_bytes = DEVICE_BYTES, host_bytes = HOST_BYTES;
    int r = gpu_load(&rig.api, err);
    if (r == 0)
        r = rig.api->open(device, &rig.gpu, err);
    if (r < 0)
        return r;
    *ret = (struct bench_gpu){.mps = rig.api->info(rig.gpu)->mps};
    snprintf(ret->name, sizeof ret->name, "%s", rig.api->info(rig.gpu)->name);
    r = prepare(&rig, &device_bytes, &host_bytes, err);
    if (r == 0) {
        r = rate_of(&rig, rig.from, device_bytes, &ret->copy_rate);
        ret->copy_rate *= 2; /* a copy reads and writes */
        if (r == 0)
            r = rate_of(&rig, rig.host, host_bytes, &ret->link_rate);
        if (r < 0)
            err_set(err, r, "device %s: copies failed: %s", device, strerror(-r));
    }
    release(&rig);
    return r;
}

int bench_gpu_measure(const char *device, struct bench_gpu *ret, struct err *err)
{
    return gpu_ask(device, "measuring its copies", measure, ret, sizeof *ret, err);
}

uint64_t bench_gpu_weights(const struct model *model)
{
    const struct model_config *c = model_config(model);
    uint64_t q = (uint64_t)c->q_heads * c->head_dim, kv = (uint64_t)c->kv_heads * c->head_dim;
    uint64_t layer = c->hidden * (2 * q + 2 * kv) + 3 * (uint64_t)c->hidden * c->ffn;
    return 2 * (c->layers * layer + (uint64_t)c->vocab * c->hidden);
}
