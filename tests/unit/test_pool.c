/* Parallel loops: every index once, results in place, many short rounds, workers that are never scheduled. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdatomic.h>

#include <cmocka.h>

#include "base/pool.h"

struct tally {
    atomic_int hits[64];
    int threads;
    uint64_t sum[64];
    uint64_t seed;
};

static void count_hit(void *arg, int index, int thread)
{
    struct tally *t = arg;
    assert_true(thread >= 0 && thread < t->threads);
    atomic_fetch_add(&t->hits[index], 1);
    t->sum[index] = t->seed * 31 + (uint64_t)index;
}

static void rounds(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 4; threads++) {
        struct pool *pool = pool_create(threads, "test");
        assert_int_equal(pool_threads(pool), threads);
        struct tally t = {.threads = threads};
        enum { ROUNDS = 3000 };
        for (int round = 0; round < ROUNDS; round++) {
            int count = round % 64;
            t.seed = (uint64_t)round;
            pool_run(pool, count, count_hit, &t);
            for (int i = 0; i < count; i++)
                assert_true(t.sum[i] == t.seed * 31 + (uint64_t)i);
        }
        for (int i = 0; i < 63; i++) {
            int expected = 0;
            for (int round = 0; round < ROUNDS; round++)
                expected += round % 64 > i;
            assert_int_equal(atomic_load(&t.hits[i]), expected);
        }
        pool_free(&pool);
        assert_null(pool);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rounds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
