/* Binds a model's tensors to their places, whatever format they come from. Fills a struct model that the
 * caller owns. Every weight is held against the configuration; a weight that nobody would use is refused,
 * because a model without, say, its biases answers nonsense. Only vectors are read while binding. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/model_private.h"

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
    case DTYPE_Q2_K:
    case DTYPE_Q3_K:
    case DTYPE_Q4_K:
    case DTYPE_Q5_K:
    case DTYPE_Q6_K:
    case DTYPE_IQ4_NL:
        return true;
    default:
        return false;
    }
}

/* What a weight must be: rows 0 stands for a vector of `cols`. */
struct want {
    const char *name;
    uint64_t rows, cols;
    struct model_tensor *to;
};

static bool plain(enum dtype type)
{
    return type == DTYPE_F32 || type == DTYPE_F16 || type == DTYPE_BF16;
}

/* A float32 copy that the model owns. The source may lie at any address. */
static const float *convert_vector(struct model *m, const struct weight *t)
{
    float *to = model_own(m, t->cols * sizeof *to);
    const uint8_t *from = t->data;
    if (t->type == DTYPE_F32) {
        memcpy(to, from, t->bytes);
        return to;
    }
    for (uint64_t i = 0; i < t->cols; i++) {
        uint16_t half;
        memcpy(&half, from + 2 * i, sizeof half);
        to[i] = t->type == DTYPE_F16 ? dtype_f16_to_f32(half) : dtype_bf16_to_f32(half);
    }
    return to;
}

static bool aligned(const struct weight *t)
{
    return (uintptr_t)t->data % (t->type == DTYPE_F32 ? 4 : 2) == 0;
}

/* Files of old writers have headers of any length, so that no element is aligned. */
static const void *aligned_data(struct model *m, const struct weight *t)
{
    return aligned(t) ? t->data : memcpy(model_own(m, t->bytes), t->data, t->bytes);
}

static int refuse_shape(const struct weight *t, const struct want *w, struct err *err)
{
    bool vector = w->rows == 0;
    return err_set(err, -EBADMSG,
                   "%.180s: tensor %s: shape: found %" PRIu64 " x %" PRIu64 " (%" PRIu32
                   " dimensions), expected %" PRIu64 " x %" PRIu64,
                   t->path, w->name, t->cols, t->rows, t->dims, w->cols, vector ? 1 : w->rows);
}

static int bind(struct model *m, const struct want *w, struct err *err)
{
    const struct weight *t = weights_use(&m->weights, w->name);
    bool vector = w->rows == 0;
    if (!t)
        return model_refuse(m, err, -EBADMSG, "tensor %s: found no such tensor, expected it", w->name);
    if (t->dims != (vector ? 1 : 2) || t->cols != w->cols || (!vector && t->rows != w->rows))
        return refuse_shape(t, w, err);
    if (vector ? !plain(t->type) : !usable(t->type))
        return err_set(err, -ENOTSUP, "%.180s: tensor %s: type: found %s, expected %s", t->path, w->name,
                       t->type_name,
                       vector ? "F32, F16 or BF16"
                              : "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K to Q6_K or IQ4_NL");
    *w->to = (struct model_tensor){t->type, (uint32_t)t->rows, (uint32_t)t->cols, NULL, t->bytes};
    if (vector && (t->type != DTYPE_F32 || !aligned(t))) {
        w->to->data = convert_vector(m, t);
        w->to->type = DTYPE_F32;
        w->to->bytes = t->cols * sizeof(float);
    } else {
        w->to->data = aligned_data(m, t);
    }
    return 0;
}

enum size { SIZE_VECTOR, SIZE_HIDDEN, SIZE_Q, SIZE_KV, SIZE_FFN, SIZE_HEAD, SIZES };

/* The parts of a layer by both names. */
static const struct part {
    const char *names[2]; /* enum model_naming */
    enum size rows, cols;
    size_t offset;
    enum { ALWAYS, BIAS, NORM } when;
} parts[] = {
#define PART(field) offsetof(struct model_layer, field)
    {{"attn_norm.weight", "input_layernorm.weight"}, SIZE_VECTOR, SIZE_HIDDEN, PART(attn_norm), ALWAYS},
    {{"attn_q.weight", "self_attn.q_proj.weight"}, SIZE_Q, SIZE_HIDDEN, PART(wq), ALWAYS},
    {{"attn_k.weight", "self_attn.k_proj.weight"}, SIZE_KV, SIZE_HIDDEN, PART(wk), ALWAYS},
    {{"attn_v.weight", "self_attn.v_proj.weight"}, SIZE_KV, SIZE_HIDDEN, PART(wv), ALWAYS},
    {{"attn_output.weight", "self_attn.o_proj.weight"}, SIZE_HIDDEN, SIZE_Q, PART(wo), ALWAYS},
    {{"ffn_norm.weight", "post_attention_layernorm.weight"},
     SIZE_VECTOR,
     SIZE_HIDDEN,
     PART(ffn_norm),
     ALWAYS},
    {{"ffn_gate.weight", "mlp.gate_proj.weight"}, SIZE_FFN, SIZE_HIDDEN, PART(gate), ALWAYS},
    {{"ffn_up.weight", "mlp.up_proj.weight"}, SIZE_FFN, SIZE_HIDDEN, PART(up), ALWAYS},
    {{"ffn_down.weight", "mlp.down_proj.weight"}, SIZE_HIDDEN, SIZE_FFN, PART(down), ALWAYS},
    {{"attn_q.bias", "self_attn.q_proj.bias"}, SIZE_VECTOR, SIZE_Q, PART(q_bias), BIAS},
    {{"attn_k.bias", "self_attn.k_proj.bias"}, SIZE_VECTOR, SIZE_KV, PART(k_bias), BIAS},
    {{"attn_v.bias", "self_attn.v_proj.bias"}, SIZE_VECTOR, SIZE_KV, PART(v_bias), BIAS},
    {{"attn_q_norm.weight", "self_attn.q_norm.weight"}, SIZE_VECTOR, SIZE_HEAD, PART(q_norm), NORM},
    {{"attn_k_norm.weight", "self_attn.k_norm.weight"}, SIZE_VECTOR, SIZE_HEAD, PART(k_norm), NORM},
#undef PART
};

static int bind_layer(struct model *m, enum model_naming naming, uint32_t index, struct err *err)
{
    const struct model_config *c = &m->config;
    const uint64_t sizes[SIZES] = {[SIZE_HIDDEN] = c->hidden,
                                   [SIZE_Q] = (uint64_t)c->q_heads * c->head_dim,
                                   [SIZE_KV] = (uint64_t)c->kv_heads * c->head_dim,
                                   [SIZE_FFN] = c->ffn,
                                   [SIZE_HEAD] = c->head_dim};
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++) {
        const struct part *p = &parts[i];
        if ((p->when == BIAS && !c->qkv_bias) || (p->when == NORM && !c->qk_norm))
            continue;
        char name[80];
        snprintf(name, sizeof name, "%s.%" PRIu32 ".%s", naming == MODEL_NAMING_GGUF ? "blk" : "model.layers",
                 index, p->names[naming]);
        struct want want = {name, sizes[p->rows], sizes[p->cols],
                            (struct model_tensor *)((char *)&m->layers[index] + p->offset)};
        int rc = bind(m, &want, err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int bind_outer(struct model *m, enum model_naming naming, struct err *err)
{
    static const char *const names[2][3] = {
        {"token_embd.weight", "output_norm.weight", "output.weight"},
        {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"},
    };
    const struct model_config *c = &m->config;
    const struct want wants[] = {
        {names[naming][0], c->vocab, c->hidden, &m->token_embedding},
        {names[naming][1], 0, c->hidden, &m->output_norm},
        {names[naming][c->tied ? 0 : 2], c->vocab, c->hidden, &m->output},
    };
    for (unsigned i = 0; i < sizeof wants / sizeof *wants; i++) {
        int rc = bind(m, &wants[i], err);
        if (rc < 0)
            return rc;
    }
    if (c->tied) { /* a second read would own a second copy where the data is not aligned */
        m->output.data = m->token_embedding.data;
        weights_use(&m->weights, names[naming][2]);
    }
    return 0;
}

static int bind_freq_factors(struct model *m, struct err *err)
{
    struct model_rope *r = &m->config.rope;
    struct model_tensor t = {0};
    struct want want = {"rope_freqs.weight", 0, r->dims / 2, &t};
    if (!weights_find(&m->weights, want.name))
        return 0;
    int rc = bind(m, &want, err);
    if (rc < 0)
        return rc;
    r->freq_factors = t.data;
    float inv_freq[MODEL_HEAD_DIM_MAX / 2], scale;
    if (model_rope_frequencies(r, inv_freq, &scale) < 0)
        return model_refuse(m, err, -EBADMSG, "tensor %s: found a divisor that is not a positive number",
                            want.name);
    return 0;
}

/* Frequencies that old checkpoints stored beside the weights; they follow from the configuration. */
static void use_stored_frequencies(struct model *m)
{
    char name[80];
    for (uint32_t i = 0; i < m->config.layers; i++) {
        snprintf(name, sizeof name, "model.layers.%" PRIu32 ".self_attn.rotary_emb.inv_freq", i);
        weights_use(&m->weights, name);
    }
}

int model_bind(struct model *model, enum model_naming naming, struct err *err)
{
    const struct model_config *c = &model->config;
    int rc = bind_outer(model, naming, err);
    if (!rc && naming == MODEL_NAMING_GGUF)
        rc = bind_freq_factors(model, err);
    if (rc < 0)
        return rc;
    model->layers = mem_alloc(c->layers, sizeof *model->layers);
    for (uint32_t i = 0; i < c->layers && !rc; i++)
        rc = bind_layer(model, naming, i, err);
    if (rc < 0)
        return rc;
    if (naming == MODEL_NAMING_FOLDER)
        use_stored_frequencies(model);
    const struct weight *t = weights_unused(&model->weights);
    if (t)
        return err_set(err, -ENOTSUP,
                       "%.180s: tensor %.*s: found, expected no such tensor in a %s model of %" PRIu32
                       " layers",
                       t->path, (int)(t->name.bytes < 120 ? t->name.bytes : 120), t->name.text,
                       model_arch_name(c->arch), c->layers);
    return 0;
}
