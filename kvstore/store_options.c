/* Command line of specontext-kvstore; see store_options.h. No state, main only. */
#include "kvstore/store_options.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "proto/memory.h"

enum { THREADS_DEFAULT_MAX = 16, THREADS_MAX = 256 };

#define AT(field) .at = offsetof(struct store_options, planner.field), .group = DAEMON_GROUP

/* clang-format off */
static const struct option_entry table[] = {
    {.name = "device", .kind = OPTION_TEXT, .at = offsetof(struct store_options, device),
     .argument = "DEVICE", .initial = "cpu", .group = DAEMON_GROUP,
     .text = "where the decoder computes: cpu, cuda, cuda:N or a GPU's UUID"},
    {.name = "device-memory", .kind = OPTION_SIZE, AT(device_bytes), .argument = "SIZE", .initial = "256M",
     .text = "KV memory of the device"},
    {.name = "host-memory", .kind = OPTION_SIZE, AT(host_bytes), .argument = "SIZE",
     .text = "most memory of the host arena's rows (default: half of RAM)"},
    {.name = "sequences", .kind = OPTION_UINT, AT(sequences), .argument = "N", .initial = "32", .least = 1,
     .most = LIMIT_SEQUENCES, .text = "sequences at a time"},
    {.name = "slots", .kind = OPTION_UINT, AT(slots), .argument = "N", .initial = "0",
     .most = LIMIT_SLOTS, .text = "slots of a sequence, group and row head; 0: 1.5 x its budget"},
    {.name = "budget", .kind = OPTION_UINT, AT(budget), .argument = "N", .initial = "0",
     .most = LIMIT_CONTEXT, .text = "largest budget that a sequence may ask for; 0: the context"},
    {.name = "threads", .kind = OPTION_UINT, AT(threads), .argument = "N", .least = 1, .most = THREADS_MAX,
     .text = "threads that plan and gather (default: processors online, at most 16)"},
    {.name = "no-elastic", .kind = OPTION_FLAG, AT(no_elastic), .text = "gather every selection whole"},
    {.name = "no-prefix", .kind = OPTION_FLAG, AT(no_prefix), .text = "keep no blocks for later requests"},
    {.name = "write-through", .kind = OPTION_CHOICE, AT(write_through), .argument = "LAYERS",
     .initial = "all", .choices = WRITE_THROUGH_CHOICES,
     .text = "whose rows host memory has: all, or those alone that are ever offloaded"},
    {.name = "no-offload", .kind = OPTION_FLAG, AT(no_offload),
     .text = "keep all layers on the device, or refuse"},
    {.name = "offload-layers", .kind = OPTION_UINT, AT(offload_layers), .argument = "N", .initial = "0",
     .most = LIMIT_LAYERS, .text = "offload at least the last N layers"},
    {.name = "poison", .kind = OPTION_FLAG, AT(poison), .text = "tests: fill what nobody wrote with NaN"},
    DAEMON_OPTIONS(struct store_options),
    {0}};
/* clang-format on */

static uint64_t half_of_ram(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page / 2 : UINT64_C(1) << 30;
}

int store_options_parse(int argc, char **argv, struct store_options *ret, struct err *err)
{
    *ret = (struct store_options){
        .daemon.lifeline = -1,
        .planner = {.host_bytes = half_of_ram(), .threads = daemon_threads(THREADS_DEFAULT_MAX)}};
    int r = options_parse(table, argc, argv, ret, err);
    if (r == 1) {
        puts("Usage: specontext-kvstore [options]\n\nHolds the KV cache in host memory and brings to the "
             "device "
             "what attention reads.");
        options_help(table, stdout);
    }
    if (r == 0 && strcmp(ret->device, "cpu") != 0 && !gpu_named(ret->device))
        return err_set(err, -EINVAL, "--device: found %s, expected cpu, cuda, cuda:N or GPU-UUID",
                       ret->device);
    return r;
}
