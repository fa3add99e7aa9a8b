/* Weighted sums of embeddings; see mix.h. Owner: the thread that owns the compute object. Embeddings of
 * earlier tokens are read again rather than kept: memory depends neither on the taps nor on the sequences,
 * and a row of the table costs little beside the projections. */
#include "retriever/mix.h"

#include <stdbool.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

_Static_assert(KEYS_TAIL >= HEAD_TAPS_MAX, "the tail holds what taps reach");

struct mix {
    const struct head *head;
    const struct head_config *config;
    struct compute *compute;
    struct matrix table;
    uint32_t tokens_max;
    uint32_t *ids; /* [tokens_max] */
    bool *there;
    float *ones; /* [hidden] */
    float *x;    /* [tokens_max][hidden] */
    float *sums; /* [groups][tokens_max][views][hidden] */
};

struct mix *mix_create(const struct head *head, const struct matrix *table, uint32_t tokens_max,
                       struct compute *compute)
{
    const struct head_config *c = head_config(head);
    if (c->features != HEAD_FEATURES_CONTEXT)
        return NULL;
    struct mix *m = mem_alloc(1, sizeof *m);
    *m = (struct mix){
        .head = head, .config = c, .compute = compute, .table = *table, .tokens_max = tokens_max};
    m->ids = mem_alloc(tokens_max, sizeof *m->ids);
    m->there = mem_alloc(tokens_max, sizeof *m->there);
    m->ones = mem_alloc_aligned(c->hidden, sizeof *m->ones);
    for (uint32_t i = 0; i < c->hidden; i++)
        m->ones[i] = 1;
    m->x = mem_alloc_aligned((size_t)tokens_max * c->hidden, sizeof *m->x);
    m->sums = mem_alloc_aligned((size_t)c->groups * tokens_max * c->views * c->hidden, sizeof *m->sums);
    return m;
}

void mix_free(struct mix **mix)
{
    struct mix *m = *mix;
    if (!m)
        return;
    mem_free(&m->ids);
    mem_free(&m->there);
    mem_free(&m->ones);
    mem_free(&m->x);
    mem_free(&m->sums);
    mem_free(mix);
}

static float *sums_of(const struct mix *m, uint32_t group, uint32_t token)
{
    size_t width = (size_t)m->config->views * m->config->hidden;
    return m->sums + ((size_t)group * m->tokens_max + token) * width;
}

const float *mix_rows(const struct mix *m, uint32_t group)
{
    return sums_of(m, group, 0);
}

uint32_t mix_earlier(const struct mix_token *t, uint32_t lag)
{
    return lag <= t->before ? t->at[-(ptrdiff_t)lag]
                            : t->keys->tail[(t->keys->count + t->before - lag) % KEYS_TAIL];
}

/* Which tokens have one `lag` before them, and which one it is. */
static void find_earlier(struct mix *m, const struct mix_token *tokens, uint32_t count, uint32_t lag)
{
    for (uint32_t i = 0; i < count; i++) {
        m->there[i] = lag <= tokens[i].keys->count + tokens[i].before;
        m->ids[i] = m->there[i] ? mix_earlier(&tokens[i], lag) : 0;
    }
}

static void add_lag(struct mix *m, uint32_t token, uint32_t lag)
{
    const struct head_config *c = m->config;
    const float *x = m->x + (size_t)token * c->hidden;
    for (uint32_t g = 0; g < c->groups; g++) {
        const float *taps = head_groups(m->head)[g].taps.data;
        for (uint32_t v = 0; v < c->views; v++) {
            float w = taps[v * c->taps + lag], *to = sums_of(m, g, token) + (size_t)v * c->hidden;
            for (uint32_t i = 0; i < c->hidden; i++)
                to[i] += w * x[i];
        }
    }
}

static void apply_norm(struct mix *m, uint32_t token)
{
    const struct head_config *c = m->config;
    for (uint32_t g = 0; g < c->groups; g++) {
        const float *norm = head_groups(m->head)[g].norm.data;
        float *to = sums_of(m, g, token);
        for (uint32_t v = 0; v < c->views; v++, to += c->hidden)
            for (uint32_t i = 0; i < c->hidden; i++)
                to[i] *= norm[i];
    }
}

void mix_run(struct mix *m, const struct mix_token *tokens, uint32_t count)
{
    const struct head_config *c = m->config;
    CHECK(count <= m->tokens_max);
    for (uint32_t g = 0; g < c->groups; g++)
        memset(sums_of(m, g, 0), 0, (size_t)count * c->views * c->hidden * sizeof *m->sums);
    for (uint32_t lag = 0; lag < c->taps; lag++) {
        find_earlier(m, tokens, count, lag);
        compute_embed(m->compute, m->x, &m->table, m->ids, (int)count);
        compute_rmsnorm(m->compute, m->x, m->x, m->ones, (int)count, (int)c->hidden, c->rms_eps);
        for (uint32_t i = 0; i < count; i++)
            if (m->there[i])
                add_lag(m, i, lag);
    }
    for (uint32_t i = 0; i < count; i++)
        apply_norm(m, i);
}
