/* Whole runs on a GPU, through the double (tests/fakegpu): the same answers wherever layers lie, the memory
 * of the card kept under its bound, parts that end while others wait on the card, and the errors a person
 * can make. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "compute/gpu.h"
#include "proto/memory_gpu.h"
#include "tests/lib/fakegpu.h"
#include "tests/lib/runcase.h"

#define BOUND_NS runcase_bound_ns(8 * CLOCK_S) /* from a part's death to the end of all */

static const char *const names[RUNCASE_PARTS] = {"specontext-kvstore", "specontext-retriever",
                                                 "specontext-decoder"};

static int set_up(void **state)
{
    char card[32];
    snprintf(card, sizeof card, "run%d", (int)getpid());
    fakegpu_use(card);
    return runcase_set_up(state);
}

/* Nobody holds memory of the card. */
static void card_is_free(void)
{
    const struct gpu_api *api;
    struct gpu *gpu = NULL;
    uint64_t left = 0, all = 0;
    int64_t deadline_ns = clock_now_ns() + BOUND_NS;
    assert_int_equal(gpu_load(&api, NULL), 0);
    assert_int_equal(api->open("cuda:0", &gpu, NULL), 0);
    all = api->info(gpu)->bytes_total - api->info(gpu)->context_bytes;
    /* A process that was killed gives its memory back when the kernel gets to it. */
    do
        assert_int_equal(api->memory_free(gpu, &left), 0);
    while (left != all && clock_now_ns() < deadline_ns);
    assert_int_equal(left, all);
    api->close(&gpu);
}

static void expect_line(const struct runcase *c, const char *part)
{
    const char *text = c->proc.err.text ? c->proc.err.text : "";
    if (!strstr(text, part))
        fail_msg("expected '%s' in: %s", part, text);
}

/* The retriever alone on a card: what it picks weighs as much as what the CPU picks, with keys of either
 * kind. */
static void test_retriever_alone(void **state)
{
    (void)state;
    runcase_need_model();
    static const char *const keys[] = {"auto", "f16", "int8"};
    const char *document = runcase_document(1500);
    for (int i = 0; i < 3; i++) {
        struct runcase cpu, gpu;
#define COMMON "-f", document, "-n", "16", "--ignore-eos", "-c", "1024", "--budget", "128", "--key-type"
        RUNCASE_RUN(&cpu, COMMON, keys[i]);
        RUNCASE_RUN(&gpu, COMMON, keys[i], "--retriever-device", "cuda:1");
#undef COMMON
        assert_int_equal((int)runcase_number(gpu.report, "generated_tokens"), 16);
        double a = runcase_number(cpu.report, "mass_mean"), b = runcase_number(gpu.report, "mass_mean");
        if (!(b > a - 0.01 && b < a + 0.01))
            fail_msg("mass with keys %s: found %g, expected %g", keys[i], b, a);
        assert_true(runcase_number(gpu.report, "attended_mean") ==
                    runcase_number(cpu.report, "attended_mean"));
        runcase_free(&cpu);
        runcase_free(&gpu);
    }
    card_is_free();
}

/* In each mode of selection. */
static void residency(const char *mode)
{
    runcase_need_model();
    RUNCASE_RESIDENCIES((&(struct runcase_residency){"--offload-layers", "12", "30", 12}), "-f",
                        runcase_document(1500), "-n", "16", "--ignore-eos", "-c", "512", "--budget", "128",
                        "--selection", mode, "--device", "cuda:0", "--device-memory", "64M", "--poison");
    card_is_free();
}

static void test_residency_current(void **state)
{
    (void)state;
    residency("current");
}

static void test_residency_previous(void **state)
{
    (void)state;
    residency("previous");
}

static void test_residency_mixed(void **state)
{
    (void)state;
    residency("mixed");
}

/* The card has no byte more than --gpu-memory allows: what the parts take fits. The retriever beside,
 * elsewhere and on the CPU. */
static void test_memory_is_bounded(void **state)
{
    (void)state;
    runcase_need_model();
    static const char *const devices[] = {"cuda:0", "cuda:0", "cuda:1", "cpu"};
    setenv("SPECONTEXT_FAKEGPU_BYTES", "838860800", 1);
    for (int i = 0; i < 4; i++) {
        struct runcase c;
        RUNCASE_RUN(&c, "-p", "Once upon a time", "-n", "8", "--ignore-eos", "-c", "2048", "--budget", "128",
                    "--device", "cuda:0", "--retriever-device", devices[i], "--gpu-memory", "800M",
                    "--key-type", i ? "auto" : "f16");
        assert_int_equal((int)runcase_number(c.report, "generated_tokens"), 8);
        runcase_free(&c);
    }
    unsetenv("SPECONTEXT_FAKEGPU_BYTES");
    card_is_free();
}

static json_t *planned(const char *retriever, const char *keys)
{
    const char *argv[] = {proc_program("specontext"),
                          "plan",
                          "-m",
                          RUNCASE_MODEL,
                          "--gpu-memory",
                          "800M",
                          "--context",
                          "8192",
                          "--budget",
                          "128",
                          "--device",
                          "cuda:0",
                          "--retriever-device",
                          retriever,
                          "--key-type",
                          keys,
                          "--json",
                          NULL};
    struct proc proc;
    proc_start(&proc, argv, NULL);
    assert_true(proc_wait(&proc, clock_now_ns() + RUNCASE_START_S * CLOCK_S));
    assert_true(proc_exited(&proc, 0));
    json_t *json = json_loads(proc.out.text, 0, NULL);
    proc_free(&proc);
    return json;
}

/* What it says of each process makes the card's memory, all of it; a context takes what this card says. */
static void test_plan_asks_the_card(void **state)
{
    (void)state;
    runcase_need_model();
    static const char *const devices[] = {"cuda:0", "cuda:1", "cpu"};
    for (int i = 0; i < 3; i++) {
        json_t *json = planned(devices[i], "auto");
        const json_t *gpu = runcase_field(json, "gpu");
        double retriever = runcase_number(gpu, "retriever_process_bytes");
        double context = runcase_number(gpu, "contexts_bytes") / (i == 0 ? 3 : 2);
        assert_true(runcase_number(gpu, "kvstore_process_bytes") + retriever +
                        runcase_number(gpu, "decoder_process_bytes") + runcase_number(gpu, "mapping_bytes") ==
                    runcase_number(gpu, "cap_bytes"));
        assert_int_equal(retriever > 0, i == 0);
        assert_true(context > 0 && context < (double)MEMORY_GPU_CONTEXT / 2); /* the double's is small */
        json_decref(json);
    }
    card_is_free();
}

/* The status of all parts of a run that decodes, as it is planned above; the run is ended. */
static json_t *status_of(const char *device, const char *keys)
{
    struct runcase c;
    struct proc status = {0};
    char dir[PATH_MAX];
    int64_t deadline_ns = clock_now_ns() + RUNCASE_START_S * CLOCK_S;
    snprintf(dir, sizeof dir, "%s", runcase_path("run/keys"));
    const char *argv[] = {proc_program("specontext"), "status", "--runtime", dir, "--json", NULL};
#define COMMON                                                                                             \
    "-p", "Once upon a time", "-n", "2000", "--ignore-eos", "-c", "8192", "--budget", "128", "--key-type", \
        keys, "--runtime", dir, "--device", device
    if (gpu_named(device))
        RUNCASE_START(&c, COMMON, "--gpu-memory", "800M");
    else
        RUNCASE_START(&c, COMMON);
#undef COMMON
    runcase_wait_text(&c);
    do { /* on a busy machine a part may not answer within the two seconds that it waits */
        proc_free(&status);
        proc_start(&status, argv, NULL);
        assert_true(proc_wait(&status, deadline_ns));
    } while (!proc_exited(&status, 0) && clock_now_ns() < deadline_ns);
    json_t *json = json_loads(status.out.text ? status.out.text : "", 0, NULL);
    assert_non_null(json);
    proc_free(&status);
    kill(c.proc.pid, SIGINT);
    runcase_end(&c, 130, deadline_ns);
    runcase_free(&c);
    return json;
}

static uint64_t bytes_of(const json_t *part, const char *section, const char *name)
{
    return (uint64_t)runcase_number(runcase_field(part, section), name);
}

/* Each kind of keys, on the CPU and on the card: the retriever has what was asked for, it takes what is
 * planned for it, and the store has just the bytes more that its keys are fewer. */
static void test_key_types(void **state)
{
    (void)state;
    runcase_need_model();
    enum { LISTS = 8 * 3, DIM = 64, CHUNK = 256, KINDS = 3 };
    static const char *const kinds[KINDS] = {"f16", "int8", "auto"}, *const devices[] = {"cpu", "cuda:0"};
    setenv("SPECONTEXT_FAKEGPU_BYTES", "838860800", 1);
    for (int d = 0; d < 2; d++) {
        uint64_t keys[KINDS] = {0}, store[KINDS] = {0}, slab = 0;
        for (int i = 0; i < KINDS; i++) {
            json_t *all = status_of(devices[d], kinds[i]);
            const json_t *retriever = runcase_field(all, "retriever"), *kv = runcase_field(all, "kvstore");
            const char *expected = i < 2 ? kinds[i]
                                   : d   ? "int8"
                                         : "f16",
                       *found = json_string_value(runcase_field(retriever, "key_type"));
            uint64_t tokens = (uint64_t)runcase_number(retriever, "tokens"),
                     key_bytes = (uint64_t)runcase_number(retriever, "key_bytes");
            assert_string_equal(found, expected);
            assert_true(tokens > 0);
            if (!d) { /* the CPU keeps 16 bits of either, in chunks */
                assert_int_equal(key_bytes, (tokens + CHUNK - 1) / CHUNK * CHUNK * LISTS * DIM * 2);
                json_decref(all);
                continue;
            }
            assert_int_equal(key_bytes, tokens * LISTS * (strcmp(found, "int8") ? DIM * 2 : DIM + 2));
            keys[i] = bytes_of(retriever, "gpu", "keys_bytes");
            slab = bytes_of(kv, "device", "slab_bytes");
            store[i] = bytes_of(kv, "device", "slabs") * slab;
            assert_true(bytes_of(retriever, "gpu", "total_bytes") + bytes_of(kv, "gpu", "total_bytes") +
                            bytes_of(runcase_field(all, "decoder"), "gpu", "total_bytes") <=
                        800 << 20);
            json_t *plan = planned(devices[d], kinds[i]);
            assert_int_equal(bytes_of(plan, "gpu", "retriever_keys_bytes"), keys[i]);
            json_decref(plan);
            json_decref(all);
        }
        if (!d)
            continue;
        assert_int_equal(keys[2], keys[1]);
        assert_int_equal(store[2], store[1]);
        uint64_t less = keys[0] - keys[1], more = store[1] - store[0];
        assert_true(keys[0] > keys[1] && store[1] > store[0] && less > 4 * slab);
        assert_true(more < less + slab && less < more + slab);
    }
    unsetenv("SPECONTEXT_FAKEGPU_BYTES");
    card_is_free();
}

static void refused(const char *const *arguments, int code, const char *line)
{
    struct runcase c;
    runcase_start(&c, arguments);
    runcase_end(&c, code, clock_now_ns() + RUNCASE_START_S * CLOCK_S);
    expect_line(&c, line);
    runcase_free(&c);
}
#define REFUSED(code, line, ...) refused((const char *const[]){"-p", "x", __VA_ARGS__, NULL}, code, line)

static void test_refusals(void **state)
{
    (void)state;
    runcase_need_model();
    REFUSED(2, "--device: found gpu, expected cpu, cuda, cuda:N or GPU-UUID", "--device", "gpu");
    REFUSED(2, "--gpu-memory: only with --device cuda", "--gpu-memory", "1G");
    REFUSED(2, "--activations: only on the CPU", "--device", "cuda", "--activations", "q8");
    REFUSED(1, "cuda:2: no such GPU: 2 visible", "--device", "cuda:2");
    REFUSED(1, "left for the KV cache, expected at least 16", "--device", "cuda:0", "--gpu-memory", "400M");
    REFUSED(1, "--gpu-memory: found 4096 MiB, free on GPU-", "--device", "cuda:0", "--gpu-memory", "4G");
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    REFUSED(1, "CUDA_VISIBLE_DEVICES 1", "--device", "cuda:1");
    unsetenv("CUDA_VISIBLE_DEVICES");
    card_is_free();
}

/* A launch that fails somewhere in the middle ends the part, and with it the run, by one line. */
static void test_a_card_that_fails(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    setenv("SPECONTEXT_FAKEGPU_FAIL", "400", 1);
    RUNCASE_START(&c, "-p", "Once upon a time", "-n", "400", "--ignore-eos", "--retriever-device", "cuda:1");
    runcase_end(&c, 1, clock_now_ns() + RUNCASE_START_S * CLOCK_S);
    unsetenv("SPECONTEXT_FAKEGPU_FAIL");
    expect_line(&c, "failed on demand: an illegal memory access");
    expect_line(&c, "specontext: specontext-retriever (pid ");
    runcase_free(&c);
}

/* So does one while the head goes up; the cause is named. */
static void test_a_card_that_fails_at_the_start(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    setenv("SPECONTEXT_FAKEGPU_FAIL", "1", 1);
    RUNCASE_START(&c, "-p", "Once upon a time", "-n", "4", "--retriever-device", "cuda:1");
    runcase_end(&c, 1, clock_now_ns() + RUNCASE_START_S * CLOCK_S);
    unsetenv("SPECONTEXT_FAKEGPU_FAIL");
    expect_line(&c, "upload of the head: launch 1 failed on demand: an illegal memory access");
    runcase_free(&c);
}

/* Killed while the card is being asked, by a library that never comes: nothing lies anywhere yet. */
static void test_killed_while_asking(void **state)
{
    (void)state;
    runcase_need_model();
    fakegpu_need_double();
    struct runcase c;
    char library[PATH_MAX], fifo[PATH_MAX];
    snprintf(library, sizeof library, "%s", getenv("SPECONTEXT_GPU_LIBRARY"));
    snprintf(fifo, sizeof fifo, "%s", runcase_path("library.so"));
    assert_int_equal(mkfifo(fifo, 0600), 0);
    setenv("SPECONTEXT_GPU_LIBRARY", fifo, 1);
    RUNCASE_START(&c, "-p", "Once upon a time", "-n", "4", "--device", "cuda:0");
    setenv("SPECONTEXT_GPU_LIBRARY", library, 1);
    int64_t deadline_ns = clock_now_ns() + RUNCASE_START_S * CLOCK_S;
    pid_t asks = 0;
    while (!asks && clock_now_ns() < deadline_ns) {
        proc_pump(&c.proc, clock_now_ns() + 10 * CLOCK_MS);
        asks = proc_child(c.proc.pid, "specontext");
    }
    assert_true(asks > 0);
    kill(c.proc.pid, SIGKILL);
    assert_true(proc_wait(&c.proc, deadline_ns));
    assert_true(proc_wait_gone(&asks, 1, deadline_ns));
    runcase_no_remains();
    runcase_free(&c);
}

/* Median of an event's row in the table of bench/timeline.py; its steps must be `steps`. */
static double median(const char *table, const char *event, int steps)
{
    char begin[64];
    int found = 0;
    double us = 0;
    snprintf(begin, sizeof begin, "\n%s ", event);
    const char *row = strstr(table, begin);
    if (!row || sscanf(row + strlen(begin), "%d %lf", &found, &us) != 2 || found != steps)
        fail_msg("%s: found %d steps, expected %d in: %s", event, found, steps, table);
    return us;
}

/* The stamps of all parts meet in one table: each event of each step is there, and none before what it waits
 * for. A message may be heard before it is known to be sent, and a flag be seen before it is stamped. */
static void test_timeline(void **state)
{
    (void)state;
    runcase_need_model();
    static const char *const orders[][10] = {
        {"told"},
        {"heard", "begun", "queued", "ranked", "compared", "topk", "topk_taken", "checked", "tables_late"},
        {"compared", "answered", "sent"},
        {"checked", "drafted"},
        {"seen", "tables_late", "written", "write_back"},
        {"posted", "launched", "released_late", "ended", "written", "consumed"}};
    struct runcase c;
    struct proc p;
    char folder[PATH_MAX];
    int steps = 0;
    snprintf(folder, sizeof folder, "%s", runcase_path("trace"));
    assert_int_equal(mkdir(folder, 0700), 0);
    setenv("SPECONTEXT_TRACE", folder, 1);
    RUNCASE_RUN(&c, "-p", "Once upon a time", "-n", "16", "--ignore-eos", "--budget", "128", "--device",
                "cuda:0");
    unsetenv("SPECONTEXT_TRACE");
    proc_start(
        &p,
        (const char *const[]){"/usr/bin/env", "python3", "bench/timeline.py", folder, "--gap", "10000", NULL},
        NULL);
    assert_true(proc_wait(&p, clock_now_ns() + 60 * CLOCK_S));
    if (!proc_exited(&p, 0) || sscanf(p.out.text, "%d steps of 1 rows", &steps) != 1)
        fail_msg("%s%s", p.out.text ? p.out.text : "", p.err.text ? p.err.text : "");
    /* The first token is the prompt's, four are left out, and none yet is measured, without a graph. */
    assert_int_equal(steps, 16 - 1 - 4);
    for (size_t i = 0; i < sizeof orders / sizeof *orders; i++)
        for (size_t j = 0; orders[i][j]; j++) {
            double us = median(p.out.text, orders[i][j], steps);
            if (j > 0 && us < median(p.out.text, orders[i][j - 1], steps))
                fail_msg("%s before %s in: %s", orders[i][j], orders[i][j - 1], p.out.text);
        }
    proc_free(&p);
    runcase_free(&c);
}

/* Parts that wait for one another on the card are let go when one dies, wherever layers lie. */
static void kill_part(enum runcase_part part, const char *offload)
{
    runcase_need_model();
    struct runcase c;
    RUNCASE_START(&c, "-p", "Once upon a time", "-n", "6000", "--ignore-eos", "--budget", "128", "--device",
                  "cuda:0", "--offload-layers", offload);
    runcase_wait_text(&c);
    runcase_find_parts(&c);
    kill(c.parts[part], SIGKILL);
    runcase_end(&c, 1, clock_now_ns() + BOUND_NS);
    expect_line(&c, names[part]);
    expect_line(&c, "was ended by signal 9");
    for (int i = 0; i < RUNCASE_PARTS; i++)
        assert_true(proc_gone(c.parts[i]));
    runcase_free(&c);
    card_is_free();
}

static void test_kill_kvstore(void **state)
{
    (void)state;
    kill_part(RUNCASE_KVSTORE, "0");
    kill_part(RUNCASE_KVSTORE, "30");
}

static void test_kill_retriever(void **state)
{
    (void)state;
    kill_part(RUNCASE_RETRIEVER, "12");
}

static void test_kill_decoder(void **state)
{
    (void)state;
    kill_part(RUNCASE_DECODER, "30");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_retriever_alone),    cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_a_card_that_fails),  cmocka_unit_test(test_a_card_that_fails_at_the_start),
        cmocka_unit_test(test_residency_current),  cmocka_unit_test(test_residency_previous),
        cmocka_unit_test(test_residency_mixed),    cmocka_unit_test(test_memory_is_bounded),
        cmocka_unit_test(test_plan_asks_the_card), cmocka_unit_test(test_killed_while_asking),
        cmocka_unit_test(test_kill_kvstore),       cmocka_unit_test(test_kill_retriever),
        cmocka_unit_test(test_kill_decoder),       cmocka_unit_test(test_timeline),
        cmocka_unit_test(test_key_types),
    };
    return cmocka_run_group_tests(tests, set_up, runcase_tear_down);
}
