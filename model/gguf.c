/* Reads GGUF. The struct gguf owns the mapping, its tables and its indexes; it is built by one thread and
 * read only afterwards. Values that a file claims are never trusted: each is held against the bytes that are
 * really there before it sizes a read or an allocation. It must never write to, or copy, tensor data. */
#include "model/gguf.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "model/mapping.h"

enum gguf_type {
    GGUF_U8,
    GGUF_I8,
    GGUF_U16,
    GGUF_I16,
    GGUF_U32,
    GGUF_I32,
    GGUF_F32,
    GGUF_BOOL,
    GGUF_STRING,
    GGUF_ARRAY,
    GGUF_U64,
    GGUF_I64,
    GGUF_F64,
    GGUF_TYPES
};

static const struct {
    const char *name;
    uint8_t bytes; /* 0: not of fixed size */
} types[GGUF_TYPES] = {
    [GGUF_U8] = {"u8", 1},       [GGUF_I8] = {"i8", 1},     [GGUF_U16] = {"u16", 2},
    [GGUF_I16] = {"i16", 2},     [GGUF_U32] = {"u32", 4},   [GGUF_I32] = {"i32", 4},
    [GGUF_F32] = {"f32", 4},     [GGUF_BOOL] = {"bool", 1}, [GGUF_STRING] = {"string", 0},
    [GGUF_ARRAY] = {"array", 0}, [GGUF_U64] = {"u64", 8},   [GGUF_I64] = {"i64", 8},
    [GGUF_F64] = {"f64", 8},
};

/* Types of ggml that base/dtype.h does not know, so that a refusal can name them. */
static const char *const foreign_types[] = {
    [9] = "Q8_1",   [15] = "Q8_K",  [16] = "IQ2_XXS", [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S",
    [21] = "IQ3_S", [22] = "IQ2_S", [23] = "IQ4_XS",  [24] = "I8",     [25] = "I16",     [26] = "I32",
    [27] = "I64",   [28] = "F64",   [29] = "IQ1_M",   [34] = "TQ1_0",  [35] = "TQ2_0",   [39] = "MXFP4",
};

/* More than any real file has; they bound the work that a damaged count can cause. */
#define KEYS_MAX              65536
#define TENSORS_MAX           (1u << 20)
#define NAME_BYTES_MAX        255 /* of a tensor; real ones stay below 64 */
#define KEY_BYTES_MAX         65535
#define TENSOR_INFO_BYTES_MIN (8 + 1 + 4 + 8 + 4 + 8) /* name length, name, n_dims, one dim, type, offset */
#define KEY_BYTES_MIN         (8 + 1 + 4 + 1)

struct gguf_value {
    uint32_t type;
    struct gguf_array array; /* element type where type is GGUF_ARRAY; data is the value itself otherwise */
};

struct gguf {
    struct mapping file;
    uint32_t version, alignment;
    uint64_t head_bytes;
    uint32_t key_count, tensor_count;
    struct name *keys;
    struct gguf_value *values; /* [key_count] */
    struct names key_index;
    struct gguf_tensor *tensors; /* [tensor_count] */
    struct name *tensor_names;
    struct names tensor_index;
};

/* Where the parser stands, and the words for an error there. */
struct cursor {
    const struct gguf *gguf;
    uint64_t at;
    uint64_t field_at;   /* begin of what was read last */
    const char *section; /* "header", "metadata", "tensor" */
    uint64_t item;       /* number within the section */
    struct name label;   /* its name, once read */
    struct err *err;
};

static int fail(const struct cursor *c, int code, const char *field, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

static int fail(const struct cursor *c, int code, const char *field, const char *fmt, ...)
{
    char detail[256], where[128];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(detail, sizeof detail, fmt, ap);
    va_end(ap);
    if (c->label.bytes)
        snprintf(where, sizeof where, "%s %.*s", c->section, (int)(c->label.bytes < 80 ? c->label.bytes : 80),
                 c->label.text);
    else if (!strcmp(c->section, "header"))
        snprintf(where, sizeof where, "header");
    else
        snprintf(where, sizeof where, "%s %" PRIu64, c->section, c->item);
    return err_set(c->err, code, "%.200s: %s %s (offset %" PRIu64 "): %s", c->gguf->file.path, where, field,
                   c->field_at, detail);
}

static uint64_t bytes_left(const struct cursor *c)
{
    return c->gguf->file.bytes - c->at;
}

static int take(struct cursor *c, uint64_t bytes, const char *field, const uint8_t **ret)
{
    c->field_at = c->at;
    if (bytes > bytes_left(c))
        return fail(c, -EBADMSG, field,
                    "found %" PRIu64 " bytes before the end of the file, expected %" PRIu64
                    " (truncated or damaged)",
                    bytes_left(c), bytes);
    *ret = c->gguf->file.data + c->at;
    c->at += bytes;
    return 0;
}

static int take_u32(struct cursor *c, const char *field, uint32_t *ret)
{
    const uint8_t *p = NULL;
    int rc = take(c, sizeof *ret, field, &p);
    if (!rc)
        memcpy(ret, p, sizeof *ret);
    return rc;
}

static int take_u64(struct cursor *c, const char *field, uint64_t *ret)
{
    const uint8_t *p = NULL;
    int rc = take(c, sizeof *ret, field, &p);
    if (!rc)
        memcpy(ret, p, sizeof *ret);
    return rc;
}

static int take_string(struct cursor *c, const char *field, struct name *ret)
{
    uint64_t bytes = 0;
    const uint8_t *p = NULL;
    int rc = take_u64(c, field, &bytes);
    if (rc < 0 || (rc = take(c, bytes, field, &p)) < 0)
        return rc;
    *ret = (struct name){(const char *)p, (size_t)bytes};
    return 0;
}

/* A key or tensor name: not empty, bounded, printable enough to be quoted. */
static int take_name(struct cursor *c, const char *field, size_t most, struct name *ret)
{
    struct name name = {0};
    int rc = take_string(c, field, &name);
    if (rc < 0)
        return rc;
    if (name.bytes == 0 || name.bytes > most)
        return fail(c, -EBADMSG, field, "found %zu bytes, expected 1 to %zu", name.bytes, most);
    if (memchr(name.text, '\0', name.bytes))
        return fail(c, -EBADMSG, field, "found a NUL byte, expected text");
    *ret = c->label = name;
    return 0;
}

static int take_array(struct cursor *c, struct gguf_array *array)
{
    int rc;
    if ((rc = take_u32(c, "array element type", &array->type)) < 0 ||
        (rc = take_u64(c, "array length", &array->count)) < 0)
        return rc;
    if (array->type >= GGUF_TYPES)
        return fail(c, -EBADMSG, "array element type", "found %" PRIu32 ", expected 0 to %d", array->type,
                    GGUF_TYPES - 1);
    if (array->type == GGUF_ARRAY)
        return fail(c, -ENOTSUP, "array element type", "found an array of arrays, expected plain elements");
    array->data = c->gguf->file.data + c->at;
    uint64_t bytes, each = types[array->type].bytes;
    if (each) {
        const uint8_t *p = NULL;
        if (__builtin_mul_overflow(array->count, each, &bytes))
            return fail(c, -EBADMSG, "array length", "found %" PRIu64 " elements, expected at most %" PRIu64,
                        array->count, bytes_left(c) / each);
        return take(c, bytes, "array", &p);
    }
    if (array->count > bytes_left(c) / 8) /* a string takes at least its length field */
        return fail(c, -EBADMSG, "array length", "found %" PRIu64 " strings, expected at most %" PRIu64,
                    array->count, bytes_left(c) / 8);
    for (uint64_t i = 0; i < array->count; i++) {
        struct name ignored;
        if ((rc = take_string(c, "string of array", &ignored)) < 0)
            return rc;
    }
    return 0;
}

static int take_value(struct cursor *c, struct gguf_value *value)
{
    int rc = take_u32(c, "value type", &value->type);
    if (rc < 0)
        return rc;
    if (value->type >= GGUF_TYPES)
        return fail(c, -EBADMSG, "value type", "found %" PRIu32 ", expected 0 to %d", value->type,
                    GGUF_TYPES - 1);
    if (value->type == GGUF_ARRAY)
        return take_array(c, &value->array);
    value->array.data = c->gguf->file.data + c->at;
    if (value->type == GGUF_STRING) {
        struct name ignored;
        return take_string(c, "string", &ignored);
    }
    const uint8_t *p = NULL;
    return take(c, types[value->type].bytes, "value", &p);
}

static int parse_header(struct gguf *g, struct cursor *c)
{
    const uint8_t *magic = NULL;
    uint64_t tensors = 0, keys = 0;
    int rc = take(c, 4, "magic", &magic);
    if (rc < 0)
        return rc;
    if (memcmp(magic, "GGUF", 4))
        return fail(c, -EBADMSG, "magic", "found %02x %02x %02x %02x, expected \"GGUF\"", magic[0], magic[1],
                    magic[2], magic[3]);
    if ((rc = take_u32(c, "version", &g->version)) < 0)
        return rc;
    if (g->version && (g->version & 0xffff) == 0)
        return fail(c, -ENOTSUP, "version", "found a big-endian file, expected little-endian");
    if (g->version < 2 || g->version > 3)
        return fail(c, -ENOTSUP, "version", "found %" PRIu32 ", expected 2 or 3", g->version);
    if ((rc = take_u64(c, "tensor count", &tensors)) < 0 || (rc = take_u64(c, "key count", &keys)) < 0)
        return rc;
    if (tensors > TENSORS_MAX || tensors > bytes_left(c) / TENSOR_INFO_BYTES_MIN)
        return fail(c, -EBADMSG, "tensor count",
                    "found %" PRIu64 ", expected at most %" PRIu64 " in the rest of the file", tensors,
                    bytes_left(c) / TENSOR_INFO_BYTES_MIN);
    if (keys > KEYS_MAX || keys > bytes_left(c) / KEY_BYTES_MIN)
        return fail(c, -EBADMSG, "key count",
                    "found %" PRIu64 ", expected at most %" PRIu64 " in the rest of the file", keys,
                    bytes_left(c) / KEY_BYTES_MIN);
    g->tensor_count = (uint32_t)tensors;
    g->key_count = (uint32_t)keys;
    return 0;
}

static int parse_metadata(struct gguf *g, struct cursor *c)
{
    g->keys = mem_alloc(g->key_count, sizeof *g->keys);
    g->values = mem_alloc(g->key_count, sizeof *g->values);
    names_init(&g->key_index, g->keys, g->key_count);
    c->section = "metadata";
    for (uint32_t i = 0; i < g->key_count; i++) {
        c->item = i;
        c->label.bytes = 0;
        int rc = take_name(c, "key", KEY_BYTES_MAX, &g->keys[i]);
        if (rc < 0)
            return rc;
        if (!names_add(&g->key_index, i))
            return fail(c, -EBADMSG, "key", "found it twice, expected once");
        if ((rc = take_value(c, &g->values[i])) < 0)
            return rc;
    }
    c->label.bytes = 0;
    g->alignment = 32;
    int rc = gguf_has(g, "general.alignment") ? gguf_u32(g, "general.alignment", &g->alignment, c->err) : 0;
    if (rc < 0)
        return rc;
    if (g->alignment < 8 || g->alignment > 1u << 20 || (g->alignment & (g->alignment - 1)))
        return err_set(c->err, -EBADMSG,
                       "%s: general.alignment: found %" PRIu32 ", expected a power of two "
                       "from 8 to 1048576",
                       g->file.path, g->alignment);
    return 0;
}

/* Bytes of the tensor from its shape and type: rows of whole blocks, without overflow. */
static int size_tensor(const struct cursor *c, struct gguf_tensor *t)
{
    const struct dtype_info *info = dtype_info((unsigned)t->type);
    if (t->shape[0] % info->block_len)
        return fail(c, -EBADMSG, "shape",
                    "found rows of %" PRIu64 " elements, expected a multiple of %u (%s)", t->shape[0],
                    info->block_len, info->name);
    uint64_t bytes = dtype_row_bytes(t->type, t->shape[0]);
    bool overflow = bytes == 0;
    for (int d = 1; d < GGUF_DIMS_MAX; d++)
        overflow |= __builtin_mul_overflow(bytes, t->shape[d], &bytes);
    if (overflow || bytes > c->gguf->file.bytes)
        return fail(c, -EBADMSG, "shape",
                    "found %" PRIu64 " x %" PRIu64 " x %" PRIu64 " x %" PRIu64
                    " of %s, expected at most the file's %" PRIu64 " bytes (truncated or damaged)",
                    t->shape[0], t->shape[1], t->shape[2], t->shape[3], info->name, c->gguf->file.bytes);
    t->bytes = bytes;
    return 0;
}

static int parse_tensor(struct cursor *c, struct gguf_tensor *t)
{
    uint32_t type = 0;
    int rc;
    if ((rc = take_name(c, "name", NAME_BYTES_MAX, &t->name)) < 0 ||
        (rc = take_u32(c, "dimension count", &t->dims)) < 0)
        return rc;
    if (t->dims < 1 || t->dims > GGUF_DIMS_MAX)
        return fail(c, -EBADMSG, "dimension count", "found %" PRIu32 ", expected 1 to %d", t->dims,
                    GGUF_DIMS_MAX);
    for (uint32_t d = 0; d < GGUF_DIMS_MAX; d++) {
        t->shape[d] = 1;
        if (d < t->dims && (rc = take_u64(c, "dimension", &t->shape[d])) < 0)
            return rc;
        if (t->shape[d] == 0)
            return fail(c, -EBADMSG, "dimension", "found 0, expected at least 1");
    }
    if ((rc = take_u32(c, "type", &type)) < 0 || (rc = take_u64(c, "data offset", &t->offset)) < 0)
        return rc;
    const struct dtype_info *info = dtype_info(type);
    if (!info || !info->name) {
        bool foreign = type < sizeof foreign_types / sizeof *foreign_types && foreign_types[type];
        return fail(c, -ENOTSUP, "type", "found %" PRIu32 " (%s), expected a type this program reads", type,
                    foreign ? foreign_types[type] : "unknown");
    }
    t->type = (enum dtype)type;
    return size_tensor(c, t);
}

static int by_offset(const void *a, const void *b)
{
    const struct gguf_tensor *x = *(const struct gguf_tensor *const *)a;
    const struct gguf_tensor *y = *(const struct gguf_tensor *const *)b;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

static int check_overlap(const struct gguf *g, struct cursor *c)
{
    const struct gguf_tensor **order = mem_alloc(g->tensor_count, sizeof *order);
    int rc = 0;
    for (uint32_t i = 0; i < g->tensor_count; i++)
        order[i] = &g->tensors[i];
    qsort(order, g->tensor_count, sizeof *order, by_offset);
    for (uint32_t i = 1; i < g->tensor_count && !rc; i++) {
        const struct gguf_tensor *before = order[i - 1], *t = order[i];
        if (before->offset + before->bytes <= t->offset)
            continue;
        c->label = t->name;
        rc = fail(c, -EBADMSG, "data", "found begin %" PRIu64 " within %.*s, expected at least %" PRIu64,
                  t->offset, (int)before->name.bytes, before->name.text, before->offset + before->bytes);
    }
    mem_free(&order);
    return rc;
}

/* Turns offsets in the data section into offsets in the file and pointers, all inside it. */
static int place_tensors(struct gguf *g, struct cursor *c)
{
    uint64_t align = g->alignment, head = (c->at + align - 1) & ~(align - 1);
    g->head_bytes = c->at;
    for (uint32_t i = 0; i < g->tensor_count; i++) {
        struct gguf_tensor *t = &g->tensors[i];
        uint64_t end;
        c->label = t->name;
        if (t->offset % align)
            return fail(c, -EBADMSG, "data offset", "found %" PRIu64 ", expected a multiple of %" PRIu64,
                        t->offset, align);
        if (__builtin_add_overflow(t->offset, head, &t->offset) ||
            __builtin_add_overflow(t->offset, t->bytes, &end) || end > g->file.bytes)
            return fail(c, -EBADMSG, "data",
                        "found %" PRIu64 " bytes at data offset %" PRIu64
                        ", expected an end within the file's %" PRIu64 " bytes (truncated or damaged)",
                        t->bytes, t->offset - head, g->file.bytes);
        t->data = g->file.data + t->offset;
    }
    return check_overlap(g, c);
}

static int parse_tensors(struct gguf *g, struct cursor *c)
{
    g->tensors = mem_alloc(g->tensor_count, sizeof *g->tensors);
    g->tensor_names = mem_alloc(g->tensor_count, sizeof *g->tensor_names);
    names_init(&g->tensor_index, g->tensor_names, g->tensor_count);
    c->section = "tensor";
    for (uint32_t i = 0; i < g->tensor_count; i++) {
        c->item = i;
        c->label.bytes = 0;
        int rc = parse_tensor(c, &g->tensors[i]);
        if (rc < 0)
            return rc;
        g->tensor_names[i] = g->tensors[i].name;
        if (!names_add(&g->tensor_index, i))
            return fail(c, -EBADMSG, "name", "found it twice, expected once");
    }
    return place_tensors(g, c);
}

int gguf_open(const char *path, struct gguf **ret_gguf, struct err *err)
{
    struct gguf *g = mem_alloc(1, sizeof *g);
    struct cursor c = {.gguf = g, .section = "header", .err = err};
    int rc = mapping_open(&g->file, path, err);
    if (!rc)
        rc = parse_header(g, &c);
    if (!rc)
        rc = parse_metadata(g, &c);
    if (!rc)
        rc = parse_tensors(g, &c);
    if (rc < 0)
        gguf_free(&g);
    else
        *ret_gguf = g;
    return rc;
}

void gguf_free(struct gguf **gguf)
{
    struct gguf *g = *gguf;
    if (!g)
        return;
    names_free(&g->key_index);
    names_free(&g->tensor_index);
    mem_free(&g->keys);
    mem_free(&g->values);
    mem_free(&g->tensors);
    mem_free(&g->tensor_names);
    mapping_close(&g->file);
    mem_free(gguf);
}

const char *gguf_path(const struct gguf *gguf)
{
    return gguf->file.path;
}

const uint8_t *gguf_file(const struct gguf *gguf, uint64_t *ret_bytes)
{
    *ret_bytes = gguf->file.bytes;
    return gguf->file.data;
}

uint64_t gguf_head_bytes(const struct gguf *gguf)
{
    return gguf->head_bytes;
}

static const struct gguf_value *find(const struct gguf *g, const char *key)
{
    uint32_t place = names_find(&g->key_index, name_of(key));
    return place == NAMES_NONE ? NULL : &g->values[place];
}

static int absent(const struct gguf *g, const char *key, struct err *err)
{
    return err_set(err, -ENOENT, "%s: %s: found no such key, expected it", g->file.path, key);
}

static int mismatch(const struct gguf *g, const char *key, const struct gguf_value *v, const char *expected,
                    struct err *err)
{
    bool array = v->type == GGUF_ARRAY;
    return err_set(err, -EBADMSG, "%s: %s: found %s%s, expected %s", g->file.path, key,
                   array ? "an array of " : "", types[array ? v->array.type : v->type].name, expected);
}

int gguf_required(int rc, struct err *err)
{
    if (rc != -ENOENT)
        return rc;
    if (err)
        err->code = -EBADMSG;
    return -EBADMSG;
}

bool gguf_has(const struct gguf *gguf, const char *key)
{
    return find(gguf, key) != NULL;
}

/* An integer of any width as a 64-bit one. False when the type is another, or the value negative. */
static bool read_integer(const struct gguf_value *v, uint64_t *ret)
{
    union {
        uint8_t u8;
        int8_t i8;
        uint16_t u16;
        int16_t i16;
        uint32_t u32;
        int32_t i32;
        uint64_t u64;
        int64_t i64;
    } x;
    if (v->type >= GGUF_TYPES || !types[v->type].bytes)
        return false;
    memcpy(&x, v->array.data, types[v->type].bytes);
    int64_t s = 0;
    switch (v->type) {
    case GGUF_U8:
        *ret = x.u8;
        return true;
    case GGUF_U16:
        *ret = x.u16;
        return true;
    case GGUF_U32:
        *ret = x.u32;
        return true;
    case GGUF_U64:
        *ret = x.u64;
        return true;
    case GGUF_I8:
        s = x.i8;
        break;
    case GGUF_I16:
        s = x.i16;
        break;
    case GGUF_I32:
        s = x.i32;
        break;
    case GGUF_I64:
        s = x.i64;
        break;
    default:
        return false;
    }
    *ret = (uint64_t)s;
    return s >= 0;
}

int gguf_u64(const struct gguf *gguf, const char *key, uint64_t *ret, struct err *err)
{
    const struct gguf_value *v = find(gguf, key);
    uint64_t value = 0;
    if (!v)
        return absent(gguf, key, err);
    if (!read_integer(v, &value))
        return mismatch(gguf, key, v, "an integer that is not negative", err);
    *ret = value;
    return 0;
}

int gguf_u32(const struct gguf *gguf, const char *key, uint32_t *ret, struct err *err)
{
    uint64_t value = 0;
    int rc = gguf_u64(gguf, key, &value, err);
    if (rc < 0)
        return rc;
    if (value > UINT32_MAX)
        return err_set(err, -EBADMSG, "%s: %s: found %" PRIu64 ", expected at most %" PRIu32, gguf->file.path,
                       key, value, UINT32_MAX);
    *ret = (uint32_t)value;
    return 0;
}

int gguf_f32(const struct gguf *gguf, const char *key, float *ret, struct err *err)
{
    const struct gguf_value *v = find(gguf, key);
    if (!v)
        return absent(gguf, key, err);
    float value;
    if (v->type == GGUF_F32) {
        memcpy(&value, v->array.data, sizeof value);
    } else if (v->type == GGUF_F64) {
        double wide;
        memcpy(&wide, v->array.data, sizeof wide);
        value = (float)wide;
    } else {
        return mismatch(gguf, key, v, "a float", err);
    }
    if (!isfinite(value))
        return err_set(err, -EBADMSG, "%s: %s: found %f, expected a finite number", gguf->file.path, key,
                       (double)value);
    *ret = value;
    return 0;
}

int gguf_bool(const struct gguf *gguf, const char *key, bool *ret, struct err *err)
{
    const struct gguf_value *v = find(gguf, key);
    if (!v)
        return absent(gguf, key, err);
    if (v->type != GGUF_BOOL || v->array.data[0] > 1)
        return mismatch(gguf, key, v, "a bool of 0 or 1", err);
    *ret = v->array.data[0];
    return 0;
}

int gguf_string(const struct gguf *gguf, const char *key, struct name *ret, struct err *err)
{
    const struct gguf_value *v = find(gguf, key);
    if (!v)
        return absent(gguf, key, err);
    if (v->type != GGUF_STRING)
        return mismatch(gguf, key, v, "a string", err);
    const uint8_t *cursor = v->array.data;
    *ret = gguf_array_next(&cursor);
    return 0;
}

static int get_array(const struct gguf *gguf, const char *key, uint32_t type, struct gguf_array *ret,
                     struct err *err)
{
    static const char *const expected[GGUF_TYPES] = {
        [GGUF_STRING] = "an array of string", [GGUF_I32] = "an array of i32", [GGUF_F32] = "an array of f32"};
    const struct gguf_value *v = find(gguf, key);
    if (!v)
        return absent(gguf, key, err);
    bool fits = v->array.type == type || (type == GGUF_I32 && v->array.type == GGUF_U32);
    if (v->type != GGUF_ARRAY || !fits)
        return mismatch(gguf, key, v, expected[type], err);
    *ret = v->array;
    return 0;
}

int gguf_strings(const struct gguf *gguf, const char *key, struct gguf_array *ret, struct err *err)
{
    return get_array(gguf, key, GGUF_STRING, ret, err);
}

int gguf_i32s(const struct gguf *gguf, const char *key, struct gguf_array *ret, struct err *err)
{
    return get_array(gguf, key, GGUF_I32, ret, err);
}

int gguf_f32s(const struct gguf *gguf, const char *key, struct gguf_array *ret, struct err *err)
{
    return get_array(gguf, key, GGUF_F32, ret, err);
}

int32_t gguf_array_i32(const struct gguf_array *array, uint64_t i)
{
    int32_t value;
    memcpy(&value, array->data + i * sizeof value, sizeof value);
    return value;
}

float gguf_array_f32(const struct gguf_array *array, uint64_t i)
{
    float value;
    memcpy(&value, array->data + i * sizeof value, sizeof value);
    return value;
}

struct name gguf_array_next(const uint8_t **cursor)
{
    uint64_t bytes;
    memcpy(&bytes, *cursor, sizeof bytes);
    struct name name = {(const char *)*cursor + sizeof bytes, (size_t)bytes};
    *cursor += sizeof bytes + bytes;
    return name;
}

uint32_t gguf_tensors(const struct gguf *gguf)
{
    return gguf->tensor_count;
}

const struct gguf_tensor *gguf_tensor_at(const struct gguf *gguf, uint32_t place)
{
    return &gguf->tensors[place];
}

const struct gguf_tensor *gguf_tensor(const struct gguf *gguf, const char *name)
{
    uint32_t place = names_find(&gguf->tensor_index, name_of(name));
    return place == NAMES_NONE ? NULL : &gguf->tensors[place];
}
