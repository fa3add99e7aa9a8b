/* Files of results, written when hours of work are over: whole or not at all. */
#ifndef BASE_OUTFILE_H
#define BASE_OUTFILE_H

#include <stddef.h>

/* Before the work: whether outfile_write can be expected to succeed. Makes the file that would be written
 * beside and removes it. Errno of the system. */
int outfile_try(const char *path);

/* Writes beside and renames; a device or a pipe is written to, not replaced, with -ENXIO or -EAGAIN when
 * nobody reads it. Errno of the system, and then a file is as it was. */
int outfile_write(const char *path, const void *data, size_t bytes);

#endif
