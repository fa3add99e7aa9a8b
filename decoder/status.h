/* The decoder's answer to STATUS. */
#ifndef DECODER_STATUS_H
#define DECODER_STATUS_H

#include <stdint.h>

#include "decoder/device.h"
#include "link/bus.h"
#include "model/model.h"

struct status {
    const char *state; /* "ready", or what it waits for */
    const struct model *model;
    uint64_t epoch, store_epoch;
    uint32_t context, sequences, chunk;
    int threads;
    const struct device_figures *device; /* NULL: not started */
    const struct bus_counters *bus;
};

/* JSON object, NUL-terminated, allocated with malloc. */
char *status_of_decoder(const struct status *status);

#endif
