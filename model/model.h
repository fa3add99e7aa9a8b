/* A language model: its configuration and its weights where they are mapped. Matrices are neither copied nor
 * converted but keep their file's type; vectors (norms, biases) are float32, converted when the file has
 * others. After model_open the object is read only: any thread. */
#ifndef MODEL_MODEL_H
#define MODEL_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/err.h"
#include "base/hash.h"

#define MODEL_HEAD_DIM_MAX 512
#define MODEL_LAYERS_MAX   1024

/* All are RMSNorm, rotary, grouped queries, SwiGLU; what differs shows in the tensors that are there. */
enum model_arch {
    MODEL_ARCH_LLAMA, /* Llama 1-3, SmolLM2, DeepSeek-R1-Distill-Llama, and Mistral's GGUF */
    MODEL_ARCH_MISTRAL,
    MODEL_ARCH_QWEN2, /* biases at query, key, value: Qwen 2, Qwen 2.5, DeepSeek-R1-Distill-Qwen */
    MODEL_ARCH_QWEN3  /* a norm over each head's query and key, before the rotation */
};

enum model_rope_scaling { MODEL_ROPE_SCALING_NONE, MODEL_ROPE_SCALING_LINEAR, MODEL_ROPE_SCALING_YARN };

struct model_rope {
    float base;    /* theta */
    uint32_t dims; /* rotated dimensions of a head, even, <= head_dim */
    bool halves;   /* pairs (j, j + dims/2) instead of (2j, 2j + 1) */
    enum model_rope_scaling scaling;
    float factor;              /* > 0; 1 without scaling */
    uint32_t original_context; /* YaRN: the context of training, else 0 */
    float beta_fast, beta_slow;
    float attn_factor;         /* on top of YaRN's own magnitude; 1 unless the file says otherwise */
    const float *freq_factors; /* [dims / 2] divisors of the frequencies (Llama 3's scaling), or NULL */
};

struct model_config {
    enum model_arch arch;
    uint32_t layers, hidden, q_heads, kv_heads, head_dim, ffn, vocab;
    uint32_t context_max; /* positions the model was made for */
    float rms_eps;
    bool tied;     /* the output matrix is the token embedding */
    bool qkv_bias; /* the layers have q_bias, k_bias, v_bias */
    bool qk_norm;  /* the layers have q_norm, k_norm */
    struct model_rope rope;
    uint32_t bos, eos; /* token ids, VOCAB_NO_TOKEN (UINT32_MAX) when the file names none */
};

/* rows x cols, row-major, rows of dtype_row_bytes(type, cols); a vector has one row. */
struct model_tensor {
    enum dtype type;
    uint32_t rows, cols;
    const void *data; /* aligned to its elements; in GGUF to 8 bytes or more. NULL: the layer has none */
    uint64_t bytes;
};

/* Source of the shapes: y = W x, W [out][in]. */
struct model_layer {
    struct model_tensor attn_norm; /* F32 [hidden] */
    struct model_tensor wq;        /* [q_heads * head_dim][hidden] */
    struct model_tensor wk, wv;    /* [kv_heads * head_dim][hidden] */
    struct model_tensor wo;        /* [hidden][q_heads * head_dim] */
    struct model_tensor ffn_norm;  /* F32 [hidden] */
    struct model_tensor gate, up;  /* [ffn][hidden] */
    struct model_tensor down;      /* [hidden][ffn] */
    struct model_tensor q_bias;    /* F32 [q_heads * head_dim], added to W x; or .data NULL */
    struct model_tensor k_bias;    /* F32 [kv_heads * head_dim]; or .data NULL */
    struct model_tensor v_bias;    /* F32 [kv_heads * head_dim]; or .data NULL */
    struct model_tensor q_norm;    /* F32 [head_dim]: RMSNorm of each head, before rope; or .data NULL */
    struct model_tensor k_norm;    /* F32 [head_dim]; or .data NULL */
};

struct model;
struct vocab;

/* Opens and checks a model: a GGUF file (of a split one, the first part) or a Hugging Face folder
 * (config.json, safetensors, tokenizer.json). Every field that is used and every weight's type and shape is
 * checked. 0; an errno of the system; -EBADMSG for a damaged file or files that contradict each other;
 * -ENOTSUP for sound ones that this program does not run (architecture, rope scaling, weight type, weights it
 * does not know). */
int model_open(const char *path, struct model **ret_model, struct err *err);
void model_free(struct model **model);

const struct model_config *model_config(const struct model *model);
const struct model_layer *model_layers(const struct model *model);           /* [config.layers] */
const struct model_tensor *model_token_embedding(const struct model *model); /* [vocab][hidden] */
const struct model_tensor *model_output_norm(const struct model *model);     /* F32 [hidden] */
const struct model_tensor *
model_output(const struct model *model); /* [vocab][hidden]; the embedding if tied */

const char *model_path(const struct model *model);
const char *model_name(const struct model *model);      /* general.name, or the file's; a line of UTF-8 */
uint64_t model_weight_bytes(const struct model *model); /* of all tensors, once each */

/* Tensors and their bytes by element type, as the files have them. */
struct model_type_use {
    uint64_t bytes;
    uint32_t tensors;
};
void model_weight_types(const struct model *model, struct model_type_use ret[DTYPE_MAX]);

/* The tokenizer's data, or NULL when the file has none. Lives as long as the model. */
const struct vocab *model_vocab(const struct model *model);

/* Names the model for caches and peers: metadata, tensor directory and samples of each tensor (its first,
 * middle and last 4 KiB). Equal on every machine for equal files; the same weights in another format have
 * another. Reads a few MB. */
struct hash128 model_fingerprint(const struct model *model);

/* "llama", "qwen2": the family's name, static. */
const char *model_arch_name(enum model_arch arch);

/* "GGUF", "GGUF in 3 parts", "safetensors": for people; owned by the model. */
const char *model_format(const struct model *model);

/* Of the tokenizer's data; see vocab_fingerprint. All zero when the file has none. */
struct hash128 model_tokenizer_fingerprint(const struct model *model);

/* Angle of pair j at position p is p * inv_freq[j]; cos and sin are both multiplied by *ret_scale (1 unless
 * YaRN). inv_freq [rope->dims / 2]. 0, or -EINVAL for dims, base or a factor that make no sense.
 * Source: YaRN, section 3 (ramp between beta_fast and beta_slow turns, magnitude 0.1 ln s + 1). */
int model_rope_frequencies(const struct model_rope *rope, float *inv_freq, float *ret_scale);

#endif
