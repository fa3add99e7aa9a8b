/* Opens models and hands out their parts. struct model owns the mapped file and the tables over it; it is
 * built by one thread, then read only. It must never touch weights while opening: loading stays lazy. */
#include "model/model.h"

#include <errno.h>
#include <string.h>
#include <sys/stat.h>

#include "base/alloc.h"
#include "model/model_private.h"

static int load(struct model *m, struct err *err)
{
    struct name arch = {0};
    int rc = gguf_required(gguf_string(m->gguf, "general.architecture", &arch, err), err);
    if (rc < 0)
        return rc;
    if (!name_is(arch, "llama"))
        return err_set(err, -ENOTSUP, "%s: general.architecture: found \"%.*s\", expected \"llama\"",
                       gguf_path(m->gguf), (int)(arch.bytes < 60 ? arch.bytes : 60), arch.text);
    if ((rc = vocab_from_gguf(m->gguf, &m->vocab, err)) < 0)
        return rc;
    return model_llama_load(m, err);
}

static char *find_name(const struct gguf *g)
{
    struct name name = {0};
    if (gguf_string(g, "general.name", &name, NULL) == 0 && name.bytes > 0 && name.bytes < 256) {
        char *text = mem_alloc(name.bytes + 1, 1);
        memcpy(text, name.text, name.bytes); /* a NUL inside only cuts it short */
        return text;
    }
    const char *slash = strrchr(gguf_path(g), '/');
    return mem_strdup(slash ? slash + 1 : gguf_path(g));
}

int model_open(const char *path, struct model **ret_model, struct err *err)
{
    struct stat st;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return err_set(err, -ENOTSUP, "%s: found a directory, expected a GGUF file", path);
    struct model *m = mem_alloc(1, sizeof *m);
    int rc = gguf_open(path, &m->gguf, err);
    if (!rc)
        rc = load(m, err);
    if (!rc) {
        m->name = find_name(m->gguf);
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
    vocab_free(&m->vocab);
    gguf_free(&m->gguf);
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
    return gguf_path(model->gguf);
}

const char *model_name(const struct model *model)
{
    return model->name;
}

uint64_t model_weight_bytes(const struct model *model)
{
    uint64_t bytes = 0; /* cannot overflow: the tensors lie in one file without overlap */
    for (uint32_t i = 0; i < gguf_tensors(model->gguf); i++)
        bytes += gguf_tensor_at(model->gguf, i)->bytes;
    return bytes;
}

const struct vocab *model_vocab(const struct model *model)
{
    return model->vocab;
}

struct hash128 model_fingerprint(const struct model *model)
{
    const uint64_t sample = 4096;
    uint64_t file_bytes;
    const uint8_t *file = gguf_file(model->gguf, &file_bytes);
    struct hash128 h = hash_bytes(0, file, gguf_head_bytes(model->gguf));
    for (uint32_t i = 0; i < gguf_tensors(model->gguf); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(model->gguf, i);
        const uint8_t *data = t->data;
        if (t->bytes <= 3 * sample) {
            h = hash_chain(h, data, t->bytes);
            continue;
        }
        h = hash_chain(h, data, sample);
        h = hash_chain(h, data + t->bytes / 2, sample);
        h = hash_chain(h, data + t->bytes - sample, sample);
    }
    return h;
}

struct hash128 model_tokenizer_fingerprint(const struct model *model)
{
    return model->vocab ? vocab_fingerprint(model->vocab) : (struct hash128){0, 0};
}
