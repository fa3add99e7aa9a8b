/* The bus: greeting in either order, restarts and deaths, big messages, callbacks, and silence. */
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/clock.h"
#include "link/bus_state.h"
#include "tests/lib/node.h"

/* ---- the states ---- */

static void every_state_meets_every_event(void **state)
{
    (void)state;
    static const int expected[BUS_STATE_COUNT][BUS_EVENT_COUNT] = {
        /*               CONNECTED     WELCOME    REFUSED       SILENCE   EPOCH     FORGOTTEN */
        [BUS_NEW] = {BUS_GREETING, -1, -1, -1, -1, -1},
        [BUS_GREETING] = {-1, BUS_READY, BUS_GREETING, -1, -1, -1},
        [BUS_READY] = {-1, -1, -1, BUS_LOST, BUS_LOST, BUS_LOST},
        [BUS_LOST] = {BUS_GREETING, -1, -1, -1, -1, -1},
    };
    for (int s = 0; s < BUS_STATE_COUNT; s++)
        for (int e = 0; e < BUS_EVENT_COUNT; e++)
            assert_int_equal(bus_state_next((enum bus_state)s, (enum bus_event)e), expected[s][e]);
    assert_string_equal(bus_state_name(BUS_READY), "ready");
}

static void servers_may_only_send_answers(void **state)
{
    (void)state;
    int allowed = 0;
    for (uint32_t role = ROLE_DECODER; role <= ROLE_KVSTORE; role++)
        for (uint32_t kind = 0; kind < 64; kind++)
            allowed += bus_answer_allowed(role, kind);
    assert_int_equal(allowed, 3 * 4 + 5 + 3 + 1);
    assert_false(bus_answer_allowed(ROLE_KVSTORE, MSG_GENERATE));
    assert_true(bus_answer_allowed(ROLE_DECODER, MSG_DONE));
}

/* ---- greeting ---- */

static void the_client_may_come_first(void **state)
{
    struct node_fixture *f = *state;
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    assert_int_equal(bus_client_state(f->one.client), BUS_GREETING);
    int64_t later_ns = clock_now_ns() + 30 * CLOCK_MS;
    assert_true(node_run_until(f->loop, node_is_later, &later_ns));
    struct msg msg = {.kind = MSG_PREFIX, .prefix.made.kind = ARENA_MADE_FULL};
    assert_int_equal(bus_send(f->one.client, &msg), -ENOTCONN);
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_until(f->loop, f->one.record.welcomes, 1);
    assert_int_equal(bus_client_state(f->one.client), BUS_READY);
    assert_int_equal(f->one.record.epoch, bus_epoch(f->store.bus));
    assert_int_equal(f->store.record.peer->epoch, bus_epoch(f->one.bus));
    assert_int_equal(f->store.record.peer->pid, getpid());
}

static void the_server_may_come_first(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    struct stat st;
    assert_int_equal(stat(f->path, &st), 0);
    assert_int_equal(st.st_mode & 0777, 0600);
    /* At once, not with the first repetition; a busy machine may take longer, but not each time. */
    int64_t took_ns = INT64_MAX;
    for (int tries = 0; tries < 10 && took_ns >= BUS_PING_NS; tries++) {
        bus_free(&f->one.bus);
        f->one.record.welcomes = 0;
        int64_t begun_ns = clock_now_ns();
        node_join(&f->one, f->loop, f->path, ROLE_DECODER);
        node_until(f->loop, f->one.record.welcomes, 1);
        took_ns = clock_now_ns() - begun_ns;
    }
    assert_true(took_ns < BUS_PING_NS);
    assert_ptr_equal(bus_find_role(f->store.server, ROLE_DECODER), f->store.record.peer);
    assert_null(bus_find_role(f->store.server, ROLE_RETRIEVER));
    struct msg status = {.kind = MSG_STATUS, .id = 77};
    assert_int_equal(bus_send(f->one.client, &status), 0);
    node_until(f->loop, f->one.record.messages, 1);
    assert_int_equal(f->one.record.last.kind, MSG_REPORT);
    assert_int_equal(f->one.record.last.id, 77);
    assert_string_equal(f->one.record.text, "{\"late\":0,\"messages\":0}");
}

static void a_path_has_one_server(void **state)
{
    struct node_fixture *f = *state;
    struct err err;
    struct node other = {0};
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    assert_int_equal(node_serve(&other, f->loop, f->path, ROLE_KVSTORE), -EADDRINUSE);
    assert_int_equal(
        bus_serve(other.bus, "kvstore.sock", ROLE_KVSTORE, &node_server_ops, &other, &other.server, &err),
        -EINVAL);
    assert_int_equal(bus_connect(other.bus, "kvstore.sock", &node_client_ops, &other, &other.client, &err),
                     -EINVAL);
    bus_free(&other.bus);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER); /* the first one is as before */
    node_until(f->loop, f->one.record.welcomes, 1);
}

static void a_refused_greeting_is_told_and_repeated(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    f->store.record.refuse = 1;
    node_join(&f->one, f->loop, f->path, ROLE_GATEWAY);
    node_until(f->loop, f->one.record.messages, 1);
    assert_int_equal(f->one.record.last.kind, MSG_ERROR);
    assert_int_equal(f->one.record.last.error.code, -EINVAL);
    assert_string_equal(f->one.record.text, "no room for a gateway today");
    assert_int_equal(bus_client_state(f->one.client), BUS_GREETING);
    assert_null(bus_find_role(f->store.server, ROLE_GATEWAY));
    node_until(f->loop, f->one.record.welcomes, 1);
    assert_int_equal(bus_counters(f->store.bus)->refused_peers, 1);
    assert_int_equal(f->store.record.gones, 0);
}

/* ---- restarts ---- */

static void a_new_server_is_noticed(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
    for (int life = 2; life <= 4; life++) {
        bus_free(&f->store.bus);
        assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
        int64_t begun_ns = clock_now_ns();
        node_until(f->loop, f->one.record.welcomes, life);
        assert_true(clock_now_ns() - begun_ns < BUS_SILENCE_NS); /* by its answer, not by silence */
        assert_int_equal(f->one.record.losses, life - 1);
        assert_int_equal(f->one.record.epoch, bus_epoch(f->store.bus));
        struct msg msg = {.kind = MSG_RESUME, .id = 5, .resume.sequence = 1};
        assert_int_equal(bus_send(f->one.client, &msg), 0);
        node_until(f->loop, f->store.record.messages, 1);
    }
}

static void a_killed_server_is_replaced(void **state)
{
    struct node_fixture *f = *state;
    pid_t pid = node_fork_server(f->path);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(access(f->path, F_OK), 0); /* its socket is left, and is taken over */
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_until(f->loop, f->one.record.welcomes, 2);
    assert_int_equal(f->one.record.losses, 1);
}

/* Another instance may have taken the path over before this one ends; the file must stay. */
static void a_server_leaves_the_path_to_who_took_it(void **state)
{
    struct node_fixture *f = *state;
    char moved[RUNTIME_PATH_MAX];
    assert_int_equal(runtime_path(f->dir, "old.sock", moved, NULL), 0);
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    assert_int_equal(rename(f->path, moved), 0);
    assert_int_equal(node_serve(&f->two, f->loop, f->path, ROLE_KVSTORE), 0);
    bus_free(&f->store.bus);
    assert_int_equal(access(f->path, F_OK), 0);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
    bus_free(&f->two.bus); /* its own file goes */
    assert_int_equal(access(f->path, F_OK), -1);
    assert_int_equal(unlink(moved), 0);
}

static void a_client_that_greets_anew_replaces_itself(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
    bus_disconnect(&f->one.client);
    assert_null(f->one.client);
    bus_disconnect(&f->one.client);
    assert_int_equal(bus_connect(f->one.bus, f->path, &node_client_ops, &f->one, &f->one.client, NULL), 0);
    node_until(f->loop, f->one.record.welcomes, 2);
    assert_int_equal(f->store.record.gones, 1);
    struct bus_peer *peer = bus_find_role(f->store.server, ROLE_DECODER);
    assert_non_null(peer);
    bus_lose_peer(f->store.server, peer);
    assert_null(bus_find_role(f->store.server, ROLE_DECODER)); /* there was one only */
    node_until(f->loop, f->one.record.welcomes, 3);            /* forgotten: it notices and greets anew */
    assert_int_equal(f->one.record.losses, 1);
    assert_int_equal(f->store.record.gones, 2);
}

/* A server that takes no messages is taken for lost; if it lives it is greeted anew, as by a new client. */
static void a_client_may_begin_anew(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    bus_client_reset(f->one.client, "too early");
    assert_int_equal(f->one.record.losses, 0);
    node_until(f->loop, f->one.record.welcomes, 1);
    struct msg msg = {.kind = MSG_RESUME, .id = 5, .resume.sequence = 1};
    bus_client_reset(f->one.client, "it takes no messages");
    assert_int_equal(f->one.record.losses, 1);
    assert_int_equal(bus_send(f->one.client, &msg), -ENOTCONN);
    node_until(f->loop, f->one.record.welcomes, 2);
    assert_int_equal(f->store.record.gones, 1);
    assert_int_equal(bus_send(f->one.client, &msg), 0);
    node_until(f->loop, f->store.record.messages, 1);
}

/* ---- load ---- */

/* The buffer of the ids is overwritten as soon as the send returns. */
static void big_messages_arrive_unharmed(void **state)
{
    struct node_fixture *f = *state;
    enum { MESSAGES = 100, IDS = 1 << 18 };
    static uint32_t ids[IDS];
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_DECODER), 0);
    node_join(&f->one, f->loop, f->path, ROLE_GATEWAY);
    node_until(f->loop, f->one.record.welcomes, 1);
    uint64_t sum = 0;
    for (uint32_t i = 1; i <= MESSAGES; i++) {
        for (uint32_t k = 0; k < IDS; k++)
            sum += ids[k] = i * 7 + k;
        struct msg msg = {.kind = MSG_TOKEN, .id = i, .token.tokens = {ids, IDS}};
        assert_int_equal(bus_reply(f->store.server, f->store.record.peer, &msg), 0);
        memset(ids, 0xff, sizeof ids);
        if (i % 10 == 0)
            node_until(f->loop, f->one.record.messages, (int)i);
    }
    assert_int_equal(f->one.record.sum, sum);
    assert_int_equal(f->one.record.last.id, MESSAGES);
    /* An answer of a kind that only stores give is not handed on. */
    struct msg msg = {.kind = MSG_GRANT, .grant.sequence = 1};
    assert_int_equal(bus_reply(f->store.server, f->store.record.peer, &msg), 0);
    node_until_counter(f->loop, &bus_counters(f->one.bus)->malformed, 1);
    assert_int_equal(f->one.record.messages, MESSAGES);
}

/* ---- callbacks ---- */

static void clients_may_disconnect_within_any_callback(void **state)
{
    struct node_fixture *f = *state;
    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_join(&f->one, f->loop, f->path, ROLE_DECODER);
    f->one.record.disconnect = &f->one.client;
    node_until(f->loop, f->one.record.welcomes, 1);
    assert_null(f->one.client);

    node_join(&f->two, f->loop, f->path, ROLE_DECODER);
    node_until(f->loop, f->two.record.welcomes, 1);
    f->two.record.disconnect = &f->two.client;
    struct msg status = {.kind = MSG_STATUS};
    for (int i = 0; i < 3; i++)
        assert_int_equal(bus_send(f->two.client, &status), 0);
    node_until(f->loop, f->two.record.messages, 1);
    assert_null(f->two.client);

    f->two.record = (struct node_record){0};
    assert_int_equal(bus_connect(f->two.bus, f->path, &node_client_ops, &f->two, &f->two.client, NULL), 0);
    node_until(f->loop, f->two.record.welcomes, 1);
    f->two.record.disconnect = &f->two.client;
    bus_lose_peer(f->store.server, f->store.record.peer);
    node_until(f->loop, f->two.record.losses, 1);
    assert_null(f->two.client);
    assert_int_equal(f->two.record.messages, 0);
}

/* ---- silence: one wait of a little more than BUS_SILENCE_NS for all of it ---- */

struct sender {
    struct node *node;
    int sent;
};

/* Only ever sends, as a retriever does: no answer comes but to the bus's own pings. */
static void send_topk(void *arg)
{
    struct sender *sender = arg;
    const struct msg_topk_entry entry = {.sequence = 1, .position = 1};
    const uint32_t counts[2] = {0};
    struct msg msg = {.kind = MSG_TOPK, .id = 1};
    msg.topk = (struct msg_topk){
        .entries = &entry, .entry_count = 1, .groups = 1, .selection_heads = 1, .counts = {counts, 2}};
    if (bus_send(sender->node->client, &msg) == 0)
        sender->sent++;
}

static void silence_is_death_but_only_of_the_silent(void **state)
{
    struct node_fixture *f = *state;
    char other[RUNTIME_PATH_MAX], third[RUNTIME_PATH_MAX];
    assert_int_equal(runtime_path(f->dir, "retriever.sock", other, NULL), 0);
    assert_int_equal(runtime_path(f->dir, "decoder.sock", third, NULL), 0);
    pid_t pid = node_fork_server(other);
    struct loop *stalled = loop_create(); /* a process that is stopped itself: its loop does not run */
    static struct node stalled_store, stalled_client;
    assert_int_equal(node_serve(&stalled_store, stalled, third, ROLE_KVSTORE), 0);
    node_join(&stalled_client, stalled, third, ROLE_DECODER);
    node_until(stalled, stalled_client.record.welcomes, 1);

    assert_int_equal(node_serve(&f->store, f->loop, f->path, ROLE_KVSTORE), 0);
    node_raw_connect(f);
    node_raw_greet(f, ROLE_DECODER, 5); /* and not a word more */
    node_join(&f->one, f->loop, f->path, ROLE_RETRIEVER);
    node_join(&f->two, f->loop, other, ROLE_DECODER);
    node_until(f->loop, f->one.record.welcomes, 1);
    node_until(f->loop, f->two.record.welcomes, 1);
    node_until(f->loop, f->store.record.hellos, 2);
    kill(pid, SIGSTOP);
    struct sender sender = {.node = &f->one};
    int timer = loop_add_timer(f->loop, 100 * CLOCK_MS, send_topk, &sender);
    int64_t begun_ns = clock_now_ns(), end_ns = begun_ns + BUS_SILENCE_NS + 700 * CLOCK_MS;
    node_until(f->loop, f->two.record.losses, 1);
    assert_true(clock_now_ns() - begun_ns > BUS_SILENCE_NS - BUS_PING_NS);
    assert_true(clock_now_ns() - begun_ns < 2 * BUS_SILENCE_NS); /* a late tick is not counted as silence */
    node_until(f->loop, f->store.record.gones, 1);
    assert_true(node_run_until(f->loop, node_is_later, &end_ns));

    assert_int_equal(f->store.record.gones, 1); /* the raw one */
    assert_null(bus_find_role(f->store.server, ROLE_DECODER));
    assert_non_null(bus_find_role(f->store.server, ROLE_RETRIEVER));
    assert_int_equal(f->one.record.losses, 0);
    assert_true(sender.sent > 4);
    loop_remove_timer(f->loop, timer);
    kill(pid, SIGCONT);
    node_until(f->loop, f->two.record.welcomes, 2); /* hung, not dead: greeted anew */

    int64_t later_ns = clock_now_ns() + BUS_PING_NS;
    assert_true(node_run_until(stalled, node_is_later, &later_ns));
    assert_int_equal(stalled_client.record.losses, 0); /* that we did not run is not the others' silence */
    assert_int_equal(stalled_store.record.gones, 0);
    bus_free(&stalled_client.bus);
    bus_free(&stalled_store.bus);
    loop_free(&stalled);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_state_meets_every_event),
        cmocka_unit_test(servers_may_only_send_answers),
        cmocka_unit_test_setup_teardown(the_client_may_come_first, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(the_server_may_come_first, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_path_has_one_server, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_refused_greeting_is_told_and_repeated, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_new_server_is_noticed, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_killed_server_is_replaced, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_server_leaves_the_path_to_who_took_it, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_client_that_greets_anew_replaces_itself, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(a_client_may_begin_anew, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(big_messages_arrive_unharmed, node_setup, node_teardown),
        cmocka_unit_test_setup_teardown(clients_may_disconnect_within_any_callback, node_setup,
                                        node_teardown),
        cmocka_unit_test_setup_teardown(silence_is_death_but_only_of_the_silent, node_setup, node_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
