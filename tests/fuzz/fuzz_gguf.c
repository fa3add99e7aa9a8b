/* libFuzzer target: any bytes as a model file. Opening must refuse or succeed; what was opened must be
 * usable: every weight readable, the tokenizer encodes and decodes. Seeds a corpus folder with sound
 * files. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "model/chat.h"
#include "model/detok.h"
#include "model/gguf.h"
#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/lib/fuzzfile.h"
#include "tests/lib/ggufgen.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static void put_tokenizer(struct ggufgen *gen, int spm)
{
    static const char *const tokens[] = {
        "<s>", "</s>", "<|im_start|>", "<|im_end|>", "a",    "b",        "ab",     "h",
        "e",   "l",    "he",           "ll",         "hell", "\xc4\xa0", "<tool>", "<0x41>"};
    static const int32_t types[] = {3, 3, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4, 6};
    static const float scores[] = {0, 0, 0, 0, -1, -2, -3, -4, -5, -6, -7, -8, -8, -9, 0, 0};
    static const char *const merges[] = {"a b", "h e", "l l", "he ll"};
    ggufgen_string(gen, "tokenizer.ggml.model", spm ? "llama" : "gpt2");
    ggufgen_strings(gen, "tokenizer.ggml.tokens", tokens, 16);
    ggufgen_i32s(gen, "tokenizer.ggml.token_type", types, 16);
    if (spm)
        ggufgen_f32s(gen, "tokenizer.ggml.scores", scores, 16);
    else
        ggufgen_strings(gen, "tokenizer.ggml.merges", merges, 4);
    ggufgen_string(gen, "tokenizer.ggml.pre", spm ? "default" : "qwen2");
    ggufgen_u32(gen, "tokenizer.ggml.bos_token_id", 0);
    ggufgen_u32(gen, "tokenizer.ggml.eos_token_id", 1);
    ggufgen_bool(gen, "tokenizer.ggml.add_bos_token", 1);
    ggufgen_string(
        gen, "tokenizer.chat_template",
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
        "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' "
        "}}{% endif %}");
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const struct ggufgen_llama sizes = {.layers = 1,
                                        .hidden = 32,
                                        .q_heads = 2,
                                        .kv_heads = 1,
                                        .head_dim = 16,
                                        .ffn = 32,
                                        .vocab = 16,
                                        .context = 8,
                                        .type = DTYPE_Q4_0};
    for (int spm = 0; spm < 2; spm++) {
        struct ggufgen gen;
        size_t bytes;
        ggufgen_init(&gen);
        put_tokenizer(&gen, spm);
        ggufgen_llama(&gen, &sizes);
        ggufgen_string(&gen, "llama.rope.scaling.type", "yarn");
        ggufgen_f32(&gen, "llama.rope.scaling.factor", 4);
        ggufgen_u32(&gen, "llama.rope.scaling.original_context_length", 4);
        uint8_t *data = ggufgen_finish(&gen, &bytes, NULL);
        fuzzfile_seed(*argc, *argv, spm ? "seed-spm" : "seed-bpe", data, bytes);
        mem_free(&data);
        ggufgen_free(&gen);
    }
    return 0;
}

static void use_tokenizer(const struct model *model)
{
    static const char text[] = "hello <|im_end|> ab<tool>\xc3\xa9 \xe6\xbc\xa2 123 '\xcc\x81";
    struct tokenizer *t = NULL;
    struct err err = {0};
    if (tokenizer_create(model, &t, &err) < 0) {
        CHECK(err.code < 0 && err.text[0]);
        return;
    }
    const struct chat_message hi = {"user", text, sizeof text - 1};
    for (int special = 0; special < 2; special++) {
        struct token_buf ids = {0};
        struct text_buf back = {0};
        struct detokenizer detok;
        detok_init(&detok);
        if (tokenizer_encode_prompt(t, text, sizeof text - 1, special, &ids, &err) == 0)
            for (size_t i = 0; i < ids.count; i++) {
                CHECK(ids.ids[i] < tokenizer_vocab(t));
                detok_push(&detok, t, ids.ids[i], &back);
            }
        detok_finish(&detok, &back);
        ids.count = 0;
        struct chat_format format;
        if (chat_format_choose(t, NULL, &format, &err) == 0)
            chat_encode_as(t, &(struct chat){&format, &hi, 1, special}, &ids, &err);
        token_buf_free(&ids);
        text_buf_free(&back);
    }
    tokenizer_free(&t);
}

/* Reads both ends, for the sanitizer to see. */
static void touch(const void *data, uint64_t bytes)
{
    const volatile uint8_t *p = data;
    if (bytes)
        (void)(p[0] + p[bytes - 1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    const char *path = fuzzfile_put(data, bytes);
    struct gguf *g = NULL;
    struct model *m = NULL;
    struct err err = {0};
    if (gguf_open(path, &g, &err) < 0) {
        CHECK(err.code < 0 && err.text[0]);
        return 0;
    }
    for (uint32_t i = 0; i < gguf_tensors(g); i++) {
        const struct gguf_tensor *t = gguf_tensor_at(g, i);
        touch(t->data, t->bytes);
    }
    gguf_free(&g);
    if (model_open(path, &m, &err) < 0) {
        CHECK(err.code < 0 && err.text[0]);
        return 0;
    }
    model_fingerprint(m);
    model_tokenizer_fingerprint(m);
    use_tokenizer(m);
    model_free(&m);
    return 0;
}
