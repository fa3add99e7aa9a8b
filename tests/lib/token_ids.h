/* Expected token ids. Used after the headers that cmocka.h needs. */
#ifndef TESTS_LIB_TOKEN_IDS_H
#define TESTS_LIB_TOKEN_IDS_H

#include <stdbool.h>
#include <stddef.h>

#include "model/tokenizer.h"

/* Encodes the text and fails the test unless the ids are the decimal numbers of `expected`, up to a newline
 * or its end. `special`: texts of control tokens count as these. */
void token_ids_check(const struct tokenizer *tokenizer, const char *text, size_t bytes, bool special,
                     const char *expected);

/* Random bytes, valid UTF-8 or not, come back exactly from tokenizer_encode_bytes. The vocabulary must know
 * every byte. */
void token_ids_check_any_bytes(const struct tokenizer *tokenizer);

#endif
