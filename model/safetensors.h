/* safetensors files: reader (one mapped file, checked as a whole when opened) and writer.
 *
 * File: u64 length of the header, header (JSON object: name -> {dtype, shape, data_offsets}, and
 * "__metadata__" -> strings), data without gap or overlap. After safetensors_open the object is read only:
 * any thread. */
#ifndef MODEL_SAFETENSORS_H
#define MODEL_SAFETENSORS_H

#include <stdint.h>

#include "base/err.h"
#include "model/names.h"

#define SAFETENSORS_DIMS_MAX   8
#define SAFETENSORS_HEADER_MAX (100u << 20) /* bytes; the format's own limit is 100 MB */

enum safetensors_type {
    SAFETENSORS_BOOL,
    SAFETENSORS_U8,
    SAFETENSORS_I8,
    SAFETENSORS_F8_E4M3,
    SAFETENSORS_F8_E5M2,
    SAFETENSORS_U16,
    SAFETENSORS_I16,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_U32,
    SAFETENSORS_I32,
    SAFETENSORS_F32,
    SAFETENSORS_U64,
    SAFETENSORS_I64,
    SAFETENSORS_F64,
    SAFETENSORS_TYPES
};

struct safetensors_tensor {
    struct name name;
    enum safetensors_type type;
    uint32_t dims;                        /* 0: a single element */
    uint64_t shape[SAFETENSORS_DIMS_MAX]; /* slowest first, as in the file */
    uint64_t bytes;
    const void *data; /* of a file that this writer made: aligned to the element; of others: perhaps not */
};

struct safetensors;

/* "BF16"; and the bytes of an element. `type` must be one of the enum. */
const char *safetensors_type_name(enum safetensors_type type);
unsigned safetensors_type_bytes(enum safetensors_type type);

/* 0; an errno of the system; -EBADMSG with a line "file: field: found X, expected Y"; -ENOTSUP for an element
 * type that is not known. A file without tensors (only metadata) is sound. */
int safetensors_open(const char *path, struct safetensors **ret, struct err *err);
void safetensors_free(struct safetensors **safetensors);

/* Tensors by place, in the order of the header, or by name (NULL: none). */
uint32_t safetensors_count(const struct safetensors *safetensors);
const struct safetensors_tensor *safetensors_at(const struct safetensors *safetensors, uint32_t place);
const struct safetensors_tensor *safetensors_find(const struct safetensors *safetensors, const char *name);

/* A value of "__metadata__" (NUL-terminated), or NULL. */
const char *safetensors_metadata(const struct safetensors *safetensors, const char *key);

struct safetensors_pair {
    const char *key, *value;
};

/* What to write; `name` and `data` are borrowed, shape x type gives the bytes. */
struct safetensors_entry {
    const char *name;
    enum safetensors_type type;
    uint32_t dims;
    uint64_t shape[SAFETENSORS_DIMS_MAX];
    const void *data;
};

struct safetensors_content {
    const struct safetensors_entry *tensors;
    uint32_t tensor_count;
    const struct safetensors_pair *metadata;
    uint32_t metadata_count;
};

/* Writes path atomically: temporary file beside it, fsync, rename, fsync of the folder. Data is ordered by
 * element size (largest first), so that each tensor is aligned. 0, an errno of the system, or -EINVAL for
 * names that are not UTF-8, reserved or repeated. On failure nothing is left behind. */
int safetensors_write(const char *path, const struct safetensors_content *content, struct err *err);

#endif
