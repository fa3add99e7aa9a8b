/* Byte-pair merging. Short sequences (nearly all: a word) are scanned, since that is faster than any queue;
 * long ones go through a heap, so that no text takes quadratic time. Both give the same result. The table
 * belongs to its caller; merging keeps no state between calls. */
#include "model/merges.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

#define SHORT_MAX 48
#define NONE      UINT32_MAX

void merges_init(struct merges *merges)
{
    merges->mask = 255;
    merges->count = 0;
    merges->slots = mem_alloc(merges->mask + 1, sizeof *merges->slots);
    memset(merges->slots, 0xff, (merges->mask + 1) * sizeof *merges->slots);
}

void merges_free(struct merges *merges)
{
    mem_free(&merges->slots);
    merges->mask = merges->count = 0;
}

static struct merge *find(const struct merges *m, uint32_t left, uint32_t right)
{
    uint64_t key = ((uint64_t)left << 32 | right) * UINT64_C(0x9e3779b97f4a7c15);
    uint32_t slot = (uint32_t)(key >> 32) & m->mask;
    struct merge *s = &m->slots[slot];
    while (s->rank != NONE && (s->left != left || s->right != right)) {
        slot = (slot + 1) & m->mask;
        s = &m->slots[slot];
    }
    return s;
}

static void grow(struct merges *m)
{
    struct merges old = *m;
    CHECK(old.mask < UINT32_MAX / 2);
    m->mask = old.mask * 2 + 1;
    m->slots = mem_alloc((size_t)m->mask + 1, sizeof *m->slots);
    memset(m->slots, 0xff, ((size_t)m->mask + 1) * sizeof *m->slots);
    for (uint64_t i = 0; i <= old.mask; i++)
        if (old.slots[i].rank != NONE)
            *find(m, old.slots[i].left, old.slots[i].right) = old.slots[i];
    mem_free(&old.slots);
}

bool merges_add(struct merges *merges, struct merge merge)
{
    CHECK(merge.rank != NONE);
    if (merges->count >= merges->mask / 2)
        grow(merges);
    struct merge *slot = find(merges, merge.left, merge.right);
    if (slot->rank != NONE)
        return false;
    *slot = merge;
    merges->count++;
    return true;
}

static uint32_t apply_short(const struct merges *m, uint32_t *ids, uint32_t count)
{
    uint32_t ranks[SHORT_MAX], into[SHORT_MAX]; /* of the pair (i, i + 1) */
    for (uint32_t i = 0; i + 1 < count; i++) {
        const struct merge *s = find(m, ids[i], ids[i + 1]);
        ranks[i] = s->rank;
        into[i] = s->into;
    }
    while (count > 1) {
        uint32_t best = 0;
        for (uint32_t i = 1; i + 1 < count; i++)
            if (ranks[i] < ranks[best])
                best = i;
        if (ranks[best] == NONE)
            break;
        ids[best] = into[best];
        count--;
        uint32_t moved = count - best - 1;
        memmove(&ids[best + 1], &ids[best + 2], moved * sizeof *ids);
        memmove(&ranks[best], &ranks[best + 1], moved * sizeof *ranks);
        memmove(&into[best], &into[best + 1], moved * sizeof *into);
        for (uint32_t i = best ? best - 1 : 0; i <= best && i + 1 < count; i++) {
            const struct merge *s = find(m, ids[i], ids[i + 1]);
            ranks[i] = s->rank;
            into[i] = s->into;
        }
    }
    return count;
}

/* A min-heap of rank << 32 | place of the left id. An entry is stale when its pair has changed since. */
struct queue {
    uint64_t *heap;
    uint32_t count;
};

static void push(struct queue *q, uint64_t entry)
{
    uint32_t i = q->count++;
    while (i && q->heap[(i - 1) / 2] > entry) {
        q->heap[i] = q->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    q->heap[i] = entry;
}

static uint64_t pop(struct queue *q)
{
    uint64_t top = q->heap[0], last = q->heap[--q->count];
    uint32_t i = 0, child;
    while ((child = 2 * i + 1) < q->count) {
        if (child + 1 < q->count && q->heap[child + 1] < q->heap[child])
            child++;
        if (q->heap[child] >= last)
            break;
        q->heap[i] = q->heap[child];
        i = child;
    }
    q->heap[i] = last;
    return top;
}

static uint32_t apply_long(const struct merges *m, uint32_t *ids, uint32_t count)
{
    uint32_t *next = mem_alloc(count, sizeof *next), *before = mem_alloc(count, sizeof *before);
    /* At first a pair an id; each merge takes out one entry and puts in two at most. */
    struct queue q = {mem_alloc(2 * (size_t)count, sizeof *q.heap), 0};
    for (uint32_t i = 0; i < count; i++) {
        before[i] = i ? i - 1 : NONE;
        next[i] = i + 1 < count ? i + 1 : NONE;
        uint32_t rank = next[i] == NONE ? NONE : find(m, ids[i], ids[next[i]])->rank;
        if (rank != NONE)
            push(&q, (uint64_t)rank << 32 | i);
    }
    while (q.count) {
        uint64_t top = pop(&q);
        uint32_t at = (uint32_t)top, right = next[at];
        if (right == NONE || right == at) /* the last one, or merged away (marked by pointing at itself) */
            continue;
        const struct merge *s = find(m, ids[at], ids[right]);
        if (s->rank != (uint32_t)(top >> 32))
            continue;
        ids[at] = s->into;
        next[at] = next[right];
        next[right] = right;
        if (next[at] != NONE)
            before[next[at]] = at;
        uint32_t neighbours[2] = {before[at], at};
        for (int i = 0; i < 2; i++) {
            uint32_t left = neighbours[i];
            if (left == NONE || next[left] == NONE)
                continue;
            uint32_t rank = find(m, ids[left], ids[next[left]])->rank;
            if (rank != NONE)
                push(&q, (uint64_t)rank << 32 | left);
        }
    }
    uint32_t kept = 0;
    for (uint32_t i = 0; i != NONE; i = next[i])
        ids[kept++] = ids[i];
    mem_free(&q.heap);
    mem_free(&before);
    mem_free(&next);
    return kept;
}

uint32_t merges_apply(const struct merges *merges, uint32_t *ids, uint32_t count)
{
    if (count < 2)
        return count;
    return count <= SHORT_MAX ? apply_short(merges, ids, count) : apply_long(merges, ids, count);
}
