/* Models in Hugging Face folders: their configuration from config.json. Fills a struct model that the caller
 * owns. Fields that change what the model computes are read or refused by name, never passed over. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "model/json_file.h"
#include "model/model_private.h"
#include "model/rope_config.h"
#include "model/vocab_folder.h"

static const struct {
    const char *type, *class_name;
    enum model_arch arch;
} archs[] = {
    {"llama", "LlamaForCausalLM", MODEL_ARCH_LLAMA},
    {"mistral", "MistralForCausalLM", MODEL_ARCH_MISTRAL},
    {"qwen2", "Qwen2ForCausalLM", MODEL_ARCH_QWEN2},
    {"qwen3", "Qwen3ForCausalLM", MODEL_ARCH_QWEN3},
};
#define ARCHS (sizeof archs / sizeof *archs)

static int refuse(const struct json_doc *d, const char *key, const char *found, const char *expected,
                  struct err *err)
{
    return err_set(err, -ENOTSUP, "%.200s: %s%s: found %.60s, expected %s", d->path, d->where, key, found,
                   expected);
}

static int read_arch(struct model *m, const struct json_doc *d, struct err *err)
{
    const char *type = NULL;
    int rc = json_required(json_text(d, "model_type", &type, err), err);
    if (rc < 0)
        return rc;
    unsigned i = 0;
    while (i < ARCHS && strcmp(type, archs[i].type))
        i++;
    if (i == ARCHS)
        return refuse(d, "model_type", type, "llama, mistral, qwen2 or qwen3", err);
    m->config.arch = archs[i].arch;
    const json_t *classes = json_object_get(d->root, "architectures");
    const char *class_name = json_string_value(json_array_get(classes, 0));
    if (class_name && strcmp(class_name, archs[i].class_name))
        return refuse(d, "architectures", class_name, archs[i].class_name, err);
    return 0;
}

/* A flag that this program can only have one way. */
static int check_flag(const struct json_doc *d, const char *key, bool expected, struct err *err)
{
    bool found = expected;
    int rc = json_optional(json_flag(d, key, &found, err));
    if (!rc && found != expected)
        return refuse(d, key, found ? "true" : "false", expected ? "true" : "false", err);
    return rc;
}

/* Attention over a window of the text: only where the window holds all of it. */
static int check_window(const struct model *m, const struct json_doc *d, struct err *err)
{
    bool use = m->config.arch == MODEL_ARCH_MISTRAL; /* the others have a switch, off when not said */
    uint32_t window = 0;
    if (!json_object_get(d->root, "sliding_window"))
        return 0;
    int rc = json_optional(json_flag(d, "use_sliding_window", &use, err));
    if (!rc)
        rc = json_optional(json_u32(d, "sliding_window", 0, UINT32_MAX, &window, err));
    if (!rc && use && window && window < m->config.context_max)
        rc = err_set(err, -ENOTSUP,
                     "%.200s: sliding_window: found %" PRIu32 ", expected null, or at least the %" PRIu32
                     " of max_position_embeddings",
                     d->path, window, m->config.context_max);
    return rc;
}

static int check_layer_types(const struct json_doc *d, struct err *err)
{
    size_t i;
    json_t *value;
    json_array_foreach(json_object_get(d->root, "layer_types"), i, value)
    {
        const char *type = json_string_value(value);
        if (!type || strcmp(type, "full_attention"))
            return refuse(d, "layer_types", type ? type : json_kind(value), "full_attention", err);
    }
    return 0;
}

static int check_features(const struct model *m, const struct json_doc *d, struct err *err)
{
    const char *act = "silu", *method = "a method";
    float rotary = 1;
    int rc = json_optional(json_text(d, "hidden_act", &act, err));
    if (rc < 0)
        return rc;
    if (strcmp(act, "silu"))
        return refuse(d, "hidden_act", act, "silu", err);
    json_t *quantized = json_object_get(d->root, "quantization_config");
    if (quantized && !json_is_null(quantized)) {
        struct json_doc inner = {quantized, d->path, "quantization_config."};
        (void)json_text(&inner, "quant_method", &method, NULL);
        return refuse(d, "quantization_config", method, "none: F32, F16 or BF16 weights, or a GGUF file",
                      err);
    }
    if ((rc = check_flag(d, "mlp_bias", false, err)) < 0 || (rc = check_window(m, d, err)) < 0 ||
        (rc = check_layer_types(d, err)) < 0)
        return rc;
    rc = json_optional(json_f32(d, "partial_rotary_factor", 1, &rotary, err));
    return !rc && rotary < 1 ? refuse(d, "partial_rotary_factor", "less than 1", "1", err) : rc;
}

static int read_sizes(struct model *m, const struct json_doc *d, struct err *err)
{
    struct model_config *c = &m->config;
    const struct {
        const char *key;
        uint32_t most, *to;
    } required[] = {
        {"num_hidden_layers", MODEL_LAYERS_MAX, &c->layers},
        {"hidden_size", 1 << 17, &c->hidden},
        {"intermediate_size", 1 << 20, &c->ffn},
        {"max_position_embeddings", 1u << 31, &c->context_max},
        {"num_attention_heads", 4096, &c->q_heads},
        {"vocab_size", 1 << 24, &c->vocab},
    };
    int rc;
    for (unsigned i = 0; i < sizeof required / sizeof *required; i++)
        if ((rc = json_u32(d, required[i].key, 1, required[i].most, required[i].to, err)) < 0)
            return json_required(rc, err);
    if ((rc = json_required(json_f32(d, "rms_norm_eps", 0.1f, &c->rms_eps, err), err)) < 0)
        return rc;
    c->kv_heads = c->q_heads;
    rc = json_u32(d, "num_key_value_heads", 1, 4096, &c->kv_heads, err);
    if (c->arch == MODEL_ARCH_LLAMA) /* the first Llama had no such field; the others' defaults differ */
        rc = json_optional(rc);
    if (rc < 0)
        return json_required(rc, err);
    c->head_dim = c->hidden / c->q_heads;
    rc = json_u32(d, "head_dim", 2, MODEL_HEAD_DIM_MAX, &c->head_dim, err);
    if (rc < 0 && rc != -ENOENT)
        return rc;
    return model_check_heads(m, "config.json: num_key_value_heads", rc == 0, err);
}

static int read_rope(struct model *m, const struct json_doc *d, struct err *err)
{
    struct model_config *c = &m->config;
    float *factors = model_own(m, c->head_dim / 2 * sizeof *factors);
    return rope_config_read(d, c->head_dim, &c->context_max, factors, &c->rope, err);
}

static int read_config(struct model *m, const struct json_doc *d, struct err *err)
{
    struct model_config *c = &m->config;
    int rc;
    if ((rc = read_arch(m, d, err)) < 0 || (rc = read_sizes(m, d, err)) < 0 ||
        (rc = check_features(m, d, err)) < 0 || (rc = read_rope(m, d, err)) < 0)
        return rc;
    bool bias = c->arch == MODEL_ARCH_QWEN2;
    if ((rc = json_optional(json_flag(d, "attention_bias", &bias, err))) < 0 ||
        (rc = json_optional(json_flag(d, "tie_word_embeddings", &c->tied, err))) < 0)
        return rc;
    c->qkv_bias = bias || c->arch == MODEL_ARCH_QWEN2;
    c->qk_norm = c->arch == MODEL_ARCH_QWEN3;
    char *text = json_dumps(d->root, JSON_COMPACT | JSON_SORT_KEYS);
    if (!text)
        return err_set(err, -ENOMEM, "%.200s: no memory for its fingerprint", d->path);
    m->head_hash = hash_bytes(0, text, strlen(text));
    mem_free(&text);
    return 0;
}

static int check_embedding(const struct model *m, struct err *err)
{
    const struct weight *t = weights_find(&m->weights, "model.embed_tokens.weight");
    if (!t)
        return model_refuse(m, err, -EBADMSG,
                            "tensor model.embed_tokens.weight: found no such tensor, expected it");
    if (t->dims != 2 || t->rows != m->config.vocab)
        return err_set(err, -EBADMSG,
                       "%.180s: tensor model.embed_tokens.weight: shape: found %" PRIu64
                       " rows, expected the %" PRIu32 " of vocab_size",
                       t->path, t->rows, m->config.vocab);
    return 0;
}

int model_folder_load(struct model *model, struct err *err)
{
    struct model *m = model;
    struct json_doc config;
    int rc = json_doc_open(&config, m->path, "config.json", err);
    if (!rc)
        rc = read_config(m, &config, err);
    if (rc == -ENOENT)
        rc = err_set(err, -EBADMSG, "%.200s: config.json: found no such file, expected a model's folder",
                     m->path);
    if (!rc)
        rc = json_required(weights_open_folder(&m->weights, m->path, err), err);
    if (!rc) /* before tables are made for as many tokens as the file claims */
        rc = check_embedding(m, err);
    if (!rc)
        rc = vocab_from_folder(m->path, &config, m->config.vocab, &m->vocab, err);
    json_doc_free(&config);
    if (rc < 0)
        return rc;
    m->config.bos = m->vocab ? m->vocab->bos : VOCAB_NO_TOKEN;
    m->config.eos = m->vocab ? m->vocab->eos : VOCAB_NO_TOKEN;
    return model_bind(m, MODEL_NAMING_FOLDER, err);
}
