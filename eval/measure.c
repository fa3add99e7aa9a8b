/* Figures over texts: attention mass beside its oracles, then consecutive positions. Owner: main's thread. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/pool.h"
#include "eval/look.h"
#include "eval/session.h"

enum { LEAST = 32 }; /* positions past `from` that make a text worth looking at */

struct measure {
    struct session *session;
    struct report_row *rows;   /* [context][way] */
    struct mass **masses;      /* the same */
    struct chooser **choosers; /* [ways], those that are alike the same */
    uint32_t lanes;            /* ways */
    const struct session_text *text;
};

static uint32_t from_of(const struct session *s, uint32_t context)
{
    return s->options->from < context / 2 ? s->options->from : context / 2;
}

/* Tokens of the text that count at this context, or 0 when it is too short for it. */
static uint32_t length_at(const struct session *s, const struct session_text *t, uint32_t context)
{
    uint32_t n = t->tokens.count < context ? (uint32_t)t->tokens.count : context;
    return n > from_of(s, context) + LEAST ? n : 0;
}

static int compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Evenly over what counts at each context; ascending, each once. */
static uint32_t sample(const struct session *s, const struct session_text *t, uint32_t **ret)
{
    uint32_t each = s->options->positions, n = 0, kept = 0;
    uint32_t *at = mem_alloc((size_t)each * s->contexts.count, sizeof *at);
    for (uint32_t c = 0; c < s->contexts.count; c++) {
        uint32_t from = from_of(s, s->contexts.at[c]), end = length_at(s, t, s->contexts.at[c]);
        for (uint32_t i = 0; i < each && end; i++)
            at[n++] = from + (uint32_t)((2ull * i + 1) * (end - from) / (2ull * each));
    }
    if (n)
        qsort(at, n, sizeof *at, compare);
    for (uint32_t i = 0; i < n; i++)
        if (i == 0 || at[i] != at[i - 1])
            at[kept++] = at[i];
    *ret = at;
    return kept;
}

struct taker {
    struct measure *measure;
    const struct look *look;
    uint32_t fed;          /* tokens that the choosers have */
    const float *features; /* rows of taps of the text; NULL: none */
};

/* The first way with the same chooser. */
static uint32_t first_alike(const struct session *s, uint32_t way)
{
    uint32_t first = 0;
    while (!session_alike(s, first, way))
        first++;
    return first;
}

static void feed_way(void *arg, int index, int thread)
{
    const struct taker *t = arg;
    const struct measure *m = t->measure;
    uint32_t way = (uint32_t)index;
    (void)thread;
    size_t width = taps_width(&m->session->engine.taps);
    const float *features = t->features ? t->features + (t->fed ? t->fed - 1 : 0) * width : NULL;
    if (first_alike(m->session, way) == way)
        chooser_feed(m->choosers[way], m->text->tokens.ids + t->fed, t->look->position + 1 - t->fed, features,
                     true);
}

/* Masses of one way, in all contexts that the position counts in. Sets of the token before, those that a
 * prompt's end has a part in and those of several budgets are not there; what oracles attain stands beside
 * every other way. */
static void add_way(void *arg, int index, int thread)
{
    const struct taker *t = arg;
    const struct measure *m = t->measure;
    const struct session *s = m->session;
    uint32_t way = (uint32_t)index, position = t->look->position;
    (void)thread;
    const struct variant *v = s->ways[way].variant;
    if (v->selection != SELECTION_CURRENT || v->pins > 0 || v->oracle || v->group_count)
        return;
    for (uint32_t c = 0; c < s->contexts.count; c++) {
        uint32_t from = from_of(s, s->contexts.at[c]), end = s->contexts.at[c];
        if (position < from || position >= length_at(s, m->text, end))
            continue;
        uint32_t bin = (uint32_t)((uint64_t)(position - from) * MASS_BINS / (end - from));
        mass_add(m->masses[c * m->lanes + way], t->look, m->choosers[way], &s->ways[way].variant->choice,
                 bin);
    }
}

static void take(void *arg, const struct look *look)
{
    struct taker *t = arg;
    const struct measure *m = t->measure;
    struct pool *pool = compute_pool(m->session->engine.compute);
    t->look = look;
    pool_run(pool, (int)m->lanes, feed_way, t);
    t->fed = look->position + 1;
    pool_run(pool, (int)m->lanes, add_way, t);
}

static int look_at(struct measure *m, struct err *err)
{
    struct session *s = m->session;
    struct taker taker = {.measure = m};
    struct pages pages = {0};
    uint32_t *positions;
    struct look_text text = {.tokens = m->text->tokens.ids};
    text.position_count = sample(s, m->text, &positions);
    text.positions = positions;
    int r = 0;
    if (text.position_count) {
        text.count = positions[text.position_count - 1] + 1;
        taker.features = text.features = engine_features_alloc(&s->engine, text.count);
        session_say("%s: attention of %" PRIu32 " positions up to %" PRIu32, m->text->name,
                    text.position_count, text.count - 1);
        for (uint32_t i = 0; i < m->lanes; i++)
            chooser_reset(m->choosers[i]);
        r = engine_pages(&s->engine, &(struct pages_sequence){.positions = text.count}, 1, &pages, err);
        if (!r)
            r = look_run(&s->engine, &pages, &text, take, &taker, err);
        engine_pages_free(&s->engine, &pages);
    }
    mem_free(&text.features);
    mem_free(&positions);
    return r;
}

static int measure_masses(struct measure *m, struct err *err)
{
    struct session *s = m->session;
    int r = 0;
    m->choosers = mem_alloc(m->lanes, sizeof *m->choosers);
    for (uint32_t i = 0; i < m->lanes && !r; i++) {
        uint32_t first = first_alike(s, i);
        m->choosers[i] = m->choosers[first];
        if (first == i)
            r = session_chooser(s, i, &m->choosers[i], err);
    }
    for (uint32_t t = 0; t < s->text_count && !r; t++) {
        m->text = &s->texts[t];
        r = look_at(m, err);
    }
    for (uint32_t i = 0; i < m->lanes; i++)
        if (first_alike(s, i) == i)
            chooser_free(&m->choosers[i]);
    mem_free(&m->choosers);
    return r;
}

/* Texts `at` .. of one batch, behind one another in `texts`; returns how many there are. */
static uint32_t texts_of(const struct session *s, uint32_t context, uint32_t *at, struct forced_text *texts)
{
    uint32_t n = 0, from = from_of(s, context);
    for (; *at < s->text_count && n < s->families; ++*at) {
        const struct session_text *t = &s->texts[*at];
        uint32_t count = length_at(s, t, context), end = count - 1;
        if (!count)
            continue;
        if (s->options->steps && s->options->steps < end - from)
            end = from + s->options->steps;
        session_say("%s: positions %" PRIu32 " to %" PRIu32, t->name, from, end - 1);
        texts[n++] = (struct forced_text){t->tokens.ids, count, from, end};
    }
    return n;
}

/* One batch of texts at one context into its rows. */
static int follow_batch(struct measure *m, const struct forced_text *texts, uint32_t count, uint32_t context,
                        struct report_row *rows, struct err *err)
{
    struct session *s = m->session;
    struct session_lanes_options options = {.families = count, .capacity = context, .loads = true};
    struct forced_sums *sums = mem_alloc(m->lanes, sizeof *sums);
    struct session_lanes lanes;
    int r = session_lanes(s, &options, &lanes, err);
    if (!r && s->options->no_forced)
        forced_choose_only(&s->engine, texts, count, lanes.at, m->lanes);
    else if (!r)
        r = forced_run(&s->engine, texts, count, lanes.at, m->lanes, sums, err);
    if (!r && engine_interrupted)
        r = err_set(err, -ECANCELED, "interrupted");
    /* Of an interrupted one there are the positions before. */
    bool there = lanes.count && lane_counts(lanes.at[0])->lists && (!r || r == -ECANCELED);
    for (uint32_t i = 0; i < lanes.count && there; i++)
        lane_counts_add(&rows[i % m->lanes].counts, lane_counts(lanes.at[i]));
    for (uint32_t i = 0; i < m->lanes && there; i++) {
        forced_sums_add(&rows[i].forced, &sums[i]);
        rows[i].texts += count;
    }
    session_lanes_free(&lanes);
    mem_free(&sums);
    return r;
}

/* Consecutive positions of all texts at one context. */
static int follow(struct measure *m, uint32_t c, struct err *err)
{
    struct session *s = m->session;
    struct report_row *rows = &m->rows[c * m->lanes];
    int r = 0;
    for (uint32_t at = 0; at < s->text_count && !r;) {
        struct forced_text texts[ENGINE_LANES];
        uint32_t count = texts_of(s, s->contexts.at[c], &at, texts);
        r = count ? follow_batch(m, texts, count, s->contexts.at[c], rows, err) : 0;
    }
    return r;
}

static void name_rows(struct measure *m)
{
    struct session *s = m->session;
    for (uint32_t c = 0; c < s->contexts.count; c++)
        for (uint32_t i = 0; i < m->lanes; i++) {
            struct report_row *row = &m->rows[c * m->lanes + i];
            row->head = s->ways[i].name;
            row->budget = s->ways[i].variant->choice.budget;
            row->context = s->contexts.at[c];
            row->from = from_of(s, row->context);
        }
}

int measure_texts(struct session *s, struct report_row **ret_rows, uint32_t *ret_count, struct err *err)
{
    struct measure m = {.session = s, .lanes = s->way_count};
    uint32_t count = s->text_count ? s->contexts.count * m.lanes : 0;
    m.rows = mem_alloc(count, sizeof *m.rows);
    m.masses = mem_alloc(count, sizeof *m.masses);
    for (uint32_t i = 0; i < count; i++)
        m.masses[i] = mass_create(s->engine.config->layers, s->engine.config->kv_heads);
    int r = 0;
    if (count) {
        name_rows(&m);
        r = s->options->no_mass ? 0 : measure_masses(&m, err);
    }
    for (uint32_t c = 0; c < s->contexts.count && count && !r; c++)
        r = follow(&m, c, err);
    uint32_t texts = 0, looked = 0;
    for (uint32_t i = 0; i < count; i++) {
        m.rows[i].lane = lane_figures(&m.rows[i].counts);
        m.rows[i].mass = mass_figures(m.masses[i]);
        m.rows[i].layers = s->engine.config->layers;
        m.rows[i].heads = s->engine.config->kv_heads;
        m.rows[i].by_head = mem_alloc((size_t)m.rows[i].layers * m.rows[i].heads, sizeof(double));
        mass_by_head(m.masses[i], m.rows[i].by_head);
        texts += m.rows[i].texts;
        looked += isfinite(m.rows[i].mass.mean);
        mass_free(&m.masses[i]);
    }
    mem_free(&m.masses);
    if (!r && count && !texts)
        r = err_set(err, -EINVAL, "texts: found none with %d tokens past position %" PRIu32 ", see --from",
                    LEAST, m.rows[0].from);
    for (uint32_t i = 0; i < count && !texts && !looked; i++)
        mem_free(&m.rows[i].by_head);
    *ret_rows = m.rows;
    *ret_count = texts || looked ? count : 0;
    return r;
}
