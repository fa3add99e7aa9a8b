/* The measurements of eval/ against naive ones: sets, attention mass and oracles by trying all sets, overlap
 * and loading by counting; tasks, n-grams, options. test_eval_engine.c has what runs the model. */
#include "tests/unit/eval_rig.h"

#include <errno.h>

#include "eval/decode.h"
#include "eval/forced.h"
#include "eval/lane.h"
#include "eval/look.h"
#include "eval/mass.h"
#include "eval/session.h"
#include "eval/tasks.h"

/* ---- sets ---------------------------------------------------------------------------------------------- */

static void test_sets_are_exact(void **state)
{
    (void)state;
    const struct choice choice = {
        .budget = 7, .sinks = 1, .window = 2}; /* a sink, two and itself, three picks */
    const float w[10] = {1, 2, 64, 4, 8, 32, 16, 128, 256, 512};
    uint32_t scratch[10], list[7];
    struct positions picks = {0}, other = {0};
    struct span s = sets_span(&choice, 9);
    assert_int_equal(s.limit, 7);
    assert_int_equal(s.most, 3);
    sets_pick(&picks, w, &s, scratch);
    assert_int_equal(sets_attended(list, &s, &picks), 7);
    assert_memory_equal(list, ((uint32_t[]){0, 2, 5, 6, 7, 8, 9}), sizeof list);
    assert_true(sets_mass(w, &s, &picks) == 1 + 64 + 32 + 16 + 128 + 256 + 512);
    assert_true(sets_mass_newest(w, &choice, 9) == 4 + 8 + 32 + 16 + 128 + 256 + 512);
    assert_true(sets_mass_sinks_newest(w, &choice, 9) == 1 + 8 + 32 + 16 + 128 + 256 + 512);
    positions_reserve(&other, 3);
    memcpy(other.at, (uint32_t[]){1, 5, 6}, 3 * sizeof *other.at);
    other.count = 3;
    assert_int_equal(sets_common(&picks, &other), 2);
    /* With room for all, all are attended, once each. */
    for (uint32_t position = 0; position < 7; position++) {
        s = sets_span(&choice, position);
        sets_pick(&picks, w, &s, scratch);
        assert_int_equal(sets_attended(list, &s, &picks), position + 1);
        for (uint32_t i = 0; i <= position; i++)
            assert_int_equal(list[i], i);
        assert_true(sets_mass_sinks_newest(w, &choice, position) == sets_mass_newest(w, &choice, position));
    }
    positions_free(&picks);
    positions_free(&other);
}

static const uint32_t set_ends[] = {30, 70, 200, 230, 260, 290, 320, 350, 380, 399};

/* What eval picks is what the retriever sends, with keys of either kind: rounding changes weights, and sets
 * of theirs. `weights` [groups][heads][CONTEXT]: the chooser's of the last position. */
static uint32_t *check_sets(struct world *w, enum compute_keys keys, uint32_t *ret_count, float *weights)
{
    enum { ENDS = sizeof set_ends / sizeof *set_ends };
    const struct choice choice = {.budget = 60, .sinks = 4, .window = 16};
    struct chooser_options options = {.model = w->rig->model,
                                      .head = w->rig->head,
                                      .pool = HEAD_POOL_MEAN,
                                      .keys = keys,
                                      .context = CONTEXT};
    struct selector *selector =
        rig_selector(w->rig, (struct rig_selector){.pool = HEAD_POOL_MEAN, .context = CONTEXT, .keys = keys});
    struct selector_result result = {0};
    struct positions picks = {0};
    struct err err = {0};
    uint32_t *all = mem_alloc((size_t)ENDS * 2 * RIG_KV_HEADS * choice.budget, sizeof *all), count = 0;
    chooser_free(&w->chooser);
    if (chooser_create(&options, &w->chooser, &err) < 0)
        fail_msg("%s", err.text);
    rig_open(selector, 1, CONTEXT, choice.budget, choice.sinks, choice.window);
    for (uint32_t i = 0, at = 0; i < ENDS; at = set_ends[i++]) {
        rig_step(selector, 1, i + 1, w->tokens, at, set_ends[i], true, &result);
        selector_forget_sent(selector); /* whole sets */
        chooser_feed(w->chooser, w->tokens + at, set_ends[i] - at, NULL, true);
        struct span span = sets_span(&choice, set_ends[i] - 1);
        const uint32_t *sent = result.positions;
        for (uint32_t l = 0; l < 2 * RIG_KV_HEADS; l++) {
            pick(w, l / RIG_KV_HEADS, l % RIG_KV_HEADS, &choice, &span, &picks);
            assert_int_equal(picks.count, result.counts[2 * l]);
            assert_memory_equal(picks.at, sent, picks.count * sizeof *sent);
            memcpy(all + count, picks.at, picks.count * sizeof *all);
            count += picks.count;
            sent += picks.count;
            memcpy(weights + (size_t)l * CONTEXT,
                   chooser_weights(w->chooser, l / RIG_KV_HEADS, l % RIG_KV_HEADS),
                   set_ends[i] * sizeof *weights);
        }
    }
    positions_free(&picks);
    selector_result_free(&result);
    selector_free(&selector);
    *ret_count = count;
    return all;
}

static void test_sets_are_the_retrievers(void **state)
{
    (void)state;
    enum { KINDS = COMPUTE_KEYS_INT8 + 1, WEIGHTS = 2 * RIG_KV_HEADS * CONTEXT };
    struct world *w = world_make(2, NULL);
    uint32_t *sets[KINDS], counts[KINDS];
    static float weights[KINDS][WEIGHTS];
    for (int keys = COMPUTE_KEYS_AUTO; keys < KINDS; keys++)
        sets[keys] = check_sets(w, (enum compute_keys)keys, &counts[keys], weights[keys]);
    assert_memory_equal(weights[COMPUTE_KEYS_AUTO], weights[COMPUTE_KEYS_F16], sizeof weights[0]);
    assert_memory_not_equal(weights[COMPUTE_KEYS_INT8], weights[COMPUTE_KEYS_F16], sizeof weights[0]);
    size_t bytes = counts[COMPUTE_KEYS_F16] * sizeof *sets[0];
    assert_int_equal(counts[COMPUTE_KEYS_INT8], counts[COMPUTE_KEYS_F16]);
    assert_memory_not_equal(sets[COMPUTE_KEYS_INT8], sets[COMPUTE_KEYS_F16], bytes);
    for (int keys = COMPUTE_KEYS_AUTO; keys < KINDS; keys++)
        mem_free(&sets[keys]);
    world_free(&w);
}

/* ---- mass and oracles ---------------------------------------------------------------------------------- */

enum { SMALL = 12, PICKS = 2 };

/* Weights that add up to one, different for each layer and head. */
static float *small_weights(uint32_t layers, uint32_t heads)
{
    float *w = mem_alloc((size_t)layers * heads * SMALL, sizeof *w);
    uint32_t seed = 5;
    for (uint32_t i = 0; i < layers * heads; i++) {
        float sum = 0;
        for (uint32_t p = 0; p < SMALL; p++)
            sum += w[i * SMALL + p] = 1 + tiny_uniform(&seed);
        for (uint32_t p = 0; p < SMALL; p++)
            w[i * SMALL + p] /= sum;
    }
    return w;
}

/* Mean mass over layers [first, end) and heads [h, h_end) of one set for all of them: the best of all sets of
 * two positions of [1, 9), beside 0 and 9, 10, 11. */
static double best_by_trying(const float *w, uint32_t heads, const uint32_t layers[2], const uint32_t of[2])
{
    double best = 0;
    for (uint32_t a = 1; a < 9; a++)
        for (uint32_t b = a + 1; b < 9; b++) {
            const uint32_t set[] = {0, a, b, 9, 10, 11};
            double sum = 0;
            for (uint32_t l = layers[0]; l < layers[1]; l++)
                for (uint32_t h = of[0]; h < of[1]; h++)
                    for (int i = 0; i < 6; i++)
                        sum += (double)w[(l * heads + h) * SMALL + set[i]];
            sum /= (layers[1] - layers[0]) * (of[1] - of[0]);
            best = sum > best ? sum : best;
        }
    return best;
}

static void test_oracles_are_the_best_of_all_sets(void **state)
{
    (void)state;
    enum { L = RIG_LAYERS, H = RIG_KV_HEADS };
    struct world *w = world_make(2, NULL); /* groups: layer 0, layers 1 to 3 */
    float *weights = small_weights(L, H);
    struct look look = {SMALL - 1, L, H, SMALL, weights};
    const struct choice choice = {.budget = PICKS + 4, .sinks = 1, .window = 2};
    struct mass *mass = mass_create(L, H);
    chooser_feed(w->chooser, w->tokens, SMALL, NULL, true);
    mass_add(mass, &look, w->chooser, &choice, 3);
    struct mass_figures f = mass_figures(mass);
    double head = 0, group = 0, shared = 0, own = 0, hits = 0, worst = 1, lowest = 1;
    struct span span = sets_span(&choice, SMALL - 1);
    struct positions picks = {0}, best = {0};
    uint32_t scratch[SMALL];
    for (uint32_t l = 0; l < L; l++) {
        double layer = 0;
        for (uint32_t h = 0; h < H; h++) {
            const float *row = weights + (l * H + h) * SMALL;
            head += best_by_trying(weights, H, (uint32_t[]){l, l + 1}, (uint32_t[]){h, h + 1}) / (L * H);
            pick(w, l > 0, h, &choice, &span, &picks);
            sets_pick(&best, row, &span, scratch);
            double m = sets_mass(row, &span, &picks);
            hits += (double)sets_common(&picks, &best) / PICKS / (L * H);
            own += m / (L * H);
            layer += m / H;
            lowest = m < lowest ? m : lowest;
        }
        worst = layer < worst ? layer : worst;
    }
    for (uint32_t h = 0; h < H; h++) {
        const uint32_t of[] = {h, h + 1};
        group += (best_by_trying(weights, H, (uint32_t[]){0, 1}, of) +
                  3 * best_by_trying(weights, H, (uint32_t[]){1, L}, of)) /
                 (L * H);
        shared += best_by_trying(weights, H, (uint32_t[]){0, L}, of) / H;
    }
    assert_true(fabs(f.best_head - head) < 1e-6);
    assert_true(fabs(f.best_group - group) < 1e-6);
    assert_true(fabs(f.best_shared - shared) < 1e-6);
    assert_true(fabs(f.best_batch - best_by_trying(weights, H, (uint32_t[]){0, L}, (uint32_t[]){0, H})) <
                1e-6);
    assert_true(fabs(f.mean - own) < 1e-6 && fabs(f.at[3] - own) < 1e-6 && isnan(f.at[2]));
    assert_true(fabs(f.hit_rate - hits) < 1e-6);
    double by_head[L * H], least = 1;
    mass_by_head(mass, by_head);
    for (int i = 0; i < L * H; i++)
        least = by_head[i] < least ? by_head[i] : least;
    assert_true(least == f.worst_head);
    assert_true(fabs(f.worst_layer - worst) < 1e-6 && fabs(f.worst_head - lowest) < 1e-6);
    assert_true(f.best_head >= f.best_group && f.best_group >= f.best_shared &&
                f.best_shared >= f.best_batch);
    assert_true(f.best_group >= f.mean && f.newest < f.best_head);
    mass_free(&mass);
    positions_free(&picks);
    positions_free(&best);
    mem_free(&weights);
    world_free(&w);
}

static void test_p10_is_the_tenth_part(void **state)
{
    (void)state;
    struct world *w = world_make(1, NULL);
    struct chooser *newest = make_chooser(w, true);
    struct mass *mass = mass_create(1, 1);
    const struct choice choice = {
        .budget = 4, .sinks = 1, .window = 2}; /* 0 and 9, 10, 11; nothing is picked */
    chooser_feed(newest, w->tokens, SMALL, NULL, true);
    for (int i = 0; i < 20; i++) { /* masses 0.20, 0.19 .. 0.01 */
        float weights[SMALL] = {[0] = 0.01f * (float)(20 - i), [5] = 1};
        struct look look = {SMALL - 1, 1, 1, SMALL, weights};
        mass_add(mass, &look, newest, &choice, 0);
    }
    struct mass_figures f = mass_figures(mass);
    assert_true(fabs(f.p10 - 0.03) < 1e-6);
    assert_true(fabs(f.mean - 0.105) < 1e-6);
    assert_true(isnan(f.hit_rate));
    mass_free(&mass);
    chooser_free(&newest);
    world_free(&w);
}

/* ---- consecutive positions ----------------------------------------------------------------------------- */

/* Budget 100, so 200 slots: more than there are positions to hold; a row is loaded once at most. */
static void test_overlap_and_loading_are_counted(void **state)
{
    (void)state;
    enum { FROM = 150, END = 190 };
    struct world *w = world_make(2, NULL);
    const struct choice choice = {.budget = 100, .sinks = 4, .window = 16};
    struct lane *lane = make_lane(w, w->chooser, &choice, SELECTION_CURRENT);
    struct forced_text text = {w->tokens, END + 1, FROM, END};
    forced_choose_only(&w->engine, &text, 1, &lane, 1);
    struct lane_figures f = lane_figures(lane_counts(lane));
    /* Again, slowly. */
    enum { LISTS = 2 * RIG_KV_HEADS };
    static bool held[LISTS][CONTEXT], before[LISTS][CONTEXT];
    memset(held, 0, sizeof held);
    memset(before, 0, sizeof before);
    struct positions picks = {0};
    double common = 0, selected = 0, loaded = 0, whole = 0;
    chooser_reset(w->chooser);
    chooser_feed(w->chooser, w->tokens, FROM, NULL, false);
    for (uint32_t p = FROM; p < END; p++) {
        struct span span = sets_span(&choice, p);
        chooser_feed(w->chooser, w->tokens + p, 1, NULL, true);
        for (uint32_t l = 0; l < LISTS; l++) {
            double layers = l < RIG_KV_HEADS ? 1 : 3;
            pick(w, l / RIG_KV_HEADS, l % RIG_KV_HEADS, &choice, &span, &picks);
            bool now[CONTEXT] = {false};
            for (uint32_t i = 0; i < picks.count; i++) {
                uint32_t at = picks.at[i];
                common += p > FROM && before[l][at];
                loaded += p > FROM && !held[l][at] ? layers : 0;
                now[at] = held[l][at] = true;
            }
            selected += p > FROM ? picks.count : 0;
            whole += p > FROM ? layers * picks.count : 0;
            memcpy(before[l], now, sizeof now);
            for (uint32_t i = 0; i <= p; i++)
                held[l][i] |= i < choice.sinks || i >= span.limit;
        }
    }
    assert_true(selected > 0 && loaded > 0);
    assert_true(fabs(f.overlap - common / selected) < 1e-12);
    assert_true(fabs(f.saved - (1 - loaded / whole)) < 1e-12);
    assert_true(f.saved_default <= f.saved && f.saved_default > 0);
    positions_free(&picks);
    lane_free(&lane);
    world_free(&w);
}

static void test_distances_are_exact(void **state)
{
    (void)state;
    const float full[] = {1, 2, 0.5f}, sparse[] = {2, 1, 0};
    struct forced_sums s = {0};
    double p = 0, q = 0, kl = 0;
    for (int i = 0; i < 3; i++) {
        p += exp((double)full[i]);
        q += exp((double)sparse[i]);
    }
    for (int i = 0; i < 3; i++)
        kl += exp((double)full[i]) / p * ((double)full[i] - log(p) - (double)sparse[i] + log(q));
    forced_compare(&s, full, sparse, 3, 2);
    assert_true(fabs(s.kl - kl) < 1e-6);
    assert_true(fabs(s.loss_full - (log(p) - 0.5)) < 1e-6 && fabs(s.loss_sparse - log(q)) < 1e-6);
    assert_int_equal(s.agreed, 0);
    forced_compare(&s, full, full, 3, 0);
    assert_true(fabs(s.kl - kl) < 1e-6);
    assert_int_equal(s.agreed, 1);
    assert_int_equal(s.positions, 2);
}

/* ---- tasks and texts ----------------------------------------------------------------------------------- */

/* The right answer is in the text, and scores; another item's does not. */
static void check_task(enum task_kind kind)
{
    struct task a, b, other, longer;
    char said[TASK_ANSWERS_MAX * TASK_WORD_BYTES + 64] = "It is ";
    task_make(kind, 7, 3, 50, &a);
    task_make(kind, 7, 3, 50, &b);
    task_make(kind, 7, 4, 50, &other);
    task_make(kind, 7, 3, 90, &longer);
    assert_int_equal(a.text.bytes, b.text.bytes);
    assert_memory_equal(a.text.text, b.text.text, a.text.bytes);
    assert_memory_equal(a.answers, b.answers, sizeof a.answers);
    assert_true(longer.text.bytes > a.text.bytes);
    assert_true(a.text.bytes != other.text.bytes || memcmp(a.text.text, other.text.text, a.text.bytes) != 0);
    for (uint32_t i = 0; i < a.answer_count; i++) {
        size_t n = strlen(said);
        snprintf(said + n, sizeof said - n, "%s\n", a.answers[i]);
        if (kind != TASK_PASSAGES)
            assert_non_null(memmem(a.text.text, a.text.bytes, a.answers[i], strlen(a.answers[i])));
    }
    assert_true(task_score(&a, said, strlen(said)) == 1);
    assert_true(task_score(&a, "I do not know 1", 15) == 0);
    assert_true(task_score(&a, "", 0) == 0);
    if (kind != TASK_COPY && kind != TASK_PASSAGES) {
        char wrong[64];
        snprintf(wrong, sizeof wrong, "1%s", a.answers[0]);
        assert_true(task_score(&a, wrong, strlen(wrong)) == 0);
    }
    task_free(&a);
    task_free(&b);
    task_free(&other);
    task_free(&longer);
}

static void test_tasks_are_repeatable(void **state)
{
    (void)state;
    for (uint32_t kind = 0; kind < TASK_COUNT; kind++) {
        enum task_kind found;
        check_task((enum task_kind)kind);
        const char *name = task_name((enum task_kind)kind);
        assert_int_equal(task_by_name(name, strlen(name), &found), 0);
        assert_int_equal(found, kind);
    }
    enum task_kind none;
    assert_int_equal(task_by_name("nee", 3, &none), -ENOENT);
}

static void test_passages_are_counted(void **state)
{
    (void)state;
    struct task t;
    task_make(TASK_PASSAGES, 1, 0, 80, &t);
    /* Count the different ones in the text itself. */
    char *text = mem_alloc(t.text.bytes + 1, 1);
    memcpy(text, t.text.text, t.text.bytes);
    const char *passages[32];
    uint32_t count = 0, different = 0;
    for (char *at = text; (at = strstr(at, "Passage ")); count++) {
        assert_true(count < 32);
        at = strchr(at, ':') + 1;
        passages[count] = at;
        at = strstr(at, "\n\n");
        *at++ = 0;
        bool seen = false;
        for (uint32_t i = 0; i < count; i++)
            seen |= !strcmp(passages[i], passages[count]);
        different += !seen;
    }
    assert_int_equal(count, 11);
    assert_true(different > 1 && different < count);
    assert_int_equal(different, (int)strtol(t.answers[0], NULL, 10));
    mem_free(&text);
    task_free(&t);
}

static void test_lists_score_by_their_order(void **state)
{
    (void)state;
    struct task t = {.answers = {"apple 1", "table 2", "river 3", "candle 4"}, .answer_count = 4};
    assert_true(task_score(&t, "apple 1, table 2, candle 4", 26) == 0.75);
    assert_true(task_score(&t, "candle 4, apple 1", 17) == 0.25);
    assert_true(task_score(&t, "pineapple 1 apple 10", 20) == 0);
}

static void test_distinct_ngrams(void **state)
{
    (void)state;
    const uint32_t ids[] = {1, 2, 1, 2, 1, 3};
    assert_true(generate_distinct(ids, 6, 1) == 3.0 / 6);
    assert_true(generate_distinct(ids, 6, 2) == 3.0 / 5); /* 12 21 12 21 13 */
    assert_true(generate_distinct(ids, 6, 3) == 3.0 / 4); /* 121 212 121 213 */
    assert_true(isnan(generate_distinct(ids, 2, 3)));
}

/* ---- options ------------------------------------------------------------------------------------------- */

static int parse(struct eval_options *o, struct err *err, const char *const *words, int count)
{
    char *argv[24] = {(char[]){"eval"}};
    assert_true(count < 23);
    for (int i = 0; i < count; i++)
        argv[i + 1] = (char *)(uintptr_t)words[i];
    *err = (struct err){0};
    return eval_options_parse(count + 1, argv, o, err);
}
#define PARSE(...)                                      \
    parse(&o, &err, (const char *const[]){__VA_ARGS__}, \
          sizeof(const char *const[]){__VA_ARGS__} / sizeof(char *))

static void test_options(void **state)
{
    (void)state;
    struct eval_options o;
    struct err err;
    assert_int_equal(PARSE("-m", "x", "-f", "a", "-f", "b", "-H", "bootstrap", "-H", "h", "--budget",
                           "512,1024", "--tasks", "copy,needle", "--context", "8192"),
                     0);
    assert_int_equal(o.files.count, 2);
    assert_string_equal(o.files.at[1], "b");
    assert_int_equal(o.heads.count, 2);
    assert_int_equal(o.budgets.count, 2);
    assert_int_equal(o.budgets.at[1], 1024);
    assert_int_equal(o.task_count, 2);
    assert_int_equal(o.tasks[0], TASK_COPY);
    assert_int_equal(PARSE("-f", "a", "b", "-H", "h", "-m", "x", "--file=c", "d"), 0);
    assert_int_equal(o.files.count, 4);
    assert_string_equal(o.files.at[3], "d");
    assert_int_equal(o.heads.count, 1);
    assert_int_equal(PARSE("-f", "a", "-m", "x", "b"), -EINVAL);
    assert_non_null(strstr(err.text, "'b'"));
    assert_int_equal(PARSE("-m", "x", "--tasks", "all"), 0);
    assert_int_equal(o.task_count, TASK_COUNT);
    assert_int_equal(PARSE("-m", "x"), -EINVAL);
    assert_int_equal(PARSE("-f", "x"), -EINVAL);
    assert_int_equal(PARSE("-m", "x", "-f", "a", "--budget", "512,"), -EINVAL);
    assert_int_equal(PARSE("-m", "x", "-f", "a", "--budget", "64"), -EINVAL); /* no room beside the window */
    assert_non_null(strstr(err.text, "--budget"));
    assert_int_equal(PARSE("-m", "x", "--tasks", "needle,none"), -EINVAL);
    assert_non_null(strstr(err.text, "--tasks"));
    assert_int_equal(PARSE("-m", "x", "-f", "a", "--plot", "p", "--no-mass"), -EINVAL);
    assert_int_equal(PARSE("-m", "x", "-f", "a", "--variant", "oracle=heads"), 0);
    assert_int_equal(PARSE("-m", "x", "-f", "a", "--variant", "oracle=heads", "--tasks", "all"), -EINVAL);
    assert_int_equal(PARSE("-m", "x", "-f", "a", "--variant", "oracle=heads", "--no-forced"), -EINVAL);
    assert_non_null(strstr(err.text, "--no-forced"));
    assert_int_equal(PARSE("--help"), 1);
}

static void test_variants(void **state)
{
    (void)state;
    struct eval_options o;
    struct err err;
    assert_int_equal(PARSE("-m", "x", "-f", "a", "-b", "512,1024", "--sinks", "8", "--variant",
                           "budget=300,pool=max,key-type=int8",
                           "head=h.s,selection=mixed,window=16,top-p=0.5", "min-mass=0.9",
                           "pins=0.25,pin-layers=4", "oracle=groups,top-p=0.9", "group-budgets=300:80:1000"),
                     0);
    assert_int_equal(o.variant_texts.count, 6);
    const struct variant *v = o.variants;
    assert_int_equal(v[0].choice.budget, 300);
    assert_int_equal(v[0].choice.sinks, 8);
    assert_int_equal(v[0].pool, 1);
    assert_int_equal(v[0].keys, COMPUTE_KEYS_INT8);
    assert_int_equal(v[1].keys, COMPUTE_KEYS_AUTO);
    assert_string_equal(v[0].head, "");
    assert_int_equal(v[1].choice.budget, 512); /* as the first budget */
    assert_int_equal(v[1].choice.window, 16);
    assert_int_equal(v[1].selection, SELECTION_MIXED);
    assert_string_equal(v[1].head, "h.s");
    assert_true(v[1].choice.top_p == 0.5f && v[1].choice.max_budget == 0);
    assert_int_equal(sets_longest(&v[1].choice), 512);
    assert_int_equal(sets_longest(&v[2].choice), 1024); /* lists that grow: to two budgets */
    assert_true(v[3].pins == 0.25f && v[3].pin_layers == 4 && v[2].pins == 0);
    assert_int_equal(v[3].oracle, ORACLE_NONE);
    assert_int_equal(v[4].oracle, ORACLE_GROUPS);
    assert_int_equal(v[4].group_count, 0);
    assert_int_equal(v[5].group_count, 3);
    assert_true(v[5].group_budgets[0] == 300 && v[5].group_budgets[1] == 80 && v[5].group_budgets[2] == 1000);
    static const char *const wrong[] = {"budget",
                                        "budget=x",
                                        "pool=none",
                                        "key-type=int4",
                                        "selection=",
                                        "window=600",
                                        "min-mass=2",
                                        "head",
                                        "",
                                        "budget=72",
                                        "color=red",
                                        "top-p=-0.1",
                                        "pins=0.5,top-p=0.5",
                                        "budget=100,",
                                        "oracle=best",
                                        "group-budgets=600:",
                                        "group-budgets=600:72",
                                        "group-budgets=600:300,top-p=0.9",
                                        "group-budgets=600:300,oracle=heads",
                                        "group-budgets=9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9:9",
                                        "oracle=heads,selection=previous",
                                        "pins=0.5,oracle=heads"};
    for (uint32_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(PARSE("-m", "x", "-f", "a", "-b", "512", "--sinks", "8", "--variant", wrong[i]),
                         -EINVAL);
        assert_non_null(strstr(err.text, "--variant"));
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sets_are_exact),
        cmocka_unit_test(test_sets_are_the_retrievers),
        cmocka_unit_test(test_oracles_are_the_best_of_all_sets),
        cmocka_unit_test(test_p10_is_the_tenth_part),
        cmocka_unit_test(test_overlap_and_loading_are_counted),
        cmocka_unit_test(test_distances_are_exact),
        cmocka_unit_test(test_tasks_are_repeatable),
        cmocka_unit_test(test_passages_are_counted),
        cmocka_unit_test(test_lists_score_by_their_order),
        cmocka_unit_test(test_distinct_ngrams),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_variants),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
