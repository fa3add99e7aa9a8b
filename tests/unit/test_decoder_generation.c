/* Requests on their own: what they ask of the store and the retriever, and what is refused at once. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "decoder/generation.h"

static const struct msg_generate plain = {
    .max_tokens = 4, .budget = 128, .sinks = 4, .window = 16, .sampling = {.top_p = 1, .repeat_penalty = 1}};

/* What OPEN says of a request, to the store and to the retriever; its memory is freed. */
static void opens_of(struct msg_generate ask_for, struct msg_open *ret_store, struct msg_open *ret_retriever)
{
    const struct generation_limits limits = {.vocab = 100, .context = 4096, .list_max = 4096};
    uint32_t *ids = mem_alloc(8, sizeof *ids);
    struct msg msg = {.kind = MSG_GENERATE, .memory = ids, .generate = ask_for};
    msg.generate.tokens = (struct msg_u32s){ids, 8};
    struct generation *q = generation_create(1, &msg, &limits);
    generation_admit(q, GENERATION_OPENING);
    generation_open_retriever(q, false, &msg);
    *ret_retriever = msg.open;
    generation_open_store(q, 77, &msg);
    *ret_store = msg.open;
    msg_free(&msg);
    generation_free(&q);
}

/* Without a rule everything is as if there were none; with one, lists may be longer than the base, and what
 * they made is not taken for what another rule made. */
static void test_budgets_of_a_sequence(void **state)
{
    (void)state;
    struct msg_open store, retriever, other;
    struct msg_generate p = plain;
    opens_of(p, &store, &retriever);
    assert_int_equal(store.budget, 128);
    assert_int_equal(retriever.budget, 128);
    assert_int_equal(retriever.budget_base, 128);
    assert_true(retriever.min_mass == 0 && retriever.top_p == 0);
    assert_int_equal(store.made.head, 77);
    p.budget_max = 300;
    p.min_mass = 0.75f;
    opens_of(p, &store, &retriever);
    assert_int_equal(store.budget, 300);
    assert_int_equal(store.made.budget, 128);
    assert_int_not_equal(store.made.head, 77);
    assert_int_equal(retriever.budget, 300);
    assert_int_equal(retriever.budget_base, 128);
    assert_true(retriever.min_mass == 0.75f && retriever.top_p == 0);
    p.min_mass = 0;
    p.budget_top_p = 0.75f;
    opens_of(p, &other, &retriever);
    assert_true(retriever.min_mass == 0 && retriever.top_p == 0.75f);
    assert_int_not_equal(other.made.head, store.made.head);
    assert_int_not_equal(other.made.head, 77);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_budgets_of_a_sequence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
