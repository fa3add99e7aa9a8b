/* Where the double lies: BUILD/tests/libspecontext-fakegpu.so, beside the folders unit and proc. */
#include "tests/lib/fakegpu.h"

#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/check.h"

void fakegpu_use(const char *card)
{
    char program[PATH_MAX], path[PATH_MAX + 64];
    const char *real = getenv("SPECONTEXT_TEST_GPU_LIBRARY");
    if (real) {
        CHECK(setenv("SPECONTEXT_GPU_LIBRARY", real, 1) == 0);
        return;
    }
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    CHECK(n > 0);
    program[n] = 0;
    for (int up = 0; up < 2; up++) {
        char *slash = strrchr(program, '/');
        CHECK(slash);
        *slash = 0;
    }
    snprintf(path, sizeof path, "%s/libspecontext-fakegpu.so", program);
    CHECK(access(path, R_OK) == 0);
    CHECK(setenv("SPECONTEXT_GPU_LIBRARY", path, 1) == 0);
    CHECK((card ? setenv("SPECONTEXT_FAKEGPU_CARD", card, 1) : unsetenv("SPECONTEXT_FAKEGPU_CARD")) == 0);
}

void fakegpu_need_double(void)
{
    if (getenv("SPECONTEXT_TEST_GPU_LIBRARY"))
        skip();
}
