/* Planning of one sparse step: 32 sequences x 8 heads, budget 2048 of 32K positions, a fifth of every set
 * changed uniformly; merges, slots, victims and tables are measured, the gathers themselves are not.
 *
 * And what the next step waits for when it follows at the heels of one (`previous`, three quarters of the
 * layers offloaded, its sets there already): from STEP_CONSUMED and STEP_POSTED to TABLES_LATE, by the
 * planner itself, 32 sequences x 8 groups x 8 heads, budget 1024 of 8K, a twentieth changed.
 *
 *   bench_plan [--quick]
 *
 * Floor: tables of 32 x 8 lists are written once (8 bytes a position) and the sets are read and written
 * once. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/pool.h"
#include "kvstore/planner.h"
#include "link/flag.h"
#include "link/segment.h"

enum {
    SEQUENCES = 32,
    HEADS = 8,
    CONTEXT = 32768,
    BUDGET = 2048,
    SINKS = 4,
    WINDOW = 64,
    SLOTS = 3072,
    STEPS_MAX = 64
};

struct bench {
    struct kv_layout layout;
    struct segment control;
    struct tables tables;
    struct sequence sequences[SEQUENCES];
    struct elastic_set sets[SEQUENCES];
    uint32_t *counts[SEQUENCES], *positions[SEQUENCES];
    uint64_t random;
    uint32_t step, position;
    uint8_t *marks;
    uint32_t set[SEQUENCES][HEADS][BUDGET];
};

static uint32_t random_below(struct bench *b, uint32_t n)
{
    b->random ^= b->random << 13;
    b->random ^= b->random >> 7;
    b->random ^= b->random << 17;
    return (uint32_t)((b->random >> 32) * n >> 32);
}

/* Selected positions of a list in ascending order, from marks. */
static uint32_t collect(const uint8_t *marks, uint8_t value, uint32_t *out)
{
    uint32_t n = 0;
    for (uint32_t p = 0; p < CONTEXT; p++)
        if (marks[p] == value)
            out[n++] = p;
    return n;
}

/* The next set of every list: a fifth leaves, as many others come. */
static void make_sets(struct bench *b, bool first)
{
    uint32_t count = BUDGET - SINKS - WINDOW - 1, changed = first ? count : count / 5;
    uint32_t limit = b->position - WINDOW;
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        uint32_t *counts = b->counts[s], *out = b->positions[s];
        for (uint32_t h = 0; h < HEADS; h++) {
            uint32_t *set = b->set[s][h];
            memset(b->marks, 0, CONTEXT);
            for (uint32_t i = 0; i < count && !first; i++)
                b->marks[set[i]] = 1;
            for (uint32_t i = 0; i < changed && !first;) {
                uint32_t p = set[random_below(b, count)];
                i += b->marks[p] == 1;
                b->marks[p] = 2;
            }
            for (uint32_t i = 0; i < changed;) {
                uint32_t p = SINKS + random_below(b, limit - SINKS);
                i += b->marks[p] == 0;
                b->marks[p] = b->marks[p] == 0 ? 3 : b->marks[p];
            }
            counts[0] = collect(b->marks, 3, out);
            out += counts[0];
            counts[1] = collect(b->marks, 2, out);
            out += counts[1];
            counts += 2;
            uint32_t n = 0;
            for (uint32_t p = 0; p < CONTEXT; p++)
                if (b->marks[p] == 1 || b->marks[p] == 3)
                    set[n++] = p;
            CHECK(n == count);
        }
        b->sets[s] = (struct elastic_set){.step = b->step,
                                          .base_step = first ? b->step : b->step - 1,
                                          .limit = limit,
                                          .position = b->position,
                                          .mass = 1,
                                          .counts = b->counts[s],
                                          .positions = b->positions[s]};
    }
}

static void plan_one(void *arg, int index, int thread)
{
    (void)thread;
    struct bench *b = arg;
    struct sequence *s = &b->sequences[index];
    struct elastic *e = &s->elastic;
    e->loads.count = e->fills.count = 0;
    CHECK(elastic_receive(e, &b->sets[index]) == 0);
    elastic_stage(e);
    elastic_commit(e, &s->counters);
    elastic_pin(e, e->limit, b->position + 1, b->position);
    tables_lists(&b->tables, b->step, 1, s, b->position);
    tables_entry(&b->tables, b->step, 1, s->index, 0, e->loads.count);
}

/* The set of a sequence without slots when it comes, and what is left for the step itself. */
static void take_one(void *arg, int index, int thread)
{
    (void)thread;
    struct bench *b = arg;
    struct sequence *s = &b->sequences[index];
    CHECK(elastic_receive(&s->elastic, &b->sets[index]) == 0);
    elastic_stage(&s->elastic);
    elastic_commit(&s->elastic, &s->counters);
    tables_draft(&b->tables, b->step, 1, s, b->position);
}

static void step_one(void *arg, int index, int thread)
{
    (void)thread;
    struct bench *b = arg;
    struct sequence *s = &b->sequences[index];
    CHECK(tables_are_drafted(s, b->step, 1, b->position));
    elastic_pin(&s->elastic, s->elastic.limit, b->position + 1, b->position);
    tables_lists(&b->tables, b->step, 1, s, b->position);
    tables_entry(&b->tables, b->step, 1, s->index, 0, 0);
}

static void init(struct bench *b)
{
    b->random = 88172645463325252u;
    b->layout = (struct kv_layout){.layers = 32,
                                   .row_heads = HEADS,
                                   .selection_heads = HEADS,
                                   .piece_bytes = 512,
                                   .context_max = CONTEXT};
    layout_set_groups(&b->layout, 1);
    struct control_params params = {
        .sequences_max = SEQUENCES, .list_max = BUDGET + 16, .slots = SLOTS, .first_step = 1};
    struct control_header header;
    control_header_init(&header, &b->layout, &params);
    CHECK(segment_create("bench-control", header.total_bytes, &b->control, NULL) == 0);
    memcpy(b->control.at, &header, sizeof header);
    tables_init(&b->tables, b->control.at);
    b->marks = mem_alloc(CONTEXT, 1);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        struct elastic_params p = {.layout = &b->layout,
                                   .capacity = CONTEXT,
                                   .sinks = SINKS,
                                   .window = WINDOW,
                                   .budget = BUDGET,
                                   .slots = SLOTS};
        b->sequences[s].index = s;
        elastic_init(&b->sequences[s].elastic, &p);
        elastic_attach(&b->sequences[s].elastic, 0, 0);
        b->counts[s] = mem_alloc(2 * HEADS, sizeof(uint32_t));
        b->positions[s] = mem_alloc(2ull * HEADS * BUDGET, sizeof(uint32_t));
    }
    b->step = 1;
    b->position = CONTEXT - 2 * STEPS_MAX - 8;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(struct bench *b, int threads, int steps)
{
    struct pool *pool = pool_create(threads, "bench");
    double ms[STEPS_MAX];
    uint64_t loads = 0;
    for (int i = 0; i < steps; i++, b->step++, b->position++) {
        make_sets(b, b->step == 1);
        int64_t from = clock_now_ns();
        pool_run(pool, SEQUENCES, plan_one, b);
        ms[i] = (double)(clock_now_ns() - from) / 1e6;
        for (uint32_t s = 0; s < SEQUENCES; s++)
            loads += b->sequences[s].elastic.loads.count;
    }
    uint64_t bytes = (uint64_t)SEQUENCES * HEADS * (BUDGET * 8 + 4); /* positions, slots and a count */
    qsort(ms, (size_t)steps, sizeof ms[0], compare);
    printf("%d thread%s: median %.2f ms a step, best %.2f, worst %.2f; %.2f MB of lists written (%.1f GB/s), "
           "%.0f rows "
           "to load a step\n",
           threads, threads > 1 ? "s" : "", ms[steps / 2], ms[0], ms[steps - 1], (double)bytes / 1e6,
           (double)bytes / ms[steps / 2] / 1e6, (double)loads / steps);
    pool_free(&pool);
}

static void measure_without_slots(struct bench *b, int threads, int steps)
{
    struct pool *pool = pool_create(threads, "bench");
    double take[STEPS_MAX], step[STEPS_MAX];
    for (int i = 0; i < steps; i++, b->step++, b->position++) {
        make_sets(b, false);
        int64_t from = clock_now_ns();
        pool_run(pool, SEQUENCES, take_one, b);
        int64_t taken = clock_now_ns();
        for (int s = 0; s < SEQUENCES; s++)
            step_one(b, s, 0);
        step[i] = (double)(clock_now_ns() - taken) / 1e3;
        take[i] = (double)(taken - from) / 1e6;
    }
    qsort(take, (size_t)steps, sizeof take[0], compare);
    qsort(step, (size_t)steps, sizeof step[0], compare);
    printf(
        "all layers resident, %d thread%s: sets taken and lists written median %.2f ms, best %.2f; then the "
        "step's tables median %.1f us, best %.1f\n",
        threads, threads > 1 ? "s" : "", take[steps / 2], take[0], step[steps / 2], step[0]);
    pool_free(&pool);
}

/* ---- at the heels of a step ---- */

enum {
    HEELS_GROUPS = 8,
    HEELS_LISTS = HEELS_GROUPS * HEADS,
    HEELS_LAYERS = 16,
    HEELS_OFFLOADED = 12,
    HEELS_PROMPT = 8192 - 2 * STEPS_MAX,
    HEELS_CAPACITY = 8192,
    HEELS_BUDGET = 1024,
    HEELS_COUNT = HEELS_BUDGET - SINKS - WINDOW - 1,
    HEELS_CHANGED = HEELS_COUNT / 20
};

/* A decoder that computes nothing and a retriever that picks at random, in the planner's thread. */
struct heels {
    struct planner *planner;
    struct control_header *control;
    uint64_t random;
    uint32_t step, position; /* of the step that is posted next and of its tokens */
    uint32_t index[SEQUENCES];
    uint8_t marks[HEELS_CAPACITY];
    uint32_t tokens[HEELS_CAPACITY];
    uint16_t set[SEQUENCES][HEELS_LISTS][HEELS_COUNT];
    struct msg_topk_entry entries[SEQUENCES];
    uint32_t counts[SEQUENCES * HEELS_LISTS * 2];
    uint32_t positions[SEQUENCES * HEELS_LISTS * HEELS_COUNT];
};

static uint32_t heels_random(struct heels *h, uint32_t n)
{
    h->random ^= h->random << 13;
    h->random ^= h->random >> 7;
    h->random ^= h->random << 17;
    return (uint32_t)((h->random >> 32) * n >> 32);
}

static void heels_raise(struct heels *h, unsigned flag)
{
    flag_raise(control_flag_at(h->control, flag), h->step);
}

static void heels_post(struct heels *h, uint32_t kind, uint32_t first, uint32_t entries, uint32_t tokens)
{
    struct step_record *r = control_step_at(h->control, h->step);
    *r = (struct step_record){.step = h->step,
                              .kind = kind,
                              .selection = SELECTION_PREVIOUS,
                              .resident_version =
                                  atomic_load(&control_flag_at(h->control, FLAG_RESIDENT_PROPOSED)->value)};
    r->entries = entries;
    for (uint32_t i = 0; i < entries; i++, r->tokens += tokens)
        r->entry[i] = (struct step_entry){.id = 1 + first + i,
                                          .sequence = h->index[first + i],
                                          .position = h->position,
                                          .count = tokens,
                                          .token_at = r->tokens};
    heels_raise(h, FLAG_STEP_POSTED);
}

static void heels_prefill(struct heels *h, uint32_t sequence)
{
    struct msg_open open = {.sequence = 1 + sequence,
                            .made = {.kind = ARENA_MADE_SPARSE, .budget = HEELS_BUDGET},
                            .capacity = HEELS_CAPACITY,
                            .budget = HEELS_BUDGET,
                            .sinks = SINKS,
                            .window = WINDOW,
                            .tokens = {.at = h->tokens, .count = HEELS_PROMPT}};
    struct msg_grant grant;
    struct err err = {0};
    if (planner_open(h->planner, &open, &grant, &err) < 0) {
        fprintf(stderr, "bench_plan: %s\n", err.text);
        exit(1);
    }
    h->index[sequence] = grant.index;
    for (h->position = 0; h->position < HEELS_PROMPT;) {
        uint32_t left = HEELS_PROMPT - h->position;
        uint32_t n = left < LIMIT_STEP_TOKENS ? left : LIMIT_STEP_TOKENS;
        heels_post(h, STEP_DENSE, sequence, 1, n);
        planner_advance(h->planner);
        for (uint32_t run = 0; run < h->control->runs; run++) {
            heels_raise(h, FLAG_RUN_CONSUMED + run);
            planner_advance(h->planner);
        }
        heels_raise(h, FLAG_KV_WRITTEN);
        heels_raise(h, FLAG_STEP_CONSUMED);
        planner_advance(h->planner);
        h->position += n;
        h->step++;
    }
}

/* One list's change; `first`: all of it. Returns how many positions were written to `out`. */
static uint32_t heels_change(struct heels *h, uint16_t *set, uint32_t limit, bool first, uint32_t counts[2],
                             uint32_t *out)
{
    uint32_t n = 0, kept = 0;
    memset(h->marks, 0, sizeof h->marks);
    for (uint32_t i = 0; i < HEELS_COUNT && !first; i++)
        h->marks[set[i]] = 1;
    for (uint32_t i = 0; i < HEELS_CHANGED && !first;) {
        uint8_t *mark = &h->marks[set[heels_random(h, HEELS_COUNT)]];
        i += *mark == 1;
        *mark = 2;
    }
    for (uint32_t i = 0; i < (first ? HEELS_COUNT : HEELS_CHANGED);) {
        uint8_t *mark = &h->marks[SINKS + heels_random(h, limit - SINKS)];
        i += *mark == 0;
        *mark = *mark == 0 ? 3 : *mark;
    }
    for (uint32_t value = 3; value >= 2; value--)
        for (uint32_t p = 0; p < HEELS_CAPACITY; p++)
            if (h->marks[p] == value)
                out[n++] = p, counts[3 - value]++;
    for (uint32_t p = 0; p < HEELS_CAPACITY; p++)
        if (h->marks[p] & 1)
            set[kept++] = (uint16_t)p;
    return n;
}

/* Sets made from `position` in `step`. */
static void heels_select(struct heels *h, uint32_t step, uint32_t position, bool first)
{
    uint32_t n = 0, limit = position - WINDOW;
    memset(h->counts, 0, sizeof h->counts);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        h->entries[s] = (struct msg_topk_entry){.sequence = 1 + s,
                                                .index = h->index[s],
                                                .base_step = first ? step : step - 1,
                                                .limit = limit,
                                                .position = position,
                                                .mass = 1};
        for (uint32_t l = 0; l < HEELS_LISTS; l++)
            n += heels_change(h, h->set[s][l], limit, first, h->counts + 2 * ((size_t)s * HEELS_LISTS + l),
                              h->positions + n);
    }
    struct msg msg = {.kind = MSG_TOPK,
                      .id = step,
                      .topk = {.entries = h->entries,
                               .entry_count = SEQUENCES,
                               .groups = HEELS_GROUPS,
                               .selection_heads = HEADS,
                               .counts = {h->counts, SEQUENCES * HEELS_LISTS * 2},
                               .positions = {h->positions, n}}};
    planner_topk(h->planner, &msg);
}

static struct heels *heels_create(int threads)
{
    struct heels *h = mem_alloc(1, sizeof *h);
    struct kv_layout layout = {.layers = HEELS_LAYERS,
                               .row_heads = HEADS,
                               .selection_heads = HEADS,
                               .piece_bytes = 16,
                               .dtype = 1,
                               .context_max = HEELS_CAPACITY};
    layout_set_groups(&layout, HEELS_GROUPS);
    struct planner_options options = {.device_bytes = UINT64_C(2) << 30,
                                      .host_bytes = UINT64_C(1) << 30,
                                      .sequences = SEQUENCES,
                                      .threads = threads,
                                      .offload_layers = HEELS_OFFLOADED,
                                      .no_prefix = true};
    struct err err = {0};
    if (planner_create(&h->planner, &options, &layout, NULL, &err) < 0 ||
        planner_attach(h->planner, 1, &err) < 0) {
        fprintf(stderr, "bench_plan: %s\n", err.text);
        exit(1);
    }
    h->control = h->planner->control.at;
    h->step = h->control->first_step;
    h->random = 88172645463325252u;
    for (uint32_t s = 0; s < SEQUENCES; s++)
        heels_prefill(h, s);
    return h;
}

/* Rows of the step before are written back first: on a GPU they are so behind the tables. */
static void measure_heels(int threads, int steps)
{
    struct heels *h = heels_create(threads);
    double us[STEPS_MAX];
    heels_select(h, h->step - 1, h->position - 1, true);
    for (int i = -4; i < steps; i++) {
        int64_t from = clock_now_ns();
        if (i > -4) { /* the step before is over */
            h->step--;
            heels_raise(h, FLAG_STEP_CONSUMED);
            h->step++;
        }
        heels_post(h, STEP_SPARSE, 0, SEQUENCES, 1);
        planner_advance(h->planner);
        CHECK(flag_reached(control_flag_at(h->control, FLAG_TABLES_LATE), h->step));
        if (i >= 0)
            us[i] = (double)(h->planner->step.tables_ns - from) / 1e3;
        heels_select(h, h->step, h->position, false);
        heels_raise(h, FLAG_KV_WRITTEN);
        planner_advance(h->planner);
        h->step++;
        h->position++;
    }
    qsort(us, (size_t)steps, sizeof us[0], compare);
    printf("at the heels of a step, %d thread%s: its end and the next record to tables median "
           "%.0f us, best %.0f, worst %.0f\n",
           threads, threads > 1 ? "s" : "", us[steps / 2], us[0], us[steps - 1]);
    planner_free(&h->planner);
    mem_free(&h);
}

int main(int argc, char **argv)
{
    bool quick = argc > 1 && strcmp(argv[1], "--quick") == 0;
    struct bench *b = mem_alloc(1, sizeof *b);
    init(b);
    printf("plan: %d sequences x %d heads, budget %d of %d positions, 20 %% changed, %d slots\n", SEQUENCES,
           HEADS, BUDGET, CONTEXT, SLOTS);
    int steps = quick ? 8 : 24;
    measure(b, 1, steps);
    measure(b, 2, steps);
    for (uint32_t s = 0; s < SEQUENCES; s++)
        elastic_detach(&b->sequences[s].elastic, 0);
    measure_without_slots(b, 1, steps);
    measure_without_slots(b, 2, steps);
    measure_heels(1, steps);
    measure_heels(2, steps);
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        CHECK(elastic_consistent(&b->sequences[s].elastic));
        elastic_free(&b->sequences[s].elastic);
        mem_free(&b->counts[s]);
        mem_free(&b->positions[s]);
    }
    segment_close(&b->control);
    mem_free(&b->marks);
    mem_free(&b);
    return 0;
}
