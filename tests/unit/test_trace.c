/* Stamps: none without a folder, and what was stamped stands in the file of the process. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/trace.h"
#include "tests/lib/temp.h"

struct record {
    int64_t ns;
    uint32_t step, event;
};

static void test_off(void **state)
{
    (void)state;
    unsetenv("SPECONTEXT_TRACE");
    trace_open("part");
    assert_false(trace_is_on);
    trace(TRACE_POSTED, 1); /* must not touch a file that is not there */
}

static void test_stamps_are_in_the_file(void **state)
{
    (void)state;
    char folder[PATH_MAX], path[PATH_MAX + 64];
    struct record found[2];
    temp_make(folder);
    setenv("SPECONTEXT_TRACE", folder, 1);
    trace_open("part");
    assert_true(trace_is_on);
    int64_t before = clock_now_ns();
    trace(TRACE_POSTED, 7);
    trace(TRACE_ENDED, UINT32_MAX);
    int64_t after = clock_now_ns();
    snprintf(path, sizeof path, "%s/part-%d.trace", folder, (int)getpid());
    FILE *file = fopen(path, "rbe");
    assert_non_null(file);
    char magic[8];
    uint64_t count;
    assert_int_equal(fread(magic, sizeof magic, 1, file), 1);
    assert_int_equal(fread(&count, sizeof count, 1, file), 1);
    assert_int_equal(fread(found, sizeof found, 1, file), 1);
    fclose(file);
    assert_memory_equal(magic, "SPTRACE1", sizeof magic);
    assert_int_equal(count, 2);
    assert_int_equal(found[0].step, 7);
    assert_int_equal(found[0].event, TRACE_POSTED);
    assert_int_equal(found[1].step, UINT32_MAX);
    assert_int_equal(found[1].event, TRACE_ENDED);
    assert_true(before <= found[0].ns && found[0].ns <= found[1].ns && found[1].ns <= after);
    temp_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_off),
                                       cmocka_unit_test(test_stamps_are_in_the_file)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
