/* Tokenizers out of tokenizer.json: the makers' own files where ../shared has them, small made ones, and
 * files that are wrong. What is absent is skipped by name. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "model/model.h"
#include "model/detok.h"
#include "model/tokenizer.h"
#include "model/pretok.h"
#include "model/vocab_folder.h"
#include "tests/lib/token_ids.h"

#define SMOLLM2 "models/SmolLM2-135M-Instruct.Q4_1.gguf"

static char *read_command(const char *command, size_t *ret_bytes)
{
    size_t room = 1 << 20, bytes = 0, n;
    char *text = mem_alloc(room, 1);
    FILE *pipe = popen(command, "re");
    assert_non_null(pipe);
    while ((n = fread(text + bytes, 1, room - bytes, pipe)) > 0) {
        bytes += n;
        if (bytes == room)
            text = mem_resize(text, room *= 2, 1);
    }
    pclose(pipe);
    *ret_bytes = bytes;
    return text;
}

static void check_file(const struct tokenizer *t, const char *texts_path, const char *ids_path)
{
    static const char separator[] = "\n__ggml_vocab_test__\n";
    char *texts = NULL, *line = NULL;
    size_t texts_room = 0, line_room = 0, count = 0;
    FILE *file = fopen(texts_path, "re"), *ids = fopen(ids_path, "re");
    assert_non_null(file);
    assert_non_null(ids);
    ssize_t bytes = getdelim(&texts, &texts_room, '\0', file);
    assert_true(bytes > 0);
    for (char *text = texts, *end; (end = strstr(text, separator)); text = end + sizeof separator - 1) {
        assert_true(getline(&line, &line_room, ids) > 0);
        token_ids_check(t, text, (size_t)(end - text), false, line);
        count++;
    }
    assert_int_equal(count, 46);
    free(texts);
    free(line);
    fclose(file);
    fclose(ids);
}

static void check_shared(const char *folder, const char *pre, uint32_t count)
{
    char json_path[128], texts_path[128], ids_path[128], command[160];
    snprintf(json_path, sizeof json_path, "../shared/tokenizers/%s/tokenizer.json.xz", folder);
    snprintf(texts_path, sizeof texts_path, "../shared/tokenizers/%s.inp", pre);
    snprintf(ids_path, sizeof ids_path, "../shared/tokenizers/%s.out", pre);
    snprintf(command, sizeof command, "xz -dc '%s'", json_path);
    if (access(json_path, R_OK) < 0 || access(texts_path, R_OK) < 0) {
        print_message("skipped: %s is absent\n", json_path);
        skip();
    }
    size_t bytes;
    char *json = read_command(command, &bytes);
    struct vocab *v = NULL;
    struct tokenizer *t = NULL;
    struct err err = {0};
    if (vocab_from_json((struct name){json, bytes}, json_path, 0, &v, &err) < 0 ||
        tokenizer_create_from(v, &t, &err) < 0)
        fail_msg("%s", err.text);
    mem_free(&json); /* nothing may be borrowed from it */
    assert_true(name_is(v->pre, pre));
    assert_int_equal(v->count, count);
    check_file(t, texts_path, ids_path);
    token_ids_check_any_bytes(t);
    /* What the makers' own tokenizer gives for U+017F after an apostrophe. */
    token_ids_check(t, "it'\xc5\xbf", 5, false, strcmp(pre, "qwen2") ? "275 6 129 123" : "275 6 144815");
    tokenizer_free(&t);
    vocab_free(&v);
}

static void test_shared_qwen(void **state)
{
    (void)state;
    check_shared("qwen3", "qwen2", 151669);
}

static void test_shared_llama(void **state)
{
    (void)state;
    check_shared("llama3", "llama-bpe", 128256);
}

#define BYTE_LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"
#define MODEL(vocab, merges) \
    "\"model\":{\"type\":\"BPE\",\"unk_token\":null,\"vocab\":{" vocab "},\"merges\":[" merges "]}"
#define ABC "\"a\":0,\"b\":1,\"c\":2,\"ab\":3,\"abc\":4"

static int open_text(const char *text, struct vocab **ret, struct err *err)
{
    *err = (struct err){0};
    *ret = NULL;
    size_t bytes = strlen(text);
    char *copy = mem_alloc(bytes, 1); /* sanitizers see its end */
    memcpy(copy, text, bytes);
    int rc = vocab_from_json((struct name){copy, bytes}, "tokenizer.json", 0, ret, err);
    mem_free(&copy);
    return rc;
}

static void check_text(const char *json, const char *text, bool special, const char *ids)
{
    struct vocab *v;
    struct tokenizer *t = NULL;
    struct err err;
    if (open_text(json, &v, &err) < 0 || tokenizer_create_from(v, &t, &err) < 0)
        fail_msg("%s", err.text);
    token_ids_check(t, text, strlen(text), special, ids);
    tokenizer_free(&t);
    vocab_free(&v);
}

/* Exactly these bytes: the ids, or NULL where the vocabulary lacks one. */
static void check_bytes(const char *json, const char *text, const uint32_t *ids, size_t count)
{
    struct vocab *v;
    struct tokenizer *t = NULL;
    struct token_buf found = {0};
    struct err err;
    if (open_text(json, &v, &err) < 0 || tokenizer_create_from(v, &t, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(tokenizer_encode_bytes(t, text, strlen(text), &found, &err), ids ? 0 : -ENOTSUP);
    assert_int_equal(found.count, count);
    if (count)
        assert_memory_equal(found.ids, ids, count * sizeof *ids);
    token_buf_free(&found);
    tokenizer_free(&t);
    vocab_free(&v);
}

static void test_forms(void **state)
{
    (void)state;
    /* Merges as strings and as pairs; another order of keys; unknown keys of any shape. */
    check_text("{\"pre_tokenizer\":" BYTE_LEVEL "," MODEL(ABC, "\"a b\",\"ab c\"") "}", "abcab", false,
               "4 3");
    check_text(
        "{" MODEL(ABC, "[\"a\",\"b\"],[\"ab\",\"c\"]") ",\"pre_tokenizer\":{\"type\":\"Sequence\","
                                                       "\"pretokenizers\":[" BYTE_LEVEL
                                                       "]},\"x\":[{\"vocab\":{\"q\":9}},[[1.5e3,null]]]}",
        "abcab", false, "4 3");
    /* Added tokens: of their own, and of ones that the vocabulary has. */
    check_text("{\"pre_tokenizer\":" BYTE_LEVEL
               ",\"added_tokens\":[{\"id\":5,\"content\":\"<x>\",\"special\":true},"
               "{\"id\":2,\"content\":\"c\",\"special\":false}]," MODEL(ABC, "\"a b\"") "}",
               "ab<x>c", true, "3 5 2");
    /* ignore_merges takes whole pieces that no merges lead to. */
    check_text("{\"pre_tokenizer\":" BYTE_LEVEL
               ",\"model\":{\"type\":\"BPE\",\"ignore_merges\":true,\"vocab\":{" ABC "},\"merges\":[]}}",
               "abc", false, "4");
}

/* Llama 2's kind: spaces as U+2581, bytes as <0xNN>, merges by rank. */
static void test_sentencepiece(void **state)
{
    (void)state;
    static const char vocab[] =
        "\"<unk>\":0,\"<0x0A>\":1,\"<0xC3>\":2,\"<0xA9>\":3,\"\xe2\x96\x81\":4,\"a\":5,"
        "\"b\":6,\"\xe2\x96\x81"
        "a\":7,\"ab\":8";
    static const char merges[] = "\"\xe2\x96\x81 a\",\"a b\"";
    static const char legacy[] =
        "\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Prepend\","
        "\"prepend\":\"\xe2\x96\x81\"},{\"type\":\"Replace\",\"pattern\":{\"String\":\" \"},"
        "\"content\":\"\xe2\x96\x81\"}]},\"pre_tokenizer\":null";
    static const char first[] =
        "\"normalizer\":null,\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":"
        "\"\xe2\x96\x81\",\"prepend_scheme\":\"first\",\"split\":false}";
    char json[2048];
    for (int i = 0; i < 2; i++) {
        snprintf(json, sizeof json,
                 "{\"added_tokens\":[{\"id\":9,\"content\":\"<s>\",\"special\":true}],%s,\"model\":{\"type\":"
                 "\"BPE\","
                 "\"unk_token\":\"<unk>\",\"byte_fallback\":true,\"vocab\":{%s},\"merges\":[%s]}}",
                 i ? first : legacy, vocab, merges);
        check_text(json, "ab\xc3\xa9\n", false, "7 6 2 3 1");
        check_text(json, "ab ab", false, "7 6 7 6");
        check_text(json, "a<s>a", true, i ? "7 9 5" : "7 9 7");
        check_text(json, "x", false, "4 0");
        check_bytes(json, "ab\xc3\xa9\n", (uint32_t[]){8, 2, 3, 1}, 4);
        check_bytes(json, " ab", (uint32_t[]){7, 6}, 2);
        check_bytes(json, "\xc3", (uint32_t[]){2}, 1);
        check_bytes(json, "x", NULL, 0);
        check_bytes(json, "a\xe2\x96\x81", NULL, 0); /* no space */
    }
    check_text("{\"model\":{\"byte_fallback\":true,\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[]}}",
               "ab", false, "0 1"); /* no merges at all */
}

/* Added tokens that take white space along or must stand alone, as `tokenizers` cuts them out. */
static void test_cuts(void **state)
{
    (void)state;
    size_t bytes, room = 0, count = 0;
    char *json = read_command("cat tests/vectors/marks.json", &bytes), *line = NULL;
    struct vocab *v = NULL;
    struct tokenizer *t = NULL;
    struct err err = {0};
    json_t *text = NULL;
    if (vocab_from_json((struct name){json, bytes}, "marks.json", 0, &v, &err) < 0 ||
        tokenizer_create_from(v, &t, &err) < 0)
        fail_msg("%s", err.text);
    FILE *vectors = fopen("tests/vectors/marks.txt", "re");
    assert_non_null(vectors);
    while (getline(&line, &room, vectors) > 0) {
        if (line[0] == 'T') {
            json_decref(text);
            text = json_loads(line + 2, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
            assert_non_null(text);
        } else if (line[0] == 'I') {
            token_ids_check(t, json_string_value(text), json_string_length(text), true, line + 2);
            count++;
        }
    }
    assert_int_equal(count, 618);
    struct hash128 with = vocab_fingerprint(v);
    mem_free(&v->cuts);
    struct hash128 without = vocab_fingerprint(v);
    assert_memory_not_equal(&with, &without, sizeof with);
    fclose(vectors);
    free(line);
    json_decref(text);
    mem_free(&json);
    tokenizer_free(&t);
    vocab_free(&v);
}

static void test_refused(void **state)
{
    (void)state;
    static const struct {
        const char *json, *words;
        int code;
    } wrongs[] = {
        {"", "no valid JSON", -EBADMSG},
        {"[]", "model.vocab: found no such field", -EBADMSG},
        {"{", "no valid JSON", -EBADMSG},
        {"{}x", "no valid JSON", -EBADMSG},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0.5]]}}", "model.type: found \"Unigram\"",
         -ENOTSUP},
        {"{\"model\":{\"vocab\":[]}}", "model.vocab: found an array, expected an object", -EBADMSG},
        {"{\"model\":{\"vocab\":{\"a\":{}}}}", "model.vocab: found an object, expected an id", -EBADMSG},
        {"{\"model\":{\"vocab\":{\"a\":-1}}}", "model.vocab: found id -1", -EBADMSG},
        {"{\"model\":{\"vocab\":{\"a\":1.5}}}", "model.vocab: found id 1.5", -EBADMSG},
        {"{\"model\":{\"vocab\":{\"a\":16777216}}}", "found id 16777216", -EBADMSG},
        {"{\"model\":{\"vocab\":{\"a\":18446744073709551616}}}", "found id 18446744073709551616", -EBADMSG},
        {"{\"pre_tokenizer\":" BYTE_LEVEL "," MODEL("\"a\":16000000", "") "}", "tokens: found id 16000000",
         -EBADMSG},
        {"{\"pre_tokenizer\":" BYTE_LEVEL "," MODEL("\"a\":0,\"b\":0", "") "}", "id 0: found tokens",
         -EBADMSG},
        {"{" MODEL("\"a\":0", "\"a a\"") ",\"model\":{\"vocab\":{}}}", "twice", -EBADMSG},
        {"{" MODEL("\"a\":0", "1") "}", "model.merges: found a number", -EBADMSG},
        {"{" MODEL("\"a\":0", "[\"a\"]") "}", "model.merges: found the end of an array", -EBADMSG},
        {"{" MODEL("\"a\":0", "[\"a\",\"a\",\"a\"]") "}", "model.merges: found a string", -EBADMSG},
        {"{" MODEL("\"a\":0", "[\"a\",\"a a\"]") "}", "model.merges: entry 0", -EBADMSG},
        {"{" MODEL("\"a\":0", "") "}", "pre_tokenizer: found none", -ENOTSUP},
        {"{\"pre_tokenizer\":{\"type\":\"Whitespace\"}," MODEL("\"a\":0", "") "}", "found Whitespace",
         -ENOTSUP},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Isolated\"}"
         "," MODEL("\"a\":0", "") "}",
         "pre_tokenizer: found Split a", -ENOTSUP},
        {"{\"normalizer\":{\"type\":\"Lowercase\"},\"pre_tokenizer\":" BYTE_LEVEL
         "," MODEL("\"a\":0", "") "}",
         "normalizer: found Lowercase", -ENOTSUP},
        {"{\"post_processor\":{\"type\":\"BertProcessing\"},\"pre_tokenizer\":" BYTE_LEVEL
         "," MODEL("\"a\":0", "") "}",
         "post_processor: found BertProcessing", -ENOTSUP},
        {"{\"added_tokens\":[{\"id\":0,\"content\":\"<x>\"}],\"pre_tokenizer\":" BYTE_LEVEL
         "," MODEL("\"a\":0", "") "}",
         "id 0: found tokens", -EBADMSG},
        {"{\"added_tokens\":[3],\"pre_tokenizer\":" BYTE_LEVEL "," MODEL("\"a\":0", "") "}",
         "added_tokens: found", -EBADMSG},
        {"{\"model\":{\"type\":\"BPE\",\"end_of_word_suffix\":\"</w>\",\"vocab\":{},\"merges\":[]}}",
         "end_of_word_suffix", -ENOTSUP},
    };
    for (unsigned i = 0; i < sizeof wrongs / sizeof *wrongs; i++) {
        struct vocab *v;
        struct err err;
        int rc = open_text(wrongs[i].json, &v, &err);
        if (rc != wrongs[i].code || !strstr(err.text, wrongs[i].words) || strchr(err.text, '\n'))
            fail_msg("%u: found %d \"%s\", expected %d \"%s\"", i, rc, err.text, wrongs[i].code,
                     wrongs[i].words);
        assert_null(v);
    }
}

/* Nesting that would take a tree of any size. */
static void test_nesting(void **state)
{
    (void)state;
    const size_t depth = 1 << 20;
    char *json = mem_alloc(depth + 8, 1);
    struct vocab *v;
    struct err err;
    memcpy(json, "{\"x\":", 5);
    memset(json + 5, '[', depth);
    assert_int_equal(open_text(json, &v, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "nesting"));
    mem_free(&json);
}

/* Every cut of a sound file is refused, or is no JSON. */
static void test_truncated(void **state)
{
    (void)state;
    static const char json[] =
        "{\"pre_tokenizer\":" BYTE_LEVEL ",\"added_tokens\":[{\"id\":5,\"content\":\"<x>\","
        "\"special\":true}]," MODEL(ABC, "\"a b\",[\"ab\",\"c\"]") "}";
    for (size_t n = 0; n < sizeof json - 1; n++) {
        char cut[sizeof json];
        struct vocab *v;
        struct err err;
        memcpy(cut, json, n);
        cut[n] = '\0';
        assert_int_equal(open_text(cut, &v, &err), -EBADMSG);
        assert_null(v);
    }
}

/* DeepSeek's pre-tokenizers, by their parts. */
static void test_passes(void **state)
{
    (void)state;
    static const struct {
        const char *pre, *text, *pieces;
    } cases[] = {
        {"deepseek-v3", "ab 12345!x\n\n  y", "ab| |123|45|!x|\n\n| | y"},
        {"deepseek-v3", "\xe4\xbd\xa0\xe5\xa5\xbd ab", "\xe4\xbd\xa0\xe5\xa5\xbd| ab"},
        {"deepseek-llm", "ab 12, c\r\n  d", "ab| |1|2|,| c|\r|\n| | d"},
        {"deepseek-llm", "x  \xe4\xbd\xa0z ", "x|  |\xe4\xbd\xa0|z| "},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct pretok *p = NULL;
        struct pretok_walk walk;
        struct name piece;
        char joined[128] = "";
        assert_int_equal(pretok_create(name_of(cases[i].pre), &p, NULL), 0);
        pretok_begin(&walk, p, cases[i].text, strlen(cases[i].text));
        while (pretok_next(&walk, &piece) > 0)
            snprintf(joined + strlen(joined), sizeof joined - strlen(joined), "%s%.*s", *joined ? "|" : "",
                     (int)piece.bytes, piece.text);
        pretok_end(&walk);
        pretok_free(&p);
        assert_string_equal(joined, cases[i].pieces);
    }
}

/* A vocabulary of GGUF written as tokenizer.json is the same tokenizer, by its fingerprint too. */
static char *write_json(const struct vocab *v)
{
    json_t *tokens = json_object(), *merges = json_array(), *added = json_array();
    for (uint32_t i = 0; i < v->count; i++) {
        struct name t = v->tokens[i];
        if (v->types[i] == VOCAB_TYPE_NORMAL)
            json_object_setn_new(tokens, t.text, t.bytes, json_integer((json_int_t)i));
        else
            json_array_append_new(added, json_pack("{s:I, s:s%, s:b}", "id", (json_int_t)i, "content", t.text,
                                                   t.bytes, "special", v->types[i] == VOCAB_TYPE_CONTROL));
    }
    for (uint32_t i = 0; i < v->merge_count; i++)
        json_array_append_new(merges, json_stringn(v->merges[i].text, v->merges[i].bytes));
    json_t *root = json_pack("{s:o, s:{s:s, s:[{s:s, s:b}, {s:s, s:b}]}, s:{s:s, s:o, s:o}}", "added_tokens",
                             added, "pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Digits",
                             "individual_digits", 1, "type", "ByteLevel", "add_prefix_space", 0, "model",
                             "type", "BPE", "vocab", tokens, "merges", merges);
    assert_non_null(root);
    char *text = json_dumps(root, JSON_COMPACT);
    json_decref(root);
    return text;
}

static void test_same_fingerprint(void **state)
{
    (void)state;
    struct model *m = NULL;
    struct vocab *v = NULL;
    struct err err = {0};
    if (access(SMOLLM2, R_OK) < 0) {
        print_message("skipped: %s is absent\n", SMOLLM2);
        skip();
    }
    assert_int_equal(model_open(SMOLLM2, &m, NULL), 0);
    char *json = write_json(model_vocab(m));
    if (vocab_from_json(name_of(json), "made", model_config(m)->vocab, &v, &err) < 0)
        fail_msg("%s", err.text);
    struct hash128 a = model_tokenizer_fingerprint(m);
    assert_true(hash_equal(vocab_fingerprint(v), a));
    v->whole_pieces = VOCAB_FLAG_YES;
    assert_false(hash_equal(vocab_fingerprint(v), a));
    v->whole_pieces = VOCAB_FLAG_NO;
    v->types[v->count - 1] = VOCAB_TYPE_USER_DEFINED;
    assert_false(hash_equal(vocab_fingerprint(v), a));
    free(json);
    vocab_free(&v);
    model_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shared_qwen), cmocka_unit_test(test_shared_llama),
        cmocka_unit_test(test_forms),       cmocka_unit_test(test_sentencepiece),
        cmocka_unit_test(test_cuts),        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_nesting),     cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_passes),      cmocka_unit_test(test_same_fingerprint),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
