/* The life of one benchmark: three daemons up, rounds of requests of random tokens, figures, everything down.
 *
 * Owns the loop and all that hangs on it; single-threaded but for ZeroMQ's own thread, and for the threads
 * that measure bandwidth while no request runs. Times are taken where a user of the daemons would take them:
 * when a request is sent and when its tokens arrive. It must never compute anything between two tokens. */
#include "launch/bench.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "compute/gpu.h"
#include "launch/bench_gpu.h"
#include "launch/bench_machine.h"
#include "launch/bench_options.h"
#include "launch/bench_parts.h"
#include "launch/bench_plan.h"
#include "launch/bench_report.h"
#include "launch/client.h"
#include "launch/parts.h"
#include "launch/sequence.h"
#include "launch/session.h"
#include "launch/supervise.h"
#include "model/head.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

struct stream {
    uint32_t received; /* tokens */
    bool finished;
};

struct bench {
    struct bench_options options;
    struct model *model;
    char head[PATH_MAX];
    uint32_t context, key_bytes; /* keys of the head for one position */
    uint32_t *ids;               /* [context] */
    struct bench_gpu gpu;        /* copy_rate 0: the model is on the CPU */
    double bandwidth;
    struct bench_row *rows;
    uint32_t row_count, row; /* `row`: in work */

    struct loop *loop;
    struct supervise *supervise;
    struct client *client;
    bool parts_ready, attached, ending;
    int code;
    char error[ERR_TEXT_MAX];

    int round;                    /* of the row; see bench_plan.h */
    struct bench_request request; /* of each sequence of the round; beginnings apart */
    struct stream streams[BENCH_PARALLEL_MAX];
    uint32_t count, outstanding; /* sequences of the round; not finished */
    uint64_t streams_used;
    uint64_t received, received_before; /* tokens of all sequences; when the time began */
    int64_t begin_ns, end_ns;           /* of what is timed; 0: not yet */
    int64_t step_ns;                    /* when the step before was complete */
    uint32_t steps;                     /* complete since the time began */
    struct bench_usage begin_cpu, end_cpu;
    struct msg_done done;       /* the last one */
    struct bench_window window; /* of a repeat */

    uint32_t lines; /* of standard input that no round has used */
    bool waiting;   /* for one */
};

static void set_error(struct bench *b, const char *text)
{
    if (!b->error[0])
        snprintf(b->error, sizeof b->error, "%.500s", text);
    b->code = EXIT_FAILED;
}

static void end_parts(struct bench *b)
{
    if (b->ending)
        return;
    b->ending = true;
    supervise_stop(b->supervise);
}

/* All four processes, ours included. */
static void all_processes(const struct bench *b, void (*add)(pid_t pid, struct bench_usage *sum),
                          struct bench_usage *ret)
{
    *ret = (struct bench_usage){0};
    add(getpid(), ret);
    for (int i = 0; i < CLIENT_PARTS; i++) {
        pid_t pid = supervise_pid(b->supervise, client_part_program((enum client_part)i));
        if (pid > 0)
            add(pid, ret);
    }
}

/* ---- rounds -------------------------------------------------------------------------------------------- */

/* Repeats have the daemons' figures of both ends; the answers come while the round goes on. */
static void ask_parts(struct bench *b)
{
    for (int i = 0; b->round >= 0 && i < CLIENT_PARTS; i++) {
        int r = client_ask_status(b->client, (enum client_part)i);
        char text[ERR_TEXT_MAX];
        if (!r)
            continue;
        snprintf(text, sizeof text, "status of %s: %s", client_part_program((enum client_part)i),
                 strerror(-r));
        set_error(b, text);
        end_parts(b);
        return;
    }
}

static void begin_time(struct bench *b)
{
    ask_parts(b);
    b->received_before = b->received;
    all_processes(b, bench_machine_cpu, &b->begin_cpu);
    b->begin_ns = b->step_ns = clock_now_ns();
    b->steps = 0;
}

/* Every sequence has so many tokens of what is timed: the steps up to there are complete. Several that come
 * at once share their time. */
static void note_steps(struct bench *b, uint32_t complete)
{
    struct bench_row *row = &b->rows[b->row];
    int64_t now = clock_now_ns(), from = b->step_ns;
    uint32_t first = b->steps, end = complete < b->options.decode ? complete : b->options.decode;
    for (; b->steps < end; b->steps++)
        row->step_ms[row->repeats * b->options.decode + b->steps] =
            (double)(now - from) * 1e-6 / (double)(end - first);
    b->step_ns = now;
}

static void end_time(struct bench *b)
{
    struct bench_row *row = &b->rows[b->row];
    b->end_ns = clock_now_ns();
    all_processes(b, bench_machine_cpu, &b->end_cpu);
    ask_parts(b);
    if (b->round + 1 == (int)b->options.repeats)
        all_processes(b, bench_machine_memory, &row->memory);
}

static void send_round(struct bench *b)
{
    const struct bench_options *o = &b->options;
    struct run_lists lists = run_options_lists(&o->run, b->context);
    struct bench_row *row = &b->rows[b->row];
    memset(b->streams, 0, sizeof b->streams);
    b->count = bench_plan_sequences(o, b->round);
    b->received = b->received_before = 0;
    b->begin_ns = b->end_ns = 0;
    b->outstanding = b->count;
    if (row->kind == BENCH_PREFILL)
        begin_time(b);
    for (uint32_t i = 0; i < b->count; i++) {
        b->request = bench_plan_request(o, row, b->round, i);
        bench_plan_tokens(&b->request, ++b->streams_used, model_config(b->model)->vocab, b->ids);
        struct msg_generate generate = {
            .flags = GENERATE_IGNORE_EOS | GENERATE_REUSE |
                     (o->run.attention == RUN_FULL ? (uint32_t)GENERATE_FULL : 0),
            .max_tokens = b->request.generate,
            .selection = o->run.selection,
            .budget = lists.budget,
            .budget_max = run_options_budget_max(&o->run, b->context),
            .min_mass = o->run.min_mass,
            .budget_top_p = o->run.budget_top_p,
            .sinks = lists.sinks,
            .window = lists.window,
            .sampling = {.top_p = 1, .repeat_penalty = 1},
            .tokens = {.at = b->ids, .count = b->request.prompt},
        };
        int r = client_generate(b->client, i, &generate);
        if (r) {
            char text[ERR_TEXT_MAX];
            snprintf(text, sizeof text, "request %u: %s", i + 1, strerror(-r));
            set_error(b, text);
            end_parts(b);
            return;
        }
    }
}

/* Skips the building of a depth that no block of the prefix cache can hold. Paced: the first round of a row,
 * and each repeat, waits for a line. */
static void begin_round(struct bench *b)
{
    bool builds = bench_plan_builds(&b->options, b->rows[b->row].depth);
    if (b->round == BENCH_ROUND_BUILD && !builds)
        b->round = BENCH_ROUND_WARM;
    bool first = b->round == BENCH_ROUND_BUILD || (b->round == BENCH_ROUND_WARM && !builds);
    if (b->options.paced && (first || b->round >= 0)) {
        b->waiting = !b->lines;
        if (b->waiting)
            return;
        b->lines--;
    }
    send_round(b);
}

static uint64_t weight_bytes(const struct bench *b)
{
    return gpu_named(b->options.run.device) ? bench_gpu_weights(b->model) : bench_machine_weights(b->model);
}

/* On a GPU, what has to be read there: the retriever's keys are another process's affair, and perhaps another
 * GPU's. */
static uint64_t step_bytes(const struct bench *b, const struct bench_row *row)
{
    const struct model_config *c = model_config(b->model);
    if (row->kind != BENCH_DECODE)
        return 0;
    double position = (double)(c->layers * c->kv_heads) * c->head_dim * 4,
           context = row->depth + row->tokens / 2.0;
    double attended = isfinite(row->attended) ? row->attended : context, keys = 0;
    if (b->options.run.attention == RUN_SPARSE && !gpu_named(b->options.run.device))
        keys = context * b->key_bytes;
    return weight_bytes(b) + (uint64_t)(b->options.parallel * (attended * position + keys));
}

static void take_sample(struct bench *b)
{
    struct bench_row *row = &b->rows[b->row];
    double seconds = (double)(b->end_ns - b->begin_ns) * 1e-9;
    double cpu = (double)(b->end_cpu.cpu_ns - b->begin_cpu.cpu_ns) * 1e-9;
    double tokens = row->kind == BENCH_DECODE
                        ? (double)(b->received - b->received_before)
                        : (double)b->count * (b->request.prompt - b->done.cached_tokens);
    row->rates[row->repeats] = tokens / seconds;
    row->cpu[row->repeats] = cpu / tokens;
    row->repeats++;
    row->cached = b->done.cached_tokens;
    row->layers_offloaded = b->done.counters.layers_offloaded_max;
    row->attended = sequence_attended(&b->done.counters);
    row->step_bytes = step_bytes(b, row);
    if (b->options.paced) {
        printf("{\"what\":\"%s\",\"depth\":%u,\"tokens_per_s\":%.3f,\"cpu_ms_per_token\":%.4f}\n",
               row->kind == BENCH_DECODE ? "decode" : "prefill", row->depth, tokens / seconds,
               1e3 * cpu / tokens);
        fflush(stdout);
    }
}

/* Called when the last sequence of a round is complete and when an answer of a part has come. */
static void end_round(struct bench *b)
{
    if (b->outstanding || b->ending)
        return;
    if (b->round >= 0 && b->end_ns && !bench_window_complete(&b->window))
        return; /* as long as a part lives, it answers: its end is seen by others */
    if (b->round >= 0) {
        take_sample(b);
        int r = bench_parts_add(&b->rows[b->row].parts, &b->window);
        bench_window_clear(&b->window);
        if (r) {
            set_error(b, "the answer of a part to STATUS is no JSON");
            end_parts(b);
            return;
        }
    }
    if (b->round == BENCH_ROUND_WARM && b->options.paced) {
        puts("{\"ready\":true}");
        fflush(stdout);
    }
    if (++b->round == (int)b->options.repeats) {
        bench_row_close(&b->rows[b->row]);
        b->round = BENCH_ROUND_BUILD;
        b->row++;
    }
    if (b->row == b->row_count)
        end_parts(b);
    else
        begin_round(b);
}

/* ---- news of the daemons ------------------------------------------------------------------------------- */

static void begin_measuring(struct bench *b)
{
    if (b->ending || !b->parts_ready || !b->attached)
        return;
    b->round = BENCH_ROUND_BUILD;
    begin_round(b);
}

/* A decode's time is over: those that began first have more to do. */
static void cancel_rest(struct bench *b)
{
    for (uint32_t i = 0; i < b->count; i++)
        if (b->streams[i].received < b->request.generate)
            client_cancel(b->client, i); /* if it could not be sent, the sequence ends by itself */
}

/* Rather than when the first sequence ends, which may take a thousand steps. */
static void end_if_stuck(struct bench *b)
{
    uint32_t received[BENCH_PARALLEL_MAX], begun;
    char text[ERR_TEXT_MAX];
    for (uint32_t i = 0; i < b->count; i++)
        received[i] = b->streams[i].received;
    uint32_t ahead = bench_plan_ahead(&b->options, b->rows[b->row].depth);
    if (b->ending || (begun = bench_plan_stuck(received, b->count, ahead)) == 0)
        return;
    snprintf(text, sizeof text,
             "%u of %u sequences run and the others wait for memory; expected fewer --requests, or more "
             "--device-memory or --host-memory",
             begun, b->count);
    set_error(b, text);
    end_parts(b);
}

/* A decode is timed from when the last sequence has its lead until that one has all its tokens; a prefill
 * from sending it until the last sequence has its first token. */
static void on_tokens(void *arg, uint32_t request, const struct msg_u32s *tokens)
{
    struct bench *b = arg;
    if (request >= b->count || b->streams[request].finished)
        return;
    b->streams[request].received += tokens->count;
    if (!b->end_ns)
        b->received += tokens->count;
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < b->count; i++)
        least = b->streams[i].received < least ? b->streams[i].received : least;
    if (b->end_ns)
        return;
    if (b->rows[b->row].kind == BENCH_PREFILL) {
        if (least > 0)
            end_time(b);
        return;
    }
    if (!b->begin_ns) {
        if (least >= BENCH_LEAD)
            begin_time(b);
        else if (least == 0)
            end_if_stuck(b);
        return;
    }
    if (least > BENCH_LEAD + b->steps)
        note_steps(b, least - BENCH_LEAD);
    if (least >= BENCH_LEAD + b->options.decode) {
        end_time(b);
        cancel_rest(b);
    }
}

static void on_done(void *arg, uint32_t request, const struct msg_done *done)
{
    struct bench *b = arg;
    if (request >= b->count || b->streams[request].finished)
        return;
    b->streams[request].finished = true;
    b->outstanding--;
    b->done = *done;
    if (done->reason == FINISH_ERROR && !b->ending) {
        set_error(b, done->text);
        end_parts(b);
    }
    bool timed = b->rows[b->row].kind == BENCH_DECODE && b->round != BENCH_ROUND_BUILD;
    if (timed && !b->end_ns && !b->ending) {
        set_error(b, "a sequence ended before all were timed together; expected fewer --requests");
        end_parts(b);
    }
    end_round(b);
}

static void on_attached(void *arg)
{
    struct bench *b = arg;
    b->attached = true;
    begin_measuring(b);
}

static void on_lost(void *arg, enum client_part part, const char *why)
{
    struct bench *b = arg;
    supervise_lost(b->supervise, client_part_program(part), why);
}

static void on_report(void *arg, enum client_part part, const char *json, uint32_t bytes)
{
    struct bench *b = arg;
    bench_window_answer(&b->window, part, json, bytes);
    if (bench_window_complete(&b->window))
        end_round(b);
}

static const struct client_ops client_ops = {
    .attached = on_attached, .lost = on_lost, .tokens = on_tokens, .done = on_done, .report = on_report};

static void on_ready(void *arg)
{
    struct bench *b = arg;
    b->parts_ready = true;
    begin_measuring(b);
}

/* A part's end is the cause of whatever else went wrong, so its text replaces another. */
static void on_failed(void *arg, const char *text)
{
    struct bench *b = arg;
    b->error[0] = 0;
    set_error(b, text);
    b->ending = true;
}

static void on_stopped(void *arg)
{
    struct bench *b = arg;
    loop_stop(b->loop, 0);
}

static const struct supervise_ops supervise_ops = {
    .ready = on_ready, .failed = on_failed, .stopped = on_stopped};

static void on_signal(void *arg, int number)
{
    struct bench *b = arg;
    (void)number;
    if (b->ending)
        supervise_kill(b->supervise);
    if (b->code == EXIT_DONE)
        b->code = EXIT_INTERRUPTED;
    end_parts(b);
}

static void on_input(void *arg, uint32_t events)
{
    struct bench *b = arg;
    char text[256];
    ssize_t n = read(STDIN_FILENO, text, sizeof text);
    (void)events;
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n <= 0) {
        loop_remove_fd(b->loop, STDIN_FILENO);
        if (b->row < b->row_count && !b->ending) {
            set_error(b, "standard input: ended before all was measured");
            end_parts(b);
        }
        return;
    }
    for (ssize_t i = 0; i < n; i++)
        b->lines += text[i] == '\n';
    if (b->waiting && b->lines && !b->ending) {
        b->waiting = false;
        begin_round(b);
    }
}

/* ---- beginning and end --------------------------------------------------------------------------------- */

/* Before the parts are started and after they have ended: nothing else of ours runs then. */
static void measure_bandwidth(struct bench *b)
{
    double rate = bench_machine_bandwidth(b->model, (int)parts_cores(&b->options.run));
    b->bandwidth = rate > b->bandwidth ? rate : b->bandwidth;
}

/* A GPU's once: it is not shared with others' work as cores are, and a process that forks must have no
 * threads. */
static int measure_device(struct bench *b, struct err *err)
{
    if (!gpu_named(b->options.run.device)) {
        measure_bandwidth(b);
        return 0;
    }
    int r = bench_gpu_measure(b->options.run.device, &b->gpu, err);
    b->bandwidth = b->gpu.copy_rate;
    return r;
}

static int choose_head(struct bench *b, struct err *err)
{
    struct head *head = NULL;
    int r = session_head(b->options.run.head, b->model, b->head, err);
    if (!r)
        r = head_open(b->head, b->model, &head, err);
    if (r)
        return r;
    const struct head_config *c = head_config(head);
    struct memory_gpu_head sizes = head_sizes(head);
    sizes.keys_int8 = run_options_keys_int8(&b->options.run) && gpu_named(b->options.run.retriever_device);
    b->key_bytes = c->groups * c->kv_heads * (uint32_t)memory_gpu_key_bytes(&sizes);
    head_free(&head);
    return 0;
}

/* Everything that can be refused before a process is started. */
static int prepare(struct bench *b, struct err *err)
{
    struct bench_options *o = &b->options;
    int r = model_open(o->run.model, &b->model, err);
    if (!r)
        r = bench_plan_context(o, model_config(b->model)->context_max, &b->context, err);
    if (!r)
        r = choose_head(b, err);
    if (r)
        return r;
    o->run.context = b->context;
    if (!o->run.host_memory)
        o->run.host_memory = bench_plan_host_memory(o, model_config(b->model), b->context);
    b->ids = mem_alloc(b->context, sizeof *b->ids);
    b->rows = bench_plan_rows(o, &b->row_count);
    return 0;
}

static int start(struct bench *b, struct err *err)
{
    int r;
    b->loop = loop_create();
    if (b->options.paced && (r = loop_add_fd(b->loop, STDIN_FILENO, EPOLLIN, on_input, b)))
        return err_set(err, r, "standard input: %s; expected a pipe or a terminal", strerror(-r));
    struct session_config config = {b->loop, b->options.run.runtime, on_signal, &supervise_ops, &client_ops,
                                    b};
    struct parts_plan plan = {.options = &b->options.run,
                              .model = b->model,
                              .context = b->context,
                              .head = b->head,
                              .sequences = b->options.parallel,
                              .requests = 1u << 16, /* rounds without end: what host memory there is */
                              .budget = run_options_budget_max(&b->options.run, b->context)};
    return session_start(&config, &plan, &b->supervise, &b->client, err);
}

static void tell(const struct bench *b)
{
    struct bench_report report = {.options = &b->options,
                                  .model_name = model_name(b->model),
                                  .head = b->head,
                                  .context = b->context,
                                  .cores = parts_cores(&b->options.run),
                                  .weight_bytes = weight_bytes(b),
                                  .gpu = gpu_named(b->options.run.device) ? &b->gpu : NULL,
                                  .bandwidth = b->bandwidth,
                                  .rows = b->rows,
                                  .row_count = b->row};
    if (b->options.output == BENCH_JSON || b->options.paced)
        bench_report_json(&report, stdout);
    else if (b->row)
        bench_report_table(&report, stdout);
}

static void release(struct bench *b)
{
    client_free(&b->client);
    supervise_free(&b->supervise);
    loop_free(&b->loop);
    for (uint32_t i = 0; i < b->row_count; i++)
        bench_row_free(&b->rows[i]);
    bench_window_clear(&b->window);
    mem_free(&b->rows);
    mem_free(&b->ids);
    model_free(&b->model);
}

int bench_main(int argc, char **argv)
{
    struct err err = {0};
    struct bench *b = mem_alloc(1, sizeof *b);
    int r = bench_options_parse(argc, argv, &b->options, &err);
    if (r) {
        mem_free(&b);
        if (r == 1) {
            bench_options_help(stdout);
            return EXIT_DONE;
        }
        fprintf(stderr, "specontext bench: %s\n", err.text);
        return EXIT_USAGE;
    }
    log_init("specontext", (enum log_level)b->options.run.log);
    r = prepare(b, &err);
    if (!r)
        r = measure_device(b, &err);
    if (!r)
        r = start(b, &err);
    if (r) {
        set_error(b, err.text);
    } else {
        loop_run(b->loop);
        if (b->row == b->row_count && !gpu_named(b->options.run.device))
            measure_bandwidth(b);
        tell(b);
    }
    if (fflush(stdout) || ferror(stdout))
        set_error(b, "standard output: not everything could be written");
    if (b->error[0])
        fprintf(stderr, "specontext: %s\n", b->error);
    int code = b->code;
    release(b);
    mem_free(&b);
    return code;
}
