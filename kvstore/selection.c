/* Merges of sorted position lists; see selection.h. No state of its own; any thread, one at a time per list.
 *
 * The merge runs over every list of every sequence in each step, so it has no data-dependent branch: which of
 * three arrays the next position comes from is decided by comparisons that move indices. Its speed is the length
 * of that chain of dependences, so two of them run side by side: one from the begin up, one from the end down. */
#include "kvstore/selection.h"

#include <string.h>

#include "base/alloc.h"

/* A merge may write this much before it is known to be wrong; see merge_diff. */
static uint32_t room(uint32_t max)
{
    return 2 * max + 16;
}

static void list_init(struct selection_list *list, uint32_t max)
{
    list->position = mem_alloc(room(max), sizeof *list->position);
    list->slot = mem_alloc(room(max), sizeof *list->slot);
    list->position[0] = UINT32_MAX;
    list->count = 0;
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
    mem_free(&s->now.position);
    mem_free(&s->now.slot);
    mem_free(&s->next.position);
    mem_free(&s->next.slot);
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

struct merge { /* state of one direction; indices of what comes next */
    uint32_t now, added, removed, out;
};

bool selection_diff(struct selection *s, const struct selection_change *c)
{
    uint32_t n = s->now.count, add_n = c->added_count, rem_n = c->removed_count;
    if (add_n > s->max || rem_n > n || n - rem_n > s->max - add_n)
        return false;
    if (!ascending_within(c->added, add_n, c->low, c->high) ||
        !ascending_within(c->removed, rem_n, 0, UINT32_MAX))
        return false;
    const uint32_t *restrict now = s->now.position, *restrict add = c->added, *restrict rem = c->removed;
    const uint16_t *restrict now_slot = s->now.slot;
    uint32_t *restrict out = s->next.position, *restrict added_at = s->added_at;
    uint16_t *restrict out_slot = s->next.slot, *restrict removed_slot = s->removed_slot;
    uint32_t i = 0, k = 0, j = 0, o = 0, twice = 0;
    while (i < n && k < add_n && j < rem_n) {
        uint32_t a = now[i], b = add[k];
        uint32_t take = b < a, gone = (a == rem[j]) & !take;
        twice |= a == b;
        out[o] = take ? b : a;
        out_slot[o] = take ? SELECTION_NO_SLOT : now_slot[i];
        added_at[k] = o;
        removed_slot[j] = now_slot[i];
        i += !take;
        k += take;
        j += gone;
        o += !gone;
    }
    while (i < n && k < add_n) {
        uint32_t a = now[i], b = add[k];
        uint32_t take = b < a;
        twice |= a == b;
        out[o] = take ? b : a;
        out_slot[o] = take ? SELECTION_NO_SLOT : now_slot[i];
        added_at[k] = o++;
        i += !take;
        k += take;
    }
    for (; i < n; i++) {
        uint32_t gone = j < rem_n && now[i] == rem[j];
        out[o] = now[i];
        out_slot[o] = now_slot[i];
        removed_slot[j] = now_slot[i];
        j += gone;
        o += !gone;
    }
    for (; k < add_n; k++) {
        out[o] = add[k];
        out_slot[o] = SELECTION_NO_SLOT;
        added_at[k] = o++;
    }
    if (twice || j != rem_n)
        return false;
    out[o] = UINT32_MAX;
    s->next.count = o;
    s->added = add_n;
    s->removed = rem_n;
    return true;
}

bool selection_full(struct selection *s, const struct selection_change *c)
{
    if (c->removed_count != 0 || c->added_count > s->max ||
        !ascending_within(c->added, c->added_count, c->low, c->high))
        return false;
    memcpy(s->next.position, c->added, c->added_count * sizeof *c->added);
    s->next.position[c->added_count] = UINT32_MAX;
    s->next.count = c->added_count;
    selection_relate(s);
    return true;
}

void selection_relate(struct selection *s)
{
    const uint32_t *now = s->now.position, *next = s->next.position;
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
    s->next.count = 0;
    s->next.position[0] = UINT32_MAX;
    s->added = s->removed = 0;
}
