/* Reads tokenizer.json. The parser hands over events; those of model.vocab and model.merges (10 MB and more)
 * are taken as they come, the others are written out again as JSON and parsed into a tree of bounded size.
 * One thread. It must never allocate by more than a small multiple of what it has really read. */
#include "model/tokenizer_json.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <yajl/yajl_gen.h>

#include "base/alloc.h"
#include "model/json_file.h"

#define MERGES_MAX (UINT32_C(1) << 23)

enum state {
    STATE_REST,
    STATE_VOCAB_BEGIN,  /* the object must follow */
    STATE_VOCAB,        /* a token or the end */
    STATE_ID,           /* a token's number */
    STATE_MERGES_BEGIN, /* the array must follow */
    STATE_MERGES,       /* a merge or the end */
    STATE_LEFT,         /* of a merge written as a pair */
    STATE_RIGHT,
    STATE_PAIR_END
};

struct reader {
    struct tokenizer_json *out;
    struct vocab *keep;
    uint32_t vocab_size;
    enum state state;
    unsigned depth;
    bool in_model, in_type; /* below the top's "model"; at its "type" */
    bool has_vocab, has_merges;
    yajl_gen gen;
    char left[VOCAB_TEXT_MAX];
    size_t left_bytes;
    int code;
    struct err *err;
};

static int fail(struct reader *r, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Records the error and returns yajl's "stop". */
static int fail(struct reader *r, int code, const char *fmt, ...)
{
    char detail[320];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(detail, sizeof detail, fmt, ap);
    va_end(ap);
    r->code = err_set(r->err, code, "%s", detail);
    return 0;
}

static int unexpected(struct reader *r, const char *found)
{
    static const char *const expected[] = {
        "anything",
        "model.vocab: found %s, expected an object",
        "model.vocab: found %s, expected a token",
        "model.vocab: found %s, expected an id",
        "model.merges: found %s, expected an array",
        "model.merges: found %s, expected a string or a pair",
        "model.merges: found %s, expected a string of a pair",
        "model.merges: found %s, expected a string of a pair",
        "model.merges: found %s, expected two strings as a pair",
    };
    char text[128];
    const char *at = strstr(expected[r->state], "%s");
    snprintf(text, sizeof text, "%.*s%s%s", (int)(at - expected[r->state]), expected[r->state], found,
             at + 2);
    return fail(r, -EBADMSG, "%s", text);
}

/* What yajl_gen says of an event that was passed on to it. */
static int passed(struct reader *r, yajl_gen_status status)
{
    const unsigned char *text;
    size_t bytes;
    if (status != yajl_gen_status_ok)
        return fail(r, -EBADMSG, "nesting: found more than %d levels, expected fewer", YAJL_MAX_DEPTH);
    yajl_gen_get_buf(r->gen, &text, &bytes);
    if (bytes > JSON_FILE_MAX)
        return fail(r, -EBADMSG, "size: found more than %u bytes outside of vocab and merges, expected less",
                    JSON_FILE_MAX);
    return 1;
}

static int on_null(void *ctx)
{
    struct reader *r = ctx;
    return r->state == STATE_REST ? passed(r, yajl_gen_null(r->gen)) : unexpected(r, "null");
}

static int on_boolean(void *ctx, int value)
{
    struct reader *r = ctx;
    return r->state == STATE_REST ? passed(r, yajl_gen_bool(r->gen, value)) : unexpected(r, "a boolean");
}

static int on_number(void *ctx, const char *text, size_t bytes)
{
    struct reader *r = ctx;
    if (r->state == STATE_REST)
        return passed(r, yajl_gen_number(r->gen, text, bytes));
    if (r->state != STATE_ID)
        return unexpected(r, "a number");
    uint64_t id = 0;
    for (size_t i = 0; i < bytes; i++)
        id = text[i] >= '0' && text[i] <= '9' && id < UINT32_MAX ? id * 10 + (uint64_t)(text[i] - '0')
                                                                 : UINT64_MAX / 2;
    if (id >= r->vocab_size)
        return fail(r, -EBADMSG,
                    "model.vocab: found id %.*s, expected less than the %" PRIu32 " of vocab_size",
                    (int)(bytes < 30 ? bytes : 30), text, r->vocab_size);
    r->out->tokens[r->out->token_count - 1].id = (uint32_t)id;
    r->state = STATE_VOCAB;
    return 1;
}

static int add_token(struct reader *r, const char *text, size_t bytes)
{
    struct tokenizer_json *o = r->out;
    if (o->token_count == r->vocab_size)
        return fail(r, -EBADMSG, "model.vocab: found more tokens than the %" PRIu32 " of vocab_size",
                    r->vocab_size);
    if (o->token_count == o->token_room) {
        o->token_room = o->token_room ? o->token_room * 2 : 1024;
        o->tokens = mem_resize(o->tokens, o->token_room, sizeof *o->tokens);
    }
    if (bytes > VOCAB_TEXT_MAX)
        return fail(r, -EBADMSG, "model.vocab: found a token of %zu bytes, expected at most %d", bytes,
                    VOCAB_TEXT_MAX);
    o->tokens[o->token_count++] = (struct tokenizer_json_token){vocab_keep(r->keep, text, bytes), 0};
    r->state = STATE_ID;
    return 1;
}

static int add_merge(struct reader *r, struct name merge)
{
    struct tokenizer_json *o = r->out;
    if (o->merge_count == MERGES_MAX || merge.bytes > VOCAB_TEXT_MAX)
        return fail(r, -EBADMSG, "model.merges: found %s, expected less",
                    merge.bytes > VOCAB_TEXT_MAX ? "a merge of more than 8193 bytes" : "more than 8388608");
    if (o->merge_count == o->merge_room) {
        o->merge_room = o->merge_room ? o->merge_room * 2 : 1024;
        o->merges = mem_resize(o->merges, o->merge_room, sizeof *o->merges);
    }
    o->merges[o->merge_count++] = vocab_keep(r->keep, merge.text, merge.bytes);
    return 1;
}

/* Left and right in one buffer, as the string form has them. No token of the kinds read here has a space. */
static int add_half(struct reader *r, const char *text, size_t bytes)
{
    if (bytes == 0 || memchr(text, ' ', bytes) || bytes > sizeof r->left - 1 ||
        (r->state == STATE_RIGHT && bytes > sizeof r->left - r->left_bytes))
        return fail(r, -EBADMSG, "model.merges: entry %" PRIu32 ": found \"%.*s\", expected a token",
                    r->out->merge_count, (int)(bytes < 60 ? bytes : 60), text);
    if (r->state == STATE_LEFT) {
        memcpy(r->left, text, bytes);
        r->left[bytes] = ' ';
        r->left_bytes = bytes + 1;
        r->state = STATE_RIGHT;
        return 1;
    }
    memcpy(r->left + r->left_bytes, text, bytes);
    r->state = STATE_PAIR_END;
    return add_merge(r, (struct name){r->left, r->left_bytes + bytes});
}

static int on_string(void *ctx, const unsigned char *text, size_t bytes)
{
    struct reader *r = ctx;
    switch (r->state) {
    case STATE_REST:
        if (r->in_type && !name_is((struct name){(const char *)text, bytes}, "BPE"))
            return fail(r, -ENOTSUP, "model.type: found \"%.*s\", expected \"BPE\"",
                        (int)(bytes < 40 ? bytes : 40), text);
        r->in_type = false;
        return passed(r, yajl_gen_string(r->gen, text, bytes));
    case STATE_MERGES:
        return add_merge(r, (struct name){(const char *)text, bytes});
    case STATE_LEFT:
    case STATE_RIGHT:
        return add_half(r, (const char *)text, bytes);
    default:
        return unexpected(r, "a string");
    }
}

static int on_map_begin(void *ctx)
{
    struct reader *r = ctx;
    if (r->state == STATE_VOCAB_BEGIN) {
        r->state = STATE_VOCAB;
        return 1;
    }
    if (r->state != STATE_REST)
        return unexpected(r, "an object");
    r->depth++;
    return passed(r, yajl_gen_map_open(r->gen));
}

/* The large tables' places in the tree are taken by null. */
static int begin_table(struct reader *r, bool *seen, enum state state)
{
    if (*seen)
        return fail(r, -EBADMSG, "model: found vocab or merges twice, expected once");
    *seen = true;
    r->state = state;
    return passed(r, yajl_gen_null(r->gen));
}

static int on_map_key(void *ctx, const unsigned char *text, size_t bytes)
{
    struct reader *r = ctx;
    struct name key = {(const char *)text, bytes};
    if (r->state == STATE_VOCAB)
        return add_token(r, key.text, key.bytes);
    if (r->depth == 1)
        r->in_model = name_is(key, "model");
    r->in_type = r->in_model && r->depth == 2 && name_is(key, "type");
    if (!passed(r, yajl_gen_string(r->gen, text, bytes)))
        return 0;
    if (r->in_model && r->depth == 2 && name_is(key, "vocab"))
        return begin_table(r, &r->has_vocab, STATE_VOCAB_BEGIN);
    if (r->in_model && r->depth == 2 && name_is(key, "merges"))
        return begin_table(r, &r->has_merges, STATE_MERGES_BEGIN);
    return 1;
}

static int on_map_end(void *ctx)
{
    struct reader *r = ctx;
    if (r->state == STATE_VOCAB) {
        r->state = STATE_REST;
        return 1;
    }
    r->depth--;
    return passed(r, yajl_gen_map_close(r->gen));
}

static int on_array_begin(void *ctx)
{
    struct reader *r = ctx;
    if (r->state == STATE_MERGES_BEGIN || r->state == STATE_MERGES) {
        r->state = r->state == STATE_MERGES ? STATE_LEFT : STATE_MERGES;
        return 1;
    }
    if (r->state != STATE_REST)
        return unexpected(r, "an array");
    r->depth++;
    return passed(r, yajl_gen_array_open(r->gen));
}

static int on_array_end(void *ctx)
{
    struct reader *r = ctx;
    switch (r->state) {
    case STATE_REST:
        r->depth--;
        return passed(r, yajl_gen_array_close(r->gen));
    case STATE_MERGES:
        r->state = STATE_REST;
        return 1;
    case STATE_PAIR_END:
        r->state = STATE_MERGES;
        return 1;
    default:
        return unexpected(r, "the end of an array");
    }
}

static const yajl_callbacks callbacks = {.yajl_null = on_null,
                                         .yajl_boolean = on_boolean,
                                         .yajl_number = on_number,
                                         .yajl_string = on_string,
                                         .yajl_start_map = on_map_begin,
                                         .yajl_map_key = on_map_key,
                                         .yajl_end_map = on_map_end,
                                         .yajl_start_array = on_array_begin,
                                         .yajl_end_array = on_array_end};

static void parse(struct reader *r, struct name text)
{
    char why[JSON_WHY_BYTES];
    int rc = json_stream(&callbacks, r, text.text, text.bytes, why);
    if (rc == -ENOMEM)
        r->code = err_set(r->err, rc, "no memory for the JSON parser");
    else if (rc == -EBADMSG)
        r->code = err_set(r->err, rc, "found no valid JSON (%s), expected an object", why);
}

static int parse_rest(struct reader *r)
{
    const unsigned char *text;
    size_t bytes;
    json_error_t why;
    yajl_gen_get_buf(r->gen, &text, &bytes);
    r->out->rest = json_loadb((const char *)text, bytes, JSON_REJECT_DUPLICATES, &why);
    if (!r->out->rest)
        return err_set(r->err, -EBADMSG, "found JSON that is refused (%.100s), expected plain JSON",
                       why.text);
    if (!r->has_vocab || !r->has_merges)
        return err_set(r->err, -EBADMSG, "model.%s: found no such field, expected it",
                       r->has_vocab ? "merges" : "vocab");
    return 0;
}

int tokenizer_json_read(struct tokenizer_json *json, struct name text, uint32_t vocab_size,
                        struct vocab *keep, struct err *err)
{
    memset(json, 0, sizeof *json);
    struct reader *r = mem_alloc(1, sizeof *r);
    *r = (struct reader){.out = json, .keep = keep, .vocab_size = vocab_size, .err = err};
    r->gen = yajl_gen_alloc(NULL);
    if (r->gen)
        parse(r, text);
    else
        r->code = err_set(err, -ENOMEM, "no memory for the JSON writer");
    int rc = r->code ? r->code : parse_rest(r);
    if (r->gen)
        yajl_gen_free(r->gen);
    mem_free(&r);
    return rc;
}

void tokenizer_json_free(struct tokenizer_json *json)
{
    mem_free(&json->tokens);
    mem_free(&json->merges);
    json_decref(json->rest);
    json->rest = NULL;
}
