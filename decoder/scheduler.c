/* The scheduler; see scheduler.h. Owner: the device thread. State: all sequences in order of arrival.
 *
 * Orders between a token's hops: it is sampled, stands in a posted record (the next step's, or a RECORD step
 * for a last one), and only then goes to the client: while that step is computed, or once it has failed.
 * CLOSE follows the last record of a sequence. */
#include "decoder/scheduler.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "decoder/generation.h"

struct scheduler {
    struct scheduler_options options;
    struct stepper *stepper;
    struct export *export;                          /* NULL: the head reads no hidden states */
    struct generation *all[SCHEDULER_REQUESTS_MAX]; /* in order of arrival */
    uint32_t count;
    bool retriever_ready;
    int64_t lost_at_ns; /* when it was not, last */
    bool full;          /* the store had no room: nobody is admitted until a sequence is closed */
    struct scheduler_figures figures;

    struct generation *members[LIMIT_SEQUENCES]; /* of the step being made */
    struct stepper_part parts[LIMIT_SEQUENCES];
    struct stepper_verdict verdicts[LIMIT_SEQUENCES];
    struct msg told; /* a STEP that waits until the step is computed; kind 0: none */
    uint32_t posted; /* members of the step that runs */
};

static void leave_step(void *arg, uint64_t sequence);
static void lose_retriever(void *arg);
static void send_recorded(void *arg);

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
    stepper_on_meanwhile(stepper, send_recorded, s);
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

static void emit(struct scheduler *s, enum scheduler_target target, const struct msg *msg)
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
    emit(s, SCHEDULER_TO_CLIENT, &msg);
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
        emit(s, SCHEDULER_TO_CLIENT, &done);
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

static bool computes(const struct generation *q)
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
    emit(s, SCHEDULER_TO_STORE, &msg);
    if (q->sparse && !q->again) {
        generation_close(q, &msg);
        emit(s, SCHEDULER_TO_RETRIEVER, &msg);
    }
}

/* The sets of a sequence in a step never come: it leaves. All its tokens are recorded then. Why, an order
 * says that is on its way: the store hears of this later, and so CLOSED is behind it. */
static void leave_step(void *arg, uint64_t sequence)
{
    struct scheduler *s = arg;
    struct generation *q = find_sequence(s, sequence);
    if (q && computes(q))
        send_close(s, q);
}

/* Whether the retriever needs the sequence's hidden states. */
static bool reads_features(const struct scheduler *s, const struct generation *q)
{
    return s->options.features && q->sparse;
}

static void take_grant(struct scheduler *s, struct generation *q, const struct msg_grant *grant)
{
    if (q->state != GENERATION_OPENING)
        return;
    if (!q->granted_at_ns)
        q->granted_at_ns = clock_now_ns();
    q->state = GENERATION_PREFILL;
    if (q->again) {
        send_close(s, q);
        return;
    }
    if (grant->index >= LIMIT_SEQUENCES || grant->cached >= q->prompt || grant->cached % BLOCK_TOKENS ||
        (grant->cached > q->kept && reads_features(s, q))) {
        generation_fail(q, -EPROTO, "kvstore granted index %u and %u cached of %u tokens, which cannot be",
                        grant->index, grant->cached, q->prompt);
        return;
    }
    q->index = grant->index;
    q->cached = q->done = q->recorded = grant->cached;
    if (reads_features(s, q))
        q->told = grant->cached; /* it has their keys */
    s->figures.cached_tokens += grant->cached;
}

/* The store refused OPEN. Without room it is asked again when another sequence has gone. */
static void take_refusal(struct scheduler *s, struct generation *q, const struct msg_error *error)
{
    struct msg msg;
    if (q->sparse) {
        generation_close(q, &msg);
        emit(s, SCHEDULER_TO_RETRIEVER, &msg);
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
    if (reads_features(s, q)) { /* of cached positions there are no states: what has keys may be cached */
        msg.open.flags = q->kept ? OPEN_REUSE : 0;
        msg.open.reuse_max = q->kept;
    }
    emit(s, SCHEDULER_TO_STORE, &msg);
}

/* Ends a sequence that only the retriever knows. */
static void give_up(struct scheduler *s, struct generation *q)
{
    struct msg msg;
    generation_close(q, &msg);
    emit(s, SCHEDULER_TO_RETRIEVER, &msg);
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
    s->lost_at_ns = clock_now_ns();
    for (uint32_t i = 0; i < s->count; i++) {
        struct generation *q = s->all[i];
        if (q->state == GENERATION_ASKING) { /* only it was asked */
            q->state = GENERATION_QUEUED;
            if (q->finish) {
                retire(s, q, NULL);
                i--; /* the next one moved up */
            }
        } else if (q->sparse && !q->finish && (computes(q) || q->state == GENERATION_OPENING)) {
            q->again = true;
            if (computes(q))
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

/* Whether a retriever is there, or still waited for; if not the sequence has ended. */
static bool awaits_retriever(struct scheduler *s, struct generation *q)
{
    if (!q->sparse || s->retriever_ready || clock_now_ns() - s->lost_at_ns < s->options.grace_ns)
        return true;
    generation_fail(q, -EHOSTUNREACH, "retriever is gone, and no other came within %lld s",
                    (long long)(s->options.grace_ns / CLOCK_S));
    retire(s, q, NULL);
    return false;
}

static void admit(struct scheduler *s)
{
    uint32_t running = live(s), places = s->options.sequences - running;
    if (running == 0)
        s->full = false; /* nobody is left whose end could say so */
    for (uint32_t i = 0; i < s->count && places > 0 && !s->full; i++) {
        struct generation *q = s->all[i];
        if (q->state != GENERATION_QUEUED)
            continue;
        if (!awaits_retriever(s, q)) {
            i--; /* the next one moved up */
            continue;
        }
        if (q->sparse && !s->retriever_ready)
            continue;
        struct msg msg;
        bool prefix = reads_features(s, q) && (q->ask.generate.flags & GENERATE_REUSE);
        generation_admit(q, prefix ? GENERATION_ASKING : GENERATION_OPENING);
        q->kept = 0;
        places--;
        if (q->sparse) {
            generation_open_retriever(q, prefix, &msg);
            emit(s, SCHEDULER_TO_RETRIEVER, &msg);
        }
        if (!prefix)
            open_store(s, q);
    }
}

/* Row of the hidden states of the position before `first`, of its own for the first token that is told. Names
 * it and what follows, up to `count` tokens' worth, to the retriever. */
static uint32_t name_rows(struct scheduler *s, const struct generation *q, uint32_t first, uint32_t count)
{
    bool begins = first == q->cached;
    uint32_t before = begins ? first : first - 1, rows = count - begins;
    CHECK(before >= q->feature_position && before + rows <= q->done);
    uint32_t row = q->feature_row + before - q->feature_position;
    export_named(s->export, row, rows);
    return row;
}

/* A STEP message with room for entries, tokens and rows. */
static void begin_step(struct scheduler *s, uint32_t step, uint32_t entries, uint32_t tokens, struct msg *ret)
{
    size_t rows = s->options.features ? entries : 0;
    *ret = (struct msg){.kind = MSG_STEP, .id = step};
    struct msg_step_entry *at = mem_alloc(1, entries * sizeof *at + (tokens + rows) * sizeof(uint32_t));
    uint32_t *ids = (uint32_t *)(at + entries);
    ret->memory = at;
    ret->step = (struct msg_step){.entries = at,
                                  .entry_count = entries,
                                  .tokens = {ids, tokens},
                                  .features = {ids + tokens, (uint32_t)rows}};
    if (rows)
        ret->step.reading = export_message(s->export);
}

static void put_entry(struct scheduler *s, struct msg *msg, uint32_t i, const struct msg_step_entry *entry,
                      const struct generation *q)
{
    ((struct msg_step_entry *)msg->memory)[i] = *entry;
    if (msg->step.features.count)
        ((uint32_t *)msg->step.features.at)[i] = name_rows(s, q, entry->position, entry->count);
}

/* Tells the retriever the tokens of one sequence up to `end`, in messages of at most a record's length. Only
 * the last asks for a selection, if any does. */
static void tell_retriever(struct scheduler *s, struct generation *q, uint32_t step, uint32_t end,
                           bool select)
{
    while (q->told < end) {
        uint32_t n = end - q->told < LIMIT_STEP_TOKENS ? end - q->told : LIMIT_STEP_TOKENS;
        uint32_t flags = select && q->told + n == end ? STEP_ENTRY_SELECT : 0;
        struct msg msg;
        begin_step(s, step, 1, n, &msg);
        put_entry(s, &msg, 0, &(struct msg_step_entry){q->sequence, q->index, q->told, n, flags}, q);
        memcpy((uint32_t *)msg.step.tokens.at, q->tokens + q->told, n * sizeof(uint32_t));
        q->told += n;
        emit(s, SCHEDULER_TO_RETRIEVER, &msg);
    }
}

/* The same for one new token of each member, in one message: at once where this step waits for the sets, else
 * while it is computed. Names rows of the steps before. */
static void tell_retriever_batch(struct scheduler *s, uint32_t count, enum selection_mode mode)
{
    struct msg msg;
    begin_step(s, stepper_next(s->stepper), count, count, &msg);
    for (uint32_t i = 0; i < count; i++) {
        struct generation *q = s->members[i];
        CHECK(q->told == q->done);
        put_entry(s, &msg, i, &(struct msg_step_entry){q->sequence, q->index, q->done, 1, STEP_ENTRY_SELECT},
                  q);
        ((uint32_t *)msg.step.tokens.at)[i] = q->tokens[q->told++];
    }
    if (mode != SELECTION_PREVIOUS)
        emit(s, SCHEDULER_TO_RETRIEVER, &msg);
    else
        s->told = msg;
}

/* Of a head that reads hidden states, what of a prompt can be told behind a chunk that ends at `end`: the
 * token at `end` needs those of the one before it. Its `step` is the one that is done: the next one's
 * selections may follow from it. */
static void tell_behind(struct scheduler *s, struct generation *q, uint32_t end)
{
    uint32_t known = end < q->prompt ? end + 1 : q->prompt;
    bool select = known == q->prompt && q->ask.generate.selection != SELECTION_CURRENT;
    tell_retriever(s, q, stepper_next(s->stepper) - 1, known, select);
}

static void take_token(struct scheduler *s, struct generation *q, int32_t token, int64_t now_ns)
{
    if (token < 0 || (uint32_t)token >= s->options.vocab) {
        s->figures.non_finite++;
        generation_fail(q, -EDOM, "non-finite logits at position %u", q->count - 1);
        return;
    }
    s->figures.generated_tokens++;
    generation_take(q, (uint32_t)token, s->options.eos, now_ns);
}

static void send_tokens(struct scheduler *s, struct generation *q)
{
    struct msg msg;
    generation_tokens(q, &msg);
    emit(s, SCHEDULER_TO_CLIENT, &msg);
}

/* What the record of the step that runs holds goes to the clients while that is computed, and to the
 * retriever what no table of it waits for: before it is queued a GPU would wait for it. */
static void send_recorded(void *arg)
{
    struct scheduler *s = arg;
    if (s->told.kind)
        emit(s, SCHEDULER_TO_RETRIEVER, &s->told);
    s->told = (struct msg){0};
    for (uint32_t i = 0; i < s->posted; i++)
        if (s->members[i]->recorded > s->members[i]->prompt + s->members[i]->sent)
            send_tokens(s, s->members[i]);
    if (s->options.meanwhile)
        s->options.meanwhile(s->options.arg);
}

/* Members' parts have been laid out. Posts, computes, tells the clients meanwhile what is recorded now,
 * samples. */
static int compute(struct scheduler *s, const struct stepper_spec *spec, struct err *err)
{
    stepper_post(s->stepper, spec);
    for (uint32_t i = 0; i < spec->count; i++)
        s->members[i]->recorded = spec->parts[i].position + spec->parts[i].count;
    s->posted = spec->count;
    int r = stepper_run(s->stepper, spec, s->verdicts, err);
    if (r < 0)
        return r;
    int64_t now_ns = clock_now_ns();
    for (uint32_t i = 0; i < spec->count; i++) {
        struct generation *q = s->members[i];
        if (!computes(q)) /* it left */
            continue;
        if (s->verdicts[i].status < 0) {
            generation_fail(q, s->verdicts[i].status, "position %u: %s: %s", spec->parts[i].position,
                            s->verdicts[i].why, strerror(-s->verdicts[i].status));
        } else {
            q->done += spec->parts[i].count;
            if (spec->parts[i].sampling && q->done == q->count)
                take_token(s, q, s->verdicts[i].token, now_ns);
        }
    }
    return 0;
}

static void add_member(struct scheduler *s, uint32_t at, struct generation *q, uint32_t count, bool sampled)
{
    s->members[at] = q;
    s->parts[at] = (struct stepper_part){.id = q->sequence,
                                         .index = q->index,
                                         .position = q->done,
                                         .count = count,
                                         .history = q->tokens,
                                         .sampling = sampled ? &q->sampling : NULL,
                                         .features = EXPORT_NONE};
    if (!reads_features(s, q))
        return;
    q->feature_row = s->parts[at].features = q->state == GENERATION_PREFILL
                                                 ? export_chunk(s->export, count)
                                                 : export_step(s->export, q->index, q->done);
    q->feature_position = q->done;
}

/* Whether the sequence may touch positions [0, end) in a dense step; if not it is ended. */
static bool fits_staging(struct scheduler *s, struct generation *q, uint32_t end)
{
    uint32_t limit = stepper_dense_limit(s->stepper, 1);
    if (end <= limit)
        return true;
    generation_fail(q, -ENOSPC,
                    "dense attention over %u positions: expected at most %u while layers are offloaded", end,
                    limit);
    return false;
}

static int prefill(struct scheduler *s, struct generation *q, struct err *err)
{
    uint32_t n = q->prompt - q->done < s->options.chunk ? q->prompt - q->done : s->options.chunk;
    uint32_t end = q->done + n;
    bool last = end == q->prompt;
    if (!fits_staging(s, q, end))
        return 0;
    bool behind = reads_features(s, q);
    if (q->sparse && !behind)
        tell_retriever(s, q, stepper_next(s->stepper), end,
                       last && q->ask.generate.selection != SELECTION_CURRENT);
    add_member(s, 0, q, n, last);
    struct stepper_spec spec = {STEP_DENSE, SELECTION_CURRENT, 1, s->parts, 1};
    int r = compute(s, &spec, err);
    if (r < 0 || q->done < end)
        return r;
    if (behind)
        tell_behind(s, q, end);
    struct msg msg;
    s->figures.prompt_tokens += n;
    if (q->done > q->shown) {
        generation_progress(q, &msg);
        emit(s, SCHEDULER_TO_CLIENT, &msg);
    }
    if (last)
        q->state = GENERATION_DECODE;
    return 0;
}

static int prefill_one(struct scheduler *s, struct err *err)
{
    for (uint32_t i = 0; i < s->count; i++)
        if (s->all[i]->state == GENERATION_PREFILL && !s->all[i]->finish)
            return prefill(s, s->all[i], err);
    return 0;
}

static int decode_sparse(struct scheduler *s, enum selection_mode mode, struct err *err)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        struct generation *q = s->all[i];
        if (q->state == GENERATION_DECODE && !q->finish && q->sparse && q->ask.generate.selection == mode)
            s->members[n++] = q;
    }
    if (n == 0)
        return 0;
    tell_retriever_batch(s, n, mode);
    for (uint32_t i = 0; i < n; i++)
        add_member(s, i, s->members[i], 1, true);
    struct stepper_spec spec = {STEP_SPARSE, mode, 0, s->parts, n};
    return compute(s, &spec, err);
}

/* In batches that the staging buffer holds. */
static int decode_full(struct scheduler *s, struct err *err)
{
    uint32_t i = 0;
    do {
        uint32_t n = 0;
        uint64_t positions = 0;
        for (; i < s->count; i++) {
            struct generation *q = s->all[i];
            if (q->state != GENERATION_DECODE || q->finish || q->sparse || !fits_staging(s, q, q->done + 1))
                continue;
            positions += (q->done / BLOCK_TOKENS + 1) * BLOCK_TOKENS;
            if (positions > stepper_dense_limit(s->stepper, 0) && n > 0)
                break;
            add_member(s, n++, q, 1, true);
        }
        struct stepper_spec spec = {STEP_DENSE, SELECTION_CURRENT, 0, s->parts, n};
        int r = n ? compute(s, &spec, err) : 0;
        if (r < 0)
            return r;
    } while (i < s->count);
    return 0;
}

/* Records the last tokens of those that ended, sends them, and closes. */
static void close_finished(struct scheduler *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        struct generation *q = s->all[i];
        if (computes(q) && q->finish && q->count > q->prompt + q->sent) {
            s->members[n] = q;
            s->parts[n++] = (struct stepper_part){.id = q->sequence,
                                                  .index = q->index,
                                                  .position = q->recorded,
                                                  .count = q->count - q->recorded,
                                                  .history = q->tokens,
                                                  .features = EXPORT_NONE};
        }
    }
    if (n > 0) {
        struct stepper_spec spec = {STEP_RECORD, SELECTION_CURRENT, 0, s->parts, n};
        stepper_post(s->stepper, &spec);
    }
    for (uint32_t i = 0; i < n; i++) {
        s->members[i]->recorded = s->members[i]->count;
        send_tokens(s, s->members[i]);
    }
    for (uint32_t i = 0; i < s->count; i++)
        if (computes(s->all[i]) && s->all[i]->finish)
            send_close(s, s->all[i]);
}

int scheduler_turn(struct scheduler *s, struct err *err)
{
    int r = check_answers(s, err);
    if (r < 0)
        return r;
    close_finished(s); /* cancelled since */
    stepper_adopt_residents(s->stepper);
    admit(s);
    r = prefill_one(s, err);
    for (int mode = SELECTION_CURRENT; r == 0 && mode <= SELECTION_MIXED; mode++)
        r = decode_sparse(s, (enum selection_mode)mode, err);
    if (r == 0)
        r = decode_full(s, err);
    if (r < 0)
        return r;
    close_finished(s);
    for (uint32_t i = 0; i < s->count; i++)
        if (computes(s->all[i]))
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
