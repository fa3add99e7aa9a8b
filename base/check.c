/* Prints what a failed CHECK saw and aborts. Any thread. */
#include "base/check.h"

#include <stdio.h>
#include <stdlib.h>

void check_failed(const char *expr, const char *file, int line)
{
    fprintf(stderr, "check failed: %s at %s:%d\n", expr, file, line);
    abort();
}
