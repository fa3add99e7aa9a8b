/* Stamps: none without a folder, what was stamped stands in the file of the process, and a full
 * disk ends nobody. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/trace.h"
#include "tests/lib/temp.h"

enum { NOT_ALLOWED = 77 };

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
    struct record found[3];
    temp_make(folder);
    setenv("SPECONTEXT_TRACE", folder, 1);
    trace_open("part");
    assert_true(trace_is_on);
    int64_t before = clock_now_ns();
    trace(TRACE_POSTED, 7);
    trace(TRACE_ENDED, UINT32_MAX);
    int64_t after = clock_now_ns(), begin = trace_begin();
    assert_true(begin >= after);
    trace_end(TRACE_MOVE, begin - 7 * CLOCK_S); /* longer than there is room for */
    trace_end(TRACE_MOVE, clock_now_ns() + CLOCK_S);
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
    assert_int_equal(count, 3); /* a span of no length is left out */
    assert_int_equal(found[0].step, 7);
    assert_int_equal(found[0].event, TRACE_POSTED);
    assert_int_equal(found[1].step, UINT32_MAX);
    assert_int_equal(found[1].event, TRACE_ENDED);
    assert_true(before <= found[0].ns && found[0].ns <= found[1].ns && found[1].ns <= after);
    assert_true(found[2].ns == begin - 7 * CLOCK_S);
    assert_int_equal(found[2].step, UINT32_MAX);
    assert_int_equal(found[2].event, TRACE_MOVE);
    temp_remove(folder);
}

/* In a child: makes a small disk that nobody else sees, and traces into it. Returns the exit code. */
static int trace_on_a_full_disk(const char *folder)
{
    if (unshare(geteuid() ? CLONE_NEWUSER | CLONE_NEWNS : CLONE_NEWNS) ||
        mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("none", folder, "tmpfs", 0, "size=1m"))
        return NOT_ALLOWED;
    setenv("SPECONTEXT_TRACE", folder, 1);
    trace_open("part");
    trace(TRACE_POSTED, 1);
    return trace_is_on || temp_list(folder)[0] ? 1 : 0;
}

/* A disk that is full says so at once, and ends nobody when stamps come to the place that it has not. */
static void test_full_disk(void **state)
{
    (void)state;
    char folder[PATH_MAX];
    int status;
    temp_make(folder);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(trace_on_a_full_disk(folder));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    temp_remove(folder);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == NOT_ALLOWED)
        skip(); /* to mount, even by itself */
    assert_int_equal(WEXITSTATUS(status), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_off),
                                       cmocka_unit_test(test_full_disk), /* before there is a trace */
                                       cmocka_unit_test(test_stamps_are_in_the_file)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
