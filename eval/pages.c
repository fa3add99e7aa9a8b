/* See pages.h. Owner: who holds the struct. */
#include "eval/pages.h"

#include <string.h>

#include "base/alloc.h"
#include "proto/limits.h"

static uint64_t *place(const struct pages *p, uint32_t sequence, uint32_t layer, uint32_t page)
{
    return &p->at[((size_t)sequence * p->config->layers + layer) * p->pages + page];
}

void pages_init(struct pages *p, const struct model_config *c, uint32_t positions, uint32_t shared,
                uint32_t sequences)
{
    *p = (struct pages){.config = c,
                        .pages = (positions + BLOCK_TOKENS - 1) / BLOCK_TOKENS,
                        .sequences = sequences,
                        .shared = shared,
                        .page_bytes = (uint64_t)BLOCK_TOKENS * c->kv_heads * 4 * c->head_dim};
    uint32_t common = shared / BLOCK_TOKENS;
    p->at = mem_alloc((size_t)sequences * c->layers * p->pages, sizeof *p->at);
    uint64_t count = 0;
    for (uint32_t s = 0; s < sequences; s++)
        for (uint32_t l = 0; l < c->layers; l++)
            for (uint32_t i = 0; i < p->pages; i++)
                *place(p, s, l, i) = s && i < common ? *place(p, 0, l, i) : p->page_bytes * count++;
    p->base = mem_alloc_aligned((size_t)count, (size_t)p->page_bytes);
}

void pages_free(struct pages *p)
{
    mem_free(&p->base);
    mem_free(&p->at);
    memset(p, 0, sizeof *p);
}

void pages_fork(struct pages *p)
{
    if (p->shared % BLOCK_TOKENS == 0)
        return;
    uint32_t page = p->shared / BLOCK_TOKENS;
    for (uint32_t s = 1; s < p->sequences; s++)
        for (uint32_t l = 0; l < p->config->layers; l++)
            memcpy(p->base + *place(p, s, l, page), p->base + *place(p, 0, l, page), (size_t)p->page_bytes);
}

struct kv_view pages_view(const struct pages *p, uint32_t sequence, uint32_t layer)
{
    return (struct kv_view){.base = p->base,
                            .at = place(p, sequence, layer, 0),
                            .page_tokens = BLOCK_TOKENS,
                            .piece_bytes = 4 * p->config->head_dim,
                            .type = DTYPE_F16};
}
