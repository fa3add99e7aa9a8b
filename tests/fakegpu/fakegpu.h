/* A GPU that is none: compute/gpu.h on the CPU, for tests of everything that stands around the kernels.
 *
 * A stream is a thread with a queue, so work is as asynchronous as on a GPU and missing synchronisation
 * shows. Device memory is a memfd a piece, filled with 0xff at its begin (NaN); its IPC handle names
 * process and descriptor. Kernels are plain C, with the semantics that compute/cuda/kernels.h states;
 * addresses that no kernel could reach (host memory that is not registered) are errors of the context here
 * too.
 *
 * Environment: SPECONTEXT_FAKEGPU_BYTES memory of each of the two cards (default 2 GiB);
 * SPECONTEXT_FAKEGPU_CARD a name without dots: processes that have it in common share the cards' memory,
 * without it each has cards of its own; SPECONTEXT_FAKEGPU_FAIL=N: the Nth launch of this process, and all
 * after it, fails as a broken context does; SPECONTEXT_FAKEGPU_NO_GRAPHS: captures end with an error;
 * CUDA_VISIBLE_DEVICES as CUDA reads it. */
#ifndef TESTS_FAKEGPU_FAKEGPU_H
#define TESTS_FAKEGPU_FAKEGPU_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "compute/compute.h"
#include "compute/gpu.h"

enum { FAKEGPU_CARDS = 2, FAKEGPU_ARGUMENT_MAX = 384 };

enum fakegpu_kind { FAKEGPU_DEVICE, FAKEGPU_IMPORTED, FAKEGPU_PINNED, FAKEGPU_REGISTERED };

struct fakegpu_range {
    uint8_t *at;
    uint64_t bytes; /* as mapped */
    int fd;         /* DEVICE: of the memfd; else -1 */
    enum fakegpu_kind kind;
};

struct gpu {
    struct gpu_info info;
    int card; /* 0 .. FAKEGPU_CARDS - 1, whatever is visible */
    int context_fd;
    uint64_t context_bytes;
    pthread_mutex_t mutex; /* everything below */
    struct fakegpu_range *ranges;
    size_t range_count, range_capacity;
    struct cuda_matmul_shape *shapes; /* prepared */
    size_t shape_count;
    uint64_t bytes; /* of device memory that this process allocated */
    struct err error;
};

/* What the thread of a stream has for kernels. */
struct fakegpu_worker {
    struct compute *compute; /* one thread */
    void *scratch[4];
    size_t scratch_bytes[4];
};

/* One piece of work: run(worker, argument) on the stream's thread. The argument is a copy. */
struct fakegpu_op {
    void (*run)(struct fakegpu_worker *worker, void *argument);
    bool is_flag; /* argument: struct flag_argument */
    _Alignas(16) uint8_t argument[FAKEGPU_ARGUMENT_MAX];
};

/* memory.c */
int fakegpu_note(struct gpu *gpu, const struct fakegpu_range *range);
bool fakegpu_reaches(struct gpu *gpu, const void *at);
uint64_t fakegpu_used(struct gpu *gpu);
int fakegpu_take(struct gpu *gpu, uint64_t bytes, int *ret_fd, struct err *err);
int fakegpu_alloc(struct gpu *gpu, uint64_t bytes, void **ret_at, struct err *err);
void fakegpu_free(struct gpu *gpu, void *at);
int fakegpu_alloc_host(struct gpu *gpu, uint64_t bytes, void **ret_host, void **ret_device, struct err *err);
void fakegpu_free_host(struct gpu *gpu, void *host);
int fakegpu_host_register(struct gpu *gpu, void *at, uint64_t bytes, void **ret_device, struct err *err);
void fakegpu_host_unregister(struct gpu *gpu, void *at);
int fakegpu_ipc_export(struct gpu *gpu, void *at, uint8_t *handle, struct err *err);
int fakegpu_ipc_open(struct gpu *gpu, const uint8_t *handle, void **ret_at, struct err *err);
void fakegpu_ipc_close(struct gpu *gpu, void *at);

/* device.c: the context's first error; launches fail from then on. */
void fakegpu_break(struct gpu *gpu, const char *format, ...) __attribute__((format(printf, 2, 3)));
int fakegpu_sound(struct gpu *gpu); /* 0 or -EIO */

/* stream.c */
int fakegpu_stream_create(struct gpu *gpu, enum gpu_priority priority, struct CUstream_st **ret_stream,
                          struct err *err);
void fakegpu_stream_free(struct gpu *gpu, struct CUstream_st **stream);
int fakegpu_stream_follow(struct gpu *gpu, struct CUstream_st *stream, struct CUstream_st *after);
int fakegpu_stream_sync(struct CUstream_st *stream);
int fakegpu_stream_done(struct CUstream_st *stream);
int fakegpu_copy(void *to, const void *from, size_t bytes, struct CUstream_st *stream);
int fakegpu_copy_rows(void *to, const void *from, size_t bytes, size_t stride, size_t rows,
                      struct CUstream_st *stream);
int fakegpu_fill(void *to, uint8_t byte, size_t bytes, struct CUstream_st *stream);
int fakegpu_host_call(struct CUstream_st *stream, void (*call)(void *), void *arg);
int fakegpu_event_create(struct gpu *gpu, struct gpu_event **ret_event, struct err *err);
void fakegpu_event_free(struct gpu_event **event);
int fakegpu_event_record(struct gpu_event *event, struct CUstream_st *stream);
int fakegpu_event_elapsed(struct gpu_event *from, struct gpu_event *to, float *ret_ms);
int fakegpu_flag_write(uint32_t *flag, uint32_t value, struct CUstream_st *stream);
int fakegpu_flag_wait(uint32_t *flag, uint32_t value, struct CUstream_st *stream);
int fakegpu_capture_begin(struct CUstream_st *stream, struct err *err);
int fakegpu_capture_end(struct gpu *gpu, struct CUstream_st *stream, struct gpu_graph **ret_graph,
                        struct err *err);
uint32_t fakegpu_graph_flags(const struct gpu_graph *graph);
int fakegpu_graph_launch(struct gpu_graph *graph, const uint32_t *values, struct CUstream_st *stream);
int fakegpu_graph_set(struct gpu_graph *graph, const uint32_t *values);
void fakegpu_graph_free(struct gpu_graph **graph);
bool fakegpu_capturing(const struct CUstream_st *stream);

/* Queues work. `reaches`: addresses that must be the device's, NULL ones apart. */
int fakegpu_queue(struct CUstream_st *stream, void (*run)(struct fakegpu_worker *, void *),
                  const void *argument, size_t bytes, const void *const *reaches, int count);

#define FAKEGPU_LAUNCH(stream, run, argument, ...)                                               \
    fakegpu_queue(stream, run, argument, sizeof *(argument), (const void *const[]){__VA_ARGS__}, \
                  (int)(sizeof((const void *const[]){__VA_ARGS__}) / sizeof(void *)))

/* Memory of the worker, kept and grown: index 0 .. 3. */
void *fakegpu_scratch(struct fakegpu_worker *worker, int index, size_t bytes);

/* pieces.c: byte offset of a piece from the view's base, in range whatever the tables say. */
uint64_t fakegpu_piece(const struct cuda_kv_view *kv, const uint64_t *at, uint32_t head, uint32_t item,
                       bool *ret_valid);
bool fakegpu_view_is_valid(const struct cuda_kv_view *kv);

/* Kernels, as in struct gpu_api. */
int fakegpu_matmul_prepare(struct gpu *gpu, const struct cuda_matmul_shape *shape, struct err *err);
int fakegpu_matmul(struct gpu *gpu, const struct cuda_matmul_shape *shape, const struct cuda_matmul *matmul,
                   struct CUstream_st *stream);
int fakegpu_product(const struct cuda_product *p, struct CUstream_st *stream);
uint32_t fakegpu_product_blocks(uint32_t rows);
int fakegpu_embed(const struct cuda_embed *, struct CUstream_st *);
int fakegpu_mix(const struct cuda_mix *, struct CUstream_st *);
int fakegpu_rmsnorm(const struct cuda_rmsnorm *, struct CUstream_st *);
int fakegpu_headnorm(const struct cuda_headnorm *, struct CUstream_st *);
int fakegpu_swiglu(const struct cuda_swiglu *, struct CUstream_st *);
int fakegpu_narrow(void *out, enum dtype out_type, const float *x, uint64_t count, struct CUstream_st *);
int fakegpu_put_rows(const struct cuda_put_rows *, struct CUstream_st *);
int fakegpu_rope_angles(const struct cuda_rope_angles *, struct CUstream_st *);
int fakegpu_rope(const struct cuda_rope *, struct CUstream_st *);
int fakegpu_rope_write(const struct cuda_rope *, const struct cuda_kv_write *, struct CUstream_st *);
int fakegpu_gather(const struct cuda_moves *, struct CUstream_st *);
int fakegpu_scatter(const struct cuda_moves *, struct CUstream_st *);
int fakegpu_copy_pieces(const struct cuda_copies *, struct CUstream_st *);
int fakegpu_copy_mapped(const struct cuda_mapped_copy *, uint32_t count, struct CUstream_st *);
size_t fakegpu_attn_work_bytes(uint32_t n, uint32_t q_heads, uint32_t head_dim, uint32_t list_max);
int fakegpu_attn(const struct cuda_attn *, struct CUstream_st *);
int fakegpu_prefill(const struct cuda_prefill *, struct CUstream_st *);
int fakegpu_keys_append(const struct cuda_keys_append *, struct CUstream_st *);
size_t fakegpu_retrieval_work_bytes(uint32_t n, uint32_t q_heads, uint32_t count_max);
int fakegpu_retrieval(const struct cuda_retrieval *, struct CUstream_st *);
int fakegpu_topk(const struct cuda_topk *, struct CUstream_st *);
int fakegpu_sets_mark(const struct cuda_sets_mark *, struct CUstream_st *);
int fakegpu_sets_changes(const struct cuda_sets_changes *, struct CUstream_st *);
int fakegpu_sample(const struct cuda_sample *, struct CUstream_st *);
int fakegpu_penalties(const struct cuda_penalties *, struct CUstream_st *);

static inline bool fakegpu_is_16bit(enum dtype type)
{
    return type == DTYPE_F16 || type == DTYPE_BF16;
}

static inline bool fakegpu_is_output(enum dtype type)
{
    return type == DTYPE_F32 || type == DTYPE_BF16;
}

static inline bool fakegpu_aligned(const void *p, uintptr_t bytes)
{
    return ((uintptr_t)p & (bytes - 1)) == 0;
}

/* Stores x [count] from element `at` on, rounded to the type (f32, bf16, f16). */
void fakegpu_store(void *out, enum dtype type, uint64_t at, const float *x, uint64_t count);
/* count elements of f32, bf16 or f16 from element `at` on. */
void fakegpu_load(float *out, const void *from, enum dtype type, uint64_t at, uint64_t count);

#endif
