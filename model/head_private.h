/* What reader and writer of heads share. Not for other folders. */
#ifndef MODEL_HEAD_PRIVATE_H
#define MODEL_HEAD_PRIVATE_H

#include <stdbool.h>

#include "model/head.h"
#include "model/safetensors.h"

enum {
    HEAD_GROUP_TENSORS = 6,
    HEAD_TENSORS_MAX = HEAD_GROUP_TENSORS * HEAD_GROUPS_MAX + 6,
    HEAD_NAME_BYTES = 40,
    HEAD_VALUE_BYTES = 320,
    HEAD_PAIRS_MAX = 40
};

/* err_set with the path in front. */
int head_refuse(const char *path, struct err *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Whether it is a head of a version that is known. */
int head_fields_form(const struct safetensors *file, const char *path, struct err *err);

/* The file's metadata but for the fingerprints, checked, into *config. */
int head_fields_read(const struct safetensors *file, const char *path, struct head_config *config,
                     struct err *err);

/* 32 hex digits. */
int head_fields_hash(const struct safetensors *file, const char *path, const char *key, struct hash128 *ret,
                     struct err *err);

/* What reader and writer both demand of a configuration. */
int head_fields_check(const char *path, const struct head_config *config, struct err *err);

/* Metadata while it is put together: values of numbers rest in `texts`. */
struct head_metadata {
    struct safetensors_pair pairs[HEAD_PAIRS_MAX];
    char texts[HEAD_PAIRS_MAX][HEAD_VALUE_BYTES];
    char calibration[CALIBRATION_TEXT_BYTES];
    unsigned pair_count, text_count;
};
void head_fields_put(struct head_metadata *metadata, const struct head_config *config);

/* A tensor of the file and where it belongs; rows 0 stands for a float32 vector of `cols`. */
struct head_tensor {
    char name[HEAD_NAME_BYTES];
    uint32_t rows, cols;
    bool optional;
    struct model_tensor *to;
};

/* All tensors that a head of this configuration may have, in the order of the file; returns their number. */
uint32_t head_tensors(const struct head_config *config, struct model_tensor *norm, struct head_shared *shared,
                      struct head_group *groups, struct model_tensor *freqs,
                      struct head_tensor ret[HEAD_TENSORS_MAX]);

/* Our element type for one of the file; vectors have the first only. 0 or -ENOTSUP. */
int head_type_from(enum safetensors_type type, bool vector, enum dtype *ret);

#endif
