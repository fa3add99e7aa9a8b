/* Small zip archives. Stateless; a test that asks for more than fits fails. */
#include "tests/lib/torchgen.h"

#include <string.h>

#include "base/check.h"

struct writer {
    uint8_t *to;
    size_t at;
};

static void put(struct writer *w, const void *data, size_t bytes)
{
    CHECK(bytes <= TORCHGEN_BYTES_MAX - w->at);
    if (bytes)
        memcpy(w->to + w->at, data, bytes);
    w->at += bytes;
}

static void put_number(struct writer *w, uint64_t value, unsigned bytes)
{
    uint8_t text[16];
    for (unsigned i = 0; i < bytes; i++)
        text[i] = i < 8 ? (uint8_t)(value >> (8 * i)) : 0;
    put(w, text, bytes);
}

static void put_local(struct writer *w, const struct torchgen_member *m)
{
    put_number(w, 0x04034b50, 4);
    put_number(w, 0, 2);
    put_number(w, m->flags, 2);
    put_number(w, m->method, 2);
    put_number(w, 0, 8); /* time, date, checksum */
    put_number(w, m->bytes, 4);
    put_number(w, m->bytes, 4);
    put_number(w, strlen(m->name), 2);
    put_number(w, 4, 2); /* torch pads with extra fields */
    put(w, m->name, strlen(m->name));
    put(w, "FB\0\0", 4);
    put(w, m->data, m->bytes);
}

static void put_entry(struct writer *w, const struct torchgen_member *m, size_t local, bool zip64)
{
    put_number(w, 0x02014b50, 4);
    put_number(w, 0, 4);
    put_number(w, m->flags, 2);
    put_number(w, m->method, 2);
    put_number(w, 0, 8);
    put_number(w, zip64 ? UINT32_MAX : m->bytes, 4);
    put_number(w, zip64 ? UINT32_MAX : m->bytes, 4);
    put_number(w, strlen(m->name), 2);
    put_number(w, zip64 ? 28 : 0, 2);
    put_number(w, 0, 2 + 2 + 2 + 4); /* comment, disk, attributes */
    put_number(w, zip64 ? UINT32_MAX : local, 4);
    put(w, m->name, strlen(m->name));
    if (!zip64)
        return;
    put_number(w, 1, 2);
    put_number(w, 24, 2);
    put_number(w, m->bytes, 8);
    put_number(w, m->bytes, 8);
    put_number(w, local, 8);
}

static void put_end(struct writer *w, unsigned count, size_t directory, bool zip64)
{
    size_t end64 = w->at, bytes = end64 - directory;
    if (zip64) {
        put_number(w, 0x06064b50, 4);
        put_number(w, 44, 8);
        put_number(w, 0, 12);
        put_number(w, count, 8);
        put_number(w, count, 8);
        put_number(w, bytes, 8);
        put_number(w, directory, 8);
        put_number(w, 0x07064b50, 4);
        put_number(w, 0, 4);
        put_number(w, end64, 8);
        put_number(w, 1, 4);
    }
    put_number(w, 0x06054b50, 4);
    put_number(w, 0, 4);
    put_number(w, zip64 ? UINT16_MAX : count, 2);
    put_number(w, zip64 ? UINT16_MAX : count, 2);
    put_number(w, zip64 ? UINT32_MAX : bytes, 4);
    put_number(w, zip64 ? UINT32_MAX : directory, 4);
    put_number(w, 0, 2);
}

size_t torchgen_zip(uint8_t *to, const struct torchgen_member *members, unsigned count, bool zip64)
{
    struct writer w = {to, 0};
    size_t locals[16];
    CHECK(count <= 16);
    for (unsigned i = 0; i < count; i++) {
        locals[i] = w.at;
        put_local(&w, &members[i]);
    }
    size_t directory = w.at;
    for (unsigned i = 0; i < count; i++)
        put_entry(&w, &members[i], locals[i], zip64);
    put_end(&w, count, directory, zip64);
    return w.at;
}

#define PICKLE                                                                                            \
    "\x80\x02"                                                                                            \
    "ccollections\nOrderedDict\nq\0)Rq\1(X\1\0\0\0a"                                                      \
    "ctorch._utils\n_rebuild_tensor_v2\nq\2((X\7\0\0\0storageq\3ctorch\nHalfStorage\nq\4X\1\0\0\0"        \
    "0q\5X\3\0\0\0cpuq\6K\3tq\7QK\0K\3\x85q\x08K\1\x85q\x09\x89h\0)Rq\x0atq\x0bRq\x0cu}q\x0dX\x09\0\0\0_" \
    "metadata"                                                                                            \
    "h\0)Rq\x0eX\0\0\0\0q\x0f}q\x10X\7\0\0\0versionq\x11K\1sssb."

const uint8_t torchgen_pickle[] = PICKLE;
const size_t torchgen_pickle_bytes = sizeof PICKLE - 1;
const uint8_t torchgen_storage[6] = {0x00, 0x3c, 0x00, 0x40, 0x00, 0x42}; /* 1, 2, 3 */

size_t torchgen_sound(uint8_t *to, bool zip64)
{
    const struct torchgen_member members[] = {{"m/data.pkl", torchgen_pickle, torchgen_pickle_bytes, 0, 0},
                                              {"m/byteorder", "little", 6, 0, 0},
                                              {"m/data/0", torchgen_storage, 6, 0, 0},
                                              {"m/version", "3\n", 2, 0, 0}};
    return torchgen_zip(to, members, 4, zip64);
}
