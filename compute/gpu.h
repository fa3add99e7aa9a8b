/* GPUs behind one table of functions, loaded when a daemon is started with --device cuda:N.
 *
 * The table comes from a shared library, so that programs run and are built where no CUDA is:
 * libspecontext-cuda.so beside the program (compute/cuda/gpu_cuda.c: CUDA 13), or the library that the
 * environment's SPECONTEXT_GPU_LIBRARY names. Tests load a double of the same interface that does all of it
 * on the CPU (tests/fakegpu), so that everything around the kernels is tested where no GPU is.
 *
 * Conventions. Errors: 0 or a negative errno; functions that can say more take a `struct err`. A `struct gpu`
 * is one device and one context in this process; create it on the thread that uses it; copies, launches,
 * flags and graphs are called from one thread at a time for each stream. Everything that takes a stream only
 * queues work on it, in order, and returns - but a kernel's first launch may load its code, which waits for
 * all streams of the process: so not behind a flag_wait that the launching thread itself must release.
 * Nobody polls a flag from a kernel (SHARED-MEMORY.md): waiting is done by stream memory operations, which
 * a plain store by any process that maps the flag releases. */
#ifndef COMPUTE_GPU_H
#define COMPUTE_GPU_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "compute/compute.h"
#include "compute/cuda/kernels.h"
#include "compute/cuda/sets.h"

#define GPU_API_VERSION 12
#define GPU_API_SYMBOL  "specontext_gpu_api" /* const struct gpu_api *specontext_gpu_api(void) */
#define GPU_IPC_BYTES   64

/* What another process opens by a handle is mapped there in small pages unless it is a whole number of large
 * ones: measured on an H200, attention over 2048 of 32K random positions of 32 sequences took 641 us in place
 * of 86 for 256 KiB too many (bench/results/2026-11-30-pages-h200.md). */
#define GPU_EXPORT_GRAIN (UINT64_C(2) << 20)
static inline uint64_t gpu_export_bytes(uint64_t bytes) /* to alloc() for ipc_export() */
{
    return (bytes + GPU_EXPORT_GRAIN - 1) / GPU_EXPORT_GRAIN * GPU_EXPORT_GRAIN;
}

struct gpu;
struct gpu_event;
struct gpu_graph;

struct gpu_info {
    char name[96];
    char uuid[48]; /* "GPU-8-4-4-4-12", as nvidia-smi prints it */
    int ordinal;   /* in this process's view (CUDA_VISIBLE_DEVICES) */
    int multiprocessors;
    int hopper; /* cuda_prefill_hopper(): chosen once; there is product() */
    int mps;    /* 1: this process is a client of an MPS server, 0: not (time-sliced) */
    uint64_t bytes_total;
    uint64_t context_bytes; /* device memory that the context took: free before less free after */
};

enum gpu_priority { GPU_PRIORITY_NORMAL, GPU_PRIORITY_HIGH };

struct gpu_api {
    uint32_t version; /* GPU_API_VERSION */

    /* ---- devices ---- */
    /* `device`: "cuda", "cuda:N" or a UUID "GPU-...". -ENODEV with the reason: no driver, no such device, not
     * visible (CUDA_VISIBLE_DEVICES), compute mode that forbids it, too old. */
    int (*open)(const char *device, struct gpu **ret_gpu, struct err *err);
    void (*close)(struct gpu **gpu); /* synchronises first; memory and streams must be freed before */
    const struct gpu_info *(*info)(const struct gpu *gpu);
    /* Device memory that is free on the card now, all processes counted. */
    int (*memory_free)(struct gpu *gpu, uint64_t *ret_bytes);
    /* The first asynchronous error of the context, as text; 0 while it is sound. After an error the context
     * is lost: log, exit. */
    int (*check)(struct gpu *gpu, struct err *err);

    /* ---- memory ---- */
    int (*alloc)(struct gpu *gpu, uint64_t bytes, void **ret_at, struct err *err); /* 256-byte aligned */
    void (*free)(struct gpu *gpu, void *at);
    /* Pinned host memory of this process, mapped: ret_device is its address for kernels. */
    int (*alloc_host)(struct gpu *gpu, uint64_t bytes, void **ret_host, void **ret_device, struct err *err);
    void (*free_host)(struct gpu *gpu, void *host);
    /* Registers memory that is mapped here already (a memfd): populated pages are pinned. Page aligned. */
    int (*host_register)(struct gpu *gpu, void *at, uint64_t bytes, void **ret_device, struct err *err);
    void (*host_unregister)(struct gpu *gpu, void *at);
    /* alloc()ed memory, best of gpu_export_bytes(), for another process on this host: handle
     * [GPU_IPC_BYTES]. Importers open each handle once. Memory lives until it is freed here and closed
     * there. */
    int (*ipc_export)(struct gpu *gpu, void *at, uint8_t *handle, struct err *err);
    int (*ipc_open)(struct gpu *gpu, const uint8_t *handle, void **ret_at, struct err *err);
    void (*ipc_close)(struct gpu *gpu, void *at);

    /* ---- streams ---- */
    int (*stream_create)(struct gpu *gpu, enum gpu_priority priority, struct CUstream_st **ret_stream,
                         struct err *err);
    void (*stream_free)(struct gpu *gpu, struct CUstream_st **stream);
    /* What is queued on `stream` from here on waits for what is queued on `after` now. Where `after` is being
     * captured `stream` is from here on too, until that capture ends: by then the captured stream must have
     * followed all that was queued on it. */
    int (*stream_follow)(struct gpu *gpu, struct CUstream_st *stream, struct CUstream_st *after);
    int (*stream_sync)(struct CUstream_st *stream); /* blocks; -EIO: see check() */
    int (*stream_done)(struct CUstream_st *stream); /* 1: all work is done, 0: not yet, -EIO */
    int (*copy)(void *to, const void *from, size_t bytes, struct CUstream_st *stream); /* any direction */
    /* `rows` rows of `bytes` each, `stride` bytes apart at both ends. */
    int (*copy_rows)(void *to, const void *from, size_t bytes, size_t stride, size_t rows,
                     struct CUstream_st *stream);
    int (*fill)(void *to, uint8_t byte, size_t bytes, struct CUstream_st *stream); /* device memory */
    /* Calls call(arg) on a thread of the library when the stream comes to it; it must not call this table and
     * must be short. Not inside a capture. */
    int (*host_call)(struct CUstream_st *stream, void (*call)(void *), void *arg);
    int (*event_create)(struct gpu *gpu, struct gpu_event **ret_event, struct err *err); /* takes times */
    void (*event_free)(struct gpu_event **event);
    int (*event_record)(struct gpu_event *event, struct CUstream_st *stream);
    int (*event_elapsed)(struct gpu_event *from, struct gpu_event *to, float *ret_ms); /* both done */

    /* ---- flags ---- `flag`: device address (host_register, alloc_host or alloc). */
    int (*flag_write)(uint32_t *flag, uint32_t value, struct CUstream_st *stream);
    /* Goes on when (int32_t)(*flag - value) >= 0. What was written before the flag is seen after. */
    int (*flag_wait)(uint32_t *flag, uint32_t value, struct CUstream_st *stream);

    /* ---- graphs ---- Work queued on `stream` between begin and end is kept, not done. flag_wait and
     * flag_write inside count up: their values are given anew at each launch, in the order of capture. */
    int (*capture_begin)(struct CUstream_st *stream, struct err *err);
    int (*capture_end)(struct gpu *gpu, struct CUstream_st *stream, struct gpu_graph **ret_graph,
                       struct err *err);
    uint32_t (*graph_flags)(const struct gpu_graph *graph); /* number of flag operations captured */
    int (*graph_launch)(struct gpu_graph *graph, const uint32_t *values, struct CUstream_st *stream);
    /* Sets values ahead of a launch with the same ones, which then takes less time: each is a call. */
    int (*graph_set)(struct gpu_graph *graph, const uint32_t *values);
    void (*graph_free)(struct gpu_graph **graph);

    /* ---- products ---- the device's cuBLASLt handle and workspace are the gpu's own. Plans are kept by
     * (rows, cols, n, out_type, bias, accumulate): made at the first use, which must not be inside a capture
     * (call matmul_prepare for each shape before). out [n][rows] f32 or bf16 = w [rows][cols] bf16 times
     * x [n][cols] bf16 (+ bias) (+ out). With out f32 n <= 32 goes through cuda_product on Hopper, n <= 2
     * through cuda_gemv elsewhere. */
    int (*matmul_prepare)(struct gpu *gpu, const struct cuda_matmul_shape *shape, struct err *err);
    int (*matmul)(struct gpu *gpu, const struct cuda_matmul_shape *shape, const struct cuda_matmul *matmul,
                  struct CUstream_st *stream);
    uint64_t (*library_bytes)(const struct gpu *gpu); /* workspace and what the libraries took */

    /* Products of few tokens with what surrounds them in a layer (products.h), on Hopper. */
    int (*product)(const struct cuda_product *, struct CUstream_st *);
    uint32_t (*product_blocks)(uint32_t rows);

    /* ---- kernels ---- compute/cuda/kernels.h and sets.h say what each does. */
    int (*embed)(const struct cuda_embed *, struct CUstream_st *);
    int (*mix)(const struct cuda_mix *, struct CUstream_st *);
    int (*rmsnorm)(const struct cuda_rmsnorm *, struct CUstream_st *);
    int (*headnorm)(const struct cuda_headnorm *, struct CUstream_st *);
    int (*swiglu)(const struct cuda_swiglu *, struct CUstream_st *);
    int (*narrow)(void *out, enum dtype out_type, const float *x, uint64_t count, struct CUstream_st *);
    int (*put_rows)(const struct cuda_put_rows *, struct CUstream_st *);
    int (*rope_angles)(const struct cuda_rope_angles *, struct CUstream_st *);
    int (*rope)(const struct cuda_rope *, struct CUstream_st *);
    int (*rope_write)(const struct cuda_rope *, const struct cuda_kv_write *, struct CUstream_st *);
    int (*gather)(const struct cuda_moves *, struct CUstream_st *);
    int (*scatter)(const struct cuda_moves *, struct CUstream_st *);
    int (*copy_pieces)(const struct cuda_copies *, struct CUstream_st *);
    int (*copy_mapped)(const struct cuda_mapped_copy *, uint32_t count, struct CUstream_st *);
    size_t (*attn_work_bytes)(uint32_t n, uint32_t q_heads, uint32_t head_dim, uint32_t list_max);
    int (*attn)(const struct cuda_attn *, struct CUstream_st *);
    int (*prefill)(const struct cuda_prefill *, struct CUstream_st *);
    int (*keys_append)(const struct cuda_keys_append *, struct CUstream_st *);
    size_t (*retrieval_work_bytes)(uint32_t n, uint32_t q_heads, uint32_t count_max);
    int (*retrieval)(const struct cuda_retrieval *, struct CUstream_st *);
    int (*topk)(const struct cuda_topk *, struct CUstream_st *);
    int (*sets_mark)(const struct cuda_sets_mark *, struct CUstream_st *);
    int (*sets_changes)(const struct cuda_sets_changes *, struct CUstream_st *);
    int (*sample)(const struct cuda_sample *, struct CUstream_st *);
    int (*penalties)(const struct cuda_penalties *, struct CUstream_st *);
};

/* Loads the library once a process; the table stays. -ENOENT or -EPROTO (another version) with the path. */
int gpu_load(const struct gpu_api **ret_api, struct err *err);

/* Whether a device's name means a GPU: "cuda", "cuda:N" with up to four digits, "GPU-...". */
int gpu_named(const char *device);

/* Whether the keys of a retriever there have 8 bits. */
static inline int gpu_keys_int8(enum compute_keys keys, const char *device)
{
    return keys == COMPUTE_KEYS_INT8 || (keys == COMPUTE_KEYS_AUTO && gpu_named(device));
}

#endif
