/* An arena outlives its store: everything but the arena is dropped, another planner takes it over. And
 * arenas that somebody damaged. */
#include "tests/unit/kvstore_fake_sets.h"

#include <fcntl.h>
#include <unistd.h>

#include "kvstore/adopt.h"

static const struct fake_open SPARSE = {
    .prompt = 200, .capacity = 500, .budget = 96, .sinks = 4, .window = 16, .flags = OPEN_REUSE};

/* A store with two live sequences, one with a shared prefix, and cached blocks of a third. */
static struct fake *busy_store(void)
{
    struct planner_options options = fake_options();
    struct fake *f = fake_create(&options, 21);
    planner_force(f->planner, 1);
    struct fake_open open = SPARSE;
    for (uint32_t i = 0; i < 3; i++) {
        open.token_seed = i;
        fake_open(f, &f->sequences[i], 1 + i, &open);
        fake_prefill(f, &f->sequences[i]);
        for (uint32_t k = 0; k < 70; k++) {
            struct fake_step step = {
                .selection = SELECTION_CURRENT, .entries = 1, .sequence = {&f->sequences[i]}};
            fake_sparse(f, &step);
        }
    }
    fake_close(f, &f->sequences[2]);
    return f;
}

/* The planner dies; a descriptor of the arena is all that stays. */
static int die(struct fake *f)
{
    int fd = fcntl(f->planner->blocks.segment.fd, F_DUPFD_CLOEXEC, 0);
    assert_true(fd >= 0);
    planner_free(&f->planner);
    return fd;
}

static void adopt(struct fake *f, int fd)
{
    struct planner_options options = fake_options();
    struct planner_events events = fake_events(f);
    struct err err = {0};
    assert_int_equal(planner_create_adopting(&f->planner, &options, &f->layout, &events, fd, &err), 0);
    fake_attach(f);
}

static void test_take_over(void **state)
{
    (void)state;
    struct fake *f = busy_store();
    struct planner *p = f->planner;
    uint32_t present = p->blocks.present, free = p->blocks.free_count, cached = p->prefix.cached;
    uint32_t indexed = p->prefix.indexed, *refs = mem_alloc(present, sizeof *refs);
    memcpy(refs, p->blocks.refs, present * sizeof *refs);
    adopt(f, die(f));
    p = f->planner;
    assert_int_equal(p->blocks.present, present);
    assert_int_equal(p->blocks.free_count, free);
    assert_int_equal(p->prefix.cached, cached);
    assert_int_equal(p->prefix.indexed, indexed);
    assert_memory_equal(p->blocks.refs, refs, present * sizeof *refs);
    mem_free(&refs);
    for (uint32_t i = 0; i < 2; i++) {
        struct fake_sequence *s = &f->sequences[i];
        struct msg_resumed resumed;
        struct err err = {0};
        assert_int_equal(planner_resume(p, s->id, &resumed, &err), 0);
        assert_int_equal(resumed.committed, 270);
        assert_int_equal(resumed.prompt_tokens, 200);
        assert_int_equal(resumed.capacity, 500);
        assert_int_equal(resumed.made.budget, 96);
        assert_memory_equal(resumed.tokens.at, s->tokens, 270 * 4);
        uint32_t *ids = (uint32_t *)(uintptr_t)resumed.tokens.at;
        mem_free(&ids);
        s->has = false;
        planner_force(p, (int32_t)i * 2);
        for (uint32_t k = 0; k < 30; k++) { /* rows from before are read again, from the host alone */
            struct fake_step step = {.selection = SELECTION_CURRENT, .entries = 1, .sequence = {s}};
            fake_sparse(f, &step);
        }
        fake_check_host(f, s, 0, s->next);
        fake_close(f, s);
    }
    struct fake_open open = SPARSE;
    open.token_seed = 2;
    fake_open(f, &f->sequences[2], 9, &open); /* the closed one's prompt is still cached */
    assert_int_equal(f->sequences[2].next, 192);
    fake_free(f);
}

static void test_other_layout_is_refused(void **state)
{
    (void)state;
    struct fake *f = busy_store();
    int fd = die(f);
    struct kv_layout other = f->layout;
    other.dtype = 2;
    struct planner_options options = fake_options();
    struct err err = {0};
    assert_int_equal(planner_create_adopting(&f->planner, &options, &other, NULL, fd, &err), -EINVAL);
    assert_non_null(strstr(err.text, "fingerprint"));
    int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    assert_int_equal(planner_create_adopting(&f->planner, &options, &other, NULL, file, &err), -EPERM);
    close(file);
    close(fd);
    fake_free(f);
}

struct damage {
    const char *name;
    void (*make)(struct planner *p);
    uint32_t sequences; /* that are still taken over */
};

static struct arena_sequence *record(struct planner *p, uint32_t i)
{
    return arena_sequence_at(p->blocks.header, i);
}

static void block_out_of_range(struct planner *p)
{
    record(p, 0)->block[2] = p->blocks.present;
}

static void block_twice(struct planner *p)
{
    record(p, 0)->block[4] = record(p, 0)->block[1];
}

static void block_free(struct planner *p)
{
    record(p, 0)->block[4] = p->blocks.free[0];
}

static void block_of_other(struct planner *p)
{
    record(p, 1)->block[4] = record(p, 0)->block[4];
}

static void committed_too_far(struct planner *p)
{
    record(p, 0)->committed = record(p, 0)->tokens + 1;
}

static void tokens_too_many(struct planner *p)
{
    record(p, 0)->tokens = UINT32_MAX;
}

static void capacity_too_large(struct planner *p)
{
    record(p, 0)->capacity = UINT32_MAX;
}

static void blocks_too_many(struct planner *p)
{
    record(p, 0)->blocks = UINT32_MAX;
}

static void id_changed(struct planner *p)
{
    arena_block_at(p->blocks.header, record(p, 0)->block[1])->tokens[7] ^= 1;
}

static void limbo(struct planner *p)
{
    record(p, 0)->state = ARENA_SEQUENCE_LIMBO;
}

static void seal_missing(struct planner *p) /* died between commit and seal */
{
    arena_block_at(p->blocks.header, record(p, 0)->block[3])->state = ARENA_BLOCK_FILLING;
}

static void test_damaged_records(void **state)
{
    (void)state;
    static const struct damage DAMAGES[] = {
        {"block out of range", block_out_of_range, 1},
        {"block twice", block_twice, 1},
        {"free block", block_free, 1},
        {"another's open block", block_of_other, 1},
        {"committed too far", committed_too_far, 1},
        {"too many tokens", tokens_too_many, 1},
        {"capacity too large", capacity_too_large, 1},
        {"too many blocks", blocks_too_many, 1},
        {"an id changed", id_changed, 1},
        {"in limbo", limbo, 1},
        {"not sealed yet", seal_missing, 2},
    };
    for (size_t i = 0; i < sizeof DAMAGES / sizeof *DAMAGES; i++) {
        struct fake *f = busy_store();
        DAMAGES[i].make(f->planner);
        adopt(f, die(f));
        uint32_t live = 0, used = 0;
        struct planner *p = f->planner;
        for (uint32_t k = 0; k < p->options.sequences; k++)
            if (p->sequences[k].record) {
                live++;
                used += p->sequences[k].blocks;
            }
        if (live != DAMAGES[i].sequences)
            fail_msg("%s: %u sequences, expected %u", DAMAGES[i].name, live, DAMAGES[i].sequences);
        assert_int_equal(p->blocks.present - p->blocks.free_count - p->prefix.cached, used);
        fake_free(f);
    }
}

static void test_damaged_header(void **state)
{
    (void)state;
    for (uint32_t at = 0; at < sizeof(struct arena_header) - 8; at += 4) {
        struct planner_options options = fake_options();
        struct fake *f = fake_create(&options, 1);
        uint8_t *byte = (uint8_t *)f->planner->blocks.header + at;
        uint32_t pad1 = offsetof(struct arena_header, blocks_present) + 4;
        *byte ^= 0x80;
        int fd = die(f);
        struct err err = {0};
        int r = planner_create_adopting(&f->planner, &options, &f->layout, NULL, fd, &err);
        if (at != pad1 && r >= 0)
            fail_msg("byte %u: taken over", at);
        if (r < 0)
            close(fd);
        fake_free(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_take_over),
        cmocka_unit_test(test_other_layout_is_refused),
    };
    /* Damage lies in the arena: what the device is made of says nothing about it. */
    const struct CMUnitTest damages[] = {
        cmocka_unit_test(test_damaged_records),
        cmocka_unit_test(test_damaged_header),
    };
    return fake_run_both(tests) + cmocka_run_group_tests(damages, NULL, NULL);
}
