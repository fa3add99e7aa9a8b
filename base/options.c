/* Parses and explains option tables. No state; called from main's thread only. It never prints errors itself:
 * the caller knows the program's name and the exit code. */
#include "base/options.h"

#include <errno.h>
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/parse.h"

#define HELP_COLUMN 34 /* where texts begin */

/* `most` 0 stands for "as far as the type goes". */
static double upper(const struct option_entry *o, double type_most)
{
    return o->most != 0 ? o->most : type_most;
}

static int parse_int64(const struct option_entry *o, const char *text, int64_t *ret)
{
    char *end;
    errno = 0;
    if ((text[0] < '0' || text[0] > '9') && text[0] != '-')
        return -EINVAL;
    long long value = strtoll(text, &end, 10);
    if (errno || end == text || *end || (double)value < o->least)
        return -EINVAL;
    *ret = value;
    return 0;
}

static int parse_float(const struct option_entry *o, const char *text, float *ret)
{
    double value;
    int r = parse_double(text, o->least, upper(o, (double)FLT_MAX), &value);
    if (!r)
        *ret = (float)value;
    return r;
}

/* Index of `text` in "a|b|c". */
static int parse_choice(const char *choices, const char *text, uint32_t *ret)
{
    size_t length = strlen(text);
    uint32_t index = 0;
    for (const char *at = choices; at; index++) {
        const char *bar = strchr(at, '|');
        size_t n = bar ? (size_t)(bar - at) : strlen(at);
        if (n == length && !memcmp(at, text, n)) {
            *ret = index;
            return 0;
        }
        at = bar ? bar + 1 : NULL;
    }
    return -EINVAL;
}

static int parse_texts(const char *text, struct option_texts *ret)
{
    if (ret->count == OPTION_TEXTS_MAX)
        return -E2BIG;
    ret->at[ret->count++] = text;
    return 0;
}

static int parse_value(const struct option_entry *o, const char *text, void *values)
{
    void *at = (char *)values + o->at;
    switch (o->kind) {
    case OPTION_TEXT:
        *(const char **)at = text;
        return 0;
    case OPTION_TEXTS:
        return parse_texts(text, at);
    case OPTION_UINT:
        return parse_u32(text, (uint32_t)o->least, (uint32_t)upper(o, UINT32_MAX), at);
    case OPTION_INT64:
        return parse_int64(o, text, at);
    case OPTION_FLOAT:
        return parse_float(o, text, at);
    case OPTION_SIZE:
        return parse_size(text, at);
    case OPTION_CHOICE:
        return parse_choice(o->choices, text, at);
    case OPTION_FLAG:
        *(bool *)at = true;
        return 0;
    case OPTION_WORDS:
        break;
    }
    return -EINVAL;
}

/* What an argument should have been, for the message. */
static void describe(const struct option_entry *o, char *ret, size_t bytes)
{
    switch (o->kind) {
    case OPTION_CHOICE:
        snprintf(ret, bytes, "one of %s", o->choices);
        break;
    case OPTION_SIZE:
        snprintf(ret, bytes, "a size such as 64M or 2G");
        break;
    case OPTION_TEXTS:
        snprintf(ret, bytes, "at most %u of them", OPTION_TEXTS_MAX);
        break;
    case OPTION_TEXT:
    case OPTION_FLAG:
        snprintf(ret, bytes, "a text");
        break;
    default:
        if (o->most != 0)
            snprintf(ret, bytes, "a number from %.10g to %.10g", o->least, o->most);
        else
            snprintf(ret, bytes, "a number, at least %.10g", o->least);
    }
}

static const struct option_entry *find_name(const struct option_entry *table, const char *name, size_t length)
{
    for (const struct option_entry *o = table; o->name; o++)
        if (o->kind != OPTION_WORDS && strlen(o->name) == length && !memcmp(o->name, name, length))
            return o;
    return NULL;
}

static const struct option_entry *find_letter(const struct option_entry *table, char letter)
{
    for (const struct option_entry *o = table; o->name; o++)
        if (o->letter && o->letter == letter)
            return o;
    return NULL;
}

/* Finds the option that `word` names; *ret_inline is the argument after '=', or NULL. */
static const struct option_entry *find(const struct option_entry *table, const char *word,
                                       const char **ret_inline)
{
    *ret_inline = NULL;
    if (word[0] != '-')
        return NULL;
    if (word[1] != '-')
        return word[1] && !word[2] ? find_letter(table, word[1]) : NULL;
    const char *equals = strchr(word + 2, '=');
    if (equals)
        *ret_inline = equals + 1;
    return find_name(table, word + 2, equals ? (size_t)(equals - word - 2) : strlen(word + 2));
}

static int refuse(const struct option_entry *o, const char *argument, struct err *err)
{
    char expected[128];
    describe(o, expected, sizeof expected);
    return err_set(err, -EINVAL, "--%s: found '%s', expected %s", o->name, argument, expected);
}

/* To the front, behind those before it. */
static void take_word(struct option_words *words, char **from)
{
    char *word = *from, **to = words->at + words->count++;
    memmove(to + 1, to, (size_t)(from - to) * sizeof *to);
    *to = word;
}

static struct option_words *find_words(const struct option_entry *table, char **argv, void *values)
{
    while (table->name && table->kind != OPTION_WORDS)
        table++;
    struct option_words *words = table->name ? (void *)((char *)values + table->at) : NULL;
    if (words)
        *words = (struct option_words){argv + 1, 0};
    return words;
}

int options_parse(const struct option_entry *table, int argc, char **argv, void *values, struct err *err)
{
    struct option_words *words = find_words(table, argv, values);
    for (const struct option_entry *o = table; o->name; o++)
        if (o->initial)
            CHECK(!parse_value(o, o->initial, values));
    const struct option_entry *texts = NULL; /* the option that further words belong to */
    for (int i = 1; i < argc; i++) {
        const char *argument;
        if (texts && argv[i][0] != '-') {
            if (parse_value(texts, argv[i], values))
                return refuse(texts, argv[i], err);
            continue;
        }
        if (words && argv[i][0] != '-') {
            take_word(words, argv + i);
            continue;
        }
        if (!strcmp(argv[i], "--help") || !strcmp(argv[i], "-h"))
            return 1;
        const struct option_entry *o = find(table, argv[i], &argument);
        if (!o)
            return err_set(err, -EINVAL, "unknown %s '%s'", argv[i][0] == '-' ? "option" : "argument",
                           argv[i]);
        if (o->kind == OPTION_FLAG && argument)
            return err_set(err, -EINVAL, "--%s takes no argument, found '%s'", o->name, argument);
        if (o->kind != OPTION_FLAG && !argument && i + 1 < argc)
            argument = argv[++i];
        if (o->kind != OPTION_FLAG && !argument)
            return err_set(err, -EINVAL, "--%s: its argument %s is missing", o->name, o->argument);
        if (parse_value(o, argument, values))
            return refuse(o, argument, err);
        texts = o->kind == OPTION_TEXTS ? o : NULL;
    }
    return 0;
}

static void help_line(const struct option_entry *o, FILE *to)
{
    char left[128];
    int n = o->letter ? snprintf(left, sizeof left, "  -%c, --%s", o->letter, o->name)
                      : snprintf(left, sizeof left, "      --%s", o->name);
    if (o->argument)
        n += snprintf(left + n, sizeof left - (size_t)n, " %s", o->argument);
    if (n >= HELP_COLUMN)
        fprintf(to, "%s\n%*s", left, HELP_COLUMN, "");
    else
        fprintf(to, "%-*s", HELP_COLUMN, left);
    fprintf(to, "%s", o->text);
    if (o->kind == OPTION_CHOICE)
        fprintf(to, ": %s", o->choices);
    if (o->initial)
        fprintf(to, " [%s]", o->initial);
    fputc('\n', to);
}

void options_help(const struct option_entry *table, FILE *to)
{
    for (const struct option_entry *first = table; first->name; first++) {
        int seen = 0; /* the group was printed with an option before this one */
        for (const struct option_entry *o = table; o < first && !seen; o++)
            seen = first->group && o->group && !strcmp(o->group, first->group);
        if (!first->group || seen)
            continue;
        fprintf(to, "\n%s\n", first->group);
        for (const struct option_entry *o = first; o->name; o++)
            if (o->group && !strcmp(o->group, first->group))
                help_line(o, to);
    }
}
