/* Opens models and hands out their parts. struct model owns the mapped files and the tables over them; it is
 * built by one thread, then read only. It must never touch matrices while opening: loading stays lazy. */
#include "model/model.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/alloc.h"
#include "model/model_private.h"
#include "model/utf8.h"

void *model_own(struct model *model, size_t bytes)
{
    struct model_owned *o = mem_alloc(1, sizeof *o + bytes); /* bytes of a vector that lies in a file */
    o->next = model->owned;
    model->owned = o;
    return o->data;
}

int model_refuse(const struct model *model, struct err *err, int code, const char *fmt, ...)
{
    char detail[320];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(detail, sizeof detail, fmt, ap);
    va_end(ap);
    return err_set(err, code, "%.180s: %s", model->path, detail);
}

int model_check_heads(const struct model *model, const char *key, bool head_dim_said, struct err *err)
{
    const struct model_config *c = &model->config;
    if (c->q_heads % c->kv_heads)
        return model_refuse(model, err, -EBADMSG,
                            "%s: found %" PRIu32 ", expected a divisor of %" PRIu32 " query heads", key,
                            c->kv_heads, c->q_heads);
    if (!head_dim_said && c->hidden % c->q_heads)
        return model_refuse(model, err, -EBADMSG,
                            "query heads: found %" PRIu32 ", expected a divisor of the hidden size %" PRIu32,
                            c->q_heads, c->hidden);
    if (c->head_dim < 2 || c->head_dim % 2 || c->head_dim > MODEL_HEAD_DIM_MAX)
        return model_refuse(model, err, -EBADMSG,
                            "head dimension: found %" PRIu32 ", expected an even one up to %d", c->head_dim,
                            MODEL_HEAD_DIM_MAX);
    return 0;
}

static char *last_part(const char *path)
{
    size_t end = strlen(path);
    while (end > 1 && path[end - 1] == '/')
        end--;
    size_t begin = end;
    while (begin && path[begin - 1] != '/')
        begin--;
    char *name = mem_alloc(end - begin + 1, 1);
    memcpy(name, path + begin, end - begin);
    return name;
}

/* A name is shown on terminals and stands in JSON: what is no UTF-8 and control characters become '?'. */
static char *printable(char *name)
{
    for (size_t at = 0, bytes = strlen(name); at < bytes;) {
        int length = utf8_char(name + at, bytes - at);
        uint32_t code = length > 0 ? utf8_code(name + at, length) : 0;
        size_t taken = length > 0 ? (size_t)length : 1;
        if (code < 0x20 || (code >= 0x7f && code < 0xa0))
            memset(name + at, '?', taken);
        at += taken;
    }
    return name;
}

static char *find_name(const struct model *m)
{
    struct name name = {0};
    if (m->weights.gguf_count && gguf_string(m->weights.ggufs[0], "general.name", &name, NULL) == 0 &&
        name.bytes > 0 && name.bytes < 256) {
        char *text = mem_alloc(name.bytes + 1, 1);
        memcpy(text, name.text, name.bytes); /* a NUL inside only cuts it short */
        return printable(text);
    }
    return printable(last_part(m->path));
}

static char *describe_format(const struct weights *w)
{
    char text[64];
    uint32_t files = w->gguf_count ? w->gguf_count : w->shard_count;
    if (files > 1)
        snprintf(text, sizeof text, "%s in %" PRIu32 " parts", w->gguf_count ? "GGUF" : "safetensors", files);
    else
        snprintf(text, sizeof text, "%s", w->gguf_count ? "GGUF" : "safetensors");
    return mem_strdup(text);
}

int model_open(const char *path, struct model **ret_model, struct err *err)
{
    struct stat st;
    bool folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    struct model *m = mem_alloc(1, sizeof *m);
    m->path = mem_strdup(path);
    int rc = folder ? model_folder_load(m, err) : model_gguf_load(m, err);
    if (!rc) {
        m->name = find_name(m);
        m->format = describe_format(&m->weights);
        *ret_model = m;
        return 0;
    }
    model_free(&m);
    return rc;
}

void model_free(struct model **model)
{
    struct model *m = *model;
    if (!m)
        return;
    mem_free(&m->layers);
    mem_free(&m->name);
    mem_free(&m->format);
    vocab_free(&m->vocab);
    while (m->owned) {
        struct model_owned *next = m->owned->next;
        mem_free(&m->owned);
        m->owned = next;
    }
    weights_free(&m->weights);
    mem_free(&m->path);
    mem_free(model);
}

const struct model_config *model_config(const struct model *model)
{
    return &model->config;
}

const struct model_layer *model_layers(const struct model *model)
{
    return model->layers;
}

const struct model_tensor *model_token_embedding(const struct model *model)
{
    return &model->token_embedding;
}

const struct model_tensor *model_output_norm(const struct model *model)
{
    return &model->output_norm;
}

const struct model_tensor *model_output(const struct model *model)
{
    return &model->output;
}

const char *model_path(const struct model *model)
{
    return model->path;
}

const char *model_name(const struct model *model)
{
    return model->name;
}

const char *model_format(const struct model *model)
{
    return model->format;
}

const char *model_arch_name(enum model_arch arch)
{
    static const char *const names[] = {
        [MODEL_ARCH_LLAMA] = "llama",
        [MODEL_ARCH_MISTRAL] = "mistral",
        [MODEL_ARCH_QWEN2] = "qwen2",
        [MODEL_ARCH_QWEN3] = "qwen3",
    };
    return names[arch];
}

uint64_t model_weight_bytes(const struct model *model)
{
    return weights_bytes(&model->weights);
}

void model_weight_types(const struct model *model, struct model_type_use ret[DTYPE_MAX])
{
    memset(ret, 0, DTYPE_MAX * sizeof *ret);
    for (uint32_t i = 0; i < model->weights.count; i++) {
        const struct weight *w = &model->weights.items[i];
        if (w->type == DTYPE_MAX) /* of a tensor that the model does not use */
            continue;
        ret[w->type].bytes += w->bytes;
        ret[w->type].tensors++;
    }
}

const struct vocab *model_vocab(const struct model *model)
{
    return model->vocab;
}

struct hash128 model_fingerprint(const struct model *model)
{
    return weights_fingerprint(&model->weights, model->head_hash);
}

struct hash128 model_tokenizer_fingerprint(const struct model *model)
{
    return model->vocab ? vocab_fingerprint(model->vocab) : (struct hash128){0, 0};
}
