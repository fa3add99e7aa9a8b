/* The daemon's loop over real sockets: a forked store, a decoder that greets, fetches its descriptors,
 * opens a sequence, does a dense step and dies; a retriever of another model; a supervisor that asks for
 * the arena. */
#include "tests/unit/kvstore_fake.h"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/loop.h"
#include "kvstore/serve.h"
#include "link/bus.h"
#include "link/fdpass.h"
#include "link/runtime.h"

#define PATIENCE (60 * CLOCK_S)

struct client { /* of the bus, with the last message of each kind */
    struct loop *loop;
    struct bus *bus;
    struct bus_client *client;
    bool ready, wants_welcome;
    struct msg_hello welcome;
    struct msg last; /* without its memory */
    uint32_t got;    /* kind of `last`, 0: none since it was asked for */
    char json[65536];
    int64_t deadline_ns;
};

static char dir[RUNTIME_PATH_MAX];
static pid_t store;
static const char *device = "cpu"; /* of the store */
static struct device_gpu *card;    /* this process's view of the same GPU */

static void on_term(void *arg, int signal)
{
    (void)signal;
    loop_stop(arg, 0);
}

static int start_store(void **state)
{
    (void)state;
    struct err err = {0};
    assert_int_equal(runtime_make_private(dir, &err), 0);
    store = fork();
    if (store != 0)
        return store > 0 ? 0 : -1;
    struct store_options options = {
        .daemon = {.runtime = dir, .lifeline = -1}, .device = device, .planner = fake_options()};
    static const int SIGNALS[] = {SIGTERM, 0};
    struct serve *serve = NULL;
    struct loop *loop = loop_create();
    log_init("kvstore", LOG_LEVEL_ERROR);
    if (loop_add_signals(loop, SIGNALS, on_term, loop) < 0 ||
        serve_create(&serve, loop, &options, -1, &err) < 0)
        _exit(9);
    int r = loop_run(loop);
    serve_free(&serve);
    loop_free(&loop);
    _exit(r);
}

static int stop_store(void **state)
{
    (void)state;
    int status = 0;
    kill(store, SIGTERM);
    waitpid(store, &status, 0);
    runtime_remove(dir);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -1;
}

static void on_welcome(void *arg, const struct msg_hello *hello, uint64_t epoch)
{
    (void)epoch;
    struct client *c = arg;
    c->ready = true;
    c->welcome = *hello;
}

static void on_message(void *arg, struct msg *msg)
{
    struct client *c = arg;
    c->got = msg->kind;
    c->last = *msg;
    if (msg->kind == MSG_REPORT)
        snprintf(c->json, sizeof c->json, "%.*s", (int)msg->report.json.bytes,
                 (const char *)msg->report.json.data);
}

static void on_lost(void *arg, const char *why)
{
    (void)why;
    ((struct client *)arg)->ready = false;
}

static void on_tick(void *arg)
{
    struct client *c = arg;
    if (clock_now_ns() > c->deadline_ns)
        loop_stop(c->loop, 1);
}

static int done_when(void *arg)
{
    struct client *c = arg;
    if (c->got || (c->ready && c->wants_welcome))
        loop_stop(c->loop, 0);
    return 0;
}

static void client_open(struct client *c, uint32_t role, const struct kv_layout *layout)
{
    static const struct bus_client_ops OPS = {on_welcome, on_message, on_lost};
    memset(c, 0, sizeof *c);
    struct msg_hello hello = {.role = role, .version_min = MSG_VERSION_MIN, .pid = (uint32_t)getpid()};
    if (layout) {
        hello.has_layout = true;
        hello.layout = *layout;
    }
    snprintf(hello.device, sizeof hello.device, "%s", card ? card->info.uuid : "cpu");
    c->loop = loop_create();
    c->bus = bus_create(c->loop, &hello);
    char path[RUNTIME_PATH_MAX];
    struct err err = {0};
    assert_int_equal(runtime_path(dir, "kvstore.sock", path, &err), 0);
    assert_int_equal(bus_connect(c->bus, path, &OPS, c, &c->client, &err), 0);
    loop_add_timer(c->loop, 20 * CLOCK_MS, on_tick, c);
    loop_before_sleep(c->loop, done_when, c);
}

static void client_close(struct client *c)
{
    bus_free(&c->bus);
    loop_free(&c->loop);
}

/* Until a message came, or, with `kind` 0, a WELCOME. */
static void client_wait(struct client *c, uint32_t kind)
{
    c->wants_welcome = kind == 0;
    c->deadline_ns = clock_now_ns() + PATIENCE;
    assert_int_equal(loop_run(c->loop), 0);
    if (kind)
        assert_int_equal(c->got, kind);
}

static void client_ask(struct client *c, struct msg *msg, uint32_t answer)
{
    c->got = 0;
    assert_int_equal(bus_send(c->client, msg), 0);
    client_wait(c, answer);
    assert_int_equal(c->last.id, msg->id);
}

struct attachment { /* what a decoder fetched */
    struct fake f;
    struct segment device, control;
    void *imported; /* device memory of a GPU */
    int connection, store_bell, decoder_bell;
};

/* The decoder's side of attaching. */
static void fetch(struct client *c, struct attachment *a)
{
    memset(a, 0, sizeof *a);
    struct fake *f = &a->f;
    char path[RUNTIME_PATH_MAX];
    struct err err = {0};
    pid_t pid;
    assert_int_equal(runtime_path(dir, "kvstore.fd", path, &err), 0);
    assert_int_equal(fdpass_connect(path, clock_now_ns() + PATIENCE, &a->connection, &pid, &err), 0);
    assert_int_equal(pid, store);
    struct fdpass_frame ask = {.magic = FDPASS_MAGIC,
                               .kind = FDPASS_ASK,
                               .role = ROLE_DECODER,
                               .epoch = bus_epoch(c->bus)},
                        frame;
    assert_int_equal(fdpass_send(a->connection, &ask, NULL, &err), 0);
    int fds[FDPASS_FDS_MAX];
    if (fdpass_recv(a->connection, clock_now_ns() + PATIENCE, &frame, fds, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(frame.kind, FDPASS_DECODER);
    assert_int_equal(frame.fds, card ? 3 : 4);
    int *fd = card ? fds : fds + 1; /* behind that of device memory: a GPU's comes without a descriptor */
    assert_int_equal(segment_map(fd[0], 0, &a->control, &err), 0);
    f->layout = fake_layout();
    f->h = a->control.at;
    assert_int_equal(control_header_check(f->h, &f->layout, a->control.bytes, &err), 0);
    if (card) {
        assert_int_equal(f->h->device_form, CONTROL_DEVICE_CUDA);
        assert_string_equal(f->h->device_uuid, card->info.uuid);
        if (card->api->ipc_open(card->gpu, f->h->device_handle, &a->imported, &err) < 0)
            fail_msg("%s", err.text);
        f->device = a->imported;
    } else {
        assert_int_equal(segment_map(fds[0], 0, &a->device, &err), 0);
        f->device = a->device.at;
    }
    assert_int_equal(f->h->device_bytes, frame.value[1]);
    assert_int_equal(a->control.bytes, frame.value[2]);
    f->step = f->h->first_step;
    a->store_bell = fd[1];
    a->decoder_bell = fd[2];
}

static void open_msg(struct msg *msg, uint64_t id, const uint32_t *tokens, uint32_t count)
{
    *msg = (struct msg){.kind = MSG_OPEN,
                        .id = 7,
                        .open = {.sequence = id,
                                 .made = {.kind = ARENA_MADE_FULL},
                                 .capacity = 300,
                                 .tokens = {.at = tokens, .count = count}}};
}

/* As the kernel does it when a decoder is killed: the mappings stay for what a test still looks at. */
static void hang_up(struct attachment *a)
{
    close(a->connection);
    close(a->store_bell);
    close(a->decoder_bell);
}

static void unmap(struct attachment *a)
{
    if (a->imported)
        card->api->ipc_close(card->gpu, a->imported);
    else
        segment_close(&a->device);
    segment_close(&a->control);
}

/* A flag that the GPU may raise, which wakes nobody who sleeps: as a decoder's stream would wait for it. */
static void await_flag(struct control_flag *flag, uint32_t step)
{
    int64_t deadline = clock_now_ns() + PATIENCE;
    while (flag_wait(flag, step, clock_now_ns() + CLOCK_MS, 0) < 0)
        if (flag_aborted(flag, step) || clock_now_ns() > deadline)
            return;
}

/* A whole dense step of 100 tokens of sequence 5. */
static void post_prompt(struct attachment *a, uint32_t index)
{
    struct fake *f = &a->f;
    struct step_record *r = control_step_at(f->h, f->step);
    *r = (struct step_record){.step = f->step,
                              .kind = STEP_DENSE,
                              .entries = 1,
                              .tokens = 100,
                              .entry = {{.id = 5, .sequence = index, .count = 100}}};
    flag_raise(control_flag_at(f->h, FLAG_STEP_POSTED), f->step);
    doorbell_ring(a->store_bell);
    await_flag(control_flag_at(f->h, FLAG_TABLES_LATE), f->step);
    for (uint32_t run = 0; run < f->h->runs; run++) {
        await_flag(control_flag_at(f->h, FLAG_ROWS_READY + run), f->step);
        flag_raise(control_flag_at(f->h, FLAG_RUN_CONSUMED + run), f->step);
    }
    flag_raise(control_flag_at(f->h, FLAG_KV_WRITTEN), f->step);
    flag_raise(control_flag_at(f->h, FLAG_STEP_CONSUMED), f->step);
    doorbell_ring(a->store_bell);
}

static void test_decoder_life(void **state)
{
    (void)state;
    struct kv_layout layout = fake_layout();
    struct client c;
    struct attachment a;
    uint32_t tokens[100];
    for (uint32_t i = 0; i < 100; i++)
        tokens[i] = i;
    client_open(&c, ROLE_DECODER, &layout);
    client_wait(&c, 0);
    assert_true(c.ready && c.welcome.has_layout);
    assert_int_equal(layout_fingerprint(&c.welcome.layout).lo, layout_fingerprint(&layout).lo);
    fetch(&c, &a);
    struct fake *f = &a.f;
    struct msg open, close_it = {.kind = MSG_CLOSE, .id = 8, .close = {.sequence = 5}};
    open_msg(&open, 5, tokens, 100);
    client_ask(&c, &open, MSG_GRANT);
    assert_int_equal(c.last.grant.sequence, 5);
    uint32_t index = c.last.grant.index;
    client_ask(&c, &open, MSG_ERROR); /* twice */
    assert_int_equal(c.last.error.code, -EEXIST);

    post_prompt(&a, index);
    assert_int_equal(flag_wait(control_flag_at(f->h, FLAG_COMMITTED), f->step, clock_now_ns() + PATIENCE, 0),
                     0);

    struct msg resume = {.kind = MSG_RESUME, .id = 9, .resume = {.sequence = 5}};
    client_ask(&c, &resume, MSG_RESUMED);
    assert_int_equal(c.last.resumed.committed, 100);
    struct msg status = {.kind = MSG_STATUS, .id = 10};
    client_ask(&c, &status, MSG_REPORT);
    assert_non_null(strstr(c.json, "\"layers_resident\":13"));
    assert_non_null(strstr(c.json, "\"committed\":100"));
    client_ask(&c, &close_it, MSG_CLOSED);
    assert_int_equal(c.last.closed.counters.bytes_written, 100 * 13 * 2 * sizeof(struct fake_piece));
    client_ask(&c, &close_it, MSG_ERROR);
    assert_int_equal(c.last.error.code, -ENOENT);
    hang_up(&a);
    unmap(&a);
    client_close(&c);
}

/* A retriever that greets while a sequence waits for sets: what it sent before it was known is lost. */
static void test_a_retriever_that_comes_is_asked(void **state)
{
    (void)state;
    struct kv_layout layout = fake_layout();
    struct client d, r;
    struct attachment a;
    uint32_t tokens[100] = {0};
    client_open(&d, ROLE_DECODER, &layout);
    client_wait(&d, 0);
    fetch(&d, &a);
    struct msg open;
    open_msg(&open, 5, tokens, 100);
    open.open.made = (struct made){.kind = ARENA_MADE_SPARSE, .budget = 96};
    open.open.budget = 96;
    open.open.sinks = 4;
    open.open.window = 16;
    client_ask(&d, &open, MSG_GRANT);
    client_open(&r, ROLE_RETRIEVER, &layout);
    client_wait(&r, MSG_RESELECT);
    assert_int_equal(r.last.reselect.sequence, 5);
    assert_int_equal(r.last.id, a.f.h->first_step);
    client_close(&r);
    hang_up(&a);
    unmap(&a);
    client_close(&d);
}

static void test_one_decoder_at_a_time_and_death(void **state)
{
    (void)state;
    struct kv_layout layout = fake_layout();
    struct client a, b;
    struct attachment first, second;
    client_open(&a, ROLE_DECODER, &layout);
    client_wait(&a, 0);
    fetch(&a, &first);
    client_open(&b, ROLE_DECODER, &layout);
    client_wait(&b, 0);
    assert_false(b.ready);
    assert_int_equal(b.last.error.code, -EBUSY);
    client_close(&b);
    hang_up(&first); /* dies: every wait of its segment breaks */
    struct control_flag *flag = control_flag_at(first.f.h, FLAG_TABLES_LATE);
    assert_int_equal(flag_wait(flag, 1, clock_now_ns() + PATIENCE, 0), -ECANCELED);
    client_close(&a);
    client_open(&b, ROLE_DECODER, &layout);
    client_wait(&b, 0);
    assert_true(b.ready);
    fetch(&b, &second);
    assert_false(flag_aborted(control_flag_at(second.f.h, FLAG_TABLES_LATE), 1));
    hang_up(&second);
    unmap(&first);
    unmap(&second);
    client_close(&b);
}

static void test_retriever_of_another_model(void **state)
{
    (void)state;
    struct kv_layout layout = fake_layout(), other = layout;
    struct client d, r;
    client_open(&d, ROLE_DECODER, &layout);
    client_wait(&d, 0);
    other.model.lo++;
    client_open(&r, ROLE_RETRIEVER, &other);
    client_wait(&r, 0);
    assert_false(r.ready);
    assert_non_null(strstr(r.last.error.text, "model: found 0000000000000002, expected 0000000000000001"));
    client_close(&r);
    other = layout;
    layout_set_groups(&other, 1);
    client_open(&r, ROLE_RETRIEVER, &other);
    client_wait(&r, 0);
    assert_false(r.ready);
    assert_non_null(
        strstr(r.last.error.text, "4 selection heads in 1 groups, expected 4 selection heads in 2"));
    client_close(&r);
    other = layout;
    other.piece_bytes = 1; /* no matter for sets */
    client_open(&r, ROLE_RETRIEVER, &other);
    client_wait(&r, 0);
    assert_true(r.ready);
    client_close(&d);
    client_open(&d, ROLE_RETRIEVER, &other); /* a second one, while the first one's process lives */
    client_wait(&d, 0);
    assert_false(d.ready);
    assert_int_equal(d.last.error.code, -EBUSY);
    client_close(&d);
    client_close(&r);
}

/* The line names both. */
static void test_decoder_on_another_device(void **state)
{
    (void)state;
    struct kv_layout layout = fake_layout();
    struct client c;
    char uuid[sizeof card->info.uuid];
    memcpy(uuid, card->info.uuid, sizeof uuid);
    card->info.uuid[4] ^= 1;
    client_open(&c, ROLE_DECODER, &layout);
    client_wait(&c, 0);
    assert_false(c.ready);
    assert_int_equal(c.last.error.code, -EINVAL);
    assert_non_null(strstr(c.last.error.text, uuid));
    assert_non_null(strstr(c.last.error.text, card->info.uuid));
    client_close(&c);
    memcpy(card->info.uuid, uuid, sizeof uuid);
}

/* A GPU that breaks ends the daemon. */
static int start_failing_store(void **state)
{
    setenv("SPECONTEXT_FAKEGPU_FAIL", "2", 1);
    int r = start_store(state);
    unsetenv("SPECONTEXT_FAKEGPU_FAIL");
    return r;
}

static void test_broken_gpu_ends_the_store(void **state)
{
    (void)state;
    struct kv_layout layout = fake_layout();
    struct client c;
    client_open(&c, ROLE_DECODER, &layout);
    client_wait(&c, 0);
    struct attachment a;
    fetch(&c, &a);
    uint32_t tokens[100] = {0};
    struct msg open;
    open_msg(&open, 5, tokens, 100);
    client_ask(&c, &open, MSG_GRANT);
    post_prompt(&a, c.last.grant.index);
    int status = 0, exited = 0;
    for (int64_t deadline = clock_now_ns() + 6 * PATIENCE; !exited && clock_now_ns() < deadline;
         sched_yield())
        exited = waitpid(store, &status, WNOHANG) == store;
    assert_true(exited && WIFEXITED(status) && WEXITSTATUS(status) == 1);
    assert_false(flag_reached(control_flag_at(a.f.h, FLAG_COMMITTED), a.f.step));
    hang_up(&a);
    unmap(&a);
    client_close(&c);
}

static int forget_store(void **state)
{
    (void)state;
    runtime_remove(dir);
    return 0;
}

static void test_supervisor_gets_the_arena(void **state)
{
    (void)state;
    char path[RUNTIME_PATH_MAX];
    struct err err = {0};
    int connection, fds[FDPASS_FDS_MAX];
    pid_t pid;
    assert_int_equal(runtime_path(dir, "kvstore.fd", path, &err), 0);
    assert_int_equal(fdpass_connect(path, clock_now_ns() + PATIENCE, &connection, &pid, &err), 0);
    struct fdpass_frame ask = {.magic = FDPASS_MAGIC, .kind = FDPASS_ASK, .role = ROLE_LAUNCH, .epoch = 1},
                        frame;
    assert_int_equal(fdpass_send(connection, &ask, NULL, &err), 0);
    struct kv_layout layout = fake_layout();
    struct client d;
    client_open(&d, ROLE_DECODER, &layout); /* with it, at the latest, the arena is made */
    client_wait(&d, 0);
    assert_int_equal(fdpass_recv(connection, clock_now_ns() + PATIENCE, &frame, fds, &err), 0);
    assert_int_equal(frame.kind, FDPASS_ARENA);
    struct segment arena;
    assert_int_equal(segment_map(fds[0], 0, &arena, &err), 0);
    assert_int_equal(arena.bytes, frame.value[0]);
    assert_int_equal(arena_header_check(arena.at, arena.bytes, &err), 0);
    segment_close(&arena);
    close(connection);
    client_close(&d);
}

static int open_card(void **state)
{
    (void)state;
    char name[32];
    struct err err = {0};
    snprintf(name, sizeof name, "serve%d", (int)getpid());
    fakegpu_use(name); /* the store's processes see the same cards */
    device = "cuda:1";
    return device_gpu_open(&card, device, &err);
}

static int close_card(void **state)
{
    (void)state;
    device_gpu_close(&card);
    return 0;
}

#define BOTH(test) cmocka_unit_test_setup_teardown(test, start_store, stop_store)

int main(void)
{
    const struct CMUnitTest tests[] = {BOTH(test_decoder_life), BOTH(test_one_decoder_at_a_time_and_death),
                                       BOTH(test_retriever_of_another_model),
                                       BOTH(test_a_retriever_that_comes_is_asked),
                                       BOTH(test_supervisor_gets_the_arena)};
    const struct CMUnitTest gpu_tests[] = {
        BOTH(test_decoder_life),
        BOTH(test_one_decoder_at_a_time_and_death),
        BOTH(test_decoder_on_another_device),
        cmocka_unit_test_setup_teardown(test_broken_gpu_ends_the_store, start_failing_store, forget_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL) +
           cmocka_run_group_tests_name("on a GPU", gpu_tests, open_card, close_card);
}
