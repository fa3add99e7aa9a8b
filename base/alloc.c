/* See alloc.h. Thin over the C library, so that sanitizers see every object. Any thread. */
#include "base/alloc.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

static size_t product(size_t count, size_t size)
{
    size_t bytes;
    CHECK(!__builtin_mul_overflow(count, size, &bytes));
    return bytes;
}

void *mem_alloc(size_t count, size_t size)
{
    size_t bytes = product(count, size);
    void *p = calloc(1, bytes ? bytes : 1);
    CHECK(p != NULL);
    return p;
}

void *mem_alloc_aligned(size_t count, size_t size)
{
    size_t bytes = product(count, size);
    size_t rounded = (bytes + 63) & ~(size_t)63;
    void *p = aligned_alloc(64, rounded ? rounded : 64);
    CHECK(p != NULL);
    memset(p, 0, rounded);
    return p;
}

void *mem_resize(void *old, size_t count, size_t size)
{
    size_t bytes = product(count, size);
    void *p = realloc(old, bytes ? bytes : 1);
    CHECK(p != NULL);
    return p;
}

char *mem_strdup(const char *text)
{
    char *p = strdup(text);
    CHECK(p != NULL);
    return p;
}

void mem_free_at(void *address_of_pointer)
{
    void *p;
    memcpy(&p, address_of_pointer, sizeof p);
    free(p);
    p = NULL;
    memcpy(address_of_pointer, &p, sizeof p);
}
