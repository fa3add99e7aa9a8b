/* The retriever without its sockets: what is selected, against a plain reference; differences; refusals. */
#include "tests/unit/retriever_reference.h"

#include <errno.h>

static const struct rig_options plain = {
    .groups = 2, .trained_context = 1 << 20, .rope_dims = 16, .rms_eps = 1e-5f};

/* ---- sets against the reference ---- */

struct shape {
    uint32_t budget, sinks, window;
};

static uint32_t limit_of(const struct shape *s, uint32_t n)
{
    uint32_t limit = n - 1 > s->window ? n - 1 - s->window : 0;
    return limit > s->sinks ? limit : s->sinks;
}

/* Compares one list; returns how many positions differ. With `exact` none may; else only such whose weight is
 * within float32's reach of the bound. */
static uint32_t check_list(const struct store *s, uint32_t l, const double *w, const struct shape *shape,
                           uint32_t n, bool exact)
{
    uint32_t limit = limit_of(shape, n), k = shape->budget - shape->sinks - shape->window - 1, differ = 0;
    uint32_t room = limit > shape->sinks && shape->sinks < n ? limit - shape->sinks : 0;
    bool *in = mem_alloc((size_t)n + 1, sizeof *in);
    double least = ref_pick(w, shape->sinks < n ? shape->sinks : n, limit < n ? limit : n, k, in);
    assert_int_equal(s->count[l], k < room ? k : room);
    for (uint32_t i = 0; i < s->count[l]; i++) {
        uint32_t p = s->at[l][i];
        assert_true(p >= shape->sinks && p < limit);
        if (in[p])
            continue;
        differ++;
        if (exact || fabs(w[p] - least) > 2e-3 * least)
            fail_msg("position %u of %u chosen, weight %.9g, least of the reference %.9g", p, n, w[p], least);
    }
    mem_free(&in);
    return differ;
}

static double ref_mass(const double *w, uint32_t n, const struct store *s, uint32_t l,
                       const struct shape *shape)
{
    double all = 0, kept = 0;
    uint32_t limit = limit_of(shape, n);
    for (uint32_t p = 0; p < n; p++) {
        all += w[p];
        kept += p < shape->sinks || p >= limit ? w[p] : 0;
    }
    for (uint32_t i = 0; i < s->count[l]; i++)
        kept += w[s->at[l][i]];
    return kept / all;
}

/* Runs n tokens, checks all lists and the mass of the last. Returns how many positions differ. */
static uint32_t check_sets(const struct rig *r, struct rig_selector o, const struct shape *shape,
                           uint32_t below, uint32_t n, double factor, bool exact)
{
    struct selector *s = rig_selector(r, o);
    struct selector_result result = {0};
    struct store store = {0};
    uint32_t *tokens = mem_alloc(n, sizeof *tokens), differ = 0, groups = head_config(r->head)->groups;
    double *w = mem_alloc((size_t)n * RIG_KV_HEADS, sizeof *w), mass = 0;
    rig_tokens(tokens, n, below, 3);
    rig_open(s, 1, n, shape->budget, shape->sinks, shape->window);
    for (uint32_t at = 0; at < n; at += 1000)
        rig_step(s, 1, at, tokens, at, at + 1000 < n ? at + 1000 : n, at + 1000 >= n, &result);
    assert_int_equal(result.entry_count, 1);
    assert_int_equal(result.entries[0].position, n - 1);
    assert_int_equal(result.entries[0].limit, limit_of(shape, n));
    assert_int_equal(result.entries[0].index, 9);
    store_take(&store, &result, 0);
    for (uint32_t g = 0; g < groups; g++) {
        ref_weights(r, g, o.pool, factor, tokens, n, w);
        for (uint32_t h = 0; h < RIG_KV_HEADS; h++) {
            uint32_t l = g * RIG_KV_HEADS + h;
            differ += check_list(&store, l, w + (size_t)h * n, shape, n, exact);
            mass += ref_mass(w + (size_t)h * n, n, &store, l, shape);
        }
    }
    mass /= groups * RIG_KV_HEADS;
    if (fabs(mass - (double)result.entries[0].mass) > 1e-3 * mass)
        fail_msg("mass: found %g, expected %g", (double)result.entries[0].mass, mass);
    store_free(&store);
    selector_result_free(&result);
    mem_free(&tokens);
    mem_free(&w);
    selector_free(&s);
    return differ;
}

static float plus_minus(const struct tiny_model *m, const char *name, uint32_t row, uint32_t col)
{
    uint32_t state = row * 7919u + col * 104729u + 1;
    (void)m;
    if (strcmp(name, "token_embd.weight") != 0)
        return 1;
    tiny_random(&state);
    return tiny_random(&state) >> 12 & 1 ? 1 : -1;
}

/* Small integers, nothing in the two dimensions that are rotated: every score is exact in any order. */
static float integers(uint32_t group, char which, uint32_t row, uint32_t col)
{
    uint32_t state = (group * 2 + (which == 'k')) * 15485863u + row * 32452843u + col * 49979687u;
    tiny_random(&state);
    tiny_random(&state);
    return row % RIG_HEAD_DIM < 2 ? 0 : (float)(tiny_random(&state) >> 9 & 1) * 0.25f;
}

static void equal_weights_go_to_the_lower_position(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{40, 4, 8}, {100, 0, 0}, {61, 1, 59}};
    static const uint32_t lengths[] = {70, 200, 256, 400, 640};
    struct rig_options o = {.groups = 2,
                            .trained_context = 4096,
                            .rope_dims = 2,
                            .rms_eps = 1e-30f,
                            .weight = plus_minus,
                            .projection = integers};
    struct rig *r = rig_make(&o);
    for (int pool = HEAD_POOL_MAX; pool <= HEAD_POOL_MEAN; pool++)
        for (unsigned i = 0; i < sizeof shapes / sizeof *shapes; i++)
            for (unsigned j = 0; j < sizeof lengths / sizeof *lengths; j++)
                check_sets(r, (struct rig_selector){.pool = (enum head_pool)pool, .context = 4096},
                           &shapes[i], 6, lengths[j], 1, true);
    rig_free(&r);
}

static void sets_are_those_of_the_reference(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{64, 4, 16}, {200, 0, 0}, {33, 16, 16}, {8, 3, 1}};
    static const uint32_t lengths[] = {1, 2, 5, 20, 21, 22, 255, 256, 257, 700};
    for (int halves = 0; halves < 2; halves++) {
        struct rig_options o = plain;
        o.halves = halves;
        struct rig *r = rig_make(&o);
        uint32_t differ = 0;
        for (int pool = HEAD_POOL_MAX; pool <= HEAD_POOL_MEAN; pool++)
            for (int isa = COMPUTE_ISA_AUTO; isa <= COMPUTE_ISA_REFERENCE; isa++)
                for (unsigned i = 0; i < sizeof shapes / sizeof *shapes; i++)
                    for (unsigned j = 0; j < sizeof lengths / sizeof *lengths; j++)
                        differ += check_sets(r,
                                             (struct rig_selector){.pool = (enum head_pool)pool,
                                                                   .context = 1000,
                                                                   .isa = (enum compute_isa)isa},
                                             &shapes[i], RIG_VOCAB, lengths[j], 1, false);
        assert_in_range(differ, 0, 60); /* of about 70,000 that were chosen */
        rig_free(&r);
    }
}

/* Views of the tokens before: at the sequence's begin, across tiles, with one view, with more. */
static void a_head_with_context_reads_the_tokens_before(void **state)
{
    (void)state;
    static const struct shape shape = {64, 4, 16};
    static const uint32_t lengths[] = {1, 2, 4, 5, 6, 22, 255, 256, 257, 258, 700};
    static const struct {
        uint32_t views, taps;
    } kinds[] = {{1, 5}, {2, 1}, {2, 3}, {3, 5}};
    for (unsigned k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        struct rig_options o = plain;
        o.views = kinds[k].views;
        o.taps = kinds[k].taps;
        struct rig *r = rig_make(&o);
        uint32_t differ = 0;
        for (unsigned j = 0; j < sizeof lengths / sizeof *lengths; j++)
            differ += check_sets(r, (struct rig_selector){.context = 1000}, &shape, RIG_VOCAB, lengths[j], 1,
                                 false);
        assert_in_range(differ, 0, 6); /* of about 1500 that were chosen */
        rig_free(&r);
    }
}

static void a_stretched_head_rotates_by_yarn(void **state)
{
    (void)state;
    static const struct shape shape = {128, 4, 64};
    static const struct {
        uint32_t context, length;
        double factor;
    } cases[] = {{2048, 2047, 1}, {2048, 2048, 1}, {2049, 2049, 2}, {8192, 2047, 4},
                 {8192, 2048, 4}, {8192, 2049, 4}, {8192, 8192, 4}};
    struct rig_options o = plain;
    o.trained_context = 2048;
    o.groups = 1;
    struct rig *r = rig_make(&o);
    uint32_t differ = 0;
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
        differ += check_sets(r, (struct rig_selector){.pool = HEAD_POOL_MAX, .context = cases[i].context},
                             &shape, RIG_VOCAB, cases[i].length, cases[i].factor, false);
    assert_in_range(differ, 0, 4);
    struct selector *trained = rig_selector(r, (struct rig_selector){.context = 2048});
    struct selector *stretched = rig_selector(r, (struct rig_selector){.context = 8192});
    struct selector *pooled = rig_selector(r, (struct rig_selector){.context = 2048, .pool = HEAD_POOL_MEAN});
    assert_int_equal(selector_rope(trained)->scaling, MODEL_ROPE_SCALING_NONE);
    assert_int_equal(selector_rope(stretched)->scaling, MODEL_ROPE_SCALING_YARN);
    assert_true(selector_rope(stretched)->factor == 4.0f);
    assert_true(hash_equal(selector_fingerprint(trained), head_fingerprint(r->head)));
    assert_false(hash_equal(selector_fingerprint(stretched), head_fingerprint(r->head)));
    assert_false(hash_equal(selector_fingerprint(pooled), head_fingerprint(r->head)));
    selector_free(&trained);
    selector_free(&stretched);
    selector_free(&pooled);
    rig_free(&r);
}

/* Rounded keys give other sets, so another identity; what `auto` means has that of its kind. */
static void the_kind_of_keys_is_in_the_fingerprint(void **state)
{
    (void)state;
    struct rig *r = rig_make(&plain);
    struct hash128 of[3];
    for (int keys = COMPUTE_KEYS_AUTO; keys <= COMPUTE_KEYS_INT8; keys++) {
        struct selector *s =
            rig_selector(r, (struct rig_selector){.context = 128, .keys = (enum compute_keys)keys});
        assert_true(selector_keys_int8(s) == (keys == COMPUTE_KEYS_INT8));
        of[keys] = selector_fingerprint(s);
        selector_free(&s);
    }
    assert_true(hash_equal(of[COMPUTE_KEYS_AUTO], of[COMPUTE_KEYS_F16]));
    assert_false(hash_equal(of[COMPUTE_KEYS_INT8], of[COMPUTE_KEYS_F16]));
    rig_free(&r);
}

static void a_large_budget_selects_all(void **state)
{
    (void)state;
    static const struct shape shapes[] = {{300, 4, 64}, {1000, 4, 64}, {4000000000u, 0, 0}};
    struct rig *r = rig_make(&plain);
    uint32_t tokens[300];
    rig_tokens(tokens, 300, RIG_VOCAB, 8);
    for (unsigned i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        struct selector *s = rig_selector(r, (struct rig_selector){.context = 300});
        struct selector_result result = {0};
        struct store store = {0};
        rig_open(s, 1, 300, shapes[i].budget, shapes[i].sinks, shapes[i].window);
        for (uint32_t n = 1; n <= 300; n++) {
            rig_step(s, 1, n, tokens, n - 1, n, true, &result);
            store_take(&store, &result, 0);
            uint32_t limit = limit_of(&shapes[i], n), first = shapes[i].sinks,
                     room = limit < n ? limit - first : 0;
            for (uint32_t l = 0; l < 2 * RIG_KV_HEADS; l++) {
                assert_int_equal(store.count[l], room);
                for (uint32_t p = 0; p < room; p++)
                    assert_int_equal(store.at[l][p], first + p);
            }
            assert_true(fabsf(result.entries[0].mass - 1) < 1e-5f);
        }
        store_free(&store);
        selector_result_free(&result);
        selector_free(&s);
    }
    rig_free(&r);
}

/* ---- differences ---- */

static void differences_add_up_to_the_set(void **state)
{
    (void)state;
    enum { STEPS = 300, PROMPT = 150 };
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = 512});
    struct selector *whole = rig_selector(r, (struct rig_selector){.context = 512});
    struct selector_result result = {0}, expected = {0};
    struct store store = {0}, right = {0};
    uint32_t tokens[PROMPT + STEPS], differences = 0, selected = 0, lists = 2 * RIG_KV_HEADS;
    rig_tokens(tokens, PROMPT + STEPS, RIG_VOCAB, 21);
    rig_open(s, 7, 512, 60, 4, 16);
    rig_open(whole, 7, 512, 60, 4, 16);
    rig_step(s, 7, UINT32_MAX - 100, tokens, 0, PROMPT, false, &result);
    rig_step(whole, 7, UINT32_MAX - 100, tokens, 0, PROMPT, false, &expected);
    assert_int_equal(result.entry_count, 0);
    for (uint32_t i = 0; i < STEPS; i++) {
        uint32_t step = UINT32_MAX - 99 + i, n = PROMPT + i + 1; /* steps wrap around on the way */
        bool select = i % 7 != 3;
        rig_step(s, 7, step, tokens, n - 1, n, select, &result);
        selector_forget_sent(whole);
        rig_step(whole, 7, step, tokens, n - 1, n, select, &expected);
        assert_int_equal(result.entry_count, select);
        if (!select)
            continue;
        selected++;
        differences += result.entries[0].base_step != step;
        store_take(&store, &result, 0);
        store_take(&right, &expected, 0);
        assert_true(result.entries[0].mass == expected.entries[0].mass);
        for (uint32_t l = 0; l < lists; l++) {
            assert_int_equal(store.count[l], right.count[l]);
            assert_memory_equal(store.at[l], right.at[l], store.count[l] * sizeof(uint32_t));
        }
    }
    assert_int_equal(differences, selected - 1); /* all but the first */
    struct selector_stats stats;
    selector_stats(s, &stats);
    assert_int_equal(stats.tokens, PROMPT + STEPS);
    assert_int_equal(stats.selections, differences + 1);
    store_free(&store);
    store_free(&right);
    selector_result_free(&result);
    selector_result_free(&expected);
    selector_free(&s);
    selector_free(&whole);
    rig_free(&r);
}

static void the_last_set_is_repeated_whole(void **state)
{
    (void)state;
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = 512});
    struct selector_result result = {0}, again = {0};
    struct store store = {0}, late = {0};
    uint32_t tokens[200];
    rig_tokens(tokens, 200, RIG_VOCAB, 4);
    rig_open(s, 7, 512, 60, 4, 16);
    assert_int_equal(selector_repeat(s, 8, 1, &again), -ENOENT);
    assert_int_equal(selector_repeat(s, 7, 1, &again), -EAGAIN);
    rig_step(s, 7, 10, tokens, 0, 100, true, &result);
    store_take(&store, &result, 0);
    rig_step(s, 7, 11, tokens, 100, 101, true, &result);
    assert_int_equal(result.entries[0].base_step, 10);
    store_take(&store, &result, 0);
    assert_int_equal(selector_repeat(s, 7, 11, &again), 0);
    assert_int_equal(again.step, 11);
    assert_int_equal(again.entries[0].base_step, 11);
    assert_int_equal(again.entries[0].position, 100);
    assert_true(again.entries[0].mass == result.entries[0].mass);
    store_take(&late, &again, 0);
    for (uint32_t l = 0; l < 2 * RIG_KV_HEADS; l++)
        assert_memory_equal(store.at[l], late.at[l], store.count[l] * sizeof(uint32_t));
    rig_step(s, 7, 12, tokens, 101, 102, true,
             &result); /* the repeated set is the base of the next difference */
    assert_int_equal(result.entries[0].base_step, 11);
    store_take(&late, &result, 0);
    assert_int_equal(selector_repeat(s, 7, 13, &again), -EAGAIN); /* asked for before it is made */
    assert_int_equal(again.entry_count, 0);
    rig_step(s, 7, 13, tokens, 102, 103, true, &result);
    assert_int_equal(result.entries[0].base_step, 13);
    selector_forget_sent_of(s, 7);
    selector_forget_sent_of(s, 99);
    rig_step(s, 7, 14, tokens, 103, 104, true, &result);
    assert_int_equal(result.entries[0].base_step, 14);
    store_free(&store);
    store_free(&late);
    selector_result_free(&result);
    selector_result_free(&again);
    selector_free(&s);
    rig_free(&r);
}

/* ---- the same bits, however it is called ---- */

enum { MANY = 5 };
static const uint32_t many_lengths[MANY] = {300, 1, 777, 256, 64};

/* All sequences together, in chunks of `chunk` tokens, then one step for all; results in order. */
static void run_many(const struct rig *r, int threads, uint32_t chunk, uint32_t sequences,
                     struct selector_result *result)
{
    struct selector *s = rig_selector(r, (struct rig_selector){.context = 1024, .threads = threads});
    static uint32_t tokens[MANY][1024], all[MANY * 1024];
    uint32_t done[MANY] = {0}, step = 0, left = 1;
    for (uint32_t i = 0; i < sequences; i++) {
        rig_tokens(tokens[i], 1024, RIG_VOCAB, 100 + i);
        rig_open(s, 1 + i, 1024, 50 + 10 * i, 4, 16);
    }
    while (left) {
        struct msg_step_entry entries[MANY];
        struct msg_step msg = {.entries = entries, .tokens = {.at = all}};
        left = 0;
        for (uint32_t i = 0; i < sequences; i++) {
            uint32_t n = many_lengths[i] - 1 - done[i] < chunk ? many_lengths[i] - 1 - done[i] : chunk;
            if (n == 0)
                continue;
            memcpy(all + msg.tokens.count, tokens[i] + done[i], n * sizeof *all);
            entries[msg.entry_count++] = (struct msg_step_entry){1 + i, i, done[i], n, 0};
            msg.tokens.count += n;
            done[i] += n;
            left |= done[i] < many_lengths[i] - 1;
        }
        selector_step(s, step++, &msg, result);
        assert_int_equal(result->refusal_count, 0);
    }
    struct msg_step_entry entries[MANY];
    for (uint32_t i = 0; i < sequences; i++) {
        all[i] = tokens[i][done[i]];
        entries[i] = (struct msg_step_entry){1 + i, i, done[i], 1, STEP_ENTRY_SELECT};
    }
    struct msg_step msg = {entries, sequences, {all, sequences}, {0}, 0};
    selector_step(s, 5000, &msg, result);
    assert_int_equal(result->entry_count, sequences);
    selector_free(&s);
}

static void must_be_same(const struct selector_result *a, uint32_t i, const struct selector_result *b,
                         uint32_t j)
{
    uint32_t lists = a->groups * a->heads;
    size_t bytes = (a->first[i + 1] - a->first[i]) * sizeof *a->positions;
    assert_memory_equal(&a->entries[i].mass, &b->entries[j].mass, sizeof(float));
    assert_int_equal(a->first[i + 1] - a->first[i], b->first[j + 1] - b->first[j]);
    assert_memory_equal(a->counts + (size_t)i * lists * 2, b->counts + (size_t)j * lists * 2, lists * 8);
    if (bytes)
        assert_memory_equal(a->positions + a->first[i], b->positions + b->first[j], bytes);
}

static void check_company(const struct rig_options *o)
{
    struct rig *r = rig_make(o);
    struct selector_result first = {0}, other = {0};
    run_many(r, 1, 256, MANY, &first);
    static const uint32_t chunks[] = {1, 7, 256, 300, 800};
    for (unsigned i = 0; i < sizeof chunks / sizeof *chunks; i++)
        for (int threads = 1; threads <= 3; threads++) {
            if (chunks[i] == 1 && threads > 1)
                continue;
            run_many(r, threads, chunks[i], MANY, &other);
            for (uint32_t e = 0; e < MANY; e++)
                must_be_same(&first, e, &other, e);
        }
    run_many(r, 3, 100, 1, &other); /* fewer items than threads: the other way through the ranking */
    must_be_same(&first, 0, &other, 0);
    for (uint32_t i = 0; i < MANY; i++) { /* each alone */
        struct selector *s = rig_selector(r, (struct rig_selector){.context = 1024, .threads = 2});
        uint32_t tokens[1024], n = many_lengths[i];
        rig_tokens(tokens, 1024, RIG_VOCAB, 100 + i);
        rig_open(s, 1, 1024, 50 + 10 * i, 4, 16);
        rig_step(s, 1, 0, tokens, 0, n, true, &other);
        must_be_same(&first, i, &other, 0);
        selector_free(&s);
    }
    selector_result_free(&first);
    selector_result_free(&other);
    rig_free(&r);
}

static void company_chunks_and_threads_change_nothing(void **state)
{
    (void)state;
    struct rig_options context = plain;
    context.views = 3;
    context.taps = 5;
    check_company(&plain);
    check_company(&context);
}

/* ---- refusals ---- */

static void must_refuse_open(struct selector *s, struct msg_open open, int code, const char *text)
{
    struct err err = {0};
    int rc = selector_open(s, &open, &err);
    if (rc != code || !strstr(err.text, text))
        fail_msg("found %d: %s, expected %d with '%s'", rc, err.text, code, text);
}

static void bad_opens_are_refused(void **state)
{
    (void)state;
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = 1 << 20});
    must_refuse_open(s, (struct msg_open){.sequence = 0, .capacity = 10}, -EINVAL, "id");
    must_refuse_open(s, (struct msg_open){.sequence = 1, .capacity = (1 << 20) + 1}, -E2BIG, "1048577");
    must_refuse_open(s,
                     (struct msg_open){.sequence = 1, .capacity = 10, .budget = 68, .sinks = 4, .window = 64},
                     -EINVAL, "68");
    must_refuse_open(
        s,
        (struct msg_open){
            .sequence = 1, .capacity = 10, .budget = 68, .sinks = UINT32_MAX, .window = UINT32_MAX},
        -EINVAL, "budget");
    must_refuse_open(s, (struct msg_open){.sequence = 1, .capacity = 1 << 20, .budget = UINT32_MAX}, 0, "");
    must_refuse_open(s, (struct msg_open){.sequence = 1, .capacity = 10}, -EEXIST, "open");
    for (uint64_t i = 2; i <= 8; i++)
        must_refuse_open(s, (struct msg_open){.sequence = i, .capacity = 10}, 0, "");
    must_refuse_open(s, (struct msg_open){.sequence = 9, .capacity = 10}, -ENOSPC, "8 open");
    assert_int_equal(selector_close(s, 9), -ENOENT);
    assert_int_equal(selector_close(s, 8), 0);
    must_refuse_open(s, (struct msg_open){.sequence = 9, .capacity = 10}, 0, "");
    selector_free(&s);
    rig_free(&r);
}

static void bad_entries_change_nothing(void **state)
{
    (void)state;
    static const struct {
        uint64_t sequence;
        uint32_t position, count, flags, token;
        int code;
        const char *text;
    } bad[] = {
        {99, 20, 1, 0, 0, -ENOENT, "99"},
        {0, 20, 1, 0, 0, -ENOENT, "sequence 0"},
        {1, 19, 1, 0, 0, -EINVAL, "found 19, expected the next, 20"},
        {1, 21, 1, 0, 0, -EINVAL, "found 21, expected the next, 20"},
        {1, 20, 21, 0, 0, -E2BIG, "expected 1 to 20"},
        {1, 20, 3, 0, RIG_VOCAB, -EINVAL, "position 22: found 64"},
        {2, 0, 1, STEP_ENTRY_SELECT, 0, -EINVAL, "budget 0"},
    };
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = 64});
    struct selector *clean = rig_selector(r, (struct rig_selector){.context = 64});
    struct selector_result result = {0}, expected = {0};
    uint32_t tokens[64];
    rig_tokens(tokens, 64, RIG_VOCAB, 1);
    rig_open(s, 1, 40, 16, 2, 4);
    rig_open(s, 2, 40, 0, 0, 0);
    rig_open(clean, 1, 40, 16, 2, 4);
    rig_step(s, 1, 0, tokens, 0, 20, true, &result);
    rig_step(clean, 1, 0, tokens, 0, 20, true, &expected);
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint32_t given[64] = {0};
        given[bad[i].count - 1] = bad[i].token;
        struct msg_step_entry entry = {bad[i].sequence, 0, bad[i].position, bad[i].count, bad[i].flags};
        struct msg_step msg = {&entry, 1, {given, bad[i].count}, {0}, 0};
        selector_step(s, 1 + i, &msg, &result);
        assert_int_equal(result.entry_count, 0);
        assert_int_equal(result.refusal_count, 1);
        assert_int_equal(result.refusals[0].sequence, bad[i].sequence);
        if (result.refusals[0].code != bad[i].code || !strstr(result.refusals[0].text, bad[i].text))
            fail_msg("case %u: found %d: %s", i, result.refusals[0].code, result.refusals[0].text);
    }
    /* Bad beside good: the good one is answered; a sequence that is named twice counts once. */
    struct msg_step_entry entries[] = {{77, 0, 0, 2, 0}, {1, 0, 20, 1, STEP_ENTRY_SELECT}, {1, 0, 21, 1, 0}};
    uint32_t given[] = {1, 2, tokens[20], 3};
    struct msg_step msg = {entries, 3, {given, 4}, {0}, 0};
    selector_step(s, 50, &msg, &result);
    assert_int_equal(result.refusal_count, 2);
    assert_non_null(strstr(result.refusals[1].text, "twice"));
    assert_int_equal(result.entry_count, 1);
    rig_step(clean, 1, 50, tokens, 20, 21, true, &expected);
    must_be_same(&result, 0, &expected, 0);
    selector_result_free(&result);
    selector_result_free(&expected);
    selector_free(&s);
    selector_free(&clean);
    rig_free(&r);
}

static float with_a_nan(const struct tiny_model *m, const char *name, uint32_t row, uint32_t col)
{
    (void)m;
    uint32_t state = row * 31 + col * 17 + 5;
    tiny_random(&state);
    bool embedding = strcmp(name, "token_embd.weight") == 0;
    return embedding && row == 13 && col == 2 ? NAN : embedding ? tiny_uniform(&state) : 1;
}

static void weights_that_are_not_finite_are_refused(void **state)
{
    (void)state;
    struct rig_options o = plain;
    o.weight = with_a_nan;
    struct rig *r = rig_make(&o);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = 64});
    struct selector_result result = {0};
    uint32_t given[] = {1, 2, 13, 4, 1, 2, 3, 4};
    struct msg_step_entry entries[] = {{1, 0, 0, 4, STEP_ENTRY_SELECT}, {2, 0, 0, 4, STEP_ENTRY_SELECT}};
    struct msg_step msg = {entries, 2, {given, 8}, {0}, 0};
    rig_open(s, 1, 40, 16, 0, 1);
    rig_open(s, 2, 40, 16, 0, 1);
    selector_step(s, 1, &msg, &result);
    assert_int_equal(result.refusal_count, 1);
    assert_int_equal(result.refusals[0].sequence, 1);
    assert_int_equal(result.refusals[0].code, -EDOM);
    assert_int_equal(result.entry_count, 1);
    assert_int_equal(result.entries[0].sequence, 2);
    selector_result_free(&result);
    selector_free(&s);
    rig_free(&r);
}

/* ---- results and life ---- */

static void large_results_are_sent_in_parts(void **state)
{
    (void)state;
    struct rig *r = rig_make(&plain);
    struct selector_result result = {0};
    run_many(r, 1, 256, MANY, &result);
    static const size_t sizes[] = {1, 700, 1500, 1 << 20};
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint32_t at = 0, parts = 0;
        while (at < result.entry_count) {
            struct msg_topk topk;
            uint32_t next = selector_result_part(&result, at, sizes[i], &topk), sum = 0;
            assert_int_equal(topk.entry_count, next - at);
            assert_ptr_equal(topk.entries, result.entries + at);
            assert_int_equal(topk.counts.count, topk.entry_count * topk.groups * topk.selection_heads * 2);
            for (uint32_t c = 0; c < topk.counts.count; c++)
                sum += topk.counts.at[c];
            assert_int_equal(sum, topk.positions.count);
            assert_true(topk.entry_count == 1 || (topk.counts.count + sum) * 4 <= sizes[i]);
            at = next;
            parts++;
        }
        assert_in_range(parts, i == 3 ? 1 : 2, i == 3 ? 1 : MANY);
    }
    selector_result_free(&result);
    selector_result_free(&result);
    rig_free(&r);
}

static void closing_gives_everything_back(void **state)
{
    (void)state;
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = 1024, .threads = 2});
    struct selector_result result = {0};
    struct selector_stats stats;
    uint32_t tokens[600];
    rig_tokens(tokens, 600, RIG_VOCAB, 1);
    for (uint64_t i = 1; i <= 200; i++) {
        rig_open(s, i, 1024, 64, 4, 16);
        rig_step(s, i, (uint32_t)i, tokens, 0, (uint32_t)(i * 3), i % 2, &result);
        selector_stats(s, &stats);
        assert_int_equal(stats.key_bytes, (i * 3 + 255) / 256 * 256 * 2 * RIG_KV_ROWS * 2);
        if (i % 3)
            assert_int_equal(selector_close(s, i), 0);
        else
            selector_close_all(s);
        selector_stats(s, &stats);
        assert_int_equal(stats.sequences, 0);
        assert_int_equal(stats.key_bytes, 0);
    }
    selector_result_free(&result);
    selector_free(&s);
    selector_free(&s);
    rig_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equal_weights_go_to_the_lower_position),
        cmocka_unit_test(sets_are_those_of_the_reference),
        cmocka_unit_test(a_head_with_context_reads_the_tokens_before),
        cmocka_unit_test(a_stretched_head_rotates_by_yarn),
        cmocka_unit_test(the_kind_of_keys_is_in_the_fingerprint),
        cmocka_unit_test(a_large_budget_selects_all),
        cmocka_unit_test(differences_add_up_to_the_set),
        cmocka_unit_test(the_last_set_is_repeated_whole),
        cmocka_unit_test(company_chunks_and_threads_change_nothing),
        cmocka_unit_test(bad_opens_are_refused),
        cmocka_unit_test(bad_entries_change_nothing),
        cmocka_unit_test(weights_that_are_not_finite_are_refused),
        cmocka_unit_test(large_results_are_sent_in_parts),
        cmocka_unit_test(closing_gives_everything_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
