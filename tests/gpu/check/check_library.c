/* What daemons expect of the library behind compute/gpu.h, and a double cannot promise of a real GPU:
 * memory and flags across processes that were started apart, graphs whose flag values change, a host store
 * that releases a wait, a peer that is killed while it waits, products, copies of pieces. Runs on whichever
 * library gpu_load finds (SPECONTEXT_GPU_LIBRARY); where no GPU is it says so and ends with 77.
 *
 *   check_library [DEVICE [PEER DEVICE]] */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "compute/gpu.h"

enum { SKIPPED = 77, VALUES = 1024, ROUNDS = 50 };
#define BOUND_NS (10 * CLOCK_S)

extern char **environ;
static const struct gpu_api *api;
static int failures;

#define EXPECT(holds) expect((holds), __LINE__, #holds)

static void expect(bool holds, int line, const char *what)
{
    if (holds)
        return;
    failures++;
    printf("FAILED line %d: %s\n", line, what);
}

struct shared { /* a memfd that both processes map and register */
    uint32_t ping[16], pong[16], ready[16], stop[16];
    uint8_t handle[GPU_IPC_BYTES];
    uint8_t pad[4096 - 4 * 64 - GPU_IPC_BYTES];
};
_Static_assert(sizeof(struct shared) == 4096, "one page");

struct rig {
    struct gpu *gpu;
    struct CUstream_st *stream;
    struct shared *shared;
    struct shared *mapped; /* as the GPU sees it */
};

static int rig_open(struct rig *rig, const char *device, int fd, struct err *err)
{
    memset(rig, 0, sizeof *rig);
    rig->shared = mmap(NULL, sizeof *rig->shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (rig->shared == MAP_FAILED)
        return err_set(err, -errno, "mmap: %s", strerror(errno));
    int r = api->open(device, &rig->gpu, err);
    if (r == 0)
        r = api->stream_create(rig->gpu, GPU_PRIORITY_NORMAL, &rig->stream, err);
    void *mapped = NULL;
    if (r == 0)
        r = api->host_register(rig->gpu, rig->shared, sizeof *rig->shared, &mapped, err);
    rig->mapped = mapped;
    return r;
}

static uint32_t load(const uint32_t *flag)
{
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

static bool wait_host(const uint32_t *flag, uint32_t value)
{
    for (int64_t end = clock_now_ns() + BOUND_NS; clock_now_ns() < end; sched_yield())
        if ((int32_t)(load(flag) - value) >= 0)
            return true;
    return false;
}

static bool wait_stream(struct CUstream_st *stream)
{
    for (int64_t end = clock_now_ns() + BOUND_NS; clock_now_ns() < end; sched_yield()) {
        int done = api->stream_done(stream);
        if (done)
            return done > 0;
    }
    return false;
}

/* x [VALUES] += x, by the operator that adds before it normalises; the norm goes behind x. */
static int twice(float *x, struct CUstream_st *stream)
{
    const struct cuda_rmsnorm norm = {.out = x + VALUES,
                                      .out_type = DTYPE_F32,
                                      .x = x,
                                      .add = x,
                                      .weight = x,
                                      .weight_type = DTYPE_F32,
                                      .n = 1,
                                      .dim = VALUES,
                                      .eps = 1};
    return api->rmsnorm(&norm, stream);
}

/* The peer: waits for ping, adds the memory to itself, answers; in a graph, with new values each round. */
static int peer(const char *device, int fd)
{
    struct rig rig;
    struct err err = {0};
    void *at = NULL;
    struct gpu_graph *graph = NULL;
    int r = rig_open(&rig, device, fd, &err);
    if (r == 0)
        r = api->ipc_open(rig.gpu, rig.shared->handle, &at, &err);
    if (r == 0)
        r = api->capture_begin(rig.stream, &err);
    if (r == 0)
        r = api->flag_wait(rig.mapped->ping, 0, rig.stream);
    if (r == 0)
        r = twice(at, rig.stream);
    if (r == 0)
        r = api->flag_write(rig.mapped->pong, 0, rig.stream);
    if (r == 0)
        r = api->capture_end(rig.gpu, rig.stream, &graph, &err);
    if (r < 0 || api->graph_flags(graph) != 2) {
        printf("FAILED peer: %d %s\n", r, err.text);
        __atomic_store_n(rig.shared->ready, 2, __ATOMIC_RELEASE);
        return 1;
    }
    __atomic_store_n(rig.shared->ready, 1, __ATOMIC_RELEASE);
    for (uint32_t round = 1;; round++) { /* the last launch waits for a ping that never comes: it is killed */
        uint32_t values[2] = {round, round}, other[2] = {round + 7, round + 7};
        if (round % 3 && api->graph_set(graph, round % 3 == 1 ? values : other) < 0) /* ahead, or to no use */
            return 1;
        if (api->graph_launch(graph, values, rig.stream) < 0 || api->stream_sync(rig.stream) < 0)
            return 1;
    }
}

static pid_t start_peer(const char *program, const char *device, int fd)
{
    char number[16];
    snprintf(number, sizeof number, "%d", fd);
    const char *argv[] = {program, "--peer", device, number, NULL};
    pid_t pid = 0;
    int r = posix_spawn(&pid, program, NULL, NULL, (char *const *)argv, environ);
    return r ? -1 : pid;
}

static void check_processes(const char *program, const char *device, const char *peer_device)
{
    struct rig rig;
    struct err err = {0};
    int fd = memfd_create("check", 0);
    EXPECT(fd >= 0 && ftruncate(fd, sizeof(struct shared)) == 0);
    int r = rig_open(&rig, device, fd, &err);
    if (r < 0)
        printf("%s\n", err.text);
    EXPECT(r == 0);
    if (r < 0)
        return;
    float values[VALUES], out[VALUES];
    for (int i = 0; i < VALUES; i++)
        values[i] = (float)i;
    void *at = NULL;
    uint64_t before = 0, during = 0, after = 0;
    EXPECT(api->alloc(rig.gpu, 4 << 20, &at, &err) == 0);
    /* A kernel's first launch loads its code, which waits for the process's streams: never behind a wait. */
    EXPECT(twice(at, rig.stream) == 0);
    EXPECT(api->copy(at, values, sizeof values, rig.stream) == 0 && api->stream_sync(rig.stream) == 0);
    EXPECT(api->ipc_export(rig.gpu, at, rig.shared->handle, &err) == 0);
    api->memory_free(rig.gpu, &before);
    pid_t pid = start_peer(program, peer_device, fd);
    EXPECT(pid > 0);
    EXPECT(wait_host(rig.shared->ready, 1) && load(rig.shared->ready) == 1);
    api->memory_free(rig.gpu, &during);
    int64_t begin = clock_now_ns();
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        EXPECT(api->flag_write(rig.mapped->ping, round, rig.stream) == 0);
        EXPECT(api->flag_wait(rig.mapped->pong, round, rig.stream) == 0);
        if (round % 8 == 0) /* keeps numbers small: the peer doubles */
            EXPECT(api->copy(at, values, sizeof values, rig.stream) == 0);
    }
    EXPECT(wait_stream(rig.stream));
    int64_t took = clock_now_ns() - begin;
    EXPECT(api->copy(out, at, sizeof out, rig.stream) == 0 && api->stream_sync(rig.stream) == 0);
    for (int i = 0; i < VALUES; i++)
        if (out[i] != values[i] * (float)(1 << ROUNDS % 8)) {
            EXPECT(out[i] == values[i] * (float)(1 << ROUNDS % 8));
            break;
        }
    printf("round trip of stream flags between processes: %.1f us\n", (double)took / ROUNDS / 1e3);
    kill(pid, SIGKILL); /* it waits in its stream */
    EXPECT(waitpid(pid, NULL, 0) == pid);
    /* We go on: a wait of ours that nobody answers is released by a plain store. */
    EXPECT(api->flag_wait(rig.mapped->pong, 1000, rig.stream) == 0);
    EXPECT(twice(at, rig.stream) == 0);
    EXPECT(api->stream_done(rig.stream) == 0);
    __atomic_store_n(rig.shared->pong, 1000 + 0x40000000u, __ATOMIC_RELEASE);
    EXPECT(wait_stream(rig.stream));
    for (int64_t end = clock_now_ns() + BOUND_NS; clock_now_ns() < end && after < before; sched_yield())
        api->memory_free(rig.gpu, &after);
    printf(
        "device memory free: before the peer %llu, beside it %llu, after its death %llu; its context %llu\n",
        (unsigned long long)before, (unsigned long long)during, (unsigned long long)after,
        (unsigned long long)api->info(rig.gpu)->context_bytes);
    EXPECT(after >= before);
    EXPECT(api->check(rig.gpu, &err) == 0);
    api->host_unregister(rig.gpu, rig.shared);
    api->free(rig.gpu, at);
    api->stream_free(rig.gpu, &rig.stream);
    api->close(&rig.gpu);
    close(fd);
}

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static void check_product(const char *device, uint32_t n, int has_bias, int accumulate)
{
    enum { ROWS = 96, COLS = 64, N_MAX = 40 };
    static uint16_t w[ROWS * COLS], x[N_MAX * COLS];
    static float bias[ROWS], out[N_MAX * ROWS];
    struct gpu *gpu;
    struct err err = {0};
    if (api->open(device, &gpu, &err) < 0)
        return expect(false, __LINE__, err.text);
    struct CUstream_st *stream = NULL;
    EXPECT(api->stream_create(gpu, GPU_PRIORITY_HIGH, &stream, &err) == 0);
    for (int i = 0; i < ROWS * COLS; i++)
        w[i] = to_bf16((float)((i * 37) % 101) / 101.0f - 0.5f);
    for (int i = 0; i < N_MAX * COLS; i++)
        x[i] = to_bf16((float)((i * 53) % 97) / 97.0f - 0.5f);
    for (int i = 0; i < ROWS; i++)
        bias[i] = (float)i / 10.0f;
    for (int i = 0; i < N_MAX * ROWS; i++)
        out[i] = 1.0f;
    const void *host[] = {w, x, bias, out};
    const size_t bytes[] = {sizeof w, sizeof x, sizeof bias, sizeof out};
    void *at[4];
    for (int i = 0; i < 4; i++) {
        EXPECT(api->alloc(gpu, bytes[i], &at[i], &err) == 0);
        EXPECT(api->copy(at[i], host[i], bytes[i], stream) == 0);
    }
    struct cuda_matmul_shape shape = {.rows = ROWS,
                                      .cols = COLS,
                                      .n = n,
                                      .out_type = DTYPE_F32,
                                      .has_bias = has_bias,
                                      .accumulate = accumulate};
    struct cuda_matmul m = {.out = at[3], .w = at[0], .x = at[1], .bias = has_bias ? at[2] : NULL};
    int r = api->matmul_prepare(gpu, &shape, &err);
    if (r == 0)
        r = api->matmul(gpu, &shape, &m, stream);
    if (r < 0)
        printf("n %u bias %d accumulate %d: %d %s\n", n, has_bias, accumulate, r, err.text);
    EXPECT(r == 0);
    EXPECT(api->copy(out, at[3], sizeof out, stream) == 0 && api->stream_sync(stream) == 0);
    double worst = 0;
    for (uint32_t t = 0; t < n; t++)
        for (int row = 0; row < ROWS; row++) {
            double sum = (has_bias ? (double)bias[row] : 0.0) + (accumulate ? 1.0 : 0.0);
            for (int c = 0; c < COLS; c++)
                sum += (double)from_bf16(w[row * COLS + c]) * (double)from_bf16(x[t * COLS + (uint32_t)c]);
            worst = fmax(worst, fabs(sum - (double)out[t * ROWS + (uint32_t)row]));
        }
    if (worst > 1e-3)
        printf("n %u bias %d accumulate %d: off by %g\n", n, has_bias, accumulate, worst);
    EXPECT(worst <= 1e-3);
    for (int i = 0; i < 4; i++)
        api->free(gpu, at[i]);
    api->stream_free(gpu, &stream);
    api->close(&gpu);
}

int main(int argc, char **argv)
{
    struct err err = {0};
    struct gpu *gpu = NULL;
    setvbuf(stdout, NULL, _IOLBF, 0);
    bool is_peer = argc == 4 && !strcmp(argv[1], "--peer");
    const char *device = argc > 1 ? argv[1] : "cuda:0", *peer_device = argc > 2 ? argv[2] : device;
    int r = gpu_load(&api, &err);
    if (r == 0 && !is_peer)
        r = api->open(device, &gpu, &err);
    if (r < 0) {
        printf("skipped: %s\n", err.text);
        return SKIPPED;
    }
    if (is_peer)
        return peer(argv[2], (int)strtol(argv[3], NULL, 10));
    api->close(&gpu);
    for (int i = 0; i < 3; i++)
        check_processes(argv[0], device, peer_device);
    static const uint32_t counts[] = {1, 2, 3, 4, 8, 33};
    for (unsigned i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int form = 0; form < 4; form++)
            check_product(device, counts[i], form & 1, form >> 1);
    printf("%s, %d failures\n", failures ? "FAILED" : "ok", failures);
    return failures ? 1 : 0;
}
