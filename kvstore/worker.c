/* The planner's thread; see worker.h. It sleeps on its mailbox and on the store's doorbell, or, while a
 * dense step's staging waits for the decoder, on RUN_CONSUMED in slices. It must never touch a socket. */
#include "kvstore/worker.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/mailbox.h"
#include "kvstore/residency.h"
#include "link/flag.h"

enum { QUEUE = 4096, HOUSEKEEPING_MS = 1000 };
#define RUN_SLICE_NS (20 * CLOCK_MS) /* how long a wait for RUN_CONSUMED may keep commands waiting */

struct worker {
    struct planner *planner;
    struct mailbox *commands, *answers;
    pthread_t thread;
    int store_bell, decoder_bell; /* -1 while no decoder is attached */
    uint32_t proposed;            /* last version that the decoder's bell was rung for */
    uint64_t answers_lost;
    atomic_bool stopping;
    pthread_mutex_t mutex; /* of stats */
    struct worker_stats stats;
};

/* ---- answers ---- */

static void put_answer(struct worker *w, struct worker_answer *a)
{
    if (mailbox_put(w->answers, a) == 0)
        return;
    w->answers_lost++;
    worker_answer_free(a);
}

static struct worker_answer *new_answer(enum worker_answer_kind kind)
{
    struct worker_answer *a = mem_alloc(1, sizeof *a);
    a->kind = kind;
    memset(a->fds, 0xff, sizeof a->fds);
    return a;
}

void worker_answer_free(struct worker_answer *a)
{
    for (size_t i = 0; i < sizeof a->fds / sizeof *a->fds; i++)
        if (a->fds[i] >= 0)
            close(a->fds[i]);
    mem_free(&a->owned);
    mem_free(&a);
}

static void reply(struct worker *w, const struct worker_command *c, const struct msg *msg, void *owned)
{
    struct worker_answer *a = new_answer(WORKER_REPLY);
    a->peer = c->peer;
    a->msg = *msg;
    a->msg.id = c->msg.id;
    a->owned = owned;
    put_answer(w, a);
}

static void reply_error(struct worker *w, const struct worker_command *c, const struct err *err)
{
    struct msg msg = {.kind = MSG_ERROR, .error = {.code = err->code}};
    _Static_assert(sizeof err->text <= sizeof msg.error.text, "an error's line fits a message");
    memcpy(msg.error.text, err->text, sizeof err->text);
    reply(w, c, &msg, NULL);
}

static void on_reselect(void *arg, uint64_t sequence, uint32_t step)
{
    struct worker *w = arg;
    struct worker_answer *a = new_answer(WORKER_TO_ROLE);
    a->role = ROLE_RETRIEVER;
    a->msg = (struct msg){.kind = MSG_RESELECT, .id = step, .reselect = {.sequence = sequence}};
    put_answer(w, a);
}

static void on_closed(void *arg, uint64_t request, const struct msg_closed *closed)
{
    struct worker *w = arg;
    struct worker_answer *a = new_answer(WORKER_TO_ROLE);
    a->role = ROLE_DECODER;
    a->msg = (struct msg){.kind = MSG_CLOSED, .id = request, .closed = *closed};
    put_answer(w, a);
}

static void on_broken(void *arg, const char *why)
{
    struct worker *w = arg;
    struct worker_answer *a = new_answer(WORKER_BROKEN);
    a->epoch = w->planner->decoder_epoch;
    err_set(&a->error, -EPROTO, "%s", why);
    put_answer(w, a);
}

struct planner_events worker_events(void)
{
    return (struct planner_events){.reselect = on_reselect, .closed = on_closed, .broken = on_broken};
}

/* ---- commands ---- */

static void close_bells(struct worker *w)
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

static int attach(struct worker *w, struct worker_answer *a)
{
    struct planner *p = w->planner;
    int r = planner_attach(p, a->epoch, &a->error);
    if (r < 0)
        return r;
    r = doorbell_create(&w->store_bell);
    if (r == 0)
        r = doorbell_create(&w->decoder_bell);
    int from[4] = {p->device.segment.fd, p->control.fd, w->store_bell, w->decoder_bell};
    for (size_t i = 0; i < 4 && r == 0; i++) {
        a->fds[i] = own_fd(from[i]);
        r = a->fds[i] < 0 ? -errno : 0;
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

static void do_attach(struct worker *w, uint64_t epoch)
{
    struct worker_answer *a = new_answer(WORKER_ATTACHED);
    a->epoch = epoch;
    attach(w, a);
    put_answer(w, a);
}

static void do_message(struct worker *w, struct worker_command *c)
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

void worker_command_free(struct worker_command *c)
{
    if (c->kind == WORKER_MESSAGE)
        msg_free(&c->msg);
    mem_free(&c);
}

static void do_command(struct worker *w, struct worker_command *c)
{
    /* What was posted before the message was sent comes first: a CLOSE may follow a record of last tokens. */
    planner_advance(w->planner);
    switch (c->kind) {
    case WORKER_MESSAGE:
        do_message(w, c);
        break;
    case WORKER_ATTACH:
        do_attach(w, c->epoch);
        break;
    case WORKER_DETACH:
        planner_detach(w->planner, clock_now_ns());
        close_bells(w);
        break;
    case WORKER_STOP: /* only wakes the thread */
        break;
    }
    worker_command_free(c);
}

/* ---- the thread ---- */

static void snapshot_sequences(const struct planner *p, struct worker_stats *s)
{
    for (uint32_t i = 0; i < p->options.sequences; i++) {
        const struct sequence *q = &p->sequences[i];
        if (!q->record)
            continue;
        s->sequences[s->live_count++] = (struct worker_sequence){.id = q->id,
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

static void snapshot(struct worker *w)
{
    const struct planner *p = w->planner;
    struct worker_stats s = {.totals = p->totals,
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
                             .control_bytes = p->attached ? p->control.bytes : 0,
                             .slots = p->params.header_slots,
                             .staging_tokens = p->residency.staging_pages * BLOCK_TOKENS,
                             .list_max = p->tables.header.list_max};
    s.totals.blocks_evicted = p->prefix.evicted;
    for (uint32_t l = 0; l < p->layout.layers; l++)
        s.pages += p->device.layer_pages[l];
    snapshot_sequences(p, &s);
    pthread_mutex_lock(&w->mutex);
    w->stats = s;
    pthread_mutex_unlock(&w->mutex);
}

static void sleep_until_news(struct worker *w, int timeout_ms)
{
    uint32_t step;
    struct control_flag *flag = planner_waits_for(w->planner, &step);
    if (flag) { /* the decoder raises it without a bell */
        flag_wait(flag, step, clock_now_ns() + RUN_SLICE_NS, 0);
        return;
    }
    struct pollfd wait[2] = {{.fd = mailbox_fd(w->commands), .events = POLLIN},
                             {.fd = w->store_bell, .events = POLLIN}};
    int r = poll(wait, w->store_bell >= 0 ? 2 : 1, timeout_ms);
    CHECK(r >= 0 || errno == EINTR);
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    prctl(PR_SET_NAME, "planner");
    while (!w->stopping) {
        if (w->store_bell >= 0)
            doorbell_clear(w->store_bell); /* before the flags are read, so that no ring is lost */
        struct worker_command *command;
        while (!w->stopping && (command = mailbox_take(w->commands)))
            do_command(w, command);
        planner_advance(w->planner);
        if (w->decoder_bell >= 0 && w->planner->residency.proposed != w->proposed) {
            w->proposed = w->planner->residency.proposed;
            doorbell_ring(w->decoder_bell);
        }
        snapshot(w);
        /* Filling pages that come back touches nothing that a step in flight reads. */
        bool more = w->planner->step.state != STEP_STAGED && planner_idle(w->planner, clock_now_ns());
        sleep_until_news(w, more ? 0 : HOUSEKEEPING_MS);
    }
    return NULL;
}

struct worker *worker_start(struct planner *planner)
{
    struct worker *w = mem_alloc(1, sizeof *w);
    w->planner = planner;
    w->commands = mailbox_create(QUEUE);
    w->answers = mailbox_create(QUEUE);
    w->store_bell = w->decoder_bell = -1;
    planner->events.arg = w;
    pthread_mutex_init(&w->mutex, NULL);
    snapshot(w);
    CHECK(pthread_create(&w->thread, NULL, worker_main, w) == 0);
    return w;
}

static void free_command(void *item)
{
    worker_command_free(item);
}

static void free_answer(void *item)
{
    worker_answer_free(item);
}

void worker_stop(struct worker **worker)
{
    struct worker *w = *worker;
    if (!w)
        return;
    *worker = NULL;
    struct worker_command *stop = mem_alloc(1, sizeof *stop);
    stop->kind = WORKER_STOP;
    w->stopping = true;
    if (mailbox_put(w->commands, stop) < 0) /* full: the thread is about to look */
        worker_command_free(stop);
    pthread_join(w->thread, NULL);
    planner_detach(w->planner, clock_now_ns());
    close_bells(w);
    mailbox_free(&w->commands, free_command);
    mailbox_free(&w->answers, free_answer);
    pthread_mutex_destroy(&w->mutex);
    mem_free(&w);
}

int worker_put(struct worker *w, struct worker_command *command)
{
    return mailbox_put(w->commands, command);
}

struct worker_answer *worker_take(struct worker *w)
{
    return mailbox_take(w->answers);
}

int worker_fd(const struct worker *w)
{
    return mailbox_fd(w->answers);
}

void worker_stats(struct worker *w, struct worker_stats *ret)
{
    pthread_mutex_lock(&w->mutex);
    *ret = w->stats;
    pthread_mutex_unlock(&w->mutex);
}
