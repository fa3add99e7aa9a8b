/* See pages.h. Owner: who holds the struct. */
#include "eval/pages.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "proto/limits.h"

static uint32_t pages_of(uint32_t positions)
{
    return (positions + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
}

uint64_t *pages_at(const struct pages *p, uint32_t sequence, uint32_t layer)
{
    return p->at + ((size_t)sequence * p->config->layers + layer) * p->pages;
}

void pages_plan(struct pages *p, const struct model_config *c, const struct pages_sequence *sequences,
                uint32_t count)
{
    *p = (struct pages){.config = c,
                        .sequences = count,
                        .page_bytes = (uint64_t)BLOCK_TOKENS * c->kv_heads * 4 * c->head_dim};
    p->sequence = mem_alloc(count, sizeof *p->sequence);
    for (uint32_t s = 0; s < count; s++) {
        uint32_t pages = pages_of(sequences[s].positions);
        CHECK(!sequences[s].shared || sequences[s].of < s);
        p->sequence[s] = sequences[s];
        p->pages = pages > p->pages ? pages : p->pages;
    }
    p->at = mem_alloc((size_t)count * c->layers * p->pages, sizeof *p->at);
    uint64_t used = 0;
    for (uint32_t s = 0; s < count; s++) {
        uint32_t common = sequences[s].shared / BLOCK_TOKENS, of = sequences[s].of;
        for (uint32_t l = 0; l < c->layers; l++)
            for (uint32_t i = 0; i < pages_of(sequences[s].positions); i++)
                pages_at(p, s, l)[i] = i < common ? pages_at(p, of, l)[i] : p->page_bytes * used++;
    }
    p->total_bytes = p->page_bytes * used;
}

void pages_init(struct pages *p, const struct model_config *c, const struct pages_sequence *sequences,
                uint32_t count)
{
    pages_plan(p, c, sequences, count);
    p->base = mem_alloc_aligned((size_t)(p->total_bytes / p->page_bytes), (size_t)p->page_bytes);
}

void pages_free(struct pages *p)
{
    mem_free(&p->base);
    mem_free(&p->at);
    mem_free(&p->sequence);
    memset(p, 0, sizeof *p);
}

uint32_t pages_split(const struct pages *p, uint32_t sequence)
{
    uint32_t shared = p->sequence[sequence].shared;
    return shared % BLOCK_TOKENS ? shared / BLOCK_TOKENS : UINT32_MAX;
}

void pages_fork(struct pages *p)
{
    for (uint32_t s = 0; s < p->sequences; s++) {
        uint32_t page = pages_split(p, s);
        for (uint32_t l = 0; l < p->config->layers && page != UINT32_MAX; l++)
            memcpy(p->base + pages_at(p, s, l)[page], p->base + pages_at(p, p->sequence[s].of, l)[page],
                   (size_t)p->page_bytes);
    }
}

struct kv_view pages_view(const struct pages *p, uint32_t sequence, uint32_t layer)
{
    return (struct kv_view){.base = p->base,
                            .at = pages_at(p, sequence, layer),
                            .page_tokens = BLOCK_TOKENS,
                            .piece_bytes = 4 * p->config->head_dim,
                            .type = DTYPE_F16};
}
