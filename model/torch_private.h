/* What the files behind torch.h share. Not for other folders. */
#ifndef MODEL_TORCH_PRIVATE_H
#define MODEL_TORCH_PRIVATE_H

#include "model/mapping.h"
#include "model/names.h"
#include "model/torch.h"

/* A stored member; the data lies within the mapped file. */
struct torch_member {
    const uint8_t *data;
    uint64_t bytes;
};

struct torch_zip {
    const struct mapping *file;
    struct torch_member *members;
    struct name *names; /* within the file; any bytes */
    uint32_t count;
    struct names index;
};

/* Reads the directory of the archive. Errors as torch_open. Release with torch_zip_close, also after a
 * failure. */
int torch_zip_open(struct torch_zip *zip, const struct mapping *file, struct err *err);
void torch_zip_close(struct torch_zip *zip);

/* By name, or NULL. */
const struct torch_member *torch_zip_find(const struct torch_zip *zip, const char *name);

/* Tensors that a pickle names, in its order. */
struct torch_list {
    struct safetensors_tensor *items;
    uint32_t count, room;
};

/* Runs the pickle PREFIX/data.pkl; names point into it, data into PREFIX/data/KEY. `path` is for errors. */
int torch_pickle_read(const struct torch_zip *zip, const char *prefix, const struct torch_member *pickle,
                      const char *path, struct torch_list *ret, struct err *err);

#endif
