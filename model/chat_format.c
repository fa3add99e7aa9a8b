/* Recognises chat templates. Short ones of the ChatML family are taken apart whole; long ones, which have
 * branches for tools that no caller uses, are known by the pieces that decide the rest. No state. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/chat.h"
#include "model/mapping.h"
#include "model/names.h"

#define BAR          "\xef\xbd\x9c" /* U+FF5C, in DeepSeek's marks */
#define SMOLLM2_TEXT "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
#define QWEN25_TEXT  "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
#define LLAMA31_DATE \
    "26 Jul 2024" /* the date that its template falls back to: prompts stay the same each day */

enum named { CHATML, SMOLLM2, QWEN25, QWEN3, LLAMA3, LLAMA31, DEEPSEEK_R1 };

static const struct chat_format named[] = {
    [CHATML] = {.family = CHAT_FAMILY_CHATML, .name = "chatml"},
    [SMOLLM2] = {.family = CHAT_FAMILY_CHATML, .name = "smollm2", .system = SMOLLM2_TEXT},
    [QWEN25] = {.family = CHAT_FAMILY_CHATML,
                .name = "qwen2.5",
                .system = QWEN25_TEXT,
                .tools_as_user = true},
    [QWEN3] = {.family = CHAT_FAMILY_QWEN3, .name = "qwen3", .tools_as_user = true},
    [LLAMA3] = {.family = CHAT_FAMILY_LLAMA3, .name = "llama3"},
    [LLAMA31] = {.family = CHAT_FAMILY_LLAMA3, .name = "llama3.1", .date = LLAMA31_DATE},
    [DEEPSEEK_R1] = {.family = CHAT_FAMILY_DEEPSEEK_R1,
                     .name = "deepseek-r1",
                     .drops_thoughts = true,
                     .opens_thought = true},
};
#define NAMES "chatml, smollm2, qwen2.5, qwen3, llama3, llama3.1 or deepseek-r1"

/* A ChatML template in normal form, in the parts that may differ. */
#define UNSET        "{%ifnotadd_generation_promptisdefined%}{%setadd_generation_prompt=false%}{%endif%}"
#define LOOP         "{%formessageinmessages%}"
#define SYSTEM_BEGIN "{%ifloop.firstandmessages[0]['role']!='system'%}{{'<|im_start|>system\\n"
#define SYSTEM_END   "<|im_end|>\\n'}}{%endif%}"
#define CONTENT      "+message['content']+'<|im_end|>'+'\\n'}}"
#define MESSAGE      "{{'<|im_start|>'+message['role']+'\\n'" CONTENT "{%endfor%}"
#define GENERATE     "{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}"

int chat_format_by_name(const char *name, struct chat_format *ret, struct err *err)
{
    for (unsigned i = 0; i < sizeof named / sizeof *named; i++) {
        if (!strcmp(named[i].name, name)) {
            *ret = named[i];
            return 0;
        }
    }
    return err_set(err, -ENOENT, "chat template: found \"%.60s\", expected %s", name, NAMES);
}

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

/* A system text out of a template's string, without escapes. */
static bool take_system(struct chat_format *f, const char *text, const char *end)
{
    size_t bytes = (size_t)(end - text);
    if (bytes >= sizeof f->system || memchr(text, '\\', bytes) || memchr(text, '\'', bytes))
        return false;
    memcpy(f->system, text, bytes);
    f->system[bytes] = '\0';
    return true;
}

static void name_chatml(struct chat_format *f)
{
    f->name = !strcmp(f->system, SMOLLM2_TEXT)                      ? "smollm2"
              : !strcmp(f->system, QWEN25_TEXT) && f->tools_as_user ? "qwen2.5"
              : *f->system                                          ? "chatml with a default system message"
                                                                    : "chatml";
}

/* Takes the normal form of a short ChatML template apart; false when it is none. */
static bool parse_chatml(const char *text, struct chat_format *f)
{
    const char *at = text;
    *f = (struct chat_format){.family = CHAT_FAMILY_CHATML};
    skip(&at, UNSET);
    if (!skip(&at, LOOP))
        return false;
    if (skip(&at, SYSTEM_BEGIN)) {
        const char *end = strstr(at, SYSTEM_END);
        if (!end || !take_system(f, at, end))
            return false;
        at = end;
        skip(&at, SYSTEM_END);
    }
    name_chatml(f);
    return skip(&at, MESSAGE) && skip(&at, GENERATE) && *at == '\0';
}

static bool has_all(const char *text, const char *const *pieces)
{
    for (; *pieces; pieces++)
        if (!strstr(text, *pieces))
            return false;
    return true;
}

/* Qwen's templates with tools. */
static bool parse_qwen(const char *text, struct chat_format *f)
{
    static const char *const qwen3[] = {
        "{{'<|im_start|>'+message.role+'\\n'+message.content+'<|im_end|>'+'\\n'}}",
        "content.split('</think>')[-1].lstrip('\\n')",
        "ns.last_query_index",
        "'\\n<tool_response>\\n'",
        "{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}",
        NULL};
    static const char *const qwen25[] = {
        "{{'<|im_start|>'+message.role+'\\n'+message.content+'<|im_end|>'+'\\n'}}", "'\\n<tool_response>\\n'",
        "{%ifadd_generation_prompt%}{{'<|im_start|>assistant\\n'}}{%endif%}", NULL};
    static const char begin[] = "{%else%}{{'<|im_start|>system\\n", end[] = "<|im_end|>\\n'}}";
    if (has_all(text, qwen3)) {
        *f = named[QWEN3];
        return true;
    }
    if (!has_all(text, qwen25) || strstr(text, "</think>"))
        return false;
    *f = (struct chat_format){.family = CHAT_FAMILY_CHATML, .tools_as_user = true};
    const char *system = strstr(text, begin);
    const char *stop = system ? strstr(system + sizeof begin - 1, end) : NULL;
    if (system && (!stop || !take_system(f, system + sizeof begin - 1, stop)))
        return false;
    name_chatml(f);
    return true;
}

static bool parse_llama3(const char *text, struct chat_format *f)
{
    static const char *const base[] = {
        "'<|start_header_id|>'+message['role']+'<|end_header_id|>\\n\\n'+message['"
        "content']|trim+'<|eot_id|>'",
        "'<|start_header_id|>assistant<|end_header_id|>\\n\\n'", "bos_token", NULL};
    static const char *const dated[] = {"'<|start_header_id|>system<|end_header_id|>\\n\\n'",
                                        "'Cutting Knowledge Date: December 2023\\n'",
                                        "'Today Date: '+date_string+'\\n\\n'", NULL};
    if (!has_all(text, base))
        return false;
    bool is_dated = has_all(text, dated);
    if (!is_dated && strstr(text, "Cutting Knowledge"))
        return false;
    *f = named[is_dated ? LLAMA31 : LLAMA3];
    return true;
}

static bool parse_deepseek(const char *text, struct chat_format *f)
{
    static const char *const base[] = {
        "{{bos_token}}{{ns.system_prompt}}", "{{'<" BAR "User" BAR ">'+message['content']}}",
        "{{'<" BAR "Assistant" BAR ">'+content+'<" BAR "end\xe2\x96\x81of\xe2\x96\x81sentence" BAR ">'}}",
        NULL};
    if (!has_all(text, base))
        return false;
    *f = named[DEEPSEEK_R1];
    f->drops_thoughts = strstr(text, "content.split('</think>')[-1]") != NULL;
    f->opens_thought = strstr(text, "{{'<" BAR "Assistant" BAR "><think>\\n'}}") != NULL;
    return f->opens_thought || strstr(text, "{{'<" BAR "Assistant" BAR ">'}}") != NULL;
}

int chat_format_by_template(const char *text, size_t bytes, struct chat_format *ret, struct err *err)
{
    bool known = false;
    while (bytes && strchr(" \t\r\n", text[bytes - 1])) /* of files: a line break at the end */
        bytes--;
    if (bytes && bytes <= CHAT_TEMPLATE_MAX && !memchr(text, '\0', bytes)) {
        char *normal = mem_alloc(2 * bytes + 1, 1);
        normalise(text, bytes, normal);
        known = parse_chatml(normal, ret) || parse_qwen(normal, ret) || parse_llama3(normal, ret) ||
                parse_deepseek(normal, ret);
        mem_free(&normal);
    }
    if (known)
        return 0;
    char quote[101];
    snprintf(quote, sizeof quote, "%.*s", (int)(bytes < 100 ? bytes : 100), bytes ? text : "");
    for (char *c = quote; *c; c++)
        if (*c == '\n' || *c == '\r')
            *c = ' ';
    return err_set(err, -ENOTSUP,
                   "chat template: found \"%s...\" (%zu bytes), expected one that is known; choose with "
                   "--chat-template FILE or NAME: %s",
                   quote, bytes, NAMES);
}

static int read_file(const char *path, struct chat_format *ret, struct err *err)
{
    struct mapping m;
    int rc = mapping_open(&m, path, err);
    if (rc < 0)
        return rc;
    rc = chat_format_by_template(m.data ? (const char *)m.data : "", m.bytes, ret, err);
    mapping_close(&m);
    return rc < 0 ? err_prefix(err, rc, "%.160s", path) : 0;
}

static int check_marks(const struct tokenizer *t, const struct chat_format *f, struct err *err)
{
    static const char *const marks[][4] = {
        [CHAT_FAMILY_CHATML] = {"<|im_start|>", "<|im_end|>"},
        [CHAT_FAMILY_QWEN3] = {"<|im_start|>", "<|im_end|>"},
        [CHAT_FAMILY_LLAMA3] = {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"},
        [CHAT_FAMILY_DEEPSEEK_R1] = {"<" BAR "User" BAR ">", "<" BAR "Assistant" BAR ">",
                                     "<" BAR "end\xe2\x96\x81of\xe2\x96\x81sentence" BAR ">"},
    };
    for (unsigned i = 0; i < 4 && marks[f->family][i]; i++)
        if (tokenizer_special(t, marks[f->family][i]) == TOKENIZER_NO_TOKEN)
            return err_set(err, -ENOTSUP, "chat template: found %s, expected %s among the tokens", f->name,
                           marks[f->family][i]);
    return 0;
}

int chat_format_choose(const struct tokenizer *tokenizer, const char *choice, struct chat_format *ret,
                       struct err *err)
{
    int rc;
    size_t bytes;
    const char *text = tokenizer_chat_template(tokenizer, &bytes);
    if (choice) {
        rc = chat_format_by_name(choice, ret, err);
        if (rc == -ENOENT && (strchr(choice, '/') || strchr(choice, '.')))
            rc = read_file(choice, ret, err);
    } else if (!text) {
        rc = err_set(
            err, -ENOENT,
            "chat template: found none in the model, expected one; choose with --chat-template FILE or "
            "NAME: %s",
            NAMES);
    } else {
        rc = chat_format_by_template(text, bytes, ret, err);
    }
    return rc < 0 ? rc : check_marks(tokenizer, ret, err);
}

int chat_check(const struct tokenizer *tokenizer, const char **ret_name, struct err *err)
{
    struct chat_format format;
    int rc = chat_format_choose(tokenizer, NULL, &format, err);
    if (!rc)
        *ret_name = format.name;
    return rc;
}
