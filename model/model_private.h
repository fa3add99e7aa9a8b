/* What model.c and the readers of single file formats share. Not for other folders. */
#ifndef MODEL_MODEL_PRIVATE_H
#define MODEL_MODEL_PRIVATE_H

#include <stddef.h>

#include "model/model.h"
#include "model/vocab.h"
#include "model/weights.h"

/* Memory that a model owns beside its files. */
struct model_owned {
    struct model_owned *next;
    max_align_t data[];
};

struct model {
    char *path, *name, *format;
    struct weights weights; /* owns the mappings that everything below points into */
    struct model_config config;
    struct model_layer *layers;
    struct model_tensor token_embedding, output_norm, output;
    struct vocab *vocab;
    struct model_owned *owned;
    struct hash128 head_hash; /* of what the configuration was read from, where weights do not cover it */
};

/* Zeroed memory that lives as long as the model. */
void *model_own(struct model *model, size_t bytes);

/* err_set with the model's path in front. */
int model_refuse(const struct model *model, struct err *err, int code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

/* Fill everything but path and name. */
int model_gguf_load(struct model *model, struct err *err);
int model_folder_load(struct model *model, struct err *err);

/* What all formats share of the checks of a configuration; the readers have held each number against its own
 * range. `key` names the field of the heads in errors. */
int model_check_heads(const struct model *model, const char *key, bool head_dim_said, struct err *err);

/* How a format calls the tensors. */
enum model_naming { MODEL_NAMING_GGUF, MODEL_NAMING_FOLDER };

/* Binds the weights to layers, embedding, output; config must be filled but for vocab. Refuses tensors that
 * nothing asked for. */
int model_bind(struct model *model, enum model_naming naming, struct err *err);

/* Llama 3's scaling as divisors [dims / 2] of the frequencies. Source: the Llama 3.1 release: wavelengths
 * above original / low are stretched by factor, below original / high kept, between them interpolated. */
struct model_llama3 {
    float factor, low, high;
    uint32_t original_context;
};
void model_llama3_factors(const struct model_rope *rope, const struct model_llama3 *scaling, float *ret);

#endif
