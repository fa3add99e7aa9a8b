/* Models: configuration and weights of sound files, refusal of files that contradict themselves, rope. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "model/model.h"
#include "model/tokenizer.h"
#include "model/vocab.h"
#include "tests/lib/ggufgen.h"

#define SMOLLM2 "models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define STORIES "../shared/tiny-model/stories260K.gguf"

static const struct ggufgen_llama grouped = {.layers = 2,
                                             .hidden = 64,
                                             .q_heads = 4,
                                             .kv_heads = 2,
                                             .head_dim = 16,
                                             .ffn = 96,
                                             .vocab = 40,
                                             .context = 128,
                                             .type = DTYPE_Q8_0};

static int open_gen(struct ggufgen *gen, struct model **ret, struct err *err)
{
    size_t bytes;
    char *path;
    uint8_t *data = ggufgen_finish(gen, &bytes, NULL);
    ggufgen_save(data, bytes, &path);
    *ret = NULL;
    *err = (struct err){0};
    int rc = model_open(path, ret, err);
    ggufgen_remove(&path);
    mem_free(&data);
    ggufgen_free(gen);
    return rc;
}

static void refuse(struct ggufgen *gen, int code, const char *words)
{
    struct model *m;
    struct err err;
    int rc = open_gen(gen, &m, &err);
    if (rc != code || !strstr(err.text, words))
        fail_msg("found %d \"%s\", expected %d \"%s\"", rc, err.text, code, words);
    assert_null(m);
}

static void make(struct ggufgen *gen, const struct ggufgen_llama *sizes)
{
    ggufgen_init(gen);
    ggufgen_llama(gen, sizes);
}

static void test_types_and_heads(void **state)
{
    (void)state;
    const enum dtype types[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16, DTYPE_Q8_0,
                                DTYPE_Q4_0, DTYPE_Q4_1, DTYPE_Q5_0, DTYPE_Q5_1};
    const uint32_t kv_heads[] = {1, 2, 4}; /* multi-query, grouped, multi-head */
    for (unsigned i = 0; i < 24; i++) {
        struct ggufgen_llama sizes = grouped;
        struct ggufgen gen;
        struct model *m;
        struct err err;
        sizes.type = types[i % 8];
        sizes.kv_heads = kv_heads[i / 8];
        sizes.untied = i % 2 == 0;
        make(&gen, &sizes);
        if (open_gen(&gen, &m, &err) < 0)
            fail_msg("%s", err.text);
        const struct model_config *c = model_config(m);
        const struct model_layer *l = &model_layers(m)[1];
        assert_int_equal(c->kv_heads, sizes.kv_heads);
        assert_int_equal(c->head_dim, 16);
        assert_int_equal(c->vocab, 40);
        assert_int_equal(c->bos, VOCAB_NO_TOKEN);
        assert_int_equal(c->tied, !sizes.untied);
        assert_int_equal(c->rope.dims, 16);
        assert_int_equal(c->rope.scaling, MODEL_ROPE_SCALING_NONE);
        assert_int_equal(l->wk.rows, sizes.kv_heads * 16);
        assert_int_equal(l->wk.cols, 64);
        assert_int_equal(l->down.cols, 96);
        assert_int_equal(l->down.type, types[i % 8]);
        assert_int_equal(l->down.bytes, 64 * dtype_row_bytes(types[i % 8], 96));
        assert_int_equal(l->attn_norm.rows, 1);
        assert_int_equal(l->attn_norm.cols, 64);
        assert_true((model_output(m)->data == model_token_embedding(m)->data) == c->tied);
        assert_string_equal(model_name(m), "generated");
        assert_null(model_vocab(m));
        struct tokenizer *t = NULL;
        assert_int_equal(tokenizer_create(m, &t, &err), -ENOENT);
        model_free(&m);
        assert_null(m);
        model_free(&m);
    }
}

/* What is no text in a name, or would move a terminal's cursor, is not passed on. */
static void test_names_are_printable(void **state)
{
    (void)state;
    /* Nine bytes each, as "generated". */
    static const char *const cases[][2] = {{"g\xc3\xa9n\xc3\xa9r\xc3\xa9", "g\xc3\xa9n\xc3\xa9r\xc3\xa9"},
                                           {"gen\xffrat\xc3x", "gen?rat?x"},
                                           {"gen\x1b[2J\nx", "gen?[2J?x"},
                                           {"gen\302\233ated", "gen??ated"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct ggufgen gen;
        struct model *m;
        struct err err;
        make(&gen, &grouped);
        uint8_t *name = memmem(gen.keys.data, gen.keys.bytes, "generated", 9);
        assert_non_null(name);
        memcpy(name, cases[i][0], strnlen(cases[i][0], 9));
        assert_int_equal(open_gen(&gen, &m, &err), 0);
        assert_string_equal(model_name(m), cases[i][1]);
        model_free(&m);
    }
}

/* Types whose blocks hold 256 elements, and IQ4_NL. */
static void test_k_types(void **state)
{
    (void)state;
    const enum dtype types[] = {DTYPE_Q2_K, DTYPE_Q3_K, DTYPE_Q4_K, DTYPE_Q5_K, DTYPE_Q6_K, DTYPE_IQ4_NL};
    for (unsigned i = 0; i < 6; i++) {
        const struct ggufgen_llama sizes = {.layers = 1,
                                            .hidden = 256,
                                            .q_heads = 4,
                                            .kv_heads = 2,
                                            .head_dim = 64,
                                            .ffn = 512,
                                            .vocab = 5,
                                            .context = 64,
                                            .type = types[i]};
        struct ggufgen gen;
        struct model *m;
        struct err err;
        make(&gen, &sizes);
        if (open_gen(&gen, &m, &err) < 0)
            fail_msg("%s", err.text);
        assert_int_equal(model_layers(m)->down.type, types[i]);
        assert_int_equal(model_layers(m)->down.bytes, 256 * dtype_row_bytes(types[i], 512));
        model_free(&m);
    }
}

/* Each size out of range, or at odds with the weights. */
static void test_sizes(void **state)
{
    (void)state;
    const struct {
        size_t offset;
        uint32_t value;
        const char *words;
    } sizes[] = {
        {offsetof(struct ggufgen_llama, q_heads), 0, "attention.head_count: found 0"},
        {offsetof(struct ggufgen_llama, q_heads), 5000, "attention.head_count: found 5000"},
        {offsetof(struct ggufgen_llama, kv_heads), 3, "head_count_kv: found 3, expected a divisor of 4"},
        {offsetof(struct ggufgen_llama, kv_heads), 8, "head_count_kv: found 8"},
        {offsetof(struct ggufgen_llama, head_dim), 0, "key_length: found 0"},
        {offsetof(struct ggufgen_llama, head_dim), 15, "head dimension: found 15"},
        {offsetof(struct ggufgen_llama, head_dim), 1024, "key_length: found 1024"},
        {offsetof(struct ggufgen_llama, context), 0, "context_length: found 0"},
        {offsetof(struct ggufgen_llama, layers), 0, "block_count: found 0"},
        {offsetof(struct ggufgen_llama, layers), 1025, "block_count: found 1025"},
        {offsetof(struct ggufgen_llama, layers), 3, "tensor blk.2.attn_norm.weight: found no such tensor"},
        {offsetof(struct ggufgen_llama, layers), 1, "tensor blk.1.attn_norm.weight: found, expected no such"},
    };
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct ggufgen_llama wrong = grouped;
        struct ggufgen head, body;
        memcpy((char *)&wrong + sizes[i].offset, &sizes[i].value, 4);
        make(&body, &grouped);
        ggufgen_init(&head);
        ggufgen_string(&head, "general.architecture", "llama");
        ggufgen_u32(&head, "llama.block_count", wrong.layers);
        ggufgen_u32(&head, "llama.context_length", wrong.context);
        ggufgen_u32(&head, "llama.embedding_length", wrong.hidden);
        ggufgen_u32(&head, "llama.feed_forward_length", wrong.ffn);
        ggufgen_u32(&head, "llama.attention.head_count", wrong.q_heads);
        ggufgen_u32(&head, "llama.attention.head_count_kv", wrong.kv_heads);
        ggufgen_u32(&head, "llama.attention.key_length", wrong.head_dim);
        ggufgen_f32(&head, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
        struct ggufgen_part keys = body.keys; /* the body's tensors behind the head's keys */
        body.keys = head.keys;
        body.key_count = head.key_count;
        head.keys = keys;
        ggufgen_free(&head);
        int code = strstr(sizes[i].words, "expected no such") ? -ENOTSUP : -EBADMSG;
        refuse(&body, code, sizes[i].words);
    }
}

static void test_keys(void **state)
{
    (void)state;
    struct ggufgen gen;
    ggufgen_init(&gen);
    refuse(&gen, -EBADMSG, "general.architecture");
    ggufgen_init(&gen);
    ggufgen_string(&gen, "general.architecture", "mamba");
    refuse(&gen, -ENOTSUP, "\"mamba\"");
    ggufgen_init(&gen);
    ggufgen_string(&gen, "general.architecture", "llama");
    refuse(&gen, -EBADMSG, "llama.block_count");
    make(&gen, &grouped);
    ggufgen_u32(&gen, "llama.expert_count", 8);
    refuse(&gen, -ENOTSUP, "expert_count");
    make(&gen, &grouped);
    ggufgen_u32(&gen, "llama.attention.value_length", 32);
    refuse(&gen, -ENOTSUP, "value_length");
    make(&gen, &grouped);
    ggufgen_u32(&gen, "llama.rope.dimension_count", 18);
    refuse(&gen, -EBADMSG, "dimension_count: found 18");
    make(&gen, &grouped);
    ggufgen_u32(&gen, "llama.rope.dimension_count", 7);
    refuse(&gen, -EBADMSG, "dimension_count: found 7");
    make(&gen, &grouped);
    ggufgen_f32(&gen, "llama.rope.freq_base", 0);
    refuse(&gen, -EBADMSG, "freq_base: found 0");
    make(&gen, &grouped);
    ggufgen_f32(&gen, "llama.rope.freq_base", NAN);
    refuse(&gen, -EBADMSG, "freq_base: found");
}

static void test_tensors(void **state)
{
    (void)state;
    struct ggufgen gen;
    struct ggufgen_llama sizes = grouped;
    make(&gen, &grouped);
    ggufgen_tensor(&gen, "blk.0.attn_output.bias", DTYPE_F32, 0, 64, 1);
    refuse(&gen, -ENOTSUP, "tensor blk.0.attn_output.bias: found, expected no such tensor");
    make(&gen, &grouped); /* biases come together, in every layer */
    ggufgen_tensor(&gen, "blk.0.attn_q.bias", DTYPE_F32, 0, 64, 1);
    refuse(&gen, -EBADMSG, "tensor blk.0.attn_k.bias: found no such tensor");
    make(&gen, &grouped);
    ggufgen_tensor(&gen, "output.weight", DTYPE_F32, 41, 64, 1);
    refuse(&gen, -EBADMSG, "tensor output.weight: shape: found 64 x 41");
    make(&gen, &grouped);
    ggufgen_tensor(&gen, "output.weight", DTYPE_F32, 0, 64, 1);
    refuse(&gen, -EBADMSG, "tensor output.weight: shape");
    sizes.layers = 0;
    ggufgen_init(&gen);
    ggufgen_llama(&gen, &sizes);
    refuse(&gen, -EBADMSG, "block_count");
    /* A norm in blocks. */
    ggufgen_init(&gen);
    ggufgen_string(&gen, "general.architecture", "llama");
    const char *const keys[] = {"block_count", "context_length", "embedding_length", "feed_forward_length",
                                "attention.head_count"};
    const uint32_t values[] = {1, 16, 256, 256, 4};
    for (int i = 0; i < 5; i++) {
        char key[64];
        snprintf(key, sizeof key, "llama.%s", keys[i]);
        ggufgen_u32(&gen, key, values[i]);
    }
    ggufgen_f32(&gen, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    ggufgen_tensor(&gen, "token_embd.weight", DTYPE_F16, 3, 256, 1);
    ggufgen_tensor(&gen, "output_norm.weight", DTYPE_Q8_0, 0, 256, 1);
    refuse(&gen, -ENOTSUP, "output_norm.weight: type: found Q8_0, expected F32, F16 or BF16");
}

/* Field fault: vocabulary and weights must fit. */
static void test_vocabulary(void **state)
{
    (void)state;
    struct ggufgen gen;
    struct model *m;
    struct err err;
    const char *tokens[41];
    float scores[41] = {0};
    int32_t types[41];
    for (int i = 0; i < 41; i++) {
        tokens[i] = "x";
        types[i] = 1;
    }
    for (int extra = -1; extra <= 1; extra++) {
        make(&gen, &grouped);
        ggufgen_string(&gen, "tokenizer.ggml.model", "llama");
        ggufgen_strings(&gen, "tokenizer.ggml.tokens", tokens, (uint64_t)(40 + extra));
        ggufgen_f32s(&gen, "tokenizer.ggml.scores", scores, (uint64_t)(40 + extra));
        ggufgen_i32s(&gen, "tokenizer.ggml.token_type", types, (uint64_t)(40 + extra));
        if (extra)
            refuse(&gen, -EBADMSG,
                   extra < 0 ? "found 39 tokens, expected 40" : "found 41 tokens, expected 40");
        else
            assert_int_equal(open_gen(&gen, &m, &err), 0);
    }
    model_free(&m);
    make(&gen, &grouped);
    ggufgen_u32(&gen, "llama.vocab_size", 41);
    refuse(&gen, -EBADMSG, "vocab_size: found 41, expected 40");
}

static void test_vocabulary_fields(void **state)
{
    (void)state;
    struct ggufgen gen;
    const char *tokens[41];
    float scores[41] = {0};
    int32_t types[41];
    for (int i = 0; i < 41; i++) {
        tokens[i] = "x";
        types[i] = 1;
    }
    const struct {
        const char *key;
        uint32_t id;
        int code;
        const char *words;
    } cases[] = {
        {"tokenizer.ggml.bos_token_id", 40, -EBADMSG, "bos_token_id: found id 40"},
        {"tokenizer.ggml.eos_token_id", UINT32_MAX, -EBADMSG, "eos_token_id: found id 4294967295"},
        {"tokenizer.chat_template", 1, -EBADMSG, "chat_template: found u32, expected a string"},
        {"tokenizer.ggml.add_bos_token", 1, -EBADMSG, "add_bos_token: found u32, expected a bool"},
        {"tokenizer.ggml.scores", 1, -EBADMSG, "scores: found u32, expected an array of f32"},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        make(&gen, &grouped);
        ggufgen_string(&gen, "tokenizer.ggml.model", "llama");
        ggufgen_strings(&gen, "tokenizer.ggml.tokens", tokens, 40);
        if (!strstr(cases[i].key, "scores"))
            ggufgen_f32s(&gen, "tokenizer.ggml.scores", scores, 40);
        ggufgen_u32(&gen, cases[i].key, cases[i].id);
        refuse(&gen, cases[i].code, cases[i].words);
    }
    make(&gen, &grouped);
    ggufgen_string(&gen, "tokenizer.ggml.model", "bert");
    ggufgen_strings(&gen, "tokenizer.ggml.tokens", tokens, 40);
    refuse(&gen, -ENOTSUP, "\"bert\"");
    make(&gen, &grouped);
    ggufgen_string(&gen, "tokenizer.ggml.model", "llama");
    refuse(&gen, -EBADMSG, "tokenizer.ggml.tokens: found no such key");
    char *huge = mem_alloc(9000, 1);
    memset(huge, 'x', 8999);
    tokens[3] = huge;
    make(&gen, &grouped);
    ggufgen_string(&gen, "tokenizer.ggml.model", "llama");
    ggufgen_strings(&gen, "tokenizer.ggml.tokens", tokens, 40);
    refuse(&gen, -EBADMSG, "entry 3: found 8999 bytes");
    tokens[3] = "x";
    mem_free(&huge);
    make(&gen, &grouped);
    types[7] = 9;
    ggufgen_string(&gen, "tokenizer.ggml.model", "llama");
    ggufgen_strings(&gen, "tokenizer.ggml.tokens", tokens, 40);
    ggufgen_i32s(&gen, "tokenizer.ggml.token_type", types, 40);
    refuse(&gen, -EBADMSG, "found type 9 for token 7");
}

/* Field fault: an unknown rope scaling is refused, not ignored. */
static void test_rope_keys(void **state)
{
    (void)state;
    struct ggufgen gen;
    struct model *m;
    struct err err;
    make(&gen, &grouped);
    ggufgen_string(&gen, "llama.rope.scaling.type", "longrope");
    refuse(&gen, -ENOTSUP, "rope.scaling.type: found \"longrope\"");
    make(&gen, &grouped);
    ggufgen_string(&gen, "llama.rope.scaling.type", "linear");
    refuse(&gen, -EBADMSG, "rope.scaling.factor: found no such key");
    make(&gen, &grouped);
    ggufgen_string(&gen, "llama.rope.scaling.type", "yarn");
    ggufgen_f32(&gen, "llama.rope.scaling.factor", 4);
    refuse(&gen, -EBADMSG, "original_context_length: found no such key");
    make(&gen, &grouped);
    ggufgen_string(&gen, "llama.rope.scaling.type", "linear");
    ggufgen_f32(&gen, "llama.rope.scaling.factor", -4);
    refuse(&gen, -EBADMSG, "rope.scaling.factor: found -4");
    make(&gen, &grouped);
    ggufgen_f32(&gen, "llama.rope.scaling.factor", 4);
    ggufgen_f32(&gen, "llama.rope.scale_linear", 4);
    refuse(&gen, -EBADMSG, "rope.scale_linear: found beside");
    for (int old = 0; old < 2; old++) {
        make(&gen, &grouped);
        ggufgen_f32(&gen, old ? "llama.rope.scale_linear" : "llama.rope.scaling.factor", 4);
        assert_int_equal(open_gen(&gen, &m, &err), 0);
        assert_int_equal(model_config(m)->rope.scaling, MODEL_ROPE_SCALING_LINEAR);
        assert_true(model_config(m)->rope.factor == 4);
        model_free(&m);
    }
    make(&gen, &grouped);
    ggufgen_string(&gen, "llama.rope.scaling.type", "yarn");
    ggufgen_f32(&gen, "llama.rope.scaling.factor", 16);
    ggufgen_u32(&gen, "llama.rope.scaling.original_context_length", 2048);
    ggufgen_f32(&gen, "llama.rope.scaling.yarn_beta_fast", 24);
    assert_int_equal(open_gen(&gen, &m, &err), 0);
    assert_int_equal(model_config(m)->rope.scaling, MODEL_ROPE_SCALING_YARN);
    assert_int_equal(model_config(m)->rope.original_context, 2048);
    assert_true(model_config(m)->rope.beta_fast == 24 && model_config(m)->rope.beta_slow == 1);
    model_free(&m);
    make(&gen, &grouped);
    ggufgen_tensor(&gen, "rope_freqs.weight", DTYPE_F32, 0, 8, 0);
    assert_int_equal(open_gen(&gen, &m, &err), 0);
    assert_true(model_config(m)->rope.freq_factors && model_config(m)->rope.freq_factors[7] == 1);
    model_free(&m);
    make(&gen, &grouped);
    ggufgen_tensor(&gen, "rope_freqs.weight", DTYPE_F32, 0, 8, 1); /* some are negative */
    refuse(&gen, -EBADMSG, "rope_freqs.weight: found a divisor");
    make(&gen, &grouped);
    ggufgen_tensor(&gen, "rope_freqs.weight", DTYPE_F32, 0, 7, 0);
    refuse(&gen, -EBADMSG, "rope_freqs.weight: shape");
}

static void test_rope_frequencies(void **state)
{
    (void)state;
    float f[64], scale;
    struct model_rope plain = {
        .base = 1e4f, .dims = 128, .factor = 1, .beta_fast = 32, .beta_slow = 1, .attn_factor = 1};
    assert_int_equal(model_rope_frequencies(&plain, f, &scale), 0);
    assert_true(f[0] == 1 && scale == 1);
    assert_float_equal(f[32], 0.01, 1e-8);
    struct model_rope linear = plain;
    linear.scaling = MODEL_ROPE_SCALING_LINEAR;
    linear.factor = 4;
    float g[64];
    assert_int_equal(model_rope_frequencies(&linear, g, &scale), 0);
    assert_true(scale == 1);
    for (int j = 0; j < 64; j++)
        assert_float_equal(g[j], f[j] / 4, f[j] * 1e-6);
    /* YaRN, base 1e4, 2048 positions: pairs to 16 are left alone, from 41 on divided. */
    const struct {
        float base;
        uint32_t original;
        int low, high;
    } yarns[] = {{1e4f, 2048, 16, 41}, {5e5f, 2048, 11, 29}, {1e6f, 2048, 10, 27}, {1e6f, 4096, 13, 31}};
    for (unsigned i = 0; i < sizeof yarns / sizeof *yarns; i++) {
        struct model_rope yarn = plain, raw = plain;
        raw.base = yarn.base = yarns[i].base;
        yarn.scaling = MODEL_ROPE_SCALING_YARN;
        yarn.factor = 16;
        yarn.original_context = yarns[i].original;
        assert_int_equal(model_rope_frequencies(&raw, f, &scale), 0);
        assert_int_equal(model_rope_frequencies(&yarn, g, &scale), 0);
        assert_float_equal(scale, 0.1 * log(16) + 1, 1e-6);
        for (int j = 0; j < 64; j++) {
            double ramp = fmin(fmax((double)(j - yarns[i].low) / (yarns[i].high - yarns[i].low), 0), 1);
            assert_float_equal(g[j], f[j] / 16 * ramp + f[j] * (1 - ramp), f[j] * 1e-5);
        }
    }
    float factors[64];
    for (int j = 0; j < 64; j++)
        factors[j] = (float)(1 + j);
    plain.freq_factors = factors;
    assert_int_equal(model_rope_frequencies(&plain, g, &scale), 0);
    assert_float_equal(g[32], 0.01 / 33, 1e-9);
    struct model_rope bad[4] = {plain, plain, plain, linear};
    bad[0].dims = 7;
    bad[1].dims = 0;
    bad[2].base = NAN;
    bad[3].factor = 0;
    for (int i = 0; i < 4; i++)
        assert_int_equal(model_rope_frequencies(&bad[i], g, &scale), -EINVAL);
}

static struct hash128 fingerprint_of(const uint8_t *data, size_t bytes)
{
    struct model *m = NULL;
    struct err err;
    char *path;
    ggufgen_save(data, bytes, &path);
    assert_int_equal(model_open(path, &m, &err), 0);
    struct hash128 h = model_fingerprint(m);
    model_free(&m);
    ggufgen_remove(&path);
    return h;
}

static void test_fingerprint(void **state)
{
    (void)state;
    struct ggufgen gen;
    struct ggufgen_llama sizes = grouped;
    size_t bytes, sections[4];
    sizes.vocab = 1000;
    make(&gen, &sizes);
    uint8_t *data = ggufgen_finish(&gen, &bytes, sections);
    struct hash128 h = fingerprint_of(data, bytes);
    assert_true(hash_equal(h, fingerprint_of(data, bytes)));
    const size_t places[] = {sections[2], sections[2] + 4095, sections[2] + 500 * 68, sections[3] - 33};
    for (unsigned i = 0; i < sizeof places / sizeof *places; i++) {
        data[places[i]] ^= 1;
        assert_false(hash_equal(h, fingerprint_of(data, bytes)));
        data[places[i]] ^= 1;
    }
    mem_free(&data);
    ggufgen_free(&gen);
}

static void test_real(void **state)
{
    (void)state;
    struct model *m = NULL;
    struct err err = {0};
    bool any = false;
    if (access(SMOLLM2, R_OK) == 0) {
        assert_int_equal(model_open(SMOLLM2, &m, &err), 0);
        assert_int_equal(err.code, 0); /* what is optional leaves no error behind */
        const struct model_config *c = model_config(m);
        assert_int_equal(c->layers, 30);
        assert_int_equal(c->q_heads, 9);
        assert_int_equal(c->kv_heads, 3);
        assert_int_equal(c->vocab, 49152);
        assert_true(c->tied && c->rope.base == 1e5f && !c->rope.halves);
        assert_int_equal(c->bos, 1);
        model_free(&m);
        any = true;
    } else {
        print_message("skipped: %s is absent\n", SMOLLM2);
    }
    if (access(STORIES, R_OK) == 0) {
        assert_int_equal(model_open(STORIES, &m, &err), 0);
        assert_int_equal(model_config(m)->head_dim, 8);
        assert_false(model_config(m)->tied);
        assert_int_equal(model_weight_bytes(m), 1171200);
        model_free(&m);
        any = true;
    } else {
        print_message("skipped: %s is absent\n", STORIES);
    }
    assert_int_equal(model_open("/tmp", &m, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "config.json"));
    if (!any)
        skip();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_types_and_heads),
        cmocka_unit_test(test_names_are_printable),
        cmocka_unit_test(test_k_types),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_vocabulary),
        cmocka_unit_test(test_vocabulary_fields),
        cmocka_unit_test(test_rope_keys),
        cmocka_unit_test(test_rope_frequencies),
        cmocka_unit_test(test_fingerprint),
        cmocka_unit_test(test_real),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
