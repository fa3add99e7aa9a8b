/* Reads prompts and encodes them. No state, no threads. Text from the person never becomes a control token:
 * those come from the chat template alone. */
#include "launch/prompt.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "model/chat.h"
#include "model/detok.h"
#include "model/utf8.h"

/* Appends a whole file; "-" is standard input. */
static int read_file(const char *path, struct text_buf *out, struct err *err)
{
    int standard = !strcmp(path, "-");
    int fd = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    char part[65536];
    int r = 0;
    for (;;) {
        ssize_t n = read(fd, part, sizeof part);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            r = err_set(err, -errno, "%s: %s", path, strerror(errno));
        if (n <= 0)
            break;
        if (out->bytes + (size_t)n > TOKENIZER_TEXT_MAX) {
            r = err_set(err, -EFBIG, "%s: more than %u bytes", path, TOKENIZER_TEXT_MAX);
            break;
        }
        text_buf_append(out, part, (size_t)n);
    }
    if (!standard)
        close(fd);
    return r;
}

struct encoder {
    const struct tokenizer *tokenizer;
    const struct chat_format *chat; /* NULL: the text is the prompt */
    const char *system;
    uint32_t context;
};

static int encode(const struct encoder *e, const char *text, size_t bytes, struct token_buf *out,
                  struct err *err)
{
    size_t valid = utf8_valid(text, bytes);
    if (valid < bytes) /* here, so that the offset is one of the person's own text */
        return err_set(err, -EILSEQ, "byte %zu of %zu is no valid UTF-8", valid, bytes);
    int r;
    if (e->chat) {
        struct chat_message messages[2];
        size_t count = 0;
        if (e->system)
            messages[count++] = (struct chat_message){"system", e->system, strlen(e->system)};
        messages[count++] = (struct chat_message){"user", text, bytes};
        r = chat_encode_as(e->tokenizer, &(struct chat){e->chat, messages, count, true}, out, err);
    } else {
        r = tokenizer_encode_prompt(e->tokenizer, text, bytes, false, out, err);
    }
    if (r)
        return r;
    if (!out->count)
        return err_set(err, -EINVAL, "it is empty");
    if (out->count >= e->context)
        return err_set(err, -E2BIG,
                       "it has %zu tokens, but the context of %u positions holds at most %u and one more",
                       out->count, e->context, e->context - 1);
    return 0;
}

static int load_one(const struct run_options *options, const struct encoder *e, struct prompts *prompts,
                    struct err *err)
{
    struct text_buf text = {0};
    int r = options->file ? read_file(options->file, &text, err) : 0;
    if (!r && options->prompt) {
        if (text.bytes && text.text[text.bytes - 1] != '\n')
            text_buf_append(&text, "\n", 1);
        text_buf_append(&text, options->prompt, strlen(options->prompt));
    }
    if (!r) {
        prompts->list = mem_alloc(1, sizeof *prompts->list);
        prompts->count = 1;
        r = encode(e, text.text ? text.text : "", text.bytes, &prompts->list[0], err);
        if (r)
            err_prefix(err, r, "the prompt");
    }
    text_buf_free(&text);
    return r;
}

static int load_line(const char *line, size_t bytes, const struct encoder *e, struct token_buf *out,
                     struct err *err)
{
    json_error_t why;
    json_t *value = json_loadb(line, bytes, JSON_DECODE_ANY | JSON_ALLOW_NUL, &why);
    if (!value)
        return err_set(err, -EINVAL, "not a JSON value: %s", why.text);
    int r;
    if (!json_is_string(value))
        r = err_set(err, -EINVAL, "not a JSON string");
    else
        r = encode(e, json_string_value(value), json_string_length(value), out, err);
    json_decref(value);
    return r;
}

static int load_list(const char *path, const struct encoder *e, struct prompts *prompts, struct err *err)
{
    struct text_buf text = {0};
    int r = read_file(path, &text, err);
    unsigned number = 0;
    for (size_t at = 0; !r && at < text.bytes;) {
        const char *line = text.text + at, *end = memchr(line, '\n', text.bytes - at);
        size_t bytes = end ? (size_t)(end - line) : text.bytes - at;
        at += bytes + 1;
        number++;
        if (!bytes)
            continue;
        if (prompts->count == PROMPT_COUNT_MAX) {
            r = err_set(err, -E2BIG, "%s: more than %u prompts", path, PROMPT_COUNT_MAX);
            break;
        }
        prompts->list = mem_resize(prompts->list, prompts->count + 1, sizeof *prompts->list);
        struct token_buf *out = &prompts->list[prompts->count++];
        *out = (struct token_buf){0};
        r = load_line(line, bytes, e, out, err);
        if (r)
            err_prefix(err, r, "%s:%u", path, number);
    }
    if (!r && !prompts->count)
        r = err_set(err, -EINVAL, "%s: no prompts in it", path);
    text_buf_free(&text);
    return r;
}

int prompts_load(const struct run_options *options, const struct tokenizer *tokenizer, uint32_t context,
                 struct prompts *ret_prompts, struct err *err)
{
    struct chat_format format;
    struct encoder e = {.tokenizer = tokenizer, .system = options->system, .context = context};
    struct prompts prompts = {0};
    int r = 0;
    if (options->chat) {
        r = chat_format_choose(tokenizer, options->chat_template, &format, err);
        e.chat = &format;
    }
    if (r)
        return r;
    r = options->prompts ? load_list(options->prompts, &e, &prompts, err)
                         : load_one(options, &e, &prompts, err);
    if (r)
        prompts_free(&prompts);
    else
        *ret_prompts = prompts;
    return r;
}

void prompts_free(struct prompts *prompts)
{
    for (uint32_t i = 0; i < prompts->count; i++)
        token_buf_free(&prompts->list[i]);
    mem_free(&prompts->list);
    prompts->count = 0;
}
