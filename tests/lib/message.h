/* Random valid messages of every kind, for tests and as seeds of fuzzing. */
#ifndef TESTS_LIB_MESSAGE_H
#define TESTS_LIB_MESSAGE_H

#include "proto/msg.h"

enum { MESSAGE_ENTRIES_MAX = 8, MESSAGE_WORDS_MAX = 1024, MESSAGE_KINDS = 24 };

extern const uint32_t message_kinds[MESSAGE_KINDS];

/* Random state, and the memory that a made message borrows until the next one is made. */
struct message_maker {
    uint64_t random; /* != 0 */
    struct msg_step_entry step[MESSAGE_ENTRIES_MAX];
    struct msg_topk_entry topk[MESSAGE_ENTRIES_MAX];
    uint32_t counts[MESSAGE_ENTRIES_MAX * 16];
    uint32_t words[MESSAGE_WORDS_MAX];
    uint32_t stop_ids[LIMIT_STOP_IDS];
    char text[256];
};

uint64_t message_random(struct message_maker *maker);

/* Every field is random within its range, and mostly not zero. */
void message_make(struct message_maker *maker, uint32_t kind, struct msg *ret_msg);

/* Whether two messages say the same; memory and where it lies apart. */
bool message_equal(const struct msg *a, const struct msg *b);

#endif
