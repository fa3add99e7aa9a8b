/* The retrieval head's file: which positions matter is decided by one query and key projection of each
 * layer group over the token embedding and, where the head was made so, features of the model's step
 * before. A safetensors file that names the model it was made for.
 *
 * Metadata (strings; numbers in decimal): format "specontext-head", version "1", model and tokenizer
 * (fingerprints, 32 hex digits), embedding model|own (by reference: the model file's matrix, or
 * embedding.weight), vocab, hidden, q_heads, kv_heads, head_dim, layers, groups, group_first_layer
 * ("0,30": groups + 1 numbers), rms_eps, rope_base, rope_dims, rope_pairs adjacent|halves, rope_scaling
 * none|linear|yarn, rope_factor, rope_original_context, trained_context, features none|target|context, pool
 * max|mean; with features target: feature_layers ("2,16,29": the features of a token are the hidden states
 * that enter these layers of the model, one after another), feature_hidden (their width); with features
 * context: views (1 to 16), taps (1 to 64), not both 1; optional:
 * rope_beta_fast, rope_beta_slow, rope_attn_factor, calibration (see calibration.h), source (free text).
 * Other keys are ignored. Tensors: norm.weight F32 [hidden]; groups.G.q.weight [q_heads *
 * head_dim][inputs], groups.G.k.weight [kv_heads * head_dim][inputs] in F32, F16 or BF16, where inputs is
 * hidden, with features target 2 * hidden: norm of the embedding first, norm of the features behind it.
 * With features context inputs is views * hidden: weighted sums of the normed embeddings of the token and
 * the taps - 1 before it (none before the sequence's first), one behind the other, by
 * groups.G.taps.weight F32 [views][taps], the token's own weight first.
 * embedding.weight [vocab][hidden] if own. With features target: features.fc.weight
 * [hidden][feature_layers * feature_hidden], features.norm.weight F32 [hidden]: g = fc of the features of
 * the position before, its norm is the projections' second half. Optional: groups.G.norm.weight F32
 * [hidden] in place of norm.weight; groups.G.q_norm.weight, groups.G.k_norm.weight F32 [head_dim], norms
 * of each head's query and key before the rotation; features.input_norm.weight F32 [feature_layers *
 * feature_hidden], a norm before fc; rope_freqs.weight F32 [rope_dims / 2] (divisors of the frequencies).
 * Others are refused. After head_open the object is read only: any thread. */
#ifndef MODEL_HEAD_H
#define MODEL_HEAD_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"
#include "base/hash.h"
#include "model/calibration.h"
#include "model/model.h"
#include "proto/memory_gpu.h"

#define HEAD_GROUPS_MAX         16u
#define HEAD_VIEWS_MAX          16u
#define HEAD_TAPS_MAX           64u
#define HEAD_FEATURE_LAYERS_MAX 8u
#define HEAD_CONTEXT_MAX        (1u << 30)
#define HEAD_SOURCE_BYTES       256

enum head_pool { HEAD_POOL_MAX, HEAD_POOL_MEAN }; /* of the softmax weights of a group's query heads */
enum head_features { HEAD_FEATURES_NONE, HEAD_FEATURES_TARGET, HEAD_FEATURES_CONTEXT };
enum head_embedding { HEAD_EMBEDDING_MODEL, HEAD_EMBEDDING_OWN };

struct head_config {
    struct hash128 model, tokenizer; /* fingerprints of what the head was made for */
    uint32_t vocab, hidden, q_heads, kv_heads, head_dim;
    uint32_t layers; /* of the model */
    uint32_t groups; /* group g serves layers [group_first_layer[g], group_first_layer[g + 1]) */
    uint32_t group_first_layer[HEAD_GROUPS_MAX + 1];
    float rms_eps;
    struct model_rope rope;   /* as trained; freq_factors point into the file */
    uint32_t trained_context; /* positions that training saw, with `rope` in force */
    enum head_pool pool;      /* the one recommended */
    enum head_embedding embedding;
    enum head_features features;
    /* With features target: hidden states that enter these layers, `feature_hidden` wide; else zero. */
    uint32_t feature_layers[HEAD_FEATURE_LAYERS_MAX], feature_layer_count, feature_hidden;
    uint32_t views, taps;           /* with features context; else zero */
    struct calibration calibration; /* of the mass that the head gives its selections; may be none */
    char source[HEAD_SOURCE_BYTES]; /* what made the head; may be empty */
};

/* Source of the shapes: y = W x, W [out][in]. */
struct head_group {
    struct model_tensor norm;   /* F32 [hidden] */
    struct model_tensor q;      /* [q_heads * head_dim][inputs] */
    struct model_tensor k;      /* [kv_heads * head_dim][inputs] */
    struct model_tensor q_norm; /* F32 [head_dim], of each head before the rotation; or .data NULL */
    struct model_tensor k_norm; /* F32 [head_dim]; or .data NULL */
    struct model_tensor taps;   /* F32 [views][taps]; or .data NULL */
};

/* What all groups share; .data NULL where the head has none. */
struct head_shared {
    struct model_tensor embedding;          /* [vocab][hidden] */
    struct model_tensor fc;                 /* [hidden][feature_layer_count * feature_hidden] */
    struct model_tensor feature_norm;       /* F32 [hidden] */
    struct model_tensor feature_input_norm; /* F32 [feature_layer_count * feature_hidden] */
};

struct head;

/* Opens and checks the file, on its own and against `model`; with model NULL only on its own (to look at
 * it). 0; an errno of the system; -EBADMSG for a damaged file, -ENOTSUP for a sound one that this program
 * does not run, -EXDEV for a head of another model or tokenizer. `err`: one line "file: field: found X,
 * expected Y". */
int head_open(const char *path, const struct model *model, struct head **ret_head, struct err *err);
void head_free(struct head **head);

const struct head_config *head_config(const struct head *head);
const struct head_group *head_groups(const struct head *head); /* [config.groups] */
const struct head_shared *head_shared(const struct head *head);
const char *head_path(const struct head *head);
const char *head_pool_name(enum head_pool pool);             /* "max", "mean" */
const char *head_features_name(enum head_features features); /* "none", "target", "context" */

/* For the arithmetic of what it takes on a GPU. */
struct memory_gpu_head head_sizes(const struct head *head);

/* Names the head for caches and peers: all metadata that is used, and all weights. */
struct hash128 head_fingerprint(const struct head *head);

/* The rotation in force for `context` positions: as trained up to trained_context; beyond it YaRN by the
 * factor context / trained_context, rounded up (on top of the head's own YaRN, if it has one). -ENOTSUP for
 * a head of linear scaling, for which no such stretch is defined. */
int head_rope(const struct head *head, uint32_t context, struct model_rope *ret_rope, struct err *err);

/* "none, base 10000, 64 dimensions, ...", "yarn, factor 4 over 2048 positions, ...": for logs and status. */
void head_rope_text(const struct model_rope *rope, char *ret_text, size_t bytes);

/* Writes path atomically. rope.freq_factors and `shared` may be NULL. A group's norm is written of its own
 * where it differs from that of group 0. Errors as safetensors_write, and -EBADMSG for a config that
 * head_open would refuse. */
int head_write(const char *path, const struct head_config *config, const struct head_shared *shared,
               const struct head_group *groups, struct err *err);

#endif
