/* The CUDA library behind compute/gpu.h: devices, memory, streams, flags. Graphs: gpu_graph.c.
 *
 * Owner: the process that loaded it; each struct gpu belongs to the thread that opened it. CUDA's current
 * device is a thread's, so whatever takes a gpu makes its device current first. The driver's functions are
 * looked up at run time: the library loads where no driver is, and says so when a device is opened. */
#include "compute/cuda/gpu_cuda.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"

enum { WORKSPACE_BYTES = 32 << 20, DRIVER_VERSION = 12000, PLANS_MAX = 256 };

struct plan {
    struct cuda_matmul_shape shape;
    struct cuda_matmul_plan *plan;
};

struct gpu {
    struct gpu_info info;
    cublasLtHandle_t handle;
    void *workspace;
    uint64_t library_bytes;
    struct plan plans[PLANS_MAX]; /* those used often in front */
    uint32_t plan_count;
    cudaEvent_t order; /* NULL: not used yet */
};

struct gpu_event {
    cudaEvent_t event;
};

struct gpu_driver gpu_driver;

int gpu_status(cudaError_t status)
{
    switch (status) {
    case cudaSuccess:
        return 0;
    case cudaErrorMemoryAllocation:
        return -ENOMEM;
    case cudaErrorInvalidValue:
        return -EINVAL;
    case cudaErrorNotReady:
        return -EAGAIN;
    default:
        return -EIO;
    }
}

/* CUDA's last error is cleared where it does not stick, so that the next launch is not blamed for it. */
int gpu_fail(struct err *err, cudaError_t status, const char *what)
{
    cudaGetLastError();
    return err_set(err, gpu_status(status), "GPU: %s: %s (%s)", what, cudaGetErrorString(status),
                   cudaGetErrorName(status));
}

static void use(const struct gpu *g)
{
    cudaSetDevice(g->info.ordinal);
}

/* ---- devices ---- */

static int driver_function(const char *name, void *ret, struct err *err)
{
    void *at = NULL;
    enum cudaDriverEntryPointQueryResult found;
    cudaError_t status =
        cudaGetDriverEntryPointByVersion(name, &at, DRIVER_VERSION, cudaEnableDefault, &found);
    if (status != cudaSuccess)
        return gpu_fail(err, status, name);
    if (found != cudaDriverEntryPointSuccess || !at)
        return err_set(err, -ENODEV, "GPU: the driver has no %s: found a driver older than CUDA 12", name);
    memcpy(ret, &at, sizeof at);
    return 0;
}

static int find_driver(struct err *err)
{
    struct gpu_driver *d = &gpu_driver;
    int r = driver_function("cuStreamWaitValue32", &d->wait_value, err);
    if (r == 0)
        r = driver_function("cuStreamWriteValue32", &d->write_value, err);
    if (r == 0)
        r = driver_function("cuGraphBatchMemOpNodeGetParams", &d->node_get, err);
    if (r == 0)
        r = driver_function("cuGraphExecBatchMemOpNodeSetParams", &d->exec_node_set, err);
    return r;
}

static int count_devices(int *ret_count, struct err *err)
{
    cudaError_t status = cudaGetDeviceCount(ret_count);
    if (status == cudaSuccess)
        return 0;
    cudaGetLastError();
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    return err_set(err, -ENODEV, "no GPU: %s%s%s", cudaGetErrorString(status),
                   visible ? "; CUDA_VISIBLE_DEVICES is " : "", visible ? visible : "");
}

static void print_uuid(const cudaUUID_t *uuid, char ret[48])
{
    const uint8_t *b = (const uint8_t *)uuid->bytes;
    snprintf(ret, 48, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1],
             b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

static int describe(int ordinal, struct gpu_info *ret, struct cudaDeviceProp *prop, struct err *err)
{
    cudaError_t status = cudaGetDeviceProperties(prop, ordinal);
    if (status != cudaSuccess)
        return gpu_fail(err, status, "properties");
    *ret = (struct gpu_info){.ordinal = ordinal,
                             .multiprocessors = prop->multiProcessorCount,
                             .bytes_total = prop->totalGlobalMem};
    snprintf(ret->name, sizeof ret->name, "%.95s", prop->name);
    print_uuid(&prop->uuid, ret->uuid);
    return 0;
}

static int parse_ordinal(const char *device, int *ret)
{
    if (!strcmp(device, "cuda")) {
        *ret = 0;
        return 0;
    }
    if (strncmp(device, "cuda:", 5) || !device[5])
        return -EINVAL;
    char *end;
    long n = strtol(device + 5, &end, 10);
    if (*end || n < 0 || n > 1023)
        return -EINVAL;
    *ret = (int)n;
    return 0;
}

static int find_device(const char *device, struct gpu_info *ret, struct cudaDeviceProp *prop, struct err *err)
{
    int count, ordinal;
    int r = count_devices(&count, err);
    if (r < 0)
        return r;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    visible = visible ? visible : "not set";
    if (!strncmp(device, "GPU-", 4)) {
        for (int i = 0; i < count; i++) {
            r = describe(i, ret, prop, err);
            if (r < 0 || !strcmp(ret->uuid, device))
                return r;
        }
        return err_set(err, -ENODEV, "device %s: not among the %d visible GPUs (CUDA_VISIBLE_DEVICES: %s)",
                       device, count, visible);
    }
    if (parse_ordinal(device, &ordinal) < 0)
        return err_set(err, -EINVAL, "device: found %s, expected cuda, cuda:N or GPU-UUID", device);
    if (ordinal >= count)
        return err_set(err, -ENODEV, "device %s: found %d visible GPUs (CUDA_VISIBLE_DEVICES: %s)", device,
                       count, visible);
    return describe(ordinal, ret, prop, err);
}

/* A server that is alive takes every new client of this user, so its pid file tells. */
static int mps_runs(void)
{
    const char *dir = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char path[512];
    if (snprintf(path, sizeof path, "%s/nvidia-cuda-mps-control.pid",
                 dir && dir[0] ? dir : "/tmp/nvidia-mps") >= (int)sizeof path)
        return 0;
    FILE *f = fopen(path, "re");
    if (!f)
        return 0;
    int pid = 0, found = fscanf(f, "%d", &pid) == 1 && pid > 0;
    fclose(f);
    return found && (kill(pid, 0) == 0 || errno == EPERM);
}

static int make_context(struct gpu *g, const struct cudaDeviceProp *prop, struct err *err)
{
    if (prop->major < 8)
        return err_set(err, -ENODEV, "device %s (%s): found compute capability %d.%d, expected at least 8.0",
                       g->info.uuid, g->info.name, prop->major, prop->minor);
    int mode = 0;
    cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, g->info.ordinal);
    if (mode == cudaComputeModeProhibited)
        return err_set(err, -ENODEV, "device %s (%s): its compute mode is Prohibited", g->info.uuid,
                       g->info.name);
    uint64_t before = 0, after = 0;
    int accounted = gpu_nvml_used(g->info.uuid, &before) == 0;
    cudaError_t status = cudaInitDevice(g->info.ordinal, 0, 0);
    if (status == cudaSuccess)
        status = cudaSetDevice(g->info.ordinal);
    size_t available = 0, total = 0;
    if (status == cudaSuccess)
        status = cudaMemGetInfo(&available, &total);
    if (status != cudaSuccess && mode == cudaComputeModeExclusiveProcess)
        return err_set(
            err, -EBUSY,
            "device %s (%s): its compute mode is Exclusive_Process and another process has it; run "
            "nvidia-cuda-mps-control or set the mode to Default",
            g->info.uuid, g->info.name);
    if (status != cudaSuccess)
        return gpu_fail(err, status, "context");
    g->info.bytes_total = total;
    /* What the card has less is others' too, if they begin at the same time. */
    if (gpu_nvml_own(g->info.uuid, &g->info.context_bytes) < 0 && accounted &&
        gpu_nvml_used(g->info.uuid, &after) == 0 && after > before)
        g->info.context_bytes = after - before;
    return 0;
}

static void close_gpu(struct gpu **gpu)
{
    struct gpu *g = *gpu;
    if (!g)
        return;
    use(g);
    cudaDeviceSynchronize();
    for (uint32_t i = 0; i < g->plan_count; i++)
        cuda_matmul_plan_free(&g->plans[i].plan);
    if (g->workspace)
        cudaFree(g->workspace);
    if (g->handle)
        cublasLtDestroy(g->handle);
    if (g->order)
        cudaEventDestroy(g->order);
    mem_free(gpu);
}

static int open_gpu(const char *device, struct gpu **ret_gpu, struct err *err)
{
    struct gpu *g = mem_alloc(1, sizeof *g);
    struct cudaDeviceProp prop;
    int r = find_device(device, &g->info, &prop, err);
    if (r == 0)
        r = make_context(g, &prop, err);
    if (r == 0)
        r = find_driver(err);
    if (r == 0)
        g->info.hopper = cuda_prefill_hopper(g->info.ordinal);
    if (r == 0 && g->info.hopper && cuda_product_load() < 0)
        r = err_set(err, -EIO, "GPU %s: its kernels do not load", g->info.uuid);
    if (r < 0) {
        mem_free(&g);
        return r;
    }
    g->info.mps = mps_runs();
    *ret_gpu = g;
    return 0;
}

static const struct gpu_info *info(const struct gpu *g)
{
    return &g->info;
}

static int memory_free(struct gpu *g, uint64_t *ret_bytes)
{
    use(g);
    size_t available = 0, total = 0;
    cudaError_t status = cudaMemGetInfo(&available, &total);
    *ret_bytes = available;
    return gpu_status(status);
}

static int check(struct gpu *g, struct err *err)
{
    use(g);
    cudaError_t status = cudaGetLastError();
    if (status == cudaSuccess)
        status = cudaStreamQuery(cudaStreamPerThread); /* errors of kernels stick to the context */
    return status == cudaSuccess || status == cudaErrorNotReady ? 0 : gpu_fail(err, status, g->info.name);
}

/* ---- memory ---- */

static int alloc_device(struct gpu *g, uint64_t bytes, void **ret_at, struct err *err)
{
    use(g);
    *ret_at = NULL;
    cudaError_t status = cudaMalloc(ret_at, bytes ? bytes : 1);
    if (status == cudaSuccess)
        return 0;
    size_t available = 0, total = 0;
    cudaGetLastError();
    cudaMemGetInfo(&available, &total);
    return err_set(err, gpu_status(status), "GPU memory: wanted %llu bytes, found %zu free of %zu: %s",
                   (unsigned long long)bytes, available, total, cudaGetErrorString(status));
}

static void free_device(struct gpu *g, void *at)
{
    use(g);
    cudaFree(at);
}

static int alloc_host(struct gpu *g, uint64_t bytes, void **ret_host, void **ret_device, struct err *err)
{
    use(g);
    cudaError_t status =
        cudaHostAlloc(ret_host, bytes ? bytes : 1, cudaHostAllocMapped | cudaHostAllocPortable);
    if (status != cudaSuccess)
        return gpu_fail(err, status, "pinned memory");
    status = cudaHostGetDevicePointer(ret_device, *ret_host, 0);
    if (status == cudaSuccess)
        return 0;
    cudaFreeHost(*ret_host);
    *ret_host = NULL;
    return gpu_fail(err, status, "pinned memory");
}

static void free_host(struct gpu *g, void *host)
{
    use(g);
    cudaFreeHost(host);
}

static int host_register(struct gpu *g, void *at, uint64_t bytes, void **ret_device, struct err *err)
{
    use(g);
    cudaError_t status = cudaHostRegister(at, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    if (status != cudaSuccess)
        return gpu_fail(err, status, "registering host memory");
    status = cudaHostGetDevicePointer(ret_device, at, 0);
    if (status == cudaSuccess)
        return 0;
    cudaHostUnregister(at);
    return gpu_fail(err, status, "registering host memory");
}

static void host_unregister(struct gpu *g, void *at)
{
    use(g);
    if (cudaHostUnregister(at) != cudaSuccess)
        cudaGetLastError();
}

static int ipc_export(struct gpu *g, void *at, uint8_t *handle, struct err *err)
{
    use(g);
    cudaIpcMemHandle_t h;
    _Static_assert(sizeof h == GPU_IPC_BYTES, "a handle fits");
    cudaError_t status = cudaIpcGetMemHandle(&h, at);
    if (status != cudaSuccess)
        return gpu_fail(err, status, "exporting memory");
    memcpy(handle, &h, sizeof h);
    return 0;
}

static int ipc_open(struct gpu *g, const uint8_t *handle, void **ret_at, struct err *err)
{
    use(g);
    cudaIpcMemHandle_t h;
    memcpy(&h, handle, sizeof h);
    cudaError_t status = cudaIpcOpenMemHandle(ret_at, h, cudaIpcMemLazyEnablePeerAccess);
    if (status == cudaSuccess)
        return 0;
    gpu_fail(err, status, "opening another process's memory");
    return err_prefix(err, gpu_status(status),
                      "device %s: the exporter may be gone, or in another PID or IPC namespace",
                      g->info.uuid);
}

static void ipc_close(struct gpu *g, void *at)
{
    use(g);
    if (cudaIpcCloseMemHandle(at) != cudaSuccess)
        cudaGetLastError();
}

/* ---- streams ---- */

static int stream_create(struct gpu *g, enum gpu_priority priority, struct CUstream_st **ret_stream,
                         struct err *err)
{
    use(g);
    int least = 0, greatest = 0;
    cudaDeviceGetStreamPriorityRange(&least, &greatest);
    cudaError_t status = cudaStreamCreateWithPriority(ret_stream, cudaStreamNonBlocking,
                                                      priority == GPU_PRIORITY_HIGH ? greatest : least);
    return status == cudaSuccess ? 0 : gpu_fail(err, status, "stream");
}

static void stream_free(struct gpu *g, struct CUstream_st **stream)
{
    if (!*stream)
        return;
    use(g);
    cudaStreamDestroy(*stream);
    *stream = NULL;
}

static int stream_sync(struct CUstream_st *stream)
{
    return gpu_status(cudaStreamSynchronize(stream));
}

static int stream_done(struct CUstream_st *stream)
{
    cudaError_t status = cudaStreamQuery(stream);
    if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return 0;
    }
    return status == cudaSuccess ? 1 : -EIO;
}

static int copy(void *to, const void *from, size_t bytes, struct CUstream_st *stream)
{
    return bytes ? gpu_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream)) : 0;
}

static int copy_rows(void *to, const void *from, size_t bytes, size_t stride, size_t rows,
                     struct CUstream_st *stream)
{
    if (!bytes || !rows)
        return 0;
    return gpu_status(cudaMemcpy2DAsync(to, stride, from, stride, bytes, rows, cudaMemcpyDefault, stream));
}

static int fill(void *to, uint8_t byte, size_t bytes, struct CUstream_st *stream)
{
    return bytes ? gpu_status(cudaMemsetAsync(to, byte, bytes, stream)) : 0;
}

static int host_call(struct CUstream_st *stream, void (*call)(void *), void *arg)
{
    return gpu_status(cudaLaunchHostFunc(stream, call, arg));
}

static int event_create(struct gpu *g, struct gpu_event **ret_event, struct err *err)
{
    use(g);
    struct gpu_event *e = mem_alloc(1, sizeof *e);
    cudaError_t status = cudaEventCreate(&e->event);
    if (status != cudaSuccess) {
        mem_free(&e);
        return gpu_fail(err, status, "event");
    }
    *ret_event = e;
    return 0;
}

static void event_free(struct gpu_event **event)
{
    if (*event)
        cudaEventDestroy((*event)->event);
    mem_free(event);
}

/* One event serves all: a wait is for what it was recorded behind when the wait was queued. */
static int stream_follow(struct gpu *g, struct CUstream_st *stream, struct CUstream_st *after)
{
    use(g);
    cudaError_t status = cudaSuccess;
    if (!g->order)
        status = cudaEventCreateWithFlags(&g->order, cudaEventDisableTiming);
    if (status == cudaSuccess)
        status = cudaEventRecord(g->order, after);
    if (status == cudaSuccess)
        status = cudaStreamWaitEvent(stream, g->order, 0);
    return gpu_status(status);
}

static int event_record(struct gpu_event *event, struct CUstream_st *stream)
{
    return gpu_status(cudaEventRecord(event->event, stream));
}

static int event_elapsed(struct gpu_event *from, struct gpu_event *to, float *ret_ms)
{
    return gpu_status(cudaEventElapsedTime(ret_ms, from->event, to->event));
}

/* ---- products ---- */

static int same_shape(const struct cuda_matmul_shape *a, const struct cuda_matmul_shape *b)
{
    return a->rows == b->rows && a->cols == b->cols && a->n == b->n && a->out_type == b->out_type &&
           !a->has_bias == !b->has_bias && !a->accumulate == !b->accumulate;
}

static int by_gemv(const struct cuda_matmul_shape *s)
{
    return s->n <= 2 && s->out_type == DTYPE_F32 && s->cols % 8 == 0;
}

static int by_product(const struct gpu *g, const struct cuda_matmul_shape *s)
{
    return g->info.hopper && s->n <= CUDA_PRODUCT_TOKENS && s->out_type == DTYPE_F32 &&
           s->cols % CUDA_PRODUCT_COLUMNS == 0;
}

/* Each use brings a plan one place further to the front. */
static struct plan *find_plan(struct gpu *g, const struct cuda_matmul_shape *shape)
{
    for (uint32_t i = 0; i < g->plan_count; i++) {
        if (!same_shape(&g->plans[i].shape, shape))
            continue;
        if (i == 0)
            return &g->plans[0];
        struct plan before = g->plans[i - 1];
        g->plans[i - 1] = g->plans[i];
        g->plans[i] = before;
        return &g->plans[i - 1];
    }
    return NULL;
}

/* What the library takes is seen by what this process has more: it allocates for itself. */
static int make_handle(struct gpu *g, struct err *err)
{
    uint64_t before = 0, after = 0;
    gpu_nvml_own(g->info.uuid, &before);
    cublasStatus_t status = cublasLtCreate(&g->handle);
    if (status != CUBLAS_STATUS_SUCCESS)
        return err_set(err, -EIO, "GPU: cuBLASLt does not start (status %d)", (int)status);
    int r = alloc_device(g, WORKSPACE_BYTES, &g->workspace, err);
    gpu_nvml_own(g->info.uuid, &after);
    g->library_bytes = before > 0 && after > before ? after - before : WORKSPACE_BYTES;
    return r;
}

static int matmul_prepare(struct gpu *g, const struct cuda_matmul_shape *shape, struct err *err)
{
    use(g);
    if (shape->n == 0 || by_gemv(shape) || by_product(g, shape) || find_plan(g, shape))
        return 0;
    int r = g->handle ? 0 : make_handle(g, err);
    if (r < 0)
        return r;
    struct plan plan = {.shape = *shape};
    plan.shape.workspace_bytes = WORKSPACE_BYTES;
    r = cuda_matmul_plan(g->handle, &plan.shape, &plan.plan);
    if (r < 0)
        return err_set(err, r, "GPU: cuBLASLt has no product of %u x %u with %u tokens", shape->rows,
                       shape->cols, shape->n);
    if (g->plan_count == PLANS_MAX) /* prompts come in many lengths; what a graph captured needs no plan */
        cuda_matmul_plan_free(&g->plans[--g->plan_count].plan);
    g->plans[g->plan_count++] = plan;
    return 0;
}

static int matmul(struct gpu *g, const struct cuda_matmul_shape *shape, const struct cuda_matmul *m,
                  struct CUstream_st *stream)
{
    if (shape->n == 0)
        return 0;
    if (by_product(g, shape)) {
        struct cuda_product product = {.out = m->out,
                                       .w = m->w,
                                       .x = m->x,
                                       .bias = m->bias,
                                       .rows = shape->rows,
                                       .cols = shape->cols,
                                       .n = shape->n,
                                       .accumulate = shape->accumulate};
        return cuda_product(&product, stream);
    }
    if (by_gemv(shape)) {
        struct cuda_gemv gemv = {.out = m->out,
                                 .w = m->w,
                                 .x = m->x,
                                 .bias = m->bias,
                                 .rows = shape->rows,
                                 .cols = shape->cols,
                                 .n = shape->n,
                                 .accumulate = shape->accumulate};
        return cuda_gemv(&gemv, stream);
    }
    int r = matmul_prepare(g, shape, NULL);
    if (r < 0)
        return r;
    struct cuda_matmul with = *m;
    with.workspace = g->workspace;
    return cuda_matmul(g->handle, find_plan(g, shape)->plan, &with, stream);
}

static uint64_t library_bytes(const struct gpu *g)
{
    return g->library_bytes;
}

/* ---- the table ---- */

static const struct gpu_api api = {
    .version = GPU_API_VERSION,
    .open = open_gpu,
    .close = close_gpu,
    .info = info,
    .memory_free = memory_free,
    .check = check,
    .alloc = alloc_device,
    .free = free_device,
    .alloc_host = alloc_host,
    .free_host = free_host,
    .host_register = host_register,
    .host_unregister = host_unregister,
    .ipc_export = ipc_export,
    .ipc_open = ipc_open,
    .ipc_close = ipc_close,
    .stream_create = stream_create,
    .stream_free = stream_free,
    .stream_follow = stream_follow,
    .stream_sync = stream_sync,
    .stream_done = stream_done,
    .copy = copy,
    .copy_rows = copy_rows,
    .fill = fill,
    .host_call = host_call,
    .event_create = event_create,
    .event_free = event_free,
    .event_record = event_record,
    .event_elapsed = event_elapsed,
    .flag_write = gpu_flag_write,
    .flag_wait = gpu_flag_wait,
    .capture_begin = gpu_capture_begin,
    .capture_end = gpu_capture_end,
    .graph_flags = gpu_graph_flags,
    .graph_launch = gpu_graph_launch,
    .graph_set = gpu_graph_set,
    .graph_free = gpu_graph_free,
    .matmul_prepare = matmul_prepare,
    .matmul = matmul,
    .product = cuda_product,
    .product_blocks = cuda_product_blocks,
    .library_bytes = library_bytes,
    .embed = cuda_embed,
    .mix = cuda_mix,
    .rmsnorm = cuda_rmsnorm,
    .headnorm = cuda_headnorm,
    .swiglu = cuda_swiglu,
    .narrow = cuda_narrow,
    .put_rows = cuda_put_rows,
    .rope_angles = cuda_rope_angles,
    .rope = cuda_rope,
    .rope_write = cuda_rope_write,
    .gather = cuda_gather,
    .scatter = cuda_scatter,
    .copy_pieces = cuda_copy_pieces,
    .copy_mapped = cuda_copy_mapped,
    .attn_work_bytes = cuda_attn_work_bytes,
    .attn = cuda_attn,
    .prefill = cuda_prefill,
    .keys_append = cuda_keys_append,
    .retrieval_work_bytes = cuda_retrieval_work_bytes,
    .retrieval = cuda_retrieval,
    .topk = cuda_topk,
    .sets_mark = cuda_sets_mark,
    .sets_changes = cuda_sets_changes,
    .sample = cuda_sample,
    .penalties = cuda_penalties,
};

const struct gpu_api *specontext_gpu_api(void)
{
    return &api;
}
