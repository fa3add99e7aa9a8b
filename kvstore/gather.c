/* Copies of rows; see gather.h. The planner thread fills batches; bodies run on the pool and write only what
 * their job names. They must never follow a number that did not come from the planner's own memory. */
#include "kvstore/gather.h"

#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/trace.h"
#include "kvstore/gather_gpu.h"

enum { LOADS_A_JOB = 128 };

void gather_init(struct gather *g, struct pool *pool, struct blocks *blocks, struct device *device)
{
    memset(g, 0, sizeof *g);
    g->pool = pool;
    g->blocks = blocks;
    g->device = device;
    if (device->gpu)
        g->gpu = gather_gpu_create(g);
}

void gather_free(struct gather *g)
{
    gather_gpu_free(&g->gpu);
    mem_free(&g->jobs);
    memset(g, 0, sizeof *g);
}

int gather_attach(struct gather *g, const struct control_header *header, struct err *err)
{
    g->slots = header->slots;
    g->units_per_slab = header->units_per_slab;
    return g->gpu ? gather_gpu_attach(g->gpu, header, err) : 0;
}

void gather_detach(struct gather *g)
{
    if (g->gpu)
        gather_gpu_detach(g->gpu);
}

void gather_add(struct gather *g, const struct gather_job *job)
{
    CHECK(job->layer >= g->blocks->layout.host_first_layer);
    if (g->count == g->room) {
        g->room = g->room ? 2 * g->room : 256;
        g->jobs = mem_resize(g->jobs, g->room, sizeof *g->jobs);
    }
    g->jobs[g->count++] = *job;
}

static uint32_t max_u32(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

uint64_t gather_rows(struct gather *g, struct sequence *s, const struct elastic_loads *loads,
                     const uint32_t range[3])
{
    const struct kv_layout *layout = &g->blocks->layout;
    uint64_t pieces = 0;
    for (uint32_t i = range[0], end; i < loads->count;
         i = end) { /* loads of a group stand together, mostly */
        uint32_t group = loads->at[i].group;
        for (end = i + 1; end < loads->count && end - i < LOADS_A_JOB && loads->at[end].group == group; end++)
            continue;
        struct gather_job job = {.kind = GATHER_ROWS,
                                 .layer = max_u32(range[1], layout->group_first_layer[group]),
                                 .end_layer = min_u32(range[2], layout->group_first_layer[group + 1]),
                                 .first = i,
                                 .end = end,
                                 .sequence = s,
                                 .loads = loads->at};
        if (job.layer >= job.end_layer)
            continue;
        gather_add(g, &job);
        pieces += (uint64_t)(end - i) * (job.end_layer - job.layer);
    }
    return pieces * layout->piece_bytes;
}

void gather_pages(struct gather *g, const struct gather_job *whole)
{
    for (uint32_t first = whole->first, end; first < whole->end && whole->layer < whole->end_layer;
         first = end) {
        end = min_u32((first / BLOCK_TOKENS + 1) * BLOCK_TOKENS, whole->end);
        struct gather_job job = *whole;
        job.first = first;
        job.end = end;
        gather_add(g, &job);
    }
}

static uint8_t *host_row(const struct gather *g, const struct sequence *s, uint32_t head, uint32_t position)
{
    return blocks_rows(g->blocks, 0) + gather_row_at(g, s, head, position);
}

/* Layers of a job that are touched now. */
static uint32_t job_low(const struct gather *g, const struct gather_job *job)
{
    return max_u32(job->layer, g->low);
}

static uint32_t job_end(const struct gather *g, const struct gather_job *job)
{
    return min_u32(job->end_layer, g->end);
}

static void run_rows(const struct gather *g, const struct gather_job *job)
{
    const struct kv_layout *layout = &g->blocks->layout;
    uint32_t piece = layout->piece_bytes, end = job_end(g, job);
    uint8_t *base = g->device->base;
    for (uint32_t i = job->first; i < job->end; i++) {
        const struct elastic_load *load = &job->loads[i];
        const uint8_t *row = host_row(g, job->sequence, load->head, load->position);
        struct gather_place place = gather_place(g, load->head, load->slot);
        for (uint32_t l = job_low(g, job); l < end; l++)
            memcpy(base + gather_slot_at(job->sequence, l, place), row + layout_piece_at(layout, l), piece);
    }
}

static void run_pages(const struct gather *g, const struct gather_job *job, bool back)
{
    const struct kv_layout *layout = &g->blocks->layout;
    uint32_t piece = layout->piece_bytes;
    for (uint32_t h = 0; h < layout->row_heads; h++)
        for (uint32_t p = job->first; p < job->end; p++) {
            uint8_t *row = host_row(g, job->sequence, h, p);
            for (uint32_t l = job->layer; l < job->end_layer; l++) {
                uint8_t *host = row + layout_piece_at(layout, l);
                uint8_t *page = g->device->base + gather_page_at(g, job, l, h, p);
                memcpy(back ? host : page, back ? page : host, piece);
            }
        }
}

static void run_back_slots(const struct gather *g, const struct gather_job *job)
{
    const struct kv_layout *layout = &g->blocks->layout;
    const struct elastic *e = &job->sequence->elastic;
    uint32_t piece = layout->piece_bytes;
    for (uint32_t l = job->layer; l < job->end_layer; l++) {
        uint32_t group = layout_group_of(layout, l);
        for (uint32_t h = 0; h < layout->row_heads; h++) {
            uint32_t slot = elastic_head(e, group, h)->slot_of[job->first];
            memcpy(host_row(g, job->sequence, h, job->first) + layout_piece_at(layout, l),
                   g->device->base + gather_slot_at(job->sequence, l, gather_place(g, h, slot)), piece);
        }
    }
}

static void run_move(const struct gather *g, const struct gather_job *job)
{
    const struct elastic_head *h = elastic_head(&job->sequence->elastic, job->group, job->head);
    uint8_t *base = g->device->base;
    for (uint32_t slot = 0; slot < h->used; slot++) {
        struct gather_place place = gather_place(g, job->head, slot);
        for (uint32_t l = job->layer; l < job->end_layer; l++)
            memcpy(base + gather_slot_at(job->sequence, l, place),
                   base + gather_page_at(g, job, l, job->head, h->position_of[slot]),
                   g->blocks->layout.piece_bytes);
    }
}

static void run_job(void *arg, int index, int thread)
{
    (void)thread;
    const struct gather *g = arg;
    const struct gather_job *job = &g->jobs[index];
    switch (job->kind) {
    case GATHER_ROWS:
        run_rows(g, job);
        break;
    case GATHER_PAGES:
    case GATHER_BACK_PAGES:
        run_pages(g, job, job->kind == GATHER_BACK_PAGES);
        break;
    case GATHER_BACK_SLOTS:
        run_back_slots(g, job);
        break;
    case GATHER_MOVE:
        run_move(g, job);
        break;
    }
}

void gather_run(struct gather *g)
{
    int64_t begin = trace_begin();
    g->low = 0;
    g->end = g->blocks->layout.layers;
    if (g->gpu)
        gather_gpu_run(g->gpu);
    else
        pool_run(g->pool, (int)g->count, run_job, g);
    g->count = 0;
    trace_end(TRACE_GATHER, begin);
}

void gather_run_each(struct gather *g, uint32_t run, uint32_t end, struct gather_ready ready)
{
    int64_t begin = trace_begin();
    uint32_t first = UINT32_MAX; /* layer that any job touches */
    for (uint32_t i = 0; i < g->count; i++)
        first = min_u32(first, g->jobs[i].layer);
    if (g->gpu)
        gather_gpu_begin(g->gpu);
    for (; run < end; run++) {
        g->low = layout_run_first(&g->blocks->layout, run);
        g->end = layout_run_first(&g->blocks->layout, run + 1);
        if (g->gpu)
            gather_gpu_layers(g->gpu);
        else if (first < g->end)
            pool_run(g->pool, (int)g->count, run_job, g);
        ready.call(ready.arg, run);
    }
    if (g->gpu && g->count)
        device_gpu_ticket(g->device->gpu);
    g->count = 0;
    trace_end(TRACE_GATHER, begin);
}

void gather_poison(const struct gather *g, const struct sequence *s, const struct elastic_loads *loads,
                   const uint32_t range[3])
{
    const struct kv_layout *layout = &g->blocks->layout;
    for (uint32_t i = range[0]; i < loads->count; i++) {
        const struct elastic_load *load = &loads->at[i];
        uint32_t first = max_u32(range[1], layout->group_first_layer[load->group]);
        uint32_t end = min_u32(range[2], layout->group_first_layer[load->group + 1]);
        for (uint32_t l = first; l < end; l++)
            device_poison(g->device, gather_slot_at(s, l, gather_place(g, load->head, load->slot)),
                          layout->piece_bytes);
    }
}
