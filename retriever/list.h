/* Lists of positions, ascending, and the difference of two of them. */
#ifndef RETRIEVER_LIST_H
#define RETRIEVER_LIST_H

#include <stdint.h>

struct list {
    uint32_t *at;
    uint32_t count, room;
};

/* Room for `room` positions at least; what is inside stays. */
void list_reserve(struct list *list, uint32_t room);
void list_free(struct list *list); /* accepts a zeroed list; leaves one */

/* added = now without before, removed = before without now; both ascending, as the inputs are. `added` must
 * have room for now->count, `removed` for before->count. */
void list_difference(struct list *added, struct list *removed, const struct list *now,
                     const struct list *before);

#endif
