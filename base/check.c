/* Prints what ends the process, and ends it. Any thread. */
#include "base/check.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

void check_failed(const char *expr, const char *file, int line)
{
    fprintf(stderr, "check failed: %s at %s:%d\n", expr, file, line);
    abort();
}

void check_exhausted(const char *fmt, ...)
{
    char text[256]; /* one write: lines of several processes do not mix */
    va_list values;
    va_start(values, fmt);
    vsnprintf(text, sizeof text, fmt, values);
    va_end(values);
    dprintf(STDERR_FILENO, "%s: %s\n", program_invocation_short_name, text);
    _exit(1); /* other threads may hold what exit handlers wait for */
}
