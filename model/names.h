/* Names out of model files: text that lies in a mapped file without a terminator, and an index over it. */
#ifndef MODEL_NAMES_H
#define MODEL_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Borrowed; not NUL-terminated; may hold any byte. */
struct name {
    const char *text;
    size_t bytes;
};

#define NAMES_NONE UINT32_MAX

/* An index from a name to its place in an array. The array and the texts must outlive it. */
struct names {
    const struct name *items;
    uint32_t *slots; /* place + 1; 0: empty */
    uint32_t mask;
};

struct name name_of(const char *text);
bool name_equal(struct name a, struct name b);
bool name_is(struct name a, const char *text);

/* Makes an empty index with room for `count` names of `items`; count <= 2^30. Release with names_free. */
void names_init(struct names *index, const struct name *items, uint32_t count);

/* Accepts a zeroed or half-built object. */
void names_free(struct names *index);

/* Enters items[place]; true, or false when an equal name was there already (which stays). */
bool names_add(struct names *index, uint32_t place);

/* The place of the name, or NAMES_NONE. Any thread, once building has ended. */
uint32_t names_find(const struct names *index, struct name name);

#endif
