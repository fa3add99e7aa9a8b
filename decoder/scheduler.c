/* The scheduler; see scheduler.h. Owner: the device thread. State: all sequences in order of arrival.
 *
 * Steps, and the order of a token's hops: scheduler_steps.c. CLOSE follows the last record of a sequence. */
#include "decoder/scheduler.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "decoder/scheduler_private.h"

static void leave_step(void *arg, uint64_t sequence);
static void lose_retriever(void *arg);

struct scheduler *scheduler_create(const struct scheduler_options *options, struct stepper *stepper)
{
    CHECK(options->sequences >= 1 && options->sequences <= LIMIT_SEQUENCES && options->chunk >= 1);
    struct scheduler *s = mem_alloc(1, sizeof *s);
    s->options = *options;
    s->stepper = stepper;
    s->retriever_ready = !options->features;
    s->lost_at_ns = clock_now_ns();
    stepper_on_refused(stepper, leave_step, s);
    stepper_on_lost(stepper, lose_retriever, s);
    stepper_on_meanwhile(stepper, scheduler_send_recorded, s);
    return s;
}

void scheduler_free(struct scheduler **scheduler)
{
    struct scheduler *s = *scheduler;
    if (!s)
        return;
    for (uint32_t i = 0; i < s->count; i++)
        generation_free(&s->all[i]);
    mem_free(scheduler);
}

void scheduler_emit(struct scheduler *s, enum scheduler_target target, const struct msg *msg)
{
    s->options.emit(s->options.arg, target, msg);
}

static struct generation *find(const struct scheduler *s, uint64_t id)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->all[i]->id == id)
            return s->all[i];
    return NULL;
}

static struct generation *find_sequence(const struct scheduler *s, uint64_t sequence)
{
    struct generation *q = find(s, sequence & GENERATION_ID);
    return q && q->sequence == sequence ? q : NULL;
}

/* Says the last word on it and forgets it. `counters` may be NULL. */
static void retire(struct scheduler *s, struct generation *q, const struct kv_counters *counters)
{
    struct msg msg;
    CHECK(q->finish);
    generation_done(q, counters, &msg);
    s->figures.finished[q->finish]++;
    scheduler_emit(s, SCHEDULER_TO_CLIENT, &msg);
    uint32_t i = 0;
    while (s->all[i] != q)
        i++;
    s->count--;
    memmove(s->all + i, s->all + i + 1, (s->count - i) * sizeof *s->all);
    generation_free(&q);
}

void scheduler_generate(struct scheduler *s, uint64_t id, struct msg *msg)
{
    struct generation_limits limits = {s->options.vocab, s->options.context, s->options.list_max};
    struct generation *q = generation_create(id, msg, &limits);
    if (s->count == SCHEDULER_REQUESTS_MAX) {
        struct msg done;
        generation_fail(q, -EBUSY, "found %u requests queued, expected fewer than %u", s->count,
                        SCHEDULER_REQUESTS_MAX);
        generation_done(q, NULL, &done);
        s->figures.finished[q->finish]++;
        scheduler_emit(s, SCHEDULER_TO_CLIENT, &done);
        generation_free(&q);
        return;
    }
    s->all[s->count++] = q;
    if (q->finish)
        retire(s, q, NULL);
}

void scheduler_cancel(struct scheduler *s, uint64_t id)
{
    struct generation *q = find(s, id);
    if (!q)
        return;
    generation_end(q, FINISH_CANCELLED);
    if (q->state == GENERATION_QUEUED)
        retire(s, q, NULL);
}

bool scheduler_computes(const struct generation *q)
{
    return q->state == GENERATION_PREFILL || q->state == GENERATION_DECODE;
}

static uint32_t live(const struct scheduler *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->count; i++)
        n += s->all[i]->state != GENERATION_QUEUED;
    return n;
}

static void send_close(struct scheduler *s, struct generation *q)
{
    struct msg msg;
    q->state = GENERATION_CLOSING;
    q->asked_ns = clock_now_ns();
    generation_close(q, &msg);
    scheduler_emit(s, SCHEDULER_TO_STORE, &msg);
    if (q->sparse && !q->again) {
        generation_close(q, &msg);
        scheduler_emit(s, SCHEDULER_TO_RETRIEVER, &msg);
    }
}

/* The sets of a sequence in a step never come: it leaves. All its tokens are recorded then. Why, an order
 * says that is on its way: the store hears of this later, and so CLOSED is behind it. */
static void leave_step(void *arg, uint64_t sequence)
{
    struct scheduler *s = arg;
    struct generation *q = find_sequence(s, sequence);
    if (q && scheduler_computes(q))
        send_close(s, q);
}

bool scheduler_reads_features(const struct scheduler *s, const struct generation *q)
{
    return s->options.features && q->sparse;
}

static void take_grant(struct scheduler *s, struct generation *q, const struct msg_grant *grant)
{
    if (q->state != GENERATION_OPENING)
        return;
    q->state = GENERATION_PREFILL;
    if (q->again) {
        send_close(s, q);
        return;
    }
    if (grant->index >= LIMIT_SEQUENCES || grant->cached >= q->prompt || grant->cached % BLOCK_TOKENS ||
        (grant->cached > q->kept && scheduler_reads_features(s, q))) {
        generation_fail(q, -EPROTO, "kvstore granted index %u and %u cached of %u tokens, which cannot be",
                        grant->index, grant->cached, q->prompt);
        return;
    }
    q->index = grant->index;
    q->cached = q->done = q->recorded = grant->cached;
    if (!q->granted_at_ns) {
        q->granted_at_ns = clock_now_ns();
        q->reused = grant->cached;
    }
    if (scheduler_reads_features(s, q))
        q->told = grant->cached; /* it has their keys */
    s->figures.cached_tokens += grant->cached;
}

/* The store refused OPEN. Without room it is asked again when another sequence has gone. */
static void take_refusal(struct scheduler *s, struct generation *q, const struct msg_error *error)
{
    struct msg msg;
    if (q->sparse) {
        generation_close(q, &msg);
        scheduler_emit(s, SCHEDULER_TO_RETRIEVER, &msg);
    }
    q->state = GENERATION_QUEUED;
    if (error->code == -ENOSPC && !q->finish && live(s) > 0) {
        s->full = true;
        return;
    }
    generation_fail(q, error->code < 0 ? error->code : -EPROTO, "kvstore: %s", error->text);
    retire(s, q, NULL);
}

/* The store has closed it. `counters` may be NULL. */
static void take_closed(struct scheduler *s, struct generation *q, const struct kv_counters *counters)
{
    s->full = false;
    if (!q->again || q->finish)
        retire(s, q, counters);
    else if (generation_begin_again(q, counters) < 0)
        retire(s, q, NULL);
    else
        s->figures.begun_again++;
}

void scheduler_store(struct scheduler *s, const struct msg *msg)
{
    struct generation *q = find_sequence(s, msg->id);
    if (!q)
        return;
    if (msg->kind == MSG_GRANT) {
        take_grant(s, q, &msg->grant);
    } else if (msg->kind == MSG_CLOSED && q->state == GENERATION_CLOSING) {
        take_closed(s, q, &msg->closed.counters);
    } else if (msg->kind == MSG_ERROR && q->state == GENERATION_OPENING) {
        take_refusal(s, q, &msg->error);
    } else if (msg->kind == MSG_ERROR && q->state == GENERATION_CLOSING) {
        take_closed(s, q, NULL);
    } else if (msg->kind == MSG_ERROR) {
        generation_fail(q, msg->error.code < 0 ? msg->error.code : -EPROTO, "kvstore: %s", msg->error.text);
    }
}

static void open_store(struct scheduler *s, struct generation *q)
{
    struct msg msg;
    q->state = GENERATION_OPENING;
    q->asked_ns = clock_now_ns();
    generation_open_store(q, s->options.head, &msg);
    if (q->begun) /* blocks of its prompt are cached since it was closed; a request may not ask for others' */
        msg.open.flags |= OPEN_REUSE;
    if (scheduler_reads_features(s, q)) {
        /* Of cached positions there are no states: what has keys may be cached. */
        msg.open.flags = q->kept ? OPEN_REUSE : 0;
        msg.open.reuse_max = q->kept;
    }
    scheduler_emit(s, SCHEDULER_TO_STORE, &msg);
}

/* Ends a sequence that only the retriever knows. */
static void give_up(struct scheduler *s, struct generation *q)
{
    struct msg msg;
    generation_close(q, &msg);
    scheduler_emit(s, SCHEDULER_TO_RETRIEVER, &msg);
    q->state = GENERATION_QUEUED;
    retire(s, q, NULL);
}

/* The retriever's answer to OPEN: positions that it has keys of. */
static void take_kept(struct scheduler *s, struct generation *q, const struct msg_grant *grant)
{
    if (q->state != GENERATION_ASKING)
        return;
    if (grant->cached >= q->prompt || grant->cached % BLOCK_TOKENS)
        generation_fail(q, -EPROTO, "retriever granted keys of %u of %u tokens, which cannot be",
                        grant->cached, q->prompt);
    q->kept = grant->cached;
    if (q->finish)
        give_up(s, q);
    else
        open_store(s, q);
}

void scheduler_retriever(struct scheduler *s, const struct msg *msg)
{
    struct generation *q = find_sequence(s, msg->id);
    if (!q || q->state == GENERATION_QUEUED)
        return;
    if (msg->kind == MSG_GRANT) {
        take_kept(s, q, &msg->grant);
    } else if (msg->kind == MSG_ERROR) {
        generation_fail(q, msg->error.code < 0 ? msg->error.code : -EPROTO, "retriever: %s", msg->error.text);
        if (q->state != GENERATION_ASKING)
            return;
        q->state = GENERATION_QUEUED; /* it was not opened */
        retire(s, q, NULL);
    }
}

void scheduler_export(struct scheduler *s, struct export *export)
{
    s->export = export;
    stepper_export(s->stepper, export);
}

/* With the retriever go the keys of all sequences. In a step, those in it leave it by their CLOSE; one that
 * has its last token needs none. */
static void lose_retriever(void *arg)
{
    struct scheduler *s = arg;
    s->retriever_ready = false;
    if (s->served)
        s->lost_at_ns = clock_now_ns();
    s->served = false;
    for (uint32_t i = s->count; i-- > 0;) { /* backwards: who is retired moves those behind */
        struct generation *q = s->all[i];
        bool asking = q->state == GENERATION_ASKING;
        if (asking || (q->sparse && !q->finish && (scheduler_computes(q) || q->state == GENERATION_OPENING)))
            q->again = true;
        if (asking) { /* the store does not know it */
            q->state = GENERATION_CLOSING;
            take_closed(s, q, NULL);
        } else if (q->again && scheduler_computes(q)) {
            send_close(s, q);
        }
    }
}

void scheduler_retriever_ready(struct scheduler *s, int ready)
{
    if (!ready)
        lose_retriever(s);
    s->retriever_ready = ready;
}

/* Neither peer may leave a question open for ever. */
static int check_answers(const struct scheduler *s, struct err *err)
{
    int64_t now = clock_now_ns();
    for (uint32_t i = 0; i < s->count; i++) {
        const struct generation *q = s->all[i];
        if ((q->state == GENERATION_ASKING || q->state == GENERATION_OPENING ||
             q->state == GENERATION_CLOSING) &&
            now - q->asked_ns > SCHEDULER_ANSWER_S * CLOCK_S)
            return err_set(err, -ETIMEDOUT, "%s did not answer %s of sequence %llu within %d s",
                           q->state == GENERATION_ASKING ? "retriever" : "kvstore",
                           q->state == GENERATION_CLOSING ? "CLOSE" : "OPEN", (unsigned long long)q->id,
                           SCHEDULER_ANSWER_S);
    }
    return 0;
}

/* Those that wait for another retriever end when none has come. */
static void check_retriever(struct scheduler *s)
{
    if (s->retriever_ready || clock_now_ns() - s->lost_at_ns < s->options.grace_ns)
        return;
    for (uint32_t i = s->count; i-- > 0;) {
        struct generation *q = s->all[i];
        if (q->state != GENERATION_QUEUED || !q->sparse)
            continue;
        generation_fail(q, -EHOSTUNREACH, "retriever is gone, and no other came within %lld s",
                        (long long)(s->options.grace_ns / CLOCK_S));
        retire(s, q, NULL);
    }
}

static void admit(struct scheduler *s)
{
    uint32_t running = live(s), places = s->options.sequences - running;
    if (running == 0)
        s->full = false; /* nobody is left whose end could say so */
    for (uint32_t i = 0; i < s->count && places > 0 && !s->full; i++) {
        struct generation *q = s->all[i];
        if (q->state != GENERATION_QUEUED || (q->sparse && !s->retriever_ready))
            continue;
        struct msg msg;
        bool prefix = scheduler_reads_features(s, q) && (q->ask.generate.flags & GENERATE_REUSE);
        generation_admit(q, prefix ? GENERATION_ASKING : GENERATION_OPENING);
        q->kept = 0;
        places--;
        if (q->sparse) {
            generation_open_retriever(q, prefix, &msg);
            scheduler_emit(s, SCHEDULER_TO_RETRIEVER, &msg);
        }
        if (!prefix)
            open_store(s, q);
    }
}

/* Records the last tokens of those that ended, sends them, and closes. */
static void close_finished(struct scheduler *s)
{
    scheduler_record(s);
    for (uint32_t i = 0; i < s->count; i++)
        if (scheduler_computes(s->all[i]) && s->all[i]->finish)
            send_close(s, s->all[i]);
}

int scheduler_turn(struct scheduler *s, struct err *err)
{
    int r = check_answers(s, err);
    if (r < 0)
        return r;
    close_finished(s); /* cancelled since */
    stepper_adopt_residents(s->stepper);
    check_retriever(s);
    admit(s);
    s->served |= s->retriever_ready;
    r = scheduler_prefill(s, err);
    if (r == 0)
        r = scheduler_decode(s, err);
    if (r < 0)
        return r;
    close_finished(s);
    for (uint32_t i = 0; i < s->count; i++)
        if (scheduler_computes(s->all[i]))
            return 1;
    return 0;
}

void scheduler_figures(const struct scheduler *s, struct scheduler_figures *ret)
{
    *ret = s->figures;
    for (uint32_t i = 0; i < s->count; i++) {
        ret->running += s->all[i]->state != GENERATION_QUEUED;
        ret->waiting += s->all[i]->state == GENERATION_QUEUED;
    }
}
