/* Figures as JSON; see status.h. No state. Loop thread. */
#include "decoder/status.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

static json_t *epoch_text(uint64_t epoch)
{
    char text[20];
    snprintf(text, sizeof text, "%016" PRIx64, epoch);
    return json_string(text);
}

static json_t *ms(int64_t ns)
{
    return json_real((double)ns / 1e6);
}

static json_t *requests(const struct scheduler_figures *f)
{
    json_t *o = json_object();
    json_object_set_new(o, "running", json_integer(f->running));
    json_object_set_new(o, "waiting", json_integer(f->waiting));
    for (uint32_t reason = FINISH_STOP; reason <= FINISH_ERROR; reason++)
        json_object_set_new(o, msg_finish_name(reason), json_integer((json_int_t)f->finished[reason]));
    json_object_set_new(o, "non_finite", json_integer((json_int_t)f->non_finite));
    return o;
}

static json_t *tokens(const struct scheduler_figures *f)
{
    json_t *o = json_object();
    json_object_set_new(o, "prompt", json_integer((json_int_t)f->prompt_tokens));
    json_object_set_new(o, "cached", json_integer((json_int_t)f->cached_tokens));
    json_object_set_new(o, "generated", json_integer((json_int_t)f->generated_tokens));
    return o;
}

static json_t *steps(const struct stepper_times *f)
{
    json_t *o = json_object();
    json_object_set_new(o, "dense", json_integer((json_int_t)f->dense));
    json_object_set_new(o, "sparse", json_integer((json_int_t)f->sparse));
    json_object_set_new(o, "record", json_integer((json_int_t)f->record));
    json_object_set_new(o, "parts_dropped", json_integer((json_int_t)f->dropped));
    json_object_set_new(o, "waits_broken", json_integer((json_int_t)f->waits_broken));
    return o;
}

static json_t *times(const struct device_figures *f)
{
    json_t *o = json_object();
    json_object_set_new(o, "wait_tables", ms(f->steps.wait_tables));
    json_object_set_new(o, "wait_rows", ms(f->steps.wait_rows));
    json_object_set_new(o, "attention", ms(f->times.attention));
    json_object_set_new(o, "matmul", ms(f->times.matmul));
    json_object_set_new(o, "other", ms(f->times.other));
    json_object_set_new(o, "sampling", ms(f->requests.sampling_ns));
    return o;
}

static json_t *bus(const struct bus_counters *c)
{
    json_t *o = json_object();
    json_object_set_new(o, "sent", json_integer((json_int_t)c->sent));
    json_object_set_new(o, "received", json_integer((json_int_t)c->received));
    json_object_set_new(o, "dropped_full", json_integer((json_int_t)c->dropped_full));
    json_object_set_new(o, "dropped_late", json_integer((json_int_t)c->dropped_late));
    json_object_set_new(o, "dropped_epoch", json_integer((json_int_t)c->dropped_epoch));
    json_object_set_new(o, "refused_peers", json_integer((json_int_t)c->refused_peers));
    json_object_set_new(o, "malformed", json_integer((json_int_t)c->malformed));
    return o;
}

char *status_json(const struct status *s)
{
    json_t *o = json_object();
    json_object_set_new(o, "part", json_string("decoder"));
    json_object_set_new(o, "state", json_string(s->state));
    json_t *name = json_string(model_name(s->model)); /* NULL when it is not UTF-8 */
    json_object_set_new(o, "model", name ? name : json_null());
    json_object_set_new(o, "weight_bytes", json_integer((json_int_t)model_weight_bytes(s->model)));
    json_object_set_new(o, "context", json_integer(s->context));
    json_object_set_new(o, "sequences", json_integer(s->sequences));
    json_object_set_new(o, "chunk", json_integer(s->chunk));
    json_object_set_new(o, "threads", json_integer(s->threads));
    json_object_set_new(o, "epoch", epoch_text(s->epoch));
    json_object_set_new(o, "store_epoch", epoch_text(s->store_epoch));
    json_object_set_new(o, "bus", bus(s->bus));
    if (s->device) {
        json_object_set_new(o, "backend", json_string(s->device->backend));
        json_object_set_new(o, "activation_bytes", json_integer((json_int_t)s->device->activation_bytes));
        json_object_set_new(o, "requests", requests(&s->device->requests));
        json_object_set_new(o, "tokens", tokens(&s->device->requests));
        json_object_set_new(o, "steps", steps(&s->device->steps));
        json_object_set_new(o, "step_ms", times(s->device));
    }
    char *text = json_dumps(o, JSON_COMPACT | JSON_SORT_KEYS);
    json_decref(o);
    return text;
}
