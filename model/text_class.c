/* Classes of characters by utf8proc's tables; stateless. */
#include "model/text_class.h"

#include <stdint.h>
#include <utf8proc.h>

#include "model/utf8.h"

static uint32_t first_code(struct name text, size_t *ret_bytes)
{
    int length = utf8_char(text.text, text.bytes);
    *ret_bytes = (size_t)length;
    return utf8_code(text.text, length);
}

static uint32_t last_code(struct name text, size_t *ret_bytes)
{
    size_t at = text.bytes - 1;
    while (at > 0 && ((uint8_t)text.text[at] & 0xc0) == 0x80)
        at--;
    return first_code((struct name){text.text + at, text.bytes - at}, ret_bytes);
}

static bool is_space(uint32_t c)
{
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
           c == 0x3000;
}

/* Circled and squared letters are symbols that count as alphabetic. */
static bool is_letter_symbol(uint32_t c)
{
    return (c >= 0x24b6 && c <= 0x24e9) || (c >= 0x1f130 && c <= 0x1f149) || (c >= 0x1f150 && c <= 0x1f169) ||
           (c >= 0x1f170 && c <= 0x1f189);
}

static bool is_word(uint32_t c)
{
    switch (utf8proc_category((utf8proc_int32_t)c)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return c == 0x200c || c == 0x200d || is_letter_symbol(c);
    }
}

bool text_begins_with_word(struct name text)
{
    size_t bytes;
    return text.bytes && is_word(first_code(text, &bytes));
}

bool text_ends_with_word(struct name text)
{
    size_t bytes;
    return text.bytes && is_word(last_code(text, &bytes));
}

size_t text_space_at_begin(struct name text)
{
    size_t at = 0, bytes;
    while (at < text.bytes && is_space(first_code((struct name){text.text + at, text.bytes - at}, &bytes)))
        at += bytes;
    return at;
}

size_t text_space_at_end(struct name text)
{
    size_t end = text.bytes, bytes;
    while (end > 0 && is_space(last_code((struct name){text.text, end}, &bytes)))
        end -= bytes;
    return text.bytes - end;
}
