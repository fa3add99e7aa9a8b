/* State of one request as the command line sees it. Loop's thread only; no I/O. */
#include "launch/sequence.h"

#include <math.h>

#include "base/clock.h"

void sequence_begin(struct sequence *s, const struct token_buf *prompt)
{
    *s = (struct sequence){.prompt = prompt};
    detok_init(&s->detok);
}

void sequence_free(struct sequence *s)
{
    token_buf_free(&s->generated);
    text_buf_free(&s->text);
    *s = (struct sequence){0};
}

void sequence_push(struct sequence *s, const struct tokenizer *tokenizer, const struct msg_u32s *ids)
{
    if (!s->first_ns)
        s->first_ns = clock_now_ns();
    for (uint32_t i = 0; i < ids->count; i++) {
        token_buf_push(&s->generated, ids->at[i]);
        detok_push(&s->detok, tokenizer, ids->at[i], &s->text);
    }
}

void sequence_finish(struct sequence *s, const struct msg_done *done)
{
    s->done = *done;
    s->finished = true;
    detok_finish(&s->detok, &s->text);
}

double sequence_ttft_ms(const struct sequence *s)
{
    return s->first_ns ? (double)(s->first_ns - s->sent_ns) / (double)CLOCK_MS : (double)NAN;
}

static double rate(double count, int64_t ns)
{
    return ns > 0 ? count * (double)CLOCK_S / (double)ns : (double)NAN;
}

double sequence_prefill_rate(const struct sequence *s)
{
    bool broken = s->done.reason == FINISH_CANCELLED || s->done.reason == FINISH_ERROR;
    if (!s->finished || (broken && !s->first_ns) || s->done.prompt_tokens < s->done.cached_tokens)
        return (double)NAN; /* of a prompt that was not computed to its end there is no rate */
    return rate(s->done.prompt_tokens - s->done.cached_tokens, s->done.prefill_ns);
}

double sequence_decode_rate(const struct sequence *s)
{
    if (!s->finished || s->done.generated_tokens < 2)
        return (double)NAN;
    return rate(s->done.generated_tokens - 1, s->done.decode_ns);
}

static double mean(double sum, uint64_t count)
{
    return count ? sum / (double)count : (double)NAN;
}

double sequence_attended(const struct kv_counters *c)
{
    return mean((double)c->attended, c->lists);
}

double sequence_overlap(const struct kv_counters *c)
{
    return mean((double)c->kept, c->selected);
}

double sequence_mass(const struct kv_counters *c)
{
    return mean(c->mass_sum, c->mass_count);
}

double sequence_mass_base(const struct kv_counters *c)
{
    return mean(c->mass_base_sum, c->mass_count);
}
