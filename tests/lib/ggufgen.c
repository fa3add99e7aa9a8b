/* Writes GGUF for tests. Objects belong to the test; the only files are temporary ones that the test
 * removes. */
#include "tests/lib/ggufgen.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"

static void put(struct ggufgen_part *part, const void *data, size_t bytes)
{
    if (part->capacity - part->bytes < bytes) {
        part->capacity = (part->bytes + bytes) * 2 + 64;
        part->data = mem_resize(part->data, part->capacity, 1);
    }
    if (bytes)
        memcpy(part->data + part->bytes, data, bytes);
    part->bytes += bytes;
}

static void put_u32(struct ggufgen_part *part, uint32_t value)
{
    put(part, &value, sizeof value);
}

static void put_u64(struct ggufgen_part *part, uint64_t value)
{
    put(part, &value, sizeof value);
}

static void put_text(struct ggufgen_part *part, const char *text)
{
    put_u64(part, strlen(text));
    put(part, text, strlen(text));
}

static void pad(struct ggufgen_part *part, size_t to, size_t already)
{
    static const uint8_t zeros[64];
    while ((part->bytes + already) % to)
        put(part, zeros, 1);
}

void ggufgen_init(struct ggufgen *gen)
{
    *gen = (struct ggufgen){.version = 3, .alignment = 32, .seed = 1};
}

void ggufgen_free(struct ggufgen *gen)
{
    mem_free(&gen->keys.data);
    mem_free(&gen->infos.data);
    mem_free(&gen->weights.data);
}

void ggufgen_raw(struct ggufgen *gen, const char *key, uint32_t type, const void *value, size_t bytes)
{
    put_text(&gen->keys, key);
    put_u32(&gen->keys, type);
    put(&gen->keys, value, bytes);
    gen->key_count++;
}

void ggufgen_u32(struct ggufgen *gen, const char *key, uint32_t value)
{
    ggufgen_raw(gen, key, 4, &value, sizeof value);
}

void ggufgen_f32(struct ggufgen *gen, const char *key, float value)
{
    ggufgen_raw(gen, key, 6, &value, sizeof value);
}

void ggufgen_bool(struct ggufgen *gen, const char *key, int value)
{
    uint8_t byte = value != 0;
    ggufgen_raw(gen, key, 7, &byte, 1);
}

void ggufgen_string(struct ggufgen *gen, const char *key, const char *value)
{
    ggufgen_raw(gen, key, 8, NULL, 0);
    put_text(&gen->keys, value);
}

static void put_array(struct ggufgen *gen, const char *key, uint32_t type, uint64_t count)
{
    ggufgen_raw(gen, key, 9, &type, sizeof type);
    put_u64(&gen->keys, count);
}

void ggufgen_strings(struct ggufgen *gen, const char *key, const char *const *values, uint64_t count)
{
    put_array(gen, key, 8, count);
    for (uint64_t i = 0; i < count; i++)
        put_text(&gen->keys, values[i]);
}

void ggufgen_i32s(struct ggufgen *gen, const char *key, const int32_t *values, uint64_t count)
{
    put_array(gen, key, 5, count);
    put(&gen->keys, values, count * sizeof *values);
}

void ggufgen_f32s(struct ggufgen *gen, const char *key, const float *values, uint64_t count)
{
    put_array(gen, key, 6, count);
    put(&gen->keys, values, count * sizeof *values);
}

void ggufgen_info(struct ggufgen *gen, const char *name, uint32_t dims, const uint64_t *shape, uint32_t type,
                  uint64_t offset)
{
    put_text(&gen->infos, name);
    put_u32(&gen->infos, dims);
    for (uint32_t d = 0; d < dims; d++)
        put_u64(&gen->infos, shape[d]);
    put_u32(&gen->infos, type);
    put_u64(&gen->infos, offset);
    gen->tensor_count++;
}

/* xorshift64*: enough for weights of tests, the same everywhere. */
static uint64_t next_random(struct ggufgen *gen)
{
    gen->seed ^= gen->seed >> 12;
    gen->seed ^= gen->seed << 25;
    gen->seed ^= gen->seed >> 27;
    return gen->seed * UINT64_C(0x2545f4914f6cdd1d);
}

static float next_value(struct ggufgen *gen, float scale)
{
    return scale * ((float)(next_random(gen) >> 40) * 0x1p-23f - 1);
}

/* Where a type's scale (and scale of minima) lie in its block, and what they are for values within +-1. */
static const struct block {
    int16_t d_at, m_at; /* -1: it has none */
    float d, m;
} blocks[DTYPE_MAX] = {
    [DTYPE_Q4_0] = {0, -1, 1 / 7.5f, 0},         [DTYPE_Q4_1] = {0, 2, 1 / 7.5f, -1},
    [DTYPE_Q5_0] = {0, -1, 1 / 15.5f, 0},        [DTYPE_Q5_1] = {0, 2, 1 / 15.5f, -1},
    [DTYPE_Q8_0] = {0, -1, 1 / 127.f, 0},        [DTYPE_IQ4_NL] = {0, -1, 1 / 127.f, 0},
    [DTYPE_Q2_K] = {80, 82, 2 / 45.f, 1 / 15.f}, [DTYPE_Q3_K] = {108, -1, 1 / 128.f, 0},
    [DTYPE_Q4_K] = {0, 2, 2 / 945.f, 1 / 63.f},  [DTYPE_Q5_K] = {0, 2, 2 / 1953.f, 1 / 63.f},
    [DTYPE_Q6_K] = {208, -1, 1 / 4096.f, 0},
};

/* One block: random bits, and scales so that values lie within about +-scale. */
static void put_block(struct ggufgen *gen, enum dtype type, float scale)
{
    const struct block *b = &blocks[type];
    uint8_t block[256];
    uint16_t d = dtype_f32_to_f16(scale * b->d), m = dtype_f32_to_f16(scale * b->m);
    unsigned bytes = dtype_info((unsigned)type)->block_bytes;
    CHECK(b->d > 0 && bytes <= sizeof block);
    for (unsigned i = 0; i < bytes; i++)
        block[i] = (uint8_t)(next_random(gen) >> 56);
    memcpy(block + b->d_at, &d, sizeof d);
    if (b->m_at >= 0)
        memcpy(block + b->m_at, &m, sizeof m);
    put(&gen->weights, block, bytes);
}

static void put_value(struct ggufgen *gen, enum dtype type, float value)
{
    uint16_t half = type == DTYPE_BF16 ? dtype_f32_to_bf16(value) : dtype_f32_to_f16(value);
    if (type == DTYPE_F32)
        put(&gen->weights, &value, sizeof value);
    else
        put(&gen->weights, &half, sizeof half);
}

void ggufgen_tensor(struct ggufgen *gen, const char *name, enum dtype type, uint64_t rows, uint64_t cols,
                    float scale)
{
    const struct dtype_info *info = dtype_info((unsigned)type);
    CHECK(info && info->name && cols % info->block_len == 0);
    uint64_t shape[2] = {cols, rows};
    ggufgen_info(gen, name, rows ? 2 : 1, shape, (uint32_t)type, gen->weights.bytes);
    for (uint64_t i = 0; i < (rows ? rows : 1) * cols / info->block_len; i++) {
        if (info->block_len == 1)
            put_value(gen, type, scale ? next_value(gen, scale) : 1);
        else
            put_block(gen, type, scale);
    }
    pad(&gen->weights, gen->alignment, 0);
}

void ggufgen_values(struct ggufgen *gen, const char *name, enum dtype type, const float *values,
                    uint64_t rows, uint64_t cols)
{
    uint64_t shape[2] = {cols, rows};
    ggufgen_info(gen, name, rows ? 2 : 1, shape, (uint32_t)type, gen->weights.bytes);
    for (uint64_t i = 0; i < (rows ? rows : 1) * cols; i++)
        put_value(gen, type, values[i]);
    pad(&gen->weights, gen->alignment, 0);
}

static void put_layer(struct ggufgen *gen, const struct ggufgen_llama *s, uint32_t layer)
{
    const struct {
        const char *name;
        uint64_t rows, cols;
    } parts[] = {
        {"attn_norm", 0, s->hidden},
        {"attn_q", (uint64_t)s->q_heads * s->head_dim, s->hidden},
        {"attn_k", (uint64_t)s->kv_heads * s->head_dim, s->hidden},
        {"attn_v", (uint64_t)s->kv_heads * s->head_dim, s->hidden},
        {"attn_output", s->hidden, (uint64_t)s->q_heads * s->head_dim},
        {"ffn_norm", 0, s->hidden},
        {"ffn_gate", s->ffn, s->hidden},
        {"ffn_up", s->ffn, s->hidden},
        {"ffn_down", s->hidden, s->ffn},
    };
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++) {
        char name[64];
        bool norm = parts[i].rows == 0;
        snprintf(name, sizeof name, "blk.%u.%s.weight", layer, parts[i].name);
        ggufgen_tensor(gen, name, norm ? DTYPE_F32 : s->type, parts[i].rows, parts[i].cols, norm ? 0 : 0.25f);
    }
}

void ggufgen_llama(struct ggufgen *gen, const struct ggufgen_llama *sizes)
{
    ggufgen_string(gen, "general.architecture", "llama");
    ggufgen_string(gen, "general.name", "generated");
    ggufgen_u32(gen, "llama.block_count", sizes->layers);
    ggufgen_u32(gen, "llama.context_length", sizes->context);
    ggufgen_u32(gen, "llama.embedding_length", sizes->hidden);
    ggufgen_u32(gen, "llama.feed_forward_length", sizes->ffn);
    ggufgen_u32(gen, "llama.attention.head_count", sizes->q_heads);
    ggufgen_u32(gen, "llama.attention.head_count_kv", sizes->kv_heads);
    ggufgen_u32(gen, "llama.attention.key_length", sizes->head_dim);
    ggufgen_f32(gen, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    ggufgen_tensor(gen, "token_embd.weight", sizes->type, sizes->vocab, sizes->hidden, 1);
    for (uint32_t i = 0; i < sizes->layers; i++)
        put_layer(gen, sizes, i);
    ggufgen_tensor(gen, "output_norm.weight", DTYPE_F32, 0, sizes->hidden, 0);
    if (sizes->untied)
        ggufgen_tensor(gen, "output.weight", sizes->type, sizes->vocab, sizes->hidden, 0.25f);
}

uint8_t *ggufgen_finish(const struct ggufgen *gen, size_t *ret_bytes, size_t ret_sections[4])
{
    struct ggufgen_part file = {0};
    size_t sections[4];
    put(&file, "GGUF", 4);
    put_u32(&file, gen->version);
    put_u64(&file, gen->tensor_count);
    put_u64(&file, gen->key_count);
    sections[0] = file.bytes;
    put(&file, gen->keys.data, gen->keys.bytes);
    sections[1] = file.bytes;
    put(&file, gen->infos.data, gen->infos.bytes);
    pad(&file, gen->alignment, 0);
    sections[2] = file.bytes;
    put(&file, gen->weights.data, gen->weights.bytes);
    sections[3] = file.bytes;
    if (ret_sections)
        memcpy(ret_sections, sections, sizeof sections);
    *ret_bytes = file.bytes;
    return file.data;
}

void ggufgen_save(const void *data, size_t bytes, char **ret_path)
{
    char path[] = "/tmp/specontext-test-XXXXXX";
    int fd = mkostemp(path, O_CLOEXEC);
    CHECK(fd >= 0);
    CHECK(write(fd, data, bytes) == (ssize_t)bytes);
    close(fd);
    *ret_path = mem_strdup(path);
}

void ggufgen_remove(char **path)
{
    if (*path)
        unlink(*path);
    mem_free(path);
}
