/* Servers and clients of the bus that write down what they are told, and a loop that runs until something is
 * so. Used after the headers that cmocka.h needs. */
#ifndef TESTS_LIB_NODE_H
#define TESTS_LIB_NODE_H

#include <stdbool.h>
#include <sys/types.h>

#include "link/bus.h"
#include "link/runtime.h"

/* What a server or a client was told. */
struct node_record {
    int hellos, welcomes, messages, losses, gones;
    struct msg last; /* without memory */
    char text[LIMIT_TEXT_BYTES];
    uint64_t epoch, sum;
    struct bus_peer *peer;
    int refuse;                     /* HELLOs to refuse */
    struct bus_client **disconnect; /* client to disconnect within the next callback */
};

struct node {
    struct loop *loop;
    struct bus *bus;
    struct bus_server *server;
    struct bus_client *client;
    struct node_record record;
};

struct node_fixture {
    char dir[RUNTIME_PATH_MAX], path[RUNTIME_PATH_MAX];
    struct loop *loop;
    struct node store, one, two;
    void *raw_context, *raw;
};

/* Runs the loop until done(arg), looked at each millisecond. False: not within 60 s. */
bool node_run_until(struct loop *loop, bool (*done)(const void *arg), const void *arg);

struct node_at_least {
    const int *count;
    int least;
};
bool node_is_at_least(const void *arg); /* struct node_at_least */

/* Runs until count >= least. */
#define node_until(loop, count, least) \
    assert_true(node_run_until(loop, node_is_at_least, &(struct node_at_least){&(count), least}))

/* As node_until, for a counter of a bus. */
void node_until_counter(struct loop *loop, const uint64_t *count, uint64_t least);

bool node_is_later(const void *arg); /* than the int64_t of clock_now_ns at arg */

extern const struct bus_server_ops node_server_ops;
extern const struct bus_client_ops node_client_ops;

struct msg_hello node_hello(uint32_t role);

/* A bus with one server; what bus_serve returns. STATUS tells {"late":N,"messages":N}. */
int node_serve(struct node *node, struct loop *loop, const char *path, uint32_t role);

/* A bus with one client. */
void node_join(struct node *node, struct loop *loop, const char *path, uint32_t role);

/* A store in a process of its own. The caller must not have a ZeroMQ context yet. */
pid_t node_fork_server(const char *path);

/* A DEALER without any of our code behind it, and what it sends. */
void node_raw_connect(struct node_fixture *f);
void node_raw_send(struct node_fixture *f, const void *bytes, size_t count, int flags);
void node_raw_send_msg(struct node_fixture *f, const struct msg *msg);
void node_raw_greet(struct node_fixture *f, uint32_t role, uint64_t epoch);

/* Of a test: *state becomes a struct node_fixture with a private directory. The teardown frees what is in it
 * and checks that no socket was left. */
int node_setup(void **state);
int node_teardown(void **state);

#endif
