/* Turns rows into a table and into JSON. No state; called once, after all is measured. */
#include "launch/bench_report.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

#define MIB (1024.0 * 1024.0)

void bench_row_init(struct bench_row *row, enum bench_kind kind, uint32_t depth,
                    const struct bench_options *options)
{
    *row = (struct bench_row){.kind = kind,
                              .depth = depth,
                              .tokens = kind == BENCH_PREFILL ? options->prompt : options->decode,
                              .rates = mem_alloc(options->repeats, sizeof *row->rates),
                              .cpu = mem_alloc(options->repeats, sizeof *row->cpu),
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
}

double bench_median(const double *sorted, uint32_t count)
{
    if (count == 0)
        return (double)NAN;
    return (sorted[(count - 1) / 2] + sorted[count / 2]) / 2;
}

double bench_row_share(const struct bench_report *report, const struct bench_row *row)
{
    double steps = bench_median(row->rates, row->repeats) / report->options->parallel;
    return row->step_bytes && report->bandwidth > 0 ? (double)row->step_bytes * steps / report->bandwidth
                                                    : (double)NAN;
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

void bench_report_table(const struct bench_report *r, FILE *to)
{
    const struct bench_options *o = r->options;
    fprintf(to, "%s, %u cores, activations %s, attention %s", r->model_name, r->cores,
            o->run.activations ? "q8" : "f32", run_options_attention_name(&o->run));
    if (o->run.attention == RUN_SPARSE)
        fprintf(to, ", selection %s, budget %u", run_options_selection_name(&o->run), o->run.budget);
    fprintf(to, "; reading weights: %.1f GB/s\n\n", r->bandwidth * 1e-9);
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
    json_object_set_new(top, "activations", json_string(o->run.activations ? "q8" : "f32"));
    json_object_set_new(top, "cores", json_integer(r->cores));
    json_object_set_new(top, "context", json_integer(r->context));
    json_object_set_new(top, "weight_bytes", json_integer((json_int_t)r->weight_bytes));
    json_object_set_new(top, "read_bytes_per_s", number(r->bandwidth));
    json_object_set_new(top, "rows", rows);
    json_dumpf(top, to,
               (o->paced ? JSON_COMPACT : JSON_INDENT(2)) | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(9));
    fputc('\n', to);
    json_decref(top);
}
