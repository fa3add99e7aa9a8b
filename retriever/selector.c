/* Sequences and their sets; see selector.h. Owner: the worker thread (or a test). A message's numbers are
 * checked here against what is known, before anything is changed or sized by them. */
#include "retriever/selector.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/pool.h"
#include "base/trace.h"
#include "retriever/selector_private.h"

/* Bytes that a message has left for positions when its other parts are largest. */
enum { SET_BYTES_MAX = LIMIT_MESSAGE_BYTES - (4 << 20) };
enum { COPY_ALONE = 64 << 10 }; /* positions that are copied before another thread would have woken up */

_Static_assert(LIMIT_GROUPS == HEAD_GROUPS_MAX, "a head has as many groups as a layout");

static int check_options(const struct selector_options *o, struct err *err)
{
    const struct head_config *c = head_config(o->head);
    if (o->context < 1 || o->context > LIMIT_CONTEXT)
        return err_set(err, -EINVAL, "context: found %" PRIu32 ", expected 1 to %u", o->context,
                       LIMIT_CONTEXT);
    if (o->sequences < 1 || o->sequences > LIMIT_SEQUENCES)
        return err_set(err, -EINVAL, "sequences: found %" PRIu32 ", expected 1 to %u", o->sequences,
                       LIMIT_SEQUENCES);
    if (c->kv_heads > LIMIT_SELECTION_HEADS)
        return err_set(err, -ENOTSUP, "%s: kv_heads: found %" PRIu32 ", expected at most %u",
                       head_path(o->head), c->kv_heads, LIMIT_SELECTION_HEADS);
    return 0;
}

bool selector_keys_int8(const struct selector *s)
{
    return gpu_keys_int8(s->options.keys, s->options.device);
}

static int make_cpu(struct selector *s, struct err *err)
{
    const struct selector_options *o = &s->options;
    int rc =
        projection_create(o->model, o->head, o->context, LIMIT_SEQUENCES, s->compute, &s->projection, err);
    if (rc == 0 && selector_keys_int8(s))
        projection_round_keys(s->projection);
    return rc < 0 ? rc
                  : rank_create(s->head, o->pool, o->context, o->threads, o->isa, s->compute, &s->rank, err);
}

static int make_card(struct selector *s, struct err *err)
{
    const struct selector_options *o = &s->options;
    struct card_options card = {.device = o->device,
                                .model = o->model,
                                .head = o->head,
                                .pool = o->pool,
                                .keys_int8 = selector_keys_int8(s),
                                .context = o->context,
                                .sequences = o->sequences,
                                .work_bytes = o->work_bytes,
                                .compute = s->compute};
    return card_create(&card, &s->card, err);
}

int selector_create(const struct selector_options *options, struct selector **ret_selector, struct err *err)
{
    int rc = check_options(options, err);
    if (rc < 0)
        return rc;
    struct selector *s = mem_alloc(1, sizeof *s);
    s->options = *options;
    s->head = head_config(options->head);
    s->lists = s->head->groups * s->head->kv_heads;
    s->sequences = mem_alloc(options->sequences, sizeof *s->sequences);
    s->items = mem_alloc((size_t)LIMIT_SEQUENCES * s->head->groups, sizeof *s->items);
    s->found = mem_alloc((size_t)LIMIT_SEQUENCES * s->lists, sizeof *s->found);
    rc = compute_create("cpu", options->threads, options->isa, &s->compute, err);
    if (rc == 0)
        rc = gpu_named(options->device) ? make_card(s, err) : make_cpu(s, err);
    if (rc < 0)
        selector_free(&s);
    else
        *ret_selector = s;
    return rc;
}

static void free_lists(const struct selector *s, struct positions **lists)
{
    for (uint32_t i = 0; *lists && i < s->lists; i++)
        positions_free(&(*lists)[i]);
    mem_free(lists);
}

static uint64_t key_bytes(const struct selector *s, const struct keys *keys)
{
    return s->card ? keys->count * card_key_bytes(s->card) : keys_bytes(keys);
}

static void close_sequence(struct selector *s, struct sequence *q)
{
    s->stats.key_bytes -= key_bytes(s, &q->keys);
    s->stats.sequences--;
    keys_free(&q->keys);
    kept_close(&q->chain);
    free_lists(s, &q->sent);
    free_lists(s, &q->next);
    free_lists(s, &q->added);
    free_lists(s, &q->removed);
    memset(q, 0, sizeof *q);
}

void selector_close_all(struct selector *s)
{
    for (uint32_t i = 0; i < s->options.sequences; i++)
        if (s->sequences[i].id)
            close_sequence(s, &s->sequences[i]);
}

void selector_free(struct selector **selector)
{
    struct selector *s = *selector;
    if (!s)
        return;
    selector_close_all(s);
    selector_drop_features(s);
    kept_free(&s->kept);
    card_free(&s->card);
    rank_free(&s->rank);
    projection_free(&s->projection);
    compute_free(&s->compute);
    mem_free(&s->sequences);
    mem_free(&s->items);
    mem_free(&s->found);
    mem_free(selector);
}

const struct model_rope *selector_rope(const struct selector *s)
{
    return s->card ? card_rope(s->card) : projection_rope(s->projection);
}

const char *selector_backend(const struct selector *s)
{
    return s->card ? card_info(s->card)->name : compute_name(s->compute);
}

const struct card *selector_card(const struct selector *s)
{
    return s->card;
}

struct hash128 selector_fingerprint(const struct selector *s)
{
    const struct model_rope *used = selector_rope(s), *trained = &s->head->rope;
    struct hash128 hash = head_fingerprint(s->options.head);
    if (s->options.pool != s->head->pool || used->scaling != trained->scaling ||
        used->factor != trained->factor) {
        struct {
            uint32_t pool, scaling, original_context;
            float factor;
        } how = {s->options.pool, used->scaling, used->original_context, used->factor};
        hash = hash_chain(hash, &how, sizeof how);
    }
    if (selector_keys_int8(s))
        hash = hash_chain(hash, "int8 keys", sizeof "int8 keys");
    return hash;
}

/* Linear: there are at most LIMIT_SEQUENCES. */
static struct sequence *find(const struct selector *s, uint64_t id)
{
    for (uint32_t i = 0; id && i < s->options.sequences; i++)
        if (s->sequences[i].id == id)
            return &s->sequences[i];
    return NULL;
}

/* Positions that Top-K may pick for one list with such a budget, whatever the length. */
static uint32_t picks_of(const struct msg_open *o, uint32_t budget)
{
    uint64_t kept = (uint64_t)o->sinks + o->window + 1;
    return budget > kept ? (uint32_t)(budget - kept) : 0;
}

static uint32_t base_of(const struct msg_open *o)
{
    return o->budget_base ? o->budget_base : o->budget;
}

static int check_open(const struct selector *s, const struct msg_open *o, struct err *err)
{
    if (o->sequence == 0)
        return err_set(err, -EINVAL, "sequence: found 0, expected an id");
    if (find(s, o->sequence))
        return err_set(err, -EEXIST, "sequence %" PRIu64 ": found it open, expected a new one", o->sequence);
    if (o->capacity > s->options.context)
        return err_set(err, -E2BIG,
                       "sequence %" PRIu64 ": capacity: found %" PRIu32
                       ", expected at most the context of %" PRIu32,
                       o->sequence, o->capacity, s->options.context);
    if (o->budget && base_of(o) < (uint64_t)o->sinks + o->window + 1)
        return err_set(err, -EINVAL,
                       "sequence %" PRIu64 ": budget: found %" PRIu32 ", expected at least sinks %" PRIu32
                       " + window %" PRIu32 " + 1",
                       o->sequence, base_of(o), o->sinks, o->window);
    if (o->budget_base > o->budget)
        return err_set(err, -EINVAL,
                       "sequence %" PRIu64 ": budget_base: found %" PRIu32
                       ", expected at most the budget of %" PRIu32,
                       o->sequence, o->budget_base, o->budget);
    uint32_t picks = picks_of(o, o->budget);
    uint64_t bytes = (uint64_t)(picks < o->capacity ? picks : o->capacity) * s->lists * 2 * sizeof(uint32_t);
    if (bytes > SET_BYTES_MAX)
        return err_set(err, -E2BIG,
                       "sequence %" PRIu64 ": budget: found %" PRIu32 ", whose difference takes %" PRIu64
                       " bytes, expected at most %d",
                       o->sequence, o->budget, bytes, SET_BYTES_MAX);
    if (s->stats.sequences == s->options.sequences)
        return err_set(err, -ENOSPC,
                       "sequence %" PRIu64 ": found %" PRIu32 " open, expected less than %" PRIu32,
                       o->sequence, s->stats.sequences, s->options.sequences);
    return 0;
}

int selector_open(struct selector *s, const struct msg_open *open, struct err *err)
{
    int rc = check_open(s, open, err);
    if (rc < 0)
        return rc;
    struct sequence *q = s->sequences;
    while (q->id)
        q++;
    *q = (struct sequence){.id = open->sequence,
                           .capacity = open->capacity,
                           .budget = open->budget,
                           .sinks = open->sinks,
                           .window = open->window,
                           .rule = {.k = picks_of(open, base_of(open)),
                                    .k_max = picks_of(open, open->budget),
                                    .min_mass = open->min_mass,
                                    .top_p = open->top_p}};
    q->on_card = s->card && !card_picks_by_mass(&q->rule);
    keys_init(&q->keys, s->head->groups, s->head->kv_heads, s->head->head_dim);
    selector_open_kept(s, q, open);
    q->sent = mem_alloc(s->lists, sizeof *q->sent);
    q->next = mem_alloc(s->lists, sizeof *q->next);
    q->added = mem_alloc(s->lists, sizeof *q->added);
    q->removed = mem_alloc(s->lists, sizeof *q->removed);
    s->stats.sequences++;
    return 0;
}

int selector_close(struct selector *s, uint64_t sequence)
{
    struct sequence *q = find(s, sequence);
    if (!q)
        return -ENOENT;
    close_sequence(s, q);
    return 0;
}

void selector_forget_sent(struct selector *s)
{
    for (uint32_t i = 0; i < s->options.sequences; i++)
        s->sequences[i].whole = true;
}

void selector_forget_sent_of(struct selector *s, uint64_t sequence)
{
    struct sequence *q = find(s, sequence);
    if (q)
        q->whole = true;
}

static void refuse(struct selector *s, struct selector_result *r, uint64_t sequence, const struct err *err)
{
    selector_result_refuse(r, sequence, err);
    s->stats.refused++;
}

/* A sequence that takes keys which were kept begins behind as many as the decoder finds cached, too. */
static bool is_next(const struct sequence *q, uint32_t position)
{
    return q->begun ? position == q->keys.count
                    : position % BLOCK_TOKENS == 0 && position / BLOCK_TOKENS <= q->chain.blocks;
}

/* `q`: the sequence that it names; NULL: there is none. */
static int check_entry(const struct selector *s, const struct sequence *q, const struct msg_step_entry *e,
                       const uint32_t *tokens, struct err *err)
{
    if (!q)
        return err_set(err, -ENOENT, "sequence %" PRIu64 ": found no OPEN of it, expected one", e->sequence);
    if (q->call == s->call)
        return err_set(err, -EINVAL, "sequence %" PRIu64 ": found it twice in a step, expected once", q->id);
    if (!is_next(q, e->position))
        return err_set(err, -EINVAL,
                       "sequence %" PRIu64 ": position: found %" PRIu32 ", expected the next, %" PRIu32,
                       q->id, e->position, q->keys.count);
    if (e->count == 0 || e->position > q->capacity || e->count > q->capacity - e->position)
        return err_set(err, -E2BIG,
                       "sequence %" PRIu64 ": count: found %" PRIu32 " tokens from position %" PRIu32
                       ", expected 1 to %" PRIu32,
                       q->id, e->count, e->position,
                       q->capacity > e->position ? q->capacity - e->position : 0);
    for (uint32_t i = 0; i < e->count; i++)
        if (tokens[i] >= s->head->vocab)
            return err_set(err, -EINVAL,
                           "sequence %" PRIu64 ": token at position %" PRIu32 ": found %" PRIu32
                           ", expected less than the vocabulary of %" PRIu32,
                           q->id, e->position + i, tokens[i], s->head->vocab);
    for (uint32_t i = 0; i < e->count && e->position + i < q->chain.count; i++)
        if (tokens[i] != q->chain.tokens[e->position + i])
            return err_set(err, -EINVAL,
                           "sequence %" PRIu64 ": token at position %" PRIu32 ": found %" PRIu32
                           ", expected the prompt's, %" PRIu32,
                           q->id, e->position + i, tokens[i], q->chain.tokens[e->position + i]);
    if ((e->flags & STEP_ENTRY_SELECT) && q->budget == 0)
        return err_set(err, -EINVAL,
                       "sequence %" PRIu64 ": found a selection asked for, expected none at budget 0", q->id);
    return 0;
}

/* Entries that fit become parts; those that want a selection also work. Returns the number of parts. */
static uint32_t plan(struct selector *s, const struct msg_step *msg, struct selector_result *result)
{
    const uint32_t *tokens = msg->tokens.at;
    uint32_t parts = 0;
    CHECK(msg->entry_count <= LIMIT_SEQUENCES);
    s->call++;
    s->work_count = 0;
    for (uint32_t i = 0; i < msg->entry_count; i++) {
        const struct msg_step_entry *e = &msg->entries[i];
        struct err err = {0};
        struct sequence *q = find(s, e->sequence);
        if (check_entry(s, q, e, tokens, &err) < 0 || selector_check_features(s, q, msg, i, &err) < 0) {
            refuse(s, result, e->sequence, &err);
        } else {
            bool query = e->flags & STEP_ENTRY_SELECT;
            q->call = s->call;
            s->stats.key_bytes -= key_bytes(s, &q->keys);
            s->parts[parts++] = (struct projection_part){.keys = &q->keys,
                                                         .tokens = tokens,
                                                         .count = e->count,
                                                         .query = query,
                                                         .place = selector_place(s, q)};
            if (msg->features.count)
                selector_aim_features(s, msg->features.at[i], &s->parts[parts - 1]);
            if (!q->begun)
                selector_begin_kept(s, q, e->position, &s->parts[parts - 1]);
            if (query)
                s->work[s->work_count++] =
                    (struct work){.sequence = q, .entry = e, .differs = q->has_set && !q->whole};
        }
        tokens += e->count;
    }
    return parts;
}

/* Room in the lists is made here, so that threads never allocate. */
static void prepare_lists(const struct selector *s, struct sequence *q, uint32_t picks)
{
    for (uint32_t l = 0; l < s->lists; l++) {
        positions_reserve(&q->next[l], picks);
        positions_reserve(&q->added[l], picks);
        positions_reserve(&q->removed[l], q->sent[l].count);
    }
}

/* Items of one sequence, one for each group. */
static void prepare_items(struct selector *s, uint32_t number)
{
    const struct work *w = &s->work[number];
    struct sequence *q = w->sequence;
    uint32_t heads = s->head->kv_heads, end = q->keys.count, position = end - 1;
    uint32_t sinks = q->sinks < end ? q->sinks : end;
    uint32_t limit = position > q->window ? position - q->window : 0;
    if (limit < sinks)
        limit = sinks;
    uint32_t most = q->rule.min_mass > 0 ? q->rule.k_max : q->rule.k;
    if (!q->on_card)
        prepare_lists(s, q, most < limit - sinks ? most : limit - sinks);
    s->how[number] =
        (q->second ? 0 : (uint32_t)CUDA_SETS_SECOND) | (w->differs ? (uint32_t)CUDA_SETS_DIFFER : 0);
    for (uint32_t g = 0; g < s->head->groups; g++)
        s->items[number * s->head->groups + g] = (struct rank_item){
            .keys = s->card ? (struct key_view){.count = end} : keys_view(&q->keys, g, end),
            .q = s->card ? NULL : projection_query(s->projection, g, number),
            .sinks = sinks,
            .limit = limit,
            .rule = q->rule,
            .now = q->next + g * heads,
            .before = w->differs ? q->sent + g * heads : NULL,
            .added = q->added + g * heads,
            .removed = q->removed + g * heads,
            .found = s->found + (size_t)number * s->lists + g * heads};
}

/* Over groups and heads: means (NaN when any is), and whether any list has a mark. */
static struct reach_result found_of(const struct selector *s, uint32_t number)
{
    struct reach_result all = {0};
    for (uint32_t l = 0; l < s->lists; l++) {
        const struct reach_result *one = &s->found[(size_t)number * s->lists + l];
        all.mass += one->mass;
        all.mass_base += one->mass_base;
        all.grown |= one->grown;
        all.is_short |= one->is_short;
    }
    all.mass /= s->lists;
    all.mass_base /= s->lists;
    return all;
}

/* `changes`: as the card handed them; NULL: they are in the sequence's lists. */
static void finish(struct selector *s, uint32_t number, const struct card_changes *changes)
{
    struct selector_result *result = s->result;
    struct work *w = &s->work[number];
    struct sequence *q = w->sequence;
    struct reach_result found = found_of(s, number);
    if (!isfinite(found.mass)) {
        struct err err;
        err_set(&err, -EDOM,
                "sequence %" PRIu64 ": position %" PRIu32 ": found weights that are not finite, "
                "expected numbers",
                q->id, q->keys.count - 1);
        refuse(s, result, q->id, &err);
        return;
    }
    uint32_t position = q->keys.count - 1, limit = position > q->window ? position - q->window : 0;
    q->entry = (struct msg_topk_entry){.sequence = q->id,
                                       .index = w->entry->index,
                                       .base_step = w->differs ? q->entry.base_step : result->step,
                                       .limit = limit > q->sinks ? limit : q->sinks,
                                       .position = position,
                                       .mass = (float)found.mass,
                                       .mass_base = (float)found.mass_base,
                                       .flags = (found.grown ? (uint32_t)TOPK_ENTRY_GROWN : 0) |
                                                (found.is_short ? (uint32_t)TOPK_ENTRY_SHORT : 0)};
    if (changes) {
        w->from = changes->positions;
        w->count = changes->total;
        w->at = selector_result_begin_entry(result, &q->entry, changes->counts, changes->total);
        q->second = !q->second;
    } else {
        selector_result_put(result, &q->entry, w->differs ? q->added : q->next,
                            w->differs ? q->removed : NULL);
        struct positions *sent = q->sent;
        q->sent = q->next;
        q->next = sent;
    }
    q->entry.base_step = result->step; /* the next difference's base; a repeat is whole */
    q->has_set = true;
    q->whole = false;
    s->stats.positions_sent += result->first[result->entry_count] - result->first[result->entry_count - 1];
    s->stats.selections++;
    s->stats.grown += found.grown;
    s->stats.fallbacks += found.is_short;
}

static void take_changes(void *arg, uint32_t query, const struct card_changes *changes)
{
    finish(arg, query, changes);
    ((struct selector *)arg)->taken = query + 1;
}

static void copy_changes(void *arg, int index, int thread)
{
    const struct selector *s = arg;
    const struct work *w = &s->work[s->landed + (uint32_t)index];
    (void)thread;
    if (w->count && w->from) /* a result of no position at all has no room for one */
        memcpy(s->result->positions + w->at, w->from, w->count * sizeof *w->from);
}

/* The result has room for all that was taken, and stays where it is until they are copied. */
static void land_changes(void *arg)
{
    struct selector *s = arg;
    int count = (int)(s->taken - s->landed);
    size_t positions = 0;
    for (int i = 0; i < count; i++)
        positions += s->work[s->landed + (uint32_t)i].count;
    if (positions > COPY_ALONE)
        pool_run(compute_pool(s->compute), count, copy_changes, s);
    else
        for (int i = 0; i < count; i++)
            copy_changes(s, i, 0);
    s->landed = s->taken;
    if (!s->part || s->landed == s->work_count || s->result->entry_count == 0)
        return;
    uint32_t step = s->result->step;
    s->result = s->part(s->part_arg, s->result);
    selector_result_begin(s->result, step, s->head);
}

void selector_on_part(struct selector *s, selector_part part, void *arg)
{
    s->part = part;
    s->part_arg = arg;
}

static void count_step(struct selector *s, int64_t append_ns, int64_t finish_ns,
                       const struct rank_times *times)
{
    struct selector_stats *t = &s->stats;
    t->steps++;
    t->sum.append_ns += t->last.append_ns = append_ns;
    t->sum.score_ns += t->last.score_ns = times->score_ns;
    t->sum.topk_ns += t->last.topk_ns = times->topk_ns;
    t->sum.encode_ns += t->last.encode_ns = times->encode_ns + finish_ns;
}

void selector_step(struct selector *s, uint32_t step, const struct msg_step *msg,
                   struct selector_result *result)
{
    struct rank_times times = {0};
    int64_t begin = clock_now_ns();
    trace_step = step;
    trace(TRACE_BEGUN, step);
    s->result = result;
    s->taken = s->landed = 0;
    selector_result_begin(result, step, s->head);
    uint32_t parts = plan(s, msg, result);
    if (s->card)
        card_project(s->card, s->parts, parts);
    else
        projection_run(s->projection, s->parts, parts);
    for (uint32_t i = 0; i < parts; i++) {
        s->stats.key_bytes += key_bytes(s, s->parts[i].keys);
        s->stats.tokens += s->parts[i].count;
    }
    for (uint32_t i = 0; i < s->work_count; i++) {
        struct work *w = &s->work[i];
        w->differs = w->differs && w->sequence->entry.base_step != step; /* equal steps mean a whole set */
        prepare_items(s, i);
    }
    int64_t appended = clock_now_ns();
    const struct card_sink sink = {s->how, take_changes, land_changes, s};
    if (s->card)
        card_rank(s->card, s->items, s->work_count * s->head->groups, &sink, &times);
    else
        rank_run(s->rank, s->items, s->work_count * s->head->groups, &times);
    int64_t ranked = clock_now_ns();
    trace(TRACE_COMPARED, step);
    for (uint32_t i = 0; i < s->work_count && !s->card; i++)
        finish(s, i, NULL);
    trace(TRACE_ANSWERED, step);
    selector_keep(s, parts);
    if (s->rows && msg->features.count)
        rows_read(s->rows, msg->reading);
    count_step(s, appended - begin, clock_now_ns() - ranked, &times);
}

static void repeat_from_card(struct selector *s, const struct sequence *q, struct selector_result *r)
{
    uint32_t *listed = mem_alloc(s->lists, sizeof *listed), *counts = mem_alloc(2 * s->lists, sizeof *counts);
    uint32_t span = q->entry.limit - q->sinks, picks = q->rule.k < span ? q->rule.k : span;
    selector_result_reserve(r, 1, 2 * s->lists, (size_t)picks * s->lists);
    uint64_t all = card_read_set(s->card, selector_place(s, q), q->second, listed, r->positions);
    for (uint32_t l = 0; l < s->lists; l++)
        counts[2 * l] = listed[l];
    selector_result_begin_entry(r, &q->entry, counts, all);
    mem_free(&listed);
    mem_free(&counts);
}

int selector_repeat(struct selector *s, uint64_t sequence, uint32_t step, struct selector_result *result)
{
    struct sequence *q = find(s, sequence);
    selector_result_begin(result, step, s->head);
    if (!q)
        return -ENOENT;
    if (!q->has_set || (int32_t)(step - q->entry.base_step) > 0) {
        q->whole = true;
        return -EAGAIN;
    }
    result->step = q->entry.base_step;
    if (q->on_card)
        repeat_from_card(s, q, result);
    else
        selector_result_put(result, &q->entry, q->sent, NULL);
    q->whole = false;
    return 0;
}

void selector_stats(const struct selector *s, struct selector_stats *ret_stats)
{
    *ret_stats = s->stats;
    ret_stats->feature_rows = s->rows ? rows_count(s->rows) : 0;
    kept_stats(s->kept, &ret_stats->kept);
    if (!s->card)
        return;
    ret_stats->gpu = card_bytes(s->card);
    ret_stats->graph_steps = card_graph_steps(s->card);
}
