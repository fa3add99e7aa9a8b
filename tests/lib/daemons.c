/* The daemons of a test; see daemons.h. Single-threaded. */
#include "tests/lib/daemons.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/check.h"
#include "base/loop.h"
#include "tests/lib/temp.h"

enum { TICK_MS = 20 };

static struct daemons_request learned[DAEMONS_REQUESTS];

static void start(struct proc *proc, const struct daemons *d, const char *name, const char *const *more)
{
    const char *argv[32] = {proc_program(name), "--runtime", d->dir, "--log", "warn"};
    int n = 5;
    while (*more)
        argv[n++] = *more++;
    proc_start(proc, argv, NULL);
}

void daemons_start(struct daemons *d, enum runcase_part part)
{
    struct proc *proc = &d->parts[part];
#define START(name, ...) start(proc, d, "specontext-" name, (const char *const[]){__VA_ARGS__, NULL})
    if (part == RUNCASE_KVSTORE && d->lacks_layers)
        START("kvstore", "--device-memory", "64M", "--host-memory", "256M", "--threads", "1", "--device",
              d->device, "--sequences", "2", "--offload-layers", "12", "--write-through", "offloaded",
              "--poison");
    else if (part == RUNCASE_KVSTORE)
        START("kvstore", "--device-memory", "64M", "--host-memory", "256M", "--threads", "1", "--device",
              d->device);
    else if (part == RUNCASE_RETRIEVER)
        START("retriever", "-m", RUNCASE_MODEL, "-H", d->head, "--context", "1024", "--threads", "1",
              "--device", d->device, "--key-type", d->key_type);
    else
        START("decoder", "-m", RUNCASE_MODEL, "--context", "1024", "--threads", "1", "--chunk", d->chunk,
              "--device", d->device);
}

void daemons_kill(struct daemons *d, enum runcase_part part)
{
    struct proc *proc = &d->parts[part];
    kill(proc->pid, SIGKILL);
    assert_true(proc_wait(proc, clock_now_ns() + DAEMONS_WAIT_S * CLOCK_S));
    proc_free(proc);
}

void daemons_restart(struct daemons *d, enum runcase_part part)
{
    daemons_kill(d, part);
    daemons_start(d, part);
}

static const char *told(struct daemons *d, enum runcase_part part)
{
    proc_pump(&d->parts[part], clock_now_ns());
    return d->parts[part].err.text ? d->parts[part].err.text : "";
}

bool daemons_said(struct daemons *d, enum runcase_part part, const char *text)
{
    return strstr(told(d, part), text) != NULL;
}

void daemons_forget_said(struct daemons *d, enum runcase_part part)
{
    struct proc_text *text = &d->parts[part].err;
    told(d, part); /* what is on its way, too */
    if (text->text)
        text->text[0] = 0;
    text->bytes = 0;
}

static void take_report(struct daemons *d, const struct msg *msg)
{
    json_decref(d->status);
    d->status = json_loadb(msg->report.json.data, msg->report.json.bytes, 0, NULL);
}

static void on_message(void *arg, struct msg *msg)
{
    struct daemons *d = arg;
    if (msg->kind == MSG_REPORT)
        take_report(d, msg);
    if (msg->id < d->first_id || msg->id - d->first_id >= d->count)
        return;
    uint32_t i = (uint32_t)(msg->id - d->first_id);
    struct daemons_request *q = &d->requests[i];
    for (uint32_t t = 0; msg->kind == MSG_TOKEN && t < msg->token.tokens.count; t++) {
        assert_true(q->count < DAEMONS_TOKENS && !q->ended);
        q->tokens[q->count++] = msg->token.tokens.at[t];
    }
    if (msg->kind == MSG_PROGRESS)
        q->progress = msg->progress.done;
    if (msg->kind == MSG_DONE) {
        assert_false(q->ended);
        q->done = msg->done;
        q->ended = true;
    } else if (d->heard) {
        d->heard(d, i);
    }
}

static void on_lost(void *arg, const char *why)
{
    (void)why;
    ((struct daemons *)arg)->lost = true;
}

static void on_tick(void *arg)
{
    struct daemons *d = arg;
    struct msg ask = {.kind = MSG_STATUS, .id = 0};
    if (bus_client_state(d->client) == BUS_READY)
        bus_send(d->client, &ask);
    if (d->lost || clock_now_ns() > d->deadline_ns || d->until(d))
        loop_stop(d->loop, 0);
}

static bool all_ended(struct daemons *d)
{
    for (uint32_t i = 0; i < d->count; i++)
        if (!d->requests[i].ended)
            return false;
    return true;
}

void daemons_run(struct daemons *d, bool (*until)(struct daemons *d))
{
    d->until = until ? until : all_ended;
    d->deadline_ns = clock_now_ns() + DAEMONS_WAIT_S * CLOCK_S;
    int timer = loop_add_timer(d->loop, TICK_MS * CLOCK_MS, on_tick, d);
    loop_run(d->loop);
    loop_remove_timer(d->loop, timer);
    if (d->lost || clock_now_ns() > d->deadline_ns) {
        for (int i = 0; i < RUNCASE_PARTS; i++)
            print_message("# part %d: %s\n", i,
                          d->parts[i].pid ? told(d, (enum runcase_part)i) : "not there");
        fail_msg("%s within %d s", d->lost ? "the decoder was gone" : "not all came", DAEMONS_WAIT_S);
    }
}

bool daemons_state_begins(const struct daemons *d, const char *text)
{
    const char *state = d->status ? json_string_value(json_object_get(d->status, "state")) : NULL;
    return state && !strncmp(state, text, strlen(text));
}

bool daemons_ready(struct daemons *d)
{
    return daemons_state_begins(d, "ready");
}

void daemons_clear(struct daemons *d)
{
    d->first_id += d->count;
    d->count = d->step = 0;
    d->heard = NULL;
}

void daemons_init(struct daemons *d, const char *head, const char *device, const char *chunk)
{
    *d = (struct daemons){.head = head, .device = device, .chunk = chunk, .key_type = "auto"};
    static unsigned worlds;
    char name[32];
    snprintf(name, sizeof name, "run%u", worlds++);
    snprintf(d->dir, sizeof d->dir, "%s", runcase_path(name));
}

void daemons_connect(struct daemons *d)
{
    static const struct bus_client_ops ops = {NULL, on_message, on_lost};
    struct msg_hello hello = {.role = ROLE_LAUNCH, .version_min = MSG_VERSION_MIN, .pid = 1};
    struct err err = {0};
    char path[RUNTIME_PATH_MAX];
    d->loop = loop_create();
    d->bus = bus_create(d->loop, &hello);
    d->first_id = 1;
    d->count = 0;
    d->lost = false;
    assert_int_equal(runtime_path(d->dir, "decoder.sock", path, &err), 0);
    assert_int_equal(bus_connect(d->bus, path, &ops, d, &d->client, &err), 0);
}

void daemons_disconnect(struct daemons *d)
{
    if (!d->loop)
        return;
    bus_free(&d->bus);
    loop_free(&d->loop);
    json_decref(d->status);
    d->status = NULL;
}

void daemons_open(struct daemons *d, const char *head, const char *device, const char *chunk)
{
    daemons_init(d, head, device, chunk);
    for (int i = 0; i < RUNCASE_PARTS; i++)
        daemons_start(d, (enum runcase_part)i);
    daemons_connect(d);
    daemons_run(d, daemons_ready);
}

void daemons_close(struct daemons *d)
{
    daemons_disconnect(d);
    for (int i = RUNCASE_PARTS; i-- > 0;)
        if (d->parts[i].pid)
            daemons_kill(d, (enum runcase_part)i);
    if (d->dir[0])
        temp_remove(d->dir);
    d->dir[0] = 0;
}

void daemons_ask(struct daemons *d, uint32_t prompt, uint32_t seed, uint32_t tokens, uint32_t selection,
                 uint32_t flags)
{
    uint32_t ids[DAEMONS_PROMPT];
    CHECK(d->count < DAEMONS_REQUESTS && prompt <= DAEMONS_PROMPT && tokens <= DAEMONS_TOKENS);
    for (uint32_t i = 0; i < prompt; i++)
        ids[i] = 1000 + (i * 37 + seed * 101) % 4001;
    struct daemons_request *q = &d->requests[d->count];
    *q = (struct daemons_request){.prompt = prompt, .seed = seed};
    q->ask = (struct msg_generate){.flags = flags | GENERATE_IGNORE_EOS,
                                   .max_tokens = tokens,
                                   .selection = selection,
                                   .budget = 40,
                                   .sinks = 4,
                                   .window = 16,
                                   .sampling = {.temperature = seed % 2 ? 1 : 0,
                                                .top_k = 40,
                                                .top_p = 1,
                                                .repeat_penalty = 1.2F,
                                                .repeat_last_n = 16,
                                                .seed = seed},
                                   .tokens = {ids, prompt}};
    struct msg msg = {.kind = MSG_GENERATE, .id = d->first_id + d->count++, .generate = q->ask};
    assert_int_equal(bus_send(d->client, &msg), 0);
    q->ask.tokens = (struct msg_u32s){0};
}

void daemons_learn(struct daemons *d)
{
    daemons_run(d, NULL);
    memcpy(learned, d->requests, sizeof learned);
    for (uint32_t i = 0; i < d->count; i++)
        if (d->requests[i].done.reason != FINISH_LENGTH)
            fail_msg("request %u: %s", i, d->requests[i].done.text);
}

const struct daemons_request *daemons_learned(uint32_t request)
{
    return &learned[request];
}

void daemons_expect(const struct daemons *d, uint32_t request)
{
    const struct daemons_request *q = &d->requests[request], *want = &learned[request];
    if (q->done.reason != FINISH_LENGTH)
        fail_msg("request %u, selection %u: %s", request, q->ask.selection, q->done.text);
    assert_int_equal(q->count, want->count);
    for (uint32_t t = 0; t < q->count; t++)
        if (q->tokens[t] != want->tokens[t])
            fail_msg("request %u, selection %u: token %u: found %u, expected %u", request, q->ask.selection,
                     t, q->tokens[t], want->tokens[t]);
    assert_int_equal(q->done.generated_tokens, want->count);
    assert_int_equal(q->progress, q->prompt);
}

void daemons_expect_learned(const struct daemons *d)
{
    for (uint32_t i = 0; i < d->count; i++)
        daemons_expect(d, i);
}
