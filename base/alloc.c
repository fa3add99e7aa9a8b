/* See alloc.h. Thin over the C library, so that sanitizers see every object. Any thread. */
#include "base/alloc.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

/* An address that is there, or the end. */
static void *must(void *p, size_t bytes)
{
    if (!p)
        check_exhausted("out of memory: %zu bytes were asked for", bytes);
    return p;
}

static size_t product(size_t count, size_t size)
{
    size_t bytes;
    CHECK(!__builtin_mul_overflow(count, size, &bytes));
    return bytes;
}

void *mem_alloc(size_t count, size_t size)
{
    size_t bytes = product(count, size);
    return must(calloc(1, bytes ? bytes : 1), bytes);
}

void *mem_alloc_aligned(size_t count, size_t size)
{
    size_t bytes = product(count, size);
    size_t rounded = (bytes + 63) & ~(size_t)63;
    return memset(must(aligned_alloc(64, rounded ? rounded : 64), rounded), 0, rounded);
}

void *mem_resize(void *old, size_t count, size_t size)
{
    size_t bytes = product(count, size);
    return must(realloc(old, bytes ? bytes : 1), bytes);
}

char *mem_strdup(const char *text)
{
    return must(strdup(text), strlen(text) + 1);
}

void mem_free_at(void *address_of_pointer)
{
    void *p;
    memcpy(&p, address_of_pointer, sizeof p);
    free(p);
    p = NULL;
    memcpy(address_of_pointer, &p, sizeof p);
}
