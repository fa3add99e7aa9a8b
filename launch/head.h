/* `specontext head`: makes retrieval heads out of models, and shows them. */
#ifndef LAUNCH_HEAD_H
#define LAUNCH_HEAD_H

#include "base/err.h"

/* The sub-command: argv[0] is "head". Returns the exit code: 0, 1 failure, 2 usage. */
int head_main(int argc, char **argv);

/* Writes to out_path (atomically) a head made of the model's own layers: norm, query and key projection of
 * one layer for each group, in 16 bit. `layer`: which, with groups 1; -1: the middle one of each group. 0
 * or a negative errno with one line in err. */
int head_bootstrap(const char *model_path, const char *out_path, int layer, unsigned groups, struct err *err);

#endif
