/* The forward pass on a GPU; see pass_gpu.h. Owner: the device thread. State: activations on the device,
 * overwritten by each batch, and the events of a profile. */
#include "decoder/pass_gpu.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "proto/limits.h"

enum part { PART_NONE, PART_WAIT, PART_MATMUL, PART_ATTENTION, PART_OTHER, PART_SAMPLING };

enum { MARKS_LAYER = 12, MARKS_ALL = 16 };

struct buffer {
    void *at;
    uint64_t bytes;
    enum gpu_device_use use;
};

struct pass_gpu {
    struct gpu_device *device;
    const struct gpu_api *api;
    const struct model_config *config;
    const struct weights_gpu *weights;
    struct pass_gpu_options options;
    uint64_t q_dim, kv_dim, qkv_dim;
    uint32_t square_blocks; /* of products with as many rows as the stream is wide; 0: none are joined */

    struct buffer x;       /* f32 [token][hidden], the residual stream */
    struct buffer h;       /* bf16 [token][max(hidden, q_dim, ffn)], what the next product takes */
    struct buffer normed;  /* bf16 [few tokens][hidden], residual stream * weight of the next norm */
    struct buffer squares; /* f32 [blocks][few tokens], sums of the residual stream's squares */
    struct buffer qkv;     /* f32 [token][q_dim + 2 kv_dim] */
    struct buffer both;    /* f32 [token][2 ffn] gate, up */
    struct buffer angles;  /* f32 [token][rope dims / 2][2] */
    struct buffer wanted;  /* f32 [row][hidden] */
    struct buffer logits;  /* f32 [row][vocab] */
    struct buffer work;    /* of attention */

    struct gpu_event **events; /* [marks_max] */
    uint8_t *parts;            /* [marks_max] what the time before an event was spent on */
    uint32_t marks, marks_max;
    int profiling;
};

static struct CUstream_st *stream_of(const struct pass_gpu *f)
{
    return f->device->stream;
}

/* The time since the last mark belongs to `part`. A mark that cannot be made is a figure less, no error. */
static void mark(struct pass_gpu *f, enum part part)
{
    if (!f->profiling || f->marks == f->marks_max)
        return;
    if (!f->events[f->marks] && f->api->event_create(f->device->gpu, &f->events[f->marks], NULL) < 0)
        return;
    if (f->api->event_record(f->events[f->marks], stream_of(f)) == 0)
        f->parts[f->marks++] = (uint8_t)part;
}

void pass_gpu_profile(struct pass_gpu *f, int on)
{
    f->profiling = on;
    if (!on)
        return;
    f->marks = 0;
    mark(f, PART_NONE);
}

int pass_gpu_collect(struct pass_gpu *f, struct pass_gpu_times *to)
{
    int64_t *const accounts[] = {
        [PART_WAIT] = &to->wait,
        [PART_MATMUL] = &to->compute.matmul,
        [PART_ATTENTION] = &to->compute.attention,
        [PART_OTHER] = &to->compute.other,
        [PART_SAMPLING] = &to->sampling,
    };
    uint32_t marks = f->marks;
    f->marks = 0; /* also after an error: they are of this step alone */
    for (uint32_t i = 1; i < marks; i++) {
        float ms;
        int r = f->api->event_elapsed(f->events[i - 1], f->events[i], &ms);
        if (r < 0)
            return r;
        *accounts[f->parts[i]] += (int64_t)((double)ms * 1e6);
    }
    return marks > 1;
}

/* ---- creation ---- */

static int make(struct pass_gpu *f, struct buffer *b, enum gpu_device_use use, uint64_t bytes,
                struct err *err)
{
    int r = gpu_device_alloc(f->device, use, bytes, &b->at, err);
    *b = (struct buffer){r < 0 ? NULL : b->at, bytes, use};
    return r;
}

static int make_all(struct pass_gpu *f, struct err *err)
{
    const struct model_config *c = f->config;
    const struct pass_gpu_options *o = &f->options;
    uint64_t tokens = o->tokens_max, widest = f->q_dim > c->hidden ? f->q_dim : c->hidden;
    uint64_t few = tokens < CUDA_PRODUCT_TOKENS ? tokens : CUDA_PRODUCT_TOKENS;
    widest = widest > c->ffn ? widest : c->ffn;
    uint64_t work = f->api->attn_work_bytes(o->entries_max, c->q_heads, c->head_dim, o->list_max);
    uint64_t single = f->api->attn_work_bytes(1, c->q_heads, c->head_dim, o->context);
    const struct {
        struct buffer *buffer;
        uint64_t bytes;
    } wanted[] = {{&f->x, tokens * c->hidden * sizeof(float)},
                  {&f->h, tokens * widest * sizeof(uint16_t)},
                  {&f->normed, few * c->hidden * sizeof(uint16_t)},
                  {&f->squares, (uint64_t)f->square_blocks * CUDA_PRODUCT_TOKENS * sizeof(float)},
                  {&f->qkv, tokens * f->qkv_dim * sizeof(float)},
                  {&f->both, tokens * 2 * c->ffn * sizeof(float)},
                  {&f->angles, tokens * c->rope.dims * sizeof(float)},
                  {&f->wanted, (uint64_t)o->entries_max * c->hidden * sizeof(float)},
                  {&f->logits, (uint64_t)o->entries_max * c->vocab * sizeof(float)}};
    int r = make(f, &f->work, GPU_DEVICE_WORKSPACE, work > single ? work : single, err);
    for (unsigned i = 0; r == 0 && i < sizeof wanted / sizeof *wanted; i++)
        r = make(f, wanted[i].buffer, GPU_DEVICE_ACTIVATIONS, wanted[i].bytes, err);
    return r;
}

/* A launch without tokens checks shapes and does nothing. */
static int check_heads(struct pass_gpu *f, struct err *err)
{
    const struct model_config *c = f->config;
    struct cuda_attn attn = {.kv = {.base = f->x.at,
                                    .device_bytes = f->x.bytes,
                                    .at = f->x.at,
                                    .at_count = 1,
                                    .page_tokens = BLOCK_TOKENS,
                                    .piece_bytes = 4 * c->head_dim,
                                    .type = DTYPE_F16},
                             .out = f->h.at,
                             .out_type = DTYPE_BF16,
                             .q = f->qkv.at,
                             .q_stride = f->qkv_dim,
                             .counts = f->x.at,
                             .list_max = 1,
                             .q_heads = c->q_heads,
                             .kv_heads = c->kv_heads,
                             .head_dim = c->head_dim,
                             .work = f->work.at};
    if (c->vocab > CUDA_VOCAB_MAX)
        return err_set(err, -ENOTSUP, "model: found %u tokens, expected at most %d on a GPU", c->vocab,
                       CUDA_VOCAB_MAX);
    if (f->api->attn(&attn, stream_of(f)) == 0 && c->hidden % 8 == 0 && c->ffn % 8 == 0)
        return 0;
    return err_set(
        err, -ENOTSUP,
        "model: found %u query and %u KV heads of %u, width %u and %u; a GPU serves heads of 64 or 128, "
        "at most %d query heads a KV head, widths that are multiples of 8",
        c->q_heads, c->kv_heads, c->head_dim, c->hidden, c->ffn, CUDA_GROUP_MAX);
}

int pass_gpu_create(struct gpu_device *device, const struct model_config *config,
                    const struct weights_gpu *weights, const struct pass_gpu_options *options,
                    struct pass_gpu **ret_pass, struct err *err)
{
    CHECK(options->tokens_max && options->entries_max && options->list_max && options->context);
    struct pass_gpu *f = mem_alloc(1, sizeof *f);
    f->device = device;
    f->api = device->api;
    f->config = config;
    f->weights = weights;
    f->options = *options;
    f->q_dim = (uint64_t)f->config->q_heads * f->config->head_dim;
    f->kv_dim = (uint64_t)f->config->kv_heads * f->config->head_dim;
    f->qkv_dim = f->q_dim + 2 * f->kv_dim;
    uint64_t widths = f->config->hidden | f->q_dim | f->config->ffn;
    if (f->api->info(device->gpu)->hopper && widths % CUDA_PRODUCT_COLUMNS == 0)
        f->square_blocks = f->api->product_blocks(f->config->hidden);
    f->marks_max = f->config->layers * MARKS_LAYER + MARKS_ALL;
    f->events = mem_alloc(f->marks_max, sizeof *f->events);
    f->parts = mem_alloc(f->marks_max, 1);
    int r = make_all(f, err);
    if (r == 0)
        r = check_heads(f, err);
    if (r < 0) {
        pass_gpu_free(&f);
        return r;
    }
    *ret_pass = f;
    return 0;
}

void pass_gpu_free(struct pass_gpu **pass)
{
    struct pass_gpu *f = *pass;
    if (!f)
        return;
    struct buffer *const all[] = {&f->x,    &f->h,      &f->normed, &f->squares, &f->qkv,
                                  &f->both, &f->angles, &f->wanted, &f->logits,  &f->work};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        gpu_device_release(f->device, all[i]->use, all[i]->bytes, all[i]->at);
    for (uint32_t i = 0; i < f->marks_max; i++)
        if (f->events[i])
            f->api->event_free(&f->events[i]);
    mem_free(&f->events);
    mem_free(&f->parts);
    mem_free(pass);
}

/* ---- products ---- */

struct product_of {
    void *out; /* f32 [n][rows] */
    const void *w, *bias;
    uint64_t rows, cols;
    int accumulate;
    /* Where a layer's operators are joined (below): whether it takes what the product before left in normed,
     * the norm that it makes that for, whether it ends with the gate. */
    int normed;
    const float *next_norm;
    int gated;
};

static struct cuda_matmul_shape shape_of(const struct product_of *p, uint32_t n)
{
    return (struct cuda_matmul_shape){.rows = (uint32_t)p->rows,
                                      .cols = (uint32_t)p->cols,
                                      .n = n,
                                      .out_type = DTYPE_F32,
                                      .has_bias = p->bias != NULL,
                                      .accumulate = p->accumulate};
}

/* The products of a layer; all take what lies in h, or in normed. */
struct products {
    struct product_of qkv, wo, gate_up, down;
};

static struct products products_of(const struct pass_gpu *f, uint32_t layer)
{
    const struct model_config *c = f->config;
    const struct weights_gpu_layer *l = &f->weights->layers[layer];
    const float *next = layer + 1 < c->layers ? l[1].attn_norm : NULL;
    return (struct products){
        .qkv = {f->qkv.at, l->qkv, l->qkv_bias, f->qkv_dim, c->hidden, 0, .normed = layer > 0},
        .wo = {f->x.at, l->wo, NULL, c->hidden, f->q_dim, 1, .next_norm = l->ffn_norm},
        .gate_up = {f->both.at, l->gate_up, NULL, 2 * (uint64_t)c->ffn, c->hidden, 0, .normed = 1,
                    .gated = 1},
        .down = {f->x.at, l->down, NULL, c->hidden, c->ffn, 1, .next_norm = next}};
}

static struct product_of output_of(const struct pass_gpu *f)
{
    return (struct product_of){
        .out = f->logits.at, .w = f->weights->output, .rows = f->config->vocab, .cols = f->config->hidden};
}

static int multiply(struct pass_gpu *f, const struct product_of *p, uint32_t n)
{
    struct cuda_matmul_shape shape = shape_of(p, n);
    struct cuda_matmul matmul = {.out = p->out, .w = p->w, .x = f->h.at, .bias = p->bias};
    int r = f->api->matmul(f->device->gpu, &shape, &matmul, stream_of(f));
    mark(f, PART_MATMUL);
    return r;
}

/* Whether norms and the gate are parts of the products around them: a launch less for each of them. */
static int is_joined(const struct pass_gpu *f, uint32_t n)
{
    return f->square_blocks && n <= CUDA_PRODUCT_TOKENS;
}

static int multiply_joined(struct pass_gpu *f, const struct product_of *p, uint32_t n)
{
    struct cuda_product product = {.out = p->out,
                                   .w = p->w,
                                   .x = p->normed ? f->normed.at : f->h.at,
                                   .bias = p->bias,
                                   .rows = (uint32_t)p->rows,
                                   .cols = (uint32_t)p->cols,
                                   .n = n,
                                   .accumulate = p->accumulate,
                                   .squares = p->normed ? f->squares.at : NULL,
                                   .square_blocks = p->normed ? f->square_blocks : 0,
                                   .eps = f->config->rms_eps,
                                   .gated = p->gated ? f->h.at : NULL,
                                   .next = p->next_norm ? f->normed.at : NULL,
                                   .next_weight = p->next_norm,
                                   .next_squares = p->next_norm ? f->squares.at : NULL};
    int r = f->api->product(&product, stream_of(f));
    mark(f, PART_MATMUL);
    return r;
}

int pass_gpu_prepare(struct pass_gpu *f, uint32_t n, uint32_t logits, struct err *err)
{
    struct products p = products_of(f, 0);
    struct product_of output = output_of(f);
    const struct product_of *const of_tokens[] = {&p.qkv, &p.wo, &p.gate_up, &p.down};
    int r = 0;
    for (unsigned i = 0; r == 0 && !is_joined(f, n) && i < sizeof of_tokens / sizeof *of_tokens; i++) {
        struct cuda_matmul_shape shape = shape_of(of_tokens[i], n);
        r = f->api->matmul_prepare(f->device->gpu, &shape, err);
    }
    if (r == 0 && logits) {
        struct cuda_matmul_shape shape = shape_of(&output, logits);
        r = f->api->matmul_prepare(f->device->gpu, &shape, err);
    }
    return r;
}

/* ---- layers ---- */

static int normalize(struct pass_gpu *f, float *x, const float *weight, uint32_t n)
{
    struct cuda_rmsnorm norm = {.out = f->h.at,
                                .out_type = DTYPE_BF16,
                                .x = x,
                                .weight = weight,
                                .weight_type = DTYPE_F32,
                                .n = n,
                                .dim = f->config->hidden,
                                .eps = f->config->rms_eps};
    int r = f->api->rmsnorm(&norm, stream_of(f));
    mark(f, PART_OTHER);
    return r;
}

static int begin(struct pass_gpu *f, const struct pass_gpu_batch *b)
{
    const struct model_rope *rope = &f->config->rope;
    struct cuda_embed embed = {.out = f->x.at,
                               .out_type = DTYPE_F32,
                               .table = f->weights->embedding,
                               .rows = f->config->vocab,
                               .cols = f->config->hidden,
                               .ids = b->ids,
                               .n = b->n};
    struct cuda_rope_angles angles = {.table = f->angles.at,
                                      .positions = b->positions,
                                      .inv_freq = f->weights->inv_freq,
                                      .n = b->n,
                                      .dims = rope->dims,
                                      .scale = f->weights->rope_scale};
    int r = f->api->embed(&embed, stream_of(f));
    return r < 0 ? r : f->api->rope_angles(&angles, stream_of(f));
}

static int head_norm(struct pass_gpu *f, float *x, const float *weight, uint32_t n, uint32_t heads)
{
    struct cuda_headnorm norm = {.x = x,
                                 .stride = f->qkv_dim,
                                 .weight = weight,
                                 .weight_type = DTYPE_F32,
                                 .n = n,
                                 .heads = heads,
                                 .dim = f->config->head_dim,
                                 .eps = f->config->rms_eps};
    return f->api->headnorm(&norm, stream_of(f));
}

/* Queries, keys and values, not yet rotated. */
static int project(struct pass_gpu *f, const struct weights_gpu_layer *w, const struct products *p,
                   uint32_t n)
{
    const struct model_config *c = f->config;
    float *q = f->qkv.at;
    int joined = is_joined(f, n), r = joined && p->qkv.normed ? 0 : normalize(f, f->x.at, w->attn_norm, n);
    if (r == 0)
        r = joined ? multiply_joined(f, &p->qkv, n) : multiply(f, &p->qkv, n);
    if (r == 0 && w->q_norm)
        r = head_norm(f, q, w->q_norm, n, c->q_heads);
    if (r == 0 && w->k_norm)
        r = head_norm(f, q + f->q_dim, w->k_norm, n, c->kv_heads);
    mark(f, PART_OTHER);
    return r;
}

/* Rotates queries and keys and writes keys and values into the cache; k follows q in a token's row. */
static int rotate_and_write(struct pass_gpu *f, const struct pass_gpu_batch *b, const struct pass_gpu_kv *kv)
{
    const struct model_config *c = f->config;
    struct cuda_rope rope = {.x = f->qkv.at,
                             .type = DTYPE_F32,
                             .stride = f->qkv_dim,
                             .table = f->angles.at,
                             .n = b->n,
                             .heads = c->q_heads + c->kv_heads,
                             .head_dim = c->head_dim,
                             .dims = c->rope.dims,
                             .adjacent = !c->rope.halves};
    const float *k = (const float *)f->qkv.at + f->q_dim;
    struct cuda_kv_write write = {.kv = kv->view,
                                  .k = k,
                                  .v = k + f->kv_dim,
                                  .stride = f->qkv_dim,
                                  .rows = b->rows,
                                  .items = kv->write,
                                  .item_stride = kv->write_stride,
                                  .head_items = kv->write_heads,
                                  .row_count = b->row_count,
                                  .n = b->n,
                                  .kv_heads = c->kv_heads,
                                  .head_dim = c->head_dim};
    int r = f->api->rope_write(&rope, &write, stream_of(f));
    mark(f, PART_OTHER);
    return r;
}

static int attend_spans(struct pass_gpu *f, const struct pass_gpu_batch *b, const struct pass_gpu_kv *kv)
{
    const struct model_config *c = f->config;
    struct cuda_prefill prefill = {.kv = kv->view,
                                   .out = f->h.at,
                                   .out_type = DTYPE_BF16,
                                   .q = f->qkv.at,
                                   .q_stride = f->qkv_dim,
                                   .spans = b->spans,
                                   .span_count = b->span_count,
                                   .span_max = b->span_max,
                                   .row_count = b->row_count,
                                   .q_heads = c->q_heads,
                                   .kv_heads = c->kv_heads,
                                   .head_dim = c->head_dim,
                                   .scale = 1.0f / sqrtf((float)c->head_dim),
                                   .hopper = f->api->info(f->device->gpu)->hopper};
    return f->api->prefill(&prefill, stream_of(f));
}

/* Queries [first, first + n); `items` as kv's, or NULL: all positions. */
static int attend_lists(struct pass_gpu *f, const struct pass_gpu_batch *b, const struct pass_gpu_kv *kv,
                        const uint32_t *items, const uint32_t range[2])
{
    const struct model_config *c = f->config;
    uint32_t first = range[0], n = range[1] - range[0];
    struct cuda_attn attn = {.kv = kv->view,
                             .out = (uint16_t *)f->h.at + first * f->q_dim,
                             .out_type = DTYPE_BF16,
                             .q = (const float *)f->qkv.at + first * f->qkv_dim,
                             .q_stride = f->qkv_dim,
                             .rows = b->rows + first,
                             .counts = items ? kv->counts : b->counts + first,
                             .count_stride = kv->count_stride,
                             .items = items,
                             .item_stride = kv->item_stride,
                             .row_count = b->row_count,
                             .list_max = items ? f->options.list_max : b->count_max,
                             .n = n,
                             .q_heads = c->q_heads,
                             .kv_heads = c->kv_heads,
                             .head_dim = c->head_dim,
                             .scale = 1.0f / sqrtf((float)c->head_dim),
                             .work = f->work.at,
                             .settled = 1};
    return f->api->attn(&attn, stream_of(f));
}

/* Neighbours that attend in the same way, as many at a time as the workspace has parts for. */
static int attend_ranges(struct pass_gpu *f, const struct pass_gpu_batch *b, const struct pass_gpu_kv *kv)
{
    const struct model_config *c = f->config;
    int r = 0;
    for (uint32_t first = 0, end; r == 0 && first < b->n; first = end) {
        int all = !kv->items || (kv->all && kv->all[first]);
        uint64_t one =
            f->api->attn_work_bytes(1, c->q_heads, c->head_dim, all ? b->count_max : f->options.list_max);
        uint64_t most = one ? f->work.bytes / one : b->n;
        if (most == 0)
            return -EINVAL;
        for (end = first + 1; end < b->n && end - first < most; end++)
            if (kv->items && kv->all && kv->all[end] != kv->all[first])
                break;
        r = attend_lists(f, b, kv, all ? NULL : kv->items, (const uint32_t[]){first, end});
    }
    return r;
}

static int attend(struct pass_gpu *f, const struct pass_gpu_batch *b, const struct pass_gpu_kv *kv)
{
    int r = b->spans ? attend_spans(f, b, kv) : attend_ranges(f, b, kv);
    mark(f, PART_ATTENTION);
    return r;
}

static int feed_forward(struct pass_gpu *f, const struct weights_gpu_layer *w, const struct products *p,
                        uint32_t n)
{
    uint32_t ffn = f->config->ffn;
    struct cuda_swiglu swiglu = {.out = f->h.at,
                                 .out_type = DTYPE_BF16,
                                 .gate = f->both.at,
                                 .up = (const float *)f->both.at + ffn,
                                 .stride = 2 * (uint64_t)ffn,
                                 .n = n,
                                 .dim = ffn};
    int r = multiply(f, &p->wo, n);
    if (r == 0)
        r = normalize(f, f->x.at, w->ffn_norm, n);
    if (r == 0)
        r = multiply(f, &p->gate_up, n);
    if (r == 0)
        r = f->api->swiglu(&swiglu, stream_of(f));
    mark(f, PART_OTHER);
    return r < 0 ? r : multiply(f, &p->down, n);
}

static int feed_forward_joined(struct pass_gpu *f, const struct products *p, uint32_t n)
{
    int r = multiply_joined(f, &p->wo, n);
    if (r == 0)
        r = multiply_joined(f, &p->gate_up, n);
    return r < 0 ? r : multiply_joined(f, &p->down, n);
}

static int queue_layer(struct pass_gpu *f, const struct pass_gpu_batch *b,
                       const struct pass_gpu_source *source, uint32_t layer, struct err *err)
{
    const struct weights_gpu_layer *w = &f->weights->layers[layer];
    struct products p = products_of(f, layer);
    struct pass_gpu_kv kv = {0};
    int r = source->hidden ? source->hidden(source->arg, layer, f->x.at, err) : 0;
    if (r < 0)
        return r;
    r = project(f, w, &p, b->n);
    if (r < 0)
        return gpu_device_error(f->device, r, "queries", err);
    r = source->layer(source->arg, layer, &kv, err);
    if (r < 0)
        return r;
    mark(f, PART_WAIT);
    r = rotate_and_write(f, b, &kv);
    if (r == 0)
        r = attend(f, b, &kv);
    if (r == 0)
        r = is_joined(f, b->n) ? feed_forward_joined(f, &p, b->n) : feed_forward(f, w, &p, b->n);
    if (r < 0)
        return gpu_device_error(f->device, r, "a layer", err);
    return source->layer_done ? source->layer_done(source->arg, layer, err) : 0;
}

/* Logits of the wanted rows. */
static int head(struct pass_gpu *f, const struct pass_gpu_batch *b)
{
    size_t row = f->config->hidden * sizeof(float);
    struct product_of output = output_of(f);
    float *x = f->x.at;
    int r = 0;
    if (b->wanted) {
        x = f->wanted.at;
        for (uint32_t i = 0; r == 0 && i < b->logits; i++)
            r = f->api->copy((uint8_t *)f->wanted.at + i * row, (uint8_t *)f->x.at + b->wanted[i] * row, row,
                             stream_of(f));
    }
    if (r == 0)
        r = normalize(f, x, f->weights->output_norm, b->logits);
    return r < 0 ? r : multiply(f, &output, b->logits);
}

int pass_gpu_queue(struct pass_gpu *f, const struct pass_gpu_batch *b, const struct pass_gpu_source *source,
                   struct err *err)
{
    CHECK(b->n > 0 && b->n <= f->options.tokens_max && b->logits <= f->options.entries_max);
    CHECK(b->wanted || b->logits == b->n || b->logits == 0);
    int r = begin(f, b);
    if (r < 0)
        return gpu_device_error(f->device, r, "embedding", err);
    for (uint32_t l = 0; l < f->config->layers; l++) {
        r = queue_layer(f, b, source, l, err);
        if (r < 0)
            return r;
    }
    r = source->hidden ? source->hidden(source->arg, f->config->layers, f->x.at, err) : 0;
    if (r < 0)
        return r;
    r = b->logits ? head(f, b) : 0;
    return r < 0 ? gpu_device_error(f->device, r, "logits", err) : 0;
}

int pass_gpu_sample(struct pass_gpu *f, uint32_t rows, const struct pass_gpu_sampling *s, struct err *err)
{
    uint32_t vocab = f->config->vocab;
    struct cuda_penalties penalties = {.logits = f->logits.at,
                                       .stride = vocab,
                                       .entries = s->penalties,
                                       .begin = s->penalty_begin,
                                       .params = s->penalty_params,
                                       .n = rows,
                                       .vocab = vocab};
    struct cuda_sample sample = {.ids = s->ret_ids,
                                 .logits = f->logits.at,
                                 .stride = vocab,
                                 .params = s->params,
                                 .n = rows,
                                 .vocab = vocab};
    int r = s->penalties ? f->api->penalties(&penalties, stream_of(f)) : 0;
    if (r == 0)
        r = f->api->sample(&sample, stream_of(f));
    mark(f, PART_SAMPLING);
    return r < 0 ? gpu_device_error(f->device, r, "sampling", err) : 0;
}

const float *pass_gpu_logits(const struct pass_gpu *f)
{
    return f->logits.at;
}

const float *pass_gpu_queries(const struct pass_gpu *f, uint64_t *ret_stride)
{
    *ret_stride = f->qkv_dim;
    return f->qkv.at;
}

const struct model_config *pass_gpu_config(const struct pass_gpu *f)
{
    return f->config;
}

struct gpu_device *pass_gpu_device(const struct pass_gpu *f)
{
    return f->device;
}

const struct pass_gpu_options *pass_gpu_options(const struct pass_gpu *f)
{
    return &f->options;
}
