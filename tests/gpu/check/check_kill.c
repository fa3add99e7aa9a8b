/* Daemons that are started one by one, killed in turn while they work, and started again: what survives goes
 * on, and neither memory of the card nor descriptors are lost.
 *
 *   check_kill MODEL HEAD [--kills 21] [--device cuda:0] [--retriever-device cuda:0]
 *
 * Killed with requests in work: the decoder and the retriever (the other two survive), and the store (the
 * retriever survives; the decoder, which cannot go on without a store, ends by itself with exit code 1).
 * What is in use after the first kill of each kind is the level for the later ones. At the end the card holds
 * what it held before. Runs on whichever library gpu_load finds; under MPS if that runs. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "compute/gpu.h"
#include "launch/client.h"
#include "link/runtime.h"
#include "proto/control.h"
#include "proto/limits.h"
#include "tests/lib/proc.h"

enum {
    REQUESTS = 4,
    PROMPT = 512,
    CONTEXT = 8192,
    BUDGET = 256,
    TOKENS = 24, /* of each request, so that they are at work */
    SKIPPED = 77
};
#define START_NS    (120 * CLOCK_S)
#define END_NS      (10 * CLOCK_S) /* until a death has been seen by all, and memory is back */
#define TICK_NS     (5 * CLOCK_MS)
#define SLACK_BYTES (UINT64_C(2) << 20) /* what the driver rounds to */

static const char *const programs[CLIENT_PARTS] = {"specontext-kvstore", "specontext-retriever",
                                                   "specontext-decoder"};

struct level { /* after a kill */
    uint64_t bytes;
    int descriptors[CLIENT_PARTS]; /* of survivors */
    bool known;
};

struct world {
    const char *model, *head, *device[CLIENT_PARTS];
    char dir[RUNTIME_PATH_MAX];
    const struct gpu_api *api;
    struct gpu *gpu;
    struct loop *loop;
    struct client *client;
    bool attached;
    struct proc parts[CLIENT_PARTS];
    struct level levels[CLIENT_PARTS]; /* by who was killed */
    bool sent[REQUESTS];
    uint32_t tokens[REQUESTS]; /* since the count was begun */
    int64_t deadline_ns;
    int failures;
};

static void failed(struct world *w, const char *what)
{
    printf("FAILED: %s\n", what);
    w->failures++;
}

/* ---- the card and the processes ------------------------------------------------------------------------ */

static uint64_t used(struct world *w)
{
    uint64_t available = 0;
    w->api->memory_free(w->gpu, &available);
    return w->api->info(w->gpu)->bytes_total - available;
}

static int descriptors(pid_t pid)
{
    char path[32];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    while (dir && readdir(dir))
        count++;
    if (dir)
        closedir(dir);
    return count - 2; /* . and .. */
}

static void start(struct world *w, enum client_part part)
{
    char context[16], sequences[16], budget[16];
    snprintf(context, sizeof context, "%d", CONTEXT);
    snprintf(sequences, sizeof sequences, "%d", REQUESTS);
    snprintf(budget, sizeof budget, "%d", BUDGET);
    const char *argv[24] = {proc_program(programs[part]),
                            "--runtime",
                            w->dir,
                            "--log",
                            "error",
                            "--device",
                            w->device[part],
                            "--sequences",
                            sequences};
    int n = 9;
    if (part == CLIENT_KVSTORE) {
        /* Less than the sequences need: some layers are offloaded. */
        const char *own[] = {"--device-memory", "320M", "--host-memory",    "2G",
                             "--budget",        budget, "--offload-layers", "8"};
        memcpy(argv + n, own, sizeof own);
    } else {
        const char *own[] = {
            "--model", w->model, "--context", context, part == CLIENT_RETRIEVER ? "--head" : NULL, w->head};
        memcpy(argv + n, own, sizeof own);
    }
    proc_start(&w->parts[part], argv, NULL);
}

static const char *last_line(struct proc *p)
{
    const char *text = p->err.text ? p->err.text : "", *at = text + strlen(text);
    while (at > text && at[-1] == '\n')
        at--;
    while (at > text && at[-1] != '\n')
        at--;
    return at;
}

/* ---- requests ------------------------------------------------------------------------------------------ */

static void on_attached(void *arg)
{
    ((struct world *)arg)->attached = true;
}

static void on_lost(void *arg, enum client_part part, const char *why)
{
    (void)arg, (void)part, (void)why; /* it was killed, or followed one that was */
}

static void on_tokens(void *arg, uint32_t request, const struct msg_u32s *tokens)
{
    struct world *w = arg;
    if (request < REQUESTS)
        w->tokens[request] += tokens->count;
}

/* Complete, or refused while the decoder starts: asked for again by the next tick. */
static void on_done(void *arg, uint32_t request, const struct msg_done *done)
{
    struct world *w = arg;
    (void)done;
    if (request < REQUESTS)
        w->sent[request] = false;
}

static const struct client_ops client_ops = {
    .attached = on_attached, .lost = on_lost, .tokens = on_tokens, .done = on_done};

static void send_requests(struct world *w)
{
    static uint32_t ids[PROMPT];
    for (uint32_t i = 0; i < REQUESTS; i++) {
        if (w->sent[i])
            continue;
        for (uint32_t t = 0; t < PROMPT; t++)
            ids[t] = 1000 + (t * 7919 + i * 104729) % 20000;
        struct msg_generate generate = {.flags = GENERATE_IGNORE_EOS,
                                        .max_tokens = CONTEXT - PROMPT,
                                        .selection = SELECTION_CURRENT,
                                        .budget = BUDGET,
                                        .sinks = 4,
                                        .window = 64,
                                        .sampling = {.top_p = 1, .repeat_penalty = 1},
                                        .tokens = {.at = ids, .count = PROMPT}};
        w->sent[i] = client_generate(w->client, i, &generate) == 0;
    }
}

static bool at_work(const struct world *w)
{
    for (int i = 0; i < REQUESTS; i++)
        if (w->tokens[i] < TOKENS)
            return false;
    return true;
}

/* Each tick: what parts say is taken, so that none stands still on its pipe. */
static void on_tick(void *arg)
{
    struct world *w = arg;
    bool ended = false;
    for (int i = 0; i < CLIENT_PARTS; i++)
        if (w->parts[i].pid && w->parts[i].pidfd >= 0) {
            proc_pump(&w->parts[i], 0);
            ended |= w->parts[i].pidfd < 0;
        }
    if (w->attached)
        send_requests(w);
    if (at_work(w))
        loop_stop(w->loop, 0);
    else if (ended || clock_now_ns() > w->deadline_ns)
        loop_stop(w->loop, 1);
}

/* All parts run: requests that are not with the decoder are sent, until all of them are at work. */
static void work(struct world *w, const char *when)
{
    struct err err = {0};
    if (!w->client && client_create(w->loop, w->dir, &client_ops, w, &w->client, &err) < 0)
        return failed(w, err.text);
    memset(w->tokens, 0, sizeof w->tokens);
    w->deadline_ns = clock_now_ns() + START_NS;
    int timer = loop_add_timer(w->loop, TICK_NS, on_tick, w), r = loop_run(w->loop);
    loop_remove_timer(w->loop, timer);
    if (r == 0)
        return;
    failed(w, when);
    for (int i = 0; i < CLIENT_PARTS; i++)
        printf("  %s: %s: %s\n", programs[i], w->parts[i].pidfd < 0 ? "ended" : "runs",
               last_line(&w->parts[i]));
}

static void forget_requests(struct world *w)
{
    client_free(&w->client);
    w->attached = false;
    memset(w->sent, 0, sizeof w->sent);
}

/* ---- kills --------------------------------------------------------------------------------------------- */

static bool is_level(struct world *w, const struct level *level, const struct level *now)
{
    for (int i = 0; i < CLIENT_PARTS; i++)
        if (w->parts[i].pid && now->descriptors[i] > level->descriptors[i])
            return false;
    return now->bytes <= level->bytes + SLACK_BYTES;
}

static void measure(struct world *w, struct level *ret)
{
    ret->bytes = used(w);
    for (int i = 0; i < CLIENT_PARTS; i++)
        ret->descriptors[i] = w->parts[i].pid ? descriptors(w->parts[i].pid) : 0;
}

/* The first time: when nothing has fallen for a second. Later: when the level is reached. */
static void check_level(struct world *w, enum client_part victim)
{
    struct level *level = &w->levels[victim], now, before;
    int64_t end = clock_now_ns() + END_NS, still = clock_now_ns();
    measure(w, &now);
    while (clock_now_ns() < end &&
           (level->known ? !is_level(w, level, &now) : clock_now_ns() - still < CLOCK_S)) {
        before = now;
        for (int i = 0; i < CLIENT_PARTS; i++)
            if (w->parts[i].pid && w->parts[i].pidfd >= 0)
                proc_pump(&w->parts[i], clock_now_ns() + TICK_NS);
        measure(w, &now);
        if (memcmp(now.descriptors, before.descriptors, sizeof now.descriptors) != 0 ||
            now.bytes != before.bytes)
            still = clock_now_ns();
    }
    if (!level->known) {
        *level = now;
        level->known = true;
    }
    printf("killed %s: %" PRIu64 " MiB in use, level %" PRIu64 "; descriptors", programs[victim],
           now.bytes >> 20, level->bytes >> 20);
    for (int i = 0; i < CLIENT_PARTS; i++)
        if (w->parts[i].pid)
            printf(" %s %d (%d)", programs[i], now.descriptors[i], level->descriptors[i]);
    printf("\n");
    if (!is_level(w, level, &now))
        failed(w, "memory or descriptors were not given back");
}

/* Ends a part's record; its process is dead or dies at once. */
static void bury(struct world *w, enum client_part part)
{
    kill(w->parts[part].pid, SIGKILL);
    if (!proc_wait(&w->parts[part], clock_now_ns() + END_NS))
        failed(w, "a killed part did not end");
    proc_free(&w->parts[part]);
}

static void check_alive(struct world *w)
{
    for (int i = 0; i < CLIENT_PARTS; i++)
        if (w->parts[i].pid && w->parts[i].pidfd < 0) {
            printf("  %s: %s\n", programs[i], last_line(&w->parts[i]));
            failed(w, "a part that should survive has ended");
        }
}

static void kill_one(struct world *w, enum client_part victim)
{
    bury(w, victim);
    forget_requests(w);
    if (victim == CLIENT_KVSTORE) {
        if (!proc_wait(&w->parts[CLIENT_DECODER], clock_now_ns() + END_NS))
            failed(w, "the decoder did not end with the part that it needs");
        else if (!proc_exited(&w->parts[CLIENT_DECODER], 1))
            failed(w, "the decoder ended in another way than by exit code 1");
        bury(w, CLIENT_DECODER);
    }
    check_level(w, victim);
    check_alive(w);
    for (int i = 0; i < CLIENT_PARTS; i++)
        if (!w->parts[i].pid)
            start(w, (enum client_part)i);
    work(w, "after a part was started again, requests do not go on");
}

static void end_all(struct world *w, uint64_t before)
{
    forget_requests(w);
    for (int i = CLIENT_PARTS; i-- > 0;) {
        kill(w->parts[i].pid, SIGTERM);
        if (!proc_wait(&w->parts[i], clock_now_ns() + END_NS))
            failed(w, "a part does not end on SIGTERM");
        proc_free(&w->parts[i]);
    }
    uint64_t now = used(w);
    for (int64_t end = clock_now_ns() + END_NS; now > before + SLACK_BYTES && clock_now_ns() < end;)
        now = used(w);
    printf("after all ended: %" PRIu64 " MiB in use, before they began %" PRIu64 "\n", now >> 20,
           before >> 20);
    if (now > before + SLACK_BYTES)
        failed(w, "memory of the card is not given back");
    runtime_remove(w->dir);
}

static int run(struct world *w, int kills)
{
    static const enum client_part order[] = {CLIENT_RETRIEVER, CLIENT_DECODER, CLIENT_KVSTORE};
    struct err err = {0};
    if (runtime_make_private(w->dir, &err) < 0) {
        fprintf(stderr, "check_kill: %s\n", err.text);
        return 1;
    }
    w->loop = loop_create();
    uint64_t before = used(w);
    for (int i = 0; i < CLIENT_PARTS; i++)
        start(w, (enum client_part)i);
    work(w, "requests do not begin");
    printf("all at work: %" PRIu64 " MiB in use, before they began %" PRIu64 "%s\n", used(w) >> 20,
           before >> 20, w->api->info(w->gpu)->mps ? "; MPS" : "; time-sliced");
    for (int i = 0; i < kills && !w->failures; i++)
        kill_one(w, order[i % 3]);
    end_all(w, before);
    loop_free(&w->loop);
    printf("%d kills: %s\n", kills, w->failures ? "FAILED" : "ok");
    return w->failures ? 1 : 0;
}

int main(int argc, char **argv)
{
    struct world w = {0};
    struct err err = {0};
    int kills = 21, r;
    const char *device = "cuda:0", *retriever = NULL;
    if (argc < 3) {
        fprintf(stderr, "usage: check_kill MODEL HEAD [--kills N] [--device D] [--retriever-device D]\n");
        return 2;
    }
    for (int i = 3; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--kills"))
            kills = (int)strtol(argv[i + 1], NULL, 10);
        else if (!strcmp(argv[i], "--device"))
            device = argv[i + 1];
        else if (!strcmp(argv[i], "--retriever-device"))
            retriever = argv[i + 1];
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    w.model = argv[1];
    w.head = argv[2];
    w.device[CLIENT_KVSTORE] = w.device[CLIENT_DECODER] = device;
    w.device[CLIENT_RETRIEVER] = retriever ? retriever : device;
    r = gpu_load(&w.api, &err);
    if (r == 0)
        r = w.api->open(device, &w.gpu, &err);
    if (r < 0) {
        printf("skipped: %s\n", err.text);
        return SKIPPED;
    }
    int code = run(&w, kills);
    w.api->close(&w.gpu);
    return code;
}
