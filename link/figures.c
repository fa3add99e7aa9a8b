/* See figures.h. No state; any thread, one an object. jansson allocates: an object that is not there is the
 * end of the process, as everywhere (base/alloc.h). */
#include "link/figures.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "base/check.h"

static void put(json_t *object, const char *key, json_t *value)
{
    CHECK(json_object_set_new(object, key, value ? value : json_null()) == 0);
}

void figures_count(json_t *object, const char *key, uint64_t value)
{
    put(object, key, json_integer((json_int_t)value));
}

void figures_real(json_t *object, const char *key, double value)
{
    put(object, key, isfinite(value) ? json_real(value) : NULL);
}

void figures_bool(json_t *object, const char *key, bool value)
{
    put(object, key, json_boolean(value));
}

void figures_text(json_t *object, const char *key, const char *text)
{
    put(object, key, json_string(text));
}

void figures_hex(json_t *object, const char *key, uint64_t value)
{
    char text[20];
    snprintf(text, sizeof text, "%016" PRIx64, value);
    put(object, key, json_string(text));
}

void figures_ms(json_t *object, const char *key, int64_t ns)
{
    figures_real(object, key, (double)ns / 1e6);
}

json_t *figures_section(json_t *object, const char *key)
{
    json_t *inside = json_object();
    put(object, key, inside);
    return inside;
}

json_t *figures_list(json_t *object, const char *key)
{
    json_t *list = json_array();
    put(object, key, list);
    return list;
}

json_t *figures_item(json_t *list)
{
    json_t *item = json_object();
    CHECK(json_array_append_new(list, item) == 0);
    return item;
}

void figures_bus(json_t *object, const struct bus_counters *c)
{
    json_t *bus = figures_section(object, "bus");
    figures_count(bus, "sent", c->sent);
    figures_count(bus, "received", c->received);
    figures_count(bus, "dropped_full", c->dropped_full);
    figures_count(bus, "dropped_late", c->dropped_late);
    figures_count(bus, "dropped_epoch", c->dropped_epoch);
    figures_count(bus, "refused_peers", c->refused_peers);
    figures_count(bus, "malformed", c->malformed);
}

char *figures_finish(json_t **object)
{
    char *text = json_dumps(*object, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9));
    json_decref(*object);
    *object = NULL;
    return text;
}
