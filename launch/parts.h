/* The command lines of the three daemons of a run. */
#ifndef LAUNCH_PARTS_H
#define LAUNCH_PARTS_H

#include <stdint.h>

#include "base/err.h"
#include "launch/run_options.h"
#include "launch/supervise.h"
#include "model/model.h"

struct parts_plan {
    const struct run_options *options;
    const struct model *model;
    const char *head;   /* path */
    uint32_t context;   /* positions of a sequence, in force */
    uint32_t sequences; /* that run at the same time */
    uint32_t requests;  /* in all */
    uint32_t budget;    /* largest that will be asked for */
};

/* Cores that --cores names, or all that this process may run on. */
uint32_t parts_cores(const struct run_options *options);

/* The store's device memory: --device-memory (0: the store's default), on a GPU what the others leave of the
 * card (gpu_memory.h). Asks the card by a process of its own: seconds, perhaps. -ENOMEM with numbers. */
int parts_device_memory(const struct parts_plan *plan, uint64_t *ret_bytes, struct err *err);

/* Starts store, retriever and decoder. Cores are divided so: all to the decoder, half to each of the others,
 * since they work in turns. */
int parts_start(struct supervise *supervise, const struct parts_plan *plan, uint64_t device_memory,
                struct err *err);

#endif
