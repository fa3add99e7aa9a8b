/* Option values: what is a number and what is not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>

#include "base/parse.h"

static void sizes(void **state)
{
    (void)state;
    uint64_t v = 0;
    assert_int_equal(parse_size("80G", &v), 0);
    assert_int_equal(v, 80ull << 30);
    assert_int_equal(parse_size("1.5GiB", &v), 0);
    assert_int_equal(v, 3ull << 29);
    assert_int_equal(parse_size("512k", &v), 0);
    assert_int_equal(v, 512 << 10);
    assert_int_equal(parse_size("4096", &v), 0);
    assert_int_equal(v, 4096);
    static const char *const bad[] = {"", "G", "-1G", "1X", "1GG", "1 G", "nan", "1e30T", " 1G", "1.5"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_true(parse_size(bad[i], &v) < 0);
    assert_int_equal(v, 4096); /* untouched by failures */
}

static void numbers(void **state)
{
    (void)state;
    uint32_t u = 7;
    assert_int_equal(parse_u32("12", 1, 12, &u), 0);
    assert_int_equal(u, 12);
    assert_int_equal(parse_u32("13", 1, 12, &u), -ERANGE);
    assert_int_equal(parse_u32("-1", 0, 12, &u), -EINVAL);
    assert_int_equal(parse_u32("1x", 0, 12, &u), -EINVAL);
    assert_int_equal(parse_u32("99999999999999999999", 0, 12, &u), -ERANGE);
    assert_int_equal(u, 12);
    double d = 1;
    assert_int_equal(parse_double("0.5", 0, 1, &d), 0);
    assert_int_equal(parse_double("nan", 0, 1, &d), -EINVAL);
    assert_int_equal(parse_double("inf", 0, 1, &d), -EINVAL);
    assert_int_equal(parse_double("1e308", 0, 1, &d), -ERANGE);
    assert_int_equal(parse_double("", 0, 1, &d), -EINVAL);
    assert_true(d == 0.5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(sizes), cmocka_unit_test(numbers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
