/* Resident and offloaded layers; see residency.h. Owner: the planner thread. It must never give pages that a
 * posted and not consumed step may read: versions come into use between steps, with a record. */
#include "kvstore/residency.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/trace.h"
#include "kvstore/step.h"
#include "link/flag.h"
#include "proto/memory.h"

#define FILL_BLOCKS 8u /* blocks that one idle call brings back: a step must not wait long behind it */

void residency_init(struct planner *p, struct control_params *params)
{
    struct residency *r = &p->residency;
    memset(r, 0, sizeof *r);
    r->runs = layout_runs(&p->layout);
    r->resident = r->runs;
    r->runs_of[0] = r->runs;
    r->forced = -1;
    params->staging_tokens = 0;
    if (p->options.no_offload)
        return;
    r->staging_layers = p->layout.layers - layout_run_first(&p->layout, r->runs - 1);
    params->staging_tokens =
        memory_staging_tokens(&p->layout, p->device.slabs * p->device.slab_bytes, params->slots);
    r->staging_pages = params->staging_tokens / BLOCK_TOKENS;
    r->staging_slabs = (uint32_t)memory_staging_slabs(&p->layout, params->staging_tokens);
}

static void staging_give(struct planner *p)
{
    struct residency *r = &p->residency;
    for (uint32_t i = 0; r->staging && i < r->staging_slabs; i++)
        device_slab_give(&p->device, r->staging_slab[i]);
    mem_free(&r->staging);
    mem_free(&r->staging_slab);
}

void residency_close(struct planner *p)
{
    staging_give(p);
}

static uint32_t wanted(const struct residency *r)
{
    return r->runs_of[r->proposed % CONTROL_RESIDENT_RING];
}

/* Pages of runs from this one on are not read any more, nor will they be. */
static uint32_t leaving_from(const struct residency *r)
{
    uint32_t keep = r->returning ? r->returning : wanted(r);
    return keep > r->resident ? keep : r->resident;
}

bool residency_leaving(const struct planner *p)
{
    for (uint32_t i = 0; p->attached && i < p->options.sequences; i++)
        for (uint32_t run = leaving_from(&p->residency); run < p->residency.runs; run++)
            if (p->sequences[i].pages_have[run])
                return true;
    return false;
}

/* Gives the pages of one sequence and run, `from` or a higher one. Whether there were any. */
static bool leave_some(struct planner *p, uint32_t from)
{
    for (uint32_t i = 0; i < p->options.sequences; i++)
        for (uint32_t run = from; run < p->residency.runs; run++)
            if (p->sequences[i].pages_have[run]) {
                sequence_give_pages(&p->sequences[i], &p->device, &p->layout, run);
                return true;
            }
    return false;
}

/* All of them, where room is needed at once. Whether there were any. */
static bool leave_all(struct planner *p, uint32_t from)
{
    bool some = false;
    while (leave_some(p, from))
        some = true;
    return some;
}

static int staging_take(struct planner *p)
{
    struct residency *r = &p->residency;
    if (r->staging)
        return 0;
    if (p->device.free_count < r->staging_slabs)
        leave_all(p, leaving_from(r));
    if (p->device.free_count < r->staging_slabs)
        return -ENOSPC;
    r->staging_slab = mem_alloc(r->staging_slabs, sizeof *r->staging_slab);
    for (uint32_t i = 0; i < r->staging_slabs; i++)
        CHECK(device_slab_take(&p->device, DEVICE_STAGING, &r->staging_slab[i]) == 0);
    uint32_t rows = 2 * r->staging_layers, a_row = r->staging_slabs / rows, per = p->device.pages_per_slab;
    r->staging = mem_alloc((size_t)rows * r->staging_pages, sizeof *r->staging);
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t i = 0; i < r->staging_pages; i++)
            r->staging[(size_t)row * r->staging_pages + i] =
                r->staging_slab[row * a_row + i / per] + i % per * p->device.page_bytes;
    return 0;
}

const uint64_t *residency_staging(const struct planner *p, uint32_t run, uint32_t layer, uint32_t first)
{
    const struct residency *r = &p->residency;
    uint32_t row = (run & 1) * r->staging_layers + layer - layout_run_first(&p->layout, run);
    return r->staging + (size_t)row * r->staging_pages + first;
}

static uint32_t pages_needed(const struct sequence *s, bool ever)
{
    uint32_t ahead = s->next + BLOCK_TOKENS; /* so that a proposal comes in time */
    uint32_t positions = ahead > s->prompt_tokens ? ahead : s->prompt_tokens;
    return sequence_pages(ever || positions > s->capacity ? s->capacity : positions);
}

uint64_t residency_slabs(const struct planner *p, uint32_t runs, const struct residency_need *more, bool ever)
{
    uint32_t resident = layout_run_first(&p->layout, runs);
    uint64_t pages = more ? more->pages : 0, slots = more ? more->slot_slabs : 0;
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        const struct sequence *s = &p->sequences[i];
        if (!s->record || !s->attached)
            continue;
        pages += pages_needed(s, ever || p->options.no_offload);
        slots += s->slot_slabs;
    }
    uint64_t slabs = 0;
    for (uint32_t l = 0; l < resident; l++) {
        uint64_t have = p->device.layer_pages[l];
        slabs += device_layer_slabs(&p->device, l, pages > have ? pages - have : 0);
    }
    if (p->options.no_offload)
        return slabs;
    slabs += slots * (p->layout.layers - resident) + p->residency.staging_slabs;
    return slabs + (runs > 0 ? slots : 0); /* a layer's slots are taken before its pages are given */
}

/* Runs that may be resident, memory apart. */
static uint32_t runs_allowed(const struct planner *p)
{
    return memory_runs_allowed(&p->layout, p->options.offload_layers);
}

/* Never fewer than are kept: planner_open admits what fits beside them. */
static uint32_t runs_that_fit(const struct planner *p)
{
    uint32_t runs = runs_allowed(p);
    while (runs > p->kept_runs && residency_slabs(p, runs, NULL, false) > p->device.slabs)
        runs--;
    return runs;
}

/* To how many runs the layers may come back: with room for all that there ever can be, and for the slots
 * that are held while their layers' pages are filled: those of layers that an earlier proposal brings back
 * too, until it is applied. */
static uint32_t runs_to_return(const struct planner *p)
{
    uint64_t slots = 0;
    for (uint32_t i = 0; i < p->options.sequences; i++)
        slots += p->sequences[i].record && p->sequences[i].attached ? p->sequences[i].slot_slabs : 0;
    uint32_t runs = runs_allowed(p), low = wanted(&p->residency);
    uint32_t from = layout_run_first(&p->layout, low < p->residency.resident ? low : p->residency.resident);
    for (; runs > wanted(&p->residency); runs--) {
        uint64_t held = slots * (layout_run_first(&p->layout, runs) - from);
        if (residency_slabs(p, runs, NULL, true) + held <= p->device.slabs)
            break;
    }
    return runs;
}

/* Pages of runs that are not resident yet and shall not become so. */
static void prepared_give(struct planner *p, uint32_t runs)
{
    uint32_t from = runs > p->residency.resident ? runs : p->residency.resident;
    for (uint32_t i = 0; i < p->options.sequences; i++)
        for (uint32_t r = from; p->sequences[i].record && r < p->residency.runs; r++)
            if (p->sequences[i].pages_have[r])
                sequence_give_pages(&p->sequences[i], &p->device, &p->layout, r);
}

static void propose(struct planner *p, uint32_t runs)
{
    struct residency *r = &p->residency;
    CHECK(runs >= p->kept_runs);
    r->returning = 0;
    if (runs == wanted(r))
        return;
    if (r->proposed - r->version >= 60) /* the ring must not forget what a record may still name */
        return;
    r->runs_of[++r->proposed % CONTROL_RESIDENT_RING] = runs;
    p->flags->resident_layers[r->proposed % CONTROL_RESIDENT_RING] = layout_run_first(&p->layout, runs);
    flag_raise(planner_flag(p, FLAG_RESIDENT_PROPOSED), r->proposed);
}

void residency_review(struct planner *p)
{
    struct residency *r = &p->residency;
    if (!p->attached || p->options.no_offload)
        return;
    uint32_t now = r->forced >= 0 ? (uint32_t)r->forced : runs_that_fit(p);
    if (now < wanted(r)) {
        propose(p, now);
        prepared_give(p, now);
        p->totals.offloads++;
        return;
    }
    uint32_t back = r->forced >= 0 ? (uint32_t)r->forced : runs_to_return(p);
    r->returning = back > wanted(r) ? back : 0;
    prepared_give(p, r->returning ? r->returning : wanted(r)); /* fewer may come back than before */
}

static int grow_pages(struct planner *p, struct sequence *s, uint32_t run, uint32_t pages)
{
    int r = sequence_grow_pages(s, &p->device, &p->layout, run, pages);
    if (r == -ENOSPC && leave_all(p, leaving_from(&p->residency)))
        r = sequence_grow_pages(s, &p->device, &p->layout, run, pages);
    return r;
}

static int take_slots(struct planner *p, struct sequence *s, uint32_t layer)
{
    int r = sequence_take_slots(s, &p->device, &p->params, layer);
    if (r == -ENOSPC && leave_all(p, leaving_from(&p->residency)))
        r = sequence_take_slots(s, &p->device, &p->params, layer);
    return r;
}

/* One sequence's share of a run that comes back. Whether anything is left to do; *budget counts blocks. */
static bool return_fill(struct planner *p, struct sequence *s, uint32_t run, uint32_t *budget)
{
    uint32_t layer = layout_run_first(&p->layout, run), end = layout_run_first(&p->layout, run + 1);
    if (grow_pages(p, s, run, sequence_pages(s->committed)) < 0) {
        p->residency.returning = 0;
        prepared_give(p, wanted(&p->residency));
        return false;
    }
    uint32_t from = s->pages_valid[run], to = s->committed;
    if (from >= to)
        return false;
    if (to - from > *budget * BLOCK_TOKENS)
        to = from + *budget * BLOCK_TOKENS;
    struct gather_job job = {.kind = GATHER_PAGES,
                             .layer = layer,
                             .end_layer = end,
                             .first = from,
                             .end = to,
                             .sequence = s,
                             .pages = s->pages + (size_t)layer * s->pages_max,
                             .stride = s->pages_max};
    gather_pages(&p->gather, &job);
    s->pages_valid[run] = to;
    s->counters.rows_filled += (uint64_t)(to - from) * p->layout.row_heads;
    s->counters.bytes_filled +=
        (uint64_t)(to - from) * p->layout.row_heads * (end - layer) * p->layout.piece_bytes;
    *budget -= (to - from + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    return true;
}

bool residency_idle(struct planner *p)
{
    struct residency *r = &p->residency;
    int64_t begin = trace_begin();
    if (p->attached && leave_some(p, leaving_from(r))) {
        trace_end(TRACE_LEAVE, begin);
        return true;
    }
    if (!p->attached || r->returning == 0)
        return false;
    step_write_owed(p); /* pages are filled from the arena with all that is committed */
    uint32_t budget = FILL_BLOCKS;
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        struct sequence *s = &p->sequences[i];
        for (uint32_t run = r->resident; s->record && s->attached && run < r->returning; run++)
            if (budget && return_fill(p, s, run, &budget) && budget == 0)
                break;
    }
    bool some = p->gather.count > 0;
    gather_run(&p->gather);
    if (r->returning && !some) {
        propose(p, r->returning);
        p->totals.returns++;
    }
    trace_end(TRACE_RETURN, begin);
    return some;
}

/* Whether the run that is being offloaded, the lowest one so far, needs slots for the sequence. Where others
 * went before and hold none of it, all of them get theirs at its next step (residency_ensure_slots). */
static bool uses_slots(const struct planner *p, const struct sequence *s)
{
    if (!s->record || !s->attached || s->budget == 0 || s->failed)
        return false;
    for (uint32_t g = 0; g < LIMIT_GROUPS; g++)
        if (s->elastic.attached[g])
            return true;
    return s->elastic.has && p->residency.resident + 1 == p->residency.runs;
}

static void count_filled(struct planner *p, struct sequence *s, uint32_t group, uint32_t layer)
{
    uint64_t rows = 0;
    for (uint32_t h = 0; h < p->layout.row_heads; h++)
        rows += elastic_head(&s->elastic, group, h)->used;
    uint32_t first = layout_run_first(&p->layout, layout_run_of(&p->layout, layer));
    bool counted =
        layer != (first > p->layout.group_first_layer[group] ? first : p->layout.group_first_layer[group]);
    s->counters.rows_filled += counted ? 0 : rows;
    s->counters.bytes_filled += rows * p->layout.piece_bytes;
}

struct attach_work {
    struct planner *planner;
    uint32_t group;
};

static void attach_one(void *arg, int index, int thread)
{
    (void)thread;
    const struct attach_work *work = arg;
    struct sequence *s = &work->planner->sequences[index];
    struct elastic *e = &s->elastic;
    if (!uses_slots(work->planner, s) || e->attached[work->group])
        return;
    elastic_attach(e, work->group, s->committed);
    e->fills.count = e->loads.count = 0; /* they are among the occupied ones */
}

/* Groups whose first layer goes: slots for what their lists hold. Takes as long as the longest sequence, all
 * threads share the sequences: a step waits. */
static void attach_groups(struct planner *p, uint32_t first, uint32_t end)
{
    for (uint32_t g = layout_group_of(&p->layout, first); g <= layout_group_of(&p->layout, end - 1); g++) {
        struct attach_work work = {p, g};
        pool_run(p->pool, (int)p->options.sequences, attach_one, &work);
    }
}

/* Slots of layers [layer, end), which are of one group: what is in the group's other layers, out of these
 * layers' pages. */
static void fill_slots(struct planner *p, struct sequence *s, uint32_t layer, uint32_t end)
{
    uint32_t group = layout_group_of(&p->layout, layer), run = layout_run_of(&p->layout, layer);
    struct elastic *e = &s->elastic;
    CHECK(e->attached[group]);
    for (uint32_t l = layer; l < end; l++)
        count_filled(p, s, group, l);
    if (s->pages_valid[run] < s->committed) { /* never used by this sequence, or given for want of room */
        uint32_t others = e->fills.count, range[3] = {others, layer, end};
        elastic_occupied(e, group, &e->fills);
        gather_rows(&p->gather, s, &e->fills, range);
        gather_run(&p->gather);
        e->fills.count = others;
        return;
    }
    struct gather_job job = {.kind = GATHER_MOVE,
                             .group = (uint16_t)group,
                             .layer = layer,
                             .end_layer = end,
                             .sequence = s,
                             .pages = s->pages + (size_t)layer * s->pages_max,
                             .stride = s->pages_max};
    for (uint32_t h = 0; h < p->layout.row_heads; h++) {
        job.head = (uint8_t)h;
        gather_add(&p->gather, &job);
    }
}

/* Layers [layer, end) of a run leave: slots for them, filled. */
static void offload_layers(struct planner *p, struct sequence *s, uint32_t layer, uint32_t end)
{
    for (uint32_t l = layer; l < end; l++)
        if (sequence_take_slots(s, &p->device, &p->params, l) < 0) {
            s->failed = true;
            return;
        }
    while (layer < end) {
        uint32_t group_end = p->layout.group_first_layer[layout_group_of(&p->layout, layer) + 1];
        group_end = group_end < end ? group_end : end;
        fill_slots(p, s, layer, group_end);
        layer = group_end;
    }
}

static uint32_t run_layers(const struct planner *p, uint32_t run)
{
    return layout_run_first(&p->layout, run + 1) - layout_run_first(&p->layout, run);
}

/* Whether each sequence's slots of a whole run find a place before its own pages are given, those of the ones
 * before it perhaps. Where slabs have several pages nobody knows what that frees. */
static bool fits_by_sequence(const struct planner *p, uint32_t run)
{
    uint64_t free = p->device.free_count, layers = run_layers(p, run);
    uint64_t given = p->device.pages_per_slab == 1 ? layers : 0; /* slabs a page of the run */
    for (uint32_t i = 0; i < p->options.sequences; i++)
        if (p->sequences[i].record && !uses_slots(p, &p->sequences[i]))
            free += given * p->sequences[i].pages_have[run];
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        const struct sequence *s = &p->sequences[i];
        if (!uses_slots(p, s))
            continue;
        if (free < s->slot_slabs * layers)
            return false;
        free = free - s->slot_slabs * layers + given * s->pages_have[run];
    }
    return true;
}

/* Sequence after sequence, one list for all layers of the run. Pages stay until there is time
 * (residency_idle), but those whose room the next sequence needs. */
static void offload_by_sequence(struct planner *p, uint32_t run)
{
    uint32_t first = layout_run_first(&p->layout, run), end = layout_run_first(&p->layout, run + 1);
    bool moved[LIMIT_SEQUENCES];
    for (uint32_t i = 0; i < p->options.sequences; i++)
        moved[i] = p->sequences[i].record && !uses_slots(p, &p->sequences[i]);
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        struct sequence *s = &p->sequences[i];
        if (moved[i] || !s->record)
            continue;
        for (uint32_t k = 0; k < p->options.sequences; k++) {
            if (p->device.free_count >= s->slot_slabs * (end - first))
                break;
            if (!moved[k] || !p->sequences[k].pages_have[run])
                continue;
            gather_run(&p->gather); /* reads them */
            sequence_give_pages(&p->sequences[k], &p->device, &p->layout, run);
        }
        offload_layers(p, s, first, end);
        moved[i] = true;
    }
    gather_run(&p->gather);
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        p->sequences[i].pages_valid[run] = 0;
        for (uint32_t l = first; l < end; l++)
            p->sequences[i].pages_written[0][l] = p->sequences[i].pages_written[1][l] = 0;
    }
}

/* Whether each layer's slots find a place before that layer's pages are given. */
static bool slots_fit(const struct planner *p, uint32_t run)
{
    uint64_t slots = 0, free = p->device.free_count;
    for (uint32_t i = 0; i < p->options.sequences; i++)
        slots += uses_slots(p, &p->sequences[i]) ? p->sequences[i].slot_slabs : 0;
    uint32_t first = layout_run_first(&p->layout, run);
    for (uint32_t l = layout_run_first(&p->layout, run + 1); l-- > first;) {
        if (free < slots)
            return false;
        free = free - slots + p->device.layer_slabs[l];
    }
    return true;
}

/* Layer after layer, whose pages are given at once. Where slots and pages do not fit side by side, all pages
 * of runs [end, run] are given first, and the slots are filled from the host. */
static void offload_by_layer(struct planner *p, uint32_t run, uint32_t end)
{
    uint32_t first = layout_run_first(&p->layout, run);
    if (!slots_fit(p, run))
        for (uint32_t i = 0; i < p->options.sequences; i++)
            for (uint32_t r = end; p->sequences[i].record && r <= run; r++)
                sequence_give_pages(&p->sequences[i], &p->device, &p->layout, r);
    for (uint32_t l = layout_run_first(&p->layout, run + 1); l-- > first;) {
        for (uint32_t i = 0; i < p->options.sequences; i++)
            if (uses_slots(p, &p->sequences[i]))
                offload_layers(p, &p->sequences[i], l, l + 1);
        gather_run(&p->gather);
        for (uint32_t i = 0; i < p->options.sequences; i++) {
            struct sequence *s = &p->sequences[i];
            for (uint32_t page = 0; s->record && page < s->pages_have[run]; page++)
                device_page_give(&p->device, s->pages[(size_t)l * s->pages_max + page]);
            s->pages_written[0][l] = s->pages_written[1][l] = 0;
        }
    }
    for (uint32_t i = 0; i < p->options.sequences; i++)
        p->sequences[i].pages_have[run] = p->sequences[i].pages_valid[run] = 0;
}

/* Runs [end, run] are to be offloaded, the highest first: this one. */
static void offload_run(struct planner *p, uint32_t run, uint32_t end)
{
    attach_groups(p, layout_run_first(&p->layout, run), layout_run_first(&p->layout, run + 1));
    if (!fits_by_sequence(p, run))
        leave_all(p, run + 1);
    if (!fits_by_sequence(p, run)) {
        offload_by_layer(p, run, end);
        return;
    }
    offload_by_sequence(p, run);
    for (uint32_t i = 0; run > end && i < p->options.sequences; i++) /* the next one needs the room */
        if (p->sequences[i].record)
            sequence_give_pages(&p->sequences[i], &p->device, &p->layout, run);
}

static void return_runs(struct planner *p, uint32_t runs)
{
    uint32_t end = layout_run_first(&p->layout, runs);
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        struct sequence *s = &p->sequences[i];
        if (!s->record || !s->attached)
            continue;
        for (uint32_t l = residency_layers(p); l < end; l++)
            if (s->has_slots[l])
                sequence_give_slots(s, &p->device, l);
        for (uint32_t g = 0; s->budget && g < p->layout.groups; g++)
            if (s->elastic.attached[g] && p->layout.group_first_layer[g + 1] <= end)
                elastic_detach(&s->elastic, g);
    }
}

int residency_apply(struct planner *p, uint32_t version)
{
    struct residency *r = &p->residency;
    if (version - r->version > r->proposed - r->version)
        return -EPROTO;
    uint32_t runs = r->runs_of[version % CONTROL_RESIDENT_RING];
    int64_t from = clock_now_ns();
    bool moves = runs != r->resident;
    r->version = version;
    if (runs < r->runs && staging_take(p) < 0)
        return -ENOSPC;
    while (r->resident > runs)
        offload_run(p, --r->resident, runs);
    if (r->resident < runs) {
        return_runs(p, runs);
        r->resident = runs;
    }
    if (runs == r->runs)
        staging_give(p);
    p->totals.move_ns += moves ? clock_now_ns() - from : 0;
    if (moves)
        trace_end(TRACE_MOVE, from);
    return 0;
}

int residency_ensure_pages(struct planner *p, struct sequence *s, uint32_t positions, uint32_t valid)
{
    for (uint32_t run = 0; run < p->residency.resident; run++) {
        int r = grow_pages(p, s, run, sequence_pages(positions));
        if (r < 0)
            return r;
        uint32_t budget = UINT32_MAX / BLOCK_TOKENS;
        if (s->pages_valid[run] < valid) {
            CHECK(valid <= s->committed);
            return_fill(p, s, run, &budget);
        }
    }
    return 0;
}

int residency_ensure_slots(struct planner *p, struct sequence *s)
{
    for (uint32_t l = residency_layers(p); l < p->layout.layers; l++) {
        if (!s->has_slots[l]) {
            int r = take_slots(p, s, l);
            if (r < 0)
                return r;
        }
        uint32_t group = layout_group_of(&p->layout, l);
        if (!s->elastic.attached[group])
            elastic_attach(&s->elastic, group, s->committed);
    }
    return 0;
}

void residency_give_all(struct planner *p, struct sequence *s)
{
    for (uint32_t run = 0; run < layout_runs(&p->layout); run++)
        sequence_give_pages(s, &p->device, &p->layout, run);
}
