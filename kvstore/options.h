/* Options of specontext-kvstore. */
#ifndef KVSTORE_OPTIONS_H
#define KVSTORE_OPTIONS_H

#include "base/err.h"
#include "base/log.h"
#include "kvstore/planner.h"

struct options {
    const char *runtime; /* directory */
    int lifeline;        /* descriptor, or -1 */
    enum log_level level;
    struct planner_options planner;
};

/* Fills defaults and what the arguments say. 0; 1: --help was asked for and printed; -EINVAL with one line
 * that names the option. */
int options_parse(int argc, char **argv, struct options *ret, struct err *err);

#endif
