/* Stamps: none without a folder, what was stamped stands in the file of the process, a full disk ends nobody;
 * and the table that bench/timeline.py makes of them. */
#include <ctype.h>
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
#include "tests/lib/proc.h"
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

/* Steps of a millisecond, in which event e comes e - 1 us after the first, and where the store's planner
 * wakes up after 4 us and takes sets for 3 us from the 6th on. */
static void write_trace(const char *folder, uint32_t steps)
{
    enum { STAMPS = TRACE_ENDED + 2 };
    char path[PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/by-hand.trace", folder);
    FILE *to = fopen(path, "wbe");
    assert_non_null(to);
    uint64_t count = (uint64_t)steps * STAMPS;
    assert_int_equal(fwrite("SPTRACE1", 8, 1, to) + fwrite(&count, sizeof count, 1, to), 2);
    for (uint32_t n = 0; n < steps; n++) {
        int64_t posted = CLOCK_S + n * CLOCK_MS;
        struct record all[STAMPS] = {{posted + 4000, 26000, TRACE_AWAKE}, {posted + 6000, 3000, TRACE_SETS}};
        for (uint32_t e = TRACE_POSTED; e <= TRACE_ENDED; e++)
            all[e + 1] = (struct record){posted + (e - 1) * INT64_C(1000), n + 7, e};
        assert_int_equal(fwrite(all, sizeof *all, STAMPS, to), STAMPS);
    }
    fclose(to);
}

static void expect_line(const char *text, const char *name, unsigned count, double us)
{
    char line[160];
    snprintf(line, sizeof line, "\n%-32s %6u %10.1f %10.1f %10.1f %10.1f", name, count, us, us, us, us);
    if (!strstr(text, line))
        fail_msg("expected '%s' in: %s", line + 1, text);
}

/* Each event of base/trace.h has the row of its name. */
static void expect_events(const char *text, unsigned count)
{
    char line[256], name[64];
    uint32_t event = 0;
    FILE *from = fopen("base/trace.h", "re");
    assert_non_null(from);
    while (event < TRACE_ENDED && fgets(line, sizeof line, from)) {
        if (sscanf(line, " TRACE_%63[A-Z_]", name) != 1)
            continue;
        for (char *c = name; *c; c++)
            *c = (char)tolower(*c);
        expect_line(text, name, count, event++);
    }
    fclose(from);
    assert_int_equal(event, TRACE_ENDED);
}

static void test_timeline(void **state)
{
    (void)state;
    char folder[PATH_MAX];
    struct proc p;
    temp_make(folder);
    write_trace(folder, 6);
    proc_start(&p,
               (const char *const[]){"/usr/bin/env", "python3", "bench/timeline.py", folder, "--first", "1",
                                     "--late", "5", NULL},
               NULL);
    assert_true(proc_wait(&p, clock_now_ns() + 60 * CLOCK_S));
    if (!proc_exited(&p, 0))
        fail_msg("%s", p.err.text ? p.err.text : "");
    const char *text = p.out.text;
    assert_memory_equal(text, "5 steps of 1 rows", 17);
    expect_events(text, 5);
    expect_line(text, "posted -> told", 5, 1);
    expect_line(text, "tables_late -> released_late", 5, 6);
    expect_line(text, "step", 5, 1000);
    expect_line(text, "awake", 6, 26);
    expect_line(text, "sets", 6, 3);
    assert_non_null(strstr(text, "\nposted -> seen: 5 of 5 steps took more than 5 us\n"));
    expect_line(text, "asleep", 5, 4);
    expect_line(text, "other", 5, 6);
    assert_non_null(strstr(text, "\nseen -> tables_late: 0 of 5 steps took more than 5 us\n"));
    proc_free(&p);
    temp_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_off), cmocka_unit_test(test_full_disk), /* before there is a trace */
        cmocka_unit_test(test_stamps_are_in_the_file), cmocka_unit_test(test_timeline)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
