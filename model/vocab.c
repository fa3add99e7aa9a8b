/* Fills struct vocab from GGUF, and what all vocabularies share. The object belongs to the caller; one thread
 * builds it. */
#include "model/vocab.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "model/gguf.h"
#include "model/pretok.h"

#define BLOCK_BYTES (UINT32_C(1) << 18)

static int read_texts(const struct gguf *g, const char *key, struct name **ret, uint32_t *ret_count,
                      struct err *err)
{
    struct gguf_array array = {0};
    int rc = gguf_strings(g, key, &array, err);
    if (rc < 0)
        return rc;
    if (array.count == 0 || array.count > VOCAB_TOKENS_MAX)
        return err_set(err, -EBADMSG, "%s: %s: found %" PRIu64 " entries, expected 1 to %" PRIu32,
                       gguf_path(g), key, array.count, VOCAB_TOKENS_MAX);
    struct name *texts = mem_alloc(array.count, sizeof *texts);
    const uint8_t *cursor = array.data;
    for (uint64_t i = 0; i < array.count && !rc; i++) {
        texts[i] = gguf_array_next(&cursor);
        if (texts[i].bytes > VOCAB_TEXT_MAX)
            rc = err_set(err, -EBADMSG, "%s: %s: entry %" PRIu64 ": found %zu bytes, expected at most %d",
                         gguf_path(g), key, i, texts[i].bytes, VOCAB_TEXT_MAX);
    }
    *ret = texts; /* the caller's to free, also on failure */
    *ret_count = (uint32_t)array.count;
    return rc;
}

static int check_count(const struct gguf *g, const char *key, uint64_t found, uint32_t expected,
                       struct err *err)
{
    if (found != expected)
        return err_set(err, -EBADMSG, "%s: %s: found %" PRIu64 " entries, expected %" PRIu32 " (one a token)",
                       gguf_path(g), key, found, expected);
    return 0;
}

static int read_types(const struct gguf *g, struct vocab *v, struct err *err)
{
    const char *key = "tokenizer.ggml.token_type";
    struct gguf_array array = {0};
    v->types = mem_alloc(v->count, sizeof *v->types);
    memset(v->types, VOCAB_TYPE_NORMAL, v->count);
    if (!gguf_has(g, key))
        return 0;
    int rc = gguf_i32s(g, key, &array, err);
    if (rc < 0 || (rc = check_count(g, key, array.count, v->count, err)) < 0)
        return rc;
    for (uint32_t i = 0; i < v->count; i++) {
        int32_t type = gguf_array_i32(&array, i);
        if (type < VOCAB_TYPE_NORMAL || type > VOCAB_TYPE_BYTE)
            return err_set(err, -EBADMSG,
                           "%s: %s: found type %" PRId32 " for token %" PRIu32 ", expected 1 to 6",
                           gguf_path(g), key, type, i);
        v->types[i] = (uint8_t)type;
    }
    return 0;
}

static int read_scores(const struct gguf *g, struct vocab *v, struct err *err)
{
    const char *key = "tokenizer.ggml.scores";
    struct gguf_array array = {0};
    int rc = gguf_f32s(g, key, &array, err);
    if (rc < 0 || (rc = check_count(g, key, array.count, v->count, err)) < 0)
        return rc;
    v->scores = mem_alloc(v->count, sizeof *v->scores);
    for (uint32_t i = 0; i < v->count; i++) {
        v->scores[i] = gguf_array_f32(&array, i);
        if (v->scores[i] != v->scores[i])
            return err_set(err, -EBADMSG, "%s: %s: found NaN for token %" PRIu32 ", expected a number",
                           gguf_path(g), key, i);
    }
    return 0;
}

static int read_id(const struct gguf *g, const char *key, uint32_t count, uint32_t *ret, struct err *err)
{
    uint32_t id = 0;
    *ret = VOCAB_NO_TOKEN;
    if (!gguf_has(g, key))
        return 0;
    int rc = gguf_u32(g, key, &id, err);
    if (rc < 0)
        return rc;
    if (id >= count)
        return err_set(err, -EBADMSG, "%s: %s: found id %" PRIu32 ", expected less than %" PRIu32,
                       gguf_path(g), key, id, count);
    *ret = id;
    return 0;
}

static int read_flag(const struct gguf *g, const char *key, enum vocab_flag *ret, struct err *err)
{
    bool yes = false;
    *ret = VOCAB_FLAG_UNSAID;
    if (!gguf_has(g, key))
        return 0;
    int rc = gguf_bool(g, key, &yes, err);
    if (!rc)
        *ret = yes ? VOCAB_FLAG_YES : VOCAB_FLAG_NO;
    return rc;
}

static int read_marks(const struct gguf *g, struct vocab *v, struct err *err)
{
    int rc;
    if ((rc = read_id(g, "tokenizer.ggml.bos_token_id", v->count, &v->bos, err)) < 0 ||
        (rc = read_id(g, "tokenizer.ggml.eos_token_id", v->count, &v->eos, err)) < 0 ||
        (rc = read_id(g, "tokenizer.ggml.eot_token_id", v->count, &v->eot, err)) < 0 ||
        (rc = read_id(g, "tokenizer.ggml.eom_token_id", v->count, &v->eom, err)) < 0 ||
        (rc = read_id(g, "tokenizer.ggml.unknown_token_id", v->count, &v->unknown, err)) < 0 ||
        (rc = read_flag(g, "tokenizer.ggml.add_bos_token", &v->add_bos, err)) < 0 ||
        (rc = read_flag(g, "tokenizer.ggml.add_space_prefix", &v->add_space_prefix, err)) < 0)
        return rc;
    const char *template_key = "tokenizer.chat_template";
    return gguf_has(g, template_key) ? gguf_string(g, template_key, &v->chat_template, err) : 0;
}

static int read_kind(const struct gguf *g, struct vocab *v, struct err *err)
{
    struct name model = {0};
    int rc = gguf_string(g, "tokenizer.ggml.model", &model, err);
    if (rc < 0)
        return rc;
    if (name_is(model, "llama")) {
        v->kind = VOCAB_KIND_SPM;
        return read_scores(g, v, err);
    }
    if (!name_is(model, "gpt2"))
        return err_set(err, -ENOTSUP,
                       "%s: tokenizer.ggml.model: found \"%.*s\", expected \"gpt2\" or \"llama\"",
                       gguf_path(g), (int)(model.bytes < 60 ? model.bytes : 60), model.text);
    v->kind = VOCAB_KIND_BPE;
    if ((rc = gguf_string(g, "tokenizer.ggml.pre", &v->pre, err)) < 0)
        return rc;
    return read_texts(g, "tokenizer.ggml.merges", &v->merges, &v->merge_count, err);
}

int vocab_from_gguf(const struct gguf *gguf, struct vocab **ret, struct err *err)
{
    *ret = NULL;
    if (!gguf_has(gguf, "tokenizer.ggml.model") && !gguf_has(gguf, "tokenizer.ggml.tokens"))
        return 0;
    struct vocab *v = mem_alloc(1, sizeof *v);
    v->nfc = v->whole_pieces = VOCAB_FLAG_UNSAID;
    int rc = read_texts(gguf, "tokenizer.ggml.tokens", &v->tokens, &v->count, err);
    if (!rc)
        rc = read_types(gguf, v, err);
    if (!rc)
        rc = read_kind(gguf, v, err);
    if (!rc)
        rc = read_marks(gguf, v, err);
    if (!rc)
        vocab_settle_marks(v);
    if (rc < 0)
        vocab_free(&v);
    *ret = v;
    return gguf_required(rc, err);
}

struct vocab_block {
    struct vocab_block *next;
    size_t used, room;
    char text[];
};

struct name vocab_keep(struct vocab *vocab, const char *text, size_t bytes)
{
    struct vocab_block *b = vocab->blocks;
    if (!b || b->room - b->used < bytes) {
        size_t room = bytes > BLOCK_BYTES ? bytes : BLOCK_BYTES;
        b = mem_resize(NULL, 1, sizeof *b + room); /* not zeroed: many of these stay half empty */
        *b = (struct vocab_block){.next = vocab->blocks, .room = room};
        vocab->blocks = b;
    }
    char *to = b->text + b->used;
    if (bytes)
        memcpy(to, text, bytes);
    b->used += bytes;
    return (struct name){to, bytes};
}

void vocab_settle_marks(struct vocab *vocab)
{
    static const char *const marks[] = {
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<\xef\xbd\x9cUser\xef\xbd\x9c>",
        "<\xef\xbd\x9c"
        "Assistant\xef\xbd\x9c>",
        "<\xef\xbd\x9c"
        "begin\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
        "<\xef\xbd\x9c"
        "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
    };
    for (uint32_t i = 0; i < vocab->count; i++) {
        if (vocab->types[i] != VOCAB_TYPE_USER_DEFINED)
            continue;
        for (unsigned k = 0; k < sizeof marks / sizeof *marks; k++)
            if (name_is(vocab->tokens[i], marks[k]))
                vocab->types[i] = VOCAB_TYPE_CONTROL;
    }
}

void vocab_free(struct vocab **vocab)
{
    struct vocab *v = *vocab;
    if (!v)
        return;
    mem_free(&v->tokens);
    mem_free(&v->types);
    mem_free(&v->cuts);
    mem_free(&v->scores);
    mem_free(&v->merges);
    while (v->blocks) {
        struct vocab_block *next = v->blocks->next;
        mem_free(&v->blocks);
        v->blocks = next;
    }
    mem_free(vocab);
}

/* Lengths go in as well, or moving a byte from one text to the next would not show. */
static struct hash128 mix_text(struct hash128 h, struct name text)
{
    uint64_t bytes = text.bytes;
    h = hash_chain(h, &bytes, sizeof bytes);
    return hash_chain(h, text.text, text.bytes);
}

static uint32_t settled(enum vocab_flag said, bool otherwise)
{
    return said == VOCAB_FLAG_UNSAID ? otherwise : said == VOCAB_FLAG_YES;
}

struct hash128 vocab_fingerprint(const struct vocab *vocab)
{
    const struct vocab *v = vocab;
    const struct pretok_traits *traits = pretok_traits_of(v->pre);
    uint32_t head[] = {(uint32_t)v->kind,
                       v->merge_count,
                       settled(v->add_space_prefix, true),
                       v->space_first,
                       settled(v->nfc, traits && traits->nfc),
                       settled(v->whole_pieces, traits && traits->whole_pieces)};
    struct hash128 h = hash_bytes(0, head, sizeof head);
    h = mix_text(h, traits ? name_of(traits->name) : v->pre);
    for (uint32_t i = 0; i < v->count; i++) {
        uint32_t place[] = {i, v->types[i]};
        if (v->types[i] == VOCAB_TYPE_UNUSED)
            continue;
        h = hash_chain(h, place, sizeof place);
        h = mix_text(h, v->tokens[i]);
        if (v->scores)
            h = hash_chain(h, &v->scores[i], sizeof v->scores[i]);
        if (v->cuts && v->cuts[i])
            h = hash_chain(h, &v->cuts[i], sizeof v->cuts[i]);
    }
    for (uint32_t i = 0; i < v->merge_count; i++)
        h = mix_text(h, v->merges[i]);
    return h;
}
