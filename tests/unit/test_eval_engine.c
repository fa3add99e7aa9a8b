/* What eval/ makes of the model, on the CPU and on the double of a GPU: attention weights against sums in
 * double, sparse against full attention, generations. Sequences of a batch do not touch one another. */
#define RIG_DIM 64
#include "tests/unit/eval_rig.h"

#include <errno.h>

#include "eval/decode.h"
#include "eval/forced.h"
#include "eval/look.h"
#include "eval/mass.h"

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
    struct look_text text = {
        .tokens = w->tokens, .count = CONTEXT, .positions = positions, .position_count = 13};
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
    chooser_feed(w->chooser, w->tokens, 100, NULL, true);
    lane_prime(late, 99);
    assert_true(lane_needs_prime(late) && !lane_needs_prime(now));
    for (uint32_t p = 100; p < 104; p++) {
        uint32_t before[RIG_KV_HEADS][40];
        const struct attn_list *lists = lane_choose(now, p - 1);
        for (uint32_t h = 0; h < RIG_KV_HEADS; h++)
            memcpy(before[h], lists[h].item, sizeof before[h]);
        chooser_feed(w->chooser, w->tokens + p, 1, NULL, true);
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

/* Half of what is picked is what the prompt's end looked at, in each set; the rest is the head's best. */
static void test_pins_are_in_all_sets(void **state)
{
    enum { PROMPT = 200, LISTS = 2 * RIG_KV_HEADS, PINNED = 9 }; /* half of 40 - 4 - 16 - 1 */
    struct world *w = world_make(2, *state);
    struct lane *lane = lane_create(&(struct lane_options){.model = w->engine.config,
                                                           .chooser = w->chooser,
                                                           .choice = {.budget = 40, .sinks = 4, .window = 16},
                                                           .pins = 0.5f,
                                                           .capacity = CONTEXT});
    struct pins pins = {.layers = RIG_LAYERS, .heads = RIG_KV_HEADS, .count = PROMPT};
    pins.weights = mem_alloc((size_t)RIG_LAYERS * RIG_KV_HEADS * PROMPT, sizeof *pins.weights);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        for (uint32_t h = 0; h < RIG_KV_HEADS; h++)
            for (uint32_t i = 0; i < PINNED; i++) /* groups: layer 0, the others */
                pins.weights[(l * RIG_KV_HEADS + h) * PROMPT + 10 + 7 * i + 2 * h + (l > 0)] = 1;
    lane_restart(lane);
    lane_pin(lane, &pins);
    chooser_feed(w->chooser, w->tokens, PROMPT, NULL, false);
    for (uint32_t p = PROMPT; p < PROMPT + 5; p++) {
        chooser_feed(w->chooser, w->tokens + p, 1, NULL, true);
        const struct attn_list *lists = lane_choose(lane, p);
        for (uint32_t l = 0; l < LISTS; l++) {
            bool in[CONTEXT] = {false};
            float weakest = INFINITY, best = 0;
            const float *weights = chooser_weights(w->chooser, l / RIG_KV_HEADS, l % RIG_KV_HEADS);
            assert_int_equal(lists[l].count, 40);
            for (uint32_t i = 0; i < 40; i++)
                in[lists[l].item[i]] = true;
            for (uint32_t i = 0; i < PINNED; i++) {
                uint32_t at = 10 + 7 * i + 2 * (l % RIG_KV_HEADS) + (l >= RIG_KV_HEADS);
                assert_true(in[at]);
                in[at] = false;
            }
            for (uint32_t i = 4; i < p - 16; i++) {
                bool pinned = i >= 10 && i < 10 + 7 * PINNED &&
                              (i - 10 - 2 * (l % RIG_KV_HEADS) - (l >= RIG_KV_HEADS)) % 7 == 0;
                if (in[i])
                    weakest = fminf(weakest, weights[i]);
                else if (!pinned)
                    best = fmaxf(best, weights[i]);
            }
            assert_true(weakest >= best);
        }
    }
    lane_free(&lane);
    pins_free(&pins);
    world_free(&w);
}

/* Out of prefill, in texts and streams: the same as the weights that are looked at, and the same alone. */
static void test_pins_come_out_of_prefill(void **state)
{
    enum { PROMPT = 300 };
    struct world *w = world_make(2, *state);
    struct chooser *second = make_chooser(w, false);
    struct lane_options options = {.model = w->engine.config,
                                   .chooser = w->chooser,
                                   .choice = {.budget = 60, .sinks = 4, .window = 16},
                                   .pins = 0.5f,
                                   .capacity = CONTEXT};
    struct lane *lanes[4] = {lane_create(&options)};
    options.pins = 0;
    lanes[1] = lane_create(&options);
    options.chooser = second;
    lanes[3] = lane_create(&options);
    options.pins = 0.5f;
    lanes[2] = lane_create(&options);
    const struct forced_text texts[] = {{w->tokens, CONTEXT, PROMPT, 330}, {w->tokens + 7, 200, 129, 160}};
    struct forced_sums sums[2] = {0}, alone[2] = {0};
    struct err err = {0};
    assert_int_equal(forced_run(&w->engine, texts, 2, lanes, 2, sums, &err), 0);
    for (int t = 0; t < 2; t++)
        assert_int_equal(forced_run(&w->engine, &texts[t], 1, lanes + 2 * t, 2, alone, &err), 0);
    for (int i = 0; i < 2; i++)
        assert_true(fabs(sums[i].kl - alone[i].kl) < 1e-9 && sums[i].kl > 1e-6);
    assert_true(sums[0].kl != sums[1].kl && sums[0].loss_full == sums[1].loss_full);
    struct pages pages;
    struct pins pins;
    struct naive *naive = mem_alloc(1, sizeof *naive);
    assert_int_equal(
        engine_pages(&w->engine, &(struct pages_sequence){.positions = CONTEXT}, 1, &pages, &err), 0);
    assert_int_equal(pins_prefill(&w->engine, &pages, 0, w->tokens, PROMPT, NULL, &pins, &err), 0);
    float *logits = mem_alloc(RIG_VOCAB, sizeof *logits);
    memcpy(logits, engine_logits(&w->engine, 0), RIG_VOCAB * sizeof *logits);
    struct engine_watch watch = {naive_layer, naive};
    for (naive->position = PROMPT - PINS_TOKENS; naive->position < PROMPT; naive->position++) {
        struct engine_chunk chunk = {&pages, 0, w->tokens, 250, 50, 1};
        assert_int_equal(engine_dense(&w->engine, &chunk, &watch, &err), 0);
    }
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        for (uint32_t h = 0; h < RIG_KV_HEADS; h++)
            for (uint32_t p = 0; p < PROMPT; p++)
                assert_true(fabs((double)pins.weights[(l * RIG_KV_HEADS + h) * PROMPT + p] -
                                 naive->weights[l][h][p]) < 1e-5);
    for (uint32_t i = 0; i < RIG_VOCAB; i++)
        assert_true(fabsf(logits[i] - engine_logits(&w->engine, 0)[i]) < 1e-4f);
    for (int i = 0; i < 4; i++)
        lane_free(&lanes[i]);
    chooser_free(&second);
    engine_pages_free(&w->engine, &pages);
    pins_free(&pins);
    mem_free(&naive);
    mem_free(&logits);
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

/* ---- hidden states ------------------------------------------------------------------------------------- */

/* What enters the first layer is the embedding; what leaves the last one is the same of a prompt as of
 * steps. */
static void test_hidden_states_are_kept(void **state)
{
    enum { TOKENS = 90 };
    struct world *w = world_make(1, *state);
    struct engine *e = &w->engine;
    struct taps *taps = &e->taps;
    struct pages pages;
    struct err err = {0};
    float *table = mem_alloc((size_t)RIG_VOCAB * RIG_HIDDEN, sizeof *table);
    uint32_t all[RIG_VOCAB];
    for (uint32_t i = 0; i < RIG_VOCAB; i++)
        all[i] = i;
    const struct model_tensor *embedding = model_token_embedding(w->rig->model);
    struct matrix matrix = {embedding->type, embedding->rows, embedding->cols, embedding->data};
    compute_embed(e->compute, table, &matrix, all, RIG_VOCAB);
    taps->layers[0] = RIG_LAYERS;
    taps->layers[1] = 0;
    taps->count = 2;
    taps->rows = mem_alloc((size_t)taps->tokens * taps_width(taps), sizeof(float));
    float *rows = engine_features_alloc(e, TOKENS);
    const struct pages_sequence sequences[] = {{.positions = TOKENS}, {.positions = TOKENS}};
    assert_int_equal(engine_pages(e, sequences, 2, &pages, &err), 0);
    assert_int_equal(engine_prefill(e, &pages, 0, w->tokens, TOKENS, rows, &err), 0);
    float error = 0, largest = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        struct engine_step step = {.pages = &pages, .sequence = 1, .position = t, .token = w->tokens[t]};
        assert_int_equal(engine_steps(e, &step, 1, &err), 0);
        const float *prompt = rows + t * taps_width(taps), *one = taps_row(taps, 0);
        for (uint32_t i = 0; i < RIG_HIDDEN; i++) {
            error = fmaxf(error, fabsf(prompt[i] - one[i]));
            largest = fmaxf(largest, fabsf(prompt[i]));
            float exact = table[w->tokens[t] * RIG_HIDDEN + i];
            assert_true(fabsf(one[RIG_HIDDEN + i] - exact) <= fabsf(exact) / 128); /* bf16 on a GPU */
            assert_true(one[RIG_HIDDEN + i] == prompt[RIG_HIDDEN + i]);
        }
    }
    assert_true(largest > 0 && error <= (*state ? largest / 10 : 0));
    engine_pages_free(e, &pages);
    mem_free(&rows);
    mem_free(&table);
    world_free(&w);
}

/* A head that looks at the model: equal weights however its tokens come, others without those states. */
static void test_looking_heads_are_fed(void **state)
{
    enum { TOKENS = 150, AT = 120 };
    struct world *w = world_make_looking(2, 3, *state);
    struct engine *e = &w->engine;
    size_t width = taps_width(&e->taps);
    struct chooser *other = make_chooser(w, false);
    struct pages pages;
    struct err err = {0};
    float *rows = engine_features_alloc(e, TOKENS), *none = engine_features_alloc(e, TOKENS);
    assert_int_equal(width, 3 * RIG_HIDDEN);
    assert_true(chooser_looks(w->chooser));
    assert_int_equal(engine_pages(e, &(struct pages_sequence){.positions = TOKENS}, 1, &pages, &err), 0);
    assert_int_equal(engine_prefill(e, &pages, 0, w->tokens, TOKENS, rows, &err), 0);
    chooser_feed(w->chooser, w->tokens, AT, rows, false);
    for (uint32_t t = AT; t < TOKENS; t++)
        chooser_feed(w->chooser, w->tokens + t, 1, rows + (t - 1) * width, true);
    chooser_feed(other, w->tokens, TOKENS, rows, true);
    for (uint32_t l = 0; l < 2 * RIG_KV_HEADS; l++)
        assert_memory_equal(chooser_weights(w->chooser, l / RIG_KV_HEADS, l % RIG_KV_HEADS),
                            chooser_weights(other, l / RIG_KV_HEADS, l % RIG_KV_HEADS),
                            TOKENS * sizeof(float));
    chooser_reset(other);
    chooser_feed(other, w->tokens, TOKENS, none, true);
    assert_memory_not_equal(chooser_weights(w->chooser, 0, 0), chooser_weights(other, 0, 0),
                            TOKENS * sizeof(float));
    chooser_free(&other);
    engine_pages_free(e, &pages);
    mem_free(&rows);
    mem_free(&none);
    world_free(&w);
}

/* What each lane's own KV makes of the model is what its head looks at: alone and together, in texts and
 * streams. */
static void test_looking_heads_choose_for_themselves(void **state)
{
    enum { LANES = 4 };
    struct world *w = world_make_looking(1, 2, *state);
    const struct choice all = {.budget = CONTEXT, .sinks = 4, .window = 16},
                        few = {.budget = 40, .sinks = 4, .window = 16};
    struct chooser *choosers[LANES];
    struct lane *lanes[LANES];
    for (int i = 0; i < LANES; i++) {
        choosers[i] = make_chooser(w, false);
        lanes[i] =
            make_lane(w, choosers[i], i % 2 ? &few : &all, i == 3 ? SELECTION_PREVIOUS : SELECTION_CURRENT);
    }
    const struct forced_text texts[] = {{w->tokens, CONTEXT, 300, 330}, {w->tokens + 7, 200, 129, 180}};
    struct forced_sums sums[2] = {0}, alone[2] = {0};
    struct err err = {0};
    assert_int_equal(forced_run(&w->engine, texts, 2, lanes, 2, sums, &err), 0);
    for (int t = 0; t < 2; t++)
        assert_int_equal(forced_run(&w->engine, &texts[t], 1, lanes + 2 * t, 2, alone, &err), 0);
    assert_true(sums[0].kl == 0 && sums[0].positions == 30 + 51);
    assert_true(fabs(sums[1].kl - alone[1].kl) < 1e-9 && sums[1].kl > 1e-6);
    struct decode_stream streams[3];
    for (int i = 0; i < 3; i++)
        streams[i] = (struct decode_stream){.prompt = w->tokens,
                                            .prompt_count = 200,
                                            .tokens = 50,
                                            .lane = i ? lanes[i - 1] : NULL,
                                            .sampling = sampler_params_default()};
    assert_int_equal(decode_run(&w->engine, streams, 3, &err), 0);
    assert_memory_equal(streams[0].out.ids, streams[1].out.ids, 50 * sizeof(uint32_t));
    assert_memory_not_equal(streams[0].out.ids, streams[2].out.ids, 50 * sizeof(uint32_t));
    for (int i = 0; i < LANES; i++) {
        lane_free(&lanes[i]);
        chooser_free(&choosers[i]);
    }
    for (int i = 0; i < 3; i++)
        token_buf_free(&streams[i].out);
    world_free(&w);
}

/* ---- oracles ------------------------------------------------------------------------------------------- */

static struct lane *make_oracle(const struct world *w, const struct choice *choice, enum oracle oracle)
{
    return lane_create(&(struct lane_options){.model = w->engine.config,
                                              .chooser = w->chooser,
                                              .choice = *choice,
                                              .oracle = oracle,
                                              .capacity = CONTEXT,
                                              .loads = oracle != ORACLE_HEADS});
}

struct oracles {
    struct world *world;
    struct choice choice;
    struct mass *mass;
    struct lane *lanes[2]; /* heads, groups */
    double attained[2];
    uint32_t looks;
};

static void attain(void *arg, const struct look *look)
{
    struct oracles *o = arg;
    for (int i = 0; i < 2; i++) {
        const struct attn_list *lists = lane_choose_by(o->lanes[i], look);
        for (uint32_t l = 0; l < look->layers; l++)
            for (uint32_t h = 0; h < look->heads; h++) {
                const struct attn_list *list = &lists[lane_group_of(o->lanes[i])[l] * look->heads + h];
                assert_int_equal(list->count, o->choice.budget);
                for (uint32_t p = 0; p < list->count; p++) {
                    assert_true(p == 0 || list->item[p] > list->item[p - 1]);
                    o->attained[i] += (double)look_weights(look, l, h)[list->item[p]];
                }
            }
    }
    chooser_feed(o->world->chooser, o->world->tokens + (o->looks ? look->position : 0),
                 o->looks ? 1 : look->position + 1, NULL, true);
    mass_add(o->mass, look, o->world->chooser, &o->choice, 0);
    o->looks += look->layers * look->heads;
}

/* What the oracles' lists attain is what mass.h says of the best sets, from tokens that stand in the pages
 * already too. */
static void test_oracles_attain_the_best_mass(void **state)
{
    struct world *w = world_make(2, *state);
    struct oracles o = {.world = w,
                        .choice = {.budget = 40, .sinks = 4, .window = 16},
                        .mass = mass_create(RIG_LAYERS, RIG_KV_HEADS)};
    const uint32_t positions[] = {330, 331};
    struct pages pages = {0};
    struct err err = {0};
    o.lanes[0] = make_oracle(w, &o.choice, ORACLE_HEADS);
    o.lanes[1] = make_oracle(w, &o.choice, ORACLE_GROUPS);
    assert_int_equal(
        engine_pages(&w->engine, &(struct pages_sequence){.positions = CONTEXT}, 1, &pages, &err), 0);
    assert_int_equal(engine_prefill(&w->engine, &pages, 0, w->tokens, 330, NULL, &err), 0);
    struct look_text text = {
        .tokens = w->tokens, .first = 330, .count = 332, .positions = positions, .position_count = 2};
    assert_int_equal(look_run(&w->engine, &pages, &text, attain, &o, &err), 0);
    assert_int_equal(o.looks, 2 * RIG_LAYERS * RIG_KV_HEADS);
    struct mass_figures f = mass_figures(o.mass);
    assert_true(fabs(o.attained[0] / o.looks - f.best_head) < 1e-6);
    assert_true(fabs(o.attained[1] / o.looks - f.best_group) < 1e-6);
    assert_true(f.best_head > f.best_group + 1e-3 && f.best_group > f.mean + 1e-3);
    assert_true(lane_figures(lane_counts(o.lanes[0])).attended == 40);
    for (int i = 0; i < 2; i++)
        lane_free(&o.lanes[i]);
    mass_free(&o.mass);
    engine_pages_free(&w->engine, &pages);
    world_free(&w);
}

/* A budget for each group: what it picks is the best so many; for the layers they are one each. */
static void test_groups_have_budgets(void **state)
{
    (void)state;
    static const uint32_t budgets[] = {90, 30};
    struct world *w = world_make(2, NULL);
    const struct choice base = {.budget = 40, .sinks = 4, .window = 16};
    struct lane *lane = lane_create(&(struct lane_options){.model = w->engine.config,
                                                           .chooser = w->chooser,
                                                           .choice = base,
                                                           .group_budgets = budgets,
                                                           .capacity = CONTEXT,
                                                           .loads = true});
    chooser_feed(w->chooser, w->tokens, 300, NULL, true);
    const struct attn_list *lists = lane_choose(lane, 299);
    for (uint32_t i = 0; i < 2 * RIG_KV_HEADS; i++) {
        struct choice own = base;
        own.budget = budgets[i / RIG_KV_HEADS];
        struct span span = sets_span(&own, 299);
        struct positions picks = {0};
        uint32_t items[90];
        pick(w, i / RIG_KV_HEADS, i % RIG_KV_HEADS, &own, &span, &picks);
        assert_int_equal(lists[i].count, own.budget);
        assert_int_equal(sets_attended(items, &span, &picks), own.budget);
        assert_memory_equal(lists[i].item, items, own.budget * sizeof *items);
        positions_free(&picks);
    }
    double mean = (90 + 30 * (RIG_LAYERS - 1.0)) / RIG_LAYERS; /* the first group is layer 0 alone */
    assert_true(fabs(lane_figures(lane_counts(lane)).attended - mean) < 1e-9);
    lane_free(&lane);
    world_free(&w);
}

/* Lists of a group count once for each of its layers. */
static void test_attended_is_a_mean_over_layers(void **state)
{
    (void)state;
    struct world *w = world_make(2, NULL);
    const struct choice heavy = {40, 4, 16, 120, 0.9f, 0};
    struct lane *lane = make_lane(w, w->chooser, &heavy, SELECTION_CURRENT);
    double by_layer = 0, by_list = 0;
    chooser_feed(w->chooser, w->tokens, 300, NULL, true);
    const struct attn_list *lists = lane_choose(lane, 299);
    for (uint32_t h = 0; h < RIG_KV_HEADS; h++) {
        for (uint32_t l = 0; l < RIG_LAYERS; l++)
            by_layer += lists[lane_group_of(lane)[l] * RIG_KV_HEADS + h].count;
        by_list += lists[h].count + lists[RIG_KV_HEADS + h].count;
    }
    by_layer /= RIG_LAYERS * RIG_KV_HEADS;
    by_list /= 2 * RIG_KV_HEADS;
    double attended = lane_figures(lane_counts(lane)).attended;
    assert_true(fabs(attended - by_layer) < 1e-9 && fabs(attended - by_list) > 1e-3);
    lane_free(&lane);
    world_free(&w);
}

/* Followed through texts: whole budgets are full attention, small ones come nearer to it than heads do, and
 * nobody beside them is touched. */
static void test_oracles_are_followed(void **state)
{
    enum { WAYS = 6, TEXTS = 2 };
    struct world *w = world_make(2, *state);
    const struct choice all = {.budget = CONTEXT, .sinks = 4, .window = 16},
                        few = {.budget = 60, .sinks = 4, .window = 16}, share = {30, 4, 16, 120, 0.9999f, 0};
    struct chooser *newest[TEXTS] = {make_chooser(w, true), make_chooser(w, true)};
    struct chooser *second = make_chooser(w, false);
    struct lane *lanes[TEXTS * WAYS];
    for (int t = 0; t < TEXTS; t++) {
        struct lane **to = &lanes[t * WAYS];
        to[0] = make_oracle(w, &all, ORACLE_HEADS);
        to[1] = make_oracle(w, &few, ORACLE_HEADS);
        to[2] = make_oracle(w, &few, ORACLE_GROUPS);
        to[3] = make_oracle(w, &share, ORACLE_HEADS);
        to[4] = make_lane(w, newest[t], &few, SELECTION_CURRENT);
        to[5] = make_lane(w, t ? second : w->chooser, &few, SELECTION_CURRENT);
    }
    const struct forced_text texts[] = {{w->tokens, CONTEXT, 300, 330}, {w->tokens + 7, 200, 129, 180}};
    struct forced_sums sums[WAYS] = {0}, alone[1] = {0};
    struct err err = {0};
    assert_int_equal(forced_run(&w->engine, texts, TEXTS, lanes, WAYS, sums, &err), 0);
    struct lane *beside[] = {lanes[5], lanes[WAYS + 5]};
    assert_int_equal(forced_run(&w->engine, texts, TEXTS, beside, 1, alone, &err), 0);
    for (int i = 0; i < WAYS; i++)
        assert_int_equal(sums[i].positions, 30 + 51);
    assert_true(sums[0].kl == 0 && sums[0].loss_full == sums[0].loss_sparse);
    assert_true(0 < sums[1].kl && sums[1].kl < sums[2].kl);
    assert_true(sums[2].kl < sums[4].kl && sums[2].kl < sums[5].kl);
    double attended = lane_figures(lane_counts(lanes[3])).attended;
    assert_true(attended > 30 && attended < 120); /* some lists grew */
    assert_true(alone[0].kl == sums[5].kl && alone[0].loss_full == sums[5].loss_full);
    for (int i = 0; i < TEXTS * WAYS; i++)
        lane_free(&lanes[i]);
    for (int t = 0; t < TEXTS; t++)
        chooser_free(&newest[t]);
    chooser_free(&second);
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
        assert_int_equal(engine_prefill(&w->engine, &pages, 0, w->tokens, 3, NULL, &err), 0);
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
        cmocka_unit_test(test_pins_are_in_all_sets),
        cmocka_unit_test(test_pins_come_out_of_prefill),
        cmocka_unit_test_prestate(test_pins_come_out_of_prefill, gpu),
        cmocka_unit_test(test_streams_go_on_by_themselves),
        cmocka_unit_test_prestate(test_streams_go_on_by_themselves, gpu),
        cmocka_unit_test(test_hidden_states_are_kept),
        cmocka_unit_test_prestate(test_hidden_states_are_kept, gpu),
        cmocka_unit_test(test_looking_heads_are_fed),
        cmocka_unit_test_prestate(test_looking_heads_are_fed, gpu),
        cmocka_unit_test(test_looking_heads_choose_for_themselves),
        cmocka_unit_test_prestate(test_looking_heads_choose_for_themselves, gpu),
        cmocka_unit_test(test_oracles_attain_the_best_mass),
        cmocka_unit_test_prestate(test_oracles_attain_the_best_mass, gpu),
        cmocka_unit_test(test_groups_have_budgets),
        cmocka_unit_test(test_attended_is_a_mean_over_layers),
        cmocka_unit_test(test_oracles_are_followed),
        cmocka_unit_test_prestate(test_oracles_are_followed, gpu),
        cmocka_unit_test(test_devices_agree),
        cmocka_unit_test(test_devices_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
