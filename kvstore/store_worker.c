/* The planner's thread; see store_worker.h. It sleeps on its mailbox and on the store's doorbell, or, while a
 * dense step's staging waits for the decoder, on RUN_CONSUMED in slices; for a millisecond at most while
 * the GPU has work of ours, and not at all while a step's end or the next one is near. It must never touch a
 * socket. */
#include "kvstore/store_worker.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/mailbox.h"
#include "base/thread.h"
#include "base/trace.h"
#include "kvstore/gather_gpu.h"
#include "kvstore/reach.h"
#include "kvstore/residency.h"
#include "kvstore/step.h"
#include "link/flag.h"

enum { QUEUE = 4096, HOUSEKEEPING_MS = 1000, CALL_S = 120 };
#define RUN_SLICE_NS (20 * CLOCK_MS) /* how long a wait for RUN_CONSUMED may keep commands waiting */

struct call {                       /* what the loop thread waits for */
    const struct kv_layout *layout; /* NULL: get rid of the planner */
    int arena_fd;
    struct err *err;
    int result;
    bool done;
};

struct store_worker {
    struct planner_options options;
    const char *device;
    struct device_gpu *gpu;  /* NULL: the CPU */
    struct planner *planner; /* NULL: no decoder has told a layout yet */
    struct call *call;       /* with the mutex, as everything that a call writes */
    pthread_cond_t called;
    bool failed; /* told already */
    struct mailbox *commands, *answers;
    pthread_t thread;
    int store_bell, decoder_bell; /* -1 while no decoder is attached */
    uint32_t proposed;            /* last version that the decoder's bell was rung for */
    uint64_t answers_lost;
    atomic_bool stopping;
    pthread_mutex_t mutex; /* of stats */
    struct store_worker_stats stats;
};

/* ---- answers ---- */

static void put_answer(struct store_worker *w, struct store_worker_answer *a)
{
    if (mailbox_put(w->answers, a) == 0)
        return;
    w->answers_lost++;
    store_worker_answer_free(a);
}

static struct store_worker_answer *new_answer(enum store_worker_answer_kind kind)
{
    struct store_worker_answer *a = mem_alloc(1, sizeof *a);
    a->kind = kind;
    memset(a->fds, 0xff, sizeof a->fds);
    return a;
}

void store_worker_answer_free(struct store_worker_answer *a)
{
    for (size_t i = 0; i < sizeof a->fds / sizeof *a->fds; i++)
        if (a->fds[i] >= 0)
            close(a->fds[i]);
    mem_free(&a->owned);
    mem_free(&a);
}

static void reply(struct store_worker *w, const struct store_worker_command *c, const struct msg *msg,
                  void *owned)
{
    struct store_worker_answer *a = new_answer(STORE_WORKER_REPLY);
    a->peer = c->peer;
    a->msg = *msg;
    a->msg.id = c->msg.id;
    a->owned = owned;
    put_answer(w, a);
}

static void reply_error(struct store_worker *w, const struct store_worker_command *c, const struct err *err)
{
    struct msg msg = {.kind = MSG_ERROR, .error = {.code = err->code}};
    _Static_assert(sizeof err->text <= sizeof msg.error.text, "an error's line fits a message");
    memcpy(msg.error.text, err->text, sizeof err->text);
    reply(w, c, &msg, NULL);
}

static void on_reselect(void *arg, uint64_t sequence, uint32_t step)
{
    struct store_worker *w = arg;
    struct store_worker_answer *a = new_answer(STORE_WORKER_TO_ROLE);
    a->role = ROLE_RETRIEVER;
    a->msg = (struct msg){.kind = MSG_RESELECT, .id = step, .reselect = {.sequence = sequence}};
    put_answer(w, a);
}

static void on_closed(void *arg, uint64_t request, const struct msg_closed *closed)
{
    struct store_worker *w = arg;
    struct store_worker_answer *a = new_answer(STORE_WORKER_TO_ROLE);
    a->role = ROLE_DECODER;
    a->msg = (struct msg){.kind = MSG_CLOSED, .id = request, .closed = *closed};
    put_answer(w, a);
}

static void on_broken(void *arg, const char *why)
{
    struct store_worker *w = arg;
    struct store_worker_answer *a = new_answer(STORE_WORKER_BROKEN);
    a->epoch = w->planner->decoder_epoch;
    err_set(&a->error, -EPROTO, "%s", why);
    put_answer(w, a);
}

/* ---- calls ---- */

static int make(struct store_worker *w, const struct call *c)
{
    struct planner_events events = {
        .arg = w, .reselect = on_reselect, .closed = on_closed, .broken = on_broken};
    return c->arena_fd < 0
               ? planner_create(&w->planner, &w->options, c->layout, &events, c->err)
               : planner_create_adopting(&w->planner, &w->options, c->layout, &events, c->arena_fd, c->err);
}

static void finish(struct store_worker *w, struct call *c, int result)
{
    pthread_mutex_lock(&w->mutex);
    c->result = result;
    c->done = true;
    pthread_cond_signal(&w->called);
    pthread_mutex_unlock(&w->mutex);
}

/* Waits for the thread to finish a call that it has, or gets by way of a command. */
static int await(struct store_worker *w, struct call *c)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += CALL_S;
    pthread_mutex_lock(&w->mutex);
    while (!c->done) /* a planner that hangs that long is of no more use */
        CHECK(pthread_cond_timedwait(&w->called, &w->mutex, &until) == 0);
    pthread_mutex_unlock(&w->mutex);
    return c->result;
}

static int call(struct store_worker *w, struct call *c)
{
    struct store_worker_command *command = mem_alloc(1, sizeof *command);
    command->kind = STORE_WORKER_CALL;
    w->call = c;
    if (mailbox_put(w->commands, command) == 0)
        return await(w, c);
    store_worker_command_free(command);
    return err_set(c->err, -EAGAIN, "the planner's queue is full");
}

int store_worker_make(struct store_worker *w, const struct kv_layout *layout, int arena_fd, struct err *err)
{
    struct call c = {.layout = layout, .arena_fd = arena_fd, .err = err};
    return call(w, &c);
}

void store_worker_unmake(struct store_worker *w)
{
    struct call c = {.arena_fd = -1};
    call(w, &c);
}

const struct planner *store_worker_planner(const struct store_worker *w)
{
    return w->planner;
}

const char *store_worker_device(const struct store_worker *w)
{
    return w->gpu ? w->gpu->info.uuid : "cpu";
}

/* ---- commands ---- */

static void close_bells(struct store_worker *w)
{
    if (w->store_bell >= 0)
        close(w->store_bell);
    if (w->decoder_bell >= 0)
        close(w->decoder_bell);
    w->store_bell = w->decoder_bell = -1;
}

static int own_fd(int fd)
{
    return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

static int attach(struct store_worker *w, struct store_worker_answer *a)
{
    struct planner *p = w->planner;
    int r = planner_attach(p, a->epoch, &a->error);
    if (r < 0)
        return r;
    r = doorbell_create(&w->store_bell);
    if (r == 0)
        r = doorbell_create(&w->decoder_bell);
    int from[4] = {p->device.segment.fd, p->control.fd, w->store_bell, w->decoder_bell};
    for (size_t i = w->gpu ? 1 : 0; i < 4 && r == 0; i++) { /* a GPU's memory is opened by its handle */
        int fd = a->fds[a->fd_count++] = own_fd(from[i]);
        r = fd < 0 ? -errno : 0;
    }
    if (r < 0) {
        planner_detach(p, clock_now_ns());
        close_bells(w);
        return err_set(&a->error, r, "attach: descriptors: %s", strerror(-r));
    }
    a->device_bytes = p->device.bytes;
    a->control_bytes = p->control.bytes;
    w->proposed = 0;
    return 0;
}

static void do_attach(struct store_worker *w, uint64_t epoch)
{
    struct store_worker_answer *a = new_answer(STORE_WORKER_ATTACHED);
    a->epoch = epoch;
    attach(w, a);
    put_answer(w, a);
}

static void unmake(struct store_worker *w)
{
    if (w->planner && w->planner->attached)
        planner_detach(w->planner, clock_now_ns());
    planner_free(&w->planner);
    close_bells(w);
}

static void do_call(struct store_worker *w)
{
    struct call *c = w->call;
    int r = 0;
    if (c->layout)
        r = make(w, c);
    else
        unmake(w);
    finish(w, c, r);
}

static void do_message(struct store_worker *w, struct store_worker_command *c)
{
    struct planner *p = w->planner;
    struct err err = {0};
    struct msg answer = {0};
    switch (c->msg.kind) {
    case MSG_OPEN:
        answer.kind = MSG_GRANT;
        if (planner_open(p, &c->msg.open, &answer.grant, &err) < 0)
            reply_error(w, c, &err);
        else
            reply(w, c, &answer, NULL);
        break;
    case MSG_CLOSE:
        if (planner_close(p, c->msg.close.sequence, c->msg.id) < 0) {
            err_set(&err, -ENOENT, "close: sequence %llu is not open",
                    (unsigned long long)c->msg.close.sequence);
            reply_error(w, c, &err);
        }
        break;
    case MSG_RESUME:
        answer.kind = MSG_RESUMED;
        if (planner_resume(p, c->msg.resume.sequence, &answer.resumed, &err) < 0)
            reply_error(w, c, &err);
        else
            reply(w, c, &answer, (void *)(uintptr_t)answer.resumed.tokens.at);
        break;
    case MSG_PREFIX:
        answer.kind = MSG_PREFIXED;
        answer.prefixed.cached = planner_prefix(p, &c->msg.prefix);
        reply(w, c, &answer, NULL);
        break;
    case MSG_TOPK:
        planner_topk(p, &c->msg);
        break;
    default:
        break; /* the bus lets nothing else pass */
    }
}

void store_worker_command_free(struct store_worker_command *c)
{
    if (c->kind == STORE_WORKER_MESSAGE)
        msg_free(&c->msg);
    mem_free(&c);
}

static enum trace_span span_of(const struct store_worker_command *c)
{
    if (c->kind != STORE_WORKER_MESSAGE)
        return TRACE_COMMAND;
    switch (c->msg.kind) {
    case MSG_TOPK:
        return TRACE_SETS;
    case MSG_OPEN:
        return TRACE_OPEN;
    case MSG_CLOSE:
        return TRACE_CLOSE;
    default:
        return TRACE_COMMAND;
    }
}

static void do_command(struct store_worker *w, struct store_worker_command *c)
{
    /* What was posted before the message was sent comes first: a CLOSE may follow a record of last tokens. */
    if (w->planner)
        planner_advance(w->planner);
    bool sound = w->planner && !planner_error(w->planner);
    int64_t begin = trace_begin();
    enum trace_span span = span_of(c);
    switch (c->kind) {
    case STORE_WORKER_MESSAGE:
        if (sound)
            do_message(w, c);
        break;
    case STORE_WORKER_ASK:
        if (sound)
            planner_ask(w->planner);
        break;
    case STORE_WORKER_ATTACH:
        if (sound)
            do_attach(w, c->epoch);
        break;
    case STORE_WORKER_DETACH:
        if (w->planner)
            planner_detach(w->planner, clock_now_ns());
        close_bells(w);
        break;
    case STORE_WORKER_CALL:
        do_call(w);
        break;
    case STORE_WORKER_STOP: /* only wakes the thread */
        break;
    }
    store_worker_command_free(c);
    trace_end(span, begin);
}

/* ---- the thread ---- */

static void snapshot_sequences(const struct planner *p, struct store_worker_stats *s)
{
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        const struct sequence *q = &p->sequences[i];
        if (!q->record)
            continue;
        s->sequences[s->live_count++] = (struct store_worker_sequence){.id = q->id,
                                                                       .index = q->index,
                                                                       .next = q->next,
                                                                       .committed = q->committed,
                                                                       .prompt = q->prompt_tokens,
                                                                       .capacity = q->capacity,
                                                                       .budget = q->budget,
                                                                       .attached = q->attached};
        msg_add_counters(&s->live, &q->counters);
    }
}

static struct store_worker_gpu snapshot_gpu(const struct planner *p, const char *device)
{
    const struct device_gpu *g = p->device.gpu;
    struct gather_gpu_reached reached = gather_gpu_reached(p->gather.gpu);
    struct store_worker_gpu s = {.device = device,
                                 .mps = g->info.mps,
                                 .context_bytes = g->info.context_bytes,
                                 .kv_bytes = g->kv_bytes,
                                 .tables_bytes = g->tables_bytes,
                                 .registered_bytes = g->registered_bytes,
                                 .reached_ahead = reached.ahead,
                                 .reached_late = reached.late,
                                 .reached_touched = reached.touched};
    memcpy(s.uuid, g->info.uuid, sizeof s.uuid);
    return s;
}

static void snapshot(struct store_worker *w)
{
    const struct planner *p = w->planner;
    struct store_worker_stats s = {.totals = p->totals,
                                   .store_epoch = p->epoch,
                                   .decoder_epoch = p->attached ? p->decoder_epoch : 0,
                                   .attached = p->attached,
                                   .state = p->step.state,
                                   .step = p->step.step,
                                   .layers = p->layout.layers,
                                   .layers_resident = p->attached ? residency_layers(p) : p->layout.layers,
                                   .version = p->residency.version,
                                   .proposed = p->residency.proposed,
                                   .slabs = p->device.slabs,
                                   .slabs_free = p->device.free_count,
                                   .slabs_slots = p->device.slot_slabs,
                                   .slabs_staging = p->device.staging_slabs,
                                   .slab_bytes = p->device.slab_bytes,
                                   .page_bytes = p->device.page_bytes,
                                   .device_bytes = p->device.bytes,
                                   .blocks = p->blocks.blocks_max,
                                   .blocks_present = p->blocks.present,
                                   .blocks_free = p->blocks.free_count,
                                   .blocks_cached = p->prefix.cached,
                                   .answers_lost = w->answers_lost,
                                   .block_bytes = p->blocks.block_bytes,
                                   .arena_bytes = p->blocks.segment.bytes,
                                   .host_layers = p->layout.layers - p->blocks.layout.host_first_layer,
                                   .control_bytes = p->attached ? p->control.bytes : 0,
                                   .slots = p->params.header_slots,
                                   .staging_tokens = p->residency.staging_pages * BLOCK_TOKENS,
                                   .list_max = p->tables.header.list_max};
    s.totals.blocks_evicted = p->prefix.evicted;
    for (uint32_t l = 0; l < p->layout.layers; l++)
        s.pages += p->device.layer_pages[l];
    snapshot_sequences(p, &s);
    if (w->gpu)
        s.gpu = snapshot_gpu(p, w->device);
    pthread_mutex_lock(&w->mutex);
    w->stats = s;
    pthread_mutex_unlock(&w->mutex);
}

static int64_t until_near(const struct store_worker *w)
{
    return w->planner ? step_until_near(w->planner, clock_now_ns()) : INT64_MAX;
}

/* Work that is at hand (timeout_ms 0) waits while a step is near. */
static void sleep_until_news(struct store_worker *w, int timeout_ms)
{
    uint32_t step;
    struct control_flag *flag = w->planner ? planner_waits_for(w->planner, &step) : NULL;
    if (flag && timeout_ms > 0) { /* the decoder raises it without a bell */
        flag_wait(flag, step, clock_now_ns() + RUN_SLICE_NS, 0);
        return;
    }
    struct pollfd wait[2] = {{.fd = mailbox_fd(w->commands), .events = POLLIN},
                             {.fd = w->store_bell, .events = POLLIN}};
    nfds_t count = w->store_bell >= 0 ? 2 : 1;
    int64_t begin = clock_now_ns(), end = timeout_ms ? begin + timeout_ms * CLOCK_MS : INT64_MAX;
    int64_t near_ns = until_near(w);
    int r = 0;
    for (; r == 0 && near_ns == 0 && clock_now_ns() < end; near_ns = until_near(w)) {
        r = poll(wait, count, 0);
        if (r == 0)
            sched_yield();
    }
    trace_end(TRACE_NEAR, begin);
    if (r == 0 && w->planner)
        step_write_owed(w->planner);
    if (r == 0) {
        int64_t left_ns = timeout_ms ? end - clock_now_ns() : 0;
        left_ns = left_ns < near_ns ? left_ns : near_ns;
        left_ns = left_ns > 0 ? left_ns : 0;
        struct timespec left = {.tv_sec = left_ns / CLOCK_S, .tv_nsec = left_ns % CLOCK_S};
        r = ppoll(wait, count, &left, NULL);
    }
    CHECK(r >= 0 || errno == EINTR);
}

static void tell_failure(struct store_worker *w)
{
    const struct err *err = planner_error(w->planner);
    if (!err || w->failed)
        return;
    w->failed = true;
    struct store_worker_answer *a = new_answer(STORE_WORKER_FAILED);
    a->error = *err;
    put_answer(w, a);
}

/* Does what can be done. Returns for how long the thread may sleep, in ms. */
static int work(struct store_worker *w)
{
    struct planner *p = w->planner;
    planner_advance(p);
    tell_failure(w);
    if (w->decoder_bell >= 0 && p->residency.proposed != w->proposed) {
        w->proposed = p->residency.proposed;
        doorbell_ring(w->decoder_bell);
    }
    snapshot(w);
    /* Filling pages that come back touches nothing that a step in flight reads. */
    bool more = !w->failed && p->step.state != STEP_STAGED && planner_idle(p, clock_now_ns());
    int64_t again = w->failed ? INT64_MAX : reach_step(p, clock_now_ns());
    if (again == 0 || (more && residency_leaving(p)))
        return 0;
    if (planner_busy(p) || again != INT64_MAX)
        return 1;
    return more ? 0 : HOUSEKEEPING_MS;
}

static void *worker_main(void *arg)
{
    struct store_worker *w = arg;
    prctl(PR_SET_NAME, "planner");
    struct call *start = w->call;
    int r = gpu_named(w->device) ? device_gpu_open(&w->gpu, w->device, start->err) : 0;
    w->options.gpu = w->gpu;
    finish(w, start, r);
    while (!w->stopping) {
        int64_t begin = trace_begin();
        if (w->store_bell >= 0)
            doorbell_clear(w->store_bell); /* before the flags are read, so that no ring is lost */
        struct store_worker_command *command;
        while (!w->stopping && (command = mailbox_take(w->commands)))
            do_command(w, command);
        int sleep_ms = w->planner ? work(w) : HOUSEKEEPING_MS;
        trace_end(TRACE_AWAKE, begin);
        sleep_until_news(w, sleep_ms);
    }
    unmake(w);
    device_gpu_close(&w->gpu);
    return NULL;
}

int store_worker_start(struct store_worker **ret, const struct planner_options *options, const char *device,
                       struct err *err)
{
    struct store_worker *w = mem_alloc(1, sizeof *w);
    struct call start = {.err = err};
    w->options = *options;
    w->device = device;
    w->call = &start;
    w->commands = mailbox_create(QUEUE);
    w->answers = mailbox_create(QUEUE);
    w->store_bell = w->decoder_bell = -1;
    pthread_mutex_init(&w->mutex, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&w->called, &monotonic);
    pthread_condattr_destroy(&monotonic);
    thread_start(&w->thread, worker_main, w);
    int r = await(w, &start);
    if (r < 0)
        store_worker_stop(&w);
    else
        *ret = w;
    return r;
}

static void free_command(void *item)
{
    store_worker_command_free(item);
}

static void free_answer(void *item)
{
    store_worker_answer_free(item);
}

void store_worker_stop(struct store_worker **worker)
{
    struct store_worker *w = *worker;
    if (!w)
        return;
    *worker = NULL;
    struct store_worker_command *stop = mem_alloc(1, sizeof *stop);
    stop->kind = STORE_WORKER_STOP;
    w->stopping = true;
    if (mailbox_put(w->commands, stop) < 0) /* full: the thread is about to look */
        store_worker_command_free(stop);
    pthread_join(w->thread, NULL);
    mailbox_free(&w->commands, free_command);
    mailbox_free(&w->answers, free_answer);
    pthread_mutex_destroy(&w->mutex);
    pthread_cond_destroy(&w->called);
    mem_free(&w);
}

int store_worker_put(struct store_worker *w, struct store_worker_command *command)
{
    return mailbox_put(w->commands, command);
}

struct store_worker_answer *store_worker_take(struct store_worker *w)
{
    return mailbox_take(w->answers);
}

int store_worker_fd(const struct store_worker *w)
{
    return mailbox_fd(w->answers);
}

void store_worker_stats(struct store_worker *w, struct store_worker_stats *ret)
{
    pthread_mutex_lock(&w->mutex);
    *ret = w->stats;
    pthread_mutex_unlock(&w->mutex);
}
