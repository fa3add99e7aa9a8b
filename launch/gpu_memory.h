/* How a card's memory is divided among the daemons of a run: --gpu-memory, and `specontext plan`. */
#ifndef LAUNCH_GPU_MEMORY_H
#define LAUNCH_GPU_MEMORY_H

#include <stdint.h>

#include "base/err.h"
#include "model/head.h"
#include "model/model.h"
#include "proto/memory.h"

/* The terms of one card, in bytes. */
struct gpu_memory {
    uint64_t cap;
    uint64_t contexts, libraries; /* of all processes on it; the MPS server is among the contexts */
    uint64_t mapping;             /* the card's own tables of the host arena, of no process */
    uint64_t weights, activations, workspace, tables;
    uint64_t features; /* hidden states that the decoder writes for the retriever */
    uint64_t retriever_weights, retriever_keys, retriever_workspace; /* 0: it is elsewhere */
    uint64_t taken;                                                  /* all of the above */
    uint64_t kv;                                                     /* cap - taken, 0 where that is less */
    uint64_t store, retriever, decoder; /* the same bytes by process, `kv` the store's; 0: it is elsewhere */
};

struct gpu_memory_load {
    const struct model *model;
    const struct head *head; /* NULL: one that is cut from the model */
    uint32_t context, sequences, budget;
    uint32_t slots;      /* 0: 1.5 budgets */
    uint32_t requests;   /* in all, at least `sequences`; 0: those */
    uint64_t host_bytes; /* that the host arena may have; 0: as the requests need */
    uint64_t kv_bytes;   /* the KV cache's share by hand; 0: what is left */
    struct memory_through through;
    uint64_t context_bytes; /* of one process, measured; 0: not */
    int with_retriever;     /* it is on the same card, */
    int keys_int8;          /* with keys of 8 bits */
    int mps;                /* the processes are clients of a server */
};

void gpu_memory_plan(const struct gpu_memory_load *load, uint64_t cap, struct gpu_memory *ret);

/* -ENOMEM and one line with all terms, when less than `least` is left for the KV cache. */
int gpu_memory_check(const struct gpu_memory *plan, uint64_t least, struct err *err);

#endif
