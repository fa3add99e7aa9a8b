/* Runs the command line for tests. State: the temporary world of the binary. Single-threaded. */
#include "tests/lib/runcase.h"

#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/check.h"
#include "tests/lib/temp.h"

static char world[PATH_MAX];
static char env_runtime[PATH_MAX + 128], env_cache[PATH_MAX + 128], env_temp[PATH_MAX + 128];

const char *runcase_path(const char *name)
{
    static char path[PATH_MAX + 64];
    snprintf(path, sizeof path, "%s/%s", world, name);
    return path;
}

int runcase_set_up(void **state)
{
    (void)state;
    temp_make(world);
    CHECK(!mkdir(runcase_path("run"), 0700) && !mkdir(runcase_path("cache"), 0700));
    snprintf(env_runtime, sizeof env_runtime, "XDG_RUNTIME_DIR=%s", runcase_path("run"));
    snprintf(env_cache, sizeof env_cache, "XDG_CACHE_HOME=%s", runcase_path("cache"));
    snprintf(env_temp, sizeof env_temp, "TMPDIR=%s", world);
    return 0;
}

int runcase_tear_down(void **state)
{
    (void)state;
    temp_remove(world);
    return 0;
}

void runcase_need_model(void)
{
    if (access(RUNCASE_MODEL, R_OK)) {
        print_message("# %s is not there: make model\n", RUNCASE_MODEL);
        skip();
    }
}

void runcase_start(struct runcase *c, const char *const *arguments)
{
    const char *argv[RUNCASE_ARGS + 8] = {proc_program("specontext"), "run", "-m", RUNCASE_MODEL, "--report"};
    const char *environment[] = {env_runtime, env_cache, env_temp, NULL};
    int n = 5;
    *c = (struct runcase){0};
    snprintf(c->report_path, sizeof c->report_path, "%s", runcase_path("report.json"));
    unlink(c->report_path);
    argv[n++] = c->report_path;
    for (; *arguments; arguments++) {
        CHECK(n < RUNCASE_ARGS);
        argv[n++] = *arguments;
    }
    argv[n] = NULL;
    proc_start(&c->proc, argv, environment);
}

static void fail_with_output(struct runcase *c, const char *what)
{
    /* Not by print_error, which cuts texts at 1 KiB: the end tells most. */
    fprintf(stderr, "# %s; standard error:\n%s\n", what, c->proc.err.text ? c->proc.err.text : "");
    proc_free(&c->proc);
    fail();
}

void runcase_wait_text(struct runcase *c)
{
    if (!proc_wait_output(&c->proc, 1, clock_now_ns() + RUNCASE_START_S * CLOCK_S))
        fail_with_output(c, "no text came");
}

void runcase_find_parts(struct runcase *c)
{
    static const char *const names[RUNCASE_PARTS] = {"specontext-kvstore", "specontext-retriever",
                                                     "specontext-decoder"};
    for (int i = 0; i < RUNCASE_PARTS; i++) {
        /* The kernel keeps 15 characters of a name: enough to tell them apart. */
        c->parts[i] = proc_child(c->proc.pid, names[i]);
        if (!c->parts[i])
            fail_with_output(c, names[i]);
    }
}

/* Names are the machine's: other programs make and remove theirs while a test runs. Ours would have our name
 * in them; test_tidy sees to it that nothing here makes any. */
void runcase_no_remains(void)
{
    assert_string_equal(temp_list(runcase_path("run")), "");
    if (strstr(temp_list("/dev/shm"), "specontext"))
        fail_msg("/dev/shm has %s", temp_list("/dev/shm"));
}

int64_t runcase_bound_ns(int64_t ns)
{
    double load = 0, cores = (double)sysconf(_SC_NPROCESSORS_ONLN);
    int running = 0;
    FILE *from = fopen("/proc/loadavg", "re");
    if (from && fscanf(from, "%lf %*f %*f %d/", &load, &running) != 2)
        load = 0;
    if (from)
        fclose(from);
    cpu_set_t set;
    if (!sched_getaffinity(0, sizeof set, &set))
        cores = (double)CPU_COUNT(&set);
    load = running > load ? running : load;
    return load > cores ? (int64_t)((double)ns * load / cores) : ns;
}

void runcase_end(struct runcase *c, int code, int64_t deadline_ns)
{
    if (!proc_wait(&c->proc, deadline_ns))
        fail_with_output(c, "it did not end in time");
    if (!proc_exited(&c->proc, code))
        fail_with_output(c, "another exit code was expected");
    json_decref(c->report);
    c->report = json_load_file(c->report_path, 0, NULL);
    runcase_no_remains();
}

void runcase_run(struct runcase *c, const char *const *arguments)
{
    runcase_start(c, arguments);
    runcase_end(c, 0, clock_now_ns() + RUNCASE_START_S * CLOCK_S);
    assert_non_null(c->report);
}

void runcase_free(struct runcase *c)
{
    proc_free(&c->proc);
    json_decref(c->report);
    *c = (struct runcase){0};
}

const char *runcase_document(size_t bytes)
{
    static char path[PATH_MAX + 64];
    char text[65536];
    FILE *from = fopen("tests/vectors/demo/document.txt", "re");
    CHECK(from && bytes < sizeof text);
    size_t n = fread(text, 1, bytes, from);
    fclose(from);
    while (n && text[n - 1] != ' ')
        n--;
    CHECK(n);
    text[n - 1] = 0;
    char name[32];
    snprintf(name, sizeof name, "document-%zu.txt", bytes);
    snprintf(path, sizeof path, "%s", runcase_path(name));
    temp_write(path, text);
    return path;
}

const json_t *runcase_field(const json_t *report, const char *name)
{
    const json_t *value = json_object_get(report, name);
    if (!value)
        fail_msg("the report lacks '%s'", name);
    return value;
}

double runcase_number(const json_t *report, const char *name)
{
    const json_t *value = runcase_field(report, name);
    if (!json_is_number(value))
        fail_msg("'%s' is no number in the report", name);
    return json_number_value(value);
}

void runcase_expect_equal(const json_t *a, const json_t *b, const char *name)
{
    const json_t *x = runcase_field(a, name), *y = runcase_field(b, name);
    if (json_equal(x, y))
        return;
    char *left = json_dumps(x, JSON_ENCODE_ANY | JSON_COMPACT),
         *right = json_dumps(y, JSON_ENCODE_ANY | JSON_COMPACT);
    fail_msg("%s differ:\n%.2000s\n%.2000s", name, left, right);
}

static void run_with(struct runcase *c, const char *const *arguments, const char *option, const char *value)
{
    const char *all[RUNCASE_ARGS];
    int n = 0;
    for (; arguments[n]; n++) {
        CHECK(n + 3 < RUNCASE_ARGS);
        all[n] = arguments[n];
    }
    all[n++] = option;
    all[n++] = value;
    all[n] = NULL;
    runcase_run(c, all);
}

void runcase_residencies(const char *const *arguments, const struct runcase_residency *r)
{
    struct runcase all, some, none;
    runcase_run(&all, arguments);
    run_with(&some, arguments, r->option, r->some);
    run_with(&none, arguments, r->option, r->none);
    runcase_expect_equal(all.report, some.report, "tokens");
    runcase_expect_equal(all.report, none.report, "tokens");
    assert_int_equal((int)runcase_number(all.report, "layers_offloaded_max"), 0);
    assert_int_equal((int)runcase_number(all.report, "bytes_loaded"), 0);
    double offloaded = runcase_number(some.report, "layers_offloaded_max");
    assert_true(offloaded >= r->least && offloaded < 30);
    assert_int_equal((int)runcase_number(none.report, "layers_offloaded_max"), 30);
    assert_true(runcase_number(some.report, "rows_loaded") > 0);
    assert_true(runcase_number(none.report, "rows_loaded") > 0);
    runcase_free(&all);
    runcase_free(&some);
    runcase_free(&none);
}
