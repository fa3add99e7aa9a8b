/* Fills struct vocab. The object belongs to the caller; one thread builds it. */
#include "model/vocab.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "model/gguf.h"

/* More than any real vocabulary; ids must leave room for marks. */
#define TOKENS_MAX     (UINT32_C(1) << 24)
#define TEXT_BYTES_MAX 8193 /* of a token or a merge; bounds what building a tokenizer costs */

static int read_texts(const struct gguf *g, const char *key, struct name **ret, uint32_t *ret_count,
                      struct err *err)
{
    struct gguf_array array = {0};
    int rc = gguf_strings(g, key, &array, err);
    if (rc < 0)
        return rc;
    if (array.count == 0 || array.count > TOKENS_MAX)
        return err_set(err, -EBADMSG, "%s: %s: found %" PRIu64 " entries, expected 1 to %" PRIu32,
                       gguf_path(g), key, array.count, TOKENS_MAX);
    struct name *texts = mem_alloc(array.count, sizeof *texts);
    const uint8_t *cursor = array.data;
    for (uint64_t i = 0; i < array.count && !rc; i++) {
        texts[i] = gguf_array_next(&cursor);
        if (texts[i].bytes > TEXT_BYTES_MAX)
            rc = err_set(err, -EBADMSG, "%s: %s: entry %" PRIu64 ": found %zu bytes, expected at most %d",
                         gguf_path(g), key, i, texts[i].bytes, TEXT_BYTES_MAX);
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
    int rc = read_texts(gguf, "tokenizer.ggml.tokens", &v->tokens, &v->count, err);
    if (!rc)
        rc = read_types(gguf, v, err);
    if (!rc)
        rc = read_kind(gguf, v, err);
    if (!rc)
        rc = read_marks(gguf, v, err);
    if (rc < 0)
        vocab_free(&v);
    *ret = v;
    return gguf_required(rc, err);
}

void vocab_free(struct vocab **vocab)
{
    struct vocab *v = *vocab;
    if (!v)
        return;
    mem_free(&v->tokens);
    mem_free(&v->types);
    mem_free(&v->scores);
    mem_free(&v->merges);
    mem_free(vocab);
}

/* Lengths go in as well, or moving a byte from one text to the next would not show. */
static struct hash128 mix_texts(struct hash128 h, const struct name *texts, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = texts[i].bytes;
        h = hash_chain(h, &bytes, sizeof bytes);
        h = hash_chain(h, texts[i].text, texts[i].bytes);
    }
    return h;
}

struct hash128 vocab_fingerprint(const struct vocab *vocab)
{
    uint32_t head[] = {(uint32_t)vocab->kind,
                       vocab->count,
                       vocab->merge_count,
                       vocab->bos,
                       vocab->eos,
                       (uint32_t)vocab->add_bos,
                       (uint32_t)vocab->add_space_prefix};
    struct hash128 h = hash_bytes(0, head, sizeof head);
    h = mix_texts(h, &vocab->pre, 1);
    h = mix_texts(h, vocab->tokens, vocab->count);
    h = hash_chain(h, vocab->types, vocab->count);
    if (vocab->scores)
        h = hash_chain(h, vocab->scores, vocab->count * sizeof *vocab->scores);
    return mix_texts(h, vocab->merges, vocab->merge_count);
}
