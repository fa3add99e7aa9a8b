/* Hidden states of the model on the card: what retriever/target.h computes, from rows that the decoder wrote.
 * Rows are gathered by number, so they may lie in memory of the card or in host memory that it reaches. */
#include "retriever/card_features.h"

#include "base/alloc.h"
#include "base/check.h"
#include "base/dtype.h"

uint64_t card_features_inputs(const struct head_config *h)
{
    return h->features == HEAD_FEATURES_TARGET ? (uint64_t)h->feature_layer_count * h->feature_hidden : 0;
}

void card_features_take(struct card *c, const struct head_shared *shared, int *rc, struct err *err)
{
    struct card_features *f = &c->features;
    uint64_t hidden = c->config->hidden, *work = &c->bytes.workspace;
    if (!f->inputs)
        return;
    f->fc = card_take(c, 2 * hidden * f->inputs, &c->bytes.weights, rc, err);
    f->norm = card_take(c, 4 * hidden, &c->bytes.weights, rc, err);
    f->x = card_take(c, 2 * CARD_TILE * f->inputs, work, rc, err);
    f->g = card_take(c, 4 * CARD_TILE * hidden, work, rc, err);
    f->normed = card_take(c, 2 * CARD_TILE * hidden, work, rc, err);
    if (!shared->feature_input_norm.data)
        return;
    f->input_norm = card_take(c, 4 * f->inputs, &c->bytes.weights, rc, err);
    f->wide = card_take(c, 4 * CARD_TILE * f->inputs, work, rc, err);
}

int card_features_upload(struct card *c, struct compute *compute, const struct head_shared *from)
{
    const struct card_features *f = &c->features;
    int rc = f->inputs ? card_upload_matrix(c, compute, f->fc, &from->fc, NULL) : 0;
    if (rc == 0 && f->inputs)
        rc = c->api->copy(f->norm, from->feature_norm.data, 4 * (size_t)c->config->hidden, c->stream);
    if (rc == 0 && f->input_norm)
        rc = c->api->copy(f->input_norm, from->feature_input_norm.data, 4 * f->inputs, c->stream);
    return rc;
}

void card_features_begin(struct card *c, const struct projection_part *part)
{
    if (!projection_begins(part))
        return;
    c->features.first[part->place].position = part->keys->count;
    c->features.first[part->place].row = part->before;
}

/* A row of the host into one of x, waited for: once in a sequence's life. Zeros stay zeros on their way. */
static void put_first(struct card *c, void *to, const uint16_t *row)
{
    const struct card_features *f = &c->features;
    size_t element = f->input_norm ? sizeof(float) : sizeof *row;
    if (!row) {
        card_must(c, c->api->fill(to, 0, f->inputs * element, c->stream), "features");
        return;
    }
    float *wide = f->input_norm ? mem_alloc(f->inputs, sizeof *wide) : NULL;
    for (uint64_t i = 0; wide && i < f->inputs; i++)
        wide[i] = dtype_bf16_to_f32(row[i]);
    card_must(c, c->api->copy(to, wide ? (const void *)wide : row, f->inputs * element, c->stream),
              "features");
    card_must(c, c->api->stream_sync(c->stream), "features");
    mem_free(&wide);
}

/* x [n][inputs] of the rows. */
static void gather(struct card *c, const struct card_features_tokens *t)
{
    struct card_features *f = &c->features;
    size_t element = f->input_norm ? sizeof(float) : sizeof(uint16_t);
    void *to = f->input_norm ? (void *)f->wide : f->x;
    struct cuda_embed embed = {.out = to,
                               .out_type = f->input_norm ? DTYPE_F32 : DTYPE_BF16,
                               .table = f->rows,
                               .rows = f->row_count,
                               .cols = (uint32_t)f->inputs,
                               .ids = t->rows,
                               .n = t->n};
    CHECK(f->rows); /* the selector has seen to it */
    card_must(c, c->api->embed(&embed, c->stream), "features");
    for (uint32_t i = 0; i < t->n; i++)
        if (t->host_positions[i] == f->first[t->host_places[i]].position)
            put_first(c, (uint8_t *)to + i * f->inputs * element, f->first[t->host_places[i]].row);
    struct cuda_rmsnorm norm = {.out = f->x,
                                .out_type = DTYPE_BF16,
                                .x = f->wide,
                                .weight = f->input_norm,
                                .weight_type = DTYPE_F32,
                                .n = t->n,
                                .dim = (uint32_t)f->inputs,
                                .eps = c->config->rms_eps};
    if (f->input_norm)
        card_must(c, c->api->rmsnorm(&norm, c->stream), "features");
}

void card_features_run(struct card *c, const struct card_features_tokens *t)
{
    struct card_features *f = &c->features;
    struct cuda_matmul_shape shape = {.rows = c->config->hidden,
                                      .cols = (uint32_t)f->inputs,
                                      .n = card_padded(t->n),
                                      .out_type = DTYPE_F32};
    struct cuda_matmul m = {.out = f->g, .w = f->fc, .x = f->x};
    struct cuda_rmsnorm norm = {.out = f->normed,
                                .out_type = DTYPE_BF16,
                                .x = f->g,
                                .weight = f->norm,
                                .weight_type = DTYPE_F32,
                                .n = t->n,
                                .dim = c->config->hidden,
                                .eps = c->config->rms_eps};
    if (!f->inputs)
        return;
    gather(c, t);
    card_must(c, c->api->matmul(c->gpu, &shape, &m, c->stream), "features");
    card_must(c, c->api->rmsnorm(&norm, c->stream), "features");
}

void card_features_prepare(struct card *c, uint32_t n)
{
    const struct head_config *h = c->config;
    struct cuda_matmul_shape shape = {
        .rows = h->hidden, .cols = (uint32_t)c->features.inputs, .n = card_padded(n), .out_type = DTYPE_F32};
    if (!c->features.inputs)
        return;
    card_must(c, c->api->matmul_prepare(c->gpu, &shape, NULL), "features");
    shape.cols = h->hidden;
    shape.accumulate = 1;
    shape.rows = h->q_heads * h->head_dim;
    card_must(c, c->api->matmul_prepare(c->gpu, &shape, NULL), "features");
    shape.rows = h->kv_heads * h->head_dim;
    card_must(c, c->api->matmul_prepare(c->gpu, &shape, NULL), "features");
}

/* ---- blocks of keys that are kept on the host ---- */

/* Where a block of one list lies on the card: its keys, and its scales where they have any. */
struct block {
    uint8_t *at;
    size_t bytes;
};

static int block_parts(const struct card *c, uint32_t place, uint32_t position, uint32_t list,
                       struct block ret[2])
{
    const struct head_config *h = c->config;
    size_t bytes = h->head_dim * (c->keys_int8 ? sizeof(int8_t) : sizeof(uint16_t));
    uint64_t first = (uint64_t)(list % h->kv_heads) * c->sizes.key_tokens + position;
    uint8_t *keys = c->keys + list / h->kv_heads * c->sizes.group_bytes + place * c->sizes.row_bytes;
    uint8_t *scales = keys + (uint64_t)h->kv_heads * c->sizes.key_tokens * bytes;
    ret[0] = (struct block){keys + first * bytes, BLOCK_TOKENS * bytes};
    ret[1] = (struct block){scales + first * sizeof(uint16_t), BLOCK_TOKENS * sizeof(uint16_t)};
    return c->keys_int8 ? 2 : 1;
}

void card_read_block(struct card *c, uint32_t place, uint32_t position, uint8_t *to)
{
    struct block part[2];
    for (uint32_t list = 0; list < card_lists(c); list++) {
        int count = block_parts(c, place, position, list, part);
        for (int i = 0; i < count; to += part[i++].bytes)
            card_must(c, c->api->copy(to, part[i].at, part[i].bytes, c->stream), "kept keys");
    }
}

void card_write_block(struct card *c, uint32_t place, uint32_t position, const uint8_t *from)
{
    struct block part[2];
    for (uint32_t list = 0; list < card_lists(c); list++) {
        int count = block_parts(c, place, position, list, part);
        for (int i = 0; i < count; from += part[i++].bytes)
            card_must(c, c->api->copy(part[i].at, from, part[i].bytes, c->stream), "kept keys");
    }
}

void card_read_row(struct card *c, uint32_t row, uint8_t *to)
{
    size_t bytes = c->features.inputs * sizeof(uint16_t);
    card_must(c, c->api->copy(to, (const uint8_t *)c->features.rows + row * bytes, bytes, c->stream),
              "kept keys");
}

void card_sync(struct card *c)
{
    card_must(c, c->api->stream_sync(c->stream), "kept keys");
}

/* A graph keeps the address of the rows. */
void card_drop_graphs(struct card *c)
{
    for (int i = 0; i < CARD_GRAPHS; i++)
        if (c->graphs[i].graph)
            c->api->graph_free(&c->graphs[i].graph);
}

void card_set_features(struct card *c, const void *rows, uint32_t count)
{
    card_drop_graphs(c);
    c->features.rows = rows;
    c->features.row_count = count;
}

const struct gpu_api *card_api(const struct card *c)
{
    return c->api;
}

struct gpu *card_gpu(const struct card *c)
{
    return c->gpu;
}
