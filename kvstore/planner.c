/* Sequences, sets and the life of a decoder; see planner.h. Owner: the planner thread. */
#include "kvstore/planner.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/trace.h"
#include "kvstore/adopt.h"
#include "kvstore/reach.h"
#include "kvstore/residency.h"
#include "kvstore/step.h"
#include "link/flag.h"
#include "proto/memory.h"

#define PIECE_ALIGN 16u /* bytes that the kernels move at a time */
#define PAGE        4096u
/* ---- life ---- */

static uint32_t budget_max(const struct planner *p)
{
    uint32_t budget = p->options.budget ? p->options.budget : p->layout.context_max;
    return budget < p->layout.context_max ? budget : p->layout.context_max;
}

/* Most that a sequence has of one (group, row head). */
static uint32_t slots_max(const struct planner *p)
{
    uint64_t slots = p->options.slots ? p->options.slots : (uint64_t)budget_max(p) * 3 / 2;
    return memory_slots(slots < UINT32_MAX ? (uint32_t)slots : UINT32_MAX, p->layout.context_max);
}

/* Fixed for the planner's life: what the arena lacks cannot be offloaded later. */
static uint32_t kept_runs(const struct planner *p)
{
    struct memory_through through = {.write_through = p->options.write_through,
                                     .offload_layers = p->options.offload_layers,
                                     .no_offload = p->options.no_offload};
    return memory_runs_kept(&p->layout, p->options.sequences, slots_max(p), p->options.device_bytes,
                            &through);
}

static struct kv_layout arena_layout(const struct planner *p)
{
    struct kv_layout layout = p->layout;
    layout.host_first_layer = layout_run_first(&p->layout, p->kept_runs);
    return layout;
}

static struct planner *planner_new(const struct planner_options *options, const struct kv_layout *layout,
                                   const struct planner_events *events)
{
    CHECK(options->sequences > 0 && options->sequences <= LIMIT_SEQUENCES && options->threads >= 1);
    struct planner *p = mem_alloc_aligned(1, sizeof *p);
    p->options = *options;
    p->layout = *layout;
    if (events)
        p->events = *events;
    p->epoch = hash_random_id();
    p->kept_runs = kept_runs(p);
    p->blocks.segment.fd = p->device.segment.fd = p->control.fd = -1;
    return p;
}

static int planner_start(struct planner *p, struct err *err)
{
    p->options.sequences = p->blocks.header->sequences_max;
    /* A block from which not all layers can be filled serves nobody but its sequence. */
    prefix_init(&p->prefix, &p->blocks, !p->options.no_prefix && p->kept_runs == 0);
    struct device_params device = {p->options.device_bytes, p->options.poison, p->options.gpu};
    if (p->options.gpu && p->layout.piece_bytes % PIECE_ALIGN)
        return err_set(err, -EINVAL, "device %s: layout: found pieces of %u bytes, expected a multiple of %u",
                       p->options.gpu->info.uuid, p->layout.piece_bytes, PIECE_ALIGN);
    int r = device_create(&p->device, &p->layout, &device, err);
    if (r < 0)
        return r;
    p->pool = pool_create(p->options.threads, "gather");
    gather_init(&p->gather, p->pool, &p->blocks, &p->device);
    reach_start(p);
    atomic_store_explicit(&p->blocks.header->store_epoch, p->epoch, memory_order_release);
    return 0;
}

int planner_create(struct planner **ret, const struct planner_options *options,
                   const struct kv_layout *layout, const struct planner_events *events, struct err *err)
{
    struct planner *p = planner_new(options, layout, events);
    struct blocks_params params = {options->host_bytes, options->sequences};
    struct kv_layout of_arena = arena_layout(p);
    int r = blocks_create(&p->blocks, &of_arena, &params, err);
    if (r == 0)
        r = planner_start(p, err);
    if (r < 0) {
        planner_free(&p);
        return r;
    }
    *ret = p;
    return 0;
}

int planner_create_adopting(struct planner **ret, const struct planner_options *options,
                            const struct kv_layout *layout, const struct planner_events *events, int arena_fd,
                            struct err *why)
{
    struct planner *p = planner_new(options, layout, events);
    struct kv_layout of_arena = arena_layout(p);
    int r = blocks_map(&p->blocks, arena_fd, &of_arena, why);
    if (r == 0) { /* from here on the descriptor belongs to the planner */
        r = planner_start(p, why);
        if (r == 0)
            adopt_records(p, clock_now_ns());
    }
    if (r < 0) {
        if (p->blocks.segment.at)
            p->blocks.segment.fd = -1; /* but not when it fails */
        planner_free(&p);
        return r;
    }
    *ret = p;
    return 0;
}

void planner_free(struct planner **planner)
{
    struct planner *p = *planner;
    if (!p)
        return;
    *planner = NULL;
    if (p->attached)
        planner_detach(p, 0);
    for (uint32_t i = 0; i < LIMIT_SEQUENCES; i++)
        sequence_pending_free(&p->sequences[i].pending);
    gather_free(&p->gather);
    pool_free(&p->pool);
    mem_free(&p->merge_scratch);
    device_close(&p->device);
    prefix_close(&p->prefix);
    blocks_close(&p->blocks);
    mem_free(&p);
}

/* ---- the decoder ---- */

/* The part of the control segment that the GPU writes to: whole pages up to the end of the flags. */
static uint64_t flags_bytes(const struct control_header *h)
{
    return (h->flags_at + FLAG_COUNT * sizeof(struct control_flag) + PAGE - 1) / PAGE * PAGE;
}

static int make_control(struct planner *p, const struct control_header *header, struct err *err)
{
    int r = segment_create("specontext-control", header->total_bytes, &p->control, err);
    if (r < 0)
        return r;
    memcpy(p->control.at, header, sizeof *header);
    r = gather_attach(&p->gather, header, err);
    if (r == 0 && p->device.gpu)
        r = device_gpu_register(p->device.gpu, p->control.at, flags_bytes(header), err);
    if (r < 0) {
        gather_detach(&p->gather);
        segment_close(&p->control);
    }
    return r;
}

int planner_attach(struct planner *p, uint64_t decoder_epoch, struct err *err)
{
    if (p->attached)
        return err_set(err, -EBUSY, "a decoder is attached already (epoch %016llx)",
                       (unsigned long long)p->decoder_epoch);
    struct control_params params = {
        .store_epoch = p->epoch,
        .decoder_epoch = decoder_epoch,
        .device_bytes = p->device.bytes,
        .sequences_max = p->options.sequences,
        .list_max = control_list_max(budget_max(p), p->layout.context_max),
        .slots = slots_max(p),
        .first_step = 1,
    };
    if (p->device.gpu) {
        params.device_form = CONTROL_DEVICE_CUDA;
        params.device_uuid = p->device.gpu->info.uuid;
        params.device_handle = p->device.handle;
    }
    residency_init(p, &params);
    struct control_header header;
    control_header_init(&header, &p->layout, &params);
    int r = make_control(p, &header, err);
    if (r < 0)
        return r;
    p->flags = p->control.at;
    tables_init(&p->tables, p->flags);
    mem_free(&p->merge_scratch);
    p->merge_scratch = mem_alloc((size_t)p->options.threads * SELECTION_SCRATCH(p->tables.header.list_max),
                                 sizeof *p->merge_scratch);
    p->params = (struct sequence_params){.layout = &p->layout,
                                         .header_slots = header.slots,
                                         .slabs_max = header.slabs_max,
                                         .units_per_slab = header.units_per_slab,
                                         .reload = p->options.no_elastic};
    memset(&p->step, 0, sizeof p->step);
    p->step.step = header.first_step;
    p->decoder_epoch = decoder_epoch;
    p->attached = true;
    p->broken = false;
    return 0;
}

/* A flag that the stream raises late would undo its abort, so the stream is waited for first: nothing in it
 * waits for anybody. */
static void abort_flags(struct planner *p)
{
    planner_commit(p, true);
    if (p->device.gpu)
        device_gpu_wait_all(p->device.gpu);
    flag_abort_all(p->flags);
}

void planner_detach(struct planner *p, int64_t now_ns)
{
    if (!p->attached)
        return;
    if (p->step.state != STEP_IDLE)
        p->totals.waits_broken++;
    abort_flags(p);
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        struct sequence *s = &p->sequences[i];
        if (!s->record || !s->attached)
            continue;
        residency_give_all(p, s);
        sequence_detach(s, &p->device);
        s->debt_layers = 0;
        s->orphan_until_ns = now_ns + PLANNER_ORPHAN_NS;
        if (s->closing || s->failed || p->kept_runs > 0) /* the device had rows that the arena lacks */
            sequence_drop(s, &p->prefix);
    }
    residency_close(p);
    gather_detach(&p->gather);
    if (p->device.gpu)
        device_gpu_unregister(p->device.gpu, p->control.at, flags_bytes(&p->tables.header));
    segment_close(&p->control);
    p->flags = NULL;
    p->attached = false;
}

void planner_break(struct planner *p, const char *why)
{
    p->broken = true;
    p->totals.waits_broken++;
    abort_flags(p);
    if (p->events.broken)
        p->events.broken(p->events.arg, why);
}

/* ---- open and close ---- */

static struct sequence *find(struct planner *p, uint64_t id)
{
    for (uint32_t i = 0; i < p->options.sequences; i++)
        if (p->sequences[i].record && p->sequences[i].id == id)
            return &p->sequences[i];
    return NULL;
}

static void drop_orphan(struct planner *p, struct sequence *s)
{
    CHECK(!s->attached);
    sequence_drop(s, &p->prefix);
}

static struct sequence *oldest_orphan(struct planner *p)
{
    struct sequence *oldest = NULL;
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        struct sequence *s = &p->sequences[i];
        if (s->record && !s->attached && (!oldest || s->orphan_until_ns < oldest->orphan_until_ns))
            oldest = s;
    }
    return oldest;
}

static int open_check(const struct planner *p, const struct msg_open *o, struct err *err)
{
    if (o->sequence == 0 || o->tokens.count == 0)
        return err_set(err, -EINVAL,
                       "open: sequence %llu with %u tokens, expected an id and at least one token",
                       (unsigned long long)o->sequence, o->tokens.count);
    if (o->made.kind != ARENA_MADE_FULL && o->made.kind != ARENA_MADE_SPARSE)
        return err_set(err, -EINVAL, "open: made: found kind %u, expected 1 or 2", o->made.kind);
    if (o->capacity < o->tokens.count || o->capacity > p->layout.context_max)
        return err_set(err, -E2BIG, "open: capacity: found %u positions (prompt %u), expected at most %u",
                       o->capacity, o->tokens.count, p->layout.context_max);
    if (o->budget > budget_max(p))
        return err_set(err, -E2BIG, "open: budget: found %u, expected at most %u", o->budget, budget_max(p));
    if (o->budget && (uint64_t)o->sinks + o->window + 1 > o->budget)
        return err_set(err, -EINVAL, "open: budget: found %u, expected more than %u sinks and a window of %u",
                       o->budget, o->sinks, o->window);
    return 0;
}

/* Slots of one (group, row head) for the sequence. 0, or -E2BIG: its steps could name more rows than there
 * are. */
static int open_slots(const struct planner *p, const struct msg_open *o, uint32_t *ret_slots, struct err *err)
{
    struct elastic_params params = {.layout = &p->layout,
                                    .capacity = o->capacity,
                                    .sinks = o->sinks,
                                    .window = o->window,
                                    .budget = o->budget};
    uint32_t needed = elastic_slots_needed(&params);
    uint64_t wanted = p->options.slots ? p->options.slots : (uint64_t)o->budget * 3 / 2;
    wanted = wanted > needed ? wanted : needed;
    wanted = wanted < o->capacity ? wanted : o->capacity;
    *ret_slots = wanted < p->params.header_slots ? (uint32_t)wanted : p->params.header_slots;
    if (o->budget && !p->options.no_offload && *ret_slots < needed)
        return err_set(err, -E2BIG, "open: budget %u needs %u slots a row head, there are %u", o->budget,
                       needed, *ret_slots);
    return 0;
}

static uint64_t blocks_reserved(const struct planner *p)
{
    uint64_t reserved = 0;
    for (uint32_t i = 0; i < p->options.sequences; i++)
        if (p->sequences[i].record)
            reserved += sequence_pages(p->sequences[i].capacity) - p->sequences[i].blocks;
    return reserved;
}

static int open_host(struct planner *p, const struct msg_open *o, const uint32_t *cached, uint32_t count,
                     struct err *err)
{
    for (;;) {
        uint64_t evictable = p->prefix.cached, need = sequence_pages(o->capacity) - count;
        for (uint32_t i = 0; i < count; i++)
            evictable -= p->blocks.refs[cached[i]] == 0;
        uint64_t have = blocks_available(&p->blocks) + evictable, reserved = blocks_reserved(p);
        if (reserved + need <= have)
            return 0;
        struct sequence *orphan = oldest_orphan(p);
        if (!orphan)
            return err_set(err, -ENOSPC,
                           "host memory: needed %llu blocks of %llu bytes, free %llu, of %u in all",
                           (unsigned long long)need, (unsigned long long)p->blocks.block_bytes,
                           (unsigned long long)(have > reserved ? have - reserved : 0), p->blocks.blocks_max);
        drop_orphan(p, orphan);
    }
}

static int open_device(const struct planner *p, const struct msg_open *o, uint32_t slots, struct err *err)
{
    struct residency_need need = {.pages = sequence_pages(o->capacity),
                                  .slot_slabs = o->budget ? sequence_slot_slabs(&p->params, slots) : 0};
    uint32_t runs = p->options.no_offload ? p->residency.runs : p->kept_runs;
    uint64_t slabs = residency_slabs(p, runs, &need, true), before = residency_slabs(p, runs, NULL, true);
    if (slabs > p->device.slabs)
        return err_set(
            err, -ENOSPC, "device memory: needed %llu slabs of %llu bytes, free %llu, of %u in all",
            (unsigned long long)(slabs - before), (unsigned long long)p->device.slab_bytes,
            (unsigned long long)(p->device.slabs > before ? p->device.slabs - before : 0), p->device.slabs);
    uint32_t dense = sequence_pages(o->budget ? o->tokens.count : o->capacity);
    if (!p->options.no_offload && dense > p->residency.staging_pages)
        return err_set(err, -E2BIG, "device memory: staging holds %u positions of a dense step, needed %u",
                       p->residency.staging_pages * BLOCK_TOKENS, dense * BLOCK_TOKENS);
    return 0;
}

static uint32_t find_prefix(const struct planner *p, const struct msg_open *o, uint32_t *ret_blocks)
{
    if (!(o->flags & OPEN_REUSE))
        return 0;
    uint32_t blocks = (o->tokens.count - 1) / BLOCK_TOKENS, most = o->reuse_max / BLOCK_TOKENS;
    struct prefix_query query = {.salt = o->salt,
                                 .made = o->made,
                                 .sparse = (o->flags & OPEN_REUSE_SPARSE) != 0,
                                 .tokens = o->tokens.at,
                                 .blocks = o->reuse_max && most < blocks ? most : blocks};
    return prefix_find(&p->prefix, &query, ret_blocks);
}

static void write_record(struct planner *p, uint32_t index, const struct msg_open *o, const uint32_t *cached,
                         uint32_t count)
{
    struct arena_sequence *r = arena_sequence_at(p->blocks.header, index);
    r->id = o->sequence;
    r->salt = o->salt;
    r->made = o->made;
    r->prompt_tokens = o->tokens.count;
    r->capacity = o->capacity;
    r->sinks = o->sinks;
    r->window = o->window;
    r->budget = o->budget;
    r->cached_tokens = count * BLOCK_TOKENS;
    memcpy(r->block, cached, count * sizeof *cached);
    atomic_store_explicit(&r->blocks, count, memory_order_relaxed);
    atomic_store_explicit(&r->tokens, count * BLOCK_TOKENS, memory_order_relaxed);
    atomic_store_explicit(&r->committed, count * BLOCK_TOKENS, memory_order_relaxed);
    atomic_store_explicit(&r->state, ARENA_SEQUENCE_LIVE, memory_order_release);
}

static void place_sequence(struct planner *p, uint32_t index, const struct msg_open *o,
                           const uint32_t *cached, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        prefix_ref(&p->prefix, cached[i]);
    write_record(p, index, o, cached, count);
    struct sequence *s = &p->sequences[index];
    sequence_init(s, arena_sequence_at(p->blocks.header, index), index);
    s->sealed = count;
    for (uint32_t i = count; i > 0; i--)
        if (arena_block_at(p->blocks.header, cached[i - 1])->made.kind == ARENA_MADE_SPARSE)
            s->first_sparse = (i - 1) * BLOCK_TOKENS; /* what follows was made on top of it */
}

static int free_index(struct planner *p, uint32_t *ret_index, struct err *err)
{
    for (uint32_t i = 0; i < p->options.sequences; i++)
        if (!p->sequences[i].record) {
            *ret_index = i;
            return 0;
        }
    struct sequence *orphan = oldest_orphan(p);
    if (!orphan)
        return err_set(err, -ENOSPC, "sequences: needed 1, free 0, of %u in all", p->options.sequences);
    *ret_index = orphan->index;
    drop_orphan(p, orphan);
    return 0;
}

static int open_sequence(struct planner *p, const struct msg_open *o, struct msg_grant *ret, struct err *err)
{
    if (!p->attached || p->broken)
        return err_set(err, -ENOTCONN, "open: no decoder is attached");
    int r = open_check(p, o, err);
    if (r < 0)
        return r;
    struct sequence *same = find(p, o->sequence);
    if (same && same->attached)
        return err_set(err, -EEXIST, "open: sequence %llu is open", (unsigned long long)o->sequence);
    if (same)
        drop_orphan(p, same);
    uint32_t slots = 0, index = 0;
    r = open_slots(p, o, &slots, err);
    if (r == 0)
        r = free_index(p, &index, err);
    if (r == 0)
        r = open_device(p, o, slots, err);
    if (r < 0)
        return r;
    uint32_t *cached = mem_alloc(sequence_pages(o->tokens.count), sizeof *cached);
    uint32_t count = find_prefix(p, o, cached);
    r = open_host(p, o, cached, count, err);
    if (r == 0) {
        place_sequence(p, index, o, cached, count);
        sequence_attach(&p->sequences[index], &p->params, slots);
        *ret = (struct msg_grant){.sequence = o->sequence, .index = index, .cached = count * BLOCK_TOKENS};
    }
    mem_free(&cached);
    return r;
}

int planner_open(struct planner *p, const struct msg_open *open, struct msg_grant *ret_grant, struct err *err)
{
    int r = open_sequence(p, open, ret_grant, err);
    if (r < 0) {
        p->totals.refused++;
        return r;
    }
    p->totals.opened++;
    p->totals.reused_tokens += ret_grant->cached;
    p->totals.prompt_tokens += open->tokens.count;
    residency_review(p);
    return 0;
}

void planner_finish_close(struct planner *p, struct sequence *s)
{
    int64_t begin = trace_begin();
    planner_commit(p, true); /* it may name the sequence */
    uint32_t resident = residency_layers(p);
    s->counters.layers_resident = resident;
    s->counters.layers_offloaded = p->layout.layers - resident;
    msg_add_counters(&p->totals.counters, &s->counters);
    p->totals.closed++;
    struct msg_closed closed = {.sequence = s->id, .counters = s->counters};
    uint64_t request = s->close_request;
    residency_give_all(p, s);
    sequence_detach(s, &p->device);
    sequence_drop(s, &p->prefix);
    if (p->events.closed)
        p->events.closed(p->events.arg, request, &closed);
    trace_end(TRACE_LEAVE, begin);
}

int planner_close(struct planner *p, uint64_t id, uint64_t request)
{
    struct sequence *s = find(p, id);
    if (!s || s->closing)
        return -ENOENT;
    s->close_request = request;
    if (!s->attached) {
        drop_orphan(p, s);
        struct msg_closed closed = {.sequence = id};
        if (p->events.closed)
            p->events.closed(p->events.arg, request, &closed);
        return 0;
    }
    if (s->in_step) {
        s->closing = true;
        atomic_store_explicit(&s->record->state, ARENA_SEQUENCE_LIMBO, memory_order_release);
        step_leave(p, s);
        return 0;
    }
    planner_finish_close(p, s);
    residency_review(p);
    return 0;
}

int planner_resume(struct planner *p, uint64_t id, struct msg_resumed *ret, struct err *err)
{
    struct sequence *s = find(p, id);
    if (!s || s->closing || !p->attached || p->broken)
        return err_set(err, -ENOENT, "resume: sequence %llu is not held here", (unsigned long long)id);
    planner_commit(p, true);
    if (!s->attached) {
        struct msg_open as_open = {.sequence = id,
                                   .capacity = s->capacity,
                                   .budget = s->budget,
                                   .sinks = s->sinks,
                                   .window = s->window,
                                   .tokens = {.count = s->prompt_tokens}};
        uint32_t slots;
        int r = s->budget > budget_max(p)
                    ? err_set(err, -E2BIG, "resume: budget: found %u, expected at most %u", s->budget,
                              budget_max(p))
                    : open_slots(p, &as_open, &slots, err);
        if (r == 0)
            r = open_device(p, &as_open, slots, err);
        if (r < 0)
            return r;
        s->next = s->committed;
        sequence_attach(s, &p->params, slots);
        residency_review(p);
    }
    uint32_t tokens = s->record->tokens, *ids = mem_alloc(tokens, sizeof *ids);
    sequence_tokens(s, &p->blocks, tokens, ids);
    *ret = (struct msg_resumed){.sequence = id,
                                .index = s->index,
                                .committed = s->committed,
                                .prompt_tokens = s->prompt_tokens,
                                .capacity = s->capacity,
                                .made = s->made,
                                .tokens = {.at = ids, .count = tokens}};
    return 0;
}

uint32_t planner_prefix(const struct planner *p, const struct msg_prefix *q)
{
    uint32_t blocks = q->tokens.count / BLOCK_TOKENS;
    uint32_t *found = mem_alloc(blocks, sizeof *found);
    struct prefix_query query = {.salt = q->salt,
                                 .made = q->made,
                                 .sparse = q->made.kind == ARENA_MADE_SPARSE,
                                 .tokens = q->tokens.at,
                                 .blocks = blocks};
    uint32_t cached = prefix_find(&p->prefix, &query, found) * BLOCK_TOKENS;
    mem_free(&found);
    return cached;
}

/* ---- advancing ---- */

struct control_flag *planner_waits_for(struct planner *p, uint32_t *ret_step)
{
    if (!p->attached || p->broken || p->step.state != STEP_STAGED)
        return NULL;
    *ret_step = p->step.step;
    return planner_flag(p, FLAG_RUN_CONSUMED + p->step.runs_written);
}

void planner_commit(struct planner *p, bool wait)
{
    struct commit *c = &p->commit;
    struct device_gpu *gpu = p->device.gpu;
    if (wait)
        step_write_owed(p);
    if (!c->waits)
        return;
    if (gpu && !device_gpu_passed(gpu, c->ticket)) {
        if (!wait)
            return;
        if (device_gpu_wait(gpu, c->ticket) < 0) {
            c->waits = false; /* those rows are lost */
            return;
        }
    }
    c->waits = false;
    for (uint32_t i = 0; i < c->parts; i++)
        sequence_publish(c->part[i].sequence, &p->prefix, c->part[i].end);
    flag_raise(planner_flag(p, FLAG_COMMITTED), c->step);
}

void planner_raise_rows(struct planner *p, uint32_t run)
{
    struct control_flag *flag = planner_flag(p, FLAG_ROWS_READY + run);
    if (planner_error(p))
        return; /* nothing is known to be in place */
    /* Rows on their way to the arena lie where the decoder writes only in slots and in staging buffers. */
    bool all = residency_layers(p) == p->layout.layers,
         pages = p->step.kind == STEP_SPARSE && run < p->residency.resident;
    bool there = !p->device.gpu || device_gpu_idle(p->device.gpu) ||
                 (pages && (p->step.pages_settled || (all && device_gpu_settled(p->device.gpu))));
    if (there)
        flag_raise(flag, p->step.step);
    else
        device_gpu_raise(p->device.gpu, flag, p->step.step);
}

bool planner_busy(struct planner *p)
{
    struct device_gpu *gpu = p->device.gpu;
    return gpu && !device_gpu_failed(gpu) && !device_gpu_passed(gpu, device_gpu_ticket(gpu));
}

const struct err *planner_error(const struct planner *p)
{
    return p->device.gpu && device_gpu_failed(p->device.gpu) ? &p->device.gpu->error : NULL;
}

void planner_advance(struct planner *p)
{
    int64_t begin_ns = clock_now_ns();
    if (planner_busy(p))
        device_gpu_look(p->device.gpu);
    planner_commit(p, false);
    while (p->attached && !p->broken && !planner_error(p) && step_advance(p))
        continue;
    if (p->commit.owed && begin_ns - p->step.ended_ns > PLANNER_NEAR_NS)
        step_write_owed(p);
    trace_end(TRACE_ADVANCE, begin_ns);
}

bool planner_idle(struct planner *p, int64_t now_ns)
{
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        struct sequence *s = &p->sequences[i];
        if (s->record && !s->attached && s->orphan_until_ns <= now_ns)
            drop_orphan(p, s);
    }
    return residency_idle(p) || reach_quiet(p, now_ns);
}

void planner_force(struct planner *p, int32_t runs)
{
    int32_t kept = (int32_t)p->kept_runs;
    p->residency.forced = runs < 0 || runs > kept ? runs : kept;
    residency_review(p);
}
