/* See variant.h. No state. */
#include "eval/variant.h"

#include <errno.h>
#include <string.h>

#include "base/parse.h"

struct word {
    const char *name;
    char *value; /* NUL-terminated, both */
};

static int choice_of(const char *value, const char *const *names, uint32_t count, uint32_t *ret)
{
    for (uint32_t i = 0; i < count; i++)
        if (!strcmp(value, names[i])) {
            *ret = i;
            return 0;
        }
    return -EINVAL;
}

static int share_of(const char *value, float *ret)
{
    double x;
    int r = parse_double(value, 0, 1, &x);
    *ret = r ? 0 : (float)x;
    return r;
}

/* "A:B:C" */
static int group_budgets_of(char *value, struct variant *v)
{
    int r = 0;
    v->group_count = 0;
    for (char *at = value, *colon; at && !r; at = colon ? colon + 1 : NULL) {
        colon = strchr(at, ':');
        if (colon)
            *colon = 0;
        r = v->group_count < LIMIT_GROUPS ? parse_u32(at, 1, 1u << 24, &v->group_budgets[v->group_count++])
                                          : -E2BIG;
        if (colon)
            *colon = ':'; /* a refusal shows all of it */
    }
    return r ? -EINVAL : 0;
}

/* 0; -ENOENT: no such name; -EINVAL: no such value. */
static int take(const struct word *w, struct variant *v)
{
    static const char *const pools[] = {"head", "max", "mean"};
    static const char *const keys[] = {"auto", "f16", "int8"};
    static const char *const oracles[] = {"none", "heads", "groups"};
    static const char *const selections[] = {"current", "previous", "mixed"};
    const struct {
        const char *name;
        uint32_t *to, most;
    } numbers[] = {{"budget", &v->choice.budget, 1u << 24},
                   {"max-budget", &v->choice.max_budget, 1u << 24},
                   {"sinks", &v->choice.sinks, 4096},
                   {"window", &v->choice.window, 65536},
                   {"pin-layers", &v->pin_layers, 65536}};
    uint32_t selection, oracle;
    for (uint32_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(w->name, numbers[i].name))
            return parse_u32(w->value, 0, numbers[i].most, numbers[i].to);
    if (!strcmp(w->name, "min-mass"))
        return share_of(w->value, &v->choice.min_mass);
    if (!strcmp(w->name, "top-p"))
        return share_of(w->value, &v->choice.top_p);
    if (!strcmp(w->name, "pins"))
        return share_of(w->value, &v->pins);
    if (!strcmp(w->name, "group-budgets"))
        return group_budgets_of(w->value, v);
    if (!strcmp(w->name, "pool"))
        return choice_of(w->value, pools, 3, &v->pool);
    if (!strcmp(w->name, "key-type"))
        return choice_of(w->value, keys, 3, &v->keys);
    if (!strcmp(w->name, "selection")) {
        int r = choice_of(w->value, selections, 3, &selection);
        v->selection = r ? v->selection : (enum selection_mode)selection;
        return r;
    }
    if (!strcmp(w->name, "oracle")) {
        int r = choice_of(w->value, oracles, 3, &oracle);
        v->oracle = r ? v->oracle : (enum oracle)oracle;
        return r;
    }
    size_t n = strlen(w->value);
    if (strcmp(w->name, "head") != 0)
        return -ENOENT;
    if (n >= sizeof v->head)
        return -EINVAL;
    memcpy(v->head, w->value, n + 1);
    return 0;
}

#define WORDS                                                                                     \
    "head=, budget=, max-budget=, sinks=, window=, pool=, selection=, min-mass=, top-p=, pins=, " \
    "pin-layers=, oracle=, group-budgets=, key-type="

/* What the value of that name can be. */
static const char *value_of(const char *name)
{
    if (!strcmp(name, "pool"))
        return "head, max or mean";
    if (!strcmp(name, "key-type"))
        return "auto, f16 or int8";
    if (!strcmp(name, "selection"))
        return "current, previous or mixed";
    if (!strcmp(name, "oracle"))
        return "none, heads or groups";
    if (!strcmp(name, "min-mass") || !strcmp(name, "top-p") || !strcmp(name, "pins"))
        return "a share from 0 to 1";
    if (!strcmp(name, "group-budgets"))
        return "A:B:..., a number of positions for each group";
    return !strcmp(name, "head")     ? "a shorter name"
           : !strcmp(name, "sinks")  ? "0 to 4096"
           : !strcmp(name, "window") ? "0 to 65536"
                                     : "a number of positions or layers";
}

int variant_parse(const char *text, const struct variant *base, struct variant *ret, struct err *err)
{
    char copy[1024];
    size_t bytes = strlen(text);
    *ret = *base;
    ret->text = text;
    if (bytes >= sizeof copy)
        return err_set(err, -EINVAL, "--variant: found %zu bytes, expected at most %zu", bytes,
                       sizeof copy - 1);
    memcpy(copy, text, bytes + 1);
    for (char *at = copy, *next; at; at = next) {
        next = strchr(at, ',');
        if (next)
            *next++ = 0;
        char *value = strchr(at, '=');
        if (value)
            *value++ = 0;
        int r = value ? take(&(struct word){at, value}, ret) : -ENOENT;
        if (r == -ENOENT)
            return err_set(err, -EINVAL, "--variant '%.60s': found '%.60s', expected " WORDS, text, at);
        if (r)
            return err_set(err, -EINVAL, "--variant '%.60s': %s: found '%.60s', expected %s", text, at, value,
                           value_of(at));
    }
    const struct choice *c = &ret->choice;
    if (c->budget <= c->sinks + c->window)
        return err_set(err, -EINVAL,
                       "--variant '%s': budget: found %u, expected more than sinks and window, %u", text,
                       c->budget, c->sinks + c->window);
    if (ret->pins > 0 && (c->min_mass > 0 || c->top_p > 0))
        return err_set(err, -EINVAL, "--variant '%s': pins do not go with lists by mass", text);
    for (uint32_t i = 0; i < ret->group_count; i++)
        if (ret->group_budgets[i] <= c->sinks + c->window)
            return err_set(err, -EINVAL,
                           "--variant '%s': group-budgets: found %u, expected more than sinks and window, %u",
                           text, ret->group_budgets[i], c->sinks + c->window);
    if (ret->group_count && (ret->pins > 0 || c->min_mass > 0 || c->top_p > 0 || ret->oracle == ORACLE_HEADS))
        return err_set(err, -EINVAL,
                       "--variant '%s': group-budgets do not go with pins, lists by mass and oracle=heads",
                       text);
    if (ret->oracle && (ret->pins > 0 || ret->selection != SELECTION_CURRENT))
        return err_set(err, -EINVAL,
                       "--variant '%s': oracles choose for the current token and do not go with pins", text);
    if (c->min_mass > 0 && c->max_budget == 0)
        ret->choice.max_budget = 2 * c->budget; /* as run has it */
    return 0;
}
