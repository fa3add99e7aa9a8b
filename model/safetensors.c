/* Reads safetensors. The struct owns the mapping and copies of the header's names. The JSON header comes as
 * events into a small state machine that knows the only shape allowed; nesting is bounded by it. Built by one
 * thread, then read only. It must never allocate by a number that the file only claims. */
#include "model/safetensors.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "model/json_file.h"
#include "model/mapping.h"
#include "model/safetensors_private.h"

static const struct {
    const char *name;
    unsigned bytes;
} types[SAFETENSORS_TYPES] = {
    [SAFETENSORS_BOOL] = {"BOOL", 1},       [SAFETENSORS_U8] = {"U8", 1},
    [SAFETENSORS_I8] = {"I8", 1},           [SAFETENSORS_F8_E4M3] = {"F8_E4M3", 1},
    [SAFETENSORS_F8_E5M2] = {"F8_E5M2", 1}, [SAFETENSORS_U16] = {"U16", 2},
    [SAFETENSORS_I16] = {"I16", 2},         [SAFETENSORS_F16] = {"F16", 2},
    [SAFETENSORS_BF16] = {"BF16", 2},       [SAFETENSORS_U32] = {"U32", 4},
    [SAFETENSORS_I32] = {"I32", 4},         [SAFETENSORS_F32] = {"F32", 4},
    [SAFETENSORS_U64] = {"U64", 8},         [SAFETENSORS_I64] = {"I64", 8},
    [SAFETENSORS_F64] = {"F64", 8},
};

struct safetensors {
    struct mapping file;
    uint32_t count, room;
    struct safetensors_tensor *tensors;
    struct name *names;
    struct names index;
    uint32_t pair_count, pair_room;
    struct name *keys, *values; /* of __metadata__, NUL-terminated */
    struct names key_index;
};

/* Where in the header the parser stands: the next event must fit this state. */
enum state {
    STATE_BEGIN,     /* { */
    STATE_NAME,      /* a tensor's name, "__metadata__", or } */
    STATE_METADATA,  /* { of __metadata__ */
    STATE_KEY,       /* a key of it, or } */
    STATE_VALUE,     /* its string */
    STATE_TENSOR,    /* { of a tensor */
    STATE_FIELD,     /* dtype, shape, data_offsets, or } */
    STATE_DTYPE,     /* a string */
    STATE_SHAPE,     /* [ */
    STATE_SHAPE_IN,  /* a number or ] */
    STATE_OFFSETS,   /* [ */
    STATE_OFFSETS_IN /* a number or ] */
};

struct parse {
    struct safetensors *s;
    enum state state;
    struct safetensors_tensor t;
    uint64_t offsets[2];
    unsigned offset_count;
    bool has_type, has_shape, has_offsets, has_metadata;
    int code;
    struct err *err;
};

static int fail(struct parse *p, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Records the error and returns yajl's "stop". */
static int fail(struct parse *p, int code, const char *fmt, ...)
{
    char detail[256], where[96] = "header";
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(detail, sizeof detail, fmt, ap);
    va_end(ap);
    if (p->state >= STATE_TENSOR)
        snprintf(where, sizeof where, "tensor %.*s", (int)(p->t.name.bytes < 80 ? p->t.name.bytes : 80),
                 p->t.name.text);
    p->code = err_set(p->err, code, "%.200s: %s: %s", p->s->file.path, where, detail);
    return 0;
}

static int unexpected(struct parse *p, const char *found)
{
    static const char *const expected[] = {"an object",
                                           "a tensor's name",
                                           "an object as __metadata__",
                                           "a key",
                                           "a string as value of __metadata__",
                                           "an object",
                                           "dtype, shape or data_offsets",
                                           "a string as dtype",
                                           "an array as shape",
                                           "a number in shape",
                                           "an array as data_offsets",
                                           "a number in data_offsets"};
    return fail(p, -EBADMSG, "found %s, expected %s", found, expected[p->state]);
}

/* A NUL-terminated copy; NULs inside were refused. */
static struct name copy(const unsigned char *text, size_t bytes)
{
    char *p = mem_alloc(bytes + 1, 1);
    memcpy(p, text, bytes);
    return (struct name){p, bytes};
}

static int on_null(void *ctx)
{
    return unexpected(ctx, "null");
}

static int on_boolean(void *ctx, int value)
{
    return unexpected(ctx, value ? "true" : "false");
}

/* Decimal digits only: no sign, fraction or exponent. */
static bool parse_number(const char *text, size_t bytes, uint64_t *ret)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] < '0' || text[i] > '9' || __builtin_mul_overflow(value, UINT64_C(10), &value) ||
            __builtin_add_overflow(value, (uint64_t)(text[i] - '0'), &value))
            return false;
    }
    *ret = value;
    return bytes > 0;
}

static int on_number(void *ctx, const char *text, size_t bytes)
{
    struct parse *p = ctx;
    uint64_t value = 0;
    if (p->state != STATE_SHAPE_IN && p->state != STATE_OFFSETS_IN)
        return unexpected(p, "a number");
    if (!parse_number(text, bytes, &value))
        return fail(p, -EBADMSG, "found %.*s, expected a whole number below 2^64",
                    (int)(bytes < 40 ? bytes : 40), text);
    if (p->state == STATE_SHAPE_IN) {
        if (p->t.dims == SAFETENSORS_DIMS_MAX)
            return fail(p, -ENOTSUP, "shape: found more than %d dimensions", SAFETENSORS_DIMS_MAX);
        p->t.shape[p->t.dims++] = value;
        return 1;
    }
    if (p->offset_count == 2)
        return fail(p, -EBADMSG, "data_offsets: found more than 2 numbers, expected begin and end");
    p->offsets[p->offset_count++] = value;
    return 1;
}

static int on_string(void *ctx, const unsigned char *text, size_t bytes)
{
    struct parse *p = ctx;
    if (p->state == STATE_VALUE) {
        if (memchr(text, 0, bytes))
            return fail(p, -EBADMSG, "__metadata__: found a NUL character, expected text");
        p->s->values[p->s->pair_count - 1] = copy(text, bytes);
        p->state = STATE_KEY;
        return 1;
    }
    if (p->state != STATE_DTYPE)
        return unexpected(p, "a string");
    struct name found = {(const char *)text, bytes};
    for (unsigned i = 0; i < SAFETENSORS_TYPES; i++) {
        if (name_is(found, types[i].name)) {
            p->t.type = (enum safetensors_type)i;
            p->state = STATE_FIELD;
            return 1;
        }
    }
    return fail(p, -ENOTSUP, "dtype: found \"%.*s\", expected a type this program reads",
                (int)(bytes < 40 ? bytes : 40), text);
}

static int on_map_begin(void *ctx)
{
    struct parse *p = ctx;
    switch (p->state) {
    case STATE_BEGIN:
        p->state = STATE_NAME;
        return 1;
    case STATE_METADATA:
        p->state = STATE_KEY;
        return 1;
    case STATE_TENSOR:
        p->state = STATE_FIELD;
        return 1;
    default:
        return unexpected(p, "an object");
    }
}

static int begin_tensor(struct parse *p, const unsigned char *text, size_t bytes)
{
    struct safetensors *s = p->s;
    if (bytes == 0 || bytes > 65535 || memchr(text, 0, bytes))
        return fail(p, -EBADMSG, "found a tensor name of %zu bytes, expected 1 to 65535 without NUL", bytes);
    if (s->count == s->room) {
        s->room = s->room ? s->room * 2 : 64; /* bounded by the header's bytes */
        s->tensors = mem_resize(s->tensors, s->room, sizeof *s->tensors);
    }
    memset(&p->t, 0, sizeof p->t);
    p->offset_count = 0;
    p->has_type = p->has_shape = p->has_offsets = false;
    p->t.name = copy(text, bytes);
    s->tensors[s->count++] = p->t; /* owned from here on */
    p->state = STATE_TENSOR;
    return 1;
}

static int begin_pair(struct parse *p, const unsigned char *text, size_t bytes)
{
    struct safetensors *s = p->s;
    if (memchr(text, 0, bytes))
        return fail(p, -EBADMSG, "__metadata__: found a NUL character, expected text");
    if (s->pair_count == s->pair_room) {
        s->pair_room = s->pair_room ? s->pair_room * 2 : 16;
        s->keys = mem_resize(s->keys, s->pair_room, sizeof *s->keys);
        s->values = mem_resize(s->values, s->pair_room, sizeof *s->values);
    }
    s->keys[s->pair_count] = copy(text, bytes);
    s->values[s->pair_count++] = (struct name){NULL, 0};
    p->state = STATE_VALUE;
    return 1;
}

static int begin_field(struct parse *p, struct name field)
{
    static const struct {
        const char *name;
        size_t seen;
        enum state next;
    } fields[] = {
        {"dtype", offsetof(struct parse, has_type), STATE_DTYPE},
        {"shape", offsetof(struct parse, has_shape), STATE_SHAPE},
        {"data_offsets", offsetof(struct parse, has_offsets), STATE_OFFSETS},
    };
    for (unsigned i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (!name_is(field, fields[i].name))
            continue;
        bool *seen = (bool *)((char *)p + fields[i].seen);
        if (*seen)
            return fail(p, -EBADMSG, "%s: found it twice, expected once", fields[i].name);
        *seen = true;
        p->state = fields[i].next;
        return 1;
    }
    return fail(p, -EBADMSG, "found field \"%.*s\", expected dtype, shape or data_offsets",
                (int)(field.bytes < 40 ? field.bytes : 40), field.text);
}

static int on_map_key(void *ctx, const unsigned char *text, size_t bytes)
{
    struct parse *p = ctx;
    struct name name = {(const char *)text, bytes};
    if (p->state == STATE_KEY)
        return begin_pair(p, text, bytes);
    if (p->state == STATE_FIELD)
        return begin_field(p, name);
    if (!name_is(name, "__metadata__"))
        return begin_tensor(p, text, bytes);
    if (p->has_metadata)
        return fail(p, -EBADMSG, "__metadata__: found it twice, expected once");
    p->has_metadata = true;
    p->state = STATE_METADATA;
    return 1;
}

int safetensors_size(enum safetensors_type type, const uint64_t *shape, uint32_t dims, uint64_t *ret_bytes)
{
    uint64_t bytes = types[type].bytes;
    for (uint32_t d = 0; d < dims; d++)
        if (__builtin_mul_overflow(bytes, shape[d], &bytes))
            return -EOVERFLOW;
    *ret_bytes = bytes;
    return 0;
}

/* All three fields are there: the range must be what shape and type need. `data` holds begin until placed. */
static int end_tensor(struct parse *p)
{
    uint64_t begin = p->offsets[0], end = p->offsets[1], bytes = 0;
    if (!p->has_type || !p->has_shape || !p->has_offsets)
        return fail(p, -EBADMSG, "%s: found no such field, expected it",
                    !p->has_type    ? "dtype"
                    : !p->has_shape ? "shape"
                                    : "data_offsets");
    if (p->offset_count != 2 || end < begin)
        return fail(p, -EBADMSG,
                    "data_offsets: found %u numbers, %" PRIu64 " and %" PRIu64 ", expected begin <= end",
                    p->offset_count, begin, end);
    if (safetensors_size(p->t.type, p->t.shape, p->t.dims, &bytes) < 0 || bytes != end - begin)
        return fail(p, -EBADMSG,
                    "data_offsets: found %" PRIu64 " bytes, expected %" PRIu64 " as shape and %s need",
                    end - begin, bytes, types[p->t.type].name);
    uint64_t data_bytes = p->s->file.bytes - safetensors_data_at(p->s->file.data);
    if (end > data_bytes)
        return fail(p, -EBADMSG,
                    "data_offsets: found end %" PRIu64 ", expected at most the file's %" PRIu64
                    " (incomplete file?)",
                    end, data_bytes);
    p->t.bytes = bytes;
    p->t.data = p->s->file.data + safetensors_data_at(p->s->file.data) + begin;
    p->s->tensors[p->s->count - 1] = p->t;
    p->state = STATE_NAME;
    return 1;
}

static int on_map_end(void *ctx)
{
    struct parse *p = ctx;
    if (p->state == STATE_FIELD)
        return end_tensor(p);
    p->state = STATE_NAME; /* of __metadata__ or of the whole: yajl lets nothing but white space follow */
    return 1;
}

static int on_array_begin(void *ctx)
{
    struct parse *p = ctx;
    if (p->state != STATE_SHAPE && p->state != STATE_OFFSETS)
        return unexpected(p, "an array");
    p->state = p->state == STATE_SHAPE ? STATE_SHAPE_IN : STATE_OFFSETS_IN;
    return 1;
}

static int on_array_end(void *ctx)
{
    struct parse *p = ctx;
    p->state = STATE_FIELD;
    return 1;
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

static int parse_json(struct safetensors *s, uint64_t bytes, struct err *err)
{
    struct parse p = {.s = s, .err = err};
    const uint8_t *json = s->file.data + 8;
    if (json[0] != '{')
        return err_set(err, -EBADMSG, "%s: header: found byte %02x, expected a JSON object", s->file.path,
                       json[0]);
    char why[JSON_WHY_BYTES];
    int r = json_stream(&callbacks, &p, json, bytes, why);
    if (r == -ENOMEM)
        return err_set(err, r, "%s: header: no memory for the JSON parser", s->file.path);
    if (r == -EBADMSG)
        return err_set(err, r, "%s: header: found no valid JSON (%s), expected an object", s->file.path, why);
    return p.code;
}

static int check_header(const struct safetensors *s, uint64_t *ret_bytes, struct err *err)
{
    uint64_t bytes;
    if (s->file.bytes < 8)
        return err_set(err, -EBADMSG,
                       "%s: header length: found a file of %" PRIu64 " bytes, expected at least 8",
                       s->file.path, s->file.bytes);
    memcpy(&bytes, s->file.data, sizeof bytes);
    if (bytes > SAFETENSORS_HEADER_MAX)
        return err_set(err, -EBADMSG, "%s: header length: found %" PRIu64 ", expected at most %u",
                       s->file.path, bytes, SAFETENSORS_HEADER_MAX);
    if (bytes < 2 || bytes > s->file.bytes - 8)
        return err_set(err, -EBADMSG,
                       "%s: header length: found %" PRIu64 ", expected 2 to %" PRIu64 " (incomplete file?)",
                       s->file.path, bytes, s->file.bytes - 8);
    *ret_bytes = bytes;
    return 0;
}

static int build_indexes(struct safetensors *s, struct err *err)
{
    s->names = mem_alloc(s->count, sizeof *s->names);
    names_init(&s->index, s->names, s->count);
    for (uint32_t i = 0; i < s->count; i++) {
        s->names[i] = s->tensors[i].name;
        if (!names_add(&s->index, i))
            return err_set(err, -EBADMSG, "%s: tensor %.80s: found it twice, expected once", s->file.path,
                           s->names[i].text);
    }
    names_init(&s->key_index, s->keys, s->pair_count);
    for (uint32_t i = 0; i < s->pair_count; i++)
        if (!names_add(&s->key_index, i))
            return err_set(err, -EBADMSG, "%s: __metadata__ %.80s: found it twice, expected once",
                           s->file.path, s->keys[i].text);
    return 0;
}

static int by_place(const void *a, const void *b)
{
    const struct safetensors_tensor *x = *(const struct safetensors_tensor *const *)a;
    const struct safetensors_tensor *y = *(const struct safetensors_tensor *const *)b;
    uintptr_t p = (uintptr_t)x->data, q = (uintptr_t)y->data;
    if (p != q)
        return p < q ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes; /* empty ones first */
}

/* The tensors must cover the data exactly: each begins where the one before ended. */
static int check_coverage(const struct safetensors *s, struct err *err)
{
    const uint8_t *data = s->file.data + safetensors_data_at(s->file.data),
                  *end = s->file.data + s->file.bytes;
    const struct safetensors_tensor **order = mem_alloc(s->count, sizeof *order);
    int rc = 0;
    for (uint32_t i = 0; i < s->count; i++)
        order[i] = &s->tensors[i];
    qsort(order, s->count, sizeof *order, by_place);
    const uint8_t *at = data;
    for (uint32_t i = 0; i < s->count && !rc; i++) {
        const uint8_t *begin = order[i]->data;
        if (begin != at)
            rc = err_set(err, -EBADMSG, "%s: tensor %.80s: data_offsets: found begin %td, expected %td (%s)",
                         s->file.path, order[i]->name.text, begin - data, at - data,
                         begin < at ? "overlap" : "gap");
        at = begin + order[i]->bytes;
    }
    if (!rc && at != end)
        rc = err_set(err, -EBADMSG, "%s: data: found %td bytes after the last tensor, expected 0",
                     s->file.path, end - at);
    mem_free(&order);
    return rc;
}

int safetensors_open(const char *path, struct safetensors **ret, struct err *err)
{
    struct safetensors *s = mem_alloc(1, sizeof *s);
    uint64_t bytes = 0;
    int rc = mapping_open(&s->file, path, err);
    if (!rc)
        rc = check_header(s, &bytes, err);
    if (!rc)
        rc = parse_json(s, bytes, err);
    if (!rc)
        rc = build_indexes(s, err);
    if (!rc)
        rc = check_coverage(s, err);
    if (rc < 0)
        safetensors_free(&s);
    else
        *ret = s;
    return rc;
}

static void free_text(struct name *name)
{
    char *text = (char *)(uintptr_t)name->text;
    mem_free(&text);
}

void safetensors_free(struct safetensors **safetensors)
{
    struct safetensors *s = *safetensors;
    if (!s)
        return;
    for (uint32_t i = 0; i < s->count; i++)
        free_text(&s->tensors[i].name);
    for (uint32_t i = 0; i < s->pair_count; i++) {
        free_text(&s->keys[i]);
        free_text(&s->values[i]);
    }
    names_free(&s->index);
    names_free(&s->key_index);
    mem_free(&s->tensors);
    mem_free(&s->names);
    mem_free(&s->keys);
    mem_free(&s->values);
    mapping_close(&s->file);
    mem_free(safetensors);
}

const char *safetensors_type_name(enum safetensors_type type)
{
    return types[type].name;
}

unsigned safetensors_type_bytes(enum safetensors_type type)
{
    return types[type].bytes;
}

uint32_t safetensors_count(const struct safetensors *safetensors)
{
    return safetensors->count;
}

const struct safetensors_tensor *safetensors_at(const struct safetensors *safetensors, uint32_t place)
{
    return &safetensors->tensors[place];
}

const struct safetensors_tensor *safetensors_find(const struct safetensors *safetensors, const char *name)
{
    uint32_t place = names_find(&safetensors->index, name_of(name));
    return place == NAMES_NONE ? NULL : &safetensors->tensors[place];
}

const char *safetensors_metadata(const struct safetensors *safetensors, const char *key)
{
    uint32_t place = names_find(&safetensors->key_index, name_of(key));
    return place == NAMES_NONE ? NULL : safetensors->values[place].text;
}
