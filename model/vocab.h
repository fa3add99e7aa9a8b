/* What a model file says of its tokenizer, in one neutral form: tokenizers are built from it, whatever file
 * it came from. Texts are borrowed from the file. Read only once filled. */
#ifndef MODEL_VOCAB_H
#define MODEL_VOCAB_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/hash.h"
#include "model/names.h"

#define VOCAB_NO_TOKEN UINT32_MAX

enum vocab_kind {
    VOCAB_KIND_BPE, /* byte-level BPE: token texts are in GPT-2's alphabet of one character a byte */
    VOCAB_KIND_SPM  /* SentencePiece BPE: U+2581 for a space, <0xNN> for lone bytes, merges by score */
};

/* GGUF's numbers. */
enum vocab_type {
    VOCAB_TYPE_NORMAL = 1,
    VOCAB_TYPE_UNKNOWN = 2,
    VOCAB_TYPE_CONTROL = 3,
    VOCAB_TYPE_USER_DEFINED = 4,
    VOCAB_TYPE_UNUSED = 5,
    VOCAB_TYPE_BYTE = 6
};

enum vocab_flag { VOCAB_FLAG_UNSAID = -1, VOCAB_FLAG_NO = 0, VOCAB_FLAG_YES = 1 };

struct vocab {
    enum vocab_kind kind;
    struct name pre; /* name of the pre-tokenizer; empty for SPM */
    uint32_t count;
    struct name *tokens; /* [count], as in the file */
    uint8_t *types;      /* [count], enum vocab_type */
    float *scores;       /* [count]; NULL for BPE */
    uint32_t merge_count;
    struct name *merges; /* [merge_count], "left right", the first is merged first; NULL for SPM */
    uint32_t bos, eos, eot, eom, unknown; /* VOCAB_NO_TOKEN where the file names none */
    enum vocab_flag add_bos, add_space_prefix;
    struct name chat_template; /* empty when there is none */
};

struct gguf;

/* From tokenizer.ggml.* of a GGUF file. *ret is NULL with 0 when the file has no tokenizer at all. -EBADMSG
 * for damaged fields, -ENOTSUP for a kind that is not read. */
int vocab_from_gguf(const struct gguf *gguf, struct vocab **ret, struct err *err);

/* Frees the arrays, not the texts. Accepts NULL and half-built objects. */
void vocab_free(struct vocab **vocab);

/* A hash of everything that decides how text becomes ids and back; equal for the same tokenizer in another
 * file. The chat template is not part of it. */
struct hash128 vocab_fingerprint(const struct vocab *vocab);

#endif
