/* Sockets and peers of the retriever; see endpoint.h. Owner: the loop thread, which blocks in epoll only.
 *
 * It passes the decoder's messages to the worker and the worker's answers to the store. One decoder at a
 * time: a new one, or the same one greeting anew, voids all that was opened before. Answers that the store
 * cannot take yet wait here, in order; when the store is lost they are void, and sets are sent whole to the
 * next one. */
#include "retriever/endpoint.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/trace.h"
#include "link/bus_state.h"
#include "link/figures.h"
#include "link/runtime.h"
#include "retriever/intake.h"

enum {
    PENDING = 128,          /* answers that wait for the store */
    PART_BYTES = 256 << 10, /* of one TOPK: while one is on its way the store works on the one before */
};

struct endpoint {
    struct loop *loop;
    struct worker *worker;
    const struct endpoint_identity *identity;
    struct bus *bus;
    struct bus_server *server;
    struct bus_client *store;
    struct intake *intake;    /* NULL: the head reads no features of the model */
    struct bus_peer *decoder; /* the one that is served; NULL: none */
    uint64_t decoder_number;  /* of its life; counts up */
    int fd;                   /* the worker's, while it is watched */
    int retry;                /* timer while the store's queue is full; -1: none */
    struct worker_answer *pending[PENDING];
    uint32_t pending_first, pending_count;
    uint32_t part; /* entry of the first pending answer that comes next */
    uint64_t dropped_topk, refused_tasks;
};

static void send_pending(void *arg);

static void send_error(struct endpoint *s, uint64_t id, int code, const char *text)
{
    struct msg msg = {.kind = MSG_ERROR, .id = id, .error = {.code = code}};
    snprintf(msg.error.text, sizeof msg.error.text, "%s", text);
    log_write(code == -EDOM ? LOG_LEVEL_WARN : LOG_LEVEL_DEBUG, "refused: id=%" PRIu64 " %s", id, text);
    if (s->decoder && bus_reply(s->server, s->decoder, &msg) < 0)
        log_warn("refusal not delivered: id=%" PRIu64 " %s", id, text);
}

/* ---- to the worker ---- */

/* Of a message that the worker has no room for. An ERROR about a step has the id of the sequence, since a
 * step is of many and each is refused by itself. */
static void refuse_task(struct endpoint *s, const struct msg *msg)
{
    static const char text[] = "the retriever has too much to do";
    s->refused_tasks++;
    if (msg->kind == MSG_OPEN)
        send_error(s, msg->id, -EAGAIN, text);
    for (uint32_t i = 0; msg->kind == MSG_STEP && i < msg->step.entry_count; i++)
        send_error(s, msg->step.entries[i].sequence, -EAGAIN, text);
}

/* Takes msg's memory. */
static void put_task(struct endpoint *s, enum worker_kind kind, struct msg *msg)
{
    struct worker_task *task = mem_alloc(1, sizeof *task);
    task->kind = kind;
    task->decoder = s->decoder_number;
    if (msg) {
        task->msg = *msg;
        msg->memory = NULL;
    }
    if (worker_put(s->worker, task) == 0)
        return;
    refuse_task(s, &task->msg);
    worker_task_free(&task);
}

/* A segment that came. What it holds is the worker's to check. */
static bool on_features(void *arg, int fd, uint64_t decoder_epoch)
{
    struct endpoint *s = arg;
    struct worker_task *task = mem_alloc(1, sizeof *task);
    *task = (struct worker_task){.kind = WORKER_FEATURES,
                                 .decoder = s->decoder_number,
                                 .features = fd,
                                 .peers = {s->decoder ? s->decoder->epoch : 0, bus_epoch(s->bus)}};
    if (!s->decoder || s->decoder->epoch != decoder_epoch) {
        log_warn("features: found a segment of decoder %016" PRIx64 ", which is not attached", decoder_epoch);
    } else if (worker_put(s->worker, task) < 0) {
        send_error(s, 0, -EAGAIN, "the retriever has too much to do");
    } else {
        return true;
    }
    worker_task_free(&task);
    return false;
}

/* ---- the decoder ---- */

static void drop_decoder(struct endpoint *s)
{
    s->decoder = NULL;
    s->decoder_number++;
    put_task(s, WORKER_NEW_DECODER, NULL);
}

static int check_hash(const char *what, struct hash128 found, struct hash128 expected, struct err *err)
{
    if (hash_equal(found, expected))
        return 0;
    return err_set(err, -EXDEV,
                   "%s: found fingerprint %016" PRIx64 "%016" PRIx64 ", expected %016" PRIx64 "%016" PRIx64
                   " as the retriever has",
                   what, found.hi, found.lo, expected.hi, expected.lo);
}

static int check_number(const char *what, uint32_t found, uint32_t expected, struct err *err)
{
    if (found == expected)
        return 0;
    return err_set(err, -EXDEV, "%s: found %" PRIu32 ", expected %" PRIu32 " as the retriever has", what,
                   found, expected);
}

/* What decoder and retriever must have in common. */
static int check_peer(const struct msg_hello *own, const struct msg_hello *peer, struct err *err)
{
    const struct hash128 none = {0, 0};
    int rc = 0;
    if (!hash_equal(peer->tokenizer, none) && !hash_equal(own->tokenizer, none))
        rc = check_hash("tokenizer", peer->tokenizer, own->tokenizer, err);
    if (rc < 0 || !peer->has_layout)
        return rc;
    const struct kv_layout *a = &peer->layout, *b = &own->layout;
    if ((rc = check_hash("model", a->model, b->model, err)) < 0 ||
        (rc = check_number("layers", a->layers, b->layers, err)) < 0 ||
        (rc = check_number("selection_heads", a->selection_heads, b->selection_heads, err)) < 0 ||
        (rc = check_number("groups", a->groups, b->groups, err)) < 0)
        return rc;
    for (uint32_t g = 0; g <= a->groups && rc == 0; g++)
        rc = check_number("group_first_layer", a->group_first_layer[g], b->group_first_layer[g], err);
    return rc;
}

static int on_hello(void *arg, struct bus_peer *peer, const struct msg_hello *hello, struct err *err)
{
    struct endpoint *s = arg;
    if (hello->role != ROLE_DECODER)
        return 0;
    int rc = check_peer(&s->identity->hello, hello, err);
    if (rc == 0 && s->decoder && bus_peer_lives(s->decoder))
        rc = err_set(err, -EBUSY, "a decoder is attached already (pid %" PRIu32 ")", s->decoder->pid);
    if (rc < 0) {
        log_warn("decoder refused: pid=%" PRIu32 " %s", hello->pid, err->text);
        return rc;
    }
    drop_decoder(s);
    s->decoder = peer;
    log_info("decoder attached: pid=%" PRIu32, hello->pid);
    return 0;
}

static void on_gone(void *arg, struct bus_peer *peer)
{
    struct endpoint *s = arg;
    if (peer != s->decoder)
        return;
    log_warn("decoder gone: pid=%" PRIu32 ", its sequences are dropped", peer->pid);
    drop_decoder(s);
}

static void on_message(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct endpoint *s = arg;
    if (msg->kind == MSG_DRAIN) {
        log_info("asked to drain");
        loop_stop(s->loop, 0);
    } else if (peer == s->decoder) {
        if (msg->kind == MSG_STEP)
            trace(TRACE_HEARD, (uint32_t)msg->id);
        put_task(s, WORKER_MESSAGE, msg);
    } else {
        struct msg error = {.kind = MSG_ERROR,
                            .id = msg->id,
                            .error = {.code = -ESTALE, .text = "another decoder has taken this one's place"}};
        bus_reply(s->server, peer, &error);
    }
}

static void send_grant(struct endpoint *s, const struct worker_answer *answer)
{
    struct msg msg = {.kind = MSG_GRANT, .id = answer->id, .grant = answer->grant};
    if (answer->decoder == s->decoder_number && s->decoder && bus_reply(s->server, s->decoder, &msg) < 0)
        log_warn("grant not delivered: id=%" PRIu64, answer->id);
}

static void send_refusals(struct endpoint *s, const struct worker_answer *answer)
{
    const struct selector_result *r = &answer->result;
    if (answer->decoder != s->decoder_number)
        return;
    if (answer->err.code)
        send_error(s, answer->id, answer->err.code, answer->err.text);
    for (uint32_t i = 0; i < r->refusal_count; i++)
        send_error(s, r->refusals[i].sequence, r->refusals[i].code, r->refusals[i].text);
}

/* ---- the store ---- */

static void pop_pending(struct endpoint *s)
{
    worker_done(s->worker, &s->pending[s->pending_first]);
    s->pending_first = (s->pending_first + 1) % PENDING;
    s->pending_count--;
    s->part = 0;
}

static void drop_pending(struct endpoint *s)
{
    for (; s->pending_count; s->dropped_topk++)
        pop_pending(s);
}

static void set_retry(struct endpoint *s, bool wanted)
{
    if (wanted && s->retry < 0)
        s->retry = loop_add_timer(s->loop, 2 * CLOCK_MS, send_pending, s);
    if (!wanted && s->retry >= 0) {
        loop_remove_timer(s->loop, s->retry);
        s->retry = -1;
    }
}

/* Sends what waits, in order, until the store's queue is full. */
static void send_pending(void *arg)
{
    struct endpoint *s = arg;
    int rc = 0;
    while (s->pending_count && (rc != -EAGAIN && rc != -ENOTCONN)) {
        const struct selector_result *r = &s->pending[s->pending_first]->result;
        struct msg msg = {.kind = MSG_TOPK, .id = r->step};
        uint32_t next = selector_result_part(r, s->part, PART_BYTES, &msg.topk);
        rc = bus_send(s->store, &msg);
        if (rc == 0) {
            s->part = next;
        } else if (rc != -EAGAIN && rc != -ENOTCONN) {
            log_warn("selection of step %" PRIu32 " not sent: %s", r->step, strerror(-rc));
            s->dropped_topk++;
            s->part = r->entry_count;
            put_task(s, WORKER_FORGET, NULL);
        }
        if (s->part == r->entry_count) {
            trace(TRACE_SENT, r->step);
            pop_pending(s);
        }
    }
    set_retry(s, rc == -EAGAIN);
}

/* What became of the segment. A decoder that hears that it cannot be used ends. */
static void answer_features(struct endpoint *s, const struct worker_answer *answer)
{
    if (answer->decoder != s->decoder_number)
        return;
    if (answer->err.code) {
        log_error("decoder's hidden states: %s", answer->err.text);
        send_error(s, 0, answer->err.code, answer->err.text);
    } else {
        log_info("hidden states of the decoder are at hand");
        intake_answer(s->intake, bus_epoch(s->bus));
    }
}

/* The answer stays here until it is sent. */
static void take_answer(struct endpoint *s, struct worker_answer *answer)
{
    if (answer->features)
        answer_features(s, answer);
    else if (answer->granted)
        send_grant(s, answer);
    else
        send_refusals(s, answer);
    if (answer->decoder != s->decoder_number || answer->result.entry_count == 0) {
        worker_done(s->worker, &answer);
        return;
    }
    if (s->pending_count ==
        PENDING) { /* what the store does not take any more cannot be told apart from a loss */
        s->dropped_topk++;
        worker_done(s->worker, &answer);
        put_task(s, WORKER_FORGET, NULL);
        return;
    }
    s->pending[(s->pending_first + s->pending_count++) % PENDING] = answer;
}

static void on_answers(void *arg, uint32_t events)
{
    struct endpoint *s = arg;
    struct worker_answer *answer;
    (void)events;
    while ((answer = worker_take(s->worker)))
        take_answer(s, answer);
    send_pending(s);
}

static void on_welcome(void *arg, const struct msg_hello *hello, uint64_t epoch)
{
    struct endpoint *s = arg;
    log_info("kvstore attached: pid=%" PRIu32 " epoch=%016" PRIx64, hello->pid, epoch);
    send_pending(s);
}

static void on_lost(void *arg, const char *why)
{
    struct endpoint *s = arg;
    log_warn("kvstore lost: %s; selections wait for the next one", why);
    drop_pending(s);
    set_retry(s, false);
    put_task(s, WORKER_FORGET, NULL);
}

static void on_store_message(void *arg, struct msg *msg)
{
    struct endpoint *s = arg;
    if (msg->kind == MSG_RESELECT) {
        put_task(s, WORKER_MESSAGE, msg);
    } else if (msg->kind == MSG_ERROR && bus_client_state(s->store) != BUS_READY) {
        log_error("kvstore refused this retriever: %s", msg->error.text);
        loop_stop(s->loop, 1);
    } else if (msg->kind == MSG_ERROR) {
        log_warn("kvstore refused a message: id=%" PRIu64 " %s", msg->id, msg->error.text);
    }
}

/* ---- status ---- */

static void put_times(json_t *root, const char *key, const struct selector_times *t, uint64_t steps)
{
    json_t *o = figures_section(root, key);
    int64_t count = steps ? (int64_t)steps : 1;
    figures_ms(o, "append", t->append_ns / count);
    figures_ms(o, "score", t->score_ns / count);
    figures_ms(o, "topk", t->topk_ns / count);
    figures_ms(o, "encode", t->encode_ns / count);
}

static void put_identity(json_t *o, const struct endpoint_identity *id)
{
    figures_text(o, "part", "retriever");
    figures_text(o, "version", SPECONTEXT_VERSION);
    figures_count(o, "pid", id->hello.pid);
    figures_text(o, "model", id->model);
    figures_text(o, "head", id->head);
    figures_text(o, "head_fingerprint", id->fingerprint);
    figures_text(o, "pool", id->pool);
    figures_text(o, "rope", id->rope);
    figures_text(o, "key_type", id->key_type);
    figures_text(o, "backend", id->backend);
    figures_count(o, "threads", id->threads);
    figures_count(o, "context", id->hello.layout.context_max);
    figures_count(o, "sequences_max", id->sequences);
}

static void put_gpu(json_t *root, const struct gpu_info *info, const struct selector_stats *t)
{
    const struct card_bytes *b = &t->gpu;
    json_t *o = figures_section(root, "gpu");
    figures_text(o, "device", info->name);
    figures_text(o, "uuid", info->uuid);
    figures_bool(o, "mps", info->mps);
    figures_count(o, "steps_graph", t->graph_steps);
    figures_count(o, "context_bytes", b->context);
    figures_count(o, "weights_bytes", b->weights);
    figures_count(o, "keys_bytes", b->keys);
    figures_count(o, "workspace_bytes", b->workspace);
    figures_count(o, "library_bytes", b->libraries);
    figures_count(o, "total_bytes", b->context + b->weights + b->keys + b->workspace + b->libraries);
}

/* Of a head that reads hidden states of the model. */
static void put_kept(json_t *o, const struct selector_stats *t)
{
    figures_count(o, "feature_rows", t->feature_rows);
    figures_count(o, "kept_tokens", t->kept.blocks * BLOCK_TOKENS);
    figures_count(o, "kept_bytes", t->kept.bytes);
    figures_count(o, "kept_bytes_max", t->kept.bytes_max);
    figures_count(o, "kept_evicted", t->kept.evicted);
    figures_count(o, "kept_reused_tokens", t->kept_tokens);
}

static char *on_status(void *arg)
{
    struct endpoint *s = arg;
    struct selector_stats t;
    worker_stats(s->worker, &t);
    json_t *o = json_object();
    put_identity(o, s->identity);
    figures_text(o, "kvstore", bus_state_name(bus_client_state(s->store)));
    figures_count(o, "decoder_pid", s->decoder ? s->decoder->pid : 0);
    figures_count(o, "sequences", t.sequences);
    figures_count(o, "key_bytes", t.key_bytes);
    figures_count(o, "steps", t.steps);
    figures_count(o, "tokens", t.tokens);
    figures_count(o, "selections", t.selections);
    figures_count(o, "selections_grown", t.grown);
    figures_count(o, "selections_short", t.fallbacks);
    figures_count(o, "refused", t.refused);
    figures_count(o, "positions_sent", t.positions_sent);
    if (s->intake)
        put_kept(o, &t);
    figures_count(o, "topk_waiting", s->pending_count);
    figures_count(o, "topk_dropped", s->dropped_topk);
    figures_count(o, "tasks_refused", s->refused_tasks);
    put_times(o, "step_ms", &t.sum, t.steps);
    put_times(o, "last_step_ms", &t.last, 1);
    if (s->identity->gpu.uuid[0])
        put_gpu(o, &s->identity->gpu, &t);
    figures_bus(o, bus_counters(s->bus));
    return figures_finish(&o);
}

/* ---- life ---- */

int endpoint_create(struct loop *loop, struct worker *worker, const struct endpoint_identity *identity,
                    const char *runtime, struct endpoint **ret_endpoint, struct err *err)
{
    const struct bus_server_ops server_ops = {on_hello, on_message, on_status, on_gone};
    const struct bus_client_ops store_ops = {on_welcome, on_store_message, on_lost};
    char own_path[RUNTIME_PATH_MAX], store_path[RUNTIME_PATH_MAX];
    struct endpoint *s = mem_alloc(1, sizeof *s);
    *s = (struct endpoint){.loop = loop, .worker = worker, .identity = identity, .fd = -1, .retry = -1};
    s->bus = bus_create(loop, &identity->hello);
    int rc = runtime_path(runtime, "retriever.sock", own_path, err);
    if (rc == 0)
        rc = runtime_path(runtime, "kvstore.sock", store_path, err);
    if (rc == 0 && identity->hello.has_features) /* before a decoder can hear that they are wanted */
        rc = intake_create(loop, runtime, on_features, s, &s->intake, err);
    if (rc == 0)
        rc = bus_serve(s->bus, own_path, ROLE_RETRIEVER, &server_ops, s, &s->server, err);
    if (rc == 0)
        rc = bus_connect(s->bus, store_path, &store_ops, s, &s->store, err);
    if (rc == 0 && (rc = loop_add_fd(loop, worker_fd(worker), EPOLLIN, on_answers, s)) < 0)
        err_set(err, rc, "worker: epoll: %s", strerror(-rc));
    if (rc < 0) {
        endpoint_free(&s);
        return rc;
    }
    s->fd = worker_fd(worker);
    *ret_endpoint = s;
    return 0;
}

void endpoint_free(struct endpoint **endpoint)
{
    struct endpoint *s = *endpoint;
    if (!s)
        return;
    if (s->fd >= 0)
        loop_remove_fd(s->loop, s->fd);
    set_retry(s, false);
    drop_pending(s);
    intake_free(&s->intake);
    bus_free(&s->bus); /* closes its servers and clients */
    mem_free(endpoint);
}
