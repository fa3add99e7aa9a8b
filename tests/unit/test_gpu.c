/* compute/gpu.h through the double (tests/fakegpu): devices, memory between processes, order of streams,
 * flags, graphs; and that the double's kernels keep what compute/cuda/kernels.h promises. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "compute/gpu.h"
#include "tests/lib/fakegpu.h"

static const struct gpu_api *api;

static int set_up(void **state)
{
    struct err err = {0};
    (void)state;
    fakegpu_use(NULL);
    if (gpu_load(&api, &err) < 0) {
        print_error("%s\n", err.text);
        return -1;
    }
    return 0;
}

struct rig {
    struct gpu *gpu;
    struct CUstream_st *stream;
    void *device[64], *host[16];
    int devices, hosts;
};

static struct rig rig_open(void)
{
    struct rig rig = {0};
    assert_int_equal(api->open("cuda:0", &rig.gpu, NULL), 0);
    assert_int_equal(api->stream_create(rig.gpu, GPU_PRIORITY_NORMAL, &rig.stream, NULL), 0);
    return rig;
}

static void rig_close(struct rig *rig)
{
    api->stream_free(rig->gpu, &rig->stream);
    for (int i = 0; i < rig->devices; i++)
        api->free(rig->gpu, rig->device[i]);
    for (int i = 0; i < rig->hosts; i++)
        api->free_host(rig->gpu, rig->host[i]);
    api->close(&rig->gpu);
}

static void *device_memory(struct rig *rig, size_t bytes)
{
    assert_int_equal(api->alloc(rig->gpu, bytes, &rig->device[rig->devices], NULL), 0);
    return rig->device[rig->devices++];
}

static void *pinned_memory(struct rig *rig, size_t bytes)
{
    void *device;
    assert_int_equal(api->alloc_host(rig->gpu, bytes, &rig->host[rig->hosts], &device, NULL), 0);
    assert_ptr_equal(device, rig->host[rig->hosts]);
    return rig->host[rig->hosts++];
}

static void *upload(struct rig *rig, const void *data, size_t bytes)
{
    void *at = device_memory(rig, bytes);
    assert_int_equal(api->copy(at, data, bytes, rig->stream), 0);
    assert_int_equal(api->stream_sync(rig->stream), 0);
    return at;
}

static void download(struct rig *rig, void *to, const void *from, size_t bytes)
{
    assert_int_equal(api->copy(to, from, bytes, rig->stream), 0);
    assert_int_equal(api->stream_sync(rig->stream), 0);
}

/* x [4] += y, by the operator that adds before it normalises; the norm goes behind x. */
static int add(float *x, const float *y, struct CUstream_st *stream)
{
    const struct cuda_rmsnorm norm = {.out = x + 4,
                                      .out_type = DTYPE_F32,
                                      .x = x,
                                      .add = y,
                                      .weight = x,
                                      .weight_type = DTYPE_F32,
                                      .n = 1,
                                      .dim = 4,
                                      .eps = 1};
    return api->rmsnorm(&norm, stream);
}

static float normal(uint64_t *random)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        *random = *random * UINT64_C(6364136223846793005) + 1442695040888963407u;
        sum += (float)(*random >> 40) / (float)(1 << 24) - 0.5f;
    }
    return sum * 1.7f;
}

static float *normals(size_t count, uint64_t random)
{
    float *x = mem_alloc(count, sizeof *x);
    for (size_t i = 0; i < count; i++)
        x[i] = normal(&random);
    return x;
}

static uint16_t *bf16s(const float *x, size_t count)
{
    uint16_t *narrow = mem_alloc(count, sizeof *narrow);
    for (size_t i = 0; i < count; i++)
        narrow[i] = dtype_f32_to_bf16(x[i]);
    return narrow;
}

/* ---- devices and memory -------------------------------------------------------------------------------- */

static void test_devices(void **state)
{
    (void)state;
    fakegpu_need_double();
    struct gpu *gpu = NULL, *by_uuid = NULL;
    struct err err = {0};
    assert_int_equal(api->open("cuda:1", &gpu, NULL), 0);
    assert_int_equal(api->open(api->info(gpu)->uuid, &by_uuid, NULL), 0);
    assert_int_equal(api->info(by_uuid)->ordinal, 1);
    api->close(&by_uuid);
    assert_null(by_uuid);
    /* The same card under another number. */
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    assert_int_equal(api->open("cuda", &by_uuid, NULL), 0);
    assert_string_equal(api->info(by_uuid)->uuid, api->info(gpu)->uuid);
    assert_int_equal(api->info(by_uuid)->ordinal, 0);
    api->close(&by_uuid);
    assert_int_equal(api->open("cuda:1", &by_uuid, &err), -ENODEV);
    assert_non_null(strstr(err.text, "CUDA_VISIBLE_DEVICES 1"));
    unsetenv("CUDA_VISIBLE_DEVICES");
    assert_int_equal(api->open("cuda:2", &by_uuid, NULL), -ENODEV);
    assert_int_equal(api->open("cuda:", &by_uuid, NULL), -ENODEV);
    api->close(&gpu);
}

static void test_memory_ends(void **state)
{
    (void)state;
    fakegpu_need_double();
    struct gpu *gpu = NULL;
    struct err err = {0};
    void *at = NULL, *more = NULL;
    uint64_t before, after;
    setenv("SPECONTEXT_FAKEGPU_BYTES", "67108864", 1);
    assert_int_equal(api->open("cuda:0", &gpu, NULL), 0);
    assert_int_equal(api->memory_free(gpu, &before), 0);
    assert_int_equal(before, 67108864 - api->info(gpu)->context_bytes);
    assert_int_equal(api->alloc(gpu, before + 1, &at, &err), -ENOMEM);
    assert_int_equal(api->alloc(gpu, before - 4096, &at, NULL), 0);
    assert_int_equal((uintptr_t)at % 256, 0);
    assert_int_equal(api->alloc(gpu, 8192, &more, &err), -ENOMEM);
    assert_non_null(strstr(err.text, "4096 of 67108864 are free"));
    api->free(gpu, at);
    assert_int_equal(api->memory_free(gpu, &after), 0);
    assert_int_equal(after, before);
    api->close(&gpu);
    unsetenv("SPECONTEXT_FAKEGPU_BYTES");
}

/* ---- order --------------------------------------------------------------------------------------------- */

static void note_call(void *arg)
{
    __atomic_fetch_add((int *)arg, 1, __ATOMIC_RELEASE);
}

/* Nothing behind a wait is done before the flag is raised by a plain store; everything is, after. */
static void test_order(void **state)
{
    (void)state;
    struct rig rig = rig_open();
    uint32_t *flag = pinned_memory(&rig, 64), *data = device_memory(&rig, 4096), out[2] = {0, 0};
    struct gpu_event *begin, *end;
    int calls = 0;
    float ms = -1;
    assert_int_equal(api->event_create(rig.gpu, &begin, NULL), 0);
    assert_int_equal(api->event_create(rig.gpu, &end, NULL), 0);
    *flag = 6;
    assert_int_equal(api->event_record(begin, rig.stream), 0);
    assert_int_equal(api->flag_wait(flag, 7, rig.stream), 0);
    assert_int_equal(api->fill(data, 0x11, 8, rig.stream), 0);
    assert_int_equal(api->copy(out, data, 8, rig.stream), 0);
    assert_int_equal(api->host_call(rig.stream, note_call, &calls), 0);
    assert_int_equal(api->flag_write(flag + 1, 3, rig.stream), 0);
    assert_int_equal(api->event_record(end, rig.stream), 0);
    assert_int_equal(api->stream_done(rig.stream), 0);
    assert_int_equal(api->event_elapsed(begin, end, &ms), -EBUSY);
    assert_int_equal(out[0], 0);
    __atomic_store_n(flag, 5 + 0x40000000u, __ATOMIC_RELEASE); /* far ahead: as an abort does */
    assert_int_equal(api->stream_sync(rig.stream), 0);
    assert_int_equal(api->stream_done(rig.stream), 1);
    assert_int_equal(out[1], 0x11111111);
    assert_int_equal(__atomic_load_n(&calls, __ATOMIC_ACQUIRE), 1);
    assert_int_equal(flag[1], 3);
    assert_int_equal(api->event_elapsed(begin, end, &ms), 0);
    assert_true(ms >= 0);
    api->event_free(&begin);
    api->event_free(&end);
    rig_close(&rig);
}

static void test_graph(void **state)
{
    (void)state;
    struct rig rig = rig_open();
    uint32_t *flags = pinned_memory(&rig, 64);
    float ones[8] = {1, 1, 1, 1}, out[4], *x = upload(&rig, ones, 32), *y = upload(&rig, ones, 32);
    struct gpu_graph *graph = NULL;
    struct err err = {0};
    assert_int_equal(api->capture_begin(rig.stream, NULL), 0);
    assert_int_equal(api->capture_begin(rig.stream, &err), -EBUSY);
    assert_int_equal(api->flag_wait(flags, 0, rig.stream), 0);
    assert_int_equal(add(x, y, rig.stream), 0);
    assert_int_equal(api->flag_write(flags + 1, 0, rig.stream), 0);
    assert_int_equal(api->host_call(rig.stream, note_call, flags), -EINVAL);
    assert_int_equal(api->stream_sync(rig.stream), -EINVAL);
    assert_int_equal(api->capture_end(rig.gpu, rig.stream, &graph, NULL), 0);
    assert_int_equal(api->graph_flags(graph), 2);
    download(&rig, out, x, sizeof out);
    assert_true(out[0] == 1); /* kept, not done */
    for (uint32_t step = 1; step <= 3; step++) {
        uint32_t values[2] = {step, 100 + step};
        assert_int_equal(api->graph_launch(graph, values, rig.stream), 0);
    }
    assert_int_equal(api->stream_done(rig.stream), 0);
    __atomic_store_n(flags, 1, __ATOMIC_RELEASE);
    while (__atomic_load_n(flags + 1, __ATOMIC_ACQUIRE) != 101)
        ;
    assert_true(x[0] == 2);
    __atomic_store_n(flags, 3, __ATOMIC_RELEASE);
    download(&rig, out, x, sizeof out);
    assert_true(out[3] == 4);
    assert_int_equal(flags[1], 103);
    assert_int_equal(api->graph_set(graph, (uint32_t[]){9, 109}), 0); /* ahead; others are given after all */
    assert_int_equal(api->graph_launch(graph, (uint32_t[]){3, 105}, rig.stream), 0);
    assert_int_equal(api->stream_sync(rig.stream), 0);
    assert_int_equal(flags[1], 105);
    api->graph_free(&graph);
    rig_close(&rig);
}

/* A stream waits for another that waits itself; in a capture both streams' work becomes one graph. */
static void test_follow(void **state)
{
    (void)state;
    struct rig rig = rig_open();
    struct CUstream_st *other = NULL;
    struct gpu_graph *graph = NULL;
    uint32_t *flags = pinned_memory(&rig, 64);
    float ones[8] = {1, 1, 1, 1}, out[4], *x = upload(&rig, ones, 32), *y = upload(&rig, ones, 32);
    assert_int_equal(api->stream_create(rig.gpu, GPU_PRIORITY_HIGH, &other, NULL), 0);
    assert_int_equal(api->flag_wait(flags, 1, rig.stream), 0);
    assert_int_equal(add(x, y, rig.stream), 0);
    assert_int_equal(api->stream_follow(rig.gpu, other, rig.stream), 0);
    assert_int_equal(add(y, x, other), 0); /* 1 + 2 */
    assert_int_equal(api->stream_follow(rig.gpu, rig.stream, other), 0);
    assert_int_equal(add(x, y, rig.stream), 0); /* 2 + 3 */
    assert_int_equal(api->stream_done(other), 0);
    __atomic_store_n(flags, 1, __ATOMIC_RELEASE);
    download(&rig, out, x, sizeof out);
    assert_true(out[0] == 5);

    assert_int_equal(api->capture_begin(rig.stream, NULL), 0);
    assert_int_equal(add(x, y, rig.stream), 0);
    assert_int_equal(api->stream_follow(rig.gpu, other, rig.stream), 0);
    assert_int_equal(add(y, x, other), 0);
    assert_int_equal(api->flag_write(flags, 0, other), 0);
    assert_int_equal(api->stream_follow(rig.gpu, rig.stream, other), 0);
    assert_int_equal(add(x, y, rig.stream), 0);
    assert_int_equal(api->capture_end(rig.gpu, rig.stream, &graph, NULL), 0);
    assert_int_equal(api->graph_flags(graph), 1);
    download(&rig, out, x, sizeof out);
    assert_true(out[0] == 5); /* kept, not done */
    assert_int_equal(api->graph_launch(graph, &(uint32_t){77}, rig.stream), 0);
    download(&rig, out, x, sizeof out);
    assert_true(out[0] == 19); /* 5 + 3 = 8, 3 + 8 = 11, 8 + 11 */
    assert_int_equal(__atomic_load_n(flags, __ATOMIC_ACQUIRE), 77);
    assert_int_equal(add(x, y, other), 0); /* no more part of the capture */
    assert_int_equal(api->stream_sync(other), 0);
    api->graph_free(&graph);

    /* Followed twice; what is behind the last time is missed. */
    for (int missed = 0; missed < 2; missed++) {
        struct err err = {0};
        assert_int_equal(api->capture_begin(rig.stream, NULL), 0);
        assert_int_equal(add(x, y, rig.stream), 0);
        assert_int_equal(api->stream_follow(rig.gpu, other, rig.stream), 0);
        for (int i = 0; i < 2; i++) {
            assert_int_equal(add(y, x, other), 0);
            assert_int_equal(api->stream_follow(rig.gpu, rig.stream, other), 0);
            assert_int_equal(add(x, y, rig.stream), 0);
        }
        if (missed)
            assert_int_equal(add(y, x, other), 0);
        assert_int_equal(api->capture_end(rig.gpu, rig.stream, &graph, &err) < 0, missed);
        api->graph_free(&graph);
    }
    api->stream_free(rig.gpu, &other);
    rig_close(&rig);
}

/* Memory that a kernel could not reach, and a launch that fails, are errors that stay. */
static void test_errors_stay(void **state)
{
    (void)state;
    struct err err = {0};
    struct rig rig = rig_open();
    float *x = device_memory(&rig, 32), host[4] = {0};
    assert_int_equal(api->check(rig.gpu, NULL), 0);
    assert_int_equal(add(x, host, rig.stream), -EIO);
    assert_int_equal(api->check(rig.gpu, &err), -EIO);
    assert_non_null(strstr(err.text, "illegal memory access"));
    assert_int_equal(add(x, x, rig.stream), -EIO);
    assert_int_equal(api->stream_sync(rig.stream), -EIO);
    rig_close(&rig);
    setenv("SPECONTEXT_FAKEGPU_FAIL", "1", 1);
    rig = rig_open();
    assert_int_equal(api->fill(device_memory(&rig, 16), 0, 16, rig.stream), -EIO);
    assert_int_equal(api->check(rig.gpu, &err), -EIO);
    unsetenv("SPECONTEXT_FAKEGPU_FAIL");
    rig_close(&rig);
}

/* ---- two processes ------------------------------------------------------------------------------------- */

struct meeting {
    uint32_t flag[16];
    uint8_t handle[GPU_IPC_BYTES];
    uint64_t used_by_both;
    uint8_t pad[4096 - 64 - GPU_IPC_BYTES - 8];
};

/* The other process: opens the memory, waits on its stream, doubles what is there, answers, and is killed
 * with the mapping open. */
static void other_process(struct meeting *m)
{
    struct gpu *gpu;
    struct CUstream_st *stream;
    void *device, *at;
    int bad = api->open("cuda:0", &gpu, NULL);
    bad |= api->stream_create(gpu, GPU_PRIORITY_NORMAL, &stream, NULL);
    bad |= api->host_register(gpu, m, sizeof *m, &device, NULL);
    bad |= api->ipc_open(gpu, m->handle, &at, NULL);
    bad |= api->flag_wait(&m->flag[0], 1, stream);
    bad |= add(at, at, stream);
    bad |= api->flag_write(&m->flag[1], 1, stream);
    bad |= api->stream_sync(stream);
    uint64_t free_bytes = 0;
    bad |= api->memory_free(gpu, &free_bytes);
    m->used_by_both = api->info(gpu)->bytes_total - free_bytes;
    bad |= api->flag_write(&m->flag[2], bad ? 2 : 1, stream);
    bad |= api->stream_sync(stream);
    for (;;)
        pause();
}

static void test_two_processes(void **state)
{
    (void)state;
    char card[32];
    snprintf(card, sizeof card, "test%d", (int)getpid());
    fakegpu_use(card);
    struct meeting *m = mmap(NULL, sizeof *m, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(m, MAP_FAILED);
    struct rig rig = rig_open();
    void *device;
    float values[8] = {1, 2, 3, 4}, out[4], *at = upload(&rig, values, sizeof values);
    uint64_t free_before, free_after;
    assert_int_equal(api->host_register(rig.gpu, m, sizeof *m, &device, NULL), 0);
    assert_int_equal(api->ipc_export(rig.gpu, at, m->handle, NULL), 0);
    assert_int_equal(api->memory_free(rig.gpu, &free_before), 0);
    pid_t pid = fork();
    if (pid == 0)
        other_process(m);
    assert_int_equal(api->flag_wait(&m->flag[1], 1, rig.stream), 0);
    assert_int_equal(api->copy(out, at, sizeof out, rig.stream), 0);
    assert_int_equal(api->flag_wait(&m->flag[2], 1, rig.stream), 0);
    assert_int_equal(api->stream_done(rig.stream), 0);
    __atomic_store_n(&m->flag[0], 1, __ATOMIC_RELEASE);
    assert_int_equal(api->stream_sync(rig.stream), 0);
    assert_int_equal(m->flag[2], 1);
    assert_true(out[0] == 2 && out[3] == 8);
    /* Its context stands on the same card; the fork shares this process's descriptors too. */
    assert_true(m->used_by_both > api->info(rig.gpu)->bytes_total - free_before);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(api->memory_free(rig.gpu, &free_after), 0);
    assert_int_equal(free_after, free_before);
    api->host_unregister(rig.gpu, m);
    munmap(m, sizeof *m);
    rig_close(&rig);
    /* A handle outlives nothing that it names. */
    fakegpu_use(NULL);
}

static void test_stale_handle(void **state)
{
    (void)state;
    struct rig rig = rig_open();
    uint8_t handle[GPU_IPC_BYTES];
    void *at, *opened = NULL;
    assert_int_equal(api->alloc(rig.gpu, 4096, &at, NULL), 0);
    assert_int_equal(api->ipc_export(rig.gpu, at, handle, NULL), 0);
    assert_int_equal(api->ipc_open(rig.gpu, handle, &opened, NULL), 0);
    api->free(rig.gpu, at);
    memset(opened, 1, 4096); /* lives until it is closed here */
    api->ipc_close(rig.gpu, opened);
    assert_true(api->ipc_open(rig.gpu, handle, &opened, NULL) < 0);
    memset(handle, 0, sizeof handle);
    assert_int_equal(api->ipc_open(rig.gpu, handle, &opened, NULL), -EINVAL);
    rig_close(&rig);
}

/* ---- kernels ------------------------------------------------------------------------------------------- */

static void test_matmul(void **state)
{
    enum { ROWS = 24, COLS = 72, N = 5 };
    (void)state;
    struct rig rig = rig_open();
    float *w = normals(ROWS * COLS, 1), *x = normals(N * COLS, 2), out[N * ROWS], alone[ROWS];
    uint16_t *w16 = bf16s(w, ROWS * COLS), *x16 = bf16s(x, N * COLS);
    void *device_x = upload(&rig, x16, N * COLS * 2);
    struct cuda_matmul m = {device_memory(&rig, sizeof out), upload(&rig, w16, ROWS * COLS * 2), device_x,
                            NULL, NULL};
    struct cuda_matmul_shape shape = {ROWS, COLS, N, DTYPE_F32, 0, 0, 0};
    assert_int_equal(api->matmul(rig.gpu, &shape, &m, rig.stream), 0);
    download(&rig, out, m.out, sizeof out);
    for (int t = 0; t < N; t++)
        for (int r = 0; r < ROWS; r++) {
            double sum = 0;
            for (int i = 0; i < COLS; i++)
                sum += (double)dtype_bf16_to_f32(w16[r * COLS + i]) *
                       (double)dtype_bf16_to_f32(x16[t * COLS + i]);
            assert_true(fabs((double)out[t * ROWS + r] - sum) < 1e-4);
        }
    shape.n = 1;
    m.x = (uint16_t *)device_x + 3 * COLS;
    assert_int_equal(api->matmul(rig.gpu, &shape, &m, rig.stream), 0);
    download(&rig, alone, m.out, sizeof alone);
    assert_memory_equal(alone, out + 3 * ROWS, sizeof alone);
    shape.accumulate = 1;
    assert_int_equal(api->matmul(rig.gpu, &shape, &m, rig.stream), 0);
    download(&rig, alone, m.out, sizeof alone);
    assert_true(alone[7] == 2 * out[3 * ROWS + 7]);
    /* A plan cannot be made inside a capture. */
    struct gpu_graph *graph = NULL;
    shape.n = 4;
    assert_int_equal(api->capture_begin(rig.stream, NULL), 0);
    assert_int_equal(api->matmul(rig.gpu, &shape, &m, rig.stream), -EINVAL);
    assert_int_equal(api->capture_end(rig.gpu, rig.stream, &graph, NULL), 0);
    api->graph_free(&graph);
    rig_close(&rig);
    mem_free(&w);
    mem_free(&x);
    mem_free(&w16);
    mem_free(&x16);
}

/* ---- pieces of KV: in pages, on the host, in slots ---- */

enum {
    KV_HEADS = 2,
    KV_DIM = 64,
    KV_COUNT = 100, /* tokens */
    KV_PIECE = 4 * KV_DIM,
    KV_PAGE = 64,
    KV_UNITS = 80,
    KV_QUERIES = KV_HEADS * 3
};

struct pieces {
    struct rig rig;
    struct cuda_kv_view paged, slotted;
    uint64_t first_page;
    uint32_t slots[KV_COUNT * 2]; /* of tokens, a head after the other */
    struct cuda_rope rope;        /* by angles of 0 */
    struct cuda_kv_write write;
    struct cuda_moves moves;
    struct cuda_attn attn;
};

static void pieces_open(struct pieces *p)
{
    memset(p, 0, sizeof *p);
    p->rig = rig_open();
    uint64_t at[8], slabs[8], page_bytes = KV_HEADS * KV_PAGE * KV_PIECE, slab_bytes = KV_UNITS * KV_PIECE;
    for (uint64_t i = 0; i < 8; i++) {
        at[i] = (7 - i) * page_bytes;
        slabs[i] = (i ^ 3) * slab_bytes;
    }
    for (uint32_t i = 0; i < KV_COUNT; i++)
        p->slots[i] = p->slots[KV_COUNT + i] = i * 7 % KV_COUNT;
    p->first_page = at[0];
    p->paged = (struct cuda_kv_view){.base = device_memory(&p->rig, 8 * page_bytes),
                                     .device_bytes = 8 * page_bytes,
                                     .at = upload(&p->rig, at, sizeof at),
                                     .row_stride = 8,
                                     .layer_stride = 8,
                                     .at_count = 8,
                                     .page_tokens = KV_PAGE,
                                     .piece_bytes = KV_PIECE,
                                     .type = DTYPE_BF16};
    p->slotted = p->paged;
    p->slotted.base = device_memory(&p->rig, 8 * slab_bytes);
    p->slotted.device_bytes = 8 * slab_bytes;
    p->slotted.at = upload(&p->rig, slabs, sizeof slabs);
    p->slotted.slotted = 1;
    p->slotted.slots = KV_COUNT;
    p->slotted.units_per_slab = KV_UNITS;
}

static void pieces_write(struct pieces *p)
{
    float *k = normals(KV_COUNT * KV_HEADS * KV_DIM, 3), *v = normals(KV_COUNT * KV_HEADS * KV_DIM, 4);
    float table[KV_COUNT * KV_DIM]; /* of cosines and sines */
    uint32_t rows[KV_COUNT] = {0}, positions[KV_COUNT];
    for (uint32_t i = 0; i < KV_COUNT; i++)
        positions[i] = i;
    for (uint32_t i = 0; i < KV_COUNT * KV_DIM; i++)
        table[i] = i % 2 == 0;
    p->write = (struct cuda_kv_write){.kv = p->paged,
                                      .k = upload(&p->rig, k, KV_COUNT * KV_HEADS * KV_DIM * 4),
                                      .v = upload(&p->rig, v, KV_COUNT * KV_HEADS * KV_DIM * 4),
                                      .stride = KV_HEADS * KV_DIM,
                                      .rows = upload(&p->rig, rows, sizeof rows),
                                      .items = upload(&p->rig, positions, sizeof positions),
                                      .row_count = 1,
                                      .n = KV_COUNT,
                                      .kv_heads = KV_HEADS,
                                      .head_dim = KV_DIM};
    p->rope = (struct cuda_rope){.x = (void *)(uintptr_t)p->write.k,
                                 .type = DTYPE_F32,
                                 .stride = p->write.stride,
                                 .table = upload(&p->rig, table, sizeof table),
                                 .n = KV_COUNT,
                                 .heads = KV_HEADS,
                                 .head_dim = KV_DIM,
                                 .dims = KV_DIM};
    assert_int_equal(api->rope_write(&p->rope, &p->write, p->rig.stream), 0);
    mem_free(&k);
    mem_free(&v);
}

/* Pages -> host -> slots. A move of a row that there is none of is left out. */
static void pieces_move(struct pieces *p)
{
    uint8_t *host = pinned_memory(&p->rig, KV_COUNT * KV_HEADS * KV_PIECE);
    struct cuda_move out[KV_COUNT * KV_HEADS], in[KV_COUNT * KV_HEADS];
    for (uint32_t i = 0; i < KV_COUNT * KV_HEADS; i++) {
        uint32_t token = i / KV_HEADS;
        out[i] = (struct cuda_move){(uint64_t)i * KV_PIECE, token, (uint16_t)(i % KV_HEADS), 0};
        in[i] = (struct cuda_move){(uint64_t)i * KV_PIECE, p->slots[token], (uint16_t)(i % KV_HEADS), 0};
    }
    out[1].row = 1;
    p->moves = (struct cuda_moves){.kv = p->paged,
                                   .host_base = host,
                                   .host_bytes = KV_COUNT * KV_HEADS * KV_PIECE,
                                   .moves = upload(&p->rig, out, sizeof out),
                                   .count = KV_COUNT * KV_HEADS,
                                   .layers = 1,
                                   .row_count = 1,
                                   .heads = KV_HEADS};
    assert_int_equal(api->scatter(&p->moves, p->rig.stream), 0);
    assert_int_equal(api->stream_sync(p->rig.stream), 0);
    for (int i = 0; i < KV_PIECE; i++)
        assert_int_equal(host[KV_PIECE + i], 0);
    memcpy(host + KV_PIECE, (uint8_t *)p->paged.base + p->first_page + KV_PAGE * KV_PIECE, KV_PIECE);
    p->moves.kv = p->slotted;
    p->moves.moves = upload(&p->rig, in, sizeof in);
    assert_int_equal(api->gather(&p->moves, p->rig.stream), 0);
}

/* Over the pages, then over the slots: the same. */
static void pieces_attend(struct pieces *p)
{
    float *q = normals(KV_QUERIES * KV_DIM, 5), out[2][KV_QUERIES * KV_DIM];
    uint32_t counts[KV_HEADS] = {KV_COUNT, KV_COUNT};
    p->attn = (struct cuda_attn){
        .kv = p->paged,
        .out = device_memory(&p->rig, sizeof out[0]),
        .out_type = DTYPE_F32,
        .q = upload(&p->rig, q, sizeof out[0]),
        .q_stride = KV_QUERIES * KV_DIM,
        .counts = upload(&p->rig, counts, sizeof counts),
        .count_stride = KV_HEADS,
        .row_count = 1,
        .list_max = KV_COUNT,
        .n = 1,
        .q_heads = KV_QUERIES,
        .kv_heads = KV_HEADS,
        .head_dim = KV_DIM,
        .scale = 0.125f,
        .work = device_memory(&p->rig, api->attn_work_bytes(1, KV_QUERIES, KV_DIM, KV_COUNT))};
    assert_int_equal(api->attn(&p->attn, p->rig.stream), 0);
    download(&p->rig, out[0], p->attn.out, sizeof out[0]);
    p->attn.kv = p->slotted;
    p->attn.items = upload(&p->rig, p->slots, sizeof p->slots);
    assert_int_equal(api->attn(&p->attn, p->rig.stream), 0);
    download(&p->rig, out[1], p->attn.out, sizeof out[1]);
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    for (int i = 0; i < KV_QUERIES * KV_DIM; i++)
        assert_false(isnan(out[0][i]));
    mem_free(&q);
}

/* Nonsense in tables harms nobody. */
static void pieces_junk(struct pieces *p)
{
    uint64_t junk[KV_COUNT];
    for (uint64_t i = 0; i < KV_COUNT; i++)
        junk[i] = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    p->attn.items = upload(&p->rig, junk, sizeof junk);
    p->attn.kv.at = upload(&p->rig, junk, sizeof junk);
    p->attn.counts = upload(&p->rig, junk, sizeof junk);
    p->write.kv.at = p->attn.kv.at;
    p->moves.kv.at = p->attn.kv.at;
    p->moves.moves = upload(&p->rig, junk, sizeof junk);
    p->moves.count = KV_COUNT / 2; /* two words each */
    assert_int_equal(api->rope_write(&p->rope, &p->write, p->rig.stream), 0);
    assert_int_equal(api->scatter(&p->moves, p->rig.stream), 0);
    assert_int_equal(api->attn(&p->attn, p->rig.stream), 0);
    assert_int_equal(api->stream_sync(p->rig.stream), 0);
}

static void test_pieces(void **state)
{
    (void)state;
    struct pieces p;
    pieces_open(&p);
    pieces_write(&p);
    pieces_move(&p);
    pieces_attend(&p);
    pieces_junk(&p);
    rig_close(&p.rig);
}

static void test_topk(void **state)
{
    (void)state;
    struct rig rig = rig_open();
    float values[16] = {9, 1, 5, NAN, 5, 2, 8, 0, /* row 1 */ 1, 1, 1, 1, 1, 1, 1, 1}, mass[2];
    uint32_t first[1] = {1}, end[1] = {7}, index[6], count[2];
    struct cuda_topk t = {.index = device_memory(&rig, sizeof index),
                          .index_stride = 3,
                          .ret_count = device_memory(&rig, sizeof count),
                          .ret_mass = device_memory(&rig, sizeof mass),
                          .values = upload(&rig, values, sizeof values),
                          .stride = 8,
                          .first = upload(&rig, first, sizeof first),
                          .end = upload(&rig, end, sizeof end),
                          .rows = 2,
                          .heads = 2,
                          .k = 3,
                          .end_max = 8};
    assert_int_equal(api->topk(&t, rig.stream), 0);
    download(&rig, index, t.index, sizeof index);
    download(&rig, count, t.ret_count, sizeof count);
    download(&rig, mass, t.ret_mass, sizeof mass);
    assert_memory_equal(index, ((uint32_t[]){2, 4, 6, 1, 2, 3}), sizeof index);
    assert_true(count[0] == 3 && count[1] == 3 && mass[0] == 18 && mass[1] == 3);
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_devices),       cmocka_unit_test(test_memory_ends),
        cmocka_unit_test(test_order),         cmocka_unit_test(test_graph),
        cmocka_unit_test(test_follow),        cmocka_unit_test(test_errors_stay),
        cmocka_unit_test(test_two_processes), cmocka_unit_test(test_stale_handle),
        cmocka_unit_test(test_matmul),        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_topk),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
