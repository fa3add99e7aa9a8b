/* Chat messages to a prompt, as the model's chat template has it.
 *
 * Templates are programs in Jinja; this program runs none of them. It knows families of them by their text
 * (spacing and quotes aside) and builds the same prompt itself; any other template is refused, since a wrong
 * prompt gives answers that are quietly bad. A person can name a family instead. Stateless: any thread. */
#ifndef MODEL_CHAT_H
#define MODEL_CHAT_H

#include <stdbool.h>
#include <stddef.h>

#include "base/err.h"
#include "model/tokenizer.h"

#define CHAT_SYSTEM_MAX   1024
#define CHAT_TEMPLATE_MAX 65536

struct chat_message {
    const char *role;    /* "system", "user", "assistant" or "tool" */
    const char *content; /* UTF-8 */
    size_t content_bytes;
};

enum chat_family {
    CHAT_FAMILY_CHATML,     /* <|im_start|> role, content <|im_end|> */
    CHAT_FAMILY_QWEN3,      /* the same; thoughts of earlier answers are left out */
    CHAT_FAMILY_LLAMA3,     /* <|start_header_id|> role <|end_header_id|> content, trimmed <|eot_id|> */
    CHAT_FAMILY_DEEPSEEK_R1 /* system text, then marks of user and assistant */
};

/* A family and what its templates differ in. A plain value. */
struct chat_format {
    enum chat_family family;
    const char *name;             /* "chatml", "smollm2", "llama3.1": static, for logs and options */
    char system[CHAT_SYSTEM_MAX]; /* the system message when none is given; "": none */
    char date[32];                /* Llama 3.1's "Today Date" line; "": the system header has none */
    bool tools_as_user;           /* a tool's answer is quoted in a user's turn */
    bool drops_thoughts;          /* DeepSeek: earlier answers without what stands before </think> */
    bool opens_thought;           /* the answer begins with <think> */
};

/* By name: "chatml", "smollm2", "qwen2.5", "qwen3", "llama3", "llama3.1", "deepseek-r1". -ENOENT. */
int chat_format_by_name(const char *name, struct chat_format *ret, struct err *err);

/* By a template's text. -ENOTSUP for one that is not known; the error quotes its begin. */
int chat_format_by_template(const char *text, size_t bytes, struct chat_format *ret, struct err *err);

/* What --chat-template says: NULL for the model's own template, a name, or the path of a file with a
 * template. Checks that the vocabulary has the family's marks. As the two above; -ENOENT too when the model
 * has no template, -ENOTSUP when the marks are missing. */
int chat_format_choose(const struct tokenizer *tokenizer, const char *choice, struct chat_format *ret,
                       struct err *err);

/* Whether prompts can be built for this model by its own template; for a daemon to ask when it starts. 0 with
 * the format's name for logs; errors as chat_format_choose. */
int chat_check(const struct tokenizer *tokenizer, const char **ret_name, struct err *err);

struct chat {
    const struct chat_format *format;
    const struct chat_message *messages;
    size_t count;
    bool generate;
};

/* Appends the chat's prompt to `out`, with `generate` also the begin of the assistant's answer.
 * Marks come from the template alone: contents are plain text and give no control tokens, whatever they
 * spell. BOS comes first, once, when the model or the template wants it and `out` is empty. -EINVAL for no
 * messages, a role that is not known or one that the family has no place for; else as tokenizer_encode, with
 * the message's number in the error. `out` is as before then. */
int chat_encode_as(const struct tokenizer *tokenizer, const struct chat *chat, struct token_buf *out,
                   struct err *err);

#endif
