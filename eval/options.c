/* The option table of `specontext eval`. */
#include "eval/options.h"

#include <errno.h>
#include <string.h>

#include "base/parse.h"
#include "base/thread.h"
#include "eval/engine.h"

#define AT(field) offsetof(struct eval_options, field)

#define GROUP_WHAT  "Model, heads and texts"
#define GROUP_MASS  "Figures over texts"
#define GROUP_TASKS "Tasks"
#define GROUP_LONG  "Long generation"
#define GROUP_OUT   "Program"

static const struct option_entry table[] = {
    {"model", 'm', OPTION_TEXT, AT(model), "MODEL", NULL, 0, 0, NULL, GROUP_WHAT,
     "GGUF file or Hugging Face folder"},
    {"head", 'H', OPTION_TEXTS, AT(heads), "HEAD", NULL, 0, 0, NULL, GROUP_WHAT,
     "file, \"bootstrap\" (first layer) or \"newest\" (no head); several"},
    {"file", 'f', OPTION_TEXTS, AT(files), "TEXT", NULL, 0, 0, NULL, GROUP_WHAT,
     "a text file; may be given several times"},
    {"budget", 'b', OPTION_TEXT, AT(budget_text), "LIST", "1024", 0, 0, NULL, GROUP_WHAT,
     "positions attended, all included: 512,1024"},
    {"sinks", 0, OPTION_UINT, AT(sinks), "N", "4", 0, 4096, NULL, GROUP_WHAT, "first tokens always attended"},
    {"window", 0, OPTION_UINT, AT(window), "N", "64", 0, 65536, NULL, GROUP_WHAT,
     "newest tokens always attended"},
    {"pool", 0, OPTION_CHOICE, AT(pool), "KIND", "head", 0, 0, "head|max|mean", GROUP_WHAT,
     "pooling over query heads"},
    {"key-type", 0, OPTION_CHOICE, AT(keys), "KIND", "auto", 0, 0, COMPUTE_KEYS_CHOICES, GROUP_WHAT,
     "heads' keys; int8: as run has them on a GPU; auto: f16"},
    {"variant", 0, OPTION_TEXTS, AT(variant_texts), "SPEC", NULL, 0, 0, NULL, GROUP_WHAT,
     "a way to choose beside heads x budgets: head=FILE,budget=512,sinks=16,selection=previous, or "
     "oracle=heads|groups (best sets); several"},
    {"context", 'c', OPTION_TEXT, AT(context_text), "LIST", NULL, 0, 0, NULL, GROUP_MASS,
     "lengths that texts are cut to (default: the model's)"},
    {"from", 0, OPTION_UINT, AT(from), "POSITION", "4096", 1, 0, NULL, GROUP_MASS,
     "first position that counts; of shorter contexts the second half"},
    {"positions", 0, OPTION_UINT, AT(positions), "N", "48", 1, 65536, NULL, GROUP_MASS,
     "positions a text and context where attention is looked at"},
    {"steps", 0, OPTION_UINT, AT(steps), "N", "0", 0, 0, NULL, GROUP_MASS,
     "consecutive positions a text that are followed; 0: to the end"},
    {"no-texts", 0, OPTION_FLAG, AT(no_texts), NULL, NULL, 0, 0, NULL, GROUP_MASS,
     "leave out all of these: texts are for long generations alone"},
    {"no-mass", 0, OPTION_FLAG, AT(no_mass), NULL, NULL, 0, 0, NULL, GROUP_MASS,
     "leave out attention mass, hit rate and oracles"},
    {"no-forced", 0, OPTION_FLAG, AT(no_forced), NULL, NULL, 0, 0, NULL, GROUP_MASS,
     "leave out sparse against full attention (overlap and loading stay)"},
    {"tasks", 0, OPTION_TEXT, AT(tasks_text), "LIST", NULL, 0, 0, NULL, GROUP_TASKS,
     "key-value, needle, variables, passages, copy, or all"},
    {"items", 0, OPTION_UINT, AT(items), "N", "10", 1, 100000, NULL, GROUP_TASKS,
     "items of each task and length"},
    {"seed", 0, OPTION_UINT, AT(seed), "S", "1", 0, 0, NULL, GROUP_TASKS, "of the generator"},
    {"task-context", 0, OPTION_TEXT, AT(task_context_text), "LIST", NULL, 0, 0, NULL, GROUP_TASKS,
     "lengths (default: 1024, doubled up to the model's limit)"},
    {"task-floor", 0, OPTION_FLOAT, AT(task_floor), "SHARE", "0", 0, 1, NULL, GROUP_TASKS,
     "a task is left after 40 items when full attention scores less"},
    {"chat-template", 0, OPTION_TEXT, AT(chat_template), "NAME", NULL, 0, 0, NULL, GROUP_TASKS,
     "as run (default: the model's)"},
    {"long-generation", 0, OPTION_UINT, AT(long_generation), "N", "0", 0, 1 << 20, NULL, GROUP_LONG,
     "generate N tokens behind the begin of each text; 0: do not"},
    {"long-prompt", 0, OPTION_UINT, AT(long_prompt), "N", "2048", 1, 1 << 20, NULL, GROUP_LONG,
     "tokens of that begin"},
    {"long-prompts", 0, OPTION_UINT, AT(long_prompts), "N", "1", 1, 64, NULL, GROUP_LONG,
     "such stretches of each text, evenly spread"},
    {"long-seeds", 0, OPTION_UINT, AT(long_seeds), "N", "2", 0, 8, NULL, GROUP_LONG,
     "samples beside the greedy one"},
    {"temp", 0, OPTION_FLOAT, AT(temperature), "T", "0.8", 0, 100, NULL, GROUP_LONG, "their temperature"},
    {"json", 0, OPTION_FLAG, AT(json), NULL, NULL, 0, 0, NULL, GROUP_OUT, "JSON instead of tables"},
    {"json-file", 0, OPTION_TEXT, AT(json_file), "FILE", NULL, 0, 0, NULL, GROUP_OUT,
     "write the JSON here, beside what is printed"},
    {"plot", 0, OPTION_TEXT, AT(plot), "FILE.svg", NULL, 0, 0, NULL, GROUP_OUT,
     "draw mass over budget and over position"},
    {"activations", 0, OPTION_CHOICE, AT(activations), "KIND", "f32", 0, 0, "f32|q8", GROUP_OUT,
     "what products with quantized weights take"},
    {"device", 0, OPTION_TEXT, AT(device), "DEVICE", "cpu", 0, 0, NULL, GROUP_OUT,
     "cpu, cuda:N: where the model is computed; heads choose on the CPU"},
    {"batch", 0, OPTION_UINT, AT(batch), "N", "0", 0, ENGINE_LANES, NULL, GROUP_OUT,
     "sequences that are computed together; 0: 16 on a CPU, 128 on a GPU"},
    {"cores", 0, OPTION_UINT, AT(cores), "N", "0", 0, 1024, NULL, GROUP_OUT, "threads; 0: all cores"},
    {NULL, 0, 0, 0, NULL, NULL, 0, 0, NULL, NULL, NULL},
};

static const char *end_of_word(const char *text)
{
    const char *comma = strchr(text, ',');
    return comma ? comma : text + strlen(text);
}

static int parse_list(const char *name, const char *text, uint32_t least, struct eval_list *ret,
                      struct err *err)
{
    for (const char *at = text; text; at = end_of_word(at) + 1) {
        char word[16];
        size_t n = (size_t)(end_of_word(at) - at);
        if (ret->count == EVAL_LIST_MAX)
            return err_set(err, -EINVAL, "--%s: found more than %u numbers", name, EVAL_LIST_MAX);
        if (n < sizeof word) {
            memcpy(word, at, n);
            word[n] = 0;
        }
        if (n >= sizeof word || parse_u32(word, least, 1u << 24, &ret->at[ret->count++]))
            return err_set(err, -EINVAL, "--%s: found '%s', expected numbers from %u, with commas between",
                           name, text, least);
        if (!at[n])
            break;
    }
    return 0;
}

static int parse_tasks(struct eval_options *o, struct err *err)
{
    const char *text = o->tasks_text;
    if (text && !strcmp(text, "all"))
        for (uint32_t i = 0; i < TASK_COUNT; i++)
            o->tasks[o->task_count++] = (enum task_kind)i;
    else
        for (const char *at = text; text; at = end_of_word(at) + 1) {
            size_t n = (size_t)(end_of_word(at) - at);
            if (o->task_count == TASK_COUNT || task_by_name(at, n, &o->tasks[o->task_count++]))
                return err_set(err, -EINVAL,
                               "--tasks: found '%s', expected all, or of key-value, needle, variables, "
                               "passages, copy, with commas between",
                               text);
            if (!at[n])
                break;
        }
    return 0;
}

static int parse_variants(struct eval_options *o, struct err *err)
{
    struct variant base = {
        .pool = o->pool, .keys = o->keys, .choice = {o->budgets.at[0], o->sinks, o->window, 0, 0, 0}};
    int r = 0;
    for (uint32_t i = 0; i < o->variant_texts.count && !r; i++)
        r = variant_parse(o->variant_texts.at[i], &base, &o->variants[i], err);
    return r;
}

static bool has_oracles(const struct eval_options *o)
{
    bool any = false;
    for (uint32_t i = 0; i < o->variant_texts.count; i++)
        any |= o->variants[i].oracle != ORACLE_NONE;
    return any;
}

static int check(const struct eval_options *o, struct err *err)
{
    if (!o->model)
        return err_set(err, -EINVAL, "-m MODEL is missing");
    if (!o->files.count && !o->task_count)
        return err_set(err, -EINVAL, "nothing to do: give texts with -f, or --tasks");
    if (o->no_texts && !o->task_count && !o->long_generation)
        return err_set(err, -EINVAL, "nothing to do: --no-texts leaves --tasks and --long-generation");
    if (!o->files.count && o->long_generation)
        return err_set(err, -EINVAL, "--long-generation needs texts: give them with -f");
    if (!o->files.count && o->plot)
        return err_set(err, -EINVAL, "--plot needs texts: give them with -f");
    if (o->plot && (o->no_mass || o->no_texts))
        return err_set(err, -EINVAL, "--plot draws mass, which --no-mass and --no-texts leave out");
    if (has_oracles(o) && (o->task_count || o->long_generation || o->no_forced))
        return err_set(err, -EINVAL,
                       "--variant oracle= looks at given texts in the model: not with --tasks, "
                       "--long-generation or --no-forced");
    return thread_cores_check(o->cores, err);
}

int eval_options_parse(int argc, char **argv, struct eval_options *o, struct err *err)
{
    memset(o, 0, sizeof *o);
    int r = options_parse(table, argc, argv, o, err);
    if (r)
        return r;
    r = parse_list("budget", o->budget_text, o->sinks + o->window + 1, &o->budgets, err);
    if (!r)
        r = parse_list("context", o->context_text, 16, &o->contexts, err);
    if (!r)
        r = parse_list("task-context", o->task_context_text, 64, &o->task_contexts, err);
    if (!r)
        r = parse_tasks(o, err);
    if (!r)
        r = parse_variants(o, err);
    return r ? r : check(o, err);
}

void eval_options_help(FILE *to)
{
    fputs(
        "Usage: specontext eval -m MODEL -f TEXT... [options]\n"
        "       specontext eval -m MODEL --tasks LIST [options]\n"
        "\n"
        "Measures a retrieval head: what share of the model's attention it finds, and what sparse attention\n"
        "costs in perplexity, on long-range tasks and in long generations.\n",
        to);
    options_help(table, to);
}
