/* The scheduler's steps; see scheduler_private.h. Owner: the device thread.
 *
 * Orders between a token's hops: it is sampled, stands in a posted record (the next step's, or a RECORD step
 * for a last one), and only then goes to the client: while that step is computed, or once it has failed. */
#include "decoder/scheduler_private.h"

#include <errno.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"

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
        scheduler_emit(s, SCHEDULER_TO_RETRIEVER, &msg);
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
        scheduler_emit(s, SCHEDULER_TO_RETRIEVER, &msg);
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
    scheduler_emit(s, SCHEDULER_TO_CLIENT, &msg);
}

/* What the record of the step that runs holds goes to the clients while that is computed, and to the
 * retriever what no table of it waits for: before it is queued a GPU would wait for it. */
void scheduler_send_recorded(void *arg)
{
    struct scheduler *s = arg;
    if (s->told.kind)
        scheduler_emit(s, SCHEDULER_TO_RETRIEVER, &s->told);
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
        if (!scheduler_computes(q)) /* it left */
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
    if (!scheduler_reads_features(s, q))
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
    bool behind = scheduler_reads_features(s, q);
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
        scheduler_emit(s, SCHEDULER_TO_CLIENT, &msg);
    }
    if (last)
        q->state = GENERATION_DECODE;
    return 0;
}

int scheduler_prefill(struct scheduler *s, struct err *err)
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

int scheduler_decode(struct scheduler *s, struct err *err)
{
    int r = 0;
    for (int mode = SELECTION_CURRENT; r == 0 && mode <= SELECTION_MIXED; mode++)
        r = decode_sparse(s, (enum selection_mode)mode, err);
    return r == 0 ? decode_full(s, err) : r;
}

void scheduler_record(struct scheduler *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        struct generation *q = s->all[i];
        if (scheduler_computes(q) && q->finish && q->count > q->prompt + q->sent) {
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
}
