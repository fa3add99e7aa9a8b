/* See reach.h. Owner: the planner thread. It must never touch memory for the first time: who needs a stretch
 * in a step that nothing was ahead of does (gather_gpu.c), nobody else. */
#include "kvstore/reach.h"

#include <errno.h>

#include "kvstore/gather_gpu.h"

#define QUIET_NS (100 * CLOCK_MS) /* without a step: registering is free */

enum {
    AHEAD_BLOCKS = 8, /* beyond those in use are populated, of those that the file holds */
    THREADS_GPU = 4,  /* that populate, at most */
    /* So far ahead of each sequence blocks are registered, in decode steps and at any other time; populated
     * as far as the latter. */
    NEAR_TOKENS = 256,
    FAR_TOKENS = 4096,
};

/* When stretches are registered in a sparse step: from a quarter to a half of what the last one took after
 * its record, but no later for a longer one than for this; where its tables waited for sets, up to a
 * quarter after those. Before, the decoder launches it and the retriever answers; the other half is what
 * steps differ by.
 *
 * Does it suffice? For a model of 8B parameters a step takes 8 ms or more, a block is 8 MiB, and 32
 * sequences take 32 of them in 64 steps: 4 MiB a step. Measured on an H200
 * (bench/results/2026-11-30-selection-h200.md): 4 MiB, populated, are registered in 0.38 ms, so the 2 ms
 * hold five times as much, 20 MiB. When all 32 come to a multiple of 64 in one step, 256 MiB more are
 * wanted, NEAR_TOKENS - 64 = 192 steps or more before they are needed; 13 steps register them. First
 * touch takes 0.56 ms a MiB: one thread has those 256 MiB within 144 ms, 15 steps of 10 ms. A prompt's
 * blocks (1.3 to 2 GB/s at 10 to 15 thousand tokens a second) take one thread about as long as they take
 * to be computed, so there are four. 1B: blocks of 2 MiB, 1 MiB a step, steps of 2.5 ms, whose 0.6 ms hold
 * 4 to 8. 70B, 64 sequences: blocks of 20 MiB, 20 MiB a step, just.
 *
 * In a decode step one in five takes 6 to 15 ms, whoever is at work beside it, and the next step waits for
 * it (bench/results/2026-11-30-awake-h200.md): memory suffices, time does not always. So what an answer of
 * FAR_TOKENS needs is registered while prompts are computed, or nothing is. */
#define STEP_NS (8 * CLOCK_MS)

void reach_start(struct planner *p)
{
    int threads = p->options.threads < THREADS_GPU ? p->options.threads : THREADS_GPU;
    blocks_populate_start(&p->blocks, p->options.gpu ? threads : 1, p->options.before_touch,
                          p->options.before_touch_arg);
}

/* Blocks that are or were in use, or will be when every open sequence has its prompt and `ahead` tokens more,
 * or its last. */
static uint32_t blocks_wanted(const struct planner *p, uint32_t ahead)
{
    uint64_t wanted = p->blocks.present - p->blocks.free_count;
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        const struct sequence *s = &p->sequences[i];
        if (!s->record || !s->attached)
            continue;
        uint32_t end = (s->next > s->prompt_tokens ? s->next : s->prompt_tokens) + ahead;
        uint32_t most = sequence_pages(end < s->capacity ? end : s->capacity);
        wanted += most > s->blocks ? most - s->blocks : 0;
    }
    wanted = wanted > p->blocks.taken ? wanted : p->blocks.taken;
    return wanted < p->blocks.blocks_max ? (uint32_t)wanted : p->blocks.blocks_max;
}

/* Tells the threads how far. On the CPU no further than what the file holds: touched in time is enough, and
 * memory that nobody comes to need stays free. Returns the blocks that are wanted registered, in a decode
 * step or at another time. */
static uint32_t aim(struct planner *p, bool decodes)
{
    struct blocks *b = &p->blocks;
    bool on_gpu = p->gather.gpu && p->attached && !planner_error(p);
    uint32_t wanted = on_gpu ? blocks_wanted(p, FAR_TOKENS) : 0;
    uint32_t populate = b->present - b->free_count + AHEAD_BLOCKS;
    populate = populate < b->present ? populate : b->present;
    blocks_populate(b, populate > wanted ? populate : wanted);
    return on_gpu && decodes ? blocks_wanted(p, NEAR_TOKENS) : wanted;
}

static void window(const struct step *step, int64_t *ret_from_ns, int64_t *ret_end_ns)
{
    int64_t took_ns = step->took_ns > 0 && step->took_ns < STEP_NS ? step->took_ns : STEP_NS;
    int64_t end_ns = step->seen_ns + took_ns / 2, behind_ns = step->planned_ns + took_ns / 4;
    *ret_from_ns = step->seen_ns + took_ns / 4;
    *ret_end_ns = end_ns > behind_ns ? end_ns : behind_ns;
}

int64_t reach_step(struct planner *p, int64_t now_ns)
{
    struct step *step = &p->step;
    bool dense = step->kind == STEP_DENSE;
    if (!p->gather.gpu || !p->attached || p->broken || planner_error(p) ||
        !(step->state == STEP_WRITTEN || (step->state == STEP_STAGED && dense)))
        return INT64_MAX;
    int64_t from_ns, end_ns;
    window(step, &from_ns, &end_ns);
    if (!dense && now_ns < from_ns)
        return from_ns;
    /* The first of a step is bound by no earlier one's time: else one that was slow would forbid all. */
    int64_t takes_ns = step->reached ? gather_gpu_reached(p->gather.gpu).longest_ns : 0;
    if (!dense && now_ns + takes_ns > end_ns)
        return INT64_MAX;
    int r = gather_gpu_reach(p->gather.gpu, aim(p, !dense));
    if (r == 1)
        step->reached = true;
    if (r != -EAGAIN)
        return r ? 0 : INT64_MAX;
    return dense || now_ns + CLOCK_MS <= end_ns ? now_ns + CLOCK_MS : INT64_MAX;
}

bool reach_quiet(struct planner *p, int64_t now_ns)
{
    aim(p, false);
    return p->gather.gpu && !planner_error(p) && p->step.state == STEP_IDLE &&
           now_ns - p->step.seen_ns >= QUIET_NS && gather_gpu_reach(p->gather.gpu, p->blocks.blocks_max) == 1;
}
