/* Messages: round trips of every kind, every truncation, damage, and hostile frames. */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <msgpack.h>

#include "proto/msg.h"
#include "proto/pack.h"
#include "tests/lib/message.h"

enum { ROUNDS = 40, FLIPS = 1500 };

struct bytes {
    uint8_t *at;
    size_t count;
};

static struct message_maker maker;

static struct bytes encoded(uint32_t kind, struct msg *msg)
{
    void *buffer;
    struct bytes frame;
    message_make(&maker, kind, msg);
    msg_encode(msg, &buffer, &frame.count);
    frame.at = buffer;
    return frame;
}

/* Decodes a copy of exactly that length on the heap, so that the sanitizer sees a read past the end. */
static int decode_exact(const uint8_t *bytes, size_t count, struct msg *msg, struct err *err)
{
    uint8_t *copy = malloc(count ? count : 1);
    assert_non_null(copy);
    memcpy(copy, bytes, count);
    int r = msg_decode(count ? copy : NULL, count, msg, err);
    free(copy);
    return r;
}

static void every_kind_comes_back(void **state)
{
    (void)state;
    for (size_t k = 0; k < MESSAGE_KINDS; k++)
        for (int i = 0; i < ROUNDS; i++) {
            struct msg in, out;
            struct err err = {0};
            struct bytes frame = encoded(message_kinds[k], &in);
            if (decode_exact(frame.at, frame.count, &out, &err) < 0)
                fail_msg("%s: %s", msg_kind_name(in.kind), err.text);
            if (!message_equal(&in, &out))
                fail_msg("%s came back different", msg_kind_name(in.kind));
            msg_free(&out);
            msg_buffer_free(frame.at);
        }
}

static void every_truncation_is_refused(void **state)
{
    (void)state;
    for (size_t k = 0; k < MESSAGE_KINDS; k++) {
        struct msg in, out;
        struct bytes frame = encoded(message_kinds[k], &in);
        for (size_t cut = 0; cut < frame.count; cut++)
            assert_int_equal(decode_exact(frame.at, cut, &out, NULL), -EPROTO);
        msg_buffer_free(frame.at);
    }
}

/* Whatever damage decodes must be a message that can be encoded, so every range was checked. */
static void damage_never_crashes(void **state)
{
    (void)state;
    int accepted = 0, refused = 0;
    for (size_t k = 0; k < MESSAGE_KINDS; k++)
        for (int i = 0; i < FLIPS; i++) {
            struct msg in, out;
            struct bytes frame = encoded(message_kinds[k], &in);
            for (uint64_t flips = 1 + message_random(&maker) % 3; flips--;)
                frame.at[message_random(&maker) % frame.count] ^= (uint8_t)(1u << message_random(&maker) % 8);
            if (decode_exact(frame.at, frame.count, &out, NULL) < 0) {
                refused++;
            } else {
                void *again;
                size_t bytes;
                msg_encode(&out, &again, &bytes);
                msg_buffer_free(again);
                msg_free(&out);
                accepted++;
            }
            msg_buffer_free(frame.at);
        }
    assert_true(accepted > FLIPS && refused > FLIPS);
}

static void trailing_bytes_are_refused(void **state)
{
    (void)state;
    struct msg in, out;
    struct bytes frame = encoded(MSG_GRANT, &in);
    frame.at = realloc(frame.at, frame.count + 1);
    assert_non_null(frame.at);
    frame.at[frame.count] = 0xc0;
    assert_int_equal(decode_exact(frame.at, frame.count + 1, &out, NULL), -EPROTO);
    free(frame.at);
}

/* The wire, byte by byte: a change of it must be meant. */
static void wire_is_fixed(void **state)
{
    (void)state;
    static const uint8_t ping[] = {0x96, 4, 4, 0xcd, 0x12, 0x34, 7, 0, 0x80};
    static const uint8_t grant[] = {0x96, 17,  4,    0xcd, 0x12, 0x34, 7,   0,    0x83, 0xa8, 's', 'e',
                                    'q',  'u', 'e',  'n',  'c',  'e',  5,   0xa5, 'i',  'n',  'd', 'e',
                                    'x',  3,   0xa6, 'c',  'a',  'c',  'h', 'e',  'd',  0xcd, 1,   0x40};
    struct msg msg = {.kind = MSG_PING, .version = MSG_VERSION, .epoch = 0x1234, .id = 7};
    void *buffer;
    size_t bytes;
    msg_encode(&msg, &buffer, &bytes);
    assert_int_equal(bytes, sizeof ping);
    assert_memory_equal(buffer, ping, sizeof ping);
    msg_buffer_free(buffer);
    msg.kind = MSG_GRANT;
    msg.grant = (struct msg_grant){.sequence = 5, .index = 3, .cached = 320};
    msg_encode(&msg, &buffer, &bytes);
    assert_int_equal(bytes, sizeof grant);
    assert_memory_equal(buffer, grant, sizeof grant);
    msg_buffer_free(buffer);
}

/* Another reader of msgpack agrees about what we write. */
static void msgpack_c_reads_it(void **state)
{
    (void)state;
    for (size_t k = 0; k < MESSAGE_KINDS; k++) {
        struct msg in;
        struct bytes frame = encoded(message_kinds[k], &in);
        msgpack_unpacked result;
        msgpack_unpacked_init(&result);
        size_t offset = 0;
        assert_int_equal(msgpack_unpack_next(&result, (char *)frame.at, frame.count, &offset),
                         MSGPACK_UNPACK_SUCCESS);
        assert_int_equal(offset, frame.count);
        assert_int_equal(result.data.type, MSGPACK_OBJECT_ARRAY);
        assert_int_equal(result.data.via.array.size, 6);
        const msgpack_object *items = result.data.via.array.ptr;
        assert_int_equal(items[0].via.u64, in.kind);
        assert_int_equal(items[2].via.u64, in.epoch);
        assert_int_equal(items[5].type, MSGPACK_OBJECT_MAP);
        msgpack_unpacked_destroy(&result);
        msg_buffer_free(frame.at);
    }
}

/* ---- frames made by hand ---- */

struct hand {
    msgpack_sbuffer buffer;
    msgpack_packer pack;
};

static void hand_text(struct hand *h, const char *text)
{
    msgpack_pack_str_with_body(&h->pack, text, strlen(text));
}

static void hand_number(struct hand *h, const char *name, uint64_t value)
{
    hand_text(h, name);
    msgpack_pack_uint64(&h->pack, value);
}

static void hand_bin(struct hand *h, const char *name, const void *data, size_t bytes)
{
    hand_text(h, name);
    msgpack_pack_bin_with_body(&h->pack, data, bytes);
}

static void hand_begin(struct hand *h, uint32_t kind, uint32_t version, uint32_t fields)
{
    msgpack_sbuffer_init(&h->buffer);
    msgpack_packer_init(&h->pack, &h->buffer, msgpack_sbuffer_write);
    msgpack_pack_array(&h->pack, 6);
    msgpack_pack_uint32(&h->pack, kind);
    msgpack_pack_uint32(&h->pack, version);
    msgpack_pack_uint64(&h->pack, 9);
    msgpack_pack_uint64(&h->pack, 1);
    msgpack_pack_int64(&h->pack, 0);
    msgpack_pack_map(&h->pack, fields);
}

static int hand_end(struct hand *h, struct msg *msg, struct err *err)
{
    int r = decode_exact((uint8_t *)h->buffer.data, h->buffer.size, msg, err);
    msgpack_sbuffer_destroy(&h->buffer);
    return r;
}

static void unknown_keys_are_skipped_and_the_last_of_two_counts(void **state)
{
    (void)state;
    struct hand h;
    struct msg msg;
    hand_begin(&h, MSG_GRANT, MSG_VERSION, 6);
    hand_number(&h, "sequence", 1);
    hand_text(&h, "later_field");
    msgpack_pack_array(&h.pack, 2); /* the fourth level */
    msgpack_pack_nil(&h.pack);
    msgpack_pack_map(&h.pack, 1);
    hand_number(&h, "x", 1);
    hand_number(&h, "index", 1);
    hand_number(&h, "sequence", 7);
    hand_text(&h, "sequences");
    msgpack_pack_ext(&h.pack, 3, 5);
    msgpack_pack_ext_body(&h.pack, "abc", 3);
    hand_number(&h, "cached", 64);
    assert_int_equal(hand_end(&h, &msg, NULL), 0);
    assert_int_equal(msg.grant.sequence, 7);
    assert_int_equal(msg.grant.index, 1);
    assert_int_equal(msg.grant.cached, 64);
    msg_free(&msg);
}

static void a_bulk_field_may_come_twice(void **state)
{
    (void)state;
    struct hand h;
    struct msg msg;
    uint32_t ids[] = {4, 5, 6};
    hand_begin(&h, MSG_TOKEN, MSG_VERSION, 2);
    hand_bin(&h, "tokens", ids, sizeof ids);
    hand_bin(&h, "tokens", ids + 1, 4);
    assert_int_equal(hand_end(&h, &msg, NULL), 0);
    assert_int_equal(msg.token.tokens.count, 1);
    assert_int_equal(msg.token.tokens.at[0], 5);
    assert_int_equal((uintptr_t)msg.token.tokens.at % 8, 0);
    msg_free(&msg);
}

static int grant_with(uint64_t sequence, uint64_t index, uint64_t cached, struct err *err)
{
    struct hand h;
    struct msg msg;
    hand_begin(&h, MSG_GRANT, MSG_VERSION, 3);
    hand_number(&h, "sequence", sequence);
    hand_number(&h, "index", index);
    hand_number(&h, "cached", cached);
    int r = hand_end(&h, &msg, err);
    if (r == 0)
        msg_free(&msg);
    return r;
}

static void ranges_are_checked_and_named(void **state)
{
    (void)state;
    struct err err;
    assert_int_equal(grant_with(1, 63, 1048576, &err), 0);
    assert_int_equal(grant_with(0, 0, 0, &err), -EPROTO);
    assert_non_null(strstr(err.text, "sequence: found 0"));
    assert_int_equal(grant_with(1, 64, 0, &err), -EPROTO);
    assert_string_equal(err.text, "GRANT: index: found 64, expected 0 to 63");
    assert_int_equal(grant_with(1, 1ull << 32, 0, &err), -EPROTO);
    assert_int_equal(grant_with(1, 0, 63, &err), -EPROTO);
    assert_int_equal(grant_with(1, 0, 1048640, &err), -EPROTO);
}

static void fields_of_other_types_are_refused(void **state)
{
    (void)state;
    for (int kind = 0; kind < 6; kind++) {
        struct hand h;
        struct msg msg;
        struct err err;
        hand_begin(&h, MSG_CLOSE, MSG_VERSION, 1);
        hand_text(&h, "sequence");
        if (kind == 0)
            msgpack_pack_int(&h.pack, -1);
        else if (kind == 1)
            hand_text(&h, "1");
        else if (kind == 2)
            msgpack_pack_double(&h.pack, 1);
        else if (kind == 3)
            msgpack_pack_map(&h.pack, 0);
        else if (kind == 4)
            msgpack_pack_nil(&h.pack);
        else
            msgpack_pack_true(&h.pack);
        assert_int_equal(hand_end(&h, &msg, &err), -EPROTO);
        assert_non_null(strstr(err.text, "sequence"));
    }
}

static void missing_fields_are_named(void **state)
{
    (void)state;
    struct hand h;
    struct msg msg;
    struct err err;
    hand_begin(&h, MSG_GRANT, MSG_VERSION, 2);
    hand_number(&h, "sequence", 1);
    hand_number(&h, "cached", 0);
    assert_int_equal(hand_end(&h, &msg, &err), -EPROTO);
    assert_string_equal(err.text, "GRANT: index: missing");
}

static int frame_is(const char *bytes, size_t count)
{
    struct msg msg;
    int r = decode_exact((const uint8_t *)bytes, count, &msg, NULL);
    assert_null(msg.memory);
    return r;
}
#define FRAME_IS(text) frame_is(text, sizeof(text) - 1)

static void hostile_frames_are_refused(void **state)
{
    (void)state;
    assert_int_equal(frame_is("", 0), -EPROTO);
    for (int byte = 0; byte < 256; byte++) {
        char one = (char)byte;
        assert_int_equal(frame_is(&one, 1), -EPROTO);
    }
    assert_int_equal(FRAME_IS("\xdd\xff\xff\xff\xff\x01\x01\x01\x01"), -EPROTO); /* 2^32 - 1 items, 4 bytes */
    assert_int_equal(FRAME_IS("\xdf\xff\xff\xff\xff\x01\x01\x01\x01"), -EPROTO);
    assert_int_equal(FRAME_IS("\xc6\xff\xff\xff\xff\x01\x01\x01\x01"), -EPROTO);
    assert_int_equal(FRAME_IS("\xdb\xff\xff\xff\xff\x01"), -EPROTO);
    assert_int_equal(FRAME_IS("\xc9\xff\xff\xff\xff\x01"), -EPROTO);
    assert_int_equal(FRAME_IS("\x86\x04\x04\x05\x06\x00\x80"), -EPROTO);         /* a map, no array */
    assert_int_equal(FRAME_IS("\x96\x04\x04\x05\x06\x00\x90"), -EPROTO);         /* body is an array */
    assert_int_equal(FRAME_IS("\x95\x04\x04\x05\x06\x00"), -EPROTO);             /* five items */
    assert_int_equal(FRAME_IS("\x97\x04\x04\x05\x06\x00\x80\x00"), -EPROTO);     /* seven items */
    assert_int_equal(FRAME_IS("\x96\xff\x04\x05\x06\x00\x80"), -EPROTO);         /* kind -1 */
    assert_int_equal(FRAME_IS("\x96\x63\x04\x05\x06\x00\x80"), -EPROTO);         /* kind 99 */
    assert_int_equal(FRAME_IS("\x96\x04\x04\x05\x06\xff\x80"), -EPROTO);         /* deadline -1 */
    assert_int_equal(FRAME_IS("\x96\x04\x04\x05\x06\x00\x81\x01\x02"), -EPROTO); /* key is a number */
    assert_int_equal(FRAME_IS("\x96\x04\x04\x05\x06\x00\xc1"), -EPROTO);         /* never used */
    assert_int_equal(FRAME_IS("\x96\x04\x04\x05\x06\x00\x80"), 0);
    assert_int_equal(FRAME_IS("\x96\x04\x05\x05\x06\x00\x80"), -EPROTONOSUPPORT);
    assert_int_equal(FRAME_IS("\x96\x04\x03\x05\x06\x00\x80"), -EPROTONOSUPPORT);
    assert_int_equal(FRAME_IS("\x93\x04\x05\xc0"), -EPROTONOSUPPORT); /* it may have other items */
}

static void depth_and_count_are_bounded(void **state)
{
    (void)state;
    char bomb[100000];
    memset(bomb, 0x91, sizeof bomb);
    assert_int_equal(frame_is(bomb, sizeof bomb), -EPROTO);
    struct hand h;
    struct msg msg;
    hand_begin(&h, MSG_PING, MSG_VERSION, 1); /* one level too many within an unknown key */
    hand_text(&h, "x");
    for (int i = 0; i < 3; i++)
        msgpack_pack_array(&h.pack, 1);
    msgpack_pack_nil(&h.pack);
    assert_int_equal(hand_end(&h, &msg, NULL), -EPROTO);
    hand_begin(&h, MSG_PING, MSG_VERSION, 1);
    hand_text(&h, "x");
    msgpack_pack_array(&h.pack, LIMIT_MESSAGE_OBJECTS);
    for (unsigned i = 0; i < LIMIT_MESSAGE_OBJECTS; i++)
        msgpack_pack_nil(&h.pack);
    assert_int_equal(hand_end(&h, &msg, NULL), -EMSGSIZE);
}

static void a_message_too_long_is_refused_unread(void **state)
{
    (void)state;
    struct msg msg;
    uint8_t byte = 0x96; /* what the length tells is not there: reading it would be a fault */
    assert_int_equal(msg_decode(&byte, LIMIT_MESSAGE_BYTES + 1, &msg, NULL), -EMSGSIZE);
}

/* ---- lengths against each other ---- */

static int step_with(const struct msg_step_entry *entries, size_t count, size_t tokens, size_t features)
{
    struct hand h;
    struct msg msg;
    uint32_t ids[LIMIT_SEQUENCES + 1] = {0};
    hand_begin(&h, MSG_STEP, MSG_VERSION, 4);
    hand_bin(&h, "entries", entries, count * sizeof *entries);
    hand_bin(&h, "tokens", ids, tokens * sizeof *ids);
    hand_bin(&h, "features", ids, features * sizeof *ids);
    hand_number(&h, "reading", 7);
    int r = hand_end(&h, &msg, NULL);
    if (r == 0)
        msg_free(&msg);
    return r;
}

static void steps_must_add_up(void **state)
{
    (void)state;
    struct msg_step_entry e[] = {{.sequence = 1, .position = 5, .count = 2},
                                 {.sequence = 2, .index = 1, .position = 9, .count = 3, .flags = 1}};
    assert_int_equal(step_with(e, 2, 5, 0), 0);
    assert_int_equal(step_with(e, 2, 5, 2), 0);
    assert_int_equal(step_with(e, 2, 5, 1), -EPROTO);
    assert_int_equal(step_with(e, 2, 4, 0), -EPROTO);
    assert_int_equal(step_with(e, 2, 6, 0), -EPROTO);
    assert_int_equal(step_with(e, 0, 0, 0), -EPROTO);
    e[0].count = 0;
    assert_int_equal(step_with(e, 2, 3, 0), -EPROTO);
    e[0].count = UINT32_MAX; /* the sum must not wrap: 2^32 - 1 + 3 = 2 */
    assert_int_equal(step_with(e, 2, 2, 0), -EPROTO);
    e[0].count = 2;
    e[0].position = LIMIT_CONTEXT - 2;
    assert_int_equal(step_with(e, 2, 5, 0), 0);
    e[0].position++;
    assert_int_equal(step_with(e, 2, 5, 0), -EPROTO);
    e[0].position = UINT32_MAX;
    assert_int_equal(step_with(e, 2, 5, 0), -EPROTO);
    e[0].position = 0;
    e[0].index = LIMIT_SEQUENCES;
    assert_int_equal(step_with(e, 2, 5, 0), -EPROTO);
    e[0].index = 0;
    e[0].flags = 2;
    assert_int_equal(step_with(e, 2, 5, 0), -EPROTO);
    e[0].flags = 0;
    e[0].sequence = 0;
    assert_int_equal(step_with(e, 2, 5, 0), -EPROTO);
}

static void steps_have_32_bits(void **state)
{
    (void)state;
    const uint32_t kinds[] = {MSG_STEP, MSG_TOPK, MSG_RESELECT};
    for (size_t k = 0; k < 3; k++) {
        struct msg in, out;
        struct err err;
        struct bytes frame = encoded(kinds[k], &in);
        while (in.id <= UINT32_MAX >> 1 || in.epoch <= UINT32_MAX) { /* until both have a known length */
            msg_buffer_free(frame.at);
            frame = encoded(kinds[k], &in);
        }
        uint8_t *id = frame.at + 3 + 9; /* behind the head, kind, version and a 64-bit epoch */
        assert_int_equal(*id, 0xce);
        struct bytes wide = {malloc(frame.count + 4), frame.count + 4};
        assert_non_null(wide.at);
        memcpy(wide.at, frame.at, 12);
        memcpy(wide.at + 12, "\xcf\0\0\0\1", 5);
        memcpy(wide.at + 17, id + 1, frame.count - 13);
        assert_int_equal(decode_exact(wide.at, wide.count, &out, &err), -EPROTO);
        assert_non_null(strstr(err.text, "id"));
        free(wide.at);
        msg_buffer_free(frame.at);
    }
}

static void too_many_step_entries_are_refused(void **state)
{
    (void)state;
    struct msg_step_entry e[LIMIT_SEQUENCES + 1];
    for (uint32_t i = 0; i <= LIMIT_SEQUENCES; i++)
        e[i] = (struct msg_step_entry){.sequence = i + 1, .count = 1};
    assert_int_equal(step_with(e, LIMIT_SEQUENCES, LIMIT_SEQUENCES, LIMIT_SEQUENCES), 0);
    assert_int_equal(step_with(e, LIMIT_SEQUENCES + 1, LIMIT_SEQUENCES + 1, 0), -EPROTO);
}

struct topk_case {
    struct msg_topk_entry entry;
    uint32_t groups, heads;
    uint32_t counts[4];
    uint32_t count, positions;
    size_t odd; /* bytes behind the positions */
};

static int topk_with(const struct topk_case *c)
{
    struct hand h;
    struct msg msg;
    uint8_t positions[256] = {0};
    hand_begin(&h, MSG_TOPK, MSG_VERSION, 5);
    hand_bin(&h, "entries", &c->entry, sizeof c->entry);
    hand_number(&h, "groups", c->groups);
    hand_number(&h, "selection_heads", c->heads);
    hand_bin(&h, "counts", c->counts, c->count * 4);
    hand_bin(&h, "positions", positions, c->positions * 4 + c->odd);
    int r = hand_end(&h, &msg, NULL);
    if (r == 0)
        msg_free(&msg);
    return r;
}

static void topk_refused(const struct topk_case *c)
{
    assert_int_equal(topk_with(c), -EPROTO);
}

static void selections_must_add_up(void **state)
{
    (void)state;
    const struct topk_case good = {
        .entry = {.sequence = 1, .base_step = 0, .limit = 10, .position = 20, .mass = 1},
        .groups = 1,
        .heads = 2,
        .counts = {3, 1, 2, 2},
        .count = 4,
        .positions = 8};
    struct topk_case c = good;
    assert_int_equal(topk_with(&c), 0);
    c.positions = 7, topk_refused(&c);
    c.positions = 9, topk_refused(&c);
    c = good, c.odd = 1, topk_refused(&c);
    c = good, c.heads = 3, topk_refused(&c);
    c = good, c.groups = LIMIT_GROUPS + 1, topk_refused(&c);
    c = good, c.heads = LIMIT_SELECTION_HEADS + 1, topk_refused(&c);
    c = good, c.count = 3, topk_refused(&c);
    c = good, c.counts[0] = 8; /* the sum must not wrap: it is 2^32 + 8 */
    c.counts[1] = UINT32_MAX - 3, topk_refused(&c);
    c = good, c.entry.mass = NAN, topk_refused(&c);
    c.entry.mass = INFINITY, topk_refused(&c);
    c.entry.mass = -0.5f, topk_refused(&c);
    c = good, c.entry.sequence = 0, topk_refused(&c);
    c = good, c.entry.position = LIMIT_CONTEXT, topk_refused(&c);
    c = good, c.entry.pad = 1, topk_refused(&c);
    c = good, c.entry.mass_base = NAN, topk_refused(&c);
    c = good, c.entry.flags = 3;
    assert_int_equal(topk_with(&c), 0);
    c.entry.flags = 4, topk_refused(&c);
    c = good, c.entry.base_step = 1, topk_refused(&c); /* the step itself: a full set removes nothing */
}

static int open_with(uint64_t sequence, uint32_t capacity, uint32_t tokens, uint32_t budget_base)
{
    struct hand h;
    struct msg msg;
    uint32_t ids[16] = {0};
    hand_begin(&h, MSG_OPEN, MSG_VERSION, 13);
    hand_number(&h, "sequence", sequence);
    hand_number(&h, "flags", 0);
    hand_number(&h, "reuse_max", 0);
    hand_number(&h, "salt", 0);
    hand_text(&h, "made");
    msgpack_pack_map(&h.pack, 3);
    hand_number(&h, "kind", 0);
    hand_number(&h, "budget", 0);
    hand_number(&h, "head", 0);
    hand_number(&h, "capacity", capacity);
    hand_number(&h, "budget", 10);
    hand_number(&h, "sinks", 0);
    hand_number(&h, "window", 0);
    hand_number(&h, "budget_base", budget_base);
    hand_text(&h, "min_mass");
    msgpack_pack_float(&h.pack, 0.5f);
    hand_text(&h, "top_p");
    msgpack_pack_float(&h.pack, 1);
    hand_bin(&h, "tokens", ids, tokens * 4);
    int r = hand_end(&h, &msg, NULL);
    if (r == 0)
        msg_free(&msg);
    return r;
}

static void an_open_agrees_with_itself(void **state)
{
    (void)state;
    assert_int_equal(open_with(1, 16, 16, 0), 0);
    assert_int_equal(open_with(1, 16, 0, 0), 0);
    assert_int_equal(open_with(1, 15, 16, 0), -EPROTO);
    assert_int_equal(open_with(0, 16, 16, 0), -EPROTO);
    assert_int_equal(open_with(1, 0, 0, 0), -EPROTO);
    assert_int_equal(open_with(1, 16, 16, 10), 0);
    assert_int_equal(open_with(1, 16, 16, 11), -EPROTO); /* more than the budget */
    assert_int_equal(open_with(1, LIMIT_CONTEXT + 1, 1, 0), -EPROTO);
}

/* Sampling values that crashed servers elsewhere. */
static void sampling_is_checked(void **state)
{
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY, -1, 1e38f};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct msg in, out;
        struct err err;
        struct bytes frame = encoded(MSG_GENERATE, &in);
        const char key[] = "temperature\xca";
        uint8_t *at = memmem(frame.at, frame.count, key, sizeof key - 1);
        assert_non_null(at);
        uint32_t bits;
        memcpy(&bits, &bad[i], sizeof bits);
        bits = __builtin_bswap32(bits);
        memcpy(at + sizeof key - 1, &bits, sizeof bits);
        assert_int_equal(decode_exact(frame.at, frame.count, &out, &err), -EPROTO);
        assert_non_null(strstr(err.text, "temperature"));
        msg_buffer_free(frame.at);
    }
}

static void texts_end_where_they_say(void **state)
{
    (void)state;
    char text[LIMIT_TEXT_BYTES + 1];
    const size_t lengths[] = {0, LIMIT_TEXT_BYTES - 1, LIMIT_TEXT_BYTES, 3};
    for (size_t i = 0; i < 4; i++) {
        struct hand h;
        struct msg msg;
        size_t length = lengths[i];
        memset(text, 'x', sizeof text);
        if (i == 3)
            text[1] = 0; /* no text of ours has a zero byte within */
        hand_begin(&h, MSG_ERROR, MSG_VERSION, 2);
        hand_text(&h, "code");
        msgpack_pack_int(&h.pack, -5);
        hand_text(&h, "text");
        msgpack_pack_str_with_body(&h.pack, text, length);
        int r = hand_end(&h, &msg, NULL);
        assert_int_equal(r, i < 2 ? 0 : -EPROTO);
        if (r == 0)
            assert_int_equal(strlen(msg.error.text), length);
    }
}

static void a_layout_is_checked_whole(void **state)
{
    (void)state;
    struct msg in, out;
    struct err err;
    struct bytes frame;
    while (frame = encoded(MSG_HELLO, &in), !in.hello.has_layout)
        msg_buffer_free(frame.at);
    const char key[] = "group_first_layer\xc4\x44";
    uint8_t *at = memmem(frame.at, frame.count, key, sizeof key - 1);
    assert_non_null(at);
    at[sizeof key - 1] = 1; /* the first group must begin at layer 0 */
    assert_int_equal(decode_exact(frame.at, frame.count, &out, &err), -EPROTO);
    assert_non_null(strstr(err.text, "group_first_layer"));
    msg_buffer_free(frame.at);
}

static void names_and_permissions(void **state)
{
    (void)state;
    assert_string_equal(msg_kind_name(MSG_OPEN), "OPEN");
    assert_string_equal(msg_kind_name(99), "?");
    assert_string_equal(msg_role_name(ROLE_DECODER), "decoder");
    assert_string_equal(msg_role_name(0), "?");
    assert_string_equal(msg_finish_name(FINISH_LENGTH), "length");
    assert_string_equal(msg_finish_name(9), "?");
    int allowed = 0;
    for (uint32_t server = ROLE_DECODER; server <= ROLE_KVSTORE; server++)
        for (uint32_t from = ROLE_DECODER; from <= ROLE_LAUNCH; from++)
            for (uint32_t kind = 0; kind < 64; kind++) {
                assert_int_equal(msg_allowed(server, from, false, kind), kind == MSG_HELLO);
                allowed += msg_allowed(server, from, true, kind);
            }
    /* HELLO, PING, STATUS of each, DRAIN of one, and the 14 of PROTOCOL.md section 4. */
    assert_int_equal(allowed, 3 * 5 * 3 + 3 + 14);
    assert_true(msg_allowed(ROLE_KVSTORE, ROLE_RETRIEVER, true, MSG_TOPK));
    assert_false(msg_allowed(ROLE_KVSTORE, ROLE_DECODER, true, MSG_TOPK));
    assert_false(msg_allowed(ROLE_DECODER, ROLE_DECODER, true, MSG_GENERATE));
    assert_false(msg_allowed(ROLE_KVSTORE, ROLE_GATEWAY, true, MSG_OPEN));
    assert_false(msg_allowed(ROLE_DECODER, ROLE_GATEWAY, true, MSG_DRAIN));
}

int main(void)
{
    maker.random = 0x9e3779b97f4a7c15;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_comes_back),
        cmocka_unit_test(every_truncation_is_refused),
        cmocka_unit_test(damage_never_crashes),
        cmocka_unit_test(trailing_bytes_are_refused),
        cmocka_unit_test(wire_is_fixed),
        cmocka_unit_test(msgpack_c_reads_it),
        cmocka_unit_test(unknown_keys_are_skipped_and_the_last_of_two_counts),
        cmocka_unit_test(a_bulk_field_may_come_twice),
        cmocka_unit_test(ranges_are_checked_and_named),
        cmocka_unit_test(fields_of_other_types_are_refused),
        cmocka_unit_test(missing_fields_are_named),
        cmocka_unit_test(hostile_frames_are_refused),
        cmocka_unit_test(depth_and_count_are_bounded),
        cmocka_unit_test(a_message_too_long_is_refused_unread),
        cmocka_unit_test(steps_must_add_up),
        cmocka_unit_test(steps_have_32_bits),
        cmocka_unit_test(too_many_step_entries_are_refused),
        cmocka_unit_test(selections_must_add_up),
        cmocka_unit_test(an_open_agrees_with_itself),
        cmocka_unit_test(sampling_is_checked),
        cmocka_unit_test(texts_end_where_they_say),
        cmocka_unit_test(a_layout_is_checked_whole),
        cmocka_unit_test(names_and_permissions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
