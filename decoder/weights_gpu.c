/* Weights on a GPU; see weights_gpu.h.
 *
 * Rows go through one pinned buffer: bf16 ones as they are; of other types the CPU makes f32 (by the
 * embedding operator, which expands rows exactly) and the GPU rounds. The buffer is filled again when the
 * stream has taken what was in it: expanding is what takes the time, the copy a tenth of it. */
#include "decoder/weights_gpu.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/pool.h"
#include "compute/compute.h"

enum { STAGE_BYTES = 16 << 20, ALIGN = 256, PIECES = 32 };

/* Cuts the one allocation; with base NULL it only counts. */
struct cutter {
    uint8_t *base;
    uint64_t at;
};

static const void *cut(struct cutter *c, uint64_t bytes)
{
    const void *here = c->base ? c->base + c->at : NULL;
    c->at += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return here;
}

static const void *cut_matrix(struct cutter *c, uint64_t rows, uint64_t cols)
{
    return cut(c, rows * cols * sizeof(uint16_t));
}

static void cut_layer(struct cutter *c, const struct model_config *m, struct weights_gpu_layer *to)
{
    uint64_t q = (uint64_t)m->q_heads * m->head_dim, all = q + 2 * (uint64_t)m->kv_heads * m->head_dim;
    to->attn_norm = cut(c, m->hidden * sizeof(float));
    to->qkv = cut_matrix(c, all, m->hidden);
    to->qkv_bias = m->qkv_bias ? cut(c, all * sizeof(float)) : NULL;
    to->q_norm = m->qk_norm ? cut(c, m->head_dim * sizeof(float)) : NULL;
    to->k_norm = m->qk_norm ? cut(c, m->head_dim * sizeof(float)) : NULL;
    to->wo = cut_matrix(c, m->hidden, q);
    to->ffn_norm = cut(c, m->hidden * sizeof(float));
    to->gate_up = cut_matrix(c, 2 * (uint64_t)m->ffn, m->hidden);
    to->down = cut_matrix(c, m->hidden, m->ffn);
}

static uint64_t cut_all(struct weights_gpu *w, const struct model_config *m, uint8_t *base)
{
    struct cutter c = {base, 0};
    w->embedding = cut_matrix(&c, m->vocab, m->hidden);
    w->output = m->tied ? w->embedding : cut_matrix(&c, m->vocab, m->hidden);
    w->output_norm = cut(&c, m->hidden * sizeof(float));
    w->inv_freq = cut(&c, (m->rope.dims / 2 + 1) * sizeof(float));
    for (uint32_t l = 0; l < m->layers; l++)
        cut_layer(&c, m, &w->layers[l]);
    return c.at;
}

struct upload {
    struct gpu_device *device;
    struct compute *compute;
    const atomic_int *stop;
    void *stage;    /* STAGE_BYTES, pinned */
    void *expanded; /* STAGE_BYTES on the device: f32 that waits for rounding */
    uint32_t *ids;  /* row numbers of one turn */
    uint32_t ids_max;
};

static int send(struct upload *u, const void *to, uint64_t bytes, struct err *err)
{
    const struct gpu_api *api = u->device->api;
    int r = api->copy((void *)to, u->stage, bytes, u->device->stream);
    if (r == 0)
        r = api->stream_sync(u->device->stream);
    return r < 0 ? gpu_device_error(u->device, r, "uploading weights", err) : 0;
}

static int put_vector(struct upload *u, const float *to, const float *from, uint64_t count, struct err *err)
{
    CHECK(count * sizeof *from <= STAGE_BYTES);
    memcpy(u->stage, from, count * sizeof *from);
    return send(u, to, count * sizeof *from, err);
}

struct copying {
    uint8_t *to;
    const uint8_t *from;
    uint64_t bytes;
};

static void copy_piece(void *arg, int index, int thread)
{
    const struct copying *c = arg;
    (void)thread;
    uint64_t begin = c->bytes * (uint64_t)index / PIECES, end = c->bytes * (uint64_t)(index + 1) / PIECES;
    memcpy(c->to + begin, c->from + begin, end - begin);
}

/* Rows that are bf16 already. */
static int put_plain(struct upload *u, const struct model_tensor *t, uint8_t *to, struct err *err)
{
    uint64_t all = (uint64_t)t->rows * t->cols * sizeof(uint16_t);
    for (uint64_t at = 0; at < all; at += STAGE_BYTES) {
        uint64_t bytes = all - at < STAGE_BYTES ? all - at : STAGE_BYTES;
        struct copying copying = {u->stage, (const uint8_t *)t->data + at, bytes};
        pool_run(compute_pool(u->compute), PIECES, copy_piece, &copying);
        int r = u->stop && *u->stop ? err_set(err, -ECANCELED, "loading was broken off")
                                    : send(u, to + at, bytes, err);
        if (r < 0)
            return r;
    }
    return 0;
}

static int put_matrix(struct upload *u, const struct model_tensor *t, const void *to_at, struct err *err)
{
    uint8_t *to = (uint8_t *)to_at;
    if (t->type == DTYPE_BF16)
        return put_plain(u, t, to, err);
    struct matrix m = {t->type, t->rows, t->cols, t->data};
    uint64_t row_bytes = t->cols * sizeof(float);
    uint32_t most = (uint32_t)(STAGE_BYTES / row_bytes);
    CHECK(most > 0);
    most = most < u->ids_max ? most : u->ids_max;
    for (uint32_t at = 0; at < t->rows; at += most) {
        uint32_t rows = t->rows - at < most ? t->rows - at : most;
        if (u->stop && *u->stop)
            return err_set(err, -ECANCELED, "loading was broken off");
        for (uint32_t i = 0; i < rows; i++)
            u->ids[i] = at + i;
        compute_embed(u->compute, u->stage, &m, u->ids, (int)rows);
        int r = send(u, u->expanded, rows * row_bytes, err);
        if (r < 0)
            return r;
        r = u->device->api->narrow(to + (uint64_t)at * t->cols * sizeof(uint16_t), DTYPE_BF16, u->expanded,
                                   (uint64_t)rows * t->cols, u->device->stream);
        if (r < 0)
            return gpu_device_error(u->device, r, "rounding weights", err);
    }
    return 0;
}

/* Several matrices of the same width, one below the other. */
static int put_stack(struct upload *u, const struct model_tensor *const *parts, int count, const void *to,
                     struct err *err)
{
    uint64_t at = 0;
    int r = 0;
    for (int i = 0; r == 0 && i < count; i++) {
        r = put_matrix(u, parts[i], (const uint8_t *)to + at, err);
        at += (uint64_t)parts[i]->rows * parts[i]->cols * sizeof(uint16_t);
    }
    return r;
}

static int put_layer(struct upload *u, const struct model_config *m, const struct model_layer *from,
                     const struct weights_gpu_layer *to, struct err *err)
{
    uint64_t q = (uint64_t)m->q_heads * m->head_dim, kv = (uint64_t)m->kv_heads * m->head_dim;
    const struct model_tensor *qkv[] = {&from->wq, &from->wk, &from->wv}, *both[] = {&from->gate, &from->up};
    int r = put_vector(u, to->attn_norm, from->attn_norm.data, m->hidden, err);
    if (r == 0)
        r = put_stack(u, qkv, 3, to->qkv, err);
    if (r == 0 && m->qkv_bias)
        r = put_vector(u, to->qkv_bias, from->q_bias.data, q, err);
    if (r == 0 && m->qkv_bias)
        r = put_vector(u, to->qkv_bias + q, from->k_bias.data, kv, err);
    if (r == 0 && m->qkv_bias)
        r = put_vector(u, to->qkv_bias + q + kv, from->v_bias.data, kv, err);
    if (r == 0 && m->qk_norm)
        r = put_vector(u, to->q_norm, from->q_norm.data, m->head_dim, err);
    if (r == 0 && m->qk_norm)
        r = put_vector(u, to->k_norm, from->k_norm.data, m->head_dim, err);
    if (r == 0)
        r = put_matrix(u, &from->wo, to->wo, err);
    if (r == 0)
        r = put_vector(u, to->ffn_norm, from->ffn_norm.data, m->hidden, err);
    if (r == 0)
        r = put_stack(u, both, 2, to->gate_up, err);
    return r < 0 ? r : put_matrix(u, &from->down, to->down, err);
}

static int put_all(struct upload *u, struct weights_gpu *w, const struct model *model, struct err *err)
{
    const struct model_config *m = model_config(model);
    const struct model_rope *rope = &m->rope;
    float *inv_freq = mem_alloc(rope->dims / 2 + 1, sizeof *inv_freq);
    int r = model_rope_frequencies(rope, inv_freq, &w->rope_scale);
    if (r < 0)
        err_set(err, r, "model: rotary frequencies: base %g, %u dimensions, factor %g make no sense",
                (double)rope->base, rope->dims, (double)rope->factor);
    else
        r = put_vector(u, w->inv_freq, inv_freq, rope->dims / 2, err);
    mem_free(&inv_freq);
    if (r == 0)
        r = put_matrix(u, model_token_embedding(model), w->embedding, err);
    if (r == 0 && !m->tied)
        r = put_matrix(u, model_output(model), w->output, err);
    if (r == 0)
        r = put_vector(u, w->output_norm, model_output_norm(model)->data, m->hidden, err);
    for (uint32_t l = 0; r == 0 && l < m->layers; l++)
        r = put_layer(u, m, &model_layers(model)[l], &w->layers[l], err);
    if (r == 0) {
        r = u->device->api->stream_sync(u->device->stream);
        r = r < 0 ? gpu_device_error(u->device, r, "uploading weights", err) : 0;
    }
    return r;
}

static int upload(struct weights_gpu *w, const struct model *model, int threads, const atomic_int *stop,
                  struct err *err)
{
    struct upload u = {.device = w->device, .stop = stop, .ids_max = 1 << 16};
    const struct gpu_api *api = w->device->api;
    void *stage_device;
    int r = compute_create("cpu", threads, COMPUTE_ISA_AUTO, &u.compute, err);
    if (r == 0)
        r = api->alloc_host(w->device->gpu, STAGE_BYTES, &u.stage, &stage_device, err);
    if (r == 0)
        r = api->alloc(w->device->gpu, STAGE_BYTES, &u.expanded, err);
    u.ids = mem_alloc(u.ids_max, sizeof *u.ids);
    if (r == 0)
        r = put_all(&u, w, model, err);
    api->stream_sync(w->device->stream); /* rounding may go on when something failed */
    if (u.expanded)
        api->free(w->device->gpu, u.expanded);
    if (u.stage)
        api->free_host(w->device->gpu, u.stage);
    mem_free(&u.ids);
    compute_free(&u.compute);
    return r;
}

int weights_gpu_create(struct gpu_device *device, const struct model *model, int threads,
                       const atomic_int *stop, struct weights_gpu **ret_weights, struct err *err)
{
    const struct model_config *m = model_config(model);
    struct weights_gpu *w = mem_alloc(1, sizeof *w);
    w->device = device;
    w->layers = mem_alloc(m->layers, sizeof *w->layers);
    w->bytes = cut_all(w, m, NULL);
    int r = gpu_device_alloc(device, GPU_DEVICE_WEIGHTS, w->bytes, &w->memory, err);
    if (r == 0) {
        cut_all(w, m, w->memory);
        r = upload(w, model, threads, stop, err);
    }
    if (r < 0) {
        weights_gpu_free(&w);
        return r;
    }
    *ret_weights = w;
    return 0;
}

void weights_gpu_free(struct weights_gpu **weights)
{
    struct weights_gpu *w = *weights;
    if (!w)
        return;
    gpu_device_release(w->device, GPU_DEVICE_WEIGHTS, w->bytes, w->memory);
    mem_free(&w->layers);
    mem_free(weights);
}
