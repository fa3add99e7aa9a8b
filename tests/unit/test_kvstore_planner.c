/* The planner's dialogs: opening and refusing, closing and limbo, prefix reuse, sets that must be refused,
 * decoders that die, memory that runs short. */
#include "tests/unit/kvstore_fake_sets.h"

static const struct fake_open SPARSE = {
    .prompt = 200, .capacity = 500, .budget = 96, .sinks = 4, .window = 16};

struct free_counts {
    uint32_t slabs, blocks, cached, live;
};

static struct free_counts free_counts(struct fake *f)
{
    struct planner *p = f->planner;
    struct free_counts c = {.slabs = p->device.free_count,
                            .blocks = p->blocks.free_count + p->prefix.cached + p->blocks.blocks_max -
                                      p->blocks.present,
                            .cached = p->prefix.cached};
    for (uint32_t i = 0; i < p->options.sequences; i++)
        c.live += p->sequences[i].record != NULL;
    return c;
}

/* A sparse decode of some steps, current mode. */
static void decode(struct fake *f, struct fake_sequence *s, uint32_t steps)
{
    for (uint32_t i = 0; i < steps; i++) {
        struct fake_step step = {.selection = SELECTION_CURRENT, .entries = 1, .sequence = {s}};
        fake_sparse(f, &step);
    }
}

static void test_thousand_cycles(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    options.host_bytes = 4u << 20; /* 156 blocks: cached ones are given up all the time */
    struct fake *f = fake_create(&options, 3);
    planner_force(f->planner, 1);
    struct free_counts start = free_counts(f);
    for (uint32_t i = 0; i < 1000; i++) {
        struct fake_open open = {.prompt = 1 + fake_random(f, 200), .capacity = 300, .flags = OPEN_REUSE};
        if (fake_random(f, 2))
            open.budget = 40, open.sinks = 2, open.window = 8;
        open.token_seed = i; /* else another's rows would be found, with its coordinates */
        struct fake_sequence *s = &f->sequences[i % 3];
        if (s->id)
            fake_close(f, s);
        fake_open(f, s, 1000 + i, &open);
        uint32_t chunk = 1 + fake_random(f, s->prompt - s->next);
        struct fake_step step = {.kind = STEP_DENSE, .entries = 1, .sequence = {s}, .count = {chunk}};
        if (fake_random(f, 4))
            fake_dense(f, &step);
        if (s->budget && s->next == s->prompt)
            decode(f, s, fake_random(f, 3));
    }
    for (uint32_t i = 0; i < 3; i++)
        fake_close(f, &f->sequences[i]);
    planner_force(f->planner, 3);
    struct fake_open open = {.prompt = 1, .capacity = 1};
    fake_open(f, &f->sequences[0], 5,
              &open); /* a step takes the version with all layers: staging is given back */
    struct fake_step step = {.kind = STEP_DENSE, .entries = 1, .sequence = {&f->sequences[0]}, .count = {1}};
    while (planner_idle(f->planner, clock_now_ns()))
        continue;
    fake_dense(f, &step);
    fake_close(f, &f->sequences[0]);
    struct free_counts end = free_counts(f);
    assert_int_equal(end.slabs, start.slabs);
    assert_int_equal(end.blocks, start.blocks);
    assert_int_equal(end.live, 0);
    assert_true(f->planner->prefix.evicted > 0);
    for (uint32_t b = 0; b < f->planner->blocks.present; b++)
        assert_int_equal(f->planner->blocks.refs[b], 0);
    fake_free(f);
}

static void expect_refusal(struct fake *f, const struct fake_open *open, int code, const char *text)
{
    struct fake_sequence s;
    struct err err = {0};
    assert_int_equal(fake_try_open(f, &s, 999, open, &err), code);
    if (!strstr(err.text, text))
        fail_msg("found '%s', expected '%s' in it", err.text, text);
}

static void test_refusals_name_numbers(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    options.budget = 128;
    options.slots = 150;
    options.host_bytes = 40 * 26624; /* 40 blocks */
    struct fake *f = fake_create(&options, 4);
    struct fake_open open = SPARSE;
    open.capacity = 2000;
    expect_refusal(f, &open, -E2BIG, "found 2000 positions (prompt 200), expected at most 1024");
    open.capacity = 100;
    expect_refusal(f, &open, -E2BIG, "found 100 positions (prompt 200)");
    open = SPARSE;
    open.budget = 129;
    expect_refusal(f, &open, -E2BIG, "found 129, expected at most 128");
    open.budget = 20;
    expect_refusal(f, &open, -EINVAL, "found 20, expected more than 4 sinks and a window of 16");
    open.budget = 96; /* two lists share a row head: 2 x 75 + 4 + 16 + 2 */
    expect_refusal(f, &open, -E2BIG, "budget 96 needs 172 slots a row head, there are 150");
    open.budget = 64;
    fake_open(f, &f->sequences[0], 1, &open);
    expect_refusal(f, &(struct fake_open){.prompt = 10, .capacity = 1024, .budget = 0}, 0, "");
    assert_int_equal(planner_close(f->planner, 999, 1), 0);
    open.capacity = 1024;
    open.token_seed = 9;
    for (uint32_t i = 1; i < 3; i++)
        fake_open(f, &f->sequences[i], 1 + i, &open);
    expect_refusal(f, &open, -ENOSPC, "needed 16 blocks of 26624 bytes, free 0, of 40 in all");
    struct err err = {0};
    struct fake_sequence again;
    open.capacity = 200;
    assert_int_equal(fake_try_open(f, &again, 1, &open, &err), -EEXIST);
    fake_free(f);
}

static void test_device_refusal_and_no_offload(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    options.device_bytes = 35u << 18; /* 35 slabs; staging takes 10 */
    struct fake *f = fake_create(&options, 5);
    struct fake_open open = SPARSE; /* 13 slabs of slots each */
    fake_open(f, &f->sequences[0], 1, &open);
    expect_refusal(f, &open, -ENOSPC, "needed 13 slabs of 262144 bytes, free 12, of 35 in all");
    fake_close(f, &f->sequences[0]);
    fake_open(f, &f->sequences[0], 2, &open); /* what was refused was not kept */
    fake_free(f);

    options.no_offload = true;
    f = fake_create(&options, 5);
    assert_int_equal(f->h->staging_tokens, 0);
    open.capacity = 1024; /* 16 pages of 128 in a slab: all sequences share 13 slabs */
    for (uint32_t i = 0; i < FAKE_SEQUENCES; i++)
        fake_open(f, &f->sequences[i], 10 + i, &open);
    fake_free(f);
}

/* Memory decides: layers leave one run after another as sequences come, and come back as they go. */
static void test_offload_by_memory(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    options.device_bytes = 150u << 18; /* two sequences fit whole, three with one run offloaded */
    options.no_prefix = true;
    fake_piece_bytes = 512;
    struct fake *f = fake_create(&options, 6);
    uint32_t resident[3];
    for (uint32_t n = 0; n < 3; n++) {
        struct fake_open open = {
            .prompt = 600, .capacity = 1000, .budget = 96, .sinks = 4, .window = 16, .token_seed = n};
        fake_open(f, &f->sequences[n], 1 + n, &open);
        fake_prefill(f, &f->sequences[n]);
        decode(f, &f->sequences[n], 30);
        resident[n] = f->planner->residency.resident;
    }
    assert_int_equal(resident[0], 3);
    assert_int_equal(resident[1], 3);
    assert_int_equal(resident[2], 2);
    for (uint32_t i = 0; i < 40; i++) {
        struct fake_step step = {.selection = SELECTION_CURRENT,
                                 .entries = 3,
                                 .sequence = {&f->sequences[0], &f->sequences[1], &f->sequences[2]}};
        fake_sparse(f, &step);
    }
    fake_close(f, &f->sequences[1]);
    fake_close(f, &f->sequences[2]);
    while (planner_idle(f->planner, clock_now_ns()))
        continue;
    decode(f, &f->sequences[0], 5);
    assert_int_equal(f->planner->residency.resident, 3);
    assert_true(f->planner->totals.returns > 0 && f->planner->totals.offloads > 0);
    fake_check_host(f, &f->sequences[0], 0, f->sequences[0].next);
    fake_free(f);
    fake_piece_bytes = sizeof(struct fake_piece);
}

/* One sequence of a tight load comes or goes. */
static void tight_change(struct fake *f, uint32_t id)
{
    struct fake_sequence *s = &f->sequences[fake_random(f, 4)], fresh;
    struct fake_open open = {
        .prompt = 1 + fake_random(f, 250), .capacity = 300 + fake_random(f, 600), .token_seed = id};
    if (fake_random(f, 4))
        open.budget = 96, open.sinks = 4, open.window = 16;
    struct err err = {0};
    if (s->id) {
        fake_close(f, s);
    } else if (fake_try_open(f, &fresh, id, &open, &err) == 0) {
        *s = fresh;
        fake_prefill(f, s);
    }
}

/* Pages come back, one piece after the other. At any time they, and the slots that are held until their
 * layers are resident, have room together; and none is kept that shall not come back any more. */
static void tight_idle(struct fake *f)
{
    struct planner *p = f->planner;
    const struct residency *r = &p->residency;
    for (uint32_t n = fake_random(f, 3) ? fake_random(f, 4) : 40; n > 0 && planner_idle(p, clock_now_ns());
         n--)
        continue;
    uint32_t top = r->runs_of[r->proposed % 64] > r->returning ? r->runs_of[r->proposed % 64] : r->returning;
    top = top > r->resident ? top : r->resident;
    uint32_t layers = layout_run_first(&f->layout, top) - layout_run_first(&f->layout, r->resident);
    uint64_t slabs = residency_slabs(p, top, NULL, false);
    for (uint32_t n = 0; n < 4; n++) {
        const struct sequence *s = &p->sequences[f->sequences[n].index];
        if (!f->sequences[n].id)
            continue;
        slabs += (uint64_t)s->slot_slabs * layers;
        for (uint32_t run = top; run < r->runs; run++)
            assert_int_equal(s->pages_have[run], 0);
    }
    assert_true(layers == 0 || slabs <= p->device.slabs);
}

/* All that are there decode, now and then a step late with what was proposed. */
static void tight_decode(struct fake *f)
{
    struct fake_step step = {.selection = SELECTION_CURRENT};
    for (uint32_t n = 0; n < 4; n++)
        if (f->sequences[n].budget && f->sequences[n].id)
            step.sequence[step.entries++] = &f->sequences[n];
    f->deaf = fake_random(f, 2);
    if (step.entries)
        fake_sparse(f, &step);
    f->deaf = false;
    for (uint32_t n = 0; n < 4; n++)
        if (f->sequences[n].id)
            assert_false(f->planner->sequences[f->sequences[n].index].failed);
}

/* Who was granted has room to its end, also where slots take more than the pages that they follow, and
 * while layers come back. */
static void test_granted_have_room(void **state)
{
    (void)state;
    fake_piece_bytes = 512;
    for (uint32_t slabs = 50; slabs < 170; slabs += 120 / fake_often(40, 8)) {
        struct planner_options options = fake_options();
        options.device_bytes = (uint64_t)slabs << 18;
        options.no_prefix = true;
        struct fake *f = fake_create(&options, slabs);
        for (uint32_t id = 1; id < 150; id++) {
            tight_change(f, id);
            tight_idle(f);
            for (uint32_t n = fake_random(f, 3); n > 0; n--)
                tight_decode(f);
            tight_idle(f);
        }
        fake_free(f);
    }
    fake_piece_bytes = sizeof(struct fake_piece);
}

/* A decoder that never takes the proposal: when pages run out, a sequence ends, and nobody's rows are
 * harmed. */
static void test_last_resort(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    options.device_bytes = 112u << 18;
    fake_piece_bytes = 512;
    struct fake *f = fake_create(&options, 7);
    f->deaf = true;
    uint32_t failed = 0;
    for (uint32_t n = 0; n < 3; n++) {
        struct fake_open open = {.prompt = 300, .capacity = 1000, .token_seed = n};
        fake_open(f, &f->sequences[n], 1 + n, &open);
        fake_prefill(f, &f->sequences[n]);
    }
    for (uint32_t i = 0, end = 600; i < end; i++) {
        struct fake_step step = {.kind = STEP_DENSE};
        for (uint32_t n = 0; n < 3; n++)
            if (f->sequences[n].id) {
                step.sequence[step.entries] = &f->sequences[n];
                step.count[step.entries++] = 1;
            }
        fake_dense(f, &step);
        for (uint32_t n = 0; n < 3; n++)
            if (f->sequences[n].id && f->planner->sequences[f->sequences[n].index].failed) {
                fake_close(f, &f->sequences[n]);
                failed++;
                end = i + 40; /* some more of the others */
            }
    }
    assert_true(failed > 0 && failed < 3);
    assert_int_equal(f->planner->residency.version, 0);
    assert_true(f->planner->residency.proposed > 0);
    for (uint32_t n = 0; n < 3; n++)
        if (f->sequences[n].id)
            fake_check_host(f, &f->sequences[n], 0, f->sequences[n].next);
    fake_free(f);
    fake_piece_bytes = sizeof(struct fake_piece);
}

static uint32_t grant_cached(struct fake *f, struct fake_sequence *s, uint64_t id,
                             const struct fake_open *open)
{
    fake_open(f, s, id, open);
    uint32_t cached = s->next;
    fake_close(f, s);
    return cached;
}

static void test_prefix_reuse(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 7);
    struct fake_sequence *a = &f->sequences[0], *b = &f->sequences[1];
    struct fake_open open = SPARSE; /* 200 = 3 blocks and 8 */
    open.flags = OPEN_REUSE;
    open.token_seed = 1;
    fake_open(f, a, 1, &open);
    assert_int_equal(a->next, 0);
    fake_prefill(f, a);
    fake_open(f, b, 2, &open); /* from blocks of a living sequence */
    assert_int_equal(b->next, 192);
    uint32_t shared = f->planner->sequences[b->index].record->block[0];
    assert_int_equal(f->planner->blocks.refs[shared], 2);
    fake_close(f, a);
    assert_int_equal(f->planner->blocks.refs[shared], 1);
    fake_close(f, b);
    assert_int_equal(f->planner->blocks.refs[shared], 0);
    assert_int_equal(f->planner->prefix.cached, 3);

    struct fake_open other = open;
    other.salt = 5; /* another tenant */
    assert_int_equal(grant_cached(f, a, 3, &other), 0);
    other = open;
    other.flags = 0;
    assert_int_equal(grant_cached(f, a, 4, &other), 0);
    other = open;
    other.reuse_max = 128; /* a retriever has keys of no more */
    assert_int_equal(grant_cached(f, a, 10, &other), 128);
    other.reuse_max = 64;
    assert_int_equal(grant_cached(f, a, 11, &other), 64);
    other.reuse_max = 1024;
    assert_int_equal(grant_cached(f, a, 12, &other), 192);
    other = open;
    other.budget = 0; /* made by full attention: serves a dense request as well */
    assert_int_equal(grant_cached(f, a, 5, &other), 192);
    other = open;
    other.prompt = 192; /* one token at least is left to compute */
    assert_int_equal(grant_cached(f, a, 6, &other), 128);
    other.prompt = 64;
    assert_int_equal(grant_cached(f, a, 7, &other), 0);
    other.prompt = 65;
    assert_int_equal(grant_cached(f, a, 8, &other), 64);
    other.token_seed = 2;
    assert_int_equal(grant_cached(f, a, 9, &other), 0);
    fake_free(f);
}

static void test_prefix_of_sparse_blocks(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 8);
    struct fake_sequence *a = &f->sequences[0];
    struct fake_open open = SPARSE;
    open.flags = OPEN_REUSE;
    fake_open(f, a, 1, &open);
    fake_prefill(f, a);
    decode(f, a, 130); /* blocks 3 and 4 hold sparse-made rows: 192..319 */
    uint32_t tokens[FAKE_CONTEXT];
    memcpy(tokens, a->tokens, sizeof tokens);
    fake_close(f, a);
    assert_int_equal(f->planner->prefix.cached, 5);
    struct msg_open again = {.sequence = 2,
                             .flags = OPEN_REUSE,
                             .made = {.kind = ARENA_MADE_SPARSE, .budget = 96},
                             .capacity = 500,
                             .budget = 96,
                             .sinks = 4,
                             .window = 16,
                             .tokens = {.at = tokens, .count = 330}};
    struct msg_grant grant;
    struct err err = {0};
    assert_int_equal(planner_open(f->planner, &again, &grant, &err), 0);
    assert_int_equal(grant.cached, 192); /* the switch is off */
    planner_close(f->planner, 2, 1);
    again.flags |= OPEN_REUSE_SPARSE;
    assert_int_equal(planner_open(f->planner, &again, &grant, &err), 0);
    assert_int_equal(grant.cached, 320);
    planner_close(f->planner, 2, 1);
    again.made.budget = again.budget = 64;
    assert_int_equal(planner_open(f->planner, &again, &grant, &err), 0);
    assert_int_equal(grant.cached, 192); /* made with another budget */
    planner_close(f->planner, 2, 1);
    struct msg_prefix query = {.made = {.kind = ARENA_MADE_SPARSE, .budget = 96},
                               .tokens = {.at = tokens, .count = 330}};
    assert_int_equal(planner_prefix(f->planner, &query), 320);
    query.made.head = 1;
    assert_int_equal(planner_prefix(f->planner, &query), 192);
    fake_free(f);
}

/* A prefix that another sequence made, read back through pages, staging and slots: rows carry the maker's
 * id. */
static void test_reused_rows_are_the_makers(void **state)
{
    (void)state;
    for (int32_t runs = 0; runs <= 3; runs++) {
        struct planner_options options = fake_options();
        struct fake *f = fake_create(&options, 9);
        planner_force(f->planner, runs);
        struct fake_sequence *s = &f->sequences[0];
        struct fake_open open = SPARSE;
        open.flags = OPEN_REUSE;
        fake_open(f, s, 1, &open);
        fake_prefill(f, s);
        fake_close(f, s);
        open.prompt = 201;
        fake_open(f, s, 1, &open); /* the same id: its coordinates fit again */
        assert_int_equal(s->next, 192);
        fake_prefill(f, s);
        decode(f, s, 60);
        fake_check_host(f, s, 0, s->next);
        fake_free(f);
    }
}

enum { SET_FAULTS = 11 };

/* One thing that is wrong with a set of one entry. */
static void spoil(const struct fake_sequence *s, struct fake_topk *t, uint32_t fault)
{
    struct msg_topk_entry *e = &t->entries[0];
    uint32_t *p = t->positions;
    switch (fault) {
    case 0:
        p[0] = 3;
        break; /* a sink */
    case 1:
        p[t->counts[0] - 1] = s->set.limit;
        break; /* in the window */
    case 2:
        p[1] = p[0];
        break; /* twice */
    case 3:
        p[0] = p[1] + 1;
        break; /* out of order */
    case 4:
        p[t->counts[0] - 1] = UINT32_MAX;
        break;
    case 5:
        e->base_step -= 1;
        break; /* a base that is not held */
    case 6:
        e->sequence = 77;
        break; /* another's index */
    case 7:
        e->index = 63;
        break;
    case 8:
        e->limit += 1;
        break;
    case 9: { /* removes what the base has not: the position added first stands in for a removed one */
        uint32_t first = t->counts[0];
        if (t->counts[1] == 0)
            p[0] = 3;
        else
            for (p[first] = 4; fake_holds(s->before.at[0], s->before.count[0], p[first]); p[first]++)
                continue;
        break;
    }
    case 10:
        p[0] = s->before.at[0][0]; /* adds what the base has */
        if (t->counts[0] > 1 && p[0] >= p[1])
            p[0] = 3;
        break;
    }
}

static void test_sets_that_are_refused(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 10);
    planner_force(f->planner, 0);
    struct fake_sequence *s = &f->sequences[0];
    fake_open(f, s, 1, &SPARSE);
    fake_prefill(f, s);
    decode(f, s, 3);
    for (uint32_t fault = 0; fault < SET_FAULTS; fault++) {
        struct fake_topk *t = mem_alloc(1, sizeof *t);
        uint32_t reselects = f->reselects;
        struct fake_set set = s->set, before = s->before;
        fake_choose(f, s, f->step, s->next);
        fake_topk_add(f, t, s, fault < 5);
        assert_true(t->counts[0] > 2);
        spoil(s, t, fault);
        fake_topk_send(f, t, f->step);
        if (f->reselects != reselects + 1)
            fail_msg("fault %u was not refused", fault);
        assert_int_equal(f->reselected, fault == 6 ? 77 : 1);
        assert_true(f->planner->sequences[s->index].elastic.next == ELASTIC_NONE);
        assert_true(elastic_consistent(&f->planner->sequences[s->index].elastic));
        s->set = set;
        s->before = before;
        mem_free(&t);
    }
    s->has = false; /* answered by a whole set */
    decode(f, s, 3);
    fake_free(f);
}

static void test_close_in_flight_waits(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 11);
    planner_force(f->planner, 1);
    struct fake_sequence *a = &f->sequences[0], *b = &f->sequences[1];
    fake_open(f, a, 1, &SPARSE);
    fake_open(f, b, 2, &SPARSE);
    fake_prefill(f, a);
    fake_prefill(f, b);
    struct fake_step step = {.kind = STEP_SPARSE,
                             .selection = SELECTION_CURRENT,
                             .entries = 2,
                             .sequence = {a, b},
                             .count = {1, 1}};
    fake_post(f, &step);
    assert_false(fake_up(f, FLAG_TABLES_LATE));
    assert_int_equal(planner_close(f->planner, a->id, 9), 0); /* while its set is waited for */
    assert_int_equal(f->closed, 0);
    assert_int_equal(f->planner->sequences[a->index].record->state, ARENA_SEQUENCE_LIMBO);
    struct fake_step only_b = {.entries = 1, .sequence = {b}};
    fake_select(f, &only_b, 0);
    assert_true(fake_up(f, FLAG_TABLES_LATE)); /* nobody waits for a's any more */
    assert_int_equal(fake_status(f, a), -ECANCELED);
    assert_int_equal(fake_status(f, b), 0);
    for (uint32_t l = 0; l < f->layout.layers; l++)
        fake_write_token(f, b, l);
    assert_int_equal(planner_close(f->planner, b->id, 10), 0); /* while the decoder computes */
    fake_raise(f, FLAG_KV_WRITTEN);
    assert_int_equal(f->closed, 0);
    fake_raise(f, FLAG_STEP_CONSUMED);
    assert_int_equal(f->closed, 2);
    assert_int_equal(free_counts(f).live, 0);
    fake_free(f);
}

static void test_decoder_dies_and_resumes(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 12);
    planner_force(f->planner, 1);
    struct fake_sequence *a = &f->sequences[0], *b = &f->sequences[1];
    struct fake_open open = SPARSE;
    fake_open(f, a, 1, &open);
    open.token_seed = 4;
    fake_open(f, b, 2, &open);
    fake_prefill(f, a);
    fake_prefill(f, b);
    decode(f, a, 20);
    struct fake_step step = {
        .kind = STEP_SPARSE, .selection = SELECTION_CURRENT, .entries = 1, .sequence = {a}, .count = {1}};
    fake_post(f, &step); /* dies within a step: its id is recorded, its row is void */
    planner_detach(f->planner, 1000);
    assert_int_equal(f->planner->device.free_count, f->planner->device.slabs);
    fake_attach(f);
    struct msg_resumed resumed;
    struct err err = {0};
    assert_int_equal(planner_resume(f->planner, 1, &resumed, &err), 0);
    assert_int_equal(resumed.committed, 220);
    assert_int_equal(resumed.tokens.count, 221);
    assert_memory_equal(resumed.tokens.at, a->tokens, 221 * 4);
    assert_int_equal(resumed.index, a->index);
    uint32_t *ids = (uint32_t *)(uintptr_t)resumed.tokens.at;
    mem_free(&ids);
    a->has = false;
    planner_force(f->planner, 2);
    decode(f, a, 30);
    fake_check_host(f, a, 0, a->next);
    assert_int_equal(planner_resume(f->planner, 3, &resumed, &err), -ENOENT);
    planner_idle(f->planner, 1000 + PLANNER_ORPHAN_NS - 1);
    assert_non_null(f->planner->sequences[b->index].record);
    planner_idle(f->planner, 1000 + PLANNER_ORPHAN_NS);
    assert_null(f->planner->sequences[b->index].record);
    fake_free(f);
}

static void test_bad_records(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 13);
    struct fake_sequence *s = &f->sequences[0];
    fake_open(f, s, 1, &SPARSE);
    for (uint32_t fault = 0; fault < 6; fault++) {
        struct step_record *r = control_step_at(f->h, f->step);
        memset(r, 0, sizeof *r);
        *r = (struct step_record){.step = f->step,
                                  .kind = STEP_DENSE,
                                  .entries = 1,
                                  .tokens = 5,
                                  .entry = {{.id = 1, .sequence = s->index, .count = 5}}};
        switch (fault) {
        case 0:
            r->entry[0].position = 1;
            break;
        case 1:
            r->entry[0].count = 6;
            break;
        case 2:
            r->entry[0].token_at = UINT32_MAX;
            break;
        case 3:
            r->entry[0].id = 2;
            break;
        case 4:
            r->entry[0].count = 0;
            break;
        case 5:
            r->entry[0].count = UINT32_MAX;
            break;
        }
        fake_raise(f, FLAG_STEP_POSTED);
        assert_true(fake_up(f, FLAG_TABLES_LATE));
        assert_int_equal(fake_status(f, s), -EINVAL);
        for (uint32_t run = 0; run < f->h->runs; run++)
            fake_raise(f, FLAG_RUN_CONSUMED + run);
        fake_raise(f, FLAG_KV_WRITTEN);
        fake_raise(f, FLAG_STEP_CONSUMED);
        f->step++;
    }
    struct step_record *r = control_step_at(f->h, f->step);
    *r = (struct step_record){.step = f->step, .kind = 9};
    fake_raise(f, FLAG_STEP_POSTED);
    assert_int_equal(f->broken, 1);
    assert_true(flag_aborted(control_flag_at(f->h, FLAG_TABLES_LATE), f->step));
    fake_free(f);
}

/* Ids alone are recorded; a prompt's last partial block and replies are found by RESUME. */
static void test_record_steps(void **state)
{
    (void)state;
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 14);
    struct fake_sequence *s = &f->sequences[0];
    fake_open(f, s, 1, &SPARSE);
    fake_prefill(f, s);
    decode(f, s, 2);
    struct fake_step step = {.kind = STEP_RECORD, .entries = 1, .sequence = {s}, .count = {3}};
    fake_post(f, &step);
    f->step++;
    struct msg_resumed resumed;
    struct err err = {0};
    assert_int_equal(planner_resume(f->planner, 1, &resumed, &err), 0);
    assert_int_equal(resumed.committed, 202);
    assert_int_equal(resumed.tokens.count, 205);
    assert_memory_equal(resumed.tokens.at, s->tokens, 205 * 4);
    uint32_t *ids = (uint32_t *)(uintptr_t)resumed.tokens.at;
    mem_free(&ids);
    fake_free(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_thousand_cycles),
        cmocka_unit_test(test_refusals_name_numbers),
        cmocka_unit_test(test_device_refusal_and_no_offload),
        cmocka_unit_test(test_offload_by_memory),
        cmocka_unit_test(test_granted_have_room),
        cmocka_unit_test(test_last_resort),
        cmocka_unit_test(test_prefix_reuse),
        cmocka_unit_test(test_prefix_of_sparse_blocks),
        cmocka_unit_test(test_reused_rows_are_the_makers),
        cmocka_unit_test(test_sets_that_are_refused),
        cmocka_unit_test(test_close_in_flight_waits),
        cmocka_unit_test(test_decoder_dies_and_resumes),
        cmocka_unit_test(test_bad_records),
        cmocka_unit_test(test_record_steps),
    };
    return fake_run_both(tests);
}
