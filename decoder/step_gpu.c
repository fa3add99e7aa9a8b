/* Steps on a GPU; see step_gpu.h. Owner: the device thread. State: the graphs of the last batches' shapes,
 * each good for as long as addresses stay, and what the step that runs is made of. */
#include "decoder/step_gpu.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/trace.h"
#include "decoder/graphs_gpu.h"
#include "decoder/inputs_gpu.h"
#include "decoder/joined_runs.h"
#include "decoder/tables_gpu.h"
#include "link/flag.h"

/* Flags of a graph: waits for runs, once more where lists of another group or the places of further layers
 * are joined inside one, for two phases' tables, and the arrival at the late one. */
enum { ROWS_STEP = 8, FLAGS_MAX = LIMIT_RUNS + LIMIT_GROUPS + 5, NO_RUN = UINT32_MAX };
#define EAGER_NS (10 * CLOCK_MS) /* for so long the end of a step is looked for without a pause */
#define PAUSE_NS (50 * INT64_C(1000))
#define BREAK_S  10 /* for the stream to end once all its waits were released */

enum profile { PROFILE_NONE, PROFILE_RUNS, PROFILE_ENDED };

struct consumed { /* what the stream raises after a run of a dense step */
    struct control_flag *flag;
    uint32_t step;
};

struct step_gpu {
    struct gpu_device *device;
    const struct gpu_api *api;
    struct pass_gpu *pass;
    struct kv_layout layout;
    struct control_header *control;
    uint32_t sequences_max, runs;
    struct inputs_gpu *inputs;
    struct tables_gpu *tables;
    const struct export *export; /* NULL: nobody reads hidden states */
    struct graphs_gpu *graphs;
    uint64_t graphs_generation;
    struct consumed consumed[LIMIT_RUNS];
    bool has_sparse;   /* a sparse step was queued */
    uint64_t since;    /* decode steps since the last prompt: which are measured follows */
    uint32_t direct;   /* so many sparse steps get no graph */
    uint32_t foreseen; /* version of the resident set that graphs were looked for */
    struct joined_runs joined;
    struct step_gpu_figures figures;
    enum profile profile; /* of the step that events measure, or measured and nobody has read */
    int profile_prompt;

    const struct step_record *record; /* of the step that runs */
    const struct step_gpu_tables *store;
    struct tables_gpu_use use;
    uint32_t early_layers, run;
    struct CUstream_st *beside;    /* copies what later layers need */
    struct tables_gpu_lists lists; /* copied last */
    uint32_t placed[2];            /* layers below it have their places: of those in pages, in slots */
    int capturing;
    uint8_t all[INPUTS_GPU_PHASES]
               [LIMIT_SEQUENCES]; /* entries that attend all positions in resident layers */
    int any_all[INPUTS_GPU_PHASES];
};

int step_gpu_create(const struct kv_layout *layout, struct control_header *control, struct pass_gpu *pass,
                    struct step_gpu **ret_step, struct err *err)
{
    struct step_gpu *g = mem_alloc(1, sizeof *g);
    g->device = pass_gpu_device(pass);
    g->api = g->device->api;
    g->graphs = graphs_gpu_create(g->api);
    joined_runs_init(&g->joined);
    g->pass = pass;
    g->layout = *layout;
    g->control = control;
    g->sequences_max = control->sequences_max;
    g->runs = layout_runs(layout);
    int r = g->api->stream_create(g->device->gpu, GPU_PRIORITY_NORMAL, &g->beside, err);
    if (r == 0)
        r = tables_gpu_create(g->device, layout, control, &g->tables, err);
    if (r == 0)
        r = inputs_gpu_create(g->device, pass_gpu_options(pass), pass_gpu_config(pass)->vocab, &g->inputs,
                              err);
    if (r < 0) {
        step_gpu_free(&g);
        return r;
    }
    for (enum places_phase phase = PLACES_EARLY; phase <= PLACES_LATE; phase++)
        inputs_gpu_let_go(g->inputs, phase, control->first_step - 1);
    atomic_store(inputs_gpu_arrived(g->inputs), control->first_step - 1);
    *ret_step = g;
    return 0;
}

void step_gpu_export(struct step_gpu *g, const struct export *export)
{
    graphs_gpu_drop(g->graphs);
    g->export = export;
}

void step_gpu_free(struct step_gpu **step)
{
    struct step_gpu *g = *step;
    if (!g)
        return;
    g->api->stream_sync(g->device->stream);
    if (g->beside) /* a step that failed may have left copies that nothing followed */
        g->api->stream_sync(g->beside);
    graphs_gpu_free(&g->graphs);
    inputs_gpu_free(&g->inputs);
    tables_gpu_free(&g->tables);
    if (g->beside)
        g->api->stream_free(g->device->gpu, &g->beside);
    mem_free(step);
}

/* ---- the tables ---- */

/* This thread's part: waits, checks, and says which table rows there are; 1: some entry attends
 * everything. */
static int read_tables(struct step_gpu *g, enum places_phase phase, const _Atomic uint32_t *arrived,
                       struct err *err)
{
    int r = g->store->wait(g->store->arg, phase, arrived, err);
    if (r < 0)
        return r;
    uint32_t offloaded = places_offloaded(g->store->places), resident = g->layout.layers - offloaded;
    if (g->record->kind == STEP_SPARSE && resident != g->use.resident)
        return err_set(err, -EPROTO, "tables: found %u resident layers, expected %u as set %u has", resident,
                       g->use.resident, g->record->resident_version);
    g->any_all[phase] = 0;
    for (uint32_t e = 0; e < g->record->entries; e++) {
        g->all[phase][e] = g->record->kind == STEP_SPARSE && places_attends_all(g->store->places, phase, e);
        g->any_all[phase] |= g->all[phase][e];
    }
    inputs_gpu_rows(g->inputs, phase, g->store->places);
    return g->any_all[phase] && resident > 0;
}

static int is_slotted(const struct step_gpu *g, uint32_t layer)
{
    return g->record->kind == STEP_SPARSE && layer >= g->use.resident;
}

static struct tables_gpu_lists lists_of(const struct step_gpu *g, uint32_t layer)
{
    return (struct tables_gpu_lists){.phase = layer < g->early_layers ? PLACES_EARLY : PLACES_LATE,
                                     .group = layout_group_of(&g->layout, layer),
                                     .slotted = is_slotted(g, layer)};
}

static int are_same(const struct tables_gpu_lists *a, const struct tables_gpu_lists *b)
{
    return a->phase == b->phase && a->group == b->group && a->slotted == b->slotted;
}

/* Copies of what the layer reads and those before it did not: of lists, and of places of layers below `end`.
 * Returns how many. */
static uint32_t copies_for_layer(struct step_gpu *g, uint32_t layer, uint32_t end,
                                 struct cuda_mapped_copy *ret_copies)
{
    struct tables_gpu_lists lists = lists_of(g, layer);
    uint32_t count = 0, *placed = &g->placed[lists.slotted];
    if (!are_same(&lists, &g->lists))
        ret_copies[count++] = tables_gpu_lists(g->tables, &g->use, &lists);
    if (lists.slotted && *placed == g->use.resident)
        ret_copies[count++] = tables_gpu_writes(g->tables, &g->use);
    if (layer >= *placed) {
        ret_copies[count++] = tables_gpu_places(g->tables, &g->use, lists.slotted, *placed, end);
        *placed = end;
    }
    g->lists = lists;
    return count;
}

/* Of the layer and those after it that lie as it does. */
static uint32_t alike_end(const struct step_gpu *g, uint32_t layer)
{
    return is_slotted(g, layer) ? g->layout.layers : g->use.resident;
}

/* Whether a layer of the phase that begins with `layer` reads lists that this one does not. */
static int others_follow(const struct step_gpu *g, uint32_t layer)
{
    struct tables_gpu_lists first = lists_of(g, layer);
    uint32_t end = first.phase == PLACES_EARLY ? g->early_layers : g->layout.layers;
    struct tables_gpu_lists last = lists_of(g, end - 1);
    return !are_same(&first, &last); /* groups and residency change in one direction only */
}

/* Waits for a phase's tables and copies what its first layer reads: by one kernel, as the layer waits for it,
 * and for layer 0 of a graph no places of the layers after, which are copied beside it. */
static int open_phase(struct step_gpu *g, uint32_t layer, struct CUstream_st *stream, struct err *err)
{
    enum places_phase phase = lists_of(g, layer).phase;
    int r = g->capturing ? g->api->flag_wait(inputs_gpu_go(g->inputs, phase), g->record->step, stream)
                         : read_tables(g, phase, NULL, err);
    if (r < 0)
        return g->capturing ? gpu_device_error(g->device, r, "a wait", err) : r;
    struct cuda_mapped_copy copies[CUDA_MAPPED_COPIES];
    uint32_t count = 0;
    copies[count++] = inputs_gpu_rows_copy(g->inputs, phase);
    if (g->record->kind == STEP_SPARSE) {
        copies[count++] = tables_gpu_counts(g->tables, &g->use, phase);
        count +=
            copies_for_layer(g, layer, g->capturing && layer == 0 ? 1 : alike_end(g, layer), copies + count);
    }
    r = g->api->copy_mapped(copies, count, stream);
    for (uint32_t e = 0; r == 0 && g->record->kind == STEP_DENSE && e < g->record->entries; e++)
        r = tables_gpu_copy_pages(g->tables, g->record->step, g->record->entry[e].sequence);
    return r < 0 ? gpu_device_error(g->device, r, "copying tables", err) : 0;
}

/* In a graph the first layer's lists are copied while its queries are computed. */
static int open_beside(struct step_gpu *g, struct err *err)
{
    int r = g->api->stream_follow(g->device->gpu, g->beside, g->device->stream);
    return r < 0 ? gpu_device_error(g->device, r, "copying tables", err) : open_phase(g, 0, g->beside, err);
}

/* Inside layer 0, and where the late phase begins. The first layer waits for its own lists alone. */
static int enter_phase(struct step_gpu *g, uint32_t layer, struct err *err)
{
    struct CUstream_st *stream = g->device->stream;
    int opened = g->capturing && layer == 0, r = 0; /* open_beside */
    if (opened)
        r = g->api->stream_follow(g->device->gpu, stream, g->beside);
    else if (g->capturing)
        r = g->api->flag_write(inputs_gpu_arrival(g->inputs), g->record->step, stream);
    if (r < 0)
        return gpu_device_error(g->device, r, "a wait", err);
    if (opened)
        return 0;
    r = open_phase(g, layer, stream, err);
    if (r < 0 || g->record->kind != STEP_SPARSE || !others_follow(g, layer))
        return r;
    r = g->api->stream_follow(g->device->gpu, g->beside, stream);
    return r < 0 ? gpu_device_error(g->device, r, "copying tables", err) : 0;
}

/* What the layer reads beyond those before is copied beside them; the stream waits for it here. */
static int join_copies(struct step_gpu *g, uint32_t layer, struct err *err)
{
    struct cuda_mapped_copy copies[CUDA_MAPPED_COPIES];
    uint32_t count = 0;
    if (g->record->kind == STEP_SPARSE)
        count = copies_for_layer(g, layer, alike_end(g, layer), copies);
    if (count == 0)
        return 0;
    int r = 0;
    for (uint32_t i = 0; i < count && r == 0; i++)
        r = tables_gpu_copy(g->tables, &copies[i], g->beside);
    if (r == 0)
        r = g->api->stream_follow(g->device->gpu, g->device->stream, g->beside);
    g->run = NO_RUN; /* the wait for the run's flag takes in both: what follows it may begin early */
    return r < 0 ? gpu_device_error(g->device, r, "copying tables", err) : 0;
}

static int joins_runs(const struct step_gpu *g)
{
    return g->joined.joined && g->early_layers == 0 && g->use.resident > 0 &&
           g->use.resident < g->layout.layers;
}

/* Whose flag the layer waits for. Runs are raised in ascending order: where no row is loaded the last one's
 * flag speaks for all. (Under `mixed` the late runs come later.) */
static uint32_t run_for(const struct step_gpu *g, uint32_t layer)
{
    uint32_t run = layout_run_of(&g->layout, layer), last = g->runs - 1;
    if (g->record->kind != STEP_SPARSE)
        return run;
    if (g->use.resident == g->layout.layers && g->early_layers == 0)
        return last;
    if (!g->capturing || !joins_runs(g))
        return run;
    uint32_t first = layout_run_of(&g->layout, g->use.resident); /* that has offloaded layers */
    return is_slotted(g, layer) ? last : run < first ? first - 1 : run;
}

static int begin_layer(void *arg, uint32_t layer, struct pass_gpu_kv *kv, struct err *err)
{
    struct step_gpu *g = arg;
    int r = 0;
    if (layer == 0 || layer == g->early_layers)
        r = enter_phase(g, layer, err);
    if (r == 0)
        r = join_copies(g, layer, err);
    if (r < 0)
        return r;
    int sparse = g->record->kind == STEP_SPARSE;
    uint32_t run = run_for(g, layer);
    if (run != g->run) {
        g->run = run;
        r = g->api->flag_wait(tables_gpu_flag(g->tables, FLAG_ROWS_READY + run), g->record->step,
                              g->device->stream);
    }
    struct pass_gpu_batch batch;
    inputs_gpu_batch(g->inputs, &batch);
    struct tables_gpu_layer at = {.layer = layer,
                                  .phase = lists_of(g, layer).phase,
                                  .sparse = sparse,
                                  .slotted = is_slotted(g, layer),
                                  .positions = batch.positions};
    tables_gpu_kv(g->tables, &at, kv);
    if (sparse && !at.slotted && !g->capturing && g->any_all[at.phase])
        kv->all = g->all[at.phase];
    return r < 0 ? gpu_device_error(g->device, r, "a wait", err) : 0;
}

static void raise_consumed(void *arg)
{
    const struct consumed *c = arg;
    flag_raise(c->flag, c->step);
}

static int end_layer(void *arg, uint32_t layer, struct err *err)
{
    struct step_gpu *g = arg;
    uint32_t run = layout_run_of(&g->layout, layer);
    if (g->record->kind != STEP_DENSE || layer + 1 != layout_run_first(&g->layout, run + 1))
        return 0;
    g->consumed[run] =
        (struct consumed){control_flag_at(g->control, FLAG_RUN_CONSUMED + run), g->record->step};
    int r = g->api->host_call(g->device->stream, raise_consumed, &g->consumed[run]);
    return r < 0 ? gpu_device_error(g->device, r, "a host call", err) : 0;
}

static int pass_hidden(void *arg, uint32_t layer, const float *x, struct err *err)
{
    struct step_gpu *g = arg;
    const uint32_t *rows = inputs_gpu_features(g->inputs);
    int r = rows ? export_queue(g->export, layer, x, rows, g->record->tokens) : 0;
    return r < 0 ? gpu_device_error(g->device, r, "hidden states", err) : 0;
}

/* ---- queueing ---- */

/* What queue_step needs. A graph that is launched again does not: it holds what was planned. */
static int prepare(struct step_gpu *g, struct err *err)
{
    struct pass_gpu_batch batch;
    inputs_gpu_batch(g->inputs, &batch);
    return pass_gpu_prepare(g->pass, batch.n, batch.logits, err);
}

/* Everything of the step, from its inputs to the chosen ids. */
static int queue_step(struct step_gpu *g, struct err *err)
{
    struct pass_gpu_batch batch;
    struct pass_gpu_sampling sampling;
    struct pass_gpu_source source = {begin_layer, end_layer, g->export ? pass_hidden : NULL, g};
    inputs_gpu_batch(g->inputs, &batch);
    inputs_gpu_sampling(g->inputs, &sampling);
    batch.row_count = g->sequences_max;
    g->run = NO_RUN;
    g->placed[0] = 0;
    g->placed[1] = g->use.resident;
    g->lists.group = LIMIT_GROUPS; /* none */
    int r = inputs_gpu_queue(g->inputs);
    if (r < 0)
        return gpu_device_error(g->device, r, "copying inputs", err);
    if (g->capturing)
        r = open_beside(g, err);
    if (r < 0)
        return r;
    r = pass_gpu_queue(g->pass, &batch, &source, err);
    if (r < 0 || batch.logits == 0)
        return r;
    return pass_gpu_sample(g->pass, batch.logits, &sampling, err); /* ret_ids: host memory, mapped */
}

static int capture(struct step_gpu *g, struct gpu_graph **ret_graph, struct err *err)
{
    struct err end_err = {0};
    int r = prepare(g, err);
    if (r == 0)
        r = g->api->capture_begin(g->device->stream, err);
    if (r < 0)
        return r;
    g->capturing = 1;
    r = queue_step(g, err);
    g->capturing = 0;
    int end = g->api->capture_end(g->device->gpu, g->device->stream, ret_graph, &end_err);
    if (r == 0 && end < 0)
        return err_set(err, end, "%s", end_err.text);
    if (r < 0 && end == 0)
        g->api->graph_free(ret_graph);
    g->figures.captured += r == 0;
    return r;
}

/* The graph of this step's shape: kept, or made in place of the one used longest ago. */
static int find_graph(struct step_gpu *g, const struct graphs_gpu_shape *shape, struct gpu_graph **ret_graph,
                      struct err *err)
{
    if (g->graphs_generation != inputs_gpu_generation(g->inputs)) {
        graphs_gpu_drop(g->graphs);
        g->graphs_generation = inputs_gpu_generation(g->inputs);
    }
    *ret_graph = graphs_gpu_find(g->graphs, shape);
    if (*ret_graph)
        return 0;
    int r = capture(g, ret_graph, err);
    if (r == 0)
        graphs_gpu_keep(g->graphs, shape, *ret_graph);
    return r;
}

static struct graphs_gpu_shape shape_of(const struct step_gpu *g)
{
    return (struct graphs_gpu_shape){.entries = g->record->entries,
                                     .parity = g->use.step & 1,
                                     .rows = g->use.rows,
                                     .resident = g->use.resident,
                                     .early_layers = g->early_layers,
                                     .penalized = inputs_gpu_penalizes(g->inputs) != 0,
                                     .exported = inputs_gpu_features(g->inputs) != NULL,
                                     .joined_runs = joins_runs(g) != 0};
}

/* While a step is computed: makes the graphs of the next two for a resident set, mostly with the same batch.
 * Each takes some ms, that a step would wait for. */
static int make_ahead(struct step_gpu *g, uint32_t resident, struct err *err)
{
    const struct tables_gpu_use now = g->use;
    int r = 0;
    for (uint32_t ahead = 1; ahead <= 2 && r == 0; ahead++) {
        struct gpu_graph *graph;
        g->use = (struct tables_gpu_use){now.step + ahead, now.rows, resident};
        struct graphs_gpu_shape shape = shape_of(g);
        r = find_graph(g, &shape, &graph, err);
    }
    g->use = now;
    return r;
}

/* For the resident set that the store has proposed meanwhile. */
static int foresee(struct step_gpu *g, struct err *err)
{
    const struct control_flag *flag = control_flag_at(g->control, FLAG_RESIDENT_PROPOSED);
    uint32_t version = atomic_load_explicit(&flag->value, memory_order_acquire);
    if (version == g->foreseen || g->record->kind != STEP_SPARSE || g->figures.launched == 0 ||
        version - g->record->resident_version >= FLAG_ABORT_AHEAD / 2)
        return 0;
    g->foreseen = version;
    uint32_t resident = g->control->resident_layers[version % CONTROL_RESIDENT_RING];
    return resident > g->layout.layers ? 0 : make_ahead(g, resident, err); /* begin_step says so */
}

static void flag_values(const struct step_gpu *g, const struct gpu_graph *graph, uint32_t step,
                        uint32_t *ret_values)
{
    CHECK(g->api->graph_flags(graph) <= FLAGS_MAX);
    for (uint32_t i = 0; i < FLAGS_MAX; i++)
        ret_values[i] = step;
}

/* While a step is computed, for the next, which has the same shape, mostly, but for the parity: its graph,
 * where the steps before speak for another way to wait for rows, and its flags. */
static int look_ahead(struct step_gpu *g, struct err *err)
{
    int r = 0, changes = g->joined.joined != g->joined.wanted;
    uint32_t values[FLAGS_MAX];
    g->joined.joined = g->joined.wanted;
    g->figures.rejoined += (uint64_t)changes;
    if (changes)
        r = make_ahead(g, g->use.resident, err);
    struct graphs_gpu_shape shape = shape_of(g);
    shape.parity ^= 1;
    struct gpu_graph *graph = r == 0 && g->figures.launched ? graphs_gpu_find(g->graphs, &shape) : NULL;
    if (!graph)
        return r;
    flag_values(g, graph, g->record->step + 1, values);
    r = g->api->graph_set(graph, values);
    return r < 0 ? gpu_device_error(g->device, r, "a step's flags", err) : 0;
}

static void look_at_rows(struct step_gpu *g)
{
    const struct control_flag *flag = control_flag_at(g->control, FLAG_ROWS_READY + g->runs - 1);
    if ((int32_t)(atomic_load_explicit(&flag->value, memory_order_acquire) - g->record->step) >= 0)
        joined_runs_ready(&g->joined, clock_now_ns());
}

/* 1: it was to no purpose, and the step must be queued in another way. */
static int launch_graph(struct step_gpu *g, struct err *err)
{
    struct graphs_gpu_shape shape = shape_of(g);
    struct gpu_graph *graph;
    uint32_t values[FLAGS_MAX];
    int r = find_graph(g, &shape, &graph, err);
    if (r < 0)
        return r;
    flag_values(g, graph, g->record->step, values);
    r = g->api->graph_launch(graph, values, g->device->stream);
    if (r < 0)
        return gpu_device_error(g->device, r, "launching a step", err);
    trace(TRACE_LAUNCHED, g->record->step);
    joined_runs_launched(&g->joined, clock_now_ns());
    g->figures.launched++;
    int again = 0;
    for (enum places_phase phase = g->early_layers ? PLACES_EARLY : PLACES_LATE; phase <= PLACES_LATE;
         phase++) {
        int later = phase == PLACES_LATE && g->early_layers;
        r = read_tables(g, phase, later ? inputs_gpu_arrived(g->inputs) : NULL, err);
        if (r < 0)
            return r;
        again |= r;
        if (again)
            inputs_gpu_void(g->inputs);
        inputs_gpu_let_go(g->inputs, phase, g->record->step);
    }
    look_at_rows(g);
    return again;
}

/* ---- the end ---- */

/* -ETIMEDOUT: it goes on. */
static int wait_end(struct step_gpu *g, int64_t deadline_ns, struct err *err)
{
    int64_t begin = clock_now_ns();
    for (;;) {
        int done = g->api->stream_done(g->device->stream);
        if (done < 0)
            return gpu_device_error(g->device, done, "a step", err);
        look_at_rows(g);
        int r = foresee(g, err);
        if (r < 0 || done)
            return r;
        int64_t now = clock_now_ns();
        if (now > deadline_ns)
            return -ETIMEDOUT;
        if (now - begin < EAGER_NS)
            sched_yield();
        else
            ppoll(NULL, 0, &(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    }
}

/* Sees the end of all that was queued of the step. */
static int finish(struct step_gpu *g, struct err *err)
{
    uint32_t step = g->record->step;
    g->store->meanwhile(g->store->arg);
    int r = g->record->kind == STEP_SPARSE ? look_ahead(g, err) : 0;
    if (r == 0)
        r = wait_end(g, clock_now_ns() + STEPPER_WAIT_S * CLOCK_S, err);
    if (r == 0)
        joined_runs_end(&g->joined, g->use.resident, g->layout.layers, clock_now_ns());
    if (r == -ETIMEDOUT)
        return err_set(err, r, "step %u did not end within %d s: the kvstore's rows or the GPU are late",
                       step, STEPPER_WAIT_S);
    for (uint32_t run = 0; r == 0 && run < g->runs; run++)
        if (flag_aborted(control_flag_at(g->control, FLAG_ROWS_READY + run), step))
            r = err_set(err, -ECANCELED,
                        "step %u was broken off while it waited for the kvstore to have the rows ready",
                        step);
    return r;
}

/* Lets go of every wait of a step that failed, with no rows, so that it writes nothing, and sees it end. A
 * stream that does not end then never will, and neither would a process that frees what it may use: freeing
 * waits for the stream. */
static void give_up(struct step_gpu *g, const struct err *why)
{
    struct err err = {0};
    inputs_gpu_void(g->inputs);
    for (enum places_phase phase = PLACES_EARLY; phase <= PLACES_LATE; phase++)
        inputs_gpu_let_go(g->inputs, phase, g->record->step);
    flag_abort_all(g->control);
    if (wait_end(g, clock_now_ns() + BREAK_S * CLOCK_S, &err) != -ETIMEDOUT)
        return;
    log_error("%s; nor did the GPU's stream end within the %d s after", why->text, BREAK_S);
    _exit(1);
}

/* ---- a step ---- */

static uint32_t rows_of(const struct step_gpu *g)
{
    uint32_t most = 0;
    for (uint32_t e = 0; e < g->record->entries; e++)
        most = g->record->entry[e].sequence >= most ? g->record->entry[e].sequence + 1 : most;
    CHECK(most <= g->sequences_max);
    most = (most + ROWS_STEP - 1) / ROWS_STEP * ROWS_STEP;
    return most < g->sequences_max ? most : g->sequences_max;
}

static int begin_step(struct step_gpu *g, const struct stepper_spec *spec, struct err *err)
{
    const struct step_record *record = g->record;
    uint32_t resident = g->control->resident_layers[record->resident_version % CONTROL_RESIDENT_RING];
    if (resident > g->layout.layers)
        return err_set(err, -EPROTO, "resident set %u: found %u layers, expected at most %u",
                       record->resident_version, resident, g->layout.layers);
    g->use = (struct tables_gpu_use){record->step, rows_of(g), resident};
    joined_runs_begin(&g->joined);
    int mixed = record->kind == STEP_SPARSE && record->selection == SELECTION_MIXED;
    g->early_layers = mixed ? record->early_layers : 0;
    return inputs_gpu_begin(g->inputs, record, spec, err);
}

static int queue_direct(struct step_gpu *g, struct err *err)
{
    int r = prepare(g, err);
    return r < 0 ? r : queue_step(g, err);
}

/* With a graph, and where that was to no purpose once more without. */
static int run_graph(struct step_gpu *g, struct err *err)
{
    int r = launch_graph(g, err);
    if (r <= 0)
        return r;
    g->figures.repeated++;
    g->direct = STEP_GPU_DIRECT;
    r = finish(g, err);
    return r < 0 ? r : queue_direct(g, err);
}

/* Reads what events measured of a step that has ended. It takes some hundred calls: not between two steps,
 * where the stream would wait for it. */
static void collect(struct step_gpu *g)
{
    int64_t wait_before = g->figures.times.wait;
    if (g->profile != PROFILE_ENDED)
        return;
    g->profile = PROFILE_NONE;
    if (pass_gpu_collect(g->pass, &g->figures.times) <= 0)
        return;
    g->figures.profiled++;
    if (!g->profile_prompt)
        waits_add(&g->figures.waits, g->figures.times.wait - wait_before);
}

static void begin_profile(struct step_gpu *g, int prompt)
{
    collect(g); /* its events are used again */
    g->profile = PROFILE_RUNS;
    g->profile_prompt = prompt;
    pass_gpu_profile(g->pass, 1);
}

/* Events measure each step of a prompt, and of those that follow one of PROFILE_EVERY, but not the first. The
 * first sparse step is queued launch by launch too, so that every kernel is loaded before one is captured. */
static int queue_or_launch(struct step_gpu *g, const struct stepper_spec *spec, struct err *err)
{
    int sparse = spec->kind == STEP_SPARSE;
    g->since = spec->prompt ? 0 : g->since + 1;
    int measured = spec->prompt || g->since % STEP_GPU_PROFILE_EVERY == STEP_GPU_PROFILE_AT;
    if (sparse && g->has_sparse && !measured && g->direct == 0)
        return run_graph(g, err);
    g->has_sparse |= sparse;
    g->direct -= sparse && g->direct > 0;
    if (measured)
        begin_profile(g, spec->prompt);
    int r = queue_direct(g, err);
    if (measured)
        pass_gpu_profile(g->pass, 0);
    return r;
}

int step_gpu_run(struct step_gpu *g, const struct step_record *record, const struct stepper_spec *spec,
                 const struct step_gpu_tables *tables, int32_t *ret_tokens, struct err *err)
{
    g->record = record;
    g->store = tables;
    int r = begin_step(g, spec, err);
    if (r == 0)
        r = queue_or_launch(g, spec, err);
    if (r == 0)
        r = finish(g, err);
    trace(TRACE_ENDED, record->step);
    if (r < 0) {
        tables->meanwhile(tables->arg); /* to see the end may take long, or end the process */
        give_up(g, err);
        return r;
    }
    for (uint32_t i = 0; i < record->entries; i++)
        ret_tokens[i] = inputs_gpu_chosen(g->inputs, i);
    if (g->profile == PROFILE_RUNS)
        g->profile = PROFILE_ENDED;
    return 0;
}

void step_gpu_figures(struct step_gpu *g, struct step_gpu_figures *ret)
{
    collect(g);
    *ret = g->figures;
}
