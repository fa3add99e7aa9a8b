/* What only the GPU form has, with a stream that can be held up: who waits for it and who does not, flags
 * behind the work, a decoder that dies with work queued, an arena of several chunks, lists longer than the
 * buffers. */
#include "tests/unit/kvstore_fake_sets.h"

#include <fcntl.h>
#include <stdatomic.h>

#include "kvstore/step.h"
#include "link/segment.h"

static const struct fake_open SPARSE = {
    .prompt = 200, .capacity = 500, .budget = 96, .sinks = 4, .window = 16};

static atomic_bool open_gate;

static void pass_gate(void *arg)
{
    (void)arg;
    int64_t deadline = clock_now_ns() + FAKE_PATIENCE;
    while (!atomic_load(&open_gate) && clock_now_ns() < deadline)
        sched_yield();
}

static void take_a_while(void *arg)
{
    (void)arg;
    for (int64_t until = clock_now_ns() + 30 * CLOCK_MS; clock_now_ns() < until;)
        sched_yield();
}

/* What is queued from now on waits, for the gate or for a while. */
static void hold_stream(void (*call)(void *))
{
    atomic_store(&open_gate, false);
    device_gpu_queued(fake_gpu, fake_gpu->api->host_call(fake_gpu->stream, call, NULL));
}

static void write_tokens(struct fake *f, const struct fake_sequence *s, uint32_t count)
{
    for (uint32_t p = s->next; p < s->next + count; p++)
        for (uint32_t l = 0; l < f->layout.layers; l++)
            for (uint32_t h = 0; h < f->layout.row_heads; h++) {
                struct fake_piece piece = fake_piece(s->id, l, h, p);
                memcpy(fake_page_piece(f, s, l, h, p), &piece, sizeof piece);
            }
}

/* The thread meets the end of a step, as the last one's length foretells it, and the next step awake. */
static void test_near_steps(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 33);
    struct fake_sequence *s = &f->sequences[0];
    fake_open(f, s, 1, &SPARSE);
    fake_prefill(f, s);
    struct step *now = &f->planner->step;
    assert_true(step_until_near(f->planner, now->ended_ns) == INT64_MAX); /* a prompt's */
    for (uint32_t i = 0; i < 2; i++) {
        struct fake_step step = {.kind = STEP_SPARSE, .entries = 1, .sequence = {s}, .count = {1}};
        fake_post(f, &step);
        assert_true(step_until_near(f->planner, now->seen_ns) == INT64_MAX); /* no tables yet */
        fake_select(f, &step, 0);
        now->took_ns = i ? 5 * CLOCK_MS : 0;
        int64_t end = now->seen_ns + now->took_ns;
        assert_true(step_until_near(f->planner, now->seen_ns) ==
                    (i ? now->took_ns - PLANNER_NEAR_NS : INT64_MAX));
        assert_true(step_until_near(f->planner, end - PLANNER_NEAR_NS) == (i ? 0 : INT64_MAX));
        assert_true(step_until_near(f->planner, end + PLANNER_NEAR_NS - 1) == (i ? 0 : INT64_MAX));
        assert_true(step_until_near(f->planner, end + PLANNER_NEAR_NS) == INT64_MAX);
        now->took_ns = 4 * PLANNER_NEAR_NS - 1; /* short */
        assert_true(step_until_near(f->planner, now->seen_ns + now->took_ns) == INT64_MAX);
        write_tokens(f, s, 1);
        fake_end_step(f, &step);
        assert_true(step_until_near(f->planner, now->ended_ns + PLANNER_NEAR_NS - 1) == 0);
        assert_true(step_until_near(f->planner, now->ended_ns + PLANNER_NEAR_NS) == INT64_MAX);
    }
    fake_free(f);
}

/* The planner goes on to the next step while the stream has not even begun with the one before. */
static void test_planner_waits_for_no_stream(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 31);
    struct fake_sequence *s = &f->sequences[0];
    fake_open(f, s, 1, &SPARSE);
    const struct arena_sequence *record = f->planner->sequences[s->index].record;
    struct fake_step step = {.kind = STEP_DENSE, .entries = 1, .sequence = {s}, .count = {100}};
    assert_int_equal(device_gpu_wait_all(fake_gpu), 0);
    hold_stream(pass_gate);
    fake_post(f, &step);
    assert_true(fake_up(f, FLAG_TABLES_LATE));
    for (uint32_t run = 0; run < f->h->runs; run++)
        assert_false(fake_up(f, FLAG_ROWS_READY + run));
    write_tokens(f, s, 100);
    fake_raise(f, FLAG_KV_WRITTEN);
    assert_false(fake_up(f, FLAG_COMMITTED));
    fake_raise(f, FLAG_STEP_CONSUMED);
    s->next += 100;
    f->step++;
    fake_post(f, &step);
    assert_true(fake_up(f, FLAG_TABLES_LATE));
    assert_int_equal(record->committed, 0);
    assert_false(flag_reached(control_flag_at(f->h, FLAG_COMMITTED), f->step - 1));
    assert_false(flag_reached(control_flag_at(f->h, FLAG_ROWS_READY), f->step - 1));
    atomic_store(&open_gate, true);
    for (uint32_t run = 0; run < f->h->runs; run++)
        assert_true(fake_comes(f, FLAG_ROWS_READY + run));
    planner_advance(f->planner); /* the stream raised them behind the write-back */
    assert_true(flag_reached(control_flag_at(f->h, FLAG_COMMITTED), f->step - 1));
    assert_int_equal(record->committed, 100);
    fake_check_host(f, s, 0, 100);
    write_tokens(f, s, 100);
    fake_end_step(f, &step);
    assert_int_equal(record->committed, 200);
    fake_free(f);
}

/* With a stream that is done the host raises the flags, in the call that plans the step. */
static void test_host_raises_when_idle(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 32);
    struct fake_sequence *s = &f->sequences[0];
    fake_open(f, s, 1, &SPARSE);
    fake_prefill(f, s);
    assert_int_equal(device_gpu_wait_all(fake_gpu), 0);
    struct fake_step step = {.kind = STEP_DENSE, .entries = 1, .sequence = {s}, .count = {1}};
    fake_post(f, &step);
    for (uint32_t run = 0; run < f->h->runs; run++)
        assert_true(fake_up(f, FLAG_ROWS_READY + run));
    assert_false(planner_busy(f->planner));
    write_tokens(f, s, 1);
    fake_end_step(f, &step);
    fake_free(f);
}

/* A sparse step whose end leaves its rows to be written back, and the tables of the next one before them. */
static void owing_step(struct fake *f, struct fake_step *step, bool first)
{
    fake_select(f, step, 0);
    fake_post(f, step);
    assert_true(fake_up(f, FLAG_TABLES_LATE));
    assert_false(f->planner->commit.owed);
    bool pages = residency_layers(f->planner) == f->layout.layers;
    for (uint32_t run = 0; !first && pages && run < f->h->runs; run++)
        assert_true(fake_up(f, FLAG_ROWS_READY + run)); /* nor are these behind them */
    fake_layers(f, step, 0, f->layout.layers);
    flag_raise(control_flag_at(f->h, FLAG_KV_WRITTEN), f->step);
    flag_raise(control_flag_at(f->h, FLAG_STEP_CONSUMED), f->step);
    planner_advance(f->planner);
    assert_true(f->planner->commit.owed);
    assert_false(fake_up(f, FLAG_COMMITTED));
    step->sequence[0]->next++;
    f->step++;
}

/* In pages and in slots: the tables of a step come before the rows of the one that it follows. What comes
 * back to the device comes behind them. */
static void test_rows_are_written_behind_the_next_tables(void **state)
{
    (void)state;
    for (int32_t runs = 3; runs >= 0; runs--) {
        struct planner_options options = fake_options();
        struct fake *f = fake_create(&options, 36);
        struct fake_sequence *s = &f->sequences[0];
        struct fake_step step = {
            .kind = STEP_SPARSE, .selection = SELECTION_CURRENT, .entries = 1, .sequence = {s}, .count = {1}};
        planner_force(f->planner, runs);
        fake_open(f, s, 1, &SPARSE);
        fake_prefill(f, s);
        for (uint32_t i = 0; i < 20; i++)
            owing_step(f, &step, i == 0);
        if (runs < 3) {
            planner_force(f->planner, 3);
            assert_true(planner_idle(f->planner, clock_now_ns()));
            assert_false(f->planner->commit.owed);
        }
        f->step--;
        assert_true(fake_comes(f, FLAG_COMMITTED)); /* nothing follows: some time later */
        f->step++;
        fake_check_host(f, s, 0, s->next);
        assert_int_equal(planner_close(f->planner, 1, 1), 0);
        fake_free(f);
    }
}

/* Layers in pages wait for nothing that a step queues for those in slots, but for what was queued before and
 * may write what their pages lie in now. */
static void test_resident_runs_do_not_wait(void **state)
{
    (void)state;
    for (int32_t resident = 1; resident <= 2; resident++) {
        struct planner_options options = fake_options();
        struct fake *f = fake_create(&options, 37);
        struct fake_sequence *s = &f->sequences[0];
        struct fake_step step = {
            .kind = STEP_SPARSE, .selection = SELECTION_CURRENT, .entries = 1, .sequence = {s}, .count = {1}};
        planner_force(f->planner, resident);
        fake_open(f, s, 1, &SPARSE);
        fake_prefill(f, s);
        for (uint32_t i = 0; i < 3; i++)
            owing_step(f, &step, i == 0);
        for (uint32_t written = 0; written < 2; written++) {
            uint64_t at = 0;
            fake_select(f, &step, 0);
            assert_int_equal(device_gpu_wait_all(fake_gpu), 0);
            hold_stream(pass_gate);
            assert_int_equal(device_slab_take(&f->planner->device, DEVICE_SLOTS, &at), 0);
            if (written)
                device_gpu_fill(fake_gpu, f->planner->device.base + at, 0xff, 1);
            fake_post(f, &step);
            assert_true(fake_up(f, FLAG_TABLES_LATE));
            for (uint32_t run = 0; run < f->h->runs; run++)
                assert_int_equal(fake_up(f, FLAG_ROWS_READY + run), run < (uint32_t)resident && !written);
            atomic_store(&open_gate, true);
            for (uint32_t run = 0; run < f->h->runs; run++)
                assert_true(fake_comes(f, FLAG_ROWS_READY + run));
            device_slab_give(&f->planner->device, at);
            fake_layers(f, &step, 0, f->layout.layers);
            fake_end_step(f, &step);
        }
        fake_check_host(f, s, 0, s->next);
        fake_free(f);
    }
}

/* Layers go, or come back, with a step: places that the stream still reads, of the sequence in it or of one
 * that was in the step before, may become pages that this very step writes. */
static void test_runs_wait_where_places_changed_hands(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 4; i++) {
        int32_t resident = i < 2 ? 1 : 3;
        struct planner_options options = fake_options();
        options.poison = false; /* that writes */
        struct fake *f = fake_create(&options, 38);
        struct fake_sequence *s = &f->sequences[0], *last = &f->sequences[i % 2];
        struct fake_step step = {
            .kind = STEP_SPARSE, .selection = SELECTION_CURRENT, .entries = 1, .sequence = {s}, .count = {1}};
        planner_force(f->planner, 4 - resident);
        for (uint32_t n = 2; n-- > 0;) {
            step.sequence[0] = &f->sequences[n];
            fake_open(f, step.sequence[0], 1 + n, &SPARSE);
            fake_prefill(f, step.sequence[0]);
            for (uint32_t k = 0; k < 3; k++)
                owing_step(f, &step, k == 0);
        }
        fake_select(f, &step, 0);
        fake_post(f, &step);
        fake_layers(f, &step, 0, f->layout.layers);
        planner_force(f->planner, resident);
        while (planner_idle(f->planner, clock_now_ns()))
            continue;
        flag_raise(control_flag_at(f->h, FLAG_KV_WRITTEN), f->step);
        flag_raise(control_flag_at(f->h, FLAG_STEP_CONSUMED), f->step);
        planner_advance(f->planner);
        s->next++;
        f->step++;
        f->planner->step.ended_ns += 10 * CLOCK_S; /* the rows stay owed, however slow this test is */
        step.sequence[0] = last;
        fake_select(f, &step, 0);
        assert_int_equal(device_gpu_wait_all(fake_gpu), 0);
        assert_true(f->planner->commit.owed);
        hold_stream(pass_gate);
        fake_post(f, &step);
        assert_int_equal(f->planner->residency.resident, resident);
        assert_true(fake_up(f, FLAG_TABLES_LATE));
        for (uint32_t run = 0; run < f->h->runs; run++)
            assert_false(fake_up(f, FLAG_ROWS_READY + run));
        atomic_store(&open_gate, true);
        for (uint32_t run = 0; run < f->h->runs; run++)
            assert_true(fake_comes(f, FLAG_ROWS_READY + run));
        fake_layers(f, &step, 0, f->layout.layers);
        fake_end_step(f, &step);
        fake_check_host(f, s, 0, s->next);
        fake_check_host(f, last, 0, last->next);
        fake_free(f);
    }
}

/* Gathers and flags of a step are queued when its decoder dies: they end, the flags stay aborted, and what is
 * handed out again is not written by what was queued before. */
static void test_decoder_dies_with_work_queued(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 33);
    planner_force(f->planner, 0);
    struct fake_sequence *s = &f->sequences[0];
    fake_open(f, s, 1, &SPARSE);
    fake_prefill(f, s);
    for (uint32_t death = 0; death < 5; death++) {
        for (uint32_t i = 0; i < 10; i++) {
            struct fake_step good = {.selection = SELECTION_CURRENT, .entries = 1, .sequence = {s}};
            fake_sparse(f, &good);
        }
        struct segment old;
        struct err err = {0};
        int fd = fcntl(f->planner->control.fd, F_DUPFD_CLOEXEC, 0);
        assert_int_equal(segment_map(fd, 0, &old, &err), 0);
        struct fake_step step = {
            .kind = STEP_SPARSE, .selection = SELECTION_CURRENT, .entries = 1, .sequence = {s}, .count = {1}};
        hold_stream(take_a_while);
        fake_post(f, &step);
        fake_select(f, &step, 0);
        assert_true(fake_up(f, FLAG_TABLES_LATE));
        if (death % 2)
            fake_raise(f, FLAG_KV_WRITTEN);
        planner_detach(f->planner, 1000);
        struct control_header *header = old.at;
        for (unsigned flag = 0; flag < FLAG_COUNT; flag++)
            assert_true(flag_aborted(control_flag_at(header, flag), f->step + 1) ||
                        flag_aborted(control_flag_at(header, flag), 0));
        segment_close(&old);
        assert_int_equal(f->planner->device.free_count, f->planner->device.slabs);
        fake_attach(f);
        planner_force(f->planner, (int32_t)(death % 3));
        struct msg_resumed resumed;
        assert_int_equal(planner_resume(f->planner, 1, &resumed, &err), 0);
        uint32_t *ids = (uint32_t *)(uintptr_t)resumed.tokens.at;
        mem_free(&ids);
        s->next = resumed.committed - death % 2; /* that one was written back without having been computed */
        if (death % 2) {
            assert_int_equal(planner_close(f->planner, 1, 1), 0);
            fake_open(f, s, 1, &SPARSE);
            fake_prefill(f, s);
        }
        s->has = false;
    }
    fake_check_host(f, s, 0, s->next);
    fake_free(f);
}

static void test_arena_of_chunks(void **state)
{
    (void)state;
    fake_piece_bytes = 1024; /* 1.7 MB a block: chunks end within blocks */
    struct planner_options options = fake_options();
    options.host_bytes = 256u << 20;
    options.device_bytes = 200u << 20;
    struct fake *f = fake_create(&options, 34);
    planner_force(f->planner, 1);
    for (uint32_t n = 0; n < 4; n++) {
        struct fake_open open = SPARSE;
        open.prompt = 850;
        open.capacity = 1000;
        open.token_seed = n;
        fake_open(f, &f->sequences[n], 1 + n, &open);
        fake_prefill(f, &f->sequences[n]);
    }
    for (uint32_t i = 0; i < 10; i++) {
        struct fake_step step = {.selection = SELECTION_CURRENT, .entries = 4};
        for (uint32_t n = 0; n < 4; n++)
            step.sequence[n] = &f->sequences[n];
        fake_sparse(f, &step);
    }
    uint32_t present = f->planner->blocks.present;
    assert_true(fake_gpu->registered_bytes > BLOCKS_CHUNK_BYTES);
    assert_true(present * f->planner->blocks.block_bytes > BLOCKS_CHUNK_BYTES);
    for (uint32_t n = 0; n < 4; n++)
        fake_check_host(f, &f->sequences[n], 0, f->sequences[n].next);
    fake_free(f);
    fake_piece_bytes = sizeof(struct fake_piece);
}

/* Far more places than the buffers have: each is used again only after the stream has passed it. */
static void test_pinned_memory_goes_round(void **state)
{
    (void)state;
    enum { WORDS = 1 << 16, ROUNDS = 600 };
    uint64_t bytes = 0;
    void *to = NULL;
    struct err err = {0};
    assert_int_equal(device_gpu_alloc(fake_gpu, WORDS * 4ull * ROUNDS, &bytes, &to, &err), 0);
    uint32_t *out = to;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        void *device;
        uint32_t *host = device_gpu_take(fake_gpu, WORDS * 4ull, &device);
        assert_non_null(host);
        for (uint32_t i = 0; i < WORDS; i++)
            host[i] = round * WORDS + i;
        device_gpu_queued(fake_gpu, fake_gpu->api->copy(out + (size_t)round * WORDS, device, WORDS * 4ull,
                                                        fake_gpu->stream));
    }
    void *device;
    uint64_t *wide = device_gpu_take(fake_gpu, 9ull << 20, &device); /* longer than a buffer */
    assert_non_null(wide);
    memset(wide, 1, 9ull << 20);
    assert_int_equal(device_gpu_wait_all(fake_gpu), 0);
    for (uint32_t i = 0; i < WORDS * ROUNDS; i++)
        if (out[i] != i)
            fail_msg("word %u: found %u", i, out[i]);
    device_gpu_free(fake_gpu, WORDS * 4ull * ROUNDS, &bytes, to);
    assert_int_equal(bytes, 0);
}

/* Many long lists: room for them is made when a decoder attaches, not in the step that has them first. */
static void test_pinned_memory_is_made_beforehand(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct kv_layout layout = fake_layout();
    struct planner *p = NULL;
    struct err err = {0};
    layout.row_heads = layout.selection_heads = 8;
    layout.context_max = 8192;
    options.sequences = 16;
    options.budget = 1024;
    assert_int_equal(planner_create(&p, &options, &layout, NULL, &err), 0);
    assert_int_equal(planner_attach(p, 77, &err), 0);
    assert_true(p->tables.header.list_max >= 1024);
    /* 16 sequences, 8 heads, 2 groups, 256 new positions of 16 bytes each: less than what is there. */
    assert_true(fake_gpu->buffer_bytes == 2u << 20);
    planner_free(&p);
    options.budget = 4096;
    options.sequences = 32;
    assert_int_equal(planner_create(&p, &options, &layout, NULL, &err), 0);
    assert_int_equal(planner_attach(p, 77, &err), 0);
    assert_true(fake_gpu->buffer_bytes == 8u << 20); /* no more than this, however many there may be */
    planner_free(&p);
}

static void test_odd_pieces_are_refused(void **state)
{
    (void)state;
    fake_piece_bytes = 24;
    struct planner_options options = fake_options();
    struct kv_layout layout = fake_layout();
    struct planner *p = NULL;
    struct err err = {0};
    assert_int_equal(planner_create(&p, &options, &layout, NULL, &err), -EINVAL);
    assert_non_null(strstr(err.text, "found pieces of 24 bytes, expected a multiple of 16"));
    fake_piece_bytes = sizeof(struct fake_piece);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_near_steps),
        cmocka_unit_test(test_planner_waits_for_no_stream),
        cmocka_unit_test(test_host_raises_when_idle),
        cmocka_unit_test(test_rows_are_written_behind_the_next_tables),
        cmocka_unit_test(test_resident_runs_do_not_wait),
        cmocka_unit_test(test_runs_wait_where_places_changed_hands),
        cmocka_unit_test(test_decoder_dies_with_work_queued),
        cmocka_unit_test(test_arena_of_chunks),
        cmocka_unit_test(test_pinned_memory_is_made_beforehand),
        cmocka_unit_test(test_pinned_memory_goes_round),
        cmocka_unit_test(test_odd_pieces_are_refused),
    };
    return cmocka_run_group_tests(tests, fake_gpu_setup, fake_gpu_teardown);
}
