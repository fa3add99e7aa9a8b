/* What each kind of message consists of: one table a kind, from which proto/msg.c both writes and reads. */
#ifndef PROTO_MSG_FIELDS_H
#define PROTO_MSG_FIELDS_H

#include "proto/msg.h"

enum field_type {
    FIELD_U32,
    FIELD_I32,
    FIELD_U64,
    FIELD_I64,
    FIELD_F32,
    FIELD_F64,
    FIELD_TEXT,    /* char [size] <-> str */
    FIELD_HASH,    /* struct hash128 <-> bin of 16 bytes, lo then hi, little-endian */
    FIELD_WORDS,   /* uint32_t [size / 4] <-> bin of exactly `size` bytes */
    FIELD_STRUCT,  /* a struct described by `sub` <-> map */
    FIELD_IDS,     /* struct msg_u32s <-> bin */
    FIELD_BYTES,   /* struct msg_bytes <-> str; a zero byte follows the decoded ones */
    FIELD_ENTRIES, /* a pointer with its uint32_t count right behind it <-> bin of structs of `size` bytes */
};

struct field {
    const char *name; /* NULL ends a table */
    enum field_type type;
    uint16_t at;         /* offset in the struct */
    uint16_t size;       /* as the type says */
    uint16_t present_at; /* offset of a bool that says whether it is there; 0: always */
    int64_t min;         /* of the value; of the count for IDS, BYTES, ENTRIES */
    uint64_t max;
    const struct field *sub;
};

struct kind {
    uint32_t kind;
    const char *name;
    const struct field *fields;
    /* Lengths against each other and what single ranges cannot say; the fields are in range already. May be
     * NULL. 0 or -EPROTO. */
    int (*check)(const struct msg *msg, struct err *err);
};

const struct kind *kind_find(uint32_t kind); /* NULL: unknown */

/* All bodies lie at the same place of the union. */
static inline void *kind_body(struct msg *msg)
{
    return &msg->hello;
}

/* Every field's range and finiteness. 0 or -EPROTO with "KIND: field: found, expected". */
int kind_check_fields(const struct kind *kind, const struct msg *msg, struct err *err);

#endif
