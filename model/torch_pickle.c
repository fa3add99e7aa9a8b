/* The pickle of a dict of tensors, run by a machine that knows the opcodes which such a pickle consists of
 * and nothing else. Values are nodes in one array, the stack and the memo hold their numbers: an opcode
 * makes at most one node and copies nothing, so memory grows no faster than the file. A global is a number
 * in the table below; nothing is ever looked up, imported or called. Source: the opcodes' documentation in
 * CPython's pickletools, and what torch.save writes. */
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "model/safetensors_private.h"
#include "model/torch_private.h"

enum kind { MARK, NONE, BOOLEAN, INTEGER, TEXT, GLOBAL, TUPLE, DICT, STORAGE, TENSOR };

static const char *const kind_names[] = {"a mark",  "None",    "a truth value", "an integer", "a string",
                                         "a class", "a tuple", "a dict",        "a storage",  "a tensor"};

enum global { ORDERED_DICT, REBUILD_TENSOR, REBUILD_PARAMETER, STORAGE_TYPE };

static const struct {
    const char *module, *name;
    enum global global;
    enum safetensors_type type; /* of STORAGE_TYPE */
} globals[] = {
    {"collections", "OrderedDict", ORDERED_DICT, 0},
    {"torch._utils", "_rebuild_tensor_v2", REBUILD_TENSOR, 0},
    {"torch._utils", "_rebuild_parameter", REBUILD_PARAMETER, 0},
    {"torch", "FloatStorage", STORAGE_TYPE, SAFETENSORS_F32},
    {"torch", "HalfStorage", STORAGE_TYPE, SAFETENSORS_F16},
    {"torch", "BFloat16Storage", STORAGE_TYPE, SAFETENSORS_BF16},
    {"torch", "DoubleStorage", STORAGE_TYPE, SAFETENSORS_F64},
    {"torch", "LongStorage", STORAGE_TYPE, SAFETENSORS_I64},
    {"torch", "IntStorage", STORAGE_TYPE, SAFETENSORS_I32},
    {"torch", "ShortStorage", STORAGE_TYPE, SAFETENSORS_I16},
    {"torch", "CharStorage", STORAGE_TYPE, SAFETENSORS_I8},
    {"torch", "ByteStorage", STORAGE_TYPE, SAFETENSORS_U8},
    {"torch", "BoolStorage", STORAGE_TYPE, SAFETENSORS_BOOL},
};
#define GLOBALS (sizeof globals / sizeof *globals)

struct node {
    enum kind kind;
    uint32_t first, count; /* TUPLE: of `elements`; GLOBAL: first is a place in `globals` */
    uint32_t tensor;       /* TENSOR: place in `tensors`; STORAGE: place in `globals` */
    int64_t number;        /* BOOLEAN, INTEGER */
    struct name text;      /* TEXT */
    struct torch_member data;
};

/* A key and its value in some dict. */
struct item {
    uint32_t dict, key, value;
};

/* An array of 32-bit numbers that grows. */
struct numbers {
    uint32_t *at, count, room;
};

struct machine {
    const struct torch_zip *zip;
    const char *prefix, *path;
    struct err *err;
    const uint8_t *code, *end;
    struct node *nodes;
    uint32_t node_count, node_room;
    struct item *items;
    uint32_t item_count, item_room;
    struct numbers stack, memo, elements;
    struct torch_list tensors; /* without names */
};

__attribute__((format(printf, 3, 4))) static int fail(struct machine *m, int code, const char *fmt, ...)
{
    char detail[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(detail, sizeof detail, fmt, ap);
    va_end(ap);
    return err_set(m->err, code, "%.200s: pickle: %s", m->path, detail);
}

static uint32_t grown(uint32_t room)
{
    return room ? room * 2 : 256; /* bounded by the bytes of the pickle */
}

static void append(struct numbers *n, uint32_t value)
{
    if (n->count == n->room)
        n->at = mem_resize(n->at, n->room = grown(n->room), sizeof *n->at);
    n->at[n->count++] = value;
}

static int push(struct machine *m, struct node node)
{
    if (m->node_count == m->node_room)
        m->nodes = mem_resize(m->nodes, m->node_room = grown(m->node_room), sizeof *m->nodes);
    m->nodes[m->node_count] = node;
    append(&m->stack, m->node_count++);
    return 0;
}

/* The topmost value, taken off; its number in *ret. `want`: a kind, or -1 for any but a mark. */
static int pop(struct machine *m, int want, uint32_t *ret)
{
    if (m->stack.count == 0)
        return fail(m, -EBADMSG, "found an empty stack, expected a value on it");
    *ret = m->stack.at[--m->stack.count];
    enum kind found = m->nodes[*ret].kind;
    if (want >= 0 ? found != (enum kind)want : found == MARK)
        return fail(m, -EBADMSG, "found %s, expected %s", kind_names[found],
                    want >= 0 ? kind_names[want] : "a value");
    return 0;
}

/* Takes the next bytes of the program. */
static int take(struct machine *m, uint64_t bytes, const uint8_t **ret)
{
    if (bytes > (uint64_t)(m->end - m->code))
        return fail(m, -EBADMSG, "found its end, expected %" PRIu64 " more bytes", bytes);
    *ret = m->code;
    m->code += bytes;
    return 0;
}

static int take_number(struct machine *m, unsigned bytes, uint64_t *ret)
{
    const uint8_t *at = NULL;
    int rc = take(m, bytes, &at);
    *ret = 0;
    for (unsigned i = 0; rc == 0 && i < bytes; i++)
        *ret |= (uint64_t)at[i] << (8 * i);
    return rc;
}

static int push_integer(struct machine *m, unsigned bytes, bool is_signed)
{
    uint64_t value = 0;
    int rc = take_number(m, bytes, &value);
    if (rc == 0 && is_signed && bytes && bytes < 8 && value >> (8 * bytes - 1))
        value |= UINT64_MAX << (8 * bytes);
    return rc < 0 ? rc : push(m, (struct node){.kind = INTEGER, .number = (int64_t)value});
}

/* LONG1: a length, then so many bytes of two's complement. */
static int push_long(struct machine *m)
{
    uint64_t bytes = 0;
    int rc = take_number(m, 1, &bytes);
    if (rc < 0)
        return rc;
    if (bytes > 8)
        return fail(m, -ENOTSUP, "found an integer of %" PRIu64 " bytes, expected at most 8", bytes);
    return push_integer(m, (unsigned)bytes, true);
}

static int push_text(struct machine *m)
{
    uint64_t bytes = 0;
    const uint8_t *at = NULL;
    int rc = take_number(m, 4, &bytes);
    if (rc < 0 || (rc = take(m, bytes, &at)) < 0)
        return rc;
    if (memchr(at, 0, bytes))
        return fail(m, -EBADMSG, "found a zero byte in a string, expected text");
    return push(m, (struct node){.kind = TEXT, .text = {(const char *)at, bytes}});
}

/* Up to the end of the line. */
static int take_line(struct machine *m, struct name *ret)
{
    const uint8_t *end = memchr(m->code, '\n', (size_t)(m->end - m->code));
    if (!end)
        return fail(m, -EBADMSG, "found its end within the name of a class");
    *ret = (struct name){(const char *)m->code, (size_t)(end - m->code)};
    m->code = end + 1;
    return 0;
}

static int push_global(struct machine *m)
{
    struct name module = {0}, name = {0};
    int rc;
    if ((rc = take_line(m, &module)) < 0 || (rc = take_line(m, &name)) < 0)
        return rc;
    for (uint32_t i = 0; i < GLOBALS; i++)
        if (name_is(module, globals[i].module) && name_is(name, globals[i].name))
            return push(m, (struct node){.kind = GLOBAL, .first = i});
    return fail(m, -ENOTSUP, "found %.*s.%.*s, expected only what a dict of tensors is made of",
                (int)(module.bytes < 80 ? module.bytes : 80), module.text,
                (int)(name.bytes < 80 ? name.bytes : 80), name.text);
}

/* Makes a tuple of the topmost `count` values. */
static int push_tuple(struct machine *m, uint32_t count)
{
    struct node node = {.kind = TUPLE, .first = m->elements.count, .count = count};
    if (m->stack.count < count)
        return fail(m, -EBADMSG, "found %" PRIu32 " values, expected the %" PRIu32 " of a tuple",
                    m->stack.count, count);
    for (uint32_t i = m->stack.count - count; i < m->stack.count; i++) {
        if (m->nodes[m->stack.at[i]].kind == MARK)
            return fail(m, -EBADMSG, "found a mark in a tuple, expected values");
        append(&m->elements, m->stack.at[i]);
    }
    m->stack.count -= count;
    return push(m, node);
}

/* The number of values above the topmost mark. */
static int count_to_mark(struct machine *m, uint32_t *ret)
{
    for (*ret = 0; *ret < m->stack.count; ++*ret)
        if (m->nodes[m->stack.at[m->stack.count - 1 - *ret]].kind == MARK)
            return 0;
    return fail(m, -EBADMSG, "found no mark, expected one");
}

static int push_marked_tuple(struct machine *m)
{
    uint32_t count = 0, mark = 0;
    int rc = count_to_mark(m, &count);
    if (rc < 0 || (rc = push_tuple(m, count)) < 0)
        return rc;
    uint32_t tuple = m->stack.at[--m->stack.count];
    rc = pop(m, MARK, &mark);
    append(&m->stack, tuple);
    return rc;
}

static int set_items(struct machine *m, uint32_t count)
{
    uint32_t value, key;
    if (count % 2 || m->stack.count < count + 1)
        return fail(m, -EBADMSG, "found %" PRIu32 " values for a dict, expected keys with values", count);
    uint32_t dict = m->stack.at[m->stack.count - count - 1];
    if (m->nodes[dict].kind != DICT)
        return fail(m, -EBADMSG, "found %s, expected a dict to put values in",
                    kind_names[m->nodes[dict].kind]);
    for (uint32_t i = 0; i < count; i += 2) {
        key = m->stack.at[m->stack.count - count + i];
        value = m->stack.at[m->stack.count - count + i + 1];
        if (m->nodes[key].kind == MARK || m->nodes[value].kind == MARK)
            return fail(m, -EBADMSG, "found a mark in a dict, expected values");
        if (m->item_count == m->item_room)
            m->items = mem_resize(m->items, m->item_room = grown(m->item_room), sizeof *m->items);
        m->items[m->item_count++] = (struct item){dict, key, value};
    }
    m->stack.count -= count;
    return 0;
}

static int set_marked_items(struct machine *m)
{
    uint32_t count = 0;
    int rc = count_to_mark(m, &count);
    if (rc < 0)
        return rc;
    /* The mark, which lies below them, goes first. */
    for (uint32_t i = m->stack.count - count; i < m->stack.count; i++)
        m->stack.at[i - 1] = m->stack.at[i];
    m->stack.count--;
    return set_items(m, count);
}

static int memo_put(struct machine *m, unsigned bytes)
{
    uint64_t place = 0;
    int rc = take_number(m, bytes, &place);
    if (rc < 0)
        return rc;
    if (m->stack.count == 0 || place > m->memo.count)
        return fail(m, -EBADMSG, "found memo place %" PRIu64 ", expected a value for at most place %" PRIu32,
                    place, m->memo.count);
    uint32_t top = m->stack.at[m->stack.count - 1];
    if (place == m->memo.count)
        append(&m->memo, top);
    else
        m->memo.at[place] = top;
    return 0;
}

static int memo_get(struct machine *m, unsigned bytes)
{
    uint64_t place = 0;
    int rc = take_number(m, bytes, &place);
    if (rc < 0)
        return rc;
    if (place >= m->memo.count || m->nodes[m->memo.at[place]].kind == MARK)
        return fail(m, -EBADMSG, "found memo place %" PRIu64 ", expected one of %" PRIu32 " values", place,
                    m->memo.count);
    append(&m->stack, m->memo.at[place]);
    return 0;
}

/* Element `i` of a tuple. */
static const struct node *element(const struct machine *m, const struct node *tuple, uint32_t i)
{
    return &m->nodes[m->elements.at[tuple->first + i]];
}

/* Whether the tuple's first values are of these kinds: a letter each, as below. */
static bool has_kinds(const struct machine *m, const struct node *tuple, const char *kinds)
{
    static const char letters[] = "MN_ISGTDXR"; /* enum kind */
    if (tuple->count < strlen(kinds))
        return false;
    for (uint32_t i = 0; kinds[i]; i++)
        if (letters[element(m, tuple, i)->kind] != kinds[i])
            return false;
    return true;
}

/* A storage: ("storage", class, key, device, elements), bytes in the member PREFIX/data/KEY. */
static int push_storage(struct machine *m)
{
    uint32_t id = 0;
    char name[512];
    int rc = pop(m, TUPLE, &id);
    if (rc < 0)
        return rc;
    const struct node *t = &m->nodes[id];
    if (t->count != 5 || !has_kinds(m, t, "SGSSI") || !name_is(element(m, t, 0)->text, "storage") ||
        globals[element(m, t, 1)->first].global != STORAGE_TYPE || element(m, t, 4)->number < 0)
        return fail(m, -EBADMSG, "found a persistent id that is no storage");
    struct name key = element(m, t, 2)->text;
    uint32_t type = element(m, t, 1)->first;
    uint64_t bytes, count = (uint64_t)element(m, t, 4)->number;
    int n = snprintf(name, sizeof name, "%s/data/%.*s", m->prefix, (int)(key.bytes < 256 ? key.bytes : 256),
                     key.text);
    const struct torch_member *data = n < (int)sizeof name ? torch_zip_find(m->zip, name) : NULL;
    if (!data)
        return fail(m, -EBADMSG, "found storage %.*s, expected a member of that name",
                    (int)(key.bytes < 80 ? key.bytes : 80), key.text);
    if (__builtin_mul_overflow(count, safetensors_type_bytes(globals[type].type), &bytes) ||
        bytes != data->bytes)
        return fail(m, -EBADMSG, "storage %.80s: found %" PRIu64 " elements in %" PRIu64 " bytes", name,
                    count, data->bytes);
    return push(m, (struct node){.kind = STORAGE, .tensor = type, .data = *data});
}

/* Shape and strides out of two tuples: the elements must lie as in C. */
static int read_shape(struct machine *m, const struct node *size, const struct node *stride,
                      struct safetensors_tensor *t)
{
    if (size->count > SAFETENSORS_DIMS_MAX || stride->count != size->count)
        return fail(m, -ENOTSUP,
                    "found a tensor of %" PRIu32 " dimensions and %" PRIu32 " strides, expected at most %d",
                    size->count, stride->count, SAFETENSORS_DIMS_MAX);
    t->dims = size->count;
    int64_t expected = 1;
    for (uint32_t d = t->dims; d-- > 0;) {
        const struct node *n = element(m, size, d), *s = element(m, stride, d);
        if (n->kind != INTEGER || s->kind != INTEGER || n->number < 0 || s->number < 0)
            return fail(m, -EBADMSG, "found a tensor's size that is no count");
        t->shape[d] = (uint64_t)n->number;
        if (n->number > 1 && s->number != expected)
            return fail(m, -ENOTSUP,
                        "found a tensor with stride %" PRId64 ", expected %" PRId64 " (contiguous)",
                        s->number, expected);
        if (__builtin_mul_overflow(expected, n->number ? n->number : 1, &expected))
            return fail(m, -EBADMSG, "found a tensor larger than memory");
    }
    return 0;
}

/* (storage, first element, size, stride, requires_grad, hooks[, metadata]) */
static int rebuild_tensor(struct machine *m, const struct node *args)
{
    struct safetensors_tensor t = {0};
    if (args->count < 6 || args->count > 7 || !has_kinds(m, args, "XITT_D"))
        return fail(m, -EBADMSG, "found arguments of _rebuild_tensor_v2 that are none");
    if (args->count == 7 && element(m, args, 6)->kind != NONE)
        return fail(m, -ENOTSUP, "found a tensor with metadata, expected a plain one");
    const struct node *storage = element(m, args, 0);
    int64_t first = element(m, args, 1)->number;
    int rc = read_shape(m, element(m, args, 2), element(m, args, 3), &t);
    if (rc < 0)
        return rc;
    t.type = globals[storage->tensor].type;
    uint64_t begin, end, width = safetensors_type_bytes(t.type);
    if (first < 0 || safetensors_size(t.type, t.shape, t.dims, &t.bytes) < 0 ||
        __builtin_mul_overflow((uint64_t)first, width, &begin) ||
        __builtin_add_overflow(begin, t.bytes, &end) || end > storage->data.bytes)
        return fail(m, -EBADMSG, "found a tensor that ends behind its storage of %" PRIu64 " bytes",
                    storage->data.bytes);
    t.data = storage->data.data + begin;
    struct torch_list *list = &m->tensors;
    if (list->count == TORCH_TENSORS_MAX)
        return fail(m, -EBADMSG, "found more than %u tensors", TORCH_TENSORS_MAX);
    if (list->count == list->room)
        list->items = mem_resize(list->items, list->room = grown(list->room), sizeof *list->items);
    list->items[list->count] = t;
    return push(m, (struct node){.kind = TENSOR, .tensor = list->count++});
}

/* Calls that a dict of tensors needs, by their meaning. */
static int reduce(struct machine *m)
{
    uint32_t args_at = 0, callee_at = 0;
    int rc;
    if ((rc = pop(m, TUPLE, &args_at)) < 0 || (rc = pop(m, GLOBAL, &callee_at)) < 0)
        return rc;
    struct node args = m->nodes[args_at];
    uint32_t callee = m->nodes[callee_at].first;
    switch (globals[callee].global) {
    case ORDERED_DICT:
        if (args.count == 0)
            return push(m, (struct node){.kind = DICT});
        break;
    case REBUILD_TENSOR:
        return rebuild_tensor(m, &args);
    case REBUILD_PARAMETER: /* (tensor, requires_grad, hooks) */
        if (args.count == 3 && has_kinds(m, &args, "R_D"))
            return push(m, *element(m, &args, 0));
        break;
    default:
        break;
    }
    return fail(m, -ENOTSUP, "found a call of %s with %" PRIu32 " arguments, expected none such",
                globals[callee].name, args.count);
}

/* Attributes of an OrderedDict (a state dict's versions): no tensors, passed over. */
static int build(struct machine *m)
{
    uint32_t state = 0;
    int rc = pop(m, DICT, &state);
    if (rc < 0)
        return rc;
    if (m->stack.count == 0 || m->nodes[m->stack.at[m->stack.count - 1]].kind != DICT)
        return fail(m, -EBADMSG, "found attributes, expected a dict that they belong to");
    return 0;
}

static int protocol(struct machine *m)
{
    uint64_t version = 0;
    int rc = take_number(m, 1, &version);
    if (rc == 0 && version != 2)
        rc = fail(m, -ENOTSUP, "protocol: found %" PRIu64 ", expected 2, which torch.save writes", version);
    return rc;
}

/* One opcode but STOP; names in comments are pickletools'. */
static int run_opcode(struct machine *m, uint8_t opcode)
{
    switch (opcode) {
    case 0x80: /* PROTO */
        return protocol(m);
    case '(': /* MARK */
        return push(m, (struct node){.kind = MARK});
    case 'N': /* NONE */
        return push(m, (struct node){.kind = NONE});
    case 0x88: /* NEWTRUE, NEWFALSE */
    case 0x89:
        return push(m, (struct node){.kind = BOOLEAN, .number = opcode == 0x88});
    case 'J': /* BININT */
        return push_integer(m, 4, true);
    case 'K': /* BININT1 */
        return push_integer(m, 1, false);
    case 'M': /* BININT2 */
        return push_integer(m, 2, false);
    case 0x8a: /* LONG1 */
        return push_long(m);
    case 'X': /* BINUNICODE */
        return push_text(m);
    case 'c': /* GLOBAL */
        return push_global(m);
    case ')': /* EMPTY_TUPLE, TUPLE1 to TUPLE3 */
        return push_tuple(m, 0);
    case 0x85:
    case 0x86:
    case 0x87:
        return push_tuple(m, opcode - 0x84u);
    case 't': /* TUPLE */
        return push_marked_tuple(m);
    case '}': /* EMPTY_DICT */
        return push(m, (struct node){.kind = DICT});
    case 's': /* SETITEM */
        return set_items(m, 2);
    case 'u': /* SETITEMS */
        return set_marked_items(m);
    case 'q': /* BINPUT, LONG_BINPUT */
        return memo_put(m, 1);
    case 'r':
        return memo_put(m, 4);
    case 'h': /* BINGET, LONG_BINGET */
        return memo_get(m, 1);
    case 'j':
        return memo_get(m, 4);
    case 'Q': /* BINPERSID */
        return push_storage(m);
    case 'R': /* REDUCE */
        return reduce(m);
    case 'b': /* BUILD */
        return build(m);
    default:
        return fail(m, -ENOTSUP, "found opcode 0x%02x, expected only what a dict of tensors is made of",
                    opcode);
    }
}

/* The dict that is left, as a list. */
static int list_tensors(struct machine *m, struct torch_list *ret)
{
    uint32_t dict = 0;
    int rc = pop(m, DICT, &dict);
    if (rc < 0)
        return rc;
    ret->items = mem_alloc(m->item_count, sizeof *ret->items);
    ret->room = m->item_count;
    for (uint32_t i = 0; i < m->item_count; i++) {
        const struct item *item = &m->items[i];
        const struct node *key = &m->nodes[item->key], *value = &m->nodes[item->value];
        if (item->dict != dict)
            continue;
        if (key->kind != TEXT)
            return fail(m, -ENOTSUP, "found %s as a key, expected a tensor's name", kind_names[key->kind]);
        if (value->kind != TENSOR)
            return fail(m, -ENOTSUP, "%.*s: found %s, expected a tensor",
                        (int)(key->text.bytes < 80 ? key->text.bytes : 80), key->text.text,
                        kind_names[value->kind]);
        struct safetensors_tensor *to = &ret->items[ret->count++];
        *to = m->tensors.items[value->tensor];
        to->name = key->text;
    }
    return 0;
}

int torch_pickle_read(const struct torch_zip *zip, const char *prefix, const struct torch_member *pickle,
                      const char *path, struct torch_list *ret, struct err *err)
{
    struct machine m = {.zip = zip,
                        .prefix = prefix,
                        .path = path,
                        .err = err,
                        .code = pickle->data,
                        .end = pickle->data + pickle->bytes};
    int rc = 0;
    if (pickle->bytes > TORCH_PICKLE_MAX)
        rc = fail(&m, -EBADMSG, "found %" PRIu64 " bytes, expected at most %u", pickle->bytes,
                  TORCH_PICKLE_MAX);
    while (rc == 0) {
        const uint8_t *opcode = NULL;
        rc = take(&m, 1, &opcode);
        if (rc == 0 && *opcode == '.') {
            rc = list_tensors(&m, ret);
            break;
        }
        if (rc == 0)
            rc = run_opcode(&m, *opcode);
    }
    mem_free(&m.nodes);
    mem_free(&m.items);
    mem_free(&m.stack.at);
    mem_free(&m.memo.at);
    mem_free(&m.elements.at);
    mem_free(&m.tensors.items);
    return rc;
}
