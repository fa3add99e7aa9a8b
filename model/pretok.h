/* Pre-tokenizers of byte-level BPE: cutting text into the pieces within which tokens may be merged. */
#ifndef MODEL_PRETOK_H
#define MODEL_PRETOK_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "model/names.h"

struct pretok;

#define PRETOK_PASSES_MAX 6

/* What else goes with a pre-tokenizer's name. */
struct pretok_traits {
    const char *name;  /* one for all aliases */
    bool nfc;          /* text is brought to NFC first */
    bool whole_pieces; /* a piece that is a token itself is taken as it is, without merging */
    bool add_bos;      /* unless the file says otherwise */
};

/* By GGUF's name: "gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-llm", "deepseek-v3" and their aliases.
 * -ENOTSUP names any other. */
int pretok_create(struct name pre, struct pretok **ret, struct err *err);
void pretok_free(struct pretok **pretok);
const struct pretok_traits *pretok_traits(const struct pretok *pretok);

/* By GGUF's name; NULL when it is not known. */
const struct pretok_traits *pretok_traits_of(struct name pre);

/* A walk over one text; the text must be valid UTF-8 and outlive it. One thread a walk. */
struct pretok_walk {
    const struct pretok *pretok;
    const char *text;
    size_t bytes, at;
    void *match; /* scratch of the regular expression engine */
    /* Each pass cuts the pieces of the one before: where it is in its piece, and the match ahead. */
    struct {
        size_t begin, at, end, match_begin, match_end;
    } passes[PRETOK_PASSES_MAX];
};

void pretok_begin(struct pretok_walk *walk, const struct pretok *pretok, const char *text, size_t bytes);

/* The next piece in *ret; the pieces joined are the text. 1, 0 at the end, or -ELOOP when the expression ran
 * into a limit of its engine. */
int pretok_next(struct pretok_walk *walk, struct name *ret);
void pretok_end(struct pretok_walk *walk);

#endif
