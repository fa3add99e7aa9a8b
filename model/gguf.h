/* GGUF files, versions 2 and 3, little-endian: metadata and tensors of one mapped file.
 *
 * Everything is checked when the file is opened: counts, lengths, offsets, shapes and ranges against the size
 * of the file, before anything is allocated for them. What the getters hand out points into the mapping and
 * lives as long as the struct gguf. After gguf_open the object is read only: any thread. */
#ifndef MODEL_GGUF_H
#define MODEL_GGUF_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "model/names.h"

#define GGUF_DIMS_MAX 4

struct gguf;

struct gguf_tensor {
    struct name name;
    uint32_t dims;                 /* 1 .. 4 */
    uint64_t shape[GGUF_DIMS_MAX]; /* fastest first, as in the file; unused ones are 1 */
    enum dtype type;
    uint64_t offset; /* from the begin of the file */
    uint64_t bytes;
    const void *data; /* aligned to the file's general.alignment (8 or more) */
};

/* An array of metadata. Elements lie unaligned in the file: read them through the functions below. */
struct gguf_array {
    uint32_t type; /* GGUF's number of the element type */
    uint64_t count;
    const uint8_t *data;
};

/* Opens, maps and checks the file. 0, an errno of the system, -EBADMSG for a damaged file, -ENOTSUP for a
 * sound one that this reader does not know (version 1, big-endian, unknown tensor type). `err` is one line
 * "file: field: found X, expected Y". */
int gguf_open(const char *path, struct gguf **ret_gguf, struct err *err);
void gguf_free(struct gguf **gguf);

const char *gguf_path(const struct gguf *gguf);

/* The whole file, and the bytes before its tensor data (header, metadata, tensor directory). */
const uint8_t *gguf_file(const struct gguf *gguf, uint64_t *ret_bytes);
uint64_t gguf_head_bytes(const struct gguf *gguf);

/* Metadata by key. 0; -ENOENT when the key is absent; -EBADMSG when its type or value does not fit. Outputs
 * are untouched on failure. Integers of any width convert when the value fits; f32 also takes f64. */
bool gguf_has(const struct gguf *gguf, const char *key);
int gguf_u32(const struct gguf *gguf, const char *key, uint32_t *ret, struct err *err);
int gguf_u64(const struct gguf *gguf, const char *key, uint64_t *ret, struct err *err);
int gguf_f32(const struct gguf *gguf, const char *key, float *ret, struct err *err);
int gguf_bool(const struct gguf *gguf, const char *key, bool *ret, struct err *err);
int gguf_string(const struct gguf *gguf, const char *key, struct name *ret, struct err *err);

/* For keys that must be there: what a getter returned, with -ENOENT turned into -EBADMSG (in `err` too). */
int gguf_required(int rc, struct err *err);

/* Arrays by key and element type: strings, 32-bit integers (signed or not), f32. */
int gguf_strings(const struct gguf *gguf, const char *key, struct gguf_array *ret, struct err *err);
int gguf_i32s(const struct gguf *gguf, const char *key, struct gguf_array *ret, struct err *err);
int gguf_f32s(const struct gguf *gguf, const char *key, struct gguf_array *ret, struct err *err);

/* Element i < count of an array of gguf_i32s or gguf_f32s. */
int32_t gguf_array_i32(const struct gguf_array *array, uint64_t i);
float gguf_array_f32(const struct gguf_array *array, uint64_t i);

/* The next string of an array of gguf_strings, in order; call at most `count` times. *cursor starts at
 * array->data. */
struct name gguf_array_next(const uint8_t **cursor);

/* Tensors: by place, 0 .. gguf_tensors - 1 in the order of the file's directory, or by name (NULL: none). */
uint32_t gguf_tensors(const struct gguf *gguf);
const struct gguf_tensor *gguf_tensor_at(const struct gguf *gguf, uint32_t place);
const struct gguf_tensor *gguf_tensor(const struct gguf *gguf, const char *name);

#endif
