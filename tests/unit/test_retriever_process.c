/* The retriever as a process, between a decoder and a store that this test plays over the real bus. */
#include "tests/unit/retriever_rig.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "base/clock.h"
#include "base/loop.h"
#include "link/bus.h"
#include "link/runtime.h"
#include "retriever/daemon.h"

enum { TOPKS_MAX = 16, DEADLINE_S = 60 };

struct played {
    struct rig *rig;
    char dir[RUNTIME_PATH_MAX];
    char log_path[RUNTIME_PATH_MAX];
    pid_t child;
    int lifeline, notify;
    struct loop *loop;
    struct bus *decoder_bus, *store_bus;
    struct bus_client *decoder;
    struct bus_server *store;
    /* what came */
    bool is_ready, welcomed, retriever_greeted, refuse_retriever, retriever_refused;
    struct msg_hello retriever;
    struct msg_error error; /* the decoder's last */
    uint64_t error_id;
    struct msg_grant grant;
    uint32_t errors, grants, topks, reports;
    struct selector_result topk[TOPKS_MAX];
    json_t *report;
    const bool *flag; /* what is waited for: either */
    const uint32_t *counter;
    uint32_t count;
};

static const struct rig_options rig_options = {
    .groups = 2, .trained_context = 128, .rope_dims = 16, .rms_eps = 1e-5f};

/* ---- waiting ---- */

static void check_awaited(struct played *p)
{
    if ((p->flag && *p->flag) || (p->counter && *p->counter >= p->count))
        loop_stop(p->loop, 0);
}

static void on_deadline(void *arg)
{
    struct played *p = arg;
    loop_stop(p->loop, 1);
}

static void run_loop(struct played *p, const char *what)
{
    int timer = loop_add_timer(p->loop, DEADLINE_S * CLOCK_S, on_deadline, p);
    int late = loop_run(p->loop);
    loop_remove_timer(p->loop, timer);
    p->flag = NULL;
    p->counter = NULL;
    if (late)
        fail_msg("%s: not within %d s", what, DEADLINE_S);
}

static void wait_flag(struct played *p, const bool *flag, const char *what)
{
    p->flag = flag;
    if (!*flag)
        run_loop(p, what);
    p->flag = NULL;
}

static void wait_count(struct played *p, const uint32_t *counter, uint32_t count, const char *what)
{
    p->counter = counter;
    p->count = count;
    if (*counter < count)
        run_loop(p, what);
    p->counter = NULL;
}

/* ---- the peers that are played ---- */

static void on_welcome(void *arg, const struct msg_hello *hello, uint64_t epoch)
{
    struct played *p = arg;
    (void)epoch;
    p->retriever = *hello;
    p->welcomed = true;
    check_awaited(p);
}

static void on_decoder_message(void *arg, struct msg *msg)
{
    struct played *p = arg;
    if (msg->kind == MSG_ERROR) {
        p->error = msg->error;
        p->error_id = msg->id;
        p->errors++;
    } else if (msg->kind == MSG_GRANT) {
        p->grant = msg->grant;
        p->grants++;
    } else if (msg->kind == MSG_REPORT) {
        json_decref(p->report);
        p->report = json_loadb(msg->report.json.data, msg->report.json.bytes, 0, NULL);
        p->reports++;
    }
    check_awaited(p);
}

static int on_store_hello(void *arg, struct bus_peer *peer, const struct msg_hello *hello, struct err *err)
{
    struct played *p = arg;
    (void)peer;
    assert_int_equal(hello->role, ROLE_RETRIEVER);
    assert_true(hello->has_layout);
    p->retriever_refused = p->refuse_retriever;
    check_awaited(p);
    if (p->refuse_retriever)
        return err_set(err, -EXDEV, "groups: found 2, expected 1");
    p->retriever_greeted = true;
    check_awaited(p);
    return 0;
}

static void on_store_message(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct played *p = arg;
    (void)peer;
    assert_int_equal(msg->kind, MSG_TOPK);
    assert_in_range(p->topks, 0, TOPKS_MAX - 1);
    struct selector_result *r = &p->topk[p->topks++];
    const struct msg_topk *t = &msg->topk;
    assert_int_equal(t->entry_count, 1);
    *r = (struct selector_result){
        .step = (uint32_t)msg->id, .groups = t->groups, .heads = t->selection_heads, .entry_count = 1};
    r->entries = mem_alloc(1, sizeof *r->entries);
    r->counts = mem_alloc(t->counts.count, sizeof *r->counts);
    r->positions = mem_alloc(t->positions.count, sizeof *r->positions);
    r->first = mem_alloc(2, sizeof *r->first);
    *r->entries = t->entries[0];
    memcpy(r->counts, t->counts.at, t->counts.count * sizeof *r->counts);
    if (t->positions.count)
        memcpy(r->positions, t->positions.at, t->positions.count * sizeof *r->positions);
    r->first[1] = t->positions.count;
    check_awaited(p);
}

static void on_notify(void *arg, uint32_t events)
{
    struct played *p = arg;
    char text[512];
    (void)events;
    ssize_t n = recv(p->notify, text, sizeof text - 1, MSG_DONTWAIT);
    if (n <= 0)
        return;
    text[n] = 0;
    p->is_ready |= strstr(text, "READY=1") != NULL;
    check_awaited(p);
}

static void start_store(struct played *p)
{
    const struct bus_server_ops ops = {on_store_hello, on_store_message, NULL, NULL};
    const struct msg_hello hello = {.role = ROLE_KVSTORE, .version_min = MSG_VERSION_MIN};
    char path[RUNTIME_PATH_MAX];
    struct err err = {0};
    p->store_bus = bus_create(p->loop, &hello);
    assert_int_equal(runtime_path(p->dir, "kvstore.sock", path, &err), 0);
    if (bus_serve(p->store_bus, path, ROLE_KVSTORE, &ops, p, &p->store, &err) < 0)
        fail_msg("%s", err.text);
}

static void stop_store(struct played *p)
{
    bus_free(&p->store_bus);
    p->retriever_greeted = false;
}

static struct msg_hello decoder_hello(const struct played *p)
{
    struct msg_hello hello = {.role = ROLE_DECODER, .version_min = MSG_VERSION_MIN, .has_layout = true};
    hello.layout = (struct kv_layout){.model = model_fingerprint(p->rig->model),
                                      .layers = RIG_LAYERS,
                                      .row_heads = RIG_KV_HEADS,
                                      .selection_heads = RIG_KV_HEADS,
                                      .groups = 2,
                                      .piece_bytes = 4 * RIG_HEAD_DIM,
                                      .dtype = DTYPE_F16,
                                      .context_max = 256,
                                      .group_first_layer = {0, 1, RIG_LAYERS}};
    return hello;
}

/* A decoder with a new epoch. */
static void start_decoder(struct played *p, const struct msg_hello *hello)
{
    const struct bus_client_ops ops = {on_welcome, on_decoder_message, NULL};
    char path[RUNTIME_PATH_MAX];
    struct err err = {0};
    bus_free(&p->decoder_bus);
    p->welcomed = false;
    p->decoder_bus = bus_create(p->loop, hello);
    assert_int_equal(runtime_path(p->dir, "retriever.sock", path, &err), 0);
    if (bus_connect(p->decoder_bus, path, &ops, p, &p->decoder, &err) < 0)
        fail_msg("%s", err.text);
}

static void attach_decoder(struct played *p)
{
    struct msg_hello hello = decoder_hello(p);
    start_decoder(p, &hello);
    wait_flag(p, &p->welcomed, "WELCOME");
}

static void tell(struct played *p, struct msg msg)
{
    assert_int_equal(bus_send(p->decoder, &msg), 0);
}

static void send_open(struct played *p, uint64_t id)
{
    tell(p, (struct msg){.kind = MSG_OPEN,
                         .id = id,
                         .open = {.sequence = id,
                                  .capacity = 200,
                                  .budget = 40,
                                  .sinks = 4,
                                  .window = 8,
                                  .made = {.kind = 2}}});
}

static void send_step(struct played *p, uint64_t id, uint32_t step, const uint32_t *tokens, uint32_t from,
                      uint32_t to)
{
    struct msg_step_entry entry = {id, 3, from, to - from, STEP_ENTRY_SELECT};
    struct msg_step msg = {&entry, 1, {tokens + from, to - from}, {0}, 0};
    tell(p, (struct msg){.kind = MSG_STEP, .id = step, .step = msg});
}

/* ---- life of the process ---- */

static int listen_notify(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    assert_true(fd >= 0 && bind(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

static void become_retriever(struct played *p, const char *notify_path, const int *lifeline, const char *head)
{
    char fd[16];
    int log = open(p->log_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const char *words[] = {"specontext-retriever",
                           "--runtime",
                           p->dir,
                           "-m",
                           p->rig->model_path,
                           "-H",
                           head,
                           "--threads",
                           "2",
                           "--context",
                           "256",
                           "--log",
                           "debug",
                           "--lifeline",
                           fd};
    char *copies[sizeof words / sizeof *words + 1] = {NULL};
    snprintf(fd, sizeof fd, "%d", lifeline[0]);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        copies[i] = mem_strdup(words[i]);
    close(lifeline[1]);
    dup2(log, STDERR_FILENO);
    setenv("NOTIFY_SOCKET", notify_path, 1);
    int code = retriever_main(sizeof words / sizeof *words, copies);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        mem_free(&copies[i]);
    _exit(code);
}

/* The process is forked before this one has any bus: ZeroMQ does not survive a fork. */
static struct played *start(const char *head)
{
    struct played *p = mem_alloc(1, sizeof *p);
    struct err err = {0};
    char notify_path[RUNTIME_PATH_MAX];
    int lifeline[2];
    p->rig = rig_make(&rig_options);
    if (runtime_make_private(p->dir, &err) < 0)
        fail_msg("%s", err.text);
    assert_int_equal(runtime_path(p->dir, "notify.sock", notify_path, &err), 0);
    snprintf(p->log_path, sizeof p->log_path, "%s/log", p->rig->dir);
    p->notify = listen_notify(notify_path);
    assert_int_equal(runtime_lifeline(lifeline), 0);
    fflush(NULL);
    p->child = fork();
    assert_true(p->child >= 0);
    if (p->child == 0)
        become_retriever(p, notify_path, lifeline, head ? head : p->rig->head_path);
    close(lifeline[0]);
    p->lifeline = lifeline[1];
    p->loop = loop_create();
    assert_int_equal(loop_add_fd(p->loop, p->notify, EPOLLIN, on_notify, p), 0);
    return p;
}

static void read_log(const struct played *p, char *text, size_t bytes)
{
    FILE *f = fopen(p->log_path, "r");
    assert_non_null(f);
    text[fread(text, 1, bytes - 1, f)] = 0;
    fclose(f);
}

/* Waits for the end of the process (bounded by the test's own alarm), which must have this exit code; what it
 * logged must contain `line`. */
static void finish(struct played **played, int code, const char *line)
{
    struct played *p = *played;
    int status = 0;
    char log[8192];
    alarm(DEADLINE_S);
    assert_int_equal(waitpid(p->child, &status, 0), p->child);
    alarm(0);
    read_log(p, log, sizeof log);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != code || !strstr(log, line))
        fail_msg("status %x, expected exit code %d and '%s' in the log:\n%s", status, code, line, log);
    bus_free(&p->decoder_bus);
    bus_free(&p->store_bus);
    loop_remove_fd(p->loop, p->notify);
    loop_free(&p->loop);
    close(p->notify);
    if (p->lifeline >= 0)
        close(p->lifeline);
    for (uint32_t i = 0; i < p->topks; i++)
        selector_result_free(&p->topk[i]);
    json_decref(p->report);
    runtime_remove(p->dir);
    unlink(p->log_path);
    rig_free(&p->rig);
    mem_free(played);
}

static void terminate(struct played **p)
{
    assert_int_equal(kill((*p)->child, SIGTERM), 0);
    finish(p, 0, "end: steps=");
}

/* The same selections, made here. */
static struct selector *twin(const struct played *p)
{
    struct selector *s = rig_selector(p->rig, (struct rig_selector){.context = 256});
    rig_open(s, 1, 200, 40, 4, 8);
    return s;
}

static void must_match(const struct selector_result *found, const struct selector_result *expected)
{
    size_t lists = (size_t)found->groups * found->heads;
    assert_int_equal(found->groups, expected->groups);
    assert_int_equal(found->step, expected->step);
    assert_int_equal(found->entries[0].base_step, expected->entries[0].base_step);
    assert_int_equal(found->entries[0].limit, expected->entries[0].limit);
    assert_int_equal(found->entries[0].position, expected->entries[0].position);
    assert_int_equal(found->entries[0].index, 3);
    assert_memory_equal(&found->entries[0].mass, &expected->entries[0].mass, sizeof(float));
    assert_memory_equal(found->counts, expected->counts, lists * 2 * sizeof *found->counts);
    assert_int_equal(found->first[1], expected->first[1]);
    assert_memory_equal(found->positions, expected->positions, found->first[1] * sizeof *found->positions);
}

/* ---- tests ---- */

static void steps_become_selections(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    wait_flag(p, &p->is_ready, "READY=1");
    start_store(p);
    attach_decoder(p);
    wait_flag(p, &p->retriever_greeted, "HELLO to the store");
    struct selector *s = twin(p);
    struct selector_result expected = {0};
    uint32_t tokens[200];
    rig_tokens(tokens, 200, RIG_VOCAB, 2);
    assert_int_equal(p->retriever.role, ROLE_RETRIEVER);
    assert_true(p->retriever.head == selector_fingerprint(s).lo);
    assert_int_equal(p->retriever.layout.selection_heads, RIG_KV_HEADS);
    assert_int_equal(p->retriever.layout.piece_bytes, 4 * RIG_HEAD_DIM);
    assert_int_equal(p->retriever.layout.group_first_layer[1], 1);
    assert_int_equal(p->retriever.layout.context_max, 256);
    send_open(p, 1);
    for (uint32_t i = 0; i < 5; i++) {
        uint32_t from = i ? 99 + i : 0;
        send_step(p, 1, 10 + i, tokens, from, 100 + i);
        wait_count(p, &p->topks, i + 1, "TOPK");
        rig_step(s, 1, 10 + i, tokens, from, 100 + i, true, &expected);
        expected.entries[0].index = 3;
        must_match(&p->topk[i], &expected);
    }
    struct msg reselect = {.kind = MSG_RESELECT, .id = 14, .reselect = {.sequence = 1}};
    assert_int_equal(bus_reply(p->store, bus_find_role(p->store, ROLE_RETRIEVER), &reselect), 0);
    wait_count(p, &p->topks, 6, "TOPK once more");
    assert_int_equal(selector_repeat(s, 1, 14, &expected), 0);
    expected.entries[0].index = 3;
    must_match(&p->topk[5], &expected);
    send_step(p, 1, 15, tokens, 110, 111); /* a gap */
    wait_count(p, &p->errors, 1, "ERROR");
    assert_int_equal(p->error_id, 1); /* the sequence */
    assert_int_equal(p->error.code, -EINVAL);
    assert_non_null(strstr(p->error.text, "expected the next, 104"));
    send_open(p, 1);
    wait_count(p, &p->errors, 2, "ERROR");
    assert_int_equal(p->error_id, 1);
    assert_int_equal(p->error.code, -EEXIST);
    tell(p, (struct msg){.kind = MSG_CLOSE, .id = 1, .close = {.sequence = 1}});
    tell(p, (struct msg){.kind = MSG_CLOSE, .id = 1, .close = {.sequence = 1}});
    send_step(p, 1, 16, tokens, 104, 105);
    wait_count(p, &p->errors, 3, "ERROR");
    assert_int_equal(p->error.code, -ENOENT);
    selector_result_free(&expected);
    selector_free(&s);
    terminate(&p);
}

/* A head that makes its keys of tokens alone keeps none, and says so when it is asked. */
static void who_asks_for_kept_keys_is_answered(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    uint32_t tokens[150];
    start_store(p);
    attach_decoder(p);
    rig_tokens(tokens, 150, RIG_VOCAB, 3);
    for (uint64_t id = 1; id <= 2; id++) {
        tell(p, (struct msg){.kind = MSG_OPEN,
                             .id = id,
                             .open = {.sequence = id,
                                      .flags = OPEN_REUSE,
                                      .capacity = 200,
                                      .budget = 40,
                                      .sinks = 4,
                                      .window = 8,
                                      .tokens = {tokens, 150}}});
        wait_count(p, &p->grants, (uint32_t)id, "a grant");
        assert_int_equal(p->grant.sequence, id);
        assert_int_equal(p->grant.cached, 0);
        send_step(p, id, (uint32_t)id, tokens, 0, 150);
        wait_count(p, &p->topks, (uint32_t)id, "a selection");
    }
    assert_int_equal(p->errors, 0);
    terminate(&p);
}

static void status_tells_what_is_true(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    uint32_t tokens[200] = {0};
    start_store(p);
    attach_decoder(p);
    send_open(p, 1);
    send_step(p, 1, 10, tokens, 0, 100);
    wait_count(p, &p->topks, 1, "TOPK");
    tell(p, (struct msg){.kind = MSG_STATUS, .id = 5});
    wait_count(p, &p->reports, 1, "REPORT");
    assert_non_null(p->report);
    assert_int_equal(json_integer_value(json_object_get(p->report, "sequences")), 1);
    assert_int_equal(json_integer_value(json_object_get(p->report, "tokens")), 100);
    assert_int_equal(json_integer_value(json_object_get(p->report, "steps")), 1);
    assert_int_equal(json_integer_value(json_object_get(p->report, "key_bytes")), 256 * 2 * RIG_KV_ROWS * 2);
    assert_string_equal(json_string_value(json_object_get(p->report, "key_type")), "f16");
    assert_string_equal(json_string_value(json_object_get(p->report, "part")), "retriever");
    assert_string_equal(json_string_value(json_object_get(p->report, "kvstore")), "ready");
    assert_non_null(strstr(json_string_value(json_object_get(p->report, "rope")), "yarn, factor 2 over 128"));
    assert_true(json_real_value(json_object_get(json_object_get(p->report, "step_ms"), "append")) > 0);
    assert_int_equal(kill(p->child, SIGINT), 0);
    finish(&p, 0, "head stretched: context=256 trained=128 rope=yarn, factor 2 over 128");
}

static void selections_wait_for_the_store(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    uint32_t tokens[200];
    rig_tokens(tokens, 200, RIG_VOCAB, 2);
    attach_decoder(p);
    send_open(p, 1);
    send_step(p, 1, 10, tokens, 0, 100);
    send_step(p, 1, 11, tokens, 100, 101);
    start_store(p);
    wait_count(p, &p->topks, 2, "both TOPK");
    assert_int_equal(p->topk[0].step, 10);
    assert_int_equal(p->topk[1].entries[0].base_step, 10);
    stop_store(p);
    start_store(p);
    wait_flag(p, &p->retriever_greeted, "HELLO to the new store");
    send_step(p, 1, 12, tokens, 101, 102);
    wait_count(p, &p->topks, 3, "TOPK to the new store");
    assert_int_equal(p->topk[2].entries[0].base_step, 12); /* whole: the new store holds nothing */
    terminate(&p);
}

static void another_decoder_begins_from_nothing(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    uint32_t tokens[200] = {0};
    start_store(p);
    attach_decoder(p);
    send_open(p, 1);
    send_step(p, 1, 10, tokens, 0, 100);
    wait_count(p, &p->topks, 1, "TOPK");
    attach_decoder(p);
    send_step(p, 1, 11, tokens, 100, 101);
    wait_count(p, &p->errors, 1, "ERROR");
    assert_int_equal(p->error.code, -ENOENT);
    send_open(p, 1);
    send_step(p, 1, 12, tokens, 0, 50);
    wait_count(p, &p->topks, 2, "TOPK");
    assert_int_equal(p->topk[1].entries[0].base_step, 12);
    assert_int_equal(p->errors, 1);
    terminate(&p);
}

static void a_decoder_that_does_not_fit_is_refused(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    for (uint32_t i = 0; i < 4; i++) {
        static const char *const expected[] = {"model", "groups", "selection_heads", "group_first_layer"};
        struct msg_hello hello = decoder_hello(p);
        if (i == 0)
            hello.layout.model.lo ^= 1;
        if (i == 1)
            layout_set_groups(&hello.layout, 1);
        if (i == 2)
            hello.layout.selection_heads = 4;
        if (i == 3)
            hello.layout.group_first_layer[1] = 2;
        start_decoder(p, &hello);
        wait_count(p, &p->errors, i + 1, "ERROR");
        assert_int_equal(p->error.code, -EXDEV);
        if (strncmp(p->error.text, expected[i], strlen(expected[i])) != 0)
            fail_msg("found '%s', expected %s", p->error.text, expected[i]);
        assert_false(p->welcomed);
    }
    terminate(&p);
}

/* Nobody takes the place of a decoder whose process lives. */
static void a_second_decoder_is_refused(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    struct msg_hello hello = decoder_hello(p);
    hello.pid = (uint32_t)getpid();
    start_decoder(p, &hello);
    wait_flag(p, &p->welcomed, "WELCOME");
    start_decoder(p, &hello);
    wait_count(p, &p->errors, 1, "ERROR");
    assert_int_equal(p->error.code, -EBUSY);
    assert_false(p->welcomed);
    terminate(&p);
}

static void the_store_may_refuse(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    p->refuse_retriever = true;
    start_store(p);
    wait_flag(p, &p->retriever_refused, "HELLO to the store");
    finish(&p, 1, "kvstore refused this retriever: groups: found 2, expected 1");
}

static void drain_ends_it(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    struct msg_hello hello = {.role = ROLE_LAUNCH, .version_min = MSG_VERSION_MIN};
    start_decoder(p, &hello);
    wait_flag(p, &p->welcomed, "WELCOME");
    tell(p, (struct msg){.kind = MSG_DRAIN});
    finish(&p, 0, "asked to drain");
}

static void the_end_of_the_lifeline_ends_it(void **state)
{
    (void)state;
    struct played *p = start(NULL);
    struct stat st;
    char dir[RUNTIME_PATH_MAX];
    memcpy(dir, p->dir, sizeof dir);
    wait_flag(p, &p->is_ready, "READY=1");
    close(p->lifeline);
    p->lifeline = -1;
    finish(&p, 0, "the supervisor is gone");
    assert_int_equal(stat(dir, &st), -1);
}

static void a_missing_head_is_one_clear_line(void **state)
{
    (void)state;
    struct played *p = start("/nonexistent/head");
    finish(&p, 1, "error retriever: /nonexistent/head: open: No such file");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_become_selections),
        cmocka_unit_test(who_asks_for_kept_keys_is_answered),
        cmocka_unit_test(status_tells_what_is_true),
        cmocka_unit_test(selections_wait_for_the_store),
        cmocka_unit_test(another_decoder_begins_from_nothing),
        cmocka_unit_test(a_decoder_that_does_not_fit_is_refused),
        cmocka_unit_test(a_second_decoder_is_refused),
        cmocka_unit_test(the_store_may_refuse),
        cmocka_unit_test(drain_ends_it),
        cmocka_unit_test(the_end_of_the_lifeline_ends_it),
        cmocka_unit_test(a_missing_head_is_one_clear_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
