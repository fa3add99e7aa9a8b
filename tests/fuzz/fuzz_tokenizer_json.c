/* libFuzzer target: any bytes as a tokenizer.json. Reading must refuse or succeed; with what was read, a text
 * must encode, and decode to valid UTF-8. The first byte chooses how many tokens the embedding has. Seeds a
 * corpus folder with sound files. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "model/detok.h"
#include "model/tokenizer.h"
#include "model/utf8.h"
#include "model/vocab_folder.h"
#include "tests/lib/fuzzfile.h"

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    static const char *const files[] = {
        " {\"added_tokens\":[{\"id\":3,\"content\":\"<s>\",\"special\":true},{\"id\":1,\"content\":\"b\"}],"
        "\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{"
        "\"type\":"
        "\"Digits\",\"individual_digits\":true},{\"type\":\"ByteLevel\",\"add_prefix_space\":false}]},"
        "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},"
        "{"
        "\"Sequence\":{}}]},\"model\":{\"type\":\"BPE\",\"ignore_merges\":true,\"vocab\":{\"a\":0,\"b\":1,"
        "\"ab\":2},"
        "\"merges\":[\"a b\"]}}",
        "A{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\",\"prepend\":"
        "\"\xe2\x96\x81\"},"
        "{\"type\":\"Replace\",\"pattern\":{\"String\":\" "
        "\"},\"content\":\"\xe2\x96\x81\"}]},\"pre_tokenizer\":null,"
        "\"model\":{\"byte_fallback\":true,\"unk_token\":\"<unk>\",\"vocab\":{\"<unk>\":0,\"<0x61>\":1,\"b\":"
        "2,"
        "\"c\":3,\"bc\":4,\"\xe2\x96\x81\":5},\"merges\":[[\"b\",\"c\"]]}}",
        "B{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":\"\xe2\x96\x81\",\"prepend_scheme\":"
        "\"first\","
        "\"split\":false},\"model\":{\"byte_fallback\":true,\"vocab\":{\"\\u0000\":1},\"merges\":[]}}",
    };
    for (unsigned i = 0; i < sizeof files / sizeof *files; i++) {
        char name[16] = "seed-0";
        name[5] = (char)('0' + i);
        fuzzfile_seed(*argc, *argv, name, files[i], strlen(files[i]));
    }
    return 0;
}

static void use(const struct tokenizer *t)
{
    static const char text[] = "<s>abc ab\n12 \xc3\xa9\xe4\xbd\xa0\xf0\x9f\x98\x80 b\xe2\x96\x81<s>";
    struct token_buf ids = {0};
    struct text_buf out = {0};
    struct detokenizer detok;
    for (int special = 0; special < 2; special++)
        CHECK(tokenizer_encode(t, text, sizeof text - 1, special, &ids, NULL) == 0);
    detok_init(&detok);
    for (size_t i = 0; i < ids.count; i++) {
        CHECK(ids.ids[i] < tokenizer_vocab(t));
        detok_push(&detok, t, ids.ids[i], &out);
    }
    detok_finish(&detok, &out);
    CHECK(utf8_valid(out.text, out.bytes) == out.bytes);
    tokenizer_fingerprint(t);
    text_buf_free(&out);
    token_buf_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    struct vocab *v = NULL;
    struct tokenizer *t = NULL;
    struct err err = {0};
    if (bytes == 0)
        return 0;
    struct name text = {(const char *)data + 1, bytes - 1};
    uint32_t vocab_size = data[0] < 'A' ? 0 : data[0];
    if (vocab_from_json(text, "tokenizer.json", vocab_size, &v, &err) < 0) {
        CHECK(err.code < 0 && err.text[0] && !strchr(err.text, '\n') && !v);
        return 0;
    }
    if (tokenizer_create_from(v, &t, &err) == 0)
        use(t);
    tokenizer_free(&t);
    vocab_free(&v);
    return 0;
}
