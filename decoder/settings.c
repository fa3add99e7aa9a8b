/* The decoder's command line; see settings.h. No state, main only. */
#include "decoder/settings.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/check.h"
#include "link/runtime.h"
#include "proto/limits.h"

enum { DEFAULT_SEQUENCES = 32, DEFAULT_CHUNK = 256, THREADS_MAX = 1024 };

static const struct option table[] = {
    {"runtime", required_argument, NULL, 'r'},
    {"lifeline", required_argument, NULL, 'l'},
    {"log", required_argument, NULL, 'L'},
    {"model", required_argument, NULL, 'm'},
    {"context", required_argument, NULL, 'c'},
    {"threads", required_argument, NULL, 't'},
    {"sequences", required_argument, NULL, 's'},
    {"chunk", required_argument, NULL, 'C'},
    {"early-layers", required_argument, NULL, 'e'},
    {"isa", required_argument, NULL, 'i'},
    {"activations", required_argument, NULL, 'a'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static const char *name_of(int option)
{
    for (const struct option *o = table; o->name; o++)
        if (o->val == option)
            return o->name;
    return "?";
}

static int number(int option, long least, long most, long *ret, struct err *err)
{
    char *end;
    errno = 0;
    long value = strtol(optarg, &end, 10);
    if (errno || end == optarg || *end || value < least || value > most)
        return err_set(err, -EINVAL, "--%s: found '%s', expected %ld to %ld", name_of(option), optarg, least,
                       most);
    *ret = value;
    return 0;
}

static int choose_isa(enum compute_isa *ret, struct err *err)
{
    if (compute_isa_parse(optarg, ret) < 0)
        return err_set(err, -EINVAL, "--isa: found '%s', expected auto, reference, avx2 or avx512", optarg);
    return 0;
}

static int choose_activations(enum compute_activations *ret, struct err *err)
{
    if (strcmp(optarg, "f32") && strcmp(optarg, "q8"))
        return err_set(err, -EINVAL, "--activations: found '%s', expected f32 or q8", optarg);
    *ret = strcmp(optarg, "q8") ? COMPUTE_ACTIVATIONS_F32 : COMPUTE_ACTIVATIONS_Q8;
    return 0;
}

static int take(int option, struct settings *o, struct err *err)
{
    long n = 0;
    int r = 0;
    switch (option) {
    case 'r':
        o->runtime = optarg;
        return 0;
    case 'm':
        o->model = optarg;
        return 0;
    case 'L':
        if (log_level_parse(optarg, &o->log) < 0)
            return err_set(err, -EINVAL, "--log: found '%s', expected error, warn, info or debug", optarg);
        return 0;
    case 'l':
        r = number(option, 0, 1 << 20, &n, err);
        o->lifeline = (int)n;
        return r;
    case 'c':
        r = number(option, 0, LIMIT_CONTEXT, &n, err);
        o->context = (uint32_t)n;
        return r;
    case 't':
        r = number(option, 1, THREADS_MAX, &n, err);
        o->threads = (int)n;
        return r;
    case 's':
        r = number(option, 1, LIMIT_SEQUENCES, &n, err);
        o->sequences = (uint32_t)n;
        return r;
    case 'C':
        r = number(option, 1, LIMIT_STEP_TOKENS, &n, err);
        o->chunk = (uint32_t)n;
        return r;
    case 'e':
        r = number(option, 0, LIMIT_LAYERS, &n, err);
        o->early_layers = (int32_t)n;
        return r;
    case 'i':
        return choose_isa(&o->isa, err);
    case 'a':
        return choose_activations(&o->activations, err);
    case 'h':
        o->help = 1;
        return 0;
    }
    CHECK(!"every option of the table is handled");
    return -EINVAL;
}

int settings_parse(int argc, char **argv, struct settings *ret, struct err *err)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    struct settings o = {.runtime = RUNTIME_DIR_DEFAULT,
                         .lifeline = -1,
                         .log = LOG_LEVEL_INFO,
                         .threads = cpus > 0 ? (int)cpus : 1,
                         .sequences = DEFAULT_SEQUENCES,
                         .chunk = DEFAULT_CHUNK,
                         .early_layers = -1,
                         .isa = COMPUTE_ISA_AUTO};
    optind = 0;
    opterr = 0;
    int option;
    while ((option = getopt_long(argc, argv, ":m:c:h", table, NULL)) != -1) {
        if (option == '?' || option == ':')
            return err_set(err, -EINVAL, "%s: %s", argv[optind - 1],
                           option == ':' ? "expected a value" : "not an option of the decoder");
        int r = take(option, &o, err);
        if (r < 0)
            return r;
    }
    if (optind < argc)
        return err_set(err, -EINVAL, "%s: found an argument, expected options only", argv[optind]);
    if (!o.model && !o.help)
        return err_set(err, -EINVAL, "--model: expected the path of a GGUF file");
    *ret = o;
    return 0;
}

void settings_help(void)
{
    printf("specontext-decoder: the language model's forward passes, batching and sampling\n"
           "\n"
           "  -m, --model FILE       GGUF file (required)\n"
           "  -c, --context N        positions of a sequence; 0: the model's (default 0)\n"
           "      --sequences N      sequences live at once (default %d, at most %u)\n"
           "      --chunk N          prompt tokens computed in one step (default %d, at most %u)\n"
           "      --early-layers N   mixed selection: layers that use the set before (default: a third)\n"
           "      --threads N        threads that compute (default: all processors)\n"
           "      --isa NAME         auto, reference, avx2 or avx512 (default auto)\n"
           "      --activations KIND what products with quantized weights take: f32, or q8 (rounded to 8 bits;\n"
           "                         default f32)\n"
           "      --runtime DIR      directory of the sockets (default %s)\n"
           "      --lifeline FD      end when this descriptor does\n"
           "      --log LEVEL        error, warn, info or debug (default info)\n"
           "  -h, --help\n",
           DEFAULT_SEQUENCES, LIMIT_SEQUENCES, DEFAULT_CHUNK, LIMIT_STEP_TOKENS, RUNTIME_DIR_DEFAULT);
}
