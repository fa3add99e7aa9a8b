/* Reading msgpack; see pack.h. Pure, any thread. Every length is compared with the bytes that are left
 * before it is used, and nothing is allocated or recursed into: hostile bytes cost at most one pass over
 * them. */
#include "proto/pack.h"

#include <errno.h>
#include <string.h>

#include "base/check.h"

enum { DEPTH_MAX = 16 };

static int truncated(const struct pack_reader *r, struct err *err)
{
    return err_set(err, -EPROTO, "message ends within an item at byte %zu", (size_t)(r->at - r->begin));
}

static uint64_t big_endian(const uint8_t *at, unsigned bytes)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++)
        value = value << 8 | at[i];
    return value;
}

/* Takes a number of `bytes` bytes. */
static bool take(struct pack_reader *r, unsigned bytes, uint64_t *ret)
{
    if ((size_t)(r->end - r->at) < bytes)
        return false;
    *ret = big_endian(r->at, bytes);
    r->at += bytes;
    return true;
}

static bool set_data(struct pack_reader *r, struct pack_item *item, enum pack_type type, uint64_t bytes)
{
    if ((uint64_t)(r->end - r->at) < bytes)
        return false;
    item->type = type;
    item->data = r->at;
    item->count = (uint32_t)bytes;
    r->at += bytes;
    return true;
}

/* Every item has at least one byte, so a count beyond the bytes that are left is a lie. */
static bool set_container(const struct pack_reader *r, struct pack_item *item, enum pack_type type,
                          uint64_t count)
{
    uint64_t least = type == PACK_MAP ? 2 * count : count;
    if ((uint64_t)(r->end - r->at) < least)
        return false;
    item->type = type;
    item->count = (uint32_t)count;
    return true;
}

static void set_signed(struct pack_item *item, int64_t value)
{
    item->type = value < 0 ? PACK_NEGATIVE : PACK_UINT;
    if (value < 0)
        item->negative = value;
    else
        item->uint = (uint64_t)value;
}

static void set_float(struct pack_item *item, uint64_t bits, unsigned bytes)
{
    item->type = PACK_FLOAT;
    if (bytes == 8) {
        memcpy(&item->real, &bits, sizeof item->real);
    } else {
        uint32_t low = (uint32_t)bits;
        float real;
        memcpy(&real, &low, sizeof real);
        item->real = real;
    }
}

/* Items with a length or value of 1, 2, 4 or 8 bytes behind the type byte. */
static bool take_long(struct pack_reader *r, uint8_t byte, struct pack_item *item)
{
    uint64_t n;
    switch (byte) {
    case 0xc4:
    case 0xc5:
    case 0xc6:
        return take(r, 1u << (byte - 0xc4), &n) && set_data(r, item, PACK_BIN, n);
    case 0xc7:
    case 0xc8:
    case 0xc9: /* one byte of ext type, then the data */
        return take(r, 1u << (byte - 0xc7), &n) && set_data(r, item, PACK_EXT, n + 1);
    case 0xca:
    case 0xcb:
        if (!take(r, 4u << (byte - 0xca), &n))
            return false;
        set_float(item, n, 4u << (byte - 0xca));
        return true;
    case 0xcc:
    case 0xcd:
    case 0xce:
    case 0xcf:
        item->type = PACK_UINT;
        return take(r, 1u << (byte - 0xcc), &item->uint);
    case 0xd0:
    case 0xd1:
    case 0xd2:
    case 0xd3: {
        unsigned bytes = 1u << (byte - 0xd0), shift = 64 - 8 * bytes;
        if (!take(r, bytes, &n))
            return false;
        set_signed(item, (int64_t)(n << shift) >> shift);
        return true;
    }
    case 0xd4:
    case 0xd5:
    case 0xd6:
    case 0xd7:
    case 0xd8:
        return set_data(r, item, PACK_EXT, (1u << (byte - 0xd4)) + 1);
    case 0xd9:
    case 0xda:
    case 0xdb:
        return take(r, 1u << (byte - 0xd9), &n) && set_data(r, item, PACK_STR, n);
    case 0xdc:
    case 0xdd:
        return take(r, 2u << (byte - 0xdc), &n) && set_container(r, item, PACK_ARRAY, n);
    case 0xde:
    case 0xdf:
        return take(r, 2u << (byte - 0xde), &n) && set_container(r, item, PACK_MAP, n);
    default: /* 0xc1 is never used */
        return false;
    }
}

int pack_next(struct pack_reader *r, struct pack_item *item, struct err *err)
{
    if (r->at >= r->end)
        return truncated(r, err);
    struct pack_reader start = *r;
    uint8_t byte = *r->at++;
    bool ok = true;
    memset(item, 0, sizeof *item);
    if (byte < 0x80 || byte >= 0xe0)
        set_signed(item, (int8_t)byte);
    else if (byte < 0x90)
        ok = set_container(r, item, PACK_MAP, byte & 15);
    else if (byte < 0xa0)
        ok = set_container(r, item, PACK_ARRAY, byte & 15);
    else if (byte < 0xc0)
        ok = set_data(r, item, PACK_STR, byte & 31);
    else if (byte == 0xc0)
        item->type = PACK_NIL;
    else if (byte == 0xc2 || byte == 0xc3)
        *item = (struct pack_item){.type = PACK_BOOL, .boolean = byte == 0xc3};
    else
        ok = take_long(r, byte, item);
    return ok ? 0 : truncated(&start, err);
}

static uint64_t children(const struct pack_item *item)
{
    return item->type == PACK_ARRAY ? item->count : item->type == PACK_MAP ? 2ull * item->count : 0;
}

int pack_check(const void *bytes, size_t length, uint32_t depth, uint32_t objects, struct err *err)
{
    CHECK(depth <= DEPTH_MAX);
    struct pack_reader r = {.at = bytes, .end = (const uint8_t *)bytes + length, .begin = bytes};
    uint64_t left[DEPTH_MAX + 1] = {1}; /* items still to come at each level */
    uint32_t level = 0;
    for (;;) {
        while (level > 0 && left[level] == 0)
            level--;
        if (left[level] == 0)
            break;
        left[level]--;
        if (objects-- == 0)
            return err_set(err, -EMSGSIZE, "message has too many items");
        struct pack_item item;
        int code = pack_next(&r, &item, err);
        if (code < 0)
            return code;
        if (item.type != PACK_ARRAY && item.type != PACK_MAP)
            continue;
        if (level == depth)
            return err_set(err, -EPROTO, "message is nested more than %u deep", depth);
        left[++level] = children(&item);
    }
    if (r.at != r.end)
        return err_set(err, -EPROTO, "message has %zu bytes behind its end", (size_t)(r.end - r.at));
    return 0;
}

void pack_skip(struct pack_reader *r)
{
    uint64_t left = 1;
    while (left--) {
        struct pack_item item;
        CHECK(pack_next(r, &item, NULL) == 0);
        left += children(&item);
    }
}
