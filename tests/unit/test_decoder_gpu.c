/* The decoder's steps on a GPU, through the double (tests/fakegpu): graphs, waits, tables and sampling
 * around the kernels. Tokens must not depend on residency, company or kind of attention; faults end those
 * whom they concern; broken waits end a step and write nothing. */
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "decoder/graphs_gpu.h"
#include "decoder/step_gpu.h"
#include "tests/unit/decoder_rig.h"

enum { ALONE = 40 }; /* requests from here on run alone, as what others are compared with */

static struct rig g;

static void open_gpu(void)
{
    rig_open_on(&g, decoder_model_gpu(), 1);
}

static void check_done(uint32_t request, uint32_t count)
{
    const struct result *r = &g.results[request];
    if (r->last.reason == FINISH_ERROR)
        fail_msg("request %u: %s", request, r->last.text);
    assert_int_equal(r->done, 1);
    assert_int_equal(r->count, count);
}

/* Runs a request by itself with full attention and all layers resident. */
static void alone(uint32_t seed, uint32_t prompt, uint32_t count)
{
    memset(&g.results[ALONE], 0, sizeof g.results[ALONE]);
    g.told[ALONE] = 0;
    ask(&g, ALONE, seed, prompt, plain(count, GENERATE_FULL, 0));
    finish(&g);
    check_done(ALONE, count);
}

static void check_equal(uint32_t request, uint32_t count)
{
    check_done(request, count);
    assert_memory_equal(g.results[request].tokens, g.results[ALONE].tokens, count * sizeof(uint32_t));
}

static struct step_gpu_figures figures(void)
{
    struct step_gpu_figures f;
    stepper_gpu_figures(g.stepper, &f);
    return f;
}

/* Full and sparse of all modes together, all residencies: what each gives alone. Both that are full come to a
 * new page while they share steps. */
static void test_mixture(void **state)
{
    (void)state;
    open_gpu();
    static const uint32_t resident[] = {13, 0, 1, 7};
    for (uint32_t round = 0; round < 4; round++) {
        store_offload(&g.store, resident[round]);
        for (uint32_t i = 1; i <= 6; i++)
            ask(&g, i + 6 * round, i, PROMPT + 5 * i,
                plain(8 + i, i == 3 || i == 4 ? GENERATE_FULL : 0, i == 3 || i == 4 ? 0 : i % 3));
        finish(&g);
    }
    store_offload(&g.store, g.layout.layers);
    for (uint32_t i = 1; i <= 6; i++) {
        alone(i, PROMPT + 5 * i, 8 + i);
        for (uint32_t round = 0; round < 4; round++)
            check_equal(i + 6 * round, 8 + i);
    }
    struct step_gpu_figures f = figures();
    assert_true(f.captured > 8 && f.launched > f.captured && f.profiled > 0);
    assert_true(f.times.compute.matmul > 0 && f.times.compute.attention > 0 && f.times.wait > 0);
    rig_close(&g);
}

/* Where layers are offloaded in part a busy host, which sees rows late, changes how they are waited for: two
 * more graphs. */
static void check_captured(uint64_t expected)
{
    struct step_gpu_figures f = figures();
    assert_true(f.captured == expected || (f.rejoined > 0 && f.captured == expected + 2));
}

/* A graph is made anew when the resident set or the batch changes, and used again when they come back. */
static void test_graphs(void **state)
{
    (void)state;
    open_gpu();
    ask(&g, 1, 1, PROMPT, plain(60, 0, SELECTION_CURRENT));
    while (g.results[1].count < 10)
        turn(&g);
    uint64_t captured = figures().captured;
    assert_int_equal(captured, 2); /* both parities */
    store_offload(&g.store, 4);
    while (g.results[1].count < 20)
        turn(&g);
    check_captured(4);
    store_offload(&g.store, g.layout.layers);
    while (g.results[1].count < 30)
        turn(&g);
    check_captured(4);
    ask(&g, 2, 2, PROMPT, plain(10, 0, SELECTION_CURRENT));
    finish(&g);
    check_captured(6);
    alone(1, PROMPT, 60);
    check_equal(1, 60);
    rig_close(&g);
}

/* A resident set that is proposed while a step is computed has its graphs before the next step begins. */
static void test_graphs_are_foreseen(void **state)
{
    (void)state;
    open_gpu();
    ask(&g, 1, 1, PROMPT, plain(40, 0, SELECTION_PREVIOUS));
    while (g.results[1].count < 10)
        turn(&g);
    assert_int_equal(figures().captured, 2);
    uint32_t step = stepper_next(g.stepper) + 3;
    g.store.offload_from = 4;
    atomic_store(&g.store.offload_step, step);
    while (stepper_next(g.stepper) <= step)
        turn(&g);
    assert_int_equal(stepper_next(g.stepper), step + 1);
    check_captured(4);
    finish(&g);
    check_captured(4);
    alone(1, PROMPT, 40);
    check_equal(1, 40);
    rig_close(&g);
}

/* A proposal in nearly every step, with three batches a turn that lose sequences: most graphs are made for
 * steps that never come, more than are kept, and the one that runs stays whole. */
static void test_proposals_while_batches_change(void **state)
{
    (void)state;
    open_gpu();
    for (uint32_t i = 1; i <= 6; i++)
        ask(&g, i, i, PROMPT + 5 * i, plain(6 + 5 * i, 0, i % 3));
    for (uint32_t turns = 0; g.results[6].done == 0; turns++) {
        g.store.offload_from = turns * 5 % 14;
        atomic_store(&g.store.offload_step, stepper_next(g.stepper) + turns % 3);
        turn(&g);
    }
    finish(&g);
    assert_true(figures().captured > GRAPHS_GPU_KEPT);
    atomic_store(&g.store.offload_step, 0);
    store_offload(&g.store, g.layout.layers);
    for (uint32_t i = 1; i <= 6; i++) {
        alone(i, PROMPT + 5 * i, 6 + 5 * i);
        check_equal(i, 6 + 5 * i);
    }
    rig_close(&g);
}

static void look_at_figures(struct rig *rig)
{
    (void)rig;
    figures();
}

/* What events measured is read later than the step ends, and not of a step that still runs: each is counted,
 * whether somebody looks at each step or at the end. */
static void test_measured_steps_are_counted(void **state)
{
    (void)state;
    static const uint32_t chunks = (PROMPT + CHUNK - 1) / CHUNK;
    open_gpu();
    for (uint32_t i = 1; i <= 2; i++) {
        g.beside = i == 1 ? look_at_figures : NULL;
        ask(&g, i, i, PROMPT, plain(200, 0, SELECTION_PREVIOUS));
        finish(&g);
        struct step_gpu_figures f = figures();
        assert_int_equal(f.profiled, i * (chunks + 1));
        assert_int_equal(f.waits.total, i);
    }
    rig_close(&g);
}

/* More shapes than are kept: the oldest gives way. */
static void test_many_graphs(void **state)
{
    (void)state;
    open_gpu();
    ask(&g, 1, 1, PROMPT, plain(100, 0, SELECTION_MIXED));
    for (uint32_t i = 0; g.results[1].done == 0; i++) {
        store_offload(&g.store, i / 4 % 14);
        turn(&g);
    }
    check_done(1, 100);
    assert_true(figures().captured > GRAPHS_GPU_KEPT);
    alone(1, PROMPT, 100);
    check_equal(1, 100);
    rig_close(&g);
}

/* The choice is model/sampler.c's: a repetition, whatever runs beside it, gives the same; greedy with strong
 * penalties repeats nothing. */
static void test_sampling(void **state)
{
    (void)state;
    open_gpu();
    struct msg_generate p = plain(24, 0, 0);
    p.sampling.temperature = 1.5f;
    p.sampling.seed = 42;
    ask(&g, 1, 3, 30, p);
    finish(&g);
    ask(&g, 2, 5, 30, plain(16, GENERATE_FULL, 0));
    ask(&g, 3, 3, 30, p);
    p.sampling.seed = 43;
    ask(&g, 4, 3, 30, p);
    p.sampling = (struct msg_sampling){.top_p = 1,
                                       .repeat_penalty = 1,
                                       .frequency_penalty = 2,
                                       .presence_penalty = 2,
                                       .repeat_last_n = 1000};
    p.max_tokens = 60;
    ask(&g, 5, 3, 30, p);
    finish(&g);
    for (uint32_t i = 1; i <= 5; i++)
        check_done(i, i == 2 ? 16 : i == 5 ? 60 : 24);
    assert_memory_equal(g.results[1].tokens, g.results[3].tokens, 24 * sizeof(uint32_t));
    assert_memory_not_equal(g.results[1].tokens, g.results[4].tokens, 24 * sizeof(uint32_t));
    alone(3, 30, 60);
    assert_memory_not_equal(g.results[5].tokens, g.results[ALONE].tokens, 60 * sizeof(uint32_t));
    rig_close(&g);
}

/* A sequence that the store drops, or whose rows are not finite, ends; its neighbour does not notice. */
static void test_faults(void **state)
{
    (void)state;
    static const struct {
        enum store_fault fault;
        int code;
        const char *words;
        uint32_t resident;
    } cases[] = {{STORE_DROPS, -ENOSPC, "the store ended the sequence", 13},
                 {STORE_DROPS, -ENOSPC, "the store ended the sequence", 0},
                 {STORE_POISONS_ROW, -EDOM, "non-finite logits at position", 13}};
    open_gpu();
    alone(2, 20, 30);
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t a = 2 * i + 1, b = 2 * i + 2;
        atomic_store(&g.store.fault, STORE_SOUND);
        store_offload(&g.store, cases[i].resident);
        ask_with_fault(&g, a, b, plain(30, 0, SELECTION_CURRENT), 3, cases[i].fault);
        while (!g.results[a].done)
            turn(&g);
        atomic_store(&g.store.fault, STORE_SOUND);
        finish(&g);
        check_error(&g, a, cases[i].code, cases[i].words);
        check_equal(b, 30);
    }
    rig_close(&g);
}

/* Tables out of any range are harmless, and so are their neighbours' results. */
static void test_wild_tables(void **state)
{
    (void)state;
    static const struct {
        enum store_fault fault;
        uint32_t resident;
    } cases[] = {{STORE_BAD_PAGE, 13},
                 {STORE_BAD_SLOT, 0},
                 {STORE_BAD_SLAB, 0},
                 {STORE_BAD_LIST, 13},
                 {STORE_LONG_LIST, 13}};
    open_gpu();
    alone(2, 20, 12);
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t a = 2 * i + 1, b = 2 * i + 2;
        store_offload(&g.store, cases[i].resident);
        ask_with_fault(&g, a, b, plain(12, 0, SELECTION_CURRENT), 3, cases[i].fault);
        finish(&g);
        atomic_store(&g.store.fault, STORE_SOUND);
        check_equal(b, 12);
    }
    rig_close(&g);
}

/* A set that is short attends everything where layers are resident, for that entry and those steps only:
 * the graph that was launched writes nothing, the step is queued again. */
static void test_short_sets(void **state)
{
    (void)state;
    open_gpu();
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++) {
        uint32_t a = 2 * mode + 1, b = 2 * mode + 2;
        uint64_t repeated = figures().repeated;
        ask_with_fault(&g, a, b, plain(40, 0, mode), 6, STORE_SHORT);
        while (g.results[b].count < 10)
            turn(&g);
        atomic_store(&g.store.fault, STORE_SOUND);
        finish(&g);
        assert_int_equal(figures().repeated, repeated + 1);
        for (uint32_t i = 0; i < 2; i++) {
            alone(i + 1, 20, 40);
            check_equal(i ? b : a, 40);
        }
    }
    ask(&g, 9, 1, 20, plain(10, 0, SELECTION_CURRENT)); /* offloaded layers have their lists only */
    store_offload(&g.store, 0);
    atomic_store(&g.store.fault_sequence, 0);
    atomic_store(&g.store.fault, STORE_SHORT);
    finish(&g);
    check_done(9, 10);
    atomic_store(&g.store.fault, STORE_SOUND);
    alone(1, 20, 10);
    assert_memory_not_equal(g.results[9].tokens, g.results[ALONE].tokens, 10 * sizeof(uint32_t));
    rig_close(&g);
}

/* Breaks off the step that was posted as `step`, once the store looks at no more. */
static void *abort_step(void *arg)
{
    uint32_t step = *(uint32_t *)arg;
    flag_wait(control_flag_at(g.store.control, FLAG_STEP_POSTED), step, clock_now_ns() + 60 * CLOCK_S, 0);
    flag_abort_all(g.store.control);
    return NULL;
}

static void check_abort(uint32_t tokens_before, const char *words)
{
    struct err err = {0};
    pthread_t thread;
    open_gpu();
    ask(&g, 1, 1, 20, plain(30, 0, SELECTION_CURRENT));
    while (g.results[1].count < tokens_before)
        turn(&g);
    turn(&g);
    size_t bytes = g.store.control->device_bytes;
    uint8_t *before = malloc(bytes);
    memcpy(before, g.store.device, bytes);
    uint32_t step = stepper_next(g.stepper);
    store_allow(&g.store, 0);
    assert_int_equal(pthread_create(&thread, NULL, abort_step, &step), 0);
    assert_int_equal(scheduler_turn(g.scheduler, &err), -ECANCELED);
    pthread_join(thread, NULL);
    if (!strstr(err.text, words))
        fail_msg("\"%s\" does not say \"%s\"", err.text, words);
    assert_memory_equal(before, g.store.device, bytes);
    free(before);
    if (tokens_before > 0)
        check_record_was_sent(&g, 1, 20);
    rig_close(&g);
}

/* A wait for tables is broken off, in a prompt (launch by launch) and in a graph: nothing was written. */
static void test_abort(void **state)
{
    (void)state;
    check_abort(0, "make the tables of");
    check_abort(5, "make the tables of");
}

/* The tables came, the rows do not: the stream itself waits, and is released. */
static void *abort_rows(void *arg)
{
    uint32_t step = *(uint32_t *)arg;
    flag_wait(control_flag_at(g.store.control, FLAG_TABLES_LATE), step, clock_now_ns() + 60 * CLOCK_S, 0);
    for (unsigned run = 0; run < g.store.control->runs; run++)
        flag_abort(control_flag_at(g.store.control, FLAG_ROWS_READY + run));
    return NULL;
}

static void test_abort_rows(void **state)
{
    (void)state;
    struct err err = {0};
    pthread_t thread;
    open_gpu();
    ask(&g, 1, 1, 20, plain(30, 0, SELECTION_CURRENT));
    while (g.results[1].count < 5)
        turn(&g);
    uint32_t step = stepper_next(g.stepper);
    atomic_store(&g.store.fault, STORE_NO_ROWS);
    assert_int_equal(pthread_create(&thread, NULL, abort_rows, &step), 0);
    assert_int_equal(scheduler_turn(g.scheduler, &err), -ECANCELED);
    pthread_join(thread, NULL);
    assert_non_null(strstr(err.text, "rows ready"));
    check_record_was_sent(&g, 1, 20);
    rig_close(&g);
}

static uint64_t launched; /* graphs, before the turn */

static void check_launched(struct rig *rig, const struct msg *msg)
{
    (void)rig, (void)msg;
    assert_int_equal(figures().launched, launched + 1);
    assert_int_equal(stepper_times(g.stepper)->tables.total + 1, stepper_times(g.stepper)->sparse);
}

static void let_tables(struct rig *rig, const struct msg *msg)
{
    if (launched)
        check_launched(rig, msg);
    store_allow(&rig->store, INT_MAX);
}

/* A token goes to its client when the step that records it is launched, before that is done; and does not
 * wait for tables that are late, in a graph and launch by launch. */
static void test_tokens_go_out_while_the_gpu_computes(void **state)
{
    (void)state;
    open_gpu();
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++) {
        ask(&g, mode + 1, 1, 20, plain(6, 0, mode)); /* in all fewer sparse steps than bring a measured one */
        while (g.results[mode + 1].count < 2)
            turn(&g);
        for (int i = 0; i < 2; i++) {
            launched = figures().launched;
            g.sending = i == 0 ? check_launched : let_tables;
            store_allow(&g.store, i == 0 ? INT_MAX : 0);
            turn(&g);
            check_record_was_sent(&g, mode + 1, 20);
        }
        g.sending = NULL;
        finish(&g);
    }
    ask(&g, 4, 1, 20, plain(6, GENERATE_FULL, 0));
    while (g.results[4].count < 2)
        turn(&g);
    launched = 0;
    g.sending = let_tables;
    store_allow(&g.store, 0);
    turn(&g);
    check_record_was_sent(&g, 4, 20);
    g.sending = NULL;
    finish(&g);
    const struct stepper_times *t = stepper_times(g.stepper);
    assert_int_equal(g.meanwhile, t->dense + t->sparse);
    alone(1, 20, 6);
    for (uint32_t i = 1; i <= 4; i++)
        check_equal(i, 6);
    rig_close(&g);
}

/* A step that cannot even be queued stands in a record all the same. */
static void test_tokens_of_a_step_that_is_not_queued(void **state)
{
    (void)state;
    struct err err = {0};
    open_gpu();
    ask(&g, 1, 1, 20, plain(30, 0, SELECTION_CURRENT));
    while (g.results[1].count < 5)
        turn(&g);
    store_allow(&g.store, 0);
    uint32_t version = control_step_at(g.store.control, stepper_next(g.stepper) - 1)->resident_version;
    g.store.control->resident_layers[version % CONTROL_RESIDENT_RING] = g.layout.layers + 1;
    assert_int_equal(scheduler_turn(g.scheduler, &err), -EPROTO);
    assert_non_null(strstr(err.text, "expected at most 13"));
    check_record_was_sent(&g, 1, 20);
    rig_close(&g);
}

static void never_return(void *arg)
{
    for (;;)
        poll(arg, 0, -1);
}

/* A GPU whose stream does not end even when nothing holds it: freeing anything would wait for it for ever, so
 * the process ends by itself. */
static void test_hung_stream(void **state)
{
    (void)state;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct err err = {0};
        alarm(60);
        open_gpu();
        ask(&g, 1, 1, 20, plain(30, 0, SELECTION_CURRENT));
        while (g.results[1].count < 5)
            turn(&g);
        if (g.device->api->host_call(g.device->stream, never_return, NULL))
            _exit(3);
        flag_abort(control_flag_at(g.store.control, FLAG_TABLES_LATE));
        scheduler_turn(g.scheduler, &err);
        _exit(2);
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 1);
}

/* Memory is counted by what it is for, and given back. */
static void test_memory(void **state)
{
    (void)state;
    open_gpu();
    struct gpu_device_figures f;
    gpu_device_figures(g.device, &f);
    uint64_t sum = f.info.context_bytes + f.library_bytes;
    for (int i = 0; i < GPU_DEVICE_USES; i++) {
        assert_int_equal(f.bytes[i] > 0, i != GPU_DEVICE_FEATURES); /* no head asks */
        sum += f.bytes[i];
    }
    assert_int_equal(sum, f.total_bytes);
    const struct model_config *c =
        g.config; /* every matrix once, in two bytes; the output is the embedding */
    uint64_t q = c->q_heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    uint64_t least =
        2 * ((uint64_t)c->vocab * c->hidden +
             c->layers * ((q + 2 * kv) * c->hidden + q * c->hidden + 3 * (uint64_t)c->ffn * c->hidden));
    assert_true(f.bytes[GPU_DEVICE_WEIGHTS] >= least);
    assert_true(f.bytes[GPU_DEVICE_WEIGHTS] <= least + least / 4 + 65536);
    scheduler_free(&g.scheduler);
    store_break(&g.store);
    stepper_free(&g.stepper);
    pass_gpu_free(&g.pass_gpu);
    weights_gpu_free(&g.weights);
    for (int i = 0; i < GPU_DEVICE_USES; i++)
        assert_int_equal(g.device->bytes[i], 0);
    rig_close(&g);
}

/* Device memory that is not on this GPU is refused, with both named. */
static void test_other_device(void **state)
{
    (void)state;
    struct err err = {0};
    open_gpu();
    struct step_gpu *step = NULL;
    struct control_header *other = mem_alloc_aligned(1, sizeof *other);
    memcpy(other, g.store.control, sizeof *other);
    snprintf(other->device_uuid, sizeof other->device_uuid, "GPU-of-another-kind");
    assert_int_equal(step_gpu_create(&g.layout, other, g.pass_gpu, &step, &err), -EPROTO);
    assert_non_null(strstr(err.text, "GPU-of-another-kind"));
    assert_non_null(strstr(err.text, g.device->api->info(g.device->gpu)->uuid));
    other->device_form = CONTROL_DEVICE_MEMFD;
    assert_int_equal(step_gpu_create(&g.layout, other, g.pass_gpu, &step, &err), -EPROTO);
    assert_non_null(strstr(err.text, "on the CPU"));
    mem_free(&other);
    rig_close(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mixture),
        cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_graphs_are_foreseen),
        cmocka_unit_test(test_proposals_while_batches_change),
        cmocka_unit_test(test_measured_steps_are_counted),
        cmocka_unit_test(test_many_graphs),
        cmocka_unit_test(test_sampling),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_wild_tables),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_abort_rows),
        cmocka_unit_test(test_tokens_go_out_while_the_gpu_computes),
        cmocka_unit_test(test_tokens_of_a_step_that_is_not_queued),
        cmocka_unit_test(test_short_sets),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_other_device),
        cmocka_unit_test(test_hung_stream),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
