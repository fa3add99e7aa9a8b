/* Word characters and white space at the ends of a text, as regular expressions over Unicode have them: \w is
 * letters, marks, decimal digits, letter numbers, connectors and joiners; \s is White_Space. Texts are valid
 * UTF-8. Pure, any thread. */
#ifndef MODEL_TEXT_CLASS_H
#define MODEL_TEXT_CLASS_H

#include <stdbool.h>
#include <stddef.h>

#include "model/names.h"

bool text_begins_with_word(struct name text);
bool text_ends_with_word(struct name text);

/* Bytes of white space at the text's begin, at its end. */
size_t text_space_at_begin(struct name text);
size_t text_space_at_end(struct name text);

#endif
