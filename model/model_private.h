/* What model.c and the readers of single file formats share. Not for other folders. */
#ifndef MODEL_MODEL_PRIVATE_H
#define MODEL_MODEL_PRIVATE_H

#include "model/gguf.h"
#include "model/model.h"
#include "model/vocab.h"

struct model {
    struct gguf *gguf; /* owns the mapping that everything below points into */
    struct model_config config;
    struct model_layer *layers;
    struct model_tensor token_embedding, output_norm, output;
    struct vocab *vocab;
    char *name;
};

/* Fills everything but vocab and name from model->gguf. */
int model_llama_load(struct model *model, struct err *err);

#endif
