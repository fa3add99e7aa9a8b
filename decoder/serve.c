/* The loop thread of the decoder; see serve.h.
 *
 * Owns: sockets, the client table, the mappings of the store's segments (the device thread uses them; they
 * are unmapped after it has ended). It blocks in the loop only. Life: retriever greeted (it tells the layer
 * groups), store greeted with the layout, segments attached, device thread started, ready; then until a
 * signal, DRAIN, the life line's end, or the loss of a part. */
#include "decoder/serve.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/loop.h"
#include "base/trace.h"
#include "decoder/attach.h"
#include "decoder/device.h"
#include "decoder/handover.h"
#include "decoder/identity.h"
#include "decoder/requests.h"
#include "decoder/status.h"
#include "link/bus.h"
#include "link/flag.h"
#include "link/runtime.h"

enum { POSTS_MAX = 4096 };
#define LAST_WORDS_NS (50 * CLOCK_MS) /* for messages on their way out before the sockets close */

struct serve {
    const struct settings *options;
    const struct model *model;
    struct identity identity; /* what peers are told, and compared with */
    struct loop *loop;
    struct bus *bus;
    struct bus_server *server;
    struct bus_client *retriever, *store;
    char retriever_path[RUNTIME_PATH_MAX], store_path[RUNTIME_PATH_MAX], segments_path[RUNTIME_PATH_MAX];
    char features_path[RUNTIME_PATH_MAX];
    uint64_t retriever_epoch;
    char retriever_device[64];
    struct handover handover; /* of the feature segment, where the retriever's head reads one */
    struct attach attach;
    struct mailbox *posts;
    struct device *device;
    struct requests requests;
    const char *state;  /* static text */
    unsigned losses;    /* of the retriever */
    bool loaded, taken; /* the device thread is ready; the retriever uses the feature segment */
    bool ready, draining, ending;
    int exit_code;
};

static void set_state(struct serve *s, const char *state)
{
    s->state = state;
    sd_notifyf(0, "STATUS=%s", state);
    log_debug("%s", state);
}

static void reply_done(struct serve *s, const struct bus_peer *peer, uint64_t id, int code, const char *text)
{
    struct msg msg = {.kind = MSG_DONE, .id = id};
    msg.done.reason = FINISH_ERROR;
    msg.done.code = code;
    snprintf(msg.done.text, sizeof msg.done.text, "%s", text);
    bus_reply(s->server, peer, &msg);
}

static void stop_loop(void *arg)
{
    struct serve *s = arg;
    loop_stop(s->loop, s->exit_code);
}

/* Says the last word on every request, lets go of every wait, and ends the loop. */
static void end(struct serve *s, int exit_code, const char *text)
{
    if (s->ending)
        return;
    s->ending = true;
    s->exit_code = exit_code;
    sd_notifyf(0, "STOPPING=1\nSTATUS=%s", text);
    for (uint32_t i = 0; i < s->requests.used; i++) {
        const struct request *r = &s->requests.at[i];
        if (r->id && !r->gone)
            reply_done(s, &r->peer, r->asked_id, -EPIPE, text);
    }
    if (s->attach.control.at)
        flag_abort_all(attach_control(&s->attach));
    handover_abort(&s->handover);
    loop_add_timer(s->loop, LAST_WORDS_NS, stop_loop, s);
}

static void fail(struct serve *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

static void fail(struct serve *s, const char *fmt, ...)
{
    char text[ERR_TEXT_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    if (!s->ending)
        log_error("%s", text);
    end(s, 1, text);
}

static int watch(struct serve *s, int fd, void (*fn)(void *arg, uint32_t events))
{
    int r = loop_add_fd(s->loop, fd, EPOLLIN, fn, s);
    if (r < 0)
        fail(s, "event loop: %s", strerror(-r));
    return r;
}

static void give_order(struct serve *s, enum order_kind kind, uint64_t id, struct msg *msg)
{
    if (!s->device)
        return;
    struct order *order = mem_alloc(1, sizeof *order);
    order->kind = kind;
    order->id = id;
    if (msg) {
        order->msg = *msg;
        msg->memory = NULL;
    }
    if (device_order(s->device, order) < 0) {
        order_free(order);
        fail(s, "device thread takes no more orders: its mailbox is full");
    }
}

/* ---- clients ---- */

static int client_hello(void *arg, struct bus_peer *peer, const struct msg_hello *hello, struct err *err)
{
    (void)arg, (void)peer, (void)hello, (void)err;
    return 0;
}

static void generate(struct serve *s, struct bus_peer *peer, struct msg *msg)
{
    if (s->ending || s->draining) {
        reply_done(s, peer, msg->id, -ESHUTDOWN, "decoder is ending");
        return;
    }
    if (!s->ready) {
        char text[128];
        snprintf(text, sizeof text, "decoder is starting: %s", s->state);
        reply_done(s, peer, msg->id, -EAGAIN, text);
        return;
    }
    struct request *r = requests_asked(&s->requests, peer, msg->id);
    if (r) {
        struct msg error = {.kind = MSG_ERROR, .id = msg->id};
        error.error.code = -EEXIST;
        snprintf(error.error.text, sizeof error.error.text, "request %" PRIu64 " is running already",
                 msg->id);
        bus_reply(s->server, peer, &error);
        return;
    }
    r = requests_add(&s->requests, peer, msg->id);
    if (!r) {
        reply_done(s, peer, msg->id, -EBUSY, "decoder has too many requests");
        return;
    }
    give_order(s, ORDER_GENERATE, r->id, msg);
}

static void drain(struct serve *s)
{
    s->draining = true;
    log_info("draining: %u requests to finish", s->requests.count);
    if (s->requests.count == 0)
        end(s, 0, "drained");
}

static void client_message(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct serve *s = arg;
    struct request *r;
    switch (msg->kind) {
    case MSG_GENERATE:
        generate(s, peer, msg);
        break;
    case MSG_CANCEL:
        r = requests_asked(&s->requests, peer, msg->id);
        if (r)
            give_order(s, ORDER_CANCEL, r->id, NULL);
        break;
    case MSG_DRAIN:
        drain(s);
        break;
    default: /* the bus lets nothing else through */
        break;
    }
}

static void forget_client(struct serve *s, struct request *r)
{
    if (r->gone)
        return;
    r->gone = true;
    log_info("request %" PRIu64 ": its client is gone", r->id);
    give_order(s, ORDER_CANCEL, r->id, NULL);
}

static void client_gone(void *arg, struct bus_peer *peer)
{
    struct serve *s = arg;
    for (uint32_t i = 0; i < s->requests.used; i++)
        if (s->requests.at[i].id && requests_of(&s->requests.at[i], peer))
            forget_client(s, &s->requests.at[i]);
}

static char *client_status(void *arg)
{
    struct serve *s = arg;
    struct device_figures figures;
    if (s->device)
        device_figures(s->device, &figures);
    struct status status = {.state = s->state,
                            .model = s->model,
                            .epoch = bus_epoch(s->bus),
                            .store_epoch = s->attach.store_epoch,
                            .context = s->identity.layout.context_max,
                            .sequences = s->options->sequences,
                            .chunk = s->options->chunk,
                            .threads = s->options->threads,
                            .device = s->device ? &figures : NULL,
                            .bus = bus_counters(s->bus)};
    return status_of_decoder(&status);
}

/* ---- posts of the device thread ---- */

static void log_done(const struct request *r, const struct msg_done *d)
{
    double decode_s = (double)d->decode_ns / 1e9, prefill_s = (double)d->prefill_ns / 1e9;
    double rate = decode_s > 0 && d->generated_tokens > 1 ? (d->generated_tokens - 1) / decode_s : 0;
    log_info("request %" PRIu64 " %s%s%s: prompt %u (cached %u) in %.2f s, generated %u at %.1f tokens/s",
             r->id, msg_finish_name(d->reason), d->text[0] ? ": " : "", d->text, d->prompt_tokens,
             d->cached_tokens, prefill_s, d->generated_tokens, rate);
}

static void to_client(struct serve *s, struct msg *msg)
{
    struct request *r = requests_find(&s->requests, msg->id);
    if (!r)
        return;
    bool done = msg->kind == MSG_DONE;
    if (done)
        log_done(r, &msg->done);
    msg->id = r->asked_id;
    if (!r->gone && bus_reply(s->server, &r->peer, msg) < 0) { /* it must not wait for what it missed */
        if (!done)
            forget_client(s, r);
        bus_lose_peer(s->server, &r->peer);
    }
    if (!done)
        return;
    requests_remove(&s->requests, r);
    if (s->draining && s->requests.count == 0)
        end(s, 0, "drained");
}

/* Once the device thread is ready, a retriever is there and, where hidden states are read, has them. */
static void look_ready(struct serve *s)
{
    struct device_figures f;
    if (s->ready || !s->loaded || !s->retriever_epoch || (s->identity.features.layers && !s->taken))
        return;
    device_figures(s->device, &f);
    s->ready = true;
    log_info("ready: %s, %" PRIu64 " MiB of activations, %u sequences", f.backend, f.activation_bytes >> 20,
             s->options->sequences);
    if (f.on_gpu)
        log_info("GPU %s%s: %" PRIu64 " MiB in all", f.gpu.info.uuid, f.gpu.info.mps ? " under MPS" : "",
                 f.gpu.total_bytes >> 20);
    if (s->identity.features.layers)
        log_info("hidden states of %u layers go to the retriever", s->identity.features.layers);
    set_state(s, "ready");
    sd_notify(0, "READY=1");
}

/* The device thread made a feature segment for the retriever. For one that is gone since, nothing is done:
 * another follows when the next has greeted. */
static void hand_over(struct serve *s, int fd, uint64_t retriever_epoch)
{
    struct err err = {0};
    if (!s->retriever_epoch || retriever_epoch != s->retriever_epoch)
        return;
    set_state(s, "waiting for the retriever to take hidden states");
    s->taken = false;
    if (handover_send(&s->handover, s->features_path, fd, bus_epoch(s->bus), &err) < 0)
        fail(s, "retriever: %s", err.text);
}

/* Greeted, and with hidden states where it reads any: sequences can be told to it. */
static void retriever_at_hand(struct serve *s)
{
    give_order(s, ORDER_RETRIEVER_READY, 0, NULL);
    if (s->ready)
        set_state(s, "ready");
    else
        look_ready(s);
}

static void handed_over(void *arg, const char *why)
{
    struct serve *s = arg;
    if (why) {
        fail(s, "retriever did not take the segment of hidden states: %s", why);
        return;
    }
    s->taken = true;
    set_state(s, "loading");
    retriever_at_hand(s);
}

static const struct bus_client_ops retriever_ops;

/* The device's name is known: greetings can begin. */
static void device_opened(struct serve *s, const char *name)
{
    struct msg_hello own;
    struct err err = {0};
    snprintf(s->identity.device, sizeof s->identity.device, "%s", name);
    identity_hello(&s->identity, &own);
    bus_set_hello(s->bus, &own);
    set_state(s, "waiting for retriever");
    if (bus_connect(s->bus, s->retriever_path, &retriever_ops, s, &s->retriever, &err) < 0)
        fail(s, "%s", err.text);
}

/* Of a message that a peer did not take: a queue that is full looks like a peer that is gone. */
static const char *reason(int code)
{
    return code == -EAGAIN ? "it is gone, or reads nothing" : strerror(-code);
}

/* One that does not hear of everything about its sequences is as good as gone: it is greeted anew, and they
 * are begun again. What was meant for one that is gone already is of nobody. */
static void to_retriever(struct serve *s, struct post *post)
{
    char why[128];
    int r = post->losses == s->losses ? bus_send(s->retriever, &post->msg) : -ENOTCONN;
    if (post->msg.kind == MSG_STEP)
        trace(TRACE_TOLD, (uint32_t)post->msg.id);
    if (r == 0 || r == -ENOTCONN)
        return;
    snprintf(why, sizeof why, "it takes no messages: %s: %s", msg_kind_name(post->msg.kind), reason(r));
    bus_client_reset(s->retriever, why);
}

static void handle_post(struct serve *s, struct post *post)
{
    int r;
    switch (post->kind) {
    case POST_CLIENT:
        to_client(s, &post->msg);
        break;
    case POST_STORE:
        r = bus_send(s->store, &post->msg);
        if (r < 0) /* a sequence that it did not hear of everything about cannot go on */
            fail(s, "kvstore takes no messages: %s: %s", msg_kind_name(post->msg.kind), reason(r));
        break;
    case POST_RETRIEVER:
        to_retriever(s, post);
        break;
    case POST_OPENED:
        device_opened(s, post->text);
        break;
    case POST_READY:
        s->loaded = true;
        look_ready(s);
        break;
    case POST_EXPORT:
        hand_over(s, post->fd, post->epoch);
        break;
    case POST_FATAL:
        fail(s, "%s", post->text);
        break;
    }
}

static void on_posts(void *arg, uint32_t events)
{
    (void)events;
    struct serve *s = arg;
    struct post *post;
    while ((post = mailbox_take(s->posts))) {
        if (!s->ending)
            handle_post(s, post);
        post_free(post);
    }
}

/* ---- the store ---- */

static void on_bell(void *arg, uint32_t events)
{
    (void)events;
    struct serve *s = arg;
    doorbell_clear(s->attach.decoder_bell);
    give_order(s, ORDER_WAKE, 0, NULL);
}

static void start_device(struct serve *s)
{
    const struct settings *o = s->options;
    uint32_t context = s->identity.layout.context_max, chunk = o->chunk < context ? o->chunk : context;
    struct device_options device = {.model = s->model,
                                    .device = o->device,
                                    .pass = {.threads = o->threads,
                                             .isa = o->isa,
                                             .activations = o->activations,
                                             .tokens_max = chunk > o->sequences ? chunk : o->sequences,
                                             .entries_max = o->sequences,
                                             .logits_max = o->sequences},
                                    .context = context,
                                    .sequences = o->sequences,
                                    .chunk = chunk,
                                    .awake = settings_awake(o)};
    s->device = device_start(&device, s->posts);
}

static void attach_device(struct serve *s)
{
    const struct settings *o = s->options;
    uint32_t layers = model_config(s->model)->layers;
    uint32_t early = o->early_layers >= 0 ? (uint32_t)o->early_layers : layers / 3;
    struct stepper_attachment attachment = {.layout = s->identity.layout,
                                            .control = attach_control(&s->attach),
                                            .device = s->attach.device.at,
                                            .store_bell = s->attach.store_bell,
                                            .early_layers = early < layers ? early : layers - 1};
    set_state(s, "loading weights and making activations");
    struct device_head head = {.fingerprint = s->identity.head,
                               .features = s->identity.features,
                               .decoder_epoch = bus_epoch(s->bus),
                               .retriever_epoch = s->retriever_epoch};
    snprintf(head.retriever_device, sizeof head.retriever_device, "%s", s->retriever_device);
    device_attach(s->device, &attachment, &head);
}

/* The descriptors, and later the store's death. */
static void on_connection(void *arg, uint32_t events)
{
    (void)events;
    struct serve *s = arg;
    struct err err = {0};
    if (s->attach.control.at) {
        loop_remove_fd(s->loop, s->attach.connection);
        fail(s, "kvstore is gone");
        return;
    }
    int on_gpu = gpu_named(s->options->device);
    if (attach_take(&s->attach, &s->identity.layout, bus_epoch(s->bus), on_gpu, &err) < 0) {
        loop_remove_fd(s->loop, s->attach.connection);
        fail(s, "%s", err.text);
        return;
    }
    const struct control_header *h = attach_control(&s->attach);
    log_info("attached to kvstore %016" PRIx64 ": device memory %" PRIu64 " MiB, %u sequences, lists of %u",
             h->store_epoch, h->device_bytes >> 20, h->sequences_max, h->list_max);
    if (watch(s, s->attach.decoder_bell, on_bell) == 0)
        attach_device(s);
}

static void store_welcome(void *arg, const struct msg_hello *hello, uint64_t epoch)
{
    struct serve *s = arg;
    (void)hello, (void)epoch;
    struct err err = {0};
    if (s->attach.connection >= 0) {
        fail(s, "kvstore is gone, another one answers");
        return;
    }
    set_state(s, "waiting for the kvstore's memory");
    if (attach_ask(&s->attach, s->segments_path, bus_epoch(s->bus), &err) < 0)
        fail(s, "kvstore: %s", err.text);
    else
        watch(s, s->attach.connection, on_connection);
}

static void store_message(void *arg, struct msg *msg)
{
    struct serve *s = arg;
    if (msg->kind == MSG_ERROR && msg->id == 0)
        fail(s, "kvstore: %s", msg->error.text);
    else if (msg->kind == MSG_GRANT || msg->kind == MSG_CLOSED || msg->kind == MSG_ERROR)
        give_order(s, ORDER_STORE, 0, msg);
}

static void store_lost(void *arg, const char *why)
{
    fail(arg, "kvstore is gone: %s", why);
}

static const struct bus_client_ops store_ops = {store_welcome, store_message, store_lost};

/* ---- the retriever ---- */

static void retriever_welcome(void *arg, const struct msg_hello *hello, uint64_t epoch)
{
    struct serve *s = arg;
    struct err err = {0};
    int again = s->store != NULL;
    int r = again ? identity_compare(&s->identity, hello, &err) : identity_join(&s->identity, hello, &err);
    if (r < 0) {
        fail(s, "%s", err.text);
        return;
    }
    s->retriever_epoch = epoch;
    snprintf(s->retriever_device, sizeof s->retriever_device, "%s", hello->device);
    log_info("greeted retriever %016" PRIx64 ": %u layer groups, head %016" PRIx64, epoch,
             s->identity.layout.groups, s->identity.head);
    if (again) {
        struct msg greeting = {.kind = MSG_HELLO, .hello = *hello};
        if (s->identity.features.layers)
            give_order(s, ORDER_EXPORT, epoch, &greeting); /* and when it has that, it is at hand */
        else
            retriever_at_hand(s);
        return;
    }
    struct msg_hello own;
    identity_hello(&s->identity, &own);
    bus_set_hello(s->bus, &own);
    set_state(s, "waiting for kvstore");
    if (bus_connect(s->bus, s->store_path, &store_ops, s, &s->store, &err) < 0)
        fail(s, "%s", err.text);
}

static void retriever_message(void *arg, struct msg *msg)
{
    struct serve *s = arg;
    if (msg->kind == MSG_ERROR && msg->id == 0)
        fail(s, "retriever: %s", msg->error.text);
    else if (msg->kind == MSG_GRANT || msg->kind == MSG_ERROR)
        give_order(s, ORDER_RETRIEVER, 0, msg);
}

static void retriever_lost(void *arg, const char *why)
{
    struct serve *s = arg;
    log_warn("retriever is gone: %s", why);
    s->losses++;
    s->retriever_epoch = 0;
    give_order(s, ORDER_RETRIEVER_LOST, 0, NULL); /* first: a wait that is broken asks why */
    handover_abort(&s->handover);
    handover_drop(&s->handover);
    if (s->loaded)
        set_state(s, "waiting for another retriever");
}

static const struct bus_client_ops retriever_ops = {retriever_welcome, retriever_message, retriever_lost};

/* ---- life ---- */

static void on_end(void *arg, const char *why)
{
    log_info("stopping: %s", why);
    end(arg, 0, "decoder is stopping");
}

static int open_sockets(struct serve *s, struct err *err)
{
    static const struct bus_server_ops server_ops = {client_hello, client_message, client_status,
                                                     client_gone};
    const char *dir = s->options->daemon.runtime;
    char server[RUNTIME_PATH_MAX];
    int r = runtime_prepare(dir, err);
    if (r == 0)
        r = runtime_path(dir, "decoder.sock", server, err);
    if (r == 0)
        r = runtime_path(dir, "retriever.sock", s->retriever_path, err);
    if (r == 0)
        r = runtime_path(dir, "kvstore.sock", s->store_path, err);
    if (r == 0)
        r = runtime_path(dir, "kvstore.fd", s->segments_path, err);
    if (r == 0)
        r = runtime_path(dir, "retriever.fd", s->features_path, err);
    if (r == 0)
        r = bus_serve(s->bus, server, ROLE_DECODER, &server_ops, s, &s->server, err);
    return r;
}

static void serve_close(struct serve *s)
{
    device_free(&s->device); /* before what it uses goes */
    bus_free(&s->bus);
    handover_close(&s->handover);
    attach_close(&s->attach);
    if (s->posts)
        loop_remove_fd(s->loop, mailbox_fd(s->posts));
    mailbox_free(&s->posts, post_free);
    requests_free(&s->requests);
    loop_free(&s->loop);
}

int serve_run(const struct settings *options, const struct model *model)
{
    struct serve s = {.options = options, .model = model, .state = "starting"};
    struct err err = {0};
    attach_init(&s.attach);
    requests_init(&s.requests);
    s.loop = loop_create();
    handover_init(&s.handover, s.loop, handed_over, &s);
    s.posts = mailbox_create(POSTS_MAX);
    struct daemon daemon = {.loop = s.loop, .options = &options->daemon, .end = on_end, .arg = &s};
    int r = daemon_watch(&daemon, &err);
    if (r == 0 && (r = loop_add_fd(s.loop, mailbox_fd(s.posts), EPOLLIN, on_posts, &s)) < 0)
        err_set(&err, r, "event loop: %s", strerror(-r));
    if (r == 0)
        r = identity_init(&s.identity, model, options->context, &err);
    if (r == 0) {
        struct msg_hello hello;
        identity_hello(&s.identity, &hello);
        s.bus = bus_create(s.loop, &hello);
        r = open_sockets(&s, &err);
    }
    if (r < 0) {
        log_error("%s", err.text);
        sd_notifyf(0, "STOPPING=1\nSTATUS=%s", err.text);
        serve_close(&s);
        return 1;
    }
    set_state(&s, "opening the device");
    start_device(&s);
    int code = loop_run(s.loop);
    sd_notify(0, "STOPPING=1");
    serve_close(&s);
    log_info("stopped");
    return code;
}
