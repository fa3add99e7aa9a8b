/* The feature segment's writer; see export.h. Owner: the device thread. State: for each row the last message
 * that names it, and how many messages there were. Numbers are counted in 64 bits here, in 32 in messages and
 * in the flag: the retriever is never far behind, since rows that it has not read are not written again. */
#include "decoder/export.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "link/flag.h"
#include "link/segment.h"

#define SPIN_NS (20 * INT64_C(1000))

struct export
{
    struct export_options options;
    struct segment segment;
    struct features_header made;    /* what the header says; the one in the segment is the peer's to spoil */
    struct features_header *header; /* in the segment: the flag */
    uint64_t *named;                /* [rows] message that reads the row last; 0: none */
    uint64_t messages;
    uint32_t chunk; /* whose rows come next */
    uint8_t *rows;  /* the first; on a GPU its address there */
    void *memory;   /* rows on our GPU */
    int registered; /* the segment is known to our GPU */
    struct export_figures figures;
};

static enum dtype type_of(const struct export_options *o)
{
    return o->device || gpu_named(o->reader) ? DTYPE_BF16 : DTYPE_F32;
}

static int on_same_gpu(const struct export_options *o)
{
    return o->device && !strcmp(o->device->api->info(o->device->gpu)->uuid, o->reader);
}

static int make_gpu_rows(struct export *x, struct features_params *params, uint8_t *handle, struct err *err)
{
    struct gpu_device *d = x->options.device;
    int r = gpu_device_alloc(d, GPU_DEVICE_FEATURES, x->figures.bytes, &x->memory, err);
    if (r == 0)
        r = d->api->ipc_export(d->gpu, x->memory, handle, err);
    params->form = FEATURES_CUDA;
    params->uuid = d->api->info(d->gpu)->uuid;
    params->handle = handle;
    x->rows = x->memory;
    return r;
}

/* Rows in the segment, which kernels reach on a GPU. */
static int find_host_rows(struct export *x, struct err *err)
{
    struct gpu_device *d = x->options.device;
    void *at = x->segment.at;
    int r = d ? d->api->host_register(d->gpu, x->segment.at, x->segment.bytes, &at, err) : 0;
    x->registered = d && r == 0;
    x->rows = (uint8_t *)at + x->made.rows_at;
    return r;
}

static int make(struct export *x, struct err *err)
{
    const struct export_options *o = &x->options;
    struct features_params params = {.decoder_epoch = o->decoder_epoch,
                                     .retriever_epoch = o->retriever_epoch,
                                     .wanted = &o->wanted,
                                     .chunk = o->chunk,
                                     .type = type_of(o),
                                     .form = FEATURES_HOST};
    uint8_t handle[GPU_IPC_BYTES];
    int r = on_same_gpu(o) ? make_gpu_rows(x, &params, handle, err) : 0;
    if (r < 0)
        return r;
    features_header_init(&x->made, &params);
    r = segment_create("specontext-features", x->made.total_bytes, &x->segment, err);
    if (r < 0)
        return r;
    x->header = x->segment.at;
    memcpy(x->header, &x->made, sizeof x->made);
    return x->made.form == FEATURES_HOST ? find_host_rows(x, err) : 0;
}

int export_create(const struct export_options *options, struct export **ret_export, struct err *err)
{
    struct export *x = mem_alloc(1, sizeof *x);
    x->options = *options;
    x->segment.fd = -1;
    x->figures = (struct export_figures){.rows = features_rows(options->chunk),
                                         .bytes = features_bytes(options->chunk, options->wanted.layers,
                                                                 options->wanted.hidden, type_of(options)),
                                         .on_gpu = on_same_gpu(options)};
    x->named = mem_alloc(x->figures.rows, sizeof *x->named);
    int r = make(x, err);
    if (r < 0) {
        export_free(&x);
        return err_prefix(err, r, "feature segment");
    }
    *ret_export = x;
    return 0;
}

void export_free(struct export **export)
{
    struct export *x = *export;
    if (!x)
        return;
    struct gpu_device *d = x->options.device;
    if (x->registered)
        d->api->host_unregister(d->gpu, x->segment.at);
    if (x->memory)
        gpu_device_release(d, GPU_DEVICE_FEATURES, x->figures.bytes, x->memory);
    segment_close(&x->segment);
    mem_free(&x->named);
    mem_free(export);
}

int export_fd(const struct export *x)
{
    return x->segment.fd;
}

/* ---- rows ---- */

uint32_t export_chunk(struct export *x, uint32_t count)
{
    CHECK(count <= x->options.chunk);
    x->chunk = (x->chunk + 1) % FEATURES_CHUNKS;
    return FEATURES_STEPS * LIMIT_SEQUENCES + x->chunk * x->options.chunk;
}

uint32_t export_step(const struct export *x, uint32_t index, uint32_t position)
{
    (void)x;
    CHECK(index < LIMIT_SEQUENCES);
    return position % FEATURES_STEPS * LIMIT_SEQUENCES + index;
}

uint32_t export_message(struct export *x)
{
    return (uint32_t)++x->messages;
}

void export_named(struct export *x, uint32_t row, uint32_t count)
{
    CHECK(row <= x->figures.rows && count <= x->figures.rows - row);
    for (uint32_t i = 0; i < count; i++)
        x->named[row + i] = x->messages;
}

int export_claim(struct export *x, uint32_t row, uint32_t count, struct err *err)
{
    uint64_t last = 0;
    CHECK(row <= x->figures.rows && count <= x->figures.rows - row);
    for (uint32_t i = 0; i < count; i++)
        last = x->named[row + i] > last ? x->named[row + i] : last;
    if (last == 0)
        return 0;
    /* Cyclically behind the newest message by as many as are outstanding. */
    uint32_t read = atomic_load_explicit(&x->header->read.value, memory_order_acquire);
    if (x->messages - last >= (uint32_t)((uint32_t)x->messages - read))
        return 0;
    int64_t begin = clock_now_ns();
    int r = flag_wait(&x->header->read, (uint32_t)last, begin + EXPORT_WAIT_S * CLOCK_S, SPIN_NS);
    x->figures.wait_ns += clock_now_ns() - begin;
    x->figures.waits++;
    if (r == -ECANCELED)
        return err_set(err, r,
                       "a step was broken off while it waited for the retriever to read hidden states");
    if (r < 0)
        return err_set(err, r, "retriever did not read the hidden states of message %" PRIu64 " within %d s",
                       last, EXPORT_WAIT_S);
    return 0;
}

/* ---- writing ---- */

/* Byte offset of a layer's part of a row; 0: it is wanted. */
static int part_of(const struct export *x, uint32_t layer, size_t *ret)
{
    const struct layout_features *w = &x->options.wanted;
    for (uint32_t i = 0; i < w->layers; i++)
        if (w->layer[i] == layer) {
            *ret = dtype_row_bytes((enum dtype)x->made.type, i * w->hidden);
            return 0;
        }
    return -ENOENT;
}

void export_write(const struct export *x, uint32_t layer, const float *from, const uint32_t *rows, uint32_t n)
{
    size_t part, hidden = x->options.wanted.hidden;
    if (part_of(x, layer, &part) < 0)
        return;
    for (uint32_t t = 0; t < n; t++) {
        if (rows[t] == EXPORT_NONE)
            continue;
        CHECK(rows[t] < x->figures.rows);
        uint8_t *to = x->rows + rows[t] * x->made.row_bytes + part;
        if (x->made.type == DTYPE_F32)
            memcpy(to, from + t * hidden, hidden * sizeof *from);
        else
            for (size_t i = 0; i < hidden; i++)
                ((uint16_t *)to)[i] = dtype_f32_to_bf16(from[t * hidden + i]);
    }
}

int export_queue(const struct export *x, uint32_t layer, const float *from, const uint32_t *rows, uint32_t n)
{
    struct gpu_device *d = x->options.device;
    size_t part;
    if (part_of(x, layer, &part) < 0)
        return 0;
    struct cuda_put_rows put = {.out = x->rows + part,
                                .stride = x->made.row_bytes / sizeof(uint16_t),
                                .x = from,
                                .rows = rows,
                                .row_count = x->figures.rows,
                                .n = n,
                                .dim = x->options.wanted.hidden};
    return d->api->put_rows(&put, d->stream);
}

void export_figures(const struct export *x, struct export_figures *ret)
{
    *ret = x ? x->figures : (struct export_figures){0};
}
