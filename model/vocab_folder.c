/* Fills struct vocab from a Hugging Face folder. Everything in tokenizer.json that changes what comes out is
 * recognised or refused by name. The vocabulary is the caller's; one thread. */
#include "model/vocab_folder.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/mapping.h"
#include "model/tokenizer_json.h"

#define TOKENIZER_JSON_MAX (128u << 20)
#define META               "\xe2\x96\x81" /* U+2581, SentencePiece's space */

/* What is being read and where, for errors. */
struct source {
    const char *path;
    struct tokenizer_json json;
    struct vocab *v;
    struct err *err;
};

static int refuse(const struct source *s, const char *field, const char *found, const char *expected)
{
    return err_set(s->err, -ENOTSUP, "%.200s: %s: found %.80s, expected %s", s->path, field, found, expected);
}

static const char *type_of(const json_t *object)
{
    const char *type = json_string_value(json_object_get(object, "type"));
    return type ? type : json_kind(object);
}

static bool flag_of(const json_t *object, const char *key, bool otherwise)
{
    const json_t *value = json_object_get(object, key);
    return json_is_boolean(value) ? json_is_true(value) : otherwise;
}

/* One token into its place. `type` NORMAL of a vocabulary's own, others of added tokens, which may name one
 * that the vocabulary has already. */
static int place_token(const struct source *s, struct name text, uint32_t id, enum vocab_type type)
{
    struct vocab *v = s->v;
    if (id >= v->count)
        return err_set(s->err, -EBADMSG,
                       "%.200s: tokens: found id %" PRIu32 ", expected less than the %" PRIu32
                       " of vocab_size",
                       s->path, id, v->count);
    bool taken = v->types[id] != VOCAB_TYPE_UNUSED;
    bool same = taken && type != VOCAB_TYPE_NORMAL && name_equal(v->tokens[id], text);
    if (taken && !same)
        return err_set(s->err, -EBADMSG,
                       "%.200s: id %" PRIu32 ": found tokens \"%.*s\" and \"%.*s\", expected one", s->path,
                       id, (int)(v->tokens[id].bytes < 60 ? v->tokens[id].bytes : 60), v->tokens[id].text,
                       (int)(text.bytes < 60 ? text.bytes : 60), text.text);
    v->tokens[id] = text;
    v->types[id] = (uint8_t)type;
    return 0;
}

static int add_added(const struct source *s, const json_t *token)
{
    const json_t *content = json_object_get(token, "content"), *id = json_object_get(token, "id");
    if (!json_is_string(content) || json_string_length(content) == 0 || !json_is_integer(id) ||
        json_integer_value(id) < 0 || json_integer_value(id) > INT32_MAX)
        return err_set(s->err, -EBADMSG, "%.200s: added_tokens: found %s, expected objects of id and content",
                       s->path, json_kind(token));
    struct name text = vocab_keep(s->v, json_string_value(content), json_string_length(content));
    int rc = place_token(s, text, (uint32_t)json_integer_value(id),
                         flag_of(token, "special", false) ? VOCAB_TYPE_CONTROL : VOCAB_TYPE_USER_DEFINED);
    unsigned cuts = (flag_of(token, "lstrip", false) ? VOCAB_CUT_LSTRIP : 0u) |
                    (flag_of(token, "rstrip", false) ? VOCAB_CUT_RSTRIP : 0u) |
                    (flag_of(token, "single_word", false) ? VOCAB_CUT_SINGLE_WORD : 0u);
    if (rc < 0 || !cuts)
        return rc;
    if (!s->v->cuts)
        s->v->cuts = mem_alloc(s->v->count, sizeof *s->v->cuts);
    s->v->cuts[json_integer_value(id)] = (uint8_t)cuts;
    return 0;
}

static bool is_byte_token(struct name t)
{
    return t.bytes == 6 && !memcmp(t.text, "<0x", 3) && t.text[5] == '>';
}

/* One more than the highest id; a file whose ids are far apart is refused when one does not fit. */
static uint32_t count_tokens(const struct source *s)
{
    const json_t *added = json_object_get(s->json.rest, "added_tokens");
    uint32_t count = 1, most = 4 * (s->json.token_count + (uint32_t)json_array_size(added)) + 1024;
    for (uint32_t i = 0; i < s->json.token_count; i++)
        if (s->json.tokens[i].id >= count && s->json.tokens[i].id < most)
            count = s->json.tokens[i].id + 1;
    for (size_t i = 0; i < json_array_size(added); i++) {
        json_int_t id = json_integer_value(json_object_get(json_array_get(added, i), "id"));
        if (id >= count && id < most)
            count = (uint32_t)id + 1;
    }
    return count;
}

static int place_tokens(const struct source *s, uint32_t vocab_size)
{
    struct vocab *v = s->v;
    bool byte_fallback = flag_of(json_object_get(s->json.rest, "model"), "byte_fallback", false);
    v->count = vocab_size ? vocab_size : count_tokens(s);
    v->tokens = mem_alloc(v->count, sizeof *v->tokens);
    v->types = mem_alloc(v->count, sizeof *v->types);
    memset(v->types, VOCAB_TYPE_UNUSED, v->count);
    int rc = 0;
    for (uint32_t i = 0; i < s->json.token_count && !rc; i++) {
        struct tokenizer_json_token t = s->json.tokens[i];
        rc = place_token(s, t.text, t.id, VOCAB_TYPE_NORMAL);
        if (!rc && byte_fallback && is_byte_token(t.text))
            v->types[t.id] = VOCAB_TYPE_BYTE;
    }
    size_t at;
    json_t *token;
    json_t *added = json_object_get(s->json.rest, "added_tokens");
    if (added && !json_is_array(added) && !json_is_null(added))
        return err_set(s->err, -EBADMSG, "%.200s: added_tokens: found %s, expected an array", s->path,
                       json_kind(added));
    json_array_foreach(added, at, token)
    {
        if (rc < 0)
            break;
        rc = add_added(s, token);
    }
    return rc;
}

/* Id of a token by its text, by a walk: used a few times. */
static uint32_t find_token(const struct vocab *v, const char *text)
{
    struct name name = name_of(text ? text : "");
    for (uint32_t i = 0; name.bytes && i < v->count; i++)
        if (v->types[i] != VOCAB_TYPE_UNUSED && name_equal(v->tokens[i], name))
            return i;
    return VOCAB_NO_TOKEN;
}

/* model: what changes how tokens are merged. */
static int read_model(const struct source *s)
{
    struct vocab *v = s->v;
    const json_t *model = json_object_get(s->json.rest, "model");
    static const char *const texts[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (unsigned i = 0; i < 2; i++)
        if (json_string_length(json_object_get(model, texts[i])))
            return refuse(s, texts[i], json_string_value(json_object_get(model, texts[i])), "none");
    if (json_number_value(json_object_get(model, "dropout")) > 0)
        return refuse(s, "model.dropout", "a chance", "none");
    v->whole_pieces = flag_of(model, "ignore_merges", false) ? VOCAB_FLAG_YES : VOCAB_FLAG_NO;
    v->kind = flag_of(model, "byte_fallback", false) ? VOCAB_KIND_SPM : VOCAB_KIND_BPE;
    v->unknown = find_token(v, json_string_value(json_object_get(model, "unk_token")));
    if (v->unknown != VOCAB_NO_TOKEN)
        v->types[v->unknown] = VOCAB_TYPE_UNKNOWN;
    return 0;
}

/* Calls `each` for a part, or for the parts of a Sequence, whose list is under `list`. */
static int walk_sequence(const struct source *s, const json_t *part, const char *list,
                         int (*each)(const struct source *, const json_t *, void *), void *arg)
{
    if (!part || json_is_null(part))
        return 0;
    if (strcmp(type_of(part), "Sequence"))
        return each(s, part, arg);
    size_t i;
    json_t *inner;
    json_array_foreach(json_object_get(part, list), i, inner)
    {
        int rc = each(s, inner, arg);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* NFC; or Llama 2's "a space first" and "U+2581 for spaces". */
static int read_normalizer(const struct source *s, const json_t *part, void *arg)
{
    (void)arg;
    struct vocab *v = s->v;
    const char *type = type_of(part);
    if (!strcmp(type, "NFC") && v->kind == VOCAB_KIND_BPE) {
        v->nfc = VOCAB_FLAG_YES;
        return 0;
    }
    const char *prepend = json_string_value(json_object_get(part, "prepend"));
    if (!strcmp(type, "Prepend") && v->kind == VOCAB_KIND_SPM && prepend && !strcmp(prepend, META)) {
        v->add_space_prefix = VOCAB_FLAG_YES;
        return 0;
    }
    const char *from = json_string_value(json_object_get(json_object_get(part, "pattern"), "String"));
    const char *to = json_string_value(json_object_get(part, "content"));
    if (!strcmp(type, "Replace") && v->kind == VOCAB_KIND_SPM && from && to && !strcmp(from, " ") &&
        !strcmp(to, META))
        return 0;
    return refuse(s, "normalizer", type, "NFC, or Prepend and Replace with U+2581");
}

struct parts {
    char text[8192];
    size_t bytes;
};

/* Line breaks stand in files as such or as escapes of the expression; here always as escapes. */
static int add_part(const struct source *s, struct parts *parts, const char *name, const char *more)
{
    if (strlen(name) + 2 * strlen(more) + 2 > sizeof parts->text - parts->bytes)
        return refuse(s, "pre_tokenizer", "expressions of more than 4 KB", "known ones");
    char *at = parts->text + parts->bytes;
    at = stpcpy(at, name);
    for (; *more; more++) {
        bool escape = *more == '\r' || *more == '\n';
        if (escape)
            *at++ = '\\';
        *at++ = escape ? (*more == '\r' ? 'r' : 'n') : *more;
    }
    *at++ = '\n';
    parts->bytes = (size_t)(at - parts->text);
    return 0;
}

/* SentencePiece's spaces as a pre-tokenizer, as newer files have them; only without cutting at spaces. */
static int read_metaspace(const struct source *s, const json_t *part)
{
    struct vocab *v = s->v;
    const char *replacement = json_string_value(json_object_get(part, "replacement"));
    const char *scheme = json_string_value(json_object_get(part, "prepend_scheme"));
    if (!scheme)
        scheme = flag_of(part, "add_prefix_space", true) ? "always" : "never";
    if (v->kind != VOCAB_KIND_SPM || flag_of(part, "split", true) || !replacement ||
        strcmp(replacement, META))
        return refuse(s, "pre_tokenizer", "Metaspace of another kind", "byte_fallback, split false, U+2581");
    v->add_space_prefix = strcmp(scheme, "never") ? VOCAB_FLAG_YES : VOCAB_FLAG_NO;
    v->space_first = !strcmp(scheme, "first");
    return 0;
}

static int read_pre_tokenizer(const struct source *s, const json_t *part, void *arg)
{
    const char *type = type_of(part);
    if (!strcmp(type, "Metaspace"))
        return read_metaspace(s, part);
    if (!strcmp(type, "Digits") && flag_of(part, "individual_digits", false))
        return add_part(s, arg, "Digits", "");
    if (!strcmp(type, "ByteLevel")) {
        if (flag_of(part, "add_prefix_space", true))
            return refuse(s, "pre_tokenizer", "ByteLevel with add_prefix_space", "it without");
        return add_part(s, arg, flag_of(part, "use_regex", true) ? "ByteLevel" : "Bytes", "");
    }
    const char *regex = json_string_value(json_object_get(json_object_get(part, "pattern"), "Regex"));
    const char *behavior = json_string_value(json_object_get(part, "behavior"));
    if (!strcmp(type, "Split") && regex && behavior && !strcmp(behavior, "Isolated") &&
        !flag_of(part, "invert", false))
        return add_part(s, arg, "Split ", regex);
    return refuse(s, "pre_tokenizer", type, "Split (Isolated, by Regex), Digits, ByteLevel or Metaspace");
}

static int read_pre(const struct source *s)
{
    struct vocab *v = s->v;
    struct parts *parts = mem_alloc(1, sizeof *parts);
    int rc =
        walk_sequence(s, json_object_get(s->json.rest, "normalizer"), "normalizers", read_normalizer, NULL);
    if (!rc)
        rc = walk_sequence(s, json_object_get(s->json.rest, "pre_tokenizer"), "pretokenizers",
                           read_pre_tokenizer, parts);
    if (!rc && v->kind == VOCAB_KIND_SPM && parts->bytes)
        rc = refuse(s, "pre_tokenizer", parts->text, "none, or Metaspace, with byte_fallback");
    if (!rc && v->kind == VOCAB_KIND_BPE) {
        const char *name = vocab_pre_name(parts->text);
        if (name)
            v->pre = name_of(name);
        else
            rc = refuse(s, "pre_tokenizer", parts->bytes ? parts->text : "none",
                        "gpt-2's, smollm's, llama-bpe's, qwen2's, deepseek-llm's or deepseek-v3's");
    }
    for (char *c = s->err ? s->err->text : NULL; rc < 0 && c && *c; c++)
        if (*c == '\n')
            *c = ' '; /* errors are one line */
    mem_free(&parts);
    return rc;
}

/* A template that puts a special token before the text, and nothing behind it. */
static int read_post_processor(const struct source *s, const json_t *part, void *arg)
{
    (void)arg;
    const char *type = type_of(part);
    if (!strcmp(type, "ByteLevel"))
        return 0;
    if (strcmp(type, "TemplateProcessing"))
        return refuse(s, "post_processor", type, "ByteLevel or TemplateProcessing");
    size_t i;
    json_t *item;
    bool text_seen = false;
    json_array_foreach(json_object_get(part, "single"), i, item)
    {
        const json_t *special = json_object_get(item, "SpecialToken");
        if (!special) {
            text_seen = true;
            continue;
        }
        const char *id = json_string_value(json_object_get(special, "id"));
        if (text_seen || s->v->add_bos == VOCAB_FLAG_YES)
            return refuse(s, "post_processor", id ? id : "a token", "one token, before the text");
        s->v->bos = find_token(s->v, id);
        if (s->v->bos == VOCAB_NO_TOKEN)
            return err_set(s->err, -EBADMSG,
                           "%.200s: post_processor: found token %.60s, expected it in the "
                           "vocabulary",
                           s->path, id ? id : "without id");
        s->v->add_bos = VOCAB_FLAG_YES;
    }
    return 0;
}

/* Names of unused places, as GGUF's converters write them. */
static void name_unused(struct vocab *v)
{
    for (uint32_t i = 0; i < v->count; i++) {
        char text[24];
        if (v->types[i] != VOCAB_TYPE_UNUSED)
            continue;
        int bytes = snprintf(text, sizeof text, "[PAD%" PRIu32 "]", i);
        v->tokens[i] = vocab_keep(v, text, (size_t)bytes);
    }
}

static int fill(struct source *s, struct name text, uint32_t vocab_size)
{
    struct vocab *v = s->v;
    struct err inner = {0};
    int rc = tokenizer_json_read(&s->json, text, vocab_size ? vocab_size : VOCAB_TOKENS_MAX, v, &inner);
    if (rc < 0)
        return err_set(s->err, rc, "%.160s: %s", s->path, inner.text);
    if (!json_is_object(s->json.rest))
        return err_set(s->err, -EBADMSG, "%.200s: found %s, expected an object", s->path,
                       json_kind(s->json.rest));
    if ((rc = place_tokens(s, vocab_size)) < 0 || (rc = read_model(s)) < 0 || (rc = read_pre(s)) < 0)
        return rc;
    v->merges = s->json.merges;
    v->merge_count = s->json.merge_count;
    s->json.merges = NULL;
    rc = walk_sequence(s, json_object_get(s->json.rest, "post_processor"), "processors", read_post_processor,
                       NULL);
    if (rc < 0)
        return rc;
    name_unused(v);
    vocab_settle_marks(v);
    return 0;
}

int vocab_from_json(struct name text, const char *path, uint32_t vocab_size, struct vocab **ret,
                    struct err *err)
{
    struct vocab *v = mem_alloc(1, sizeof *v);
    struct source s = {.path = path, .v = v, .err = err};
    v->bos = v->eos = v->eot = v->eom = v->unknown = VOCAB_NO_TOKEN;
    v->nfc = v->add_bos = v->add_space_prefix = VOCAB_FLAG_NO;
    int rc = fill(&s, text, vocab_size);
    tokenizer_json_free(&s.json);
    if (rc < 0)
        vocab_free(&v);
    *ret = v;
    return rc;
}

/* A token's text in tokenizer_config.json: a string, or an object with content. */
static const char *mark_text(const json_t *root, const char *key)
{
    const json_t *value = json_object_get(root, key);
    return json_string_value(json_is_object(value) ? json_object_get(value, "content") : value);
}

/* A template, or a list of named ones of which "default" counts. */
static const char *template_text(const json_t *root)
{
    const json_t *value = json_object_get(root, "chat_template");
    size_t i;
    json_t *item;
    json_array_foreach(value, i, item)
    {
        const char *name = json_string_value(json_object_get(item, "name"));
        if (name && !strcmp(name, "default"))
            return json_string_value(json_object_get(item, "template"));
    }
    return json_string_value(value);
}

static int read_tokenizer_config(const char *folder, struct vocab *v, struct err *err)
{
    struct json_doc d;
    int rc = json_doc_open(&d, folder, "tokenizer_config.json", err);
    if (!rc) {
        const char *text = template_text(d.root);
        uint32_t bos = find_token(v, mark_text(d.root, "bos_token"));
        if (text)
            v->chat_template = vocab_keep(v, text, strlen(text));
        if (bos != VOCAB_NO_TOKEN)
            v->bos = bos;
        v->eos = find_token(v, mark_text(d.root, "eos_token"));
        const json_t *add = json_object_get(d.root, "add_bos_token");
        if (json_is_boolean(add))
            v->add_bos = json_is_true(add) ? VOCAB_FLAG_YES : VOCAB_FLAG_NO;
    }
    json_doc_free(&d);
    return json_optional(rc);
}

static int read_template_file(const char *folder, struct vocab *v, struct err *err)
{
    struct mapping m;
    size_t room = strlen(folder) + 32;
    char *path = mem_alloc(room, 1);
    snprintf(path, room, "%s/chat_template.jinja", folder);
    int rc = mapping_open(&m, path, err);
    if (!rc && m.bytes > JSON_FILE_MAX)
        rc = err_set(err, -EBADMSG, "%.200s: size: found %" PRIu64 " bytes, expected at most %u", path,
                     m.bytes, JSON_FILE_MAX);
    else if (!rc && m.bytes)
        v->chat_template = vocab_keep(v, (const char *)m.data, m.bytes);
    mapping_close(&m);
    mem_free(&path);
    return json_optional(rc);
}

static void add_end(struct vocab *v, const json_t *id)
{
    json_int_t number;
    if (!json_whole(id, &number) || number < 0 || number >= (json_int_t)v->count ||
        v->end_count == VOCAB_ENDS_MAX)
        return;
    v->ends[v->end_count++] = (uint32_t)number;
    if (v->eos == VOCAB_NO_TOKEN)
        v->eos = (uint32_t)number;
}

/* eos_token_id, a number or a list, in config.json and generation_config.json alike. */
static void add_ends(struct vocab *v, const json_t *root)
{
    const json_t *ends = json_object_get(root, "eos_token_id");
    size_t i;
    json_t *id;
    add_end(v, ends);
    json_array_foreach(ends, i, id) add_end(v, id);
    json_int_t bos;
    if (v->bos == VOCAB_NO_TOKEN && json_whole(json_object_get(root, "bos_token_id"), &bos) && bos >= 0 &&
        bos < (json_int_t)v->count)
        v->bos = (uint32_t)bos;
}

static int read_beside(const char *folder, const struct json_doc *config, struct vocab *v, struct err *err)
{
    struct json_doc generation;
    int rc;
    if ((rc = read_tokenizer_config(folder, v, err)) < 0 || (rc = read_template_file(folder, v, err)) < 0)
        return rc;
    rc = json_optional(json_doc_open(&generation, folder, "generation_config.json", err));
    if (!rc) {
        add_ends(v, generation.root);
        add_ends(v, config->root);
    }
    json_doc_free(&generation);
    return rc;
}

int vocab_from_folder(const char *folder, const struct json_doc *config, uint32_t vocab_size,
                      struct vocab **ret, struct err *err)
{
    struct mapping m;
    size_t room = strlen(folder) + 32;
    char *path = mem_alloc(room, 1);
    *ret = NULL;
    snprintf(path, room, "%s/tokenizer.json", folder);
    int rc = mapping_open(&m, path, err);
    if (rc == 0 && m.bytes > TOKENIZER_JSON_MAX)
        rc = err_set(err, -EBADMSG, "%.200s: size: found %" PRIu64 " bytes, expected at most %u", path,
                     m.bytes, TOKENIZER_JSON_MAX);
    else if (rc == 0)
        rc = vocab_from_json((struct name){m.data ? (const char *)m.data : "", m.bytes}, path, vocab_size,
                             ret, err);
    mapping_close(&m);
    mem_free(&path);
    if (rc == -ENOENT)
        return 0;
    if (!rc)
        rc = read_beside(folder, config, *ret, err);
    if (rc < 0)
        vocab_free(ret);
    return rc;
}
