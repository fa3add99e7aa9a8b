/* Sockets of the store; see serve.h. Owner of everything in here: the loop thread. It must never touch the
 * planner while its thread runs: commands and answers go through store_worker.h.
 *
 * The planner's thread starts with the daemon and opens the GPU; the planner is made when the first decoder
 * says HELLO, since the layout comes with it. A decoder's life is that of its connection for descriptors:
 * when that ends, the decoder is dead, whatever the bus says. */
#include "kvstore/serve.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/trace.h"
#include "kvstore/status.h"
#include "kvstore/store_worker.h"
#include "link/fdpass.h"
#include "link/runtime.h"
#include "link/unix_socket.h"

enum { CONNECTIONS_MAX = 16 };

struct connection { /* of the socket for descriptors */
    struct serve *serve;
    int fd;
    pid_t pid;
    uint32_t role; /* 0 before it asked */
    uint64_t epoch;
};

struct serve {
    struct loop *loop;
    struct store_options options;
    struct bus *bus;
    struct bus_server *server;
    struct msg_hello hello;
    int listen_fd, arena_fd;
    struct unix_socket_file listen_file;
    struct connection connections[CONNECTIONS_MAX];
    struct store_worker *worker;
    const struct planner *planner; /* the worker's; NULL before the first decoder */
    struct kv_layout layout;       /* valid with the planner */
    uint64_t decoder_epoch;        /* greeted; 0: none */
    struct connection *decoder;    /* its connection, once it has asked */
    bool have_retriever;
    struct kv_layout retriever_layout;
    struct hash128 tokenizer[2]; /* of decoder and retriever */
    bool draining;
    const char *state;
    struct store_worker_stats stats; /* last snapshot, for status */
};

static void set_state(struct serve *s, const char *state)
{
    s->state = state;
    sd_notifyf(0, "STATUS=%s", state);
}

/* ---- the planner's life ---- */

static void stop_planner(struct serve *s)
{
    store_worker_unmake(s->worker);
    s->planner = NULL;
    s->hello.has_layout = false;
    bus_set_hello(s->bus, &s->hello);
}

static void send_arena(struct serve *s, struct connection *c)
{
    struct stat st = {0};
    fstat(s->planner->blocks.segment.fd, &st);
    struct fdpass_frame frame = {.magic = FDPASS_MAGIC,
                                 .kind = FDPASS_ARENA,
                                 .epoch = bus_epoch(s->bus),
                                 .role = ROLE_KVSTORE,
                                 .fds = 1,
                                 .value = {(uint64_t)st.st_size}};
    struct err err = {0};
    if (fdpass_send(c->fd, &frame, &s->planner->blocks.segment.fd, &err) < 0)
        log_warn("the arena was not handed to pid %d: %s", (int)c->pid, err.text);
}

/* Layers that the arena lacks. */
static uint32_t host_lacks(const struct serve *s)
{
    return s->planner ? s->planner->blocks.layout.host_first_layer : 0;
}

static int make_planner(struct serve *s, const struct kv_layout *layout, struct err *err)
{
    int r = -ENOENT;
    if (s->arena_fd >= 0) {
        r = store_worker_make(s->worker, layout, s->arena_fd, err);
        if (r < 0) {
            log_warn("the inherited arena is dropped: %s", err->text);
            close(s->arena_fd);
        } else {
            log_info("arena adopted");
        }
        s->arena_fd = -1;
    }
    if (r < 0)
        r = store_worker_make(s->worker, layout, -1, err);
    if (r < 0)
        return r;
    s->planner = store_worker_planner(s->worker);
    s->layout = *layout;
    s->hello.has_layout = true;
    s->hello.layout = *layout;
    bus_set_hello(s->bus, &s->hello);
    log_info(
        "layout layers=%u row_heads=%u groups=%u piece_bytes=%u context=%u device_slabs=%u host_blocks=%u",
        layout->layers, layout->row_heads, layout->groups, layout->piece_bytes, layout->context_max,
        s->planner->device.slabs, s->planner->blocks.blocks_max);
    if (host_lacks(s) > 0)
        log_info("write-through offloaded: layers below %u of %u are kept on the device alone: no prefix is "
                 "used again, and sequences end with their decoder",
                 host_lacks(s), layout->layers);
    for (int i = 0; i < CONNECTIONS_MAX; i++)
        if (s->connections[i].fd >= 0 && s->connections[i].role == ROLE_LAUNCH)
            send_arena(s, &s->connections[i]);
    return 0;
}

static void command(struct serve *s, enum store_worker_command_kind kind, uint64_t epoch)
{
    struct store_worker_command *c = mem_alloc(1, sizeof *c);
    c->kind = kind;
    c->epoch = epoch;
    if (store_worker_put(s->worker, c) == 0)
        return;
    store_worker_command_free(c);
    log_error("the planner takes no commands any more");
    loop_stop(s->loop, 1);
}

/* ---- descriptors ---- */

static void drop_connection(struct serve *s, struct connection *c)
{
    loop_remove_fd(s->loop, c->fd);
    close(c->fd);
    if (s->decoder == c) {
        log_info("decoder gone pid=%d epoch=%016llx%s", (int)c->pid, (unsigned long long)c->epoch,
                 host_lacks(s) > 0 ? ": its sequences are dropped, host memory lacks layers of theirs" : "");
        s->decoder = NULL;
        s->decoder_epoch = 0;
        command(s, STORE_WORKER_DETACH, 0);
        set_state(s, "waiting for a decoder");
    }
    *c = (struct connection){.serve = s, .fd = -1};
}

static void answer_ask(struct serve *s, struct connection *c, const struct fdpass_frame *ask)
{
    c->role = ask->role;
    c->epoch = ask->epoch;
    if (ask->role == ROLE_LAUNCH) {
        if (s->planner)
            send_arena(s, c);
        return;
    }
    if (ask->role != ROLE_DECODER || !s->planner || ask->epoch != s->decoder_epoch || s->decoder) {
        log_warn("descriptors refused pid=%d role=%s epoch=%016llx", (int)c->pid, msg_role_name(ask->role),
                 (unsigned long long)ask->epoch);
        drop_connection(s, c);
        return;
    }
    s->decoder = c;
    command(s, STORE_WORKER_ATTACH, c->epoch);
}

static void on_connection(void *arg, uint32_t events)
{
    (void)events;
    struct connection *c = arg;
    struct fdpass_frame frame;
    int fds[FDPASS_FDS_MAX];
    struct err err = {0};
    int r = fdpass_recv(c->fd, 0, &frame, fds, &err);
    if (r == -ETIMEDOUT)
        return;
    for (uint32_t i = 0; r == 0 && i < frame.fds && i < FDPASS_FDS_MAX; i++)
        close(fds[i]); /* an ask brings none */
    if (r < 0 || frame.kind != FDPASS_ASK || c->role != 0) {
        if (r < 0 && r != -ECONNRESET)
            log_warn("descriptors: pid %d: %s", (int)c->pid, err.text);
        drop_connection(c->serve, c);
        return;
    }
    answer_ask(c->serve, c, &frame);
}

static void on_listen(void *arg, uint32_t events)
{
    (void)events;
    struct serve *s = arg;
    int fd;
    pid_t pid;
    struct err err = {0};
    int r = fdpass_accept(s->listen_fd, &fd, &pid, &err);
    if (r < 0) {
        if (r != -EAGAIN)
            log_warn("descriptors: %s", err.text);
        return;
    }
    for (int i = 0; i < CONNECTIONS_MAX; i++) {
        struct connection *c = &s->connections[i];
        if (c->fd >= 0)
            continue;
        *c = (struct connection){.serve = s, .fd = fd, .pid = pid};
        r = loop_add_fd(s->loop, fd, EPOLLIN | EPOLLRDHUP, on_connection, c);
        if (r < 0) {
            log_warn("descriptors: pid %d cannot be watched: %s", (int)pid, strerror(-r));
            close(fd);
            c->fd = -1;
        }
        return;
    }
    log_warn("descriptors: all %d connections are taken, pid %d is refused", CONNECTIONS_MAX, (int)pid);
    close(fd);
}

/* ---- answers of the planner ---- */

static void on_attached(struct serve *s, struct store_worker_answer *a)
{
    if (!s->decoder || s->decoder->epoch != a->epoch)
        return; /* it has gone meanwhile; its DETACH is on the way */
    struct fdpass_frame frame = {.magic = FDPASS_MAGIC,
                                 .kind = FDPASS_DECODER,
                                 .epoch = bus_epoch(s->bus),
                                 .role = ROLE_KVSTORE,
                                 .fds = a->fd_count,
                                 .value = {s->planner->epoch, a->device_bytes, a->control_bytes}};
    int r = a->error.code < 0 ? a->error.code : fdpass_send(s->decoder->fd, &frame, a->fds, &a->error);
    if (r < 0) {
        log_error("decoder pid=%d is not attached: %s", (int)s->decoder->pid, a->error.text);
        drop_connection(s, s->decoder);
        return;
    }
    log_info("decoder attached pid=%d epoch=%016llx", (int)s->decoder->pid, (unsigned long long)a->epoch);
    set_state(s, "serving");
}

static void on_answer(struct serve *s, struct store_worker_answer *a)
{
    struct bus_peer *peer;
    switch (a->kind) {
    case STORE_WORKER_REPLY:
        bus_reply(s->server, &a->peer,
                  &a->msg); /* a full queue is counted by the bus; the asker has a deadline */
        break;
    case STORE_WORKER_TO_ROLE:
        peer = bus_find_role(s->server, a->role);
        if (peer)
            bus_reply(s->server, peer, &a->msg);
        break;
    case STORE_WORKER_ATTACHED:
        on_attached(s, a);
        break;
    case STORE_WORKER_BROKEN:
        log_error("decoder: %s", a->error.text);
        if (s->decoder && s->decoder->epoch == a->epoch)
            drop_connection(s, s->decoder);
        break;
    case STORE_WORKER_FAILED:
        log_error("%s", a->error.text);
        loop_stop(s->loop, 1);
        break;
    }
}

static void drain_if_done(struct serve *s)
{
    if (!s->draining)
        return;
    bool live = false;
    if (s->planner) {
        store_worker_stats(s->worker, &s->stats);
        for (uint32_t i = 0; i < s->stats.live_count; i++)
            live |= s->stats.sequences[i].attached;
    }
    if (!live)
        loop_stop(s->loop, 0);
}

static void on_answers(void *arg, uint32_t events)
{
    (void)events;
    struct serve *s = arg;
    struct store_worker_answer *a;
    while ((a = store_worker_take(s->worker))) {
        on_answer(s, a);
        store_worker_answer_free(a);
    }
    drain_if_done(s);
}

static void on_timer(void *arg)
{
    drain_if_done(arg);
}

/* ---- the bus ---- */

static bool connection_ended(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN | POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

static bool hash_set(struct hash128 h)
{
    return h.lo || h.hi;
}

/* What a retriever's sets and the store's rows must agree on. */
static int compare_retriever(const struct kv_layout *store, const struct kv_layout *retriever,
                             struct err *err)
{
    if (!hash_equal(store->model, retriever->model))
        return err_set(err, -EINVAL, "layout: model: found %016llx, expected %016llx",
                       (unsigned long long)retriever->model.lo, (unsigned long long)store->model.lo);
    if (store->selection_heads != retriever->selection_heads || store->groups != retriever->groups)
        return err_set(
            err, -EINVAL,
            "layout: found %u selection heads in %u groups, expected %u selection heads in %u groups",
            retriever->selection_heads, retriever->groups, store->selection_heads, store->groups);
    for (uint32_t g = 0; g <= store->groups && g <= LIMIT_GROUPS; g++)
        if (store->group_first_layer[g] != retriever->group_first_layer[g])
            return err_set(err, -EINVAL, "layout: group %u: found first layer %u, expected %u", g,
                           retriever->group_first_layer[g], store->group_first_layer[g]);
    return 0;
}

static int compare_tokenizers(struct serve *s, int which, struct hash128 found, struct err *err)
{
    struct hash128 other = s->tokenizer[!which];
    if (hash_set(found) && hash_set(other) && !hash_equal(found, other))
        return err_set(err, -EINVAL, "tokenizer: found %016llx, the %s has %016llx",
                       (unsigned long long)found.lo, which == 0 ? "retriever" : "decoder",
                       (unsigned long long)other.lo);
    s->tokenizer[which] = found;
    return 0;
}

static int greet_decoder(struct serve *s, const struct bus_peer *peer, const struct msg_hello *hello,
                         struct err *err)
{
    if (!hello->has_layout)
        return err_set(err, -EPROTO, "HELLO of a decoder without a layout");
    int r = layout_check(&hello->layout, err);
    if (r < 0)
        return r;
    if (strcmp(hello->device[0] ? hello->device : "cpu", s->hello.device) != 0)
        return err_set(err, -EINVAL, "device: the decoder computes on %s, the store's KV memory lies on %s",
                       hello->device, s->hello.device);
    if (s->decoder && s->decoder->epoch != peer->epoch) {
        if (!connection_ended(s->decoder->fd))
            return err_set(err, -EBUSY, "a decoder is attached already (pid %d)", (int)s->decoder->pid);
        drop_connection(s, s->decoder);
    }
    if (s->draining)
        return err_set(err, -ESHUTDOWN, "the store is draining");
    if (s->have_retriever && bus_find_role(s->server, ROLE_RETRIEVER)) {
        r = compare_retriever(&hello->layout, &s->retriever_layout, err);
        if (r < 0)
            return r;
    } else {
        s->tokenizer[1] = (struct hash128){0, 0};
    }
    r = compare_tokenizers(s, 0, hello->tokenizer, err);
    if (r < 0)
        return r;
    struct hash128 found = layout_fingerprint(&hello->layout), mine = layout_fingerprint(&s->layout);
    if (s->planner && !hash_equal(found, mine)) {
        if (s->decoder)
            return err_set(err, -EINVAL, "layout: found fingerprint %016llx, expected %016llx",
                           (unsigned long long)found.lo, (unsigned long long)mine.lo);
        log_info("another layout: the arena is dropped found=%016llx had=%016llx",
                 (unsigned long long)found.lo, (unsigned long long)mine.lo);
        stop_planner(s);
    }
    if (!s->planner) {
        r = make_planner(s, &hello->layout, err);
        if (r < 0)
            return r;
    }
    s->decoder_epoch = peer->epoch;
    return 0;
}

static int greet_retriever(struct serve *s, const struct msg_hello *hello, struct err *err)
{
    if (!hello->has_layout)
        return err_set(err, -EPROTO, "HELLO of a retriever without a layout");
    const struct bus_peer *other = bus_find_role(s->server, ROLE_RETRIEVER);
    if (other && bus_peer_lives(other))
        return err_set(err, -EBUSY, "a retriever is attached already (pid %u)", other->pid);
    if (s->planner) {
        int r = compare_retriever(&s->layout, &hello->layout, err);
        if (r < 0)
            return r;
    }
    int r = compare_tokenizers(s, 1, hello->tokenizer, err);
    if (r < 0)
        return r;
    s->have_retriever = true;
    s->retriever_layout = hello->layout;
    command(s, STORE_WORKER_ASK, 0);
    return 0;
}

static int on_hello(void *arg, struct bus_peer *peer, const struct msg_hello *hello, struct err *err)
{
    struct serve *s = arg;
    int r = 0;
    if (hello->role == ROLE_DECODER)
        r = greet_decoder(s, peer, hello, err);
    else if (hello->role == ROLE_RETRIEVER)
        r = greet_retriever(s, hello, err);
    if (r < 0)
        log_warn("%s pid=%u is refused: %s", msg_role_name(hello->role), hello->pid, err ? err->text : "");
    else
        log_debug("%s greets pid=%u", msg_role_name(hello->role), hello->pid);
    return r;
}

static void refuse_message(struct serve *s, struct bus_peer *peer, const struct msg *msg, int code,
                           const char *text)
{
    struct msg answer = {.kind = MSG_ERROR, .id = msg->id, .error = {.code = code}};
    snprintf(answer.error.text, sizeof answer.error.text, "%s", text);
    bus_reply(s->server, peer, &answer);
}

static void on_message(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct serve *s = arg;
    if (msg->kind == MSG_DRAIN) {
        log_info("draining");
        s->draining = true;
        set_state(s, "draining");
        drain_if_done(s);
        return;
    }
    if (msg->kind == MSG_OPEN && s->draining) {
        refuse_message(s, peer, msg, -ESHUTDOWN, "the store is draining");
        return;
    }
    if (!s->planner) {
        if (msg->kind == MSG_PREFIX) {
            struct msg none = {.kind = MSG_PREFIXED, .id = msg->id};
            bus_reply(s->server, peer, &none);
        }
        return; /* nobody has sequences yet */
    }
    if (msg->kind == MSG_TOPK)
        trace(TRACE_TOPK, (uint32_t)msg->id);
    struct store_worker_command *c = mem_alloc(1, sizeof *c);
    *c = (struct store_worker_command){.kind = STORE_WORKER_MESSAGE, .peer = *peer, .msg = *msg};
    msg->memory = NULL;
    if (store_worker_put(s->worker, c) < 0) {
        refuse_message(s, peer, msg, -EAGAIN, "the planner's queue is full");
        store_worker_command_free(c);
    }
}

static void on_gone(void *arg, struct bus_peer *peer)
{
    struct serve *s = arg;
    log_debug("%s is silent pid=%u", msg_role_name(peer->role), peer->pid);
    if (peer->role == ROLE_DECODER && !s->decoder && peer->epoch == s->decoder_epoch)
        s->decoder_epoch = 0;
}

static char *on_status(void *arg)
{
    struct serve *s = arg;
    struct status_source source = {
        .options = &s->options.planner, .bus = bus_counters(s->bus), .state = s->state, .layout = &s->layout};
    if (s->planner) {
        store_worker_stats(s->worker, &s->stats);
        source.stats = &s->stats;
    }
    return status_of_store(&source);
}

/* ---- life ---- */

int serve_create(struct serve **ret, struct loop *loop, const struct store_options *options, int arena_fd,
                 struct err *err)
{
    static const struct bus_server_ops OPS = {on_hello, on_message, on_status, on_gone};
    struct serve *s = mem_alloc(1, sizeof *s);
    *s = (struct serve){.loop = loop, .options = *options, .listen_fd = -1, .arena_fd = arena_fd};
    for (int i = 0; i < CONNECTIONS_MAX; i++)
        s->connections[i] = (struct connection){.serve = s, .fd = -1};
    s->hello =
        (struct msg_hello){.role = ROLE_KVSTORE, .version_min = MSG_VERSION_MIN, .pid = (uint32_t)getpid()};
    snprintf(s->hello.build, sizeof s->hello.build, "%s", SPECONTEXT_VERSION);
    const char *device = options->device ? options->device : "cpu";
    int r = store_worker_start(&s->worker, &options->planner, device, err);
    if (r == 0 && (r = loop_add_fd(loop, store_worker_fd(s->worker), EPOLLIN, on_answers, s)) < 0)
        err_set(err, r, "event loop: %s", strerror(-r));
    if (r < 0) {
        serve_free(&s);
        return r;
    }
    snprintf(s->hello.device, sizeof s->hello.device, "%s", store_worker_device(s->worker));
    s->bus = bus_create(loop, &s->hello);
    char path[RUNTIME_PATH_MAX];
    r = runtime_path(options->daemon.runtime, "kvstore.fd", path, err);
    if (r == 0)
        r = fdpass_listen(path, &s->listen_fd, err);
    if (r == 0)
        s->listen_file = unix_socket_file(path);
    if (r == 0 && (r = loop_add_fd(loop, s->listen_fd, EPOLLIN, on_listen, s)) < 0)
        err_set(err, r, "event loop: %s", strerror(-r));
    if (r == 0)
        r = runtime_path(options->daemon.runtime, "kvstore.sock", path, err);
    if (r == 0)
        r = bus_serve(s->bus, path, ROLE_KVSTORE, &OPS, s, &s->server, err);
    if (r < 0) {
        serve_free(&s);
        return r;
    }
    loop_add_timer(loop, CLOCK_S / 4, on_timer, s);
    set_state(s, "waiting for a decoder");
    *ret = s;
    return 0;
}

void serve_free(struct serve **serve)
{
    struct serve *s = *serve;
    if (!s)
        return;
    *serve = NULL;
    for (int i = 0; i < CONNECTIONS_MAX; i++)
        if (s->connections[i].fd >= 0) {
            loop_remove_fd(s->loop, s->connections[i].fd);
            close(s->connections[i].fd);
        }
    if (s->listen_fd >= 0) {
        char path[RUNTIME_PATH_MAX];
        if (runtime_path(s->options.daemon.runtime, "kvstore.fd", path, NULL) == 0)
            unix_socket_unlink(path, s->listen_file); /* before it closes, when others may take the path */
        loop_remove_fd(s->loop, s->listen_fd);
        close(s->listen_fd);
    }
    if (s->worker)
        loop_remove_fd(s->loop, store_worker_fd(s->worker));
    store_worker_stop(&s->worker);
    if (s->arena_fd >= 0)
        close(s->arena_fd);
    bus_free(&s->bus);
    mem_free(&s);
}
