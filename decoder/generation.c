/* Requests and sequences; see generation.h. Owner of each: the scheduler. Nothing here waits or sends. */
#include "decoder/generation.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"

static int check_prompt(const struct msg_generate *g, const struct generation_limits *limits, struct err *err)
{
    if (g->tokens.count == 0)
        return err_set(err, -EINVAL, "tokens: found none, expected at least 1");
    if (g->tokens.count >= limits->context)
        return err_set(err, -E2BIG,
                       "prompt of %u tokens does not fit the context of %u: n_prompt %u, n_ctx %u",
                       g->tokens.count, limits->context, g->tokens.count, limits->context);
    for (uint32_t i = 0; i < g->tokens.count; i++)
        if (g->tokens.at[i] >= limits->vocab)
            return err_set(err, -EINVAL, "tokens[%u]: found id %u, expected below %u", i, g->tokens.at[i],
                           limits->vocab);
    return 0;
}

static uint32_t budget_max(const struct msg_generate *g)
{
    return g->budget_max ? g->budget_max : g->budget;
}

static int check_selection(const struct msg_generate *g, const struct generation_limits *limits,
                           struct err *err)
{
    if (g->flags & GENERATE_FULL)
        return 0;
    if (g->selection > SELECTION_MIXED)
        return err_set(err, -EINVAL, "selection: found %u, expected 0 to %d", g->selection, SELECTION_MIXED);
    if (budget_max(g) > limits->list_max)
        return err_set(err, -EINVAL, "%s: found %u, expected at most %u as the store was started with",
                       g->budget_max ? "budget_max" : "budget", budget_max(g), limits->list_max);
    if (g->budget > budget_max(g))
        return err_set(err, -EINVAL, "budget_max: found %u, expected at least the budget of %u",
                       g->budget_max, g->budget);
    if ((uint64_t)g->sinks + g->window + 1 > g->budget)
        return err_set(err, -EINVAL, "budget: found %u, expected more than sinks %u and window %u together",
                       g->budget, g->sinks, g->window);
    return 0;
}

static void take_sampling(struct sampler_params *to, const struct msg_sampling *from)
{
    *to = sampler_params_default();
    to->temperature = from->temperature;
    to->top_p = from->top_p;
    to->min_p = from->min_p;
    to->top_k = from->top_k;
    to->repeat_penalty = from->repeat_penalty;
    to->presence_penalty = from->presence_penalty;
    to->frequency_penalty = from->frequency_penalty;
    to->repeat_last_n = from->repeat_last_n;
    to->seed = from->seed;
}

struct generation *generation_create(uint64_t id, struct msg *generate,
                                     const struct generation_limits *limits)
{
    struct generation *q = mem_alloc(1, sizeof *q);
    CHECK(id <= GENERATION_ID);
    q->id = q->sequence = id;
    q->ask = *generate;
    generate->memory = NULL;
    q->queued_at_ns = clock_now_ns();
    const struct msg_generate *g = &q->ask.generate;
    q->sparse = !(g->flags & GENERATE_FULL);
    q->prompt = g->tokens.count;
    take_sampling(&q->sampling, &g->sampling);
    int r = check_prompt(g, limits, &q->failure);
    if (r == 0)
        r = check_selection(g, limits, &q->failure);
    if (r == 0)
        r = sampler_params_check(&q->sampling, &q->failure);
    if (r < 0) {
        q->finish = FINISH_ERROR;
        return q;
    }
    uint64_t all = (uint64_t)q->prompt + g->max_tokens;
    q->capacity = all < limits->context ? (uint32_t)all : limits->context;
    if (q->capacity == q->prompt)
        q->finish = FINISH_LENGTH;
    return q;
}

void generation_free(struct generation **sequence)
{
    struct generation *q = *sequence;
    if (!q)
        return;
    msg_free(&q->ask);
    mem_free(&q->tokens);
    mem_free(sequence);
}

void generation_admit(struct generation *q, enum generation_state state)
{
    CHECK(q->state == GENERATION_QUEUED && !q->finish);
    q->state = state;
    q->again = false;
    q->asked_ns = clock_now_ns();
    if (q->tokens)
        return; /* refused once for want of room, or begun again */
    q->tokens = mem_alloc(q->capacity, sizeof *q->tokens);
    memcpy(q->tokens, q->ask.generate.tokens.at, q->prompt * sizeof *q->tokens);
    q->count = q->prompt;
}

void generation_end(struct generation *q, uint32_t reason)
{
    if (q->finish)
        return;
    q->finish = reason;
    if (reason != FINISH_LENGTH && q->count > q->prompt + q->sent)
        q->count--;
}

int generation_fail(struct generation *q, int code, const char *fmt, ...)
{
    if (q->finish)
        return code;
    char text[ERR_TEXT_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    generation_end(q, FINISH_ERROR);
    return err_set(&q->failure, code, "%s", text);
}

int generation_begin_again(struct generation *q, const struct kv_counters *counters)
{
    CHECK(q->state == GENERATION_CLOSING && q->again && !q->finish);
    q->state = GENERATION_QUEUED;
    q->again = false;
    if (counters)
        msg_add_counters(&q->counters, counters);
    if (q->vain == GENERATION_VAIN_MAX)
        return generation_fail(q, -EHOSTUNREACH, "retriever is gone, %u times without a new token in between",
                               q->vain + 1);
    q->begun++;
    q->vain++;
    q->sequence = (uint64_t)q->begun << GENERATION_ID_BITS | q->id;
    q->count = q->prompt + q->sent;
    q->recorded = q->done = q->told = q->cached = 0;
    return 0;
}

static bool ends(const struct generation *q, uint32_t id, const uint8_t *eos)
{
    const struct msg_generate *g = &q->ask.generate;
    for (uint32_t i = 0; i < g->stop_ids.count; i++)
        if (g->stop_ids.at[i] == id)
            return true;
    return eos[id] && !(g->flags & GENERATE_IGNORE_EOS);
}

void generation_take(struct generation *q, uint32_t id, const uint8_t *eos, int64_t now_ns)
{
    CHECK(!q->finish && q->count < q->capacity);
    q->vain = 0;
    q->last_at_ns = now_ns;
    if (!q->first_at_ns)
        q->first_at_ns = now_ns;
    if (ends(q, id, eos)) {
        generation_end(q, FINISH_STOP);
        return;
    }
    q->tokens[q->count++] = id;
    if (q->count == q->capacity)
        generation_end(q, FINISH_LENGTH);
}

static void begin(uint64_t id, uint32_t kind, struct msg *ret)
{
    memset(ret, 0, sizeof *ret);
    ret->kind = kind;
    ret->id = id;
}

static void copy_tokens(struct msg *msg, struct msg_u32s *to, const uint32_t *from, uint32_t count)
{
    uint32_t *copy = mem_alloc(count ? count : 1, sizeof *copy);
    memcpy(copy, from, count * sizeof *copy);
    msg->memory = copy;
    *to = (struct msg_u32s){copy, count};
}

/* What decides how sparse KV is made beside the budget: the head, and the rule by which lists grow and
 * end. */
static uint64_t made_by(const struct msg_generate *g, uint64_t head)
{
    struct {
        uint64_t head;
        float min_mass, top_p;
        uint64_t budget_max;
    } rule = {head, g->min_mass, g->budget_top_p, budget_max(g)};
    return g->min_mass > 0 || g->budget_top_p > 0 ? hash_bytes(0, &rule, sizeof rule).lo : head;
}

void generation_open_store(const struct generation *q, uint64_t head, struct msg *ret)
{
    const struct msg_generate *g = &q->ask.generate;
    generation_open_retriever(q, false, ret);
    ret->open.flags = (g->flags & GENERATE_REUSE ? OPEN_REUSE : 0u) |
                      (g->flags & GENERATE_REUSE_SPARSE ? OPEN_REUSE_SPARSE : 0u);
    ret->open.salt = g->salt;
    ret->open.made = q->sparse ? (struct made){ARENA_MADE_SPARSE, g->budget, made_by(g, head)}
                               : (struct made){ARENA_MADE_FULL, 0, 0};
    copy_tokens(ret, &ret->open.tokens, q->tokens, q->prompt);
}

void generation_open_retriever(const struct generation *q, bool prefix, struct msg *ret)
{
    const struct msg_generate *g = &q->ask.generate;
    begin(q->sequence, MSG_OPEN, ret);
    ret->open.sequence = q->sequence;
    ret->open.made.kind = ARENA_MADE_FULL;
    ret->open.capacity = q->capacity;
    if (q->sparse) {
        ret->open.budget = budget_max(g);
        ret->open.budget_base = g->budget;
        ret->open.min_mass = g->min_mass;
        ret->open.top_p = g->budget_top_p;
        ret->open.sinks = g->sinks;
        ret->open.window = g->window;
    }
    if (!prefix)
        return;
    ret->open.flags = OPEN_REUSE;
    ret->open.salt = g->salt;
    copy_tokens(ret, &ret->open.tokens, q->tokens, q->prompt);
}

void generation_close(const struct generation *q, struct msg *ret)
{
    begin(q->sequence, MSG_CLOSE, ret);
    ret->close.sequence = q->sequence;
}

void generation_progress(struct generation *q, struct msg *ret)
{
    q->shown = q->done;
    begin(q->id, MSG_PROGRESS, ret);
    ret->progress = (struct msg_progress){q->done, q->prompt, q->reused};
}

void generation_tokens(struct generation *q, struct msg *ret)
{
    uint32_t first = q->prompt + q->sent;
    CHECK(q->recorded > first && q->recorded <= q->count);
    begin(q->id, MSG_TOKEN, ret);
    copy_tokens(ret, &ret->token.tokens, q->tokens + first, q->recorded - first);
    q->sent = q->recorded - q->prompt;
}

static int64_t between(int64_t from, int64_t to)
{
    return from && to > from ? to - from : 0;
}

void generation_done(struct generation *q, const struct kv_counters *counters, struct msg *ret)
{
    int64_t now = clock_now_ns();
    begin(q->id, MSG_DONE, ret);
    struct msg_done *d = &ret->done;
    d->reason = q->finish;
    if (q->finish == FINISH_ERROR) {
        d->code = q->failure.code;
        snprintf(d->text, sizeof d->text, "%s", q->failure.text);
    }
    d->prompt_tokens = q->prompt;
    d->cached_tokens = q->reused;
    d->generated_tokens = q->sent;
    d->queued_ns = between(q->queued_at_ns, q->granted_at_ns ? q->granted_at_ns : now);
    d->prefill_ns = between(q->granted_at_ns, q->first_at_ns ? q->first_at_ns : now);
    d->decode_ns = between(q->first_at_ns, q->last_at_ns);
    if (counters)
        msg_add_counters(&q->counters, counters);
    d->counters = q->counters;
}
