/* The supervisor with parts that are this binary under other names: readiness, ends of every kind, deafness,
 * clean-up, and what is left when the supervisor itself is killed. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/check.h"
#include "launch/notify.h"
#include "launch/supervise.h"
#include "link/runtime.h"
#include "tests/lib/proc.h"
#include "tests/lib/temp.h"

static char temp[PATH_MAX], bin[PATH_MAX + 8], run_base[PATH_MAX + 8];

/* ---- the parts ----------------------------------------------------------------------------------------- */

/* Leans on the part whose pid the test wrote down: told to end, it looks whether that one ends before it. */
static void lean_on_base(const char *runtime)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigprocmask(SIG_BLOCK, &set, NULL);
    sd_notify(0, "READY=1");
    struct timespec bound = {.tv_sec = 60};
    CHECK(sigtimedwait(&set, NULL, &bound) == SIGTERM);
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/../../base-pid", runtime);
    FILE *from = fopen(path, "re");
    int pid;
    CHECK(from && fscanf(from, "%d", &pid) == 1);
    fclose(from);
    pid_t base = pid;
    if (proc_wait_gone(&base, 1, clock_now_ns() + 200 * CLOCK_MS)) {
        snprintf(path, sizeof path, "%s/../../out-of-order", runtime);
        temp_write(path, "");
    }
}

static void leave(int number)
{
    (void)number;
    _exit(1);
}

static int part_main(int argc, char **argv, const char *name)
{
    int lifeline = -1;
    const char *runtime = NULL;
    for (int i = 1; i + 1 < argc; i++) {
        if (!strcmp(argv[i], "--lifeline"))
            lifeline = (int)strtol(argv[i + 1], NULL, 10);
        if (!strcmp(argv[i], "--runtime"))
            runtime = argv[i + 1];
    }
    CHECK(lifeline >= 0 && runtime);
    if (!strcmp(name, "part-exit3"))
        return 3;
    if (!strcmp(name, "part-lean")) {
        lean_on_base(runtime);
        return 0;
    }
    if (!strcmp(name, "part-silent"))
        poll(NULL, 0, 60000);
    if (!strcmp(name, "part-deaf"))
        signal(SIGTERM, SIG_IGN);
    if (!strcmp(name, "part-leave"))
        signal(SIGUSR1, leave);
    sd_notify(0, "STATUS=loading \033[31m");
    sd_notify(0, "READY=1");
    struct pollfd p = {.fd = lifeline, .events = POLLIN};
    if (!strcmp(name, "part-deaf"))
        p.fd = -1;
    poll(&p, 1, 60000);
    runtime_remove(runtime);
    return 0;
}

/* ---- the other side ------------------------------------------------------------------------------------ */

struct seen {
    struct loop *loop;
    struct supervise *supervise;
    int statuses, ready, failed, stopped;
    char status[256], text[ERR_TEXT_MAX];
    int64_t failed_ns, stopping_ns, stopped_ns;
    void (*when_ready)(struct seen *seen);
    int64_t deadline_ns;
};

static void on_status(void *arg, const char *part, const char *text)
{
    struct seen *seen = arg;
    seen->statuses++;
    snprintf(seen->status, sizeof seen->status, "%s: %s", part, text);
}

static void on_ready(void *arg)
{
    struct seen *seen = arg;
    seen->ready++;
    if (seen->when_ready)
        seen->when_ready(seen);
}

static void on_failed(void *arg, const char *text)
{
    struct seen *seen = arg;
    seen->failed++;
    seen->failed_ns = clock_now_ns();
    snprintf(seen->text, sizeof seen->text, "%s", text);
}

static void on_stopped(void *arg)
{
    struct seen *seen = arg;
    seen->stopped++;
    seen->stopped_ns = clock_now_ns();
    loop_stop(seen->loop, 0);
}

static const struct supervise_ops ops = {
    .status = on_status, .ready = on_ready, .failed = on_failed, .stopped = on_stopped};

static void on_deadline(void *arg)
{
    struct seen *seen = arg;
    if (clock_now_ns() >= seen->deadline_ns)
        loop_stop(seen->loop, -1);
}

static void begin(struct seen *seen, int64_t start_ns)
{
    *seen = (struct seen){.loop = loop_create(), .deadline_ns = clock_now_ns() + 60 * CLOCK_S};
    struct supervise_config config = {.loop = seen->loop, .bin_dir = bin, .start_ns = start_ns};
    struct err err = {0};
    assert_int_equal(supervise_create(&config, &ops, seen, &seen->supervise, &err), 0);
    loop_add_timer(seen->loop, 20 * CLOCK_MS, on_deadline, seen);
}

static void add(struct seen *seen, const char *program)
{
    struct supervise_part part = {.program = program};
    struct err err = {0};
    assert_int_equal(supervise_start(seen->supervise, &part, &err), 0);
}

/* Until no part is left; the failure is told once, in a text that has all of these words. */
#define RUN_TO_FAILURE(seen, ...) run_to_failure(seen, (const char *const[]){__VA_ARGS__, NULL})

static void run_to_failure(struct seen *seen, const char *const *words)
{
    assert_int_equal(loop_run(seen->loop), 0);
    assert_int_equal(seen->failed, 1);
    for (; *words; words++)
        assert_non_null(strstr(seen->text, *words));
}

static void end(struct seen *seen)
{
    supervise_free(&seen->supervise);
    assert_null(seen->supervise);
    loop_free(&seen->loop);
    assert_string_equal(temp_list(run_base), "");
}

static void stop_it(struct seen *seen)
{
    seen->stopping_ns = clock_now_ns();
    supervise_stop(seen->supervise);
}

static void test_ready_and_stop(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 0);
    seen.when_ready = stop_it;
    add(&seen, "part-a");
    add(&seen, "part-b");
    pid_t a = supervise_pid(seen.supervise, "part-a");
    assert_true(a > 0);
    assert_int_equal(supervise_pid(seen.supervise, "part-x"), 0);
    assert_int_equal(loop_run(seen.loop), 0);
    assert_int_equal(seen.ready, 1);
    assert_int_equal(seen.statuses, 2);
    assert_non_null(strstr(seen.status, "loading ?[31m")); /* no escape reaches the terminal */
    assert_int_equal(seen.failed, 0);
    assert_int_equal(seen.stopped, 1);
    assert_true(proc_gone(a));
    assert_string_equal(temp_list(run_base), "");
    end(&seen);
}

static void kill_b(struct seen *seen)
{
    kill(supervise_pid(seen->supervise, "part-b"), SIGKILL);
}

static void test_killed_part_is_named(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 0);
    seen.when_ready = kill_b;
    add(&seen, "part-a");
    add(&seen, "part-b");
    char pid[32];
    snprintf(pid, sizeof pid, "(pid %d)", (int)supervise_pid(seen.supervise, "part-b"));
    RUN_TO_FAILURE(&seen, "part-b", pid, "signal 9");
    assert_int_equal(seen.stopped, 1);
    end(&seen);
}

static void test_exit_while_starting(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 0);
    add(&seen, "part-a");
    add(&seen, "part-exit3");
    RUN_TO_FAILURE(&seen, "part-exit3", "exit code 3 while starting");
    end(&seen);
}

static void test_start_has_a_bound(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 3 * CLOCK_S); /* what part-a may take for its own start */
    add(&seen, "part-a");
    add(&seen, "part-silent");
    RUN_TO_FAILURE(&seen, "part-silent", "did not become ready");
    assert_int_equal(seen.ready, 0);
    end(&seen);
}

static void stop_deaf(struct seen *seen)
{
    pid_t pid = supervise_pid(seen->supervise, "part-deaf");
    kill(pid, SIGSTOP);
    siginfo_t info;
    waitid(P_PID, (id_t)pid, &info, WSTOPPED | WNOWAIT); /* the kernel stops it in its own time */
}

static void lose_deaf(struct seen *seen)
{
    stop_deaf(seen);
    supervise_lost(seen->supervise, "part-deaf", "silent");
}

static void test_stopped_part_is_named_and_killed(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 0);
    seen.when_ready = lose_deaf;
    add(&seen, "part-a");
    add(&seen, "part-deaf");
    RUN_TO_FAILURE(&seen, "part-deaf", "stopped by signal 19");
    end(&seen);
}

static void stop_deaf_and_leave(struct seen *seen)
{
    stop_deaf(seen);
    kill(supervise_pid(seen->supervise, "part-leave"), SIGUSR1);
}

/* A peer of the stopped part may give up on it first: that one's end is not the cause. */
static void test_end_of_who_waited_is_not_blamed(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 0);
    seen.when_ready = stop_deaf_and_leave;
    add(&seen, "part-leave");
    add(&seen, "part-deaf");
    RUN_TO_FAILURE(&seen, "part-deaf", "stopped by signal 19");
    end(&seen);
}

static void test_stopped_while_starting(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 3 * CLOCK_S);
    add(&seen, "part-a");
    add(&seen, "part-silent");
    kill(supervise_pid(seen.supervise, "part-silent"), SIGSTOP);
    RUN_TO_FAILURE(&seen, "part-silent", "stopped by signal 19");
    assert_int_equal(seen.ready, 0);
    end(&seen);
}

static void test_deaf_part_is_killed_in_time(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 0);
    seen.when_ready = stop_it;
    add(&seen, "part-deaf");
    assert_int_equal(loop_run(seen.loop), 0);
    assert_int_equal(seen.stopped, 1);
    assert_true(seen.stopped_ns - seen.stopping_ns >= SUPERVISE_STOP_NS);
    assert_true(seen.stopped_ns - seen.stopping_ns < SUPERVISE_STOP_NS + 10 * CLOCK_S);
    end(&seen);
}

/* Parts lean on those that were started before them, so they end before them. */
static void test_order_of_an_ordinary_end(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 0);
    seen.when_ready = stop_it;
    add(&seen, "part-a");
    add(&seen, "part-lean");
    pid_t pid = supervise_pid(seen.supervise, "part-lean");
    char path[PATH_MAX + 32];
    snprintf(path, sizeof path, "%s/base-pid", temp);
    char text[32];
    snprintf(text, sizeof text, "%d", (int)supervise_pid(seen.supervise, "part-a"));
    temp_write(path, text);
    assert_int_equal(loop_run(seen.loop), 0);
    assert_int_equal(seen.stopped, 1);
    assert_true(proc_gone(pid));
    snprintf(path, sizeof path, "%s/out-of-order", temp);
    assert_int_not_equal(access(path, F_OK), 0);
    end(&seen);
}

static void test_missing_program(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 0);
    struct supervise_part part = {.program = "part-none"};
    struct err err = {0};
    assert_int_equal(supervise_start(seen.supervise, &part, &err), -ENOENT);
    assert_non_null(strstr(err.text, "part-none"));
    end(&seen);
}

/* Two runs in one directory: the second is refused and leaves the first one's sockets alone. One that a crash
 * left behind stops nobody. */
static void test_a_directory_in_use(void **state)
{
    (void)state;
    char dir[PATH_MAX + 32];
    snprintf(dir, sizeof dir, "%s/one", run_base);
    struct seen seen = {.loop = loop_create()};
    struct supervise_config config = {.loop = seen.loop, .bin_dir = bin, .dir = dir};
    struct err err = {0};
    assert_int_equal(supervise_create(&config, &ops, &seen, &seen.supervise, &err), 0);
    struct supervise *second = NULL;
    assert_int_equal(supervise_create(&config, &ops, &seen, &second, &err), -EADDRINUSE);
    assert_non_null(strstr(err.text, "another run"));
    assert_null(second);
    assert_string_equal(temp_list(dir), "notify.sock");
    supervise_free(&seen.supervise);
    assert_string_equal(temp_list(run_base), "");

    assert_int_equal(mkdir(dir, 0700), 0);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%.80s/notify.sock", dir);
    int stale = socket(AF_UNIX, SOCK_DGRAM, 0);
    assert_int_equal(bind(stale, (struct sockaddr *)&address, sizeof address), 0);
    close(stale); /* its name stays */
    assert_int_equal(supervise_create(&config, &ops, &seen, &seen.supervise, &err), 0);
    end(&seen);
}

static void test_free_ends_what_runs(void **state)
{
    (void)state;
    struct seen seen;
    begin(&seen, 0);
    add(&seen, "part-a");
    add(&seen, "part-deaf");
    pid_t pids[] = {supervise_pid(seen.supervise, "part-a"), supervise_pid(seen.supervise, "part-deaf")};
    end(&seen);
    assert_true(proc_gone(pids[0]) && proc_gone(pids[1]));
}

/* A child supervises and is killed: the part sees the life line's end and takes the directory away. */
static void test_killed_supervisor(void **state)
{
    (void)state;
    int told[2];
    assert_int_equal(pipe(told), 0);
    pid_t child = fork();
    if (child == 0) {
        struct seen seen;
        begin(&seen, 0);
        add(&seen, "part-a");
        struct supervise_part part = {.program = "part-deaf",
                                      .die_with_parent = 1}; /* hears nothing at all */
        CHECK(!supervise_start(seen.supervise, &part, NULL));
        pid_t pids[] = {supervise_pid(seen.supervise, "part-a"), supervise_pid(seen.supervise, "part-deaf")};
        CHECK(write(told[1], pids, sizeof pids) == sizeof pids);
        loop_run(seen.loop);
        _exit(0);
    }
    pid_t pids[2];
    assert_int_equal(read(told[0], pids, sizeof pids), sizeof pids);
    assert_string_not_equal(temp_list(run_base), "");
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    assert_true(proc_wait_gone(pids, 2, clock_now_ns() + 60 * CLOCK_S));
    assert_string_equal(temp_list(run_base), "");
    close(told[0]);
    close(told[1]);
}

static int set_up(void **state)
{
    (void)state;
    static const char *const names[] = {"part-a",    "part-b",    "part-exit3", "part-silent",
                                        "part-deaf", "part-lean", "part-leave"};
    char self[PATH_MAX], link[PATH_MAX + 64];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    temp_make(temp);
    snprintf(bin, sizeof bin, "%s/bin", temp);
    snprintf(run_base, sizeof run_base, "%s/run", temp);
    if (mkdir(bin, 0700) || mkdir(run_base, 0700))
        return -1;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(link, sizeof link, "%s/%s", bin, names[i]);
        if (symlink(self, link))
            return -1;
    }
    return setenv("XDG_RUNTIME_DIR", run_base, 1);
}

static int tear_down(void **state)
{
    (void)state;
    temp_remove(temp);
    return 0;
}

int main(int argc, char **argv)
{
    const char *slash = strrchr(argv[0], '/'), *name = slash ? slash + 1 : argv[0];
    if (!strncmp(name, "part-", 5))
        return part_main(argc, argv, name);
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ready_and_stop),
        cmocka_unit_test(test_killed_part_is_named),
        cmocka_unit_test(test_exit_while_starting),
        cmocka_unit_test(test_start_has_a_bound),
        cmocka_unit_test(test_stopped_part_is_named_and_killed),
        cmocka_unit_test(test_end_of_who_waited_is_not_blamed),
        cmocka_unit_test(test_deaf_part_is_killed_in_time),
        cmocka_unit_test(test_order_of_an_ordinary_end),
        cmocka_unit_test(test_stopped_while_starting),
        cmocka_unit_test(test_missing_program),
        cmocka_unit_test(test_a_directory_in_use),
        cmocka_unit_test(test_free_ends_what_runs),
        cmocka_unit_test(test_killed_supervisor),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
