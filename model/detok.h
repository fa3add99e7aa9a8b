/* Token ids back to text, one id at a time: only whole, valid UTF-8 characters come out, so that what a
 * client sees is valid at every moment. */
#ifndef MODEL_DETOK_H
#define MODEL_DETOK_H

#include <stddef.h>
#include <stdint.h>

#include "model/tokenizer.h"

/* Text that grows at the end. Starts zeroed; released by text_buf_free, which leaves it zeroed. Not
 * NUL-terminated; NULs may be part of it. */
struct text_buf {
    char *text;
    size_t bytes, capacity;
};

void text_buf_append(struct text_buf *buf, const char *text, size_t bytes);
void text_buf_free(struct text_buf *buf);

/* The bytes held back: the begin of a character whose rest is in tokens to come. A plain value; one a
 * stream. */
struct detokenizer {
    uint8_t held_bytes;
    char held[3];
};

void detok_init(struct detokenizer *detok);

/* Appends what the id adds to the text. Control tokens, and ids out of range, add nothing. Each byte that
 * can be part of no valid character becomes U+FFFD; the begin of a character waits. A SentencePiece
 * model's first word keeps the space that its encoding put there. */
void detok_push(struct detokenizer *detok, const struct tokenizer *tokenizer, uint32_t id,
                struct text_buf *out);

/* At the end of the text: a character that never became whole becomes one U+FFFD. Leaves detok as
 * initialised. */
void detok_finish(struct detokenizer *detok, struct text_buf *out);

#endif
