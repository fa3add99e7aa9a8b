/* What tools/inflate makes of a retrieval head that reads hidden states: over the large model it gives every
 * position the weight that the small head gives it over the small model. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>

#include "base/alloc.h"
#include "eval/chooser.h"
#include "eval/engine.h"
#include "model/head.h"
#include "tests/lib/ggufgen_arch.h"

#define FOLDER "tests/vectors/inflated"

enum { CONTEXT = 256 };

struct side {
    struct engine engine;
    struct head *head;
    struct chooser *chooser;
};

static void open_side(struct side *s, const char *model, const char *head)
{
    struct err err = {0};
    struct engine_options options = {.model = model, .threads = 2, .list_max = CONTEXT};
    int r = engine_open(&options, &s->engine, &err);
    if (r == 0)
        r = head_open(head, s->engine.model, &s->head, &err);
    if (r == 0)
        r = taps_add(&s->engine.taps, s->head, s->engine.config->layers, &err);
    if (r < 0)
        fail_msg("%s", err.text);
    struct chooser_options choose = {.model = s->engine.model,
                                     .head = s->head,
                                     .pool = head_config(s->head)->pool,
                                     .context = CONTEXT,
                                     .taps = &s->engine.taps};
    if (chooser_create(&choose, &s->chooser, &err) < 0)
        fail_msg("%s", err.text);
}

static void close_side(struct side *s)
{
    chooser_free(&s->chooser);
    head_free(&s->head);
    engine_close(&s->engine);
}

/* The head's weights at the last of the tokens, out of the model's own hidden states. */
static void weigh(struct side *s, const uint32_t *tokens, uint32_t count)
{
    struct pages pages;
    struct err err = {0};
    float *rows = engine_features_alloc(&s->engine, count);
    assert_non_null(rows);
    assert_int_equal(engine_pages(&s->engine, &(struct pages_sequence){.positions = count}, 1, &pages, &err),
                     0);
    assert_int_equal(engine_prefill(&s->engine, &pages, 0, tokens, count, rows, &err), 0);
    chooser_reset(s->chooser);
    chooser_feed(s->chooser, tokens, count, rows, true);
    engine_pages_free(&s->engine, &pages);
    mem_free(&rows);
}

static void test_weights_are_the_small_heads(void **state)
{
    (void)state;
    struct ggufgen_arch_golden golden;
    struct side small = {0}, large = {0};
    char *path;
    ggufgen_arch_folder("llama-gqa", 1, NULL, &path);
    ggufgen_arch_golden("llama-gqa", 128, &golden);
    open_side(&small, path, FOLDER "/head-small.safetensors");
    open_side(&large, FOLDER, FOLDER "/head-large.safetensors");
    const struct head_config *a = head_config(small.head), *b = head_config(large.head);
    assert_true(a->features == HEAD_FEATURES_TARGET && b->features == HEAD_FEATURES_TARGET);
    assert_true(a->groups == 2 && b->groups == 2);
    float worst = 0, spread = 0;
    for (uint32_t count = 1; count <= golden.tokens; count++) {
        weigh(&small, golden.ids, count);
        weigh(&large, golden.ids, count);
        for (uint32_t g = 0; g < a->groups; g++)
            for (uint32_t h = 0; h < b->kv_heads; h++) {
                const float *x = chooser_weights(small.chooser, g, h * a->kv_heads / b->kv_heads);
                const float *y = chooser_weights(large.chooser, g, h);
                for (uint32_t p = 0; p < count; p++) {
                    worst = fmaxf(worst, fabsf(x[p] - y[p]));
                    spread = fmaxf(spread, fabsf(x[p] - 1 / (float)count));
                }
            }
    }
    printf("largest difference of a weight %.5f; weights are up to %.3f off an even spread\n", (double)worst,
           (double)spread);
    assert_true(spread > 0.3f); /* the head does choose */
    assert_true(worst < 2e-2f); /* the large model is in bfloat16 */
    close_side(&small);
    close_side(&large);
    mem_free(&golden.ids);
    mem_free(&golden.logits);
    ggufgen_arch_remove(&path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_weights_are_the_small_heads)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
