/* Encodes text. A tokenizer is read only here and any number of threads may use one; all scratch memory lives
 * in the call. Order of work: marks (control and user-defined tokens) are cut out, what lies between them is
 * normalised, cut into pieces and merged. It must never give a control token for plain text. */
#include "model/tokenizer.h"

#include <errno.h>
#include <string.h>
#include <utf8proc.h>

#include "base/alloc.h"
#include "model/text_class.h"
#include "model/tokenizer_private.h"
#include "model/utf8.h"

static void reserve(struct token_buf *buf, size_t more)
{
    if (buf->capacity - buf->count >= more)
        return;
    size_t capacity = buf->capacity ? buf->capacity : 64;
    while (capacity - buf->count < more)
        capacity *= 2; /* `more` is bounded by TOKENIZER_TEXT_MAX */
    buf->ids = mem_resize(buf->ids, capacity, sizeof *buf->ids);
    buf->capacity = capacity;
}

void token_buf_push(struct token_buf *buf, uint32_t id)
{
    reserve(buf, 1);
    buf->ids[buf->count++] = id;
}

void token_buf_free(struct token_buf *buf)
{
    mem_free(&buf->ids);
    buf->count = buf->capacity = 0;
}

static void merge_piece(const struct tokenizer *t, struct name piece, struct token_buf *out)
{
    if (t->whole_pieces) {
        uint32_t id = names_find(&t->index, piece);
        if (id != NAMES_NONE) {
            token_buf_push(out, id);
            return;
        }
    }
    reserve(out, piece.bytes);
    uint32_t *ids = out->ids + out->count, count = 0;
    for (size_t i = 0; i < piece.bytes; i++) {
        uint32_t id = t->byte_ids[(uint8_t)piece.text[i]];
        if (id != TOKENIZER_NO_TOKEN)
            ids[count++] = id;
    }
    out->count += merges_apply(&t->merges, ids, count);
}

/* What pieces of this text gave before: words come again, and looking one up takes a tenth of merging it. */
#define CACHE_SLOTS 4096
#define CACHE_BYTES 22
#define CACHE_IDS   9
#define CACHE_FROM  4096 /* bytes of text from which on filling it pays */

struct cached {
    uint8_t bytes, count; /* bytes 0: empty */
    char text[CACHE_BYTES];
    uint32_t ids[CACHE_IDS];
};

static uint32_t cache_slot(struct name piece)
{
    uint64_t head = 0, tail = 0;
    size_t n = piece.bytes < 8 ? piece.bytes : 8;
    memcpy(&head, piece.text, n);
    memcpy(&tail, piece.text + piece.bytes - n, n);
    uint64_t mixed =
        (head ^ (tail * UINT64_C(0x9e3779b97f4a7c15)) ^ piece.bytes) * UINT64_C(0xff51afd7ed558ccd);
    return (uint32_t)(mixed >> 40) % CACHE_SLOTS;
}

static void encode_piece(const struct tokenizer *t, struct cached *cache, struct name piece,
                         struct token_buf *out)
{
    if (!cache || piece.bytes > CACHE_BYTES) {
        merge_piece(t, piece, out);
        return;
    }
    struct cached *c = &cache[cache_slot(piece)];
    if (c->bytes == piece.bytes && !memcmp(c->text, piece.text, piece.bytes)) {
        reserve(out, c->count);
        memcpy(out->ids + out->count, c->ids, c->count * sizeof *c->ids);
        out->count += c->count;
        return;
    }
    size_t before = out->count;
    merge_piece(t, piece, out);
    size_t count = out->count - before;
    if (count == 0 || count > CACHE_IDS)
        return;
    c->bytes = (uint8_t)piece.bytes;
    c->count = (uint8_t)count;
    memcpy(c->text, piece.text, piece.bytes);
    memcpy(c->ids, out->ids + before, count * sizeof *c->ids);
}

static int encode_bpe(const struct tokenizer *t, struct name text, struct token_buf *out, struct err *err)
{
    struct pretok_walk walk;
    struct name piece;
    struct cached *cache = text.bytes >= CACHE_FROM ? mem_alloc(CACHE_SLOTS, sizeof *cache) : NULL;
    int rc;
    pretok_begin(&walk, t->pretok, text.text, text.bytes);
    while ((rc = pretok_next(&walk, &piece)) > 0)
        encode_piece(t, cache, piece, out);
    if (rc < 0)
        err_set(err, rc, "text: byte %zu: the pre-tokenizer reached a limit of its regular expression",
                walk.at);
    pretok_end(&walk);
    mem_free(&cache);
    return rc;
}

/* Characters below U+0300 are in NFC already; their first bytes are below 0xcc. */
static bool may_need_nfc(struct name text)
{
    for (size_t i = 0; i < text.bytes; i++)
        if ((uint8_t)text.text[i] >= 0xcc)
            return true;
    return false;
}

static int encode_nfc(const struct tokenizer *t, struct name text, struct token_buf *out, struct err *err)
{
    utf8proc_uint8_t *normal = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)text.text, (utf8proc_ssize_t)text.bytes,
                                      &normal, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (n < 0)
        return err_set(err, -ENOMEM, "text: NFC: %s", utf8proc_errmsg(n));
    struct name composed = {(const char *)normal, (size_t)n};
    int rc = encode_bpe(t, composed, out, err);
    mem_free(&normal);
    return rc;
}

/* Spaces stand as themselves in `raw`; U+2581 in the text means a space too, as SentencePiece has it.
 * `space_before`: one is put before the text. */
static void encode_spm(const struct tokenizer *t, struct name text, bool space_before, struct token_buf *out)
{
    char *spaced = mem_alloc(text.bytes + 1, 1);
    size_t bytes = 0;
    if (space_before)
        spaced[bytes++] = ' ';
    for (size_t at = 0; at < text.bytes;) {
        bool space = text.bytes - at >= 3 && !memcmp(text.text + at, "\xe2\x96\x81", 3);
        spaced[bytes++] = space ? ' ' : text.text[at];
        at += space ? 3 : 1;
    }
    reserve(out, bytes);
    uint32_t *ids = out->ids + out->count, count = 0;
    for (size_t at = 0; at < bytes;) {
        size_t length = (size_t)utf8_char(spaced + at, bytes - at);
        uint32_t id = names_find(&t->index, (struct name){spaced + at, length});
        if (id != NAMES_NONE) {
            ids[count++] = id;
        } else {
            bool lacks_bytes = t->byte_ids[(uint8_t)spaced[at]] == TOKENIZER_NO_TOKEN;
            for (size_t i = 0; i < length && !lacks_bytes; i++)
                ids[count++] = t->byte_ids[(uint8_t)spaced[at + i]];
            if (lacks_bytes && t->vocab->unknown != VOCAB_NO_TOKEN)
                ids[count++] = t->vocab->unknown;
        }
        at += length;
    }
    out->count += merges_apply(&t->merges, ids, count);
    mem_free(&spaced);
}

/* `first`: no mark stands before the text. */
static int encode_plain(const struct tokenizer *t, struct name text, bool first, struct token_buf *out,
                        struct err *err)
{
    if (text.bytes == 0)
        return 0;
    if (t->vocab->kind == VOCAB_KIND_SPM) {
        encode_spm(t, text, t->add_space && (first || !t->vocab->space_first), out);
        return 0;
    }
    return t->nfc && may_need_nfc(text) ? encode_nfc(t, text, out, err) : encode_bpe(t, text, out, err);
}

/* The longest mark at this place, or TOKENIZER_NO_TOKEN. */
static uint32_t find_mark(const struct tokenizer *t, const struct tokenizer_marks *marks, struct name text)
{
    uint8_t first = (uint8_t)text.text[0];
    for (uint32_t i = marks->starts[first]; i < marks->starts[first + 1]; i++) {
        struct name mark = t->raw[marks->ids[i]];
        if (mark.bytes <= text.bytes && !memcmp(mark.text, text.text, mark.bytes))
            return marks->ids[i];
    }
    return TOKENIZER_NO_TOKEN;
}

/* What a mark takes from the text: its own bytes, and white space beside them. */
struct cut {
    size_t start, end;
};

/* False where the mark must stand alone and does not. `begin`: white space before it was taken already. */
static bool cut_mark(const struct tokenizer *t, uint32_t id, struct name text, size_t begin, struct cut *cut)
{
    uint8_t how = t->vocab->cuts ? t->vocab->cuts[id] : 0;
    struct name before = {text.text, cut->start}, after = {text.text + cut->end, text.bytes - cut->end};
    if (how & VOCAB_CUT_SINGLE_WORD && (text_ends_with_word(before) || text_begins_with_word(after)))
        return false;
    if (how & VOCAB_CUT_LSTRIP) {
        size_t start = before.bytes - text_space_at_end(before);
        cut->start = start > begin ? start : begin;
    }
    if (how & VOCAB_CUT_RSTRIP)
        cut->end += text_space_at_begin(after);
    return true;
}

/* The search goes on behind a mark's own bytes, also where it took more or was none after all, as
 * `tokenizers` does. */
static int encode_marked(const struct tokenizer *t, const struct tokenizer_marks *marks, struct name text,
                         struct token_buf *out, struct err *err)
{
    size_t begin = 0, at = 0;
    int rc = 0;
    while (marks->starts[256] && at < text.bytes && !rc) {
        uint32_t id = find_mark(t, marks, (struct name){text.text + at, text.bytes - at});
        if (id == TOKENIZER_NO_TOKEN) {
            at++;
            continue;
        }
        struct cut cut = {at, at + t->raw[id].bytes};
        at = cut.end;
        if (!cut_mark(t, id, text, begin, &cut))
            continue;
        if (cut.start > begin)
            rc = encode_plain(t, (struct name){text.text + begin, cut.start - begin}, begin == 0, out, err);
        token_buf_push(out, id);
        begin = cut.end;
    }
    struct name rest = {text.text + begin, text.bytes - begin};
    return rc ? rc : encode_plain(t, rest, begin == 0, out, err);
}

int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool special,
                     struct token_buf *out, struct err *err)
{
    if (bytes > TOKENIZER_TEXT_MAX)
        return err_set(err, -E2BIG, "text: length: found %zu bytes, expected at most %u", bytes,
                       TOKENIZER_TEXT_MAX);
    size_t valid = utf8_valid(text, bytes);
    if (valid != bytes)
        return err_set(err, -EILSEQ, "text: byte %zu: found no valid UTF-8 character (%02x)", valid,
                       (unsigned)(uint8_t)text[valid]);
    size_t before = out->count;
    int rc = encode_marked(tokenizer, &tokenizer->marks[special], (struct name){text, bytes}, out, err);
    if (rc < 0)
        out->count = before;
    return rc;
}

/* The token of one byte; nothing where the vocabulary lacks it. */
static void encode_byte(const struct tokenizer *t, char byte, struct token_buf *out)
{
    uint32_t id = t->byte_ids[(uint8_t)byte];
    if (id != TOKENIZER_NO_TOKEN)
        token_buf_push(out, id);
}

/* A SentencePiece vocabulary reads U+2581 as a space, so here the bytes of that character stand for it. */
static void encode_spm_exact(const struct tokenizer *t, struct name text, struct token_buf *out)
{
    static const char mark[] = "\xe2\x96\x81";
    while (text.bytes) {
        const char *at = memmem(text.text, text.bytes, mark, 3);
        size_t plain = at ? (size_t)(at - text.text) : text.bytes, taken = at ? plain + 3 : plain;
        if (plain)
            encode_spm(t, (struct name){text.text, plain}, false, out);
        for (size_t i = plain; i < taken; i++)
            encode_byte(t, text.text[i], out);
        text = (struct name){text.text + taken, text.bytes - taken};
    }
}

/* Whether the tokens from `from` on stand for exactly these bytes; *ret_at: where they stop to. */
static bool stands_for(const struct tokenizer *t, const struct token_buf *ids, size_t from, struct name text,
                       size_t *ret_at)
{
    size_t at = 0;
    bool equal = true;
    for (size_t i = from; i < ids->count && equal; i++) {
        struct name raw = t->raw[ids->ids[i]];
        equal = raw.bytes <= text.bytes - at && !memcmp(raw.text, text.text + at, raw.bytes);
        at += equal ? raw.bytes : 0;
    }
    *ret_at = at;
    return equal && at == text.bytes;
}

int tokenizer_encode_bytes(const struct tokenizer *tokenizer, const char *data, size_t bytes,
                           struct token_buf *out, struct err *err)
{
    if (bytes > TOKENIZER_TEXT_MAX)
        return err_set(err, -E2BIG, "text: length: found %zu bytes, expected at most %u", bytes,
                       TOKENIZER_TEXT_MAX);
    size_t before = out->count, at = 0;
    int rc = 0;
    while (at < bytes && !rc) {
        struct name text = {data + at, utf8_valid(data + at, bytes - at)};
        if (text.bytes && tokenizer->vocab->kind == VOCAB_KIND_SPM)
            encode_spm_exact(tokenizer, text, out);
        else if (text.bytes)
            rc = encode_bpe(tokenizer, text, out, err);
        at += text.bytes;
        if (at < bytes && !rc)
            encode_byte(tokenizer, data[at++], out);
    }
    if (!rc && !stands_for(tokenizer, out, before, (struct name){data, bytes}, &at))
        rc = err_set(err, -ENOTSUP, "text: byte %zu: found %02x, which the vocabulary has no token for", at,
                     (unsigned)(uint8_t)data[at]);
    if (rc < 0)
        out->count = before;
    return rc;
}

int tokenizer_encode_prompt(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool special,
                            struct token_buf *out, struct err *err)
{
    if (tokenizer->add_bos)
        token_buf_push(out, tokenizer->vocab->bos);
    int rc = tokenizer_encode(tokenizer, text, bytes, special, out, err);
    if (rc < 0)
        out->count = 0;
    else if (tokenizer->add_bos && out->count > 1 && out->ids[1] == tokenizer->vocab->bos)
        memmove(out->ids, out->ids + 1, --out->count * sizeof *out->ids); /* the text spelled it itself */
    return rc;
}

uint32_t tokenizer_vocab(const struct tokenizer *tokenizer)
{
    return tokenizer->vocab->count;
}

bool tokenizer_add_bos(const struct tokenizer *tokenizer)
{
    return tokenizer->add_bos;
}

uint32_t tokenizer_bos(const struct tokenizer *tokenizer)
{
    return tokenizer->vocab->bos;
}

bool tokenizer_is_eos(const struct tokenizer *tokenizer, uint32_t id)
{
    return id < tokenizer->vocab->count && tokenizer->is_eos[id];
}

bool tokenizer_is_control(const struct tokenizer *tokenizer, uint32_t id)
{
    return id < tokenizer->vocab->count && tokenizer_type_is_control(tokenizer->vocab->types[id]);
}

uint32_t tokenizer_special(const struct tokenizer *tokenizer, const char *text)
{
    struct name name = name_of(text);
    if (name.bytes == 0)
        return TOKENIZER_NO_TOKEN;
    uint32_t id = find_mark(tokenizer, &tokenizer->marks[1], name);
    return id != TOKENIZER_NO_TOKEN && tokenizer->raw[id].bytes == name.bytes ? id : TOKENIZER_NO_TOKEN;
}

const char *tokenizer_bytes(const struct tokenizer *tokenizer, uint32_t id, size_t *ret_bytes)
{
    bool valid = id < tokenizer->vocab->count;
    *ret_bytes = valid ? tokenizer->raw[id].bytes : 0;
    return valid ? tokenizer->raw[id].text : NULL;
}

const char *tokenizer_chat_template(const struct tokenizer *tokenizer, size_t *ret_bytes)
{
    *ret_bytes = tokenizer->vocab->chat_template.bytes;
    return *ret_bytes ? tokenizer->vocab->chat_template.text : NULL;
}

struct hash128 tokenizer_fingerprint(const struct tokenizer *tokenizer)
{
    return vocab_fingerprint(tokenizer->vocab);
}
