/* The scheduler over a store that runs as a thread of the test: what requests get must equal a plain greedy
 * loop over the forward pass; ends, refusals and faults must hit those whom they concern, and nobody else. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/unit/decoder_rig.h"

/* ---- tests ---- */

/* Full and sparse of all modes together, more than there are places, all residencies. */
static void test_mixture(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    for (uint32_t offloaded = 0; offloaded < 3; offloaded++) {
        store_offload(&g.store, offloaded == 0 ? g.layout.layers : offloaded == 1 ? 0 : 1);
        memset(g.results, 0, sizeof g.results);
        memset(g.told, 0, sizeof g.told);
        for (uint32_t i = 1; i <= 6; i++)
            ask(&g, i + 10 * offloaded, i, PROMPT + 5 * i,
                plain(8 + i, i % 4 == 0 ? GENERATE_FULL : 0, i % 4 == 0 ? 0 : i % 4 - 1));
        finish(&g);
        for (uint32_t i = 1; i <= 6; i++)
            check_greedy(&g, i + 10 * offloaded, i, PROMPT + 5 * i, 8 + i);
    }
    rig_close(&g);
}

/* Cancelled while queued, in prefill and while decoding; the others get what they would have got. */
static void test_cancel(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    g.places = 3;
    for (uint32_t i = 1; i <= 6; i++)
        ask(&g, i, i, PROMPT, plain(20, 0, SELECTION_CURRENT));
    scheduler_cancel(g.scheduler, 6);
    assert_int_equal(g.results[6].done, 1);
    turn(&g);
    turn(&g);
    scheduler_cancel(g.scheduler, 3); /* waits for its first chunk, or has one */
    scheduler_cancel(g.scheduler, 99);
    while (g.results[1].count < 3)
        turn(&g);
    scheduler_cancel(g.scheduler, 1);
    finish(&g);
    static const uint32_t cancelled[] = {6, 3, 1}, others[] = {2, 4, 5};
    for (unsigned i = 0; i < 3; i++) {
        assert_int_equal(g.results[cancelled[i]].done, 1);
        assert_int_equal(g.results[cancelled[i]].last.reason, FINISH_CANCELLED);
        assert_int_equal(g.results[cancelled[i]].last.generated_tokens, g.results[cancelled[i]].count);
        check_greedy(&g, others[i], others[i], PROMPT, 20);
    }
    assert_true(g.results[1].count >= 3 && g.results[1].count < 20);
    rig_close(&g);
}

/* A store with one place: everyone gets a turn; one without any: the refusal's text comes back. */
static void test_no_room(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    g.places = 1;
    for (uint32_t i = 1; i <= 3; i++)
        ask(&g, i, i, 20, plain(4, GENERATE_FULL, 0));
    finish(&g);
    for (uint32_t i = 1; i <= 3; i++)
        check_greedy(&g, i, i, 20, 4);
    g.places = 0;
    ask(&g, 4, 4, 20, plain(4, 0, 0));
    finish(&g);
    assert_int_equal(g.results[4].last.reason, FINISH_ERROR);
    assert_int_equal(g.results[4].last.code, -ENOSPC);
    assert_non_null(strstr(g.results[4].last.text, "no room"));
    rig_close(&g);
}

static void test_context_edges(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    ask(&g, 1, 1, STORE_CONTEXT, plain(4, 0, 0));
    ask(&g, 2, 2, 10 * STORE_CONTEXT, plain(4, 0, 0));
    ask(&g, 3, 3, 0, plain(4, 0, 0));
    check_error(&g, 1, -E2BIG, "n_prompt 256, n_ctx 256");
    check_error(&g, 2, -E2BIG, "n_prompt 2560, n_ctx 256");
    check_error(&g, 3, -EINVAL, "tokens");
    ask(&g, 4, 4, 10, plain(0, 0, 0));
    assert_int_equal(g.results[4].done, 1);
    assert_int_equal(g.results[4].last.reason, FINISH_LENGTH);
    assert_int_equal(g.results[4].last.generated_tokens, 0);
    ask(&g, 5, 5, STORE_CONTEXT - 1, plain(UINT32_MAX, GENERATE_FULL, 0));
    ask(&g, 6, 6, STORE_CONTEXT - 3, plain(UINT32_MAX, GENERATE_FULL, SELECTION_MIXED));
    finish(&g);
    check_greedy(&g, 5, 5, STORE_CONTEXT - 1, 1);
    check_greedy(&g, 6, 6, STORE_CONTEXT - 3, 3);
    rig_close(&g);
}

static void test_refusals(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    struct msg_generate p = plain(4, 0, 3);
    ask(&g, 1, 1, 10, p);
    check_error(&g, 1, -EINVAL, "selection");
    p = plain(4, 0, 0);
    p.budget = 20;
    ask(&g, 2, 1, 10, p);
    check_error(&g, 2, -EINVAL, "budget");
    p.budget = STORE_CONTEXT + 1;
    ask(&g, 3, 1, 10, p);
    check_error(&g, 3, -EINVAL, "budget");
    p = plain(4, 0, 0);
    p.budget_max = STORE_CONTEXT + 1;
    ask(&g, 6, 1, 10, p);
    check_error(&g, 6, -EINVAL, "budget_max");
    p.budget_max = 127;
    ask(&g, 7, 1, 10, p);
    check_error(&g, 7, -EINVAL, "budget_max: found 127, expected at least the budget of 128");
    p = plain(4, 0, 0);
    p.sampling.temperature = -1;
    ask(&g, 4, 1, 10, p);
    check_error(&g, 4, -EINVAL, "temperature");
    struct msg msg = {.kind = MSG_GENERATE, .generate = plain(4, 0, 0)};
    uint32_t *id = malloc(sizeof *id);
    *id = g.config->vocab;
    msg.memory = id;
    msg.generate.tokens = (struct msg_u32s){id, 1};
    scheduler_generate(g.scheduler, 5, &msg);
    check_error(&g, 5, -EINVAL, "tokens[0]");
    rig_close(&g);
}

/* An end-of-sequence token, and stop ids, end it with "stop" and are not part of what is sent. */
static void test_stop(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    uint32_t want[12], stop;
    greedy(&g, 3, 30, 12, want);
    uint32_t at = 11;
    while (at > 0) { /* the last id that did not occur before */
        uint32_t i = 0;
        while (i < at && want[i] != want[at])
            i++;
        if (i == at)
            break;
        at--;
    }
    stop = want[at];
    struct msg_generate p = plain(12, GENERATE_FULL, 0);
    p.stop_ids = (struct msg_u32s){&stop, 1};
    ask(&g, 1, 3, 30, p);
    finish(&g);
    assert_int_equal(g.results[1].last.reason, FINISH_STOP);
    assert_int_equal(g.results[1].count, at);
    g.eos[stop] = 1;
    ask(&g, 2, 3, 30, plain(12, 0, 0));
    ask(&g, 3, 3, 30, plain(12, GENERATE_IGNORE_EOS, 0));
    finish(&g);
    assert_int_equal(g.results[2].last.reason, FINISH_STOP);
    assert_int_equal(g.results[2].count, at);
    assert_memory_equal(g.results[2].tokens, want, at * sizeof *want);
    check_greedy(&g, 3, 3, 30, 12);
    rig_close(&g);
}

/* The same seed gives the same tokens, whatever runs beside it. */
static void test_sampling(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    struct msg_generate p = plain(16, 0, 0);
    p.sampling.temperature = 1.5f;
    p.sampling.seed = 42;
    ask(&g, 1, 3, 30, p);
    finish(&g);
    ask(&g, 2, 5, 30, plain(16, GENERATE_FULL, 0));
    ask(&g, 3, 3, 30, p);
    p.sampling.seed = 43;
    ask(&g, 4, 3, 30, p);
    finish(&g);
    assert_int_equal(g.results[1].count, 16);
    assert_memory_equal(g.results[1].tokens, g.results[3].tokens, 16 * sizeof(uint32_t));
    assert_memory_not_equal(g.results[1].tokens, g.results[4].tokens, 16 * sizeof(uint32_t));
    rig_close(&g);
}

/* Faults of one sequence's tables or rows end that one by name, and leave its neighbour alone. */
static void test_faults(void **state)
{
    (void)state;
    static const struct {
        enum store_fault fault;
        int code;
        const char *words;
        int offloaded;
    } cases[] = {
        {STORE_DROPS, -ENOSPC, "the store ended the sequence", 0},
        {STORE_BAD_PAGE, -EPROTO, "page outside", 0},
        {STORE_BAD_SLOT, -EPROTO, "slot that does not exist", 1},
        {STORE_BAD_SLAB, -EPROTO, "slab outside", 1},
        {STORE_BAD_LIST, -EPROTO, "position that is not there", 0},
        {STORE_LONG_LIST, -EPROTO, "length", 0},
        {STORE_POISONS_ROW, -EDOM, "non-finite logits at position", 0},
    };
    static struct rig g;
    rig_open(&g);
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t a = 2 * i + 1, b = 2 * i + 2;
        atomic_store(&g.store.fault, STORE_SOUND);
        store_offload(&g.store, cases[i].offloaded ? 0 : g.layout.layers);
        ask_with_fault(&g, a, b, plain(30, 0, SELECTION_CURRENT), 2, cases[i].fault);
        while (!g.results[a].done)
            turn(&g);
        atomic_store(&g.store.fault, STORE_SOUND);
        finish(&g);
        check_error(&g, a, cases[i].code, cases[i].words);
        check_greedy(&g, b, 2, 20, 30);
    }
    rig_close(&g);
}

/* The store lets a sequence leave the step that waits for its set. */
static void let_leave(struct rig *g, const struct msg *msg)
{
    atomic_store(&g->store.fault_sequence, g->index_used[0] == msg->id ? 0 : 1);
    atomic_store(&g->store.fault, STORE_DROPS);
    store_allow(&g->store, INT_MAX);
}

/* The order by which the thread hears of a loss. */
static void hear_of_loss(struct rig *g)
{
    g->losses_heard++;
    scheduler_retriever_ready(g->scheduler, 0);
}

/* The retriever is lost while a sparse step waits for its selections, which then never come: the sequences
 * leave the step, and with the next retriever get what they would have got. */
static void lose_in_a_step(int on_gpu)
{
    static struct rig g;
    rig_open_on(&g, on_gpu ? decoder_model_gpu() : decoder_model(), on_gpu);
    int64_t begin = clock_now_ns();
    struct err err = {0};
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++) {
        uint32_t a = 3 * mode + 1, b = a + 1, c = b + 1, closed = g.keys_closed;
        ask(&g, a, a, PROMPT, plain(8, 0, mode));
        ask(&g, b, b, PROMPT, plain(8, 0, mode));
        while (g.results[b].count < 3)
            turn(&g);
        atomic_fetch_add(&g.losses, 1);
        store_allow(&g.store, 0);
        g.closing = let_leave;
        if (scheduler_turn(g.scheduler, &err) != 0)
            fail_msg("%s", err.text);
        ask(&g, c, c, PROMPT, plain(8, 0, mode));
        g.closing = NULL;
        atomic_store(&g.store.fault, STORE_SOUND);
        hear_of_loss(&g);
        assert_int_equal(g.keys_closed, closed); /* nobody is there to be told */
        for (int i = 0; i < 4; i++)
            turn(&g);
        assert_int_equal(g.results[a].done + g.results[b].done + g.results[c].done, 0);
        scheduler_retriever_ready(g.scheduler, 1);
        finish(&g);
        if (!on_gpu)
            for (uint32_t i = a; i <= c; i++)
                check_greedy(&g, i, i, PROMPT, 8);
        for (uint32_t i = a; i <= c; i++) {
            assert_int_equal(g.results[i].count, 8);
            assert_int_equal(g.results[i].closed, i == c ? 1 : 2);
        }
    }
    struct scheduler_figures f;
    scheduler_figures(g.scheduler, &f);
    assert_int_equal(f.begun_again, 6);
    assert_int_equal(stepper_times(g.stepper)->waits_broken, 0);
    assert_true(clock_now_ns() - begin < STEPPER_WAIT_S * CLOCK_S);
    rig_close(&g);
}

static void test_retriever_lost(void **state)
{
    (void)state;
    lose_in_a_step(0);
}

static void test_retriever_lost_on_gpu(void **state)
{
    (void)state;
    lose_in_a_step(1);
}

/* Between two steps: what comes meanwhile waits with the others, full attention does not. A request that ends
 * while it waits, or while it is computed again, has what its client has. */
static void test_retriever_lost_between(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    ask(&g, 1, 1, PROMPT, plain(24, 0, 0));
    ask(&g, 2, 2, PROMPT, plain(24, 0, SELECTION_PREVIOUS));
    ask(&g, 3, 3, PROMPT, plain(40, GENERATE_FULL, 0));
    ask(&g, 4, 4, PROMPT, plain(8, 0, 0));
    while (g.results[4].count < 3)
        turn(&g);
    hear_of_loss(&g);
    ask(&g, 5, 5, PROMPT, plain(8, 0, 0));
    while (!g.results[3].done)
        turn(&g);
    check_greedy(&g, 3, 3, PROMPT, 40);
    assert_int_equal(g.results[1].done + g.results[2].done + g.results[5].done, 0);
    assert_int_equal(g.index_used[0] + g.index_used[1] + g.index_used[2], 0);
    uint32_t had[] = {g.results[2].count, g.results[4].count};
    scheduler_cancel(g.scheduler, 2);
    assert_int_equal(g.results[2].done, 1);
    scheduler_retriever_ready(g.scheduler, 1);
    for (int i = 0; i < 9; i++) /* into the fourth's prompt, and beyond */
        turn(&g);
    scheduler_cancel(g.scheduler, 4);
    finish(&g);
    check_greedy(&g, 1, 1, PROMPT, 24);
    check_greedy(&g, 5, 5, PROMPT, 8);
    for (uint32_t i = 0; i < 2; i++) {
        const struct result *r = &g.results[2 * (i + 1)];
        assert_int_equal(r->last.reason, FINISH_CANCELLED);
        assert_int_equal(r->count, had[i]);
        assert_int_equal(r->last.generated_tokens, had[i]);
    }
    rig_close(&g);
}

/* It may not ask for blocks of others, but its own are cached when it is begun again. */
static void test_prompt_is_not_computed_again(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    g.cached = BLOCK_TOKENS;
    ask(&g, 1, 1, 2 * BLOCK_TOKENS, plain(8, 0, 0));
    while (g.results[1].count < 3)
        turn(&g);
    hear_of_loss(&g);
    scheduler_retriever_ready(g.scheduler, 1);
    finish(&g);
    assert_int_equal(g.results[1].last.reason, FINISH_LENGTH);
    assert_int_equal(g.results[1].count, 8);
    assert_int_equal(g.told[1], 2 * BLOCK_TOKENS + 7);
    struct scheduler_figures f;
    scheduler_figures(g.scheduler, &f);
    assert_int_equal(f.prompt_tokens, 3 * BLOCK_TOKENS);
    assert_int_equal(g.results[1].last.cached_tokens, 0); /* its client had all of them computed */
    rig_close(&g);
}

/* A request with which every retriever ends: it fails, when it has been tried often enough. */
static void test_retriever_lost_again(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    ask(&g, 1, 1, PROMPT, plain(8, 0, 0));
    while (g.results[1].count < 3)
        turn(&g);
    for (int i = 0; i <= GENERATION_VAIN_MAX; i++) {
        assert_int_equal(g.results[1].done, 0);
        hear_of_loss(&g);
        turn(&g);
        scheduler_retriever_ready(g.scheduler, 1);
        turn(&g);
    }
    check_error(&g, 1, -EHOSTUNREACH, "retriever is gone, 5 times without a new token in between");
    assert_int_equal(g.results[1].last.generated_tokens, 3);
    rig_close(&g);
}

/* No other one comes. */
static void test_no_other_retriever(void **state)
{
    (void)state;
    static struct rig g;
    int64_t before = rig_grace_ns;
    rig_grace_ns = 0;
    rig_open(&g);
    rig_grace_ns = before;
    ask(&g, 1, 1, PROMPT, plain(8, 0, 0));
    while (g.results[1].count < 3)
        turn(&g);
    hear_of_loss(&g);
    ask(&g, 2, 1, PROMPT, plain(8, 0, 0));
    finish(&g);
    for (uint32_t i = 1; i <= 2; i++)
        check_error(&g, i, -EHOSTUNREACH, "retriever is gone, and no other came within 0 s");
    rig_close(&g);
}

/* One that comes and goes between two turns is none; nor does it matter whether there is a place. */
static void test_no_retriever_stays(void **state)
{
    (void)state;
    static struct rig g;
    int64_t before = rig_grace_ns;
    for (uint32_t running = 1; running <= STORE_SEQUENCES; running += STORE_SEQUENCES - 1) {
        rig_grace_ns = CLOCK_MS;
        rig_open(&g);
        rig_grace_ns = before;
        for (uint32_t i = 1; i <= running; i++)
            ask(&g, i, i, PROMPT, plain(STORE_CONTEXT - PROMPT, GENERATE_FULL, 0));
        turn(&g);
        ask(&g, 50, 50, PROMPT, plain(8, 0, 0));
        while (!g.results[50].done) {
            scheduler_retriever_ready(g.scheduler, 1);
            hear_of_loss(&g);
            turn(&g);
            assert_int_equal(g.results[1].done, 0);
        }
        check_error(&g, 50, -EHOSTUNREACH, "retriever is gone, and no other came within 0 s");
        rig_close(&g);
    }
}

/* The retriever refuses a sequence whose sets a step waits for: it alone ends, with the retriever's words.
 * The refusal of a sequence that is in no step ends nothing. */
static void test_retriever_refuses(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    int64_t begin = clock_now_ns();
    struct msg refusal = {.kind = MSG_ERROR, .error = {.code = -EDOM, .text = "sequence: too bad"}};
    stepper_refused(&g.refusals, 77);
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++) {
        uint32_t a = 2 * mode + 1, b = a + 1, closed = g.keys_closed;
        atomic_store(&g.store.fault, STORE_SOUND);
        g.closing = NULL;
        ask(&g, a, a, PROMPT, plain(8, 0, mode));
        ask(&g, b, b, PROMPT, plain(8, 0, mode));
        while (g.results[b].count < 3)
            turn(&g);
        stepper_refused(&g.refusals, a);
        store_allow(&g.store, 0);
        g.closing = let_leave;
        struct err err = {0};
        assert_int_equal(scheduler_turn(g.scheduler, &err), 1);
        assert_int_equal(g.keys_closed, closed + 1);
        stepper_retriever_refused(g.stepper); /* the order that the refusal came by */
        refusal.id = a;
        scheduler_retriever(g.scheduler, &refusal);
        answer(&g);
        assert_int_equal(g.results[a].last.counters.steps, 123);
        check_error(&g, a, -EDOM, "retriever: sequence: too bad");
        atomic_store(&g.store.fault, STORE_SOUND);
        finish(&g);
        check_greedy(&g, b, b, PROMPT, 8);
    }
    assert_true(clock_now_ns() - begin < STEPPER_WAIT_S * CLOCK_S / 2);
    rig_close(&g);
}

/* The store dies while a step waits for it. */
static void *abort_when_posted(void *arg)
{
    struct rig *g = arg;
    flag_wait(control_flag_at(g->store.control, FLAG_STEP_POSTED), g->store.control->first_step,
              clock_now_ns() + 60 * CLOCK_S, 0);
    flag_abort_all(g->store.control);
    return NULL;
}

static void test_abort(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    struct err err = {0};
    pthread_t thread;
    atomic_store(&g.store.fault, STORE_SILENT);
    ask(&g, 1, 1, 20, plain(4, 0, 0));
    turn(&g);
    assert_int_equal(pthread_create(&thread, NULL, abort_when_posted, &g), 0);
    assert_int_equal(scheduler_turn(g.scheduler, &err), -ECANCELED);
    pthread_join(thread, NULL);
    assert_non_null(strstr(err.text, "step 5"));
    assert_int_equal(stepper_times(g.stepper)->waits_broken, 1);
    rig_close(&g);
}

/* The tables of a step come when its tokens are at the client. */
static void let_tables(struct rig *g, const struct msg *msg)
{
    (void)msg;
    store_allow(&g->store, INT_MAX);
}

/* Tokens go out once their step is posted, however late its tables are. */
static void test_tokens_while_tables_are_late(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    for (uint32_t full = 0; full < 2; full++) {
        ask(&g, full + 1, 1, 20, plain(8, full ? GENERATE_FULL : 0, SELECTION_CURRENT));
        while (g.results[full + 1].count < 2)
            turn(&g);
        store_allow(&g.store, 0);
        g.sending = let_tables;
        turn(&g);
        check_record_was_sent(&g, full + 1, 20);
        g.sending = NULL;
        finish(&g);
        check_greedy(&g, full + 1, 1, 20, 8);
    }
    const struct stepper_times *t = stepper_times(g.stepper);
    assert_int_equal(g.meanwhile, t->dense + t->sparse);
    assert_int_equal(t->waits_broken, 0);
    rig_close(&g);
}

/* Selections are asked for each decoded token; with a set of the token before, for the prompt's last one
 * too. */
static void test_selects(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++) {
        g.selects = 0;
        ask(&g, mode + 1, 1, 20, plain(5, 0, mode));
        finish(&g);
        assert_int_equal(g.selects, mode == SELECTION_CURRENT ? 4 : 5);
        assert_int_equal(g.told[mode + 1], 24);
    }
    g.selects = 0;
    ask(&g, 9, 1, 20, plain(5, GENERATE_FULL, 0));
    finish(&g);
    assert_int_equal(g.selects, 0);
    assert_int_equal(g.told[9], 0);
    rig_close(&g);
}

/* With offloaded layers dense steps are cut to what the store can stage, and a sequence that is longer
 * ends. */
static void test_staging(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    store_offload(&g.store, 1);
    for (uint32_t i = 1; i <= 3; i++)
        ask(&g, i, i, 40 + 15 * i, plain(10, GENERATE_FULL, 0));
    finish(&g);
    for (uint32_t i = 1; i <= 3; i++)
        check_greedy(&g, i, i, 40 + 15 * i, 10);
    ask(&g, 4, 4, STORE_STAGING + 1, plain(4, GENERATE_FULL, 0));
    ask(&g, 5, 5, STORE_STAGING - 2, plain(4, GENERATE_FULL, 0));
    finish(&g);
    check_error(&g, 4, -ENOSPC, "expected at most 192");
    check_error(&g, 5, -ENOSPC, "expected at most 192");
    assert_int_equal(g.results[5].count, 2); /* the third was sampled, not recorded */
    rig_close(&g);
}

/* The resident set that the store proposes is taken over at the next step boundary. */
static void test_residents(void **state)
{
    (void)state;
    static struct rig g;
    rig_open(&g);
    for (uint32_t i = 0; i < 3; i++)
        store_offload(&g.store, g.layout.layers - i);
    ask(&g, 1, 1, 20, plain(5, 0, 0));
    finish(&g);
    assert_true(flag_reached(control_flag_at(g.store.control, FLAG_RESIDENT_ACKED), 3));
    assert_int_equal(control_step_at(g.store.control, g.store.control->first_step)->resident_version, 3);
    check_greedy(&g, 1, 1, 20, 5);
    rig_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mixture),
        cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_stop),
        cmocka_unit_test(test_context_edges),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_retriever_lost),
        cmocka_unit_test(test_retriever_lost_on_gpu),
        cmocka_unit_test(test_retriever_lost_between),
        cmocka_unit_test(test_prompt_is_not_computed_again),
        cmocka_unit_test(test_retriever_lost_again),
        cmocka_unit_test(test_no_other_retriever),
        cmocka_unit_test(test_no_retriever_stays),
        cmocka_unit_test(test_retriever_refuses),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_selects),
        cmocka_unit_test(test_residents),
        cmocka_unit_test(test_staging),
        cmocka_unit_test(test_tokens_while_tables_are_late),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
