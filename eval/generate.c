/* Long generations: how a text drifts that sparse attention wrote from its own KV, judged by full attention
 * and by how much it repeats itself. Owner: main's thread. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/pool.h"
#include "eval/decode.h"
#include "eval/session.h"

enum { NGRAMS = 4 };

struct grams {
    const uint32_t *ids;
    uint32_t n;
};

static int compare_grams(const void *a, const void *b, void *arg)
{
    const struct grams *g = arg;
    const uint32_t *x = g->ids + *(const uint32_t *)a, *y = g->ids + *(const uint32_t *)b;
    for (uint32_t i = 0; i < g->n; i++)
        if (x[i] != y[i])
            return x[i] < y[i] ? -1 : 1;
    return 0;
}

double generate_distinct(const uint32_t *ids, uint32_t count, uint32_t n)
{
    if (count < n)
        return (double)NAN;
    uint32_t total = count - n + 1, distinct = 1;
    uint32_t *at = mem_alloc(total, sizeof *at);
    struct grams grams = {ids, n};
    for (uint32_t i = 0; i < total; i++)
        at[i] = i;
    qsort_r(at, total, sizeof *at, compare_grams, &grams);
    for (uint32_t i = 1; i < total; i++)
        distinct += compare_grams(&at[i - 1], &at[i], &grams) != 0;
    mem_free(&at);
    return (double)distinct / total;
}

/* Streams of one batch: families (a stretch of a text, and a seed) of full attention and each way. Prompts
 * are lists of their own, so that families of one stretch share them by pointer. */
struct generating {
    struct session *session;
    struct session_lanes lanes;    /* [families][ways] */
    struct decode_stream *streams; /* [families][1 + ways] */
    struct family *families;       /* all of them */
    uint32_t family_count;
    uint32_t each;                  /* 1 + ways */
    struct report_generation *rows; /* [2][1 + ways]: greedy, sampled */
};

struct family {
    const uint32_t *prompt;
    uint32_t sample; /* 0: greedy; all streams of another one draw the same random numbers */
};

/* Rows of logits of one chunk against the tokens that came. */
struct judging {
    const struct engine *engine;
    const uint32_t *next; /* [rows] */
    double *losses;       /* [rows] */
};

static void judge_row(void *arg, int index, int thread)
{
    const struct judging *j = arg;
    (void)thread;
    j->losses[index] =
        forced_loss(engine_logits(j->engine, (uint32_t)index), j->engine->config->vocab, j->next[index]);
}

/* Mean -log p, under full attention, of what a stream wrote. Its prompt lies in `pages`. */
static int judge(struct engine *e, const struct decode_stream *s, const struct pages *pages,
                 uint32_t sequence, double *ret_loss, struct err *err)
{
    uint32_t count = s->prompt_count + (uint32_t)s->out.count, scored = 0;
    uint32_t *tokens = mem_alloc(count, sizeof *tokens);
    memcpy(tokens, s->prompt, s->prompt_count * sizeof *tokens);
    memcpy(tokens + s->prompt_count, s->out.ids, s->out.count * sizeof *tokens);
    uint32_t most = e->chunk < ENGINE_LANES ? e->chunk : ENGINE_LANES;
    double sum = 0;
    int r = 0;
    for (uint32_t at = s->prompt_count; at + 1 < count && !r; at += most) {
        uint32_t n = count - 1 - at < most ? count - 1 - at : most;
        double losses[ENGINE_LANES];
        struct engine_chunk chunk = {pages, sequence, tokens, at, n, n};
        struct judging judging = {e, tokens + at + 1, losses};
        r = engine_dense(e, &chunk, NULL, err);
        if (!r)
            pool_run(compute_pool(e->compute), (int)n, judge_row, &judging);
        for (uint32_t i = 0; i < n && !r; i++)
            sum += losses[i];
        scored += n;
    }
    *ret_loss = scored ? sum / scored : 0;
    mem_free(&tokens);
    return r;
}

/* What the streams of one family wrote, into their rows. */
static int judge_family(struct generating *g, const struct family *f, const struct decode_stream *streams,
                        struct err *err)
{
    struct engine *e = &g->session->engine;
    struct report_generation *rows = g->rows + (f->sample ? g->each : 0);
    const struct eval_options *o = g->session->options;
    struct pages_sequence sequences[ENGINE_LANES];
    struct pages pages = {0};
    for (uint32_t i = 0; i < g->each; i++)
        sequences[i] =
            (struct pages_sequence){o->long_prompt + o->long_generation, i ? o->long_prompt : 0, 0};
    int r = engine_pages(e, sequences, g->each, &pages, err);
    if (!r)
        r = engine_prefill(e, &pages, 0, f->prompt, o->long_prompt, NULL, err);
    if (!r)
        r = engine_fork(e, &pages, err);
    double full = 0, loss = 0;
    for (uint32_t i = 0; i < g->each && !r; i++) {
        const struct token_buf *out = &streams[i].out;
        r = judge(e, &streams[i], &pages, i, &loss, err);
        full = i ? full : loss;
        rows[i].loss += loss;
        rows[i].worse += loss - full;
        rows[i].worse_squares += (loss - full) * (loss - full);
        rows[i].streams++;
        rows[i].tokens += (uint32_t)out->count;
        for (uint32_t n = 0; n < NGRAMS; n++)
            rows[i].distinct[n] += generate_distinct(out->ids, (uint32_t)out->count, n + 1);
    }
    engine_pages_free(e, &pages);
    return r;
}

/* Families first .. first + count - 1, together. */
static int generate_batch(struct generating *g, uint32_t first, uint32_t count, struct err *err)
{
    const struct eval_options *o = g->session->options;
    for (uint32_t i = 0; i < count * g->each; i++) {
        const struct family *f = &g->families[first + i / g->each];
        struct decode_stream *s = &g->streams[i];
        s->prompt = f->prompt;
        s->prompt_count = o->long_prompt;
        s->tokens = o->long_generation;
        s->sampling = sampler_params_default();
        s->sampling.temperature = f->sample ? o->temperature : 0;
        s->sampling.seed = (uint64_t)o->seed + f->sample;
    }
    session_say("long generations %" PRIu32 " to %" PRIu32 " of %" PRIu32 ": %" PRIu32 " tokens each",
                first + 1, first + count, g->family_count, o->long_generation);
    int r = decode_run(&g->session->engine, g->streams, count * g->each, err);
    for (uint32_t i = 0; i < count && !r; i++)
        r = judge_family(g, &g->families[first + i], &g->streams[i * g->each], err);
    return r;
}

/* Stretches of all texts that are long enough, each with all samples. */
static void find_families(struct generating *g)
{
    const struct session *s = g->session;
    const struct eval_options *o = s->options;
    uint32_t samples = 1 + o->long_seeds;
    g->families = mem_alloc((size_t)s->text_count * o->long_prompts * samples, sizeof *g->families);
    for (uint32_t t = 0; t < s->text_count; t++) {
        const struct token_buf *text = &s->texts[t].tokens;
        uint32_t room = text->count < o->long_prompt ? 0 : (uint32_t)text->count - o->long_prompt;
        for (uint32_t p = 0; p < o->long_prompts && text->count >= o->long_prompt; p++)
            for (uint32_t n = 0; n < samples; n++)
                g->families[g->family_count++] =
                    (struct family){text->ids + (uint64_t)room * p / o->long_prompts, n};
    }
}

static void begin_rows(struct generating *g)
{
    const struct session *s = g->session;
    g->rows = mem_alloc(2ull * g->each, sizeof *g->rows);
    for (uint32_t i = 0; i < 2 * g->each; i++) {
        uint32_t way = i % g->each;
        g->rows[i] = (struct report_generation){.head = way ? s->ways[way - 1].name : NULL,
                                                .budget = way ? s->ways[way - 1].variant->choice.budget : 0,
                                                .texts = g->family_count / (1 + s->options->long_seeds),
                                                .prompt = s->options->long_prompt,
                                                .sampled = i >= g->each};
    }
}

static int generate_all(struct generating *g, struct err *err)
{
    struct session *s = g->session;
    uint32_t most = s->families < g->family_count ? s->families : g->family_count;
    struct session_lanes_options options = {.families = most, .capacity = s->context, .apart = true};
    int r = session_lanes(s, &options, &g->lanes, err);
    if (r)
        return r;
    g->streams = mem_alloc((size_t)most * g->each, sizeof *g->streams);
    for (uint32_t i = 0; i < most * g->each; i++)
        g->streams[i].lane = i % g->each ? g->lanes.at[i / g->each * s->way_count + i % g->each - 1] : NULL;
    for (uint32_t at = 0; at < g->family_count && !r; at += most)
        r = generate_batch(g, at, g->family_count - at < most ? g->family_count - at : most, err);
    for (uint32_t i = 0; i < most * g->each; i++)
        token_buf_free(&g->streams[i].out);
    return r;
}

int generate_long(struct session *s, struct report_generation **ret, uint32_t *ret_count, struct err *err)
{
    struct generating g = {.session = s, .each = 1 + s->way_count};
    *ret = NULL;
    *ret_count = 0;
    if (!s->options->long_generation)
        return 0;
    find_families(&g);
    begin_rows(&g);
    int r = generate_all(&g, err); /* session_open saw a text that is long enough */
    for (uint32_t i = 0; i < 2 * g.each; i++)
        for (int n = 0; n < NGRAMS; n++)
            g.rows[i].distinct[n] /= g.rows[i].streams;
    mem_free(&g.streams);
    mem_free(&g.families);
    session_lanes_free(&g.lanes);
    *ret = g.rows;
    *ret_count = g.rows[0].streams ? (s->options->long_seeds ? 2 : 1) * g.each : 0;
    return r;
}
