/* `specontext plan` against what the store then allocates for the same load: within 3 %; and the retriever's
 * keys of beginnings, exactly. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <jansson.h>
#include <math.h>
#include <signal.h>

#include "base/clock.h"
#include "tests/lib/proc.h"
#include "tests/lib/runcase.h"

enum { REQUESTS = 4, DOCUMENT_MAX = 6000 };

static json_t *run_json(const char *const *argv)
{
    struct proc proc;
    proc_start(&proc, argv, NULL);
    assert_true(proc_wait(&proc, clock_now_ns() + RUNCASE_START_S * CLOCK_S));
    assert_true(proc_exited(&proc, 0) || proc_exited(&proc, 1));
    json_t *json = json_loads(proc.out.text, 0, NULL);
    proc_free(&proc);
    return json;
}

/* REQUESTS prompts of the same text of `most` bytes, one JSON string a line. */
static const char *prompts_file(size_t most)
{
    static char path[PATH_MAX];
    char text[DOCUMENT_MAX + 1];
    FILE *in = fopen(runcase_document(most), "r");
    assert_non_null(in);
    size_t bytes = fread(text, 1, DOCUMENT_MAX, in);
    fclose(in);
    snprintf(path, sizeof path, "%s", runcase_path("prompts.jsonl"));
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    for (int i = 0; i < REQUESTS; i++) {
        json_t *line = json_stringn(text, bytes);
        assert_non_null(line);
        json_dumpf(line, out, JSON_ENCODE_ANY);
        fputc('\n', out);
        json_decref(line);
    }
    fclose(out);
    return path;
}

/* The status of a part that runs there, or NULL. */
static json_t *status_of(const char *dir, const char *part)
{
    const char *argv[] = {proc_program("specontext"), "status", "--runtime", dir, "--json", NULL};
    json_t *all = run_json(argv), *one = json_incref(json_object_get(all, part));
    json_decref(all);
    return one;
}

/* The store's status once all requests decode, NULL before. `ret_tokens[REQUESTS]`: how long each is by then;
 * on a busy machine they are blocks apart. */
static json_t *store_decoding(const char *dir, int64_t *ret_tokens)
{
    json_t *store = status_of(dir, "kvstore");
    const json_t *list = json_object_get(store, "sequences");
    size_t decoding = 0;
    for (size_t i = 0; i < json_array_size(list) && i < REQUESTS; i++) {
        const json_t *one = json_array_get(list, i);
        ret_tokens[i] = json_integer_value(json_object_get(one, "tokens"));
        decoding += ret_tokens[i] > json_integer_value(json_object_get(one, "prompt_tokens")) + 1;
    }
    if (decoding == REQUESTS)
        return store;
    json_decref(store);
    return NULL;
}

struct load {
    size_t prompt_bytes;
    const char *device_memory, *context, *through;
    int layers; /* in host memory, of 30 */
    bool offloads;
};

/* Adds one request's share of what is planned for REQUESTS of `tokens` tokens while `offloaded` layers are in
 * host memory. */
static void add_planned(int64_t tokens, const struct load *load, int64_t offloaded, double *device,
                        double *host)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)tokens);
    const char *argv[] = {proc_program("specontext"),
                          "plan",
                          "-m",
                          RUNCASE_MODEL,
                          "--device-memory",
                          load->device_memory,
                          "--write-through",
                          load->through,
                          "--requests",
                          "4",
                          "-c",
                          load->context,
                          "--budget",
                          "256",
                          "--context",
                          text,
                          "--json",
                          NULL};
    json_t *plan = run_json(argv);
    assert_int_equal((int)runcase_number(plan, "host_layers"), load->layers);
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(plan, "thresholds"), i, row)
    {
        if (json_integer_value(json_object_get(row, "layers_offloaded")) == offloaded)
            *device += runcase_number(row, "device_bytes") / REQUESTS;
    }
    *host += runcase_number(plan, "host_bytes") / REQUESTS;
    json_decref(plan);
}

static void check_load(const struct load *load)
{
    struct runcase c;
    char dir[PATH_MAX];
    snprintf(dir, sizeof dir, "%s", runcase_path("run/plan"));
    RUNCASE_START(&c, "--prompts", prompts_file(load->prompt_bytes), "-n", "6000", "--ignore-eos", "--budget",
                  "256", "--no-prefix", "--device-memory", load->device_memory, "-c", load->context,
                  "--write-through", load->through, "--runtime", dir);
    json_t *store = NULL;
    int64_t tokens[REQUESTS] = {0}, deadline = clock_now_ns() + 240 * CLOCK_S;
    /* To ask takes a process of its own: often enough is four times a second, the cores have work. */
    while (!store && clock_now_ns() < deadline && !proc_wait(&c.proc, clock_now_ns() + CLOCK_S / 4))
        store = store_decoding(dir, tokens);
    assert_non_null(store);
    kill(c.proc.pid, SIGINT);
    runcase_end(&c, 130, clock_now_ns() + RUNCASE_START_S * CLOCK_S);

    int64_t offloaded = (int64_t)runcase_number(store, "layers_offloaded");
    assert_true(load->offloads ? offloaded > 0 : offloaded == 0);
    double planned = 0, host_planned = 0;
    for (int i = 0; i < REQUESTS; i++)
        add_planned(tokens[i], load, offloaded, &planned, &host_planned);
    const json_t *device = runcase_field(store, "device"), *host = runcase_field(store, "host");
    double used = (runcase_number(device, "slabs") - runcase_number(device, "slabs_free")) *
                  runcase_number(device, "slab_bytes");
    printf("device %s, %lld to %lld tokens, %lld layers offloaded: planned %.1f MB, allocated %.1f MB\n",
           load->device_memory, (long long)tokens[0], (long long)tokens[REQUESTS - 1], (long long)offloaded,
           planned / 1e6, used / 1e6);
    assert_true(fabs(used - planned) <= 0.03 * planned);
    assert_string_equal(json_string_value(runcase_field(store, "write_through")), load->through);
    assert_int_equal((int)runcase_number(host, "layers"), load->layers);
    double blocks = runcase_number(host, "blocks_used") * runcase_number(host, "block_bytes");
    printf("host: planned %.1f MB, allocated %.1f MB\n", host_planned / 1e6, blocks / 1e6);
    assert_true(fabs(blocks - host_planned) <= 0.03 * host_planned);
    json_decref(store);
    runcase_free(&c);
}

static void test_resident(void **state)
{
    (void)state;
    runcase_need_model();
    check_load(&(struct load){DOCUMENT_MAX / 3, "256M", "8192", "all", 30, false});
}

static void test_offloaded(void **state)
{
    (void)state;
    runcase_need_model();
    check_load(&(struct load){DOCUMENT_MAX, "150M", "8192", "all", 30, true});
}

/* Host memory has only the layers that leave. */
static void test_host_memory_of_some_layers(void **state)
{
    (void)state;
    runcase_need_model();
    check_load(&(struct load){DOCUMENT_MAX, "150M", "2048", "offloaded", 18, true});
}

static void expect_said(const char *const *more, const char *line, int host_layers, size_t thresholds)
{
    const char *argv[24] = {proc_program("specontext"),
                            "plan",
                            "--layers",
                            "32",
                            "--heads",
                            "32",
                            "--kv-heads",
                            "8",
                            "--head-dim",
                            "128",
                            "--requests",
                            "32",
                            "-c",
                            "34816"};
    int n = 14;
    while (*more)
        argv[n++] = *more++;
    struct proc proc;
    proc_start(&proc, argv, NULL);
    assert_true(proc_wait(&proc, clock_now_ns() + RUNCASE_START_S * CLOCK_S));
    assert_true(proc_exited(&proc, 0));
    if (!strstr(proc.out.text, line))
        fail_msg("expected '%s' in: %s", line, proc.out.text);
    proc_free(&proc);
    argv[n++] = "--json";
    json_t *plan = run_json(argv);
    assert_int_equal((int)runcase_number(plan, "host_layers"), host_layers);
    assert_int_equal((int)runcase_number(plan, "layers"), 32);
    assert_true(runcase_number(plan, "kv_bytes_per_token") == 128 << 10);
    assert_true(runcase_number(plan, "host_bytes") == 34816. * 32 * 4096 * host_layers);
    assert_int_equal(json_array_size(runcase_field(plan, "thresholds")), thresholds);
    json_decref(plan);
}
#define EXPECT_SAID(line, layers, thresholds, ...) \
    expect_said((const char *const[]){__VA_ARGS__, NULL}, line, layers, thresholds)

/* 32 requests of 34K tokens of an 8B model: 136 GiB, or 102 where a quarter of the layers never leaves. */
static void test_write_through_is_told(void **state)
{
    (void)state;
    EXPECT_SAID("34816 tokens a request: 136.000 GiB", 32, 9, "--device-memory", "50G");
    EXPECT_SAID("34816 tokens a request: 102.000 GiB", 24, 7, "--device-memory", "50G", "--write-through",
                "offloaded");
    EXPECT_SAID("host memory has 24 of 32 layers, the others never leave the device", 24, 7,
                "--device-memory", "50G", "--write-through", "offloaded");
    EXPECT_SAID("host memory has 0 of 32 layers", 0, 1, "--device-memory", "160G", "--write-through",
                "offloaded");
    EXPECT_SAID("host memory has 16 of 32 layers", 16, 5, "--device-memory", "160G", "--write-through",
                "offloaded", "--offload-layers", "15");
    EXPECT_SAID("any of the 32 layers may have to leave", 32, 9, "--device-memory", "16G", "--write-through",
                "offloaded");
}

/* What the retriever keeps of a long prompt, with a head that reads hidden states: as many blocks as fit, and
 * their bytes. */
static void test_prefix_memory(void **state)
{
    (void)state;
    runcase_need_model();
    struct runcase c;
    char dir[PATH_MAX];
    snprintf(dir, sizeof dir, "%s", runcase_path("run/prefix"));
    const char *argv[] = {
        proc_program("specontext"), "plan", "-m",     RUNCASE_MODEL, "--device-memory", "256M",
        "--prefix-memory",          "1M",   "--json", NULL};
    json_t *plan = run_json(argv);
    double planned = runcase_number(plan, "prefix_bytes"), tokens = runcase_number(plan, "prefix_tokens");
    json_decref(plan);
    assert_true(planned > 512 << 10 && planned <= 1 << 20 && tokens >= 256);
    RUNCASE_START(&c, "-f", runcase_document(DOCUMENT_MAX / 2), "-n", "6000", "--ignore-eos",
                  "--prefix-memory", "1M", "--runtime", dir);
    double kept = 0;
    int64_t deadline = clock_now_ns() + 240 * CLOCK_S;
    while (kept != planned && clock_now_ns() < deadline &&
           !proc_wait(&c.proc, clock_now_ns() + CLOCK_S / 4)) {
        json_t *retriever = status_of(dir, "retriever");
        const json_t *bytes = json_object_get(retriever, "kept_bytes");
        kept = bytes ? (double)json_integer_value(bytes) : 0;
        if (kept == planned)
            assert_true(runcase_number(retriever, "kept_tokens") == tokens);
        json_decref(retriever);
    }
    kill(c.proc.pid, SIGINT);
    runcase_end(&c, 130, clock_now_ns() + RUNCASE_START_S * CLOCK_S);
    assert_true(kept == planned);
    runcase_free(&c);
}

static double kept_tokens(const char *device, const char *keys)
{
    const char *argv[] = {proc_program("specontext"),
                          "plan",
                          "-m",
                          RUNCASE_MODEL,
                          "--gpu-memory",
                          "8G",
                          "--context",
                          "8192",
                          "--requests",
                          "2",
                          "--prefix-memory",
                          "64M",
                          "--retriever-device",
                          device,
                          "--key-type",
                          keys,
                          "--json",
                          NULL};
    json_t *plan = run_json(argv);
    double tokens = runcase_number(plan, "prefix_tokens");
    json_decref(plan);
    return tokens;
}

/* The CPU keeps keys that it rounded to 8 bits in 16. */
static void test_kept_keys_lie_where_the_retriever_is(void **state)
{
    (void)state;
    runcase_need_model();
    double wide = kept_tokens("cuda:0", "f16");
    assert_true(kept_tokens("cuda:0", "int8") > 1.5 * wide);
    assert_true(kept_tokens("cuda:1", "auto") > 1.5 * wide);
    assert_true(kept_tokens("cpu", "auto") == wide);
    assert_true(kept_tokens("cpu", "int8") == wide);
}

static json_t *divided(const char *through, const char *option, const char *value)
{
    const char *argv[] = {proc_program("specontext"),
                          "plan",
                          "-m",
                          RUNCASE_MODEL,
                          "--gpu-memory",
                          "5G",
                          "--requests",
                          "16",
                          "--write-through",
                          through,
                          "--json",
                          option,
                          value,
                          NULL};
    return run_json(argv);
}

/* The card's tables of host memory are those of the layers that it has; what they leave is the cache's. */
static void test_tables_of_host_memory(void **state)
{
    (void)state;
    runcase_need_model();
    static const char *const by_hand[] = {NULL, "2G"};
    for (int i = 0; i < 2; i++) {
        const char *option = by_hand[i] ? "--device-memory" : NULL;
        json_t *all = divided("all", option, by_hand[i]), *some = divided("offloaded", option, by_hand[i]);
        const json_t *a = json_object_get(all, "gpu"), *b = json_object_get(some, "gpu");
        double less = runcase_number(a, "mapping_bytes") - runcase_number(b, "mapping_bytes");
        double layers = runcase_number(some, "host_layers");
        assert_true(layers > 0 && layers < 30 && runcase_number(all, "host_layers") == 30);
        assert_true(less > 0);
        assert_true(runcase_number(some, "host_bytes") * 30 == runcase_number(all, "host_bytes") * layers);
        double tables = runcase_number(some, "host_bytes") / 512; /* or of a run more, of four layers */
        assert_true(runcase_number(b, "mapping_bytes") >= tables - 1 &&
                    runcase_number(b, "mapping_bytes") <= tables * (layers + 4) / layers);
        double more = runcase_number(b, "kv_bytes") - runcase_number(a, "kv_bytes");
        assert_true(more == (by_hand[i] ? 0 : less));
        json_decref(all);
        json_decref(some);
    }
}

/* Short requests where sequences may be long: the tables are of the layers that host memory has then. */
static void test_tables_of_short_requests(void **state)
{
    (void)state;
    runcase_need_model();
    json_t *longest = divided("offloaded", NULL, NULL), *few = divided("offloaded", "--context", "512");
    const json_t *a = json_object_get(longest, "gpu"), *b = json_object_get(few, "gpu");
    assert_true(runcase_number(few, "host_layers") > 0);
    assert_true(runcase_number(few, "host_layers") == runcase_number(longest, "host_layers"));
    assert_true(runcase_number(b, "mapping_bytes") > 0);
    assert_true(runcase_number(b, "mapping_bytes") == runcase_number(a, "mapping_bytes"));
    json_decref(longest);
    json_decref(few);
}

/* As run takes both: the card is divided, and the KV cache's share is what was asked for. */
static void test_the_share_by_hand(void **state)
{
    (void)state;
    runcase_need_model();
    const char *argv[] = {proc_program("specontext"), "plan", "-m",     RUNCASE_MODEL, "--gpu-memory", "8G",
                          "--device-memory",          "50M",  "--json", NULL};
    json_t *plan = run_json(argv);
    assert_true(runcase_number(plan, "memory_bytes") == 50 << 20);
    assert_true(runcase_number(json_object_get(plan, "gpu"), "kv_bytes") == 50 << 20);
    json_decref(plan);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_resident),
                                       cmocka_unit_test(test_offloaded),
                                       cmocka_unit_test(test_host_memory_of_some_layers),
                                       cmocka_unit_test(test_write_through_is_told),
                                       cmocka_unit_test(test_prefix_memory),
                                       cmocka_unit_test(test_kept_keys_lie_where_the_retriever_is),
                                       cmocka_unit_test(test_the_share_by_hand),
                                       cmocka_unit_test(test_tables_of_host_memory),
                                       cmocka_unit_test(test_tables_of_short_requests)};
    return cmocka_run_group_tests(tests, runcase_set_up, runcase_tear_down);
}
