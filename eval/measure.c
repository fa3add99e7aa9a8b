/* Figures over texts: attention mass beside its oracles, then consecutive positions. Owner: main's thread. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "eval/look.h"
#include "eval/session.h"

enum { LEAST = 32 }; /* positions past `from` that make a text worth looking at */

struct measure {
    struct session *session;
    struct report_row *rows;   /* [context][head][budget] */
    struct mass **masses;      /* the same */
    struct chooser **choosers; /* [heads] */
    uint32_t lanes;            /* heads * budgets */
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
    uint32_t fed; /* tokens that the choosers have */
};

static void take(void *arg, const struct look *look)
{
    struct taker *t = arg;
    struct measure *m = t->measure;
    struct session *s = m->session;
    const struct eval_options *o = s->options;
    for (uint32_t h = 0; h < s->head_count; h++)
        chooser_feed(m->choosers[h], m->text->tokens.ids + t->fed, look->position + 1 - t->fed, true);
    t->fed = look->position + 1;
    for (uint32_t c = 0; c < s->contexts.count; c++) {
        uint32_t from = from_of(s, s->contexts.at[c]), end = s->contexts.at[c];
        if (look->position < from || look->position >= length_at(s, m->text, end))
            continue;
        uint32_t bin = (uint32_t)((uint64_t)(look->position - from) * MASS_BINS / (end - from));
        for (uint32_t i = 0; i < m->lanes; i++) {
            struct choice choice = {session_budget_of(s, i), o->sinks, o->window};
            mass_add(m->masses[c * m->lanes + i], look, m->choosers[session_head_of(s, i)], &choice, bin);
        }
    }
}

static int look_at(struct measure *m, struct err *err)
{
    struct session *s = m->session;
    struct taker taker = {.measure = m};
    uint32_t *positions;
    struct look_text text = {.tokens = m->text->tokens.ids};
    text.position_count = sample(s, m->text, &positions);
    text.positions = positions;
    int r = 0;
    if (text.position_count) {
        struct pages pages;
        text.count = positions[text.position_count - 1] + 1;
        session_say("%s: attention of %" PRIu32 " positions up to %" PRIu32, m->text->name,
                    text.position_count, text.count - 1);
        for (uint32_t h = 0; h < s->head_count; h++)
            chooser_reset(m->choosers[h]);
        pages_init(&pages, s->engine.config, text.count, 0, 1);
        r = look_run(&s->engine, &pages, &text, take, &taker, err);
        pages_free(&pages);
    }
    mem_free(&positions);
    return r;
}

static int measure_masses(struct measure *m, struct err *err)
{
    struct session *s = m->session;
    int r = 0;
    m->choosers = mem_alloc(s->head_count, sizeof *m->choosers);
    for (uint32_t h = 0; h < s->head_count && !r; h++)
        r = session_chooser(s, h, &m->choosers[h], err);
    for (uint32_t t = 0; t < s->text_count && !r; t++) {
        m->text = &s->texts[t];
        r = look_at(m, err);
    }
    for (uint32_t h = 0; h < s->head_count; h++)
        chooser_free(&m->choosers[h]);
    mem_free(&m->choosers);
    return r;
}

/* Consecutive positions of all texts at one context. */
static int follow(struct measure *m, uint32_t c, struct err *err)
{
    struct session *s = m->session;
    uint32_t context = s->contexts.at[c], from = from_of(s, context);
    struct report_row *rows = &m->rows[c * m->lanes];
    struct forced_sums *sums = mem_alloc(m->lanes, sizeof *sums);
    struct session_lanes lanes;
    int r = session_lanes(s, context, false, &lanes, err);
    for (uint32_t t = 0; t < s->text_count && !r; t++) {
        uint32_t count = length_at(s, &s->texts[t], context), end = count - 1;
        if (!count)
            continue;
        if (s->options->steps && s->options->steps < end - from)
            end = from + s->options->steps;
        struct forced_text text = {s->texts[t].tokens.ids, count, from, end};
        session_say("%s: positions %" PRIu32 " to %" PRIu32, s->texts[t].name, from, end - 1);
        if (s->options->no_forced)
            forced_choose_only(&text, lanes.at, m->lanes);
        else
            r = forced_run(&s->engine, &text, lanes.at, m->lanes, sums, err);
        for (uint32_t i = 0; i < m->lanes; i++)
            rows[i].texts++;
    }
    for (uint32_t i = 0; i < m->lanes && !r; i++) {
        rows[i].lane = lane_figures(lanes.at[i]);
        rows[i].forced = sums[i];
    }
    session_lanes_free(&lanes);
    mem_free(&sums);
    return r;
}

static void name_rows(struct measure *m)
{
    struct session *s = m->session;
    for (uint32_t c = 0; c < s->contexts.count; c++)
        for (uint32_t i = 0; i < m->lanes; i++) {
            struct report_row *row = &m->rows[c * m->lanes + i];
            row->head = s->heads[session_head_of(s, i)].name;
            row->budget = session_budget_of(s, i);
            row->context = s->contexts.at[c];
            row->from = from_of(s, row->context);
        }
}

int measure_texts(struct session *s, struct report_row **ret_rows, uint32_t *ret_count, struct err *err)
{
    struct measure m = {.session = s, .lanes = s->head_count * s->options->budgets.count};
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
    if (!r && engine_interrupted)
        r = err_set(err, -ECANCELED, "interrupted");
    uint32_t texts = 0;
    for (uint32_t i = 0; i < count; i++) {
        m.rows[i].mass = mass_figures(m.masses[i]);
        m.rows[i].layers = s->engine.config->layers;
        m.rows[i].heads = s->engine.config->kv_heads;
        m.rows[i].by_head = mem_alloc((size_t)m.rows[i].layers * m.rows[i].heads, sizeof(double));
        mass_by_head(m.masses[i], m.rows[i].by_head);
        texts += m.rows[i].texts;
        mass_free(&m.masses[i]);
    }
    mem_free(&m.masses);
    if (!r && count && !texts)
        r = err_set(err, -EINVAL, "texts: found none with %d tokens past position %" PRIu32 ", see --from",
                    LEAST, m.rows[0].from);
    *ret_rows = m.rows;
    *ret_count = count;
    return r;
}
