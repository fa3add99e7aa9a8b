/* Text to token ids and back, as the model's file defines it: byte-level BPE and SentencePiece BPE.
 * A tokenizer borrows from the vocabulary it was made from; once created it is read only: any thread. */
#ifndef MODEL_TOKENIZER_H
#define MODEL_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/hash.h"

#define TOKENIZER_TEXT_MAX (64u << 20) /* bytes of one text */
#define TOKENIZER_NO_TOKEN UINT32_MAX

struct model;
struct vocab;
struct tokenizer;

/* Ids that grow at the end. Starts zeroed; released by token_buf_free, which leaves it zeroed. */
struct token_buf {
    uint32_t *ids;
    size_t count, capacity;
};

void token_buf_push(struct token_buf *buf, uint32_t id);
void token_buf_free(struct token_buf *buf);

/* 0; -ENOENT when the model has no tokenizer; -ENOTSUP for a pre-tokenizer that is not known; -EBADMSG for
 * merges that name pieces which are no tokens, and for control tokens that are not UTF-8. The model (the
 * vocabulary) must outlive the tokenizer. */
int tokenizer_create(const struct model *model, struct tokenizer **ret, struct err *err);
int tokenizer_create_from(const struct vocab *vocab, struct tokenizer **ret, struct err *err);
void tokenizer_free(struct tokenizer **tokenizer);

/* Appends the ids of text [bytes]. With `special`, text that spells a control token becomes that token;
 * without, it is plain text and no control token can come out (tokens that the file calls user-defined are
 * matched either way, as the models' own tokenizers do). Never adds BOS or EOS. Where a byte-level
 * vocabulary lacks the token of a byte (some lack rare control characters), that byte is left out, as in
 * the models' own tokenizers. -EILSEQ with the byte offset for text that is not UTF-8, -E2BIG above
 * TOKENIZER_TEXT_MAX, -ELOOP when the expression hit a limit; `out` is as before then. */
int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool special,
                     struct token_buf *out, struct err *err);

/* Appends ids that stand for exactly these bytes, whatever they are: nothing is normalized, no space is
 * added, no control token comes out, and a byte that is no UTF-8 becomes the token of that byte. -ENOTSUP
 * with the offset of a byte that the vocabulary has no token for; else errors as tokenizer_encode. */
int tokenizer_encode_bytes(const struct tokenizer *tokenizer, const char *data, size_t bytes,
                           struct token_buf *out, struct err *err);

/* As tokenizer_encode for the whole of a prompt: puts BOS first if the model wants it, once even when the
 * text spells it itself. `out` must be empty. */
int tokenizer_encode_prompt(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool special,
                            struct token_buf *out, struct err *err);

uint32_t tokenizer_vocab(const struct tokenizer *tokenizer); /* number of ids */
bool tokenizer_add_bos(const struct tokenizer *tokenizer);
uint32_t tokenizer_bos(const struct tokenizer *tokenizer); /* or TOKENIZER_NO_TOKEN */

/* Ends a generation: EOS, end of turn, end of message, and control tokens known by name to mean that. Ids out
 * of range: false, here and below. */
bool tokenizer_is_eos(const struct tokenizer *tokenizer, uint32_t id);
bool tokenizer_is_control(const struct tokenizer *tokenizer, uint32_t id);

/* The id of a control or user-defined token by its text, or TOKENIZER_NO_TOKEN. */
uint32_t tokenizer_special(const struct tokenizer *tokenizer, const char *text);

/* The raw bytes that a token stands for (any bytes, perhaps part of a character); of a control token its
 * text. Not NUL-terminated; lives as long as the tokenizer. NULL and 0 for an id out of range. */
const char *tokenizer_bytes(const struct tokenizer *tokenizer, uint32_t id, size_t *ret_bytes);

/* The model's Jinja chat template (not NUL-terminated), or NULL and 0. */
const char *tokenizer_chat_template(const struct tokenizer *tokenizer, size_t *ret_bytes);

/* Equal for tokenizers that treat all text alike; the same as model_tokenizer_fingerprint. */
struct hash128 tokenizer_fingerprint(const struct tokenizer *tokenizer);

#endif
