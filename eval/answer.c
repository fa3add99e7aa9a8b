/* Tasks: each item is made as long as its context allows, asked as a chat, and answered by full attention and
 * by every lane. Owner: main's thread. */
#include <errno.h>
#include <inttypes.h>

#include "base/alloc.h"
#include "eval/decode.h"
#include "eval/session.h"
#include "model/chat.h"

struct answering {
    struct session *session;
    struct chat_format format;
    struct session_lanes lanes;
    struct decode_stream *streams; /* [1 + lanes]: full attention first */
};

struct item {
    enum task_kind kind;
    uint32_t number, context;
    struct task task;
    struct token_buf prompt;
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
    int r = chat_encode_as(a->session->engine.tokenizer, &chat, &item->prompt, err);
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
    double value = task_score(item->kind, &item->task, text.text ? text.text : "", text.bytes);
    text_buf_free(&text);
    return value;
}

/* One item into the rows [lanes] of its task and length. */
static int answer_item(struct answering *a, struct item *item, struct report_task *rows, struct err *err)
{
    int r = make_item(a, item, err);
    if (r)
        return r;
    struct decode d = {.prompt = item->prompt.ids,
                       .prompt_count = (uint32_t)item->prompt.count,
                       .tokens = item->task.answer_tokens,
                       .stop = true};
    r = decode_run(&a->session->engine, &d, a->streams, 1 + a->lanes.count, err);
    double full = r ? 0 : score(a, item, &a->streams[0]);
    for (uint32_t i = 0; i < a->lanes.count && !r; i++) {
        double sparse = score(a, item, &a->streams[1 + i]);
        rows[i].items++;
        rows[i].full += full;
        rows[i].sparse += sparse;
        rows[i].better += sparse > full + 1e-9;
        rows[i].worse += sparse < full - 1e-9;
    }
    return r;
}

static int answer_task(struct answering *a, enum task_kind kind, uint32_t context, struct report_task *rows,
                       struct err *err)
{
    struct session *s = a->session;
    int r = 0;
    session_say("task %s at %" PRIu32 ": %" PRIu32 " items", task_name(kind), context, s->options->items);
    for (uint32_t i = 0; i < a->lanes.count; i++)
        rows[i] = (struct report_task){.head = s->heads[session_head_of(s, i)].name,
                                       .budget = session_budget_of(s, i),
                                       .context = context,
                                       .task = kind};
    for (uint32_t n = 0; n < s->options->items && !r; n++) {
        struct item item = {.kind = kind, .number = n, .context = context};
        r = answer_item(a, &item, rows, err);
        item_free(&item);
    }
    for (uint32_t i = 0; i < a->lanes.count && !r; i++) {
        rows[i].full /= rows[i].items;
        rows[i].sparse /= rows[i].items;
        session_say("  full %.3f, %s %" PRIu32 " %.3f", rows[i].full, rows[i].head, rows[i].budget,
                    rows[i].sparse);
    }
    return r;
}

static int begin(struct answering *a, struct err *err)
{
    struct session *s = a->session;
    int r = chat_format_choose(s->engine.tokenizer, s->options->chat_template, &a->format, err);
    if (!r)
        r = session_lanes(s, s->context, true, &a->lanes, err);
    if (r)
        return r;
    a->streams = mem_alloc(1 + a->lanes.count, sizeof *a->streams);
    for (uint32_t i = 0; i <= a->lanes.count; i++)
        a->streams[i] = (struct decode_stream){.lane = i ? a->lanes.at[i - 1] : NULL,
                                               .sampling = sampler_params_default()};
    return 0;
}

int answer_tasks(struct session *s, struct report_task **ret_tasks, uint32_t *ret_count, struct err *err)
{
    const struct eval_options *o = s->options;
    struct answering a = {.session = s};
    *ret_tasks = NULL;
    *ret_count = 0;
    if (!o->task_count)
        return 0;
    int r = begin(&a, err);
    uint32_t count = s->task_contexts.count * o->task_count * a.lanes.count;
    struct report_task *rows = mem_alloc(count, sizeof *rows);
    for (uint32_t c = 0; c < s->task_contexts.count; c++)
        for (uint32_t t = 0; t < o->task_count && !r; t++)
            r = answer_task(&a, o->tasks[t], s->task_contexts.at[c],
                            rows + (c * o->task_count + t) * a.lanes.count, err);
    for (uint32_t i = 0; a.streams && i <= a.lanes.count; i++)
        token_buf_free(&a.streams[i].out);
    mem_free(&a.streams);
    session_lanes_free(&a.lanes);
    *ret_tasks = rows;
    *ret_count = count;
    return r;
}
