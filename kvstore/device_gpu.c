/* The store's GPU; see device_gpu.h. Owner: the planner thread. It must never wait for a flag that another
 * process raises: then a dead decoder could hold the store's stream. */
#include "kvstore/device_gpu.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/trace.h"

#define PATIENCE_NS  (20 * CLOCK_S) /* whatever is queued takes far less: lists are bounded by the buffers */
#define SPIN_NS      (CLOCK_MS / 10)
#define LOOK_NS      (10 * CLOCK_MS) /* how often a wait asks whether the GPU is sound */
#define BUFFER_BYTES (UINT64_C(2) << 20)
#define ALIGN        UINT64_C(256)

/* ---- life ---- */

static void buffers_free(struct device_gpu *g)
{
    for (uint32_t i = 0; i < DEVICE_GPU_BUFFERS; i++) {
        if (g->buffers[i].host)
            g->api->free_host(g->gpu, g->buffers[i].host);
        g->buffers[i] = (struct device_gpu_buffer){0};
    }
    g->buffer_bytes = 0;
}

static int buffers_make(struct device_gpu *g, uint64_t bytes, struct err *err)
{
    for (uint32_t i = 0; i < DEVICE_GPU_BUFFERS; i++) {
        void *host = NULL, *device = NULL;
        int r = g->api->alloc_host(g->gpu, bytes, &host, &device, err);
        if (r < 0) {
            buffers_free(g);
            return r;
        }
        g->buffers[i] = (struct device_gpu_buffer){host, device, g->ticket};
    }
    g->buffer_bytes = bytes;
    g->buffer = 0;
    g->used = 0;
    return 0;
}

static int make_reached(struct device_gpu *g, struct err *err)
{
    void *host = NULL, *device = NULL;
    int r = g->api->alloc_host(g->gpu, ALIGN, &host, &device, err);
    if (r < 0)
        return r;
    g->reached = host;
    g->reached_at = device;
    atomic_store(g->reached, 0);
    return 0;
}

int device_gpu_open(struct device_gpu **ret, const char *name, struct err *err)
{
    const struct gpu_api *api;
    int r = gpu_load(&api, err);
    if (r < 0)
        return r;
    struct device_gpu *g = mem_alloc(1, sizeof *g);
    g->api = api;
    r = api->open(name, &g->gpu, err);
    if (r == 0) {
        g->info = *api->info(g->gpu);
        r = api->stream_create(g->gpu, GPU_PRIORITY_HIGH, &g->stream, err);
    }
    if (r == 0)
        r = make_reached(g, err);
    if (r == 0)
        r = buffers_make(g, BUFFER_BYTES, err);
    if (r < 0) {
        device_gpu_close(&g);
        return r;
    }
    *ret = g;
    return 0;
}

void device_gpu_close(struct device_gpu **gpu)
{
    struct device_gpu *g = *gpu;
    if (!g)
        return;
    *gpu = NULL;
    if (g->reached)
        device_gpu_wait_all(g);
    buffers_free(g);
    if (g->reached)
        g->api->free_host(g->gpu, (void *)g->reached);
    if (g->stream)
        g->api->stream_free(g->gpu, &g->stream);
    if (g->gpu)
        g->api->close(&g->gpu);
    mem_free(&g);
}

/* ---- memory ---- */

int device_gpu_alloc(struct device_gpu *g, uint64_t bytes, uint64_t *count, void **ret_at, struct err *err)
{
    int r = g->api->alloc(g->gpu, bytes, ret_at, err);
    if (r == 0)
        *count += bytes;
    return r;
}

void device_gpu_free(struct device_gpu *g, uint64_t bytes, uint64_t *count, void *at)
{
    if (!at)
        return;
    g->api->free(g->gpu, at);
    *count -= bytes;
}

int device_gpu_register(struct device_gpu *g, void *at, uint64_t bytes, struct err *err)
{
    void *device = NULL;
    int r = g->api->host_register(g->gpu, at, bytes, &device, err);
    if (r < 0)
        return r;
    if (device != at) { /* rows are named by one base and an offset, whatever registration they lie in */
        g->api->host_unregister(g->gpu, at);
        return err_set(err, -ENOTSUP, "GPU %s: found host memory at another address, expected the same",
                       g->info.uuid);
    }
    g->registered_bytes += bytes;
    return 0;
}

void device_gpu_unregister(struct device_gpu *g, void *at, uint64_t bytes)
{
    g->api->host_unregister(g->gpu, at);
    g->registered_bytes -= bytes;
}

/* ---- the stream ---- */

static void fail(struct device_gpu *g, int code)
{
    if (g->error.code)
        return;
    if (g->api->check(g->gpu, &g->error) == 0)
        err_set(&g->error, code,
                code == -ETIMEDOUT ? "its work did not end in time: %s" : "work was refused: %s",
                strerror(-code));
    err_prefix(&g->error, code, "GPU %s", g->info.uuid);
}

void device_gpu_queued(struct device_gpu *g, int r)
{
    g->ahead = true;
    if (r < 0)
        fail(g, r);
}

void device_gpu_writes(struct device_gpu *g, int r)
{
    device_gpu_queued(g, r);
    g->written = g->ticket + 1;
}

void device_gpu_fill(struct device_gpu *g, void *at, uint8_t byte, uint64_t bytes)
{
    if (!g->error.code)
        device_gpu_writes(g, g->api->fill(at, byte, bytes, g->stream));
}

void device_gpu_raise(struct device_gpu *g, struct control_flag *flag, uint32_t step)
{
    if (!g->error.code)
        device_gpu_writes(g, g->api->flag_write((uint32_t *)&flag->value, step, g->stream));
}

uint32_t device_gpu_ticket(struct device_gpu *g)
{
    if (g->ahead && !g->error.code) {
        device_gpu_queued(g, g->api->flag_write(g->reached_at, ++g->ticket, g->stream));
        g->ahead = false;
    }
    return g->ticket;
}

bool device_gpu_passed(const struct device_gpu *g, uint32_t ticket)
{
    return (int32_t)(atomic_load_explicit(g->reached, memory_order_acquire) - ticket) >= 0;
}

bool device_gpu_idle(const struct device_gpu *g)
{
    return !g->ahead && device_gpu_passed(g, g->ticket);
}

bool device_gpu_settled(const struct device_gpu *g)
{
    return device_gpu_passed(g, g->written);
}

void device_gpu_given(struct device_gpu *g)
{
    g->written = device_gpu_ticket(g);
}

void device_gpu_look(struct device_gpu *g)
{
    int64_t now = clock_now_ns();
    if (g->error.code || now < g->look_ns)
        return;
    g->look_ns = now + LOOK_NS;
    struct err found = {0};
    if (g->api->check(g->gpu, &found) < 0)
        fail(g, -EIO);
}

int device_gpu_wait(struct device_gpu *g, uint32_t ticket)
{
    int64_t begin = clock_now_ns();
    while (!g->error.code && !device_gpu_passed(g, ticket)) {
        int64_t now = clock_now_ns();
        if (now - begin >= SPIN_NS)
            device_gpu_look(g);
        if (now - begin >= PATIENCE_NS)
            fail(g, -ETIMEDOUT);
        if (now - begin >= SPIN_NS)
            nanosleep(&(struct timespec){.tv_nsec = CLOCK_MS / 50}, NULL);
    }
    trace_end(TRACE_STREAM_WAIT, begin);
    return g->error.code;
}

int device_gpu_wait_all(struct device_gpu *g)
{
    return device_gpu_wait(g, device_gpu_ticket(g));
}

/* ---- pinned memory ---- */

int device_gpu_widen(struct device_gpu *g, uint64_t bytes)
{
    uint64_t wide = g->buffer_bytes;
    if (g->error.code || bytes <= wide)
        return g->error.code;
    int64_t begin = trace_begin();
    while (wide < bytes)
        wide *= 2;
    if (device_gpu_wait_all(g) < 0)
        return g->error.code;
    buffers_free(g);
    int r = buffers_make(g, wide, &g->error);
    trace_end(TRACE_WIDEN, begin);
    if (r < 0)
        err_prefix(&g->error, r, "lists of %llu bytes", (unsigned long long)wide);
    return r;
}

void *device_gpu_take(struct device_gpu *g, uint64_t bytes, void **ret_device)
{
    bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    if (device_gpu_widen(g, bytes) < 0)
        return NULL;
    if (bytes > g->buffer_bytes - g->used) {
        g->buffers[g->buffer].ticket = device_gpu_ticket(g);
        g->buffer = (g->buffer + 1) % DEVICE_GPU_BUFFERS;
        g->used = 0;
        if (device_gpu_wait(g, g->buffers[g->buffer].ticket) < 0)
            return NULL;
    }
    uint8_t *host = g->buffers[g->buffer].host + g->used;
    *ret_device = g->buffers[g->buffer].device + g->used;
    g->used += bytes;
    return host;
}
