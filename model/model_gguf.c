/* Models in GGUF: their configuration from the file's metadata. Fills a struct model that the caller owns.
 * Every number is held against a range before it is used. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/model_private.h"

/* A metadata key of the model's architecture: "llama." and the rest. */
struct key {
    char text[80];
};

static struct key key_of(const struct model *m, const char *rest)
{
    struct key key;
    snprintf(key.text, sizeof key.text, "%s.%s", model_arch_name(m->config.arch), rest);
    return key;
}

static const struct gguf *meta(const struct model *m)
{
    return m->weights.ggufs[0];
}

static bool has(const struct model *m, const char *rest)
{
    struct key key = key_of(m, rest);
    return gguf_has(meta(m), key.text);
}

struct range {
    const char *rest; /* of the key */
    uint32_t least, most;
    uint32_t *to;
};

/* -ENOENT when the key is absent. */
static int read_range(const struct model *m, const struct range *r, struct err *err)
{
    uint32_t value = 0;
    struct key key = key_of(m, r->rest);
    int rc = gguf_u32(meta(m), key.text, &value, err);
    if (rc < 0)
        return rc;
    if (value < r->least || value > r->most)
        return model_refuse(m, err, -EBADMSG, "%s: found %" PRIu32 ", expected %" PRIu32 " to %" PRIu32,
                            key.text, value, r->least, r->most);
    *r->to = value;
    return 0;
}

/* As read_range, but *to keeps its default when the key is absent. */
static int read_optional(const struct model *m, const struct range *r, struct err *err)
{
    return has(m, r->rest) ? read_range(m, r, err) : 0;
}

/* *to keeps its default when the key is absent. */
static int read_float(const struct model *m, const char *rest, float most, float *to, struct err *err)
{
    float value = 0;
    struct key key = key_of(m, rest);
    if (!gguf_has(meta(m), key.text))
        return 0;
    int rc = gguf_f32(meta(m), key.text, &value, err);
    if (rc < 0)
        return rc;
    if (!(value > 0 && value <= most))
        return model_refuse(m, err, -EBADMSG, "%s: found %g, expected more than 0, at most %g", key.text,
                            (double)value, (double)most);
    *to = value;
    return 0;
}

/* Features that this program lacks: refused by name where the file uses them. */
static int check_features(const struct model *m, uint32_t value_dim, uint32_t experts, uint32_t window,
                          struct err *err)
{
    const struct model_config *c = &m->config;
    if (experts)
        return model_refuse(m, err, -ENOTSUP, "%s: found %" PRIu32 ", expected a dense model",
                            key_of(m, "expert_count").text, experts);
    if (value_dim && value_dim != c->head_dim)
        return model_refuse(m, err, -ENOTSUP, "%s: found %" PRIu32 ", expected %" PRIu32 " as for keys",
                            key_of(m, "attention.value_length").text, value_dim, c->head_dim);
    if (window && window < c->context_max)
        return model_refuse(m, err, -ENOTSUP,
                            "%s: found %" PRIu32 ", expected none, or at least the context of %" PRIu32,
                            key_of(m, "attention.sliding_window").text, window, c->context_max);
    return 0;
}

static int read_sizes(struct model *m, struct err *err)
{
    struct model_config *c = &m->config;
    uint32_t value_dim = 0, experts = 0, window = 0;
    const struct range required[] = {
        {"block_count", 1, MODEL_LAYERS_MAX, &c->layers}, {"embedding_length", 1, 1 << 17, &c->hidden},
        {"feed_forward_length", 1, 1 << 20, &c->ffn},     {"context_length", 1, 1u << 31, &c->context_max},
        {"attention.head_count", 1, 4096, &c->q_heads},
    };
    int rc = 0;
    for (unsigned i = 0; i < sizeof required / sizeof *required; i++)
        if ((rc = read_range(m, &required[i], err)) < 0)
            return gguf_required(rc, err);
    c->kv_heads = c->q_heads;
    c->head_dim = c->hidden / c->q_heads;
    const struct range optional[] = {
        {"attention.head_count_kv", 1, 4096, &c->kv_heads},
        {"attention.key_length", 2, MODEL_HEAD_DIM_MAX, &c->head_dim},
        {"attention.value_length", 2, MODEL_HEAD_DIM_MAX, &value_dim},
        {"expert_count", 0, UINT32_MAX, &experts},
        {"attention.sliding_window", 0, UINT32_MAX, &window},
    };
    for (unsigned i = 0; i < sizeof optional / sizeof *optional; i++)
        if ((rc = read_optional(m, &optional[i], err)) < 0)
            return rc;
    if ((rc = check_features(m, value_dim, experts, window, err)) < 0)
        return rc;
    struct key heads = key_of(m, "attention.head_count_kv");
    return model_check_heads(m, heads.text, has(m, "attention.key_length"), err);
}

/* *ret_factor: the key that holds the factor. */
static int read_scaling_type(struct model *m, const char **ret_factor, struct err *err)
{
    struct model_rope *r = &m->config.rope;
    struct key key = key_of(m, "rope.scaling.type");
    struct name type = {0};
    bool said = gguf_has(meta(m), key.text), old = has(m, "rope.scale_linear");
    int rc = said ? gguf_string(meta(m), key.text, &type, err) : 0;
    if (rc < 0)
        return rc;
    *ret_factor = old ? "rope.scale_linear" : "rope.scaling.factor";
    if (old && (said || has(m, "rope.scaling.factor")))
        return model_refuse(m, err, -EBADMSG, "%s: found beside rope.scaling, expected one of them",
                            key_of(m, "rope.scale_linear").text);
    if (said && name_is(type, "yarn"))
        r->scaling = MODEL_ROPE_SCALING_YARN;
    else if (said ? name_is(type, "linear") : has(m, *ret_factor))
        r->scaling = MODEL_ROPE_SCALING_LINEAR; /* a factor alone has always meant linear */
    else if (said && !name_is(type, "none"))
        return model_refuse(m, err, -ENOTSUP, "%s: found \"%.*s\", expected \"none\", \"linear\" or \"yarn\"",
                            key.text, (int)(type.bytes < 40 ? type.bytes : 40), type.text);
    return 0;
}

static int read_scaling(struct model *m, struct err *err)
{
    struct model_rope *r = &m->config.rope;
    const char *factor;
    int rc = read_scaling_type(m, &factor, err);
    if (rc < 0 || r->scaling == MODEL_ROPE_SCALING_NONE)
        return rc;
    if (!has(m, factor))
        return model_refuse(m, err, -EBADMSG, "%s: found no such key, expected it with scaling type %s",
                            key_of(m, factor).text,
                            r->scaling == MODEL_ROPE_SCALING_YARN ? "yarn" : "linear");
    if ((rc = read_float(m, factor, 65536, &r->factor, err)) < 0 || r->scaling == MODEL_ROPE_SCALING_LINEAR)
        return rc;
    struct range original = {"rope.scaling.original_context_length", 1, 1u << 31, &r->original_context};
    if ((rc = read_range(m, &original, err)) < 0)
        return gguf_required(rc, err);
    if ((rc = read_float(m, "rope.scaling.attn_factor", 1e4f, &r->attn_factor, err)) < 0 ||
        (rc = read_float(m, "rope.scaling.yarn_attn_factor", 1e4f, &r->attn_factor, err)) < 0 ||
        (rc = read_float(m, "rope.scaling.yarn_beta_fast", 1e6f, &r->beta_fast, err)) < 0)
        return rc;
    return read_float(m, "rope.scaling.yarn_beta_slow", 1e6f, &r->beta_slow, err);
}

static int read_rope(struct model *m, struct err *err)
{
    struct model_config *c = &m->config;
    struct model_rope *r = &c->rope;
    *r = (struct model_rope){.base = 10000,
                             .dims = c->head_dim,
                             .halves = c->arch != MODEL_ARCH_LLAMA, /* its rows are stored permuted */
                             .factor = 1,
                             .beta_fast = 32,
                             .beta_slow = 1,
                             .attn_factor = 1};
    struct range dims = {"rope.dimension_count", 2, c->head_dim, &r->dims};
    int rc = read_optional(m, &dims, err);
    if (rc < 0)
        return rc;
    if (r->dims % 2)
        return model_refuse(m, err, -EBADMSG, "%s: found %" PRIu32 ", expected an even number",
                            key_of(m, dims.rest).text, r->dims);
    if ((rc = read_float(m, "rope.freq_base", 1e12f, &r->base, err)) < 0)
        return rc;
    if (r->base <= 1)
        return model_refuse(m, err, -EBADMSG, "%s: found %g, expected more than 1",
                            key_of(m, "rope.freq_base").text, (double)r->base);
    return read_scaling(m, err);
}

static int read_vocabulary(struct model *m, struct err *err)
{
    struct model_config *c = &m->config;
    const struct weight *embedding = weights_find(&m->weights, "token_embd.weight");
    if (!embedding || embedding->dims != 2 || embedding->rows > 1 << 24)
        return model_refuse(m, err, -EBADMSG,
                            "tensor token_embd.weight: found %s, expected a matrix of one row a token",
                            embedding ? "another shape" : "no such tensor");
    c->vocab = (uint32_t)embedding->rows;
    uint32_t said = c->vocab;
    struct range size = {"vocab_size", 1, UINT32_MAX, &said};
    int rc = read_optional(m, &size, err);
    if (rc < 0)
        return rc;
    if (said != c->vocab)
        return model_refuse(m, err, -EBADMSG,
                            "%s: found %" PRIu32 ", expected %" PRIu32 " as token_embd.weight has rows",
                            key_of(m, size.rest).text, said, c->vocab);
    if (m->vocab && m->vocab->count != c->vocab)
        return model_refuse(m, err, -EBADMSG,
                            "tokenizer.ggml.tokens: found %" PRIu32 " tokens, expected %" PRIu32
                            " as token_embd.weight has rows",
                            m->vocab->count, c->vocab);
    c->bos = m->vocab ? m->vocab->bos : VOCAB_NO_TOKEN;
    c->eos = m->vocab ? m->vocab->eos : VOCAB_NO_TOKEN;
    return 0;
}

static int read_arch(struct model *m, struct err *err)
{
    static const enum model_arch known[] = {MODEL_ARCH_LLAMA, MODEL_ARCH_QWEN2, MODEL_ARCH_QWEN3};
    struct name arch = {0};
    int rc = gguf_required(gguf_string(meta(m), "general.architecture", &arch, err), err);
    if (rc < 0)
        return rc;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++) {
        if (name_is(arch, model_arch_name(known[i]))) {
            m->config.arch = known[i];
            return 0;
        }
    }
    return model_refuse(m, err, -ENOTSUP,
                        "general.architecture: found \"%.*s\", expected \"llama\", \"qwen2\" or \"qwen3\"",
                        (int)(arch.bytes < 60 ? arch.bytes : 60), arch.text);
}

int model_gguf_load(struct model *model, struct err *err)
{
    struct model *m = model;
    struct model_config *c = &m->config;
    int rc;
    if ((rc = weights_open_gguf(&m->weights, m->path, err)) < 0 || (rc = read_arch(m, err)) < 0 ||
        (rc = vocab_from_gguf(meta(m), &m->vocab, err)) < 0 || (rc = read_sizes(m, err)) < 0 ||
        (rc = read_rope(m, err)) < 0)
        return rc;
    const char *eps = "attention.layer_norm_rms_epsilon";
    if (!has(m, eps))
        return model_refuse(m, err, -EBADMSG, "%s: found no such key, expected it", key_of(m, eps).text);
    if ((rc = read_float(m, eps, 0.1f, &c->rms_eps, err)) < 0 || (rc = read_vocabulary(m, err)) < 0)
        return rc;
    c->tied = !weights_find(&m->weights, "output.weight");
    c->qkv_bias = c->arch == MODEL_ARCH_QWEN2 || weights_find(&m->weights, "blk.0.attn_q.bias");
    c->qk_norm = c->arch == MODEL_ARCH_QWEN3;
    return model_bind(m, MODEL_NAMING_GGUF, err);
}
