/* Samples tokens. No state at all: randomness is a hash of (seed, sequence, position), and probabilities
 * are summed in a fixed order, so a choice can be repeated anywhere. It must never allocate: it runs once
 * a token. */
#include "model/sampler.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/hash.h"

#define PENALTY_WINDOW_MAX (1u << 20)

struct candidate {
    float logit;
    uint32_t id;
};

struct sampler_params sampler_params_default(void)
{
    return (struct sampler_params){.top_p = 1, .repeat_penalty = 1, .repeat_last_n = 64};
}

int sampler_params_check(const struct sampler_params *params, struct err *err)
{
    const struct {
        const char *name;
        float value, least, most;
    } ranges[] = {
        {"temperature", params->temperature, 0, 100},
        {"top_p", params->top_p, 0, 1},
        {"min_p", params->min_p, 0, 1},
        {"repeat_penalty", params->repeat_penalty, 0.01f, 100},
        {"presence_penalty", params->presence_penalty, -2, 2},
        {"frequency_penalty", params->frequency_penalty, -2, 2},
    };
    for (unsigned i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (!(ranges[i].value >= ranges[i].least && ranges[i].value <= ranges[i].most)) /* NaN fails both */
            return err_set(err, -EINVAL, "%s: found %g, expected %g to %g", ranges[i].name,
                           (double)ranges[i].value, (double)ranges[i].least, (double)ranges[i].most);
    if (params->repeat_last_n > PENALTY_WINDOW_MAX)
        return err_set(err, -EINVAL, "repeat_last_n: found %u, expected at most %u", params->repeat_last_n,
                       PENALTY_WINDOW_MAX);
    return 0;
}

size_t sampler_scratch_bytes(uint32_t vocab)
{
    return (size_t)vocab * sizeof(struct candidate); /* counts of occurrences need less, and earlier */
}

static int apply_penalties(const struct sampler_params *p, const struct sampler_input *in)
{
    uint32_t n = p->repeat_last_n < in->history_count ? p->repeat_last_n : in->history_count;
    const uint32_t *last = in->history + (in->history_count - n);
    uint32_t *counts = in->scratch; /* [vocab]; only entries that occur are ever read */
    if (p->repeat_penalty == 1 && p->presence_penalty == 0 && p->frequency_penalty == 0)
        return 0;
    for (uint32_t i = 0; i < n; i++) {
        if (last[i] >= in->vocab)
            return -EINVAL;
        counts[last[i]] = 0;
    }
    for (uint32_t i = 0; i < n; i++)
        counts[last[i]]++;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t count = counts[last[i]];
        float *logit = &in->logits[last[i]];
        if (!count)
            continue; /* done at an earlier occurrence */
        counts[last[i]] = 0;
        *logit = *logit > 0 ? *logit / p->repeat_penalty : *logit * p->repeat_penalty;
        *logit -= p->presence_penalty + (float)count * p->frequency_penalty;
    }
    return 0;
}

enum { LANES = 16 };

/* Largest logit and check in one pass, in lanes that compilers turn into vectors; then its first place. */
static int find_best(const float *logits, uint32_t vocab, uint32_t *ret_id)
{
    float most[LANES], best = -INFINITY;
    uint32_t bad[LANES] = {0}, any = 0, i = 0;
    for (uint32_t j = 0; j < LANES; j++)
        most[j] = -INFINITY;
    for (; i + LANES <= vocab; i += LANES)
        for (uint32_t j = 0; j < LANES; j++) {
            float x = logits[i + j];
            bad[j] |= !(x < INFINITY); /* NaN too */
            most[j] = x > most[j] ? x : most[j];
        }
    for (; i < vocab; i++) {
        any |= !(logits[i] < INFINITY);
        best = logits[i] > best ? logits[i] : best;
    }
    for (uint32_t j = 0; j < LANES; j++) {
        any |= bad[j];
        best = most[j] > best ? most[j] : best;
    }
    if (any || best == -INFINITY)
        return -EDOM;
    for (i = 0; logits[i] != best; i++)
        ;
    *ret_id = i;
    return 0;
}

static bool before(struct candidate a, struct candidate b)
{
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

/* Max-heap by `before`: candidates leave it in their order, as many as are wanted. */
static void sift_down(struct candidate *heap, uint32_t count, uint32_t at)
{
    struct candidate moved = heap[at];
    uint64_t child;
    while ((child = 2 * (uint64_t)at + 1) < count) {
        if (child + 1 < count && before(heap[child + 1], heap[child]))
            child++;
        if (!before(heap[child], moved))
            break;
        heap[at] = heap[child];
        at = (uint32_t)child;
    }
    heap[at] = moved;
}

/* Moves the largest of heap[0 .. count) to heap[count - 1]. */
static void pop_to_end(struct candidate *heap, uint32_t count)
{
    struct candidate top = heap[0];
    heap[0] = heap[count - 1];
    heap[count - 1] = top;
    sift_down(heap, count - 1, 0);
}

/* Keeps top_k, then top_p of what that left. The survivors are the last *count of the array of `vocab`, the
 * best one at the very end. */
static uint32_t cut(const struct sampler_params *p, struct candidate *c, uint32_t vocab, float best)
{
    uint32_t most = p->top_k && p->top_k < vocab ? p->top_k : vocab, kept = 0;
    if (most == vocab && p->top_p >= 1)
        return vocab; /* in order of ids: any fixed order will do */
    for (uint32_t i = vocab / 2; i-- > 0;)
        sift_down(c, vocab, i);
    double total = 0, sum = 0;
    if (most == vocab) { /* top_p alone: the total needs no order */
        for (uint32_t i = 0; i < vocab; i++)
            total += exp((double)c[i].logit - best);
        while (kept < vocab && (kept == 0 || sum < p->top_p * total)) {
            pop_to_end(c, vocab - kept);
            kept++;
            sum += exp((double)c[vocab - kept].logit - best);
        }
        return kept;
    }
    for (; kept < most; kept++) {
        pop_to_end(c, vocab - kept);
        total += exp((double)c[vocab - kept - 1].logit - best);
    }
    if (p->top_p >= 1)
        return kept;
    for (kept = 0; kept < most && (kept == 0 || sum < p->top_p * total); kept++)
        sum += exp((double)c[vocab - kept - 1].logit - best);
    return kept;
}

/* Uniform in [0, 1), 53 bits. */
static double random_unit(uint64_t seed, uint64_t sequence, uint32_t position)
{
    uint64_t key[2] = {sequence, position};
    return (double)(hash_bytes(seed, key, sizeof key).lo >> 11) * 0x1p-53;
}

/* Draws from the last `kept` candidates, walking from the end: softmax of logit / temperature among those
 * that min_p leaves. */
static uint32_t draw(const struct sampler_params *p, const struct sampler_input *in, uint32_t kept,
                     float best)
{
    const struct candidate *c = in->scratch;
    double least = p->min_p > 0 ? best + log(p->min_p) : -INFINITY, total = 0, sum = 0;
    for (uint32_t i = in->vocab; i-- > in->vocab - kept;)
        if (c[i].logit >= least)
            total += exp(((double)c[i].logit - best) / p->temperature);
    double target = random_unit(p->seed, in->sequence, in->position) * total;
    uint32_t id = 0;
    for (uint32_t i = in->vocab; i-- > in->vocab - kept;) {
        double weight = c[i].logit >= least ? exp(((double)c[i].logit - best) / p->temperature) : 0;
        if (weight <= 0)
            continue;
        id = c[i].id; /* the last one with any weight, should rounding leave the target above the sum */
        sum += weight;
        if (sum > target)
            break;
    }
    return id;
}

int sampler_sample(const struct sampler_params *params, const struct sampler_input *input, uint32_t *ret_id)
{
    uint32_t best = 0;
    int rc = apply_penalties(params, input);
    if (!rc)
        rc = find_best(input->logits, input->vocab, &best);
    if (rc < 0)
        return rc;
    if (params->temperature > 0 && params->top_k != 1) {
        struct candidate *c = input->scratch;
        float top = input->logits[best];
        for (uint32_t i = 0; i < input->vocab; i++)
            c[i] = (struct candidate){input->logits[i], i};
        uint32_t kept = cut(params, c, input->vocab, top);
        best = draw(params, input, kept, top);
    }
    *ret_id = best;
    return 0;
}
