/* See decode.h. Owner: main's thread. Between two calls of the model the streams work side by side: each
 * takes its token, feeds it to its chooser, and chooses. */
#include "eval/decode.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/pool.h"

struct stream {
    uint32_t of;  /* the first stream with the same prompt */
    uint32_t row; /* of the last logits */
    bool working;
    uint32_t unsound; /* the position where logits were not finite, or 0 */
    const struct attn_list *lists;
};

/* What one thread samples with. */
struct bench {
    void *scratch;
    float *logits;
};

struct run {
    struct engine *engine;
    struct decode_stream *streams;
    struct stream *states;
    uint32_t count;
    struct pages pages;
    struct bench *benches; /* [threads] */
    float *first;          /* [count][vocab]: logits behind each prompt, of the streams that computed one */
    struct pins *pins;     /* [count] what the ends of those prompts looked at; empty: no lane wants it */
    float **features;      /* [count] rows of taps of those prompts; NULL: nobody looks */
};

static void side_by_side(struct run *u, void (*body)(void *arg, int index, int thread))
{
    pool_run(compute_pool(u->engine->compute), (int)u->count, body, u);
}

/* The next token out of `logits`, which are left as they are. */
static void take(struct run *u, uint32_t i, const float *logits, int thread)
{
    struct decode_stream *s = &u->streams[i];
    struct bench *bench = &u->benches[thread];
    uint32_t vocab = u->engine->config->vocab, id;
    memcpy(bench->logits, logits, vocab * sizeof *logits);
    struct sampler_input input = {.logits = bench->logits,
                                  .vocab = vocab,
                                  .history = s->out.ids,
                                  .history_count = (uint32_t)s->out.count,
                                  .sequence = 1, /* streams of equal seeds draw alike */
                                  .position = s->prompt_count + (uint32_t)s->out.count,
                                  .scratch = bench->scratch};
    if (sampler_sample(&s->sampling, &input, &id) < 0)
        u->states[i].unsound = input.position;
    else if (s->stop && tokenizer_is_eos(u->engine->tokenizer, id))
        s->ended = true;
    else
        token_buf_push(&s->out, id);
    u->states[i].working = !u->states[i].unsound && !s->ended && s->out.count < s->tokens;
}

/* What the lane attends for the token that was taken last; `features`: of the position before it. */
static void choose(struct run *u, uint32_t i, const float *features)
{
    struct decode_stream *s = &u->streams[i];
    if (!s->lane || !u->states[i].working)
        return;
    uint32_t token = s->out.ids[s->out.count - 1], position = s->prompt_count + (uint32_t)s->out.count - 1;
    chooser_feed(lane_chooser(s->lane), &token, 1, features, true);
    u->states[i].lists = lane_choose(s->lane, position);
}

static void begin_stream(void *arg, int index, int thread)
{
    struct run *u = arg;
    uint32_t i = (uint32_t)index;
    struct decode_stream *s = &u->streams[i];
    const float *features = u->features[u->states[i].of];
    size_t last = (s->prompt_count - 1) * (size_t)taps_width(&u->engine->taps);
    s->out.count = 0;
    s->ended = false;
    if (s->lane) {
        bool prime = lane_needs_prime(s->lane);
        lane_restart(s->lane);
        if (lane_wants_pins(s->lane))
            lane_pin(s->lane, &u->pins[u->states[i].of]);
        chooser_reset(lane_chooser(s->lane));
        chooser_feed(lane_chooser(s->lane), s->prompt, s->prompt_count, features, prime);
        if (prime)
            lane_prime(s->lane, s->prompt_count - 1);
    }
    take(u, i, u->first + (size_t)u->states[i].of * u->engine->config->vocab, thread);
    choose(u, i, features ? features + last : NULL);
}

static void go_on(void *arg, int index, int thread)
{
    struct run *u = arg;
    uint32_t i = (uint32_t)index;
    if (!u->states[i].working)
        return;
    take(u, i, engine_logits(u->engine, u->states[i].row), thread);
    choose(u, i, taps_row(&u->engine->taps, u->states[i].row));
}

static int prefill(struct run *u, uint32_t i, struct err *err)
{
    const struct decode_stream *s = &u->streams[i];
    bool pins = false;
    for (uint32_t j = i; j < u->count; j++)
        pins |= u->states[j].of == i && u->streams[j].lane && lane_wants_pins(u->streams[j].lane);
    return pins ? pins_prefill(u->engine, &u->pages, i, s->prompt, s->prompt_count, u->features[i],
                               &u->pins[i], err)
                : engine_prefill(u->engine, &u->pages, i, s->prompt, s->prompt_count, u->features[i], err);
}

static int begin(struct run *u, struct err *err)
{
    struct pages_sequence sequences[ENGINE_LANES];
    size_t vocab = u->engine->config->vocab;
    for (uint32_t i = 0; i < u->count; i++) {
        struct decode_stream *s = &u->streams[i];
        CHECK(s->prompt_count > 0 && s->tokens > 0);
        while (u->streams[u->states[i].of].prompt != s->prompt)
            u->states[i].of++;
        sequences[i] = (struct pages_sequence){.positions = s->prompt_count + s->tokens,
                                               .shared = u->states[i].of < i ? s->prompt_count : 0,
                                               .of = u->states[i].of};
    }
    int r = engine_pages(u->engine, sequences, u->count, &u->pages, err);
    for (uint32_t i = 0; i < u->count && !r; i++) {
        if (u->states[i].of != i)
            continue;
        u->features[i] = engine_features_alloc(u->engine, u->streams[i].prompt_count);
        r = prefill(u, i, err);
        if (!r)
            memcpy(u->first + i * vocab, engine_logits(u->engine, 0), vocab * sizeof *u->first);
    }
    if (!r)
        r = engine_fork(u->engine, &u->pages, err);
    if (!r)
        side_by_side(u, begin_stream);
    for (uint32_t i = 0; i < u->count; i++) {
        mem_free(&u->features[i]);
        pins_free(&u->pins[i]);
    }
    return r;
}

/* One token in every stream that goes on; returns their number, or negative. */
static int step(struct run *u, struct err *err)
{
    struct engine_step steps[ENGINE_LANES] = {0};
    uint32_t n = 0, longest = 0;
    for (uint32_t i = 0; i < u->count; i++) {
        const struct decode_stream *s = &u->streams[i];
        struct stream *state = &u->states[i];
        if (state->unsound)
            return err_set(err, -EDOM, "logits at position %u are not finite", state->unsound);
        if (!state->working)
            continue;
        uint32_t position = s->prompt_count + (uint32_t)s->out.count - 1;
        state->row = n;
        steps[n++] = (struct engine_step){.pages = &u->pages,
                                          .sequence = i,
                                          .position = position,
                                          .token = s->out.ids[s->out.count - 1],
                                          .lists = s->lane ? state->lists : NULL,
                                          .group_of = s->lane ? lane_group_of(s->lane) : NULL};
        longest = position > longest ? position : longest;
    }
    int r = n ? engine_steps(u->engine, steps, n, err) : 0;
    if (n && !r)
        side_by_side(u, go_on);
    if (n && !r && u->engine->progress)
        u->engine->progress(longest);
    return r < 0 ? r : (int)n;
}

int decode_run(struct engine *e, struct decode_stream *streams, uint32_t count, struct err *err)
{
    struct run u = {.engine = e, .streams = streams, .count = count};
    int threads = pool_threads(compute_pool(e->compute));
    CHECK(count > 0 && count <= ENGINE_LANES);
    u.states = mem_alloc(count, sizeof *u.states);
    u.features = mem_alloc(count, sizeof *u.features);
    u.pins = mem_alloc(count, sizeof *u.pins);
    u.first = mem_alloc((size_t)count * e->config->vocab, sizeof *u.first);
    u.benches = mem_alloc((size_t)threads, sizeof *u.benches);
    for (int i = 0; i < threads; i++)
        u.benches[i] = (struct bench){mem_alloc(1, sampler_scratch_bytes(e->config->vocab)),
                                      mem_alloc(e->config->vocab, sizeof(float))};
    int r = begin(&u, err);
    if (!r)
        do
            r = step(&u, err);
        while (r > 0);
    for (int i = 0; i < threads; i++) {
        mem_free(&u.benches[i].scratch);
        mem_free(&u.benches[i].logits);
    }
    mem_free(&u.benches);
    mem_free(&u.features);
    mem_free(&u.pins);
    mem_free(&u.first);
    mem_free(&u.states);
    engine_pages_free(e, &u.pages);
    return r;
}
