/* The bus against what may not come in: hostile frames, forbidden and late messages, floods, strangers. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <zmq.h>

#include "base/clock.h"
#include "tests/lib/node.h"

enum { PEERS_MAX = 64 };

/* ---- what may not come in ---- */

static void forbidden_kinds_close_the_peer(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_join(&f->one, f->loop, f->path, ROLE_RETRIEVER);
    node_until(f->loop, f->one.record.welcomes, 1);
    struct msg msg = {.kind = MSG_CLOSE, .id = 4, .close.sequence = 1};
    assert_int_equal(bus_send(f->one.client, &msg), 0);
    node_until(f->loop, f->store.record.gones, 1);
    assert_int_equal(f->store.record.messages, 0);
    node_until(f->loop, f->one.record.messages, 1);
    assert_int_equal(f->one.record.last.error.code, -EPROTO);
    assert_int_equal(f->one.record.last.id, 4);
    assert_string_equal(f->one.record.text, "CLOSE is not for a retriever to send to a kvstore");
    node_until(f->loop, f->one.record.welcomes, 2); /* it may begin anew */
}

static void late_messages_are_dropped(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
    struct msg msg = {.kind = MSG_RESUME, .id = 1, .deadline_ns = clock_now_ns(), .resume.sequence = 1};
    assert_int_equal(bus_send(f->one.client, &msg), 0);
    msg.id = 2;
    msg.deadline_ns = clock_now_ns() + 30 * CLOCK_S;
    assert_int_equal(bus_send(f->one.client, &msg), 0);
    node_until(f->loop, f->store.record.messages, 1);
    assert_int_equal(f->store.record.last.id, 2);
    assert_int_equal(bus_counters(f->store.bus)->dropped_late, 1);
    msg =
        (struct msg){.kind = MSG_GRANT, .deadline_ns = 1, .grant.sequence = 1}; /* on the way back as well */
    assert_int_equal(bus_reply(f->store.server, f->store.record.peer, &msg), 0);
    node_until_counter(f->loop, &bus_counters(f->one.bus)->dropped_late, 1);
    assert_int_equal(f->one.record.messages, 0);
}

static void malformed_frames_leave_the_server_alive(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_raw_connect(f);
    const struct bus_counters *counters = bus_counters(f->store.bus);
    node_raw_send(f, "", 0, 0);
    node_raw_send(f, "\x96", 1, 0);
    node_raw_send(f, "\xdd\xff\xff\xff\xff\x01\x01\x01\x01", 9, 0);
    node_raw_send(f, "", 0, ZMQ_SNDMORE); /* as a REQ would: three frames */
    node_raw_send(f, "\x96\x04\x01\x05\x06\x00\x80", 7, 0);
    for (int i = 0; i < 5; i++)
        node_raw_send(f, "x", 1, i < 4 ? ZMQ_SNDMORE : 0);
    node_until_counter(f->loop, &counters->malformed, 5);
    node_raw_greet(f, ROLE_DECODER, 5); /* still the same connection, and welcome */
    node_until(f->loop, f->store.record.hellos, 1);
    int64_t begun_ns = clock_now_ns();
    node_raw_send(f, "\x96\x63\x01\x05\x06\x00\x80", 7, 0); /* an unknown kind closes a peer */
    node_until(f->loop, f->store.record.gones, 1);
    assert_true(clock_now_ns() - begun_ns < BUS_SILENCE_NS - CLOCK_S); /* for that, not for silence */
    assert_int_equal(counters->malformed, 6);
    node_raw_send(f, "\x96\x04\x09\x05\x06\x00\x80", 7, 0); /* a version of the future gets an answer */
    node_until_counter(f->loop, &counters->malformed, 7);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
    struct msg msg;
    uint8_t answer[4096];
    const int codes[] = {0, -EPROTO, -EPROTONOSUPPORT}; /* WELCOME, then two errors */
    for (int i = 0; i < 3; i++) {
        int bytes = zmq_recv(f->raw, answer, sizeof answer, 0);
        assert_true(bytes > 0 && bytes <= (int)sizeof answer);
        assert_int_equal(msg_decode(answer, (size_t)bytes, &msg, NULL), 0);
        assert_int_equal(msg.kind, i == 0 ? MSG_WELCOME : MSG_ERROR);
        if (i)
            assert_int_equal(msg.error.code, codes[i]);
        msg_free(&msg);
    }
}

static void a_message_beyond_the_limit_never_arrives(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_raw_connect(f);
    size_t bytes = (size_t)LIMIT_MESSAGE_BYTES + 1;
    zmq_msg_t huge;
    assert_int_equal(zmq_msg_init_size(&huge, bytes), 0); /* never touched: the header's length is enough */
    assert_int_equal(zmq_msg_send(&huge, f->raw, 0), (int)bytes);
    node_raw_greet(f, ROLE_LAUNCH, 5); /* behind it, on a new connection */
    node_until(f->loop, f->store.record.hellos, 1);
    assert_int_equal(bus_counters(f->store.bus)->malformed, 0);
    assert_int_equal(bus_counters(f->store.bus)->received, 1);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
}

static void messages_of_another_epoch_are_dropped(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_raw_connect(f);
    struct msg msg = {.kind = MSG_RESUME, .version = MSG_VERSION, .epoch = 5, .id = 1, .resume.sequence = 9};
    node_raw_send_msg(f, &msg); /* before HELLO: refused */
    node_until_counter(f->loop, &bus_counters(f->store.bus)->refused_peers, 1);
    node_raw_greet(f, ROLE_DECODER, 5);
    node_raw_send_msg(f, &msg);
    msg.epoch = 4;
    msg.id = 2;
    node_raw_send_msg(f, &msg);
    msg.epoch = 5;
    msg.id = 3;
    node_raw_send_msg(f, &msg);
    node_until(f->loop, f->store.record.messages, 2);
    assert_int_equal(f->store.record.last.id, 3);
    assert_int_equal(bus_counters(f->store.bus)->dropped_epoch, 1);
    node_raw_greet(f, ROLE_DECODER, 5); /* repeated: welcomed, not told again */
    msg.id = 4;
    node_raw_send_msg(f, &msg);
    node_until(f->loop, f->store.record.messages, 3);
    assert_int_equal(f->store.record.hellos, 1);
    node_raw_greet(f, ROLE_DECODER, 6); /* a new life on the same connection */
    node_until(f->loop, f->store.record.hellos, 2);
    assert_int_equal(f->store.record.gones, 1);
}

static void strangers_are_cut_off(void **state)
{
    struct node_fixture *f = *state;
    if (geteuid() != 0)
        skip();
    const uid_t users[] = {0, 12345};
    pid_t pids[2];
    int go[2];
    assert_int_equal(pipe(go), 0);
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (pids[i] > 0)
            continue;
        char byte;
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        snprintf(address.sun_path, sizeof address.sun_path, "%s", f->path);
        alarm(20);
        if (read(go[0], &byte, 1) != 1 || setresuid(users[i], users[i], users[i]) < 0)
            _exit(1);
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
            _exit(2);
        ssize_t n = recv(fd, &byte, 1, 0); /* ZeroMQ speaks first, unless it hangs up */
        _exit(n == (users[i] == 0 ? 1 : 0) ? 0 : 3);
    }
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    assert_int_equal(chmod(f->dir, 0777), 0); /* the first two locks are open: the third is under test */
    assert_int_equal(chmod(f->path, 0777), 0);
    assert_int_equal(write(go[1], "go", 2), 2);
    for (int i = 0; i < 2; i++) {
        int status;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
    close(go[0]);
    close(go[1]);
}

/* ---- the table of peers ---- */

static void the_table_of_peers_is_bounded(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    void *raws[PEERS_MAX];
    for (int i = 0; i < PEERS_MAX; i++) {
        node_raw_connect(f);
        node_raw_greet(f, ROLE_LAUNCH, (uint64_t)i + 1);
        raws[i] = f->raw;
    }
    f->raw = NULL;
    node_until(f->loop, f->store.record.hellos, PEERS_MAX);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.messages, 1);
    assert_int_equal(f->one.record.last.error.code, -EBUSY);
    assert_int_equal(f->store.record.gones, 0);
    node_until(f->loop, f->one.record.welcomes, 1); /* once somebody should have pinged and has not */
    assert_int_equal(f->store.record.gones, 1);
    for (int i = 0; i < PEERS_MAX; i++)
        zmq_close(raws[i]);
}

static bool is_unreachable(const void *arg)
{
    const struct node *store = arg;
    struct msg msg = {.kind = MSG_GRANT, .grant.sequence = 1};
    return store->record.peer && bus_reply(store->server, store->record.peer, &msg) == -EHOSTUNREACH;
}

static void a_peer_that_left_is_unreachable(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
    bus_free(&f->one.bus);
    assert_true(node_run_until(f->loop, is_unreachable, &f->store));
}

static bool is_report(const void *arg)
{
    return ((const struct node_record *)arg)->last.kind == MSG_REPORT;
}

/* The server is stopped: the queue fills, then each send is refused at once; what waited is dropped as
 * late. */
static void a_flood_is_refused_not_queued_for_ever(void **state)
{
    struct node_fixture *f = *state;
    pid_t pid = node_fork_server(f->path);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
    kill(pid, SIGSTOP);
    static uint32_t ids[2000];
    struct msg msg = {.kind = MSG_PREFIX, .deadline_ns = clock_now_ns() + 1};
    msg.prefix = (struct msg_prefix){.made.kind = ARENA_MADE_FULL, .tokens = {ids, 2000}};
    int sent = 0, refused = 0;
    for (int64_t until_ns = clock_now_ns() + 60 * CLOCK_S; refused < 100 && clock_now_ns() < until_ns;) {
        int64_t begun_ns = clock_now_ns();
        int r = bus_send(f->one.client, &msg);
        assert_true(clock_now_ns() - begun_ns < CLOCK_S);
        assert_true(r == 0 || r == -EAGAIN);
        sent += r == 0;
        refused += r == -EAGAIN;
    }
    assert_int_equal(refused, 100);
    assert_true(sent >= 100 && sent < 5000);
    assert_true(bus_counters(f->one.bus)->dropped_full >= 100);
    kill(pid, SIGCONT);
    struct msg status = {.kind = MSG_STATUS, .id = 1};
    int64_t deadline_ns = clock_now_ns() + 60 * CLOCK_S;
    while (bus_send(f->one.client, &status) == -EAGAIN && clock_now_ns() < deadline_ns)
        ;
    assert_true(node_run_until(f->loop, is_report, &f->one.record));
    char expected[100];
    snprintf(expected, sizeof expected, "{\"late\":%d,\"messages\":0}", sent); /* none was taken for new */
    assert_string_equal(f->one.record.text, expected);
    assert_int_equal(f->one.record.losses, 0);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

/* A peer that does not read: its queue fills, and the server loses it. */
static void who_does_not_read_may_be_lost(void **state)
{
    struct node_fixture *f = *state;
    enum { MOST = 1 << 20 };
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_DECODER), 0);
    node_raw_connect(f);
    node_raw_greet(f, ROLE_LAUNCH, 5);
    node_until(f->loop, f->store.record.hellos, 1);
    static uint32_t ids[256];
    struct bus_peer who = *f->store.record.peer;
    int r = 0, sent = 0;
    for (; r == 0 && sent < MOST; sent++) {
        struct msg msg = {.kind = MSG_TOKEN, .id = 1, .token.tokens = {ids, 256}};
        r = bus_reply(f->store.server, &who, &msg);
    }
    assert_int_equal(r, -EAGAIN);
    bus_lose_peer(f->store.server, &who);
    assert_int_equal(f->store.record.gones, 1);
    bus_lose_peer(f->store.server, &who); /* known no more */
    assert_int_equal(f->store.record.gones, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(forbidden_kinds_close_the_peer, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(late_messages_are_dropped, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(malformed_frames_leave_the_server_alive, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_message_beyond_the_limit_never_arrives, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(messages_of_another_epoch_are_dropped, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(strangers_are_cut_off, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(the_table_of_peers_is_bounded, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_peer_that_left_is_unreachable, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(who_does_not_read_may_be_lost, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_flood_is_refused_not_queued_for_ever, node_setup, node_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
