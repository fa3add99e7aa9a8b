/* The double's selections as sets of bits. */
#include <errno.h>
#include <string.h>

#include "tests/fakegpu/fakegpu.h"

static uint32_t *set_at(const struct cuda_sets *s, uint32_t place, uint32_t list, bool second)
{
    return s->bits + (((uint64_t)place * s->lists + list) * 2 + second) * s->words;
}

static uint32_t *count_at(const struct cuda_sets *s, uint32_t query, uint32_t list)
{
    return s->count + ((uint64_t)query * s->lists + list) * 2;
}

/* Words of the set that is written and of the one it is compared with. */
static uint32_t before_of(const struct cuda_sets *s, uint32_t query, uint32_t list, uint32_t word)
{
    uint32_t how = s->how[query];
    return how & CUDA_SETS_DIFFER ? set_at(s, s->place[query], list, !(how & CUDA_SETS_SECOND))[word] : 0;
}

static void run_mark(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_sets_mark *m = argument;
    const struct cuda_sets *s = &m->sets;
    (void)worker;
    for (uint32_t r = 0; r < m->rows; r++) {
        uint32_t query = m->first_query + r / m->heads, list = m->first_list + r % m->heads;
        uint32_t place = s->place[query], *count = count_at(s, query, list);
        count[0] = count[1] = 0;
        if (place >= s->place_count)
            continue;
        uint32_t *now = set_at(s, place, list, s->how[query] & CUDA_SETS_SECOND);
        memset(now, 0, s->words * sizeof *now);
        for (uint32_t i = 0; i < m->row_count[r] && i < m->index_stride; i++) {
            uint32_t p = m->index[r * m->index_stride + i];
            if (p / 32 < s->words)
                now[p / 32] |= UINT32_C(1) << p % 32;
        }
        for (uint32_t w = 0; w < s->words; w++) {
            uint32_t before = before_of(s, query, list, w);
            count[0] += (uint32_t)__builtin_popcount(now[w] & ~before);
            count[1] += (uint32_t)__builtin_popcount(before & ~now[w]);
        }
    }
}

static bool sets_are_valid(const struct cuda_sets *s)
{
    return s->words && s->words <= CUDA_SETS_WORDS_MAX && s->lists && s->place_count && s->bits && s->count &&
           s->place && s->how;
}

int fakegpu_sets_mark(const struct cuda_sets_mark *m, struct CUstream_st *stream)
{
    if (!sets_are_valid(&m->sets) || m->heads == 0 || m->first_list > m->sets.lists ||
        m->heads > m->sets.lists - m->first_list)
        return -EINVAL;
    return m->rows ? FAKEGPU_LAUNCH(stream, run_mark, m, m->sets.bits, m->sets.count, m->sets.place,
                                    m->sets.how, m->index, m->row_count)
                   : 0;
}

/* Positions of the bits set, from `at` on as far as there is room; returns the place behind them. */
static uint64_t write_positions(const struct cuda_sets_changes *c, uint64_t at, uint32_t bits, uint32_t first)
{
    for (; bits; bits &= bits - 1, at++)
        if (at < c->room)
            c->work[at] = first + (uint32_t)__builtin_ctz(bits);
    return at;
}

static void run_changes(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_sets_changes *c = argument;
    const struct cuda_sets *s = &c->sets;
    uint64_t at = 0;
    (void)worker;
    for (uint32_t i = 0; i < c->n * s->lists; i++) {
        uint32_t query = c->first + i / s->lists, list = i % s->lists, place = s->place[query];
        if (place >= s->place_count || (count_at(s, query, list)[0] | count_at(s, query, list)[1]) == 0)
            continue;
        const uint32_t *now = set_at(s, place, list, s->how[query] & CUDA_SETS_SECOND);
        for (uint32_t w = 0; w < s->words; w++)
            at = write_positions(c, at, now[w] & ~before_of(s, query, list, w), w * 32);
        for (uint32_t w = 0; w < s->words; w++)
            at = write_positions(c, at, before_of(s, query, list, w) & ~now[w], w * 32);
    }
    *c->total = (uint32_t)(at < c->room ? at : c->room);
    memcpy(c->out, c->work, *c->total * sizeof *c->out);
}

int fakegpu_sets_changes(const struct cuda_sets_changes *c, struct CUstream_st *stream)
{
    if (!sets_are_valid(&c->sets) || c->room % 4 || c->room > UINT32_MAX - 3 || c->n > 65535 || !c->total ||
        !fakegpu_aligned(c->work, 16) || !fakegpu_aligned(c->out, 16))
        return -EINVAL;
    return c->n ? FAKEGPU_LAUNCH(stream, run_changes, c, c->sets.bits, c->sets.count, c->sets.place,
                                 c->sets.how, c->work, c->out, c->total)
                : 0;
}
