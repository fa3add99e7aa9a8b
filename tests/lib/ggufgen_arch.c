/* Writes the models of tests/vectors/arch. The files are temporary; the test removes them. */
#include "tests/lib/ggufgen_arch.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "model/safetensors.h"
#include "tests/lib/ggufgen.h"

#define TENSORS_MAX 64

const char *const ggufgen_arch_names[] = {"llama-gqa",    "llama-mha-tied", "llama-mqa",  "llama3-scaling",
                                          "llama-linear", "llama-yarn",     "mistral",    "qwen2",
                                          "qwen2-tied",   "qwen3",          "qwen3-yarn", NULL};

struct tensor {
    char name[64], gguf[64];
    uint32_t rows, cols; /* rows 0: a vector */
    uint32_t heads;      /* of query and key: for GGUF's order of rows */
    float *values;
};

struct arch {
    json_t *config;
    const char *type; /* model_type */
    uint32_t hidden, ffn, vocab, layers, q_heads, kv_heads, head_dim;
    bool tied;
    struct tensor tensors[TENSORS_MAX];
    uint32_t count;
};

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static float value_of(const char *name, uint64_t hash, uint64_t i)
{
    int8_t v = (int8_t)(mix(hash + i * UINT64_C(0x9e3779b97f4a7c15)) >> 56);
    if (strstr(name, "norm"))
        return 1 + floorf((float)v / 8) / 64;
    size_t bytes = strlen(name);
    bool bias = bytes > 5 && !strcmp(name + bytes - 5, ".bias");
    return (float)v / (bias ? 256 : strstr(name, "embed") ? 128 : 512);
}

static void add(struct arch *a, struct tensor t)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325), count = (uint64_t)(t.rows ? t.rows : 1) * t.cols;
    for (const char *c = t.name; *c; c++)
        hash = (hash ^ (uint8_t)*c) * UINT64_C(0x100000001b3);
    t.values = mem_alloc(count, sizeof *t.values);
    for (uint64_t i = 0; i < count; i++)
        t.values[i] = value_of(t.name, hash, i);
    CHECK(a->count < TENSORS_MAX);
    a->tensors[a->count++] = t;
}

static void add_part(struct arch *a, uint32_t layer, const char *const names[2], const uint32_t shape[3])
{
    struct tensor t = {.rows = shape[0], .cols = shape[1], .heads = shape[2]};
    snprintf(t.name, sizeof t.name, "model.layers.%" PRIu32 ".%s", layer, names[0]);
    snprintf(t.gguf, sizeof t.gguf, "blk.%" PRIu32 ".%s", layer, names[1]);
    add(a, t);
}

static void add_layer(struct arch *a, uint32_t layer)
{
    uint32_t h = a->hidden, q = a->q_heads * a->head_dim, kv = a->kv_heads * a->head_dim;
    const struct {
        const char *names[2];
        uint32_t shape[3];
        const char *only; /* the architecture that has it, NULL: all */
    } parts[] = {
        {{"input_layernorm.weight", "attn_norm.weight"}, {0, h, 0}, NULL},
        {{"self_attn.q_proj.weight", "attn_q.weight"}, {q, h, a->q_heads}, NULL},
        {{"self_attn.k_proj.weight", "attn_k.weight"}, {kv, h, a->kv_heads}, NULL},
        {{"self_attn.v_proj.weight", "attn_v.weight"}, {kv, h, 0}, NULL},
        {{"self_attn.o_proj.weight", "attn_output.weight"}, {h, q, 0}, NULL},
        {{"post_attention_layernorm.weight", "ffn_norm.weight"}, {0, h, 0}, NULL},
        {{"mlp.gate_proj.weight", "ffn_gate.weight"}, {a->ffn, h, 0}, NULL},
        {{"mlp.up_proj.weight", "ffn_up.weight"}, {a->ffn, h, 0}, NULL},
        {{"mlp.down_proj.weight", "ffn_down.weight"}, {h, a->ffn, 0}, NULL},
        {{"self_attn.q_proj.bias", "attn_q.bias"}, {0, q, 0}, "qwen2"},
        {{"self_attn.k_proj.bias", "attn_k.bias"}, {0, kv, 0}, "qwen2"},
        {{"self_attn.v_proj.bias", "attn_v.bias"}, {0, kv, 0}, "qwen2"},
        {{"self_attn.q_norm.weight", "attn_q_norm.weight"}, {0, a->head_dim, 0}, "qwen3"},
        {{"self_attn.k_norm.weight", "attn_k_norm.weight"}, {0, a->head_dim, 0}, "qwen3"},
    };
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++)
        if (!parts[i].only || !strcmp(parts[i].only, a->type))
            add_part(a, layer, parts[i].names, parts[i].shape);
}

static uint32_t number(const json_t *config, const char *key, uint32_t otherwise)
{
    const json_t *value = json_object_get(config, key);
    return json_is_integer(value) ? (uint32_t)json_integer_value(value) : otherwise;
}

/* `head_dim` 0: the case's. */
static void load(struct arch *a, const char *name, uint32_t head_dim)
{
    char path[128];
    memset(a, 0, sizeof *a);
    snprintf(path, sizeof path, ARCH_VECTORS "/%s/config.json", name);
    a->config = json_load_file(path, 0, NULL);
    CHECK(a->config != NULL);
    CHECK(!head_dim || json_object_set_new(a->config, "head_dim", json_integer(head_dim)) == 0);
    a->type = json_string_value(json_object_get(a->config, "model_type"));
    a->hidden = number(a->config, "hidden_size", 0);
    a->ffn = number(a->config, "intermediate_size", 0);
    a->vocab = number(a->config, "vocab_size", 0);
    a->layers = number(a->config, "num_hidden_layers", 0);
    a->q_heads = number(a->config, "num_attention_heads", 0);
    a->kv_heads = number(a->config, "num_key_value_heads", 0);
    a->head_dim = number(a->config, "head_dim", a->hidden / a->q_heads);
    a->tied = json_is_true(json_object_get(a->config, "tie_word_embeddings"));
    add(a, (struct tensor){"model.embed_tokens.weight", "token_embd.weight", a->vocab, a->hidden, 0, NULL});
    for (uint32_t i = 0; i < a->layers; i++)
        add_layer(a, i);
    add(a, (struct tensor){"model.norm.weight", "output_norm.weight", 0, a->hidden, 0, NULL});
    if (!a->tied)
        add(a, (struct tensor){"lm_head.weight", "output.weight", a->vocab, a->hidden, 0, NULL});
}

static void unload(struct arch *a)
{
    for (uint32_t i = 0; i < a->count; i++)
        mem_free(&a->tensors[i].values);
    json_decref(a->config);
}

static enum safetensors_type type_of(const struct arch *a)
{
    const char *type = json_string_value(json_object_get(a->config, "torch_dtype"));
    return !strcmp(type, "float16")    ? SAFETENSORS_F16
           : !strcmp(type, "bfloat16") ? SAFETENSORS_BF16
                                       : SAFETENSORS_F32;
}

static void *convert(const struct tensor *t, enum safetensors_type type)
{
    uint64_t count = (uint64_t)(t->rows ? t->rows : 1) * t->cols;
    void *data = mem_alloc(count, 4);
    if (type == SAFETENSORS_F32) {
        memcpy(data, t->values, count * 4);
        return data;
    }
    uint16_t *half = data;
    for (uint64_t i = 0; i < count; i++)
        half[i] = type == SAFETENSORS_F16 ? dtype_f32_to_f16(t->values[i]) : dtype_f32_to_bf16(t->values[i]);
    return data;
}

/* Every `shards`-th tensor, from `shard` on. */
static void write_shard(const struct arch *a, const char *folder, unsigned shard, unsigned shards,
                        json_t *map)
{
    char file[64], path[256];
    struct safetensors_entry entries[TENSORS_MAX];
    struct safetensors_content content = {.tensors = entries};
    enum safetensors_type type = type_of(a);
    struct err err = {0};
    if (shards > 1)
        snprintf(file, sizeof file, "model-%05u-of-%05u.safetensors", shard + 1, shards);
    else
        snprintf(file, sizeof file, "model.safetensors");
    for (uint32_t i = shard; i < a->count; i += shards) {
        const struct tensor *t = &a->tensors[i];
        struct safetensors_entry e = {.name = t->name,
                                      .type = type,
                                      .dims = t->rows ? 2 : 1,
                                      .shape = {t->rows ? t->rows : t->cols, t->cols},
                                      .data = convert(t, type)};
        entries[content.tensor_count++] = e;
        json_object_set_new(map, t->name, json_string(file));
    }
    snprintf(path, sizeof path, "%s/%s", folder, file);
    CHECK(safetensors_write(path, &content, &err) == 0);
    for (uint32_t i = 0; i < content.tensor_count; i++) {
        void *data = (void *)(uintptr_t)entries[i].data;
        mem_free(&data);
    }
}

static void make_folder(struct arch *a, unsigned shards, const char *config, char **ret_path)
{
    char folder[] = "/tmp/specontext-test-XXXXXX", path[256];
    CHECK(mkdtemp(folder) != NULL);
    json_t *map = json_object();
    for (unsigned i = 0; i < shards; i++)
        write_shard(a, folder, i, shards, map);
    json_t *index = json_pack("{s:{}, s:o}", "metadata", "weight_map", map);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
    CHECK(shards == 1 || json_dump_file(index, path, 0) == 0);
    json_decref(index);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *file = fopen(path, "we");
    CHECK(file != NULL);
    CHECK(config ? fputs(config, file) >= 0 : json_dumpf(a->config, file, 0) == 0);
    fclose(file);
    unload(a);
    *ret_path = mem_strdup(folder);
}

void ggufgen_arch_folder(const char *name, unsigned shards, const char *config, char **ret_path)
{
    struct arch a;
    load(&a, name, 0);
    make_folder(&a, shards, config, ret_path);
}

void ggufgen_arch_folder_heads(const char *name, uint32_t head_dim, char **ret_path)
{
    struct arch a;
    load(&a, name, head_dim);
    make_folder(&a, 1, NULL, ret_path);
}

/* Rows (half, j) of a head to (j, half), in place. */
static void permute(struct tensor *t)
{
    uint32_t dim = t->rows / t->heads;
    float *to = mem_alloc((uint64_t)t->rows * t->cols, sizeof *to);
    for (uint32_t r = 0; r < t->rows; r++) {
        uint32_t head = r / dim, half = r % dim / (dim / 2), j = r % (dim / 2);
        memcpy(to + (uint64_t)(head * dim + 2 * j + half) * t->cols, t->values + (uint64_t)r * t->cols,
               t->cols * sizeof *to);
    }
    mem_free(&t->values);
    t->values = to;
}

static double real(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static void put_u32(struct ggufgen *g, const char *arch, const char *key, uint32_t value)
{
    char text[96];
    snprintf(text, sizeof text, "%s.%s", arch, key);
    ggufgen_u32(g, text, value);
}

static void put_f32(struct ggufgen *g, const char *arch, const char *key, double value)
{
    char text[96];
    snprintf(text, sizeof text, "%s.%s", arch, key);
    ggufgen_f32(g, text, (float)value);
}

static void put_scaling(struct ggufgen *g, const struct arch *a, const char *arch)
{
    const json_t *s = json_object_get(a->config, "rope_scaling");
    const char *type = json_string_value(json_object_get(s, "rope_type"));
    char key[96];
    type = type ? type : json_string_value(json_object_get(s, "type"));
    if (!type)
        return;
    double original = real(s, "original_max_position_embeddings"), factor = real(s, "factor");
    if (strcmp(type, "llama3")) {
        snprintf(key, sizeof key, "%s.rope.scaling.type", arch);
        ggufgen_string(g, key, type);
        put_f32(g, arch, "rope.scaling.factor", factor);
        if (!strcmp(type, "yarn"))
            put_u32(g, arch, "rope.scaling.original_context_length", (uint32_t)original);
        return;
    }
    float divisors[256];
    double low = real(s, "low_freq_factor"), high = real(s, "high_freq_factor");
    for (uint32_t j = 0; j < a->head_dim / 2; j++) {
        double wave = 2 * M_PI * pow(real(a->config, "rope_theta"), 2.0 * j / a->head_dim);
        double smooth = (original / wave - low) / (high - low);
        divisors[j] = (float)(wave < original / high  ? 1
                              : wave > original / low ? factor
                                                      : 1 / ((1 - smooth) / factor + smooth));
    }
    ggufgen_values(g, "rope_freqs.weight", DTYPE_F32, divisors, 0, a->head_dim / 2);
}

static void put_keys(struct ggufgen *g, const struct arch *a, const char *arch)
{
    ggufgen_string(g, "general.architecture", arch);
    put_u32(g, arch, "block_count", a->layers);
    put_u32(g, arch, "context_length", number(a->config, "max_position_embeddings", 0));
    put_u32(g, arch, "embedding_length", a->hidden);
    put_u32(g, arch, "feed_forward_length", a->ffn);
    put_u32(g, arch, "attention.head_count", a->q_heads);
    put_u32(g, arch, "attention.head_count_kv", a->kv_heads);
    put_u32(g, arch, "attention.key_length", a->head_dim);
    put_u32(g, arch, "attention.value_length", a->head_dim);
    put_u32(g, arch, "rope.dimension_count", a->head_dim);
    put_f32(g, arch, "attention.layer_norm_rms_epsilon", real(a->config, "rms_norm_eps"));
    put_f32(g, arch, "rope.freq_base", real(a->config, "rope_theta"));
}

static void save(struct ggufgen *g, const char *path)
{
    size_t bytes;
    uint8_t *data = ggufgen_finish(g, &bytes, NULL);
    FILE *file = fopen(path, "we");
    CHECK(file != NULL && fwrite(data, 1, bytes, file) == bytes);
    fclose(file);
    mem_free(&data);
    ggufgen_free(g);
}

static void put_split(struct ggufgen *g, uint32_t part, uint32_t parts, uint32_t tensors)
{
    ggufgen_u32(g, "split.no", part);
    ggufgen_u32(g, "split.count", parts);
    ggufgen_u32(g, "split.tensors.count", tensors);
}

void ggufgen_arch_file(const char *name, enum dtype type, unsigned parts, char **ret_path)
{
    struct arch a;
    char stem[] = "/tmp/specontext-test-XXXXXX", path[128];
    load(&a, name, 0);
    bool llama = !strcmp(a.type, "llama") || !strcmp(a.type, "mistral");
    bool scaled = json_is_object(json_object_get(a.config, "rope_scaling")) && llama;
    CHECK(mkdtemp(stem) != NULL); /* a folder keeps the parts together */
    for (unsigned part = 0; part < parts; part++) {
        struct ggufgen g;
        ggufgen_init(&g);
        if (part == 0) {
            put_keys(&g, &a, llama ? "llama" : a.type);
            put_scaling(&g, &a, llama ? "llama" : a.type);
        }
        if (parts > 1)
            put_split(&g, part, parts, a.count + (scaled && !strcmp(name, "llama3-scaling")));
        for (uint32_t i = part; i < a.count; i += parts) {
            struct tensor *t = &a.tensors[i];
            if (llama && t->heads)
                permute(t);
            ggufgen_values(&g, t->gguf, t->rows ? type : DTYPE_F32, t->values, t->rows, t->cols);
        }
        snprintf(path, sizeof path, "%s/%s-%05u-of-%05u.gguf", stem, name, part + 1, parts);
        save(&g, path);
    }
    unload(&a);
    snprintf(path, sizeof path, "%s/%s-00001-of-%05u.gguf", stem, name, parts);
    *ret_path = mem_strdup(path);
}

void ggufgen_arch_remove(char **path)
{
    struct stat st;
    char child[512];
    if (!*path)
        return;
    if (stat(*path, &st) < 0 || !S_ISDIR(st.st_mode))
        *strrchr(*path, '/') = '\0';
    CHECK(!strncmp(*path, "/tmp/specontext-test-", 21));
    DIR *folder = opendir(*path);
    for (struct dirent *e = folder ? readdir(folder) : NULL; e; e = readdir(folder)) {
        snprintf(child, sizeof child, "%s/%s", *path, e->d_name);
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            unlink(child);
    }
    if (folder)
        closedir(folder);
    rmdir(*path);
    mem_free(path);
}

void ggufgen_arch_golden(const char *name, uint32_t vocab, struct ggufgen_arch_golden *ret)
{
    char path[128];
    struct stat st;
    snprintf(path, sizeof path, ARCH_VECTORS "/%s/logits.f32", name);
    FILE *file = fopen(path, "re");
    CHECK(file != NULL && fstat(fileno(file), &st) == 0);
    ret->vocab = vocab;
    ret->tokens = (uint32_t)((size_t)st.st_size / sizeof(float) / vocab);
    ret->logits = mem_alloc((size_t)ret->tokens * vocab, sizeof(float));
    ret->ids = mem_alloc(ret->tokens, sizeof *ret->ids);
    CHECK(fread(ret->logits, sizeof(float) * vocab, ret->tokens, file) == ret->tokens);
    fclose(file);
    snprintf(path, sizeof path, ARCH_VECTORS "/%s/tokens.txt", name);
    file = fopen(path, "re");
    CHECK(file != NULL);
    for (uint32_t i = 0; i < ret->tokens; i++)
        CHECK(fscanf(file, "%" SCNu32, &ret->ids[i]) == 1);
    fclose(file);
}
