/* Chat messages to a prompt, as the model's chat template has it.
 *
 * Templates are programs in Jinja; this program runs none of them. It knows the ChatML family by its text
 * (spacing and quotes aside) and builds the same prompt itself; any other template is refused, since a wrong
 * prompt gives answers that are quietly bad. Stateless: any thread. */
#ifndef MODEL_CHAT_H
#define MODEL_CHAT_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "model/tokenizer.h"

struct chat_message {
    const char *role;    /* "system", "user", "assistant" or "tool" */
    const char *content; /* UTF-8 */
    size_t content_bytes;
};

/* Whether prompts can be built for this model; for a daemon to ask when it starts. 0 with a name for logs
 * ("chatml", "chatml with a default system message"); -ENOENT when the model has no template; -ENOTSUP for
 * one that is not known (the error quotes its begin) or whose marks the vocabulary lacks. */
int chat_check(const struct tokenizer *tokenizer, const char **ret_name, struct err *err);

/* Appends the prompt for the messages to `out`, with `generate` also the begin of the assistant's answer.
 * Marks come from the template alone: contents are plain text and give no control tokens, whatever they
 * spell. BOS comes first, once, when the model wants it and `out` is empty. -EINVAL for no messages or a
 * role that is not known; else as chat_check, or tokenizer_encode with the message's number in the error.
 * `out` is as before then. */
int chat_encode(const struct tokenizer *tokenizer, const struct chat_message *messages, size_t count,
                bool generate, struct token_buf *out, struct err *err);

#endif
