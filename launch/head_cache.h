/* The head of a model for which none was given: a trained one that comes with the program, by the model's
 * fingerprint, or else one cut from the model once and kept in the user's cache. */
#ifndef LAUNCH_HEAD_CACHE_H
#define LAUNCH_HEAD_CACHE_H

#include <limits.h>
#include <stdbool.h>

#include "base/err.h"
#include "model/model.h"

/* A shipped head (share/specontext/heads beside the programs' folder, heads/ of the source tree), or
 * $XDG_CACHE_HOME/specontext/heads/FINGERPRINT.safetensors (or below ~/.cache), made when it is missing or
 * does not fit the model. Concurrent callers are safe: each writes a file of its own and renames it. */
int head_cache_get(const struct model *model, char ret_path[PATH_MAX], struct err *err);

/* The shipped head alone: false where none fits. Makes nothing. */
bool head_cache_shipped(const struct model *model, char ret_path[PATH_MAX]);

#endif
