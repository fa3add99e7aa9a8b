/* What eval/ makes of the model, on the CPU and on the double of a GPU: attention weights against sums in
 * double, sparse against full attention, generations. Sequences of a batch do not touch one another. */
#define RIG_DIM 64
#include "tests/unit/eval_rig.h"

#include <errno.h>

#include "eval/decode.h"
#include "eval/forced.h"
#include "eval/look.h"

/* ---- attention weights of a model ---------------------------------------------------------------------- */

/* One query's weights in double, out of the queries and the bytes of the pages. */
struct naive {
    uint32_t position;
    double weights[RIG_LAYERS][RIG_KV_HEADS][CONTEXT];
};

static void naive_layer(void *arg, const struct engine *e, const struct kv_view *view, uint32_t layer,
                        uint32_t first, uint32_t count)
{
    struct naive *n = arg;
    if (n->position < first || n->position >= first + count)
        return;
    for (uint32_t h = 0; h < RIG_Q_HEADS; h++) {
        uint32_t kv = h / (RIG_Q_HEADS / RIG_KV_HEADS);
        const float *q = engine_queries(e, n->position - first) + h * RIG_HEAD_DIM;
        double score[CONTEXT], sum = 0;
        for (uint32_t p = 0; p <= n->position; p++) {
            uint16_t k[RIG_HEAD_DIM];
            memcpy(k, view->base + view->at[p / 64] + (kv * 64 + p % 64) * view->piece_bytes, sizeof k);
            score[p] = 0;
            for (int d = 0; d < RIG_HEAD_DIM; d++)
                score[p] += (double)q[d] * (double)dtype_f16_to_f32(k[d]);
            sum += score[p] = exp(score[p] / sqrt(RIG_HEAD_DIM));
        }
        for (uint32_t p = 0; p <= n->position; p++)
            n->weights[layer][kv][p] += score[p] / sum / (RIG_Q_HEADS / RIG_KV_HEADS);
    }
}

struct seen {
    uint32_t count;
    uint32_t positions[16];
    struct naive *naive;
};

static void see(void *arg, const struct look *look)
{
    struct seen *s = arg;
    s->positions[s->count++] = look->position;
    for (uint32_t l = 0; look->position == s->naive->position && l < look->layers; l++)
        for (uint32_t h = 0; h < look->heads; h++)
            for (uint32_t p = 0; p <= look->position; p++)
                assert_true(fabs((double)look_weights(look, l, h)[p] - s->naive->weights[l][h][p]) < 1e-6);
}

static void test_looks_are_the_models_weights(void **state)
{
    struct world *w = world_make(1, *state);
    struct naive *naive = mem_alloc(1, sizeof *naive);
    struct seen seen = {.naive = naive};
    struct pages pages;
    struct err err = {0};
    naive->position = 305;
    struct engine_watch watch = {naive_layer, naive};
    assert_int_equal(
        engine_pages(&w->engine, &(struct pages_sequence){.positions = CONTEXT}, 1, &pages, &err), 0);
    for (uint32_t at = 0; at < CONTEXT; at += 100) {
        struct engine_chunk chunk = {&pages, 0, w->tokens, at, 100, 0};
        assert_int_equal(engine_dense(&w->engine, &chunk, &watch, &err), 0);
    }
    /* More than one chunk may hold, so that chunks get cut. */
    static const uint32_t positions[] = {3, 300, 301, 302, 303, 304, 305, 306, 307, 308, 309, 310, 398};
    struct look_text text = {w->tokens, CONTEXT, positions, 13};
    assert_int_equal(look_run(&w->engine, &pages, &text, see, &seen, &err), 0);
    assert_int_equal(seen.count, 13);
    assert_memory_equal(seen.positions, positions, sizeof positions);
    assert_true(naive->weights[0][0][0] > 0);
    engine_pages_free(&w->engine, &pages);
    mem_free(&naive);
    world_free(&w);
}

/* ---- consecutive positions ----------------------------------------------------------------------------- */

/* A budget that holds everything is full attention, bit for bit; a small one is not. Both in one run. */
static void test_whole_budget_is_full_attention(void **state)
{
    struct world *w = world_make(2, *state);
    const struct choice all = {.budget = CONTEXT, .sinks = 4, .window = 16},
                        few = {.budget = 40, .sinks = 4, .window = 16};
    struct lane *lanes[] = {
        make_lane(w, w->chooser, &all, SELECTION_CURRENT), make_lane(w, w->chooser, &few, SELECTION_CURRENT),
        make_lane(w, w->chooser, &all, SELECTION_MIXED), make_lane(w, w->chooser, &few, SELECTION_MIXED),
        make_lane(w, w->chooser, &few, SELECTION_PREVIOUS)};
    enum { LANES = sizeof lanes / sizeof *lanes };
    struct forced_text text = {w->tokens, CONTEXT, 300, 350}; /* not at a page's begin */
    struct forced_sums sums[LANES] = {0};
    struct err err = {0};
    if (forced_run(&w->engine, &text, 1, lanes, LANES, sums, &err) < 0)
        fail_msg("%s", err.text);
    for (int i = 0; i < LANES; i++) {
        assert_int_equal(sums[i].positions, 50);
        assert_true(sums[i].loss_full > 0 && sums[i].loss_full == sums[0].loss_full);
    }
    for (int i = 0; i < LANES; i++) {
        bool whole = i == 0 || i == 2;
        assert_true(whole == (sums[i].loss_full == sums[i].loss_sparse));
        assert_true(whole ? sums[i].kl == 0 && sums[i].agreed == 50 : sums[i].kl > 1e-6);
    }
    assert_true(sums[1].kl != sums[3].kl && sums[3].kl != sums[4].kl && sums[1].kl != sums[4].kl);
    engine_interrupted = 1;
    assert_int_equal(forced_run(&w->engine, &text, 1, lanes, LANES, sums, &err), -ECANCELED);
    engine_interrupted = 0;
    for (int i = 0; i < LANES; i++)
        lane_free(&lanes[i]);
    world_free(&w);
}

/* Texts of different lengths together: what each gives alone. */
static void test_texts_together_are_texts_alone(void **state)
{
    struct world *w = world_make(2, *state);
    const struct choice few = {.budget = 40, .sinks = 4, .window = 16}, heavy = {40, 4, 16, 120, 0.9f, 0};
    struct chooser *second = make_chooser(w, false);
    struct lane *lanes[] = {make_lane(w, w->chooser, &few, SELECTION_CURRENT),
                            make_lane(w, w->chooser, &heavy, SELECTION_PREVIOUS),
                            make_lane(w, second, &few, SELECTION_CURRENT),
                            make_lane(w, second, &heavy, SELECTION_PREVIOUS)};
    const struct forced_text texts[] = {{w->tokens, CONTEXT, 300, 330}, {w->tokens + 7, 200, 129, 180}};
    struct forced_sums sums[2] = {0}, alone[2] = {0};
    struct err err = {0};
    assert_int_equal(forced_run(&w->engine, texts, 2, lanes, 2, sums, &err), 0);
    for (int t = 0; t < 2; t++)
        assert_int_equal(forced_run(&w->engine, &texts[t], 1, lanes + 2 * t, 2, alone, &err), 0);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(sums[i].positions, 30 + 51);
        assert_true(fabs(sums[i].kl - alone[i].kl) < 1e-9 && sums[i].kl > 1e-6);
        assert_true(fabs(sums[i].worse - alone[i].worse) < 1e-9);
    }
    assert_true(lane_figures(lane_counts(lanes[0])).attended == 40);
    assert_true(lane_figures(lane_counts(lanes[1])).attended > 41); /* grown */
    for (int i = 0; i < 4; i++)
        lane_free(&lanes[i]);
    chooser_free(&second);
    world_free(&w);
}

/* The first set of `previous` is the prompt's last token's; it is attended with the newest position added. */
static void test_previous_sets_are_one_token_late(void **state)
{
    struct world *w = world_make(1, *state);
    const struct choice few = {.budget = 40, .sinks = 4, .window = 16};
    struct lane *now = make_lane(w, w->chooser, &few, SELECTION_CURRENT);
    struct lane *late = make_lane(w, w->chooser, &few, SELECTION_PREVIOUS);
    chooser_feed(w->chooser, w->tokens, 100, true);
    lane_prime(late, 99);
    assert_true(lane_needs_prime(late) && !lane_needs_prime(now));
    for (uint32_t p = 100; p < 104; p++) {
        uint32_t before[RIG_KV_HEADS][40];
        const struct attn_list *lists = lane_choose(now, p - 1);
        for (uint32_t h = 0; h < RIG_KV_HEADS; h++)
            memcpy(before[h], lists[h].item, sizeof before[h]);
        chooser_feed(w->chooser, w->tokens + p, 1, true);
        lists = lane_choose(late, p);
        for (uint32_t h = 0; h < RIG_KV_HEADS; h++) {
            assert_int_equal(lists[h].count, 41);
            assert_memory_equal(lists[h].item, before[h], sizeof before[h]);
            assert_int_equal(lists[h].item[40], p);
        }
    }
    lane_free(&now);
    lane_free(&late);
    world_free(&w);
}

/* ---- generations --------------------------------------------------------------------------------------- */

static void test_streams_go_on_by_themselves(void **state)
{
    struct world *w = world_make(1, *state);
    const struct choice all = {.budget = CONTEXT, .sinks = 4, .window = 16},
                        few = {.budget = 40, .sinks = 4, .window = 16};
    struct chooser *choosers[] = {w->chooser, make_chooser(w, false), make_chooser(w, false)};
    const struct decode_stream plain = {
        .prompt = w->tokens, .prompt_count = 200, .tokens = 60, .sampling = sampler_params_default()};
    struct decode_stream streams[5] = {plain, plain, plain, plain, plain};
    streams[1].lane = make_lane(w, choosers[0], &all, SELECTION_CURRENT);
    streams[2].lane = make_lane(w, choosers[1], &few, SELECTION_CURRENT);
    streams[3].prompt = w->tokens + 50; /* another family */
    streams[3].prompt_count = 77;
    streams[4].prompt = streams[3].prompt;
    streams[4].prompt_count = 77;
    streams[4].tokens = 33;
    streams[4].lane = make_lane(w, choosers[2], &all, SELECTION_CURRENT);
    struct err err = {0};
    for (int again = 0; again < 2; again++) {
        if (decode_run(&w->engine, streams, 5, &err) < 0)
            fail_msg("%s", err.text);
        for (int i = 0; i < 5; i++)
            assert_int_equal(streams[i].out.count, i == 4 ? 33 : 60);
        assert_memory_equal(streams[0].out.ids, streams[1].out.ids, 60 * sizeof(uint32_t));
        assert_memory_equal(streams[3].out.ids, streams[4].out.ids, 33 * sizeof(uint32_t));
    }
    assert_memory_not_equal(streams[0].out.ids, streams[2].out.ids, 60 * sizeof(uint32_t));
    assert_memory_not_equal(streams[0].out.ids, streams[3].out.ids, 60 * sizeof(uint32_t));
    for (int i = 0; i < 5; i++) {
        lane_free(&streams[i].lane);
        token_buf_free(&streams[i].out);
    }
    chooser_free(&choosers[1]);
    chooser_free(&choosers[2]);
    world_free(&w);
}

/* ---- devices ------------------------------------------------------------------------------------------- */

static void test_devices_agree(void **state)
{
    (void)state;
    static const char *const devices[] = {NULL, "cuda:0"};
    float *logits[2];
    for (int d = 0; d < 2; d++) {
        struct world *w = world_make(1, devices[d]);
        struct pages pages;
        struct err err = {0};
        assert_int_equal(
            engine_pages(&w->engine, &(struct pages_sequence){.positions = CONTEXT}, 1, &pages, &err), 0);
        assert_int_equal(engine_prefill(&w->engine, &pages, 0, w->tokens, 3, &err), 0);
        logits[d] = mem_alloc(RIG_VOCAB, sizeof(float));
        memcpy(logits[d], engine_logits(&w->engine, 0), RIG_VOCAB * sizeof(float));
        engine_pages_free(&w->engine, &pages);
        world_free(&w);
    }
    float error = 0, largest = 0;
    for (int i = 0; i < RIG_VOCAB; i++) {
        error = fmaxf(error, fabsf(logits[0][i] - logits[1][i]));
        largest = fmaxf(largest, fabsf(logits[0][i]));
    }
    assert_true(error < largest / 20); /* weights and activations of bf16, of few tokens */
    mem_free(&logits[0]);
    mem_free(&logits[1]);
}

static void test_devices_are_refused(void **state)
{
    (void)state;
    struct world *w = world_make(1, NULL);
    struct engine engine;
    struct err err = {0};
    struct engine_options options = {.model = w->rig->model_path, .device = "gpu", .threads = 1};
    assert_int_equal(engine_open(&options, &engine, &err), -EINVAL);
    assert_non_null(strstr(err.text, "'gpu'"));
    fakegpu_use(NULL);
    options.device = "cuda:77";
    options.list_max = 1;
    assert_true(engine_open(&options, &engine, &err) < 0);
    world_free(&w);
}

int main(void)
{
    static char gpu[] = "cuda:0";
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_looks_are_the_models_weights),
        cmocka_unit_test_prestate(test_looks_are_the_models_weights, gpu),
        cmocka_unit_test(test_whole_budget_is_full_attention),
        cmocka_unit_test_prestate(test_whole_budget_is_full_attention, gpu),
        cmocka_unit_test(test_texts_together_are_texts_alone),
        cmocka_unit_test_prestate(test_texts_together_are_texts_alone, gpu),
        cmocka_unit_test(test_previous_sets_are_one_token_late),
        cmocka_unit_test(test_streams_go_on_by_themselves),
        cmocka_unit_test_prestate(test_streams_go_on_by_themselves, gpu),
        cmocka_unit_test(test_devices_agree),
        cmocka_unit_test(test_devices_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
