/* Pre-tokenizers on PCRE2. The compiled expressions are read only; each walk has its own match data.
 *
 * The expressions are compiled anchored, because asking for it at match time leaves the JIT, and matched
 * without UTF checks: the caller has validated the text once. An expression that stands alone covers any
 * text: some alternative matches at every character. Of several, each cuts the pieces that the one before
 * made, into its matches and what lies between them; it sees no more than its piece. Differences to the
 * tokenizers' own expressions: - \s is spelled as Unicode's White_Space, since PCRE2 counts U+180E as well; -
 * "smollm" is published as two passes (each digit alone, then GPT-2's expression on what lies between). One
 * pass gives the same pieces when a digit also counts as the end of white space. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "model/pretok.h"

#include <errno.h>
#include <pcre2.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "model/pretok_published.h"

#define W_SHORT   "\\t-\\r\\x20\\x85\\xa0\\x{1680}"
#define W         W_SHORT "\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define SPACE     "[" W "]"
#define SPACES    SPACE "+(?![^" W "])|" SPACE "+"
#define CUT_SHORT "'s|'t|'re|'ve|'m|'ll|'d"

static const char gpt2[] = CUT_SHORT "| ?\\p{L}+| ?\\p{N}+| ?[^" W "\\p{L}\\p{N}]+|" SPACES;
static const char smollm[] =
    CUT_SHORT "| ?\\p{L}+|\\p{N}| ?[^" W "\\p{L}\\p{N}]+|" SPACE "+(?![^" W "\\p{N}])|" SPACE "+";

#define AFTER_NUMBER  "| ?[^" W "\\p{L}\\p{N}]+[\\r\\n]*|" SPACE "*[\\r\\n]+|" SPACES
#define BEFORE_NUMBER "(?i:" CUT_SHORT ")|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
static const char llama3[] = BEFORE_NUMBER "\\p{N}{1,3}" AFTER_NUMBER;
static const char qwen2[] = BEFORE_NUMBER "\\p{N}" AFTER_NUMBER;

/* DeepSeek's two, each a list of passes. */
#define FIRST SPACE "?["
#define V3_WORDS \
    "[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*|" SPACE "*[\\r\\n]+|" SPACES
#define V3_SYMBOLS "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|"
static const char v3_words[] = V3_SYMBOLS V3_WORDS;

static const struct known {
    const char *pre, *passes[PRETOK_PASSES_MAX];
    struct pretok_traits traits;
} knowns[] = {
    {"gpt-2", {gpt2}, {.name = "gpt-2"}},
    {"smollm", {smollm}, {.name = "smollm"}},
    {"llama-bpe", {llama3}, {.name = "llama-bpe", .whole_pieces = true, .add_bos = true}},
    {"llama3", {llama3}, {.name = "llama-bpe", .whole_pieces = true, .add_bos = true}},
    {"llama-v3", {llama3}, {.name = "llama-bpe", .whole_pieces = true, .add_bos = true}},
    {"qwen2", {qwen2}, {.name = "qwen2", .nfc = true}},
    {"deepseek-r1-qwen", {qwen2}, {.name = "qwen2", .nfc = true}},
    {"deepseek-llm",
     {"[\\r\\n]", FIRST PUBLISHED_CASED "]+", FIRST PUBLISHED_MARKS "]+", SPACE "+\\z",
      "[" PUBLISHED_ASIAN "]+", "\\p{N}"},
     {.name = "deepseek-llm"}},
    {"deepseek-v3", {"\\p{N}{1,3}", "[" PUBLISHED_ASIAN3 "]+", v3_words}, {.name = "deepseek-v3"}},
};

struct pretok {
    const struct known *known;
    unsigned passes;
    pcre2_code *codes[PRETOK_PASSES_MAX];
    bool jit;
};

static const struct known *find_known(struct name pre)
{
    for (unsigned i = 0; i < sizeof knowns / sizeof *knowns; i++)
        if (name_is(pre, knowns[i].pre))
            return &knowns[i];
    return NULL;
}

static pcre2_code *compile(const char *expression, uint32_t anchored, bool *jit)
{
    int number;
    PCRE2_SIZE offset;
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED,
                                     PCRE2_UTF | PCRE2_UCP | anchored, &number, &offset, NULL);
    CHECK(code != NULL); /* the expressions are constants of this file */
    *jit &= pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0;
    return code;
}

int pretok_create(struct name pre, struct pretok **ret, struct err *err)
{
    const struct known *known = find_known(pre);
    if (!known)
        return err_set(err, -ENOTSUP,
                       "tokenizer.ggml.pre: found \"%.*s\", expected gpt-2, smollm, llama-bpe, qwen2, "
                       "deepseek-llm or deepseek-v3",
                       (int)(pre.bytes < 60 ? pre.bytes : 60), pre.text);
    struct pretok *p = mem_alloc(1, sizeof *p);
    p->known = known;
    p->jit = true;
    while (p->passes < PRETOK_PASSES_MAX && known->passes[p->passes])
        p->passes++;
    for (unsigned i = 0; i < p->passes; i++)
        p->codes[i] = compile(known->passes[i], p->passes == 1 ? PCRE2_ANCHORED : 0, &p->jit);
    *ret = p;
    return 0;
}

void pretok_free(struct pretok **pretok)
{
    if (!*pretok)
        return;
    for (unsigned i = 0; i < (*pretok)->passes; i++)
        pcre2_code_free((*pretok)->codes[i]);
    mem_free(pretok);
}

const struct pretok_traits *pretok_traits(const struct pretok *pretok)
{
    return &pretok->known->traits;
}

const struct pretok_traits *pretok_traits_of(struct name pre)
{
    const struct known *known = find_known(pre);
    return known ? &known->traits : NULL;
}

void pretok_begin(struct pretok_walk *walk, const struct pretok *pretok, const char *text, size_t bytes)
{
    memset(walk, 0, sizeof *walk);
    walk->pretok = pretok;
    walk->text = text;
    walk->bytes = bytes;
    walk->match = pcre2_match_data_create(1, NULL);
    CHECK(walk->match != NULL);
}

/* Matches pass `pass` in text [begin, end) from `at` on. 1 with the match, 0: none, -ELOOP. */
static int match(struct pretok_walk *walk, unsigned pass, struct name text, size_t at, size_t ret[2])
{
    const struct pretok *p = walk->pretok;
    PCRE2_SPTR subject = (PCRE2_SPTR)text.text;
    int rc =
        p->jit ? pcre2_jit_match(p->codes[pass], subject, text.bytes, at, 0, walk->match, NULL)
               : pcre2_match(p->codes[pass], subject, text.bytes, at, PCRE2_NO_UTF_CHECK, walk->match, NULL);
    if (rc < 0)
        return rc == PCRE2_ERROR_NOMATCH ? 0 : -ELOOP;
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(walk->match);
    CHECK(found[1] > at && found[1] <= text.bytes && found[0] < found[1]);
    ret[0] = found[0];
    ret[1] = found[1];
    return 1;
}

static int next_covering(struct pretok_walk *walk, struct name *ret)
{
    size_t found[2];
    if (walk->at == walk->bytes)
        return 0;
    int rc = match(walk, 0, (struct name){walk->text, walk->bytes}, walk->at, found);
    if (rc <= 0)
        return -ELOOP;
    *ret = (struct name){walk->text + walk->at, found[1] - walk->at};
    walk->at = found[1];
    return 1;
}

/* The next piece of one pass within the piece that it was given: text up to a match, or the match. */
static int next_of_pass(struct pretok_walk *walk, unsigned pass, struct name *ret)
{
    size_t at = walk->passes[pass].at, begin = walk->passes[pass].begin, end = walk->passes[pass].end,
           found[2];
    if (at == end)
        return 0;
    if (walk->passes[pass].match_end <= at) {
        int rc = match(walk, pass, (struct name){walk->text + begin, end - begin}, at - begin, found);
        if (rc < 0)
            return rc;
        walk->passes[pass].match_begin = rc ? begin + found[0] : end;
        walk->passes[pass].match_end = rc ? begin + found[1] : end;
    }
    bool inside = walk->passes[pass].match_begin <= at;
    walk->passes[pass].at = inside ? walk->passes[pass].match_end : walk->passes[pass].match_begin;
    *ret = (struct name){walk->text + at, walk->passes[pass].at - at};
    return 1;
}

int pretok_next(struct pretok_walk *walk, struct name *ret)
{
    unsigned passes = walk->pretok->passes, pass = passes - 1;
    if (passes == 1)
        return next_covering(walk, ret);
    if (walk->at == 0) { /* the first pass is given the whole text */
        walk->passes[0].end = walk->bytes;
        walk->at = walk->bytes;
    }
    for (;;) {
        struct name piece;
        int rc = next_of_pass(walk, pass, &piece);
        if (rc < 0 || (rc == 0 && pass == 0))
            return rc;
        if (rc == 0) {
            pass--;
            continue;
        }
        if (++pass == passes) {
            *ret = piece;
            return 1;
        }
        size_t begin = (size_t)(piece.text - walk->text);
        walk->passes[pass].begin = walk->passes[pass].at = begin;
        walk->passes[pass].end = begin + piece.bytes;
        walk->passes[pass].match_begin = walk->passes[pass].match_end = begin;
    }
}

void pretok_end(struct pretok_walk *walk)
{
    pcre2_match_data_free(walk->match);
    walk->match = NULL;
}
