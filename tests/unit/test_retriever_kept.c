/* Keys that are kept: the longest beginning is found, by tokens and salt; what is held stays, what was used
 * least lately goes, ends before begins; the bound holds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/alloc.h"
#include "retriever/kept.h"

enum { DATA = 1000, BLOCKS = 12 };

static uint32_t prompt[BLOCKS * BLOCK_TOKENS];

/* `seed` from token `from` on. */
static void write_prompt(uint32_t from, uint32_t seed)
{
    for (uint32_t i = from; i < BLOCKS * BLOCK_TOKENS; i++)
        prompt[i] = seed * 1000 + i;
}

/* Bytes that `count` blocks take. */
static uint64_t bytes_of(uint32_t count)
{
    struct kept_chain c;
    struct kept_stats stats;
    struct kept *k = kept_create(DATA, 1 << 20);
    kept_open(k, &c, 0, prompt, BLOCK_TOKENS);
    assert_non_null(kept_add(k, &c));
    kept_stats(k, &stats);
    kept_close(&c);
    kept_free(&k);
    assert_int_equal(stats.blocks, 1);
    assert_in_range(stats.bytes, DATA + 256, DATA + 600);
    return stats.bytes * count;
}

/* Adds blocks until the chain has `end`, or it ends; their first byte is their number. */
static void add_to(struct kept *k, struct kept_chain *c, uint32_t end)
{
    while (c->blocks < end && !c->ended) {
        uint8_t number = (uint8_t)c->blocks, *data = kept_add(k, c);
        if (data)
            memset(data, number, DATA);
    }
}

/* How many blocks a prompt of so many tokens finds; their data are checked. */
static uint32_t found(struct kept *k, uint64_t salt, uint32_t count)
{
    const uint8_t *data[BLOCKS];
    struct kept_chain c;
    kept_open(k, &c, salt, prompt, count);
    uint32_t n = c.blocks;
    kept_list(&c, data);
    for (uint32_t i = 0; i < n; i++)
        assert_true(data[i][0] == i && data[i][DATA - 1] == i);
    assert_ptr_equal(kept_last(&c), n ? data[n - 1] : NULL);
    kept_close(&c);
    return n;
}

static void the_longest_beginning_is_found(void **state)
{
    (void)state;
    struct kept *k = kept_create(DATA, 1 << 20);
    struct kept_chain c;
    write_prompt(0, 1);
    assert_int_equal(found(k, 0, 600), 0);
    kept_open(k, &c, 0, prompt, 5 * BLOCK_TOKENS + 1);
    add_to(k, &c, 5);
    assert_int_equal(found(k, 0, 5 * BLOCK_TOKENS + 1), 5); /* of a chain that is open */
    kept_close(&c);
    assert_int_equal(found(k, 0, 5 * BLOCK_TOKENS + 1), 5);
    assert_int_equal(found(k, 0, 5 * BLOCK_TOKENS), 4); /* a token is left over to be computed */
    assert_int_equal(found(k, 0, 10 * BLOCK_TOKENS), 5);
    assert_int_equal(found(k, 0, BLOCK_TOKENS), 0);
    assert_int_equal(found(k, 9, 10 * BLOCK_TOKENS), 0); /* another tenant's */
    write_prompt(3 * BLOCK_TOKENS - 1, 2);
    assert_int_equal(found(k, 0, 10 * BLOCK_TOKENS), 2);
    write_prompt(0, 3);
    memmove(prompt, prompt + BLOCK_TOKENS, sizeof prompt / 2);
    assert_int_equal(found(k, 0, 10 * BLOCK_TOKENS), 0);
    kept_free(&k);
}

static void equal_blocks_are_kept_once(void **state)
{
    (void)state;
    struct kept *k = kept_create(DATA, 1 << 20);
    struct kept_chain a, b;
    struct kept_stats stats;
    write_prompt(0, 1);
    kept_open(k, &a, 0, prompt, sizeof prompt / 4);
    kept_open(k, &b, 0, prompt, sizeof prompt / 4);
    add_to(k, &a, 4);
    add_to(k, &b, 6);
    add_to(k, &a, 7);
    kept_stats(k, &stats);
    assert_int_equal(stats.blocks, 7);
    assert_int_equal(stats.bytes, bytes_of(7));
    kept_cut(&b, 2); /* behind what the store has */
    assert_int_equal(b.blocks, 2);
    assert_int_equal(kept_last(&b)[0], 1);
    assert_null(kept_add(k, &b));
    assert_int_equal(b.blocks, 3);
    kept_cut(&b, 0);
    assert_null(kept_last(&b));
    kept_close(&a);
    kept_close(&b);
    assert_int_equal(found(k, 0, sizeof prompt / 4), 7);
    kept_free(&k);
}

/* Three prompts of one begin, room for ten blocks: of the one used least lately the end goes. */
static void what_was_used_least_lately_goes_from_its_end(void **state)
{
    (void)state;
    struct kept *k = kept_create(DATA, bytes_of(10) + DATA);
    struct kept_chain c;
    struct kept_stats stats;
    for (uint32_t i = 1; i <= 2; i++) {
        write_prompt(0, 1);
        write_prompt(2 * BLOCK_TOKENS, 10 + i);
        kept_open(k, &c, 0, prompt, sizeof prompt / 4);
        add_to(k, &c, 6);
        kept_close(&c);
    }
    assert_int_equal(found(k, 0, sizeof prompt / 4), 6); /* the second; both take all of the ten */
    write_prompt(2 * BLOCK_TOKENS, 11);
    assert_int_equal(found(k, 0, sizeof prompt / 4), 6); /* the first, so the second is older now */
    write_prompt(2 * BLOCK_TOKENS, 13);
    kept_open(k, &c, 0, prompt, sizeof prompt / 4);
    assert_int_equal(c.blocks, 2);
    add_to(k, &c, 5);
    kept_close(&c);
    kept_stats(k, &stats);
    assert_int_equal(stats.blocks, 10);
    assert_int_equal(stats.evicted, 3);
    assert_in_range(stats.bytes, 0, stats.bytes_max);
    assert_int_equal(found(k, 0, sizeof prompt / 4), 5);
    write_prompt(2 * BLOCK_TOKENS, 11);
    assert_int_equal(found(k, 0, sizeof prompt / 4), 6);
    write_prompt(2 * BLOCK_TOKENS, 12);
    assert_int_equal(found(k, 0, sizeof prompt / 4), 3);
    kept_free(&k);
}

/* A chain is never cut behind the back of who holds it; who finds no room goes on without. */
static void what_is_held_stays(void **state)
{
    (void)state;
    struct kept *k = kept_create(DATA, bytes_of(4));
    struct kept_chain a, b, none;
    struct kept_stats stats;
    write_prompt(0, 1);
    kept_open(k, &a, 0, prompt, sizeof prompt / 4);
    add_to(k, &a, 6);
    assert_true(a.ended);
    assert_int_equal(a.blocks, 4);
    write_prompt(0, 2);
    kept_open(k, &b, 0, prompt, sizeof prompt / 4);
    add_to(k, &b, 1);
    assert_true(b.ended);
    assert_int_equal(b.blocks, 0);
    kept_close(&b);
    kept_close(&a);
    kept_open(k, &b, 0, prompt, sizeof prompt / 4);
    add_to(k, &b, 3);
    assert_int_equal(b.blocks, 3);
    write_prompt(0, 1);
    assert_int_equal(found(k, 0, sizeof prompt / 4), 1);
    kept_close(&b);
    kept_stats(k, &stats);
    assert_int_equal(stats.evicted, 3);
    kept_free(&k);
    k = kept_create(DATA, DATA); /* not even one */
    kept_open(k, &a, 0, prompt, sizeof prompt / 4);
    assert_null(kept_add(k, &a));
    assert_true(a.ended);
    kept_close(&a);
    kept_free(&k);
    kept_open(NULL, &none, 0, prompt, sizeof prompt / 4);
    assert_true(none.ended);
    assert_null(none.tokens);
    kept_stats(NULL, &stats);
    assert_int_equal(stats.bytes_max, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_longest_beginning_is_found),
        cmocka_unit_test(equal_blocks_are_kept_once),
        cmocka_unit_test(what_was_used_least_lately_goes_from_its_end),
        cmocka_unit_test(what_is_held_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
