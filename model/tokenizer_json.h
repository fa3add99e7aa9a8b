/* tokenizer.json of a Hugging Face folder, read in one pass: the large tables go straight into arrays, all
 * else becomes a small JSON tree. Not for other folders. */
#ifndef MODEL_TOKENIZER_JSON_H
#define MODEL_TOKENIZER_JSON_H

#include <jansson.h>
#include <stdint.h>

#include "base/err.h"
#include "model/vocab.h"

struct tokenizer_json_token {
    struct name text;
    uint32_t id;
};

struct tokenizer_json {
    struct tokenizer_json_token *tokens; /* model.vocab; texts kept by the vocabulary */
    uint32_t token_count, token_room;
    struct name *merges; /* model.merges as "left right" */
    uint32_t merge_count, merge_room;
    json_t *rest; /* everything else; model.vocab and model.merges are null in it */
};

/* Reads the text; names are kept in `keep`. Ids must be below `vocab_size`. 0; -EBADMSG with field, found and
 * expected; -ENOTSUP for a model.type other than BPE. Release with tokenizer_json_free, also on failure. */
int tokenizer_json_read(struct tokenizer_json *json, struct name text, uint32_t vocab_size,
                        struct vocab *keep, struct err *err);
void tokenizer_json_free(struct tokenizer_json *json);

#endif
