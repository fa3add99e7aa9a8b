/* Models of GGUF architecture "llama": configuration and weights. Fills a struct model that the caller owns.
 * Every number is held against a range before it is used, every weight against the configuration; a weight
 * that nobody would use is refused, because a model without, say, its biases answers nonsense. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/model_private.h"

#define KEY(name) "llama." name

static int refuse(const struct model *m, struct err *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static int refuse(const struct model *m, struct err *err, int code, const char *fmt, ...)
{
    char detail[320];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(detail, sizeof detail, fmt, ap);
    va_end(ap);
    return err_set(err, code, "%.180s: %s", gguf_path(m->gguf), detail);
}

struct range {
    const char *key;
    uint32_t least, most;
    uint32_t *to;
};

static int read_range(const struct model *m, const struct range *r, struct err *err)
{
    uint32_t value = 0;
    int rc = gguf_u32(m->gguf, r->key, &value, err);
    if (rc < 0)
        return rc;
    if (value < r->least || value > r->most)
        return refuse(m, err, -EBADMSG, "%s: found %" PRIu32 ", expected %" PRIu32 " to %" PRIu32, r->key,
                      value, r->least, r->most);
    *r->to = value;
    return 0;
}

/* As read_range, but *to keeps its default when the key is absent. */
static int read_optional(const struct model *m, const struct range *r, struct err *err)
{
    return gguf_has(m->gguf, r->key) ? read_range(m, r, err) : 0;
}

/* *to keeps its default when the key is absent. */
static int read_float(const struct model *m, const char *key, float most, float *to, struct err *err)
{
    float value = 0;
    if (!gguf_has(m->gguf, key))
        return 0;
    int rc = gguf_f32(m->gguf, key, &value, err);
    if (rc < 0)
        return rc;
    if (!(value > 0 && value <= most))
        return refuse(m, err, -EBADMSG, "%s: found %g, expected more than 0, at most %g", key, (double)value,
                      (double)most);
    *to = value;
    return 0;
}

static int read_sizes(struct model *m, struct err *err)
{
    struct model_config *c = &m->config;
    uint32_t value_dim = 0, experts = 0;
    const struct range required[] = {
        {KEY("block_count"), 1, MODEL_LAYERS_MAX, &c->layers},
        {KEY("embedding_length"), 1, 1 << 17, &c->hidden},
        {KEY("feed_forward_length"), 1, 1 << 20, &c->ffn},
        {KEY("context_length"), 1, 1u << 31, &c->context_max},
        {KEY("attention.head_count"), 1, 4096, &c->q_heads},
    };
    int rc = 0;
    for (unsigned i = 0; i < sizeof required / sizeof *required; i++)
        if ((rc = read_range(m, &required[i], err)) < 0)
            return gguf_required(rc, err);
    c->kv_heads = c->q_heads;
    c->head_dim = c->hidden / c->q_heads;
    const struct range optional[] = {
        {KEY("attention.head_count_kv"), 1, 4096, &c->kv_heads},
        {KEY("attention.key_length"), 2, MODEL_HEAD_DIM_MAX, &c->head_dim},
        {KEY("attention.value_length"), 2, MODEL_HEAD_DIM_MAX, &value_dim},
        {KEY("expert_count"), 0, UINT32_MAX, &experts},
    };
    for (unsigned i = 0; i < sizeof optional / sizeof *optional; i++)
        if ((rc = read_optional(m, &optional[i], err)) < 0)
            return rc;
    if (experts)
        return refuse(m, err, -ENOTSUP, KEY("expert_count") ": found %" PRIu32 ", expected a dense model",
                      experts);
    if (c->q_heads % c->kv_heads)
        return refuse(m, err, -EBADMSG,
                      KEY("attention.head_count_kv") ": found %" PRIu32 ", expected a divisor of %" PRIu32
                                                     " query heads",
                      c->kv_heads, c->q_heads);
    if (!gguf_has(m->gguf, KEY("attention.key_length")) && c->hidden % c->q_heads)
        return refuse(m, err, -EBADMSG,
                      KEY("attention.head_count") ": found %" PRIu32
                                                  ", expected a divisor of the embedding length %" PRIu32,
                      c->q_heads, c->hidden);
    if (c->head_dim < 2 || c->head_dim % 2 || c->head_dim > MODEL_HEAD_DIM_MAX)
        return refuse(m, err, -EBADMSG, "head dimension: found %" PRIu32 ", expected an even one up to %d",
                      c->head_dim, MODEL_HEAD_DIM_MAX);
    if (value_dim && value_dim != c->head_dim)
        return refuse(m, err, -ENOTSUP,
                      KEY("attention.value_length") ": found %" PRIu32 ", expected %" PRIu32 " as for keys",
                      value_dim, c->head_dim);
    return 0;
}

static int read_scaling(struct model *m, struct err *err)
{
    struct model_rope *r = &m->config.rope;
    const struct gguf *g = m->gguf;
    const char *type_key = KEY("rope.scaling.type"), *factor_key = KEY("rope.scaling.factor");
    struct name type = {0};
    bool said = gguf_has(g, type_key);
    int rc = said ? gguf_string(g, type_key, &type, err) : 0;
    if (rc < 0)
        return rc;
    bool old = gguf_has(g, KEY("rope.scale_linear"));
    if (old && (said || gguf_has(g, factor_key)))
        return refuse(m, err, -EBADMSG,
                      KEY("rope.scale_linear") ": found beside rope.scaling, expected one of them");
    if (old)
        factor_key = KEY("rope.scale_linear");
    if (said && name_is(type, "yarn"))
        r->scaling = MODEL_ROPE_SCALING_YARN;
    else if (said ? name_is(type, "linear") : gguf_has(g, factor_key))
        r->scaling = MODEL_ROPE_SCALING_LINEAR; /* a factor alone has always meant linear */
    else if (said && !name_is(type, "none"))
        return refuse(m, err, -ENOTSUP, "%s: found \"%.*s\", expected \"none\", \"linear\" or \"yarn\"",
                      type_key, (int)(type.bytes < 40 ? type.bytes : 40), type.text);
    if (r->scaling == MODEL_ROPE_SCALING_NONE)
        return 0;
    if (!gguf_has(g, factor_key))
        return refuse(m, err, -EBADMSG, "%s: found no such key, expected it with scaling type %.*s",
                      factor_key, (int)type.bytes, type.text);
    if ((rc = read_float(m, factor_key, 65536, &r->factor, err)) < 0)
        return rc;
    if (r->scaling == MODEL_ROPE_SCALING_LINEAR)
        return 0;
    struct range original = {KEY("rope.scaling.original_context_length"), 1, 1u << 31, &r->original_context};
    if ((rc = read_range(m, &original, err)) < 0)
        return gguf_required(rc, err);
    if ((rc = read_float(m, KEY("rope.scaling.attn_factor"), 1e4f, &r->attn_factor, err)) < 0 ||
        (rc = read_float(m, KEY("rope.scaling.yarn_attn_factor"), 1e4f, &r->attn_factor, err)) < 0 ||
        (rc = read_float(m, KEY("rope.scaling.yarn_beta_fast"), 1e6f, &r->beta_fast, err)) < 0)
        return rc;
    return read_float(m, KEY("rope.scaling.yarn_beta_slow"), 1e6f, &r->beta_slow, err);
}

static int read_rope(struct model *m, struct err *err)
{
    struct model_config *c = &m->config;
    struct model_rope *r = &c->rope;
    *r = (struct model_rope){
        .base = 10000, .dims = c->head_dim, .factor = 1, .beta_fast = 32, .beta_slow = 1, .attn_factor = 1};
    struct range dims = {KEY("rope.dimension_count"), 2, c->head_dim, &r->dims};
    int rc = read_optional(m, &dims, err);
    if (rc < 0)
        return rc;
    if (r->dims % 2)
        return refuse(m, err, -EBADMSG, "%s: found %" PRIu32 ", expected an even number", dims.key, r->dims);
    if ((rc = read_float(m, KEY("rope.freq_base"), 1e12f, &r->base, err)) < 0)
        return rc;
    if (r->base <= 1)
        return refuse(m, err, -EBADMSG, KEY("rope.freq_base") ": found %g, expected more than 1",
                      (double)r->base);
    return read_scaling(m, err);
}

static bool usable(enum dtype type)
{
    switch (type) {
    case DTYPE_F32:
    case DTYPE_F16:
    case DTYPE_BF16:
    case DTYPE_Q8_0:
    case DTYPE_Q4_0:
    case DTYPE_Q4_1:
    case DTYPE_Q5_0:
    case DTYPE_Q5_1:
        return true;
    default:
        return false;
    }
}

/* What a weight must be: rows 0 stands for a float32 vector of `cols`. */
struct want {
    const char *name;
    uint64_t rows, cols;
    struct model_tensor *to;
};

static int read_tensor(const struct model *m, const struct want *w, struct err *err)
{
    const struct gguf_tensor *t = gguf_tensor(m->gguf, w->name);
    bool vector = w->rows == 0;
    if (!t)
        return refuse(m, err, -EBADMSG, "tensor %s: found no such tensor, expected it", w->name);
    if (t->dims != (vector ? 1 : 2) || t->shape[0] != w->cols || (!vector && t->shape[1] != w->rows))
        return refuse(m, err, -EBADMSG,
                      "tensor %s: shape: found %" PRIu64 " x %" PRIu64 " (%" PRIu32
                      " dimensions), expected %" PRIu64 " x %" PRIu64,
                      w->name, t->shape[0], t->shape[1], t->dims, w->cols, vector ? 1 : w->rows);
    if (vector ? t->type != DTYPE_F32 : !usable(t->type))
        return refuse(m, err, -ENOTSUP, "tensor %s: type: found %s, expected %s", w->name,
                      dtype_info((unsigned)t->type)->name,
                      vector ? "F32" : "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1");
    *w->to = (struct model_tensor){t->type, (uint32_t)t->shape[1], (uint32_t)t->shape[0], t->data, t->bytes};
    return 0;
}

static const char *const layer_parts[] = {"attn_norm", "attn_q",   "attn_k", "attn_v",  "attn_output",
                                          "ffn_norm",  "ffn_gate", "ffn_up", "ffn_down"};
#define LAYER_PARTS (sizeof layer_parts / sizeof *layer_parts)

static int read_layer(struct model *m, uint32_t index, struct err *err)
{
    const struct model_config *c = &m->config;
    struct model_layer *l = &m->layers[index];
    uint64_t q = (uint64_t)c->q_heads * c->head_dim, kv = (uint64_t)c->kv_heads * c->head_dim;
    const struct want wants[LAYER_PARTS] = {
        /* in the order of layer_parts */
        {NULL, 0, c->hidden, &l->attn_norm}, {NULL, q, c->hidden, &l->wq},
        {NULL, kv, c->hidden, &l->wk},       {NULL, kv, c->hidden, &l->wv},
        {NULL, c->hidden, q, &l->wo},        {NULL, 0, c->hidden, &l->ffn_norm},
        {NULL, c->ffn, c->hidden, &l->gate}, {NULL, c->ffn, c->hidden, &l->up},
        {NULL, c->hidden, c->ffn, &l->down},
    };
    for (unsigned i = 0; i < LAYER_PARTS; i++) {
        char name[64];
        struct want want = wants[i];
        snprintf(name, sizeof name, "blk.%" PRIu32 ".%s.weight", index, layer_parts[i]);
        want.name = name;
        int rc = read_tensor(m, &want, err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static bool known_tensor(const struct model *m, struct name name)
{
    static const char *const outer[] = {"token_embd.weight", "output_norm.weight", "output.weight",
                                        "rope_freqs.weight"};
    for (unsigned i = 0; i < sizeof outer / sizeof *outer; i++)
        if (name_is(name, outer[i]))
            return true;
    uint32_t layer = 0;
    char text[64], again[64];
    snprintf(text, sizeof text, "%.*s", (int)(name.bytes < sizeof text ? name.bytes : 0), name.text);
    if (sscanf(text, "blk.%" SCNu32, &layer) != 1 || layer >= m->config.layers)
        return false;
    for (unsigned i = 0; i < LAYER_PARTS; i++) {
        snprintf(again, sizeof again, "blk.%" PRIu32 ".%s.weight", layer, layer_parts[i]);
        if (!strcmp(text, again))
            return true;
    }
    return false;
}

static int read_freq_factors(struct model *m, struct err *err)
{
    struct model_rope *r = &m->config.rope;
    struct model_tensor t = {0};
    struct want want = {"rope_freqs.weight", 0, r->dims / 2, &t};
    if (!gguf_tensor(m->gguf, want.name))
        return 0;
    int rc = read_tensor(m, &want, err);
    if (rc < 0)
        return rc;
    r->freq_factors = t.data;
    float inv_freq[MODEL_HEAD_DIM_MAX / 2], scale;
    if (model_rope_frequencies(r, inv_freq, &scale) < 0)
        return refuse(m, err, -EBADMSG, "tensor %s: found a divisor that is not a positive number",
                      want.name);
    return 0;
}

static int read_outer(struct model *m, struct err *err)
{
    struct model_config *c = &m->config;
    const struct gguf_tensor *embedding = gguf_tensor(m->gguf, "token_embd.weight");
    if (!embedding || embedding->dims != 2 || embedding->shape[1] > 1 << 24)
        return refuse(m, err, -EBADMSG,
                      "tensor token_embd.weight: found %s, expected a matrix of one row a token",
                      embedding ? "another shape" : "no such tensor");
    c->vocab = (uint32_t)embedding->shape[1];
    uint32_t said = c->vocab;
    struct range size = {KEY("vocab_size"), 1, UINT32_MAX, &said};
    int rc = read_optional(m, &size, err);
    if (rc < 0)
        return rc;
    if (said != c->vocab)
        return refuse(m, err, -EBADMSG,
                      "%s: found %" PRIu32 ", expected %" PRIu32 " as token_embd.weight has rows", size.key,
                      said, c->vocab);
    if (m->vocab && m->vocab->count != c->vocab)
        return refuse(m, err, -EBADMSG,
                      "tokenizer.ggml.tokens: found %" PRIu32 " tokens, expected %" PRIu32
                      " as token_embd.weight has rows",
                      m->vocab->count, c->vocab);
    c->bos = m->vocab ? m->vocab->bos : VOCAB_NO_TOKEN;
    c->eos = m->vocab ? m->vocab->eos : VOCAB_NO_TOKEN;
    c->tied = !gguf_tensor(m->gguf, "output.weight");
    const struct want wants[] = {
        {"token_embd.weight", c->vocab, c->hidden, &m->token_embedding},
        {"output_norm.weight", 0, c->hidden, &m->output_norm},
        {c->tied ? "token_embd.weight" : "output.weight", c->vocab, c->hidden, &m->output},
    };
    for (unsigned i = 0; i < sizeof wants / sizeof *wants; i++)
        if ((rc = read_tensor(m, &wants[i], err)) < 0)
            return rc;
    return 0;
}

int model_llama_load(struct model *model, struct err *err)
{
    struct model_config *c = &model->config;
    c->arch = MODEL_ARCH_LLAMA;
    int rc;
    if ((rc = read_sizes(model, err)) < 0 || (rc = read_rope(model, err)) < 0)
        return rc;
    const char *eps_key = KEY("attention.layer_norm_rms_epsilon");
    if (!gguf_has(model->gguf, eps_key))
        return refuse(model, err, -EBADMSG, "%s: found no such key, expected it", eps_key);
    if ((rc = read_float(model, eps_key, 0.1f, &c->rms_eps, err)) < 0 || (rc = read_outer(model, err)) < 0 ||
        (rc = read_freq_factors(model, err)) < 0)
        return rc;
    model->layers = mem_alloc(c->layers, sizeof *model->layers);
    for (uint32_t i = 0; i < c->layers; i++)
        if ((rc = read_layer(model, i, err)) < 0)
            return rc;
    for (uint32_t i = 0; i < gguf_tensors(model->gguf); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(model->gguf, i);
        if (!known_tensor(model, t->name))
            return refuse(model, err, -ENOTSUP,
                          "tensor %.*s: found, expected no such tensor in a llama model of %" PRIu32
                          " layers",
                          (int)t->name.bytes, t->name.text, c->layers);
    }
    return 0;
}
