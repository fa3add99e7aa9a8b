/* Options of specontext-retriever; see arguments.h. One table gives parsing and help. Called once, by main.
 * */
#include "retriever/arguments.h"

#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/parse.h"
#include "link/runtime.h"
#include "model/head.h"
#include "proto/limits.h"

enum { EXIT_USAGE = 2, THREADS_MAX = 1024, FD_MAX = 1 << 20 };

static const struct {
    struct option option;
    const char *argument, *help;
} table[] = {
    {{"model", required_argument, NULL, 'm'},
     "FILE",
     "the language model (GGUF): its token embedding is used"},
    {{"head", required_argument, NULL, 'H'}, "FILE", "the retrieval head (safetensors), made for this model"},
    {{"context", required_argument, NULL, 'c'}, "N", "positions of a sequence (default 0: the model's)"},
    {{"sequences", required_argument, NULL, 's'}, "N", "open at a time (default 32, at most 64)"},
    {{"pool", required_argument, NULL, 'p'},
     "KIND",
     "max or mean of a group's query heads (default: the head's)"},
    {{"threads", required_argument, NULL, 't'}, "N", "for computing (default: all processors)"},
    {{"runtime", required_argument, NULL, 'r'},
     "DIR",
     "where the sockets are (default " RUNTIME_DIR_DEFAULT ")"},
    {{"lifeline", required_argument, NULL, 'l'}, "FD", "end when this descriptor ends"},
    {{"log", required_argument, NULL, 'L'}, "LEVEL", "error, warn, info or debug (default info)"},
    {{"help", no_argument, NULL, 'h'}, "", "this text"},
};
enum { OPTIONS = sizeof table / sizeof *table };

static void print_help(void)
{
    printf("usage: specontext-retriever -m MODEL -H HEAD [options]\n\n"
           "Picks, for each step of each sequence, the positions that attention will read.\n\n");
    for (int i = 0; i < OPTIONS; i++) {
        int value = table[i].option.val;
        char mark[4] = "   ";
        if (value == 'm' || value == 'H' || value == 'h')
            snprintf(mark, sizeof mark, "-%c,", value);
        printf("  %s --%-10s %-6s %s\n", mark, table[i].option.name, table[i].argument, table[i].help);
    }
}

static int mistake(const char *what, const char *value)
{
    fprintf(stderr, "specontext-retriever: %s%s%s\n", what, value ? ": " : "", value ? value : "");
    return EXIT_USAGE;
}

static int take_pool(const char *text, struct arguments *o)
{
    for (int i = HEAD_POOL_MAX; i <= HEAD_POOL_MEAN; i++) {
        if (!strcmp(text, head_pool_name((enum head_pool)i))) {
            o->pool = i;
            return 0;
        }
    }
    return -1;
}

/* 0, or negative when the value is none. */
static int take_value(int option, const char *text, struct arguments *o)
{
    uint32_t fd = 0;
    int r = 0;
    switch (option) {
    case 'm':
        o->model = text;
        return 0;
    case 'H':
        o->head = text;
        return 0;
    case 'r':
        o->runtime = text;
        return 0;
    case 'c':
        return parse_u32(text, 0, LIMIT_CONTEXT, &o->context);
    case 's':
        return parse_u32(text, 1, LIMIT_SEQUENCES, &o->sequences);
    case 't':
        return parse_u32(text, 1, THREADS_MAX, &o->threads);
    case 'p':
        return take_pool(text, o);
    case 'l':
        r = parse_u32(text, 0, FD_MAX, &fd);
        o->lifeline = (int)fd;
        return r;
    default:
        return log_level_parse(text, &o->log);
    }
}

int arguments_parse(int argc, char **argv, struct arguments *o)
{
    struct option list[OPTIONS + 1] = {0};
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    *o = (struct arguments){.runtime = RUNTIME_DIR_DEFAULT,
                            .lifeline = -1,
                            .log = LOG_LEVEL_INFO,
                            .threads = processors > 0 && processors < THREADS_MAX ? (uint32_t)processors : 1,
                            .pool = -1,
                            .sequences = 32};
    for (int i = 0; i < OPTIONS; i++)
        list[i] = table[i].option;
    int option, at = -1;
    optind = 0; /* parse from the beginning, whatever was parsed before */
    while ((option = getopt_long(argc, argv, ":m:H:h", list, &at)) != -1) {
        if (option == 'h') {
            print_help();
            return 0;
        }
        if (option == '?' || option == ':')
            return mistake(option == ':' ? "an argument is missing after" : "no such option",
                           argv[optind - 1]);
        if (take_value(option, optarg, o) < 0) {
            char what[64];
            snprintf(what, sizeof what, "--%s: a value that cannot be", at >= 0 ? list[at].name : "option");
            return mistake(what, optarg);
        }
    }
    if (optind < argc)
        return mistake("no further argument is taken, found", argv[optind]);
    if (!o->model)
        return mistake("--model is needed", NULL);
    if (!o->head)
        return mistake("--head is needed", NULL);
    return -1;
}
