/* The control plane's part of a decode step: STEP from the decoder to the retriever, TOPK from there to the
 * store, through the real bus, loop threads and sockets of three processes. The retriever answers at once
 * with a prepared selection, so what is measured is messages alone: from the decoder's send to the store's
 * callback, which has the message decoded and checked.
 *
 * Floors printed beside it: the bytes of one TOPK copied once, and sent through a plain Unix socket. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "link/bus.h"
#include "link/flag.h"
#include "link/runtime.h"

enum { SEQUENCES = 32, HEADS = 8, BUDGET = 2048, CHANGED = 410, CONTEXT = 32768, STEPS_MAX = 1100 };

struct stamps { /* of one step */
    int64_t posted, asked, answered, arrived;
};

struct shared {   /* between the three processes */
    int doorbell; /* the store's, heard by the decoder */
    uint32_t steps, warm_up;
    bool full;
    char step_path[RUNTIME_PATH_MAX], topk_path[RUNTIME_PATH_MAX];
    struct stamps stamps[STEPS_MAX];
};

struct side {
    struct shared *shared;
    struct loop *loop;
    struct bus *bus;
    struct bus_server *server;
    struct bus_client *client;
    uint32_t step; /* decoder: the one in flight */
};

static struct bus *make_bus(struct side *side, uint32_t role)
{
    struct msg_hello hello = {.role = role, .version_min = MSG_VERSION_MIN, .pid = (uint32_t)getpid()};
    side->loop = loop_create();
    return side->bus = bus_create(side->loop, &hello);
}

static void must(int r, const struct err *err)
{
    if (r == 0)
        return;
    fprintf(stderr, "bench_hop: %s\n", err->text);
    exit(1);
}

/* ---- store ---- */

static void take_topk(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct side *side = arg;
    (void)peer;
    CHECK(msg->kind == MSG_TOPK && msg->id < STEPS_MAX);
    side->shared->stamps[msg->id].arrived = clock_now_ns();
    doorbell_ring(side->shared->doorbell);
}

static void run_store(struct shared *shared)
{
    struct side side = {.shared = shared};
    struct bus_server_ops ops = {.message = take_topk};
    struct err err;
    must(bus_serve(make_bus(&side, ROLE_KVSTORE), shared->topk_path, ROLE_KVSTORE, &ops, &side, &side.server,
                   &err),
         &err);
    loop_run(side.loop);
}

/* ---- retriever ---- */

static struct msg topk; /* prepared */

static uint32_t *ascending(uint32_t count)
{
    uint32_t *at = mem_alloc(count, sizeof *at);
    for (uint32_t i = 0; i < count; i++)
        at[i] = 16 + (uint32_t)((uint64_t)i * (CONTEXT - 1000) / count);
    return at;
}

static void prepare_topk(bool full)
{
    uint32_t added = full ? BUDGET : CHANGED, removed = full ? 0 : CHANGED;
    uint32_t lists = SEQUENCES * HEADS, each = added + removed;
    struct msg_topk_entry *entries = mem_alloc(SEQUENCES, sizeof *entries);
    uint32_t *counts = mem_alloc(lists * 2, sizeof *counts);
    uint32_t *positions = mem_alloc((size_t)lists * each, sizeof *positions);
    uint32_t *list = ascending(each);
    for (uint32_t i = 0; i < SEQUENCES; i++)
        entries[i] = (struct msg_topk_entry){
            .sequence = i + 1, .index = i, .limit = CONTEXT - 500, .position = CONTEXT, .mass = 0.9f};
    for (uint32_t l = 0; l < lists; l++) {
        counts[2 * l] = added;
        counts[2 * l + 1] = removed;
        memcpy(positions + (size_t)l * each, list, each * sizeof *list);
    }
    mem_free(&list);
    topk = (struct msg){.kind = MSG_TOPK, .version = MSG_VERSION};
    topk.topk = (struct msg_topk){.entries = entries,
                                  .entry_count = SEQUENCES,
                                  .groups = 1,
                                  .selection_heads = HEADS,
                                  .counts = {counts, lists * 2},
                                  .positions = {positions, lists * each}};
}

static void free_topk(void)
{
    mem_free(&topk.topk.entries);
    mem_free(&topk.topk.counts.at);
    mem_free(&topk.topk.positions.at);
}

static void stamp_topk(bool full, uint64_t step)
{
    struct msg_topk_entry *entries = (struct msg_topk_entry *)(uintptr_t)topk.topk.entries;
    topk.id = step;
    for (uint32_t i = 0; i < SEQUENCES; i++)
        entries[i].base_step = (uint32_t)step - (full ? 0 : 1);
}

static void answer_step(void *arg, struct bus_peer *peer, struct msg *msg)
{
    struct side *side = arg;
    (void)peer;
    CHECK(msg->kind == MSG_STEP && msg->id < STEPS_MAX);
    struct stamps *stamps = &side->shared->stamps[msg->id];
    stamps->asked = clock_now_ns();
    stamp_topk(side->shared->full, msg->id);
    CHECK(bus_send(side->client, &topk) == 0);
    stamps->answered = clock_now_ns();
}

static void serve_steps(void *arg, const struct msg_hello *hello, uint64_t epoch)
{
    struct side *side = arg;
    (void)hello;
    (void)epoch;
    struct bus_server_ops ops = {.message = answer_step};
    struct err err;
    must(bus_serve(side->bus, side->shared->step_path, ROLE_RETRIEVER, &ops, side, &side->server, &err),
         &err);
}

static void run_retriever(struct shared *shared)
{
    struct side side = {.shared = shared};
    struct bus_client_ops ops = {.welcome = serve_steps}; /* steps only once the store is there */
    struct err err;
    prepare_topk(shared->full);
    must(bus_connect(make_bus(&side, ROLE_RETRIEVER), shared->topk_path, &ops, &side, &side.client, &err),
         &err);
    loop_run(side.loop);
}

/* ---- decoder ---- */

static void post_step(struct side *side)
{
    static struct msg_step_entry entries[SEQUENCES];
    static uint32_t tokens[SEQUENCES];
    for (uint32_t i = 0; i < SEQUENCES; i++)
        entries[i] = (struct msg_step_entry){.sequence = i + 1,
                                             .index = i,
                                             .position = 30000 + side->step,
                                             .count = 1,
                                             .flags = STEP_ENTRY_SELECT};
    struct msg msg = {.kind = MSG_STEP, .id = side->step, .deadline_ns = clock_now_ns() + 10 * CLOCK_S};
    msg.step = (struct msg_step){.entries = entries, .entry_count = SEQUENCES, .tokens = {tokens, SEQUENCES}};
    side->shared->stamps[side->step].posted = clock_now_ns();
    CHECK(bus_send(side->client, &msg) == 0);
}

static void next_step(void *arg, uint32_t events)
{
    struct side *side = arg;
    (void)events;
    doorbell_clear(side->shared->doorbell);
    if (++side->step == side->shared->steps)
        loop_stop(side->loop, 0);
    else
        post_step(side);
}

static void first_step(void *arg, const struct msg_hello *hello, uint64_t epoch)
{
    (void)hello;
    (void)epoch;
    post_step(arg);
}

static void give_up(void *arg)
{
    fprintf(stderr, "bench_hop: no end within 60 s\n");
    loop_stop(((struct side *)arg)->loop, 1);
}

static int run_decoder(struct shared *shared)
{
    struct side side = {.shared = shared};
    struct bus_client_ops ops = {.welcome = first_step};
    struct err err;
    must(bus_connect(make_bus(&side, ROLE_DECODER), shared->step_path, &ops, &side, &side.client, &err),
         &err);
    CHECK(loop_add_fd(side.loop, shared->doorbell, EPOLLIN, next_step, &side) == 0);
    loop_add_timer(side.loop, 60 * CLOCK_S, give_up, &side);
    int r = loop_run(side.loop);
    bus_free(&side.bus);
    loop_free(&side.loop);
    return r;
}

/* ---- figures ---- */

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

struct spread {
    double median_us, p99_us;
};

static struct spread spread_of(int64_t *ns, uint32_t count)
{
    qsort(ns, count, sizeof *ns, compare);
    return (struct spread){(double)ns[count / 2] / 1e3, (double)ns[count * 99 / 100] / 1e3};
}

static void print_stage(const struct shared *shared, const char *name, size_t from, size_t to)
{
    static int64_t ns[STEPS_MAX];
    uint32_t count = 0;
    for (uint32_t i = shared->warm_up; i < shared->steps; i++) {
        const uint8_t *stamps = (const uint8_t *)&shared->stamps[i];
        int64_t begin, end;
        memcpy(&begin, stamps + from, sizeof begin);
        memcpy(&end, stamps + to, sizeof end);
        ns[count++] = end - begin;
    }
    struct spread s = spread_of(ns, count);
    printf("  %-44s median %8.1f us   p99 %8.1f us\n", name, s.median_us, s.p99_us);
}

/* One byte asks for the next message. */
static void send_when_asked(int fd, const uint8_t *from, size_t bytes)
{
    uint8_t ask;
    while (read(fd, &ask, 1) == 1)
        for (size_t sent = 0; sent < bytes;)
            sent += (size_t)write(fd, from + sent, bytes - sent);
    _exit(0);
}

/* Once through memory, and once through a socket pair from another process. */
static void print_floors(size_t bytes, uint32_t rounds)
{
    static int64_t copies[STEPS_MAX], sends[STEPS_MAX];
    uint8_t *from = mem_alloc(bytes, 1), *to = mem_alloc(bytes, 1);
    memset(from, 1, bytes);
    int pair[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        close(pair[0]);
        send_when_asked(pair[1], from, bytes);
    }
    close(pair[1]);
    for (uint32_t i = 0; i < rounds; i++) {
        int64_t begun = clock_now_ns();
        memcpy(to, from, bytes);
        copies[i] = clock_now_ns() - begun;
        begun = clock_now_ns();
        CHECK(write(pair[0], from, 1) == 1);
        for (size_t got = 0; got < bytes;)
            got += (size_t)read(pair[0], to + got, bytes - got);
        sends[i] = clock_now_ns() - begun;
    }
    close(pair[0]);
    waitpid(pid, NULL, 0);
    struct spread copy = spread_of(copies, rounds), send = spread_of(sends, rounds);
    printf("  %-44s median %8.1f us   p99 %8.1f us\n", "floor: one copy in memory", copy.median_us,
           copy.p99_us);
    printf("  %-44s median %8.1f us   p99 %8.1f us\n", "floor: asked for and read from a Unix socket",
           send.median_us, send.p99_us);
    mem_free(&from);
    mem_free(&to);
}

/* Without any transport. */
static void print_codec(size_t *ret_bytes, uint32_t rounds)
{
    static int64_t writes[STEPS_MAX], reads[STEPS_MAX];
    for (uint32_t i = 0; i < rounds; i++) {
        void *buffer;
        struct msg msg;
        int64_t begun = clock_now_ns();
        msg_encode(&topk, &buffer, ret_bytes);
        writes[i] = clock_now_ns() - begun;
        begun = clock_now_ns();
        CHECK(msg_decode(buffer, *ret_bytes, &msg, NULL) == 0);
        reads[i] = clock_now_ns() - begun;
        msg_free(&msg);
        msg_buffer_free(buffer);
    }
    struct spread write = spread_of(writes, rounds), read = spread_of(reads, rounds);
    printf("  %-44s median %8.1f us   p99 %8.1f us\n", "TOPK: msg_encode alone", write.median_us,
           write.p99_us);
    printf("  %-44s median %8.1f us   p99 %8.1f us\n", "TOPK: msg_decode alone", read.median_us, read.p99_us);
}

static pid_t start(void (*fn)(struct shared *shared), struct shared *shared)
{
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        fn(shared);
        _exit(0);
    }
    return pid;
}

static int run_case(struct shared *shared, bool full)
{
    char dir[RUNTIME_PATH_MAX];
    struct err err;
    shared->full = full;
    must(runtime_make_private(dir, &err), &err);
    must(runtime_path(dir, "retriever.sock", shared->step_path, &err), &err);
    must(runtime_path(dir, "kvstore.sock", shared->topk_path, &err), &err);
    pid_t store = start(run_store, shared), retriever = start(run_retriever, shared);
    int r = run_decoder(shared);
    kill(store, SIGKILL);
    kill(retriever, SIGKILL);
    waitpid(store, NULL, 0);
    waitpid(retriever, NULL, 0);
    runtime_remove(dir);
    if (r)
        return r;
    size_t bytes;
    printf("%s: %d sequences x %d heads x %s, %u steps\n", full ? "full sets" : "differences", SEQUENCES,
           HEADS, full ? "2048 positions" : "(410 added + 410 removed)", shared->steps - shared->warm_up);
    print_stage(shared, "hop: decoder's send to store's callback", offsetof(struct stamps, posted),
                offsetof(struct stamps, arrived));
    print_stage(shared, "STEP: send to retriever's callback", offsetof(struct stamps, posted),
                offsetof(struct stamps, asked));
    print_stage(shared, "TOPK: encoded and queued", offsetof(struct stamps, asked),
                offsetof(struct stamps, answered));
    print_stage(shared, "TOPK: queued to store's callback", offsetof(struct stamps, answered),
                offsetof(struct stamps, arrived));
    prepare_topk(full);
    stamp_topk(full, 1);
    print_codec(&bytes, shared->steps);
    print_floors(bytes, shared->steps);
    printf("  TOPK is %zu bytes\n", bytes);
    free_topk();
    return 0;
}

int main(int argc, char **argv)
{
    bool quick = argc == 2 && strcmp(argv[1], "--quick") == 0;
    if (argc > 1 && !quick) {
        fprintf(stderr, "usage: bench_hop [--quick]\n");
        return 2;
    }
    struct shared *shared =
        mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    setvbuf(stdout, NULL, _IOLBF, 0); /* nothing unwritten when it forks */
    CHECK(doorbell_create(&shared->doorbell) == 0);
    shared->warm_up = quick ? 20 : 100;
    shared->steps = quick ? 120 : STEPS_MAX;
    int r = run_case(shared, false);
    return r ? r : run_case(shared, true);
}
