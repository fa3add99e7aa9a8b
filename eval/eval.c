/* `specontext eval`: measures, then prints once: all of it, or what there was when it was ended. */
#include "eval/eval.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/outfile.h"
#include "eval/session.h"

enum { EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

static void on_signal(int number)
{
    (void)number;
    engine_interrupted = 1;
}

/* The first asks, the second ends at once. */
static void catch_signals(void)
{
    static const int signals[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
    for (unsigned i = 0; i < sizeof signals / sizeof *signals; i++)
        sigaction(signals[i], &action, NULL);
}

struct results {
    struct report_row *rows;
    struct report_task *tasks;
    struct report_generation *generations;
    struct report report;
};

/* What was measured is there whatever it returns. */
static int measure(struct session *s, struct results *r, struct err *err)
{
    int code = measure_texts(s, &r->rows, &r->report.row_count, err);
    if (!code)
        code = answer_tasks(s, &r->tasks, &r->report.task_count, err);
    if (!code)
        code = generate_long(s, &r->generations, &r->report.generation_count, err);
    r->report.options = s->options;
    r->report.model_name = model_name(s->engine.model);
    r->report.rows = r->rows;
    r->report.tasks = r->tasks;
    r->report.generations = r->generations;
    r->report.incomplete = code < 0;
    return code;
}

/* Standard output and the files; progress is off the terminal by then. A drawing cannot say what it lacks, so
 * there is none of a part. */
static int print(const struct results *r, const struct eval_options *o, struct err *err)
{
    int code = o->plot && !r->report.incomplete ? report_plot(&r->report, o->plot, err) : 0;
    if (!code && o->json_file)
        code = report_json_file(&r->report, o->json_file, err);
    if (code)
        return code;
    if (o->json)
        report_json(&r->report, stdout);
    else
        report_tables(&r->report, stdout);
    if (fflush(stdout) || ferror(stdout))
        return err_set(err, -EIO, "standard output: %s", strerror(errno));
    return 0;
}

/* Before hours of measuring. */
static int try_file(const char *option, const char *path, struct err *err)
{
    int r = path ? outfile_try(path) : 0;
    return r ? err_set(err, r, "%s: %s: %s", option, path, strerror(-r)) : 0;
}

static int evaluate(const struct eval_options *o, struct err *err)
{
    struct session session;
    struct results results = {0};
    int r = try_file("--plot", o->plot, err);
    if (!r)
        r = try_file("--json-file", o->json_file, err);
    if (!r)
        r = session_open(o, &session, err);
    if (r)
        return r;
    catch_signals();
    r = measure(&session, &results, err);
    session_clear();
    const struct report *report = &results.report;
    bool any = report->row_count || report->task_count || report->generation_count;
    if (!r || any) {
        struct err lost = {0};
        int code = print(&results, o, &lost);
        if (code && !r)
            *err = lost;
        else if (code)
            fprintf(stderr, "specontext eval: %s\n", lost.text);
        r = r ? r : code;
    }
    for (uint32_t i = 0; i < results.report.row_count; i++)
        mem_free(&results.rows[i].by_head);
    mem_free(&results.rows);
    mem_free(&results.tasks);
    mem_free(&results.generations);
    session_close(&session);
    return r;
}

int eval_main(int argc, char **argv)
{
    struct eval_options options;
    struct err err = {0};
    int r = eval_options_parse(argc, argv, &options, &err);
    if (r > 0) {
        eval_options_help(stdout);
        return 0;
    }
    if (r < 0) {
        fprintf(stderr, "specontext eval: %s\nTry `specontext eval --help`.\n", err.text);
        return EXIT_USAGE;
    }
    r = evaluate(&options, &err);
    if (r < 0)
        fprintf(stderr, "specontext eval: %s\n", err.text);
    return r == -ECANCELED ? EXIT_INTERRUPTED : r < 0 ? EXIT_FAILED : 0;
}
