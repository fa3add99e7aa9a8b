/* The map from a head's own mass to the mass that was measured: model/calibration.h. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include <errno.h>

#include "model/calibration.h"

static void mass_is_mapped_between_pairs(void **state)
{
    (void)state;
    static const double cases[][2] = {{-1, 0.125},    {0, 0.125},    {0.25, 0.1875},
                                      {0.5, 0.25},    {0.625, 0.25}, {0.75, 0.25},
                                      {0.875, 0.625}, {1, 1},        {1.0001, 1}};
    struct calibration c, none = {0};
    struct err err = {0};
    if (calibration_parse("0:0.125,0.5:0.25,.75:2.5e-1,1:1", &c, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(c.count, 4);
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_true(calibration_at(&c, cases[i][0]) == cases[i][1]);
        assert_true(calibration_at(&none, cases[i][0]) == cases[i][0]);
    }
    assert_true(isnan(calibration_at(&c, (double)NAN)));
    char text[2 * CALIBRATION_TEXT_BYTES]; /* the most pairs, and one more */
    int at = 0;
    for (uint32_t i = 0; i < CALIBRATION_POINTS_MAX - 1; i++)
        at += snprintf(text + at, sizeof text - (size_t)at, "%.9g:%.9g,", 1.2345678e-5 * i, 1.2345678e-6 * i);
    snprintf(text + at, sizeof text - (size_t)at, "1:1");
    assert_int_equal(calibration_parse(text, &c, &err), 0);
    assert_int_equal(c.count, CALIBRATION_POINTS_MAX);
    calibration_text(&c, text);
    assert_int_equal(calibration_parse(text, &none, &err), 0);
    assert_memory_equal(&c, &none, sizeof c);
    snprintf(text + strlen(text), sizeof text - strlen(text), ",1:1");
    assert_int_equal(calibration_parse(text, &c, &err), -EBADMSG);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {cmocka_unit_test(mass_is_mapped_between_pairs)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
