/* From what the person gave (text, file, list of prompts) to token ids. */
#ifndef LAUNCH_PROMPT_H
#define LAUNCH_PROMPT_H

#include <stdint.h>

#include "base/err.h"
#include "launch/run_options.h"
#include "model/tokenizer.h"

#define PROMPT_COUNT_MAX 4096u

struct prompts {
    struct token_buf *list; /* [count] */
    uint32_t count;
};

/* Reads and encodes every prompt that the options name; each must leave room for one token in `context`
 * positions. 0 or negative with one line: -EILSEQ for text that is not UTF-8, -E2BIG for a prompt that is too
 * long, with both numbers. */
int prompts_load(const struct run_options *options, const struct tokenizer *tokenizer, uint32_t context,
                 struct prompts *ret_prompts, struct err *err);
void prompts_free(struct prompts *prompts); /* accepts a zeroed one, leaves it zeroed */

#endif
