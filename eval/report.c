/* See report.h. No state. */
#include "eval/report.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/outfile.h"
#include "link/figures.h"

#define DONE_BY_FULL 0.5 /* what full attention must score for a task to tell anything */

static double per(double sum, uint64_t count)
{
    return count ? sum / (double)count : (double)NAN;
}

static void add_bins(json_t *to, const char *name, const double *at)
{
    json_t *list = figures_list(to, name);
    for (uint32_t b = 0; b < MASS_BINS; b++)
        json_array_append_new(list, isfinite(at[b]) ? json_real(at[b]) : json_null());
}

static void add_mass(json_t *to, const struct mass_figures *f)
{
    json_t *mass = figures_section(to, "mass");
    figures_real(mass, "mean", f->mean);
    figures_real(mass, "p10", f->p10);
    figures_real(mass, "worst_layer", f->worst_layer);
    figures_real(mass, "worst_head", f->worst_head);
    json_t *where = figures_section(mass, "worst_at");
    figures_count(where, "layer", f->worst_layer_at);
    figures_count(where, "head_layer", f->worst_head_at[0]);
    figures_count(where, "head", f->worst_head_at[1]);
    add_bins(mass, "by_position", f->at);
    figures_real(to, "hit_rate", f->hit_rate);
    json_t *batch = figures_section(to, "batch");
    figures_real(batch, "mass", f->batch);
    figures_real(batch, "hit_rate", f->batch_hits);
    json_t *oracle = figures_section(to, "oracle");
    figures_real(oracle, "per_layer_head", f->best_head);
    figures_real(oracle, "per_group", f->best_group);
    figures_real(oracle, "shared", f->best_shared);
    figures_real(oracle, "batch", f->best_batch);
    figures_real(oracle, "newest", f->newest);
    figures_real(oracle, "sinks_newest", f->sinks_newest);
    add_bins(oracle, "per_layer_head_by_position", f->best_head_at);
    add_bins(oracle, "per_group_by_position", f->best_group_at);
    add_bins(oracle, "sinks_newest_by_position", f->sinks_newest_at);
}

static void add_by_head(json_t *to, const struct report_row *r)
{
    json_t *layers = figures_list(json_object_get(to, "mass"), "by_layer_head");
    for (uint32_t l = 0; l < r->layers; l++) {
        json_t *heads = json_array();
        for (uint32_t h = 0; h < r->heads; h++) {
            double mass = r->by_head[l * r->heads + h];
            json_array_append_new(heads, isfinite(mass) ? json_real(mass) : json_null());
        }
        json_array_append_new(layers, heads);
    }
}

static void add_row(json_t *to, const struct report_row *r)
{
    const struct forced_sums *f = &r->forced;
    figures_text(to, "head", r->head);
    figures_count(to, "budget", r->budget);
    figures_count(to, "context", r->context);
    figures_count(to, "from", r->from);
    figures_count(to, "texts", r->texts);
    add_mass(to, &r->mass);
    add_by_head(to, r);
    figures_real(to, "overlap", r->lane.overlap);
    figures_real(to, "bytes_saved", r->lane.saved);
    figures_real(to, "bytes_saved_default_slots", r->lane.saved_default);
    figures_real(to, "attended", r->lane.attended);
    figures_count(to, "scored", f->positions);
    figures_real(to, "ppl_full", exp(per(f->loss_full, f->positions)));
    figures_real(to, "ppl_sparse", exp(per(f->loss_sparse, f->positions)));
    struct forced_mean worse = forced_mean(f->worse, f->worse_squares, f->positions);
    struct forced_mean kl = forced_mean(f->kl, f->kl_squares, f->positions);
    figures_real(to, "loss_difference", worse.mean);
    figures_real(to, "loss_difference_error", worse.error);
    figures_real(to, "kl", per(f->kl, f->positions));
    figures_real(to, "kl_error", kl.error);
    figures_real(to, "top1_agreement", per((double)f->agreed, f->positions));
}

/* Standard error of the mean difference. */
static double task_error(const struct report_task *t)
{
    return forced_mean((t->sparse - t->full) * t->items, t->squares, t->items).error;
}

/* Rows of a task and length. */
static uint32_t task_ways(const struct report *r)
{
    uint32_t n = 1;
    while (n < r->task_count && r->tasks[n].task == r->tasks[0].task &&
           r->tasks[n].context == r->tasks[0].context)
        n++;
    return n;
}

/* All items of one way, of tasks that full attention does half of the time at least; context 0. */
static struct report_task together(const struct report *r, uint32_t way)
{
    struct report_task sum = {.head = r->tasks[way].head, .budget = r->tasks[way].budget, .task = TASK_COUNT};
    for (uint32_t i = way; i < r->task_count; i += task_ways(r)) {
        const struct report_task *t = &r->tasks[i];
        if (!t->items || t->full < DONE_BY_FULL)
            continue;
        sum.items += t->items;
        sum.full += t->full * t->items;
        sum.sparse += t->sparse * t->items;
        sum.squares += t->squares;
        sum.better += t->better;
        sum.worse += t->worse;
    }
    sum.full /= sum.items;
    sum.sparse /= sum.items;
    return sum;
}

static void add_task(json_t *to, const struct report_task *t)
{
    figures_text(to, "task", t->task < TASK_COUNT ? task_name(t->task) : NULL);
    figures_text(to, "head", t->head);
    figures_count(to, "budget", t->budget);
    figures_count(to, "context", t->context);
    figures_count(to, "items", t->items);
    figures_real(to, "full", t->full);
    figures_real(to, "sparse", t->sparse);
    figures_real(to, "difference", t->sparse - t->full);
    figures_real(to, "difference_error", task_error(t));
    figures_count(to, "better", t->better);
    figures_count(to, "worse", t->worse);
}

static void add_generation(json_t *to, const struct report_generation *g)
{
    figures_text(to, "attention", g->head ? "sparse" : "full");
    figures_text(to, "head", g->head);
    if (g->head)
        figures_count(to, "budget", g->budget);
    figures_text(to, "sampling", g->sampled ? "sampled" : "greedy");
    figures_count(to, "texts", g->texts);
    figures_count(to, "prompt", g->prompt);
    figures_count(to, "tokens", g->tokens);
    struct forced_mean worse = forced_mean(g->worse, g->worse_squares, g->streams);
    figures_count(to, "streams", g->streams);
    figures_real(to, "ppl_under_full", exp(per(g->loss, g->streams)));
    figures_real(to, "loss_difference", worse.mean);
    figures_real(to, "loss_difference_error", worse.error);
    figures_real(to, "repeated_4grams", 1 - g->distinct[3]);
    json_t *distinct = figures_list(to, "distinct");
    for (int n = 0; n < 4; n++)
        json_array_append_new(distinct, isfinite(g->distinct[n]) ? json_real(g->distinct[n]) : json_null());
}

/* To be freed. */
static char *json_text(const struct report *r)
{
    const struct eval_options *o = r->options;
    json_t *top = json_object();
    figures_text(top, "version", SPECONTEXT_VERSION);
    figures_text(top, "model", r->model_name);
    figures_text(top, "model_file", o->model);
    figures_bool(top, "incomplete", r->incomplete);
    figures_count(top, "sinks", o->sinks);
    figures_count(top, "window", o->window);
    figures_count(top, "positions", o->positions);
    figures_count(top, "seed", o->seed);
    json_t *files = figures_list(top, "files");
    for (uint32_t i = 0; i < o->files.count; i++)
        json_array_append_new(files, json_string(o->files.at[i]));
    json_t *list = figures_list(top, "results");
    for (uint32_t i = 0; i < r->row_count; i++)
        add_row(figures_item(list), &r->rows[i]);
    list = figures_list(top, "tasks");
    for (uint32_t i = 0; i < r->task_count; i++)
        add_task(figures_item(list), &r->tasks[i]);
    list = figures_list(top, "tasks_together");
    for (uint32_t i = 0; r->task_count && i < task_ways(r); i++) {
        struct report_task all = together(r, i);
        add_task(figures_item(list), &all);
    }
    list = figures_list(top, "generations");
    for (uint32_t i = 0; i < r->generation_count; i++)
        add_generation(figures_item(list), &r->generations[i]);
    return figures_finish(&top);
}

void report_json(const struct report *r, FILE *to)
{
    char *text = json_text(r);
    fprintf(to, "%s\n", text);
    free(text);
}

int report_json_file(const struct report *r, const char *path, struct err *err)
{
    char *text = json_text(r);
    size_t bytes = strlen(text);
    text[bytes] = '\n'; /* in place of the NUL */
    int code = outfile_write(path, text, bytes + 1);
    free(text);
    return code ? err_set(err, code, "--json-file: %s: %s", path, strerror(-code)) : 0;
}

/* ---- tables -------------------------------------------------------------------------------------------- */

/* "0.884", or "-" for what was not measured. */
static const char *cell(double value, int digits, char text[16])
{
    if (isfinite(value))
        snprintf(text, 16, "%.*f", digits, value);
    else
        snprintf(text, 16, "-");
    return text;
}

static void print_cell(FILE *to, double value, int digits)
{
    char text[16];
    fprintf(to, " %8s", cell(value, digits, text));
}

/* The end of a path, so that tables stay narrow. */
static const char *short_name(const char *head)
{
    const char *slash = head ? strrchr(head, '/') : NULL;
    return slash ? slash + 1 : head ? head : "full attention";
}

static size_t longer(size_t most, const char *head)
{
    size_t n = strlen(short_name(head));
    return n > most ? n : most;
}

/* Of the longest name; longer ones are cut. */
static int name_width(const struct report *r)
{
    size_t most = 20;
    for (uint32_t i = 0; i < r->row_count; i++)
        most = longer(most, r->rows[i].head);
    for (uint32_t i = 0; i < r->task_count; i++)
        most = longer(most, r->tasks[i].head);
    for (uint32_t i = 0; i < r->generation_count; i++)
        most = longer(most, r->generations[i].head);
    return most < 64 ? (int)most : 64;
}

static void print_who(FILE *to, int width, const char *head, uint32_t budget, uint32_t context)
{
    fprintf(to, "%-*.*s %6" PRIu32 " %7" PRIu32, width, width, short_name(head), budget, context);
}

static void print_masses(const struct report *r, FILE *to)
{
    fprintf(to,
            "Attention mass of the sets, and of the best sets there are (per layer and head; per group of "
            "layers and head;\nper head; one for all), of the newest positions, of sinks and newest "
            "positions; batch: one set for all heads\n");
    fprintf(to, "%-*s %6s %7s %8s %8s %8s %8s %8s %8s | %8s %8s %8s %8s %8s %8s\n", name_width(r), "head",
            "budget", "context", "mean", "p10", "layer", "head", "hits", "batch", "best", "group", "shared",
            "one", "newest", "sinks+");
    for (uint32_t i = 0; i < r->row_count; i++) {
        const struct mass_figures *f = &r->rows[i].mass;
        const double left[] = {f->mean, f->p10, f->worst_layer, f->worst_head, f->hit_rate, f->batch};
        const double right[] = {f->best_head,  f->best_group, f->best_shared,
                                f->best_batch, f->newest,     f->sinks_newest};
        print_who(to, name_width(r), r->rows[i].head, r->rows[i].budget, r->rows[i].context);
        for (int j = 0; j < 6; j++)
            print_cell(to, left[j], 3);
        fprintf(to, " |");
        for (int j = 0; j < 6; j++)
            print_cell(to, right[j], 3);
        fprintf(to, "\n");
    }
}

static void print_forced(const struct report *r, FILE *to)
{
    fprintf(to, "\nConsecutive positions: overlap of adjacent selections, bytes that elastic loading saves "
                "(slots 2 and 1.5 budgets),\nsparse against full attention\n");
    fprintf(to, "%-*s %6s %7s %8s %8s %8s %8s %8s %8s %8s %8s %8s %8s %8s %8s\n", name_width(r), "head",
            "budget", "context", "overlap", "saved 2", "saved1.5", "attended", "scored", "ppl full", "sparse",
            "dlog ppl", "+-", "KL", "+-", "top-1");
    for (uint32_t i = 0; i < r->row_count; i++) {
        const struct report_row *row = &r->rows[i];
        const struct forced_sums *f = &row->forced;
        print_who(to, name_width(r), row->head, row->budget, row->context);
        print_cell(to, row->lane.overlap, 3);
        print_cell(to, row->lane.saved, 4);
        print_cell(to, row->lane.saved_default, 4);
        print_cell(to, row->lane.attended, 0);
        fprintf(to, " %8" PRIu64, f->positions);
        print_cell(to, exp(per(f->loss_full, f->positions)), 3);
        print_cell(to, exp(per(f->loss_sparse, f->positions)), 3);
        struct forced_mean worse = forced_mean(f->worse, f->worse_squares, f->positions);
        struct forced_mean kl = forced_mean(f->kl, f->kl_squares, f->positions);
        print_cell(to, worse.mean, 4);
        print_cell(to, worse.error, 4);
        print_cell(to, per(f->kl, f->positions), 4);
        print_cell(to, kl.error, 4);
        print_cell(to, per((double)f->agreed, f->positions), 3);
        fprintf(to, "\n");
    }
}

static void print_task(const struct report *r, const struct report_task *t, FILE *to)
{
    print_who(to, name_width(r), t->head, t->budget, t->context);
    fprintf(to, " %-10s %6" PRIu32, t->task < TASK_COUNT ? task_name(t->task) : "together", t->items);
    print_cell(to, t->full, 3);
    print_cell(to, t->sparse, 3);
    print_cell(to, t->sparse - t->full, 3);
    print_cell(to, task_error(t), 3);
    fprintf(to, " %7" PRIu32 " %6" PRIu32 "\n", t->better, t->worse);
}

static void print_tasks(const struct report *r, FILE *to)
{
    fprintf(to,
            "\nTasks: mean scores on the same items; better, worse: items where sparse scores higher, "
            "lower; together: where\nfull attention scores %.1f and more\n",
            DONE_BY_FULL);
    fprintf(to, "%-*s %6s %7s %-10s %6s %8s %8s %8s %8s %7s %6s\n", name_width(r), "head", "budget",
            "context", "task", "items", "full", "sparse", "diff", "+-", "better", "worse");
    for (uint32_t i = 0; i < r->task_count; i++)
        print_task(r, &r->tasks[i], to);
    for (uint32_t i = 0; i < task_ways(r); i++) {
        struct report_task all = together(r, i);
        print_task(r, &all, to);
    }
}

static void print_generations(const struct report *r, FILE *to)
{
    fprintf(to,
            "\nLong generation: perplexity of what was generated under full attention, its logarithm less "
            "that of full\nattention's own beside it; n-grams that were there before\n");
    fprintf(to, "%-*s %6s %7s %-8s %7s %7s %8s %8s %8s %8s %8s %8s %8s\n", name_width(r), "head", "budget",
            "prompt", "how", "streams", "tokens", "ppl", "dlog ppl", "+-", "n = 1", "2", "3", "4");
    for (uint32_t i = 0; i < r->generation_count; i++) {
        const struct report_generation *g = &r->generations[i];
        struct forced_mean worse = forced_mean(g->worse, g->worse_squares, g->streams);
        print_who(to, name_width(r), g->head, g->budget, g->prompt);
        fprintf(to, " %-8s %7" PRIu32 " %7" PRIu32, g->sampled ? "sampled" : "greedy", g->streams, g->tokens);
        print_cell(to, exp(per(g->loss, g->streams)), 3);
        print_cell(to, worse.mean, 4);
        print_cell(to, worse.error, 4);
        for (int n = 0; n < 4; n++)
            print_cell(to, 1 - g->distinct[n], 3);
        fprintf(to, "\n");
    }
}

void report_tables(const struct report *r, FILE *to)
{
    if (r->incomplete)
        fputs("Incomplete: figures of what was measured until it ended\n\n", to);
    if (r->row_count && !r->options->no_mass)
        print_masses(r, to);
    if (r->row_count)
        print_forced(r, to);
    if (r->task_count)
        print_tasks(r, to);
    if (r->generation_count)
        print_generations(r, to);
}
