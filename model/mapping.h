/* A model file mapped read-only and shared: weights stay in the page cache, one copy for all processes. */
#ifndef MODEL_MAPPING_H
#define MODEL_MAPPING_H

#include <stdint.h>

#include "base/err.h"

struct mapping {
    char *path;
    const uint8_t *data; /* page-aligned; NULL for an empty file */
    uint64_t bytes;
};

/* Maps a regular file. 0, or the errno of the failing call with the path in `err`; -EINVAL for a file that is
 * not regular, -EBADMSG for a Git-LFS pointer in place of the file (recognised by its text). The file must
 * not be cut short while it is mapped: reading past its end raises SIGBUS. */
int mapping_open(struct mapping *mapping, const char *path, struct err *err);

/* Accepts a zeroed or closed mapping. */
void mapping_close(struct mapping *mapping);

#endif
