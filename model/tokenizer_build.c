/* Builds tokenizers from vocabularies: raw bytes of each token, the merge table, the marks. One thread; the
 * tokenizer is the caller's. Whatever the vocabulary says comes from a file: nothing here may CHECK it. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "model/model.h"
#include "model/tokenizer_private.h"
#include "model/utf8.h"

bool tokenizer_type_is_control(uint8_t type)
{
    return type == VOCAB_TYPE_CONTROL || type == VOCAB_TYPE_UNKNOWN;
}

/* GPT-2's alphabet: bytes that print stand for themselves, the others follow from U+0100 on in their
 * order. */
static void make_alphabet(int16_t bytes[512])
{
    int shifted = 256;
    memset(bytes, 0xff, 512 * sizeof *bytes);
    for (int b = 0; b < 256; b++) {
        bool prints = (b >= '!' && b <= '~') || (b >= 0xa1 && b != 0xad);
        bytes[prints ? b : shifted++] = (int16_t)b;
    }
}

/* Undoes the alphabet. The bytes written (at most text.bytes), or -1 when a character is not of it. */
static ptrdiff_t decode_alphabet(const int16_t alphabet[512], struct name text, char *out)
{
    ptrdiff_t n = 0;
    for (size_t at = 0; at < text.bytes;) {
        int length = utf8_char(text.text + at, text.bytes - at);
        uint32_t code = length > 0 ? utf8_code(text.text + at, length) : 512;
        if (code >= 512 || alphabet[code] < 0)
            return -1;
        out[n++] = (char)alphabet[code];
        at += (size_t)length;
    }
    return n;
}

/* U+2581 to a space; <0xNN> of a byte token to that byte. Returns the bytes written. */
static ptrdiff_t decode_pieces(struct name text, uint8_t type, char *out)
{
    if (type == VOCAB_TYPE_BYTE && text.bytes == 6 && !memcmp(text.text, "<0x", 3)) {
        char digits[3] = {text.text[3], text.text[4], 0}, *end;
        unsigned long value = strtoul(digits, &end, 16);
        if (end == digits + 2) {
            *out = (char)value;
            return 1;
        }
    }
    ptrdiff_t n = 0;
    for (size_t at = 0; at < text.bytes;) {
        bool space = text.bytes - at >= 3 && !memcmp(text.text + at, "\xe2\x96\x81", 3);
        out[n++] = space ? ' ' : text.text[at];
        at += space ? 3 : 1;
    }
    return n;
}

static bool is_verbatim(uint8_t type)
{
    return tokenizer_type_is_control(type) || type == VOCAB_TYPE_USER_DEFINED;
}

static void build_raw(struct tokenizer *t)
{
    const struct vocab *v = t->vocab;
    size_t room = 1;
    for (uint32_t i = 0; i < v->count; i++)
        room += v->tokens[i].bytes; /* texts of one file: no overflow */
    int16_t alphabet[512];
    make_alphabet(alphabet);
    t->raw = mem_alloc(v->count, sizeof *t->raw);
    t->arena = mem_alloc(room, 1);
    char *at = t->arena;
    for (uint32_t i = 0; i < v->count; i++) {
        t->raw[i] = v->tokens[i];
        if (is_verbatim(v->types[i]))
            continue;
        ptrdiff_t n = v->kind == VOCAB_KIND_BPE ? decode_alphabet(alphabet, v->tokens[i], at)
                                                : decode_pieces(v->tokens[i], v->types[i], at);
        if (n < 0)
            continue; /* a token out of the alphabet stands for its own text */
        t->raw[i] = (struct name){at, (size_t)n};
        at += n;
    }
}

/* Control tokens stay out of the index, so that merging plain text can never give one. The same holds for
 * byte tokens of SentencePiece: the text "<0x41>" is not the byte. */
static void build_index(struct tokenizer *t)
{
    const struct vocab *v = t->vocab;
    names_init(&t->index, t->raw, v->count);
    memset(t->byte_ids, 0xff, sizeof t->byte_ids);
    for (uint32_t i = 0; i < v->count; i++) {
        if (tokenizer_type_is_control(v->types[i]) || t->raw[i].bytes == 0)
            continue;
        bool bytes = v->kind == VOCAB_KIND_BPE || v->types[i] == VOCAB_TYPE_BYTE;
        uint8_t first = (uint8_t)t->raw[i].text[0];
        if (bytes && t->raw[i].bytes == 1 && t->byte_ids[first] == TOKENIZER_NO_TOKEN)
            t->byte_ids[first] = i;
        if (v->types[i] != VOCAB_TYPE_BYTE)
            names_add(&t->index, i); /* of equal tokens the first counts */
    }
}

static int bad_merge(uint32_t rank, struct name merge, struct err *err)
{
    return err_set(err, -EBADMSG,
                   "merges: entry %" PRIu32 ": found \"%.*s\", expected two tokens that join to a third",
                   rank, (int)(merge.bytes < 80 ? merge.bytes : 80), merge.text);
}

/* Both halves of a merge as raw bytes behind each other in `joined`, which is as long as the merge. False
 * when it is not two texts. */
static bool split_merge(const struct tokenizer *t, const int16_t alphabet[512], struct name m, char *joined,
                        size_t ret_lengths[2])
{
    const char *space = m.bytes ? memchr(m.text, ' ', m.bytes) : NULL;
    if (!space)
        return false;
    size_t left = (size_t)(space - m.text);
    const struct name halves[2] = {{m.text, left}, {space + 1, m.bytes - left - 1}};
    for (int i = 0; i < 2; i++) {
        ptrdiff_t n = t->vocab->kind == VOCAB_KIND_BPE ? decode_alphabet(alphabet, halves[i], joined)
                                                       : decode_pieces(halves[i], VOCAB_TYPE_NORMAL, joined);
        if (n <= 0)
            return false;
        ret_lengths[i] = (size_t)n;
        joined += n;
    }
    return true;
}

static int build_merges_list(struct tokenizer *t, struct err *err)
{
    const struct vocab *v = t->vocab;
    size_t longest = 0;
    for (uint32_t i = 0; i < v->merge_count; i++)
        longest = v->merges[i].bytes > longest ? v->merges[i].bytes : longest;
    int16_t alphabet[512];
    make_alphabet(alphabet);
    char *joined = mem_alloc(longest + 1, 1);
    int rc = 0;
    for (uint32_t i = 0; i < v->merge_count && !rc; i++) {
        size_t n[2];
        if (!split_merge(t, alphabet, v->merges[i], joined, n)) {
            rc = bad_merge(i, v->merges[i], err);
            break;
        }
        struct merge merge = {.left = names_find(&t->index, (struct name){joined, n[0]}),
                              .right = names_find(&t->index, (struct name){joined + n[0], n[1]}),
                              .rank = i,
                              .into = names_find(&t->index, (struct name){joined, n[0] + n[1]})};
        if (merge.left == NAMES_NONE || merge.right == NAMES_NONE || merge.into == NAMES_NONE)
            rc = bad_merge(i, v->merges[i], err);
        else
            merges_add(&t->merges, merge);
    }
    mem_free(&joined);
    return rc;
}

struct scored {
    float score;
    uint32_t id;
};

static int by_score(const void *a, const void *b)
{
    const struct scored *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* SentencePiece joins any two neighbours whose text together is a token, the best score first. That is a
 * merge for each way to cut each token in two; tokens of equal score share a rank, so that the leftmost
 * wins. */
static void build_merges_spm(struct tokenizer *t)
{
    const struct vocab *v = t->vocab;
    struct scored *order = mem_alloc(v->count, sizeof *order);
    for (uint32_t i = 0; i < v->count; i++)
        order[i] = (struct scored){v->scores[i], i};
    qsort(order, v->count, sizeof *order, by_score);
    uint32_t rank = 0;
    for (uint32_t i = 0; i < v->count; i++) {
        uint32_t id = order[i].id;
        struct name text = t->raw[id];
        if (i && order[i].score != order[i - 1].score)
            rank = i;
        if (names_find(&t->index, text) != id)
            continue;
        for (size_t cut = 1; cut < text.bytes; cut++) {
            if (((uint8_t)text.text[cut] & 0xc0) == 0x80)
                continue; /* within a character */
            struct merge merge = {.left = names_find(&t->index, (struct name){text.text, cut}),
                                  .right =
                                      names_find(&t->index, (struct name){text.text + cut, text.bytes - cut}),
                                  .rank = rank,
                                  .into = id};
            if (merge.left != NAMES_NONE && merge.right != NAMES_NONE)
                merges_add(&t->merges, merge);
        }
    }
    mem_free(&order);
}

struct mark {
    struct name text;
    uint32_t id;
};

static int by_first_byte(const void *a, const void *b)
{
    const struct mark *x = a, *y = b;
    uint8_t p = (uint8_t)x->text.text[0], q = (uint8_t)y->text.text[0];
    if (p != q)
        return p < q ? -1 : 1;
    if (x->text.bytes != y->text.bytes)
        return x->text.bytes > y->text.bytes ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* A mark must be valid UTF-8, so that what lies between marks is, too: the rest relies on it. */
static int check_mark(const struct tokenizer *t, uint32_t id, struct err *err)
{
    if (utf8_valid(t->raw[id].text, t->raw[id].bytes) == t->raw[id].bytes)
        return 0;
    return err_set(err, -EBADMSG, "tokens: token %" PRIu32 ": found invalid UTF-8, expected text", id);
}

static int build_marks(struct tokenizer *t, bool control, struct err *err)
{
    const struct vocab *v = t->vocab;
    struct tokenizer_marks *marks = &t->marks[control];
    struct mark *list = mem_alloc(v->count, sizeof *list);
    uint32_t count = 0;
    int rc = 0;
    for (uint32_t i = 0; i < v->count && !rc; i++) {
        bool mark =
            v->types[i] == VOCAB_TYPE_USER_DEFINED || (control && tokenizer_type_is_control(v->types[i]));
        if (!mark || !t->raw[i].bytes)
            continue;
        rc = check_mark(t, i, err);
        list[count++] = (struct mark){t->raw[i], i};
    }
    qsort(list, count, sizeof *list, by_first_byte);
    marks->ids = mem_alloc(count, sizeof *marks->ids);
    for (uint32_t i = 0; i < count; i++) {
        marks->ids[i] = list[i].id;
        marks->starts[(uint8_t)list[i].text.text[0] + 1] = i + 1;
    }
    for (int b = 1; b <= 256; b++)
        if (marks->starts[b] < marks->starts[b - 1])
            marks->starts[b] = marks->starts[b - 1];
    mem_free(&list);
    return rc;
}

static void build_ends(struct tokenizer *t)
{
    static const char *const texts[] = {"<|im_end|>",
                                        "<|endoftext|>",
                                        "<|eot_id|>",
                                        "<|eom_id|>",
                                        "<|end_of_text|>",
                                        "<|end|>",
                                        "<end_of_turn>",
                                        "</s>",
                                        "<|end_of_sentence|>",
                                        "<\xef\xbd\x9c"
                                        "end\xe2\x96\x81of"
                                        "\xe2\x96\x81sentence\xef\xbd\x9c>",
                                        "<|return|>"};
    const struct vocab *v = t->vocab;
    const uint32_t named[] = {v->eos, v->eot, v->eom};
    t->is_eos = mem_alloc(v->count, sizeof *t->is_eos);
    for (unsigned i = 0; i < sizeof named / sizeof *named; i++)
        if (named[i] < v->count)
            t->is_eos[named[i]] = 1;
    for (uint32_t i = 0; i < v->end_count; i++)
        t->is_eos[v->ends[i]] = 1;
    for (unsigned i = 0; i < sizeof texts / sizeof *texts; i++) {
        uint32_t id = tokenizer_special(t, texts[i]);
        if (id != TOKENIZER_NO_TOKEN && tokenizer_type_is_control(v->types[id]))
            t->is_eos[id] = 1;
    }
}

static bool said(enum vocab_flag flag, bool otherwise)
{
    return flag == VOCAB_FLAG_UNSAID ? otherwise : flag == VOCAB_FLAG_YES;
}

static int build_bpe(struct tokenizer *t, struct err *err)
{
    int rc = pretok_create(t->vocab->pre, &t->pretok, err);
    if (rc < 0)
        return rc;
    const struct pretok_traits *traits = pretok_traits(t->pretok);
    t->nfc = said(t->vocab->nfc, traits->nfc);
    t->whole_pieces = said(t->vocab->whole_pieces, traits->whole_pieces);
    t->add_bos = traits->add_bos;
    return build_merges_list(t, err);
}

int tokenizer_create_from(const struct vocab *vocab, struct tokenizer **ret, struct err *err)
{
    struct tokenizer *t = mem_alloc(1, sizeof *t);
    int rc = 0;
    t->vocab = vocab;
    build_raw(t);
    build_index(t);
    merges_init(&t->merges);
    if (vocab->kind == VOCAB_KIND_BPE) {
        rc = build_bpe(t, err);
    } else {
        t->add_bos = true;
        t->add_space = vocab->add_space_prefix != VOCAB_FLAG_NO;
        if (!vocab->scores)
            rc = build_merges_list(t, err);
        else
            build_merges_spm(t);
    }
    if (!rc)
        rc = build_marks(t, false, err);
    if (!rc)
        rc = build_marks(t, true, err);
    if (rc < 0) {
        tokenizer_free(&t);
        return rc;
    }
    t->add_bos = said(vocab->add_bos, t->add_bos);
    if (vocab->bos == VOCAB_NO_TOKEN)
        t->add_bos = false;
    build_ends(t);
    *ret = t;
    return 0;
}

int tokenizer_create(const struct model *model, struct tokenizer **ret, struct err *err)
{
    const struct vocab *vocab = model_vocab(model);
    if (!vocab)
        return err_set(
            err, -ENOENT,
            "%s: tokenizer: found none, expected tokenizer.ggml.model in the file or tokenizer.json",
            model_path(model));
    int rc = tokenizer_create_from(vocab, ret, err);
    return rc < 0 ? err_prefix(err, rc, "%s", model_path(model)) : 0;
}

void tokenizer_free(struct tokenizer **tokenizer)
{
    struct tokenizer *t = *tokenizer;
    if (!t)
        return;
    names_free(&t->index);
    merges_free(&t->merges);
    pretok_free(&t->pretok);
    mem_free(&t->marks[0].ids);
    mem_free(&t->marks[1].ids);
    mem_free(&t->is_eos);
    mem_free(&t->raw);
    mem_free(&t->arena);
    mem_free(tokenizer);
}
