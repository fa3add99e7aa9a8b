/* Open-addressing hash index over names of a mapped file. The caller owns the index; while it is built it
 * belongs to one thread, afterwards it is read only. It never copies a name. */
#include "model/names.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/hash.h"

struct name name_of(const char *text)
{
    return (struct name){text, strlen(text)};
}

bool name_equal(struct name a, struct name b)
{
    return a.bytes == b.bytes && (a.bytes == 0 || memcmp(a.text, b.text, a.bytes) == 0);
}

bool name_is(struct name a, const char *text)
{
    return name_equal(a, name_of(text));
}

void names_init(struct names *index, const struct name *items, uint32_t count)
{
    CHECK(count <= UINT32_C(1) << 30);
    uint32_t size = 4;
    while (size / 2 < count) /* at most half full, so that a probe always ends */
        size *= 2;
    index->items = items;
    index->slots = mem_alloc(size, sizeof *index->slots);
    index->mask = size - 1;
}

void names_free(struct names *index)
{
    mem_free(&index->slots);
    index->items = NULL;
    index->mask = 0;
}

/* The slot that holds the name, or the empty one where it would go. */
static uint32_t find_slot(const struct names *index, struct name name)
{
    uint32_t slot = (uint32_t)hash_bytes(0, name.text, name.bytes).lo & index->mask;
    while (index->slots[slot] && !name_equal(index->items[index->slots[slot] - 1], name))
        slot = (slot + 1) & index->mask;
    return slot;
}

bool names_add(struct names *index, uint32_t place)
{
    uint32_t slot = find_slot(index, index->items[place]);
    if (index->slots[slot])
        return false;
    index->slots[slot] = place + 1;
    return true;
}

uint32_t names_find(const struct names *index, struct name name)
{
    if (!index->slots)
        return NAMES_NONE;
    uint32_t place = index->slots[find_slot(index, name)];
    return place ? place - 1 : NAMES_NONE;
}
