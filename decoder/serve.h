/* The loop thread: sockets, peers, and the order in which the decoder comes to life. */
#ifndef DECODER_SERVE_H
#define DECODER_SERVE_H

#include "base/err.h"
#include "decoder/settings.h"
#include "model/model.h"

/* Serves until it is told to end. The process's exit code: 0, or 1 after one line that names the part that
 * failed. Call before any other thread starts. `model` and `options` are borrowed. */
int serve_run(const struct settings *options, const struct model *model);

#endif
