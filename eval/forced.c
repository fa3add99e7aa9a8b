/* See forced.h. Owner: main's thread. In a step the choosers work side by side, then the lanes, then the
 * model with everything in one batch, then the comparisons. Full attention goes through the same operators
 * as the lanes do, in the same batch, so that what differs is the positions attended. */
#include "eval/forced.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/pool.h"
#include "eval/look.h"

static double log_sum(const float *x, uint32_t n, uint32_t *ret_best)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        best = x[i] > x[best] ? i : best;
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)expf(x[i] - x[best]);
    *ret_best = best;
    return log(sum) + (double)x[best];
}

double forced_loss(const float *logits, uint32_t vocab, uint32_t token)
{
    uint32_t best;
    return log_sum(logits, vocab, &best) - (double)logits[token];
}

void forced_compare(struct forced_sums *s, const float *full, const float *sparse, uint32_t vocab,
                    uint32_t next)
{
    uint32_t best_full, best_sparse;
    double log_full = log_sum(full, vocab, &best_full), log_sparse = log_sum(sparse, vocab, &best_sparse);
    double kl = 0, shift = log_sparse - log_full;
    for (uint32_t i = 0; i < vocab; i++)
        kl += (double)expf(full[i] - (float)log_full) * ((double)full[i] - (double)sparse[i] + shift);
    double loss_full = log_full - (double)full[next], loss_sparse = log_sparse - (double)sparse[next];
    s->positions++;
    s->agreed += best_full == best_sparse;
    s->loss_full += loss_full;
    s->loss_sparse += loss_sparse;
    s->worse += loss_sparse - loss_full;
    s->worse_squares += (loss_sparse - loss_full) * (loss_sparse - loss_full);
    s->kl += kl;
    s->kl_squares += kl * kl;
}

void forced_sums_add(struct forced_sums *to, const struct forced_sums *from)
{
    to->positions += from->positions;
    to->agreed += from->agreed;
    to->loss_full += from->loss_full;
    to->loss_sparse += from->loss_sparse;
    to->worse += from->worse;
    to->worse_squares += from->worse_squares;
    to->kl += from->kl;
    to->kl_squares += from->kl_squares;
}

struct forced_mean forced_mean(double sum, double squares, uint64_t n)
{
    if (n < 2)
        return (struct forced_mean){n ? sum : (double)NAN, (double)NAN};
    double mean = sum / (double)n, variance = (squares - sum * mean) / (double)(n - 1);
    return (struct forced_mean){mean, sqrt(variance > 0 ? variance / (double)n : 0)};
}

/* ---- all texts, side by side --------------------------------------------------------------------------- */

/* A lane of a text, and what it does at the position in work. */
struct runner {
    const struct forced_text *text;
    struct lane *lane;
    const struct attn_list *lists;
    struct forced_sums sums;
    uint32_t full, row; /* rows of logits */
};

/* A chooser, once, though several lanes may take from it. */
struct feeder {
    const struct forced_text *text;
    struct chooser *chooser;
    uint32_t runner; /* the first that takes from it; the only one when it looks at the model */
    bool prime;
};

struct run {
    struct engine *engine;
    const struct forced_text *texts;
    uint32_t text_count, lanes_each, runner_count, feeder_count;
    struct runner *runners; /* [texts][lanes] */
    struct feeder *feeders;
    uint32_t offset;   /* of the position in work from each text's `from` */
    struct pins *pins; /* [texts] what each prompt's end looked at; empty: no lane wants it */
    float **features;  /* [texts] rows of taps of the prompt; NULL: nobody looks */
};

static void side_by_side(struct run *u, uint32_t count, void (*body)(void *arg, int index, int thread))
{
    pool_run(compute_pool(u->engine->compute), (int)count, body, u);
}

static bool at_work(const struct run *u, const struct forced_text *t)
{
    return t->from + u->offset < t->end;
}

/* Oracles ask nobody. */
static void add_feeder(struct run *u, uint32_t runner)
{
    struct lane *lane = u->runners[runner].lane;
    if (lane_knows(lane))
        return;
    uint32_t i = 0;
    while (i < u->feeder_count && u->feeders[i].chooser != lane_chooser(lane))
        i++;
    if (i == u->feeder_count)
        u->feeders[u->feeder_count++] =
            (struct feeder){u->runners[runner].text, lane_chooser(lane), runner, false};
    u->feeders[i].prime |= lane_needs_prime(lane);
}

static void begin_feeder(void *arg, int index, int thread)
{
    const struct run *u = arg;
    const struct feeder *f = &u->feeders[index];
    (void)thread;
    chooser_reset(f->chooser);
    chooser_feed(f->chooser, f->text->tokens, f->text->from, u->features[f->text - u->texts], f->prime);
}

static void begin_lane(void *arg, int index, int thread)
{
    const struct run *u = arg;
    const struct runner *n = &u->runners[index];
    (void)thread;
    lane_restart(n->lane);
    if (u->pins[n->text - u->texts].count && lane_wants_pins(n->lane))
        lane_pin(n->lane, &u->pins[n->text - u->texts]);
    if (lane_needs_prime(n->lane))
        lane_prime(n->lane, n->text->from - 1);
}

static void feed(void *arg, int index, int thread)
{
    const struct run *u = arg;
    const struct feeder *f = &u->feeders[index];
    (void)thread;
    if (!at_work(u, f->text))
        return;
    const float *features = NULL;
    const struct taps *taps = &u->engine->taps;
    if (chooser_looks(f->chooser))
        features = u->offset
                       ? taps_row(taps, u->runners[f->runner].row)
                       : u->features[f->text - u->texts] + (f->text->from - 1) * (size_t)taps_width(taps);
    chooser_feed(f->chooser, f->text->tokens + f->text->from + u->offset, 1, features, true);
}

static void choose(void *arg, int index, int thread)
{
    struct run *u = arg;
    struct runner *n = &u->runners[index];
    (void)thread;
    if (at_work(u, n->text) && !lane_knows(n->lane))
        n->lists = lane_choose(n->lane, n->text->from + u->offset);
}

/* The look at a text's token, and whom to tell. */
struct showing {
    const struct run *run;
    const struct forced_text *text;
    const struct look *look;
};

static void choose_by(void *arg, int index, int thread)
{
    const struct showing *s = arg;
    struct runner *n = &s->run->runners[index];
    (void)thread;
    if (n->text == s->text && lane_knows(n->lane))
        n->lists = lane_choose_by(n->lane, s->look);
}

static void show(void *arg, const struct look *look)
{
    struct showing *s = arg;
    s->look = look;
    pool_run(compute_pool(s->run->engine->compute), (int)s->run->runner_count, choose_by, s);
}

/* The tokens pass through full attention by themselves, texts that oracles choose for; again with all else in
 * `step`, which finds the same KV and leaves the same. */
static int show_oracles(const struct run *u, const struct pages *pages, struct err *err)
{
    int r = 0;
    for (uint32_t t = 0; t < u->text_count && !r; t++) {
        const struct forced_text *text = &u->texts[t];
        uint32_t position = text->from + u->offset;
        bool knows = false;
        for (uint32_t i = 0; i < u->lanes_each; i++)
            knows |= lane_knows(u->runners[t * u->lanes_each + i].lane);
        if (!knows || !at_work(u, text))
            continue;
        struct showing showing = {.run = u, .text = text};
        r = look_run(u->engine, pages,
                     &(struct look_text){.sequence = t,
                                         .tokens = text->tokens,
                                         .first = position,
                                         .count = position + 1,
                                         .positions = &position,
                                         .position_count = 1},
                     show, &showing, err);
    }
    return r;
}

static void compare(void *arg, int index, int thread)
{
    struct run *u = arg;
    struct runner *n = &u->runners[index];
    const struct engine *e = u->engine;
    (void)thread;
    if (at_work(u, n->text))
        forced_compare(&n->sums, engine_logits(e, n->full), engine_logits(e, n->row), e->config->vocab,
                       n->text->tokens[n->text->from + u->offset + 1]);
}

static void begin(struct run *u, struct lane *const *lanes)
{
    u->runner_count = u->text_count * u->lanes_each;
    u->runners = mem_alloc(u->runner_count, sizeof *u->runners);
    u->feeders = mem_alloc(u->runner_count, sizeof *u->feeders);
    for (uint32_t i = 0; i < u->runner_count; i++) {
        const struct forced_text *t = &u->texts[i / u->lanes_each];
        CHECK(t->from >= 1 && t->end < t->count);
        u->runners[i] = (struct runner){.text = t, .lane = lanes[i]};
        add_feeder(u, i);
    }
    u->features = mem_alloc(u->text_count, sizeof *u->features);
    u->pins = mem_alloc(u->text_count, sizeof *u->pins);
}

/* The prompts are computed, where a model is. */
static void begin_choosing(struct run *u)
{
    side_by_side(u, u->feeder_count, begin_feeder);
    side_by_side(u, u->runner_count, begin_lane);
}

static void end(struct run *u)
{
    for (uint32_t t = 0; t < u->text_count; t++) {
        mem_free(&u->features[t]);
        pins_free(&u->pins[t]);
    }
    mem_free(&u->features);
    mem_free(&u->pins);
    mem_free(&u->runners);
    mem_free(&u->feeders);
}

static bool any_at_work(const struct run *u)
{
    bool any = false;
    for (uint32_t t = 0; t < u->text_count; t++)
        any |= at_work(u, &u->texts[t]);
    return any && !engine_interrupted;
}

/* Sequences: full attention of all texts, then lane by lane, all texts of each. */
static int step(struct run *u, const struct pages *pages, struct err *err)
{
    struct engine_step steps[ENGINE_LANES] = {0};
    uint32_t count = 0, full[ENGINE_LANES];
    side_by_side(u, u->feeder_count, feed); /* reads taps that the next call overwrites */
    int r = show_oracles(u, pages, err);
    if (r)
        return r;
    side_by_side(u, u->runner_count, choose);
    for (uint32_t sequence = 0; sequence < u->text_count * (1 + u->lanes_each); sequence++) {
        uint32_t text = sequence % u->text_count, lane = sequence / u->text_count;
        const struct forced_text *t = &u->texts[text];
        if (!at_work(u, t))
            continue;
        struct engine_step *to = &steps[count];
        *to = (struct engine_step){pages, sequence, t->from + u->offset, t->tokens[t->from + u->offset],
                                   NULL,  NULL};
        if (lane == 0)
            full[text] = count;
        else {
            struct runner *n = &u->runners[text * u->lanes_each + lane - 1];
            to->lists = n->lists;
            to->group_of = lane_group_of(n->lane);
            n->full = full[text];
            n->row = count;
        }
        count++;
    }
    r = engine_steps(u->engine, steps, count, err);
    if (!r)
        side_by_side(u, u->runner_count, compare);
    return r;
}

static int prefill(struct run *u, struct pages *pages, struct err *err)
{
    struct pages_sequence sequences[ENGINE_LANES];
    uint32_t count = u->text_count * (1 + u->lanes_each);
    for (uint32_t s = 0; s < count; s++) {
        const struct forced_text *t = &u->texts[s % u->text_count];
        sequences[s] = (struct pages_sequence){
            .positions = t->end, .shared = s < u->text_count ? 0 : t->from, .of = s % u->text_count};
    }
    int r = engine_pages(u->engine, sequences, count, pages, err);
    bool pins = false;
    for (uint32_t i = 0; i < u->runner_count; i++)
        pins |= lane_wants_pins(u->runners[i].lane);
    for (uint32_t t = 0; t < u->text_count && !r; t++) {
        const struct forced_text *text = &u->texts[t];
        u->features[t] = engine_features_alloc(u->engine, text->from);
        r = pins ? pins_prefill(u->engine, pages, t, text->tokens, text->from, u->features[t], &u->pins[t],
                                err)
                 : engine_prefill(u->engine, pages, t, text->tokens, text->from, u->features[t], err);
    }
    return r ? r : engine_fork(u->engine, pages, err);
}

int forced_run(struct engine *e, const struct forced_text *texts, uint32_t text_count,
               struct lane *const *lanes, uint32_t lanes_each, struct forced_sums *sums, struct err *err)
{
    struct pages pages = {0};
    struct run u = {.engine = e, .texts = texts, .text_count = text_count, .lanes_each = lanes_each};
    CHECK(text_count > 0 && lanes_each > 0 && text_count * (1 + lanes_each) <= ENGINE_LANES);
    begin(&u, lanes);
    int r = prefill(&u, &pages, err);
    if (!r)
        begin_choosing(&u);
    for (; !r && any_at_work(&u); u.offset++) {
        r = step(&u, &pages, err);
        if (!r && e->progress)
            e->progress(texts[0].from + u.offset);
    }
    if (!r && engine_interrupted)
        r = err_set(err, -ECANCELED, "interrupted");
    for (uint32_t i = 0; i < u.runner_count; i++)
        forced_sums_add(&sums[i % lanes_each], &u.runners[i].sums);
    engine_pages_free(e, &pages);
    end(&u);
    return r;
}

void forced_choose_only(struct engine *e, const struct forced_text *texts, uint32_t text_count,
                        struct lane *const *lanes, uint32_t lanes_each)
{
    struct run u = {.engine = e, .texts = texts, .text_count = text_count, .lanes_each = lanes_each};
    begin(&u, lanes);
    begin_choosing(&u);
    for (; any_at_work(&u); u.offset++) {
        side_by_side(&u, u.feeder_count, feed);
        side_by_side(&u, u.runner_count, choose);
    }
    end(&u);
}
