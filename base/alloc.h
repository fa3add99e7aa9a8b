/* Memory of the process. Allocation of what the program itself sized cannot fail in a way that it could
 * handle, so these end the process with a line that says so (check_exhausted). Sizes that come out of files
 * or messages must be bounded by the caller first. */
#ifndef BASE_ALLOC_H
#define BASE_ALLOC_H

#include <stddef.h>

/* Zeroed memory for `count` objects of `size` bytes; count * size must not overflow. Free with mem_free. */
void *mem_alloc(size_t count, size_t size) __attribute__((malloc));

/* As mem_alloc, on a 64-byte boundary (SIMD loads, one cache line a writer). Free with mem_free. */
void *mem_alloc_aligned(size_t count, size_t size) __attribute__((malloc));

/* Grows or shrinks; new bytes are not zeroed. */
void *mem_resize(void *old, size_t count, size_t size);

char *mem_strdup(const char *text) __attribute__((malloc));

/* Frees *p and sets it to NULL; *p may be NULL. Takes the address of any object pointer. */
#define mem_free(p) mem_free_at((void *)(p))
void mem_free_at(void *address_of_pointer);

#endif
