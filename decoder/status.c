/* Figures as JSON; see status.h. No state. Loop thread. */
#include "decoder/status.h"

#include "link/figures.h"

static void put_requests(json_t *root, const struct scheduler_figures *f)
{
    json_t *o = figures_section(root, "requests");
    figures_count(o, "running", f->running);
    figures_count(o, "waiting", f->waiting);
    for (uint32_t reason = FINISH_STOP; reason <= FINISH_ERROR; reason++)
        figures_count(o, msg_finish_name(reason), f->finished[reason]);
    figures_count(o, "non_finite", f->non_finite);
    figures_count(o, "begun_again", f->begun_again);
}

static void put_tokens(json_t *root, const struct scheduler_figures *f)
{
    json_t *o = figures_section(root, "tokens");
    figures_count(o, "prompt", f->prompt_tokens);
    figures_count(o, "cached", f->cached_tokens);
    figures_count(o, "generated", f->generated_tokens);
}

static void put_steps(json_t *root, const struct stepper_times *f)
{
    json_t *o = figures_section(root, "steps");
    figures_count(o, "dense", f->dense);
    figures_count(o, "sparse", f->sparse);
    figures_count(o, "record", f->record);
    figures_count(o, "parts_dropped", f->dropped);
    figures_count(o, "waits_broken", f->waits_broken);
    json_t *list = figures_list(o, "moves"); /* [sparse steps so far, layers offloaded from then on] */
    uint64_t first = f->move_count > STEPPER_MOVES ? f->move_count - STEPPER_MOVES : 0;
    for (uint64_t i = first; i < f->move_count; i++)
        json_array_append_new(list, json_pack("[I,i]", (json_int_t)f->moves[i % STEPPER_MOVES].sparse,
                                              (int)f->moves[i % STEPPER_MOVES].offloaded));
}

static void put_times(json_t *root, const struct device_figures *f)
{
    json_t *o = figures_section(root, "step_ms");
    figures_ms(o, "wait_tables", f->steps.wait_tables);
    figures_ms(o, "wait_rows", f->on_gpu ? f->gpu_steps.times.wait : f->steps.wait_rows);
    figures_ms(o, "attention", f->times.attention);
    figures_ms(o, "matmul", f->times.matmul);
    figures_ms(o, "other", f->times.other);
    figures_ms(o, "sampling", f->on_gpu ? f->gpu_steps.times.sampling : f->steps.sampling);
}

static void put_waits(json_t *o, const char *key, const struct waits *w)
{
    json_t *to = figures_section(o, key);
    figures_count(to, "steps", w->total);
    figures_real(to, "p50", (double)waits_quantile_ns(w, 0.5) * 1e-3);
    figures_real(to, "p99", (double)waits_quantile_ns(w, 0.99) * 1e-3);
    json_t *list =
        figures_list(to, "below"); /* [microseconds, steps that waited less and longer than the last] */
    for (uint32_t i = 0; i < WAITS_BUCKETS; i++)
        if (w->count[i])
            json_array_append_new(
                list, json_pack("[f,I]", (double)waits_bound_ns(i) * 1e-3, (json_int_t)w->count[i]));
}

/* Of a GPU, `rows` are the stream's waits in the steps that were measured, for tables and rows. */
static void put_wait_lengths(json_t *root, const struct device_figures *f)
{
    json_t *o = figures_section(root, "wait_us");
    put_waits(o, "tables", &f->steps.tables);
    put_waits(o, "rows", f->on_gpu ? &f->gpu_steps.waits : &f->steps.rows);
}

/* Of a GPU, step_ms sums the steps that were measured (decoder/step_gpu.h), but for wait_tables, which is
 * measured in every step. */
static void put_gpu(json_t *root, const struct device_figures *f)
{
    json_t *o = figures_section(root, "gpu");
    const struct gpu_device_figures *g = &f->gpu;
    figures_text(o, "device", g->info.name);
    figures_text(o, "uuid", g->info.uuid);
    figures_bool(o, "mps", g->info.mps);
    figures_count(o, "context_bytes", g->info.context_bytes);
    figures_count(o, "weights_bytes", g->bytes[GPU_DEVICE_WEIGHTS]);
    figures_count(o, "activations_bytes", g->bytes[GPU_DEVICE_ACTIVATIONS]);
    figures_count(o, "tables_bytes", g->bytes[GPU_DEVICE_TABLES]);
    figures_count(o, "workspace_bytes", g->bytes[GPU_DEVICE_WORKSPACE]);
    figures_count(o, "features_bytes", g->bytes[GPU_DEVICE_FEATURES]);
    figures_count(o, "library_bytes", g->library_bytes);
    figures_count(o, "total_bytes", g->total_bytes);
    figures_count(o, "graphs_made", f->gpu_steps.captured);
    figures_count(o, "graphs_launched", f->gpu_steps.launched);
    figures_count(o, "steps_repeated", f->gpu_steps.repeated);
    figures_count(o, "steps_measured", f->gpu_steps.profiled);
}

/* Hidden states that the retriever's head reads. */
static void put_features(json_t *root, const struct export_figures *f)
{
    json_t *o = figures_section(root, "features");
    figures_count(o, "rows", f->rows);
    figures_count(o, "bytes", f->bytes);
    figures_bool(o, "on_gpu", f->on_gpu);
    figures_count(o, "waits", f->waits);
    figures_ms(o, "wait_ms", f->wait_ns);
}

char *status_of_decoder(const struct status *s)
{
    json_t *o = json_object();
    figures_text(o, "part", "decoder");
    figures_text(o, "state", s->state);
    figures_text(o, "model", model_name(s->model));
    figures_count(o, "weight_bytes", model_weight_bytes(s->model));
    figures_count(o, "context", s->context);
    figures_count(o, "sequences", s->sequences);
    figures_count(o, "chunk", s->chunk);
    figures_count(o, "threads", s->threads);
    figures_hex(o, "epoch", s->epoch);
    figures_hex(o, "store_epoch", s->store_epoch);
    figures_bus(o, s->bus);
    if (s->device) {
        figures_text(o, "backend", s->device->backend);
        figures_count(o, "activation_bytes", s->device->activation_bytes);
        put_requests(o, &s->device->requests);
        put_tokens(o, &s->device->requests);
        put_steps(o, &s->device->steps);
        put_times(o, s->device);
        put_wait_lengths(o, s->device);
        if (s->device->features.rows)
            put_features(o, &s->device->features);
        if (s->device->on_gpu)
            put_gpu(o, s->device);
    }
    return figures_finish(&o);
}
