/* Reading msgpack without allocating: one item at a time, over bytes that stay the caller's. (Writing is
 * msgpack-c's packer.) */
#ifndef PROTO_PACK_H
#define PROTO_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

struct pack_reader {
    const uint8_t *at, *end;
    const uint8_t *begin; /* for offsets in errors */
};

enum pack_type {
    PACK_NIL,
    PACK_BOOL,
    PACK_UINT,
    PACK_NEGATIVE,
    PACK_FLOAT,
    PACK_STR,
    PACK_BIN,
    PACK_EXT,
    PACK_ARRAY,
    PACK_MAP
};

struct pack_item {
    enum pack_type type;
    union {
        bool boolean;
        uint64_t uint;    /* PACK_UINT: every integer >= 0, whatever its form */
        int64_t negative; /* PACK_NEGATIVE: < 0 */
        double real;
    };
    const uint8_t *data; /* str, bin, ext */
    uint32_t count;      /* str, bin, ext: bytes; array: items; map: pairs */
};

/* The next item; of a container its head only. -EPROTO when the bytes end within it, or when a container
 * tells more items than bytes are left. */
int pack_next(struct pack_reader *reader, struct pack_item *ret, struct err *err);

/* Whether the bytes are exactly one item, nested at most `depth` containers deep, of at most `objects` items
 * in all (keys and containers count). 0, -EPROTO (framing, depth, bytes behind the end), -EMSGSIZE
 * (objects). */
int pack_check(const void *bytes, size_t length, uint32_t depth, uint32_t objects, struct err *err);

/* Steps over one whole item of bytes that pack_check has passed. */
void pack_skip(struct pack_reader *reader);

#endif
