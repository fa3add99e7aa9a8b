/* Tasks: each item is made as long as its context allows, asked as a chat, and answered by full attention and
 * by every lane. Owner: main's thread. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/alloc.h"
#include "base/pool.h"
#include "eval/decode.h"
#include "eval/session.h"
#include "model/chat.h"

enum { PILOT = 40 }; /* items that tell whether a task is worth the others */

struct answering {
    struct session *session;
    struct chat_format format;
    struct session_lanes lanes;    /* [families][ways] */
    struct decode_stream *streams; /* [families][1 + ways]: full attention first */
    struct item *items;            /* [families] */
    uint32_t each;                 /* 1 + ways */
};

struct item {
    enum task_kind kind;
    uint32_t number, context;
    struct task task;
    struct token_buf prompt;
    int failed; /* a negative errno */
    struct err err;
};

static void item_free(struct item *item)
{
    task_free(&item->task);
    token_buf_free(&item->prompt);
}

/* Makes the item of `units`; 1: prompt and answer fit, 0: they do not. */
static int make_units(const struct answering *a, struct item *item, uint32_t units, struct err *err)
{
    task_free(&item->task);
    item->prompt.count = 0;
    task_make(item->kind, a->session->options->seed, item->number, units, &item->task);
    struct chat_message message = {"user", item->task.text.text, item->task.text.bytes};
    struct chat chat = {.format = &a->format, .messages = &message, .count = 1, .generate = true};
    const struct tokenizer *tokenizer = a->session->engine.tokenizer;
    const char *lead = item->task.lead;
    int r = chat_encode_as(tokenizer, &chat, &item->prompt, err);
    if (!r && *lead)
        r = tokenizer_encode(tokenizer, lead, strlen(lead), false, &item->prompt, err);
    return r ? r : item->prompt.count + item->task.answer_tokens <= item->context;
}

/* The longest that fits. */
static int make_item(const struct answering *a, struct item *item, struct err *err)
{
    uint32_t fits = 0, fails = 1;
    int r;
    while ((r = make_units(a, item, fails, err)) > 0) {
        fits = fails;
        fails *= 2;
    }
    while (r == 0 && fits + 1 < fails) {
        uint32_t units = fits + (fails - fits) / 2;
        r = make_units(a, item, units, err);
        if (r > 0)
            fits = units;
        else
            fails = units;
        r = r < 0 ? r : 0;
    }
    if (r == 0 && fits == 0)
        return err_set(err, -EINVAL, "task %s: its shortest text does not fit into %" PRIu32 " tokens",
                       task_name(item->kind), item->context);
    if (r == 0)
        r = make_units(a, item, fits, err);
    return r < 0 ? r : 0;
}

static double score(const struct answering *a, const struct item *item, const struct decode_stream *s)
{
    struct detokenizer detok;
    struct text_buf text = {0};
    detok_init(&detok);
    for (size_t i = 0; i < s->out.count; i++)
        detok_push(&detok, a->session->engine.tokenizer, s->out.ids[i], &text);
    detok_finish(&detok, &text);
    double value = task_score(&item->task, text.text ? text.text : "", text.bytes);
    text_buf_free(&text);
    return value;
}

static void make_one(void *arg, int index, int thread)
{
    const struct answering *a = arg;
    struct item *item = &a->items[index];
    (void)thread;
    item->failed = make_item(a, item, &item->err);
}

/* Scores of one item's streams into the rows [ways] of its task and length. */
static void add_scores(const struct answering *a, const struct item *item,
                       const struct decode_stream *streams, struct report_task *rows)
{
    double full = score(a, item, &streams[0]);
    for (uint32_t i = 0; i + 1 < a->each; i++) {
        double sparse = score(a, item, &streams[1 + i]);
        rows[i].items++;
        rows[i].full += full;
        rows[i].sparse += sparse;
        rows[i].squares += (sparse - full) * (sparse - full);
        rows[i].better += sparse > full + 1e-9;
        rows[i].worse += sparse < full - 1e-9;
    }
}

/* The first `count` of a->items, whose kind, number and context are there. */
static int answer_batch(struct answering *a, uint32_t count, struct report_task *rows, struct err *err)
{
    const struct engine *e = &a->session->engine;
    int r = 0;
    pool_run(compute_pool(e->compute), (int)count, make_one, a);
    for (uint32_t i = 0; i < count && !r; i++) {
        const struct item *item = &a->items[i];
        if (item->failed)
            r = err_set(err, item->failed, "%s", item->err.text);
        for (uint32_t j = 0; j < a->each; j++) {
            struct decode_stream *s = &a->streams[i * a->each + j];
            s->prompt = item->prompt.ids;
            s->prompt_count = (uint32_t)item->prompt.count;
            s->tokens = item->task.answer_tokens;
            s->stop = true;
        }
    }
    if (!r)
        r = decode_run(&a->session->engine, a->streams, count * a->each, err);
    for (uint32_t i = 0; i < count; i++) {
        if (!r)
            add_scores(a, &a->items[i], &a->streams[i * a->each], rows);
        item_free(&a->items[i]);
    }
    return r;
}

/* Whether full attention has shown that it does not do the task: then it tells nothing about sparse
 * attention. */
static bool hopeless(const struct answering *a, const struct report_task *row)
{
    return row->items >= PILOT && row->full < (double)a->session->options->task_floor * row->items;
}

static int answer_task(struct answering *a, enum task_kind kind, uint32_t context, struct report_task *rows,
                       struct err *err)
{
    struct session *s = a->session;
    int r = 0;
    session_say("task %s at %" PRIu32 ": %" PRIu32 " items", task_name(kind), context, s->options->items);
    for (uint32_t i = 0; i < s->way_count; i++)
        rows[i] = (struct report_task){.head = s->ways[i].name,
                                       .budget = s->ways[i].variant->choice.budget,
                                       .context = context,
                                       .task = kind};
    for (uint32_t at = 0; at < s->options->items && !r && !hopeless(a, rows);) {
        uint32_t count = 0;
        while (count < s->families && at < s->options->items)
            a->items[count++] = (struct item){.kind = kind, .number = at++, .context = context};
        r = answer_batch(a, count, rows, err);
    }
    for (uint32_t i = 0; i < s->way_count && rows[i].items; i++) {
        rows[i].full /= rows[i].items;
        rows[i].sparse /= rows[i].items;
        session_say("  %" PRIu32 " items: full %.3f, %s %" PRIu32 " %.3f", rows[i].items, rows[i].full,
                    rows[i].head, rows[i].budget, rows[i].sparse);
    }
    return r;
}

static int begin(struct answering *a, struct err *err)
{
    struct session *s = a->session;
    struct session_lanes_options options = {.families = s->families, .capacity = s->context, .apart = true};
    int r = chat_format_choose(s->engine.tokenizer, s->options->chat_template, &a->format, err);
    if (!r)
        r = session_lanes(s, &options, &a->lanes, err);
    if (r)
        return r;
    a->items = mem_alloc(s->families, sizeof *a->items);
    a->streams = mem_alloc((size_t)s->families * a->each, sizeof *a->streams);
    for (uint32_t i = 0; i < s->families * a->each; i++) {
        uint32_t way = i % a->each;
        a->streams[i] =
            (struct decode_stream){.lane = way ? a->lanes.at[i / a->each * s->way_count + way - 1] : NULL,
                                   .sampling = sampler_params_default()};
    }
    return 0;
}

int answer_tasks(struct session *s, struct report_task **ret_tasks, uint32_t *ret_count, struct err *err)
{
    const struct eval_options *o = s->options;
    struct answering a = {.session = s, .each = 1 + s->way_count};
    *ret_tasks = NULL;
    *ret_count = 0;
    if (!o->task_count)
        return 0;
    int r = begin(&a, err);
    uint32_t count = s->task_contexts.count * o->task_count * s->way_count, there = 0;
    struct report_task *rows = mem_alloc(count, sizeof *rows);
    for (uint32_t c = 0; c < s->task_contexts.count; c++)
        for (uint32_t t = 0; t < o->task_count && !r; t++)
            r = answer_task(&a, o->tasks[t], s->task_contexts.at[c],
                            rows + (c * o->task_count + t) * s->way_count, err);
    while (there < count && rows[there].items)
        there++;
    for (uint32_t i = 0; a.streams && i < s->families * a.each; i++)
        token_buf_free(&a.streams[i].out);
    mem_free(&a.streams);
    mem_free(&a.items);
    session_lanes_free(&a.lanes);
    *ret_tasks = rows;
    *ret_count = there; /* less than all when it was interrupted */
    return r;
}
