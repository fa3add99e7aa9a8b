/* What a model file says of its tokenizer, in one neutral form: tokenizers are built from it, whatever file
 * it came from. Texts are borrowed from a mapped file, or kept here. Read only once filled. */
#ifndef MODEL_VOCAB_H
#define MODEL_VOCAB_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "base/hash.h"
#include "model/names.h"

#define VOCAB_NO_TOKEN   UINT32_MAX
#define VOCAB_TOKENS_MAX (UINT32_C(1) << 24) /* more than any real vocabulary has */
#define VOCAB_ENDS_MAX   16
#define VOCAB_TEXT_MAX   8193 /* bytes of a token or a merge; bounds what building a tokenizer costs */

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

/* How a token is cut out of text, as `tokenizers` has it: what it takes along, and where it is none. */
enum vocab_cut {
    VOCAB_CUT_LSTRIP = 1,     /* white space before it goes with it */
    VOCAB_CUT_RSTRIP = 2,     /* ... behind it */
    VOCAB_CUT_SINGLE_WORD = 4 /* it is one only where no word character touches it */
};

enum vocab_flag { VOCAB_FLAG_UNSAID = -1, VOCAB_FLAG_NO = 0, VOCAB_FLAG_YES = 1 };

struct vocab {
    enum vocab_kind kind;
    struct name pre; /* name of the pre-tokenizer; empty for SPM */
    uint32_t count;
    struct name *tokens; /* [count], as in the file */
    uint8_t *types;      /* [count], enum vocab_type */
    uint8_t *cuts;       /* [count], enum vocab_cut's bits; NULL: none anywhere */
    float *scores;       /* [count]; NULL: `merges` says what is merged */
    uint32_t merge_count;
    struct name *merges; /* [merge_count], "left right", the first is merged first; unused with scores */
    uint32_t bos, eos, eot, eom, unknown; /* VOCAB_NO_TOKEN where the file names none */
    uint32_t ends[VOCAB_ENDS_MAX];        /* more ids that end a generation */
    uint32_t end_count;
    enum vocab_flag add_bos, add_space_prefix;
    enum vocab_flag nfc, whole_pieces; /* UNSAID: as goes with `pre` */
    bool space_first;                  /* SPM: the space is added to the text's begin only, not after marks */
    struct name chat_template;         /* empty when there is none */
    struct vocab_block *blocks;        /* what vocab_keep keeps */
};

struct gguf;

/* From tokenizer.ggml.* of a GGUF file. *ret is NULL with 0 when the file has no tokenizer at all. -EBADMSG
 * for damaged fields, -ENOTSUP for a kind that is not read. */
int vocab_from_gguf(const struct gguf *gguf, struct vocab **ret, struct err *err);

/* A copy of the text that lives as long as the vocabulary. */
struct name vocab_keep(struct vocab *vocab, const char *text, size_t bytes);

/* Marks of turns that some files call ordinary added tokens become control tokens, so that no client's text
 * can spell them. To be called once tokens and types are filled. */
void vocab_settle_marks(struct vocab *vocab);

/* Frees the arrays and kept texts, not borrowed ones. Accepts NULL and half-built objects. */
void vocab_free(struct vocab **vocab);

/* A hash of everything that decides how plain text becomes ids and back; equal for the same tokenizer in GGUF
 * and as tokenizer.json (byte-level BPE). Which ids begin or end a text and the chat template are not part of
 * it, nor are tokens of type unused, by which vocabularies are padded. */
struct hash128 vocab_fingerprint(const struct vocab *vocab);

#endif
