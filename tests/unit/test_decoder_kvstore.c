/* The decoder's scheduler over the store's planner, both whole, in one process: the tokens of a request
 * must not depend on which layers are resident. Device memory is poisoned with NaN wherever nothing was
 * written, so one row that was not loaded ends a sequence. The test plays the retriever. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "decoder/scheduler.h"
#include "kvstore/planner.h"
#include "link/flag.h"
#include "tests/unit/decoder_model.h"

enum { CONTEXT = 256, CHUNK = 32, SEQUENCES = 4, REQUESTS = 8, EVENTS_MAX = 64, GROUPS = 2, TOKENS = 40 };

/* What becomes of the resident layers in mid-generation: they stay; their number is another one every few
 * turns; all of them are back for one turn in between. */
enum moves { STAY, MOVE, LEAP };

struct result {
    uint32_t tokens[CONTEXT], count, done;
    struct msg_done last;
};

struct rig {
    struct model *model;
    const struct model_config *config;
    struct pass *pass;
    struct kv_layout layout;
    struct planner *planner;
    pthread_mutex_t mutex; /* the planner, and what it said */
    pthread_t thread;
    atomic_int stop;
    int bell;
    char broken[256];
    struct msg answers[EVENTS_MAX]; /* of the store, not handed on yet */
    uint32_t answer_count;
    struct stepper *stepper;
    struct scheduler *scheduler;
    uint8_t *eos;
    struct result results[REQUESTS];
    struct msg_open opened[REQUESTS]; /* what the retriever knows */
    uint32_t flags;                   /* of every set: enum topk_entry_flags */
};

static struct rig rig;

/* ---- the store's thread ---- */

static void on_reselect(void *arg, uint64_t sequence, uint32_t step)
{
    struct rig *g = arg;
    snprintf(g->broken, sizeof g->broken, "set of sequence %u refused in step %u", (unsigned)sequence, step);
}

static void on_closed(void *arg, uint64_t request, const struct msg_closed *closed)
{
    struct rig *g = arg;
    CHECK(g->answer_count < EVENTS_MAX);
    g->answers[g->answer_count++] = (struct msg){.kind = MSG_CLOSED, .id = request, .closed = *closed};
}

static void on_broken(void *arg, const char *why)
{
    struct rig *g = arg;
    snprintf(g->broken, sizeof g->broken, "%s", why);
}

static void *planner_main(void *arg)
{
    struct rig *g = arg;
    while (!atomic_load(&g->stop)) {
        struct pollfd p = {.fd = g->bell, .events = POLLIN};
        poll(&p, 1, 1);
        doorbell_clear(g->bell);
        pthread_mutex_lock(&g->mutex);
        planner_advance(g->planner);
        planner_idle(g->planner, clock_now_ns());
        pthread_mutex_unlock(&g->mutex);
    }
    return NULL;
}

static void ask_store(struct rig *g, const struct msg *msg)
{
    struct err err = {0};
    struct msg answer = {.kind = MSG_GRANT, .id = msg->id};
    pthread_mutex_lock(&g->mutex);
    if (msg->kind == MSG_CLOSE) {
        CHECK(planner_close(g->planner, msg->close.sequence, msg->id) == 0);
    } else {
        int r = planner_open(g->planner, &msg->open, &answer.grant, &err);
        if (r < 0) {
            answer.kind = MSG_ERROR;
            answer.error.code = r;
            snprintf(answer.error.text, sizeof answer.error.text, "%s", err.text);
        }
        CHECK(g->answer_count < EVENTS_MAX);
        g->answers[g->answer_count++] = answer;
    }
    pthread_mutex_unlock(&g->mutex);
}

/* ---- the retriever ---- */

/* A run of positions that moves on slowly, another one for each list; at most as many as the budget
 * leaves. */
static uint32_t choose(const struct msg_open *o, uint32_t t, uint32_t list, uint32_t *ret)
{
    uint32_t limit = t > o->window && t - o->window > o->sinks ? t - o->window : o->sinks;
    uint32_t all = limit - o->sinks, most = o->budget - o->sinks - o->window - 1;
    uint32_t count = all < most ? all : most, n = 0;
    for (uint32_t i = 0; i < all; i++) {
        uint32_t shifted = (i + t / 2 + list * 11) % all;
        if (shifted < count)
            ret[n++] = o->sinks + i;
    }
    return n;
}

static void select_for(struct rig *g, uint64_t step, const struct msg_step_entry *e)
{
    const struct msg_open *o = &g->opened[e->sequence];
    uint32_t t = e->position + e->count - 1, lists = GROUPS * g->layout.selection_heads, n = 0;
    uint32_t *positions = mem_alloc((size_t)lists * CONTEXT, sizeof *positions);
    uint32_t *counts = mem_alloc((size_t)lists * 2, sizeof *counts);
    for (uint32_t l = 0; l < lists; l++)
        n += counts[2 * l] = choose(o, t, l, positions + n);
    struct msg_topk_entry entry = {.sequence = e->sequence,
                                   .index = e->index,
                                   .base_step = (uint32_t)step,
                                   .limit = t > o->window + o->sinks ? t - o->window : o->sinks,
                                   .position = t,
                                   .mass = 0.5f,
                                   .flags = g->flags};
    struct msg msg = {.kind = MSG_TOPK, .id = step};
    msg.topk = (struct msg_topk){.entries = &entry,
                                 .entry_count = 1,
                                 .groups = GROUPS,
                                 .selection_heads = g->layout.selection_heads,
                                 .counts = {counts, lists * 2},
                                 .positions = {positions, n}};
    pthread_mutex_lock(&g->mutex);
    planner_topk(g->planner, &msg);
    pthread_mutex_unlock(&g->mutex);
    doorbell_ring(g->bell);
    mem_free(&positions);
    mem_free(&counts);
}

static void ask_retriever(struct rig *g, const struct msg *msg)
{
    if (msg->kind == MSG_OPEN)
        g->opened[msg->id] = msg->open;
    for (uint32_t i = 0; msg->kind == MSG_STEP && i < msg->step.entry_count; i++)
        if (msg->step.entries[i].flags & STEP_ENTRY_SELECT)
            select_for(g, msg->id, &msg->step.entries[i]);
}

static void take(void *arg, enum scheduler_target target, const struct msg *msg)
{
    struct rig *g = arg;
    void *memory = msg->memory;
    struct result *to = &g->results[msg->id % REQUESTS];
    if (target == SCHEDULER_TO_STORE)
        ask_store(g, msg);
    else if (target == SCHEDULER_TO_RETRIEVER)
        ask_retriever(g, msg);
    else if (msg->kind == MSG_TOKEN)
        to->tokens[to->count++] = msg->token.tokens.at[0];
    else if (msg->kind == MSG_DONE) {
        to->done++;
        to->last = msg->done;
    }
    mem_free(&memory);
}

/* ---- the rig ---- */

static void rig_store(struct rig *g, uint64_t device_bytes)
{
    struct planner_options options = {.device_bytes = device_bytes,
                                      .host_bytes = 256u << 20,
                                      .sequences = SEQUENCES,
                                      .threads = 1,
                                      .poison = true};
    struct planner_events events = {g, on_reselect, on_closed, on_broken};
    struct err err = {0};
    if (planner_create(&g->planner, &options, &g->layout, &events, &err) < 0 ||
        planner_attach(g->planner, 2, &err) < 0)
        fail_msg("%s", err.text);
    pthread_mutex_init(&g->mutex, NULL);
    assert_int_equal(doorbell_create(&g->bell), 0);
    atomic_store(&g->stop, 0);
    assert_int_equal(pthread_create(&g->thread, NULL, planner_main, g), 0);
}

static void rig_open(struct rig *g, uint64_t device_bytes)
{
    memset(g, 0, sizeof *g);
    struct err err = {0};
    struct pass_options options = {
        .threads = 2, .tokens_max = CHUNK, .entries_max = SEQUENCES, .logits_max = SEQUENCES};
    if (model_open(decoder_model(), &g->model, &err) < 0 ||
        pass_create(g->model, &options, &g->pass, &err) < 0)
        fail_msg("%s", err.text);
    g->config = model_config(g->model);
    g->layout = (struct kv_layout){.layers = g->config->layers,
                                   .row_heads = g->config->kv_heads,
                                   .selection_heads = g->config->kv_heads,
                                   .piece_bytes = 4 * g->config->head_dim,
                                   .dtype = DTYPE_F16,
                                   .context_max = CONTEXT};
    layout_set_groups(&g->layout, GROUPS);
    rig_store(g, device_bytes);
    struct control_header *control = g->planner->control.at;
    struct stepper_attachment attachment = {
        g->layout, control, g->planner->device.base, g->bell, 6, NULL, NULL, NULL, NULL};
    g->stepper = stepper_create(&attachment, g->pass);
    g->eos = mem_alloc(g->config->vocab, 1);
    struct scheduler_options so = {.vocab = g->config->vocab,
                                   .context = CONTEXT,
                                   .list_max = control->list_max,
                                   .sequences = SEQUENCES,
                                   .chunk = CHUNK,
                                   .eos = g->eos,
                                   .emit = take,
                                   .arg = g};
    g->scheduler = scheduler_create(&so, g->stepper);
}

static void rig_close(struct rig *g)
{
    atomic_store(&g->stop, 1);
    doorbell_ring(g->bell);
    pthread_join(g->thread, NULL);
    scheduler_free(&g->scheduler);
    stepper_free(&g->stepper);
    planner_detach(g->planner, clock_now_ns());
    planner_free(&g->planner);
    close(g->bell);
    pass_free(&g->pass);
    model_free(&g->model);
    mem_free(&g->eos);
}

static void force(struct rig *g, int32_t runs)
{
    pthread_mutex_lock(&g->mutex);
    planner_force(g->planner, runs);
    pthread_mutex_unlock(&g->mutex);
}

/* All layers are proposed as resident when it returns, so the next step is made with them. */
static void bring_back(struct rig *g)
{
    pthread_mutex_lock(&g->mutex);
    planner_force(g->planner, (int32_t)layout_runs(&g->layout));
    while (planner_idle(g->planner, clock_now_ns()))
        continue;
    pthread_mutex_unlock(&g->mutex);
}

static void hand_on(struct rig *g)
{
    struct msg answers[EVENTS_MAX];
    pthread_mutex_lock(&g->mutex);
    uint32_t n = g->answer_count;
    memcpy(answers, g->answers, n * sizeof *answers);
    g->answer_count = 0;
    pthread_mutex_unlock(&g->mutex);
    for (uint32_t i = 0; i < n; i++)
        scheduler_store(g->scheduler, &answers[i]);
}

/* Turns until nothing is left. */
static void finish(struct rig *g, enum moves moves)
{
    struct scheduler_figures f;
    struct err err = {0};
    int64_t deadline = clock_now_ns() + 120 * CLOCK_S;
    uint32_t turns = 0, runs = layout_runs(&g->layout);
    do {
        turns++;
        if (moves == LEAP && turns % 4 == 3)
            bring_back(g);
        if (moves != STAY && turns % 4 == 0)
            force(g, (int32_t)(turns / 4 * 5 % (moves == LEAP ? runs : runs + 1)));
        int r = scheduler_turn(g->scheduler, &err);
        if (r < 0)
            fail_msg("%s; store: %s", err.text, g->broken);
        hand_on(g);
        scheduler_figures(g->scheduler, &f);
        assert_true(clock_now_ns() < deadline);
    } while (f.running + f.waiting > 0);
    assert_string_equal(g->broken, "");
}

static void ask(struct rig *g, uint32_t request, uint32_t budget, uint32_t selection)
{
    uint32_t prompt = 100 + 23 * request, *ids = malloc(prompt * sizeof *ids);
    for (uint32_t i = 0; i < prompt; i++)
        ids[i] = (request * 7919 + i * 104729 + i * i * 31) % g->config->vocab;
    struct msg msg = {.kind = MSG_GENERATE, .memory = ids};
    msg.generate = (struct msg_generate){.flags = budget ? 0 : GENERATE_FULL,
                                         .max_tokens = TOKENS,
                                         .selection = selection,
                                         .budget = budget,
                                         .sinks = 4,
                                         .window = 8,
                                         .sampling = {.top_p = 1, .repeat_penalty = 1},
                                         .tokens = {ids, prompt}};
    scheduler_generate(g->scheduler, request, &msg);
}

/* Three requests; what they gave is left in `ret`. */
static void ask_three(struct rig *g, uint32_t budget, uint32_t selection, enum moves moves,
                      struct result *ret)
{
    memset(g->results, 0, sizeof g->results);
    for (uint32_t i = 1; i <= 3; i++)
        ask(g, i, budget, selection);
    finish(g, moves);
    for (uint32_t i = 1; i <= 3; i++) {
        if (g->results[i].last.reason != FINISH_LENGTH)
            fail_msg("request %u: %s", i, g->results[i].last.text);
        assert_int_equal(g->results[i].count, TOKENS);
        ret[i - 1] = g->results[i];
    }
}

static void check_same(const struct result *a, const struct result *b)
{
    for (uint32_t i = 0; i < 3; i++)
        assert_memory_equal(a[i].tokens, b[i].tokens, sizeof a[i].tokens);
}

/* ---- tests ---- */

/* A budget that holds everything gives what full attention gives, whatever is resident. */
static void test_all_selected(void **state)
{
    (void)state;
    struct result full[3], sparse[3];
    rig_open(&rig, 256u << 20);
    ask_three(&rig, 0, 0, STAY, full);
    static const int32_t runs[] = {3, 1, 0};
    for (unsigned i = 0; i < 3; i++) {
        force(&rig, runs[i]);
        ask_three(&rig, CONTEXT, i, STAY, sparse); /* i: each selection mode once */
        check_same(full, sparse);
        ask_three(&rig, 0, 0, STAY, sparse);
        check_same(full, sparse);
    }
    rig_close(&rig);
}

/* A small budget: the same tokens with all, some and no layers resident, and while that changes. */
static void test_residencies(void **state)
{
    (void)state;
    struct result full[3], want[3], got[3];
    rig_open(&rig, 256u << 20);
    ask_three(&rig, 0, 0, STAY, full);
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++) {
        force(&rig, 3);
        ask_three(&rig, 32, mode, STAY, want);
        assert_memory_not_equal(want[0].tokens, full[0].tokens, sizeof full[0].tokens);
        force(&rig, 1);
        ask_three(&rig, 32, mode, STAY, got);
        check_same(want, got);
        assert_true(got[0].last.counters.rows_loaded > 0);
        for (enum moves moves = MOVE; moves <= LEAP; moves++) {
            force(&rig, 0);
            ask_three(&rig, 32, mode, moves, got);
            check_same(want, got);
        }
    }
    rig_close(&rig);
}

/* Sets that are short: with all layers resident the tokens are those of full attention, in every mode; with
 * none resident they are those of the lists. */
static void test_short_sets(void **state)
{
    (void)state;
    struct result full[3], lists[3], got[3];
    rig_open(&rig, 256u << 20);
    ask_three(&rig, 0, 0, STAY, full);
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++) {
        rig.flags = 0;
        force(&rig, 3);
        ask_three(&rig, 32, mode, STAY, lists);
        assert_memory_not_equal(lists[0].tokens, full[0].tokens, sizeof full[0].tokens);
        rig.flags = TOPK_ENTRY_SHORT;
        ask_three(&rig, 32, mode, STAY, got);
        check_same(full, got);
        assert_true(got[0].last.counters.fallbacks == got[0].last.counters.steps);
        assert_true(got[0].last.counters.attended > 2 * lists[0].last.counters.attended);
        force(&rig, 0);
        ask_three(&rig, 32, mode, STAY, got);
        check_same(lists, got);
        assert_int_equal(got[0].last.counters.attended, lists[0].last.counters.attended);
    }
    rig_close(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_selected),
        cmocka_unit_test(test_residencies),
        cmocka_unit_test(test_short_sets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
