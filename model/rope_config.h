/* Rotary embeddings as a Hugging Face config.json describes them. Not for other folders. */
#ifndef MODEL_ROPE_CONFIG_H
#define MODEL_ROPE_CONFIG_H

#include "model/json_file.h"
#include "model/model.h"

/* Fills *ret for heads of `head_dim`; without any field: base 10000, no scaling. *context (the positions
 * that the file names) grows to what a scaling stretches it to. `factors` [head_dim / 2] belongs to the
 * caller and must live as long as *ret, which points there for Llama 3's scaling. 0; -EBADMSG; -ENOTSUP
 * for another scaling. */
int rope_config_read(const struct json_doc *doc, uint32_t head_dim, uint32_t *context, float *factors,
                     struct model_rope *ret, struct err *err);

#endif
