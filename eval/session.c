/* See session.h. Owner: main's thread. Files that are made here (a bootstrapped head) are gone again before
 * anything is measured. */
#include "eval/session.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/thread.h"
#include "launch/head.h"
#include "launch/head_cache.h"
#include "launch/tokenizer_source.h"
#include "proto/limits.h"

enum { BATCH_CPU = 16 }; /* KV of so many sequences fits beside all else on small machines */

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
    struct err why = {0};
    char *text = NULL;
    size_t bytes = 0;
    t->name = name;
    int r = tokenizer_source_text(name, TOKENIZER_TEXT_MAX, &text, &bytes, err);
    if (!r)
        r = tokenizer_encode_prompt(s->engine.tokenizer, text, bytes, false, &t->tokens, &why);
    mem_free(&text);
    return r && why.text[0] ? err_set(err, r, "%s: %s", name, why.text) : r;
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
    if (o->no_texts)
        s->contexts.count = 0;
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
    bool long_enough = !o->long_generation;
    for (uint32_t i = 0; i < s->text_count; i++)
        long_enough |= s->texts[i].tokens.count >= o->long_prompt;
    if (!r && !long_enough)
        r = err_set(err, -EINVAL, "--long-prompt: found no text of %" PRIu32 " tokens", o->long_prompt);
    return r;
}

static int threads_of(const struct eval_options *o)
{
    return (int)(o->cores ? o->cores : thread_cores());
}

/* The head of that name, opened when it is new. */
static int find_head(struct session *s, const char *name, uint32_t *ret, struct err *err)
{
    for (*ret = 0; *ret < s->head_count; ++*ret)
        if (!strcmp(s->heads[*ret].name, name))
            return 0;
    if (s->head_count == OPTION_TEXTS_MAX)
        return err_set(err, -EINVAL, "heads: found more than %u", OPTION_TEXTS_MAX);
    return open_head(s, name, err);
}

static int check_group_budgets(const struct variant *v, const struct head *head, struct err *err)
{
    uint32_t groups = head ? head_config(head)->groups : 1;
    if (v->group_count == 0 || v->group_count == groups)
        return 0;
    return err_set(err, -EINVAL,
                   "--variant '%s': group-budgets: found %" PRIu32
                   ", expected one for each of the head's groups, %" PRIu32,
                   v->text, v->group_count, groups);
}

static int open_ways(struct session *s, struct err *err)
{
    const struct eval_options *o = s->options;
    uint32_t plain = s->head_count * o->budgets.count;
    if (plain + o->variant_texts.count >= ENGINE_LANES)
        return err_set(err, -EINVAL, "heads x budgets and variants: found %" PRIu32 ", expected less than %u",
                       plain + o->variant_texts.count, ENGINE_LANES);
    s->plain = mem_alloc(plain, sizeof *s->plain);
    for (uint32_t i = 0; i < plain; i++) {
        s->plain[i] = (struct variant){.pool = o->pool,
                                       .keys = o->keys,
                                       .choice = {.budget = o->budgets.at[i % o->budgets.count],
                                                  .sinks = o->sinks,
                                                  .window = o->window}};
        uint32_t head = i / o->budgets.count;
        s->ways[s->way_count++] = (struct session_way){head, &s->plain[i], s->heads[head].name};
    }
    int r = 0;
    for (uint32_t i = 0; i < o->variant_texts.count && !r; i++) {
        const struct variant *v = &o->variants[i];
        uint32_t head = 0;
        r = v->head[0] ? find_head(s, v->head, &head, err) : 0;
        if (!r)
            r = check_group_budgets(v, s->heads[head].head, err);
        s->ways[s->way_count++] = (struct session_way){head, v, v->text};
    }
    uint32_t batch = o->batch ? o->batch : s->engine.gpu ? ENGINE_LANES : BATCH_CPU;
    s->families = batch / (1 + s->way_count);
    s->families = s->families ? s->families : 1;
    return r;
}

/* Hidden states that heads look at are kept from now on. */
static int open_taps(struct session *s, struct err *err)
{
    int r = 0;
    for (uint32_t i = 0; i < s->head_count && !r; i++)
        if (s->heads[i].head)
            r = taps_add(&s->engine.taps, s->heads[i].head, s->engine.config->layers, err);
    if (!r && s->engine.taps.count && s->options->no_forced)
        r = err_set(err, -EINVAL,
                    "--no-forced: a head looks at the model's hidden states, which need the model");
    return r;
}

static int open_parts(struct session *s, struct err *err)
{
    const struct eval_options *o = s->options;
    if (!s->engine.tokenizer)
        return err_set(err, -ENOENT, "%s: found no tokenizer, which texts need", o->model);
    int r = o->heads.count ? 0 : open_head(s, NULL, err);
    for (uint32_t i = 0; i < o->heads.count && !r; i++)
        r = open_head(s, o->heads.at[i], err);
    if (!r)
        r = open_ways(s, err);
    if (!r)
        r = open_taps(s, err);
    for (uint32_t i = 0; i < o->files.count && !r; i++)
        r = open_text(s, o->files.at[i], err);
    return r ? r : fill_context(s, err);
}

/* One position more than the longest set: what the set of the token before lacks. */
static uint32_t longest_list(const struct eval_options *o)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < o->budgets.count; i++)
        most = o->budgets.at[i] > most ? o->budgets.at[i] : most;
    for (uint32_t i = 0; i < o->variant_texts.count; i++) {
        const struct variant *v = &o->variants[i];
        uint32_t longest = sets_longest(&v->choice);
        for (uint32_t g = 0; g < v->group_count; g++)
            longest = v->group_budgets[g] > longest ? v->group_budgets[g] : longest;
        most = longest > most ? longest : most;
    }
    return most + 1;
}

int session_open(const struct eval_options *o, struct session *ret, struct err *err)
{
    memset(ret, 0, sizeof *ret);
    ret->options = o;
    struct engine_options options = {.model = o->model,
                                     .device = o->device,
                                     .threads = threads_of(o),
                                     .activations = o->activations,
                                     .list_max = longest_list(o)};
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
    mem_free(&s->plain);
    engine_close(&s->engine);
    memset(s, 0, sizeof *s);
}

int session_chooser(struct session *s, uint32_t way, struct chooser **ret, struct err *err)
{
    const struct session_way *w = &s->ways[way];
    const struct head *head = s->heads[w->head].head;
    struct chooser_options options = {.model = s->engine.model,
                                      .head = head,
                                      .context = s->context,
                                      .taps = &s->engine.taps,
                                      .keys = (enum compute_keys)w->variant->keys};
    if (head)
        options.pool = w->variant->pool ? (enum head_pool)(w->variant->pool - 1) : head_config(head)->pool;
    return chooser_create(&options, ret, err);
}

bool session_alike(const struct session *s, uint32_t way, uint32_t other)
{
    const struct session_way *a = &s->ways[way], *b = &s->ways[other];
    const struct head *head = s->heads[a->head].head;
    bool looks = head && head_config(head)->features == HEAD_FEATURES_TARGET;
    return way == other || (!looks && a->head == b->head && a->variant->pool == b->variant->pool &&
                            a->variant->keys == b->variant->keys);
}

int session_lanes(struct session *s, const struct session_lanes_options *o, struct session_lanes *ret,
                  struct err *err)
{
    uint32_t count = o->families * s->way_count;
    *ret = (struct session_lanes){.at = mem_alloc(count, sizeof(struct lane *)),
                                  .choosers = mem_alloc(count, sizeof(struct chooser *))};
    for (uint32_t i = 0; i < count; i++) {
        uint32_t way = i % s->way_count, alike = 0;
        struct chooser *chooser = NULL;
        while (!session_alike(s, alike, way))
            alike++;
        if (alike < way && !o->apart)
            chooser = lane_chooser(ret->at[i - way + alike]);
        else {
            int r = session_chooser(s, way, &chooser, err);
            if (r) {
                session_lanes_free(ret);
                return r;
            }
            ret->choosers[ret->chooser_count++] = chooser;
        }
        const struct variant *v = s->ways[way].variant;
        enum oracle oracle = v->oracle;
        struct lane_options options = {.model = s->engine.config,
                                       .chooser = chooser,
                                       .choice = v->choice,
                                       .group_budgets = v->group_count ? v->group_budgets : NULL,
                                       .selection = v->selection,
                                       .pins = v->pins,
                                       .pin_layers = v->pin_layers,
                                       .oracle = oracle,
                                       .capacity = o->capacity,
                                       .loads = o->loads && oracle != ORACLE_HEADS};
        ret->at[ret->count++] = lane_create(&options);
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
