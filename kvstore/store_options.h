/* Options of specontext-kvstore. */
#ifndef KVSTORE_STORE_OPTIONS_H
#define KVSTORE_STORE_OPTIONS_H

#include "base/err.h"
#include "kvstore/planner.h"
#include "link/daemon.h"

struct store_options {
    struct daemon_options daemon;
    const char *device; /* "cpu", or what names a GPU */
    struct planner_options planner;
};

/* Fills defaults and what the arguments say (texts are borrowed). 0; 1: --help was asked for and printed;
 * -EINVAL with one line that names the option. */
int store_options_parse(int argc, char **argv, struct store_options *ret, struct err *err);

#endif
