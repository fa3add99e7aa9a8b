/* For tests: writes a small llama model of float32 weights as a GGUF file, without a tokenizer. */
#ifndef TESTS_UNIT_TINY_MODEL_H
#define TESTS_UNIT_TINY_MODEL_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct tiny_model {
    uint32_t vocab, hidden, q_heads, kv_heads, head_dim, layers, context;
    uint32_t seed;
    float rope_base;
    /* Weight of a tensor: by name, row and column; NULL: random, in [-1, 1), scaled down by the width. */
    float (*weight)(const struct tiny_model *m, const char *name, uint32_t row, uint32_t col);
};

static inline uint32_t tiny_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static inline float tiny_uniform(uint32_t *state)
{
    return (float)tiny_random(state) / 8388608.0f - 1.0f;
}

static inline void tiny_put(FILE *f, const void *data, size_t bytes)
{
    if (fwrite(data, 1, bytes, f) != bytes)
        abort();
}

static inline void tiny_u32(FILE *f, uint32_t value)
{
    tiny_put(f, &value, sizeof value);
}

static inline void tiny_u64(FILE *f, uint64_t value)
{
    tiny_put(f, &value, sizeof value);
}

static inline void tiny_text(FILE *f, const char *text)
{
    tiny_u64(f, strlen(text));
    tiny_put(f, text, strlen(text));
}

static inline void tiny_key_u32(FILE *f, const char *key, uint32_t value)
{
    tiny_text(f, key);
    tiny_u32(f, 4);
    tiny_u32(f, value);
}

static inline void tiny_key_f32(FILE *f, const char *key, float value)
{
    tiny_text(f, key);
    tiny_u32(f, 6);
    tiny_put(f, &value, sizeof value);
}

/* rows 0: a vector. */
struct tiny_tensor {
    char name[48];
    uint32_t rows, cols;
};

static inline uint32_t tiny_tensors(const struct tiny_model *m, struct tiny_tensor *t)
{
    uint32_t n = 0, q = m->q_heads * m->head_dim, kv = m->kv_heads * m->head_dim, h = m->hidden;
    const struct {
        const char *name;
        uint32_t rows, cols;
    } parts[] = {{"attn_norm", 0, h}, {"attn_q", q, h},      {"attn_k", kv, h},
                 {"attn_v", kv, h},   {"attn_output", h, q}, {"ffn_norm", 0, h},
                 {"ffn_gate", h, h},  {"ffn_up", h, h},      {"ffn_down", h, h}};
    t[n++] = (struct tiny_tensor){"token_embd.weight", m->vocab, h};
    t[n++] = (struct tiny_tensor){"output_norm.weight", 0, h};
    for (uint32_t l = 0; l < m->layers; l++)
        for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++) {
            t[n] = (struct tiny_tensor){"", parts[i].rows, parts[i].cols};
            snprintf(t[n++].name, sizeof t->name, "blk.%u.%s.weight", l, parts[i].name);
        }
    return n;
}

static inline uint64_t tiny_bytes(const struct tiny_tensor *t)
{
    return (((uint64_t)(t->rows ? t->rows : 1) * t->cols * 4) + 31) & ~UINT64_C(31);
}

static inline void tiny_data(FILE *f, const struct tiny_model *m, const struct tiny_tensor *t,
                             uint32_t *state)
{
    uint64_t written = 0;
    for (uint32_t r = 0; r < (t->rows ? t->rows : 1); r++)
        for (uint32_t c = 0; c < t->cols; c++) {
            float value = t->rows ? tiny_uniform(state) : 1 + 0.5f * tiny_uniform(state);
            if (m->weight)
                value = m->weight(m, t->name, r, c);
            tiny_put(f, &value, sizeof value);
            written += sizeof value;
        }
    for (; written < tiny_bytes(t); written++)
        tiny_put(f, "", 1);
}

static inline void tiny_model_write(const struct tiny_model *m, const char *path)
{
    struct tiny_tensor *t = calloc(2 + 9 * (size_t)m->layers, sizeof *t);
    FILE *f = fopen(path, "wb");
    if (!t || !f)
        abort();
    uint32_t n = tiny_tensors(m, t), state = m->seed;
    uint64_t at = 0;
    tiny_put(f, "GGUF", 4);
    tiny_u32(f, 3);
    tiny_u64(f, n);
    tiny_u64(f, 11);
    tiny_text(f, "general.architecture");
    tiny_u32(f, 8);
    tiny_text(f, "llama");
    tiny_key_u32(f, "llama.context_length", m->context);
    tiny_key_u32(f, "llama.embedding_length", m->hidden);
    tiny_key_u32(f, "llama.block_count", m->layers);
    tiny_key_u32(f, "llama.feed_forward_length", m->hidden);
    tiny_key_u32(f, "llama.attention.head_count", m->q_heads);
    tiny_key_u32(f, "llama.attention.head_count_kv", m->kv_heads);
    tiny_key_u32(f, "llama.attention.key_length", m->head_dim);
    tiny_key_u32(f, "llama.rope.dimension_count", m->head_dim);
    tiny_key_f32(f, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    tiny_key_f32(f, "llama.rope.freq_base", m->rope_base);
    for (uint32_t i = 0; i < n; i++) {
        tiny_text(f, t[i].name);
        tiny_u32(f, t[i].rows ? 2 : 1);
        tiny_u64(f, t[i].cols);
        if (t[i].rows)
            tiny_u64(f, t[i].rows);
        tiny_u32(f, 0);
        tiny_u64(f, at);
        at += tiny_bytes(&t[i]);
    }
    for (long end = ftell(f); end % 32; end++)
        tiny_put(f, "", 1);
    for (uint32_t i = 0; i < n; i++)
        tiny_data(f, m, &t[i], &state);
    if (fclose(f) != 0)
        abort();
    free(t);
}

#endif
