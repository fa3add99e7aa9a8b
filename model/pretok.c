/* Pre-tokenizers on PCRE2. The compiled expressions are read only; each walk has its own match data.
 *
 * The expressions are compiled anchored, because asking for it at match time leaves the JIT, and matched
 * without UTF checks: the caller has validated the text once. Each covers any text: some alternative matches
 * at every character. Differences to the tokenizers' own expressions:
 * - \s is spelled as Unicode's White_Space, since PCRE2 counts U+180E as well;
 * - "smollm" is published as two passes (each digit alone, then GPT-2's expression on what lies between). One
 *   pass gives the same pieces when a digit also counts as the end of white space. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "model/pretok.h"

#include <errno.h>
#include <pcre2.h>

#include "base/alloc.h"
#include "base/check.h"

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

static const struct known {
    const char *pre, *expression;
    struct pretok_traits traits;
} knowns[] = {
    {"gpt-2", gpt2, {0}},
    {"smollm", smollm, {0}},
    {"llama-bpe", llama3, {.whole_pieces = true, .add_bos = true}},
    {"llama3", llama3, {.whole_pieces = true, .add_bos = true}},
    {"llama-v3", llama3, {.whole_pieces = true, .add_bos = true}},
    {"qwen2", qwen2, {.nfc = true}},
    {"deepseek-r1-qwen", qwen2, {.nfc = true}},
};

struct pretok {
    const struct known *known;
    pcre2_code *code;
    bool jit;
};

int pretok_create(struct name pre, struct pretok **ret, struct err *err)
{
    const struct known *known = NULL;
    for (unsigned i = 0; i < sizeof knowns / sizeof *knowns && !known; i++)
        if (name_is(pre, knowns[i].pre))
            known = &knowns[i];
    if (!known)
        return err_set(err, -ENOTSUP,
                       "tokenizer.ggml.pre: found \"%.*s\", expected gpt-2, smollm, llama-bpe or qwen2",
                       (int)(pre.bytes < 60 ? pre.bytes : 60), pre.text);
    int number;
    PCRE2_SIZE offset;
    struct pretok *p = mem_alloc(1, sizeof *p);
    p->known = known;
    p->code = pcre2_compile((PCRE2_SPTR)known->expression, PCRE2_ZERO_TERMINATED,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &number, &offset, NULL);
    CHECK(p->code != NULL); /* the expressions are constants of this file */
    p->jit = pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE) == 0;
    *ret = p;
    return 0;
}

void pretok_free(struct pretok **pretok)
{
    if (!*pretok)
        return;
    pcre2_code_free((*pretok)->code);
    mem_free(pretok);
}

const struct pretok_traits *pretok_traits(const struct pretok *pretok)
{
    return &pretok->known->traits;
}

void pretok_begin(struct pretok_walk *walk, const struct pretok *pretok, const char *text, size_t bytes)
{
    *walk = (struct pretok_walk){.pretok = pretok, .text = text, .bytes = bytes};
    walk->match = pcre2_match_data_create(1, NULL);
    CHECK(walk->match != NULL);
}

int pretok_next(struct pretok_walk *walk, struct name *ret)
{
    if (walk->at == walk->bytes)
        return 0;
    PCRE2_SPTR text = (PCRE2_SPTR)walk->text;
    const struct pretok *p = walk->pretok;
    int rc = p->jit
                 ? pcre2_jit_match(p->code, text, walk->bytes, walk->at, 0, walk->match, NULL)
                 : pcre2_match(p->code, text, walk->bytes, walk->at, PCRE2_NO_UTF_CHECK, walk->match, NULL);
    if (rc < 0)
        return -ELOOP;
    size_t end = pcre2_get_ovector_pointer(walk->match)[1];
    CHECK(end > walk->at && end <= walk->bytes);
    *ret = (struct name){walk->text + walk->at, end - walk->at};
    walk->at = end;
    return 1;
}

void pretok_end(struct pretok_walk *walk)
{
    pcre2_match_data_free(walk->match);
    walk->match = NULL;
}
