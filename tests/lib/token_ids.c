/* See token_ids.h. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

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
