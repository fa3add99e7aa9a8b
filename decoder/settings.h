/* The decoder's command line. */
#ifndef DECODER_SETTINGS_H
#define DECODER_SETTINGS_H

#include <stdint.h>

#include "base/awake.h"
#include "base/err.h"
#include "compute/compute.h"
#include "link/daemon.h"

struct settings {
    struct daemon_options daemon;
    const char *model;
    const char *device; /* "cpu", "cuda", "cuda:N", "GPU-..." */
    uint32_t context;   /* positions; 0: the model's */
    int threads;
    uint32_t sequences;   /* live at once */
    uint32_t chunk;       /* prefill tokens a step */
    int32_t early_layers; /* mixed selection; -1: a third of the layers */
    enum compute_isa isa;
    enum compute_activations activations;
    enum awake_idle idle;
};

/* Cores that are kept awake while steps follow one another; 0: none. */
uint32_t settings_awake(const struct settings *settings);

/* Fills defaults and what the arguments say (texts are borrowed). 0; 1: --help was asked for and printed;
 * -EINVAL with the option, what was found and what was expected. */
int settings_parse(int argc, char **argv, struct settings *ret, struct err *err);

#endif
