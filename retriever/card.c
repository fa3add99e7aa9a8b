/* The head on a GPU: memory, weights, and from token ids to keys and queries; see card.h.
 *
 * Owner: the selector's thread. Everything goes through one stream, in order; pinned buffers are written
 * again only after card_rank or card_project has waited for it. */
#include "retriever/card.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/log.h"
#include "retriever/card_private.h"

enum { KEY_BYTES = sizeof(uint16_t), UPLOAD_ROWS = 512 };

_Static_assert(CUDA_KEYS_CHUNK == 512, "memory_gpu_retriever counts parts of this size");

void card_must(struct card *c, int rc, const char *what)
{
    struct err err = {0};
    if (rc >= 0)
        return;
    if (c->api->check(c->gpu, &err) == 0)
        err_set(&err, rc, "%s", strerror(-rc));
    log_error("GPU %s: %s: %s", c->api->info(c->gpu)->uuid, what, err.text);
    _exit(1); /* the context is lost, and with it what an orderly end would wait for */
}

static int check_options(const struct card_options *o, struct err *err)
{
    const struct head_config *h = head_config(o->head);
    if (h->head_dim != 64 && h->head_dim != 128)
        return err_set(err, -ENOTSUP, "%s: head_dim on a GPU: found %" PRIu32 ", expected 64 or 128",
                       head_path(o->head), h->head_dim);
    if (h->hidden % 8 || h->q_heads / h->kv_heads > CUDA_GROUP_MAX)
        return err_set(err, -ENOTSUP,
                       "%s: on a GPU: found hidden %" PRIu32 " and %" PRIu32
                       " query heads a KV head, expected "
                       "a multiple of 8 and at most %d",
                       head_path(o->head), h->hidden, h->q_heads / h->kv_heads, CUDA_GROUP_MAX);
    if (h->features == HEAD_FEATURES_CONTEXT)
        return err_set(
            err, -ENOTSUP,
            "%s: features on a GPU: found \"context\", expected \"none\"; use --retriever-device cpu",
            head_path(o->head));
    if (o->context > CUDA_TOPK_MAX)
        return err_set(err, -ENOTSUP, "context on a GPU: found %" PRIu32 ", expected at most %d", o->context,
                       CUDA_TOPK_MAX);
    return projection_check_features(o->head, err);
}

/* ---- memory -------------------------------------------------------------------------------------------- */

/* Takes memory of a kind; the first failure stays in *rc. */
static void *take(struct card *c, uint64_t bytes, uint64_t *kind, int *rc, struct err *err)
{
    void *at = NULL;
    CHECK(c->owned_count < (int)(sizeof c->owned / sizeof *c->owned));
    if (*rc == 0)
        *rc = c->api->alloc(c->gpu, bytes, &at, err);
    if (*rc == 0) {
        c->owned[c->owned_count++] = at;
        *kind += bytes;
    }
    return at;
}

static void *take_pinned(struct card *c, uint64_t bytes, int *rc, struct err *err)
{
    void *at = NULL, *device;
    CHECK(c->pinned_count < (int)(sizeof c->pinned / sizeof *c->pinned));
    if (*rc == 0)
        *rc = c->api->alloc_host(c->gpu, bytes, &at, &device, err);
    if (*rc == 0)
        c->pinned[c->pinned_count++] = at;
    return at;
}

static int check_room(struct card *c, struct err *err)
{
    const struct memory_gpu_retriever *need = &c->sizes;
    uint64_t all = need->weights + need->keys + need->workspace, room = 0;
    int rc = c->api->memory_free(c->gpu, &room);
    if (rc < 0)
        return err_set(err, rc, "GPU %s: free memory is not known", c->api->info(c->gpu)->uuid);
    if (all <= room)
        return 0;
    return err_set(err, -ENOMEM,
                   "GPU %s: the retriever needs %" PRIu64 " MiB (weights %" PRIu64 ", keys of %" PRIu32
                   " sequences of %" PRIu32 " positions %" PRIu64 ", work %" PRIu64 "), free are %" PRIu64
                   ": lower --sequences or --context, or use another --retriever-device",
                   c->api->info(c->gpu)->uuid, all >> 20, need->weights >> 20, c->sequences, c->context,
                   need->keys >> 20, need->workspace >> 20, room >> 20);
}

static int take_memory(struct card *c, const struct head_group *groups, struct err *err)
{
    const struct head_config *h = c->config;
    struct card_bytes *b = &c->bytes;
    uint64_t q_row = (uint64_t)h->q_heads * h->head_dim, k_row = (uint64_t)h->kv_heads * h->head_dim;
    uint64_t lists = (uint64_t)LIMIT_SEQUENCES * h->kv_heads;
    int rc = check_room(c, err);
    c->table = take(c, 2 * (uint64_t)h->vocab * h->hidden, &b->weights, &rc, err);
    for (uint32_t g = 0; g < h->groups; g++) {
        c->group[g].norm = take(c, 4 * h->hidden, &b->weights, &rc, err);
        if (groups[g].q_norm.data)
            c->group[g].q_norm = take(c, 4 * h->head_dim, &b->weights, &rc, err);
        if (groups[g].k_norm.data)
            c->group[g].k_norm = take(c, 4 * h->head_dim, &b->weights, &rc, err);
        c->group[g].q = take(c, 2 * q_row * h->hidden, &b->weights, &rc, err);
        c->group[g].k = take(c, 2 * k_row * h->hidden, &b->weights, &rc, err);
    }
    c->inv_freq = take(c, 2 * h->rope.dims, &b->weights, &rc, err);
    c->keys = take(c, h->groups * c->sizes.group_bytes, &b->keys, &rc, err);
    c->key_at = take(c, 8 * c->sequences, &b->keys, &rc, err);
    c->x = take(c, 4 * (uint64_t)CARD_TILE * h->hidden, &b->workspace, &rc, err);
    c->normed = take(c, 2 * (uint64_t)CARD_TILE * h->hidden, &b->workspace, &rc, err);
    c->k = take(c, 4 * CARD_TILE * k_row, &b->workspace, &rc, err);
    c->angles = take(c, 4 * CARD_TILE * h->rope.dims, &b->workspace, &rc, err);
    c->q = take(c, 4 * h->groups * LIMIT_SEQUENCES * q_row, &b->workspace, &rc, err);
    c->work = take(c, c->sizes.scores, &b->workspace, &rc, err);
    c->weights = take(c, c->sizes.pooled, &b->workspace, &rc, err);
    c->ignored = take(c, c->sizes.pooled, &b->workspace, &rc, err);
    c->index = take(c, c->sizes.index, &b->workspace, &rc, err);
    c->counts = take(c, 4 * lists, &b->workspace, &rc, err);
    c->masses = take(c, 4 * lists * CARD_MASSES * h->groups, &b->workspace, &rc, err);
    c->tokens = take(c, sizeof *c->tokens, &b->workspace, &rc, err);
    c->queries = take(c, sizeof *c->queries, &b->workspace, &rc, err);
    c->ranges = take(c, sizeof *c->ranges, &b->workspace, &rc, err);
    c->host_ranges = take_pinned(c, sizeof *c->ranges, &rc, err);
    c->host_tokens = take_pinned(c, sizeof *c->tokens, &rc, err);
    c->host_queries = take_pinned(c, sizeof *c->queries, &rc, err);
    c->host_weights = take_pinned(c, c->sizes.pooled, &rc, err);
    c->host_index = take_pinned(c, c->sizes.index, &rc, err);
    c->host_masses = take_pinned(c, 4 * lists * CARD_MASSES * h->groups, &rc, err);
    return rc;
}

/* ---- weights ------------------------------------------------------------------------------------------- */

/* A matrix of any type to bf16 on the card, some hundred rows at a time. */
static int upload_matrix(struct card *c, struct compute *compute, void *to, const struct model_tensor *t)
{
    struct matrix m = {t->type, t->rows, t->cols, t->data};
    float *wide = mem_alloc_aligned((size_t)UPLOAD_ROWS * m.cols, sizeof *wide);
    uint16_t *narrow = mem_alloc_aligned((size_t)UPLOAD_ROWS * m.cols, sizeof *narrow);
    uint32_t ids[UPLOAD_ROWS];
    int rc = 0;
    for (uint32_t first = 0; first < m.rows && rc == 0; first += UPLOAD_ROWS) {
        uint32_t n = m.rows - first < UPLOAD_ROWS ? m.rows - first : UPLOAD_ROWS;
        for (uint32_t i = 0; i < n; i++)
            ids[i] = first + i;
        compute_embed(compute, wide, &m, ids, (int)n);
        for (size_t i = 0; i < (size_t)n * m.cols; i++)
            narrow[i] = dtype_f32_to_bf16(wide[i]);
        rc = c->api->copy((uint16_t *)to + (size_t)first * m.cols, narrow, (size_t)n * m.cols * 2, c->stream);
        if (rc == 0)
            rc = c->api->stream_sync(c->stream); /* the buffer is written again */
    }
    mem_free(&wide);
    mem_free(&narrow);
    return rc;
}

static int upload(struct card *c, const struct card_options *o, struct err *err)
{
    const struct head_group *groups = head_groups(o->head);
    uint64_t *at = mem_alloc(c->sequences, sizeof *at);
    for (uint32_t i = 0; i < c->sequences; i++)
        at[i] = i * c->sizes.row_bytes;
    int rc = upload_matrix(c, o->compute, c->table,
                           c->config->embedding == HEAD_EMBEDDING_OWN ? &head_shared(o->head)->embedding
                                                                      : model_token_embedding(o->model));
    for (uint32_t g = 0; g < c->config->groups && rc == 0; g++) {
        rc = upload_matrix(c, o->compute, c->group[g].q, &groups[g].q);
        if (rc == 0)
            rc = upload_matrix(c, o->compute, c->group[g].k, &groups[g].k);
        if (rc == 0 && groups[g].q_norm.data)
            rc = c->api->copy(c->group[g].q_norm, groups[g].q_norm.data, 4 * (size_t)c->config->head_dim,
                              c->stream);
        if (rc == 0 && groups[g].k_norm.data)
            rc = c->api->copy(c->group[g].k_norm, groups[g].k_norm.data, 4 * (size_t)c->config->head_dim,
                              c->stream);
        if (rc == 0)
            rc =
                c->api->copy(c->group[g].norm, groups[g].norm.data, 4 * (size_t)c->config->hidden, c->stream);
    }
    if (rc == 0)
        rc = c->api->copy(c->inv_freq, c->rotation.inv_freq, 2 * (size_t)c->rotation.rope.dims, c->stream);
    if (rc == 0)
        rc = c->api->copy(c->key_at, at, 8 * (size_t)c->sequences, c->stream);
    int synced = c->api->stream_sync(c->stream);
    mem_free(&at);
    rc = rc < 0 ? rc : synced;
    return rc < 0
               ? err_set(err, rc, "GPU %s: upload of the head: %s", c->api->info(c->gpu)->uuid, strerror(-rc))
               : 0;
}

int card_create(const struct card_options *o, struct card **ret_card, struct err *err)
{
    const struct gpu_api *api = NULL;
    int rc = check_options(o, err);
    if (rc < 0 || (rc = gpu_load(&api, err)) < 0)
        return rc;
    struct card *c = mem_alloc(1, sizeof *c);
    *c = (struct card){.api = api,
                       .config = head_config(o->head),
                       .context = o->context,
                       .sequences = o->sequences,
                       .mean = o->pool == HEAD_POOL_MEAN};
    c->vocab = c->config->vocab;
    struct memory_gpu_head head = {.vocab = c->config->vocab,
                                   .hidden = c->config->hidden,
                                   .q_heads = c->config->q_heads,
                                   .kv_heads = c->config->kv_heads,
                                   .head_dim = c->config->head_dim,
                                   .groups = c->config->groups,
                                   .rope_dims = c->config->rope.dims};
    for (uint32_t g = 0; g < head.groups; g++)
        head.head_norms += !!head_groups(o->head)[g].q_norm.data + !!head_groups(o->head)[g].k_norm.data;
    memory_gpu_retriever(&head, o->context, o->sequences, o->work_bytes ? o->work_bytes : MEMORY_GPU_WORK,
                         &c->sizes);
    c->scratch.topk = mem_alloc(o->context, sizeof *c->scratch.topk);
    c->scratch.index = mem_alloc(o->context, sizeof *c->scratch.index);
    c->scratch.weights = mem_alloc(o->context, sizeof *c->scratch.weights);
    c->slices = mem_alloc((size_t)c->config->groups * LIMIT_SEQUENCES, sizeof *c->slices);
    rc = projection_rotation(o->head, o->context, &c->rotation, err);
    if (rc == 0)
        rc = api->open(o->device, &c->gpu, err);
    if (rc == 0)
        rc = api->stream_create(c->gpu, GPU_PRIORITY_NORMAL, &c->stream, err);
    if (rc == 0)
        rc = take_memory(c, head_groups(o->head), err);
    if (rc == 0)
        rc = upload(c, o, err);
    if (rc < 0)
        card_free(&c);
    else
        *ret_card = c;
    return rc;
}

void card_free(struct card **card)
{
    struct card *c = *card;
    if (!c)
        return;
    if (c->stream)
        c->api->stream_free(c->gpu, &c->stream);
    for (int i = 0; i < c->owned_count; i++)
        c->api->free(c->gpu, c->owned[i]);
    for (int i = 0; i < c->pinned_count; i++)
        c->api->free_host(c->gpu, c->pinned[i]);
    if (c->gpu)
        c->api->close(&c->gpu);
    mem_free(&c->scratch.topk);
    mem_free(&c->scratch.index);
    mem_free(&c->scratch.weights);
    mem_free(&c->slices);
    mem_free(card);
}

const struct model_rope *card_rope(const struct card *c)
{
    return &c->rotation.rope;
}

const struct gpu_info *card_info(const struct card *c)
{
    return c->api->info(c->gpu);
}

struct card_bytes card_bytes(const struct card *c)
{
    struct card_bytes b = c->bytes;
    b.context = c->api->info(c->gpu)->context_bytes;
    b.libraries = c->api->library_bytes(c->gpu);
    return b;
}

uint64_t card_key_bytes(const struct card *c)
{
    return (uint64_t)c->config->groups * c->config->kv_heads * c->config->head_dim * KEY_BYTES;
}

/* ---- projection ---------------------------------------------------------------------------------------- */

/* Tokens that a product is made for: few shapes, so few plans. Rows past the real ones hold anything; nobody
 * reads what they give. */
static uint32_t padded(uint32_t n)
{
    uint32_t p = 1;
    while (p < n)
        p *= 2;
    return p;
}

/* out [n][rows] f32 = w times the normed tokens. */
static void multiply(struct card *c, float *out, const void *w, uint32_t rows, uint32_t n)
{
    struct cuda_matmul_shape shape = {
        .rows = rows, .cols = c->config->hidden, .n = padded(n), .out_type = DTYPE_F32};
    struct cuda_matmul m = {.out = out, .w = w, .x = c->normed};
    card_must(c, c->api->matmul(c->gpu, &shape, &m, c->stream), "projection");
}

static void rotate(struct card *c, float *x, uint32_t heads, uint32_t n)
{
    struct cuda_rope rope = {.x = x,
                             .type = DTYPE_F32,
                             .stride = (uint64_t)heads * c->config->head_dim,
                             .table = c->angles,
                             .n = n,
                             .heads = heads,
                             .head_dim = c->config->head_dim,
                             .dims = c->rotation.rope.dims,
                             .adjacent = !c->rotation.rope.halves};
    card_must(c, c->api->rope(&rope, c->stream), "rotation");
}

/* The norm of every head, where the head has one. */
static void norm_heads(struct card *c, float *x, const void *weight, uint32_t heads, uint32_t n)
{
    struct cuda_headnorm norm = {.x = x,
                                 .stride = (uint64_t)heads * c->config->head_dim,
                                 .weight = weight,
                                 .weight_type = DTYPE_F32,
                                 .n = n,
                                 .heads = heads,
                                 .dim = c->config->head_dim,
                                 .eps = c->config->rms_eps};
    if (weight)
        card_must(c, c->api->headnorm(&norm, c->stream), "norm of heads");
}

/* Embeddings of n tokens to x, and the angles of their positions. */
static void embed(struct card *c, const uint32_t *ids, const uint32_t *positions, uint32_t n)
{
    struct cuda_embed e = {.out = c->x,
                           .out_type = DTYPE_F32,
                           .table = c->table,
                           .rows = c->vocab,
                           .cols = c->config->hidden,
                           .ids = ids,
                           .n = n};
    struct cuda_rope_angles a = {.table = c->angles,
                                 .positions = positions,
                                 .inv_freq = c->inv_freq,
                                 .n = n,
                                 .dims = c->rotation.rope.dims,
                                 .scale = c->rotation.scale};
    card_must(c, c->api->embed(&e, c->stream), "embedding");
    card_must(c, c->api->rope_angles(&a, c->stream), "angles");
}

static void normalise(struct card *c, uint32_t group, uint32_t n)
{
    struct cuda_rmsnorm norm = {.out = c->normed,
                                .out_type = DTYPE_BF16,
                                .x = c->x,
                                .weight = c->group[group].norm,
                                .weight_type = DTYPE_F32,
                                .n = n,
                                .dim = c->config->hidden,
                                .eps = c->config->rms_eps};
    card_must(c, c->api->rmsnorm(&norm, c->stream), "norm");
}

struct cuda_key_view card_keys(const struct card *c, uint32_t group)
{
    return (struct cuda_key_view){.base = c->keys + group * c->sizes.group_bytes,
                                  .device_bytes = c->sizes.group_bytes,
                                  .at = c->key_at,
                                  .row_stride = 1,
                                  .at_count = 1,
                                  .chunk_tokens = c->context,
                                  .type = DTYPE_F16};
}

/* Keys of tokens [first, first + n) of the step. */
static void append_tile(struct card *c, uint32_t first, uint32_t n)
{
    const struct head_config *h = c->config;
    embed(c, c->tokens->id + first, c->tokens->position + first, n);
    for (uint32_t g = 0; g < h->groups; g++) {
        struct cuda_keys_append a = {.keys = card_keys(c, g),
                                     .k = c->k,
                                     .stride = (uint64_t)h->kv_heads * h->head_dim,
                                     .rows = c->tokens->place + first,
                                     .positions = c->tokens->position + first,
                                     .row_count = c->sequences,
                                     .n = n,
                                     .kv_heads = h->kv_heads,
                                     .head_dim = h->head_dim};
        normalise(c, g, n);
        multiply(c, c->k, c->group[g].k, h->kv_heads * h->head_dim, n);
        norm_heads(c, c->k, c->group[g].k_norm, h->kv_heads, n);
        rotate(c, c->k, h->kv_heads, n);
        card_must(c, c->api->keys_append(&a, c->stream), "keys");
    }
}

static void make_queries(struct card *c)
{
    const struct head_config *h = c->config;
    uint32_t n = c->query_count;
    if (!n)
        return;
    embed(c, c->queries->id, c->queries->position, n);
    for (uint32_t g = 0; g < h->groups; g++) {
        float *q = c->q + (uint64_t)g * LIMIT_SEQUENCES * h->q_heads * h->head_dim;
        normalise(c, g, n);
        multiply(c, q, c->group[g].q, h->q_heads * h->head_dim, n);
        norm_heads(c, q, c->group[g].q_norm, h->q_heads, n);
        rotate(c, q, h->q_heads, n);
    }
}

static void send_queries(struct card *c)
{
    if (c->query_count)
        card_must(c, c->api->copy(c->queries, c->host_queries, sizeof *c->queries, c->stream), "copy");
}

/* Tokens [0, n) that wait in the pinned buffer: to the card, and their keys made. The wait makes the buffer
 * free again. */
static void append_waiting(struct card *c, uint32_t n, bool wait)
{
    if (!n)
        return;
    card_must(c, c->api->copy(c->tokens, c->host_tokens, sizeof *c->tokens, c->stream), "copy");
    for (uint32_t first = 0; first < n; first += CARD_TILE)
        append_tile(c, first, n - first < CARD_TILE ? n - first : CARD_TILE);
    if (wait)
        card_must(c, c->api->stream_sync(c->stream), "keys");
}

void card_project(struct card *c, const struct projection_part *parts, uint32_t part_count)
{
    struct card_tokens *t = c->host_tokens;
    struct card_queries *q = c->host_queries;
    uint32_t n = 0;
    card_must(c, c->api->check(c->gpu, NULL), "state"); /* makes the device this thread's, too */
    c->query_count = 0;
    for (uint32_t p = 0; p < part_count; p++) {
        const struct projection_part *part = &parts[p];
        uint32_t position = part->keys->count;
        for (uint32_t i = 0; i < part->count; i++) {
            t->id[n] = part->tokens[i];
            t->position[n] = position + i;
            t->place[n] = part->place;
            if (++n < LIMIT_STEP_TOKENS)
                continue;
            append_waiting(c, n, true);
            n = 0;
        }
        part->keys->count += part->count;
        if (!part->query)
            continue;
        CHECK(c->query_count < LIMIT_SEQUENCES);
        q->id[c->query_count] = part->tokens[part->count - 1];
        q->position[c->query_count] = part->keys->count - 1;
        q->place[c->query_count] = part->place;
        q->count[c->query_count++] = part->keys->count;
    }
    /* With queries card_rank waits. */
    append_waiting(c, n, !c->query_count);
    send_queries(c);
    make_queries(c);
}
