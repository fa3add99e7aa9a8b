/* UTF-8 checks. No state. */
#include "model/utf8.h"

#include <string.h>

int utf8_char(const char *text, size_t bytes)
{
    const uint8_t *p = (const uint8_t *)text;
    if (p[0] < 0x80)
        return 1;
    int length = p[0] < 0xc2 ? 0 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : p[0] < 0xf5 ? 4 : 0;
    if (!length)
        return 0;
    /* The second byte's range is what rules out overlong forms, surrogates and values too large. */
    uint8_t low = p[0] == 0xe0 ? 0xa0 : p[0] == 0xf0 ? 0x90 : 0x80;
    uint8_t high = p[0] == 0xed ? 0x9f : p[0] == 0xf4 ? 0x8f : 0xbf;
    for (int i = 1; i < length; i++) {
        if ((size_t)i == bytes)
            return -1;
        if (p[i] < low || p[i] > high)
            return 0;
        low = 0x80;
        high = 0xbf;
    }
    return length;
}

size_t utf8_valid(const char *text, size_t bytes)
{
    size_t at = 0;
    while (at < bytes) {
        uint64_t eight;
        if (bytes - at >= sizeof eight) {
            memcpy(&eight, text + at, sizeof eight);
            if (!(eight & UINT64_C(0x8080808080808080))) {
                at += sizeof eight;
                continue;
            }
        }
        int length = utf8_char(text + at, bytes - at);
        if (length <= 0)
            return at;
        at += (size_t)length;
    }
    return bytes;
}

uint32_t utf8_code(const char *text, int length)
{
    const uint8_t *p = (const uint8_t *)text;
    switch (length) {
    case 1:
        return p[0];
    case 2:
        return (uint32_t)(p[0] & 31) << 6 | (p[1] & 63u);
    case 3:
        return (uint32_t)(p[0] & 15) << 12 | (uint32_t)(p[1] & 63) << 6 | (p[2] & 63u);
    default:
        return (uint32_t)(p[0] & 7) << 18 | (uint32_t)(p[1] & 63) << 12 | (uint32_t)(p[2] & 63) << 6 |
               (p[3] & 63u);
    }
}
