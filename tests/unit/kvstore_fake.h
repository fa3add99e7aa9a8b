/* The planner with a decoder and a retriever in the same thread. Every piece holds its coordinates
 * (sequence, position, layer, row head), so a row that went astray is seen at once. Here: making it,
 * opening and closing. */
#ifndef TESTS_KVSTORE_FAKE_H
#define TESTS_KVSTORE_FAKE_H

#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "kvstore/planner.h"
#include "kvstore/residency.h"
#include "link/flag.h"
#include "tests/lib/fakegpu.h"

#define FAKE_PATIENCE (60 * CLOCK_S)

enum { FAKE_SEQUENCES = 6, FAKE_CONTEXT = 1024, FAKE_LISTS = 16 };

struct fake_piece {
    uint32_t sequence, position, place, check;
};

struct fake_set {                          /* what the retriever sent last */
    uint32_t step, position, limit, flags; /* enum topk_entry_flags */
    uint32_t count[FAKE_LISTS];
    uint32_t at[FAKE_LISTS][FAKE_CONTEXT];
};

struct fake_sequence {
    uint64_t id;
    uint32_t index, next, prompt, capacity, budget, sinks, window;
    bool has;      /* the retriever sent a set */
    uint32_t base; /* usual budget, past which lists grow in some steps, with marks; 0: the budget */
    uint32_t grown, fallbacks; /* sets sent with the mark; steps in which it was to be heeded */
    struct fake_set set, before;
    uint32_t tokens[FAKE_CONTEXT];
};

struct fake {
    struct planner *planner;
    struct kv_layout layout;
    struct control_header *h;
    struct table_view view[2];
    uint8_t *device;
    uint64_t random;
    uint32_t step, version;
    bool deaf;  /* takes no proposal of a resident set */
    bool hasty; /* the next step follows at once: nobody waits for rows to be back in the arena */
    struct fake_sequence sequences[FAKE_SEQUENCES];
    uint32_t reselects, closed, broken;
    uint64_t reselected;
    uint32_t reselect_step;
    struct msg_closed last_closed;
    char why[256];
};

static inline uint32_t fake_random(struct fake *f, uint32_t below)
{
    f->random ^= f->random << 13;
    f->random ^= f->random >> 7;
    f->random ^= f->random << 17;
    return (uint32_t)((f->random >> 32) * below >> 32);
}

static void fake_on_reselect(void *arg, uint64_t sequence, uint32_t step)
{
    struct fake *f = arg;
    f->reselects++;
    f->reselected = sequence;
    f->reselect_step = step;
}

static void fake_on_closed(void *arg, uint64_t request, const struct msg_closed *closed)
{
    (void)request;
    struct fake *f = arg;
    f->closed++;
    f->last_closed = *closed;
}

static void fake_on_broken(void *arg, const char *why)
{
    struct fake *f = arg;
    f->broken++;
    snprintf(f->why, sizeof f->why, "%s", why);
}

/* Bytes of a piece; only the first of them tell coordinates. Larger ones make pages and slots fill slabs. */
static uint32_t fake_piece_bytes = sizeof(struct fake_piece);

/* Three runs (0-3, 4-7, 8-12) and two groups (0-5, 6-12): their bounds fall on different layers. */
static inline struct kv_layout fake_layout(void)
{
    struct kv_layout layout = {.model = {1, 2},
                               .layers = 13,
                               .row_heads = 2,
                               .selection_heads = 4,
                               .piece_bytes = fake_piece_bytes,
                               .dtype = 1,
                               .context_max = FAKE_CONTEXT};
    layout_set_groups(&layout, 2);
    return layout;
}

/* Set: device memory lies on a double of a GPU, whose memory this process sees too. */
static struct device_gpu *fake_gpu;

static inline int fake_gpu_setup(void **state)
{
    (void)state;
    struct err err = {0};
    fakegpu_use(NULL);
    if (device_gpu_open(&fake_gpu, "cuda:0", &err) < 0)
        fail_msg("%s", err.text);
    return 0;
}

static inline int fake_gpu_teardown(void **state)
{
    (void)state;
    assert_int_equal(fake_gpu->error.code, 0);
    assert_int_equal(fake_gpu->kv_bytes + fake_gpu->tables_bytes + fake_gpu->registered_bytes, 0);
    device_gpu_close(&fake_gpu);
    return 0;
}

/* How often a test of random choices repeats them: on the double of a GPU each takes ten times as long, and
 * what it adds is the order of its stream. */
static inline uint32_t fake_often(uint32_t often, uint32_t on_gpu)
{
    return fake_gpu ? on_gpu : often;
}

/* The tests with a memfd, then with the GPU. */
#define fake_run_both(tests)                     \
    (cmocka_run_group_tests(tests, NULL, NULL) + \
     cmocka_run_group_tests_name(#tests " on a GPU", tests, fake_gpu_setup, fake_gpu_teardown))

static inline struct planner_options fake_options(void)
{
    return (struct planner_options){.gpu = fake_gpu,
                                    .device_bytes = 48u << 20,
                                    .host_bytes = 64u << 20,
                                    .sequences = FAKE_SEQUENCES,
                                    .threads = 2,
                                    .poison = true};
}

static inline struct planner_events fake_events(struct fake *f)
{
    return (struct planner_events){
        .arg = f, .reselect = fake_on_reselect, .closed = fake_on_closed, .broken = fake_on_broken};
}

/* Maps what planner_attach made, as the decoder would. */
static inline void fake_attach(struct fake *f)
{
    struct err err = {0};
    assert_int_equal(planner_attach(f->planner, 77, &err), 0);
    f->h = f->planner->control.at;
    assert_int_equal(control_header_check(f->h, &f->layout, f->planner->control.bytes, &err), 0);
    f->device = f->planner->device.base;
    for (uint32_t parity = 0; parity < 2; parity++) {
        f->view[parity].header = f->h;
        f->view[parity].base = (uint8_t *)control_table_at(f->h, parity);
        control_table_offsets(f->h, &f->view[parity].at);
    }
    f->step = f->h->first_step;
    f->version = 0;
}

static inline struct fake *fake_create(const struct planner_options *options, uint64_t seed)
{
    struct fake *f = mem_alloc(1, sizeof *f);
    struct err err = {0};
    struct planner_events events = fake_events(f);
    f->layout = fake_layout();
    f->random = seed * 0x9E3779B97F4A7C15u + 88172645463325252u;
    assert_int_equal(planner_create(&f->planner, options, &f->layout, &events, &err), 0);
    fake_attach(f);
    return f;
}

static inline void fake_free(struct fake *f)
{
    planner_free(&f->planner);
    mem_free(&f);
}

static inline struct fake_piece fake_piece(uint64_t id, uint32_t layer, uint32_t head, uint32_t position)
{
    struct fake_piece p = {(uint32_t)id, position, layer << 16 | head, 0};
    p.check = (p.sequence * 2654435761u) ^ (p.position * 40503u) ^ p.place;
    return p;
}

static inline void fake_check_piece(const void *at, uint64_t id, uint32_t layer, uint32_t head,
                                    uint32_t position)
{
    struct fake_piece want = fake_piece(id, layer, head, position);
    if (memcmp(at, &want, sizeof want)) {
        const struct fake_piece *found = at;
        fail_msg("found sequence %u position %u layer %u head %u, expected %u %u %u %u", found->sequence,
                 found->position, found->place >> 16, found->place & 0xffff, want.sequence, position, layer,
                 head);
    }
}

/* ---- the control plane ---- */

struct fake_open {
    uint32_t prompt, capacity, budget, sinks, window, flags;
    uint64_t salt;
    uint32_t token_seed; /* equal seeds: equal prompts */
    uint32_t reuse_max;
};

static inline int fake_try_open(struct fake *f, struct fake_sequence *s, uint64_t id,
                                const struct fake_open *o, struct err *err)
{
    memset(s, 0, sizeof *s);
    for (uint32_t i = 0; i < FAKE_CONTEXT; i++)
        s->tokens[i] = i < o->prompt ? o->token_seed * 7919 + i : (uint32_t)id * 31 + i;
    struct msg_open open = {
        .sequence = id,
        .flags = o->flags,
        .salt = o->salt,
        .made = {.kind = o->budget ? ARENA_MADE_SPARSE : ARENA_MADE_FULL, .budget = o->budget},
        .capacity = o->capacity,
        .reuse_max = o->reuse_max,
        .budget = o->budget,
        .sinks = o->sinks,
        .window = o->window,
        .tokens = {.at = s->tokens, .count = o->prompt}};
    struct msg_grant grant;
    int r = planner_open(f->planner, &open, &grant, err);
    if (r < 0)
        return r;
    s->id = id;
    s->index = grant.index;
    s->next = grant.cached;
    s->prompt = o->prompt;
    s->capacity = o->capacity;
    s->budget = o->budget;
    s->sinks = o->sinks;
    s->window = o->window;
    return 0;
}

static inline void fake_open(struct fake *f, struct fake_sequence *s, uint64_t id, const struct fake_open *o)
{
    struct err err = {0};
    int r = fake_try_open(f, s, id, o, &err);
    if (r < 0)
        fail_msg("open: %s", err.text);
}

static inline void fake_close(struct fake *f, struct fake_sequence *s)
{
    uint32_t closed = f->closed;
    assert_int_equal(planner_close(f->planner, s->id, 1), 0);
    assert_int_equal(f->closed, closed + 1);
    s->id = 0;
}

#endif
