/* Whole runs with a head that reads hidden states of the model: a draft model of random weights is imported
 * with its features, and gives the same answers wherever layers lie, on the CPU and on the double of a GPU,
 * with the retriever beside the model, on another card and on the CPU; and the parts end when one dies. */
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

#include "base/alloc.h"
#include "base/dtype.h"
#include "model/safetensors.h"
#include "tests/lib/fakegpu.h"
#include "tests/lib/runcase.h"
#include "tests/lib/temp.h"
#include "tests/unit/tiny_model.h"

/* SmolLM2-135M's. */
enum { HIDDEN = 576, Q_ROWS = 576, K_ROWS = 192, TAPS = 3 };
#define BOUND_NS runcase_bound_ns(8 * CLOCK_S) /* from a part's death to the end of all */

static char head[PATH_MAX + 64];

static uint16_t *numbers(size_t count, float scale, uint32_t seed)
{
    uint16_t *to = mem_alloc(count, sizeof *to);
    for (size_t i = 0; i < count; i++)
        to[i] = dtype_f32_to_f16(tiny_uniform(&seed) * scale);
    return to;
}

static void write_draft(const char *folder)
{
    uint16_t *q = numbers((size_t)Q_ROWS * 2 * HIDDEN, 0.06f, 1),
             *k = numbers((size_t)K_ROWS * 2 * HIDDEN, 0.06f, 2),
             *fc = numbers((size_t)HIDDEN * TAPS * HIDDEN, 0.04f, 3);
    float norm[HIDDEN];
    char path[PATH_MAX + 128];
    struct err err = {0};
    for (int i = 0; i < HIDDEN; i++)
        norm[i] = 1 + (float)(i % 7) / 16;
    const struct safetensors_entry tensors[] = {
        {"midlayer.self_attn.q_proj.weight", SAFETENSORS_F16, 2, {Q_ROWS, 2 * HIDDEN}, q},
        {"midlayer.self_attn.k_proj.weight", SAFETENSORS_F16, 2, {K_ROWS, 2 * HIDDEN}, k},
        {"midlayer.input_layernorm.weight", SAFETENSORS_F32, 1, {HIDDEN}, norm},
        {"midlayer.hidden_norm.weight", SAFETENSORS_F32, 1, {HIDDEN}, norm},
        {"fc.weight", SAFETENSORS_F16, 2, {HIDDEN, TAPS * HIDDEN}, fc},
    };
    struct safetensors_content content = {tensors, sizeof tensors / sizeof *tensors, NULL, 0};
    assert_int_equal(mkdir(folder, 0700), 0);
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    if (safetensors_write(path, &content, &err) < 0)
        fail_msg("%s", err.text);
    snprintf(path, sizeof path, "%s/config.json", folder);
    temp_write(
        path, "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 576, \"num_attention_heads\": 9, "
              "\"num_key_value_heads\": 3, \"num_hidden_layers\": 1, \"max_position_embeddings\": 2048, "
              "\"rms_norm_eps\": 1e-05, \"rope_theta\": 100000, \"vocab_size\": 49152, "
              "\"draft_vocab_size\": 32000}");
    mem_free(&q);
    mem_free(&k);
    mem_free(&fc);
}

/* The head, made by the first test that asks for it. */
static const char *imported(void)
{
    runcase_need_model();
    if (head[0])
        return head;
    char folder[PATH_MAX + 64];
    struct proc p;
    snprintf(folder, sizeof folder, "%s", runcase_path("draft"));
    write_draft(folder);
    snprintf(head, sizeof head, "%s", runcase_path("draft.safetensors"));
    proc_start(&p,
               (const char *const[]){proc_program("specontext"), "head", "import", folder, "-m",
                                     RUNCASE_MODEL, "-o", head, "--features", "target", NULL},
               NULL);
    assert_true(proc_wait(&p, clock_now_ns() + RUNCASE_START_S * CLOCK_S));
    if (!proc_exited(&p, 0))
        fail_msg("%s", p.err.text);
    proc_free(&p);
    return head;
}

static int set_up(void **state)
{
    char card[32];
    snprintf(card, sizeof card, "features%d", (int)getpid());
    fakegpu_use(card);
    return runcase_set_up(state);
}

static void expect_tokens(const struct runcase *a, const struct runcase *b)
{
    assert_int_equal(json_array_size(runcase_field(a->report, "tokens")),
                     json_array_size(runcase_field(b->report, "tokens")));
    if (!json_equal(runcase_field(a->report, "tokens"), runcase_field(b->report, "tokens")))
        fail_msg("tokens differ: %s\nand: %s", json_string_value(runcase_field(a->report, "text")),
                 json_string_value(runcase_field(b->report, "text")));
}

/* Prompts of more than one chunk; all layers on the device, some, none. */
static void residency(const char *mode, const char *device)
{
    const char *path = imported(), *document = runcase_document(2500);
    struct runcase all, some, none;
#define COMMON                                                                                             \
    "-f", document, "-H", path, "-n", "16", "--ignore-eos", "-c", "1024", "--budget", "96", "--selection", \
        mode, "--device", device, "--device-memory", "64M", "--poison"
    RUNCASE_RUN(&all, COMMON);
    RUNCASE_RUN(&some, COMMON, "--offload-layers", "12");
    RUNCASE_RUN(&none, COMMON, "--offload-layers", "30");
#undef COMMON
    expect_tokens(&all, &some);
    expect_tokens(&all, &none);
    assert_int_equal((int)runcase_number(none.report, "layers_offloaded_max"), 30);
    assert_true(runcase_number(none.report, "rows_loaded") > 0);
    assert_true(runcase_number(all.report, "prompt_tokens") > 300);
    runcase_free(&all);
    runcase_free(&some);
    runcase_free(&none);
}

static void test_residency_current(void **state)
{
    (void)state;
    residency("current", "cpu");
}

static void test_residency_previous(void **state)
{
    (void)state;
    residency("previous", "cpu");
}

static void test_residency_on_a_gpu(void **state)
{
    (void)state;
    residency("previous", "cuda:0");
}

/* Rows cross on the card, through pinned memory to another card, and to the CPU: the same numbers, so nearly
 * the same sets. */
static void test_retriever_elsewhere(void **state)
{
    (void)state;
    const char *path = imported(), *document = runcase_document(1500);
    static const char *const devices[] = {"cuda:0", "cuda:1", "cpu"};
    double mass[3];
    for (int i = 0; i < 3; i++) {
        struct runcase c;
        RUNCASE_RUN(&c, "-f", document, "-H", path, "-n", "12", "--ignore-eos", "-c", "1024", "--budget",
                    "96", "--device", "cuda:0", "--retriever-device", devices[i]);
        assert_int_equal((int)runcase_number(c.report, "generated_tokens"), 12);
        mass[i] = runcase_number(c.report, "mass_mean");
        runcase_free(&c);
        if (!(mass[i] > mass[0] - 0.01 && mass[i] < mass[0] + 0.01))
            fail_msg("mass with the retriever on %s: found %g, expected %g", devices[i], mass[i], mass[0]);
    }
    assert_true(mass[0] > 0 && mass[0] < 1);
}

/* Prompts of one long beginning, in a file: each goes on in its own way behind it. */
static const char *beginnings(uint32_t count)
{
    static char path[PATH_MAX + 64];
    char text[16000] = "";
    snprintf(path, sizeof path, "%s", runcase_path("prompts.jsonl"));
    for (uint32_t i = 0; i < count; i++)
        snprintf(
            text + strlen(text), sizeof text - strlen(text),
            "\"The sea was calm and the wind was light, and nobody on the ship thought of what was to come. "
            "The captain stood at the rail and looked to the west, where the sky was red, and he said to the "
            "mate that they would be home before the week was out. The mate said nothing. He had sailed "
            "these "
            "waters for thirty years, and he knew that a red sky in the west may mean one thing to a farmer "
            "and another to a sailor. So he went below, where the lamp swung from its beam and the cook was "
            "at his pots, and sat down on a barrel to think it over. Story number %u.\"\n",
            100 + i);
    temp_write(path, text);
    return path;
}

static int cached(const struct runcase *c, uint32_t sequence)
{
    return (int)runcase_number(json_array_get(runcase_field(c->report, "sequences"), sequence),
                               "cached_tokens");
}

static void expect_same_sequences(const struct runcase *a, const struct runcase *b, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const json_t *x = json_array_get(runcase_field(a->report, "sequences"), i),
                     *y = json_array_get(runcase_field(b->report, "sequences"), i);
        runcase_expect_equal(x, y, "tokens");
    }
}

/* A prompt whose beginning was there before takes the store's KV and the retriever's keys of it, and gets the
 * same answer as without; no more of it than both have. */
static void prefix(const char *mode, const char *device)
{
    const char *path = imported(), *prompts = beginnings(3);
    struct runcase used, unused, some;
#define COMMON                                                                                          \
    "--prompts", prompts, "-H", path, "-n", "12", "--ignore-eos", "--sequences", "1", "-c", "1024",     \
        "--budget", "96", "--window", "16", "--selection", mode, "--device", device, "--device-memory", \
        "64M"
    RUNCASE_RUN(&used, COMMON);
    RUNCASE_RUN(&unused, COMMON, "--no-prefix");
    /* One block: 3 heads of 64 and a row; on a GPU keys have 8 bits. */
    RUNCASE_RUN(&some, COMMON, "--prefix-memory", strcmp(device, "cpu") ? "24K" : "40K");
#undef COMMON
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(cached(&unused, i), 0);
    assert_int_equal(cached(&used, 0), 0);
    assert_true(cached(&used, 1) >= 128);
    assert_int_equal(cached(&used, 2), cached(&used, 1));
    assert_int_equal(cached(&some, 1), 64);
    assert_int_equal(cached(&some, 2), 64);
    expect_same_sequences(&used, &unused, 3);
    expect_same_sequences(&some, &unused, 3);
    runcase_free(&used);
    runcase_free(&unused);
    runcase_free(&some);
}

static void test_prefix_current(void **state)
{
    (void)state;
    prefix("current", "cpu");
}

static void test_prefix_previous(void **state)
{
    (void)state;
    prefix("previous", "cpu");
}

static void test_prefix_on_a_gpu(void **state)
{
    (void)state;
    prefix("previous", "cuda:0");
}

static void kill_part(enum runcase_part part, const char *device)
{
    struct runcase c;
    RUNCASE_START(&c, "-p", "Once upon a time", "-H", imported(), "-n", "6000", "--ignore-eos", "--budget",
                  "96", "--device", device);
    runcase_wait_text(&c);
    runcase_find_parts(&c);
    kill(c.parts[part], SIGKILL);
    runcase_end(&c, 1, clock_now_ns() + BOUND_NS);
    if (!c.proc.err.text || !strstr(c.proc.err.text, "was ended by signal 9"))
        fail_msg("%s", c.proc.err.text);
    for (int i = 0; i < RUNCASE_PARTS; i++)
        assert_true(proc_gone(c.parts[i]));
    runcase_free(&c);
}

static void test_kill_retriever(void **state)
{
    (void)state;
    kill_part(RUNCASE_RETRIEVER, "cpu");
    kill_part(RUNCASE_RETRIEVER, "cuda:0");
}

static void test_kill_decoder(void **state)
{
    (void)state;
    kill_part(RUNCASE_DECODER, "cpu");
    kill_part(RUNCASE_DECODER, "cuda:0");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_residency_current),  cmocka_unit_test(test_residency_previous),
        cmocka_unit_test(test_residency_on_a_gpu), cmocka_unit_test(test_retriever_elsewhere),
        cmocka_unit_test(test_prefix_current),     cmocka_unit_test(test_prefix_previous),
        cmocka_unit_test(test_prefix_on_a_gpu),    cmocka_unit_test(test_kill_retriever),
        cmocka_unit_test(test_kill_decoder),
    };
    return cmocka_run_group_tests(tests, set_up, runcase_tear_down);
}
