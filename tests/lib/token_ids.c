/* See token_ids.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/lib/token_ids.h"

void token_ids_check(const struct tokenizer *t, const char *text, size_t bytes, bool special,
                     const char *expected)
{
    struct token_buf ids = {0};
    struct err err = {0};
    if (tokenizer_encode(t, text, bytes, special, &ids, &err) < 0)
        fail_msg("%s", err.text);
    size_t i = 0;
    char *end;
    for (const char *p = expected; *p && *p != '\n'; p = end, i++) {
        unsigned long id = strtoul(p, &end, 10);
        if (end == p)
            break;
        if (i >= ids.count || ids.ids[i] != id)
            fail_msg("\"%.*s\": id %zu: found %d, expected %lu", (int)bytes, text, i,
                     i < ids.count ? (int)ids.ids[i] : -1, id);
    }
    if (ids.count != i)
        fail_msg("\"%.*s\": found %zu ids, expected %zu", (int)bytes, text, ids.count, i);
    token_buf_free(&ids);
}

static void check_bytes(const struct tokenizer *t, const char *data, size_t bytes)
{
    struct token_buf ids = {0};
    struct err err = {0};
    size_t at = 0;
    if (tokenizer_encode_bytes(t, data, bytes, &ids, &err) < 0)
        fail_msg("%s", err.text);
    for (size_t i = 0; i < ids.count; i++) {
        size_t n;
        const char *raw = tokenizer_bytes(t, ids.ids[i], &n);
        assert_false(tokenizer_is_control(t, ids.ids[i]));
        assert_true(n <= bytes - at);
        assert_memory_equal(raw, data + at, n);
        at += n;
    }
    assert_int_equal(at, bytes);
    token_buf_free(&ids);
}

void token_ids_check_any_bytes(const struct tokenizer *tokenizer)
{
    /* Decomposed, SentencePiece's mark of a space, cut characters, a control token's text. */
    static const char *const texts[] = {"e\xcc\x81", "\xe2\x96\x81 a", "\xe6\xbc",
                                        "\xff\xfe",  "<s></s>",        " a"};
    for (unsigned i = 0; i < sizeof texts / sizeof *texts; i++)
        check_bytes(tokenizer, texts[i], strlen(texts[i]));
    uint64_t seed = 88172645463325252u;
    for (int round = 0; round < 500; round++) {
        char data[256];
        for (size_t i = 0; i < sizeof data; i++) {
            seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
            data[i] = (char)(round % 2 ? seed >> 56 : seed >> 57); /* every second: ASCII only */
        }
        check_bytes(tokenizer, data, 1 + (size_t)(seed >> 32) % sizeof data);
    }
}
