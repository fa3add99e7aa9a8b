/* The decoder's command line. */
#ifndef DECODER_SETTINGS_H
#define DECODER_SETTINGS_H

#include <stdint.h>

#include "base/err.h"
#include "base/log.h"
#include "compute/compute.h"

struct settings {
    const char *runtime;
    int lifeline; /* -1: none */
    enum log_level log;
    const char *model;
    uint32_t context; /* positions; 0: the model's */
    int threads;
    uint32_t sequences;   /* live at once */
    uint32_t chunk;       /* prefill tokens a step */
    int32_t early_layers; /* mixed selection; -1: a third of the layers */
    enum compute_isa isa;
    enum compute_activations activations;
    int help;
};

/* 0, or -EINVAL with the option, what was found and what was expected. Texts are borrowed from argv. */
int settings_parse(int argc, char **argv, struct settings *ret, struct err *err);

void settings_help(void); /* to stdout */

#endif
