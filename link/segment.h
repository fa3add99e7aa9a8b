/* Shared memory that leaves nothing behind: memfds, passed by descriptor, never by name. */
#ifndef LINK_SEGMENT_H
#define LINK_SEGMENT_H

#include <stdint.h>

#include "base/err.h"

struct segment {
    int fd;           /* -1 when closed */
    void *at;         /* NULL when closed */
    uint64_t bytes;   /* that may be accessed */
    uint64_t reserve; /* address space behind `at`; 0: as long as `bytes` */
};

/* A new memfd called `name` (seen in /proc/PID/maps as /memfd:name), `bytes` long (sparse zeros), sealed
 * against shrinking, mapped read-write. Growing stays possible. */
int segment_create(const char *name, uint64_t bytes, struct segment *ret, struct err *err);

/* Maps [0, bytes) of a received descriptor; takes fd on success only. `bytes` 0: all of it. Checks that it is
 * a memfd sealed against shrinking and long enough, so that no access can fault. */
int segment_map(int fd, uint64_t bytes, struct segment *ret, struct err *err);

/* As above with `reserve` bytes of address space, into which the segment grows without ever moving; of 2 MiB
 * and more it begins where a huge page can. The second maps all of the file. */
int segment_create_reserved(const char *name, uint64_t bytes, uint64_t reserve, struct segment *ret,
                            struct err *err);
int segment_map_reserved(int fd, uint64_t reserve, struct segment *ret, struct err *err);

/* Lengthens file and mapping; new bytes are zero. The mapping may move unless address space was reserved
 * (-ENOSPC past it). On failure the segment is as before. */
int segment_grow(struct segment *segment, uint64_t bytes, struct err *err);

void segment_close(struct segment *segment); /* accepts a zeroed or closed one with fd -1 */

#endif
