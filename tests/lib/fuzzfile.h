/* For fuzzers of file readers: bytes as a file without a disk, and seeds for an empty corpus. */
#ifndef TESTS_LIB_FUZZFILE_H
#define TESTS_LIB_FUZZFILE_H

#include <stddef.h>
#include <stdint.h>

/* Puts the bytes into one memory file of the process, and its path, valid until the next call, into the
 * result. */
const char *fuzzfile_put(const uint8_t *data, size_t bytes);

/* Writes a seed into the fuzzer's first corpus folder: the first argument that is no option. Does nothing
 * without one, or when the seed is there. */
void fuzzfile_seed(int argc, char **argv, const char *name, const void *data, size_t bytes);

#endif
