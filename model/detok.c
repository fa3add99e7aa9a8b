/* Streaming detokenizer. All state is in struct detokenizer, which belongs to one stream. */
#include "model/detok.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "model/utf8.h"

static const char replacement[] = "\xef\xbf\xbd";

void text_buf_append(struct text_buf *buf, const char *text, size_t bytes)
{
    if (bytes == 0)
        return;
    if (buf->capacity - buf->bytes < bytes) {
        size_t need, capacity;
        CHECK(!__builtin_add_overflow(buf->bytes, bytes, &need));
        CHECK(!__builtin_add_overflow(need, need / 2 + 64, &capacity));
        buf->text = mem_resize(buf->text, capacity, 1);
        buf->capacity = capacity;
    }
    memcpy(buf->text + buf->bytes, text, bytes);
    buf->bytes += bytes;
}

void text_buf_free(struct text_buf *buf)
{
    mem_free(&buf->text);
    buf->bytes = buf->capacity = 0;
}

void detok_init(struct detokenizer *detok)
{
    memset(detok, 0, sizeof *detok);
}

/* Emits the valid characters of `text`, a replacement for each invalid byte; returns how many bytes at the
 * end are the begin of a character. */
static size_t emit(const char *text, size_t bytes, struct text_buf *out)
{
    size_t at = 0;
    while (at < bytes) {
        size_t valid = utf8_valid(text + at, bytes - at);
        text_buf_append(out, text + at, valid);
        at += valid;
        if (at == bytes)
            break;
        if (utf8_char(text + at, bytes - at) < 0)
            return bytes - at;
        text_buf_append(out, replacement, 3);
        at++;
    }
    return 0;
}

void detok_push(struct detokenizer *detok, const struct tokenizer *tokenizer, uint32_t id,
                struct text_buf *out)
{
    size_t bytes;
    const char *text = tokenizer_bytes(tokenizer, id, &bytes);
    if (!text || bytes == 0 || tokenizer_is_control(tokenizer, id))
        return;
    /* A few bytes more settle the character that was held; the rest needs no copy. */
    char joined[4];
    size_t more = 0;
    while (detok->held_bytes && more < bytes) {
        size_t held = detok->held_bytes;
        memcpy(joined, detok->held, held);
        joined[held] = text[more++];
        size_t left = emit(joined, held + 1, out);
        memcpy(detok->held, joined + held + 1 - left, left);
        detok->held_bytes = (uint8_t)left;
    }
    if (more == bytes)
        return;
    size_t left = emit(text + more, bytes - more, out);
    memcpy(detok->held, text + bytes - left, left);
    detok->held_bytes = (uint8_t)left;
}

void detok_finish(struct detokenizer *detok, struct text_buf *out)
{
    if (detok->held_bytes)
        text_buf_append(out, replacement, 3);
    detok_init(detok);
}
