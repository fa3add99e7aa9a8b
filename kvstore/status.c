/* Figures of the store for people and for metrics; see status.h. Loop thread. */
#include "kvstore/status.h"

#include "link/figures.h"
#include "proto/memory.h"

static void put_layout(json_t *root, const struct kv_layout *l)
{
    json_t *o = figures_section(root, "layout");
    figures_hex(o, "fingerprint", layout_fingerprint(l).lo);
    figures_hex(o, "model", l->model.lo);
    figures_count(o, "layers", l->layers);
    figures_count(o, "row_heads", l->row_heads);
    figures_count(o, "selection_heads", l->selection_heads);
    figures_count(o, "groups", l->groups);
    figures_count(o, "runs", layout_runs(l));
    figures_count(o, "piece_bytes", l->piece_bytes);
    figures_count(o, "context", l->context_max);
}

static void put_memory(json_t *root, const struct store_worker_stats *s)
{
    json_t *o = figures_section(root, "device");
    figures_count(o, "bytes", s->device_bytes);
    figures_count(o, "slab_bytes", s->slab_bytes);
    figures_count(o, "page_bytes", s->page_bytes);
    figures_count(o, "slabs", s->slabs);
    figures_count(o, "slabs_free", s->slabs_free);
    figures_count(o, "slabs_slots", s->slabs_slots);
    figures_count(o, "slabs_staging", s->slabs_staging);
    figures_count(o, "slabs_pages", s->slabs - s->slabs_free - s->slabs_slots - s->slabs_staging);
    figures_count(o, "pages", s->pages);
    figures_count(o, "slots", s->slots);
    figures_count(o, "staging_tokens", s->staging_tokens);
    figures_count(o, "list_max", s->list_max);
    o = figures_section(root, "host");
    figures_count(o, "bytes", s->arena_bytes);
    figures_count(o, "layers", s->host_layers);
    figures_count(o, "block_bytes", s->block_bytes);
    figures_count(o, "blocks", s->blocks);
    figures_count(o, "blocks_used", s->blocks_present - s->blocks_free - s->blocks_cached);
    figures_count(o, "blocks_cached", s->blocks_cached);
    figures_count(o, "blocks_free", s->blocks - (s->blocks_present - s->blocks_free));
    figures_count(root, "control_bytes", s->control_bytes);
}

static void put_gpu(json_t *root, const struct store_worker_gpu *g)
{
    if (!g->device)
        return;
    json_t *o = figures_section(root, "gpu");
    figures_text(o, "device", g->device);
    figures_text(o, "uuid", g->uuid);
    figures_bool(o, "mps", g->mps);
    figures_count(o, "context_bytes", g->context_bytes);
    figures_count(o, "kv_bytes", g->kv_bytes);
    figures_count(o, "tables_bytes", g->tables_bytes);
    figures_count(o, "total_bytes", g->context_bytes + g->kv_bytes + g->tables_bytes);
    figures_count(o, "host_registered_bytes", g->registered_bytes);
    figures_count(o, "reached_ahead", g->reached_ahead);
    figures_count(o, "reached_late", g->reached_late);
    figures_count(o, "reached_touched", g->reached_touched);
}

static void put_counters(json_t *root, const char *key, const struct kv_counters *c)
{
    json_t *o = figures_section(root, key);
    figures_count(o, "steps", c->steps);
    figures_count(o, "attended", c->attended);
    figures_count(o, "lists", c->lists);
    figures_count(o, "selected", c->selected);
    figures_count(o, "kept", c->kept);
    figures_count(o, "rows_loaded", c->rows_loaded);
    figures_count(o, "bytes_loaded", c->bytes_loaded);
    figures_count(o, "bytes_if_reloaded", c->bytes_if_reloaded);
    figures_count(o, "rows_filled", c->rows_filled);
    figures_count(o, "bytes_filled", c->bytes_filled);
    figures_count(o, "bytes_written", c->bytes_written);
    figures_real(o, "mass_mean", c->mass_count ? c->mass_sum / (double)c->mass_count : 0);
    figures_real(o, "mass_base_mean", c->mass_count ? c->mass_base_sum / (double)c->mass_count : 0);
    figures_count(o, "selections_grown", c->grown);
    figures_count(o, "fallbacks", c->fallbacks);
}

static void put_totals(json_t *root, const struct planner_totals *t)
{
    json_t *o = figures_section(root, "totals");
    figures_count(o, "steps_dense", t->steps_dense);
    figures_count(o, "steps_sparse", t->steps_sparse);
    figures_count(o, "steps_record", t->steps_record);
    figures_count(o, "sets", t->sets);
    figures_count(o, "sets_refused", t->sets_refused);
    figures_count(o, "opened", t->opened);
    figures_count(o, "refused", t->refused);
    figures_count(o, "closed", t->closed);
    figures_count(o, "offloads", t->offloads);
    figures_count(o, "returns", t->returns);
    figures_count(o, "blocks_evicted", t->blocks_evicted);
    figures_count(o, "prompt_tokens", t->prompt_tokens);
    figures_count(o, "reused_tokens", t->reused_tokens);
    figures_count(o, "plan_us", (uint64_t)(t->plan_ns / 1000));
    figures_count(o, "gather_us", (uint64_t)(t->gather_ns / 1000));
    figures_count(o, "move_us", (uint64_t)(t->move_ns / 1000));
    figures_count(o, "waits_broken", t->waits_broken);
}

static void put_sequences(json_t *root, const struct store_worker_stats *s)
{
    json_t *list = figures_list(root, "sequences");
    for (uint32_t i = 0; i < s->live_count; i++) {
        const struct store_worker_sequence *q = &s->sequences[i];
        json_t *o = figures_item(list);
        figures_count(o, "id", q->id);
        figures_count(o, "index", q->index);
        figures_count(o, "prompt_tokens", q->prompt);
        figures_count(o, "tokens", q->next);
        figures_count(o, "committed", q->committed);
        figures_count(o, "capacity", q->capacity);
        figures_count(o, "budget", q->budget);
        figures_bool(o, "attached", q->attached);
    }
}

static void put_stats(json_t *root, const struct store_worker_stats *s)
{
    static const char *const STATES[] = {[STEP_IDLE] = "idle",
                                         [STEP_SETS] = "waits for a selection",
                                         [STEP_STAGED] = "staging",
                                         [STEP_WRITTEN] = "waits for the decoder",
                                         [STEP_CONSUMED] = "waits for the decoder"};
    figures_hex(root, "epoch", s->store_epoch);
    figures_hex(root, "decoder_epoch", s->decoder_epoch);
    figures_count(root, "step", s->step);
    figures_text(root, "step_state", STATES[s->state]);
    figures_count(root, "layers_resident", s->layers_resident);
    figures_count(root, "layers_offloaded", s->layers - s->layers_resident);
    figures_count(root, "resident_version", s->version);
    figures_count(root, "resident_proposed", s->proposed);
    figures_count(root, "answers_lost", s->answers_lost);
    put_memory(root, s);
    put_gpu(root, &s->gpu);
    put_counters(root, "counters_live", &s->live);
    put_counters(root, "counters_closed", &s->totals.counters);
    put_totals(root, &s->totals);
    put_sequences(root, s);
}

char *status_of_store(const struct status_source *source)
{
    json_t *root = json_object();
    figures_text(root, "part", "kvstore");
    figures_text(root, "version", SPECONTEXT_VERSION);
    figures_text(root, "state", source->state);
    figures_bool(root, "elastic", !source->options->no_elastic);
    figures_bool(root, "offload", !source->options->no_offload);
    figures_text(root, "write_through", memory_through_name(source->options->write_through));
    if (source->stats) {
        put_layout(root, source->layout);
        put_stats(root, source->stats);
    }
    figures_bus(root, source->bus);
    return figures_finish(&root);
}
