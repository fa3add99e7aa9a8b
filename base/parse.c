/* See parse.h. Any thread. */
#include "base/parse.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

int parse_u32(const char *text, uint32_t low, uint32_t high, uint32_t *ret)
{
    if (!isdigit((unsigned char)text[0]))
        return -EINVAL;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (*end)
        return -EINVAL;
    if (errno == ERANGE || value < low || value > high)
        return -ERANGE;
    *ret = (uint32_t)value;
    return 0;
}

int parse_double(const char *text, double low, double high, double *ret)
{
    if (!text[0] || isspace((unsigned char)text[0]))
        return -EINVAL;
    char *end;
    double value = strtod(text, &end);
    if (*end || !isfinite(value))
        return -EINVAL;
    if (value < low || value > high)
        return -ERANGE;
    *ret = value;
    return 0;
}

int parse_size(const char *text, uint64_t *ret_bytes)
{
    if (!isdigit((unsigned char)text[0]))
        return -EINVAL;
    char *end;
    double value = strtod(text, &end);
    static const char units[] = "KMGT";
    if (*end) {
        const char *unit = strchr(units, toupper((unsigned char)*end));
        if (!unit || !*unit)
            return -EINVAL;
        value = ldexp(value, 10 * (int)(unit - units + 1));
        end++;
        if (*end && strcmp(end, "iB") && strcmp(end, "B"))
            return -EINVAL;
    } else if (value != floor(value))
        return -EINVAL; /* bytes are whole */
    if (!isfinite(value) || value >= ldexp(1, 62))
        return -ERANGE;
    *ret_bytes = (uint64_t)value;
    return 0;
}
