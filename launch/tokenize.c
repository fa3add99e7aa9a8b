/* `specontext tokenize` and `specontext detokenize`. Single-threaded; reads the model, changes nothing. */
#include "launch/tokenize.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/options.h"
#include "base/parse.h"
#include "launch/tokenizer_source.h"
#include "model/detok.h"

struct options {
    const char *command, *model, *text, *file;
    struct option_words words;
    bool special, bos, json, ids, lines, bytes;
};

#define AT(field) .at = offsetof(struct options, field)

/* A table reads best as rows. */
/* clang-format off */
#define MODEL_ROW \
    {.name = "model", .letter = 'm', .kind = OPTION_TEXT, AT(model), .argument = "MODEL", \
     .group = "Options", .text = "GGUF file, Hugging Face folder, or a tokenizer.json"}

static const struct option_entry tokenize_table[] = {
    MODEL_ROW,
    {.name = "prompt", .letter = 'p', .kind = OPTION_TEXT, AT(text), .argument = "TEXT", .group = "Options",
     .text = "the text"},
    {.name = "file", .letter = 'f', .kind = OPTION_TEXT, AT(file), .argument = "FILE", .group = "Options",
     .text = "a file with the text; - for standard input"},
    {.name = "special", .kind = OPTION_FLAG, AT(special), .group = "Options",
     .text = "text that spells a control token becomes that token"},
    {.name = "bos", .kind = OPTION_FLAG, AT(bos), .group = "Options",
     .text = "as a prompt: with the token that begins a text, if the model wants one"},
    {.name = "bytes", .kind = OPTION_FLAG, AT(bytes), .group = "Options",
     .text = "any bytes, also such as are no UTF-8, and none changed: no normalization"},
    {.name = "ids", .kind = OPTION_FLAG, AT(ids), .group = "Options", .text = "ids only, on one line"},
    {.name = "lines", .kind = OPTION_FLAG, AT(lines), .group = "Options",
     .text = "each line of the text by itself: a line of ids for it"},
    {.name = "json", .kind = OPTION_FLAG, AT(json), .group = "Options", .text = "a JSON object"},
    {0}};

static const struct option_entry detokenize_table[] = {
    {.name = "", .kind = OPTION_WORDS, AT(words)},
    MODEL_ROW,
    {.name = "special", .kind = OPTION_FLAG, AT(special), .group = "Options",
     .text = "print control tokens too"},
    {.name = "bytes", .kind = OPTION_FLAG, AT(bytes), .group = "Options",
     .text = "the tokens' own bytes, also such as are no UTF-8"},
    {.name = "json", .kind = OPTION_FLAG, AT(json), .group = "Options", .text = "a JSON object"},
    {0}};
/* clang-format on */

static int usage_error(const struct options *o, const char *what)
{
    fprintf(stderr, "specontext %s: %s\nTry `specontext %s --help`.\n", o->command, what, o->command);
    return 2;
}

/* -1: go on; else the exit code. */
static int read_options(struct options *o, int argc, char **argv)
{
    struct err err = {0};
    bool encode = !strcmp(o->command, "tokenize");
    const struct option_entry *table = encode ? tokenize_table : detokenize_table;
    int r = options_parse(table, argc, argv, o, &err);
    if (r == 1) {
        puts(encode ? "Usage: specontext tokenize -m MODEL [-p TEXT | -f FILE] [options]\n\n"
                      "Prints the tokens of a text (from standard input when neither -p nor -f is given): "
                      "id and what it stands for."
                    : "Usage: specontext detokenize -m MODEL [ID...] [options]\n\n"
                      "Prints the text of token ids (from standard input when none are given; separated by "
                      "space or comma).");
        options_help(table, stdout);
        return 0;
    }
    if (r < 0)
        return usage_error(o, err.text);
    o->ids |= o->lines;
    if (!o->model)
        return usage_error(o, "-m MODEL is missing");
    if (o->bytes && (o->bos || (encode ? o->special : o->json)))
        return usage_error(o, encode ? "--bytes: not together with --special or --bos"
                                     : "--bytes: not together with --json");
    if (o->text && o->file)
        return usage_error(o, "found both -p and -f, expected one of them");
    return -1;
}

static int failed(const struct options *o, const struct err *err)
{
    fprintf(stderr, "specontext %s: %s\n", o->command, err->text);
    return 1;
}

/* Bytes of one token so that a terminal shows them on one line. */
static void print_piece(const char *text, size_t bytes)
{
    putchar('"');
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '\n')
            fputs("\\n", stdout);
        else if (c == '"' || c == '\\')
            printf("\\%c", c);
        else if (c < 32 || c == 127)
            printf("\\x%02x", c);
        else
            putchar(c);
    }
    putchar('"');
}

static int print_json(json_t *root)
{
    int rc = json_dumpf(root, stdout, JSON_INDENT(2) | JSON_SORT_KEYS);
    putchar('\n');
    json_decref(root);
    return rc < 0;
}

static json_t *ids_json(const struct token_buf *ids)
{
    json_t *list = json_array();
    for (size_t i = 0; i < ids->count; i++)
        json_array_append_new(list, json_integer((json_int_t)ids->ids[i]));
    return list;
}

static int print_tokens(const struct options *o, const struct tokenizer *t, const struct token_buf *ids,
                        size_t text_bytes)
{
    if (o->json)
        return print_json(json_pack("{s:I, s:I, s:o}", "bytes", (json_int_t)text_bytes, "count",
                                    (json_int_t)ids->count, "ids", ids_json(ids)));
    for (size_t i = 0; i < ids->count; i++) {
        if (o->ids) {
            printf("%s%" PRIu32, i ? " " : "", ids->ids[i]);
            continue;
        }
        size_t bytes;
        const char *text = tokenizer_bytes(t, ids->ids[i], &bytes);
        printf("%8" PRIu32 "  ", ids->ids[i]);
        print_piece(text, bytes);
        puts(tokenizer_is_control(t, ids->ids[i]) ? "  (control)" : "");
    }
    if (o->ids)
        putchar('\n');
    return 0;
}

static int encode(const struct options *o, const struct tokenizer *t, const char *text, size_t bytes,
                  struct token_buf *ids, struct err *err)
{
    if (o->bytes)
        return tokenizer_encode_bytes(t, text, bytes, ids, err);
    return o->bos ? tokenizer_encode_prompt(t, text, bytes, o->special, ids, err)
                  : tokenizer_encode(t, text, bytes, o->special, ids, err);
}

static int encode_lines(const struct options *o, const struct tokenizer *t, const char *text, size_t bytes,
                        struct err *err)
{
    struct token_buf ids = {0};
    int rc = 0;
    for (size_t at = 0, line = 1; at < bytes && !rc; line++) {
        const char *end = memchr(text + at, '\n', bytes - at);
        size_t length = end ? (size_t)(end - text) - at : bytes - at;
        ids.count = 0;
        rc = encode(o, t, text + at, length, &ids, err);
        if (rc < 0)
            err_prefix(err, rc, "line %zu", line);
        else
            print_tokens(o, t, &ids, length);
        at += length + 1;
    }
    token_buf_free(&ids);
    return rc;
}

int tokenize_main(int argc, char **argv)
{
    struct options o = {.command = "tokenize"};
    struct tokenizer_source source = {0};
    struct token_buf ids = {0};
    struct err err = {0};
    char *read = NULL;
    size_t bytes = 0;
    int code = read_options(&o, argc, argv);
    if (code >= 0)
        return code;
    int rc = tokenizer_source_open(&source, o.model, &err);
    if (!rc && !o.text)
        rc = tokenizer_source_text(o.file ? o.file : "-", TOKENIZER_TEXT_MAX, &read, &bytes, &err);
    const char *text = o.text ? o.text : read;
    bytes = o.text ? strlen(o.text) : bytes;
    if (!rc && o.lines)
        rc = encode_lines(&o, source.tokenizer, text, bytes, &err);
    else if (!rc)
        rc = encode(&o, source.tokenizer, text, bytes, &ids, &err);
    if (rc < 0)
        code = failed(&o, &err);
    else
        code = o.lines ? 0 : print_tokens(&o, source.tokenizer, &ids, bytes);
    token_buf_free(&ids);
    tokenizer_source_close(&source);
    mem_free(&read);
    return code;
}

/* Ids out of text, which is changed. */
static int parse_ids(char *text, uint32_t vocab, struct token_buf *ids, struct err *err)
{
    char *rest;
    for (char *word = strtok_r(text, " \t\r\n,[]", &rest); word; word = strtok_r(NULL, " \t\r\n,[]", &rest)) {
        uint32_t id;
        if (parse_u32(word, 0, vocab - 1, &id) < 0)
            return err_set(err, -EINVAL, "ids: found \"%.40s\", expected numbers below %" PRIu32, word,
                           vocab);
        token_buf_push(ids, id);
    }
    return 0;
}

static int read_ids(const struct option_words *words, uint32_t vocab, struct token_buf *ids, struct err *err)
{
    char *text = NULL;
    size_t bytes = 0;
    int rc = 0;
    for (uint32_t i = 0; i < words->count && !rc; i++)
        rc = parse_ids(words->at[i], vocab, ids, err);
    if (rc < 0 || words->count)
        return rc;
    rc = tokenizer_source_text("-", TOKENIZER_TEXT_MAX, &text, &bytes, err);
    if (!rc && memchr(text, '\0', bytes))
        rc = err_set(err, -EINVAL, "ids: found a NUL byte, expected numbers");
    if (!rc) {
        text = mem_resize(text, bytes + 1, 1);
        text[bytes] = '\0';
        rc = parse_ids(text, vocab, ids, err);
    }
    mem_free(&text);
    return rc;
}

static void decode(const struct options *o, const struct tokenizer *t, const struct token_buf *ids,
                   struct text_buf *out)
{
    struct detokenizer detok;
    detok_init(&detok);
    for (size_t i = 0; i < ids->count; i++) {
        size_t bytes;
        const char *text = tokenizer_bytes(t, ids->ids[i], &bytes);
        bool control = tokenizer_is_control(t, ids->ids[i]);
        if (o->special && control) {
            detok_finish(&detok, out);
            text_buf_append(out, text, bytes);
        } else if (o->bytes) {
            if (!control)
                text_buf_append(out, text, bytes);
        } else {
            detok_push(&detok, t, ids->ids[i], out);
        }
    }
    detok_finish(&detok, out);
}

int detokenize_main(int argc, char **argv)
{
    struct options o = {.command = "detokenize"};
    struct tokenizer_source source = {0};
    struct token_buf ids = {0};
    struct text_buf text = {0};
    struct err err = {0};
    int code = read_options(&o, argc, argv);
    if (code >= 0)
        return code;
    int rc = tokenizer_source_open(&source, o.model, &err);
    if (!rc)
        rc = read_ids(&o.words, tokenizer_vocab(source.tokenizer), &ids, &err);
    if (rc < 0) {
        code = failed(&o, &err);
    } else {
        decode(&o, source.tokenizer, &ids, &text);
        code = 0;
        if (o.json)
            code = print_json(json_pack("{s:s%, s:o}", "text", text.bytes ? text.text : "", text.bytes, "ids",
                                        ids_json(&ids)));
        else
            fwrite(text.text ? text.text : "", 1, text.bytes, stdout);
    }
    text_buf_free(&text);
    token_buf_free(&ids);
    tokenizer_source_close(&source);
    return code;
}
