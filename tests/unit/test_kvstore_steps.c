/* Steps through the planner with rows that say where they belong: dense and sparse, all selection modes, all
 * residency levels and changes of it, staging, write-back, slots under pressure. */
#include "kvstore/step.h"
#include "tests/unit/kvstore_fake_sets.h"

static const struct fake_open OPEN_SPARSE = {
    .prompt = 300, .capacity = 700, .budget = 96, .sinks = 4, .window = 16};

static void test_dense_at_every_residency(void **state)
{
    (void)state;
    for (int32_t runs = 0; runs <= 3; runs++) {
        struct planner_options options = fake_options();
        struct fake *f = fake_create(&options, 1 + (uint64_t)runs);
        planner_force(f->planner, runs);
        struct fake_open open = {.prompt = 333, .capacity = 400, .token_seed = 1};
        struct fake_sequence *a = &f->sequences[0], *b = &f->sequences[1];
        fake_open(f, a, 11, &open);
        open.token_seed = 2;
        fake_open(f, b, 12, &open);
        fake_prefill(f, a);
        assert_int_equal(f->planner->residency.resident, runs);
        fake_prefill(f, b);
        for (uint32_t i = 0; i < 70; i++) { /* full attention over both, through a page boundary */
            struct fake_step step = {.kind = STEP_DENSE, .entries = 2, .sequence = {a, b}, .count = {1, 1}};
            if (a->next == 400)
                break;
            fake_dense(f, &step);
        }
        fake_check_host(f, a, 0, a->next);
        fake_check_host(f, b, 0, b->next);
        fake_free(f);
    }
}

/* The last set may be in use or not when the sequence is closed. `growing`: steps with sets that do, or 0. */
static void check_marks(const struct fake_sequence *s, const struct kv_counters *c, uint32_t growing)
{
    assert_true(c->mass_sum == 0.5 * (double)c->mass_count);
    assert_true(c->mass_base_sum == 0.25 * (double)c->mass_count);
    assert_in_range(s->grown - c->grown, 0, 1);
    assert_int_equal(s->fallbacks, c->fallbacks);
    assert_true(growing ? c->grown > growing / 10 &&
                              (c->fallbacks > growing / 10 || c->layers_offloaded_max == 13)
                        : c->grown + c->fallbacks == 0);
}

enum { NO_ELASTIC = 1, GROWING = 2, HASTY = 4 };

/* The i-th sequence, as far as its prompt. */
static void open_sparse(struct fake *f, uint32_t i, uint32_t selection, unsigned how)
{
    static const uint32_t budgets[] = {96, 60, 200};
    struct fake_sequence *s = &f->sequences[i];
    struct fake_open open = OPEN_SPARSE;
    open.budget = budgets[i];
    open.prompt = 250 + fake_random(f, 100);
    open.token_seed = 10 + i;
    if (how & HASTY)
        open.window = fake_random(f, 4);
    fake_open(f, s, 100 + i, &open);
    s->base = how & GROWING ? budgets[i] / 3 + 14 : 0;
    fake_prefill(f, s);
    if (selection == SELECTION_CURRENT)
        return;
    struct fake_step last = {.entries = 1, .sequence = {s}}; /* the prompt's last token has a selection too */
    f->step--;
    fake_select(f, &last, (uint32_t)-1);
    f->step++;
}

/* One run: several sequences, `steps` sparse steps, residency forced about. GROWING: lists usually take a
 * third of their budget, some steps all of it, each list its own. HASTY: steps follow at each other's heels,
 * and sequences are closed between them. */
static void run_sparse(uint64_t seed, uint32_t selection, int32_t runs, unsigned how)
{
    struct planner_options options = fake_options();
    bool no_elastic = options.no_elastic = how & NO_ELASTIC;
    struct fake *f = fake_create(&options, seed);
    uint32_t n = 3;
    planner_force(f->planner, runs < 0 ? (int32_t)fake_random(f, 4) : runs);
    for (uint32_t i = 0; i < n; i++)
        open_sparse(f, i, selection, how);
    uint32_t steps = fake_often(210, 80);
    f->hasty = how & HASTY;
    for (uint32_t i = 0; i < steps; i++) {
        if (runs < 0 && fake_random(f, 12) == 0)
            planner_force(f->planner, (int32_t)fake_random(f, 4));
        if (how == HASTY && fake_random(f, 25) == 0) {
            uint32_t k = fake_random(f, n);
            fake_close(f, &f->sequences[k]);
            open_sparse(f, k, selection, how);
        }
        while (planner_idle(f->planner, clock_now_ns()) && fake_random(f, 3))
            continue;
        struct fake_step step = {.selection = selection, .late_topk = fake_random(f, 2)};
        if (selection == SELECTION_MIXED)
            step.early_layers = fake_random(f, 14);
        for (uint32_t k = 0; k < n; k++)
            if (selection != SELECTION_CURRENT || fake_random(f, 4))
                step.sequence[step.entries++] = &f->sequences[k];
        if (step.entries)
            fake_sparse(f, &step);
    }
    assert_int_equal(f->reselects, 0);
    assert_int_equal(f->broken, 0);
    assert_true(step_until_near(f->planner, f->planner->step.ended_ns) == (fake_gpu ? 0 : INT64_MAX));
    planner_commit(f->planner, true);
    for (uint32_t i = 0; i < n; i++) {
        fake_check_host(f, &f->sequences[i], 0, f->sequences[i].next);
        uint32_t drafts = f->planner->sequences[f->sequences[i].index].drafts_used;
        /* Where slots are short, few sets find all of theirs before the one in use is let go. */
        if (selection == SELECTION_PREVIOUS && runs >= 0 && how == 0)
            assert_true(drafts > (runs == 3 ? steps - 10 : 0));
        /* Without slots also those whose set came before the last one's of a step that waited for it. */
        if (selection != SELECTION_PREVIOUS && runs == 3 && how == 0 && i == 0)
            assert_true(drafts > 10);
        fake_close(f, &f->sequences[i]);
        const struct kv_counters *c = &f->last_closed.counters;
        assert_true(c->kept <= c->selected);
        check_marks(&f->sequences[i], c, how & GROWING ? steps : 0);
        if (runs == 0 && no_elastic)
            assert_true(c->bytes_loaded >= c->bytes_if_reloaded * 9 / 10 &&
                        c->bytes_loaded <= c->bytes_if_reloaded);
        if (runs == 0 && !no_elastic && how != HASTY) /* there it may have been opened just now */
            assert_true(c->bytes_loaded > 0 && c->bytes_loaded < c->bytes_if_reloaded);
        if (runs == 3)
            assert_int_equal(c->rows_loaded, 0);
    }
    fake_free(f);
}

static void test_sparse_current(void **state)
{
    (void)state;
    for (int32_t runs = -1; runs <= 3; runs++)
        run_sparse(20 + (uint64_t)runs, SELECTION_CURRENT, runs, 0);
}

static void test_sparse_previous(void **state)
{
    (void)state;
    for (int32_t runs = -1; runs <= 3; runs++)
        run_sparse(30 + (uint64_t)runs, SELECTION_PREVIOUS, runs, 0);
}

static void test_sparse_mixed(void **state)
{
    (void)state;
    for (int32_t runs = -1; runs <= 3; runs++)
        run_sparse(40 + (uint64_t)runs, SELECTION_MIXED, runs, 0);
}

static void test_sparse_without_elastic(void **state)
{
    (void)state;
    run_sparse(50, SELECTION_CURRENT, 0, NO_ELASTIC);
    run_sparse(51, SELECTION_PREVIOUS, -1, NO_ELASTIC);
    run_sparse(52, SELECTION_MIXED, -1, NO_ELASTIC);
}

static void test_lists_that_grow_and_shrink(void **state)
{
    (void)state;
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++)
        for (int32_t runs = -1; runs <= 3; runs += 1 + (runs == 0))
            run_sparse(60 + 10 * mode + (uint64_t)runs, mode, runs, GROWING);
    run_sparse(91, SELECTION_CURRENT, 0, NO_ELASTIC | GROWING);
}

/* Rows of a step go back behind the tables of the next one, in which others are planned, brought back and let
 * go. */
static void test_steps_at_each_others_heels(void **state)
{
    (void)state;
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++)
        for (int32_t runs = -1; runs <= 3; runs++)
            run_sparse(110 + 10 * mode + (uint64_t)runs, mode, runs, HASTY);
    run_sparse(141, SELECTION_CURRENT, -1, HASTY | NO_ELASTIC);
    run_sparse(142, SELECTION_MIXED, -1, HASTY | GROWING);
}

/* A short set counts as all positions in layers on the device, as its lists in the others. */
static void test_what_is_attended_is_counted(void **state)
{
    (void)state;
    for (int32_t runs = 0; runs <= 3; runs++) {
        struct planner_options options = fake_options();
        struct fake *f = fake_create(&options, 7);
        struct fake_open open = {.prompt = 100, .capacity = 110, .budget = 20, .sinks = 1, .window = 18};
        struct fake_sequence *s = &f->sequences[0];
        planner_force(f->planner, runs);
        fake_open(f, s, 5, &open);
        fake_prefill(f, s);
        s->set = (struct fake_set){f->step, 100, 100 - 18, TOPK_ENTRY_SHORT, {0}, {{0}}};
        struct fake_topk *t = mem_alloc(1, sizeof *t);
        fake_topk_add(f, t, s, true); /* empty: sinks and window are all that the budget holds */
        fake_topk_send(f, t, f->step);
        mem_free(&t);
        struct fake_step step = {.kind = STEP_SPARSE, .entries = 1, .sequence = {s}, .count = {1}};
        fake_post(f, &step);
        fake_layers(f, &step, 0, f->layout.layers);
        fake_end_step(f, &step);
        fake_close(f, s);
        const struct kv_counters *c = &f->last_closed.counters;
        /* Groups of 6 and 7 layers, runs end at layers 4, 8 and 13; four lists each. */
        uint64_t first = runs ? runs == 1 ? (4 * 101 + 2 * 20) / 6 : 101 : 20;
        uint64_t second = runs < 2 ? 20 : runs == 2 ? (2 * 101 + 5 * 20) / 7 : 101;
        assert_int_equal(c->attended, 4 * (first + second));
        assert_int_equal(c->lists, 8);
        assert_int_equal(c->fallbacks, runs > 0);
        fake_free(f);
    }
}

static void force_now(struct fake *f, int32_t runs)
{
    planner_force(f->planner, runs);
    while (planner_idle(f->planner, clock_now_ns()))
        continue;
}

/* Lists are written for a step that is to come; then, in two steps one after the other, all layers come back
 * and go again: the same groups have slots as before, but other ones. */
static void test_slots_that_are_others_than_drafted(void **state)
{
    (void)state;
    for (int32_t runs = 0; runs < 3; runs++) {
        struct planner_options options = fake_options();
        options.slots = 400; /* every set finds all of its slots before the one in use is let go */
        struct fake *f = fake_create(&options, 40 + (uint64_t)runs);
        struct fake_sequence *s = &f->sequences[0];
        force_now(f, runs);
        fake_open(f, s, 5, &OPEN_SPARSE);
        fake_prefill(f, s);
        struct fake_step step = {
            .selection = SELECTION_PREVIOUS, .entries = 1, .sequence = {s}, .early_topk = true};
        f->step--;
        fake_select(f, &step, (uint32_t)-1); /* of the last token of the prompt */
        f->step++;
        const struct sequence_draft *draft[2] = {&f->planner->sequences[s->index].draft[0][1],
                                                 &f->planner->sequences[s->index].draft[1][1]};
        for (uint32_t i = 0; i < 40; i++) {
            bool moves = i % 4 == 2; /* all layers in this step, `runs` again in the next one */
            if (moves)
                force_now(f, 3);
            fake_sparse(f, &step);
            assert_int_equal(f->planner->residency.resident, moves ? 3 : runs);
            const struct sequence_draft *next = draft[f->step & 1];
            assert_true(i == 0 || (next->ready && next->step == f->step));
            force_now(f, runs);
        }
        fake_free(f);
    }
}

/* A sequence has a set but has made no sparse step when, in a step of another one, more layers go: those that
 * went before hold no slots of it yet. */
static void test_slots_of_one_that_waits(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 50);
    struct fake_sequence *busy = &f->sequences[0], *waits = &f->sequences[1];
    force_now(f, 1);
    for (uint32_t i = 0; i < 2; i++) {
        fake_open(f, &f->sequences[i], 5 + i, &OPEN_SPARSE);
        fake_prefill(f, &f->sequences[i]);
    }
    struct fake_step both = {.selection = SELECTION_PREVIOUS, .entries = 2, .sequence = {busy, waits}},
                     one = {.selection = SELECTION_PREVIOUS, .entries = 1, .sequence = {busy}};
    f->step--;
    fake_select(f, &both, (uint32_t)-1);
    f->step++;
    fake_sparse(f, &one);
    force_now(f, 0);
    fake_sparse(f, &one);
    fake_sparse(f, &both);
    fake_free(f);
}

/* What a step's lists name, all layers, however many sets have come since they were written. */
static void check_lists(struct fake *f, const struct fake_sequence *s, const struct fake_set *set)
{
    for (uint32_t l = 0; l < f->layout.layers; l++)
        for (uint32_t h = 0; h < f->layout.selection_heads; h++)
            fake_check_list(f, s, set, 1, l, h);
}

/* While a step reads its slots the next set is put to use, and the one after that comes too: it wants slots
 * that only the step in flight still reads, and waits for it. `slots` are few enough for that. */
static void run_held(uint32_t slots, int32_t runs, uint32_t after)
{
    struct planner_options options = fake_options();
    options.slots = slots;
    struct fake *f = fake_create(&options, slots + 4u * (uint32_t)runs + after);
    struct fake_step step = {.kind = STEP_SPARSE, .selection = SELECTION_PREVIOUS, .entries = 2};
    struct fake_set *in_use[2];
    force_now(f, runs);
    for (uint32_t i = 0; i < 2; i++) {
        struct fake_sequence *s = step.sequence[i] = &f->sequences[i];
        step.count[i] = 1;
        fake_open(f, s, 5 + i, &OPEN_SPARSE);
        fake_prefill(f, s);
        in_use[i] = mem_alloc(1, sizeof *in_use[i]);
    }
    f->step--;
    fake_select(f, &step, (uint32_t)-1);
    f->step++;
    uint32_t held = 0, waited = 0;
    bool ahead = false; /* the set that the step brings is there already */
    for (uint32_t i = 0; i < 60; i++) {
        for (uint32_t k = 0; k < 2; k++)
            *in_use[k] = ahead ? step.sequence[k]->before : step.sequence[k]->set;
        fake_post(f, &step);
        assert_true(fake_up(f, FLAG_TABLES_LATE));
        for (uint32_t run = 0; run < f->h->runs; run++)
            assert_true(fake_comes(f, FLAG_ROWS_READY + run));
        for (uint32_t k = 0; k < 2; k++)
            for (uint32_t l = 0; l < f->layout.layers; l++)
                fake_write_token(f, step.sequence[k], l);
        if (!ahead)
            fake_select(f, &step, 0);
        for (uint32_t k = 0; k < 2; k++) {
            const struct elastic *e = &f->planner->sequences[step.sequence[k]->index].elastic;
            held += e->held;
            assert_true(!e->held || e->position == step.sequence[k]->next);
        }
        ahead = i % after == 0; /* a retriever that runs ahead of its decoder */
        if (ahead) {
            f->step++;
            fake_select(f, &step, 1);
            f->step--;
        }
        for (uint32_t k = 0; k < 2; k++) {
            const struct elastic *e = &f->planner->sequences[step.sequence[k]->index].elastic;
            waited += e->held && e->next == ELASTIC_RECEIVED;
            check_lists(f, step.sequence[k], in_use[k]);
        }
        fake_end_step(f, &step);
        for (uint32_t k = 0; k < 2; k++) {
            const struct elastic *e = &f->planner->sequences[step.sequence[k]->index].elastic;
            assert_false(e->held);
            assert_true(elastic_consistent(e));
        }
    }
    assert_int_equal(f->reselects, 0);
    /* Of every `after` steps one has a set staged in front of it that came too soon, and none is lost but by
     * that. */
    uint32_t whole = f->planner->sequences[step.sequence[0]->index].drafts_whole;
    assert_true(runs == 3 ? whole == 0 : slots < 200 || whole >= 10);
    /* With all layers resident there is nothing to hold; with the fewest slots nothing finds its own. */
    assert_true(runs == 3 ? held == 0 : slots < 200 || held > 60);
    assert_true(runs == 3 || slots < 200 || waited > 10);
    planner_commit(f->planner, true);
    for (uint32_t k = 0; k < 2; k++) {
        fake_check_host(f, step.sequence[k], 0, step.sequence[k]->next);
        fake_close(f, step.sequence[k]);
        mem_free(&in_use[k]);
    }
    fake_free(f);
}

static void test_sets_put_to_use_while_a_step_reads(void **state)
{
    (void)state;
    for (int32_t runs = 0; runs <= 3; runs++)
        for (uint32_t slots = 172; slots < 400; slots += 72)
            run_held(slots, runs, 3 + (uint32_t)runs % 2);
}

/* The set of the step to come is there for one sequence, while the step waits for another one's: it stays
 * where it is until the tables are out, and is put to use then. */
static void test_a_set_that_comes_before_the_tables(void **state)
{
    (void)state;
    for (int32_t runs = 0; runs <= 3; runs++) {
        struct planner_options options = fake_options();
        options.slots = 400;
        struct fake *f = fake_create(&options, 60 + (uint64_t)runs);
        struct fake_sequence *a = &f->sequences[0], *b = &f->sequences[1];
        struct fake_step both = {.selection = SELECTION_PREVIOUS, .entries = 2, .sequence = {a, b}},
                         first = {.entries = 1, .sequence = {a}}, second = {.entries = 1, .sequence = {b}};
        force_now(f, runs);
        for (uint32_t i = 0; i < 2; i++) {
            fake_open(f, &f->sequences[i], 5 + i, &OPEN_SPARSE);
            fake_prefill(f, &f->sequences[i]);
        }
        f->step--;
        fake_select(f, &both, (uint32_t)-1);
        f->step++;
        for (uint32_t i = 0; i < 10; i++)
            fake_sparse(f, &both);
        both.kind = STEP_SPARSE;
        fake_post(f, &both);
        fake_select(f, &first, 0);
        fake_layers(f, &both, 0, f->layout.layers);
        fake_end_step(f, &both); /* and nothing has come of b's */
        fake_post(f, &both);
        assert_false(fake_up(f, FLAG_TABLES_LATE));
        fake_select(f, &first, 0);
        const struct elastic *e = &f->planner->sequences[a->index].elastic;
        assert_int_equal(e->position, a->next - 1);
        f->step--;
        fake_select(f, &second, (uint32_t)-1);
        f->step++;
        assert_true(fake_up(f, FLAG_TABLES_LATE));
        assert_int_equal(e->position, a->next);
        assert_int_equal(e->held, runs < 3);
        fake_select(f, &second, 0);
        fake_layers(f, &both, 0, f->layout.layers);
        fake_end_step(f, &both);
        fake_sparse(f, &both);
        assert_int_equal(f->reselects, 0);
        fake_free(f);
    }
}

/* Under `mixed` a sequence is closed when its early tables are out and its late set has not come: the step
 * goes on without it, with slots and without. */
static void test_leaving_between_the_halves(void **state)
{
    (void)state;
    for (int32_t runs = 0; runs <= 3; runs++) {
        struct planner_options options = fake_options();
        struct fake *f = fake_create(&options, 97);
        struct fake_sequence *a = &f->sequences[0], *b = &f->sequences[1];
        planner_force(f->planner, runs);
        struct fake_step both = {.selection = SELECTION_MIXED,
                                 .early_layers = 5,
                                 .entries = 2,
                                 .sequence = {a, b}},
                         rest = {
                             .selection = SELECTION_MIXED, .early_layers = 5, .entries = 1, .sequence = {b}};
        for (uint32_t i = 0; i < 2; i++) {
            fake_open(f, both.sequence[i], 1 + i, &OPEN_SPARSE);
            fake_prefill(f, both.sequence[i]);
            f->step--;
            fake_select(f, &(struct fake_step){.entries = 1, .sequence = {both.sequence[i]}}, (uint32_t)-1);
            f->step++;
        }
        fake_sparse(f, &both);
        fake_post(f, &both);
        assert_true(fake_up(f, FLAG_TABLES_EARLY));
        assert_int_equal(planner_close(f->planner, a->id, 9), 0);
        assert_false(fake_up(f, FLAG_TABLES_LATE));
        fake_select(f, &rest, 0);
        assert_true(fake_up(f, FLAG_TABLES_LATE));
        assert_int_equal(fake_status(f, a), -ECANCELED);
        rest.count[0] = 1;
        fake_layers(f, &rest, 0, f->layout.layers);
        assert_int_equal(f->closed, 0);
        fake_end_step(f, &rest);
        assert_int_equal(f->closed, 1);
        for (uint32_t i = 0; i < 20; i++)
            fake_sparse(f, &rest);
        fake_close(f, b);
        fake_free(f);
    }
}

/* A retriever that came is asked for what is newer than the sets at hand: what it sent while the store did
 * not know it is lost, and a step would wait for that. */
static void test_a_retriever_is_asked(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 12);
    struct fake_sequence *s = &f->sequences[0];
    planner_ask(f->planner);
    assert_int_equal(f->reselects, 0);
    fake_open(f, &f->sequences[1], 2,
              &(struct fake_open){.prompt = 40, .capacity = 100}); /* attends everything */
    fake_open(f, s, 1, &OPEN_SPARSE);
    fake_prefill(f, s);
    planner_ask(f->planner);
    assert_int_equal(f->reselects, 1);
    assert_int_equal(f->reselected, 1);
    assert_int_equal(f->reselect_step, f->h->first_step);
    for (uint32_t i = 0; i < 3; i++)
        fake_sparse(f, &(struct fake_step){.selection = SELECTION_CURRENT, .entries = 1, .sequence = {s}});
    uint32_t held = f->planner->sequences[s->index].elastic.step;
    planner_ask(f->planner);
    assert_int_equal(f->reselects, 2);
    assert_int_equal(f->reselect_step, held + 1);
    fake_free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_retriever_is_asked),
        cmocka_unit_test(test_dense_at_every_residency),
        cmocka_unit_test(test_sparse_current),
        cmocka_unit_test(test_sparse_previous),
        cmocka_unit_test(test_sparse_mixed),
        cmocka_unit_test(test_sparse_without_elastic),
        cmocka_unit_test(test_lists_that_grow_and_shrink),
        cmocka_unit_test(test_steps_at_each_others_heels),
        cmocka_unit_test(test_what_is_attended_is_counted),
        cmocka_unit_test(test_slots_that_are_others_than_drafted),
        cmocka_unit_test(test_slots_of_one_that_waits),
        cmocka_unit_test(test_sets_put_to_use_while_a_step_reads),
        cmocka_unit_test(test_a_set_that_comes_before_the_tables),
        cmocka_unit_test(test_leaving_between_the_halves),
    };
    return fake_run_both(tests);
}
