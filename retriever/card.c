/* The head on a GPU: memory and weights; see card.h. Owner: the selector's thread. */
#include "retriever/card.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/log.h"
#include "retriever/card_features.h"
#include "retriever/card_private.h"

enum { UPLOAD_ROWS = 512, LANDED_BYTES = 64 };

_Static_assert(CUDA_KEYS_CHUNK == 512, "memory_gpu_retriever counts parts of this size");
_Static_assert(CUDA_KEYS_GRAIN == 16, "memory_gpu_retriever rounds up to it");
_Static_assert(MEMORY_GPU_TAPS == HEAD_TAPS_MAX, "memory_gpu_retriever counts lists of this reach");
_Static_assert(CUDA_MIX_VIEWS_MAX >= HEAD_VIEWS_MAX && CUDA_MIX_TAPS_MAX >= HEAD_TAPS_MAX,
               "the kernel serves every head");

void card_must(struct card *c, int rc, const char *what)
{
    struct err err = {0};
    if (rc >= 0)
        return;
    if (c->capturing) { /* nothing has been done yet: find_graph goes on without */
        c->capture_rc = c->capture_rc ? c->capture_rc : rc;
        return;
    }
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
    if (o->context > CUDA_TOPK_MAX)
        return err_set(err, -ENOTSUP, "context on a GPU: found %" PRIu32 ", expected at most %d", o->context,
                       CUDA_TOPK_MAX);
    if (h->feature_hidden % 8)
        return err_set(err, -ENOTSUP,
                       "%s: feature_hidden on a GPU: found %" PRIu32 ", expected a multiple of 8",
                       head_path(o->head), h->feature_hidden);
    return 0;
}

/* ---- memory -------------------------------------------------------------------------------------------- */

/* Takes memory of a kind; the first failure stays in *rc. */
void *card_take(struct card *c, uint64_t bytes, uint64_t *kind, int *rc, struct err *err)
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

static void *take_mapped(struct card *c, uint64_t bytes, void **ret_device, int *rc, struct err *err)
{
    void *at = NULL;
    *ret_device = NULL;
    CHECK(c->pinned_count < (int)(sizeof c->pinned / sizeof *c->pinned));
    if (*rc == 0)
        *rc = c->api->alloc_host(c->gpu, bytes, &at, ret_device, err);
    if (*rc == 0)
        c->pinned[c->pinned_count++] = at;
    return at;
}

static void *take_pinned(struct card *c, uint64_t bytes, int *rc, struct err *err)
{
    void *device;
    return take_mapped(c, bytes, &device, rc, err);
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

void card_copy(struct card *c, void *to, const void *from, uint64_t bytes, struct CUstream_st *stream)
{
    const struct cuda_mapped_copy copy = {.to = to, .from = from, .bytes = bytes, .rows = 1};
    card_must(c, c->api->copy_mapped(&copy, 1, stream), "copy");
}

/* Masses, and counts of changes behind them. */
uint64_t card_results_bytes(const struct card *c)
{
    uint64_t lists = (uint64_t)LIMIT_SEQUENCES * c->config->kv_heads;
    return 4 * lists * (CARD_MASSES + 2) * c->config->groups;
}

static int take_memory(struct card *c, const struct head *head, struct err *err)
{
    const struct head_group *groups = head_groups(head);
    const struct head_config *h = c->config;
    struct card_bytes *b = &c->bytes;
    uint64_t q_row = (uint64_t)h->q_heads * h->head_dim, k_row = (uint64_t)h->kv_heads * h->head_dim;
    uint64_t lists = (uint64_t)LIMIT_SEQUENCES * h->kv_heads;
    int rc = check_room(c, err);
    c->table = card_take(c, 2 * (uint64_t)h->vocab * h->hidden, &b->weights, &rc, err);
    c->row_scale = card_take(c, 4 * (uint64_t)h->vocab, &b->weights, &rc, err);
    for (uint32_t g = 0; g < h->groups; g++) {
        c->group[g].norm = card_take(c, 4 * h->hidden, &b->weights, &rc, err);
        if (groups[g].q_norm.data)
            c->group[g].q_norm = card_take(c, 4 * h->head_dim, &b->weights, &rc, err);
        if (groups[g].k_norm.data)
            c->group[g].k_norm = card_take(c, 4 * h->head_dim, &b->weights, &rc, err);
        c->group[g].q = card_take(c, 2 * q_row * c->inputs, &b->weights, &rc, err);
        c->group[g].k = card_take(c, 2 * k_row * c->inputs, &b->weights, &rc, err);
        c->group[g].taps = card_take(c, 4 * (uint64_t)c->views * c->taps, &b->weights, &rc, err);
        if (c->features.inputs) {
            c->group[g].q_features = card_take(c, 2 * q_row * h->hidden, &b->weights, &rc, err);
            c->group[g].k_features = card_take(c, 2 * k_row * h->hidden, &b->weights, &rc, err);
        }
    }
    card_features_take(c, head_shared(head), &rc, err);
    c->inv_freq = card_take(c, 2 * h->rope.dims, &b->weights, &rc, err);
    c->keys = card_take(c, h->groups * c->sizes.group_bytes, &b->keys, &rc, err);
    c->key_at = card_take(c, 8 * c->sequences, &b->keys, &rc, err);
    c->mixed = card_take(c, 2 * (uint64_t)CARD_TILE * c->inputs, &b->workspace, &rc, err);
    c->k = card_take(c, 4 * CARD_TILE * k_row, &b->workspace, &rc, err);
    c->angles = card_take(c, 4 * CARD_TILE * h->rope.dims, &b->workspace, &rc, err);
    c->q = card_take(c, 4 * h->groups * LIMIT_SEQUENCES * q_row, &b->workspace, &rc, err);
    c->work = card_take(c, c->sizes.scores, &b->workspace, &rc, err);
    for (int lane = 0; lane < 2; lane++) {
        c->weights[lane] = card_take(c, c->sizes.pooled, &b->workspace, &rc, err);
        c->index[lane] = card_take(c, c->sizes.index, &b->workspace, &rc, err);
        c->counts[lane] = card_take(c, 4 * lists, &b->workspace, &rc, err);
    }
    c->ignored = (uint32_t *)c->weights[1];
    for (int i = 0; i < 2; i++)
        c->masses[i] = card_take(c, card_results_bytes(c), &b->workspace, &rc, err);
    c->sets = card_take(c, c->sizes.sets, &b->workspace, &rc, err);
    c->changes = card_take(c, c->sizes.changes, &b->workspace, &rc, err);
    c->total = card_take(c, sizeof *c->total, &b->workspace, &rc, err);
    c->tokens = card_take(c, sizeof *c->tokens, &b->workspace, &rc, err);
    c->queries = card_take(c, sizeof *c->queries, &b->workspace, &rc, err);
    c->ranges = card_take(c, sizeof *c->ranges, &b->workspace, &rc, err);
    c->host_ranges = take_mapped(c, sizeof *c->ranges, &c->host_ranges_device, &rc, err);
    c->host_tokens = take_pinned(c, sizeof *c->tokens, &rc, err);
    c->host_queries = take_mapped(c, sizeof *c->queries, &c->host_queries_device, &rc, err);
    c->host_weights = take_pinned(c, c->sizes.pooled, &rc, err);
    c->host_changes = take_mapped(c, c->sizes.changes, &c->host_changes_device, &rc, err);
    c->host_sets = take_pinned(c, c->sizes.sets / c->sequences, &rc, err);
    for (int i = 0; i < 2; i++)
        c->host_masses[i] = take_mapped(c, card_results_bytes(c), &c->host_masses_device[i], &rc, err);
    c->landed = take_mapped(c, LANDED_BYTES, &c->landed_device, &rc, err);
    if (rc == 0)
        atomic_store(c->landed, 0);
    return rc;
}

/* ---- weights ------------------------------------------------------------------------------------------- */

/* What an RMS norm multiplies a row by that is rounded already. The sum has parts, for vector units. */
static float scale_of(const uint16_t *row, uint32_t cols, float eps)
{
    enum { PARTS = 8 };
    double part[PARTS] = {0}, sum = 0;
    for (uint32_t i = 0; i < cols; i += PARTS)
        for (uint32_t j = 0; j < PARTS; j++) { /* cols is a multiple: check_options */
            double x = (double)dtype_bf16_to_f32(row[i + j]);
            part[j] += x * x;
        }
    for (uint32_t j = 0; j < PARTS; j++)
        sum += part[j];
    return (float)(1 / sqrt(sum / cols + (double)eps));
}

struct columns { /* of a matrix */
    const struct model_tensor *of;
    uint32_t first, count;
};

/* Columns of a matrix of any type to bf16 on the card, some hundred rows at a time. ret_scale [rows], or
 * NULL. */
static int upload_columns(struct card *c, struct compute *compute, void *to, const struct columns *columns,
                          float *ret_scale)
{
    const struct model_tensor *t = columns->of;
    uint32_t cols = columns->count;
    struct matrix m = {t->type, t->rows, t->cols, t->data};
    float *wide = mem_alloc_aligned((size_t)UPLOAD_ROWS * m.cols, sizeof *wide);
    uint16_t *narrow = mem_alloc_aligned((size_t)UPLOAD_ROWS * cols, sizeof *narrow);
    uint32_t ids[UPLOAD_ROWS];
    int rc = 0;
    for (uint32_t first = 0; first < m.rows && rc == 0; first += UPLOAD_ROWS) {
        uint32_t n = m.rows - first < UPLOAD_ROWS ? m.rows - first : UPLOAD_ROWS;
        for (uint32_t i = 0; i < n; i++)
            ids[i] = first + i;
        compute_embed(compute, wide, &m, ids, (int)n);
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < cols; j++)
                narrow[i * cols + j] = dtype_f32_to_bf16(wide[i * m.cols + columns->first + j]);
        for (uint32_t i = 0; i < n && ret_scale; i++)
            ret_scale[first + i] = scale_of(narrow + (size_t)i * cols, cols, c->config->rms_eps);
        rc = c->api->copy((uint16_t *)to + (size_t)first * cols, narrow, (size_t)n * cols * 2, c->stream);
        if (rc == 0)
            rc = c->api->stream_sync(c->stream); /* the buffer is written again */
    }
    mem_free(&wide);
    mem_free(&narrow);
    return rc;
}

int card_upload_matrix(struct card *c, struct compute *compute, void *to, const struct model_tensor *t,
                       float *ret_scale)
{
    return upload_columns(c, compute, to, &(struct columns){t, 0, t->cols}, ret_scale);
}

/* The embedding, and the norms of its rows. */
static int upload_table(struct card *c, const struct card_options *o)
{
    float *scale = mem_alloc(c->config->vocab, sizeof *scale);
    int rc = card_upload_matrix(c, o->compute, c->table,
                                c->config->embedding == HEAD_EMBEDDING_OWN ? &head_shared(o->head)->embedding
                                                                           : model_token_embedding(o->model),
                                scale);
    if (rc == 0)
        rc = c->api->copy(c->row_scale, scale, 4 * (size_t)c->config->vocab, c->stream);
    int synced = c->api->stream_sync(c->stream);
    mem_free(&scale);
    return rc < 0 ? rc : synced;
}

static int upload_group(struct card *c, struct compute *compute, const struct head_group *from,
                        const struct card_group *to)
{
    static const float one = 1; /* the token alone */
    const struct head_config *h = c->config;
    const struct {
        void *to;
        const void *from;
        size_t count;
    } vectors[] = {{to->norm, from->norm.data, h->hidden},
                   {to->q_norm, from->q_norm.data, h->head_dim},
                   {to->k_norm, from->k_norm.data, h->head_dim},
                   {to->taps, from->taps.data ? from->taps.data : &one, (size_t)c->views * c->taps}};
    int rc = upload_columns(c, compute, to->q, &(struct columns){&from->q, 0, c->inputs}, NULL);
    if (rc == 0)
        rc = upload_columns(c, compute, to->k, &(struct columns){&from->k, 0, c->inputs}, NULL);
    if (rc == 0 && to->q_features)
        rc = upload_columns(c, compute, to->q_features, &(struct columns){&from->q, h->hidden, h->hidden},
                            NULL);
    if (rc == 0 && to->k_features)
        rc = upload_columns(c, compute, to->k_features, &(struct columns){&from->k, h->hidden, h->hidden},
                            NULL);
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors && rc == 0; i++)
        if (vectors[i].from)
            rc = c->api->copy(vectors[i].to, vectors[i].from, 4 * vectors[i].count, c->stream);
    return rc;
}

static int upload(struct card *c, const struct card_options *o, struct err *err)
{
    uint64_t *at = mem_alloc(c->sequences, sizeof *at);
    for (uint32_t i = 0; i < c->sequences; i++)
        at[i] = i * c->sizes.row_bytes;
    int rc = upload_table(c, o);
    for (uint32_t g = 0; g < c->config->groups && rc == 0; g++)
        rc = upload_group(c, o->compute, &head_groups(o->head)[g], &c->group[g]);
    if (rc == 0)
        rc = card_features_upload(c, o->compute, head_shared(o->head));
    if (rc == 0)
        rc = c->api->copy(c->inv_freq, c->rotation.inv_freq, 2 * (size_t)c->rotation.rope.dims, c->stream);
    if (rc == 0)
        rc = c->api->copy(c->key_at, at, 8 * (size_t)c->sequences, c->stream);
    int synced = c->api->stream_sync(c->stream);
    mem_free(&at);
    rc = rc < 0 ? rc : synced;
    if (rc == 0)
        return 0;
    if (c->api->check(c->gpu, err) == 0)
        err_set(err, rc, "%s", strerror(-rc));
    return err_prefix(err, rc, "GPU %s: upload of the head", c->api->info(c->gpu)->uuid);
}

/* What follows on scores goes first: it is short, and the scores' many blocks would fill the card before. */
static int make_streams(struct card *c, struct err *err)
{
    struct CUstream_st **const all[] = {&c->stream, &c->lane[0], &c->lane[1], &c->out};
    int rc = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all && rc == 0; i++)
        rc = c->api->stream_create(c->gpu, i == 0 ? GPU_PRIORITY_NORMAL : GPU_PRIORITY_HIGH, all[i], err);
    return rc;
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
                       .compute = o->compute,
                       .context = o->context,
                       .sequences = o->sequences,
                       .keys_int8 = o->keys_int8,
                       .mean = o->pool == HEAD_POOL_MEAN};
    bool context = c->config->features == HEAD_FEATURES_CONTEXT;
    c->views = context ? c->config->views : 1;
    c->taps = context ? c->config->taps : 1;
    c->inputs = c->views * c->config->hidden;
    c->features.inputs = card_features_inputs(c->config);
    struct memory_gpu_head head = head_sizes(o->head);
    head.keys_int8 = o->keys_int8;
    memory_gpu_retriever(&head, o->context, o->sequences, o->work_bytes ? o->work_bytes : MEMORY_GPU_WORK,
                         &c->sizes);
    c->scratch.topk = mem_alloc(o->context, sizeof *c->scratch.topk);
    c->scratch.index = mem_alloc(o->context, sizeof *c->scratch.index);
    c->scratch.weights = mem_alloc(o->context, sizeof *c->scratch.weights);
    rc = projection_rotation(o->head, o->context, &c->rotation, err);
    if (rc == 0)
        rc = api->open(o->device, &c->gpu, err);
    if (rc == 0)
        rc = make_streams(c, err);
    if (rc == 0)
        rc = take_memory(c, o->head, err);
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
    card_drop_graphs(c);
    struct CUstream_st **const streams[] = {&c->stream, &c->lane[0], &c->lane[1], &c->out};
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++)
        if (*streams[i])
            c->api->stream_free(c->gpu, streams[i]);
    for (int i = 0; i < c->owned_count; i++)
        c->api->free(c->gpu, c->owned[i]);
    for (int i = 0; i < c->pinned_count; i++)
        c->api->free_host(c->gpu, c->pinned[i]);
    if (c->gpu)
        c->api->close(&c->gpu);
    mem_free(&c->scratch.topk);
    mem_free(&c->scratch.index);
    mem_free(&c->scratch.weights);
    mem_free(card);
}

const struct model_rope *card_rope(const struct card *c)
{
    return &c->rotation.rope;
}

uint64_t card_graph_steps(const struct card *c)
{
    return c->graph_steps;
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
    return c->config->groups * (c->sizes.row_bytes / c->sizes.key_tokens);
}
