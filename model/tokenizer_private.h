/* Inside of tokenizers, shared by the file that builds them and the one that uses them. */
#ifndef MODEL_TOKENIZER_PRIVATE_H
#define MODEL_TOKENIZER_PRIVATE_H

#include "model/merges.h"
#include "model/names.h"
#include "model/pretok.h"
#include "model/tokenizer.h"
#include "model/vocab.h"

/* Tokens that are cut out of text before anything else, by first byte, longest first. */
struct tokenizer_marks {
    uint32_t *ids;
    uint32_t starts[257]; /* marks with first byte b: ids[starts[b]] .. ids[starts[b + 1]] */
};

struct tokenizer {
    const struct vocab *vocab; /* borrowed */
    struct name *raw;          /* [vocab->count] the bytes each token stands for */
    char *arena;               /* behind `raw` where they differ from the file's text */
    struct names index;        /* raw bytes -> id, of tokens that plain text may become */
    uint32_t byte_ids[256];    /* TOKENIZER_NO_TOKEN where the vocabulary lacks it */
    struct merges merges;
    struct pretok *pretok;           /* byte-level BPE only */
    struct tokenizer_marks marks[2]; /* [0]: user-defined only; [1]: control tokens too */
    uint8_t *is_eos;                 /* [vocab->count] */
    bool add_bos, add_space, nfc, whole_pieces;
};

bool tokenizer_type_is_control(uint8_t type);

#endif
