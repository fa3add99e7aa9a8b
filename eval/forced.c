/* See forced.h. Owner: main's thread. */
#include "eval/forced.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

enum { STRIDE = 32 }; /* tokens of full attention whose logits are kept at a time */

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

void forced_compare(struct forced_sums *s, const float *full, const float *sparse, uint32_t vocab,
                    uint32_t next)
{
    uint32_t best_full, best_sparse;
    double log_full = log_sum(full, vocab, &best_full), log_sparse = log_sum(sparse, vocab, &best_sparse);
    double kl = 0, shift = log_sparse - log_full;
    for (uint32_t i = 0; i < vocab; i++)
        kl += (double)expf(full[i] - (float)log_full) * ((double)full[i] - (double)sparse[i] + shift);
    s->positions++;
    s->agreed += best_full == best_sparse;
    s->loss_full += log_full - (double)full[next];
    s->loss_sparse += log_sparse - (double)sparse[next];
    s->kl += kl;
}

/* Each chooser once, in the order of the lanes. */
static void feed(struct lane *const *lanes, uint32_t count, const uint32_t *tokens, uint32_t n, bool weigh)
{
    for (uint32_t i = 0; i < count; i++)
        if (i == 0 || lane_chooser(lanes[i]) != lane_chooser(lanes[i - 1]))
            chooser_feed(lane_chooser(lanes[i]), tokens, n, weigh);
}

static void begin(const struct forced_text *t, struct lane *const *lanes, uint32_t count)
{
    CHECK(t->from >= 1 && t->end < t->count);
    for (uint32_t i = 0; i < count; i++) {
        lane_restart(lanes[i]);
        chooser_reset(lane_chooser(lanes[i]));
    }
    feed(lanes, count, t->tokens, t->from, false);
}

void forced_choose_only(const struct forced_text *t, struct lane *const *lanes, uint32_t count)
{
    begin(t, lanes, count);
    for (uint32_t p = t->from; p < t->end && !engine_interrupted; p++) {
        feed(lanes, count, t->tokens + p, 1, true);
        for (uint32_t i = 0; i < count; i++)
            lane_choose(lanes[i], p);
    }
}

/* Position p in all lanes, against the full row of it. */
static int step(struct engine *e, const struct forced_text *t, const struct pages *pages,
                struct lane *const *lanes, uint32_t count, uint32_t p, const float *full,
                struct forced_sums *sums, struct err *err)
{
    struct engine_step steps[ENGINE_LANES] = {0};
    feed(lanes, count, t->tokens + p, 1, true);
    for (uint32_t i = 0; i < count; i++)
        steps[i] = (struct engine_step){.pages = pages,
                                        .sequence = i + 1,
                                        .position = p,
                                        .token = t->tokens[p],
                                        .lists = lane_choose(lanes[i], p),
                                        .group_of = lane_group_of(lanes[i])};
    int r = engine_steps(e, steps, count, err);
    for (uint32_t i = 0; i < count && !r; i++)
        forced_compare(&sums[i], full, pass_logits(e->pass, i), e->config->vocab, t->tokens[p + 1]);
    return r;
}

int forced_run(struct engine *e, const struct forced_text *t, struct lane *const *lanes, uint32_t count,
               struct forced_sums *sums, struct err *err)
{
    struct pages pages;
    size_t vocab = e->config->vocab;
    CHECK(count > 0 && count <= ENGINE_LANES);
    begin(t, lanes, count);
    pages_init(&pages, e->config, t->end, t->from, count + 1);
    float *full = mem_alloc(STRIDE * vocab, sizeof *full);
    int r = engine_prefill(e, &pages, t->tokens, t->from, err);
    if (!r)
        pages_fork(&pages);
    for (uint32_t at = t->from; at < t->end && !r; at += STRIDE) {
        uint32_t n = t->end - at < STRIDE ? t->end - at : STRIDE;
        struct engine_chunk chunk = {&pages, 0, t->tokens, at, n, n};
        r = engine_dense(e, &chunk, NULL, err);
        if (!r)
            memcpy(full, pass_logits(e->pass, 0), n * vocab * sizeof *full);
        for (uint32_t i = 0; i < n && !r; i++)
            r = step(e, t, &pages, lanes, count, at + i, full + i * vocab, sums, err);
    }
    mem_free(&full);
    pages_free(&pages);
    return r;
}
