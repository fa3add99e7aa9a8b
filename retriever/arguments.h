/* The daemon's options. */
#ifndef RETRIEVER_ARGUMENTS_H
#define RETRIEVER_ARGUMENTS_H

#include <stdint.h>

#include "base/log.h"

struct arguments {
    const char *runtime; /* directory of the sockets */
    int lifeline;        /* descriptor whose end of file ends the daemon; -1: none */
    enum log_level log;
    const char *model, *head; /* files */
    uint32_t threads;
    int pool;         /* enum head_pool, or -1: as the head recommends */
    uint32_t context; /* 0: the model's */
    uint32_t sequences;
};

/* Fills `options` from defaults and argv (borrowed). Returns -1 to go on, or the exit code to end with: 0
 * after --help, 2 for a mistake (said on stderr). */
int arguments_parse(int argc, char **argv, struct arguments *options);

#endif
