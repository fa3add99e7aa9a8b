/* Builds chat prompts. Holds nothing between calls. Roles and contents come from clients: they must never
 * reach the part of the tokenizer that knows control tokens. */
#include "model/chat.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/detok.h"
#include "model/names.h"

#define BAR "\xef\xbd\x9c"

/* The prompt as it grows: text gathers between marks and is encoded as one, because white space at the begin
 * of a content joins the break before it. */
struct builder {
    const struct tokenizer *t;
    struct text_buf text;
    struct token_buf *out;
    struct err *err;
    int rc;
};

static void flush(struct builder *b)
{
    if (!b->rc && b->text.bytes)
        b->rc = tokenizer_encode(b->t, b->text.text, b->text.bytes, false, b->out, b->err);
    b->text.bytes = 0;
}

/* A mark that the family's check has found in the vocabulary. */
static void put_mark(struct builder *b, const char *mark)
{
    flush(b);
    if (!b->rc)
        token_buf_push(b->out, tokenizer_special(b->t, mark));
}

/* As a mark where the vocabulary has it, else as text. */
static void put_token(struct builder *b, const char *text)
{
    if (tokenizer_special(b->t, text) != TOKENIZER_NO_TOKEN)
        put_mark(b, text);
    else
        text_buf_append(&b->text, text, strlen(text));
}

static void put_text(struct builder *b, const char *text)
{
    text_buf_append(&b->text, text, strlen(text));
}

static void put_name(struct builder *b, struct name text)
{
    if (text.bytes > TOKENIZER_TEXT_MAX - b->text.bytes)
        b->rc = err_set(b->err, -E2BIG, "content: found %zu bytes, expected at most %u", text.bytes,
                        TOKENIZER_TEXT_MAX);
    if (!b->rc)
        text_buf_append(&b->text, text.text, text.bytes);
}

static struct name content_of(const struct chat_message *m)
{
    return (struct name){m->content, m->content_bytes};
}

static bool is_role(const struct chat_message *m, const char *role)
{
    return !strcmp(m->role, role);
}

/* Without white space (of the given kinds) at both ends. */
static struct name trim_begin(struct name t, const char *kinds)
{
    while (t.bytes && t.text[0] && strchr(kinds, t.text[0])) {
        t.text++;
        t.bytes--;
    }
    return t;
}

static struct name trim(struct name t, const char *kinds)
{
    t = trim_begin(t, kinds);
    while (t.bytes && t.text[t.bytes - 1] && strchr(kinds, t.text[t.bytes - 1]))
        t.bytes--;
    return t;
}

/* What follows the last `mark`; the text itself without one. */
static struct name after_last(struct name t, const char *mark)
{
    size_t bytes = strlen(mark);
    for (size_t at = t.bytes; at >= bytes && t.bytes; at--)
        if (!memcmp(t.text + at - bytes, mark, bytes))
            return (struct name){t.text + at, t.bytes - at};
    return t;
}

static struct name before_first(struct name t, const char *mark)
{
    const char *at = t.bytes ? memmem(t.text, t.bytes, mark, strlen(mark)) : NULL;
    return at ? (struct name){t.text, (size_t)(at - t.text)} : t;
}

static void chatml_turn(struct builder *b, const char *role, struct name content)
{
    put_mark(b, "<|im_start|>");
    put_text(b, role);
    put_text(b, "\n");
    put_name(b, content);
    put_mark(b, "<|im_end|>");
    put_text(b, "\n");
}

/* Answers of tools that follow each other share a user's turn. */
static void quoted_tool(struct builder *b, const struct chat *chat, size_t i)
{
    if (i == 0 || !is_role(&chat->messages[i - 1], "tool")) {
        put_mark(b, "<|im_start|>");
        put_text(b, "user");
    }
    put_text(b, "\n");
    put_token(b, "<tool_response>");
    put_text(b, "\n");
    put_name(b, content_of(&chat->messages[i]));
    put_text(b, "\n");
    put_token(b, "</tool_response>");
    if (i + 1 == chat->count || !is_role(&chat->messages[i + 1], "tool")) {
        put_mark(b, "<|im_end|>");
        put_text(b, "\n");
    }
}

static void chatml_message(struct builder *b, const struct chat *chat, size_t i)
{
    const struct chat_message *m = &chat->messages[i];
    if (chat->format->tools_as_user && is_role(m, "tool"))
        quoted_tool(b, chat, i);
    else
        chatml_turn(b, m->role, content_of(m));
}

/* The last message that asks something, rather than quoting a tool; the last of all when none does. */
static size_t last_query(const struct chat *chat)
{
    static const char begin[] = "<tool_response>", end[] = "</tool_response>";
    const size_t head = sizeof begin - 1, tail = sizeof end - 1;
    for (size_t i = chat->count; i-- > 0;) {
        const struct chat_message *m = &chat->messages[i];
        bool quotes = m->content_bytes >= head && !memcmp(m->content, begin, head) &&
                      m->content_bytes >= tail && !memcmp(m->content + m->content_bytes - tail, end, tail);
        if (is_role(m, "user") && !quotes)
            return i;
    }
    return chat->count - 1;
}

/* Thoughts stay only in answers behind the last query: of a turn that goes on. */
static void qwen3_answer(struct builder *b, const struct chat *chat, size_t i)
{
    struct name content = content_of(&chat->messages[i]), thought = {"", 0};
    if (content.bytes && memmem(content.text, content.bytes, "</think>", 8)) {
        thought = trim(before_first(content, "</think>"), "");
        while (thought.bytes && thought.text[thought.bytes - 1] == '\n')
            thought.bytes--;
        thought = trim_begin(after_last(thought, "<think>"), "\n");
        content = trim_begin(after_last(content, "</think>"), "\n");
    }
    put_mark(b, "<|im_start|>");
    put_text(b, "assistant\n");
    if (i > last_query(chat) && (i + 1 == chat->count || thought.bytes)) {
        put_token(b, "<think>");
        put_text(b, "\n");
        put_name(b, trim(thought, "\n"));
        put_text(b, "\n");
        put_token(b, "</think>");
        put_text(b, "\n\n");
        content = trim_begin(content, "\n");
    }
    put_name(b, content);
    put_mark(b, "<|im_end|>");
    put_text(b, "\n");
}

static void qwen3_message(struct builder *b, const struct chat *chat, size_t i)
{
    if (is_role(&chat->messages[i], "assistant"))
        qwen3_answer(b, chat, i);
    else
        chatml_message(b, chat, i);
}

static void llama3_turn(struct builder *b, const char *role, struct name content)
{
    put_mark(b, "<|start_header_id|>");
    put_text(b, role);
    put_mark(b, "<|end_header_id|>");
    put_text(b, "\n\n");
    put_name(b, trim(content, " \t\n\v\f\r"));
    put_mark(b, "<|eot_id|>");
}

/* Llama 3.1 has a system turn always, with dates in it. */
static void llama3_dated(struct builder *b, const struct chat *chat)
{
    const struct chat_message *first = &chat->messages[0];
    put_mark(b, "<|start_header_id|>");
    put_text(b, "system");
    put_mark(b, "<|end_header_id|>");
    put_text(b, "\n\nCutting Knowledge Date: December 2023\nToday Date: ");
    put_text(b, chat->format->date);
    put_text(b, "\n\n");
    if (is_role(first, "system"))
        put_name(b, trim(content_of(first), " \t\n\v\f\r"));
    put_mark(b, "<|eot_id|>");
}

static void llama3_message(struct builder *b, const struct chat *chat, size_t i)
{
    const struct chat_message *m = &chat->messages[i];
    bool dated = *chat->format->date;
    if (dated && i == 0)
        llama3_dated(b, chat);
    if (!dated || i || !is_role(m, "system"))
        llama3_turn(b, is_role(m, "tool") && dated ? "ipython" : m->role, content_of(m));
}

/* The last system message counts, and comes first, without a mark. */
static void deepseek_system(struct builder *b, const struct chat *chat)
{
    for (size_t i = chat->count; i-- > 0;) {
        if (is_role(&chat->messages[i], "system")) {
            put_name(b, content_of(&chat->messages[i]));
            return;
        }
    }
}

static void deepseek_message(struct builder *b, const struct chat *chat, size_t i)
{
    const struct chat_message *m = &chat->messages[i];
    if (i == 0)
        deepseek_system(b, chat);
    if (is_role(m, "user")) {
        put_mark(b, "<" BAR "User" BAR ">");
        put_name(b, content_of(m));
    } else if (is_role(m, "assistant")) {
        put_mark(b, "<" BAR "Assistant" BAR ">");
        put_name(b, chat->format->drops_thoughts ? after_last(content_of(m), "</think>") : content_of(m));
        put_mark(b, "<" BAR "end\xe2\x96\x81of\xe2\x96\x81sentence" BAR ">");
    }
}

static void put_generate(struct builder *b, const struct chat_format *f)
{
    switch (f->family) {
    case CHAT_FAMILY_CHATML:
    case CHAT_FAMILY_QWEN3:
        put_mark(b, "<|im_start|>");
        put_text(b, "assistant\n");
        break;
    case CHAT_FAMILY_LLAMA3:
        put_mark(b, "<|start_header_id|>");
        put_text(b, "assistant");
        put_mark(b, "<|end_header_id|>");
        put_text(b, "\n\n");
        break;
    case CHAT_FAMILY_DEEPSEEK_R1:
        put_mark(b, "<" BAR "Assistant" BAR ">");
        if (f->opens_thought) {
            put_token(b, "<think>");
            put_text(b, "\n");
        }
        break;
    }
    flush(b);
}

static int check_messages(const struct chat *chat, struct err *err)
{
    static const char *const roles[] = {"system", "user", "assistant", "tool"};
    if (chat->count == 0)
        return err_set(err, -EINVAL, "messages: found none, expected at least one");
    for (size_t i = 0; i < chat->count; i++) {
        const char *role = chat->messages[i].role;
        unsigned k = 0;
        while (k < 4 && strcmp(role, roles[k]))
            k++;
        if (k == 4)
            return err_set(err, -EINVAL,
                           "messages[%zu]: role: found \"%.40s\", expected system, user, assistant or tool",
                           i, role);
        if (k == 3 && chat->format->family == CHAT_FAMILY_DEEPSEEK_R1)
            return err_set(err, -EINVAL,
                           "messages[%zu]: role: found \"tool\", expected system, user or assistant (%s)", i,
                           chat->format->name);
    }
    return 0;
}

static void put_messages(struct builder *b, const struct chat *chat)
{
    static void (*const puts_by_family[])(struct builder *, const struct chat *, size_t) = {
        [CHAT_FAMILY_CHATML] = chatml_message,
        [CHAT_FAMILY_QWEN3] = qwen3_message,
        [CHAT_FAMILY_LLAMA3] = llama3_message,
        [CHAT_FAMILY_DEEPSEEK_R1] = deepseek_message,
    };
    const struct chat_format *f = chat->format;
    bool wants = f->family == CHAT_FAMILY_LLAMA3 || f->family == CHAT_FAMILY_DEEPSEEK_R1;
    if ((wants || tokenizer_add_bos(b->t)) && tokenizer_bos(b->t) != TOKENIZER_NO_TOKEN && b->out->count == 0)
        token_buf_push(b->out, tokenizer_bos(b->t));
    if (*f->system && !is_role(&chat->messages[0], "system"))
        chatml_turn(b, "system", name_of(f->system));
    for (size_t i = 0; i < chat->count && !b->rc; i++) {
        puts_by_family[f->family](b, chat, i);
        bool joins =
            i + 1 < chat->count && is_role(&chat->messages[i + 1], "tool"); /* no mark between them */
        if (!joins)
            flush(b);
        if (b->rc < 0)
            err_prefix(b->err, b->rc, "messages[%zu]", i);
    }
}

int chat_encode_as(const struct tokenizer *tokenizer, const struct chat *chat, struct token_buf *out,
                   struct err *err)
{
    size_t before = out->count;
    struct builder b = {.t = tokenizer, .out = out, .err = err};
    int rc = check_messages(chat, err);
    if (rc < 0)
        return rc;
    put_messages(&b, chat);
    flush(&b);
    if (chat->generate)
        put_generate(&b, chat->format);
    text_buf_free(&b.text);
    if (b.rc < 0)
        out->count = before;
    return b.rc;
}
