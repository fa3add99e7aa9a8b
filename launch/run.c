/* The life of one run: prompts in, three daemons up, requests out, text and figures back, everything down.
 *
 * Owns the loop and all that hangs on it; single-threaded but for ZeroMQ's own thread. The daemons are
 * forked before that thread exists. After the start nothing here may block: text goes through a queue
 * (output.h), and ends of children come by descriptor. A start, an interruption and an end have deadlines;
 * while the decoder answers, the bus sees to it that it is alive, and its own waits are bounded. */
#include "launch/run.h"

#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "launch/arena.h"
#include "launch/client.h"
#include "launch/output.h"
#include "launch/progress.h"
#include "launch/prompt.h"
#include "launch/report.h"
#include "launch/run_options.h"
#include "launch/sequence.h"
#include "launch/session.h"
#include "launch/supervise.h"

#define TICK_NS   (50 * CLOCK_MS)
#define CANCEL_NS (2 * CLOCK_S) /* from Ctrl-C until the decoder's last words must have come */
/* The decoder may tell that a request failed before the cause, a part's end, is seen here. */
#define BLAME_NS          (300 * CLOCK_MS)
#define SEQUENCES_DEFAULT 32u

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

enum stage {
    LOADING,    /* parts start */
    ANSWERING,  /* requests are with the decoder */
    CANCELLING, /* interrupted: until `deadline_ns` for last words */
    SETTLING,   /* a request failed: until `deadline_ns` for the news of a part's end */
    WRITING,    /* all is answered, standard output takes its time */
    ENDING,     /* the parts are being ended */
};

struct run {
    struct run_options options;
    struct model *model;
    struct tokenizer *tokenizer;
    uint32_t context, budget_max; /* in force */
    struct run_lists lists;       /* in force */
    uint64_t seed;
    char head[PATH_MAX];
    struct prompts prompts;
    struct sequence *sequences; /* [prompts.count] */
    uint32_t next, outstanding; /* first that was not sent; sent and not finished */

    struct loop *loop;
    struct supervise *supervise;
    struct client *client;
    struct output *output;
    struct progress progress;
    struct arena_hold arena;
    enum stage stage;
    bool parts_ready, attached;
    int64_t begin_ns, ready_ns, end_ns, deadline_ns;
    size_t shown; /* bytes of the only sequence's text that went to standard output */
    int code;
    char error[ERR_TEXT_MAX]; /* "" while nothing failed */
};

static void set_error(struct run *run, const char *text)
{
    if (!run->error[0])
        snprintf(run->error, sizeof run->error, "%s", text);
    run->code = EXIT_FAILED;
}

static void end_parts(struct run *run)
{
    if (run->stage == ENDING)
        return;
    run->stage = ENDING;
    if (!run->end_ns)
        run->end_ns = clock_now_ns();
    progress_clear(&run->progress);
    supervise_stop(run->supervise);
}

/* ---- text ---------------------------------------------------------------------------------------------- */

static void show_text(struct run *run)
{
    struct sequence *s = &run->sequences[0];
    if (run->options.prompts || s->text.bytes == run->shown)
        return;
    progress_clear(&run->progress);
    output_write(run->output, s->text.text + run->shown, s->text.bytes - run->shown);
    run->shown = s->text.bytes;
}

/* What stands on standard output once everything is answered. */
static void show_rest(struct run *run)
{
    if (!run->options.prompts) {
        show_text(run);
        if (run->shown && run->sequences[0].text.text[run->shown - 1] != '\n')
            output_write(run->output, "\n", 1);
        return;
    }
    for (uint32_t i = 0; i < run->prompts.count; i++) {
        const struct text_buf *text = &run->sequences[i].text;
        json_t *value = json_stringn(text->text ? text->text : "", text->bytes);
        char *line = json_dumps(value, JSON_ENCODE_ANY);
        json_decref(value);
        if (line) {
            output_write(run->output, line, strlen(line));
            output_write(run->output, "\n", 1);
        }
        free(line);
    }
}

static void finish(struct run *run)
{
    if (!run->end_ns)
        run->end_ns = clock_now_ns();
    run->stage = WRITING;
    progress_clear(&run->progress);
    show_rest(run);
    if (run->stage == WRITING && output_empty(run->output))
        end_parts(run);
}

static void on_output(void *arg, int error)
{
    struct run *run = arg;
    if (error) {
        char text[ERR_TEXT_MAX];
        snprintf(text, sizeof text, "standard output: %s", strerror(-error));
        set_error(run, text);
        end_parts(run);
    } else if (run->stage == WRITING) {
        end_parts(run);
    }
}

/* ---- requests ------------------------------------------------------------------------------------------ */

static void describe_request(const struct run *run, uint32_t request, struct msg_generate *ret)
{
    const struct run_options *o = &run->options;
    const struct token_buf *prompt = &run->prompts.list[request];
    *ret = (struct msg_generate){
        .flags = (o->attention == RUN_FULL ? (uint32_t)GENERATE_FULL : 0) |
                 (o->ignore_eos ? (uint32_t)GENERATE_IGNORE_EOS : 0) |
                 (o->no_prefix ? 0 : (uint32_t)GENERATE_REUSE),
        .max_tokens = o->tokens,
        .selection = o->selection,
        .budget = run->lists.budget,
        .sinks = run->lists.sinks,
        .window = run->lists.window,
        .budget_max = run->budget_max,
        .min_mass = o->min_mass,
        .budget_top_p = o->budget_top_p,
        .sampling = {.temperature = o->temperature,
                     .top_p = o->top_p,
                     .min_p = o->min_p,
                     .repeat_penalty = o->repeat_penalty,
                     .presence_penalty = o->presence_penalty,
                     .frequency_penalty = o->frequency_penalty,
                     .top_k = o->top_k,
                     .repeat_last_n = o->repeat_last_n,
                     .seed = run->seed},
        .tokens = {.at = prompt->ids, .count = (uint32_t)prompt->count},
    };
}

/* Sends as many requests as may be outstanding. A full queue is tried again at the next tick. */
static void send_requests(struct run *run)
{
    while (run->stage == ANSWERING && run->next < run->prompts.count && run->outstanding < LIMIT_SEQUENCES) {
        struct msg_generate generate;
        describe_request(run, run->next, &generate);
        if (client_generate(run->client, run->next, &generate))
            return;
        struct sequence *s = &run->sequences[run->next++];
        s->sent = true;
        s->sent_ns = clock_now_ns();
        run->outstanding++;
    }
}

static void begin_answering(struct run *run)
{
    if (run->stage != LOADING || !run->parts_ready || !run->attached)
        return;
    progress_clear(&run->progress);
    run->ready_ns = clock_now_ns();
    struct err err = {0};
    if (arena_hold_ask(&run->arena, supervise_dir(run->supervise), client_epoch(run->client), &err))
        log_warn("the arena's descriptor is not held: %s", err.text);
    log_debug("ready after %" PRId64 " ms, %u prompts", (run->ready_ns - run->begin_ns) / CLOCK_MS,
              run->prompts.count);
    run->stage = ANSWERING;
    send_requests(run);
}

static struct sequence *find_sequence(struct run *run, uint32_t request)
{
    struct sequence *s = request < run->prompts.count ? &run->sequences[request] : NULL;
    return s && s->sent && !s->finished ? s : NULL;
}

static void on_progress(void *arg, uint32_t request, const struct msg_progress *progress)
{
    struct run *run = arg;
    struct sequence *s = find_sequence(run, request);
    if (!s)
        return;
    s->prefilled = progress->done;
    s->cached = progress->cached;
    uint64_t done = 0, total = 0;
    for (uint32_t i = 0; i < run->prompts.count; i++) {
        done += run->sequences[i].prefilled;
        total += run->prompts.list[i].count;
    }
    if (run->stage == ANSWERING && !run->shown)
        progress_prefill(&run->progress, done, total);
}

static void on_tokens(void *arg, uint32_t request, const struct msg_u32s *tokens)
{
    struct run *run = arg;
    struct sequence *s = find_sequence(run, request);
    if (!s)
        return;
    sequence_push(s, run->tokenizer, tokens);
    show_text(run);
}

static void on_done(void *arg, uint32_t request, const struct msg_done *done)
{
    struct run *run = arg;
    struct sequence *s = find_sequence(run, request);
    if (!s)
        return;
    sequence_finish(s, done);
    run->outstanding--;
    /* Who was told to cancel and then to stop may say that it stops: that is no failure. */
    if (done->reason == FINISH_ERROR && run->stage == ANSWERING) {
        char text[ERR_TEXT_MAX];
        if (run->options.prompts)
            snprintf(text, sizeof text, "prompt %u: %.400s", request + 1, done->text);
        else
            snprintf(text, sizeof text, "%.400s", done->text);
        set_error(run, text);
    }
    send_requests(run);
    if (run->outstanding || (run->stage == ANSWERING && run->next < run->prompts.count))
        return;
    if (run->stage == ANSWERING && run->error[0]) {
        run->stage = SETTLING;
        run->deadline_ns = clock_now_ns() + BLAME_NS;
    } else if (run->stage == ANSWERING || run->stage == CANCELLING) {
        finish(run);
    }
}

static void on_attached(void *arg)
{
    struct run *run = arg;
    run->attached = true;
    begin_answering(run);
}

static void on_lost(void *arg, enum client_part part, const char *why)
{
    struct run *run = arg;
    supervise_lost(run->supervise, client_part_program(part), why);
}

static const struct client_ops client_ops = {
    .attached = on_attached, .lost = on_lost, .progress = on_progress, .tokens = on_tokens, .done = on_done};

/* ---- parts and time ------------------------------------------------------------------------------------ */

static void on_status(void *arg, const char *part, const char *text)
{
    struct run *run = arg;
    if (run->stage == LOADING)
        progress_loading(&run->progress, part, text);
}

static void on_ready(void *arg)
{
    struct run *run = arg;
    run->parts_ready = true;
    begin_answering(run);
}

/* A part's end is the cause of whatever else went wrong, so its text replaces another. */
static void on_failed(void *arg, const char *text)
{
    struct run *run = arg;
    run->error[0] = 0;
    set_error(run, text);
    if (!run->end_ns)
        run->end_ns = clock_now_ns();
    progress_clear(&run->progress);
    if (run->stage != LOADING)
        show_rest(run);
    run->stage = ENDING;
}

static void on_stopped(void *arg)
{
    struct run *run = arg;
    loop_stop(run->loop, 0);
}

static const struct supervise_ops supervise_ops = {
    .status = on_status, .ready = on_ready, .failed = on_failed, .stopped = on_stopped};

static void on_signal(void *arg, int number)
{
    struct run *run = arg;
    (void)number;
    bool first = run->stage == LOADING || run->stage == ANSWERING;
    if (run->code == EXIT_DONE)
        run->code = EXIT_INTERRUPTED;
    if (!first) { /* the second one: at once */
        end_parts(run);
        supervise_kill(run->supervise);
    } else if (run->stage == LOADING || !run->outstanding) {
        end_parts(run);
    } else {
        run->stage = CANCELLING;
        run->deadline_ns = clock_now_ns() + CANCEL_NS;
        for (uint32_t i = 0; i < run->next; i++)
            if (!run->sequences[i].finished)
                client_cancel(run->client, i);
    }
}

static void on_tick(void *arg)
{
    struct run *run = arg;
    send_requests(run);
    int64_t over = clock_now_ns() - run->deadline_ns;
    bool waits = run->stage == SETTLING && over < SUPERVISE_ENDING_NS && supervise_ending(run->supervise);
    if ((run->stage == CANCELLING || run->stage == SETTLING) && over >= 0 && !waits)
        finish(run);
}

/* ---- beginning and end --------------------------------------------------------------------------------- */

/* Everything that can be refused before a process is started. */
static int prepare(struct run *run, struct err *err)
{
    struct run_options *o = &run->options;
    int r = o->report ? report_check(o->report, err) : 0;
    if (!r)
        r = model_open(o->model, &run->model, err);
    if (r)
        return r;
    uint32_t most = model_config(run->model)->context_max;
    if (o->context > most)
        return err_set(err, -EINVAL, "--ctx-size: found %u, but the model was made for %u", o->context, most);
    run->context = o->context ? o->context : most;
    run->lists = run_options_lists(o, run->context);
    run->budget_max = run_options_budget_max(o, run->context);
    run->seed = o->seed < 0 ? hash_random_id() >> 1 : (uint64_t)o->seed;
    r = tokenizer_create(run->model, &run->tokenizer, err);
    if (!r)
        r = prompts_load(o, run->tokenizer, run->context, &run->prompts, err);
    if (r)
        return r;
    run->sequences = mem_alloc(run->prompts.count, sizeof *run->sequences);
    for (uint32_t i = 0; i < run->prompts.count; i++)
        sequence_begin(&run->sequences[i], &run->prompts.list[i]);
    return session_head(o->head, run->model, run->head, err);
}

static int start(struct run *run, struct err *err)
{
    run->loop = loop_create();
    struct session_config config = {run->loop,      run->options.runtime, on_signal,
                                    &supervise_ops, &client_ops,          run};
    uint32_t sequences = run->options.sequences ? run->options.sequences : SEQUENCES_DEFAULT;
    struct parts_plan plan = {
        .options = &run->options,
        .model = run->model,
        .context = run->context,
        .head = run->head,
        .sequences = run->prompts.count < sequences ? run->prompts.count : sequences,
        .requests = run->prompts.count,
        .budget = run->budget_max,
    };
    int r = session_start(&config, &plan, &run->supervise, &run->client, err);
    if (r)
        return r;
    run->output = output_create(run->loop, STDOUT_FILENO, on_output, run);
    loop_add_timer(run->loop, TICK_NS, on_tick, run);
    return 0;
}

static void tell(struct run *run)
{
    struct report report = {
        .options = &run->options,
        .model_name = model_name(run->model),
        .head = run->head,
        .context = run->context,
        .budget = run->lists.budget,
        .budget_max = run->budget_max,
        .seed = run->seed,
        .sequences = run->sequences,
        .count = run->prompts.count,
        .load_ns = (run->ready_ns ? run->ready_ns : run->end_ns) - run->begin_ns,
        .run_ns = run->ready_ns ? run->end_ns - run->ready_ns : 0,
        .error = run->error[0] ? run->error : NULL,
    };
    report.processes[report.process_count++] = (struct report_process){"specontext", (uint32_t)getpid()};
    for (int i = 0; i < CLIENT_PARTS; i++)
        report.processes[report.process_count++] = (struct report_process){
            client_part_name((enum client_part)i),
            (uint32_t)supervise_pid(run->supervise, client_part_program((enum client_part)i))};
    bool any = false;
    for (uint32_t i = 0; i < run->prompts.count; i++)
        any = any || run->sequences[i].generated.count || run->sequences[i].finished;
    if (any) {
        fputc('\n', stderr);
        report_print(&report, stderr);
    }
    struct err err = {0};
    if (any && run->options.report && report_write(&report, run->options.report, &err))
        set_error(run, err.text);
}

static void release(struct run *run)
{
    client_free(&run->client);
    if (run->loop)
        arena_hold_free(&run->arena);
    output_free(&run->output);
    supervise_free(&run->supervise);
    loop_free(&run->loop);
    for (uint32_t i = 0; run->sequences && i < run->prompts.count; i++)
        sequence_free(&run->sequences[i]);
    mem_free(&run->sequences);
    prompts_free(&run->prompts);
    tokenizer_free(&run->tokenizer);
    model_free(&run->model);
}

int run_main(int argc, char **argv)
{
    struct err err = {0};
    struct run *run = mem_alloc(1, sizeof *run);
    run->begin_ns = clock_now_ns();
    int r = run_options_parse(argc, argv, &run->options, &err);
    if (r) {
        mem_free(&run);
        if (r == 1) {
            run_options_help(stdout);
            return EXIT_DONE;
        }
        fprintf(stderr, "specontext run: %s\n", err.text);
        return EXIT_USAGE;
    }
    log_init("specontext", (enum log_level)run->options.log);
    progress_init(&run->progress, STDERR_FILENO);
    r = prepare(run, &err);
    if (!r) {
        r = start(run, &err);
        arena_hold_init(&run->arena, run->loop);
    }
    if (r) {
        set_error(run, err.text);
    } else {
        loop_run(run->loop);
        tell(run);
    }
    if (run->error[0])
        fprintf(stderr, "specontext: %s\n", run->error);
    int code = run->code;
    release(run);
    mem_free(&run);
    return code;
}
