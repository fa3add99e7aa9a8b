/* Driver of compute_attention.
 *
 * A list is cut by index into chunks of ATTN_CHUNK entries. Each chunk gives a part: its own maximum, sum
 * of exponentials and weighted sum of V; parts are merged in the order of the chunks. So the order of
 * operations depends on the list's length alone: parts may be made by any thread, one after the other or
 * all at once, and neighbouring queries may be taken through a chunk together.
 *
 * Two shapes of work: with many queries an item is (some neighbouring queries, KV head) and merges as it
 * goes; with few (decoding), an item is one chunk and the merge follows. Called by the owner's thread. */
#include <math.h>
#include <string.h>

#include "base/check.h"
#include "base/pool.h"
#include "compute/cpu/address.h"
#include "compute/cpu/kernels.h"

enum { QUERIES_MAX = 16, ITEMS_PER_THREAD = 4 };

struct job {
    struct compute *c;
    const struct kernels *kernels;
    float *out;
    const float *q;
    const struct attn_query *queries;
    int n, q_heads, kv_heads, head_dim, group;
    float scale;
    int queries_per_item; /* many queries */
    int chunk, chunks;    /* few queries: the wave of chunks that is being worked on */
    size_t part_floats;
    float *parts, *states; /* few queries: [item][chunk][part_floats], [item][group][max, sum] */
};

/* A part or a state of `rows` query rows. */
struct part {
    float *acc; /* [rows][head_dim] */
    float *max, *sum;
};

static const struct attn_list *list_of(const struct job *job, int query, int head)
{
    const struct attn_query *q = &job->queries[query];
    return &q->lists[q->shared_list ? 0 : head];
}

static size_t row_of(const struct job *job, int query, int q_head)
{
    return ((size_t)query * (size_t)job->q_heads + (size_t)q_head) * (size_t)job->head_dim;
}

static void merge(struct part *state, const struct part *part, int rows, int head_dim, int first)
{
    for (int r = 0; r < rows; r++) {
        float *acc = state->acc + (size_t)r * (size_t)head_dim;
        const float *more = part->acc + (size_t)r * (size_t)head_dim;
        if (first) {
            memcpy(acc, more, (size_t)head_dim * sizeof *acc);
            state->max[r] = part->max[r];
            state->sum[r] = part->sum[r];
            continue;
        }
        float max = part->max[r] > state->max[r] ? part->max[r] : state->max[r];
        float old_factor = expf(state->max[r] - max), new_factor = expf(part->max[r] - max);
        for (int d = 0; d < head_dim; d++)
            acc[d] = acc[d] * old_factor + more[d] * new_factor;
        state->sum[r] = state->sum[r] * old_factor + part->sum[r] * new_factor;
        state->max[r] = max;
    }
}

static void finish(float *acc, const float *sum, int rows, int head_dim)
{
    for (int r = 0; r < rows; r++) {
        float factor = 1.0f / sum[r];
        for (int d = 0; d < head_dim; d++)
            acc[(size_t)r * (size_t)head_dim + (size_t)d] *= factor;
    }
}

static void run_chunk(const struct job *job, struct scratch *s, struct attn_tile *tile, struct part *ret_part)
{
    tile->stride = ATTN_CHUNK;
    tile->piece = s->piece;
    tile->piece_bytes = 4 * job->head_dim;
    tile->head_dim = job->head_dim;
    tile->scale = job->scale;
    job->kernels->attn_scores(s->scores, tile);
    for (int r = 0; r < tile->rows; r++)
        ret_part->sum[r] =
            job->kernels->softmax_part(s->scores + r * ATTN_CHUNK, tile->count, &ret_part->max[r]);
    job->kernels->attn_values(ret_part->acc, s->scores, tile);
}

static uint32_t chunk_length(uint32_t count, uint32_t first)
{
    return count - first < ATTN_CHUNK ? count - first : ATTN_CHUNK;
}

/* Neighbouring queries that can share the pieces of a chunk, and the query heads of one KV head they want. */
struct run {
    int query, queries;
    int kv_head, q_head, heads;
    uint32_t least, most; /* counts of the shortest and the longest list */
    uint32_t first;       /* first list entry of the chunk that is being worked on */
};

static int same_pieces(const struct job *job, int a, int b, int head)
{
    return job->queries[a].kv == job->queries[b].kv && !list_of(job, a, head)->item &&
           !list_of(job, b, head)->item;
}

/* Grows a run from `query` up to `end`. */
static struct run run_from(const struct job *job, int query, int end, int kv_head, int q_head, int heads)
{
    uint32_t count = list_of(job, query, kv_head)->count;
    struct run run = {query, 1, kv_head, q_head, heads, count, count, 0};
    while (query + run.queries < end && (run.queries + 1) * heads <= ATTN_ROWS &&
           same_pieces(job, query, query + run.queries, kv_head)) {
        count = list_of(job, query + run.queries++, kv_head)->count;
        run.least = count < run.least ? count : run.least;
        run.most = count > run.most ? count : run.most;
    }
    return run;
}

/* Takes queries [from, from + queries) of the run through one chunk and merges the part into their states. */
static void run_queries(const struct job *job, struct scratch *s, const struct run *run, int from,
                        int queries, uint32_t length)
{
    const float *q[ATTN_ROWS];
    for (int i = 0; i < queries; i++)
        for (int h = 0; h < run->heads; h++)
            q[i * run->heads + h] = job->q + row_of(job, run->query + from + i, run->q_head + h);
    struct attn_tile tile = {
        .count = (int)length,
        .type = job->queries[run->query].kv->type,
        .q = q,
        .rows = queries * run->heads,
    };
    struct part part = {s->part, s->part_max, s->part_sum};
    run_chunk(job, s, &tile, &part);
    for (int i = 0; i < queries; i++) {
        int row = i * run->heads, state_row = (from + i) * run->heads;
        struct part state = {job->out + row_of(job, run->query + from + i, run->q_head), s->max + state_row,
                             s->sum + state_row};
        struct part own = {s->part + (size_t)row * (size_t)job->head_dim, s->part_max + row,
                           s->part_sum + row};
        merge(&state, &own, run->heads, job->head_dim, run->first == 0);
    }
}

static void run_all_chunks(const struct job *job, struct scratch *s, struct run *run)
{
    const struct kv_view *kv = job->queries[run->query].kv;
    for (uint32_t first = 0; first < run->most; first += ATTN_CHUNK) {
        run->first = first;
        uint32_t length = chunk_length(run->most, first);
        address_pieces(s->piece, kv, (uint32_t)run->kv_head, list_of(job, run->query, run->kv_head)->item,
                       first, length);
        if (run->least >= first + length) {
            run_queries(job, s, run, 0, run->queries, length);
            continue;
        }
        /* Some lists end inside this chunk: a query must not touch what lies past its own end. */
        for (int i = 0; i < run->queries; i++) {
            uint32_t count = list_of(job, run->query + i, run->kv_head)->count;
            if (count > first)
                run_queries(job, s, run, i, 1, chunk_length(count, first));
        }
    }
    for (int i = 0; i < run->queries; i++) {
        float *acc = job->out + row_of(job, run->query + i, run->q_head);
        if (list_of(job, run->query + i, run->kv_head)->count == 0)
            memset(acc, 0, (size_t)run->heads * (size_t)job->head_dim * sizeof *acc);
        else
            finish(acc, s->sum + i * run->heads, run->heads, job->head_dim);
    }
}

static void many_item(void *arg, int index, int thread)
{
    const struct job *job = arg;
    int kv_head = index % job->kv_heads, first = index / job->kv_heads * job->queries_per_item;
    int end = job->n - first < job->queries_per_item ? job->n : first + job->queries_per_item;
    for (int h = 0; h < job->group; h += ATTN_ROWS) {
        int heads = job->group - h < ATTN_ROWS ? job->group - h : ATTN_ROWS;
        for (int query = first; query < end;) {
            struct run run = run_from(job, query, end, kv_head, kv_head * job->group + h, heads);
            run_all_chunks(job, &job->c->scratch[thread], &run);
            query += run.queries;
        }
    }
}

static void attend_many(struct job *job)
{
    int per_item = job->n * job->kv_heads / (job->c->threads * ITEMS_PER_THREAD);
    job->queries_per_item = per_item < 1 ? 1 : per_item > QUERIES_MAX ? QUERIES_MAX : per_item;
    int items = (job->n + job->queries_per_item - 1) / job->queries_per_item;
    pool_run(job->c->pool, items * job->kv_heads, many_item, job);
}

static struct part part_at(const struct job *job, int item, int chunk)
{
    float *at = job->parts + ((size_t)item * (size_t)job->chunks + (size_t)chunk) * job->part_floats;
    float *max = at + (size_t)job->group * (size_t)job->head_dim;
    return (struct part){at, max, max + job->group};
}

static void part_item(void *arg, int index, int thread)
{
    const struct job *job = arg;
    int item = index / job->chunks, chunk = index % job->chunks;
    int query = item / job->kv_heads, kv_head = item % job->kv_heads;
    const struct attn_list *list = list_of(job, query, kv_head);
    uint32_t first = (uint32_t)(job->chunk + chunk) * ATTN_CHUNK;
    if (first >= list->count)
        return;
    uint32_t length = chunk_length(list->count, first);
    struct scratch *s = &job->c->scratch[thread];
    const struct kv_view *kv = job->queries[query].kv;
    address_pieces(s->piece, kv, (uint32_t)kv_head, list->item, first, length);
    const float *q[ATTN_ROWS];
    for (int h = 0; h < job->group; h++)
        q[h] = job->q + row_of(job, query, kv_head * job->group + h);
    struct attn_tile tile = {.count = (int)length, .type = kv->type, .q = q, .rows = job->group};
    struct part part = part_at(job, item, chunk);
    run_chunk(job, s, &tile, &part);
}

static void merge_item(void *arg, int item, int thread)
{
    (void)thread;
    const struct job *job = arg;
    int query = item / job->kv_heads, kv_head = item % job->kv_heads;
    uint32_t count = list_of(job, query, kv_head)->count;
    float *max = job->states + (size_t)item * 2 * (size_t)job->group;
    struct part state = {job->out + row_of(job, query, kv_head * job->group), max, max + job->group};
    if (count == 0 && job->chunk == 0)
        memset(state.acc, 0, (size_t)job->group * (size_t)job->head_dim * sizeof *state.acc);
    for (int i = 0; i < job->chunks && (uint32_t)(job->chunk + i) * ATTN_CHUNK < count; i++) {
        struct part part = part_at(job, item, i);
        merge(&state, &part, job->group, job->head_dim, job->chunk + i == 0);
        if (count - (uint32_t)(job->chunk + i) * ATTN_CHUNK <= ATTN_CHUNK)
            finish(state.acc, state.sum, job->group, job->head_dim);
    }
}

/* Parts of all items go to the shared buffer, in waves of as many chunks as it holds. */
static void attend_few(struct job *job, int items, size_t wave)
{
    uint32_t most = 0;
    for (int t = 0; t < job->n; t++)
        for (int h = 0; h < job->kv_heads; h++) {
            uint32_t count = list_of(job, t, h)->count;
            most = count > most ? count : most;
        }
    int total = (int)((most + (uint64_t)ATTN_CHUNK - 1) / ATTN_CHUNK);
    job->states = job->c->shared;
    job->parts = job->states + (size_t)items * 2 * (size_t)job->group;
    do {
        int left = total - job->chunk;
        job->chunks = (size_t)left < wave ? left : (int)wave;
        pool_run(job->c->pool, items * job->chunks, part_item, job);
        pool_run(job->c->pool, items, merge_item, job);
        job->chunk += job->chunks;
    } while (job->chunk < total);
}

void compute_attention(struct compute *c, float *out, const float *q, const struct attn_query *queries, int n,
                       int q_heads, int kv_heads, int head_dim, float scale)
{
    if (n <= 0)
        return;
    CHECK(kv_heads > 0 && q_heads % kv_heads == 0 && head_dim > 0 && head_dim <= HEAD_DIM_MAX);
    struct job job = {.c = c,
                      .kernels = kernels_for_head(c, head_dim),
                      .out = out,
                      .q = q,
                      .queries = queries,
                      .n = n,
                      .q_heads = q_heads,
                      .kv_heads = kv_heads,
                      .head_dim = head_dim,
                      .group = q_heads / kv_heads,
                      .scale = scale};
    job.part_floats = (size_t)job.group * ((size_t)head_dim + 2);
    int64_t items = (int64_t)n * kv_heads;
    int few = c->threads > 1 && items < c->threads * ITEMS_PER_THREAD && job.group <= ATTN_ROWS;
    size_t wave =
        few ? (SHARED_FLOATS - (size_t)items * 2 * (size_t)job.group) / ((size_t)items * job.part_floats) : 0;
    if (wave > 0)
        attend_few(&job, (int)items, wave);
    else
        attend_many(&job);
}
