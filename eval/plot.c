/* Mass over budget and over position, drawn as SVG. No state. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/outfile.h"
#include "eval/report.h"

enum { WIDTH = 460, HEIGHT = 320, LEFT = 60, TOP = 40, LEGEND = 200, PALETTE = 8 };

static const char *const colours[PALETTE] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd",
                                             "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f"};

struct panel {
    FILE *to;
    double x0, low;   /* left edge; the least mass that is drawn */
    double from, end; /* of the x axis */
    bool logarithmic;
    int lines;
};

static double x_of(const struct panel *p, double value)
{
    double part = p->logarithmic ? log(value / p->from) / log(p->end / p->from)
                                 : (value - p->from) / (p->end - p->from);
    return p->x0 + LEFT + (isfinite(part) ? part : 0.5) * WIDTH;
}

static double y_of(const struct panel *p, double mass)
{
    return TOP + HEIGHT * (1 - (mass - p->low) / (1 - p->low));
}

static void text(const struct panel *p, double x, double y, const char *anchor, const char *what)
{
    fprintf(p->to, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor);
    for (; *what; what++) {
        if (*what == '<' || *what == '&')
            fputs(*what == '<' ? "&lt;" : "&amp;", p->to);
        else
            fputc(*what, p->to);
    }
    fputs("</text>\n", p->to);
}

static void frame(const struct panel *p, const char *title, const char *axis)
{
    char label[16];
    fprintf(p->to, "<rect x=\"%.1f\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"none\" stroke=\"#444\"/>\n",
            p->x0 + LEFT, TOP, WIDTH, HEIGHT);
    for (int i = 0; i <= 5; i++) {
        double mass = p->low + (1 - p->low) * i / 5;
        snprintf(label, sizeof label, "%.2f", mass);
        text(p, p->x0 + LEFT - 6, y_of(p, mass) + 4, "end", label);
        fprintf(p->to, "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n",
                p->x0 + LEFT, p->x0 + LEFT + WIDTH, y_of(p, mass), y_of(p, mass));
    }
    text(p, p->x0 + LEFT + WIDTH / 2.0, TOP - 14, "middle", title);
    text(p, p->x0 + LEFT + WIDTH / 2.0, TOP + HEIGHT + 36, "middle", axis);
}

static void tick(const struct panel *p, double value)
{
    char label[16];
    snprintf(label, sizeof label, "%.0f", value);
    text(p, x_of(p, value), TOP + HEIGHT + 16, "middle", label);
}

/* Points that are not finite are left out. */
static void line(struct panel *p, const char *name, const double *x, const double *y, uint32_t count,
                 bool dashed)
{
    const char *colour = colours[p->lines % PALETTE], *dash = dashed ? " stroke-dasharray=\"5 4\"" : "";
    fprintf(p->to, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s points=\"", colour, dash);
    for (uint32_t i = 0; i < count; i++)
        if (isfinite(y[i]))
            fprintf(p->to, "%.1f,%.1f ", x_of(p, x[i]), y_of(p, y[i]));
    fputs("\"/>\n", p->to);
    double at = p->x0 + LEFT + WIDTH + 12, row = TOP + 14 + 18 * p->lines++;
    fprintf(p->to,
            "<line x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\" stroke=\"%s\" stroke-width=\"2\"%s/>\n",
            at, at + 22, row - 4, row - 4, colour, dash);
    text(p, at + 28, row, "start", name);
}

static const char *short_name(const char *head)
{
    const char *slash = strrchr(head, '/');
    return slash ? slash + 1 : head;
}

/* Rows of the last context: [heads][budgets]. */
struct last {
    const struct report_row *rows;
    uint32_t heads, budgets;
};

static const char *const oracle_names[] = {"best: layer and head", "best: group and head",
                                           "sinks and newest"};

static double oracle(const struct mass_figures *f, int which)
{
    return which == 0 ? f->best_head : which == 1 ? f->best_group : f->sinks_newest;
}

static int by_budget(const void *a, const void *b)
{
    const struct report_row *const *x = a, *const *y = b;
    return ((*x)->budget > (*y)->budget) - ((*x)->budget < (*y)->budget);
}

/* A head's rows in ascending order of budget. */
static void sort_rows(const struct last *l, uint32_t head, const struct report_row **ret)
{
    for (uint32_t b = 0; b < l->budgets; b++)
        ret[b] = &l->rows[head * l->budgets + b];
    qsort(ret, l->budgets, sizeof *ret, by_budget);
}

static void draw_budgets(struct panel *p, const struct last *l)
{
    const struct report_row *rows[EVAL_LIST_MAX];
    double x[EVAL_LIST_MAX], y[EVAL_LIST_MAX];
    sort_rows(l, 0, rows);
    p->from = rows[0]->budget;
    p->end = rows[l->budgets - 1]->budget;
    p->logarithmic = true;
    frame(p, "attention mass over budget", "positions attended");
    for (uint32_t b = 0; b < l->budgets; b++)
        tick(p, x[b] = rows[b]->budget);
    for (uint32_t h = 0; h < l->heads; h++) {
        sort_rows(l, h, rows);
        for (uint32_t b = 0; b < l->budgets; b++)
            y[b] = rows[b]->mass.mean;
        line(p, short_name(rows[0]->head), x, y, l->budgets, false);
    }
    sort_rows(l, 0, rows);
    for (int k = 0; k < 3; k++) {
        for (uint32_t b = 0; b < l->budgets; b++)
            y[b] = oracle(&rows[b]->mass, k);
        line(p, oracle_names[k], x, y, l->budgets, true);
    }
}

/* At the least budget, where most is to be seen. */
static void draw_positions(struct panel *p, const struct last *l)
{
    const struct report_row *rows[EVAL_LIST_MAX];
    double x[MASS_BINS];
    char title[64];
    sort_rows(l, 0, rows);
    p->from = rows[0]->from;
    p->end = rows[0]->context;
    snprintf(title, sizeof title, "attention mass over position, budget %" PRIu32, rows[0]->budget);
    frame(p, title, "position of the query");
    tick(p, p->from);
    tick(p, p->end);
    for (uint32_t b = 0; b < MASS_BINS; b++)
        x[b] = p->from + (p->end - p->from) * (b + 0.5) / MASS_BINS;
    for (uint32_t h = 0; h < l->heads; h++) {
        sort_rows(l, h, rows);
        line(p, short_name(rows[0]->head), x, rows[0]->mass.at, MASS_BINS, false);
    }
    sort_rows(l, 0, rows);
    const struct mass_figures *f = &rows[0]->mass;
    line(p, "best: layer and head", x, f->best_head_at, MASS_BINS, true);
    line(p, "best: group and head", x, f->best_group_at, MASS_BINS, true);
    line(p, "sinks and newest", x, f->sinks_newest_at, MASS_BINS, true);
}

static double least_mass(const struct last *l)
{
    double low = 1;
    for (uint32_t i = 0; i < l->heads * l->budgets; i++) {
        const struct mass_figures *f = &l->rows[i].mass;
        low = f->mean < low ? f->mean : low;
        low = f->sinks_newest < low ? f->sinks_newest : low;
        for (uint32_t b = 0; b < MASS_BINS; b++) {
            low = f->at[b] < low ? f->at[b] : low;
            low = f->sinks_newest_at[b] < low ? f->sinks_newest_at[b] : low;
        }
    }
    return low >= 0.9 ? 0.9 : low >= 0.75 ? 0.75 : low >= 0.5 ? 0.5 : 0; /* steps of round numbers */
}

static void draw(FILE *to, const struct last *l)
{
    int width = LEFT + WIDTH + LEGEND;
    fprintf(to,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" font-family=\"sans-serif\" "
            "font-size=\"12\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
            2 * width, TOP + HEIGHT + 60);
    struct panel left = {.to = to, .low = least_mass(l)}, right = {.to = to, .low = left.low, .x0 = width};
    draw_budgets(&left, l);
    draw_positions(&right, l);
    fputs("</svg>\n", to);
}

int report_plot(const struct report *r, const char *path, struct err *err)
{
    uint32_t budgets = r->options->budgets.count, last = r->rows[r->row_count - 1].context, first = 0;
    while (r->rows[first].context != last)
        first++;
    struct last l = {r->rows + first, (r->row_count - first - r->options->variant_texts.count) / budgets,
                     budgets};
    char *text = NULL;
    size_t bytes = 0;
    FILE *to = open_memstream(&text, &bytes);
    int code = to ? 0 : -errno;
    if (to) {
        draw(to, &l);
        code = fclose(to) ? -errno : outfile_write(path, text, bytes);
    }
    free(text);
    return code ? err_set(err, code, "--plot: %s: %s", path, strerror(-code)) : 0;
}
