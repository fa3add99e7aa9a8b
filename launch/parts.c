/* Builds the daemons' command lines out of the options of a run. No state. */
#include "launch/parts.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>

#include "base/log.h"
#include "launch/client.h"

#define NUMBER_BYTES      24
#define STORE_THREADS_MAX 16u /* more do not copy faster */

uint32_t parts_cores(const struct run_options *options)
{
    cpu_set_t set;
    if (options->cores)
        return options->cores;
    int n = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    return n > 0 ? (uint32_t)n : 1;
}

/* "--name N", unless N is the daemon's own default, zero. */
static void add_number(struct supervise_part *part, const char *name, uint64_t value, char text[NUMBER_BYTES])
{
    if (!value)
        return;
    snprintf(text, NUMBER_BYTES, "%" PRIu64, value);
    supervise_arg(part, name, text);
}

static int start_store(struct supervise *s, const struct parts_plan *plan, uint32_t threads, struct err *err)
{
    const struct run_options *o = plan->options;
    struct supervise_part part = {.program = client_part_program(CLIENT_KVSTORE)};
    char text[7][NUMBER_BYTES];
    supervise_arg(&part, "--log", log_level_name(o->log));
    add_number(&part, "--threads", threads, text[0]);
    add_number(&part, "--device-memory", o->device_memory, text[1]);
    add_number(&part, "--host-memory", o->host_memory, text[2]);
    add_number(&part, "--sequences", plan->sequences, text[3]);
    add_number(&part, "--slots", o->slots, text[4]);
    add_number(&part, "--budget", plan->budget, text[5]);
    add_number(&part, "--offload-layers", o->offload_layers, text[6]);
    if (o->no_elastic)
        supervise_arg(&part, "--no-elastic", NULL);
    if (o->no_prefix)
        supervise_arg(&part, "--no-prefix", NULL);
    if (o->no_offload)
        supervise_arg(&part, "--no-offload", NULL);
    if (o->poison)
        supervise_arg(&part, "--poison", NULL);
    return supervise_start(s, &part, err);
}

static int start_retriever(struct supervise *s, const struct parts_plan *plan, uint32_t threads,
                           struct err *err)
{
    const struct run_options *o = plan->options;
    /* Nothing of it outlives it, and the store tidies up: so it may die at once with us. */
    struct supervise_part part = {.program = client_part_program(CLIENT_RETRIEVER), .die_with_parent = 1};
    char text[3][NUMBER_BYTES];
    supervise_arg(&part, "--log", log_level_name(o->log));
    supervise_arg(&part, "--model", o->model);
    supervise_arg(&part, "--head", plan->head);
    supervise_arg(&part, "--pool", run_options_pool_name(o));
    add_number(&part, "--threads", threads, text[0]);
    add_number(&part, "--context", o->context, text[1]);
    add_number(&part, "--sequences", plan->sequences, text[2]);
    return supervise_start(s, &part, err);
}

static int start_decoder(struct supervise *s, const struct parts_plan *plan, uint32_t threads,
                         struct err *err)
{
    const struct run_options *o = plan->options;
    struct supervise_part part = {.program = client_part_program(CLIENT_DECODER), .die_with_parent = 1};
    char text[3][NUMBER_BYTES];
    supervise_arg(&part, "--log", log_level_name(o->log));
    supervise_arg(&part, "--model", o->model);
    supervise_arg(&part, "--activations", o->activations ? "q8" : "f32");
    add_number(&part, "--threads", threads, text[0]);
    add_number(&part, "--context", o->context, text[1]);
    add_number(&part, "--sequences", plan->sequences, text[2]);
    return supervise_start(s, &part, err);
}

int parts_start(struct supervise *supervise, const struct parts_plan *plan, struct err *err)
{
    uint32_t cores = parts_cores(plan->options);
    uint32_t half = cores > 1 ? cores / 2 : 1;
    int r = start_store(supervise, plan, half < STORE_THREADS_MAX ? half : STORE_THREADS_MAX, err);
    if (!r)
        r = start_retriever(supervise, plan, half, err);
    if (!r)
        r = start_decoder(supervise, plan, cores, err);
    return r;
}
