/* Builds the daemons' command lines out of the options of a run. No state. */
#include "launch/parts.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/awake.h"
#include "base/log.h"
#include "base/thread.h"
#include "compute/gpu.h"
#include "launch/client.h"
#include "launch/gpu_memory.h"
#include "launch/gpu_probe.h"
#include "model/head.h"
#include "proto/memory.h"

#define NUMBER_BYTES      24
#define STORE_THREADS_MAX 16u                  /* more do not copy faster */
#define KV_LEAST          (UINT64_C(16) << 20) /* less holds no sequence worth a run */

uint32_t parts_cores(const struct run_options *options)
{
    return options->cores ? options->cores : thread_cores();
}

/* "--name N", unless N is the daemon's own default, zero. */
static void add_number(struct supervise_part *part, const char *name, uint64_t value, char text[NUMBER_BYTES])
{
    if (!value)
        return;
    snprintf(text, NUMBER_BYTES, "%" PRIu64, value);
    supervise_arg(part, name, text);
}

static int start_store(struct supervise *s, const struct parts_plan *plan, uint64_t device_memory,
                       uint32_t threads, struct err *err)
{
    const struct run_options *o = plan->options;
    struct supervise_part part = {.program = client_part_program(CLIENT_KVSTORE)};
    char text[7][NUMBER_BYTES];
    supervise_arg(&part, "--log", log_level_name(o->log));
    add_number(&part, "--threads", threads, text[0]);
    if (gpu_named(o->device))
        supervise_arg(&part, "--device", o->device);
    add_number(&part, "--device-memory", device_memory, text[1]);
    add_number(&part, "--host-memory", o->host_memory, text[2]);
    add_number(&part, "--sequences", plan->sequences, text[3]);
    add_number(&part, "--slots", o->slots, text[4]);
    add_number(&part, "--budget", plan->budget, text[5]);
    add_number(&part, "--offload-layers", o->offload_layers, text[6]);
    supervise_arg(&part, "--write-through", memory_through_name(o->write_through));
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
    char text[4][NUMBER_BYTES];
    supervise_arg(&part, "--log", log_level_name(o->log));
    supervise_arg(&part, "--model", o->model);
    supervise_arg(&part, "--head", plan->head);
    supervise_arg(&part, "--pool", run_options_pool_name(o));
    supervise_arg(&part, "--device", o->retriever_device);
    supervise_arg(&part, "--key-type", run_options_keys_name(o));
    add_number(&part, "--threads", threads, text[0]);
    add_number(&part, "--context", o->context, text[1]);
    add_number(&part, "--sequences", plan->sequences, text[2]);
    snprintf(text[3], NUMBER_BYTES, "%" PRIu64, o->prefix_memory);
    supervise_arg(&part, "--prefix-memory", text[3]);
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
    if (gpu_named(o->device))
        supervise_arg(&part, "--device", o->device);
    supervise_arg(&part, "--activations", o->activations ? "q8" : "f32");
    if (o->idle != AWAKE_IDLE_AUTO)
        supervise_arg(&part, "--idle", o->idle == AWAKE_IDLE_POLL ? "poll" : "halt");
    add_number(&part, "--threads", threads, text[0]);
    add_number(&part, "--context", o->context, text[1]);
    add_number(&part, "--sequences", plan->sequences, text[2]);
    return supervise_start(s, &part, err);
}

/* The store's own default. */
static uint64_t half_of_ram(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    return pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page / 2 : 0;
}

/* The store's share of the card: what is left of --gpu-memory, or what --device-memory says, if that fits. */
static int divide_card(const struct parts_plan *plan, uint64_t *ret_device_memory, struct err *err)
{
    const struct run_options *o = plan->options;
    struct gpu_probe card;
    struct gpu_memory memory;
    struct head *head = NULL;
    struct gpu_memory_load load = {.model = plan->model,
                                   .context = plan->context,
                                   .sequences = plan->sequences,
                                   .budget = plan->budget,
                                   .slots = o->slots,
                                   .keys_int8 = run_options_keys_int8(o),
                                   .requests = plan->requests,
                                   .host_bytes = o->host_memory ? o->host_memory : half_of_ram(),
                                   .kv_bytes = o->device_memory,
                                   .through = {.write_through = o->write_through,
                                               .offload_layers = o->offload_layers,
                                               .no_offload = o->no_offload}};
    int r = gpu_probe(o->device, &card, err);
    if (r == 0)
        r = gpu_probe_same(&card, o->device, o->retriever_device, &load.with_retriever, err);
    if (r == 0 && o->gpu_memory > card.free_bytes)
        r = err_set(err, -ENOMEM, "--gpu-memory: found %" PRIu64 " MiB, free on %s are %" PRIu64 " MiB",
                    o->gpu_memory >> 20, card.info.uuid, card.free_bytes >> 20);
    if (r == 0)
        r = head_open(plan->head, plan->model, &head, err);
    if (r < 0)
        return r;
    load.head = head;
    load.context_bytes = card.info.context_bytes;
    load.mps = card.info.mps;
    gpu_memory_plan(&load, o->gpu_memory ? o->gpu_memory : card.free_bytes / 10 * 9, &memory);
    head_free(&head);
    r = gpu_memory_check(&memory, o->device_memory ? o->device_memory : KV_LEAST, err);
    *ret_device_memory = o->device_memory ? o->device_memory : memory.kv;
    log_info("GPU %s: of %" PRIu64 " MiB the KV cache gets %" PRIu64 ", everything else %" PRIu64,
             card.info.uuid, memory.cap >> 20, *ret_device_memory >> 20, memory.taken >> 20);
    return r;
}

int parts_device_memory(const struct parts_plan *plan, uint64_t *ret_bytes, struct err *err)
{
    *ret_bytes = plan->options->device_memory;
    return gpu_named(plan->options->device) ? divide_card(plan, ret_bytes, err) : 0;
}

int parts_start(struct supervise *supervise, const struct parts_plan *plan, uint64_t device_memory,
                struct err *err)
{
    uint32_t cores = parts_cores(plan->options);
    uint32_t half = cores > 1 ? cores / 2 : 1;
    int r =
        start_store(supervise, plan, device_memory, half < STORE_THREADS_MAX ? half : STORE_THREADS_MAX, err);
    if (!r)
        r = start_retriever(supervise, plan, half, err);
    if (!r)
        r = start_decoder(supervise, plan, cores, err);
    return r;
}
