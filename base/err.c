/* Fills struct err; see err.h. No state, any thread. */
#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/check.h"

int err_set(struct err *err, int code, const char *fmt, ...)
{
    CHECK(code < 0);
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(err->text, sizeof err->text, fmt, ap);
        va_end(ap);
        err->code = code;
        for (char *p = err->text; *p; p++) /* texts quote names out of files: keep them on one line */
            if ((unsigned char)*p < 0x20 || *p == 0x7f)
                *p = '?';
    }
    return code;
}

int err_prefix(struct err *err, int code, const char *fmt, ...)
{
    if (!err)
        return code;
    char old[ERR_TEXT_MAX];
    memcpy(old, err->text, sizeof old);
    char head[ERR_TEXT_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(head, sizeof head, fmt, ap);
    va_end(ap);
    return err_set(err, code, "%.*s: %.*s", 200, head, ERR_TEXT_MAX - 204, old);
}
