/* From token ids to keys and queries on a GPU; see card.h.
 *
 * Owner: the selector's thread. Everything goes through one stream, in order; pinned buffers are written
 * again only after card_rank or card_project has waited for it. */
#include "base/check.h"
#include "retriever/card.h"
#include "retriever/card_features.h"
#include "retriever/card_private.h"
#include "retriever/mix.h"

uint32_t card_padded(uint32_t n)
{
    uint32_t p = 1;
    while (p < n)
        p *= 2;
    return p;
}

/* out [n][rows] f32 = w times what mix() made (+ `features` times what card_features_run() made). */
static void multiply(struct card *c, float *out, const void *w, const void *features, uint32_t rows,
                     uint32_t n)
{
    struct cuda_matmul_shape shape = {
        .rows = rows, .cols = c->inputs, .n = card_padded(n), .out_type = DTYPE_F32};
    struct cuda_matmul m = {.out = out, .w = w, .x = c->mixed};
    card_must(c, c->api->matmul(c->gpu, &shape, &m, c->stream), "projection");
    if (!features)
        return;
    shape.cols = c->config->hidden;
    shape.accumulate = 1;
    m.w = features;
    m.x = c->features.normed;
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

/* Tokens whose numbers lie on the card. */
struct batch {
    const uint32_t *ids, *at, *positions;
    uint32_t id_count, n;
};

static void make_angles(struct card *c, const struct batch *b)
{
    struct cuda_rope_angles a = {.table = c->angles,
                                 .positions = b->positions,
                                 .inv_freq = c->inv_freq,
                                 .n = b->n,
                                 .dims = c->rotation.rope.dims,
                                 .scale = c->rotation.scale};
    card_must(c, c->api->rope_angles(&a, c->stream), "angles");
}

/* What the group's products read: with one view of one tap the normed embedding. */
static void mix(struct card *c, uint32_t group, const struct batch *b)
{
    struct cuda_mix m = {.out = c->mixed,
                         .table = c->table,
                         .row_scale = c->row_scale,
                         .taps = c->group[group].taps,
                         .weight = c->group[group].norm,
                         .ids = b->ids,
                         .at = b->at,
                         .positions = b->positions,
                         .id_count = b->id_count,
                         .rows = c->config->vocab,
                         .dim = c->config->hidden,
                         .views = c->views,
                         .tap_count = c->taps,
                         .n = b->n};
    card_must(c, c->api->mix(&m, c->stream), "embedding");
}

struct cuda_key_view card_keys(const struct card *c, uint32_t group)
{
    return (struct cuda_key_view){.base = c->keys + group * c->sizes.group_bytes,
                                  .device_bytes = c->sizes.group_bytes,
                                  .at = c->key_at,
                                  .row_stride = 1,
                                  .at_count = 1,
                                  .chunk_tokens = c->sizes.key_tokens,
                                  .type = c->keys_int8 ? DTYPE_I8 : DTYPE_F16};
}

/* Keys of what mix() made, into the cache. */
static void make_keys(struct card *c, uint32_t group, const uint32_t *places, const struct batch *b)
{
    const struct head_config *h = c->config;
    struct cuda_keys_append a = {.keys = card_keys(c, group),
                                 .k = c->k,
                                 .stride = (uint64_t)h->kv_heads * h->head_dim,
                                 .rows = places,
                                 .positions = b->positions,
                                 .row_count = c->sequences,
                                 .n = b->n,
                                 .kv_heads = h->kv_heads,
                                 .head_dim = h->head_dim};
    multiply(c, c->k, c->group[group].k, c->group[group].k_features, h->kv_heads * h->head_dim, b->n);
    norm_heads(c, c->k, c->group[group].k_norm, h->kv_heads, b->n);
    rotate(c, c->k, h->kv_heads, b->n);
    card_must(c, c->api->keys_append(&a, c->stream), "keys");
}

/* Queries of what mix() made. */
static void make_group_queries(struct card *c, uint32_t group, const struct batch *b)
{
    const struct head_config *h = c->config;
    float *q = c->q + (uint64_t)group * LIMIT_SEQUENCES * h->q_heads * h->head_dim;
    multiply(c, q, c->group[group].q, c->group[group].q_features, h->q_heads * h->head_dim, b->n);
    norm_heads(c, q, c->group[group].q_norm, h->q_heads, b->n);
    rotate(c, q, h->q_heads, b->n);
}

/* Keys of tokens [first, first + n) of the step. */
static void append_tile(struct card *c, uint32_t first, uint32_t n)
{
    const struct batch b = {.ids = c->tokens->id,
                            .at = c->tokens->at + first,
                            .positions = c->tokens->position + first,
                            .id_count = sizeof c->tokens->id / sizeof *c->tokens->id,
                            .n = n};
    const struct card_features_tokens features = {
        c->tokens->feature + first, c->host_tokens->position + first, c->host_tokens->place + first, n};
    make_angles(c, &b);
    card_features_run(c, &features);
    for (uint32_t g = 0; g < c->config->groups; g++) {
        mix(c, g, &b);
        make_keys(c, g, c->tokens->place + first, &b);
    }
}

/* Of the tokens that bring queries, and their keys: what both are made of is made once. */
static void make_queries(struct card *c)
{
    const struct batch b = {.ids = c->queries->id,
                            .at = c->queries->at,
                            .positions = c->queries->position,
                            .id_count = sizeof c->queries->id / sizeof *c->queries->id,
                            .n = c->query_count};
    if (!c->query_count)
        return;
    card_copy(c, c->queries, c->host_queries_device, sizeof *c->queries, c->stream);
    make_angles(c, &b);
    card_features_run(c, &(struct card_features_tokens){c->queries->feature, c->host_queries->position,
                                                        c->host_queries->place, c->query_count});
    for (uint32_t g = 0; g < c->config->groups; g++) {
        mix(c, g, &b);
        make_keys(c, g, c->queries->place, &b);
        make_group_queries(c, g, &b);
    }
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

/* Puts a part's token i into a list of ids, of `used` so far; where a stretch of them begins, what its taps
 * reach before it. Returns where it stands. */
static uint32_t put_id(const struct card *c, uint32_t *ids, uint32_t used, const struct projection_part *part,
                       uint32_t i, bool begins)
{
    struct mix_token t = {&part->tokens[i], i, part->keys};
    uint32_t position = part->keys->count + i, lag = c->taps - 1 < position ? c->taps - 1 : position;
    for (; begins && lag > 0; lag--)
        ids[used++] = mix_earlier(&t, lag);
    ids[used] = part->tokens[i];
    return used;
}

/* Puts the part's tokens without a query behind those that wait; returns how many wait then. */
static uint32_t put_tokens(struct card *c, const struct projection_part *part, uint32_t n)
{
    struct card_tokens *t = c->host_tokens;
    for (uint32_t i = 0; i < part->count - part->query; i++) {
        t->at[n] = put_id(c, t->id, n ? t->at[n - 1] + 1 : 0, part, i, i == 0 || n == 0);
        t->position[n] = part->keys->count + i;
        t->place[n] = part->place;
        t->feature[n] = part->feature_row + projection_feature(part, i);
        if (++n < LIMIT_STEP_TOKENS)
            continue;
        append_waiting(c, n, true);
        n = 0;
    }
    return n;
}

static void put_query(struct card *c, const struct projection_part *part)
{
    struct card_queries *q = c->host_queries;
    uint32_t n = c->query_count++, last = part->count - 1;
    CHECK(n < LIMIT_SEQUENCES);
    q->at[n] = put_id(c, q->id, n ? q->at[n - 1] + 1 : 0, part, last, true);
    q->position[n] = part->keys->count + last;
    q->place[n] = part->place;
    q->feature[n] = part->feature_row + projection_feature(part, last);
    q->count[n] = part->keys->count + part->count;
}

void card_project(struct card *c, const struct projection_part *parts, uint32_t part_count)
{
    uint32_t n = 0;
    bool begins = false;                  /* a part, whose first token's features stand elsewhere */
    bool decode = true;                   /* each part is a token and its query */
    CHECK(part_count <= LIMIT_SEQUENCES); /* stretches of ids that fit */
    card_must(c, c->api->check(c->gpu, NULL), "state"); /* makes the device this thread's, too */
    c->query_count = 0;
    for (uint32_t p = 0; p < part_count; p++) {
        begins |= projection_begins(&parts[p]);
        decode &= parts[p].query && parts[p].count == 1;
        card_features_begin(c, &parts[p]);
        n = put_tokens(c, &parts[p], n);
        if (parts[p].query)
            put_query(c, &parts[p]);
        keys_advance(parts[p].keys, parts[p].tokens, parts[p].count);
    }
    /* A decode step may be a graph, with all that card_rank does. */
    c->waiting = decode && !(begins && c->features.inputs);
    if (c->waiting)
        return;
    /* With queries card_rank waits. */
    append_waiting(c, n, !c->query_count);
    make_queries(c);
}

void card_queue_waiting(struct card *c)
{
    if (c->waiting)
        make_queries(c);
}

void card_prepare_products(struct card *c, uint32_t n)
{
    const struct head_config *h = c->config;
    struct cuda_matmul_shape shape = {.cols = c->inputs, .n = card_padded(n), .out_type = DTYPE_F32};
    shape.rows = h->q_heads * h->head_dim;
    card_must(c, c->api->matmul_prepare(c->gpu, &shape, NULL), "projection");
    shape.rows = h->kv_heads * h->head_dim;
    card_must(c, c->api->matmul_prepare(c->gpu, &shape, NULL), "projection");
    card_features_prepare(c, n);
}
