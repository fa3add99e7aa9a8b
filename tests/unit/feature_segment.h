/* For tests of the retriever: a feature segment as a decoder makes it, and steps that name its rows. Header
 * only. Include retriever_rig.h first. */
#ifndef TESTS_UNIT_FEATURE_SEGMENT_H
#define TESTS_UNIT_FEATURE_SEGMENT_H

#include <fcntl.h>

#include "compute/gpu.h"
#include "link/segment.h"
#include "proto/features.h"
#include "retriever/rows.h"

enum { FEATURE_CHUNK = 256, FEATURE_DECODER = 71, FEATURE_RETRIEVER = 72 };

struct feature_segment {
    struct segment segment;
    struct features_header *header;
    uint8_t *rows;
    const struct gpu_api *api; /* rows on the double of a GPU; NULL: in the segment */
    struct gpu *gpu;
    uint32_t row; /* next one to be used */
    uint32_t reading;
};

/* `api`: rows lie on the double's card `device`, whose memory the CPU reaches too. */
static inline void feature_segment_make(struct feature_segment *f, const struct head *head, enum dtype type,
                                        const struct gpu_api *api, const char *device)
{
    struct layout_features wanted = rows_features(head_config(head));
    struct features_params params = {.decoder_epoch = FEATURE_DECODER,
                                     .retriever_epoch = FEATURE_RETRIEVER,
                                     .wanted = &wanted,
                                     .chunk = FEATURE_CHUNK,
                                     .type = type};
    struct features_header header;
    struct err err = {0};
    uint8_t handle[GPU_IPC_BYTES];
    void *at = NULL;
    *f = (struct feature_segment){.api = api};
    if (api) {
        uint64_t bytes = features_bytes(FEATURE_CHUNK, wanted.layers, wanted.hidden, type);
        if (api->open(device, &f->gpu, &err) < 0 || api->alloc(f->gpu, bytes, &at, &err) < 0 ||
            api->ipc_export(f->gpu, at, handle, &err) < 0)
            fail_msg("%s", err.text);
        params.form = FEATURES_CUDA;
        params.uuid = api->info(f->gpu)->uuid;
        params.handle = handle;
    }
    features_header_init(&header, &params);
    if (segment_create("test-features", header.total_bytes, &f->segment, &err) < 0)
        fail_msg("%s", err.text);
    f->header = f->segment.at;
    memcpy(f->header, &header, sizeof header);
    f->rows = api ? at : (uint8_t *)f->segment.at + header.rows_at;
}

static inline void feature_segment_free(struct feature_segment *f)
{
    if (f->api) {
        f->api->free(f->gpu, f->rows);
        f->api->close(&f->gpu);
    }
    segment_close(&f->segment);
}

static inline int feature_segment_fd(const struct feature_segment *f)
{
    int fd = fcntl(f->segment.fd, F_DUPFD_CLOEXEC, 0);
    assert_true(fd >= 0);
    return fd;
}

static inline void feature_segment_give(const struct feature_segment *f, struct selector *s)
{
    struct selector_peers peers = {FEATURE_DECODER, FEATURE_RETRIEVER};
    struct err err = {0};
    if (selector_take_features(s, feature_segment_fd(f), &peers, &err) < 0)
        fail_msg("%s", err.text);
}

/* Writes hidden states [count][row] into rows that follow one another; returns the first. */
static inline uint32_t feature_segment_put(struct feature_segment *f, const float *hidden, uint32_t count)
{
    const struct features_header *h = f->header;
    uint32_t width = h->layers * h->hidden;
    if (count > h->rows - f->row)
        f->row = 0;
    assert_true(count <= h->rows);
    for (size_t i = 0; i < (size_t)count * width; i++)
        if (h->type == DTYPE_F32)
            ((float *)(f->rows + f->row * h->row_bytes))[i] = hidden[i];
        else
            ((uint16_t *)(f->rows + f->row * h->row_bytes))[i] = dtype_f32_to_bf16(hidden[i]);
    f->row += count;
    return f->row - count;
}

/* The entry's rows, of the sequence's hidden states from position 0 on. */
static inline uint32_t feature_segment_entry(struct feature_segment *f, const struct msg_step_entry *e,
                                             const float *hidden)
{
    uint32_t width = f->header->layers * f->header->hidden, first = e->position ? e->position - 1 : 0;
    return feature_segment_put(f, hidden + (size_t)first * width, e->count - (e->position == 0));
}

#endif
