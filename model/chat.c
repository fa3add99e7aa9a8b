/* Builds chat prompts. Holds nothing between calls. Roles and contents come from clients: they must never
 * reach the part of the tokenizer that knows control tokens. */
#include "model/chat.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/names.h"

#define TEMPLATE_MAX 65536

/* A ChatML template with spacing outside of strings taken away, in the parts that may differ. */
#define UNSET        "{%ifnotadd_generation_promptisdefined%}{%setadd_generation_prompt=false%}{%endif%}"
#define LOOP         "{%formessageinmessages%}"
#define SYSTEM_BEGIN "{%ifloop.firstandmessages[0]['role']!='system'%}{{'<|im_start|>system\\n"
#define SYSTEM_END   "<|im_end|>\\n'}}{%endif%}"
#define CONTENT      "+message['content']+'<|im_end|>'+'\\n'}}"
#define MESSAGE      "{{'<|im_start|>'+message['role']+'\\n'" CONTENT "{%endfor%}"
#define GENERATE     "{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}"

struct format {
    char *text;                 /* the template in normal form */
    struct name default_system; /* part of it; NULL text: there is none */
    uint32_t im_start, im_end;
};

static void put(char *out, size_t *at, const char *text)
{
    size_t bytes = strlen(text);
    memcpy(out + *at, text, bytes);
    *at += bytes;
}

/* One spelling for templates that differ in layout only: outside of strings no white space and no trimming
 * dashes at tags; strings in single quotes, a line break in them as \n. Needs 2 * bytes + 1 at `out`. */
static void normalise(const char *text, size_t bytes, char *out)
{
    size_t n = 0;
    char quote = 0;
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i], after = i + 1 < bytes ? text[i + 1] : 0;
        if (quote && c == '\n') {
            put(out, &n, "\\n");
        } else if (quote && c == '\\' && after) {
            out[n++] = c;
            out[n++] = after;
            i++;
        } else if (quote ? c == quote : c == '\'' || c == '"') {
            quote = quote ? 0 : c;
            out[n++] = '\'';
        } else if (quote) {
            out[n++] = c;
        } else if (c == '-' &&
                   ((n && (out[n - 1] == '%' || out[n - 1] == '{')) || after == '%' || after == '}')) {
            continue;
        } else if (!strchr(" \t\r\n", c)) {
            out[n++] = c;
        }
    }
    out[n] = '\0';
}

static bool skip(const char **at, const char *text)
{
    size_t bytes = strlen(text);
    if (strncmp(*at, text, bytes))
        return false;
    *at += bytes;
    return true;
}

/* Takes the normal form apart; false when it is not of the family. */
static bool parse(struct format *f)
{
    const char *at = f->text;
    skip(&at, UNSET);
    if (!skip(&at, LOOP))
        return false;
    if (skip(&at, SYSTEM_BEGIN)) {
        const char *end = strstr(at, SYSTEM_END);
        if (!end || memchr(at, '\\', (size_t)(end - at)) || memchr(at, '\'', (size_t)(end - at)))
            return false;
        f->default_system = (struct name){at, (size_t)(end - at)};
        at = end;
        skip(&at, SYSTEM_END);
    }
    return skip(&at, MESSAGE) && skip(&at, GENERATE) && *at == '\0';
}

static int find_format(const struct tokenizer *t, struct format *f, struct err *err)
{
    size_t bytes;
    const char *text = tokenizer_chat_template(t, &bytes);
    memset(f, 0, sizeof *f);
    if (!text)
        return err_set(err, -ENOENT, "tokenizer.chat_template: found none, expected one in the model's file");
    bool known = false;
    if (bytes <= TEMPLATE_MAX && !memchr(text, '\0', bytes)) {
        f->text = mem_alloc(2 * bytes + 1, 1);
        normalise(text, bytes, f->text);
        known = parse(f);
    }
    if (!known) {
        mem_free(&f->text);
        return err_set(err, -ENOTSUP,
                       "tokenizer.chat_template: found \"%.*s...\" (%zu bytes), expected a template "
                       "of the ChatML family",
                       (int)(bytes < 100 ? bytes : 100), text, bytes);
    }
    f->im_start = tokenizer_special(t, "<|im_start|>");
    f->im_end = tokenizer_special(t, "<|im_end|>");
    if (f->im_start == TOKENIZER_NO_TOKEN || f->im_end == TOKENIZER_NO_TOKEN) {
        mem_free(&f->text);
        return err_set(err, -ENOTSUP,
                       "tokenizer.chat_template: found ChatML, expected <|im_start|> and <|im_end|> "
                       "among the tokens");
    }
    return 0;
}

int chat_check(const struct tokenizer *tokenizer, const char **ret_name, struct err *err)
{
    struct format f;
    int rc = find_format(tokenizer, &f, err);
    if (rc < 0)
        return rc;
    *ret_name = f.default_system.text ? "chatml with a default system message" : "chatml";
    mem_free(&f.text);
    return 0;
}

static bool known_role(const char *role)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    for (unsigned i = 0; i < sizeof roles / sizeof *roles; i++)
        if (!strcmp(role, roles[i]))
            return true;
    return false;
}

/* <|im_start|> role \n content <|im_end|> \n. Role, break and content are encoded as one text, because white
 * space at the begin of the content joins the break. */
static int put_message(const struct tokenizer *t, const struct format *f, const struct chat_message *m,
                       struct token_buf *out, struct err *err)
{
    size_t head = strlen(m->role) + 1;
    if (m->content_bytes > TOKENIZER_TEXT_MAX - head)
        return err_set(err, -E2BIG, "content: found %zu bytes, expected at most %zu", m->content_bytes,
                       TOKENIZER_TEXT_MAX - head);
    char *text = mem_alloc(head + m->content_bytes, 1);
    memcpy(text, m->role, head - 1);
    text[head - 1] = '\n';
    if (m->content_bytes)
        memcpy(text + head, m->content, m->content_bytes);
    token_buf_push(out, f->im_start);
    int rc = tokenizer_encode(t, text, head + m->content_bytes, false, out, err);
    mem_free(&text);
    if (rc < 0)
        return rc;
    token_buf_push(out, f->im_end);
    return tokenizer_encode(t, "\n", 1, false, out, err);
}

static int put_all(const struct tokenizer *t, const struct format *f, const struct chat_message *messages,
                   size_t count, struct token_buf *out, struct err *err)
{
    int rc = 0;
    if (tokenizer_add_bos(t) && out->count == 0)
        token_buf_push(out, tokenizer_bos(t));
    if (f->default_system.text && strcmp(messages[0].role, "system")) {
        struct chat_message system = {"system", f->default_system.text, f->default_system.bytes};
        rc = put_message(t, f, &system, out, err);
    }
    for (size_t i = 0; i < count && !rc; i++) {
        rc = put_message(t, f, &messages[i], out, err);
        if (rc < 0)
            err_prefix(err, rc, "messages[%zu]", i);
    }
    return rc;
}

int chat_encode(const struct tokenizer *tokenizer, const struct chat_message *messages, size_t count,
                bool generate, struct token_buf *out, struct err *err)
{
    if (count == 0)
        return err_set(err, -EINVAL, "messages: found none, expected at least one");
    for (size_t i = 0; i < count; i++)
        if (!known_role(messages[i].role))
            return err_set(err, -EINVAL,
                           "messages[%zu]: role: found \"%.40s\", expected system, user, assistant or tool",
                           i, messages[i].role);
    struct format f;
    int rc = find_format(tokenizer, &f, err);
    if (rc < 0)
        return rc;
    size_t before = out->count;
    rc = put_all(tokenizer, &f, messages, count, out, err);
    if (!rc && generate) {
        token_buf_push(out, f.im_start);
        rc = tokenizer_encode(tokenizer, "assistant\n", 10, false, out, err);
    }
    if (rc < 0)
        out->count = before;
    mem_free(&f.text);
    return rc;
}
