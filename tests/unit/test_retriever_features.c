/* Heads that read hidden states of the model: what they pick is what a plain reference picks, whatever the
 * chunks and the batch, on the CPU and on the double of a GPU, wherever the rows lie; and what is no segment
 * of theirs is refused by name. */
#define RIG_DIM 64
#include "tests/unit/retriever_reference.h"

#include <errno.h>
#include <sys/mman.h>

#include "tests/lib/fakegpu.h"
#include "tests/unit/feature_segment.h"

enum { SEQUENCES = 4, POSITIONS = 700, CONTEXT = 1000 };

static const struct rig_options plain = {
    .groups = 2, .trained_context = 4096, .rope_dims = 64, .rms_eps = 1e-5f, .features = 3};

struct text {
    uint32_t tokens[POSITIONS];
    float *hidden; /* [POSITIONS][row], as bf16 holds it */
};

static void text_make(const struct rig *r, struct text *t, uint32_t seed)
{
    size_t count = (size_t)POSITIONS * r->features * RIG_HIDDEN;
    rig_tokens(t->tokens, POSITIONS, RIG_VOCAB, seed);
    t->hidden = mem_alloc(count, sizeof *t->hidden);
    for (size_t i = 0; i < count; i++)
        t->hidden[i] = dtype_bf16_to_f32(dtype_f32_to_bf16(4 * tiny_uniform(&seed)));
}

/* One sequence's tokens [from, to) with their rows. */
static void step(struct selector *s, struct feature_segment *f, const struct text *t, uint64_t id,
                 uint32_t number, uint32_t from, uint32_t to, bool select, struct selector_result *result)
{
    struct msg_step_entry entry = {id, 9, from, to - from, select ? STEP_ENTRY_SELECT : 0};
    uint32_t row = feature_segment_entry(f, &entry, t->hidden);
    struct msg_step msg = {&entry, 1, {t->tokens + from, to - from}, {&row, 1}, ++f->reading};
    selector_step(s, number, &msg, result);
    if (result->refusal_count)
        fail_msg("%s", result->refusals[0].text);
    assert_int_equal(atomic_load(&f->header->read.value), f->reading);
}

/* Whole lists of the last of `to` tokens, all at once from a new sequence. */
static void lists_of(struct selector *s, struct feature_segment *f, const struct text *t, uint32_t to,
                     struct store *ret)
{
    struct selector_result result = {0};
    rig_open(s, 90, POSITIONS, 100, 4, 16);
    for (uint32_t at = 0; at < to; at += FEATURE_CHUNK) {
        uint32_t end = to - at < FEATURE_CHUNK ? to : at + FEATURE_CHUNK;
        step(s, f, t, 90, 1 + at, at, end, end == to, &result);
    }
    store_take(ret, &result, 0);
    assert_int_equal(selector_close(s, 90), 0);
    selector_result_free(&result);
}

static void equal_stores(const struct store *a, const struct store *b)
{
    for (uint32_t l = 0; l < RIG_GROUPS_MAX * RIG_KV_HEADS; l++) {
        assert_int_equal(a->count[l], b->count[l]);
        assert_memory_equal(a->at[l], b->at[l], a->count[l] * sizeof(uint32_t));
    }
}

/* Positions of `found` that the reference would not have picked, of those whose weight is clear of the least
 * one picked. */
static uint32_t wrong_picks(const struct rig *r, const struct store *found, const struct text *t, uint32_t n)
{
    double *weights = mem_alloc((size_t)n * RIG_KV_HEADS, sizeof *weights);
    bool *in = mem_alloc(n, sizeof *in);
    uint32_t wrong = 0, limit = n - 1 > 16 + 4 ? n - 1 - 16 : 4;
    ref_hidden = t->hidden;
    for (uint32_t g = 0; g < 2; g++) {
        ref_weights(r, g, HEAD_POOL_MAX, 1, t->tokens, n, weights);
        for (uint32_t h = 0; h < RIG_KV_HEADS; h++) {
            const struct store *s = found;
            uint32_t l = g * RIG_KV_HEADS + h, k = 100 - 4 - 16 - 1;
            memset(in, 0, n * sizeof *in);
            ref_pick(weights + (size_t)h * n, 4, limit, k, in);
            assert_int_equal(s->count[l], limit - 4 < k ? limit - 4 : k);
            for (uint32_t i = 0; i < s->count[l]; i++)
                wrong += !in[s->at[l][i]];
        }
    }
    mem_free(&weights);
    mem_free(&in);
    return wrong;
}

static void sets_are_the_references(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 22, 255, 256, 257, 258, 600};
    for (int kind = 0; kind < 3; kind++) {
        struct rig_options o = plain;
        o.features = kind ? 2 : 1;
        o.input_norm = kind == 2;
        struct rig *r = rig_make(&o);
        struct selector *s = rig_selector(r, (struct rig_selector){.context = CONTEXT});
        struct feature_segment f;
        struct text t;
        uint32_t wrong = 0;
        text_make(r, &t, 5);
        feature_segment_make(&f, r->head, DTYPE_F32, NULL, NULL);
        feature_segment_give(&f, s);
        for (unsigned i = 0; i < sizeof lengths / sizeof *lengths; i++) {
            struct store found = {0};
            lists_of(s, &f, &t, lengths[i], &found);
            wrong += wrong_picks(r, &found, &t, lengths[i]);
            store_free(&found);
        }
        assert_in_range(wrong, 0, 6); /* of about 1500: weights that float32 cannot tell apart */
        mem_free(&t.hidden);
        selector_free(&s);
        feature_segment_free(&f);
        rig_free(&r);
    }
}

/* Random parts of random sequences, each step; every selection equals that of the sequence alone. */
static void cut(struct selector *s, struct selector *alone, struct feature_segment *f, struct text *texts)
{
    struct msg_step_entry entries[SEQUENCES];
    struct selector_result result = {0};
    uint32_t done[SEQUENCES] = {0}, random = 7, rows[SEQUENCES],
             *tokens = mem_alloc(SEQUENCES * POSITIONS, 4);
    struct store stores[SEQUENCES] = {0};
    for (uint32_t i = 0; i < SEQUENCES; i++)
        rig_open(s, i + 1, POSITIONS, 100, 4, 16);
    for (uint32_t number = 1; number <= 60; number++) {
        uint32_t count = 0, n = 0;
        f->row = 0; /* rows are read when the call returns */
        for (uint32_t i = 0; i < SEQUENCES; i++) {
            uint32_t dice = tiny_random(&random) % 16,
                     take = dice < 3 ? tiny_random(&random) % (FEATURE_CHUNK / SEQUENCES) + 1 : 1;
            if (dice == 15 || done[i] + take > POSITIONS)
                continue;
            entries[count] =
                (struct msg_step_entry){i + 1, i, done[i], take, dice % 4 ? STEP_ENTRY_SELECT : 0};
            memcpy(tokens + n, texts[i].tokens + done[i], take * sizeof *tokens);
            rows[count] = feature_segment_entry(f, &entries[count], texts[i].hidden);
            done[i] += take;
            n += take;
            count++;
        }
        struct msg_step msg = {entries, count, {tokens, n}, {rows, count}, ++f->reading};
        selector_step(s, number, &msg, &result);
        assert_int_equal(result.refusal_count, 0);
        for (uint32_t i = 0; i < result.entry_count; i++)
            store_take(&stores[result.entries[i].sequence - 1], &result, i);
        for (uint32_t i = 0; i < result.entry_count && number % 20 == 0; i++) {
            struct store whole = {0};
            uint32_t q = (uint32_t)result.entries[i].sequence - 1;
            lists_of(alone, f, &texts[q], done[q], &whole);
            equal_stores(&stores[q], &whole);
            store_free(&whole);
        }
    }
    for (uint32_t i = 0; i < SEQUENCES; i++)
        store_free(&stores[i]);
    selector_result_free(&result);
    mem_free(&tokens);
}

static void chunks_and_batches_do_not_matter(const char *device)
{
    struct rig_options o = plain;
    o.input_norm = true;
    o.head_norms = true;
    struct rig *r = rig_make(&o);
    struct rig_selector options = {.context = CONTEXT, .device = device};
    struct selector *s = rig_selector(r, options), *alone = rig_selector(r, options);
    struct feature_segment f;
    struct text texts[SEQUENCES];
    feature_segment_make(&f, r->head, device ? DTYPE_BF16 : DTYPE_F32, NULL, NULL);
    feature_segment_give(&f, s);
    feature_segment_give(&f, alone);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        text_make(r, &texts[i], 20 + i);
    cut(s, alone, &f, texts);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        mem_free(&texts[i].hidden);
    selector_free(&s);
    selector_free(&alone);
    feature_segment_free(&f);
    rig_free(&r);
}

static void chunks_do_not_matter_on_the_cpu(void **state)
{
    (void)state;
    chunks_and_batches_do_not_matter(NULL);
}

static void chunks_do_not_matter_on_a_gpu(void **state)
{
    (void)state;
    fakegpu_use(NULL);
    chunks_and_batches_do_not_matter("cuda:0");
}

/* Decode steps of one shape become a graph; it reads the rows that are named now, and of the segment that is
 * there now. */
static void graphs_read_the_rows_of_their_step(void **state)
{
    (void)state;
    enum { PROMPT = 200, STEPS = 12 };
    fakegpu_use(NULL);
    struct rig *r = rig_make(&plain);
    struct rig_selector options = {.context = CONTEXT, .device = "cuda:0"};
    struct selector *s = rig_selector(r, options), *alone = rig_selector(r, options);
    struct feature_segment f[2];
    struct selector_result result = {0};
    struct store found = {0};
    struct selector_stats stats;
    struct text t;
    text_make(r, &t, 8);
    for (int i = 0; i < 2; i++)
        feature_segment_make(&f[i], r->head, DTYPE_BF16, NULL, NULL);
    feature_segment_give(&f[0], s);
    feature_segment_give(&f[0], alone);
    rig_open(s, 1, POSITIONS, 100, 4, 16);
    step(s, &f[0], &t, 1, 1, 0, PROMPT, false, &result);
    for (uint32_t i = 0; i < STEPS; i++) {
        struct store whole = {0};
        uint32_t n = PROMPT + i + 1, other = i >= STEPS / 2;
        if (i == STEPS / 2) {
            memset(f[0].rows, 0x7f, f[0].header->rows * f[0].header->row_bytes); /* none of it may be read */
            feature_segment_give(&f[1], s);
            feature_segment_give(&f[1], alone);
        }
        step(s, &f[other], &t, 1, 2 + i, n - 1, n, true, &result);
        store_take(&found, &result, 0);
        lists_of(alone, &f[other], &t, n, &whole);
        equal_stores(&found, &whole);
        store_free(&whole);
    }
    selector_stats(s, &stats);
    assert_true(stats.graph_steps >= STEPS / 2);
    store_free(&found);
    selector_result_free(&result);
    mem_free(&t.hidden);
    selector_free(&s);
    selector_free(&alone);
    for (int i = 0; i < 2; i++)
        feature_segment_free(&f[i]);
    rig_free(&r);
}

/* ---- keys that are kept ---- */

static void open_reusing(struct selector *s, uint64_t id, const struct text *t, uint32_t prompt)
{
    struct msg_open open = {.sequence = id,
                            .flags = OPEN_REUSE,
                            .capacity = POSITIONS,
                            .budget = 100,
                            .sinks = 4,
                            .window = 16,
                            .tokens = {t->tokens, prompt}};
    struct err err = {0};
    if (selector_open(s, &open, &err) < 0)
        fail_msg("%s", err.text);
}

/* Tokens [from, to), by steps of at most FEATURE_CHUNK tokens; where the sequence begins with them the first
 * one has no row, wherever it is. A selection of the last. */
static void go_on(struct selector *s, struct feature_segment *f, const struct text *t, uint64_t id,
                  uint32_t from, uint32_t to, bool begins, struct store *ret)
{
    struct selector_result result = {0};
    uint32_t width = f->header->layers * f->header->hidden;
    for (uint32_t at = from; at < to; begins = false) {
        uint32_t n = to - at < FEATURE_CHUNK ? to - at : FEATURE_CHUNK, first = begins ? at : at - 1;
        struct msg_step_entry entry = {id, 9, at, n, at + n == to ? STEP_ENTRY_SELECT : 0};
        uint32_t row = feature_segment_put(f, t->hidden + (size_t)first * width, n - begins);
        struct msg_step msg = {&entry, 1, {t->tokens + at, n}, {&row, 1}, ++f->reading};
        selector_step(s, 1 + at, &msg, &result);
        if (result.refusal_count)
            fail_msg("%s", result.refusals[0].text);
        at += n;
    }
    store_take(ret, &result, 0);
    selector_result_free(&result);
}

/* A text that is `t` up to token `from`. */
static void text_branch(const struct rig *r, struct text *b, const struct text *t, uint32_t from,
                        uint32_t seed)
{
    text_make(r, b, seed);
    memcpy(b->tokens, t->tokens, from * sizeof *b->tokens);
    memcpy(b->hidden, t->hidden, (size_t)from * r->features * RIG_HIDDEN * sizeof *b->hidden);
    b->tokens[from] = (t->tokens[from] + 1) % RIG_VOCAB;
}

/* Sequences that begin behind keys of another one's prompt pick what they pick without. */
static void kept_keys_are_as_good_as_new(const char *device, enum compute_keys keys, bool input_norm)
{
    enum { PROMPT = 330, SHARED = 200 };
    static const struct {
        uint32_t prompt, kept, begin; /* kept: 5 blocks of the same prompt, 3 of the other */
        bool other;
    } cases[] = {{PROMPT, 320, 320, false}, {PROMPT, 320, 128, false}, {PROMPT, 320, 0, false},
                 {321, 320, 320, false},    {320, 256, 256, false},    {500, 320, 320, false},
                 {PROMPT, 192, 192, true},  {193, 192, 192, true},     {PROMPT, 320, 320, true}};
    struct rig_options o = plain;
    o.input_norm = input_norm;
    struct rig *r = rig_make(&o);
    struct rig_selector options = {.context = CONTEXT, .device = device, .kept_bytes = 4 << 20, .keys = keys};
    struct selector *s = rig_selector(r, options);
    options.kept_bytes = 0;
    struct selector *alone = rig_selector(r, options);
    struct feature_segment f;
    struct selector_stats stats;
    struct text t, other;
    struct store first = {0};
    uint64_t reused = 0;
    text_make(r, &t, 5);
    text_branch(r, &other, &t, SHARED, 6);
    feature_segment_make(&f, r->head, device ? DTYPE_BF16 : DTYPE_F32, NULL, NULL);
    feature_segment_give(&f, s);
    feature_segment_give(&f, alone);
    open_reusing(s, 1, &t, PROMPT);
    assert_int_equal(selector_kept(s, 1), 0);
    go_on(s, &f, &t, 1, 0, PROMPT + 60, true, &first); /* past a block's end, which is the answer's */
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct text *x = cases[i].other ? &other : &t;
        struct store found = {0}, whole = {0};
        if (i == 3)
            assert_int_equal(selector_close(s, 1), 0); /* what it made is still there */
        open_reusing(s, 2, x, cases[i].prompt);
        if (selector_kept(s, 2) != cases[i].kept)
            fail_msg("case %u: found %u kept, expected %u", i, selector_kept(s, 2), cases[i].kept);
        go_on(s, &f, x, 2, cases[i].begin, cases[i].prompt, true, &found);
        lists_of(alone, &f, x, cases[i].prompt, &whole);
        equal_stores(&found, &whole);
        go_on(s, &f, x, 2, cases[i].prompt, cases[i].prompt + 9, false, &found);
        store_free(&whole);
        lists_of(alone, &f, x, cases[i].prompt + 9, &whole);
        equal_stores(&found, &whole);
        assert_int_equal(selector_close(s, 2), 0);
        store_free(&found);
        store_free(&whole);
        reused += cases[i].begin;
    }
    selector_stats(s, &stats);
    assert_int_equal(stats.kept_tokens, reused);
    assert_int_equal(stats.key_bytes, 0);
    assert_int_equal(stats.kept.blocks, 5 + 2 + 2); /* 500: two more; the other text's two */
    store_free(&first);
    mem_free(&t.hidden);
    mem_free(&other.hidden);
    selector_free(&s);
    selector_free(&alone);
    feature_segment_free(&f);
    rig_free(&r);
}

static void kept_keys_on_the_cpu(void **state)
{
    (void)state;
    kept_keys_are_as_good_as_new(NULL, COMPUTE_KEYS_F16, false);
    kept_keys_are_as_good_as_new(NULL, COMPUTE_KEYS_F16, true);
    kept_keys_are_as_good_as_new(NULL, COMPUTE_KEYS_INT8, false);
}

static void kept_keys_on_a_gpu(void **state)
{
    (void)state;
    fakegpu_use(NULL);
    kept_keys_are_as_good_as_new("cuda:0", COMPUTE_KEYS_F16, false);
    kept_keys_are_as_good_as_new("cuda:0", COMPUTE_KEYS_F16, true);
    kept_keys_are_as_good_as_new("cuda:0", COMPUTE_KEYS_INT8, false);
    kept_keys_are_as_good_as_new("cuda:0", COMPUTE_KEYS_INT8, true);
}

static void expect_refusal(struct selector *s, const struct msg_step *msg, int code, const char *part);

/* What a sequence begins with is what it was granted, at most; the prompt is the one that OPEN told; rows of
 * another type are not taken for those that were kept. */
static void what_was_not_kept_is_refused(void **state)
{
    (void)state;
    enum { PROMPT = 200 };
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = CONTEXT, .kept_bytes = 1 << 20});
    struct feature_segment f, narrow;
    struct text t;
    struct store found = {0};
    text_make(r, &t, 5);
    feature_segment_make(&f, r->head, DTYPE_F32, NULL, NULL);
    feature_segment_give(&f, s);
    open_reusing(s, 1, &t, PROMPT);
    go_on(s, &f, &t, 1, 0, PROMPT, true, &found);
    open_reusing(s, 2, &t, PROMPT);
    assert_int_equal(selector_kept(s, 2), 192);
    uint32_t row = 0;
    struct msg_step_entry entry = {2, 9, 256, 2, 0};
    struct msg_step msg = {&entry, 1, {t.tokens + 128, 2}, {&row, 1}, ++f.reading};
    expect_refusal(s, &msg, -EINVAL, "position: found 256, expected the next, 0");
    entry.position = 100;
    expect_refusal(s, &msg, -EINVAL, "position: found 100");
    entry.position = 128;
    msg.tokens.at = t.tokens + 129;
    expect_refusal(s, &msg, -EINVAL, "token at position 128: found");
    rig_open(s, 3, POSITIONS, 100, 4, 16); /* did not ask */
    assert_int_equal(selector_kept(s, 3), 0);
    assert_int_equal(selector_kept(s, 99), 0);
    entry.sequence = 3;
    expect_refusal(s, &msg, -EINVAL, "position: found 128");
    selector_close_all(s);
    feature_segment_give(&f, s);
    open_reusing(s, 4, &t, PROMPT);
    assert_int_equal(selector_kept(s, 4), 192); /* another segment of the same kind */
    feature_segment_make(&narrow, r->head, DTYPE_BF16, NULL, NULL);
    feature_segment_give(&narrow, s);
    assert_int_equal(selector_kept(s, 4), 0);
    open_reusing(s, 5, &t, PROMPT);
    assert_int_equal(selector_kept(s, 5), 0);
    store_free(&found);
    mem_free(&t.hidden);
    selector_free(&s);
    feature_segment_free(&f);
    feature_segment_free(&narrow);
    rig_free(&r);
}

/* ---- where rows lie ---- */

static uint32_t common(const struct store *a, const struct store *b, uint32_t *ret_all)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < RIG_GROUPS_MAX * RIG_KV_HEADS; l++) {
        *ret_all += a->count[l];
        for (uint32_t i = 0, j = 0; i < a->count[l] && j < b->count[l];) {
            uint32_t x = a->at[l][i], y = b->at[l][j];
            n += x == y;
            i += x <= y;
            j += y <= x;
        }
    }
    return n;
}

/* bf16 in the segment for the CPU; in the segment and on the card for the card: all read the same. */
static void rows_lie_on_the_host_or_on_the_card(void **state)
{
    (void)state;
    fakegpu_use(NULL);
    const struct gpu_api *api;
    struct err err = {0};
    assert_int_equal(gpu_load(&api, &err), 0);
    struct rig *r = rig_make(&plain);
    struct text t;
    text_make(r, &t, 41);
    struct store found[4] = {0};
    for (int kind = 0; kind < 4; kind++) {
        struct selector *s =
            rig_selector(r, (struct rig_selector){.context = CONTEXT, .device = kind < 2 ? NULL : "cuda:0"});
        struct feature_segment f;
        feature_segment_make(&f, r->head, kind == 0 ? DTYPE_F32 : DTYPE_BF16, kind == 3 ? api : NULL,
                             "cuda:0");
        feature_segment_give(&f, s);
        lists_of(s, &f, &t, 600, &found[kind]);
        selector_free(&s);
        feature_segment_free(&f);
    }
    uint32_t all = 0, same = common(&found[0], &found[2], &all);
    equal_stores(&found[0], &found[1]);
    equal_stores(&found[2], &found[3]);
    if (same < all / 20 * 19) /* products of bf16 */
        fail_msg("found %u of %u positions on the card as on the CPU", same, all);
    for (int i = 0; i < 4; i++)
        store_free(&found[i]);
    mem_free(&t.hidden);
    rig_free(&r);
}

/* ---- what is refused ---- */

static void expect_refusal(struct selector *s, const struct msg_step *msg, int code, const char *part)
{
    struct selector_result result = {0};
    selector_step(s, 1, msg, &result);
    assert_int_equal(result.refusal_count, 1);
    assert_int_equal(result.refusals[0].code, code);
    if (!strstr(result.refusals[0].text, part))
        fail_msg("expected '%s' in: %s", part, result.refusals[0].text);
    selector_result_free(&result);
}

static void steps_without_their_rows_are_refused(void **state)
{
    (void)state;
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = CONTEXT});
    struct selector_result result = {0};
    struct feature_segment f;
    struct text t;
    text_make(r, &t, 3);
    feature_segment_make(&f, r->head, DTYPE_F32, NULL, NULL);
    struct msg_step_entry entry = {1, 9, 0, 5, 0};
    uint32_t row = 0, rows = f.header->rows;
    struct msg_step msg = {&entry, 1, {t.tokens, 5}, {&row, 1}, 1};
    rig_open(s, 1, POSITIONS, 100, 4, 16);
    expect_refusal(s, &msg, -ENOTCONN, "no feature segment");
    feature_segment_give(&f, s);
    msg.features.count = 0;
    expect_refusal(s, &msg, -ENOTCONN, "no rows");
    msg.features.count = 1;
    row = rows - 3; /* four are needed: the first token has none */
    expect_refusal(s, &msg, -EINVAL, "4 rows from");
    row = UINT32_MAX;
    expect_refusal(s, &msg, -EINVAL, "4 rows from");
    assert_int_equal(atomic_load(&f.header->read.value), 1); /* nobody waits for what was refused */
    row = rows - 4;
    msg.reading = 2;
    feature_segment_put(&f, t.hidden, 4);
    selector_step(s, 2, &msg, &result);
    assert_int_equal(result.refusal_count, 0);
    assert_int_equal(atomic_load(&f.header->read.value), 2);
    selector_drop_features(s);
    entry.position = 5;
    expect_refusal(s, &msg, -ENOTCONN, "no feature segment");
    selector_result_free(&result);
    mem_free(&t.hidden);
    selector_free(&s);
    feature_segment_free(&f);
    rig_free(&r);
}

static void expect_no_segment(struct selector *s, int fd, int code, const char *part)
{
    struct selector_peers peers = {FEATURE_DECODER, FEATURE_RETRIEVER};
    struct err err = {0};
    assert_int_equal(selector_take_features(s, fd, &peers, &err), code);
    if (!strstr(err.text, part))
        fail_msg("expected '%s' in: %s", part, err.text);
    assert_int_equal(fcntl(fd, F_GETFD), -1); /* closed whatever it was */
}

static void other_segments_are_refused(void **state)
{
    (void)state;
    static const struct {
        size_t at;
        uint32_t value;
        int code;
        const char *part;
    } spoilt[] = {
        {offsetof(struct features_header, magic), 1, -EPROTO, "magic"},
        {offsetof(struct features_header, version), 9, -EPROTO, "version 9"},
        {offsetof(struct features_header, decoder_epoch), 9, -EPROTO, "decoder epoch: found 9"},
        {offsetof(struct features_header, retriever_epoch), 9, -EPROTO, "retriever epoch: found 9"},
        {offsetof(struct features_header, rows), 0, -EINVAL, "rows: found 0"},
        {offsetof(struct features_header, rows), 1u << 30, -EINVAL, "rows"},
        {offsetof(struct features_header, rows), 600, -EPROTO, "header"},
        {offsetof(struct features_header, type), DTYPE_F16, -EPROTO, "type"},
        {offsetof(struct features_header, form), 2, -EPROTO, "form"},
        {offsetof(struct features_header, layers), 2, -EPROTO, "layers: found 2, expected 3"},
        {offsetof(struct features_header, hidden), 16, -EPROTO, "hidden: found 16, expected 32"},
        {offsetof(struct features_header, layer) + 4, 3, -EPROTO, "layer: found 3, expected 1"},
        {offsetof(struct features_header, row_bytes), 8, -EPROTO, "header"},
        {offsetof(struct features_header, total_bytes), 1u << 20, -EPROTO, "header"},
        {offsetof(struct features_header, checksum), 5, -EPROTO, "checksum"},
    };
    struct rig *r = rig_make(&plain);
    struct selector *s = rig_selector(r, (struct rig_selector){.context = CONTEXT});
    for (unsigned i = 0; i < sizeof spoilt / sizeof *spoilt; i++) {
        struct feature_segment f;
        feature_segment_make(&f, r->head, DTYPE_F32, NULL, NULL);
        memcpy((uint8_t *)f.header + spoilt[i].at, &spoilt[i].value, sizeof spoilt[i].value);
        expect_no_segment(s, feature_segment_fd(&f), spoilt[i].code, spoilt[i].part);
        feature_segment_free(&f);
    }
    /* Shorter than its header says, with a header that is sound. */
    struct feature_segment f;
    feature_segment_make(&f, r->head, DTYPE_F32, NULL, NULL);
    struct segment small;
    assert_int_equal(segment_create("test-small", FEATURES_ROWS_AT, &small, NULL), 0);
    memcpy(small.at, f.header, sizeof *f.header);
    expect_no_segment(s, fcntl(small.fd, F_DUPFD_CLOEXEC, 0), -EINVAL, "length");
    segment_close(&small);
    assert_int_equal(segment_create("test-small", 64, &small, NULL), 0);
    expect_no_segment(s, fcntl(small.fd, F_DUPFD_CLOEXEC, 0), -EINVAL, "length");
    segment_close(&small);
    int loose = memfd_create("test-loose", MFD_CLOEXEC);
    assert_int_equal(ftruncate(loose, (off_t)f.header->total_bytes), 0);
    expect_no_segment(s, loose, -EPERM, "sealed");
    feature_segment_free(&f);
    selector_free(&s);
    rig_free(&r);
}

/* Rows on another card than the retriever's, on a card for the CPU, of a type that kernels do not read. */
static void rows_on_another_gpu_are_refused(void **state)
{
    (void)state;
    fakegpu_use(NULL);
    const struct gpu_api *api;
    assert_int_equal(gpu_load(&api, NULL), 0);
    struct rig *r = rig_make(&plain);
    struct selector *cpu = rig_selector(r, (struct rig_selector){.context = CONTEXT});
    struct selector *gpu = rig_selector(r, (struct rig_selector){.context = CONTEXT, .device = "cuda:0"});
    struct feature_segment f;
    feature_segment_make(&f, r->head, DTYPE_BF16, api, "cuda:1");
    expect_no_segment(cpu, feature_segment_fd(&f), -EXDEV, "expected them on the host");
    expect_no_segment(gpu, feature_segment_fd(&f), -EXDEV, "found rows on GPU");
    feature_segment_free(&f);
    feature_segment_make(&f, r->head, DTYPE_F32, NULL, NULL);
    expect_no_segment(gpu, feature_segment_fd(&f), -EPROTO, "BF16");
    feature_segment_free(&f);
    selector_free(&cpu);
    selector_free(&gpu);
    rig_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sets_are_the_references),
        cmocka_unit_test(chunks_do_not_matter_on_the_cpu),
        cmocka_unit_test(chunks_do_not_matter_on_a_gpu),
        cmocka_unit_test(graphs_read_the_rows_of_their_step),
        cmocka_unit_test(kept_keys_on_the_cpu),
        cmocka_unit_test(kept_keys_on_a_gpu),
        cmocka_unit_test(what_was_not_kept_is_refused),
        cmocka_unit_test(rows_lie_on_the_host_or_on_the_card),
        cmocka_unit_test(steps_without_their_rows_are_refused),
        cmocka_unit_test(other_segments_are_refused),
        cmocka_unit_test(rows_on_another_gpu_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
