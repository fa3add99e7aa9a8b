/* Lists and launches for the GPU; see gather_gpu.h. Owner: the planner thread; lists of rows are filled by
 * its pool.
 *
 * Everything goes into the store's one stream, so whatever is queued sees what was queued before it: rows
 * that were written back are there for a later gather, and a slot or page that is given and taken again is
 * written in the order of its owners. What kernels read of the host's - lists, places of pages - is copied
 * into pinned memory that is filled again only after the stream has passed it; slab tables, and the places of
 * pages that move into slots, lie on the device and are changed by copies in the stream, so no queued kernel
 * sees an entry change. It must never hand a kernel an address that the host may change or unmap while it is
 * queued. */
#include "kvstore/gather_gpu.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/trace.h"

enum {
    TIMES = 8,                 /* of registrations that are kept */
    LISTS_BYTES = 8 << 20,     /* of pinned memory made beforehand, at most */
    SEGMENT_ENTRIES = 1 << 16, /* of one launch whose rows are named one by one */
    SEGMENT_ROWS = 1 << 15,    /* struct cuda_move counts rows in 16 bits */
    TOUCH_BYTES = 1 << 19,
    NO_LAUNCH = 0xffffffff
};

struct rows_list { /* moves of one group's loads, good for any of its layers */
    const struct cuda_move *moves;
    uint32_t count, layer, end_layer;
};

struct gather_gpu {
    struct gather *gather;
    struct device_gpu *device;
    uint8_t *registered;     /* [stretch of the arena] */
    uint32_t stretches, low; /* stretches [0, low) are registered, `low` is not */
    struct gather_gpu_reached reached;
    int64_t ahead_ns[TIMES];
    uint32_t sequences, slabs_max, layers; /* of slab_table */
    uint64_t *slab_table;                  /* on the device: [sequence][layer][slabs_max] */
    uint64_t *places;                      /* on the device: of the pages that a batch moves into slots */
    uint64_t places_bytes;
    struct rows_list lists[LIMIT_GROUPS];
    uint32_t list_count;
    struct cuda_move *rows_host; /* while lists are filled */
};

/* ---- the arena ---- */

struct touch {
    uint8_t *at;
    uint64_t bytes;
};

static void touch_part(void *arg, int index, int thread)
{
    (void)thread;
    const struct touch *t = arg;
    uint64_t from = (uint64_t)index * TOUCH_BYTES, left = t->bytes - from;
    /* A kernel without it (before 5.14) leaves it to the registration. */
    madvise(t->at + from, left < TOUCH_BYTES ? left : TOUCH_BYTES, MADV_POPULATE_WRITE);
}

static void register_stretch(struct gather_gpu *g, uint32_t stretch, bool populated)
{
    void *at = NULL;
    uint64_t bytes = 0;
    struct err *err = &g->device->error;
    int r = blocks_stretch(g->gather->blocks, stretch, &at, &bytes, err);
    if (r == 0 && !populated) { /* first touch is what takes time, so all threads take part in it */
        struct touch t = {at, bytes};
        int64_t begin = trace_begin();
        pool_run(g->gather->pool, (int)((bytes + TOUCH_BYTES - 1) / TOUCH_BYTES), touch_part, &t);
        trace_end(TRACE_TOUCH, begin);
    }
    if (r == 0)
        r = device_gpu_register(g->device, at, bytes, err);
    if (r < 0) {
        err_prefix(err, r, "host arena: %llu bytes for the GPU", (unsigned long long)bytes);
        return;
    }
    g->registered[stretch] = 1;
    while (g->low < g->stretches && g->registered[g->low])
        g->low++;
}

/* For kernels that are about to be queued. */
static void need_stretch(struct gather_gpu *g, uint32_t stretch)
{
    if (g->registered[stretch] || device_gpu_failed(g->device))
        return;
    int64_t begin = trace_begin();
    bool populated = blocks_is_populated(g->gather->blocks, stretch);
    register_stretch(g, stretch, populated);
    g->reached.late++;
    g->reached.touched += !populated;
    trace_end(TRACE_REGISTER_LATE, begin);
}

/* Kernels may reach all blocks of the sequence from here on. */
static void reach_blocks(struct gather_gpu *g, struct sequence *s)
{
    uint64_t bytes = g->gather->blocks->block_bytes;
    for (; s->blocks_reached < s->blocks; s->blocks_reached++) {
        uint64_t from = s->record->block[s->blocks_reached] * bytes;
        for (uint64_t c = from / BLOCKS_STRETCH_BYTES; c <= (from + bytes - 1) / BLOCKS_STRETCH_BYTES; c++)
            need_stretch(g, (uint32_t)c);
    }
}

int gather_gpu_reach(struct gather_gpu *g, uint32_t blocks)
{
    uint32_t stretch = g->low;
    if (stretch == g->stretches || stretch * BLOCKS_STRETCH_BYTES >= blocks * g->gather->blocks->block_bytes)
        return 0;
    if (device_gpu_failed(g->device) || !blocks_is_populated(g->gather->blocks, stretch))
        return -EAGAIN;
    int64_t begin = clock_now_ns();
    register_stretch(g, stretch, true);
    g->ahead_ns[g->reached.ahead++ % TIMES] = clock_now_ns() - begin;
    trace_end(TRACE_REGISTER_AHEAD, begin);
    return device_gpu_failed(g->device) ? -EAGAIN : 1;
}

struct gather_gpu_reached gather_gpu_reached(const struct gather_gpu *g)
{
    struct gather_gpu_reached reached = g->reached;
    for (uint32_t i = 0; i < TIMES; i++)
        reached.longest_ns = reached.longest_ns > g->ahead_ns[i] ? reached.longest_ns : g->ahead_ns[i];
    return reached;
}

/* ---- life ---- */

struct gather_gpu *gather_gpu_create(struct gather *gather)
{
    struct gather_gpu *g = mem_alloc(1, sizeof *g);
    g->gather = gather;
    g->device = gather->device->gpu;
    g->stretches = blocks_stretches(gather->blocks);
    g->registered = mem_alloc(g->stretches, 1);
    g->layers = gather->blocks->layout.layers;
    return g;
}

void gather_gpu_free(struct gather_gpu **gpu)
{
    struct gather_gpu *g = *gpu;
    if (!g)
        return;
    *gpu = NULL;
    device_gpu_wait_all(g->device);
    gather_gpu_detach(g);
    for (uint32_t c = 0; c < g->stretches; c++) {
        void *at;
        uint64_t bytes;
        if (g->registered[c] && blocks_stretch(g->gather->blocks, c, &at, &bytes, NULL) == 0)
            device_gpu_unregister(g->device, at, bytes);
    }
    mem_free(&g->registered);
    mem_free(&g);
}

/* Of a run of layers of all sequences; no more than the decoder's tables of all layers' pages, which is what
 * a plan counts for the store. */
static uint64_t places_bytes_of(const struct kv_layout *layout, uint32_t sequences)
{
    uint32_t layers = 0;
    for (uint32_t run = 0; run < layout_runs(layout); run++) {
        uint32_t of_run = layout_run_first(layout, run + 1) - layout_run_first(layout, run);
        layers = of_run > layers ? of_run : layers;
    }
    return (uint64_t)sequences * layers * sequence_pages(layout->context_max) * sizeof(uint64_t);
}

static uint64_t table_bytes(const struct gather_gpu *g)
{
    return (uint64_t)g->sequences * g->layers * g->slabs_max * sizeof *g->slab_table;
}

/* Loads of a step in which a quarter of each list is new. */
static int make_room(struct gather_gpu *g, const struct control_header *header, struct err *err)
{
    const struct kv_layout *layout = &g->gather->blocks->layout;
    uint64_t lists = (uint64_t)header->sequences_max * layout->groups * layout->row_heads;
    uint64_t bytes = header->staging_tokens ? lists * header->list_max / 4 * sizeof(struct cuda_move) : 0;
    int r = device_gpu_widen(g->device, bytes < LISTS_BYTES ? bytes : LISTS_BYTES);
    return r < 0 ? err_set(err, r, "%s", g->device->error.text) : 0;
}

int gather_gpu_attach(struct gather_gpu *g, const struct control_header *header, struct err *err)
{
    g->sequences = header->sequences_max;
    g->slabs_max = header->slabs_max ? header->slabs_max : 1;
    void *at = NULL;
    int r = device_gpu_alloc(g->device, table_bytes(g), &g->device->tables_bytes, &at, err);
    g->slab_table = at;
    g->places_bytes = places_bytes_of(&g->gather->blocks->layout, g->sequences);
    at = NULL;
    if (r == 0 && header->slabs_max) { /* layers may leave */
        r = device_gpu_alloc(g->device, g->places_bytes, &g->device->tables_bytes, &at, err);
        g->places = at;
    }
    if (r < 0)
        return r;
    if (g->stretches > 0 && !g->registered[0] && !device_gpu_failed(g->device)) /* the base of all rows */
        register_stretch(g, 0, blocks_is_populated(g->gather->blocks, 0));
    return make_room(g, header, err);
}

void gather_gpu_detach(struct gather_gpu *g)
{
    device_gpu_wait_all(g->device);
    device_gpu_free(g->device, table_bytes(g), &g->device->tables_bytes, g->slab_table);
    device_gpu_free(g->device, g->places_bytes, &g->device->tables_bytes, g->places);
    g->slab_table = g->places = NULL;
}

/* ---- views ---- */

static struct cuda_kv_view view(const struct gather_gpu *g)
{
    const struct device *d = g->gather->device;
    return (struct cuda_kv_view){.base = d->base,
                                 .device_bytes = d->bytes,
                                 .piece_bytes = g->gather->blocks->layout.piece_bytes,
                                 .type = DTYPE_F16}; /* pieces are moved, not read: any 16-bit type does */
}

static struct cuda_kv_view slots_view(const struct gather_gpu *g)
{
    struct cuda_kv_view v = view(g);
    v.at = g->slab_table;
    v.row_stride = (uint64_t)g->layers * g->slabs_max;
    v.layer_stride = v.at_count = g->slabs_max;
    v.slotted = 1;
    v.slots = g->gather->slots;
    v.units_per_slab = g->gather->units_per_slab;
    return v;
}

/* A table of places made for one launch: [row][layer of the launch][entry], entries are pages. */
static struct cuda_kv_view pages_view(const struct gather_gpu *g, const uint64_t *at, uint32_t layers,
                                      uint32_t entries)
{
    struct cuda_kv_view v = view(g);
    v.at = at;
    v.row_stride = (uint64_t)layers * entries;
    v.layer_stride = v.at_count = entries;
    v.page_tokens = BLOCK_TOKENS;
    return v;
}

/* Rows of the arena as seen from a layer. */
static struct cuda_moves moves_of(const struct gather_gpu *g, struct cuda_kv_view kv, uint32_t layer,
                                  uint32_t layers)
{
    const struct blocks *b = g->gather->blocks;
    uint64_t skip = layout_piece_at(&b->layout, layer);
    return (struct cuda_moves){.kv = kv,
                               .host_base = blocks_rows(b, 0) + skip,
                               .host_bytes = b->segment.bytes - b->rows_at - skip,
                               .layers = layers,
                               .heads = b->layout.row_heads};
}

/* Brings slab tables of a sequence up to date for layers [low, end). */
static void send_slabs(struct gather_gpu *g, struct sequence *s, uint32_t low, uint32_t end)
{
    for (uint32_t l = low, to; l < end; l = to + 1) {
        for (to = l; to < end && s->has_slots[to] && !s->slabs_sent[to]; to++)
            s->slabs_sent[to] = true;
        if (to == l)
            continue;
        uint64_t entries = (uint64_t)(to - l) * s->slabs_max, bytes = entries * sizeof(uint64_t);
        void *device;
        uint64_t *host = device_gpu_take(g->device, bytes, &device);
        if (!host)
            return;
        for (uint64_t i = 0; i < entries; i++) { /* what no unit needs lies out of range: nothing is moved */
            uint64_t at = s->slabs[(size_t)l * s->slabs_max + i];
            host[i] = at == UINT64_MAX ? g->gather->device->bytes : at;
        }
        uint64_t *table = g->slab_table + ((uint64_t)s->index * g->layers + l) * g->slabs_max;
        device_gpu_queued(g->device, g->device->api->copy(table, host, bytes, g->device->stream));
    }
}

/* ---- loads into slots ---- */

static void fill_rows(void *arg, int index, int thread)
{
    (void)thread;
    const struct gather_gpu *g = arg;
    const struct gather_job *job = &g->gather->jobs[index];
    if (job->kind != GATHER_ROWS)
        return;
    struct cuda_move *out = g->rows_host + job->at;
    for (uint32_t i = job->first; i < job->end; i++) {
        const struct elastic_load *load = &job->loads[i];
        *out++ =
            (struct cuda_move){.host = gather_row_at(g->gather, job->sequence, load->head, load->position),
                               .item = load->slot,
                               .head = load->head,
                               .row = (uint16_t)job->sequence->index};
    }
}

/* The lists of all GATHER_ROWS jobs, one for each range of layers, in one piece of pinned memory. */
static void make_rows(struct gather_gpu *g)
{
    struct gather *all = g->gather;
    uint32_t total = 0;
    g->list_count = 0;
    for (uint32_t from = 0; from < all->count; from++) {
        struct gather_job *key = &all->jobs[from];
        if (key->kind != GATHER_ROWS || key->launch != NO_LAUNCH)
            continue;
        CHECK(g->list_count < LIMIT_GROUPS); /* ranges of layers in a batch differ by group alone */
        struct rows_list *list = &g->lists[g->list_count];
        *list = (struct rows_list){.layer = key->layer, .end_layer = key->end_layer};
        uint32_t first = total;
        for (uint32_t i = from; i < all->count; i++) {
            struct gather_job *job = &all->jobs[i];
            if (job->kind != GATHER_ROWS || job->layer != list->layer || job->end_layer != list->end_layer)
                continue;
            job->launch = g->list_count;
            job->at = total;
            total += job->end - job->first;
        }
        list->count = total - first;
        g->list_count++;
    }
    if (total == 0)
        return;
    for (uint32_t i = 0; i < all->count; i++)
        if (all->jobs[i].kind == GATHER_ROWS)
            send_slabs(g, all->jobs[i].sequence, all->jobs[i].layer, all->jobs[i].end_layer);
    void *device = NULL;
    g->rows_host = device_gpu_take(g->device, (uint64_t)total * sizeof *g->rows_host, &device);
    if (!g->rows_host) {
        g->list_count = 0;
        return;
    }
    pool_run(all->pool, (int)all->count, fill_rows, g);
    const struct cuda_move *moves = device;
    for (uint32_t i = 0; i < g->list_count; moves += g->lists[i++].count)
        g->lists[i].moves = moves;
}

/* Launches the lists' layers within [gather->low, gather->end). */
static void launch_rows(struct gather_gpu *g)
{
    for (uint32_t i = 0; i < g->list_count && !device_gpu_failed(g->device); i++) {
        const struct rows_list *list = &g->lists[i];
        uint32_t low = list->layer > g->gather->low ? list->layer : g->gather->low;
        uint32_t end = list->end_layer < g->gather->end ? list->end_layer : g->gather->end;
        if (low >= end)
            continue;
        struct cuda_moves m = moves_of(g, slots_view(g), low, end - low);
        m.moves = list->moves;
        m.count = list->count;
        m.first_layer = low;
        m.row_count = g->sequences;
        device_gpu_writes(g->device, g->device->api->gather(&m, g->device->stream));
    }
}

/* ---- pages, and slots that are written back: places are made for each launch ---- */

struct segment_counts {
    uint32_t rows, entries;
};

/* What a job takes of a launch. Pages: a row for the one page it touches. Slots: a row for each row head,
 * whose places are exact. */
static struct segment_counts job_counts(const struct gather_gpu *g, const struct gather_job *job)
{
    uint32_t heads = g->gather->blocks->layout.row_heads;
    if (job->kind == GATHER_BACK_SLOTS)
        return (struct segment_counts){heads, heads};
    return (struct segment_counts){1, heads * (job->end - job->first)};
}

static void fill_page(const struct gather_gpu *g, const struct gather_job *job, uint64_t *at, uint32_t row,
                      struct cuda_move *out)
{
    uint32_t layers = job->end_layer - job->layer;
    for (uint32_t l = 0; l < layers; l++)
        at[row * layers + l] = job->pages[(size_t)l * job->stride + job->first / BLOCK_TOKENS];
    for (uint32_t h = 0; h < g->gather->blocks->layout.row_heads; h++)
        for (uint32_t p = job->first; p < job->end; p++)
            *out++ = (struct cuda_move){.host = gather_row_at(g->gather, job->sequence, h, p),
                                        .item = p % BLOCK_TOKENS,
                                        .head = (uint16_t)h,
                                        .row = (uint16_t)row};
}

static void fill_back_slots(const struct gather_gpu *g, const struct gather_job *job, uint64_t *at,
                            uint32_t row, struct cuda_move *out)
{
    const struct kv_layout *layout = &g->gather->blocks->layout;
    const struct sequence *s = job->sequence;
    uint32_t layers = job->end_layer - job->layer;
    for (uint32_t h = 0; h < layout->row_heads; h++, row++) {
        for (uint32_t l = job->layer; l < job->end_layer; l++) {
            uint32_t slot = elastic_head(&s->elastic, layout_group_of(layout, l), h)->slot_of[job->first];
            at[row * layers + l - job->layer] = gather_slot_at(s, l, gather_place(g->gather, h, slot));
        }
        *out++ = (struct cuda_move){.host = gather_row_at(g->gather, s, h, job->first), .row = (uint16_t)row};
    }
}

static bool same_launch(const struct gather_job *a, const struct gather_job *b)
{
    return a->kind == b->kind && a->layer == b->layer && a->end_layer == b->end_layer;
}

/* Launches jobs of one kind and range of layers, from job `from` on; as many as one launch takes. Those get
 * launch number 0. */
static void launch_segment(struct gather_gpu *g, uint32_t from)
{
    struct gather *all = g->gather;
    const struct gather_job *key = &all->jobs[from];
    struct segment_counts sum = {0, 0};
    uint32_t end = from, layers = key->end_layer - key->layer;
    for (; end < all->count; end++) {
        struct gather_job *job = &all->jobs[end];
        if (job->launch != NO_LAUNCH || !same_launch(job, key))
            continue;
        struct segment_counts more = job_counts(g, job);
        if (sum.rows && (sum.rows + more.rows > SEGMENT_ROWS || sum.entries + more.entries > SEGMENT_ENTRIES))
            break;
        job->launch = 0;
        sum.rows += more.rows;
        sum.entries += more.entries;
    }
    uint64_t moves_bytes = sum.entries * sizeof(struct cuda_move);
    void *device = NULL;
    struct cuda_move *moves =
        device_gpu_take(g->device, moves_bytes + (uint64_t)sum.rows * layers * sizeof(uint64_t), &device);
    if (!moves)
        return;
    uint64_t *at = (uint64_t *)(moves + sum.entries);
    struct segment_counts n = {0, 0};
    for (uint32_t i = from; i < end; i++) {
        const struct gather_job *job = &all->jobs[i];
        if (!same_launch(job, key))
            continue;
        (job->kind == GATHER_BACK_SLOTS ? fill_back_slots : fill_page)(g, job, at, n.rows, moves + n.entries);
        struct segment_counts more = job_counts(g, job);
        n.rows += more.rows;
        n.entries += more.entries;
    }
    const uint64_t *at_device = (const uint64_t *)((const uint8_t *)device + moves_bytes);
    struct cuda_moves m = moves_of(g, pages_view(g, at_device, layers, 1), key->layer, layers);
    m.moves = device;
    m.count = sum.entries;
    m.row_count = sum.rows;
    if (key->kind == GATHER_PAGES)
        device_gpu_writes(g->device, g->device->api->gather(&m, g->device->stream));
    else
        device_gpu_queued(g->device, g->device->api->scatter(&m, g->device->stream));
}

/* ---- pages into slots ---- */

static uint32_t job_slots(const struct gather_job *job)
{
    return elastic_head(&job->sequence->elastic, job->group, job->head)->used;
}

struct move_part { /* all row heads of one sequence and range of layers: neighbouring jobs */
    const struct gather_job *jobs;
    uint32_t job_count, copies, pages;
    uint64_t places, places_bytes; /* in the launch's piece of pinned memory: all parts' places of pages, */
    uint64_t at, bytes;            /* then all parts' copies, which these count from the first on */
};

struct move_work {
    const struct move_part *parts;
    uint8_t *places, *copies;
};

/* Returns the end of its jobs. */
static uint32_t find_move(const struct gather *all, uint32_t from, struct move_part *ret)
{
    const struct gather_job *key = &all->jobs[from];
    uint32_t end = from;
    *ret = (struct move_part){.jobs = key, .pages = sequence_pages(key->sequence->committed)};
    for (; end < all->count && same_launch(&all->jobs[end], key) && all->jobs[end].sequence == key->sequence;
         end++)
        ret->copies += job_slots(&all->jobs[end]);
    ret->job_count = end - from;
    ret->bytes = ret->copies * sizeof(struct cuda_copy);
    ret->places_bytes = (uint64_t)(key->end_layer - key->layer) * ret->pages * sizeof(uint64_t);
    return end;
}

static void fill_move(void *arg, int index, int thread)
{
    (void)thread;
    const struct move_work *work = arg;
    const struct move_part *part = &work->parts[index];
    const struct gather_job *key = part->jobs;
    struct cuda_copy *copies = (struct cuda_copy *)(work->copies + part->at);
    uint64_t *at = (uint64_t *)(work->places + part->places);
    for (uint32_t l = 0; l < key->end_layer - key->layer; l++)
        memcpy(at + (size_t)l * part->pages, key->pages + (size_t)l * key->stride, part->pages * sizeof *at);
    for (uint32_t i = 0; i < part->job_count; i++) {
        const struct gather_job *job = &part->jobs[i];
        const struct elastic_head *h = elastic_head(&job->sequence->elastic, job->group, job->head);
        for (uint32_t slot = 0; slot < h->used; slot++)
            *copies++ = (struct cuda_copy){.from = h->position_of[slot], .to = slot, .head = job->head};
    }
}

static void launch_move(struct gather_gpu *g, const struct move_part *part, const uint8_t *copies)
{
    const struct gather_job *key = part->jobs;
    uint32_t layers = key->end_layer - key->layer;
    struct cuda_copies c = {
        .from = pages_view(g, g->places + part->places / sizeof *g->places, layers, part->pages),
        .to = slots_view(g),
        .copies = (const struct cuda_copy *)(copies + part->at),
        .count = part->copies,
        .layers = layers,
        .row_count = 1,
        .heads = g->gather->blocks->layout.row_heads};
    /* One sequence: row 0 and layer 0 of either table are its own. */
    c.to.at += ((uint64_t)key->sequence->index * g->layers + key->layer) * g->slabs_max;
    if (part->copies > 0)
        device_gpu_writes(g->device, g->device->api->copy_pieces(&c, g->device->stream));
}

/* Neighbouring jobs of one range of layers, as many sequences as the memory takes: their lists are filled by
 * all threads. The kernel looks up a place for each piece, from the host's memory it took three times as long
 * (bench/results/2026-12-01-attention-h200.md); the list it reads once. Returns the end of the jobs. */
static uint32_t launch_moves(struct gather_gpu *g, uint32_t from)
{
    struct gather *all = g->gather;
    struct move_part parts[LIMIT_SEQUENCES];
    uint32_t count = 0, end = from;
    uint64_t bytes = 0, places = 0;
    while (end < all->count && count < LIMIT_SEQUENCES && same_launch(&all->jobs[end], &all->jobs[from])) {
        struct move_part *part = &parts[count];
        uint32_t next = find_move(all, end, part);
        if (count > 0 && (places + part->places_bytes > g->places_bytes ||
                          places + part->places_bytes + bytes + part->bytes > g->device->buffer_bytes))
            break;
        part->places = places;
        part->at = bytes;
        places += part->places_bytes;
        bytes += part->bytes;
        count++;
        end = next;
    }
    CHECK(places <= g->places_bytes);
    for (uint32_t i = 0; i < count; i++)
        send_slabs(g, parts[i].jobs->sequence, parts[i].jobs->layer, parts[i].jobs->end_layer);
    void *device = NULL;
    uint8_t *host = bytes ? device_gpu_take(g->device, places + bytes, &device) : NULL;
    if (!host)
        return end;
    struct move_work work = {parts, host, host + places};
    pool_run(all->pool, (int)count, fill_move, &work);
    device_gpu_queued(g->device, g->device->api->copy(g->places, host, places, g->device->stream));
    for (uint32_t i = 0; i < count; i++)
        launch_move(g, &parts[i], (const uint8_t *)device + places);
    return end;
}

/* ---- batches ---- */

void gather_gpu_begin(struct gather_gpu *g)
{
    for (uint32_t i = 0; i < g->gather->count; i++) {
        struct gather_job *job = &g->gather->jobs[i];
        job->launch = NO_LAUNCH;
        reach_blocks(g, job->sequence);
    }
    g->list_count = 0;
    if (!device_gpu_failed(g->device))
        make_rows(g);
}

void gather_gpu_layers(struct gather_gpu *g)
{
    launch_rows(g);
}

void gather_gpu_run(struct gather_gpu *g)
{
    struct gather *all = g->gather;
    if (all->count == 0)
        return;
    gather_gpu_begin(g);
    launch_rows(g);
    for (uint32_t i = 0; i < all->count && !device_gpu_failed(g->device);) {
        if (all->jobs[i].kind == GATHER_MOVE) {
            i = launch_moves(g, i);
            continue;
        }
        if (all->jobs[i].launch == NO_LAUNCH)
            launch_segment(g, i);
        i++;
    }
    device_gpu_ticket(g->device);
}
