/* JSON objects of figures: answers to STATUS, and reports. What has no value in JSON becomes null: numbers that
 * are not finite, texts that are NULL or no UTF-8. */
#ifndef LINK_FIGURES_H
#define LINK_FIGURES_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "link/bus.h"

/* Adds the key, or replaces its value. */
void figures_count(json_t *object, const char *key, uint64_t value);
void figures_real(json_t *object, const char *key, double value);
void figures_bool(json_t *object, const char *key, bool value);
void figures_text(json_t *object, const char *key, const char *text);
void figures_hex(json_t *object, const char *key, uint64_t value); /* 16 digits, a text */
void figures_ms(json_t *object, const char *key, int64_t ns);      /* as milliseconds */

/* An empty object or list inside `object`, which owns it. */
json_t *figures_section(json_t *object, const char *key);
json_t *figures_list(json_t *object, const char *key);
json_t *figures_item(json_t *list); /* an empty object at the list's end */

/* The counters as section "bus". */
void figures_bus(json_t *object, const struct bus_counters *counters);

/* The object as text, NUL-terminated and malloc'ed; releases the object. */
char *figures_finish(json_t **object);

#endif
