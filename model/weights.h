/* The tensors of a model under one index, whatever number and kind of files they lie in: one GGUF file,
 * the parts of a split one, safetensors shards, or a file of torch.save. The object owns the mapped files;
 * once filled it is read only, but for the marks of which tensors were asked for. Not for other folders. */
#ifndef MODEL_WEIGHTS_H
#define MODEL_WEIGHTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "base/hash.h"
#include "model/gguf.h"
#include "model/names.h"
#include "model/safetensors.h"
#include "model/torch.h"

#define WEIGHTS_FILES_MAX 4096

struct weight {
    struct name name;
    const char *type_name; /* as the file calls it */
    enum dtype type;       /* DTYPE_MAX: a type that weights cannot have */
    uint32_t dims;
    uint64_t rows, cols; /* rows of a vector: 1; of more than two dimensions: the product of the slow ones */
    const void *data;
    uint64_t bytes;
    const char *path; /* of its file */
    bool used;        /* weights_use found it */
};

struct weights {
    struct gguf **ggufs;
    uint32_t gguf_count;
    struct safetensors **shards;
    uint32_t shard_count;
    char **paths; /* of the shards */
    struct torch *torch;
    char *torch_path;
    struct weight *items;
    struct name *names;
    uint32_t count;
    struct names index;
};

/* Opens a GGUF file and, when its name and metadata say that it is the first part of a split one, the other
 * parts. 0; errors as gguf_open; -EBADMSG for parts that are missing, foreign or hold a tensor twice. */
int weights_open_gguf(struct weights *weights, const char *path, struct err *err);

/* Opens the safetensors files of a Hugging Face folder: model.safetensors, or the shards that
 * model.safetensors.index.json names. 0; errors as safetensors_open; -EBADMSG when index and shards differ;
 * -ENOENT when there are neither. */
int weights_open_folder(struct weights *weights, const char *folder, struct err *err);

/* Opens a pytorch_model.bin. 0; errors as torch_open; -EBADMSG when it names a tensor twice. Such weights
 * have no fingerprint. */
int weights_open_torch(struct weights *weights, const char *path, struct err *err);

/* Accepts a zeroed object. */
void weights_free(struct weights *weights);

/* By name; NULL: none. `use` marks it for weights_unused. */
const struct weight *weights_find(const struct weights *weights, const char *name);
const struct weight *weights_use(struct weights *weights, const char *name);

/* A tensor that weights_use never found, or NULL. */
const struct weight *weights_unused(const struct weights *weights);

uint64_t weights_bytes(const struct weights *weights);

/* Chains onto `from`: heads of the GGUF files or names, types and shapes; 4 KiB samples of each tensor. */
struct hash128 weights_fingerprint(const struct weights *weights, struct hash128 from);

#endif
