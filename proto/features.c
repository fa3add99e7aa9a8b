/* Layout of the feature segment: sizes and the check of its header. Pure, any thread. */
#include "proto/features.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(struct features_header) <= FEATURES_ROWS_AT, "the header lies before the rows");

uint32_t features_rows(uint32_t chunk)
{
    return FEATURES_STEPS * LIMIT_SEQUENCES + FEATURES_CHUNKS * chunk;
}

uint64_t features_bytes(uint32_t chunk, uint32_t layers, uint32_t hidden, enum dtype type)
{
    return (uint64_t)features_rows(chunk) * dtype_row_bytes(type, layers * hidden);
}

static uint64_t checksum(const struct features_header *h)
{
    return hash_bytes(0, h, offsetof(struct features_header, checksum)).lo;
}

/* What follows from rows, type, form and layers. */
static void derive(struct features_header *h)
{
    h->magic = FEATURES_MAGIC;
    h->version = FEATURES_VERSION;
    h->header_bytes = sizeof *h;
    h->row_bytes = dtype_row_bytes((enum dtype)h->type, h->layers * h->hidden);
    h->rows_at = h->form == FEATURES_HOST ? FEATURES_ROWS_AT : 0;
    uint64_t end = h->rows_at + h->rows * h->row_bytes;
    h->total_bytes = h->form == FEATURES_HOST
                         ? (end + FEATURES_ROWS_AT - 1) / FEATURES_ROWS_AT * FEATURES_ROWS_AT
                         : FEATURES_ROWS_AT;
    h->checksum = checksum(h);
}

void features_header_init(struct features_header *h, const struct features_params *p)
{
    memset(h, 0, sizeof *h);
    h->decoder_epoch = p->decoder_epoch;
    h->retriever_epoch = p->retriever_epoch;
    h->rows = features_rows(p->chunk);
    h->type = p->type;
    h->form = p->form;
    h->layers = p->wanted->layers;
    h->hidden = p->wanted->hidden;
    memcpy(h->layer, p->wanted->layer, sizeof h->layer);
    if (p->form == FEATURES_CUDA) {
        snprintf(h->uuid, sizeof h->uuid, "%s", p->uuid);
        memcpy(h->handle, p->handle, sizeof h->handle);
    }
    derive(h);
}

static int differ(const char *what, uint64_t found, uint64_t expected, struct err *err)
{
    return err_set(err, -EPROTO, "feature segment: %s: found %" PRIu64 ", expected %" PRIu64, what, found,
                   expected);
}

/* Epochs, and what the head reads. */
static int check_peer(const struct features_header *h, const struct features_params *p, struct err *err)
{
    const struct {
        const char *what;
        uint64_t found, expected;
    } same[] = {{"decoder epoch", h->decoder_epoch, p->decoder_epoch},
                {"retriever epoch", h->retriever_epoch, p->retriever_epoch},
                {"layers", h->layers, p->wanted->layers},
                {"hidden", h->hidden, p->wanted->hidden}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (same[i].found != same[i].expected)
            return differ(same[i].what, same[i].found, same[i].expected, err);
    for (uint32_t i = 0; i < LIMIT_FEATURE_LAYERS; i++)
        if (h->layer[i] != p->wanted->layer[i])
            return differ("layer", h->layer[i], p->wanted->layer[i], err);
    return 0;
}

int features_header_check(const struct features_header *h, const struct features_params *p,
                          uint64_t file_bytes, struct err *err)
{
    if (file_bytes < FEATURES_ROWS_AT)
        return err_set(err, -EINVAL, "feature segment: length: found %" PRIu64 " bytes, expected at least %d",
                       file_bytes, FEATURES_ROWS_AT);
    if (h->magic != FEATURES_MAGIC || h->version != FEATURES_VERSION || h->header_bytes != sizeof *h)
        return err_set(err, -EPROTO,
                       "feature segment: found magic %016" PRIx64 " version %" PRIu32 ", expected %016" PRIx64
                       " version %u",
                       h->magic, h->version, FEATURES_MAGIC, FEATURES_VERSION);
    int r = check_peer(h, p, err);
    if (r < 0)
        return r;
    if (h->form > FEATURES_CUDA || h->uuid[CONTROL_UUID_BYTES - 1])
        return err_set(err, -EPROTO,
                       "feature segment: form: found %" PRIu32 ", expected 0 (host) or 1 (CUDA)", h->form);
    if (h->type != DTYPE_F32 && h->type != DTYPE_BF16)
        return err_set(err, -EPROTO, "feature segment: type: found %" PRIu32 ", expected F32 or BF16",
                       h->type);
    if (h->rows == 0 || h->rows > features_rows(LIMIT_STEP_TOKENS))
        return err_set(err, -EINVAL, "feature segment: rows: found %" PRIu32 ", expected 1 to %" PRIu32,
                       h->rows, features_rows(LIMIT_STEP_TOKENS));
    struct features_header want = *h;
    derive(&want);
    if (memcmp(&want, h, offsetof(struct features_header, pad1)))
        return err_set(err, -EPROTO,
                       "feature segment: header: found %" PRIu64 " bytes and checksum %016" PRIx64
                       ", expected %" PRIu64 " and %016" PRIx64,
                       h->total_bytes, h->checksum, want.total_bytes, want.checksum);
    if (file_bytes < h->total_bytes)
        return err_set(err, -EINVAL, "feature segment: length: found %" PRIu64 " bytes, expected %" PRIu64,
                       file_bytes, h->total_bytes);
    return 0;
}
