/* How a process ends that cannot go on: by a failed CHECK, without memory, without a thread. Each end is that
 * of a child. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/pool.h"

/* What a child prints that calls `body`, and its status of waitpid. */
static int end_of(void (*body)(void), char *ret_text, size_t room)
{
    int ends[2], status;
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        dup2(ends[1], STDERR_FILENO);
        body();
        _exit(0);
    }
    close(ends[1]);
    size_t bytes = 0;
    for (ssize_t n; (n = read(ends[0], ret_text + bytes, room - 1 - bytes)) > 0;)
        bytes += (size_t)n;
    ret_text[bytes] = 0;
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return status;
}

static void fail_check(void)
{
    CHECK(1 + 1 == 3);
}

static void test_failed_check(void **state)
{
    (void)state;
    char text[4096];
    int status = end_of(fail_check, text, sizeof text);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    assert_non_null(strstr(text, "check failed: 1 + 1 == 3 at tests/unit/test_check.c:"));
}

#ifndef __SANITIZE_ADDRESS__ /* whose own memory would not fit either */
/* As much as is mapped already and `more` bytes. */
static void bound_memory(rlim_t more)
{
    struct rlimit all;
    rlim_t pages = 0;
    char text[64] = {0};
    FILE *from = fopen("/proc/self/statm", "re");
    if (from && fgets(text, sizeof text, from))
        pages = (rlim_t)strtoull(text, NULL, 10);
    if (from)
        fclose(from);
    getrlimit(RLIMIT_AS, &all);
    all.rlim_cur = pages * (rlim_t)sysconf(_SC_PAGESIZE) + more;
    setrlimit(RLIMIT_AS, &all);
}

static void take_memory(void)
{
    bound_memory(1 << 20);
    mem_alloc(1, 64 << 20);
}

static void take_threads(void)
{
    bound_memory(4 << 20); /* less than a thread's stack */
    setrlimit(RLIMIT_STACK, &(struct rlimit){8 << 20, RLIM_INFINITY});
    struct pool *pool = pool_create(4, "test");
    pool_free(&pool);
}

/* One line, exit code 1. */
static void expect_exhausted(void (*body)(void), const char *line)
{
    char text[4096];
    int status = end_of(body, text, sizeof text);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 1 || !strstr(text, line))
        fail_msg("status %#x, said: %s", (unsigned)status, text);
    assert_ptr_equal(strchr(text, '\n'), text + strlen(text) - 1);
}

static void test_no_memory(void **state)
{
    (void)state;
    expect_exhausted(take_memory, "test_check: out of memory: 67108864 bytes were asked for\n");
}

static void test_no_thread(void **state)
{
    (void)state;
    expect_exhausted(take_threads, "test_check: cannot start a thread: ");
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_failed_check),
#ifndef __SANITIZE_ADDRESS__
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_no_thread),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
