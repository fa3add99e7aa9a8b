/* Tokenizers against golden ids of other implementations, and properties: round trips, no control tokens
 * out of plain text, streaming. Real vocabularies are looked for in models/ and ../shared; what is absent
 * is skipped. */
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
#include "model/detok.h"
#include "model/merges.h"
#include "model/model.h"
#include "model/pretok.h"
#include "model/tokenizer.h"
#include "model/utf8.h"
#include "model/vocab.h"
#include "tests/lib/token_ids.h"

#define SMOLLM2 "models/SmolLM2-135M-Instruct.Q4_1.gguf"
#define STORIES "../shared/tiny-model/stories260K.gguf"
#define VECTORS "tests/vectors/tokenizer_smollm2.txt"

/* Ids that llama.cpp gives for the texts of test_spm. */
#define SPM_ONCE    "403 407 261 378"
#define SPM_LILY    "317 439 419 280 294 432 410 485 410 243 162 155 131 443"
#define SPM_TWO     "410 410 259 424 414 410 262 427 412 331 419"
#define SPM_MARKS   "410 504 419 505 410 504 492 419 505 410 504 477 444 484 475 505"
#define SPM_SPECIAL "1 261 2 410 268"

static struct model *smollm2_model;
static struct tokenizer *smollm2;

static int open_all(void **state)
{
    (void)state;
    struct err err = {0};
    if (access(SMOLLM2, R_OK) < 0)
        return 0;
    if (model_open(SMOLLM2, &smollm2_model, &err) < 0 ||
        tokenizer_create(smollm2_model, &smollm2, &err) < 0) {
        print_error("%s\n", err.text);
        return -1;
    }
    return 0;
}

static int close_all(void **state)
{
    (void)state;
    tokenizer_free(&smollm2);
    model_free(&smollm2_model);
    return 0;
}

static void need_smollm2(void)
{
    if (!smollm2) {
        print_message("skipped: %s is absent\n", SMOLLM2);
        skip();
    }
}

static void test_smollm2_vectors(void **state)
{
    (void)state;
    need_smollm2();
    FILE *file = fopen(VECTORS, "re");
    assert_non_null(file);
    char *line = NULL;
    size_t room = 0, texts = 0, encodings = 0;
    json_t *text = NULL;
    while (getline(&line, &room, file) > 0) {
        if (line[0] == 'T') {
            json_decref(text);
            text = json_loads(line + 2, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
            assert_non_null(text);
            texts++;
        } else if (line[0] == 'P' || line[0] == 'S') {
            token_ids_check(smollm2, json_string_value(text), json_string_length(text), line[0] == 'S',
                            line + 1);
            encodings++;
        }
    }
    json_decref(text);
    free(line);
    fclose(file);
    assert_true(texts >= 60 && encodings == 2 * texts);
}

/* The text that ids give, through the streaming detokenizer; must be valid after every step. */
static void decode(const struct tokenizer *t, const struct token_buf *ids, struct text_buf *out)
{
    struct detokenizer detok;
    detok_init(&detok);
    for (size_t i = 0; i < ids->count; i++) {
        size_t before = out->bytes;
        detok_push(&detok, t, ids->ids[i], out);
        assert_int_equal(utf8_valid(out->text + before, out->bytes - before), out->bytes - before);
    }
    detok_finish(&detok, out);
}

static void check_round_trip(const struct tokenizer *t, const char *text, size_t bytes)
{
    struct token_buf ids = {0};
    struct text_buf back = {0};
    struct err err = {0};
    if (tokenizer_encode(t, text, bytes, false, &ids, &err) < 0)
        fail_msg("%s", err.text);
    for (size_t i = 0; i < ids.count; i++)
        assert_false(tokenizer_is_control(t, ids.ids[i]));
    decode(t, &ids, &back);
    assert_int_equal(back.bytes, bytes);
    assert_memory_equal(back.text, text, bytes);
    text_buf_free(&back);
    token_buf_free(&ids);
}

static uint64_t next_random(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

static size_t put_code(char *out, uint32_t c)
{
    static const uint8_t heads[] = {0, 0, 0xc0, 0xe0, 0xf0};
    size_t length = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = length; i-- > 1; c >>= 6)
        out[i] = (char)(0x80 | (c & 63));
    out[0] = (char)(heads[length] | c);
    return length;
}

/* Bytes that the vocabulary cannot spell: left out of the random texts. */
static bool spelled(const struct tokenizer *t, const char *bytes, size_t count)
{
    bool all = true;
    for (size_t i = 0; i < count && all; i++) {
        bool found = false;
        for (uint32_t id = 0; id < tokenizer_vocab(t) && !found; id++) {
            size_t n;
            const char *raw = tokenizer_bytes(t, id, &n);
            found = n == 1 && raw[0] == bytes[i];
        }
        all = found;
    }
    return all;
}

static void test_round_trip(void **state)
{
    (void)state;
    need_smollm2();
    bool lead[256];
    for (int b = 0; b < 256; b++)
        lead[b] = spelled(smollm2, &(char){(char)b}, 1);
    static const uint32_t limits[] = {0x80, 0x80, 0x250, 0x3000, 0x10000, 0x110000};
    uint64_t seed = 88172645463325252u;
    for (int round = 0; round < 2000; round++) {
        char text[256 + 4];
        size_t bytes = 0, want = next_random(&seed) % 256;
        while (bytes < want) {
            uint32_t c = (uint32_t)(next_random(&seed) % limits[next_random(&seed) % 6]);
            if (c == 0 || (c >= 0xd800 && c < 0xe000))
                continue;
            size_t n = put_code(text + bytes, c);
            if (lead[(uint8_t)text[bytes]])
                bytes += n;
        }
        check_round_trip(smollm2, text, bytes);
    }
}

static void test_long(void **state)
{
    (void)state;
    need_smollm2();
    const struct {
        const char *unit;
        size_t times;
    } texts[] = {{" ", 300000},  {"a", 300000},  {"=-", 150000}, {"\n \t", 100000}, {"\xe6\xbc\xa2", 100000},
                 {"x ", 100000}, {"  9", 100000}};
    for (unsigned i = 0; i < sizeof texts / sizeof *texts; i++) {
        size_t unit = strlen(texts[i].unit), bytes = unit * texts[i].times;
        char *text = mem_alloc(bytes, 1);
        for (size_t j = 0; j < texts[i].times; j++)
            memcpy(text + j * unit, texts[i].unit, unit);
        check_round_trip(smollm2, text, bytes);
        mem_free(&text);
    }
}

/* Field fault: marks in a user's text are text. */
static void test_no_control(void **state)
{
    (void)state;
    need_smollm2();
    for (uint32_t id = 0; id < tokenizer_vocab(smollm2); id++) {
        size_t bytes;
        const char *text = tokenizer_bytes(smollm2, id, &bytes);
        if (!tokenizer_is_control(smollm2, id))
            continue;
        check_round_trip(smollm2, text, bytes);
        struct token_buf ids = {0};
        assert_int_equal(tokenizer_encode(smollm2, text, bytes, true, &ids, NULL), 0);
        assert_int_equal(ids.count, 1);
        assert_int_equal(ids.ids[0], id);
        token_buf_free(&ids);
    }
    assert_true(tokenizer_is_eos(smollm2, 0));
    assert_true(tokenizer_is_eos(smollm2, 2));
    assert_false(tokenizer_is_eos(smollm2, 1));
    assert_false(tokenizer_is_eos(smollm2, UINT32_MAX));
    assert_int_equal(tokenizer_special(smollm2, "<|im_end|>"), 2);
    assert_int_equal(tokenizer_special(smollm2, "<|im_end"), TOKENIZER_NO_TOKEN);
    assert_int_equal(tokenizer_special(smollm2, "hello"), TOKENIZER_NO_TOKEN);
}

static void test_invalid_utf8(void **state)
{
    (void)state;
    const struct {
        const char *text;
        size_t bytes, at;
    } cases[] = {{"\xed\xa0\x80", 3, 0}, {"\xf0\x80\x80\x41", 4, 0}, {"\xe2\x80\x41", 3, 0},
                 {"\xc0\xaf", 2, 0},     {"\xf4\x90\x80\x80", 4, 0}, {"abcdefgh\x80", 9, 8},
                 {"\xff", 1, 0},         {"ok\xe2\x82", 4, 2},       {"\xf0\x9f\x98", 3, 0},
                 {"a\xc3\xa9\xc3", 4, 3}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(utf8_valid(cases[i].text, cases[i].bytes), cases[i].at);
    assert_int_equal(utf8_valid("\xf4\x8f\xbf\xbf\xed\x9f\xbf\xee\x80\x80", 10), 10);
    need_smollm2();
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct token_buf ids = {0};
        struct err err = {0};
        char where[32];
        snprintf(where, sizeof where, "byte %zu:", cases[i].at);
        token_buf_push(&ids, 5);
        assert_int_equal(tokenizer_encode(smollm2, cases[i].text, cases[i].bytes, false, &ids, &err),
                         -EILSEQ);
        assert_non_null(strstr(err.text, where));
        assert_int_equal(ids.count, 1);
        token_buf_free(&ids);
    }
}

/* A vocabulary of the 256 bytes, a few merges and marks, made here. */
static struct vocab *make_vocab(const char *pre, enum vocab_flag add_bos)
{
    static const char *const extra[] = {"he",  "ll",         "hell",   "hello",
                                        "<s>", "<|im_end|>", "<tool>", "\xc4\xa0h"};
    static const uint8_t extra_types[] = {1, 1, 1, 1, 3, 3, 4, 1};
    static const char *const merges[] = {"h e", "l l", "he ll", "hell o", "\xc4\xa0 h"};
    static char alphabet[256][3];
    struct vocab *v = mem_alloc(1, sizeof *v);
    v->pre = name_of(pre);
    v->count = 264;
    v->tokens = mem_alloc(v->count, sizeof *v->tokens);
    v->types = mem_alloc(v->count, 1);
    uint32_t shifted = 256;
    for (uint32_t b = 0; b < 256; b++) {
        bool prints = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
        size_t n = put_code(alphabet[b], prints ? b : shifted++);
        v->tokens[b] = (struct name){alphabet[b], n};
        v->types[b] = VOCAB_TYPE_NORMAL;
    }
    for (uint32_t i = 0; i < 8; i++) {
        v->tokens[256 + i] = name_of(extra[i]);
        v->types[256 + i] = extra_types[i];
    }
    v->merge_count = 5;
    v->merges = mem_alloc(5, sizeof *v->merges);
    for (int i = 0; i < 5; i++)
        v->merges[i] = name_of(merges[i]);
    v->bos = 260;
    v->eos = 261;
    v->eot = v->eom = v->unknown = VOCAB_NO_TOKEN;
    v->add_bos = add_bos;
    v->add_space_prefix = v->nfc = v->whole_pieces = VOCAB_FLAG_UNSAID;
    return v;
}

static void test_made_vocab(void **state)
{
    (void)state;
    struct vocab *v = make_vocab("gpt-2", VOCAB_FLAG_YES);
    struct tokenizer *t = NULL;
    struct err err = {0};
    assert_int_equal(tokenizer_create_from(v, &t, &err), 0);
    token_ids_check(t, "hello", 5, false, "259");
    token_ids_check(t, "hellhe hx", 9, false, "258 256 263 120");
    token_ids_check(t, "<s>", 3, false, "60 115 62");
    token_ids_check(t, "<s>", 3, true, "260");
    token_ids_check(t, "a<tool><tool>b", 14, false, "97 262 262 98"); /* user-defined ones count either way */
    uint64_t seed = 42;
    for (int round = 0; round < 500; round++) {
        char text[64 + 4];
        size_t bytes = 0;
        while (bytes < 64) {
            uint32_t c = (uint32_t)(next_random(&seed) % 0x110000);
            if (c < 0xd800 || c >= 0xe000)
                bytes += put_code(text + bytes, c ? c : 1);
        }
        check_round_trip(t, text, bytes);
    }
    token_ids_check_any_bytes(t);
    struct hash128 a = tokenizer_fingerprint(t), b;
    tokenizer_free(&t);
    v->tokens[259] = name_of("hellp");
    b = vocab_fingerprint(v);
    assert_false(hash_equal(a, b));
    assert_int_equal(tokenizer_create_from(v, &t, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "entry 3: found \"hell o\""));
    v->tokens[259] = name_of("hello");
    v->tokens[262] = name_of("\xe6\xbc"); /* would cut characters of a text in two */
    assert_int_equal(tokenizer_create_from(v, &t, &err), -EBADMSG);
    assert_non_null(strstr(err.text, "token 262: found invalid UTF-8"));
    v->pre = name_of("chameleon");
    assert_int_equal(tokenizer_create_from(v, &t, &err), -ENOTSUP);
    assert_non_null(strstr(err.text, "chameleon"));
    assert_null(t);
    vocab_free(&v);
}

/* Field fault: one BOS, also when the text spells it. */
static void test_bos(void **state)
{
    (void)state;
    struct vocab *v = make_vocab("llama-bpe", VOCAB_FLAG_UNSAID);
    struct tokenizer *t = NULL;
    struct token_buf ids = {0};
    assert_int_equal(tokenizer_create_from(v, &t, NULL), 0);
    assert_true(tokenizer_add_bos(t));
    assert_int_equal(tokenizer_encode_prompt(t, "a", 1, true, &ids, NULL), 0);
    assert_int_equal(ids.count, 2);
    assert_int_equal(ids.ids[0], 260);
    ids.count = 0;
    assert_int_equal(tokenizer_encode_prompt(t, "<s>a", 4, true, &ids, NULL), 0);
    assert_int_equal(ids.count, 2);
    assert_int_equal(ids.ids[0], 260);
    assert_int_equal(ids.ids[1], 97);
    ids.count = 0;
    assert_int_equal(tokenizer_encode_prompt(t, "<s>", 3, false, &ids, NULL), 0);
    assert_int_equal(ids.count, 4); /* plain text keeps its own */
    ids.count = 0;
    assert_int_equal(tokenizer_encode_prompt(t, "\xff", 1, true, &ids, NULL), -EILSEQ);
    assert_int_equal(ids.count, 0);
    tokenizer_free(&t);
    v->add_bos = VOCAB_FLAG_NO;
    assert_int_equal(tokenizer_create_from(v, &t, NULL), 0);
    assert_int_equal(tokenizer_encode_prompt(t, "a", 1, true, &ids, NULL), 0);
    assert_int_equal(ids.count, 1);
    token_buf_free(&ids);
    tokenizer_free(&t);
    vocab_free(&v);
}

static void push_bytes(const struct tokenizer *t, struct detokenizer *d, const char *bytes, size_t count,
                       struct text_buf *out)
{
    for (size_t i = 0; i < count; i++) /* ids below 256 are the bytes in make_vocab */
        detok_push(d, t, (uint8_t)bytes[i], out);
}

static void test_detok(void **state)
{
    (void)state;
    struct vocab *v = make_vocab("gpt-2", VOCAB_FLAG_NO);
    struct tokenizer *t = NULL;
    assert_int_equal(tokenizer_create_from(v, &t, NULL), 0);
#define R "\xef\xbf\xbd"
    const struct {
        const char *in;
        size_t bytes;
        const char *now, *end; /* after the last push; added by the finish */
    } cases[] = {{"\xf0\x9f\x98\x80", 4, "\xf0\x9f\x98\x80", ""},
                 {"\xf0\x9f\x98", 3, "", R},
                 {"\xf0\x9f", 2, "", R},
                 {"\xf0", 1, "", R},
                 {"\xed\xa0\x80", 3, R R R, ""},
                 {"\xf0\x80\x80\x41", 4, R R R "A", ""},
                 {"\xe2\x80\x41", 3, R R "A", ""},
                 {"\xc0\xaf", 2, R R, ""},
                 {"\xf4\x90\x80\x80", 4, R R R R, ""},
                 {"\x80", 1, R, ""},
                 {"\xe2\xe2\x82\xac", 4, R "\xe2\x82\xac", ""},
                 {"a\xf0\x9f\xe2\x82", 5, "a" R R, R}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct detokenizer d;
        struct text_buf out = {0};
        detok_init(&d);
        push_bytes(t, &d, cases[i].in, cases[i].bytes, &out);
        detok_push(&d, t, 260, &out); /* control: nothing */
        detok_push(&d, t, UINT32_MAX, &out);
        size_t now = strlen(cases[i].now), end = strlen(cases[i].end);
        if (out.bytes != now || (now && memcmp(out.text, cases[i].now, now)))
            fail_msg("case %u: found \"%.*s\", expected \"%s\"", i, (int)out.bytes, out.text, cases[i].now);
        detok_finish(&d, &out);
        assert_int_equal(out.bytes, now + end);
        if (end)
            assert_memory_equal(out.text + now, cases[i].end, end);
        assert_int_equal(d.held_bytes, 0);
        text_buf_free(&out);
    }
    tokenizer_free(&t);
    vocab_free(&v);
}

/* Short and long merging must agree: a naive model of both. */
static uint32_t merge_naive(const struct merges *m, uint32_t *ids, uint32_t count)
{
    for (;;) {
        uint32_t best = UINT32_MAX, at = 0, pair[2];
        for (uint32_t i = 0; i + 1 < count; i++) {
            for (uint32_t s = 0; s <= m->mask; s++) {
                const struct merge *e = &m->slots[s];
                if (e->rank < best && e->left == ids[i] && e->right == ids[i + 1]) {
                    best = e->rank;
                    at = i;
                    pair[0] = e->into;
                }
            }
        }
        if (best == UINT32_MAX)
            return count;
        ids[at] = pair[0];
        memmove(&ids[at + 1], &ids[at + 2], (count - at - 2) * sizeof *ids);
        count--;
    }
}

static void test_merges(void **state)
{
    (void)state;
    uint64_t seed = 7;
    for (int round = 0; round < 60; round++) {
        struct merges m;
        merges_init(&m);
        for (uint32_t rank = 0; rank < 40; rank++)
            merges_add(&m,
                       (struct merge){(uint32_t)(next_random(&seed) % 8), (uint32_t)(next_random(&seed) % 8),
                                      round % 2 ? rank / 4 : rank, (uint32_t)(next_random(&seed) % 12)});
        uint32_t ids[120], again[120], count = round % 3 ? 120 : (uint32_t)(next_random(&seed) % 49);
        for (uint32_t i = 0; i < count; i++)
            ids[i] = again[i] = (uint32_t)(next_random(&seed) % 8);
        uint32_t fast = merges_apply(&m, ids, count), slow = merge_naive(&m, again, count);
        assert_int_equal(fast, slow);
        assert_memory_equal(ids, again, slow * sizeof *ids);
        merges_free(&m);
    }
}

static void test_spm(void **state)
{
    (void)state;
    struct model *m = NULL;
    struct tokenizer *t = NULL;
    struct err err = {0};
    if (access(STORIES, R_OK) < 0) {
        print_message("skipped: %s is absent\n", STORIES);
        skip();
    }
    assert_int_equal(model_open(STORIES, &m, &err), 0);
    assert_int_equal(tokenizer_create(m, &t, &err), 0);
    assert_true(tokenizer_add_bos(t));
    assert_int_equal(tokenizer_bos(t), 1);
    assert_true(tokenizer_is_eos(t, 2));
    token_ids_check(t, "Once upon a time", 16, false, SPM_ONCE);
    token_ids_check(t, "Lily's cat, \xc3\xa9 \xf0\x9f\x98\x80!", 20, false, SPM_LILY);
    token_ids_check(t, "  two  spaces", 13, false, SPM_TWO);
    token_ids_check(t, "<s> </s> <0x41>", 15, false, SPM_MARKS);
    token_ids_check(t, "<s>a</s> b", 10, true, SPM_SPECIAL);
    struct token_buf ids = {0};
    struct text_buf text = {0};
    const char *story = "One day, a \xe6\xbc\xa2 went to \xf0\x9f\x9a\x80.\n\tEnd";
    assert_int_equal(tokenizer_encode(t, story, strlen(story), false, &ids, &err), 0);
    decode(t, &ids, &text);
    assert_int_equal(text.bytes, strlen(story) + 1);
    assert_int_equal(text.text[0], ' ');
    assert_memory_equal(text.text + 1, story, strlen(story));
    text_buf_free(&text);
    token_buf_free(&ids);
    tokenizer_free(&t);
    model_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_smollm2_vectors),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_no_control),
        cmocka_unit_test(test_invalid_utf8),
        cmocka_unit_test(test_made_vocab),
        cmocka_unit_test(test_bos),
        cmocka_unit_test(test_detok),
        cmocka_unit_test(test_merges),
        cmocka_unit_test(test_spm),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
