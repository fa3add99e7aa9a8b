/* The command line: finds the sub-command and hands over. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "launch/bench.h"
#include "launch/eval.h"
#include "launch/head.h"
#include "launch/inspect.h"
#include "launch/plan.h"
#include "launch/run.h"
#include "launch/status.h"
#include "launch/tokenize.h"

struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *text;
};

static int help_main(int argc, char **argv);
static int version_main(int argc, char **argv);

static const struct command commands[] = {
    {"run", run_main, "answer a prompt, or many, with daemons that it starts and ends"},
    {"bench", bench_main, "measure prefill and decode through the daemons"},
    {"eval", eval_command_main, "measure a retrieval head, and what sparse attention costs"},
    {"status", status_main, "ask running daemons how they are"},
    {"plan", plan_main, "how much memory a load needs, and when layers have to be offloaded"},
    {"inspect", inspect_main, "what a model is, and whether it fits"},
    {"head", head_main, "make and inspect retrieval heads"},
    {"tokenize", tokenize_main, "text to token ids"},
    {"detokenize", detokenize_main, "token ids to text"},
    {"help", help_main, "this text, or that of a command"},
    {"version", version_main, "the version"},
};

static const struct command *find_command(const char *name)
{
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(commands[i].name, name))
            return &commands[i];
    return NULL;
}

static void print_help(FILE *to)
{
    fputs("Usage: specontext COMMAND [options]\n"
          "\n"
          "Long-context LLM inference whose KV cache lives in host memory.\n"
          "\n"
          "Commands\n",
          to);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(to, "  %-12s%s\n", commands[i].name, commands[i].text);
    fputs("\nspecontext COMMAND --help tells a command's options.\n", to);
}

static int unknown_command(const char *name)
{
    fprintf(stderr, "specontext: unknown command '%s'; specontext help lists them\n", name);
    return 2;
}

static int help_main(int argc, char **argv)
{
    if (argc < 2) {
        print_help(stdout);
        return 0;
    }
    const struct command *command = find_command(argv[1]);
    if (!command)
        return unknown_command(argv[1]);
    if (command->run == help_main || command->run == version_main) {
        print_help(stdout);
        return 0;
    }
    char *args[] = {argv[1], (char[]){"--help"}, NULL};
    return command->run(2, args);
}

static int version_main(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    printf("specontext %s\n", SPECONTEXT_VERSION);
    return 0;
}

/* A closed standard stream must not become the number of something of ours: text would go there. A closed
 * standard output takes a place that cannot be written to, so that what should have gone there fails. */
static int hold_standard_streams(void)
{
    static const int modes[] = {O_RDONLY, O_RDONLY, O_WRONLY};
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && (errno != EBADF || open("/dev/null", modes[fd]) != fd))
            return -1;
    return 0;
}

int main(int argc, char **argv)
{
    if (hold_standard_streams())
        return 1;
    if (argc < 2) {
        print_help(stderr);
        return 2;
    }
    const char *name = argv[1];
    if (!strcmp(name, "--help") || !strcmp(name, "-h"))
        name = "help";
    else if (!strcmp(name, "--version"))
        name = "version";
    const struct command *command = find_command(name);
    if (!command)
        return unknown_command(name);
    int code = command->run(argc - 1, argv + 1);
    if (code == 0 && (fflush(stdout) || ferror(stdout))) {
        fprintf(stderr, "specontext: standard output: %s\n", strerror(errno));
        code = 1;
    }
    return code;
}
