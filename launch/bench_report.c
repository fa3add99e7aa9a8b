/* Turns rows into a table and into JSON. No state; called once, after all is measured. */
#include "launch/bench_report.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "proto/memory.h"

#define MIB (1024.0 * 1024.0)

void bench_row_init(struct bench_row *row, enum bench_kind kind, uint32_t depth,
                    const struct bench_options *options)
{
    *row = (struct bench_row){
        .kind = kind,
        .depth = depth,
        .tokens = kind == BENCH_PREFILL ? options->prompt : options->decode,
        .rates = mem_alloc(options->repeats, sizeof *row->rates),
        .cpu = mem_alloc(options->repeats, sizeof *row->cpu),
        .step_ms = kind == BENCH_DECODE
                       ? mem_alloc((size_t)options->repeats * options->decode, sizeof *row->step_ms)
                       : NULL,
        .attended = (double)NAN};
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void bench_row_close(struct bench_row *row)
{
    qsort(row->rates, row->repeats, sizeof *row->rates, by_value);
    qsort(row->cpu, row->repeats, sizeof *row->cpu, by_value);
}

void bench_row_free(struct bench_row *row)
{
    mem_free(&row->rates);
    mem_free(&row->cpu);
    mem_free(&row->step_ms);
    bench_parts_free(&row->parts);
}

double bench_median(const double *sorted, uint32_t count)
{
    if (count == 0)
        return (double)NAN;
    return (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
}

double bench_row_step_ms(const struct bench_report *report, const struct bench_row *row)
{
    return row->kind == BENCH_DECODE
               ? 1e3 * report->options->parallel / bench_median(row->rates, row->repeats)
               : (double)NAN;
}

double bench_row_floor_ms(const struct bench_report *report, const struct bench_row *row)
{
    return row->step_bytes && report->bandwidth > 0 ? 1e3 * (double)row->step_bytes / report->bandwidth
                                                    : (double)NAN;
}

double bench_row_share(const struct bench_report *report, const struct bench_row *row)
{
    return bench_row_floor_ms(report, row) / bench_row_step_ms(report, row);
}

static double loaded_a_step(const struct bench_row *row)
{
    return bench_parts_mean(row->parts.bytes_loaded, row->parts.store_steps);
}

/* What a step loads against what the link carries in that time; NAN on the CPU. */
static double link_share(const struct bench_report *r, const struct bench_row *row)
{
    if (!r->gpu || !(r->gpu->link_rate > 0))
        return (double)NAN;
    return loaded_a_step(row) / (r->gpu->link_rate * 1e-3 * bench_row_step_ms(r, row));
}

static uint64_t gpu_bytes(const struct bench_row *row)
{
    uint64_t sum = 0;
    for (int part = 0; part < CLIENT_PARTS; part++)
        sum += bench_parts_gpu_bytes(&row->parts, (enum client_part)part);
    return sum;
}

static const char *kind_name(enum bench_kind kind)
{
    return kind == BENCH_PREFILL ? "prefill" : "decode";
}

static double lowest(const struct bench_row *row)
{
    return row->repeats ? row->rates[0] : (double)NAN;
}

static double highest(const struct bench_row *row)
{
    return row->repeats ? row->rates[row->repeats - 1] : (double)NAN;
}

/* " 3.10 |", or " - |". */
static void put_cell(FILE *to, int decimals, double value)
{
    if (isfinite(value))
        fprintf(to, " %.*f |", decimals, value);
    else
        fputs(" - |", to);
}

static void gpu_cells(const struct bench_report *r, const struct bench_row *row, FILE *to)
{
    put_cell(to, 2, link_share(r, row));
    for (int part = 0; part < CLIENT_PARTS; part++)
        put_cell(to, 0, (double)bench_parts_gpu_bytes(&row->parts, (enum client_part)part) / MIB);
    put_cell(to, 0, (double)gpu_bytes(row) / MIB);
}

/* Where the time of decode steps goes; on a GPU also what of it is taken. Waits for tables and rows as
 * p50 / p99. */
static void step_table(const struct bench_report *r, FILE *to)
{
    fprintf(to,
            "\n| depth | step ms | floor ms | x floor | wait | attention | matmul | sampling | other | "
            "retrieval | tables p50 us | p99 | rows p50 us | p99 | loads MB |%s\n"
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|%s\n",
            r->gpu ? " of link | GPU MiB: store | retriever | decoder | all |" : "",
            r->gpu ? "---|---|---|---|---|" : "");
    for (uint32_t i = 0; i < r->row_count; i++) {
        const struct bench_row *row = &r->rows[i];
        const struct bench_parts *p = &row->parts;
        if (row->kind != BENCH_DECODE)
            continue;
        double retrieval = p->append_ms + p->score_ms + p->topk_ms + p->encode_ms;
        const double times[] = {p->wait_ms, p->attention_ms, p->matmul_ms, p->sampling_ms, p->other_ms};
        fprintf(to, "| %u |", row->depth);
        put_cell(to, 3, bench_row_step_ms(r, row));
        put_cell(to, 3, bench_row_floor_ms(r, row));
        put_cell(to, 2, 1 / bench_row_share(r, row));
        for (size_t t = 0; t < sizeof times / sizeof *times; t++)
            put_cell(to, 3, bench_parts_mean(times[t], p->steps));
        put_cell(to, 3, bench_parts_mean(retrieval, p->retriever_steps));
        put_cell(to, 0, bench_waits_quantile(&p->tables, 0.5));
        put_cell(to, 0, bench_waits_quantile(&p->tables, 0.99));
        put_cell(to, 0, bench_waits_quantile(&p->rows, 0.5));
        put_cell(to, 0, bench_waits_quantile(&p->rows, 0.99));
        put_cell(to, 2, 1e-6 * loaded_a_step(row));
        if (r->gpu)
            gpu_cells(r, row, to);
        fputs("\n", to);
    }
}

void bench_report_table(const struct bench_report *r, FILE *to)
{
    const struct bench_options *o = r->options;
    fprintf(to, "%s, %u cores, ", r->model_name, r->cores);
    if (r->gpu)
        fprintf(to, "%s%s", r->gpu->name, r->gpu->mps ? " with MPS" : "");
    else
        fprintf(to, "activations %s", o->run.activations ? "q8" : "f32");
    fprintf(to, ", attention %s", run_options_attention_name(&o->run));
    if (o->run.attention == RUN_SPARSE)
        fprintf(to, ", selection %s, budget %u", run_options_selection_name(&o->run), o->run.budget);
    fprintf(to, "; %s: %.1f GB/s", r->gpu ? "copies on the device" : "reading weights", r->bandwidth * 1e-9);
    if (r->gpu)
        fprintf(to, ", from the host: %.1f GB/s", r->gpu->link_rate * 1e-9);
    fputs("\n\n", to);
    fputs("| what | depth | sequences | tokens/s | min | max | step reads MB | of bandwidth | cpu ms/token | "
          "PSS MiB |\n|---|---|---|---|---|---|---|---|---|---|\n",
          to);
    for (uint32_t i = 0; i < r->row_count; i++) {
        const struct bench_row *row = &r->rows[i];
        fprintf(to, "| %s %u | %u | %u | %.1f | %.1f | %.1f |", kind_name(row->kind), row->tokens, row->depth,
                o->parallel, bench_median(row->rates, row->repeats), lowest(row), highest(row));
        if (row->step_bytes)
            fprintf(to, " %.1f | %.0f %% |", (double)row->step_bytes * 1e-6, 100 * bench_row_share(r, row));
        else
            fputs(" - | - |", to);
        fprintf(to, " %.3f | %.0f |\n", 1e3 * bench_median(row->cpu, row->repeats),
                (double)row->memory.pss / MIB);
    }
    step_table(r, to);
}

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *list_of(const double *values, uint32_t count)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < count; i++)
        json_array_append_new(list, number(values[i]));
    return list;
}

/* Means over the steps of a row that were measured. */
static json_t *split_json(const struct bench_parts *p)
{
    json_t *o = json_object();
    json_object_set_new(o, "steps", json_integer((json_int_t)p->steps));
    json_object_set_new(o, "wait_ms", number(bench_parts_mean(p->wait_ms, p->steps)));
    json_object_set_new(o, "attention_ms", number(bench_parts_mean(p->attention_ms, p->steps)));
    json_object_set_new(o, "matmul_ms", number(bench_parts_mean(p->matmul_ms, p->steps)));
    json_object_set_new(o, "sampling_ms", number(bench_parts_mean(p->sampling_ms, p->steps)));
    json_object_set_new(o, "other_ms", number(bench_parts_mean(p->other_ms, p->steps)));
    return o;
}

static json_t *retriever_json(const struct bench_parts *p)
{
    json_t *o = json_object();
    json_object_set_new(o, "append_ms", number(bench_parts_mean(p->append_ms, p->retriever_steps)));
    json_object_set_new(o, "score_ms", number(bench_parts_mean(p->score_ms, p->retriever_steps)));
    json_object_set_new(o, "topk_ms", number(bench_parts_mean(p->topk_ms, p->retriever_steps)));
    json_object_set_new(o, "encode_ms", number(bench_parts_mean(p->encode_ms, p->retriever_steps)));
    return o;
}

static json_t *waits_json(const struct bench_waits *w)
{
    json_t *o = json_object();
    json_object_set_new(o, "p50", number(bench_waits_quantile(w, 0.5)));
    json_object_set_new(o, "p99", number(bench_waits_quantile(w, 0.99)));
    return o;
}

/* What the parts told of their GPUs, and the sum; null when none is on one. */
static json_t *gpu_memory_json(const struct bench_row *row)
{
    json_t *o = json_object();
    for (int part = 0; part < CLIENT_PARTS; part++)
        if (row->parts.gpu[part])
            json_object_set(o, client_part_name((enum client_part)part), row->parts.gpu[part]);
    if (json_object_size(o)) {
        json_object_set_new(o, "total_bytes", json_integer((json_int_t)gpu_bytes(row)));
        return o;
    }
    json_decref(o);
    return json_null();
}

/* Each step's time by repeat, and where layers moved: {repeat, step, layers_offloaded}. */
static void put_steps(json_t *o, const struct bench_row *row)
{
    json_t *repeats = json_array(), *moves = json_array();
    for (uint32_t i = 0; row->step_ms && i < row->repeats; i++)
        json_array_append_new(repeats, list_of(row->step_ms + (size_t)i * row->tokens, row->tokens));
    for (uint32_t i = 0; i < row->parts.move_count; i++) {
        const struct bench_move *m = &row->parts.moves[i];
        json_array_append_new(moves, json_pack("{s:i, s:i, s:i}", "repeat", (int)m->repeat, "step",
                                               (int)m->step, "layers_offloaded", (int)m->offloaded));
    }
    json_object_set_new(o, "steps_ms", repeats);
    json_object_set_new(o, "moves", moves);
    json_object_set_new(o, "move_ms", number(row->parts.move_ms));
}

/* How its steps spent their time. */
static void put_parts(json_t *o, const struct bench_report *r, const struct bench_row *row)
{
    const struct bench_parts *p = &row->parts;
    json_t *waits = json_object();
    json_object_set_new(waits, "tables", waits_json(&p->tables));
    json_object_set_new(waits, "rows", waits_json(&p->rows));
    json_object_set_new(o, "step_ms", number(bench_row_step_ms(r, row)));
    json_object_set_new(o, "floor_ms", number(bench_row_floor_ms(r, row)));
    json_object_set_new(o, "step_to_floor", number(1 / bench_row_share(r, row)));
    json_object_set_new(o, "split", split_json(p));
    json_object_set_new(o, "retriever", retriever_json(p));
    json_object_set_new(o, "wait_us", waits);
    json_object_set_new(o, "loaded_bytes_per_step", number(loaded_a_step(row)));
    json_object_set_new(o, "link_share", number(link_share(r, row)));
    json_object_set_new(o, "gpu_memory", gpu_memory_json(row));
}

static json_t *gpu_json(const struct bench_gpu *gpu)
{
    if (!gpu)
        return json_null();
    json_t *o = json_object();
    json_object_set_new(o, "name", json_string(gpu->name));
    json_object_set_new(o, "mps", json_boolean(gpu->mps));
    json_object_set_new(o, "copy_bytes_per_s", number(gpu->copy_rate));
    json_object_set_new(o, "link_bytes_per_s", number(gpu->link_rate));
    return o;
}

static json_t *row_json(const struct bench_report *r, const struct bench_row *row)
{
    json_t *o = json_object();
    json_object_set_new(o, "what", json_string(kind_name(row->kind)));
    json_object_set_new(o, "depth", json_integer(row->depth));
    json_object_set_new(o, "sequences", json_integer(r->options->parallel));
    json_object_set_new(o, "tokens", json_integer(row->tokens));
    json_object_set_new(o, "repeats", json_integer(row->repeats));
    json_object_set_new(o, "tokens_per_s", number(bench_median(row->rates, row->repeats)));
    json_object_set_new(o, "min", number(lowest(row)));
    json_object_set_new(o, "max", number(highest(row)));
    json_object_set_new(o, "samples", list_of(row->rates, row->repeats));
    json_object_set_new(o, "cpu_ms_per_token", number(1e3 * bench_median(row->cpu, row->repeats)));
    json_object_set_new(o, "step_bytes",
                        row->step_bytes ? json_integer((json_int_t)row->step_bytes) : json_null());
    json_object_set_new(o, "bandwidth_share", number(bench_row_share(r, row)));
    json_object_set_new(o, "attended_mean", number(row->attended));
    json_object_set_new(o, "cached_tokens", json_integer(row->cached));
    json_object_set_new(o, "layers_offloaded", json_integer(row->layers_offloaded));
    put_parts(o, r, row);
    put_steps(o, row);
    json_object_set_new(o, "rss_bytes", json_integer((json_int_t)row->memory.rss));
    json_object_set_new(o, "pss_bytes", json_integer((json_int_t)row->memory.pss));
    return o;
}

void bench_report_json(const struct bench_report *r, FILE *to)
{
    const struct bench_options *o = r->options;
    json_t *rows = json_array(), *top = json_object();
    for (uint32_t i = 0; i < r->row_count; i++)
        json_array_append_new(rows, row_json(r, &r->rows[i]));
    bool sparse = o->run.attention == RUN_SPARSE;
    json_object_set_new(top, "engine", json_string("specontext"));
    json_object_set_new(top, "version", json_string(SPECONTEXT_VERSION));
    json_object_set_new(top, "model", json_string(r->model_name));
    json_object_set_new(top, "model_file", json_string(o->run.model));
    json_object_set_new(top, "head", json_string(r->head));
    json_object_set_new(top, "attention", json_string(run_options_attention_name(&o->run)));
    json_object_set_new(top, "selection",
                        sparse ? json_string(run_options_selection_name(&o->run)) : json_null());
    json_object_set_new(top, "budget", sparse ? json_integer(o->run.budget) : json_null());
    json_object_set_new(top, "device", json_string(o->run.device));
    json_object_set_new(top, "retriever_device", json_string(o->run.retriever_device));
    json_object_set_new(top, "key_type",
                        sparse ? json_string(run_options_keys_int8(&o->run) ? "int8" : "f16") : json_null());
    json_object_set_new(top, "distinct", json_boolean(o->distinct));
    json_object_set_new(top, "elastic", json_boolean(!o->run.no_elastic));
    json_object_set_new(top, "offload", json_boolean(!o->run.no_offload));
    json_object_set_new(top, "write_through", json_string(memory_through_name(o->run.write_through)));
    json_object_set_new(top, "activations", json_string(r->gpu ? "bf16" : o->run.activations ? "q8" : "f32"));
    json_object_set_new(top, "cores", json_integer(r->cores));
    json_object_set_new(top, "context", json_integer(r->context));
    json_object_set_new(top, "weight_bytes", json_integer((json_int_t)r->weight_bytes));
    json_object_set_new(top, "read_bytes_per_s", number(r->bandwidth));
    json_object_set_new(top, "gpu", gpu_json(r->gpu));
    json_object_set_new(top, "rows", rows);
    json_dumpf(top, to,
               (o->paced ? JSON_COMPACT : JSON_INDENT(2)) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9));
    fputc('\n', to);
    json_decref(top);
}
