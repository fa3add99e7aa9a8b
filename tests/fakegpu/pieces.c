/* The double's movement of KV pieces and its attention: pieces are collected by their tables, every index
 * brought into range or left out as on a GPU, and attended by the CPU's operator. */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "tests/fakegpu/fakegpu.h"

uint64_t fakegpu_piece(const struct cuda_kv_view *kv, const uint64_t *at, uint32_t head, uint32_t item,
                       bool *ret_valid)
{
    uint64_t entry, inside;
    if (kv->slotted) {
        uint64_t unit = (uint64_t)head * kv->slots + item;
        entry = unit / kv->units_per_slab;
        inside = unit % kv->units_per_slab;
        *ret_valid = item < kv->slots && entry < kv->at_count;
    } else {
        entry = item / kv->page_tokens;
        inside = (uint64_t)head * kv->page_tokens + item % kv->page_tokens;
        *ret_valid = entry < kv->at_count;
    }
    entry = entry < kv->at_count ? entry : kv->at_count - 1;
    uint64_t offset = (at[entry] & ~UINT64_C(15)) + inside * kv->piece_bytes;
    uint64_t last = (kv->device_bytes - kv->piece_bytes) & ~UINT64_C(15);
    *ret_valid = *ret_valid && offset <= last;
    return offset <= last ? offset : last;
}

bool fakegpu_view_is_valid(const struct cuda_kv_view *kv)
{
    if (!fakegpu_is_16bit(kv->type) || kv->piece_bytes == 0 || kv->piece_bytes % 16 || kv->at_count == 0 ||
        kv->device_bytes < kv->piece_bytes || !fakegpu_aligned(kv->base, 16))
        return false;
    return kv->slotted ? kv->slots && kv->units_per_slab : kv->page_tokens != 0;
}

static void run_kv_write(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_kv_write *w = argument;
    (void)worker;
    for (uint32_t t = 0; t < w->n; t++) {
        uint32_t row = w->rows ? w->rows[t] : t;
        for (uint32_t h = 0; h < w->kv_heads && row < w->row_count; h++) {
            uint32_t item = w->head_items ? w->items[row * w->item_stride + h] : w->items[t];
            uint64_t from = t * w->stride + (uint64_t)h * w->head_dim;
            bool valid;
            uint64_t offset = fakegpu_piece(&w->kv, w->kv.at + row * w->kv.row_stride, h, item, &valid);
            if (!valid)
                continue;
            fakegpu_store(w->kv.base + offset, w->kv.type, 0, w->k + from, w->head_dim);
            fakegpu_store(w->kv.base + offset, w->kv.type, w->head_dim, w->v + from, w->head_dim);
        }
    }
}

int fakegpu_rope_write(const struct cuda_rope *rope, const struct cuda_kv_write *w,
                       struct CUstream_st *stream)
{
    if (!fakegpu_view_is_valid(&w->kv) || w->kv_heads == 0 || w->head_dim == 0 || w->head_dim % 8 ||
        w->stride % 4 || w->kv.piece_bytes < 4 * w->head_dim || !fakegpu_aligned(w->k, 16) ||
        !fakegpu_aligned(w->v, 16) || !w->items)
        return -EINVAL;
    int r = fakegpu_rope(rope, stream);
    if (r < 0 || w->n == 0)
        return r;
    return FAKEGPU_LAUNCH(stream, run_kv_write, w, w->kv.base, w->kv.at, w->k, w->v, w->rows, w->items);
}

static void run_moves(const struct cuda_moves *m, bool to_device)
{
    uint64_t run_bytes = (uint64_t)m->layers * m->kv.piece_bytes;
    for (uint32_t i = 0; i < m->count; i++) {
        struct cuda_move move = m->moves[i];
        if (move.row >= m->row_count || move.head >= m->heads || move.host % 16 ||
            move.host > m->host_bytes || m->host_bytes - move.host < run_bytes)
            continue;
        for (uint32_t l = 0; l < m->layers; l++) {
            const uint64_t *at =
                m->kv.at + move.row * m->kv.row_stride + (m->first_layer + l) * m->kv.layer_stride;
            uint8_t *host = m->host_base + move.host + (uint64_t)l * m->kv.piece_bytes;
            bool valid;
            uint8_t *piece = m->kv.base + fakegpu_piece(&m->kv, at, move.head, move.item, &valid);
            if (valid)
                memcpy(to_device ? piece : host, to_device ? host : piece, m->kv.piece_bytes);
        }
    }
}

static void run_gather(struct fakegpu_worker *worker, void *argument)
{
    (void)worker;
    run_moves(argument, true);
}

static void run_scatter(struct fakegpu_worker *worker, void *argument)
{
    (void)worker;
    run_moves(argument, false);
}

static int launch_moves(const struct cuda_moves *m, void (*run)(struct fakegpu_worker *, void *),
                        struct CUstream_st *stream)
{
    if (!fakegpu_view_is_valid(&m->kv) || m->layers == 0 || m->blocks > 64 ||
        !fakegpu_aligned(m->host_base, 16) || !fakegpu_aligned(m->moves, 16))
        return -EINVAL;
    return m->count ? FAKEGPU_LAUNCH(stream, run, m, m->kv.base, m->kv.at, m->host_base, m->moves) : 0;
}

int fakegpu_gather(const struct cuda_moves *m, struct CUstream_st *stream)
{
    return launch_moves(m, run_gather, stream);
}

int fakegpu_scatter(const struct cuda_moves *m, struct CUstream_st *stream)
{
    return launch_moves(m, run_scatter, stream);
}

static void run_copies(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_copies *c = argument;
    (void)worker;
    for (uint64_t i = 0; i < (uint64_t)c->count * c->layers; i++) {
        struct cuda_copy copy = c->copies[i / c->layers];
        uint64_t layer = c->first_layer + i % c->layers;
        bool from_valid, to_valid;
        if (copy.row >= c->row_count || copy.head >= c->heads)
            continue;
        const uint64_t *from_at = c->from.at + copy.row * c->from.row_stride + layer * c->from.layer_stride;
        const uint64_t *to_at = c->to.at + copy.row * c->to.row_stride + layer * c->to.layer_stride;
        uint64_t from = fakegpu_piece(&c->from, from_at, copy.head, copy.from, &from_valid);
        uint64_t to = fakegpu_piece(&c->to, to_at, copy.head, copy.to, &to_valid);
        if (from_valid && to_valid)
            memcpy(c->to.base + to, c->from.base + from, c->from.piece_bytes);
    }
}

int fakegpu_copy_pieces(const struct cuda_copies *c, struct CUstream_st *stream)
{
    if (!fakegpu_view_is_valid(&c->from) || !fakegpu_view_is_valid(&c->to) ||
        c->from.piece_bytes != c->to.piece_bytes || c->layers == 0 || !fakegpu_aligned(c->copies, 4))
        return -EINVAL;
    return c->count ? FAKEGPU_LAUNCH(stream, run_copies, c, c->from.base, c->from.at, c->to.base, c->to.at,
                                     c->copies)
                    : 0;
}

/* ---- attention ----------------------------------------------------------------------------------------- */

/* As the kernel wants: chunks of parts. Nothing here needs it, but sizes must be like those of a GPU. */
size_t fakegpu_attn_work_bytes(uint32_t n, uint32_t q_heads, uint32_t head_dim, uint32_t list_max)
{
    uint64_t chunks = ((uint64_t)list_max + CUDA_ATTN_CHUNK - 1) / CUDA_ATTN_CHUNK;
    return (size_t)(n * chunks * q_heads * (head_dim + 4) * sizeof(float));
}

/* The pieces of a list side by side in the worker's memory: a view of one page. `item` NULL: identity. */
static struct kv_view collect(struct fakegpu_worker *worker, const struct cuda_kv_view *kv,
                              const uint64_t *at, uint32_t head, const uint32_t *item, uint32_t count)
{
    static const uint64_t zero = 0;
    uint8_t *to = fakegpu_scratch(worker, 0, (size_t)(count ? count : 1) * kv->piece_bytes);
    for (uint32_t i = 0; i < count; i++) {
        bool valid;
        memcpy(to + (size_t)i * kv->piece_bytes,
               kv->base + fakegpu_piece(kv, at, head, item ? item[i] : i, &valid), kv->piece_bytes);
    }
    return (struct kv_view){.base = to,
                            .at = &zero,
                            .page_tokens = count ? count : 1,
                            .piece_bytes = kv->piece_bytes,
                            .type = kv->type};
}

static void attend_head(struct fakegpu_worker *worker, const struct cuda_attn *a, uint32_t t, uint32_t head)
{
    uint32_t group = a->q_heads / a->kv_heads, row = a->rows ? a->rows[t] : t, h = a->shared_list ? 0 : head;
    uint64_t size = (uint64_t)group * a->head_dim, at = (uint64_t)t * a->q_heads * a->head_dim + head * size;
    const uint32_t *item = NULL;
    uint32_t count = 0;
    if (row < a->row_count) {
        item = a->items ? a->items + row * a->item_stride + (uint64_t)h * a->list_max : NULL;
        count = a->items ? a->counts[row * a->count_stride + h] : a->counts[t];
        count = count < a->list_max ? count : a->list_max;
    }
    const uint64_t *table = a->kv.at + (row < a->row_count ? row : 0) * a->kv.row_stride;
    struct kv_view view = collect(worker, &a->kv, table, head, item, count);
    struct attn_list list = {count, NULL};
    struct attn_query query = {&view, &list, 1};
    float *out = fakegpu_scratch(worker, 1, size * sizeof *out);
    compute_attention(worker->compute, out, a->q + t * a->q_stride + head * size, &query, 1, (int)group, 1,
                      (int)a->head_dim, a->scale);
    fakegpu_store(a->out, a->out_type, at, out, size);
}

static void run_attn(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_attn *a = argument;
    for (uint32_t t = 0; t < a->n; t++)
        for (uint32_t h = 0; h < a->kv_heads; h++)
            attend_head(worker, a, t, h);
}

int fakegpu_attn(const struct cuda_attn *a, struct CUstream_st *stream)
{
    if (!fakegpu_view_is_valid(&a->kv) || !fakegpu_is_output(a->out_type) || a->kv_heads == 0 ||
        a->q_heads == 0 || a->q_heads % a->kv_heads || a->q_heads / a->kv_heads > CUDA_GROUP_MAX ||
        (a->head_dim != 64 && a->head_dim != 128) || a->kv.piece_bytes < 4 * a->head_dim ||
        a->list_max == 0 || (!a->items && a->kv.slotted) || a->q_stride % 4 || !fakegpu_aligned(a->q, 16) ||
        !a->work || a->n > 65535 || a->kv_heads > 65535)
        return -EINVAL;
    return a->n ? FAKEGPU_LAUNCH(stream, run_attn, a, a->kv.base, a->kv.at, a->out, a->q, a->rows, a->counts,
                                 a->items, a->work)
                : 0;
}

/* One KV head of a span: the pieces once, then each token's causal list. Queries are rounded as the pieces
 * are.
 */
static void prefill_head(struct fakegpu_worker *worker, const struct cuda_prefill *p,
                         const struct cuda_span *span, uint32_t head)
{
    uint32_t group = p->q_heads / p->kv_heads, count = span->count < p->span_max ? span->count : p->span_max;
    uint64_t size = (uint64_t)group * p->head_dim;
    struct kv_view view =
        collect(worker, &p->kv, p->kv.at + span->row * p->kv.row_stride, head, NULL, span->position + count);
    float *out = fakegpu_scratch(worker, 1, size * sizeof *out), *q = fakegpu_scratch(worker, 2, size * 4);
    uint16_t *narrow = fakegpu_scratch(worker, 3, size * sizeof *narrow);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t t = span->first + i, at = (t * p->kv_heads + head) * size;
        struct attn_list list = {span->position + i + 1, NULL};
        struct attn_query query = {&view, &list, 1};
        fakegpu_store(narrow, p->kv.type, 0, p->q + t * p->q_stride + head * size, size);
        fakegpu_load(q, narrow, p->kv.type, 0, size);
        compute_attention(worker->compute, out, q, &query, 1, (int)group, 1, (int)p->head_dim, p->scale);
        fakegpu_store(p->out, p->out_type, at, out, size);
    }
}

static void run_prefill(struct fakegpu_worker *worker, void *argument)
{
    const struct cuda_prefill *p = argument;
    for (uint32_t s = 0; s < p->span_count; s++)
        for (uint32_t h = 0; h < p->kv_heads && p->spans[s].row < p->row_count; h++)
            prefill_head(worker, p, &p->spans[s], h);
}

int fakegpu_prefill(const struct cuda_prefill *p, struct CUstream_st *stream)
{
    if (!fakegpu_view_is_valid(&p->kv) || p->kv.slotted || p->kv.page_tokens % 64 || p->kv_heads == 0 ||
        p->q_heads == 0 || p->q_heads % p->kv_heads || (p->head_dim != 64 && p->head_dim != 128) ||
        p->kv.piece_bytes < 4 * p->head_dim || !fakegpu_is_output(p->out_type) || p->q_stride % 4 ||
        !fakegpu_aligned(p->q, 16) || !fakegpu_aligned(p->out, 8) || p->q_heads > 65535 ||
        p->span_count > 65535)
        return -EINVAL;
    return p->span_count && p->span_max
               ? FAKEGPU_LAUNCH(stream, run_prefill, p, p->kv.base, p->kv.at, p->out, p->q, p->spans)
               : 0;
}
