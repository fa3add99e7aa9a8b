/* Command line of specontext-kvstore; see options.h. */
#include "kvstore/options.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/parse.h"
#include "link/runtime.h"

struct option_text {
    const char *name, *argument, *text; /* argument NULL: a switch */
};

enum option_id {
    OPT_RUNTIME,
    OPT_LIFELINE,
    OPT_LOG,
    OPT_DEVICE_MEMORY,
    OPT_HOST_MEMORY,
    OPT_SEQUENCES,
    OPT_SLOTS,
    OPT_BUDGET,
    OPT_THREADS,
    OPT_NO_ELASTIC,
    OPT_NO_PREFIX,
    OPT_NO_OFFLOAD,
    OPT_OFFLOAD_LAYERS,
    OPT_POISON,
    OPT_HELP,
    OPT_COUNT
};

static const struct option_text TEXTS[OPT_COUNT] = {
    [OPT_RUNTIME] = {"runtime", "DIR", "runtime directory (default " RUNTIME_DIR_DEFAULT ")"},
    [OPT_LIFELINE] = {"lifeline", "FD", "end when this descriptor reads end-of-file"},
    [OPT_LOG] = {"log", "LEVEL", "error, warn, info, debug (default info)"},
    [OPT_DEVICE_MEMORY] = {"device-memory", "SIZE", "KV memory of the device (default 256M)"},
    [OPT_HOST_MEMORY] = {"host-memory", "SIZE",
                         "most memory of the host arena's rows (default: half of RAM)"},
    [OPT_SEQUENCES] = {"sequences", "N", "sequences at a time, 1 to 64 (default 32)"},
    [OPT_SLOTS] = {"slots", "N", "slots of a sequence, group and row head (default 0: 1.5 x its budget)"},
    [OPT_BUDGET] = {"budget", "N", "largest budget that a sequence may ask for (default 0: the context)"},
    [OPT_THREADS] = {"threads", "N", "threads that plan and gather (default: processors online, at most 16)"},
    [OPT_NO_ELASTIC] = {"no-elastic", NULL, "gather every selection whole"},
    [OPT_NO_PREFIX] = {"no-prefix", NULL, "keep no blocks for later requests"},
    [OPT_NO_OFFLOAD] = {"no-offload", NULL, "keep all layers on the device, or refuse"},
    [OPT_OFFLOAD_LAYERS] = {"offload-layers", "N", "offload at least the last N layers (default 0)"},
    [OPT_POISON] = {"poison", NULL, "tests: fill what nobody wrote with NaN"},
    [OPT_HELP] = {"help", NULL, "this text"},
};

static void print_help(void)
{
    printf("specontext-kvstore: holds the KV cache in host memory and brings to the device what attention "
           "reads\n\n");
    for (int i = 0; i < OPT_COUNT; i++) {
        char left[64];
        snprintf(left, sizeof left, "--%s %s", TEXTS[i].name, TEXTS[i].argument ? TEXTS[i].argument : "");
        printf("  %-24s %s\n", left, TEXTS[i].text);
    }
}

static void set_defaults(struct options *o)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE), cores = sysconf(_SC_NPROCESSORS_ONLN);
    *o = (struct options){.runtime = RUNTIME_DIR_DEFAULT, .lifeline = -1, .level = LOG_LEVEL_INFO};
    o->planner = (struct planner_options){
        .device_bytes = UINT64_C(256) << 20,
        .host_bytes = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page / 2 : UINT64_C(1) << 30,
        .sequences = 32,
        .threads = cores > 16  ? 16
                   : cores > 0 ? (int)cores
                               : 1};
}

static int apply(struct options *o, int id, const char *value)
{
    struct planner_options *p = &o->planner;
    uint32_t n = 0;
    int r = 0;
    switch (id) {
    case OPT_RUNTIME:
        o->runtime = value;
        break;
    case OPT_LIFELINE:
        r = parse_u32(value, 0, INT32_MAX, &n);
        o->lifeline = (int)n;
        break;
    case OPT_LOG:
        r = log_level_parse(value, &o->level);
        break;
    case OPT_DEVICE_MEMORY:
        r = parse_size(value, &p->device_bytes);
        break;
    case OPT_HOST_MEMORY:
        r = parse_size(value, &p->host_bytes);
        break;
    case OPT_SEQUENCES:
        r = parse_u32(value, 1, LIMIT_SEQUENCES, &p->sequences);
        break;
    case OPT_SLOTS:
        r = parse_u32(value, 0, ELASTIC_SLOTS_MAX, &p->slots);
        break;
    case OPT_BUDGET:
        r = parse_u32(value, 0, LIMIT_CONTEXT, &p->budget);
        break;
    case OPT_THREADS:
        r = parse_u32(value, 1, 256, &n);
        p->threads = (int)n;
        break;
    case OPT_NO_ELASTIC:
        p->no_elastic = true;
        break;
    case OPT_NO_PREFIX:
        p->no_prefix = true;
        break;
    case OPT_NO_OFFLOAD:
        p->no_offload = true;
        break;
    case OPT_OFFLOAD_LAYERS:
        r = parse_u32(value, 0, LIMIT_LAYERS, &p->offload_layers);
        break;
    case OPT_POISON:
        p->poison = true;
        break;
    }
    return r;
}

int options_parse(int argc, char **argv, struct options *o, struct err *err)
{
    struct option table[OPT_COUNT + 1];
    memset(table, 0, sizeof table);
    for (int i = 0; i < OPT_COUNT; i++)
        table[i] = (struct option){.name = TEXTS[i].name,
                                   .has_arg = TEXTS[i].argument ? required_argument : no_argument,
                                   .val = i + 256};
    set_defaults(o);
    opterr = 0;
    optind = 1;
    for (;;) {
        int c = getopt_long(argc, argv, ":", table, NULL);
        if (c == -1)
            break;
        if (c < 256)
            return err_set(err, -EINVAL, "%s: %s", argv[optind - 1],
                           c == ':' ? "an argument is missing" : "unknown option (see --help)");
        if (c - 256 == OPT_HELP) {
            print_help();
            return 1;
        }
        if (apply(o, c - 256, optarg) < 0)
            return err_set(err, -EINVAL, "--%s: %s: out of range or no value of its kind",
                           TEXTS[c - 256].name, optarg);
    }
    if (optind < argc)
        return err_set(err, -EINVAL, "%s: arguments without an option are not taken", argv[optind]);
    return 0;
}
