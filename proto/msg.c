/* Messages as bytes; see msg.h. Pure, any thread.
 *
 * Both directions walk the tables of msg_fields.c. Reading goes: the whole frame's framing (nothing
 * allocated), envelope, fields into the struct (bulk data still pointing into the frame), ranges, one
 * allocation for all bulk data, and last what needs the data's content. Structs of entries are copied as
 * they are, so this is for little-endian machines only. */
#include "proto/msg.h"

#include <errno.h>
#include <msgpack.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "proto/msg_fields.h"
#include "proto/pack.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "bulk data travels as it lies in memory");

enum { ENVELOPE_ITEMS = 6, ENCODE_ROOM = 4096, BULK_ALIGN = 8 };

/* Bulk data of a field, whichever type it has. */
struct bulk {
    const void **data; /* the struct's pointer */
    size_t bytes;
};

/* Whether the field is bulk data. `base` is what its offset counts from. */
static bool field_bulk(const struct field *f, void *base, struct bulk *ret)
{
    size_t unit;
    switch (f->type) {
    case FIELD_IDS:
        unit = sizeof(uint32_t);
        break;
    case FIELD_BYTES:
        unit = 1;
        break;
    case FIELD_ENTRIES:
        unit = f->size;
        break;
    default:
        return false;
    }
    uint8_t *at = (uint8_t *)base + f->at;
    uint32_t count; /* all three: a pointer, then a count */
    memcpy(&count, at + sizeof(void *), sizeof count);
    *ret = (struct bulk){.data = (const void **)(void *)at, .bytes = count * unit};
    return true;
}

/* Bulk fields stand in the body itself, never in a struct within it. */
static size_t bulk_bytes(const struct kind *kind, void *body)
{
    size_t sum = 0;
    struct bulk bulk;
    for (const struct field *f = kind->fields; f->name; f++)
        if (field_bulk(f, body, &bulk))
            sum +=
                (bulk.bytes + BULK_ALIGN) / BULK_ALIGN * BULK_ALIGN; /* at least one zero byte behind each */
    return sum;
}

/* ---- writing ---- */

static void write_text(msgpack_packer *pack, const void *data, size_t bytes)
{
    CHECK(msgpack_pack_str(pack, bytes) == 0 && msgpack_pack_str_body(pack, data, bytes) == 0);
}

static void write_bin(msgpack_packer *pack, const void *data, size_t bytes)
{
    CHECK(msgpack_pack_bin(pack, bytes) == 0 && msgpack_pack_bin_body(pack, data, bytes) == 0);
}

static bool is_present(const struct field *f, const uint8_t *base)
{
    return !f->present_at || *(const bool *)(base + f->present_at);
}

static void write_table(msgpack_packer *pack, const struct field *table, uint8_t *base);

static void write_field(msgpack_packer *pack, const struct field *f, uint8_t *base)
{
    void *at = base + f->at;
    struct bulk bulk;
    switch (f->type) {
    case FIELD_U32:
        msgpack_pack_uint32(pack, *(const uint32_t *)at);
        break;
    case FIELD_I32:
        msgpack_pack_int32(pack, *(const int32_t *)at);
        break;
    case FIELD_U64:
        msgpack_pack_uint64(pack, *(const uint64_t *)at);
        break;
    case FIELD_I64:
        msgpack_pack_int64(pack, *(const int64_t *)at);
        break;
    case FIELD_F32:
        msgpack_pack_float(pack, *(const float *)at);
        break;
    case FIELD_F64:
        msgpack_pack_double(pack, *(const double *)at);
        break;
    case FIELD_TEXT:
        write_text(pack, at, strlen(at));
        break;
    case FIELD_HASH:
    case FIELD_WORDS:
        write_bin(pack, at, f->size);
        break;
    case FIELD_STRUCT:
        write_table(pack, f->sub, at);
        break;
    case FIELD_BYTES:
        field_bulk(f, base, &bulk);
        write_text(pack, *bulk.data, bulk.bytes);
        break;
    case FIELD_IDS:
    case FIELD_ENTRIES:
        field_bulk(f, base, &bulk);
        write_bin(pack, *bulk.data, bulk.bytes);
        break;
    }
}

static void write_table(msgpack_packer *pack, const struct field *table, uint8_t *base)
{
    uint32_t count = 0;
    for (const struct field *f = table; f->name; f++)
        count += is_present(f, base);
    CHECK(msgpack_pack_map(pack, count) == 0);
    for (const struct field *f = table; f->name; f++) {
        if (!is_present(f, base))
            continue;
        write_text(pack, f->name, strlen(f->name));
        write_field(pack, f, base);
    }
}

void msg_encode(const struct msg *msg, void **ret_buffer, size_t *ret_bytes)
{
    const struct kind *kind = kind_find(msg->kind);
    CHECK(kind != NULL);
    CHECK(msg->version >= MSG_VERSION_MIN && msg->version <= MSG_VERSION && msg->deadline_ns >= 0);
    CHECK(kind_check_fields(kind, msg, NULL) == 0);
    CHECK(!kind->check || kind->check(msg, NULL) == 0);
    uint8_t *body = (uint8_t *)(uintptr_t)&msg->hello; /* written to by no type of field */

    msgpack_sbuffer buffer;
    msgpack_sbuffer_init(&buffer);
    buffer.alloc = ENCODE_ROOM + bulk_bytes(kind, body); /* one allocation, since bulk data is what counts */
    buffer.data = mem_resize(NULL, buffer.alloc, 1);
    msgpack_packer pack;
    msgpack_packer_init(&pack, &buffer, msgpack_sbuffer_write);
    msgpack_pack_array(&pack, ENVELOPE_ITEMS);
    msgpack_pack_uint32(&pack, msg->kind);
    msgpack_pack_uint32(&pack, msg->version);
    msgpack_pack_uint64(&pack, msg->epoch);
    msgpack_pack_uint64(&pack, msg->id);
    msgpack_pack_int64(&pack, msg->deadline_ns);
    write_table(&pack, kind->fields, body);
    CHECK(buffer.size <= LIMIT_MESSAGE_BYTES);
    *ret_buffer = buffer.data;
    *ret_bytes = buffer.size;
}

void msg_buffer_free(void *buffer)
{
    mem_free(&buffer);
}

/* ---- reading ---- */

static int wrong_type(const char *name, struct err *err)
{
    return err_set(err, -EPROTO, "%s: found another type than expected", name);
}

static int read_unsigned(const struct pack_item *item, const char *name, uint64_t most, uint64_t *ret,
                         struct err *err)
{
    if (item->type == PACK_NEGATIVE)
        return err_set(err, -EPROTO, "%s: found %lld, expected at least 0", name, (long long)item->negative);
    if (item->type != PACK_UINT)
        return wrong_type(name, err);
    if (item->uint > most)
        return err_set(err, -EPROTO, "%s: found %llu, expected at most %llu", name,
                       (unsigned long long)item->uint, (unsigned long long)most);
    *ret = item->uint;
    return 0;
}

static int read_signed(const struct pack_item *item, const char *name, int64_t most, int64_t *ret,
                       struct err *err)
{
    uint64_t value = 0;
    if (item->type == PACK_NEGATIVE && item->negative >= -most - 1) {
        *ret = item->negative;
        return 0;
    }
    int r = read_unsigned(item, name, (uint64_t)most, &value, err);
    *ret = (int64_t)value;
    return r;
}

static int read_number(const struct field *f, const struct pack_item *item, void *at, struct err *err)
{
    uint64_t u = 0;
    int64_t i = 0;
    int r;
    switch (f->type) {
    case FIELD_U32:
        r = read_unsigned(item, f->name, UINT32_MAX, &u, err);
        *(uint32_t *)at = (uint32_t)u;
        return r;
    case FIELD_U64:
        r = read_unsigned(item, f->name, UINT64_MAX, &u, err);
        *(uint64_t *)at = u;
        return r;
    case FIELD_I32:
        r = read_signed(item, f->name, INT32_MAX, &i, err);
        *(int32_t *)at = (int32_t)i;
        return r;
    case FIELD_I64:
        r = read_signed(item, f->name, INT64_MAX, &i, err);
        *(int64_t *)at = i;
        return r;
    default:
        if (item->type != PACK_FLOAT)
            return wrong_type(f->name, err);
        if (f->type == FIELD_F64)
            *(double *)at = item->real;
        else
            *(float *)at = (float)item->real;
        return 0;
    }
}

static int read_text(const struct field *f, const struct pack_item *item, char *at, struct err *err)
{
    if (item->type != PACK_STR)
        return wrong_type(f->name, err);
    if (item->count >= f->size)
        return err_set(err, -EPROTO, "%s: length: found %u, expected at most %u", f->name, item->count,
                       f->size - 1u);
    if (memchr(item->data, 0, item->count))
        return err_set(err, -EPROTO, "%s: found a zero byte in the text", f->name);
    memset(at, 0, f->size); /* a key may come twice */
    memcpy(at, item->data, item->count);
    return 0;
}

/* Leaves the struct's pointer in the frame; copy_bulk moves the data out of it. */
static int read_bulk(const struct field *f, const struct pack_item *item, uint8_t *at, struct err *err)
{
    uint32_t unit = f->type == FIELD_IDS ? sizeof(uint32_t) : f->type == FIELD_ENTRIES ? f->size : 1;
    if (item->type != (f->type == FIELD_BYTES ? PACK_STR : PACK_BIN))
        return wrong_type(f->name, err);
    if (item->count % unit)
        return err_set(err, -EPROTO, "%s: length: found %u bytes, expected a multiple of %u", f->name,
                       item->count, unit);
    uint32_t count = item->count / unit;
    memcpy(at, &item->data, sizeof item->data);
    memcpy(at + sizeof item->data, &count, sizeof count);
    return 0;
}

static int read_table(struct pack_reader *reader, const struct pack_item *map, const struct field *table,
                      uint8_t *base, struct err *err);

/* `item`: the value's head, already taken from the reader. */
static int read_field(struct pack_reader *reader, const struct field *f, const struct pack_item *item,
                      uint8_t *base, struct err *err)
{
    switch (f->type) {
    case FIELD_TEXT:
        return read_text(f, item, (char *)base + f->at, err);
    case FIELD_HASH:
    case FIELD_WORDS:
        if (item->type != PACK_BIN)
            return wrong_type(f->name, err);
        if (item->count != f->size)
            return err_set(err, -EPROTO, "%s: length: found %u bytes, expected %u", f->name, item->count,
                           f->size);
        memcpy(base + f->at, item->data, f->size);
        return 0;
    case FIELD_IDS:
    case FIELD_BYTES:
    case FIELD_ENTRIES:
        return read_bulk(f, item, base + f->at, err);
    case FIELD_STRUCT:
        return read_table(reader, item, f->sub, base + f->at, err);
    default:
        return read_number(f, item, base + f->at, err);
    }
}

static const struct field *find_field(const struct field *table, const struct pack_item *key)
{
    for (const struct field *f = table; f->name; f++)
        if (strlen(f->name) == key->count && memcmp(f->name, key->data, key->count) == 0)
            return f;
    return NULL;
}

static int read_table(struct pack_reader *reader, const struct pack_item *map, const struct field *table,
                      uint8_t *base, struct err *err)
{
    uint32_t seen = 0; /* a bit for each field: tables are short */
    if (map->type != PACK_MAP)
        return err_set(err, -EPROTO, "found another type than a map of fields");
    for (uint32_t i = 0; i < map->count; i++) {
        struct pack_item key, value;
        int r = pack_next(reader, &key, err);
        if (r == 0 && key.type != PACK_STR)
            r = err_set(err, -EPROTO, "found a field whose name is no string");
        if (r < 0)
            return r;
        const struct field *f = find_field(table, &key);
        if (!f) {
            pack_skip(reader);
            continue;
        }
        r = pack_next(reader, &value, err);
        if (r == 0)
            r = read_field(reader, f, &value, base, err);
        if (r < 0)
            return r;
        seen |= 1u << (f - table);
        if (f->present_at)
            *(bool *)(base + f->present_at) = true;
    }
    for (const struct field *f = table; f->name; f++)
        if (!f->present_at && !(seen & 1u << (f - table)))
            return err_set(err, -EPROTO, "%s: missing", f->name);
    return 0;
}

static int read_envelope(struct pack_reader *reader, struct msg *msg, struct err *err)
{
    struct pack_item array, item;
    uint64_t value = 0;
    int r = pack_next(reader, &array, err);
    if (r == 0 && (array.type != PACK_ARRAY || array.count < 2))
        r = err_set(err, -EPROTO, "message is no array of %d items", ENVELOPE_ITEMS);
    if (r == 0 && (r = pack_next(reader, &item, err)) == 0)
        r = read_unsigned(&item, "kind", UINT32_MAX, &value, err);
    msg->kind = (uint32_t)value;
    if (r == 0 && (r = pack_next(reader, &item, err)) == 0)
        r = read_unsigned(&item, "version", UINT32_MAX, &value, err);
    msg->version = (uint32_t)value;
    if (r < 0)
        return r;
    if (msg->version < MSG_VERSION_MIN || msg->version > MSG_VERSION)
        return err_set(err, -EPROTONOSUPPORT, "version: found %u, expected %u to %u", msg->version,
                       MSG_VERSION_MIN, MSG_VERSION);
    if (array.count != ENVELOPE_ITEMS)
        return err_set(err, -EPROTO, "message: found %u items, expected %d", array.count, ENVELOPE_ITEMS);
    if ((r = pack_next(reader, &item, err)) == 0)
        r = read_unsigned(&item, "epoch", UINT64_MAX, &msg->epoch, err);
    if (r == 0 && (r = pack_next(reader, &item, err)) == 0)
        r = read_unsigned(&item, "id", UINT64_MAX, &msg->id, err);
    if (r == 0 && (r = pack_next(reader, &item, err)) == 0)
        r = read_unsigned(&item, "deadline_ns", INT64_MAX, &value, err);
    msg->deadline_ns = (int64_t)value;
    return r;
}

/* Moves all bulk data out of the frame into one block, each at a multiple of 8, zero bytes behind it. */
static void copy_bulk(const struct kind *kind, struct msg *msg)
{
    size_t bytes = bulk_bytes(kind, kind_body(msg));
    if (bytes == 0)
        return;
    uint8_t *to = mem_resize(NULL, bytes, 1);
    msg->memory = to;
    struct bulk bulk;
    for (const struct field *f = kind->fields; f->name; f++) {
        if (!field_bulk(f, kind_body(msg), &bulk))
            continue;
        size_t room = (bulk.bytes + BULK_ALIGN) / BULK_ALIGN * BULK_ALIGN;
        memcpy(to, *bulk.data, bulk.bytes);
        memset(to + bulk.bytes, 0, room - bulk.bytes);
        *bulk.data = to;
        to += room;
    }
}

static int read_body(struct pack_reader *reader, struct msg *msg, struct err *err)
{
    const struct kind *kind = kind_find(msg->kind);
    if (!kind)
        return err_set(err, -EPROTO, "kind: found %u, expected a known one", msg->kind);
    struct pack_item map;
    int r = pack_next(reader, &map, err);
    if (r == 0)
        r = read_table(reader, &map, kind->fields, kind_body(msg), err);
    if (r < 0)
        return err_prefix(err, r, "%s", kind->name);
    r = kind_check_fields(kind, msg, err);
    if (r < 0)
        return r;
    copy_bulk(kind, msg);
    return kind->check ? kind->check(msg, err) : 0;
}

int msg_decode(const void *frame, size_t bytes, struct msg *ret, struct err *err)
{
    memset(ret, 0, sizeof *ret);
    if (bytes > LIMIT_MESSAGE_BYTES)
        return err_set(err, -EMSGSIZE, "message: found %zu bytes, expected at most %u", bytes,
                       LIMIT_MESSAGE_BYTES);
    int r = pack_check(frame, bytes, LIMIT_MESSAGE_DEPTH, LIMIT_MESSAGE_OBJECTS, err);
    if (r < 0)
        return r;
    struct pack_reader reader = {.at = frame, .end = (const uint8_t *)frame + bytes, .begin = frame};
    r = read_envelope(&reader, ret, err);
    if (r == 0)
        r = read_body(&reader, ret, err);
    if (r < 0)
        msg_free(ret);
    return r;
}

void msg_free(struct msg *msg)
{
    mem_free(&msg->memory);
}

void msg_add_counters(struct kv_counters *sum, const struct kv_counters *c)
{
    sum->steps += c->steps;
    sum->attended += c->attended;
    sum->lists += c->lists;
    sum->selected += c->selected;
    sum->kept += c->kept;
    sum->rows_loaded += c->rows_loaded;
    sum->bytes_loaded += c->bytes_loaded;
    sum->bytes_if_reloaded += c->bytes_if_reloaded;
    sum->rows_filled += c->rows_filled;
    sum->bytes_filled += c->bytes_filled;
    sum->bytes_written += c->bytes_written;
    sum->mass_sum += c->mass_sum;
    sum->mass_base_sum += c->mass_base_sum;
    sum->mass_count += c->mass_count;
    sum->grown += c->grown;
    sum->fallbacks += c->fallbacks;
    sum->layers_resident = c->layers_resident;
    sum->layers_offloaded = c->layers_offloaded;
    if (c->layers_offloaded_max > sum->layers_offloaded_max)
        sum->layers_offloaded_max = c->layers_offloaded_max;
}

/* ---- names and permissions ---- */

const char *msg_kind_name(uint32_t kind)
{
    const struct kind *found = kind_find(kind);
    return found ? found->name : "?";
}

const char *msg_role_name(uint32_t role)
{
    static const char *const names[] = {
        [ROLE_DECODER] = "decoder", [ROLE_RETRIEVER] = "retriever", [ROLE_KVSTORE] = "kvstore",
        [ROLE_GATEWAY] = "gateway", [ROLE_LAUNCH] = "launch",
    };
    return role >= ROLE_DECODER && role <= ROLE_LAUNCH ? names[role] : "?";
}

const char *msg_finish_name(uint32_t reason)
{
    static const char *const names[] = {
        [FINISH_STOP] = "stop",
        [FINISH_LENGTH] = "length",
        [FINISH_CANCELLED] = "cancelled",
        [FINISH_ERROR] = "error",
    };
    return reason >= FINISH_STOP && reason <= FINISH_ERROR ? names[reason] : "?";
}

struct permission {
    uint32_t server, from, kind;
};

static const struct permission permissions[] = {
    {ROLE_KVSTORE, ROLE_DECODER, MSG_OPEN},     {ROLE_KVSTORE, ROLE_DECODER, MSG_CLOSE},
    {ROLE_KVSTORE, ROLE_DECODER, MSG_RESUME},   {ROLE_KVSTORE, ROLE_DECODER, MSG_PREFIX},
    {ROLE_KVSTORE, ROLE_RETRIEVER, MSG_TOPK},   {ROLE_KVSTORE, ROLE_GATEWAY, MSG_PREFIX},
    {ROLE_KVSTORE, ROLE_LAUNCH, MSG_PREFIX},    {ROLE_RETRIEVER, ROLE_DECODER, MSG_OPEN},
    {ROLE_RETRIEVER, ROLE_DECODER, MSG_CLOSE},  {ROLE_RETRIEVER, ROLE_DECODER, MSG_STEP},
    {ROLE_DECODER, ROLE_GATEWAY, MSG_GENERATE}, {ROLE_DECODER, ROLE_GATEWAY, MSG_CANCEL},
    {ROLE_DECODER, ROLE_LAUNCH, MSG_GENERATE},  {ROLE_DECODER, ROLE_LAUNCH, MSG_CANCEL},
};

bool msg_allowed(uint32_t server, uint32_t from, bool greeted, uint32_t kind)
{
    if (kind == MSG_HELLO)
        return true;
    if (!greeted)
        return false;
    if (kind == MSG_PING || kind == MSG_STATUS)
        return true;
    if (kind == MSG_DRAIN)
        return from == ROLE_LAUNCH;
    for (size_t i = 0; i < sizeof permissions / sizeof *permissions; i++) {
        const struct permission *p = &permissions[i];
        if (p->server == server && p->from == from && p->kind == kind)
            return true;
    }
    return false;
}
