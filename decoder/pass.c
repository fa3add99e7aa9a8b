/* The forward pass; see pass.h.
 *
 * Owner: the thread that calls. State: activations, overwritten by each call. All of it is allocated at
 * creation, none in a pass. It must never touch KV memory but through the operators, at the places that the
 * source named. */
#include "decoder/pass.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"

struct pass {
    const struct model_config *config;
    const struct model_layer *layers;
    struct matrix embedding, output;
    const float *output_norm;
    struct compute *compute;
    struct rope rope;
    float *inv_freq; /* [rope.dims / 2] */
    struct pass_options options;

    float *x;                   /* [token][hidden], the residual stream */
    float *h;                   /* [token][max(hidden, q_heads * head_dim)] */
    float *y;                   /* [token][hidden], what a block adds to x */
    float *q;                   /* [token][q_heads][head_dim] */
    float *k, *v;               /* [token][kv_heads][head_dim] */
    float *gate, *up;           /* [token][ffn] */
    float *wanted;              /* [logits row][hidden] */
    float *logits;              /* [logits row][vocab] */
    uint32_t *ids;              /* [token] */
    uint32_t *positions;        /* [token] */
    uint32_t *entry_of;         /* [token] */
    struct attn_list *up_to;    /* [token] all positions up to its own */
    struct attn_query *queries; /* [token] */
    struct kv_place *places;    /* [token] */
    struct pass_kv *kv;         /* [entry] */
    uint64_t bytes;
    struct pass_times times;
    int64_t mark_ns;
};

static struct matrix matrix_of(const struct model_tensor *t)
{
    return (struct matrix){t->type, t->rows, t->cols, t->data};
}

/* Gives the time since the last call to one account. */
static void account(struct pass *f, int64_t *ns)
{
    int64_t now = clock_now_ns();
    *ns += now - f->mark_ns;
    f->mark_ns = now;
}

static float *floats(struct pass *f, uint64_t rows, uint64_t cols)
{
    f->bytes += rows * cols * sizeof(float);
    return mem_alloc_aligned((size_t)(rows * cols), sizeof(float));
}

static void allocate(struct pass *f)
{
    const struct model_config *c = f->config;
    uint64_t tokens = f->options.tokens_max, q_dim = (uint64_t)c->q_heads * c->head_dim;
    uint64_t kv_dim = (uint64_t)c->kv_heads * c->head_dim;
    f->x = floats(f, tokens, c->hidden);
    f->h = floats(f, tokens, q_dim > c->hidden ? q_dim : c->hidden);
    f->y = floats(f, tokens, c->hidden);
    f->q = floats(f, tokens, q_dim);
    f->k = floats(f, tokens, kv_dim);
    f->v = floats(f, tokens, kv_dim);
    f->gate = floats(f, tokens, c->ffn);
    f->up = floats(f, tokens, c->ffn);
    f->wanted = floats(f, f->options.logits_max, c->hidden);
    f->logits = floats(f, f->options.logits_max, c->vocab);
    f->ids = mem_alloc((size_t)tokens, sizeof *f->ids);
    f->positions = mem_alloc((size_t)tokens, sizeof *f->positions);
    f->entry_of = mem_alloc((size_t)tokens, sizeof *f->entry_of);
    f->up_to = mem_alloc((size_t)tokens, sizeof *f->up_to);
    f->queries = mem_alloc((size_t)tokens, sizeof *f->queries);
    f->places = mem_alloc((size_t)tokens, sizeof *f->places);
    f->kv = mem_alloc(f->options.entries_max, sizeof *f->kv);
}

int pass_create(const struct model *model, const struct pass_options *options, struct pass **ret_pass,
                struct err *err)
{
    CHECK(options->tokens_max && options->entries_max && options->logits_max);
    struct pass *f = mem_alloc(1, sizeof *f);
    f->config = model_config(model);
    f->layers = model_layers(model);
    f->embedding = matrix_of(model_token_embedding(model));
    f->output = matrix_of(model_output(model));
    f->output_norm = model_output_norm(model)->data;
    f->options = *options;
    const struct model_rope *rope = &f->config->rope;
    f->inv_freq = mem_alloc(rope->dims / 2 + 1, sizeof *f->inv_freq);
    f->rope = (struct rope){rope->halves ? ROPE_PAIRS_HALVES : ROPE_PAIRS_ADJACENT, (int)rope->dims,
                            f->inv_freq, 1};
    int r = model_rope_frequencies(rope, f->inv_freq, &f->rope.scale);
    if (r < 0)
        err_set(err, r, "model: rotary frequencies: base %g, %u dimensions, factor %g make no sense",
                (double)rope->base, rope->dims, (double)rope->factor);
    else
        r = compute_create_with(
            &(struct compute_options){"cpu", options->threads, options->isa, options->activations},
            &f->compute, err);
    if (r < 0) {
        pass_free(&f);
        return r;
    }
    allocate(f);
    *ret_pass = f;
    return 0;
}

void pass_free(struct pass **pass)
{
    struct pass *f = *pass;
    if (!f)
        return;
    compute_free(&f->compute);
    float **buffers[] = {&f->inv_freq, &f->x,    &f->h,  &f->y,      &f->q,     &f->k,
                         &f->v,        &f->gate, &f->up, &f->wanted, &f->logits};
    for (unsigned i = 0; i < sizeof buffers / sizeof *buffers; i++)
        mem_free(buffers[i]);
    mem_free(&f->ids);
    mem_free(&f->positions);
    mem_free(&f->entry_of);
    mem_free(&f->up_to);
    mem_free(&f->queries);
    mem_free(&f->places);
    mem_free(&f->kv);
    mem_free(pass);
}

/* Lays the tokens of all entries one behind the other. Returns their number. */
static int lay_out(struct pass *f, const struct pass_entry *entries, uint32_t count)
{
    uint32_t n = 0, rows = 0;
    CHECK(count <= f->options.entries_max);
    for (uint32_t e = 0; e < count; e++) {
        CHECK(entries[e].count > 0 && entries[e].count <= f->options.tokens_max - n);
        CHECK(entries[e].logits <= entries[e].count && entries[e].logits <= f->options.logits_max - rows);
        rows += entries[e].logits;
        for (uint32_t i = 0; i < entries[e].count; i++, n++) {
            CHECK(entries[e].tokens[i] < f->config->vocab);
            f->ids[n] = entries[e].tokens[i];
            f->positions[n] = entries[e].position + i;
            f->entry_of[n] = e;
            f->up_to[n] = (struct attn_list){f->positions[n] + 1, NULL};
        }
    }
    memset(f->kv, 0, count * sizeof *f->kv);
    return (int)n;
}

static const struct attn_list nothing = {0, NULL};

/* Turns what the source said of each entry into what the operators want for each token. */
static void aim(struct pass *f, int n)
{
    for (int t = 0; t < n; t++) {
        const struct pass_kv *kv = &f->kv[f->entry_of[t]];
        f->places[t] = (struct kv_place){&kv->view, &f->positions[t], 1};
        f->queries[t] = (struct attn_query){&kv->view, &f->up_to[t], 1};
        if (kv->dropped) {
            f->queries[t].lists = &nothing;
            continue;
        }
        CHECK(!kv->view.slotted || (kv->lists && kv->write));
        if (kv->write)
            f->places[t] = (struct kv_place){&kv->view, kv->write, 0};
        if (kv->lists)
            f->queries[t] = (struct attn_query){&kv->view, kv->lists, 0};
    }
}

/* Entries that were dropped are left out: their places may be anywhere. */
static void write_kv(struct pass *f, int n)
{
    int kv_heads = (int)f->config->kv_heads, head_dim = (int)f->config->head_dim;
    size_t row = (size_t)kv_heads * (size_t)head_dim;
    for (int t = 0; t < n;) {
        int end = t;
        while (end < n && !f->kv[f->entry_of[end]].dropped)
            end++;
        if (end > t)
            compute_kv_write(f->compute, f->places + t, f->k + (size_t)t * row, f->v + (size_t)t * row,
                             end - t, kv_heads, head_dim);
        t = end + 1;
    }
}

/* Queries, keys and values of a layer: all that can be computed before its tables and rows are there. */
static void project(struct pass *f, const struct model_layer *layer, int n)
{
    const struct model_config *c = f->config;
    struct compute *k = f->compute;
    struct matrix wq = matrix_of(&layer->wq), wk = matrix_of(&layer->wk), wv = matrix_of(&layer->wv);
    compute_rmsnorm(k, f->h, f->x, layer->attn_norm.data, n, (int)c->hidden, c->rms_eps);
    account(f, &f->times.other);
    const struct product qkv[] = {
        {f->q, &wq, layer->q_bias.data}, {f->k, &wk, layer->k_bias.data}, {f->v, &wv, layer->v_bias.data}};
    compute_matmul_many(k, qkv, 3, f->h, n);
    account(f, &f->times.matmul);
    if (c->qk_norm) { /* each head is a row of its own */
        compute_rmsnorm(k, f->q, f->q, layer->q_norm.data, n * (int)c->q_heads, (int)c->head_dim, c->rms_eps);
        compute_rmsnorm(k, f->k, f->k, layer->k_norm.data, n * (int)c->kv_heads, (int)c->head_dim,
                        c->rms_eps);
    }
    compute_rope(k, f->q, &f->rope, f->positions, n, (int)c->q_heads, (int)c->head_dim);
    compute_rope(k, f->k, &f->rope, f->positions, n, (int)c->kv_heads, (int)c->head_dim);
    account(f, &f->times.other);
}

static void attend(struct pass *f, const struct model_layer *layer, int n)
{
    const struct model_config *c = f->config;
    struct compute *k = f->compute;
    struct matrix wo = matrix_of(&layer->wo);
    write_kv(f, n); /* before attention: a token's own position is in its list */
    account(f, &f->times.other);
    compute_attention(k, f->h, f->q, f->queries, n, (int)c->q_heads, (int)c->kv_heads, (int)c->head_dim,
                      1.0f / sqrtf((float)c->head_dim));
    account(f, &f->times.attention);
    compute_matmul(k, f->y, &wo, f->h, NULL, n);
    account(f, &f->times.matmul);
    compute_add(k, f->x, f->y, (size_t)n * c->hidden);
}

static void feed_forward(struct pass *f, const struct model_layer *layer, int n)
{
    const struct model_config *c = f->config;
    struct compute *k = f->compute;
    struct matrix gate = matrix_of(&layer->gate), up = matrix_of(&layer->up), down = matrix_of(&layer->down);
    compute_rmsnorm(k, f->h, f->x, layer->ffn_norm.data, n, (int)c->hidden, c->rms_eps);
    account(f, &f->times.other);
    const struct product both[] = {{f->gate, &gate, NULL}, {f->up, &up, NULL}};
    compute_matmul_many(k, both, 2, f->h, n);
    account(f, &f->times.matmul);
    compute_swiglu(k, f->gate, f->gate, f->up, n, (int)c->ffn);
    account(f, &f->times.other);
    compute_matmul(k, f->y, &down, f->gate, NULL, n);
    account(f, &f->times.matmul);
    compute_add(k, f->x, f->y, (size_t)n * c->hidden);
    account(f, &f->times.other);
}

static void head(struct pass *f, const struct pass_entry *entries, uint32_t count)
{
    size_t hidden = f->config->hidden;
    uint32_t end = 0, rows = 0;
    for (uint32_t e = 0; e < count; e++) {
        end += entries[e].count;
        memcpy(f->wanted + rows * hidden, f->x + (end - entries[e].logits) * hidden,
               entries[e].logits * hidden * sizeof *f->wanted);
        rows += entries[e].logits;
    }
    if (rows == 0)
        return;
    compute_rmsnorm(f->compute, f->wanted, f->wanted, f->output_norm, (int)rows, (int)hidden,
                    f->config->rms_eps);
    compute_matmul(f->compute, f->logits, &f->output, f->wanted, NULL, (int)rows);
    account(f, &f->times.matmul);
}

int pass_run(struct pass *f, const struct pass_entry *entries, uint32_t count,
             const struct pass_source *source, struct err *err)
{
    int n = lay_out(f, entries, count);
    f->mark_ns = clock_now_ns();
    compute_embed(f->compute, f->x, &f->embedding, f->ids, n);
    account(f, &f->times.other);
    for (uint32_t l = 0; l < f->config->layers; l++) {
        if (source->hidden)
            source->hidden(source->arg, l, f->x);
        project(f, &f->layers[l], n);
        int r = source->layer(source->arg, l, f->kv, err);
        if (r < 0)
            return r;
        aim(f, n);
        f->mark_ns = clock_now_ns(); /* the source keeps account of its own waits */
        attend(f, &f->layers[l], n);
        feed_forward(f, &f->layers[l], n);
        if (source->layer_done)
            source->layer_done(source->arg, l);
    }
    if (source->hidden)
        source->hidden(source->arg, f->config->layers, f->x);
    head(f, entries, count);
    return 0;
}

float *pass_logits(struct pass *f, uint32_t row)
{
    CHECK(row < f->options.logits_max);
    return f->logits + (size_t)row * f->config->vocab;
}

const float *pass_queries(const struct pass *f)
{
    return f->q;
}

uint32_t pass_vocab(const struct pass *f)
{
    return f->config->vocab;
}

const struct pass_times *pass_times(const struct pass *f)
{
    return &f->times;
}

const char *pass_backend(const struct pass *f)
{
    return compute_name(f->compute);
}

uint64_t pass_bytes(const struct pass *f)
{
    return f->bytes;
}
