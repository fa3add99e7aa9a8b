/* EAGLE-3 draft models as retrieval heads. A draft model is a folder with config.json and its weights, in
 * model.safetensors or pytorch_model.bin, as EAGLE, SpecForge, AngelSlim and speculators write them; of
 * its one layer the query and key projections, their norms and rotation are taken, and what feeds them.
 *
 * The object owns the files' mappings and copies of what had to be cut or converted; one thread. */
#ifndef MODEL_EAGLE_H
#define MODEL_EAGLE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "model/head.h"
#include "model/model.h"

/* Positions that draft models are trained on, whatever max_position_embeddings they copy from their model. */
#define EAGLE_TRAINED_CONTEXT 2048u

enum eagle_layout {
    EAGLE_LAYOUT_EAGLE,
    EAGLE_LAYOUT_SPECFORGE,
    EAGLE_LAYOUT_ANGELSLIM,
    EAGLE_LAYOUT_SPECULATORS
};

struct eagle_config {
    enum eagle_layout layout;
    uint32_t hidden, q_heads, kv_heads, head_dim, vocab;
    uint32_t target_hidden; /* width of the model's hidden states */
    uint32_t position_max;  /* what the file says, stretched as its scaling says */
    float rms_eps;
    struct model_rope rope;
    bool own_embedding; /* the file has one */
    bool head_norms;    /* of queries and keys */
    /* Hidden states that enter these layers; count 0: the file does not say. */
    uint32_t feature_layers[HEAD_FEATURE_LAYERS_MAX], feature_layer_count;
};

struct eagle;

/* Opens and checks the folder. 0; an errno of the system; -EBADMSG for damaged files; -ENOTSUP for another
 * kind of draft model, or one with weights that this program does not know. */
int eagle_open(const char *folder, struct eagle **ret_eagle, struct err *err);
void eagle_free(struct eagle **eagle);

const struct eagle_config *eagle_config(const struct eagle *eagle);
const char *eagle_weights_path(const struct eagle *eagle); /* of the file that holds the projections */
const char *eagle_layout_name(enum eagle_layout layout);   /* "EAGLE", "speculators" */

enum eagle_embedding { EAGLE_EMBEDDING_AUTO, EAGLE_EMBEDDING_OWN, EAGLE_EMBEDDING_MODEL };

struct eagle_options {
    enum head_features features; /* NONE: the projections' embedding half only */
    enum eagle_embedding
        embedding;            /* AUTO: the model's when the file has none or the very same, else its own */
    uint32_t trained_context; /* 0: EAGLE_TRAINED_CONTEXT, or all that the file's own scaling spans */
    enum head_pool pool;
};

/* Writes the head of `model` to `path`. Errors as head_write; -EXDEV when the draft model belongs to
 * another model (sizes); -ENOTSUP for features that cannot be kept; -ENOENT when an own embedding is asked
 * for that is not there. */
int eagle_write(struct eagle *eagle, const struct model *model, const struct eagle_options *options,
                const char *path, struct err *err);

#endif
