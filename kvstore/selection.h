/* One list of selected positions, and the change that leads to the next one. Pure, no ownership of memory
 * but its own; the caller (elastic.h) says which slots the positions have.
 *
 * A change is made in two parts, so that it can be refused before anything else was touched:
 * selection_diff or selection_full merges it into `next` and checks it; selection_swap makes `next` the
 * list. */
#ifndef KVSTORE_SELECTION_H
#define KVSTORE_SELECTION_H

#include <stdbool.h>
#include <stdint.h>

#define SELECTION_NO_SLOT UINT16_MAX

struct selection_list {
    int32_t *position; /* ascending; SELECTION_BEHIND follows the last */
    uint16_t *slot;    /* of each position; SELECTION_NO_SLOT where it has none (yet) */
    uint32_t count;
};

#define SELECTION_BEHIND INT32_MAX

struct selection {
    struct selection_list now, next;
    uint32_t max;       /* positions of a list */
    uint32_t *added_at; /* where in `next` those stand that `now` lacks, ascending */
    uint32_t added;
    uint16_t *removed_slot; /* slots of those that `next` lacks */
    uint32_t removed;
};

struct selection_change {
    const uint32_t *added, *removed; /* ascending */
    uint32_t added_count, removed_count;
    uint32_t low, high; /* every added position is in [low, high), high <= LIMIT_CONTEXT */
    int32_t *scratch;   /* SELECTION_SCRATCH(max) entries */
};

#define SELECTION_SCRATCH(max) (2u * (max) + 2u)

void selection_init(struct selection *selection, uint32_t max);
void selection_free(struct selection *selection);

/* next = now - removed + added. False, and `next` is void, when the positions are out of range or order, or
 * `removed` is not in `now`, or `added` is, or the result is longer than max. */
bool selection_diff(struct selection *selection, const struct selection_change *change);

/* next = added (a whole set); finds out what is new and what is gone. */
bool selection_full(struct selection *selection, const struct selection_change *change);

/* Finds added_at, removed_slot and the kept slots of `next` anew, after slots of `now` have changed. */
void selection_relate(struct selection *selection);

void selection_swap(struct selection *selection);

#endif
