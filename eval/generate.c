/* Long generations: how a text drifts that sparse attention wrote from its own KV, judged by full attention
 * and by how much it repeats itself. Owner: main's thread. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "eval/decode.h"
#include "eval/session.h"

enum { NGRAMS = 4, JUDGED = 32 }; /* JUDGED: tokens whose logits are taken at a time */

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

struct generating {
    struct session *session;
    struct session_lanes lanes;
    struct decode_stream *streams;  /* [1 + lanes] */
    struct report_generation *rows; /* [2][1 + lanes]: greedy, sampled */
    uint32_t samples[2];            /* added to the rows of each kind */
};

/* Adds -log p, under full attention, of what stream i wrote. */
static int judge(struct generating *g, const struct decode *d, const struct pages *pages, uint32_t sequence,
                 double *loss, struct err *err)
{
    struct engine *e = &g->session->engine;
    const struct token_buf *out = &g->streams[sequence].out;
    uint32_t count = d->prompt_count + (uint32_t)out->count, vocab = e->config->vocab;
    uint32_t *tokens = mem_alloc(count, sizeof *tokens);
    memcpy(tokens, d->prompt, d->prompt_count * sizeof *tokens);
    memcpy(tokens + d->prompt_count, out->ids, out->count * sizeof *tokens);
    struct forced_sums sums = {0};
    int r = 0;
    for (uint32_t at = d->prompt_count; at + 1 < count && !r; at += JUDGED) {
        uint32_t n = count - 1 - at < JUDGED ? count - 1 - at : JUDGED;
        struct engine_chunk chunk = {pages, sequence, tokens, at, n, n};
        r = engine_dense(e, &chunk, NULL, err);
        for (uint32_t i = 0; i < n && !r; i++)
            forced_compare(&sums, pass_logits(e->pass, i), pass_logits(e->pass, i), vocab,
                           tokens[at + i + 1]);
    }
    *loss += sums.positions ? sums.loss_full / (double)sums.positions : 0;
    mem_free(&tokens);
    return r;
}

/* What all streams wrote, into their rows. */
static int judge_all(struct generating *g, const struct decode *d, struct report_generation *rows,
                     struct err *err)
{
    struct engine *e = &g->session->engine;
    struct pages pages;
    uint32_t streams = 1 + g->lanes.count;
    pages_init(&pages, e->config, d->prompt_count + d->tokens, d->prompt_count, streams);
    int r = engine_prefill(e, &pages, d->prompt, d->prompt_count, err);
    if (!r)
        pages_fork(&pages);
    for (uint32_t i = 0; i < streams && !r; i++) {
        const struct token_buf *out = &g->streams[i].out;
        r = judge(g, d, &pages, i, &rows[i].loss, err);
        rows[i].tokens += (uint32_t)out->count;
        for (uint32_t n = 0; n < NGRAMS; n++)
            rows[i].distinct[n] += generate_distinct(out->ids, (uint32_t)out->count, n + 1);
    }
    pages_free(&pages);
    return r;
}

/* Sample 0 is greedy; all streams of another one draw the same random numbers. */
static int generate_one(struct generating *g, const struct session_text *text, uint32_t sample,
                        struct err *err)
{
    const struct eval_options *o = g->session->options;
    struct decode d = {
        .prompt = text->tokens.ids, .prompt_count = o->long_prompt, .tokens = o->long_generation};
    session_say("%s: %" PRIu32 " tokens, %s", text->name, d.tokens, sample ? "sampled" : "greedy");
    for (uint32_t i = 0; i <= g->lanes.count; i++) {
        g->streams[i].sampling = sampler_params_default();
        g->streams[i].sampling.temperature = sample ? o->temperature : 0;
        g->streams[i].sampling.seed = (uint64_t)o->seed + sample;
    }
    int r = decode_run(&g->session->engine, &d, g->streams, 1 + g->lanes.count, err);
    if (!r)
        r = judge_all(g, &d, g->rows + (sample ? 1 + g->lanes.count : 0), err);
    g->samples[sample != 0]++;
    return r;
}

static void begin(struct generating *g)
{
    const struct session *s = g->session;
    uint32_t streams = 1 + g->lanes.count;
    g->streams = mem_alloc(streams, sizeof *g->streams);
    g->rows = mem_alloc(2ull * streams, sizeof *g->rows);
    for (uint32_t i = 0; i < streams; i++) {
        g->streams[i].lane = i ? g->lanes.at[i - 1] : NULL;
        for (uint32_t sampled = 0; sampled < 2; sampled++)
            g->rows[sampled * streams + i] =
                (struct report_generation){.head = i ? s->heads[session_head_of(s, i - 1)].name : NULL,
                                           .budget = i ? session_budget_of(s, i - 1) : 0,
                                           .prompt = s->options->long_prompt,
                                           .sampled = sampled};
    }
}

int generate_long(struct session *s, struct report_generation **ret, uint32_t *ret_count, struct err *err)
{
    struct generating g = {.session = s};
    *ret = NULL;
    *ret_count = 0;
    if (!s->options->long_generation)
        return 0;
    int r = session_lanes(s, s->context, true, &g.lanes, err);
    if (r)
        return r;
    begin(&g);
    uint32_t streams = 1 + g.lanes.count, texts = 0;
    for (uint32_t t = 0; t < s->text_count && !r; t++) {
        if (s->texts[t].tokens.count < s->options->long_prompt)
            continue;
        texts++;
        for (uint32_t n = 0; n <= s->options->long_seeds && !r; n++)
            r = generate_one(&g, &s->texts[t], n, err);
    }
    for (uint32_t i = 0; i < 2 * streams; i++) {
        double samples = (double)g.samples[i >= streams];
        g.rows[i].texts = texts;
        g.rows[i].loss /= samples;
        for (int n = 0; n < NGRAMS; n++)
            g.rows[i].distinct[n] /= samples;
    }
    for (uint32_t i = 0; i < streams; i++)
        token_buf_free(&g.streams[i].out);
    mem_free(&g.streams);
    session_lanes_free(&g.lanes);
    *ret = g.rows;
    *ret_count = (s->options->long_seeds ? 2 : 1) * streams;
    if (!r && !texts)
        r = err_set(err, -EINVAL, "--long-prompt: found no text of %" PRIu32 " tokens",
                    s->options->long_prompt);
    return r;
}
