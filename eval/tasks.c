/* See tasks.h. Texts are made of a few patterns and words; nothing is read. Units are drawn one after another
 * from random numbers of their own, so that a longer text of an item is the shorter one with more in it. */
#include "eval/tasks.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static const char *const names[TASK_COUNT] = {"key-value", "needle", "variables", "passages", "copy"};

static const char *const people[] = {"Anna",  "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry",
                                     "Irene", "Jonas", "Karin", "Louis", "Maria", "Nils",  "Olga",  "Peter"};
static const char *const acts[] = {"walked to",    "wrote about",    "painted",     "talked of",
                                   "looked after", "remembered",     "asked about", "cleaned",
                                   "described",    "came back from", "went past",   "drew a map of"};
static const char *const places[] = {"the old mill",     "the harbour",    "the railway station",
                                     "the small garden", "the town hall",  "the stone bridge",
                                     "the library",      "the north gate", "the market square",
                                     "the white house",  "the river bank", "the school"};
static const char *const times[] = {"in the morning",  "before lunch",   "late at night",   "on a rainy day",
                                    "during the week", "after the fair", "in early spring", "last winter"};
static const char *const things[] = {"apple",  "table",  "river",  "candle", "window", "garden",
                                     "silver", "basket", "bridge", "letter", "mirror", "pencil",
                                     "orange", "hammer", "button", "ladder"};

#define WORDS(list) ((uint32_t)(sizeof list / sizeof *list))

/* A random number below `below` that depends on nothing but the arguments. */
static uint32_t draw(uint64_t seed, uint32_t item, uint32_t unit, uint32_t use, uint32_t below)
{
    uint64_t x = seed + 0x9e3779b97f4a7c15u * (((uint64_t)item << 40) + ((uint64_t)unit << 8) + use + 1);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (uint32_t)((x ^ (x >> 31)) % below);
}

struct maker {
    struct task *task;
    uint64_t seed;
    uint32_t item, units;
};

__attribute__((format(printf, 2, 3))) static void say(struct maker *m, const char *format, ...)
{
    char line[512];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    text_buf_append(&m->task->text, line, n < (int)sizeof line ? (size_t)n : sizeof line - 1);
}

__attribute__((format(printf, 2, 3))) static void expect(struct maker *m, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(m->task->answers[m->task->answer_count++], TASK_WORD_BYTES, format, args);
    va_end(args);
}

/* What the answer begins with, word for word as in the text: small models go on where they would refuse. */
__attribute__((format(printf, 2, 3))) static void lead(struct maker *m, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(m->task->lead, sizeof m->task->lead, format, args);
    va_end(args);
}

static uint32_t number(const struct maker *m, uint32_t unit, uint32_t use, uint32_t below)
{
    return draw(m->seed, m->item, unit, use, below);
}

/* Uses 0 .. 3 of the unit. */
static void say_sentence(struct maker *m, uint32_t unit)
{
    say(m, "%s %s %s %s. ", people[number(m, unit, 0, WORDS(people))], acts[number(m, unit, 1, WORDS(acts))],
        places[number(m, unit, 2, WORDS(places))], times[number(m, unit, 3, WORDS(times))]);
}

enum { ONCE = 0xffffff }; /* the unit number of what an item has once */

/* Where, of `units` units, something stands: anywhere, each place as likely; grows with the text. */
static uint32_t somewhere(const struct maker *m, uint32_t use)
{
    return (uint32_t)((uint64_t)number(m, ONCE, use, 1 << 20) * m->units >> 20);
}

/* `count` different ones of `things`, into ret; uses 32 .. 47 of what an item has once. */
static void draw_things(const struct maker *m, uint32_t count, const char **ret)
{
    const char *left[WORDS(things)];
    memcpy(left, things, sizeof left);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t at = i + number(m, ONCE, 32 + i, WORDS(things) - i);
        ret[i] = left[at];
        left[at] = left[i];
    }
}

/* Whether part i of `parts`, somewhere in the i-th stretch of the text, stands before this unit. */
static bool stands_before(const struct maker *m, uint32_t part, uint32_t parts, uint32_t unit)
{
    uint32_t within = number(m, ONCE, 64 + part, 1024);
    return unit == (uint32_t)((((uint64_t)part << 10) + within) * m->units / ((uint64_t)parts << 10));
}

/* Numbers of a few people; one is asked for. */
static void make_key_value(struct maker *m)
{
    enum { PAIRS = 3 };
    uint32_t asked = number(m, ONCE, 0, PAIRS), first = number(m, ONCE, 1, WORDS(people));
    for (uint32_t i = 0; i < m->units; i++) {
        for (uint32_t k = 0; k < PAIRS; k++)
            if (stands_before(m, k, PAIRS, i))
                say(m, "The secret number of %s is %05u. ", people[(first + 5 * k) % WORDS(people)],
                    10000 + number(m, ONCE, 16 + k, 90000));
        say_sentence(m, i);
    }
    const char *who = people[(first + 5 * asked) % WORDS(people)];
    say(m, "\n\nWhat is the secret number of %s? Answer with the number alone.", who);
    lead(m, "The secret number of %s is", who);
    expect(m, "%05u", 10000 + number(m, ONCE, 16 + asked, 90000));
    m->task->answer_tokens = 12;
}

static void make_needle(struct maker *m)
{
    uint32_t at = somewhere(m, 0), who = number(m, ONCE, 1, WORDS(people)),
             code = 10000 + number(m, ONCE, 2, 90000);
    for (uint32_t i = 0; i < m->units; i++) {
        if (i == at)
            say(m, "The secret number of %s is %05u. ", people[who], code);
        say_sentence(m, i);
    }
    say(m, "\n\nWhat is the secret number of %s? Answer with the number alone.", people[who]);
    lead(m, "The secret number of %s is", people[who]);
    expect(m, "%05u", code);
    m->task->answer_tokens = 12;
}

/* A number that goes from one to the next, each somewhere behind the one before. The answer's begin walks the
 * way back: a small model does not. */
static void make_variables(struct maker *m)
{
    enum { LINKS = 3 };
    uint32_t value = 10000 + number(m, ONCE, 2, 90000), first = number(m, ONCE, 1, WORDS(people));
    const char *who[LINKS];
    for (uint32_t k = 0; k < LINKS; k++)
        who[k] = people[(first + 5 * k) % WORDS(people)];
    for (uint32_t i = 0; i < m->units; i++) {
        for (uint32_t k = 0; k < LINKS; k++)
            if (stands_before(m, k, LINKS, i) && k)
                say(m, "%s has the number of %s. ", who[k], who[k - 1]);
            else if (stands_before(m, k, LINKS, i))
                say(m, "The secret number of %s is %05u. ", who[0], value);
        say_sentence(m, i);
    }
    say(m, "\n\nWhat is the secret number of %s? Answer with the number alone.", who[LINKS - 1]);
    lead(m, "%s has the number of %s. %s has the number of %s. The secret number of %s is", who[2], who[1],
         who[1], who[0], who[0]);
    expect(m, "%05u", value);
    m->task->answer_tokens = 12;
}

/* Eight sentences a passage; some passages are said again. */
static void make_passages(struct maker *m)
{
    enum { SENTENCES = 8 };
    uint32_t passages = m->units / SENTENCES + 1, different = 0;
    say(m, "Some of these passages may be repeated.\n\n");
    for (uint32_t i = 0; i < passages; i++) {
        bool again = i > 0 && number(m, i, 4, 3) == 0;
        uint32_t of = again ? number(m, i, 5, different) : different;
        different += !again;
        say(m, "Passage %u: ", i + 1);
        for (uint32_t j = 0; j < SENTENCES; j++)
            say_sentence(m, of * SENTENCES + j);
        say(m, "\n\n");
    }
    say(m, "How many different passages are there? Answer with the number alone.");
    lead(m, "The number of different passages is");
    expect(m, "%u", different);
    m->task->answer_tokens = 12;
}

static void make_copy(struct maker *m)
{
    enum { ITEMS = 8 };
    const char *words[ITEMS];
    draw_things(m, ITEMS, words);
    say(m, "This is the list:\n");
    for (uint32_t i = 0; i < ITEMS; i++) {
        uint32_t value = 10 + number(m, ONCE, i, 90);
        say(m, "%s %u\n", words[i], value);
        if (i)
            expect(m, "%s %u", words[i], value);
        else
            lead(m, "This is the list:\n%s %u\n", words[i], value);
    }
    say(m, "\nThis is a report:\n");
    for (uint32_t i = 0; i < m->units; i++)
        say_sentence(m, i);
    say(m, "\n\nRepeat the list, line by line.");
    m->task->answer_tokens = 56;
}

const char *task_name(enum task_kind kind)
{
    return names[kind];
}

int task_by_name(const char *name, uint64_t bytes, enum task_kind *ret)
{
    for (uint32_t i = 0; i < TASK_COUNT; i++)
        if (strlen(names[i]) == bytes && !memcmp(names[i], name, bytes)) {
            *ret = (enum task_kind)i;
            return 0;
        }
    return -ENOENT;
}

void task_make(enum task_kind kind, uint64_t seed, uint32_t item, uint32_t units, struct task *ret)
{
    static void (*const make[TASK_COUNT])(struct maker *) = {make_key_value, make_needle, make_variables,
                                                             make_passages, make_copy};
    *ret = (struct task){.answer_count = 0};
    struct maker m = {ret, seed, item + ((uint32_t)kind << 16), units};
    make[kind](&m);
}

void task_free(struct task *task)
{
    text_buf_free(&task->text);
    memset(task, 0, sizeof *task);
}

/* The answer in text[from, bytes) with no letter or digit beside it: where it ends, or 0. */
static uint64_t find_word(const char *text, uint64_t from, uint64_t bytes, const char *answer)
{
    uint64_t n = strlen(answer);
    for (uint64_t at = from; at + n <= bytes; at++) {
        bool begins = at == 0 || !isalnum((unsigned char)text[at - 1]);
        bool ends = at + n == bytes || !isalnum((unsigned char)text[at + n]);
        if (begins && ends && !memcmp(text + at, answer, n))
            return at + n;
    }
    return 0;
}

double task_score(const struct task *task, const char *text, uint64_t bytes)
{
    if (task->answer_count == 1) {
        uint64_t first = 0;
        while (first < bytes && !isdigit((unsigned char)text[first]))
            first++;
        uint64_t end = find_word(text, first, bytes, task->answers[0]);
        return end == first + strlen(task->answers[0]) ? 1 : 0;
    }
    uint32_t found = 0;
    uint64_t at = 0;
    for (uint32_t i = 0; i < task->answer_count; i++) {
        uint64_t end = find_word(text, at, bytes, task->answers[i]);
        found += end != 0;
        at = end ? end : at;
    }
    return (double)found / task->answer_count;
}
