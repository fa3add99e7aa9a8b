/* The retriever on a GPU (the double) against the retriever on the CPU: the same sets, differences and
 * masses, for inputs that bf16 holds exactly; bounds of memory; refusals. */
#define RIG_DIM 64
#include "tests/unit/retriever_rig.h"

#include <errno.h>
#include <unistd.h>

#include "proto/memory_gpu.h"
#include "retriever/card.h"
#include "tests/lib/fakegpu.h"

enum { SEQUENCES = 5, POSITIONS = 1400 };

static enum compute_keys keys; /* of all tests: they run once with each kind */

/* Embeddings of +-1, a power of two for each row: under a norm of ones all are +-1, and sums of them by
 * taps of three bits are exact. */
static float plus_minus(const struct tiny_model *m, const char *name, uint32_t row, uint32_t col)
{
    uint32_t state = row * 7919u + col * 104729u + 1;
    (void)m;
    if (strcmp(name, "token_embd.weight") != 0)
        return 1;
    tiny_random(&state);
    return (tiny_random(&state) >> 12 & 1 ? 1.0f : -1.0f) * exp2f((float)(row % 7) - 4);
}

static float short_numbers(uint32_t group, char which, uint32_t row, uint32_t col)
{
    uint32_t state = (group * 2 + (which == 'k')) * 15485863u + row * 32452843u + col * 49979687u;
    tiny_random(&state);
    tiny_random(&state);
    return (float)((int)(tiny_random(&state) >> 8 & 127) - 64) / 256;
}

static const struct rig_options exact = {.groups = 2,
                                         .trained_context = 1 << 14,
                                         .rope_dims = 48,
                                         .rms_eps = 1e-30f,
                                         .weight = plus_minus,
                                         .projection = short_numbers};

/* Views of the tokens before; the second reaches as far as a head can. */
static const struct {
    uint32_t views, taps;
} contexts[] = {{3, 5}, {2, 64}};
enum { CONTEXTS = sizeof contexts / sizeof *contexts };

static struct rig_options with_context(int which)
{
    struct rig_options o = exact;
    o.views = contexts[which].views;
    o.taps = contexts[which].taps;
    return o;
}

static void same_result(const struct selector_result *cpu, const struct selector_result *gpu)
{
    assert_int_equal(gpu->entry_count, cpu->entry_count);
    assert_int_equal(gpu->refusal_count, cpu->refusal_count);
    for (uint32_t i = 0; i < cpu->refusal_count; i++)
        assert_string_equal(gpu->refusals[i].text, cpu->refusals[i].text);
    if (!cpu->entry_count)
        return;
    uint32_t lists = cpu->groups * cpu->heads;
    assert_memory_equal(gpu->counts, cpu->counts, (size_t)cpu->entry_count * lists * 2 * sizeof *cpu->counts);
    assert_memory_equal(gpu->positions, cpu->positions,
                        cpu->first[cpu->entry_count] * sizeof *cpu->positions);
    for (uint32_t i = 0; i < cpu->entry_count; i++) {
        const struct msg_topk_entry *a = &cpu->entries[i], *b = &gpu->entries[i];
        assert_int_equal(b->sequence, a->sequence);
        assert_int_equal(b->base_step, a->base_step);
        assert_int_equal(b->limit, a->limit);
        assert_int_equal(b->position, a->position);
        assert_int_equal(b->flags, a->flags);
        if (!(fabsf(a->mass - b->mass) < 1e-4f && fabsf(a->mass_base - b->mass_base) < 1e-4f))
            fail_msg("mass: found %g, expected %g", (double)b->mass, (double)a->mass);
    }
}

/* Both forms, the same calls. */
struct pair {
    struct rig *rig;
    struct selector *cpu, *gpu;
    struct selector_result cpu_result, gpu_result;
    uint32_t tokens[SEQUENCES][POSITIONS];
};

static struct pair *pair_make(const struct rig_options *o, enum head_pool pool, uint64_t work_bytes)
{
    struct pair *p = mem_alloc(1, sizeof *p);
    p->rig = rig_make(o);
    p->cpu = rig_selector(p->rig, (struct rig_selector){.pool = pool, .context = 4096, .keys = keys});
    p->gpu = rig_selector(
        p->rig,
        (struct rig_selector){
            .pool = pool, .context = 4096, .device = "cuda:0", .work_bytes = work_bytes, .keys = keys});
    for (uint32_t s = 0; s < SEQUENCES; s++)
        rig_tokens(p->tokens[s], POSITIONS, RIG_VOCAB, 3 + s);
    return p;
}

static void pair_free(struct pair **pair)
{
    struct pair *p = *pair;
    selector_result_free(&p->cpu_result);
    selector_result_free(&p->gpu_result);
    selector_free(&p->cpu);
    selector_free(&p->gpu);
    rig_free(&p->rig);
    mem_free(pair);
}

static void pair_open(struct pair *p, uint64_t id, uint32_t budget, uint32_t sinks, uint32_t window)
{
    rig_open(p->cpu, id, POSITIONS, budget, sinks, window);
    rig_open(p->gpu, id, POSITIONS, budget, sinks, window);
}

static void pair_step(struct pair *p, uint32_t step, const struct msg_step *msg)
{
    selector_step(p->cpu, step, msg, &p->cpu_result);
    selector_step(p->gpu, step, msg, &p->gpu_result);
    same_result(&p->cpu_result, &p->gpu_result);
}

static void check_lengths(const struct rig_options *o, enum head_pool pool)
{
    static const struct {
        uint32_t budget, sinks, window;
    } shapes[] = {{64, 4, 16}, {200, 0, 0}, {33, 16, 16}, {8, 3, 1}, {2000, 4, 16}};
    static const uint32_t lengths[] = {1, 2, 5, 20, 21, 22, 255, 256, 257, 511, 513, 1100};
    struct pair *p = pair_make(o, pool, 0);
    for (unsigned i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (unsigned j = 0; j < sizeof lengths / sizeof *lengths; j++) {
            struct msg_step_entry entry = {1, 9, 0, lengths[j], STEP_ENTRY_SELECT};
            pair_open(p, 1, shapes[i].budget, shapes[i].sinks, shapes[i].window);
            pair_step(p, 1, &(struct msg_step){&entry, 1, {p->tokens[0], lengths[j]}, {0}, 0});
            assert_int_equal(p->gpu_result.entry_count, 1);
            assert_int_equal(selector_close(p->cpu, 1), 0);
            assert_int_equal(selector_close(p->gpu, 1), 0);
        }
    pair_free(&p);
}

static void one_sequence_of_every_length(void **state)
{
    (void)state;
    for (int pool = HEAD_POOL_MAX; pool <= HEAD_POOL_MEAN; pool++) {
        struct rig_options o = exact;
        o.halves = pool == HEAD_POOL_MEAN;
        check_lengths(&o, (enum head_pool)pool);
    }
    for (int i = 0; i < CONTEXTS; i++) {
        struct rig_options o = with_context(i);
        check_lengths(&o, HEAD_POOL_MEAN);
    }
}

/* A step of some of the sequences: prompts, single tokens, with and without a selection; one entry is wrong
 * now and then. */
static uint32_t random_step(struct pair *p, uint32_t *done, uint32_t *random, struct msg_step_entry *entries,
                            uint32_t *tokens, struct msg_step *msg)
{
    uint32_t count = 0, n = 0;
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        uint32_t dice = tiny_random(random) % 16, take = dice < 2 ? tiny_random(random) % 300 + 1 : 1;
        if (dice >= 13 || done[s] + take > POSITIONS)
            continue;
        struct msg_step_entry *e = &entries[count++];
        *e = (struct msg_step_entry){s + 1, s, done[s], take, dice != 5 ? STEP_ENTRY_SELECT : 0};
        memcpy(tokens + n, p->tokens[s] + done[s], take * sizeof *tokens);
        if (dice == 7)
            e->position++; /* refused */
        else
            done[s] += take;
        n += take;
    }
    *msg = (struct msg_step){entries, count, {tokens, n}, {0}, 0};
    return count;
}

/* The same sequence on both; its lists end by mass. */
static void pair_open_by_mass(struct pair *p, const struct msg_open *open)
{
    assert_int_equal(selector_open(p->cpu, open, NULL), 0);
    assert_int_equal(selector_open(p->gpu, open, NULL), 0);
}

/* Of one position and list. */
static uint64_t key_bytes(void)
{
    return keys == COMPUTE_KEYS_INT8 ? RIG_HEAD_DIM + 2 : RIG_HEAD_DIM * 2;
}

static void run_script(struct pair *p, uint32_t steps, bool masses)
{
    struct msg_step_entry entries[SEQUENCES];
    uint32_t tokens[SEQUENCES * 300], done[SEQUENCES] = {0}, random = 77, differences = 0, grown = 0;
    struct msg_step msg;
    /* Budgets that differ cut slices; a sequence that takes everything may join any. */
    static const uint32_t budgets[SEQUENCES] = {64, 64, 40, 1400, 64};
    for (uint32_t s = 0; s < SEQUENCES; s++)
        if (masses && s % 2)
            pair_open_by_mass(p, &(struct msg_open){.sequence = s + 1,
                                                    .capacity = POSITIONS,
                                                    .budget = 800,
                                                    .budget_base = budgets[s] < 800 ? budgets[s] : 800,
                                                    .sinks = s,
                                                    .window = 8 + s,
                                                    .min_mass = s == 1 ? 0.8f : 0,
                                                    .top_p = s == 3 ? 0.6f : 0});
        else
            pair_open(p, s + 1, budgets[s], s, 8 + s);
    for (uint32_t step = 1; step <= steps; step++) {
        if (!random_step(p, done, &random, entries, tokens, &msg))
            continue;
        pair_step(p, step, &msg);
        for (uint32_t i = 0; i < p->gpu_result.entry_count; i++)
            differences += p->gpu_result.entries[i].base_step != step;
        for (uint32_t i = 0; i < p->gpu_result.entry_count; i++)
            grown += p->gpu_result.entries[i].flags != 0;
        uint64_t again = tiny_random(&random) % (2 * SEQUENCES) + 1;
        if (step % 3)
            continue;
        assert_int_equal(selector_repeat(p->gpu, again, step, &p->gpu_result),
                         selector_repeat(p->cpu, again, step, &p->cpu_result));
        same_result(&p->cpu_result, &p->gpu_result);
    }
    assert_true(differences > steps);
    if (masses)
        assert_true(grown > 2);
    struct selector_stats cpu, gpu;
    selector_stats(p->cpu, &cpu);
    selector_stats(p->gpu, &gpu);
    assert_int_equal(gpu.tokens, cpu.tokens);
    assert_int_equal(gpu.selections, cpu.selections);
    assert_int_equal(gpu.positions_sent, cpu.positions_sent);
    assert_int_equal(gpu.key_bytes, gpu.tokens * 2 * RIG_KV_HEADS * key_bytes());
}

static void sequences_together_and_their_differences(void **state)
{
    (void)state;
    struct rig_options o = exact;
    o.head_norms = true;
    struct pair *p = pair_make(&o, HEAD_POOL_MEAN, 0);
    run_script(p, 120, false);
    pair_free(&p);
}

/* Prompts that go on in later steps, single tokens, steps that a sequence is not in. */
static void sequences_of_heads_with_context(void **state)
{
    (void)state;
    for (int i = 0; i < CONTEXTS; i++) {
        struct rig_options o = with_context(i);
        struct pair *p = pair_make(&o, HEAD_POOL_MEAN, 0);
        run_script(p, 120, false);
        pair_free(&p);
    }
}

/* More tokens than the card takes at a time: a sequence goes on behind what it was cut at. */
static void a_step_of_more_tokens_than_fit(void **state)
{
    (void)state;
    _Static_assert(SEQUENCES * 1000 > LIMIT_STEP_TOKENS && LIMIT_STEP_TOKENS % 1000 != 0,
                   "the cut is in a sequence");
    for (int i = 0; i < CONTEXTS; i++) {
        struct rig_options o = with_context(i);
        struct pair *p = pair_make(&o, HEAD_POOL_MEAN, 0);
        struct msg_step_entry entries[SEQUENCES];
        uint32_t *tokens = mem_alloc(SEQUENCES * 1000, sizeof *tokens);
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            pair_open(p, s + 1, 64, 4, 8);
            entries[s] = (struct msg_step_entry){s + 1, s, 0, 1000, STEP_ENTRY_SELECT};
            memcpy(tokens + (size_t)s * 1000, p->tokens[s], 1000 * sizeof *tokens);
        }
        pair_step(p, 1, &(struct msg_step){entries, SEQUENCES, {tokens, SEQUENCES * 1000}, {0}, 0});
        assert_int_equal(p->gpu_result.entry_count, SEQUENCES);
        mem_free(&tokens);
        pair_free(&p);
    }
}

/* The set that entry i of a result has is the one that the sequence gets alone: same positions, same mass. */
static void same_as_alone(const struct selector_result *r, uint32_t i, const struct selector_result *alone)
{
    uint32_t lists = r->groups * r->heads;
    size_t count = r->first[i + 1] - r->first[i];
    assert_int_equal(alone->entry_count, 1);
    assert_int_equal(alone->first[1], count);
    assert_memory_equal(alone->counts, r->counts + (size_t)i * lists * 2, lists * 2 * sizeof *r->counts);
    assert_memory_equal(alone->positions, r->positions + r->first[i], count * sizeof *r->positions);
    assert_memory_equal(&alone->entries[0].mass, &r->entries[i].mass, sizeof(float));
}

static void company_changes_nothing(void **state)
{
    (void)state;
    enum { STEPS = 70 }; /* the last one's taps reach over single tokens alone */
    static const uint32_t prompts[SEQUENCES] = {1, 63, 300, 64, 700};
    struct rig_options o = with_context(1);
    struct pair *p = pair_make(&o, HEAD_POOL_MEAN, 0);
    struct selector *alone = rig_selector(
        p->rig,
        (struct rig_selector){.pool = HEAD_POOL_MEAN, .context = 4096, .device = "cuda:1", .keys = keys});
    for (uint32_t s = 0; s < SEQUENCES; s++) {
        rig_open(p->gpu, s + 1, POSITIONS, 48, 4, 8);
        rig_open(alone, s + 1, POSITIONS, 48, 4, 8);
    }
    for (uint32_t step = 0; step <= STEPS; step++) {
        struct msg_step_entry entries[SEQUENCES];
        uint32_t tokens[SEQUENCES * POSITIONS], n = 0;
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            uint32_t count = step ? 1 : prompts[s], from = step ? prompts[s] + step - 1 : 0;
            entries[s] = (struct msg_step_entry){s + 1, s, from, count, STEP_ENTRY_SELECT};
            memcpy(tokens + n, p->tokens[s] + from, count * sizeof *tokens);
            n += count;
        }
        selector_step(p->gpu, step, &(struct msg_step){entries, SEQUENCES, {tokens, n}, {0}, 0},
                      &p->gpu_result);
        assert_int_equal(p->gpu_result.entry_count, SEQUENCES);
        for (uint32_t s = 0; s < SEQUENCES; s++) {
            rig_step(alone, s + 1, step, p->tokens[s], entries[s].position,
                     entries[s].position + entries[s].count, true, &p->cpu_result);
            same_as_alone(&p->gpu_result, s, &p->cpu_result);
        }
    }
    struct selector_stats stats;
    selector_stats(p->gpu, &stats);
    assert_int_equal(stats.graph_steps, STEPS - 1); /* all but the prompts', and the first of its shape */
    selector_free(&alone);
    pair_free(&p);
}

struct parts {
    struct selector_result result[2];
    uint32_t count;
};

static struct selector_result *next_part(void *arg, struct selector_result *result)
{
    struct parts *parts = arg;
    assert_ptr_equal(result, &parts->result[0]);
    parts->count++;
    return &parts->result[1];
}

/* Enough sequences for results to come in two halves, the first while the card works on the second. */
static void check_halves(bool graphs)
{
    enum { MANY = 19, STEPS = 24, PROMPT = 40 };
    struct rig *r = rig_make(&exact);
    struct rig_selector o = {.pool = HEAD_POOL_MEAN, .context = 256, .sequences = MANY, .keys = keys};
    struct selector *cpu = rig_selector(r, o);
    o.device = "cuda:0";
    struct selector *gpu = rig_selector(r, o);
    struct selector_result expected = {0};
    struct parts parts = {0};
    uint32_t tokens[MANY * PROMPT];
    selector_on_part(gpu, next_part, &parts);
    for (uint32_t s = 0; s < MANY; s++) {
        rig_open(cpu, s + 1, 256, 24, 2, 4);
        rig_open(gpu, s + 1, 256, 24, 2, 4);
    }
    for (uint32_t step = 0; step <= STEPS; step++) {
        struct msg_step_entry entries[MANY];
        uint32_t n = step ? 1 : PROMPT, at = step ? PROMPT + step - 1 : 0;
        rig_tokens(tokens, MANY * n, RIG_VOCAB, 100 + step);
        for (uint32_t s = 0; s < MANY; s++)
            entries[s] = (struct msg_step_entry){s + 1, s, at, n, STEP_ENTRY_SELECT};
        struct msg_step msg = {entries, MANY, {tokens, MANY * n}, {0}, 0};
        parts.count = 0;
        selector_step(cpu, step, &msg, &expected);
        selector_step(gpu, step, &msg, &parts.result[0]);
        assert_int_equal(parts.count, 1);
        assert_int_equal(parts.result[0].entry_count + parts.result[1].entry_count, MANY);
        uint32_t lists = expected.groups * expected.heads, first = parts.result[0].entry_count;
        struct selector_result rest = expected; /* what the second part is to have */
        expected.entry_count = first;
        same_result(&expected, &parts.result[0]);
        rest.entry_count = MANY - first;
        rest.entries += first;
        rest.counts += (size_t)first * lists * 2;
        rest.positions += rest.first[first];
        size_t begin = rest.first[first];
        for (uint32_t i = first; i <= MANY; i++)
            rest.first[i] -= begin;
        rest.first += first;
        same_result(&rest, &parts.result[1]);
        uint64_t again = step % MANY + 1;
        if (step % 5 == 0) {
            assert_int_equal(selector_repeat(cpu, again, step, &expected), 0);
            assert_int_equal(selector_repeat(gpu, again, step, &parts.result[0]), 0);
            same_result(&expected, &parts.result[0]);
        }
    }
    struct selector_stats stats;
    selector_stats(gpu, &stats);
    assert_int_equal(stats.graph_steps, graphs ? STEPS - 1 : 0);
    for (int i = 0; i < 2; i++)
        selector_result_free(&parts.result[i]);
    selector_result_free(&expected);
    selector_free(&cpu);
    selector_free(&gpu);
    rig_free(&r);
}

static void halves_change_nothing(void **state)
{
    (void)state;
    check_halves(true);
}

/* A step that cannot be captured is queued launch by launch, and so are all after it. */
static void captures_that_fail_change_nothing(void **state)
{
    (void)state;
    fakegpu_need_double();
    setenv("SPECONTEXT_FAKEGPU_NO_GRAPHS", "1", 1);
    check_halves(false);
    unsetenv("SPECONTEXT_FAKEGPU_NO_GRAPHS");
}

/* So little work memory that every query is a slice of its own, and positions come back in several parts. */
static void small_slices_change_nothing(void **state)
{
    (void)state;
    for (int pool = HEAD_POOL_MAX; pool <= HEAD_POOL_MEAN; pool++) {
        struct pair *p = pair_make(&exact, (enum head_pool)pool, 1);
        run_script(p, 60, true);
        pair_free(&p);
    }
}

static int refused(const struct rig *r, struct selector_options o, const char *text)
{
    struct selector *s = NULL;
    struct err err = {0};
    o.model = r->model;
    o.head = r->head;
    o.threads = 1;
    int rc = selector_create(&o, &s, &err);
    if (rc == 0)
        fail_msg("expected a refusal: %s", text);
    if (!strstr(err.text, text))
        fail_msg("found \"%s\", expected \"%s\"", err.text, text);
    assert_null(s);
    return rc;
}

static void what_the_card_cannot_hold_is_refused(void **state)
{
    (void)state;
    fakegpu_need_double();
    struct rig *r = rig_make(&exact);
    struct selector_options o = {.device = "cuda:1", .context = 1 << 18, .sequences = 8, .keys = keys};
    assert_int_equal(refused(r, o, "context on a GPU: found 262144, expected at most 131072"), -ENOTSUP);
    o.context = 4096;
    o.device = "cuda:7";
    assert_int_equal(refused(r, o, "cuda:7"), -ENODEV);
    o.device = "cuda:1";
    setenv("SPECONTEXT_FAKEGPU_BYTES", "20000000", 1);
    assert_int_equal(refused(r, o,
                             keys == COMPUTE_KEYS_INT8 ? "keys of 8 sequences of 4096 positions 8, "
                                                       : "keys of 8 sequences of 4096 positions 16, "),
                     -ENOMEM);
    unsetenv("SPECONTEXT_FAKEGPU_BYTES");
    rig_free(&r);
}

static void count_memory(const struct rig_options *o, uint32_t context)
{
    uint64_t room = keys == COMPUTE_KEYS_INT8 ? (context + 15) / 16 * 16 : context;
    struct rig *r = rig_make(o);
    struct selector *s =
        rig_selector(r, (struct rig_selector){.context = context, .device = "cuda:1", .keys = keys});
    struct card_bytes b = card_bytes(selector_card(s));
    struct memory_gpu_head head = {.vocab = RIG_VOCAB,
                                   .hidden = RIG_HIDDEN,
                                   .q_heads = RIG_Q_HEADS,
                                   .kv_heads = RIG_KV_HEADS,
                                   .head_dim = RIG_HEAD_DIM,
                                   .groups = 2,
                                   .rope_dims = 48,
                                   .head_norms = o->head_norms ? 4 : 0,
                                   .views = o->views,
                                   .taps = o->taps,
                                   .features = (uint64_t)o->features * RIG_HIDDEN,
                                   .feature_input_norm = o->input_norm,
                                   .keys_int8 = keys == COMPUTE_KEYS_INT8};
    struct memory_gpu_retriever need;
    memory_gpu_retriever(&head, context, 8, MEMORY_GPU_WORK, &need);
    assert_int_equal(b.keys, need.keys);
    assert_int_equal(b.weights, need.weights);
    assert_int_equal(b.workspace, need.workspace);
    assert_int_equal(need.keys, 2 * 8 * room * RIG_KV_HEADS * key_bytes() + 64);
    assert_true(b.context > 0 && b.libraries > 0);
    assert_string_equal(selector_backend(s), card_info(selector_card(s))->name);
    selector_free(&s);
    rig_free(&r);
}

static void memory_is_counted(void **state)
{
    (void)state;
    fakegpu_need_double();
    count_memory(&exact, 4096);
    count_memory(&exact, 4095);
    for (int i = 0; i < CONTEXTS; i++) {
        struct rig_options o = with_context(i);
        o.head_norms = true;
        count_memory(&o, 4096);
    }
    for (int i = 0; i < 2; i++) {
        struct rig_options o = exact;
        o.features = 3;
        o.input_norm = i;
        count_memory(&o, 4096);
    }
}

/* A key that is not a number makes its selection one that is refused; its company is not touched. */
static float with_a_nan(const struct tiny_model *m, const char *name, uint32_t row, uint32_t col)
{
    return row == 63 && col == 5 && !strcmp(name, "token_embd.weight") ? NAN : plus_minus(m, name, row, col);
}

static void weights_that_are_not_finite_are_refused(void **state)
{
    (void)state;
    for (int pool = HEAD_POOL_MAX; pool <= HEAD_POOL_MEAN; pool++) {
        struct rig_options o = exact;
        o.weight = with_a_nan;
        struct pair *p = pair_make(&o, (enum head_pool)pool, 0);
        struct msg_step_entry entries[2] = {{1, 0, 0, 100, STEP_ENTRY_SELECT},
                                            {2, 1, 0, 100, STEP_ENTRY_SELECT}};
        uint32_t tokens[200];
        rig_tokens(tokens, 200, 63, 9);
        tokens[40] = 63;
        pair_open(p, 1, 32, 4, 8);
        pair_open(p, 2, 32, 4, 8);
        pair_step(p, 1, &(struct msg_step){entries, 2, {tokens, 200}, {0}, 0});
        assert_int_equal(p->gpu_result.refusal_count, 1);
        assert_int_equal(p->gpu_result.refusals[0].code, -EDOM);
        assert_int_equal(p->gpu_result.entry_count, 1);
        pair_free(&p);
    }
}

static int set_up(void **state)
{
    (void)state;
    fakegpu_use(NULL);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_sequence_of_every_length),
        cmocka_unit_test(sequences_together_and_their_differences),
        cmocka_unit_test(sequences_of_heads_with_context),
        cmocka_unit_test(a_step_of_more_tokens_than_fit),
        cmocka_unit_test(company_changes_nothing),
        cmocka_unit_test(halves_change_nothing),
        cmocka_unit_test(captures_that_fail_change_nothing),
        cmocka_unit_test(small_slices_change_nothing),
        cmocka_unit_test(what_the_card_cannot_hold_is_refused),
        cmocka_unit_test(memory_is_counted),
        cmocka_unit_test(weights_that_are_not_finite_are_refused),
    };
    keys = COMPUTE_KEYS_F16;
    int failed = cmocka_run_group_tests_name("f16", tests, set_up, NULL);
    keys = COMPUTE_KEYS_INT8;
    return failed + cmocka_run_group_tests_name("int8", tests, set_up, NULL);
}
