/* Hidden states of the model on the card: what retriever/target.h computes, from rows that the decoder wrote.
 * Rows are gathered by number, so they may lie in memory of the card or in host memory that it reaches. */
#include "retriever/card_features.h"

#include "base/check.h"

uint64_t card_features_inputs(const struct head_config *h)
{
    return h->features == HEAD_FEATURES_TARGET ? (uint64_t)h->feature_layer_count * h->feature_hidden : 0;
}

/* x [n][inputs] of the rows; a sequence's first token has none, and zeros stay zeros on their way. */
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
        if (t->host_positions[i] == 0)
            card_must(
                c, c->api->fill((uint8_t *)to + i * f->inputs * element, 0, f->inputs * element, c->stream),
                "features");
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

void card_set_features(struct card *c, const void *rows, uint32_t count)
{
    c->features.rows = rows;
    c->features.row_count = count;
}
