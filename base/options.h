/* Options of a program or sub-command: one table says name, argument, default, group and text; parsing,
 * defaults and the help are all made from it, so that none of them can contradict another. */
#ifndef BASE_OPTIONS_H
#define BASE_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "base/err.h"

enum option_kind {
    OPTION_TEXT,   /* const char *: any argument */
    OPTION_TEXTS,  /* struct option_texts: any argument; occurrences add up, each with the words behind it */
    OPTION_UINT,   /* uint32_t, or an int when `most` fits it */
    OPTION_INT64,  /* int64_t */
    OPTION_FLOAT,  /* float; finite */
    OPTION_SIZE,   /* uint64_t bytes, as parse_size reads them */
    OPTION_FLAG,   /* bool: true when the option stands there; takes no argument */
    OPTION_CHOICE, /* uint32_t, or an enum that counts from 0: index into `choices` */
    OPTION_WORDS,  /* struct option_words: what is no option, wherever it stands; name "", no group */
};

#define OPTION_TEXTS_MAX 64u

struct option_texts {
    const char *at[OPTION_TEXTS_MAX];
    uint32_t count;
};

struct option_words {
    char **at; /* into argv, which is put into another order */
    uint32_t count;
};

struct option_entry {
    const char *name; /* without "--"; NULL ends a table */
    char letter;      /* the short form, or 0 */
    enum option_kind kind;
    size_t at;            /* offset into the values */
    const char *argument; /* placeholder in the help; NULL for a flag */
    const char *initial;  /* default, parsed like an argument; NULL: as `values` has it */
    double least, most;   /* numbers: the range, both included; most 0 = as far as the type goes */
    const char *choices;  /* OPTION_CHOICE: "sparse|full" */
    const char *group;    /* heading in the help; NULL: not shown */
    const char *text;
};

/* Puts the defaults into `values`, then what argv[1..] says. "--name value", "--name=value", "-x value". A
 * second occurrence replaces the first (but OPTION_TEXTS keeps all, up to OPTION_TEXTS_MAX). 0; 1 when
 * --help or -h stands there; -EINVAL with the option's name. */
int options_parse(const struct option_entry *table, int argc, char **argv, void *values, struct err *err);

/* The table as help: groups in order of first appearance, defaults in brackets. */
void options_help(const struct option_entry *table, FILE *to);

#endif
