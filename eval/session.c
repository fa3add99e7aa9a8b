/* See session.h. Owner: main's thread. Files that are made here (a bootstrapped head) are gone again before
 * anything is measured. */
#include "eval/session.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "launch/head.h"
#include "launch/head_cache.h"
#include "launch/tokenizer_source.h"
#include "proto/limits.h"

static bool progress_shown; /* a line of it stands on the terminal */

static void show_progress(uint32_t position)
{
    fprintf(stderr, "\r\033[K  position %" PRIu32, position);
    progress_shown = true;
}

void session_clear(void)
{
    if (progress_shown)
        fputs("\r\033[K", stderr);
    progress_shown = false;
}

void session_say(const char *format, ...)
{
    va_list args;
    session_clear();
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

/* Removed as soon as it is open: the head keeps its mapping. */
static int open_bootstrapped(struct session *s, struct head **ret, struct err *err)
{
    char path[PATH_MAX];
    const char *tmp = getenv("TMPDIR");
    if (snprintf(path, sizeof path, "%s/specontext-head-XXXXXX", tmp && *tmp ? tmp : "/tmp") >=
        (int)sizeof path)
        return err_set(err, -ENAMETOOLONG, "TMPDIR: name too long");
    int fd = mkstemp(path);
    if (fd < 0)
        return err_set(err, -errno, "%s: %s", path, strerror(errno));
    close(fd);
    int r = head_bootstrap(model_path(s->engine.model), path, 0, 1, err);
    if (!r)
        r = head_open(path, s->engine.model, ret, err);
    unlink(path);
    return r;
}

static int open_head(struct session *s, const char *name, struct err *err)
{
    struct session_head *h = &s->heads[s->head_count++];
    h->name = name;
    if (name && !strcmp(name, "newest"))
        return 0;
    if (name && !strcmp(name, "bootstrap"))
        return open_bootstrapped(s, &h->head, err);
    if (!name) {
        char path[PATH_MAX];
        int r = head_cache_get(s->engine.model, path, err);
        if (r)
            return r;
        h->name = h->path = mem_strdup(path);
    }
    return head_open(h->name, s->engine.model, &h->head, err);
}

static int open_text(struct session *s, const char *name, struct err *err)
{
    struct session_text *t = &s->texts[s->text_count++];
    char *text = NULL;
    size_t bytes = 0;
    t->name = name;
    int r = tokenizer_source_text(name, TOKENIZER_TEXT_MAX, &text, &bytes, err);
    if (!r)
        r = tokenizer_encode_prompt(s->engine.tokenizer, text, bytes, false, &t->tokens, err);
    mem_free(&text);
    return r;
}

/* The list that was asked for, or `from` doubled up to the model's limit. */
static int fill_contexts(uint32_t most, const struct eval_list *asked, uint32_t from, struct eval_list *ret,
                         struct err *err)
{
    *ret = *asked;
    for (uint32_t i = 0; i < asked->count; i++)
        if (asked->at[i] > most)
            return err_set(err, -EINVAL, "context: found %" PRIu32 ", expected at most %" PRIu32,
                           asked->at[i], most);
    for (uint32_t c = from < most ? from : most; !asked->count && ret->count < EVAL_LIST_MAX; c *= 2) {
        ret->at[ret->count++] = c;
        if (c > most / 2)
            break;
    }
    return 0;
}

static int fill_context(struct session *s, struct err *err)
{
    const struct eval_options *o = s->options;
    /* As long as sequences of the daemons, which is what operators are made for. */
    uint32_t most =
        s->engine.config->context_max < LIMIT_CONTEXT ? s->engine.config->context_max : LIMIT_CONTEXT;
    int r = fill_contexts(most, &o->contexts, most, &s->contexts, err);
    if (!r)
        r = fill_contexts(most, &o->task_contexts, 1024, &s->task_contexts, err);
    for (uint32_t i = 0; i < s->contexts.count && s->text_count; i++)
        s->context = s->contexts.at[i] > s->context ? s->contexts.at[i] : s->context;
    for (uint32_t i = 0; i < s->task_contexts.count && o->task_count; i++)
        s->context = s->task_contexts.at[i] > s->context ? s->task_contexts.at[i] : s->context;
    uint64_t generated = o->long_generation ? (uint64_t)o->long_prompt + o->long_generation : 0;
    if (generated > most)
        return err_set(err, -EINVAL,
                       "--long-generation: found %" PRIu32 " + %" PRIu32 " tokens, expected at most %" PRIu32,
                       o->long_prompt, o->long_generation, most);
    s->context = generated > s->context ? (uint32_t)generated : s->context;
    return r;
}

static int threads_of(const struct eval_options *o)
{
    cpu_set_t set;
    if (o->cores)
        return (int)o->cores;
    int n = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

static int open_parts(struct session *s, struct err *err)
{
    const struct eval_options *o = s->options;
    if (!s->engine.tokenizer)
        return err_set(err, -ENOENT, "%s: found no tokenizer, which texts need", o->model);
    int r = o->heads.count ? 0 : open_head(s, NULL, err);
    for (uint32_t i = 0; i < o->heads.count && !r; i++)
        r = open_head(s, o->heads.at[i], err);
    for (uint32_t i = 0; i < o->files.count && !r; i++)
        r = open_text(s, o->files.at[i], err);
    if (!r)
        r = fill_context(s, err);
    if (!r && s->head_count * o->budgets.count >= ENGINE_LANES)
        r = err_set(err, -EINVAL, "heads x budgets: found %" PRIu32 ", expected less than %u",
                    s->head_count * o->budgets.count, ENGINE_LANES);
    return r;
}

int session_open(const struct eval_options *o, struct session *ret, struct err *err)
{
    memset(ret, 0, sizeof *ret);
    ret->options = o;
    struct engine_options options = {o->model, threads_of(o), o->activations};
    int r = engine_open(&options, &ret->engine, err);
    if (!r)
        r = open_parts(ret, err);
    if (isatty(STDERR_FILENO))
        ret->engine.progress = show_progress;
    if (r)
        session_close(ret);
    return r;
}

void session_close(struct session *s)
{
    session_clear();
    for (uint32_t i = 0; i < s->head_count; i++) {
        head_free(&s->heads[i].head);
        mem_free(&s->heads[i].path);
    }
    for (uint32_t i = 0; i < s->text_count; i++)
        token_buf_free(&s->texts[i].tokens);
    engine_close(&s->engine);
    memset(s, 0, sizeof *s);
}

int session_chooser(struct session *s, uint32_t index, struct chooser **ret, struct err *err)
{
    const struct head *head = s->heads[index].head;
    struct chooser_options options = {
        .model = s->engine.model, .head = head, .context = s->context, .compute = s->engine.compute};
    if (head)
        options.pool = s->options->pool ? (enum head_pool)(s->options->pool - 1) : head_config(head)->pool;
    return chooser_create(&options, ret, err);
}

int session_lanes(struct session *s, uint32_t capacity, bool apart, struct session_lanes *ret,
                  struct err *err)
{
    const struct eval_options *o = s->options;
    uint32_t count = s->head_count * o->budgets.count;
    *ret = (struct session_lanes){.at = mem_alloc(count, sizeof(struct lane *)),
                                  .choosers = mem_alloc(count, sizeof(struct chooser *))};
    for (uint32_t i = 0; i < count; i++) {
        if (apart || i % o->budgets.count == 0) {
            int r = session_chooser(s, session_head_of(s, i), &ret->choosers[ret->chooser_count], err);
            if (r) {
                session_lanes_free(ret);
                return r;
            }
            ret->chooser_count++;
        }
        struct choice choice = {session_budget_of(s, i), o->sinks, o->window};
        ret->at[ret->count++] =
            lane_create(s->engine.config, ret->choosers[ret->chooser_count - 1], &choice, capacity);
    }
    return 0;
}

void session_lanes_free(struct session_lanes *l)
{
    for (uint32_t i = 0; i < l->count; i++)
        lane_free(&l->at[i]);
    for (uint32_t i = 0; i < l->chooser_count; i++)
        chooser_free(&l->choosers[i]);
    mem_free(&l->at);
    mem_free(&l->choosers);
    memset(l, 0, sizeof *l);
}

uint32_t session_head_of(const struct session *s, uint32_t lane)
{
    return lane / s->options->budgets.count;
}

uint32_t session_budget_of(const struct session *s, uint32_t lane)
{
    return s->options->budgets.at[lane % s->options->budgets.count];
}
