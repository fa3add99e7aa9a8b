/* Whole runs with sequences that the retriever refuses: a head with an embedding of its own, in which the row
 * of one token makes keys that are no numbers. Requests with that token in their prompt fail, each with the
 * cause; the others get what they would have got alone, in the places and blocks of those that failed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "model/head.h"
#include "model/tokenizer.h"
#include "tests/lib/fakegpu.h"
#include "tests/lib/runcase.h"
#include "tests/lib/temp.h"
#include "tests/unit/tiny_model.h"

enum { HIDDEN = 64, HEAD_DIM = 64, TAPS = 2, PROMPTS = 5 };
#define HUGE_WEIGHT 3e38f

static const char bad_text[] = " @";

static float *numbers(size_t rows, size_t cols, float scale, uint32_t seed)
{
    float *to = mem_alloc(rows * cols, sizeof *to);
    for (size_t i = 0; i < rows * cols; i++)
        to[i] = tiny_uniform(&seed) * scale;
    return to;
}

static void set_column(float *at, size_t rows, size_t cols, float value)
{
    for (size_t r = 0; r < rows; r++)
        at[r * cols] = value;
}

static struct model_tensor tensor(const float *at, uint32_t rows, uint32_t cols)
{
    return (struct model_tensor){DTYPE_F32, rows, cols, at, 0};
}

static uint32_t bad_token(const struct model *model)
{
    struct tokenizer *tokenizer;
    struct token_buf ids = {0};
    struct err err = {0};
    if (tokenizer_create(model, &tokenizer, &err) < 0 ||
        tokenizer_encode(tokenizer, bad_text, strlen(bad_text), false, &ids, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(ids.count, 1);
    uint32_t id = ids.ids[0];
    token_buf_free(&ids);
    tokenizer_free(&tokenizer);
    return id;
}

/* Column 0 of the embedding is zero but for the bad token, and what multiplies it is huge. */
static void write_head(const char *path, bool features)
{
    struct model *model;
    struct err err = {0};
    if (model_open(RUNCASE_MODEL, &model, &err) < 0)
        fail_msg("%s", err.text);
    const struct model_config *m = model_config(model);
    struct head_config c = {.model = model_fingerprint(model),
                            .tokenizer = model_tokenizer_fingerprint(model),
                            .vocab = m->vocab,
                            .hidden = HIDDEN,
                            .q_heads = m->kv_heads,
                            .kv_heads = m->kv_heads,
                            .head_dim = HEAD_DIM,
                            .layers = m->layers,
                            .groups = 2,
                            .group_first_layer = {0, m->layers / 2, m->layers},
                            .rms_eps = 1e-5f,
                            .rope = {.base = 10000,
                                     .dims = HEAD_DIM,
                                     .halves = 1,
                                     .factor = 1,
                                     .original_context = 1024,
                                     .beta_fast = 32,
                                     .beta_slow = 1,
                                     .attn_factor = 1},
                            .trained_context = 1024,
                            .embedding = HEAD_EMBEDDING_OWN};
    uint32_t rows = m->kv_heads * HEAD_DIM, cols = features ? 2 * HIDDEN : HIDDEN, row = TAPS * m->hidden;
    float *embedding = numbers(m->vocab, HIDDEN, 1, 1), *q = numbers(rows, cols, 0.3f, 2),
          *k = numbers(rows, cols, 0.3f, 3), *fc = numbers(HIDDEN, row, 0.02f, 4), norm[HIDDEN];
    for (int i = 0; i < HIDDEN; i++)
        norm[i] = 1;
    set_column(embedding, m->vocab, HIDDEN, 0);
    embedding[(size_t)bad_token(model) * HIDDEN] = 1;
    set_column(k, rows, cols, HUGE_WEIGHT);
    struct head_shared shared = {.embedding = tensor(embedding, m->vocab, HIDDEN)};
    const struct head_group group = {
        tensor(norm, 1, HIDDEN), tensor(q, rows, cols), tensor(k, rows, cols), {0}, {0}, {0}};
    if (features) {
        c.features = HEAD_FEATURES_TARGET;
        c.feature_layer_count = TAPS;
        c.feature_layers[0] = 4;
        c.feature_layers[1] = 14;
        c.feature_hidden = m->hidden;
        shared.fc = tensor(fc, HIDDEN, row);
        shared.feature_norm = tensor(norm, 1, HIDDEN);
    }
    if (head_write(path, &c, &shared, (const struct head_group[]){group, group}, &err) < 0)
        fail_msg("%s", err.text);
    mem_free(&embedding);
    mem_free(&q);
    mem_free(&k);
    mem_free(&fc);
    model_free(&model);
}

static const char *head(bool features)
{
    static char paths[2][PATH_MAX + 64];
    char *path = paths[features];
    if (path[0])
        return path;
    snprintf(path, sizeof paths[0], "%s", runcase_path(features ? "features.head" : "plain.head"));
    write_head(path, features);
    return path;
}

/* Prompts of one beginning, a line each; those of which `bad` has the bit also hold the bad token. */
static const char *prompts(const char *name, uint32_t bad)
{
    static char path[PATH_MAX + 64];
    char text[8000] = "";
    for (uint32_t i = 0; i < PROMPTS; i++)
        snprintf(
            text + strlen(text), sizeof text - strlen(text),
            "\"The sea was calm and the wind was light, and nobody on the ship thought of what was to "
            "come. The captain stood at the rail and looked to the west, where the sky was red, and he "
            "said to the mate that they would be home before the week was out. The mate said nothing, "
            "for he had sailed these waters for thirty years, and so he went below, where the lamp swung "
            "from its beam and the cook was at his pots.%s Story number %u.\"\n",
            bad >> i & 1 ? bad_text : "", 100 + i);
    snprintf(path, sizeof path, "%s", runcase_path(name));
    temp_write(path, text);
    return path;
}

static const json_t *sequence(const struct runcase *c, uint32_t i)
{
    const json_t *one = json_array_get(runcase_field(c->report, "sequences"), i);
    assert_non_null(one);
    return one;
}

/* The second and the fourth prompt of five, in two places and the four blocks that two take: the retriever
 * refuses each as soon as a set of it is asked for, while another waits for its sets in the same steps. */
static void refused(const char *mode, bool features, const char *device)
{
    runcase_need_model();
    struct runcase sound, some;
#define COMMON                                                                                           \
    "-H", head(features), "-n", "12", "--ignore-eos", "--sequences", "2", "-c", "512", "--budget", "64", \
        "--window", "16", "--selection", mode, "--device", device, "--device-memory", "64M",             \
        "--host-memory", "6M"
    RUNCASE_RUN(&sound, "--prompts", prompts("sound.jsonl", 0), COMMON);
    RUNCASE_START(&some, "--prompts", prompts("some.jsonl", 1 << 1 | 1 << 3), COMMON);
#undef COMMON
    runcase_end(&some, 1, clock_now_ns() + RUNCASE_START_S * CLOCK_S);
    for (uint32_t i = 0; i < PROMPTS; i++) {
        if (i != 1 && i != 3) {
            if (strcmp(device, "cpu") == 0) /* there a batch gives what each would get alone */
                runcase_expect_equal(sequence(&sound, i), sequence(&some, i), "tokens");
            assert_int_equal(json_array_size(runcase_field(sequence(&some, i), "tokens")), 12);
            continue;
        }
        const char *why = json_string_value(runcase_field(sequence(&some, i), "error"));
        if (!why || strncmp(why, "retriever: sequence ", 20) != 0 ||
            !strstr(why, "found weights that are not finite, expected numbers"))
            fail_msg("prompt %u: %s", i + 1, why ? why : "no error");
    }
    if (!strstr(some.proc.err.text, "specontext: prompt 2: retriever: sequence "))
        fail_msg("%s", some.proc.err.text);
    runcase_free(&sound);
    runcase_free(&some);
}

static void test_current(void **state)
{
    (void)state;
    refused("current", false, "cpu");
}

static void test_previous(void **state)
{
    (void)state;
    refused("previous", false, "cpu");
}

static void test_mixed(void **state)
{
    (void)state;
    refused("mixed", false, "cpu");
}

/* With keys that are kept of a common beginning. */
static void test_features(void **state)
{
    (void)state;
    refused("current", true, "cpu");
    refused("mixed", true, "cpu");
}

static void test_on_a_gpu(void **state)
{
    (void)state;
    refused("current", false, "cuda:0");
    refused("previous", true, "cuda:0");
}

static int set_up(void **state)
{
    char card[32];
    snprintf(card, sizeof card, "refused%d", (int)getpid());
    fakegpu_use(card);
    return runcase_set_up(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_current),  cmocka_unit_test(test_previous), cmocka_unit_test(test_mixed),
        cmocka_unit_test(test_features), cmocka_unit_test(test_on_a_gpu),
    };
    return cmocka_run_group_tests(tests, set_up, runcase_tear_down);
}
