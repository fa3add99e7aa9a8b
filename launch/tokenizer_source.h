/* Where commands that need no weights get a tokenizer from: a model, or a tokenizer.json alone. */
#ifndef LAUNCH_TOKENIZER_SOURCE_H
#define LAUNCH_TOKENIZER_SOURCE_H

#include "base/err.h"
#include "model/model.h"
#include "model/tokenizer.h"

struct tokenizer_source {
    struct model *model; /* NULL when it came from a tokenizer.json */
    struct vocab *vocab; /* of that */
    struct tokenizer *tokenizer;
};

/* `path`: what model_open takes, or a file named *.json. */
int tokenizer_source_open(struct tokenizer_source *source, const char *path, struct err *err);
void tokenizer_source_close(struct tokenizer_source *source); /* accepts a zeroed one */

/* A whole file, or standard input for "-"; at most `most` bytes (-E2BIG). Free with mem_free. */
int tokenizer_source_text(const char *path, size_t most, char **ret, size_t *ret_bytes, struct err *err);

#endif
