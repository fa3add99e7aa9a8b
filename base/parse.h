/* Numbers out of option values: the whole text must be one, in range, or it is an error. */
#ifndef BASE_PARSE_H
#define BASE_PARSE_H

#include <stdint.h>

/* Decimal, low <= value <= high. 0 or -EINVAL / -ERANGE. */
int parse_u32(const char *text, uint32_t low, uint32_t high, uint32_t *ret);

/* Finite, low <= value <= high. */
int parse_double(const char *text, double low, double high, double *ret);

/* Bytes: a decimal number (a fraction is allowed) and K, M, G or T, with or without "iB" or "B": powers of
 * 1024. */
int parse_size(const char *text, uint64_t *ret_bytes);

#endif
