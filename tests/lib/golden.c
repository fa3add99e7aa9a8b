/* Reads golden logits and compares; see golden.h. No state. */
#include "tests/lib/golden.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"

static uint8_t *read_file(const char *path, size_t *ret_bytes)
{
    FILE *f = fopen(path, "rb");
    CHECK(f);
    CHECK(fseek(f, 0, SEEK_END) == 0);
    *ret_bytes = (size_t)ftell(f);
    rewind(f);
    uint8_t *data = mem_alloc(*ret_bytes, 1);
    CHECK(fread(data, 1, *ret_bytes, f) == *ret_bytes);
    fclose(f);
    return data;
}

void golden_open(struct golden *g, const char *path)
{
    size_t bytes;
    g->file = read_file(path, &bytes);
    uint32_t head[6];
    CHECK(bytes > 32 && !memcmp(g->file, "SCTXGLD", 8));
    memcpy(head, g->file + 8, sizeof head);
    g->positions = head[1];
    g->top_k = head[2];
    g->vocab = head[3];
    size_t n = g->positions, k = g->top_k;
    CHECK(bytes == 32 + 8 * n + 4 * (n + 1) + 4 * n + 8 * n * k);
    g->lse = (const double *)(g->file + 32);
    g->ids = (const uint32_t *)(g->lse + n);
    g->next = (const float *)(g->ids + n + 1);
    g->top_ids = (const uint32_t *)(g->next + n);
    g->top = (const float *)(g->top_ids + n * k);
}

static double log_sum_exp(const float *row, uint32_t count)
{
    double top = row[0], sum = 0;
    for (uint32_t i = 1; i < count; i++)
        top = row[i] > top ? row[i] : top;
    for (uint32_t i = 0; i < count; i++)
        sum += exp(row[i] - top);
    return top + log(sum);
}

void golden_compare(struct golden_figures *to, const struct golden *g, uint32_t p, const float *row)
{
    const uint32_t *ids = g->top_ids + (size_t)p * g->top_k;
    const float *top = g->top + (size_t)p * g->top_k;
    double lse = log_sum_exp(row, g->vocab), rest = 1, rest_ref = 1, kl = 0;
    uint32_t best = 0;
    for (uint32_t i = 1; i < g->vocab; i++)
        best = row[i] > row[best] ? i : best;
    double chosen = top[g->top_k - 1]; /* an id outside the top lies below it */
    for (uint32_t i = 0; i < g->top_k; i++) {
        double p_log = top[i] - g->lse[p], q_log = row[ids[i]] - lse;
        kl += exp(p_log) * (p_log - q_log);
        rest_ref -= exp(p_log);
        rest -= exp(q_log);
        if (ids[i] == best)
            chosen = top[i];
    }
    if (rest_ref > 0 && rest > 0)
        kl += rest_ref * log(rest_ref / rest);
    to->kl += kl;
    to->loss += lse - row[g->ids[p + 1]];
    to->loss_ref += g->lse[p] - g->next[p];
    to->positions++;
    if (best == ids[0])
        to->agree++;
    else if (top[0] - chosen > to->gap_max)
        to->gap_max = top[0] - chosen;
}

void golden_close(struct golden *g)
{
    mem_free(&g->file);
}

void golden_print(const struct golden_figures *f)
{
    double n = f->positions, ppl = exp(f->loss / n), ppl_ref = exp(f->loss_ref / n);
    printf("%u positions: perplexity %.4f, reference %.4f (%+.3f %%); top-1 agreement %.4f, largest gap of a "
           "disagreement %.4f; mean KL %.3e\n",
           f->positions, ppl, ppl_ref, 100 * (ppl / ppl_ref - 1), f->agree / n, f->gap_max, f->kl / n);
}
