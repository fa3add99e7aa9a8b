/* Merges of sorted position lists; see selection.h. No state of its own; any thread, one at a time per
 * list.
 *
 * The merge runs over every list of every sequence in each step. Between two changes it copies a fixed
 * width and counts how much of that it wanted, so it has no branch that depends on the data but rare ones. */
#include "kvstore/selection.h"

#include <string.h>

#include "base/alloc.h"
#include "proto/limits.h"

enum { WIDE = 8 }; /* positions copied at a time */

/* Room for a list that is too long by all that was added, its sentinels, and copies of WIDE at its end. */
static uint32_t room(uint32_t max)
{
    return 2 * max + 3 * WIDE;
}

static void list_init(struct selection_list *list, uint32_t max)
{
    list->position = mem_alloc_aligned(room(max), sizeof *list->position);
    list->slot = mem_alloc_aligned(room(max), sizeof *list->slot);
    list->count = 0;
    for (uint32_t i = 0; i < WIDE; i++)
        list->position[i] = SELECTION_BEHIND;
}

static void list_free(struct selection_list *list)
{
    mem_free(&list->position);
    mem_free(&list->slot);
}

void selection_init(struct selection *s, uint32_t max)
{
    memset(s, 0, sizeof *s);
    s->max = max;
    list_init(&s->now, max);
    list_init(&s->next, max);
    s->added_at = mem_alloc(room(max), sizeof *s->added_at);
    s->removed_slot = mem_alloc(room(max), sizeof *s->removed_slot);
}

void selection_free(struct selection *s)
{
    list_free(&s->now);
    list_free(&s->next);
    mem_free(&s->added_at);
    mem_free(&s->removed_slot);
}

static bool ascending_within(const uint32_t *p, uint32_t n, uint32_t low, uint32_t high)
{
    if (n == 0)
        return true;
    uint32_t bad = 0;
    for (uint32_t i = 1; i < n; i++)
        bad |= p[i - 1] >= p[i];
    return !bad && p[0] >= low && p[n - 1] < high;
}

/* A copy with a sentinel behind it, so that no index has to be compared with an end. */
static int32_t *guarded(int32_t *to, const uint32_t *from, uint32_t n)
{
    memcpy(to, from, n * sizeof *to);
    to[n] = SELECTION_BEHIND;
    return to;
}

static void list_end(struct selection_list *list, uint32_t count)
{
    list->count = count;
    for (uint32_t i = 0; i < WIDE; i++)
        list->position[count + i] = SELECTION_BEHIND;
}

/* The positions from `from` on that stand before x, moved over; returns how many. Copies WIDE at a time and
 * counts what was wanted: more than WIDE between two changes are rare. */
static inline uint32_t copy_before(const int32_t *restrict from, const uint16_t *restrict from_slot,
                                   int32_t x, int32_t *restrict out, uint16_t *restrict out_slot)
{
    uint32_t moved = 0, count;
    do {
        memcpy(out + moved, from + moved, WIDE * sizeof *out);
        memcpy(out_slot + moved, from_slot + moved, WIDE * sizeof *out_slot);
        count = 0;
        for (uint32_t k = 0; k < WIDE; k++)
            count += from[moved + k] < x;
        moved += count;
    } while (__builtin_expect(count == WIDE, 0));
    return moved;
}

/* Walks over the changes in ascending order; `now` is copied in between. */
static bool merge(struct selection *s, const int32_t *restrict added, const int32_t *restrict removed,
                  uint32_t changes)
{
    const int32_t *restrict now = s->now.position;
    const uint16_t *restrict now_slot = s->now.slot;
    int32_t *restrict out = s->next.position;
    uint16_t *restrict out_slot = s->next.slot, *restrict removed_slot = s->removed_slot;
    uint32_t *restrict added_at = s->added_at;
    uint32_t count = s->now.count, i = 0, o = 0, k = 0, j = 0;
    for (uint32_t change = 0; change < changes; change++) {
        int32_t a = added[k], r = removed[j];
        uint32_t add = a < r;
        int32_t x = add ? a : r;
        uint32_t moved = copy_before(now + i, now_slot + i, x, out + o, out_slot + o);
        i += moved;
        o += moved;
        /* Added is what `now` lacks, removed what it has; and nothing is both. */
        if ((now[i] == x) == add || a == r)
            return false;
        out[o] = x;
        out_slot[o] = SELECTION_NO_SLOT;
        added_at[k] = o;
        removed_slot[j] = now_slot[i];
        k += add;
        o += add;
        j += !add;
        i += !add;
    }
    memcpy(out + o, now + i, (count - i) * sizeof *out);
    memcpy(out_slot + o, now_slot + i, (count - i) * sizeof *out_slot);
    list_end(&s->next, o + count - i);
    return true;
}

bool selection_diff(struct selection *s, const struct selection_change *c)
{
    uint32_t n = s->now.count;
    if (c->added_count > s->max || c->removed_count > n || n - c->removed_count > s->max - c->added_count)
        return false;
    if (!ascending_within(c->added, c->added_count, c->low, c->high) ||
        !ascending_within(c->removed, c->removed_count, 0, LIMIT_CONTEXT))
        return false;
    s->added = c->added_count;
    s->removed = c->removed_count;
    return merge(s, guarded(c->scratch, c->added, c->added_count),
                 guarded(c->scratch + s->max + 1, c->removed, c->removed_count),
                 c->added_count + c->removed_count);
}

bool selection_full(struct selection *s, const struct selection_change *c)
{
    if (c->removed_count != 0 || c->added_count > s->max ||
        !ascending_within(c->added, c->added_count, c->low, c->high))
        return false;
    memcpy(s->next.position, c->added, c->added_count * sizeof *c->added);
    list_end(&s->next, c->added_count);
    selection_relate(s);
    return true;
}

void selection_relate(struct selection *s)
{
    const int32_t *now = s->now.position, *next = s->next.position;
    uint32_t i = 0, o = 0, added = 0, removed = 0;
    while (i < s->now.count || o < s->next.count) { /* the entries behind the ends compare as largest */
        if (now[i] == next[o]) {
            s->next.slot[o++] = s->now.slot[i++];
        } else if (now[i] < next[o]) {
            s->removed_slot[removed++] = s->now.slot[i++];
        } else {
            s->next.slot[o] = SELECTION_NO_SLOT;
            s->added_at[added++] = o++;
        }
    }
    s->added = added;
    s->removed = removed;
}

void selection_swap(struct selection *s)
{
    struct selection_list list = s->now;
    s->now = s->next;
    s->next = list;
    list_end(&s->next, 0);
    s->added = s->removed = 0;
}
