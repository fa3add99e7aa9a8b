/* UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, nothing above U+10FFFF. Pure, any thread. */
#ifndef MODEL_UTF8_H
#define MODEL_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* The length (1 to 4) of the character at `text`; 0 when its first byte begins no valid character; -1 when
 * the `bytes` that are there are the begin of a valid character and the rest is missing. bytes >= 1. */
int utf8_char(const char *text, size_t bytes);

/* The offset of the first byte that is not valid, or `bytes` when all are. */
size_t utf8_valid(const char *text, size_t bytes);

/* The code point of a valid character of `length` bytes. */
uint32_t utf8_code(const char *text, int length);

#endif
