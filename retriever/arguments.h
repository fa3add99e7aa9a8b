/* The retriever's command line. */
#ifndef RETRIEVER_ARGUMENTS_H
#define RETRIEVER_ARGUMENTS_H

#include <stdint.h>

#include "base/err.h"
#include "link/daemon.h"

struct arguments {
    struct daemon_options daemon;
    const char *model, *head; /* files */
    const char *device;       /* "cpu", or a GPU */
    int threads;
    uint32_t keys;    /* enum compute_keys */
    uint32_t pool;    /* 0: as the head recommends; else 1 + enum head_pool */
    uint32_t context; /* 0: the model's */
    uint32_t sequences;
    uint64_t prefix_memory;
};

/* Fills defaults and what the arguments say (texts are borrowed). 0; 1: --help was asked for and printed;
 * -EINVAL with one line that names the option. */
int arguments_parse(int argc, char **argv, struct arguments *ret, struct err *err);

#endif
