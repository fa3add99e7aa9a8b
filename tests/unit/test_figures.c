/* Figures as JSON: what each kind becomes, and what has no value in JSON. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "link/figures.h"

static void expect(json_t *object, const char *expected)
{
    char *text = figures_finish(&object);
    assert_null(object);
    assert_string_equal(text, expected);
    free(text);
}

static void kinds(void **state)
{
    (void)state;
    json_t *o = json_object();
    figures_count(o, "count", 7);
    figures_real(o, "real", 0.5);
    figures_bool(o, "bool", true);
    figures_text(o, "text", "a\"b");
    figures_hex(o, "hex", UINT64_C(0x1f));
    figures_ms(o, "ms", 1500000);
    figures_count(figures_section(o, "section"), "x", 1);
    json_t *list = figures_list(o, "list");
    figures_count(figures_item(list), "y", 2);
    figures_item(list);
    figures_count(o, "count", 8);
    expect(o, "{\"count\":8,\"real\":0.5,\"bool\":true,\"text\":\"a\\\"b\",\"hex\":\"000000000000001f\","
              "\"ms\":1.5,\"section\":{\"x\":1},\"list\":[{\"y\":2},{}]}");
}

static void what_json_cannot_say_is_null(void **state)
{
    (void)state;
    json_t *o = json_object();
    figures_real(o, "a", (double)NAN);
    figures_real(o, "b", (double)INFINITY);
    figures_text(o, "c", NULL);
    figures_text(o, "d", "\xff");
    expect(o, "{\"a\":null,\"b\":null,\"c\":null,\"d\":null}");
}

static void counters_of_the_bus(void **state)
{
    (void)state;
    json_t *o = json_object();
    figures_bus(o, &(struct bus_counters){.sent = 1,
                                          .received = 2,
                                          .dropped_full = 3,
                                          .dropped_late = 4,
                                          .dropped_epoch = 5,
                                          .refused_peers = 6,
                                          .malformed = 7});
    expect(o, "{\"bus\":{\"sent\":1,\"received\":2,\"dropped_full\":3,\"dropped_late\":4,\"dropped_epoch\":5,"
              "\"refused_peers\":6,\"malformed\":7}}");
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(kinds),
        cmocka_unit_test(what_json_cannot_say_is_null),
        cmocka_unit_test(counters_of_the_bus),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
