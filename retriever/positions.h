/* Lists of positions, ascending, and the difference of two of them. */
#ifndef RETRIEVER_POSITIONS_H
#define RETRIEVER_POSITIONS_H

#include <stdint.h>

struct positions {
    uint32_t *at;
    uint32_t count, room;
};

/* Room for `room` positions at least; what is inside stays. */
void positions_reserve(struct positions *list, uint32_t room);
void positions_free(struct positions *list); /* accepts a zeroed list; leaves one */

/* added = now without before, removed = before without now; both ascending, as the inputs are. `added` must
 * have room for now->count, `removed` for before->count. */
void positions_difference(struct positions *added, struct positions *removed, const struct positions *now,
                          const struct positions *before);

#endif
