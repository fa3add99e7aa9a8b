/* The memory model: bytes that a load needs on the device and on the host, and the context lengths
 * (thresholds) at which one more run of layers has to leave the device. Pure arithmetic; the store decides by
 * it and `specontext plan` prints it.
 *
 * `paper`: the formula of the paper (arXiv 2512.00722 section on memory; its printed threshold_i lacks the
 * factor 4 before i*B, which M_part has: an erratum that is mended here).
 * `exact`: what our processes allocate, slab by slab. */
#ifndef PROTO_MEMORY_H
#define PROTO_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/layout.h"
#include "proto/memory_gpu.h"

struct memory_paper {
    double memory_bytes; /* of the GPU */
    double model_bytes, head_bytes;
    uint32_t layers, kv_heads, head_dim;
    uint32_t query_groups; /* a = query heads / KV heads: a repeat_kv buffer's factor */
    uint32_t requests, budget;
};

/* Longest context S (tokens per request) with `offloaded` layers in host memory; 0 when even the weights do
 * not fit. */
uint64_t memory_paper_threshold(const struct memory_paper *paper, uint32_t offloaded);

struct memory_load {
    uint32_t requests;       /* sequences, all of the same length */
    uint32_t slots;          /* of one (sequence, group, row head), before the cap by the sequence's length */
    uint32_t staging_tokens; /* positions that one dense step touches while layers are offloaded */
};

/* Slots that a sequence of `capacity` positions really gets. */
static inline uint32_t memory_slots(uint32_t slots, uint32_t capacity)
{
    slots = slots < capacity ? slots : capacity;
    return slots < LIMIT_SLOTS ? slots : LIMIT_SLOTS;
}

/* Slabs of both staging buffers; slab sizes by layout_slab_bytes. */
uint64_t memory_staging_slabs(const struct kv_layout *layout, uint32_t tokens);

/* Positions that the store's staging buffers hold: the layout's context, if half of the device takes them, or
 * all of it but the slots of one sequence: else a sequence of that length could not run at all. */
uint32_t memory_staging_tokens(const struct kv_layout *layout, uint64_t device_bytes, uint32_t slots);

/* Device slabs for the load at `context` positions a request with layers [0, resident) on the device.
 * `resident` is a run boundary. */
uint64_t memory_device_slabs(const struct kv_layout *layout, const struct memory_load *load, uint32_t context,
                             uint32_t resident);

/* Device slabs that the store wants to see before it keeps layers [0, resident) there at `context` positions
 * a request: pages a block ahead, so that a proposal comes in time, and, unless all layers are offloaded, the
 * slots of one layer more, which are taken before its pages are given; staging buffers always. */
uint64_t memory_kept_slabs(const struct kv_layout *layout, const struct memory_load *load, uint32_t context,
                           uint32_t resident);

/* Longest context (<= layout->context_max) at which the store keeps layers [0, resident) in `device_bytes`;
 * 0 when not even one position fits. */
uint32_t memory_exact_threshold(const struct kv_layout *layout, const struct memory_load *load,
                                uint64_t device_bytes, uint32_t resident);

/* Which layers' rows go to host memory: all, or only those of layers that are ever offloaded. */
enum memory_write_through { WRITE_THROUGH_ALL, WRITE_THROUGH_OFFLOADED };
#define WRITE_THROUGH_CHOICES "all|offloaded"
const char *memory_through_name(uint32_t write_through);

struct memory_through {      /* what the store is told about it */
    uint32_t write_through;  /* enum memory_write_through */
    uint32_t offload_layers; /* at least the last so many are offloaded */
    bool no_offload;
};

/* Runs that host memory lacks: 0 under `all`, else those that are on the device even when so many requests,
 * all that there may be, have layout->context_max positions and `slots` slots of one (group, row head). */
uint32_t memory_runs_kept(const struct kv_layout *layout, uint32_t requests, uint32_t slots,
                          uint64_t device_bytes, const struct memory_through *through);

/* Most runs that leave at least the last `offload_layers` layers out. */
uint32_t memory_runs_allowed(const struct kv_layout *layout, uint32_t offload_layers);

/* Host bytes of the rows (and key rows) of the load, whole blocks. */
uint64_t memory_host_bytes(const struct kv_layout *layout, uint32_t requests, uint32_t context);

#define MEMORY_PREFIX_BLOCK 320u /* tokens of a block of keys that a retriever keeps, and what finds it */

/* Host bytes of such a block: keys of all groups, and one row of hidden states. */
uint64_t memory_prefix_bytes(const struct memory_gpu_head *head, uint64_t row_bytes);

#endif
