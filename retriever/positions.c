/* See positions.h. No state; a list belongs to whoever holds it. */
#include "retriever/positions.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

void positions_reserve(struct positions *list, uint32_t room)
{
    if (room <= list->room)
        return;
    uint64_t grown = (uint64_t)list->room + list->room / 2;
    list->room = grown > room && grown <= UINT32_MAX ? (uint32_t)grown : room;
    list->at = mem_resize(list->at, list->room, sizeof *list->at);
}

void positions_free(struct positions *list)
{
    mem_free(&list->at);
    memset(list, 0, sizeof *list);
}

void positions_difference(struct positions *added, struct positions *removed, const struct positions *now,
                          const struct positions *before)
{
    CHECK(added->room >= now->count && removed->room >= before->count);
    const uint32_t *a = now->at, *b = before->at, *a_end = a + now->count, *b_end = b + before->count;
    uint32_t n_added = 0, n_removed = 0;
    /* Writes both and keeps what counts: the outcome of the comparison cannot be foretold. Places behind the
     * counts are never past the room, since one element is taken from a list for each place used. */
    while (a < a_end && b < b_end) {
        uint32_t x = *a, y = *b;
        added->at[n_added] = x;
        removed->at[n_removed] = y;
        n_added += x < y;
        n_removed += y < x;
        a += x <= y;
        b += y <= x;
    }
    if (a < a_end)
        memcpy(added->at + n_added, a, (size_t)(a_end - a) * sizeof *a);
    if (b < b_end)
        memcpy(removed->at + n_removed, b, (size_t)(b_end - b) * sizeof *b);
    added->count = n_added + (uint32_t)(a_end - a);
    removed->count = n_removed + (uint32_t)(b_end - b);
}
