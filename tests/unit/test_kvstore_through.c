/* Write-through `offloaded`: an arena without the layers that never leave the device. Rows where they belong
 * in all modes, however residency is pressed; a load as large as may be; and what such an arena is not good
 * for: prefixes, other decoders, other stores. */
#include "tests/unit/kvstore_fake_sets.h"

#include <fcntl.h>
#include <unistd.h>

#include "proto/memory.h"

enum { RUNS = 3, OPEN = 3 };

static const struct fake_open SPARSE = {
    .prompt = 300, .capacity = 700, .budget = 96, .sinks = 4, .window = 16, .flags = OPEN_REUSE};

/* A store whose device holds so many runs, and no more, when all sequences are as long as they may be. */
static struct planner_options through_options(uint32_t kept)
{
    struct planner_options options = fake_options();
    struct kv_layout layout = fake_layout();
    struct memory_through through = {.write_through = WRITE_THROUGH_OFFLOADED};
    options.write_through = WRITE_THROUGH_OFFLOADED;
    options.slots = 400;
    options.host_bytes = 256u << 20;
    uint64_t slab = layout_slab_bytes(&layout);
    for (options.device_bytes = slab;; options.device_bytes += slab) {
        uint64_t more = options.device_bytes + (kept == 0 ? slab : 0); /* without any: the most */
        if (memory_runs_kept(&layout, options.sequences, options.slots, more, &through) >= (kept ? kept : 1))
            break;
    }
    return options;
}

static struct fake *through_create(uint32_t kept, uint64_t seed)
{
    fake_piece_bytes = 2048; /* a page is a slab */
    struct planner_options options = through_options(kept);
    struct fake *f = fake_create(&options, seed);
    const struct blocks *b = &f->planner->blocks;
    assert_int_equal(f->planner->kept_runs, kept);
    assert_int_equal(b->layout.host_first_layer, layout_run_first(&f->layout, kept));
    uint32_t layers = f->layout.layers - layout_run_first(&f->layout, kept);
    assert_int_equal(b->block_bytes,
                     (uint64_t)layers * f->layout.row_heads * BLOCK_TOKENS * fake_piece_bytes);
    return f;
}

static void through_free(struct fake *f)
{
    fake_free(f);
    fake_piece_bytes = sizeof(struct fake_piece);
}

static void through_open(struct fake *f, uint32_t i, uint32_t selection)
{
    static const uint32_t budgets[] = {96, 60, 200};
    struct fake_sequence *s = &f->sequences[i];
    struct fake_open open = SPARSE;
    open.budget = budgets[i % OPEN];
    open.prompt = 250 + fake_random(f, 100);
    open.token_seed = i; /* the same beginning each time: nothing of it is taken */
    fake_open(f, s, 100 + i, &open);
    assert_int_equal(s->next, 0);
    fake_prefill(f, s);
    if (selection == SELECTION_CURRENT)
        return;
    struct fake_step last = {.entries = 1, .sequence = {s}};
    f->step--;
    fake_select(f, &last, (uint32_t)-1);
    f->step++;
}

static void force(struct fake *f)
{
    planner_force(f->planner, (int32_t)fake_random(f, RUNS + 1));
}

static void run_mode(uint32_t selection, uint32_t kept, bool hasty)
{
    struct fake *f = through_create(kept, 7 + 10 * selection + kept + 100u * hasty);
    struct planner *p = f->planner;
    for (uint32_t i = 0; i < OPEN; i++)
        through_open(f, i, selection);
    f->hasty = hasty;
    uint32_t least = RUNS, most = 0;
    for (uint32_t i = 0; i < fake_often(160, 60); i++) {
        if (fake_random(f, 8) == 0)
            force(f);
        if (fake_random(f, 30) == 0) {
            uint32_t k = fake_random(f, OPEN);
            fake_close(f, &f->sequences[k]);
            through_open(f, k, selection);
        }
        while (planner_idle(p, clock_now_ns()) && fake_random(f, 3))
            continue;
        struct fake_step step = {.selection = selection, .late_topk = fake_random(f, 2), .entries = OPEN};
        if (selection == SELECTION_MIXED)
            step.early_layers = fake_random(f, f->layout.layers + 1);
        for (uint32_t k = 0; k < OPEN; k++)
            step.sequence[k] = &f->sequences[k];
        fake_sparse(f, &step);
        least = p->residency.resident < least ? p->residency.resident : least;
        most = p->residency.resident > most ? p->residency.resident : most;
    }
    assert_int_equal(least, kept);
    assert_int_equal(most, RUNS);
    assert_int_equal(f->reselects + f->broken, 0);
    planner_commit(p, true);
    for (uint32_t i = 0; i < OPEN; i++) {
        fake_check_host(f, &f->sequences[i], 0, f->sequences[i].next);
        fake_close(f, &f->sequences[i]);
    }
    assert_int_equal(p->prefix.cached, 0);
    assert_int_equal(p->totals.reused_tokens, 0);
    through_free(f);
}

static void test_rows_in_every_mode(void **state)
{
    (void)state;
    for (uint32_t mode = SELECTION_CURRENT; mode <= SELECTION_MIXED; mode++)
        for (uint32_t kept = 0; kept < RUNS; kept++)
            if (kept > 0 || mode == SELECTION_CURRENT) {
                if (kept > 0)
                    run_mode(mode, kept, false);
                run_mode(mode, kept > 0 ? kept : 1, true);
            }
}

/* As many sequences as there may be grow until they are as long as they may be: all are served, layers leave
 * by themselves, those that are kept do not. `left`: free slabs by then. */
static void test_the_largest_load(void **state)
{
    (void)state;
    for (uint32_t kept = 1; kept < RUNS; kept++) {
        struct fake *f = through_create(kept, 40 + kept);
        struct planner *p = f->planner;
        struct fake_open open = {
            .prompt = FAKE_CONTEXT - 8, .capacity = FAKE_CONTEXT, .budget = 200, .sinks = 4, .window = 16};
        for (uint32_t i = 0; i < FAKE_SEQUENCES; i++) {
            fake_open(f, &f->sequences[i], 1 + i, &open);
            fake_prefill(f, &f->sequences[i]);
            assert_true(p->residency.resident >= kept);
        }
        for (uint32_t i = 0; i < 8; i++) {
            struct fake_step step = {.selection = SELECTION_CURRENT, .entries = FAKE_SEQUENCES};
            for (uint32_t k = 0; k < FAKE_SEQUENCES; k++)
                step.sequence[k] = &f->sequences[k];
            fake_sparse(f, &step);
        }
        assert_int_equal(p->residency.resident, kept);
        for (uint32_t k = 0; k < FAKE_SEQUENCES; k++) {
            assert_false(p->sequences[f->sequences[k].index].failed);
            assert_int_equal(f->sequences[k].next, FAKE_CONTEXT);
            fake_check_host(f, &f->sequences[k], 0, FAKE_CONTEXT);
        }
        through_free(f);
    }
}

/* Where the layers that are kept have no room a sequence is refused, though it would fit if they could go. */
static void test_kept_layers_are_counted(void **state)
{
    (void)state;
    fake_piece_bytes = 2048;
    struct fake_open open = {.prompt = 700, .capacity = FAKE_CONTEXT, .budget = 96, .sinks = 4, .window = 16};
    for (uint32_t through = WRITE_THROUGH_ALL; through <= WRITE_THROUGH_OFFLOADED; through++) {
        struct planner_options options = through_options(2);
        options.write_through = through;
        struct fake *f = fake_create(&options, 60);
        struct planner *p = f->planner;
        uint64_t room = residency_slabs(p, 2, NULL, true);
        struct err err = {0};
        uint32_t slabs = p->device.slabs;
        p->device.slabs = (uint32_t)room + 8 * 16 + 5; /* a little less than its pages in eight layers */
        int r = fake_try_open(f, &f->sequences[0], 1, &open, &err);
        assert_int_equal(r, through == WRITE_THROUGH_ALL ? 0 : -ENOSPC);
        if (r < 0)
            assert_non_null(strstr(err.text, "device memory: needed "));
        p->device.slabs = slabs;
        fake_free(f);
    }
    fake_piece_bytes = sizeof(struct fake_piece);
}

/* However little room there is, as where others' pages lie scattered: what leaves is the rest. */
static void test_what_is_kept_is_never_proposed(void **state)
{
    (void)state;
    for (uint32_t kept = 1; kept <= RUNS; kept++) {
        struct fake *f = through_create(kept, 65 + kept);
        struct planner *p = f->planner;
        uint32_t slabs = p->device.slabs;
        through_open(f, 0, SELECTION_CURRENT);
        p->device.slabs = 1;
        residency_review(p);
        p->device.slabs = slabs;
        assert_int_equal(p->residency.proposed, kept < RUNS);
        struct fake_step step = {
            .selection = SELECTION_CURRENT, .entries = 1, .sequence = {&f->sequences[0]}};
        fake_sparse(f, &step);
        assert_int_equal(p->residency.resident, kept);
        fake_close(f, &f->sequences[0]);
        through_free(f);
    }
}

static int resume(struct fake *f, uint64_t id, struct err *err)
{
    struct msg_resumed resumed;
    int r = planner_resume(f->planner, id, &resumed, err);
    if (r == 0) {
        uint32_t *ids = (uint32_t *)(uintptr_t)resumed.tokens.at;
        mem_free(&ids);
    }
    return r;
}

/* Pages go with the decoder, and the sequences with them: the next one finds none, and all memory free. */
static void test_a_decoder_dies(void **state)
{
    (void)state;
    struct err err = {0};
    for (uint32_t kept = 0; kept <= RUNS; kept++) {
        struct fake *f = through_create(kept, 70 + kept);
        struct planner *p = f->planner;
        through_open(f, 0, SELECTION_CURRENT);
        through_open(f, 1, SELECTION_CURRENT);
        struct fake_step step = {
            .selection = SELECTION_CURRENT, .entries = 2, .sequence = {&f->sequences[0], &f->sequences[1]}};
        fake_sparse(f, &step);
        step.kind = STEP_SPARSE;
        fake_post(f, &step); /* and is not there any more to write it */
        planner_detach(p, clock_now_ns());
        fake_attach(f);
        assert_int_equal(resume(f, 100, &err), kept > 0 ? -ENOENT : 0);
        if (kept > 0) {
            assert_non_null(strstr(err.text, "not held here"));
            assert_int_equal(p->device.free_count, p->device.slabs);
            assert_int_equal(p->blocks.free_count, p->blocks.present);
            assert_int_equal(p->prefix.cached, 0);
            through_open(f, 0, SELECTION_CURRENT);
            struct fake_step one = {
                .selection = SELECTION_CURRENT, .entries = 1, .sequence = {&f->sequences[0]}};
            for (uint32_t i = 0; i < 10; i++)
                fake_sparse(f, &one);
            fake_check_host(f, &f->sequences[0], 0, f->sequences[0].next);
        }
        through_free(f);
    }
}

/* The descriptor of the arena of a store that is gone. */
static int arena_of(struct planner_options options, uint64_t seed)
{
    struct fake *f = fake_create(&options, seed);
    through_open(f, 0, SELECTION_CURRENT);
    int fd = fcntl(f->planner->blocks.segment.fd, F_DUPFD_CLOEXEC, 0);
    assert_true(fd >= 0);
    fake_free(f);
    return fd;
}

/* Only an arena with all layers is taken over, by a store that has all of them there too. */
static void test_another_store(void **state)
{
    (void)state;
    struct err err = {0};
    fake_piece_bytes = 2048;
    struct kv_layout layout = fake_layout();
    struct planner_options some = through_options(1), none = through_options(RUNS), all = through_options(1),
                           zero = through_options(0);
    all.write_through = WRITE_THROUGH_ALL;
    const struct {
        const struct planner_options *left, *next;
        int result;
        const char *text;
    } ways[] = {{&some, &some, -ENODATA, "layers: found those from 4 on (write-through offloaded)"},
                {&some, &all, -ENODATA, "layers: found those from 4 on (write-through offloaded)"},
                {&none, &none, -ENODATA, "layers: found those from 13 on (write-through offloaded)"},
                {&all, &some, -EINVAL, "fingerprint"},
                {&zero, &all, 0, ""},
                {&all, &zero, 0, ""}};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        int fd = arena_of(*ways[i].left, 90 + i);
        struct planner *p = NULL;
        err.text[0] = 0;
        assert_int_equal(planner_create_adopting(&p, ways[i].next, &layout, NULL, fd, &err), ways[i].result);
        assert_non_null(strstr(err.text, ways[i].text));
        if (ways[i].result < 0)
            close(fd); /* it stays the caller's */
        else
            assert_true(p->sequences[0].record != NULL);
        planner_free(&p);
    }
    fake_piece_bytes = sizeof(struct fake_piece);
}

/* Nothing is ever offloaded: blocks have ids and no bytes, as many as all sequences can fill. */
static void test_an_arena_without_rows(void **state)
{
    (void)state;
    for (uint32_t no_offload = 0; no_offload < 2; no_offload++) {
        fake_piece_bytes = 2048;
        struct planner_options options = through_options(RUNS);
        options.no_offload = no_offload;
        options.host_bytes = 1;
        struct fake *f = fake_create(&options, 80 + no_offload);
        struct planner *p = f->planner;
        assert_int_equal(p->kept_runs, RUNS);
        assert_int_equal(p->blocks.block_bytes, 0);
        assert_int_equal(p->blocks.blocks_max, FAKE_SEQUENCES * FAKE_CONTEXT / BLOCK_TOKENS);
        struct fake_open open = {
            .prompt = FAKE_CONTEXT - 70, .capacity = FAKE_CONTEXT, .budget = 200, .sinks = 4, .window = 16};
        for (uint32_t round = 0; round < 2; round++) {
            for (uint32_t i = 0; i < FAKE_SEQUENCES; i++) {
                fake_open(f, &f->sequences[i], 1 + i, &open);
                fake_prefill(f, &f->sequences[i]);
            }
            for (uint32_t i = 0; i < 70; i++) {
                struct fake_step step = {.selection = SELECTION_CURRENT, .entries = FAKE_SEQUENCES};
                for (uint32_t k = 0; k < FAKE_SEQUENCES; k++)
                    step.sequence[k] = &f->sequences[k];
                fake_sparse(f, &step);
                while (planner_idle(p, clock_now_ns()))
                    continue;
            }
            for (uint32_t i = 0; i < FAKE_SEQUENCES; i++) {
                assert_int_equal(f->sequences[i].next, FAKE_CONTEXT);
                fake_close(f, &f->sequences[i]);
                assert_int_equal(f->last_closed.counters.bytes_written, 0);
                assert_int_equal(f->last_closed.counters.layers_offloaded_max, 0);
            }
        }
        assert_int_equal(p->blocks.segment.bytes, p->blocks.rows_at);
        through_free(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_in_every_mode),      cmocka_unit_test(test_the_largest_load),
        cmocka_unit_test(test_kept_layers_are_counted), cmocka_unit_test(test_what_is_kept_is_never_proposed),
        cmocka_unit_test(test_a_decoder_dies),          cmocka_unit_test(test_another_store),
        cmocka_unit_test(test_an_arena_without_rows),
    };
    return fake_run_both(tests);
}
