/* `specontext head`: makes retrieval heads out of models, and shows them. */
#ifndef LAUNCH_HEAD_H
#define LAUNCH_HEAD_H

#include <stdint.h>

#include "base/err.h"

/* The sub-command: argv[0] is "head". Returns the exit code: 0, 1 failure, 2 usage. */
int head_main(int argc, char **argv);

/* Writes to out_path (atomically) a head made of the model's own layer `layer`: norm, query and key
 * projection, in 16 bit, the same for each of `groups` layer groups. Layer 0 is the one to take, since its
 * input is the embedding, which is all that a head sees; deeper layers' projections find less than a plain
 * recent window does (measured on SmolLM2-135M at 4.7K positions, budget 512: 0.73 of the attention mass from
 * layer 0, 0.64 to 0.68 from others, 0.75 from the newest positions alone). 0 or a negative errno with one
 * line in err. */
int head_bootstrap(const char *model_path, const char *out_path, uint32_t layer, unsigned groups,
                   struct err *err);

#endif
