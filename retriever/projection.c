/* The retrieval head's projections; see projection.h. Owner: the thread that owns the compute object. All
 * buffers are made once, for a tile of tokens and the most queries: memory does not depend on the
 * context. */
#include "retriever/projection.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "retriever/mix.h"
#include "retriever/target.h"

struct projection {
    const struct head *head;
    const struct head_config *config;
    struct compute *compute;
    struct matrix table;
    struct projection_rotation rotation;
    struct rope rope;
    uint32_t queries_max, query_count;
    bool round_keys;
    uint32_t ids[PROJECTION_TILE_TOKENS], positions[PROJECTION_TILE_TOKENS];
    float *x, *normed, *k;         /* [tile][hidden], same, [tile][kv_heads][head_dim] */
    float *query_x, *query_normed; /* [queries_max][hidden] */
    struct mix *mix;               /* NULL: of the token alone */
    struct mix_token tokens[PROJECTION_TILE_TOKENS];
    float *query_mixed;    /* [groups][queries_max][views * hidden], with a mix */
    struct target *target; /* NULL: no features of the model */
    struct target_row features[PROJECTION_TILE_TOKENS];
    float *joined;                        /* [tile][2 * hidden], with a target */
    float *query_features, *query_joined; /* [queries_max][hidden], [queries_max][2 * hidden] */
    uint32_t *query_positions;
    float *q; /* [groups][queries_max][q_heads][head_dim] */
};

static struct matrix matrix_of(const struct model_tensor *t)
{
    return (struct matrix){t->type, t->rows, t->cols, t->data};
}

int projection_rotation(const struct head *head, uint32_t context, struct projection_rotation *ret,
                        struct err *err)
{
    *ret = (struct projection_rotation){.scale = 1};
    int rc = head_rope(head, context, &ret->rope, err);
    if (rc == 0 && model_rope_frequencies(&ret->rope, ret->inv_freq, &ret->scale) < 0)
        rc = err_set(err, -EINVAL, "%s: rope: found values that give no frequencies at %u positions",
                     head_path(head), context);
    return rc;
}

/* Elements of a group's query_mixed. */
static size_t query_stride(const struct projection *f)
{
    return (size_t)f->queries_max * f->config->views * f->config->hidden;
}

int projection_create(const struct model *model, const struct head *head, uint32_t context,
                      uint32_t queries_max, struct compute *compute, struct projection **ret_projection,
                      struct err *err)
{
    const struct head_config *c = head_config(head);
    struct projection *f = mem_alloc(1, sizeof *f);
    int rc = projection_rotation(head, context, &f->rotation, err);
    if (rc < 0) {
        projection_free(&f);
        return rc;
    }
    f->head = head;
    f->config = c;
    f->compute = compute;
    f->table = matrix_of(c->embedding == HEAD_EMBEDDING_OWN ? &head_shared(head)->embedding
                                                            : model_token_embedding(model));
    f->rope = (struct rope){f->rotation.rope.halves ? ROPE_PAIRS_HALVES : ROPE_PAIRS_ADJACENT,
                            (int)f->rotation.rope.dims, f->rotation.inv_freq, f->rotation.scale};
    f->queries_max = queries_max;
    f->x = mem_alloc_aligned((size_t)PROJECTION_TILE_TOKENS * c->hidden, sizeof *f->x);
    f->normed = mem_alloc_aligned((size_t)PROJECTION_TILE_TOKENS * c->hidden, sizeof *f->normed);
    f->k = mem_alloc_aligned((size_t)PROJECTION_TILE_TOKENS * c->kv_heads * c->head_dim, sizeof *f->k);
    f->query_x = mem_alloc_aligned((size_t)queries_max * c->hidden, sizeof *f->query_x);
    f->query_normed = mem_alloc_aligned((size_t)queries_max * c->hidden, sizeof *f->query_normed);
    f->mix = mix_create(head, &f->table, PROJECTION_TILE_TOKENS, compute);
    if (f->mix)
        f->query_mixed = mem_alloc_aligned(c->groups * query_stride(f), sizeof *f->query_mixed);
    f->target = target_create(head, PROJECTION_TILE_TOKENS, compute);
    if (f->target) {
        f->joined = mem_alloc_aligned(2 * (size_t)PROJECTION_TILE_TOKENS * c->hidden, sizeof *f->joined);
        f->query_features = mem_alloc_aligned((size_t)queries_max * c->hidden, sizeof *f->query_features);
        f->query_joined = mem_alloc_aligned(2 * (size_t)queries_max * c->hidden, sizeof *f->query_joined);
    }
    f->query_positions = mem_alloc(queries_max, sizeof *f->query_positions);
    f->q = mem_alloc_aligned((size_t)c->groups * queries_max * c->q_heads * c->head_dim, sizeof *f->q);
    *ret_projection = f;
    return 0;
}

void projection_free(struct projection **projection)
{
    struct projection *f = *projection;
    if (!f)
        return;
    mem_free(&f->x);
    mem_free(&f->normed);
    mem_free(&f->k);
    mem_free(&f->query_x);
    mem_free(&f->query_normed);
    mem_free(&f->query_mixed);
    mix_free(&f->mix);
    target_free(&f->target);
    mem_free(&f->joined);
    mem_free(&f->query_features);
    mem_free(&f->query_joined);
    mem_free(&f->query_positions);
    mem_free(&f->q);
    mem_free(projection);
}

void projection_round_keys(struct projection *f)
{
    f->round_keys = true;
}

const struct model_rope *projection_rope(const struct projection *f)
{
    return &f->rotation.rope;
}

const float *projection_query(const struct projection *f, uint32_t group, uint32_t number)
{
    CHECK(group < f->config->groups && number < f->query_count);
    return f->q + ((size_t)group * f->queries_max + number) * f->config->q_heads * f->config->head_dim;
}

/* A stretch of one part inside a tile. */
struct stretch {
    struct keys *keys;
    uint32_t at, position, count; /* place in the tile, position of the first token */
};

/* Where the next tile begins. */
struct cursor {
    const struct projection_part *parts;
    uint32_t part_count, part, done; /* tokens of parts[part] that are done */
};

/* What the model made of the position before token i of the part. */
static struct target_row row_of(const struct projection *f, const struct projection_part *part, uint32_t i)
{
    size_t bytes =
        dtype_row_bytes(part->features_type, f->config->feature_layer_count * f->config->feature_hidden);
    if (projection_begins(part) && i == 0)
        return (struct target_row){part->before, part->features_type};
    CHECK(part->features);
    return (struct target_row){(const uint8_t *)part->features + projection_feature(part, i) * bytes,
                               part->features_type};
}

/* Takes the next tokens, keeps the embeddings that queries will need; returns the tile's number of tokens. */
static uint32_t fill_tile(struct projection *f, struct cursor *c, struct stretch *stretches,
                          uint32_t *ret_count)
{
    uint32_t n = 0, count = 0;
    while (c->part < c->part_count && n < PROJECTION_TILE_TOKENS) {
        const struct projection_part *part = &c->parts[c->part];
        uint32_t take = part->count - c->done, room = PROJECTION_TILE_TOKENS - n;
        take = take < room ? take : room;
        stretches[count++] = (struct stretch){part->keys, n, part->keys->count + c->done, take};
        for (uint32_t i = 0; i < take; i++) {
            f->ids[n + i] = part->tokens[c->done + i];
            f->positions[n + i] = part->keys->count + c->done + i;
            f->tokens[n + i] = (struct mix_token){&part->tokens[c->done + i], c->done + i, part->keys};
            if (f->target)
                f->features[n + i] = row_of(f, part, c->done + i);
        }
        n += take;
        c->done += take;
        if (c->done == part->count) {
            c->part++;
            c->done = 0;
        }
    }
    if (f->mix)
        mix_run(f->mix, f->tokens, n);
    else
        compute_embed(f->compute, f->x, &f->table, f->ids, (int)n);
    if (f->target)
        target_run(f->target, f->features, n);
    *ret_count = count;
    return n;
}

/* What a group's products read of the tile. */
static const float *tile_input(struct projection *f, uint32_t g, uint32_t n)
{
    const struct head_config *c = f->config;
    if (f->mix)
        return mix_rows(f->mix, g);
    compute_rmsnorm(f->compute, f->normed, f->x, head_groups(f->head)[g].norm.data, (int)n, (int)c->hidden,
                    c->rms_eps);
    if (!f->target)
        return f->normed;
    target_join(f->target, f->joined, f->normed, target_rows(f->target), n);
    return f->joined;
}

static void append_tile(struct projection *f, const struct stretch *stretches, uint32_t count, uint32_t n)
{
    const struct head_config *c = f->config;
    for (uint32_t g = 0; g < c->groups; g++) {
        const struct head_group *group = &head_groups(f->head)[g];
        struct matrix wk = matrix_of(&group->k);
        compute_matmul(f->compute, f->k, &wk, tile_input(f, g, n), NULL, (int)n);
        if (group->k_norm.data)
            compute_rmsnorm(f->compute, f->k, f->k, group->k_norm.data, (int)(n * c->kv_heads),
                            (int)c->head_dim, c->rms_eps);
        compute_rope(f->compute, f->k, &f->rope, f->positions, (int)n, (int)c->kv_heads, (int)c->head_dim);
        if (f->round_keys)
            compute_keys_round(f->compute, f->k, (int)(n * c->kv_heads), (int)c->head_dim);
        for (uint32_t i = 0; i < count; i++) {
            const struct stretch *s = &stretches[i];
            struct key_view view = keys_view(s->keys, g, s->position);
            compute_keys_append(f->compute, &view, f->k + (size_t)s->at * c->kv_heads * c->head_dim,
                                (int)s->count, (int)c->kv_heads, (int)c->head_dim);
        }
    }
}

/* The same of the queries. */
static const float *query_input(struct projection *f, uint32_t g)
{
    const struct head_config *c = f->config;
    if (f->mix)
        return f->query_mixed + g * query_stride(f);
    compute_rmsnorm(f->compute, f->query_normed, f->query_x, head_groups(f->head)[g].norm.data,
                    (int)f->query_count, (int)c->hidden, c->rms_eps);
    if (!f->target)
        return f->query_normed;
    target_join(f->target, f->query_joined, f->query_normed, f->query_features, f->query_count);
    return f->query_joined;
}

static void make_queries(struct projection *f)
{
    const struct head_config *c = f->config;
    int n = (int)f->query_count;
    if (n == 0)
        return;
    for (uint32_t g = 0; g < c->groups; g++) {
        const struct head_group *group = &head_groups(f->head)[g];
        struct matrix wq = matrix_of(&group->q);
        float *q = f->q + (size_t)g * f->queries_max * c->q_heads * c->head_dim;
        compute_matmul(f->compute, q, &wq, query_input(f, g), NULL, n);
        if (group->q_norm.data)
            compute_rmsnorm(f->compute, q, q, group->q_norm.data, n * (int)c->q_heads, (int)c->head_dim,
                            c->rms_eps);
        compute_rope(f->compute, q, &f->rope, f->query_positions, n, (int)c->q_heads, (int)c->head_dim);
    }
}

/* What token `at` of the tile gives its query. */
static void keep_query(struct projection *f, uint32_t number, uint32_t at)
{
    const struct head_config *c = f->config;
    size_t width = (size_t)c->hidden * (f->mix ? c->views : 1);
    if (!f->mix)
        memcpy(f->query_x + number * width, f->x + at * width, width * sizeof *f->x);
    if (f->target)
        memcpy(f->query_features + number * width, target_rows(f->target) + at * width,
               width * sizeof *f->query_features);
    for (uint32_t g = 0; f->mix && g < c->groups; g++)
        memcpy(f->query_mixed + g * query_stride(f) + number * width, mix_rows(f->mix, g) + at * width,
               width * sizeof *f->query_mixed);
}

/* Of the last tokens of the parts that end in this tile. */
static void keep_queries(struct projection *f, const struct cursor *before, const struct cursor *after)
{
    uint32_t at = 0;
    for (uint32_t p = before->part; p < after->part; p++) {
        const struct projection_part *part = &before->parts[p];
        at += part->count - (p == before->part ? before->done : 0);
        if (!part->query)
            continue;
        CHECK(f->query_count < f->queries_max);
        f->query_positions[f->query_count] = part->keys->count + part->count - 1;
        keep_query(f, f->query_count++, at - 1);
    }
}

void projection_run(struct projection *f, const struct projection_part *parts, uint32_t part_count)
{
    struct cursor c = {.parts = parts, .part_count = part_count};
    struct stretch stretches[PROJECTION_TILE_TOKENS];
    f->query_count = 0;
    for (uint32_t p = 0; p < part_count; p++) {
        CHECK(parts[p].count > 0);
        keys_reserve(parts[p].keys, parts[p].keys->count + parts[p].count);
    }
    while (c.part < part_count) {
        struct cursor before = c;
        uint32_t count, n = fill_tile(f, &c, stretches, &count);
        keep_queries(f, &before, &c);
        append_tile(f, stretches, count, n);
    }
    for (uint32_t p = 0; p < part_count; p++)
        keys_advance(parts[p].keys, parts[p].tokens, parts[p].count);
    make_queries(f);
}
