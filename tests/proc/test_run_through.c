/* Whole runs with `--write-through offloaded`: the same answers as with all layers in host memory, on the CPU
 * and on a GPU (through the double, tests/fakegpu), wherever layers lie; nothing of a prefix is used again; a
 * part that dies ends the run as ever. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/lib/fakegpu.h"
#include "tests/lib/runcase.h"

#define BOUND_NS runcase_bound_ns(8 * CLOCK_S)

static int set_up(void **state)
{
    char card[32];
    snprintf(card, sizeof card, "through%d", (int)getpid());
    fakegpu_use(card);
    return runcase_set_up(state);
}

/* What the arena got of one sequence: its layers, of 30. */
static int host_layers(const struct runcase *all, const struct runcase *some)
{
    double share =
        runcase_number(some->report, "bytes_written") / runcase_number(all->report, "bytes_written");
    return (int)(share * 30 + 0.5);
}

struct way {
    const char *device, *memory, *offload;
    int layers; /* in host memory */
    bool leave; /* some of them do leave */
};

/* Layers that are kept are those that the memory holds of a sequence of 1024 positions. */
static void equal(const char *mode, const struct way *way)
{
    struct runcase all, some;
    const char *document = runcase_document(way->device[1] == 'p' ? 3000 : 1500);
#define COMMON                                                                                              \
    "-f", document, "-n", "24", "--ignore-eos", "-c", "1024", "--budget", "128", "--poison", "--selection", \
        mode, "--device", way->device, "--device-memory", way->memory, "--offload-layers", way->offload,    \
        "--sequences", "1"
    RUNCASE_RUN(&all, COMMON);
    RUNCASE_RUN(&some, COMMON, "--write-through", "offloaded");
#undef COMMON
    runcase_expect_equal(all.report, some.report, "tokens");
    runcase_expect_equal(all.report, some.report, "layers_offloaded_max");
    assert_int_equal(host_layers(&all, &some), way->layers);
    assert_true((runcase_number(some.report, "layers_offloaded_max") > 0) == way->leave);
    assert_true((runcase_number(some.report, "rows_loaded") > 0) == way->leave);
    runcase_free(&all);
    runcase_free(&some);
}

/* In each mode of selection where some layers stay and others leave. */
static void in_modes(const struct way *way)
{
    static const char *const modes[] = {"current", "previous", "mixed"};
    for (int m = 0; m < (way->leave && way->layers < 30 ? 3 : 1); m++)
        equal(modes[m], way);
}

/* Everything resident: no layer is in host memory; some; all. */
static void test_cpu(void **state)
{
    (void)state;
    runcase_need_model();
    static const struct way ways[] = {{"cpu", "256M", "0", 0, false},
                                      {"cpu", "28M", "0", 22, true},
                                      {"cpu", "18M", "0", 30, true},
                                      {"cpu", "256M", "30", 30, true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        in_modes(&ways[i]);
}

static void test_gpu(void **state)
{
    (void)state;
    runcase_need_model();
    static const struct way ways[] = {{"cuda:0", "64M", "0", 0, false},
                                      {"cuda:0", "64M", "12", 14, true},
                                      {"cuda:0", "64M", "30", 30, true}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        in_modes(&ways[i]);
}

/* Many prompts, more than run at a time. */
static void test_many(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase all, some;
#define COMMON                                                                                               \
    "--prompts", "tests/vectors/prompts32.jsonl", "-n", "24", "--ignore-eos", "-c", "512", "--budget", "96", \
        "--sequences", "6", "--device-memory", "60M", "--poison"
    RUNCASE_RUN(&all, COMMON);
    RUNCASE_RUN(&some, COMMON, "--write-through", "offloaded");
#undef COMMON
    const json_t *a = runcase_field(all.report, "sequences"), *b = runcase_field(some.report, "sequences");
    assert_int_equal(json_array_size(a), 32);
    for (size_t i = 0; i < 32; i++) {
        runcase_expect_equal(json_array_get(a, i), json_array_get(b, i), "tokens");
        assert_int_equal((int)runcase_number(json_array_get(b, i), "cached_tokens"), 0);
    }
    runcase_free(&all);
    runcase_free(&some);
}

static void kill_part(enum runcase_part part, const char *name, const char *device)
{
    struct runcase c;
    RUNCASE_START(&c, "-p", "Once upon a time", "-n", "400", "--ignore-eos", "--budget", "128", "-c", "512",
                  "--device", device, "--device-memory", "64M", "--offload-layers", "12", "--write-through",
                  "offloaded");
    runcase_wait_text(&c);
    runcase_find_parts(&c);
    kill(c.parts[part], SIGKILL);
    runcase_end(&c, 1, clock_now_ns() + BOUND_NS);
    char line[96];
    snprintf(line, sizeof line, "specontext: %s (pid %d) was ended by signal 9", name, (int)c.parts[part]);
    if (!strstr(c.proc.err.text ? c.proc.err.text : "", line))
        fail_msg("expected '%s' in: %s", line, c.proc.err.text);
    runcase_free(&c);
}

static void test_a_part_dies(void **state)
{
    (void)state;
    runcase_need_model();
    static const char *const devices[] = {"cpu", "cuda:0"};
    for (int i = 0; i < 2; i++) {
        kill_part(RUNCASE_KVSTORE, "specontext-kvstore", devices[i]);
        kill_part(RUNCASE_DECODER, "specontext-decoder", devices[i]);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {cmocka_unit_test(test_cpu), cmocka_unit_test(test_gpu),
                                              cmocka_unit_test(test_many),
                                              cmocka_unit_test(test_a_part_dies)};
    return cmocka_run_group_tests(tests, set_up, runcase_tear_down);
}
