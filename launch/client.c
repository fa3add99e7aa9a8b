/* Three bus clients and what their messages mean. Owns the bus. Loop's thread only; it must never block and
 * never decide how a run goes on: that is the caller's. */
#include "launch/client.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "link/bus.h"
#include "link/runtime.h"

struct peer {
    struct client *client;
    enum client_part part;
    struct bus_client *bus;
    bool welcomed;
    uint32_t pid;
};

struct client {
    struct bus *bus;
    const struct client_ops *ops;
    void *arg;
    bool attached;
    struct peer peers[CLIENT_PARTS];
};

static const char *const names[CLIENT_PARTS] = {"kvstore", "retriever", "decoder"};
static const char *const programs[CLIENT_PARTS] = {"specontext-kvstore", "specontext-retriever",
                                                   "specontext-decoder"};

const char *client_part_program(enum client_part part)
{
    return programs[part];
}

const char *client_part_name(enum client_part part)
{
    return names[part];
}

static void on_welcome(void *arg, const struct msg_hello *hello, uint64_t epoch)
{
    struct peer *peer = arg;
    struct client *client = peer->client;
    (void)epoch;
    peer->welcomed = true;
    peer->pid = hello->pid;
    for (int i = 0; i < CLIENT_PARTS; i++)
        if (!client->peers[i].welcomed)
            return;
    if (!client->attached) {
        client->attached = true;
        if (client->ops->attached)
            client->ops->attached(client->arg);
    }
}

static void on_lost(void *arg, const char *why)
{
    struct peer *peer = arg;
    peer->client->ops->lost(peer->client->arg, peer->part, why);
}

/* An ERROR that answers GENERATE ends the request as DONE would. */
static void on_refusal(struct peer *peer, const struct msg *msg)
{
    struct client *client = peer->client;
    if (peer->part == CLIENT_DECODER && msg->id) {
        struct msg_done done = {.reason = FINISH_ERROR, .code = msg->error.code};
        snprintf(done.text, sizeof done.text, "%s", msg->error.text);
        if (client->ops->done)
            client->ops->done(client->arg, (uint32_t)msg->id - 1, &done);
        return;
    }
    client->ops->lost(client->arg, peer->part, msg->error.text);
}

static void on_message(void *arg, struct msg *msg)
{
    struct peer *peer = arg;
    const struct client_ops *ops = peer->client->ops;
    void *to = peer->client->arg;
    uint32_t request = (uint32_t)msg->id - 1; /* ids on the wire begin at 1: 0 is the greeting's */
    switch (msg->kind) {
    case MSG_PROGRESS:
        if (ops->progress)
            ops->progress(to, request, &msg->progress);
        break;
    case MSG_TOKEN:
        if (ops->tokens)
            ops->tokens(to, request, &msg->token.tokens);
        break;
    case MSG_DONE:
        if (ops->done)
            ops->done(to, request, &msg->done);
        break;
    case MSG_REPORT:
        if (ops->report)
            ops->report(to, peer->part, msg->report.json.data, msg->report.json.bytes);
        break;
    case MSG_ERROR:
        on_refusal(peer, msg);
        break;
    default: /* the bus lets pass only what a server may send; the rest is for other clients */
        break;
    }
}

static const struct bus_client_ops bus_ops = {.welcome = on_welcome, .message = on_message, .lost = on_lost};

int client_create(struct loop *loop, const char *dir, const struct client_ops *ops, void *arg,
                  struct client **ret_client, struct err *err)
{
    struct msg_hello hello = {.role = ROLE_LAUNCH, .version_min = MSG_VERSION_MIN, .pid = (uint32_t)getpid()};
    snprintf(hello.build, sizeof hello.build, "specontext %s", SPECONTEXT_VERSION);
    snprintf(hello.device, sizeof hello.device, "cpu");
    struct client *client = mem_alloc(1, sizeof *client);
    client->ops = ops;
    client->arg = arg;
    client->bus = bus_create(loop, &hello);
    if (!client->bus) {
        mem_free(&client);
        return err_set(err, -ENOMEM, "cannot make a ZeroMQ context");
    }
    for (int i = 0; i < CLIENT_PARTS; i++) {
        struct peer *peer = &client->peers[i];
        peer->client = client;
        peer->part = (enum client_part)i;
        char name[32], path[RUNTIME_PATH_MAX];
        snprintf(name, sizeof name, "%s.sock", names[i]);
        int r = runtime_path(dir, name, path, err);
        if (!r)
            r = bus_connect(client->bus, path, &bus_ops, peer, &peer->bus, err);
        if (r) {
            client_free(&client);
            return r;
        }
    }
    *ret_client = client;
    return 0;
}

void client_free(struct client **client)
{
    if (!*client)
        return;
    bus_free(&(*client)->bus);
    mem_free(client);
}

uint32_t client_part_pid(const struct client *client, enum client_part part)
{
    return client->peers[part].pid;
}

int client_generate(struct client *client, uint32_t request, const struct msg_generate *generate)
{
    struct msg msg = {.kind = MSG_GENERATE, .id = (uint64_t)request + 1, .generate = *generate};
    return bus_send(client->peers[CLIENT_DECODER].bus, &msg);
}

int client_cancel(struct client *client, uint32_t request)
{
    struct msg msg = {.kind = MSG_CANCEL, .id = (uint64_t)request + 1};
    return bus_send(client->peers[CLIENT_DECODER].bus, &msg);
}

int client_ask_status(struct client *client, enum client_part part)
{
    struct msg msg = {.kind = MSG_STATUS, .id = 1};
    return bus_send(client->peers[part].bus, &msg);
}

uint64_t client_epoch(const struct client *client)
{
    return bus_epoch(client->bus);
}
