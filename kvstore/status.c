/* Figures of the store for people and for metrics; see status.h. Loop thread. */
#include "kvstore/status.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

#include "base/check.h"

static void set_number(json_t *object, const char *key, uint64_t value)
{
    CHECK(json_object_set_new(object, key, json_integer((json_int_t)value)) == 0);
}

static void set_hex(json_t *object, const char *key, uint64_t value)
{
    char text[20];
    snprintf(text, sizeof text, "%016" PRIx64, value);
    CHECK(json_object_set_new(object, key, json_string(text)) == 0);
}

static json_t *section(json_t *object, const char *key)
{
    json_t *inside = json_object();
    CHECK(inside && json_object_set_new(object, key, inside) == 0);
    return inside;
}

static void put_layout(json_t *root, const struct kv_layout *l)
{
    json_t *o = section(root, "layout");
    set_hex(o, "fingerprint", layout_fingerprint(l).lo);
    set_hex(o, "model", l->model.lo);
    set_number(o, "layers", l->layers);
    set_number(o, "row_heads", l->row_heads);
    set_number(o, "selection_heads", l->selection_heads);
    set_number(o, "groups", l->groups);
    set_number(o, "runs", layout_runs(l));
    set_number(o, "piece_bytes", l->piece_bytes);
    set_number(o, "context", l->context_max);
}

static void put_memory(json_t *root, const struct worker_stats *s)
{
    json_t *o = section(root, "device");
    set_number(o, "bytes", s->device_bytes);
    set_number(o, "slab_bytes", s->slab_bytes);
    set_number(o, "page_bytes", s->page_bytes);
    set_number(o, "slabs", s->slabs);
    set_number(o, "slabs_free", s->slabs_free);
    set_number(o, "slabs_slots", s->slabs_slots);
    set_number(o, "slabs_staging", s->slabs_staging);
    set_number(o, "slabs_pages", s->slabs - s->slabs_free - s->slabs_slots - s->slabs_staging);
    set_number(o, "pages", s->pages);
    set_number(o, "slots", s->slots);
    set_number(o, "staging_tokens", s->staging_tokens);
    set_number(o, "list_max", s->list_max);
    o = section(root, "host");
    set_number(o, "bytes", s->arena_bytes);
    set_number(o, "block_bytes", s->block_bytes);
    set_number(o, "blocks", s->blocks);
    set_number(o, "blocks_used", s->blocks_present - s->blocks_free - s->blocks_cached);
    set_number(o, "blocks_cached", s->blocks_cached);
    set_number(o, "blocks_free", s->blocks - (s->blocks_present - s->blocks_free));
    set_number(root, "control_bytes", s->control_bytes);
}

static void put_counters(json_t *root, const char *key, const struct kv_counters *c)
{
    json_t *o = section(root, key);
    set_number(o, "steps", c->steps);
    set_number(o, "attended", c->attended);
    set_number(o, "lists", c->lists);
    set_number(o, "selected", c->selected);
    set_number(o, "kept", c->kept);
    set_number(o, "rows_loaded", c->rows_loaded);
    set_number(o, "bytes_loaded", c->bytes_loaded);
    set_number(o, "bytes_if_reloaded", c->bytes_if_reloaded);
    set_number(o, "rows_filled", c->rows_filled);
    set_number(o, "bytes_filled", c->bytes_filled);
    set_number(o, "bytes_written", c->bytes_written);
    CHECK(json_object_set_new(o, "mass_mean",
                              json_real(c->mass_count ? c->mass_sum / (double)c->mass_count : 0)) == 0);
}

static void put_totals(json_t *root, const struct planner_totals *t)
{
    json_t *o = section(root, "totals");
    set_number(o, "steps_dense", t->steps_dense);
    set_number(o, "steps_sparse", t->steps_sparse);
    set_number(o, "steps_record", t->steps_record);
    set_number(o, "sets", t->sets);
    set_number(o, "sets_refused", t->sets_refused);
    set_number(o, "opened", t->opened);
    set_number(o, "refused", t->refused);
    set_number(o, "closed", t->closed);
    set_number(o, "offloads", t->offloads);
    set_number(o, "returns", t->returns);
    set_number(o, "blocks_evicted", t->blocks_evicted);
    set_number(o, "prompt_tokens", t->prompt_tokens);
    set_number(o, "reused_tokens", t->reused_tokens);
    set_number(o, "plan_us", (uint64_t)(t->plan_ns / 1000));
    set_number(o, "gather_us", (uint64_t)(t->gather_ns / 1000));
    set_number(o, "waits_broken", t->counters.waits_broken);
}

static void put_sequences(json_t *root, const struct worker_stats *s)
{
    json_t *list = json_array();
    CHECK(list && json_object_set_new(root, "sequences", list) == 0);
    for (uint32_t i = 0; i < s->live_count; i++) {
        const struct worker_sequence *q = &s->sequences[i];
        json_t *o = json_object();
        CHECK(o && json_array_append_new(list, o) == 0);
        set_number(o, "id", q->id);
        set_number(o, "index", q->index);
        set_number(o, "prompt_tokens", q->prompt);
        set_number(o, "tokens", q->next);
        set_number(o, "committed", q->committed);
        set_number(o, "capacity", q->capacity);
        set_number(o, "budget", q->budget);
        CHECK(json_object_set_new(o, "attached", json_boolean(q->attached)) == 0);
    }
}

static void put_stats(json_t *root, const struct worker_stats *s)
{
    static const char *const STATES[] = {[STEP_IDLE] = "idle",
                                         [STEP_SETS] = "waits for a selection",
                                         [STEP_STAGED] = "staging",
                                         [STEP_WRITTEN] = "waits for the decoder",
                                         [STEP_CONSUMED] = "waits for the decoder"};
    set_hex(root, "epoch", s->store_epoch);
    set_hex(root, "decoder_epoch", s->decoder_epoch);
    set_number(root, "step", s->step);
    CHECK(json_object_set_new(root, "step_state", json_string(STATES[s->state])) == 0);
    set_number(root, "layers_resident", s->layers_resident);
    set_number(root, "layers_offloaded", s->layers - s->layers_resident);
    set_number(root, "resident_version", s->version);
    set_number(root, "resident_proposed", s->proposed);
    put_memory(root, s);
    put_counters(root, "counters_live", &s->live);
    put_counters(root, "counters_closed", &s->totals.counters);
    put_totals(root, &s->totals);
    put_sequences(root, s);
}

char *status_json(const struct status_source *source)
{
    json_t *root = json_object();
    CHECK(root != NULL);
    CHECK(json_object_set_new(root, "part", json_string("kvstore")) == 0);
    CHECK(json_object_set_new(root, "version", json_string(SPECONTEXT_VERSION)) == 0);
    CHECK(json_object_set_new(root, "state", json_string(source->state)) == 0);
    CHECK(json_object_set_new(root, "elastic", json_boolean(!source->options->no_elastic)) == 0);
    CHECK(json_object_set_new(root, "offload", json_boolean(!source->options->no_offload)) == 0);
    if (source->stats) {
        put_layout(root, source->layout);
        put_stats(root, source->stats);
    }
    json_t *bus = section(root, "bus");
    set_number(bus, "sent", source->bus->sent);
    set_number(bus, "received", source->bus->received);
    set_number(bus, "dropped_full", source->bus->dropped_full);
    set_number(bus, "dropped_late", source->bus->dropped_late);
    set_number(bus, "dropped_epoch", source->bus->dropped_epoch);
    set_number(bus, "refused_peers", source->bus->refused_peers);
    set_number(bus, "malformed", source->bus->malformed);
    char *text = json_dumps(root, JSON_COMPACT | JSON_PRESERVE_ORDER);
    json_decref(root);
    return text;
}
