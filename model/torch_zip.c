/* The directory of a zip archive in memory. Only what torch.save writes: members stored as they are, not
 * encrypted, in one file. No number of the file is used before it was held against what is there.
 * Checksums are not compared: torch can be told not to write them. Source: PKWARE's APPNOTE, sections 4.3
 * and 4.5.3. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "model/torch_private.h"

enum { END_BYTES = 22, LOCATOR_BYTES = 20, END64_BYTES = 56, ENTRY_BYTES = 46, LOCAL_BYTES = 30 };
enum { COMMENT_MAX = 65535, EXTRA_ZIP64 = 1, FLAG_ENCRYPTED = 1 };

#define SIGNATURE_END     0x06054b50u
#define SIGNATURE_LOCATOR 0x07064b50u
#define SIGNATURE_END64   0x06064b50u
#define SIGNATURE_ENTRY   0x02014b50u
#define SIGNATURE_LOCAL   0x04034b50u

static uint64_t number(const uint8_t *at, unsigned bytes)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++)
        value |= (uint64_t)at[i] << (8 * i);
    return value;
}

/* Whether [at, at + bytes) lies in the file. */
static bool within(const struct mapping *m, uint64_t at, uint64_t bytes)
{
    return at <= m->bytes && bytes <= m->bytes - at;
}

static int damaged(const struct mapping *m, const char *what, uint64_t found, const char *expected,
                   struct err *err)
{
    return err_set(err, -EBADMSG, "%.200s: zip: %s: found %" PRIu64 ", expected %s", m->path, what, found,
                   expected);
}

/* The last end record; comments behind it are allowed. */
static int find_end(const struct mapping *m, uint64_t *ret, struct err *err)
{
    uint64_t least = m->bytes > END_BYTES + COMMENT_MAX ? m->bytes - END_BYTES - COMMENT_MAX : 0;
    for (uint64_t at = m->bytes < END_BYTES ? 0 : m->bytes - END_BYTES + 1; at-- > least;)
        if (number(m->data + at, 4) == SIGNATURE_END) {
            *ret = at;
            return 0;
        }
    return err_set(err, -EBADMSG,
                   "%.200s: found no end of a zip archive, expected a file of torch.save since PyTorch 1.6",
                   m->path);
}

struct directory {
    uint64_t entries, bytes, at;
};

static int read_end64(const struct mapping *m, uint64_t locator, struct directory *d, struct err *err)
{
    uint64_t at = number(m->data + locator + 8, 8);
    if (!within(m, at, END64_BYTES) || number(m->data + at, 4) != SIGNATURE_END64)
        return damaged(m, "place of the zip64 end record", at, "one in the file", err);
    *d = (struct directory){number(m->data + at + 32, 8), number(m->data + at + 40, 8),
                            number(m->data + at + 48, 8)};
    return 0;
}

static int read_end(const struct mapping *m, struct directory *d, struct err *err)
{
    uint64_t at = 0;
    int rc = find_end(m, &at, err);
    if (rc < 0)
        return rc;
    const uint8_t *end = m->data + at;
    *d = (struct directory){number(end + 10, 2), number(end + 12, 4), number(end + 16, 4)};
    if (at >= LOCATOR_BYTES && number(end - LOCATOR_BYTES, 4) == SIGNATURE_LOCATOR &&
        (rc = read_end64(m, at - LOCATOR_BYTES, d, err)) < 0)
        return rc;
    if (!within(m, d->at, d->bytes))
        return damaged(m, "place of the directory", d->at, "one in the file", err);
    if (d->entries > d->bytes / ENTRY_BYTES)
        return damaged(m, "entries", d->entries, "no more than the directory has room for", err);
    return 0;
}

/* One entry of the directory. */
struct entry {
    uint64_t flags, method, packed, bytes, local;
    struct name name;
};

/* Sizes and place that do not fit 32 bits stand in an extra field, those that are needed, in this order. */
static int read_extra(const struct mapping *m, struct entry *e, const uint8_t *extra, uint64_t bytes,
                      struct err *err)
{
    uint64_t *const wide[] = {&e->bytes, &e->packed, &e->local};
    for (uint64_t at = 0; at + 4 <= bytes;) {
        uint64_t id = number(extra + at, 2), size = number(extra + at + 2, 2), used = 0;
        at += 4;
        if (size > bytes - at)
            return damaged(m, "bytes of an extra field", size, "no more than there are", err);
        for (unsigned i = 0; id == EXTRA_ZIP64 && i < 3; i++) {
            if (*wide[i] != UINT32_MAX)
                continue;
            if (size - used < 8)
                return damaged(m, "bytes of the zip64 field", size, "a number for each size it replaces",
                               err);
            *wide[i] = number(extra + at + used, 8);
            used += 8;
        }
        at += size;
    }
    return 0;
}

static int check_entry(const struct mapping *m, const struct entry *e, struct err *err)
{
    const char *what = NULL;
    if (e->flags & FLAG_ENCRYPTED)
        what = "encryption";
    else if (e->method != 0)
        what = "compression";
    else if (e->packed != e->bytes)
        what = "another size than the stored one";
    if (what)
        return err_set(err, -ENOTSUP, "%.200s: zip: member %.*s: found %s, expected bytes as they are",
                       m->path, (int)(e->name.bytes < 80 ? e->name.bytes : 80), e->name.text, what);
    return 0;
}

/* Where the member's bytes begin: behind its local header, whose name and extra field have lengths of their
 * own. */
static int find_data(const struct mapping *m, const struct entry *e, struct torch_member *ret,
                     struct err *err)
{
    if (!within(m, e->local, LOCAL_BYTES) || number(m->data + e->local, 4) != SIGNATURE_LOCAL)
        return damaged(m, "place of a member", e->local, "a local header in the file", err);
    uint64_t at =
        e->local + LOCAL_BYTES + number(m->data + e->local + 26, 2) + number(m->data + e->local + 28, 2);
    if (!within(m, at, e->bytes))
        return damaged(m, "bytes of a member", e->bytes, "no more than the file has", err);
    *ret = (struct torch_member){m->data + at, e->bytes};
    return 0;
}

/* Reads the entry at *at and moves behind it. */
static int read_entry(struct torch_zip *zip, uint64_t *at, uint64_t end, struct err *err)
{
    const struct mapping *m = zip->file;
    const uint8_t *p = m->data + *at;
    if (end - *at < ENTRY_BYTES || number(p, 4) != SIGNATURE_ENTRY)
        return damaged(m, "directory entry at", *at, "an entry there", err);
    uint64_t name_bytes = number(p + 28, 2), extra_bytes = number(p + 30, 2), comment = number(p + 32, 2);
    uint64_t room = end - *at - ENTRY_BYTES;
    if (name_bytes + extra_bytes + comment > room)
        return damaged(m, "bytes of a directory entry", name_bytes + extra_bytes + comment,
                       "no more than the directory has", err);
    struct entry e = {.flags = number(p + 8, 2),
                      .method = number(p + 10, 2),
                      .packed = number(p + 20, 4),
                      .bytes = number(p + 24, 4),
                      .local = number(p + 42, 4),
                      .name = {(const char *)p + ENTRY_BYTES, name_bytes}};
    int rc = read_extra(m, &e, p + ENTRY_BYTES + name_bytes, extra_bytes, err);
    if (rc == 0)
        rc = check_entry(m, &e, err);
    if (rc == 0)
        rc = find_data(m, &e, &zip->members[zip->count], err);
    if (rc < 0)
        return rc;
    zip->names[zip->count] = e.name;
    if (!names_add(&zip->index, zip->count))
        return err_set(err, -EBADMSG, "%.200s: zip: member %.*s: found it twice, expected it once", m->path,
                       (int)(e.name.bytes < 80 ? e.name.bytes : 80), e.name.text);
    zip->count++;
    *at += ENTRY_BYTES + name_bytes + extra_bytes + comment;
    return 0;
}

int torch_zip_open(struct torch_zip *zip, const struct mapping *file, struct err *err)
{
    struct directory d;
    memset(zip, 0, sizeof *zip);
    zip->file = file;
    int rc = read_end(file, &d, err);
    if (rc < 0)
        return rc;
    if (d.entries > TORCH_TENSORS_MAX)
        return damaged(file, "entries", d.entries, "at most a million", err);
    zip->members = mem_alloc(d.entries, sizeof *zip->members);
    zip->names = mem_alloc(d.entries, sizeof *zip->names);
    names_init(&zip->index, zip->names, (uint32_t)d.entries);
    uint64_t at = d.at;
    for (uint64_t i = 0; i < d.entries && rc == 0; i++)
        rc = read_entry(zip, &at, d.at + d.bytes, err);
    return rc;
}

void torch_zip_close(struct torch_zip *zip)
{
    names_free(&zip->index);
    mem_free(&zip->members);
    mem_free(&zip->names);
}

const struct torch_member *torch_zip_find(const struct torch_zip *zip, const char *name)
{
    uint32_t place = names_find(&zip->index, name_of(name));
    return place == NAMES_NONE ? NULL : &zip->members[place];
}
