/* The feature segment; see rows.h. Owner: the worker thread. The header is copied before it is checked:
 * nothing that is used later can change behind it. */
#include "retriever/rows.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "link/flag.h"
#include "link/segment.h"

_Static_assert(LIMIT_FEATURE_LAYERS == HEAD_FEATURE_LAYERS_MAX,
               "a head reads as many layers as a message has");

struct rows {
    struct segment segment;
    struct features_header header;
    const struct gpu_api *api;
    struct gpu *gpu;
    void *opened;     /* on our GPU, by handle */
    void *registered; /* the segment's address on our GPU */
    const uint8_t *at;
};

struct layout_features rows_features(const struct head_config *head)
{
    struct layout_features f = {.layers = head->feature_layer_count, .hidden = head->feature_hidden};
    memcpy(f.layer, head->feature_layers, f.layers * sizeof *f.layer);
    return f;
}

static int check(struct rows *r, const struct rows_wanted *w, uint64_t file_bytes, struct err *err)
{
    struct layout_features features = rows_features(w->head);
    struct features_params expected = {
        .decoder_epoch = w->decoder_epoch, .retriever_epoch = w->retriever_epoch, .wanted = &features};
    memcpy(&r->header, r->segment.at, sizeof r->header);
    int rc = features_header_check(&r->header, &expected, file_bytes, err);
    if (rc < 0)
        return rc;
    if (w->api && r->header.type != DTYPE_BF16)
        return err_set(err, -EPROTO, "feature segment: type: found %u, expected BF16 for a GPU",
                       r->header.type);
    if (r->header.form == FEATURES_CUDA &&
        (!w->api || strcmp(r->header.uuid, w->api->info(w->gpu)->uuid) != 0))
        return err_set(err, -EXDEV, "feature segment: found rows on GPU %.47s, expected them on %s",
                       r->header.uuid, w->api ? w->api->info(w->gpu)->uuid : "the host");
    return 0;
}

static int find_rows(struct rows *r, struct err *err)
{
    const struct features_header *h = &r->header;
    int rc = 0;
    r->at = (const uint8_t *)r->segment.at + h->rows_at;
    if (h->form == FEATURES_CUDA) {
        rc = r->api->ipc_open(r->gpu, h->handle, &r->opened, err);
        r->at = r->opened;
    } else if (r->api) {
        rc = r->api->host_register(r->gpu, r->segment.at, h->total_bytes, &r->registered, err);
        r->at = (const uint8_t *)r->registered + h->rows_at;
    }
    return rc < 0 ? err_prefix(err, rc, "feature segment") : 0;
}

int rows_open(int fd, const struct rows_wanted *w, struct rows **ret_rows, struct err *err)
{
    struct stat st;
    struct rows *r = mem_alloc(1, sizeof *r);
    r->segment.fd = -1;
    r->api = w->api;
    r->gpu = w->gpu;
    int rc = fstat(fd, &st) < 0 ? err_set(err, -errno, "feature segment: %s", strerror(errno)) : 0;
    if (rc == 0 && (uint64_t)st.st_size < FEATURES_ROWS_AT)
        rc = err_set(err, -EINVAL, "feature segment: length: found %lld bytes, expected at least %d",
                     (long long)st.st_size, FEATURES_ROWS_AT);
    if (rc == 0)
        rc = segment_map(fd, 0, &r->segment, err);
    if (rc < 0)
        close(fd); /* the segment has it otherwise */
    else
        rc = check(r, w, r->segment.bytes, err);
    if (rc == 0)
        rc = find_rows(r, err);
    if (rc < 0)
        rows_close(&r);
    else
        *ret_rows = r;
    return rc;
}

void rows_close(struct rows **rows)
{
    struct rows *r = *rows;
    if (!r)
        return;
    if (r->opened)
        r->api->ipc_close(r->gpu, r->opened);
    if (r->registered)
        r->api->host_unregister(r->gpu, r->segment.at);
    segment_close(&r->segment);
    mem_free(rows);
}

const uint8_t *rows_at(const struct rows *r)
{
    return r->at;
}

uint32_t rows_count(const struct rows *r)
{
    return r->header.rows;
}

enum dtype rows_type(const struct rows *r)
{
    return (enum dtype)r->header.type;
}

uint64_t rows_row_bytes(const struct rows *r)
{
    return r->header.row_bytes;
}

void rows_read(struct rows *r, uint32_t reading)
{
    flag_raise(&((struct features_header *)r->segment.at)->read, reading);
}
