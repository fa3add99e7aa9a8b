/* The scheduler over the tests' store (decoder_store.h) and the messages of a client and a retriever that
 * the test plays; on the CPU, or on the double of a GPU. Header only, included by tests of the decoder. */
#ifndef TESTS_UNIT_DECODER_RIG_H
#define TESTS_UNIT_DECODER_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "decoder/generation.h"
#include "decoder/pass_gpu.h"
#include "decoder/scheduler.h"
#include "tests/lib/fakegpu.h"
#include "tests/unit/decoder_model.h"
#include "tests/unit/decoder_store.h"

enum { EVENTS_MAX = 4096, CHUNK = 16, PROMPT = 40 };

struct result { /* of one request */
    uint32_t tokens[STORE_CONTEXT];
    uint32_t count, progress, done; /* done: DONE messages */
    uint32_t closed;                /* times that the store closed its sequence */
    struct msg_done last;
};

struct rig {
    struct model *model;
    const struct model_config *config;
    struct pass *pass;
    struct gpu_device *device; /* on a GPU: instead of the pass */
    struct weights_gpu *weights;
    struct pass_gpu *pass_gpu;
    struct kv_layout layout;
    struct store store;
    struct stepper *stepper;
    struct scheduler *scheduler;
    uint8_t *eos;
    struct result results[64];    /* by request */
    struct msg asked[EVENTS_MAX]; /* of the store, not answered yet */
    uint32_t asked_count;
    uint32_t index_used[STORE_SEQUENCES]; /* request, 0: free */
    uint32_t told[64];                    /* positions that the retriever has, by request */
    uint32_t places;                      /* sequences that the store takes */
    uint32_t opened, closed, selects;
    /* Prefixes: tokens that the store has cached and that the retriever has keys of; requests that it was
     * asked about and has not answered, and whether it answers; sequences closed there. */
    uint32_t cached, kept, keys_asked_count, keys_closed;
    uint64_t keys_asked[64];
    bool keys_silent;
    struct export *export;                                   /* with rig_export: where hidden states go */
    void (*stepped)(struct rig *rig, const struct msg *msg); /* of each STEP; NULL: nothing but the checks */
    void (*closing)(struct rig *rig, const struct msg *msg); /* of each CLOSE for the store; may be NULL */
    void (*sending)(struct rig *rig, const struct msg *msg); /* of each TOKEN; may be NULL */
    void (*beside)(struct rig *rig);                         /* while a step is computed; may be NULL */
    uint32_t meanwhile;                                      /* times that this was so */
    atomic_uint losses;                                      /* of the retriever */
    unsigned losses_heard;                                   /* of them, by the device thread */
    struct stepper_refusals refusals;                        /* the same */
};

static int64_t rig_grace_ns = 3600 * CLOCK_S; /* of the rigs that are opened next */

/* The request that a sequence is of. */
static inline uint32_t request_of(uint64_t sequence)
{
    return (uint32_t)(sequence & GENERATION_ID);
}

/* A token goes out only when it stands in a record that was posted. */
static inline void check_recorded(struct rig *g, uint32_t token)
{
    uint32_t step = stepper_next(g->stepper) - 1;
    const struct control_flag *posted = control_flag_at(g->store.control, FLAG_STEP_POSTED);
    assert_true(flag_reached((struct control_flag *)posted, step) || flag_aborted(posted, step));
    const struct step_record *r = control_step_at(g->store.control, step);
    uint32_t i = 0;
    while (i < r->tokens && r->token[i] != token)
        i++;
    assert_true(i < r->tokens);
}

static inline void take_client(struct rig *g, const struct msg *msg)
{
    struct result *to = &g->results[msg->id];
    assert_int_equal(to->done, 0);
    if (msg->kind == MSG_TOKEN) {
        for (uint32_t i = 0; i < msg->token.tokens.count; i++) {
            check_recorded(g, msg->token.tokens.at[i]);
            to->tokens[to->count++] = msg->token.tokens.at[i];
        }
        if (g->sending)
            g->sending(g, msg);
    } else if (msg->kind == MSG_PROGRESS) {
        assert_true(msg->progress.done > to->progress);
        to->progress = msg->progress.done;
    } else {
        assert_int_equal(msg->kind, MSG_DONE);
        to->last = msg->done;
        to->done++;
    }
}

/* Checks that the retriever hears every token once, in order. */
static inline void take_retriever(struct rig *g, const struct msg *msg)
{
    if (msg->kind == MSG_OPEN && (msg->open.flags & OPEN_REUSE)) {
        assert_non_null(g->export);
        assert_int_equal(msg->open.flags, OPEN_REUSE);
        g->keys_asked[g->keys_asked_count++] = msg->id;
    }
    if (msg->kind == MSG_OPEN && !g->export)
        g->told[request_of(msg->id)] = 0;
    g->keys_closed += msg->kind == MSG_CLOSE;
    if (msg->kind != MSG_STEP)
        return;
    uint32_t at = 0;
    for (uint32_t i = 0; i < msg->step.entry_count; i++) {
        const struct msg_step_entry *e = &msg->step.entries[i];
        uint32_t *told = &g->told[request_of(e->sequence)];
        assert_int_equal(e->position, *told);
        *told += e->count;
        g->selects += e->flags & STEP_ENTRY_SELECT;
        at += e->count;
    }
    assert_int_equal(at, msg->step.tokens.count);
    assert_int_equal(msg->step.features.count, g->export ? msg->step.entry_count : 0);
    if (g->stepped)
        g->stepped(g, msg);
}

static inline void take(void *arg, enum scheduler_target target, const struct msg *msg)
{
    struct rig *g = arg;
    struct msg copy = *msg;
    if (target == SCHEDULER_TO_CLIENT)
        take_client(g, msg);
    else if (target == SCHEDULER_TO_RETRIEVER)
        take_retriever(g, msg);
    else
        g->asked[g->asked_count++] = copy;
    if (target == SCHEDULER_TO_STORE && msg->kind == MSG_CLOSE && g->closing)
        g->closing(g, msg);
    mem_free(&copy.memory);
}

static inline void count_meanwhile(void *arg)
{
    struct rig *g = arg;
    g->meanwhile++;
    if (g->beside)
        g->beside(g);
}

static inline void rig_make_pass(struct rig *g, int on_gpu)
{
    struct err err = {0};
    struct pass_options options = {
        .threads = 2, .tokens_max = CHUNK, .entries_max = STORE_SEQUENCES, .logits_max = STORE_SEQUENCES};
    struct pass_gpu_options gpu_options = {CHUNK, STORE_SEQUENCES, STORE_CONTEXT, STORE_CONTEXT};
    if (!on_gpu) {
        assert_int_equal(pass_create(g->model, &options, &g->pass, &err), 0);
        return;
    }
    fakegpu_use(NULL);
    if (gpu_device_open("cuda:0", &g->device, &err) < 0 ||
        weights_gpu_create(g->device, g->model, 2, NULL, &g->weights, &err) < 0 ||
        pass_gpu_create(g->device, model_config(g->model), g->weights, &gpu_options, &g->pass_gpu, &err) < 0)
        fail_msg("%s", err.text);
}

/* With `wanted`: a retriever on `reader` reads hidden states. */
static inline void rig_export(struct rig *g, const struct layout_features *wanted, const char *reader)
{
    struct err err = {0};
    struct export_options o = {.wanted = *wanted,
                               .decoder_epoch = 2,
                               .retriever_epoch = 3,
                               .chunk = CHUNK,
                               .reader = reader,
                               .device = g->device};
    if (export_create(&o, &g->export, &err) < 0)
        fail_msg("%s", err.text);
    scheduler_export(g->scheduler, g->export);
    scheduler_retriever_ready(g->scheduler, 1);
}

static inline void rig_open_for(struct rig *g, const char *model, int on_gpu,
                                const struct layout_features *wanted, const char *reader)
{
    memset(g, 0, sizeof *g);
    struct err err = {0};
    if (model_open(model, &g->model, &err) < 0)
        fail_msg("%s", err.text);
    g->config = model_config(g->model);
    rig_make_pass(g, on_gpu);
    g->layout = (struct kv_layout){.layers = g->config->layers,
                                   .row_heads = g->config->kv_heads,
                                   .selection_heads = g->config->kv_heads,
                                   .piece_bytes = 4 * g->config->head_dim,
                                   .dtype = DTYPE_F16,
                                   .context_max = STORE_CONTEXT};
    layout_set_groups(&g->layout, 2);
    store_start_on(&g->store, &g->layout, 2, g->device ? g->device->api : NULL);
    struct stepper_attachment attachment = {g->layout,  g->store.control, g->store.device, g->store.bell, 2,
                                            &g->losses, &g->losses_heard, &g->refusals,    NULL};
    if (!on_gpu)
        g->stepper = stepper_create(&attachment, g->pass);
    else if (stepper_create_gpu(&attachment, g->pass_gpu, &g->stepper, &err) < 0)
        fail_msg("%s", err.text);
    g->eos = mem_alloc(g->config->vocab, 1);
    struct scheduler_options so = {.vocab = g->config->vocab,
                                   .context = STORE_CONTEXT,
                                   .list_max = STORE_CONTEXT,
                                   .sequences = STORE_SEQUENCES,
                                   .chunk = CHUNK,
                                   .head = 77,
                                   .eos = g->eos,
                                   .features = wanted != NULL,
                                   .grace_ns = rig_grace_ns,
                                   .emit = take,
                                   .meanwhile = count_meanwhile,
                                   .arg = g};
    g->scheduler = scheduler_create(&so, g->stepper);
    g->places = STORE_SEQUENCES;
    if (wanted)
        rig_export(g, wanted, reader);
}

static inline void rig_open_on(struct rig *g, const char *model, int on_gpu)
{
    rig_open_for(g, model, on_gpu, NULL, NULL);
}

static inline void rig_open(struct rig *g)
{
    rig_open_on(g, decoder_model(), 0);
}

static inline void rig_close(struct rig *g)
{
    store_break(&g->store); /* before a step that waits for it is taken down, its memory after */
    scheduler_free(&g->scheduler);
    stepper_free(&g->stepper);
    export_free(&g->export);
    store_stop(&g->store);
    pass_free(&g->pass);
    pass_gpu_free(&g->pass_gpu);
    weights_gpu_free(&g->weights);
    gpu_device_free(&g->device);
    model_free(&g->model);
    mem_free(&g->eos);
}

static inline void answer_open(struct rig *g, const struct msg *ask)
{
    struct msg msg = {.kind = MSG_GRANT, .id = ask->id};
    uint32_t i = 0;
    while (i < g->places && g->index_used[i])
        i++;
    g->opened++;
    if (i == g->places) {
        msg.kind = MSG_ERROR;
        msg.error.code = -ENOSPC;
        snprintf(msg.error.text, sizeof msg.error.text, "no room");
    } else {
        g->index_used[i] = request_of(ask->id);
        bool any = ask->open.reuse_max == 0 || g->cached < ask->open.reuse_max;
        uint32_t cached = !(ask->open.flags & OPEN_REUSE) ? 0 : any ? g->cached : ask->open.reuse_max;
        msg.grant = (struct msg_grant){ask->id, i, cached};
        if (g->export)
            g->told[request_of(ask->id)] = cached;
    }
    scheduler_store(g->scheduler, &msg);
}

static inline void answer_close(struct rig *g, const struct msg *ask)
{
    struct msg msg = {.kind = MSG_CLOSED, .id = ask->id};
    msg.closed.sequence = ask->id;
    msg.closed.counters.steps = 123;
    for (uint32_t i = 0; i < STORE_SEQUENCES; i++)
        if (g->index_used[i] == request_of(ask->id))
            g->index_used[i] = 0;
    g->closed++;
    g->results[request_of(ask->id)].closed++;
    scheduler_store(g->scheduler, &msg);
}

static inline void answer_keys(struct rig *g)
{
    for (uint32_t i = 0; i < g->keys_asked_count; i++) {
        struct msg msg = {.kind = MSG_GRANT, .id = g->keys_asked[i], .grant = {g->keys_asked[i], 0, g->kept}};
        scheduler_retriever(g->scheduler, &msg);
    }
    g->keys_asked_count = 0;
}

static inline void answer(struct rig *g)
{
    if (!g->keys_silent)
        answer_keys(g);
    for (uint32_t i = 0; i < g->asked_count; i++)
        if (g->asked[i].kind == MSG_OPEN)
            answer_open(g, &g->asked[i]);
        else
            answer_close(g, &g->asked[i]);
    g->asked_count = 0;
}

/* Turns until nothing is left to do. */
static inline void finish(struct rig *g)
{
    struct err err = {0};
    struct scheduler_figures f;
    int turns = 0;
    do {
        if (scheduler_turn(g->scheduler, &err) < 0)
            fail_msg("%s", err.text);
        answer(g);
        scheduler_figures(g->scheduler, &f);
        assert_true(++turns < 5000);
    } while (f.running + f.waiting > 0);
    for (uint32_t i = 0; i < STORE_SEQUENCES; i++)
        assert_int_equal(g->index_used[i], 0);
}

static inline void turn(struct rig *g)
{
    struct err err = {0};
    assert_true(scheduler_turn(g->scheduler, &err) >= 0);
    answer(g);
}

static inline uint32_t prompt_id(const struct rig *g, uint32_t seed, uint32_t i)
{
    return (seed * 7919u + i * 104729u + i * i * 31u) % g->config->vocab;
}

static inline struct msg_generate plain(uint32_t max_tokens, uint32_t flags, uint32_t selection)
{
    return (struct msg_generate){.flags = flags,
                                 .max_tokens = max_tokens,
                                 .selection = selection,
                                 .budget = 128,
                                 .sinks = 4,
                                 .window = 16,
                                 .sampling = {.top_p = 1, .repeat_penalty = 1}};
}

static inline void ask(struct rig *g, uint32_t request, uint32_t seed, uint32_t prompt,
                       struct msg_generate generate)
{
    uint32_t *ids = malloc((prompt + 1) * sizeof *ids);
    for (uint32_t i = 0; i < prompt; i++)
        ids[i] = prompt_id(g, seed, i);
    struct msg msg = {.kind = MSG_GENERATE, .id = 900, .memory = ids, .generate = generate};
    msg.generate.tokens = (struct msg_u32s){ids, prompt};
    scheduler_generate(g->scheduler, request, &msg);
}

/* Two requests of the seeds 1 and 2: `a` meets the fault once `b` has `before` tokens. */
static inline void ask_with_fault(struct rig *g, uint32_t a, uint32_t b, struct msg_generate generate,
                                  uint32_t before, enum store_fault fault)
{
    ask(g, a, 1, 20, generate);
    ask(g, b, 2, 20, generate);
    while (g->results[b].count < before)
        turn(g);
    atomic_store(&g->store.fault_sequence, g->index_used[0] == a ? 0 : 1);
    atomic_store(&g->store.fault, fault);
}

/* ---- what it must equal ---- */

/* The client has what the record posted last holds of its answer, no more, no less: also of a step that
 * failed. */
static inline void check_record_was_sent(const struct rig *g, uint32_t request, uint32_t prompt)
{
    const struct step_record *r = control_step_at(g->store.control, stepper_next(g->stepper) - 1);
    const struct result *result = &g->results[request];
    uint32_t i = 0;
    while (i < r->entries && request_of(r->entry[i].id) != request)
        i++;
    assert_true(i < r->entries);
    const struct step_entry *e = &r->entry[i];
    assert_true(e->position >= prompt);
    assert_int_equal(result->count, e->position + e->count - prompt);
    assert_int_equal(result->tokens[result->count - 1], r->token[e->token_at + e->count - 1]);
}

static inline void check_error(const struct rig *g, uint32_t request, int code, const char *words)
{
    const struct msg_done *d = &g->results[request].last;
    assert_int_equal(g->results[request].done, 1);
    assert_int_equal(d->reason, FINISH_ERROR);
    assert_int_equal(d->code, code);
    if (!strstr(d->text, words))
        fail_msg("\"%s\" does not name \"%s\"", d->text, words);
}

struct plain_kv {
    const struct rig *rig;
    uint8_t *base;
    uint64_t *at;
};

static inline int plain_layer(void *arg, uint32_t layer, struct pass_kv *kv, struct err *err)
{
    (void)err;
    struct plain_kv *p = arg;
    uint32_t pages = STORE_CONTEXT / BLOCK_TOKENS;
    kv->view = (struct kv_view){.base = p->base,
                                .at = p->at + layer * pages,
                                .page_tokens = BLOCK_TOKENS,
                                .piece_bytes = p->rig->layout.piece_bytes,
                                .type = DTYPE_F16};
    return 0;
}

static inline void greedy(const struct rig *g, uint32_t seed, uint32_t prompt, uint32_t count, uint32_t *ret)
{
    uint32_t pages = STORE_CONTEXT / BLOCK_TOKENS, all = g->layout.layers * pages;
    struct plain_kv kv = {g, mem_alloc_aligned(all, g->store.control->page_bytes), mem_alloc(all, 8)};
    for (uint32_t i = 0; i < all; i++)
        kv.at[i] = i * g->store.control->page_bytes;
    struct pass_source source = {.layer = plain_layer, .arg = &kv};
    for (uint32_t p = 0; p + 1 < prompt + count; p++) {
        uint32_t id = p < prompt ? prompt_id(g, seed, p) : ret[p - prompt], best = 0;
        struct pass_entry entry = {&id, p, 1, 1};
        assert_int_equal(pass_run(g->pass, &entry, 1, &source, NULL), 0);
        const float *row = pass_logits(g->pass, 0);
        for (uint32_t i = 1; i < g->config->vocab; i++)
            best = row[i] > row[best] ? i : best;
        if (p + 1 >= prompt)
            ret[p + 1 - prompt] = best;
    }
    mem_free(&kv.base);
    mem_free(&kv.at);
}

static inline void check_greedy(const struct rig *g, uint32_t request, uint32_t seed, uint32_t prompt,
                                uint32_t count)
{
    uint32_t want[STORE_CONTEXT];
    const struct result *r = &g->results[request];
    greedy(g, seed, prompt, count, want);
    assert_int_equal(r->done, 1);
    assert_int_equal(r->count, count);
    assert_memory_equal(r->tokens, want, count * sizeof *want);
    assert_int_equal(r->last.reason, FINISH_LENGTH);
    assert_int_equal(r->last.prompt_tokens, prompt);
    assert_int_equal(r->last.generated_tokens, count);
    assert_int_equal(r->last.counters.steps, 123 * r->closed);
    assert_int_equal(r->progress, prompt);
}

#endif
