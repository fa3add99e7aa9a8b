/* See decode.h. Owner: main's thread. */
#include "eval/decode.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

struct run {
    struct engine *engine;
    const struct decode *decode;
    struct decode_stream *streams;
    uint32_t count;
    struct pages pages;
    void *scratch;
    float *logits;
};

/* Takes the next token of stream i from `logits` (which is changed). */
static int take(struct run *u, uint32_t i, float *logits, struct err *err)
{
    struct decode_stream *s = &u->streams[i];
    struct sampler_input input = {.logits = logits,
                                  .vocab = u->engine->config->vocab,
                                  .history = s->out.ids,
                                  .history_count = (uint32_t)s->out.count,
                                  .sequence = 1, /* streams of equal seeds draw alike */
                                  .position = u->decode->prompt_count + (uint32_t)s->out.count,
                                  .scratch = u->scratch};
    uint32_t id;
    int r = sampler_sample(&s->sampling, &input, &id);
    if (r < 0)
        return err_set(err, r, "logits at position %u are not finite", input.position);
    if (u->decode->stop && tokenizer_is_eos(u->engine->tokenizer, id))
        s->ended = true;
    else
        token_buf_push(&s->out, id);
    return 0;
}

static int begin(struct run *u, struct err *err)
{
    const struct decode *d = u->decode;
    size_t vocab = u->engine->config->vocab;
    int r = engine_prefill(u->engine, &u->pages, d->prompt, d->prompt_count, err);
    if (r)
        return r;
    pages_fork(&u->pages);
    for (uint32_t i = 0; i < u->count && !r; i++) {
        struct decode_stream *s = &u->streams[i];
        s->out.count = 0;
        s->ended = false;
        if (s->lane) {
            lane_restart(s->lane);
            chooser_reset(lane_chooser(s->lane));
            chooser_feed(lane_chooser(s->lane), d->prompt, d->prompt_count, false);
        }
        memcpy(u->logits, pass_logits(u->engine->pass, 0), vocab * sizeof *u->logits);
        r = take(u, i, u->logits, err);
    }
    return r;
}

/* One token in every stream that goes on; returns their number, or negative. */
static int step(struct run *u, struct err *err)
{
    struct engine_step steps[ENGINE_LANES] = {0};
    uint32_t of[ENGINE_LANES], n = 0;
    for (uint32_t i = 0; i < u->count; i++) {
        struct decode_stream *s = &u->streams[i];
        if (s->ended || s->out.count >= u->decode->tokens)
            continue;
        uint32_t token = s->out.ids[s->out.count - 1];
        uint32_t position = u->decode->prompt_count + (uint32_t)s->out.count - 1;
        struct engine_step *to = &steps[n];
        *to = (struct engine_step){&u->pages, i, position, token, NULL, NULL};
        if (s->lane) {
            chooser_feed(lane_chooser(s->lane), &token, 1, true);
            to->lists = lane_choose(s->lane, position);
            to->group_of = lane_group_of(s->lane);
        }
        of[n++] = i;
    }
    int r = n ? engine_steps(u->engine, steps, n, err) : 0;
    for (uint32_t i = 0; i < n && !r; i++)
        r = take(u, of[i], pass_logits(u->engine->pass, i), err);
    return r < 0 ? r : (int)n;
}

int decode_run(struct engine *e, const struct decode *d, struct decode_stream *streams, uint32_t count,
               struct err *err)
{
    struct run u = {.engine = e, .decode = d, .streams = streams, .count = count};
    CHECK(count > 0 && count <= ENGINE_LANES && d->prompt_count > 0 && d->tokens > 0);
    pages_init(&u.pages, e->config, d->prompt_count + d->tokens, d->prompt_count, count);
    u.scratch = mem_alloc(1, sampler_scratch_bytes(e->config->vocab));
    u.logits = mem_alloc(e->config->vocab, sizeof *u.logits);
    int r = begin(&u, err);
    if (!r)
        do
            r = step(&u, err);
        while (r > 0);
    mem_free(&u.scratch);
    mem_free(&u.logits);
    pages_free(&u.pages);
    return r;
}
