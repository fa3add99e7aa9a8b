/* Temporary directories of tests. */
#ifndef TESTS_LIB_TEMP_H
#define TESTS_LIB_TEMP_H

#include <limits.h>

/* A new directory below /tmp with a short name (sockets lie in it). Fails the test when it cannot. */
void temp_make(char ret_path[PATH_MAX]);

/* Removes a directory and everything in it; never follows links. */
void temp_remove(const char *path);

/* Names in a directory but "." and "..", sorted, joined with blanks; "" also when it does not exist. Valid
 * until the next call. */
const char *temp_list(const char *path);

/* Writes a whole file. */
void temp_write(const char *path, const char *text);

#endif
