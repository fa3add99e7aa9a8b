/* `specontext head import`: a draft model's folder into a head file, and a look at such folders. */
#ifndef LAUNCH_HEAD_IMPORT_H
#define LAUNCH_HEAD_IMPORT_H

#include "base/err.h"
#include "model/eagle.h"

struct head_import {
    const char *folder, *model_path;
    const char *out_path; /* NULL: HEAD_IMPORT_FILE in the folder */
    struct eagle_options options;
};

#define HEAD_IMPORT_FILE "retrieval-head.safetensors"

/* Prints what the folder holds; with a model, also writes the head, and prints what became of it and how
 * it is stretched for the model's whole context. Errors as eagle_open and eagle_write. */
int head_import(const struct head_import *import, struct err *err);

#endif
